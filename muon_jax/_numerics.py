"""Sums, roots, quotients and norms that hold at the ends of a dtype's range."""

import jax
import jax.numpy as jnp


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
