"""Everything that touches X: the products XXᵀ and QX, and the passes around them.

On GPUs, passes over 16-bit arrays take two neighbouring elements at a time, packed in a 32-bit
word. XLA's loops load and store four elements at once, which in 16 bits is half of what a thread
could load: a copy of 16-bit elements runs at 3.3 TB/s on an H200, a copy of words at 4.3 TB/s.

- Only whole passes gain, from memory to memory: XLA computes nothing in one loop with a view of it
  in another dtype.
- Words have no derivative. So packed passes are for operands and results of kernels, which have
  none either.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from muon_jax._iteration.normalization import ceil_log2, powers_of_two
from pallas_kernels import Implementation
from pallas_kernels import device as _device


def elementwise_packed(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns `function(x)`.

    Args:
        function: of each element; shapes that broadcast along the last axis stay as they are.
        x: shape `(..., n)`.
    """
    if not _fits(x) or jax.eval_shape(function, x).dtype.itemsize != 2:
        return function(x)
    words, result = _words(x), []
    for shift in (0, 16):
        half = jax.lax.bitcast_convert_type((words >> shift).astype(jnp.uint16), x.dtype)
        result.append(function(half))
    low, high = (jax.lax.bitcast_convert_type(y, jnp.uint16).astype(jnp.uint32) for y in result)
    return _elements(low | high << 16, result[0].dtype)


def pad_packed(x: jax.Array, rows: int, cols: int) -> jax.Array:
    """Returns matrices `(..., m, n)` with `rows` more rows of zeros, and an even `cols` columns."""
    if not _fits(x):
        return _pad(x, rows, cols)
    return _elements(_pad(_words(x), rows, cols // 2), x.dtype)


def cut_packed(x: jax.Array, rows: int, cols: int) -> jax.Array:
    """Returns the first rows and columns of matrices `(..., m, n)`."""
    if not _fits(x) or cols % 2:
        return x[..., :rows, :cols]
    return _elements(_words(x)[..., :rows, : cols // 2], x.dtype)


def _fits(x: jax.Array) -> bool:
    """Whether the rows of `x` are whole words."""
    return x.dtype.itemsize == 2 and x.shape[-1] % 2 == 0


def _pad(x: jax.Array, rows: int, cols: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, cols)])


def _words(x: jax.Array) -> jax.Array:
    """Returns the words `(..., n/2)` of 16-bit elements `(..., n)`."""
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), jnp.uint32)


def _elements(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the 16-bit elements `(..., n)` of words `(..., n/2)`."""
    pairs = jax.lax.bitcast_convert_type(words, dtype)
    return pairs.reshape(*words.shape[:-1], 2 * words.shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeMatrices:
    """Matrices that this device has whole.

    Attributes:
        implementation: of all products.
        out_dtype: of the result, where X is read from memory as it is, and the result stored as it
            is. None for the products' dtype.
    """

    implementation: Implementation
    out_dtype: jnp.dtype | None = None

    def gram(
        self,
        x: Any,
        alpha: float | jax.Array = 1.0,
        *,
        residual: bool = False,
        symmetrize_output: bool = True,
    ) -> tuple[jax.Array, ...]:
        """Returns alpha·XXᵀ, rounded, and with `residual` also what the rounding left.

        Args:
            x: shape `(..., m, n)`.
            alpha: a coefficient, or one for each matrix.
            residual: whether to return the residual.
            symmetrize_output: as for `syrk`.
        """
        return self.implementation.syrkx(
            x, alpha=alpha, symmetrize_output=symmetrize_output, residual=residual
        )

    def apply(self, q: jax.Array, x: Any, *, last: bool) -> Any:
        """Returns QX, the last one in the dtype of the result.

        Args:
            q: shape `(..., m, m)`.
            x: shape `(..., m, n)`.
            last: whether this is the last application of the iteration.
        """
        return self.implementation.gemm(q, x, out_dtype=self.out_dtype if last else None)

    def spread(self, q: jax.Array) -> jax.Array:
        """Returns Q for all matrices of X, of Q for those that this device iterates on."""
        return q


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeStacks(WholeMatrices):
    """Whole matrices of one m and several n, one stack for each n; by `"mosaic_gpu"`.

    Their Gram matrices are one stack, in the order of the matrices.
    """

    def gram(
        self,
        x: Sequence[jax.Array],
        alpha: float | jax.Array = 1.0,
        *,
        residual: bool = False,
        symmetrize_output: bool = True,
    ) -> tuple[jax.Array, ...]:
        """Returns `WholeMatrices.gram` of all matrices, in one launch."""
        del symmetrize_output  # the result is symmetric in any case
        return self.implementation.syrk_of_stacks(x, alpha=alpha, residual=residual)

    def apply(self, q: jax.Array, x: Sequence[jax.Array], *, last: bool) -> list[jax.Array]:
        """Returns `WholeMatrices.apply` of all matrices, in one launch."""
        out_dtype = self.out_dtype if last else None
        return [*self.implementation.gemm_of_stacks(q, x, out_dtype=out_dtype)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulated:
    """A stack of momenta that is computed where it is read: U = w₂M + w₃G, M <- w₀M + w₁G.

    Attributes:
        gradients: G, shape `(batch, rows, cols)`; arrays or, to ask about them, shapes.
        momenta: M, of this shape, before the update.
        weights: w, shape `(4,)`.
        is_swapped: whether the matrices are the transposes of those of G and M.
    """

    gradients: Any
    momenta: Any
    weights: jax.Array
    is_swapped: bool = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the stack of U."""
        batch, rows, cols = self.gradients.shape
        return (batch, cols, rows) if self.is_swapped else (batch, rows, cols)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype that results have."""
        return jnp.promote_types(self.gradients.dtype, self.momenta.dtype)

    @property
    def size(self) -> int:
        """The number of entries."""
        return self.gradients.size

    @property
    def is_transposed(self) -> bool:
        """Whether a wide matrix is the transpose of one of G."""
        return is_tall(self) != self.is_swapped

    def __len__(self) -> int:
        return len(self.gradients)


def is_tall(x: jax.Array | jax.ShapeDtypeStruct | Accumulated) -> bool:
    """Returns whether the matrices `(..., m, n)` of a stack have more rows than columns."""
    return x.shape[-2] > x.shape[-1]


def accumulate(
    stacks: Sequence[Accumulated], n: int, dtype: jnp.dtype, operand: WholeMatrices
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Returns the new momenta, and what `join` and `scale_down` return of U, with padding.

    Args:
        stacks: of matrices of one shape, or of the transposed shape.
        n: the larger size of the matrices.
        dtype: of the products.
        operand: the matrices.
    """
    first = jax.ShapeDtypeStruct((1, *sorted(stacks[0].shape[1:])), dtype)
    return operand.implementation.accumulate(
        [x.gradients for x in stacks],
        [x.momenta for x in stacks],
        stacks[0].weights,
        [x.is_transposed for x in stacks],
        padded_sizes(first, operand),
        dtype,
        exponent_of(n),
    )


def exponent_of(n: int) -> int:
    """Returns e, for which entries of X of at most 2⁻ᵉ are at most n^-¼."""
    return -(-ceil_log2(n) // 4)


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
    first, second = powers_of_two(rounded(largest), exponent_of(n))
    # Each stack is scaled by itself, for XLA to scale it in the pass that computes it.
    factors = split_apart([f[..., None, None] for f in (first, second)], stacks)

    def scale(f: jax.Array, g: jax.Array, x: jax.Array) -> jax.Array:
        return (rounded(x) * f * g).astype(dtype)

    scaled = [
        elementwise_packed(functools.partial(scale, f, g), x)
        if _is_packed(x, dtype, operand)
        else scale(f, g, x)
        for x, f, g in zip(stacks, *factors, strict=True)
    ]
    return scaled, first * second


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
    return in_rows(x).mT if _device.current().platform == "gpu" else transposed_back(x)


def in_rows(x: jax.Array) -> jax.Array:
    """Returns X, which GPUs keep in memory row by row."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def transposed_back(x: jax.Array) -> jax.Array:
    """Returns Xᵀ. On CPUs X also lies in memory row by row, or the product that X is would differ.

    Two barriers keep X there, in place of a constraint of layouts: `jax.export` takes no program
    with such a constraint. The second barrier is on rows, which cannot lie as columns do.
    """
    if _device.current().platform != "cpu":
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

    - 64 for the implementation `"mosaic_gpu"` and 128 for its relatives, which need them,
    - 8 for the others: matrix units load 16 bytes at a time.

    XLA pads in the pass that scales x. The columns are padded in eights, for XLA to load several
    elements at a time.
    """
    m, n = padded_sizes(x, operand)
    if _is_packed(x, x.dtype, operand):
        return pad_packed(x, m - x.shape[-2], n - x.shape[-1])
    width = math.gcd(x.shape[-1], 8)
    x = x.reshape(*x.shape[:-1], x.shape[-1] // width, width)
    rows, cols = (0, m - x.shape[-3]), (0, n // width - x.shape[-2])
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [rows, cols, (0, 0)])
    return x.reshape(*x.shape[:-2], n)


def padded_sizes(x: jax.Array | jax.ShapeDtypeStruct, operand: WholeMatrices) -> tuple[int, int]:
    """Returns the sizes that matrices have with the padding that products in their dtype need."""
    name = _implementation(x, x.dtype, operand)
    return _round_up(x, {"mosaic_gpu": 64, "triton": 8, "xla": 8}.get(name, 128))


def cut_padding(x: jax.Array, rows: int, cols: int, operand: WholeMatrices) -> jax.Array:
    """Returns the first rows and columns of `(..., m, n)`: the inverse of `pad_for_kernels`."""
    if _is_packed(x, x.dtype, operand):
        return cut_packed(x, rows, cols)
    return x[..., :rows, :cols]


def _is_packed(x: jax.Array, dtype: jnp.dtype, operand: WholeMatrices) -> bool:
    """Whether passes over X are packed: they pass over X alone, and kernels in `dtype` follow."""
    return operand.out_dtype is not None and _implementation(x, dtype, operand) != "xla"


def _implementation(
    x: jax.Array | jax.ShapeDtypeStruct, dtype: jnp.dtype, operand: WholeMatrices
) -> str:
    """The implementation of the products of X in `dtype`, once X is padded."""
    padded = jax.ShapeDtypeStruct((*x.shape[:-2], *_round_up(x, 64)), dtype)
    return operand.implementation.name_for(padded)


def _round_up(x: jax.Array | jax.ShapeDtypeStruct, multiple: int) -> tuple[int, int]:
    """The sizes of the matrices, rounded up to a multiple."""
    m, n = x.shape[-2:]
    return m + -m % multiple, n + -n % multiple
