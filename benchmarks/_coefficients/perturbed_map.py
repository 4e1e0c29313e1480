"""The map of a schedule with errors in its intermediates: y(σ), and the map of pairs (σ, λ).

Errors are a vector with one entry for each intermediate, in the order of computation: of each step
R, each Sⱼ but h, and the output. Errors of R and Sⱼ are relative to their maximum, those of an
output to the output itself.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax._iteration.steps import Step


def map_with_errors(
    steps: Sequence[Step], x: jax.Array | np.ndarray, errors: jax.Array | np.ndarray | None = None
) -> jax.Array:
    """Returns y(x) for x of shape `(points,)`.

    Args:
        steps: of the schedule.
        x: singular values.
        errors: shape `(errors,)`; pass None for no errors.
    """
    errors = np.zeros(_count_errors(steps)) if errors is None else errors
    return _run_steps(steps, x[:, None, None], errors)[:, 0, 0]


def largest_of_pair(
    steps: Sequence[Step], first: float, second: jax.Array | np.ndarray, errors: jax.Array
) -> jax.Array:
    """Returns the largest singular value of h(R)·diag(first, second), by point.

    Args:
        steps: of the schedule.
        first: one singular value for all points.
        second: the other one, shape `(points,)`.
        errors: shape `(errors, 2, 2)`.
    """
    x = jnp.zeros((*second.shape, 2, 2)).at[:, 0, 0].set(first).at[:, 1, 1].set(second)
    x = _run_steps(steps, x, errors)
    total = jnp.sum(x * x, axis=(1, 2))
    determinant = x[:, 0, 0] * x[:, 1, 1] - x[:, 0, 1] * x[:, 1, 0]
    gap = (total - 2 * determinant) * (total + 2 * determinant)
    return jnp.sqrt((total + jnp.sqrt(jnp.maximum(gap, 1e-20))) / 2)


def pair_errors(each: np.ndarray) -> np.ndarray:
    """Returns errors of a pair of directions.

    The first three are of R, S₁ and S₂ alone, between the two directions. The other twelve are of
    all intermediates together, by half, of random signs, between the directions and in the second.

    Args:
        each: the errors of each intermediate on its own, shape `(intermediates, errors)`.

    Returns:
        Shape `(15, errors, 2, 2)`.
    """
    between, small = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[0.0, 0.0], [0.0, 1.0]])
    signs = np.random.default_rng(0).choice([-0.5, 0.5], (2, 12, len(each))) @ each
    mixed = signs[..., None, None] * np.stack([between, small])[:, None, None]
    return np.concatenate([each[:3, :, None, None] * between, mixed.sum(axis=0)])


def _run_steps(steps: Sequence[Step], x: Any, errors: jax.Array | np.ndarray) -> jax.Array:
    """The result of the steps for matrices `(points, k, k)`."""
    remaining = iter(errors)
    for step in steps:

        def error_of(j: int, term: Any, step: Step = step) -> Any:
            return _of_largest(next(remaining), term) if j < len(step.products) else 0.0

        h = h_with_errors(
            step, _small_product(x, x.mT), error_of, _small_product, np.eye(x.shape[-1])
        )
        x = _small_product(h, x) * (1.0 + next(remaining))
    return x


def h_with_errors(
    step: Step,
    gram: Any,
    error_of: Callable[[int, Any], Any],
    multiply: Callable[[Any, Any], Any] = operator.mul,
    identity: Any = 1.0,
) -> Any:
    """Returns h, where each Sⱼ has an error, which its residual gives back to the next product.

    Args:
        step: with the polynomial h.
        gram: R: eigenvalues, or matrices.
        error_of: the error of Sⱼ, from j and Sⱼ.
        multiply: of two Sⱼ.
        identity: I.
    """
    error = error_of(0, gram)
    terms = [gram + error]
    for j, product in enumerate(step.products):
        added = sum(beta * terms[i] for beta, i in product.addends)
        term = product.alpha * multiply(terms[-1], terms[-1]) + added + product.diagonal * identity
        if j < len(step.residual_betas):
            term -= step.residual_betas[j] * error
        error = error_of(j + 1, term)
        terms.append(term + error)
    return terms[-1]


def _small_product(a: Any, b: Any) -> Any:
    """AB of small matrices `(points, k, k)`, as one multiplication and one sum."""
    return (a[..., :, None] * b[..., None, :, :]).sum(axis=-2)


def _of_largest(error: Any, term: Any) -> jax.Array:
    return error * jnp.max(jnp.abs(term))


def _count_errors(steps: Sequence[Step]) -> int:
    return sum(len(step.products) + 1 for step in steps)
