"""The Newton–Schulz iteration, written once over `syrk` and a plain matrix product.

The standard form of steps of a triple each is here, other forms are in `_gram` and `_composed`.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from muon_jax._iteration import composed as _composed
from muon_jax._iteration import gram as _gram
from muon_jax._iteration import packed as _words
from muon_jax._iteration import recipes as _coefficients
from muon_jax._iteration.form import Method
from muon_jax._iteration.normalization import EpsMode, gram_gain, normalize, powers_of_two
from muon_jax._iteration.operand import Whole
from muon_jax._iteration.precision import context
from muon_jax._iteration.steps import Schedule
from pallas_kernels import _device, select_implementation, syrk


def scale_down(
    stacks: Sequence[jax.Array], largest: jax.Array, n: int, dtype: jnp.dtype, held: Whole
) -> tuple[list[jax.Array], jax.Array]:
    """Returns the stacks in `dtype`, with entries of at most n^-¼, and what they are times.

    In 16 bits they are rounded before they are scaled, as are matrices that were sent in 16 bits:
    those that float16 makes subnormal would be others else. So are stacks of 16 bits, of which XLA
    keeps more digits where it computes them in the same pass.

    Args:
        stacks: as for `orthogonalize`.
        largest: the largest entry of each of their matrices.
        n: the larger size of the matrices.
        dtype: of the products.
        held: as for `iterate`.
    """
    narrow = min(dtype, stacks[0].dtype, key=lambda dtype: jnp.finfo(dtype).nmant)
    rounded = functools.partial(_rounded, dtype=narrow)
    first, second = powers_of_two(rounded(largest), -(-_log2(n) // 4))
    # Each stack by itself, for XLA to make it part of the pass that computes the stack.
    factors = split_apart([f[..., None, None] for f in (first, second)], stacks)

    def scale(x, f, g):
        def function(x):
            return (rounded(x) * f * g).astype(dtype)

        return _words.elementwise(function, x) if _in_words(x, dtype, held) else function(x)

    return [*map(scale, stacks, *factors)], first * second


def iterate(
    x: jax.Array,
    recipe: _coefficients.Quintics | Schedule,
    method: Method,
    eps: float | jax.Array,
    eps_mode: EpsMode,
    scale: jax.Array,
    preconditioning: str,
    n: int,
    held: Whole,
) -> jax.Array:
    """Returns the result of the steps.

    Args:
        x: wide matrices `(..., m, n)` that `scale_down` has made, or pieces of such.
        scale: what they are times, for each matrix that `held` gives the Gram matrix of.
        n: that of whole matrices.
        held: the matrices whole or, in the gram form, in pieces.
        recipe, method, eps, eps_mode, preconditioning: as for `newton_schulz`, resolved.
    """
    rows, cols = x.shape[-2:]
    if _device.platform() == "cpu":  # or XLA merges a transpose and a product in a way it cannot do
        x = jax.lax.optimization_barrier(x)
    x = _padded(x, held)
    with context(x.dtype, full=isinstance(recipe, Schedule) or recipe.diverging):
        if isinstance(recipe, Schedule):
            steps = recipe.steps_in(x.dtype)
            x = _composed.run(x, steps, eps, eps_mode, scale, _log2(n), held)
        elif method == "gram":
            x = _gram.run(x, recipe, eps, eps_mode, scale, preconditioning, _log2(n), held)
        else:
            x = _run_quintics(x, recipe, eps, eps_mode, scale, preconditioning, _log2(n), held)
    return _words.cut(x, rows, cols) if _in_words(x, x.dtype, held) else x[..., :rows, :cols]


def join(stacks: Sequence[jax.Array]) -> jax.Array:
    """Returns the matrices of all stacks as one stack, the tall ones transposed together."""
    if len(stacks) == 1:
        return transposed(*stacks) if is_tall(*stacks) else stacks[0]
    # Barriers, or XLA computes the stacks where they are transposed or concatenated.
    runs = (_write([*run]) for _, run in itertools.groupby(stacks, is_tall))
    runs = map(jax.lax.optimization_barrier, runs)
    return jnp.concatenate([transposed(run) if is_tall(run) else run for run in runs])


def _write(stacks):
    """The stacks as one, each written to its place by the kernel that computes it.

    A concatenation of more than a few takes XLA several times as long.
    """
    shape, like = (sum(map(len, stacks)), *stacks[0].shape[1:]), stacks[0]
    x = jax.lax.empty(shape, like.dtype, out_sharding=jax.typeof(like).sharding)
    *begins, _ = itertools.accumulate(map(len, stacks), initial=0)
    for begin, stack in zip(unknown(begins), stacks, strict=True):
        x = jax.lax.dynamic_update_slice_in_dim(x, stack, begin, axis=0)
    return x


def unknown(numbers: Sequence[int]) -> list[jax.Array]:
    """The numbers, which XLA does not get to know: what differs in them alone is one kernel.

    Written to a place that it knows, each matrix of a model would be a kernel of its own, to be
    tuned and compiled.
    """
    return jax.lax.optimization_barrier([jnp.uint32(number) for number in numbers])


def split(x: jax.Array, stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the parts of `x` that belong to the stacks."""
    ends = itertools.accumulate(map(len, stacks))
    return [x] if len(stacks) == 1 else jnp.split(x, [*ends][:-1])


def split_apart(factors: Sequence[jax.Array], stacks: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """As `split`, of each of the factors, not within the kernels that multiply by them.

    Those would differ in what they slice, as by places that are not `unknown`.
    """
    parts = [split(factor, stacks) for factor in factors]
    return jax.lax.optimization_barrier(parts) if len(stacks) > 1 else parts


def transposed(x: jax.Array) -> jax.Array:
    """Xᵀ, where X lies in memory row by row: else GPUs transpose all that X is computed from."""
    if _device.platform() == "gpu":
        return with_layout_constraint(x, Layout(tuple(range(x.ndim)))).mT
    return transposed_back(x)


def transposed_back(x: jax.Array) -> jax.Array:
    """Xᵀ. On CPUs X too lies in memory row by row: else the product that X is would be another one.

    Barriers see to it, the second one on rows, which cannot lie as columns do: `jax.export` takes
    no programs with constraints of layouts.
    """
    if _device.platform() != "cpu":
        return x.mT
    x = jax.lax.optimization_barrier(x).mT
    rows = jax.lax.optimization_barrier(jax.lax.collapse(x, 0, x.ndim - 1))
    return rows.reshape(x.shape)


def bounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x`, whose finite numbers stay finite when rounded to the mantissa of `dtype`."""
    given, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if narrow.nmant >= given.nmant:
        return x
    most = (2 - 2.0**-narrow.nmant) * 2.0 ** (given.maxexp - 1)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x)


def _rounded(x, dtype):
    """`x` with the mantissa of `dtype`, where that has 16 bits, and its own exponents."""
    if jnp.finfo(dtype).bits > 16:
        return x
    x = bounded(x, dtype)
    return jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, jnp.finfo(dtype).nmant)


def _log2(n):
    """log₂ n, rounded up."""
    return (n - 1).bit_length()


def _run_quintics(x, quintics, eps, eps_mode, scale, preconditioning, log2_n, held):
    """Steps of a triple each; the first has its Gram matrix of `gram_gain`."""
    rows, first, last, _ = quintics
    is_traced = _coefficients.is_traced((first, last))
    product = functools.partial(syrk, symmetrize_output=False, implementation=held.implementation)

    def triple(step):
        if len(rows) == 1:
            return rows[0]
        if not _coefficients.is_traced(step):
            return rows[step]
        # Of scalars: custom_partitioning takes no program with arrays in it.
        return jnp.stack([jnp.stack(row) for row in rows])[step]

    def apply(step, x, gram, s, factor):
        """factor·(a·I + b·R + c·R²)·X, one step on factor·X, with R = s²·gram."""
        a, b, c = (factor * coefficient for coefficient in triple(step))
        q = product(gram, gram, alpha=c * s**4, beta=b * s**2, diagonal=a)
        return held.apply(q, x, last=not is_traced and step == last - 1)

    def body(step, x):
        return apply(step, x, product(x), 1.0, 1.0)

    gain = gram_gain(log2_n)
    gram = product(x, alpha=gain**2)
    x, gram, s, factor = normalize(
        x, gram, gain, eps, eps_mode, scale, preconditioning, held.spread
    )
    x = apply(first, x, gram, s, factor)
    if is_traced:
        return jax.lax.fori_loop(first + 1, last, body, x)
    for step in range(int(first) + 1, int(last)):
        x = body(step, x)
    return x


def _padded(x, held):
    """Adds rows and columns of zeros, which no step changes, in the pass that scales x.

    Sizes become multiples of 64 for the kernel that needs those, of 8 for others: matrix units load
    16 bytes at a time. The columns are padded in eights, so that XLA, too, loads several at a time.
    """
    m, n = _sizes(x, 64 if _chosen(x, x.dtype, held) == "mosaic_gpu" else 8)
    if _in_words(x, x.dtype, held):
        return _words.pad(x, m - x.shape[-2], n - x.shape[-1])
    width = math.gcd(x.shape[-1], 8)
    x = x.reshape(*x.shape[:-1], x.shape[-1] // width, width)
    rows, cols = (0, m - x.shape[-3]), (0, n // width - x.shape[-2])
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [rows, cols, (0, 0)])
    return x.reshape(*x.shape[:-2], n)


def _in_words(x, dtype, held):
    """Whether passes over X are of X alone, and kernels in `dtype` follow."""
    return held.is_alone and _chosen(x, dtype, held) != "xla"


def _chosen(x, dtype, held):
    """The implementation of the products of X, once it is padded, in `dtype`."""
    operand = jax.ShapeDtypeStruct((*x.shape[:-2], *_sizes(x, 64)), dtype)
    return held.implementation or select_implementation(operand).implementation


def _sizes(x, multiple):
    """Those of the matrices, rounded up."""
    return tuple(size + -size % multiple for size in x.shape[-2:])


def is_tall(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether the matrices of a stack have more rows than columns."""
    return x.shape[-2] > x.shape[-1]
