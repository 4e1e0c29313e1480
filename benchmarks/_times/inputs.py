"""Random matrices to time and to check with."""

import jax
import jax.numpy as jnp


def standard_normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Returns a standard normal array, the same for the same seed."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


def symmetric(x: jax.Array) -> jax.Array:
    """Returns the lower triangle of `x`, `(..., m, m)`, mirrored."""
    lower = jnp.tril(x)
    return lower + jnp.tril(lower, -1).mT
