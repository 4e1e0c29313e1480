"""The distance of results to the polar factor, on the device: for matrices too large for a CPU."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from muon_jax.benchmarks import _accuracy

# Of the largest singular value: directions with less do not count.
THRESHOLD = _accuracy.THRESHOLDS[0]


def errors(x: jax.Array, results: Iterable[tuple[str, jax.Array]]) -> dict[str, float]:
    """Returns ‖UₖᵀO - Vₖᵀ‖_F/√k of each result O, for the first matrix X = UΣVᵀ of a stack.

    k is the number of singular values above `THRESHOLD`·σ₁. All is computed in float64, U and Σ
    from the eigenvectors of XXᵀ.

    Args:
        x: shape `(..., m, n)`, m ≤ n.
        results: names, and approximations of the polar factors, in the shape of `x`.
    """
    with jax.enable_x64(True):
        u, vt, is_large = _singular_vectors(_first(x))
        return {
            name: round(float(_error(_first(out), u, vt, is_large)), 4) for name, out in results
        }


def _first(x):
    return x.reshape(-1, *x.shape[-2:])[0].astype(jnp.float64)


@jax.jit
def _singular_vectors(x):
    squares, u = jnp.linalg.eigh(x @ x.mT)
    sigma = jnp.sqrt(jnp.maximum(squares, 0))
    is_large = sigma > THRESHOLD * sigma[-1]
    return u, jnp.where(is_large, 1 / sigma, 0)[:, None] * (u.mT @ x), is_large


@jax.jit
def _error(out, u, vt, is_large):
    squares = jnp.sum((u.mT @ out - vt) ** 2, axis=-1)
    return jnp.sqrt(jnp.sum(squares, where=is_large) / jnp.sum(is_large))
