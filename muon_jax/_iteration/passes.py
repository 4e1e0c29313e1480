"""The passes over X around the products: scaling, joining, padding, transposing, cutting."""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from muon_jax._iteration import packed
from muon_jax._iteration.normalization import ceil_log2, powers_of_two
from muon_jax._iteration.operand import WholeMatrices
from pallas_kernels import device as _device
from pallas_kernels import select_implementation


def is_tall(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether the matrices `(..., m, n)` of a stack have more rows than columns."""
    return x.shape[-2] > x.shape[-1]


def scale_down(
    stacks: Sequence[jax.Array],
    largest: jax.Array,
    n: int,
    dtype: jnp.dtype,
    operand: WholeMatrices,
) -> tuple[list[jax.Array], jax.Array]:
    """Returns the stacks in `dtype`, with entries of at most n^-¼, and the scale of each matrix.

    In 16 bits, round first, then scale:

    - Matrices that crossed the network are already rounded, and scaling first would make other
      entries subnormal.
    - XLA keeps more digits of a 16-bit stack that it computes in the same pass.

    Args:
        stacks: shapes `(batch, m, n)` or `(batch, n, m)`, of one dtype.
        largest: the largest entry of each matrix, shape `(total batch,)`.
        n: the larger size of the matrices.
        dtype: of the products.
        operand: the matrices whole, or sharded.
    """
    narrow = min(dtype, stacks[0].dtype, key=lambda dtype: jnp.finfo(dtype).nmant)
    rounded = functools.partial(_rounded, dtype=narrow)
    first, second = powers_of_two(rounded(largest), -(-ceil_log2(n) // 4))
    # Each stack is scaled by itself, for XLA to scale it in the pass that computes it.
    factors = split_apart([f[..., None, None] for f in (first, second)], stacks)

    def scale(x: jax.Array, f: jax.Array, g: jax.Array) -> jax.Array:
        def function(x: jax.Array) -> jax.Array:
            return (rounded(x) * f * g).astype(dtype)

        return packed.elementwise(function, x) if _is_packed(x, dtype, operand) else function(x)

    return [*map(scale, stacks, *factors)], first * second


def join(stacks: Sequence[jax.Array]) -> jax.Array:
    """Returns the matrices of all stacks as one stack, the tall ones transposed together.

    Args:
        stacks: shapes `(batch, m, n)` or `(batch, n, m)`.
    """
    if len(stacks) == 1:
        return transposed(*stacks) if is_tall(*stacks) else stacks[0]
    # Without barriers XLA computes the stacks where they are transposed or concatenated.
    runs = (_write([*run]) for _, run in itertools.groupby(stacks, is_tall))
    runs = map(jax.lax.optimization_barrier, runs)
    return jnp.concatenate([transposed(run) if is_tall(run) else run for run in runs])


def _write(stacks: Sequence[jax.Array]) -> jax.Array:
    """Returns the stacks as one, each written to its place by the kernel that computes it.

    XLA takes several times as long to concatenate more than a few stacks.
    """
    shape, like = (sum(map(len, stacks)), *stacks[0].shape[1:]), stacks[0]
    x = jax.lax.empty(shape, like.dtype, out_sharding=jax.typeof(like).sharding)
    *begins, _ = itertools.accumulate(map(len, stacks), initial=0)
    for begin, stack in zip(unknown(begins), stacks, strict=True):
        x = jax.lax.dynamic_update_slice_in_dim(x, stack, begin, axis=0)
    return x


def unknown(numbers: Sequence[int]) -> list[jax.Array]:
    """Returns the numbers hidden from XLA, so that kernels that differ in them alone are one.

    If XLA knew the place that a matrix is written to, each matrix of a model would be a kernel of
    its own, to be tuned and compiled.
    """
    return jax.lax.optimization_barrier([jnp.uint32(number) for number in numbers])


def split(x: jax.Array, stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the parts of `x`, of shape `(total batch, …)`, that belong to the stacks."""
    return [x] if len(stacks) == 1 else cut_at(x, tuple(map(len, stacks)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def cut_at(x: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Returns the parts of `x`, of these sizes along its first axis, from places `unknown` to XLA.

    The derivative is that of `jnp.split`. Its transpose is one concatenation, where each dynamic
    slice would make an array of the size of `x`.
    """
    *begins, _ = itertools.accumulate(sizes, initial=0)
    return [
        jax.lax.dynamic_slice_in_dim(x, begin, size)
        for begin, size in zip(unknown(begins), sizes, strict=True)
    ]


@cut_at.defjvp
def _(
    sizes: tuple[int, ...], primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    *ends, _ = itertools.accumulate(sizes)
    return cut_at(*primals, sizes), jnp.split(*tangents, ends)


def split_apart(factors: Sequence[jax.Array], stacks: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Returns `split` of each factor, outside the kernels that multiply by the parts.

    Inside, the kernels would differ in what they slice. The factors stand before a barrier, too, or
    XLA would compute all that leads to them once for each part.
    """
    if len(stacks) == 1:
        return [[factor] for factor in factors]
    factors = jax.lax.optimization_barrier([*factors])
    return jax.lax.optimization_barrier([split(factor, stacks) for factor in factors])


def transposed(x: jax.Array) -> jax.Array:
    """Returns Xᵀ, of X `(..., m, n)` that lies in memory row by row.

    Without the constraint GPUs transpose everything that X is computed from.
    """
    if _device.platform() == "gpu":
        return with_layout_constraint(x, Layout(tuple(range(x.ndim)))).mT
    return transposed_back(x)


def transposed_back(x: jax.Array) -> jax.Array:
    """Returns Xᵀ. On CPUs X also lies in memory row by row, or the product that X is would differ.

    Two barriers keep X there, in place of a constraint of layouts: `jax.export` takes no program
    with such a constraint. The second barrier is on rows, which cannot lie as columns do.
    """
    if _device.platform() != "cpu":
        return x.mT
    x = jax.lax.optimization_barrier(x).mT
    rows = jax.lax.optimization_barrier(jax.lax.collapse(x, 0, x.ndim - 1))
    return rows.reshape(x.shape)


def bounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns `x`, clipped so that finite numbers stay finite in the mantissa of `dtype`."""
    given, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if narrow.nmant >= given.nmant:
        return x
    most = (2 - 2.0**-narrow.nmant) * 2.0 ** (given.maxexp - 1)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x)


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns `x` with the mantissa of a 16-bit `dtype`, and its own exponents; else `x`."""
    if jnp.finfo(dtype).bits > 16:
        return x
    x = bounded(x, dtype)
    return jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, jnp.finfo(dtype).nmant)


def pad_for_kernels(x: jax.Array, operand: WholeMatrices) -> jax.Array:
    """Returns matrices `(..., m, n)` with rows and columns of zeros, which no step changes.

    Sizes become multiples of

    - 64 for the implementation `"mosaic_gpu"`, which needs them,
    - 8 for the others: matrix units load 16 bytes at a time.

    XLA pads in the pass that scales x. The columns are padded in eights, for XLA to load several
    elements at a time.
    """
    m, n = _round_up(x, 64 if _implementation(x, x.dtype, operand) == "mosaic_gpu" else 8)
    if _is_packed(x, x.dtype, operand):
        return packed.pad(x, m - x.shape[-2], n - x.shape[-1])
    width = math.gcd(x.shape[-1], 8)
    x = x.reshape(*x.shape[:-1], x.shape[-1] // width, width)
    rows, cols = (0, m - x.shape[-3]), (0, n // width - x.shape[-2])
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [rows, cols, (0, 0)])
    return x.reshape(*x.shape[:-2], n)


def cut_padding(x: jax.Array, rows: int, cols: int, operand: WholeMatrices) -> jax.Array:
    """Returns the first rows and columns of `(..., m, n)`: the inverse of `pad_for_kernels`."""
    if _is_packed(x, x.dtype, operand):
        return packed.cut(x, rows, cols)
    return x[..., :rows, :cols]


def _is_packed(x: jax.Array, dtype: jnp.dtype, operand: WholeMatrices) -> bool:
    """Whether passes over X are packed: they pass over X alone, and kernels in `dtype` follow."""
    return operand.is_stored and _implementation(x, dtype, operand) != "xla"


def _implementation(x: jax.Array, dtype: jnp.dtype, operand: WholeMatrices) -> str:
    """The implementation of the products of X in `dtype`, once X is padded."""
    padded = jax.ShapeDtypeStruct((*x.shape[:-2], *_round_up(x, 64)), dtype)
    return operand.implementation or select_implementation(padded).implementation


def _round_up(x: jax.Array, multiple: int) -> Iterable[int]:
    """The sizes of the matrices, rounded up to a multiple."""
    return tuple(size + -size % multiple for size in x.shape[-2:])
