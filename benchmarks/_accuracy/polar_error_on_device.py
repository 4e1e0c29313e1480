"""The distance of results to the polar factor, on the device: for matrices too large for a CPU."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from benchmarks._accuracy.polar_error import THRESHOLDS

# Directions with a smaller singular value, relative to the largest, do not count.
THRESHOLD = THRESHOLDS[0]


def polar_errors(x: jax.Array, results: Iterable[tuple[str, jax.Array]]) -> dict[str, float]:
    """Returns ‖UₖᵀO - Vₖᵀ‖_F/√k of each result O, for the first matrix X = UΣVᵀ of a stack.

    k is the number of singular values above `THRESHOLD`·σ₁. All is computed in float64, U and Σ
    from the eigenvectors of XXᵀ.

    Args:
        x: shape `(..., m, n)`, m ≤ n.
        results: names, and approximations of the polar factors, in the shape of `x`.
    """
    with jax.enable_x64(True):
        u, vt, is_large = _singular_vectors(_first_matrix(x))
        return {
            name: round(float(_error_of_large(_first_matrix(out), u, vt, is_large)), 4)
            for name, out in results
        }


def _first_matrix(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[-2:])[0].astype(jnp.float64)


@jax.jit
def _singular_vectors(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """U and Vᵀ in ascending order of σ, and which σ are large; rows of Vᵀ are 0 for the others."""
    squares, u = jnp.linalg.eigh(x @ x.mT)
    sigma = jnp.sqrt(jnp.maximum(squares, 0))
    is_large = sigma > THRESHOLD * sigma[-1]
    return u, jnp.where(is_large, 1 / sigma, 0)[:, None] * (u.mT @ x), is_large


@jax.jit
def _error_of_large(out: jax.Array, u: jax.Array, vt: jax.Array, is_large: jax.Array) -> jax.Array:
    squares = jnp.sum((u.mT @ out - vt) ** 2, axis=-1)
    return jnp.sqrt(jnp.sum(squares, where=is_large) / jnp.sum(is_large))
