"""Sums, roots, quotients and norms that hold at the ends of a dtype's range."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def total(x: jax.Array) -> jax.Array:
    """Σx along the last axis, the same in whatever order XLA sums.

    That order depends on the size of the stack, and on times that XLA's autotuner measures. So sums
    are pairs of numbers, with `TwoSum <https://doi.org/10.1137/030601818>`_ of Knuth; their last
    digits, where the order shows, are beyond those of the result.
    """

    def add(left, right):
        (x, x_low), (y, y_low) = left, right
        high = x + y
        of_y = high - x
        return high, x_low + y_low + ((x - (high - of_y)) + (y - of_y))

    zero = jnp.zeros((), x.dtype)
    # Zeros that have a derivative.
    high, low = jax.lax.reduce((x, x - x), (zero, zero), add, (x.ndim - 1,))
    return high + low


def root(x: jax.Array) -> jax.Array:
    """√x, with the derivative 0 at 0."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


def accumulator(x: jax.Array):
    """The dtype of sums of absolute values of `x`: real, float32 or wider."""
    return jnp.finfo(jnp.promote_types(x.dtype, jnp.float32)).dtype


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32 or wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def norm_of_any_size(
    x: jax.Array,
    largest: Callable[[jax.Array], jax.Array],
    total: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """√Σ|x|², of entries too whose squares are out of range.

    Args:
        x: the entries.
        largest, total: make max |x| and Σ, in shapes that broadcast to x's.
    """
    most = largest(x)
    mantissa, _ = jnp.frexp(most)
    power = over(most, 4 * mantissa)  # of two: quotients are exact, and 1/power is in range
    return power * jnp.sqrt(total(jnp.abs(over(x, power)) ** 2))


def over(x: jax.Array, y: jax.Array) -> jax.Array:
    """x/y, and x where y is 0."""
    return x / jnp.where(y == 0, 1, y)
