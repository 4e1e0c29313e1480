"""What rounding can do at worst, to first order: errors of one sign, and a spike that turns.

Where the entries of a matrix have few values, equal entries round alike. The error of an Sⱼ is then
no sum of independent ones: its norm can come up to u·‖Sⱼ‖, with the unit roundoff u.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._coefficients.perturbed_map import h_with_errors
from muon_jax._iteration.steps import Step

# Two rounding errors of S for a spike, R = uuᵀ, m = 64, in units of u. The first is of an entry
# between the spike and a small direction, relative to S(1) - S(0). The second is of the diagonal,
# relative to S(0).
_BETWEEN, _OF_DIAGONAL = 0.1, 0.28


def worst_outputs(steps: Sequence[Step], sigma: jax.Array, roundoff: float) -> jax.Array:
    """Returns what the steps make of singular values at most, and at least.

    The output of each step is off, to either side, by the sum of what the errors of its R, Sⱼ and h
    do to it. Each error is `roundoff` times the maximum, less what a residual gives back. The next
    step takes both outputs.

    Args:
        steps: of the schedule.
        sigma: shape `(points,)`.
        roundoff: u, or less.

    Returns:
        Shape `(2^steps, points)`.
    """
    outputs = sigma[None]
    for step in steps:

        def result(errors: jax.Array, step: Step = step, x: jax.Array = outputs) -> jax.Array:
            return x * h_with_errors(step, x**2, lambda j, s: errors[j] * jnp.abs(s).max())

        y, response = jax.linearize(result, jnp.zeros(len(step.products) + 1))
        each = jax.vmap(response)(roundoff * jnp.eye(len(step.products) + 1))
        off = jnp.sqrt(each**2 + 1e-10 * roundoff**2).sum(axis=0)  # |each|, with derivatives
        outputs = jnp.concatenate([y + off, jax.nn.relu(y - off)])
    return outputs


def turns_of_spike(step: Step, roundoff: float) -> jax.Array:
    """Returns by which angles the roundings of R, S₁, … turn the direction of a singular value 1.

    The others are small. What h(R) has between the two directions, relative to h(1), is the tangent
    of the angle. Later steps keep the angle, because they change singular values only.

    Args:
        step: the first one.
        roundoff: u.

    Returns:
        Shape `(products,)`.
    """
    one, zero = step.terms(1.0), step.terms(0.0)
    between = jnp.array([[0.0, 1.0], [1.0, 0.0]])

    def off(errors: jax.Array) -> jax.Array:
        def error_of(j: int, _: Any) -> Any:
            return errors[j] * between if j < len(step.products) else 0.0

        spike = jnp.diag(jnp.array([1.0, 0.0]))
        return h_with_errors(step, spike, error_of, jnp.matmul, jnp.eye(2))[1, 0]

    sizes = [_BETWEEN]
    for s_one, s_zero in zip(one[1:-1], zero[1:-1], strict=True):
        sizes.append(_BETWEEN * abs(s_one - s_zero) + _OF_DIAGONAL * abs(s_zero))
    response = jax.grad(off)(jnp.zeros(len(step.products)))
    return response * roundoff * jnp.stack(sizes) / jnp.maximum(abs(one[-1]), 0.05)
