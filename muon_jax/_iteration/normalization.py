"""What X is divided by: powers of two, norms, row sums."""

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from muon_jax._numerics import accumulator, over, root, total, wide

type EpsMode = Literal["add", "max"]


def largest_entries(stacks: Sequence[jax.Array]) -> jax.Array:
    """max |X| of each matrix, not finite where X is not; for one stack of its batch's shape.

    First of each row, which XLA finds while it computes the stack, then of all stacks of as many
    rows at once.
    """
    by_row = [jnp.max(jnp.abs(x), axis=-1, initial=0).astype(accumulator(x)) for x in stacks]
    groups = itertools.groupby(by_row, key=lambda x: x.shape[-1])
    parts = [jnp.max(jnp.concatenate([*group]), axis=-1, initial=0) for _, group in groups]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def powers_of_two(largest: jax.Array, exponent: int) -> tuple[jax.Array, jax.Array]:
    """Two powers of two whose product takes `largest` to between a half and once 2^-exponent.

    They are two because the product itself is no normal number for `largest` near the end of its
    range. NaN where `largest` is not finite.
    """
    _, k = jnp.frexp(largest)
    k = jnp.maximum(k + exponent, int(jnp.finfo(largest.dtype).minexp))
    one = 1 + 0 * largest
    return jnp.ldexp(one, -(k // 2)), jnp.ldexp(one, k // 2 - k)


def gram_gain(log2_n: int) -> float:
    """The power of two for which gain²·XXᵀ has entries up to 2¹⁵, where those of X are n^-¼."""
    return 2.0 ** ((15 - log2_n) // 2 - (-log2_n // 4))


def inverse_norm(
    x: jax.Array,
    gram: jax.Array,
    eps: float | jax.Array,
    eps_mode: EpsMode,
    scale: float | jax.Array,
    preconditioning: str,
) -> jax.Array:
    """1/(norm of X, with eps in it), and 0 for the zero matrix; X is `scale` times the caller's."""
    if preconditioning == "frobenius":
        *batch, m, _ = gram.shape
        diagonal = gram.reshape(*batch, m * m)[..., :: m + 1]  # jnp.diagonal is a kernel of its own
        norm = root(total(diagonal.real.astype(accumulator(gram))))
        regularized = regularize(norm, times(eps, scale), eps_mode)
    elif preconditioning == "schatten":
        norm = root(total(total(jnp.abs(gram).astype(accumulator(gram)) ** 2)))
        regularized = root(jnp.maximum(norm, times(times(eps, scale), scale)))
    else:
        norm = jnp.linalg.norm(wide(x), ord=2, axis=(-2, -1))
        regularized = regularize(norm, times(eps, scale), eps_mode)
    return over(jnp.where(norm == 0, 0, 1), regularized)


def normalize(
    x: jax.Array,
    gram: jax.Array,
    gain: float,
    eps: float | jax.Array,
    eps_mode: EpsMode,
    scale: jax.Array,
    preconditioning: str,
    spread: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, float | jax.Array, float | jax.Array]:
    """Returns Y, A, s, f: the normalized X is f·Y, and its Gram matrix s²·A.

    Args:
        x: X, `scale` times the caller's.
        gram: gain²·XXᵀ, with the `gram_gain`.
        spread: makes what is for the matrices of `x` of what is for those of `gram`.
        gain, eps, eps_mode, scale, preconditioning: as for `inverse_norm`, and AOL.
    """
    scale = gain * scale
    if preconditioning != "aol":
        s = inverse_norm(gain * x, gram, eps, eps_mode, scale, preconditioning)
        return x, gram, s, gain * s
    d = inverse_row_norms(gram, times(times(eps, scale), scale))
    preconditioned = (gram * (2**7 * d) * (2**7 * d.mT)).astype(x.dtype)
    return (gain * x * spread(d)).astype(x.dtype), preconditioned, 2.0**-7, 1.0


def regularize(
    norm: jax.typing.ArrayLike, eps: jax.typing.ArrayLike, eps_mode: EpsMode
) -> jax.Array:
    """The norm with eps added to it, or eps where that is larger."""
    return jnp.add(norm, eps) if eps_mode == "add" else jnp.maximum(norm, eps)


def times(eps: jax.typing.ArrayLike, scale: jax.typing.ArrayLike) -> jax.Array:
    """eps·scale, and 0 for eps = 0 where XLA, which reorders products, makes that 0·∞."""
    return jnp.where(jnp.equal(eps, 0), 0, jnp.multiply(eps, scale))


def inverse_row_norms(gram: jax.Array, least: jax.Array) -> jax.Array:
    """The diagonal of D, as a column, with D⁻² = max(Σⱼ|Aᵢⱼ|, least): the AOL preconditioner.

    DX has singular values up to 1, and the Gram matrix DAD. A row of zeros stays one. A is of
    `gram_gain`; in float16 sums below 2⁻¹¹, of numbers that are subnormal there, count as 2⁻¹¹, or
    their rounding would be as large as the rest of DAD.
    """
    sums = total(jnp.abs(gram).astype(accumulator(gram)))[..., None]
    if gram.dtype == jnp.float16:
        least = jnp.maximum(least, 2.0**-11)
    d = jax.lax.rsqrt(jnp.where(sums == 0, 1, jnp.maximum(sums, least[..., None, None])))
    return jnp.where(sums == 0, 0, d)
