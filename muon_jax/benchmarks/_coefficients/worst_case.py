"""What rounding can do at worst, to first order: errors of one sign, and a spike that turns.

Where the entries of a matrix have few values, equal entries round alike. The error of an Sⱼ is then
no sum of independent ones: its norm can come up to u·‖Sⱼ‖, with the unit roundoff u.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax._iteration.steps import Step

# The rounding errors of S for a spike, R = uuᵀ, m = 64, in units of u: of an entry between the
# spike and a small direction, relative to S(1) - S(0), and of the diagonal, relative to S(0).
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
            return x * _with_errors(step, x**2, errors)

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
        error = errors[0] * between
        terms = [jnp.diag(jnp.array([1.0, 0.0])) + error]
        for j, product in enumerate(step.products):
            term = product.alpha * terms[-1] @ terms[-1] + product.diagonal * jnp.eye(2)
            term += sum(beta * terms[i] for beta, i in product.addends)
            if j < len(step.residual_betas):
                term -= step.residual_betas[j] * error
            if j + 1 < len(step.products):
                error = errors[j + 1] * between
                term += error
            terms.append(term)
        return terms[-1][1, 0]

    sizes = [_BETWEEN]
    for s_one, s_zero in zip(one[1:-1], zero[1:-1], strict=True):
        sizes.append(_BETWEEN * abs(s_one - s_zero) + _OF_DIAGONAL * abs(s_zero))
    response = jax.grad(off)(jnp.zeros(len(step.products)))
    return response * roundoff * jnp.stack(sizes) / jnp.maximum(abs(one[-1]), 0.05)


def _with_errors(step: Step, eigenvalue: jax.Array, errors: jax.Array | np.ndarray) -> jax.Array:
    """h, where R, S₁, … and h are off by these errors, relative to the maximum of each."""
    error = errors[0] * jnp.abs(eigenvalue).max()
    terms = [eigenvalue + error]
    for j, product in enumerate(step.products):
        added = sum(beta * terms[i] for beta, i in product.addends)
        term = product.alpha * terms[-1] ** 2 + added + product.diagonal
        if j < len(step.residual_betas):
            term -= step.residual_betas[j] * error
        error = errors[j + 1] * jnp.abs(term).max()
        terms.append(term + error)
    return terms[-1]
