"""What X is divided by: a power of two, then a norm or the row sums of AOL.

Every step costs less than a pass over X, because the norm is read off the first Gram matrix and
divided out through the coefficients of the first step.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

type EpsMode = Literal["add", "max"]
type Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]
# The Schatten-4 norm of composed schedules has `eps` added to it; "schatten" has it as in optax.
type Norm = Preconditioning | Literal["schatten_4"]


def total(x: jax.Array) -> jax.Array:
    """Σx along the last axis, the same in whatever order XLA sums.

    XLA's order depends on the size of the stack and on the times that its autotuner measures. So
    each sum is a pair of numbers, added with `TwoSum <https://doi.org/10.1137/030601818>`_ of
    Knuth. The order shows only in the last digits of a pair, beyond the digits of the result.
    """

    def add(
        left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        (x, x_low), (y, y_low) = left, right
        high = x + y
        of_y = high - x
        return high, x_low + y_low + ((x - (high - of_y)) + (y - of_y))

    zero = jnp.zeros((), x.dtype)
    # `x - x` is zero like a constant, but has a derivative.
    high, low = jax.lax.reduce((x, x - x), (zero, zero), add, (x.ndim - 1,))
    return high + low


def root(x: jax.Array) -> jax.Array:
    """√x, with the derivative 0 at 0."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


def over(x: jax.Array, y: jax.Array) -> jax.Array:
    """x/y, or x where y is 0."""
    return x / jnp.where(y == 0, 1, y)


def accumulator(x: jax.Array) -> jnp.dtype:
    """The dtype in which absolute values of `x` are summed: real, float32 or wider."""
    return jnp.finfo(jnp.promote_types(x.dtype, jnp.float32)).dtype


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32 or wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def largest_entries(stacks: Sequence[jax.Array]) -> jax.Array:
    """Returns max |X| of each matrix, not finite where X is not, without a derivative.

    No result depends on the powers of two that are made of it. JAX's derivative compares the
    entries with their maximum, which XLA may recompute and round in another way.

    XLA finds the largest entry of each row while it computes the stack. The largest entries of all
    stacks with equally many rows are then found together.

    Args:
        stacks: shapes `(batch, m, n)`, or one stack `(..., m, n)`.

    Returns:
        Shape `(total batch,)`, or `(...)` for one stack; float32 or wider.
    """
    stacks = jax.lax.stop_gradient(stacks)
    by_row = [jnp.max(jnp.abs(x), axis=-1, initial=0).astype(accumulator(x)) for x in stacks]
    groups = itertools.groupby(by_row, key=lambda x: x.shape[-1])
    parts = [jnp.max(jnp.concatenate([*group]), axis=-1, initial=0) for _, group in groups]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


# JAX 0.12.0 cannot trace frexp and ldexp in a `custom_vmap` where a shard_map tracks what varies.
def binary_exponent(x: jax.Array) -> jax.Array:
    """Returns k for normal numbers x in [2^(k-1), 2^k), and `minexp` of the dtype for smaller ones.

    It is `maxexp + 1` for what is not finite.
    """
    info = jnp.finfo(x.dtype)
    bits = jax.lax.bitcast_convert_type(x, f"int{info.bits}")
    return (bits >> info.nmant).astype(jnp.int32) - (info.maxexp - 2)


def power_of_two(k: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns 2^k, a normal number."""
    info = jnp.finfo(dtype)
    bits = (k + (info.maxexp - 1)).astype(f"int{info.bits}") << info.nmant
    return jax.lax.bitcast_convert_type(bits, dtype)


def powers_of_two(largest: jax.Array, exponent: int) -> tuple[jax.Array, jax.Array]:
    """Returns two powers of two whose product takes `largest` into [2^-exponent / 2, 2^-exponent].

    One power would not do: for `largest` near the end of the range it is no normal number. Both are
    NaN where `largest` is not finite.
    """
    k = jnp.maximum(binary_exponent(largest) + exponent, int(jnp.finfo(largest.dtype).minexp))
    one = 1 + 0 * largest
    first, second = (power_of_two(x, largest.dtype) for x in (-(k // 2), k // 2 - k))
    return one * first, one * second


def ceil_log2(n: int) -> int:
    """Returns log₂ n, rounded up."""
    return (n - 1).bit_length()


def gram_gain(n: int) -> float:
    """Returns the power of two for which gain²·XXᵀ has entries up to 2¹⁵.

    Entries of X, of shape (m, n), are at most n^-¼.
    """
    log2_n = ceil_log2(n)
    return 2.0 ** ((15 - log2_n) // 2 - (-log2_n // 4))


def regularize(
    norm: jax.typing.ArrayLike, eps: jax.typing.ArrayLike, eps_mode: EpsMode
) -> jax.Array:
    """Returns norm + eps, or max(norm, eps) under `eps_mode="max"`."""
    return jnp.add(norm, eps) if eps_mode == "add" else jnp.maximum(norm, eps)


@dataclasses.dataclass(frozen=True)
class Normalization:
    """How X is divided by its norm.

    Attributes:
        norm: which norm, or `"aol"`.
        eps: added to the norm of the caller's X, or its least value.
        eps_mode: `"add"` or `"max"`.
        scale: X is `scale` times the caller's; shape `(...)`, a number for each matrix.
        gain: the `gram_gain`, or one for each matrix.
    """

    norm: Norm
    eps: float | jax.Array
    eps_mode: EpsMode
    scale: jax.Array
    gain: float | jax.Array

    def __call__(
        self, x: jax.Array, gram: jax.Array, spread: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array, float | jax.Array, float | jax.Array]:
        """Returns (x, gram, s, factor): X over its norm is factor·x, and its XXᵀ is s²·gram.

        The norm stands apart in s and factor, which are a number or one for each matrix, `(...)`.

        Args:
            x: shape `(..., m, n)`.
            gram: gain²·XXᵀ, shape `(..., m, m)`.
            spread: takes values for the matrices of `gram` to the matrices of `x`.
        """
        scale = self.gain * self.scale
        if self.norm != "aol":
            s = self._inverse_norm(x, gram, scale)
            return x, gram, s, self.gain * s
        d = _inverse_row_norms(gram, _times(_times(self.eps, scale), scale))
        preconditioned = (gram * (2**7 * d) * (2**7 * d.mT)).astype(x.dtype)
        return (self.gain * x * spread(d)).astype(x.dtype), preconditioned, 2.0**-7, 1.0

    def _inverse_norm(self, x: jax.Array, gram: jax.Array, scale: jax.Array) -> jax.Array:
        """Returns 1/(norm of X, with eps in the norm), and 0 for the zero matrix."""
        if self.norm == "schatten_4":
            s = _inverse_schatten_norm(gram, 0.0, 1.0)
            # s is 0 for the zero matrix, whose scale times eps may be ∞.
            return s / regularize(1.0, _times(s, self.eps * scale), self.eps_mode)
        if self.norm == "schatten":
            return _inverse_schatten_norm(gram, self.eps, scale)
        if self.norm == "frobenius":
            *batch, m, _ = gram.shape
            # jnp.diagonal would be a kernel of its own.
            diagonal = gram.reshape(*batch, m * m)[..., :: m + 1]
            norm = root(total(diagonal.real.astype(accumulator(gram))))
        else:
            norm = jnp.linalg.norm(wide(self.gain * x), ord=2, axis=(-2, -1))
        return _inverse(norm, regularize(norm, _times(self.eps, scale), self.eps_mode))


def _inverse_schatten_norm(
    gram: jax.Array, eps: float | jax.Array, scale: float | jax.Array
) -> jax.Array:
    """Returns 1/ν, ν² at least eps·scale², and 0 for the zero matrix."""
    norm = root(total(total(jnp.abs(gram).astype(accumulator(gram)) ** 2)))
    return _inverse(norm, root(jnp.maximum(norm, _times(_times(eps, scale), scale))))


def _inverse(norm: jax.Array, regularized: jax.Array) -> jax.Array:
    return over(jnp.where(norm == 0, 0, 1), regularized)


def _times(x: jax.typing.ArrayLike, y: jax.typing.ArrayLike) -> jax.Array:
    """Returns x·y, and 0 for x = 0: XLA reorders products, and could make 0·∞ of it."""
    return jnp.where(jnp.equal(x, 0), 0, jnp.multiply(x, y))


def _inverse_row_norms(gram: jax.Array, least: jax.Array) -> jax.Array:
    """Returns the diagonal of the AOL preconditioner D, D⁻² = max(Σⱼ|Aᵢⱼ|, least), as a column.

    DX has singular values up to 1, and the Gram matrix DAD. A row of zeros stays a row of zeros.

    In float16 a sum below 2⁻¹¹ counts as 2⁻¹¹: such a sum is of subnormal numbers, whose rounding
    would be as large as the rest of DAD.

    Args:
        gram: A, times the square of the `gram_gain`; shape `(..., m, m)`.
        least: shape `(...)`.
    """
    sums = total(jnp.abs(gram).astype(accumulator(gram)))[..., None]
    if gram.dtype == jnp.float16:
        least = jnp.maximum(least, 2.0**-11)
    d = jax.lax.rsqrt(jnp.where(sums == 0, 1, jnp.maximum(sums, least[..., None, None])))
    return jnp.where(sums == 0, 0, d)
