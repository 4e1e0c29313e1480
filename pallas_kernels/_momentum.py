"""The momentum of many matrices, and what their iteration reads of it, in one pass over memory.

With weights w, for each matrix with gradient G and momentum M,

    M <- w₀M + w₁G,   U = w₂M + w₃G,   X = 2ᵏU, rounded to 16 bits,

where M is the new momentum, written in place, and X is written to its place in a stack, wide and
with its padding. In float16 the power of two has to be known before anything is rounded:

1.  A sample of blocks, which touches every row and every column, predicts the largest entry of U.
2.  The pass stores X by that prediction, and finds the largest entry.
3.  Where the prediction was too low, X is computed once more, from the new M. A kernel does that,
    which for all other matrices reads a flag.

A launch takes up to `OPERANDS` arrays, in place of a launch for each. Lowered through Triton, as
`_triton` is.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._stacked import Arrays, jitted, with_rules
from pallas_kernels._triton import load, store

# Bits of float32: as integers, those of NaN are the largest of these.
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
# Blocks of the pass, of the sample, and of what is computed again. On an H200 other blocks of the
# pass, and 4 warps in place of 8, take as long or up to 12% longer. Small blocks compile faster.
TILE, SAMPLE, REDONE = 64, (16, 64), 32
# How many gradients one launch reads. Each is a branch of the kernel, to be compiled. Half as many
# take 5% longer and half the time to compile.
OPERANDS = 12


class Layout(NamedTuple):
    """How matrices lie in memory, and X in its stack.

    Attributes:
        transposed: for each array whether X is the transpose of its matrices.
        shape: `(m, n)` of X with its padding.
        dtype: of X.
        exponent: e, with which the largest entry of X is in [2⁻ᵉ / 4, 2⁻ᵉ].
    """

    transposed: tuple[bool, ...]
    shape: tuple[int, int]
    dtype: jnp.dtype
    exponent: int


def accumulate(
    gradients: Sequence[jax.Array],
    momenta: Sequence[jax.Array],
    weights: jax.Array,
    layout: Layout,
    *,
    interpret: bool = False,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Returns the new momenta, the stack of X, and its scale 2ᵏ for each matrix.

    Args:
        gradients: shapes `(batch, rows, cols)`, floats of 16 or 32 bits.
        momenta: of these shapes, each in any such dtype. They are written in place. What is
            computed once more is computed from the rounded new momenta.
        weights: w, shape `(4,)`.
        layout: of the matrices.
        interpret: whether to interpret the kernels.
    """
    number = len(gradients)

    def by_kernels(*operands: jax.Array) -> Arrays:
        weights, *arrays = operands
        return _by_kernels(weights, arrays[:number], arrays[number:], layout, interpret)

    def under_vmap(_: Any, size: int, in_batched: Any, *operands: jax.Array) -> Arrays:
        def defined(weights: jax.Array, *arrays: jax.Array) -> Arrays:
            return _by_definition(weights, arrays[:number], arrays[number:], layout)

        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        return jax.vmap(defined, axes, axis_size=size)(*operands)

    call = with_rules(by_kernels, "triton", under_vmap)
    *new, stack, scale = call(weights.astype(jnp.float32), *gradients, *momenta)
    return new, stack, scale


def _by_definition(
    weights: jax.Array, gradients: Arrays, momenta: Arrays, layout: Layout
) -> Arrays:
    """The definition, in jnp."""
    new, stacks = [], []
    for g, m, transposed in zip(gradients, momenta, layout.transposed, strict=True):
        wide, u = _accumulated(weights, g, m)
        new.append(wide.astype(m.dtype))
        u = u.mT if transposed else u
        pads = [(0, size - own) for size, own in zip(layout.shape, u.shape[1:], strict=True)]
        stacks.append(jnp.pad(u, [(0, 0), *pads]))
    u = jnp.concatenate(stacks)
    largest = _bits(u, axis=(1, 2))
    (first, second), _ = _factors(largest, largest, layout.exponent)
    x = u * first[:, None, None] * second[:, None, None]
    return (*new, x.astype(layout.dtype), first * second)


def _accumulated(
    weights: Any, g: jax.Array, m: jax.Array, *, again: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The new M, in float32, and U; where M is new already it stays as it is."""
    g, m = g.astype(jnp.float32), m.astype(jnp.float32)
    m = m if again else weights[0] * m + weights[1] * g
    return m, weights[2] * m + weights[3] * g


def _by_kernels(
    weights: jax.Array,
    gradients: Sequence[jax.Array],
    momenta: Sequence[jax.Array],
    layout: Layout,
    interpret: bool,
) -> Arrays:
    """The three kernels, chunk by chunk."""
    counts = [*map(len, gradients)]
    chunks = _chunks(gradients, momenta, layout.transposed)
    sizes = [sum(counts[chunk]) for chunk in chunks]
    # Hidden from XLA, so that chunks of equal arrays are one kernel.
    begins = itertools.accumulate(sizes[:-1], initial=0)
    places = jax.lax.optimization_barrier([jnp.full(1, begin, jnp.int32) for begin in begins])

    def launch(i: int, kind: str, momenta: Sequence[jax.Array], *others: jax.Array) -> Arrays:
        options = {"interpret": interpret, "exponent": layout.exponent}
        options["transposed"] = layout.transposed[chunks[i].start]
        operands = (weights, places[i], *others, gradients[chunks[i]], momenta)
        return _launch(*operands, kind=kind, **options)

    # The bits of the largest entries of samples, and of matrices.
    found = jnp.zeros((2, sum(counts)), jnp.int32)
    for i, chunk in enumerate(chunks):
        (found,) = launch(i, "sample", momenta[chunk], found)
    stack, new = jax.lax.empty((sum(counts), *layout.shape), layout.dtype), []
    for i, chunk in enumerate(chunks):
        stack, found, *made = launch(i, "pass", momenta[chunk], stack, found)
        new += made
    for i, chunk in enumerate(chunks):
        (stack,) = launch(i, "redo", new[chunk], stack, found)
    (first, second), _ = _factors(found[0], found[1], layout.exponent)
    return (*new, stack, first * second)


def _factors(
    sampled: jax.Array, largest: jax.Array | None, exponent: int
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Two powers of two, whose product is 2ᵏ, and whether it is another than that of the sample.

    Without the largest entry of the matrix it is the power for the sample.

    Args:
        sampled: the bits of the largest entry of the sample.
        largest: the bits of the largest entry of the matrix.
        exponent: see `Layout`.
    """

    def k_of(bits: jax.Array, exponent: int) -> jax.Array:  # as frexp
        return jnp.maximum((bits >> 23) - (126 - exponent), jnp.int32(-126))

    k = k_of(sampled, exponent + 1)
    is_finite, is_wrong = sampled < _INFINITY, None
    if largest is not None:
        # X of the sample has a largest entry in [2⁻ᵉ, 2⁻ᵉ⁺¹] / 4, X of the matrix may have more.
        exact = k_of(largest, exponent)
        is_finite = largest < _INFINITY
        is_wrong = ((exact > k) | (exact < k - 1)) & (largest > 0) | ~is_finite
        k = jnp.where(is_wrong, exact, k)
    least = jnp.where(is_finite, jnp.int32(0), jnp.int32(_NAN))
    half = k >> 1
    first, second = (_floats(jnp.maximum((127 - x) << 23, least)) for x in (half, k - half))
    return (first, second), is_wrong


def _chunks(
    gradients: Sequence[jax.Array], momenta: Sequence[jax.Array], transposed: Sequence[bool]
) -> list[slice]:
    """The arrays of each launch: neighbours of one kind, in equal numbers where that can be."""

    def kind(i: int) -> Any:
        g, m = gradients[i], momenta[i]
        return g.shape[1:], g.dtype, m.dtype, transposed[i]

    chunks = []
    for _, alike in itertools.groupby(range(len(gradients)), kind):
        first, *others = alike
        count = 1 + len(others)
        size = -(-count // -(-count // OPERANDS))
        starts = range(first, first + count, size)
        chunks += [slice(i, min(i + size, first + count)) for i in starts]
    return chunks


def _floats(bits: jax.Array) -> jax.Array:
    """The floats with these bits."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@jitted
def _launch(
    weights: jax.Array,
    place: jax.Array,
    *operands: Any,
    kind: str,
    exponent: int,
    transposed: bool,
    interpret: bool,
) -> Arrays:
    """One launch.

    Args:
        weights: w.
        place: of the first matrix in the stack, `(1,)`.
        operands: the stack of X, but for `"sample"`; the bits of the largest entries; gradients and
            momenta, of one shape `(…, rows, cols)`.
        kind: `"sample"`, `"pass"` or `"redo"`.
        exponent: see `Layout`.
        transposed: whether X is the transpose of the matrices.
        interpret: whether to interpret the kernel.

    Returns:
        What the launch has written in place.
    """
    *others, gradients, momenta = operands
    _, rows, cols = gradients[0].shape
    if kind == "sample":
        body = _sample_kernel
        blocks = max(pl.cdiv(rows, SAMPLE[0]), pl.cdiv(cols, SAMPLE[1]))
    else:
        body = _pass_kernel if kind == "pass" else _redo_kernel
        body = functools.partial(body, exponent=exponent, transposed=transposed)
        _, m, n = others[0].shape
        is_pass = kind == "pass"
        blocks = pl.cdiv(m, TILE) * pl.cdiv(n, TILE) if is_pass else pl.cdiv(m, REDONE)
    written = others[:1] if kind == "redo" else others
    aliases = {2 + i: i for i in range(len(written))}
    if kind == "pass":
        first = 2 + len(others) + len(gradients)
        aliases |= {first + i: len(written) + i for i in range(len(momenta))}
        written = [*written, *momenta]
    results = pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written],
        grid=(blocks, sum(map(len, gradients))),
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name=f"momentum_{kind}",
    )(weights, place, *others, gradients, momenta)
    return tuple(results)


def _sample_kernel(
    weights: Any, place: Any, _: Any, gradients: Any, momenta: Any, found: Any
) -> None:
    """One block of the sample."""
    block, matrix, (height, width) = pl.program_id(0), pl.program_id(1), SAMPLE
    _, rows, cols = gradients[0].shape
    at = (block % pl.cdiv(rows, height) * height, block % pl.cdiv(cols, width) * width)
    place_of_matrix = _array_of(matrix, gradients)
    g, m = _loaded(*place_of_matrix, gradients, momenta, at, SAMPLE, (rows, cols))
    _, u = _accumulated(_read(weights), g, m)
    plt.atomic_max(found, (jnp.int32(0), matrix + plt.load(place.at[jnp.int32(0)])), _bits(u))


def _pass_kernel(
    weights: Any,
    place: Any,
    _: Any,
    sampled: Any,
    gradients: Any,
    momenta: Any,
    stack: Any,
    found: Any,
    *new: Any,
    exponent: int,
    transposed: bool,
) -> None:
    """One block."""
    block, matrix = pl.program_id(0), pl.program_id(1)
    tiles = pl.cdiv(stack.shape[2], TILE)
    which, own = _array_of(matrix, gradients)
    row, col = block // tiles * TILE, block % tiles * TILE
    at, covered = _in_array((row, col), transposed), _in_array(stack.shape[1:], transposed)
    g, m = _loaded(which, own, gradients, momenta, at, (TILE, TILE), covered)
    m, u = _accumulated(_read(weights), g, m)
    rounded = m.astype(new[0].dtype)
    for i, ref in enumerate(new):
        pl.when(which == i)(functools.partial(store, ref, own, *at, rounded, covered=covered))
    of_stack = matrix + plt.load(place.at[jnp.int32(0)])
    plt.atomic_max(found, (jnp.int32(1), of_stack), _bits(u))
    factors, _ = _factors(plt.load(sampled.at[jnp.int32(0), of_stack]), None, exponent)
    _store_scaled(stack, of_stack, factors, (row, col), u, transposed)


def _redo_kernel(
    weights: Any,
    place: Any,
    _: Any,
    found: Any,
    gradients: Any,
    momenta: Any,
    stack: Any,
    *,
    exponent: int,
    transposed: bool,
) -> None:
    """A row of blocks, of a matrix whose X is to be computed again."""
    matrix, row = pl.program_id(1), pl.program_id(0) * REDONE
    which, own = _array_of(matrix, gradients)
    of_stack = matrix + plt.load(place.at[jnp.int32(0)])
    covered = _in_array(stack.shape[1:], transposed)
    sampled, largest = (plt.load(found.at[jnp.int32(i), of_stack]) for i in range(2))
    factors, is_wrong = _factors(sampled, largest, exponent)

    def of_block(index: jax.Array, _: Any) -> None:
        col = index * REDONE
        at = _in_array((row, col), transposed)
        g, m = _loaded(which, own, gradients, momenta, at, (REDONE, REDONE), covered)
        _, u = _accumulated(_read(weights), g, m, again=True)
        _store_scaled(stack, of_stack, factors, (row, col), u, transposed)

    @pl.when(is_wrong)
    def _() -> None:
        blocks = jnp.int32(pl.cdiv(stack.shape[2], REDONE))
        jax.lax.fori_loop(jnp.int32(0), blocks, of_block, None)


def _in_array(pair: tuple[Any, ...], transposed: bool) -> tuple[Any, ...]:
    """The row and column, or sizes, of X in an array that has its matrix."""
    return pair[::-1] if transposed else pair


def _read(weights: Any) -> list[jax.Array]:
    return [plt.load(weights.at[jnp.int32(i)]) for i in range(4)]


def _array_of(matrix: jax.Array, arrays: Any) -> tuple[jax.Array, jax.Array]:
    """Which array has a matrix, and at which index."""
    which, own = jnp.int32(0), matrix
    if all(x.shape[0] == 1 for x in arrays):
        return matrix, which
    for end, x in zip(itertools.accumulate(x.shape[0] for x in arrays[:-1]), arrays, strict=False):
        is_later = (matrix >= end).astype(jnp.int32)
        which, own = which + is_later, own - x.shape[0] * is_later
    return which, own


def _loaded(
    which: jax.Array,
    own: jax.Array,
    gradients: Any,
    momenta: Any,
    at: tuple[jax.Array, ...],
    shape: tuple[int, int],
    covered: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """A block of a gradient and of its momentum, zero beyond them.

    The branches load and do nothing else: a kernel with all in each branch takes two to three times
    as long to compile.
    """

    def load_both(*pair: Any) -> tuple[jax.Array, ...]:
        return tuple(load(ref, own, *at, shape, covered=covered) for ref in pair)

    pairs = zip(gradients, momenta, strict=True)
    return jax.lax.switch(which, [functools.partial(load_both, *pair) for pair in pairs])


def _store_scaled(
    stack: Any,
    matrix: jax.Array,
    factors: tuple[jax.Array, jax.Array],
    at: tuple[jax.Array, jax.Array],
    u: jax.Array,
    transposed: bool,
) -> None:
    """Writes a block of X."""
    x = (u * factors[0] * factors[1]).astype(stack.dtype)
    store(stack, matrix, *at, x.T if transposed else x)


def _bits(u: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """The bits of the largest |U|, as integers: maxima of floats may lose a NaN."""
    return jnp.max(jax.lax.bitcast_convert_type(jnp.abs(u), jnp.int32), axis=axis)
