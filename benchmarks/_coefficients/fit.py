"""Fits composed schedules under the noise of rounding: the origin of `_iteration.coefficients`.

All steps are fitted jointly, by nonlinear least squares in float64. Let σ ↦ y(σ) be the map of the
schedule. The objective is a sum of squares, where each kind of term is a mean over its points:

- Distance: y - 1, on 240 log-uniform points of [l, 1] and, with a tenth of their weight, on 39 of
  [l/8, l].
- Rounding: on the same points the first-order response of y to the rounding of each intermediate
  on its own. The errors are `noise` times 2·10⁻⁴ of the maximum for R, 2·10⁻³ of the maximum for an
  Sⱼ other than h, and 5·10⁻³ of itself for the output of each step but the last.
- Bounds: 6·log(1 + excess) on 280 points of [l/30, 1.01]. The excess is that of y above `cap`, or
  that of min(0.3, 0.15σ/l) above y. There y is without errors, or with the output of one step, not
  the last, off by ±`drift`.
- Worst case: the same of what rounding errors of one sign, each of `worst`·u of the
  maximum, can make of y together, above `most`, on 200 points of [l/10, 1]: `worst_outputs`.
- Coupling: 4.2·log(1 + excess) above 1.33 of the largest singular value of h(R)·diag(√λ, σ), for
  λ of 0.45, 0.7 and 1, and 12 points σ of [l/10, 0.15]. R, S₁ or S₂ is off by `coupling` of its
  maximum between the two directions. Or, twelve times, all intermediates are off by half of that,
  with random signs, between the directions and in the direction of σ.
- Spike: `spike` times y(1) - 1, and times the angles by which rounding turns the direction of a
  singular value 1 among small ones: `turns_of_spike`.

Where an S has a residual, the next product takes its error back, as far as `Step` does. The
objective does not have the noise of `Step.noisy`, which is less than the rounding of an S.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from benchmarks._coefficients.designs import Design
from benchmarks._coefficients.free import steps_of_free, to_eight_digits
from benchmarks._coefficients.perturbed_map import (
    largest_of_pair,
    map_with_errors,
    pair_errors,
)
from benchmarks._coefficients.worst_case import turns_of_spike, worst_outputs
from muon_jax._iteration.steps import Step

_ROUNDING_OF_R, _ROUNDING_OF_S, _ROUNDING_OF_OUTPUT = 2e-4, 2e-3, 5e-3


def fit(design: Design) -> tuple[Step, ...]:
    """Returns the steps of `design` at the minimum that the fit reaches from its start."""
    with jax.enable_x64(True), np.errstate(over="ignore"):  # steps that overflow are rejected
        function = functools.partial(objective_terms, design)
        compiled = jax.jit(function)
        jacobian: Any = jax.jit(jax.jacfwd(function))  # scipy annotates this argument as str
        found = scipy.optimize.least_squares(
            compiled, design.start, jacobian, x_scale="jac", ftol=1e-10, max_nfev=300
        )
        return tuple(map(to_eight_digits, steps_of_free(design, found.x.tolist())))


def properties(steps: tuple[Step, ...], low: float) -> dict[str, float]:
    """Returns the slope of y at 0, its least value on [low, 1] and its maximum on [0, 1]."""
    with jax.enable_x64(True):
        y = map_with_errors(steps, _log_grid(low, 1.0, 10_000))
        slope = map_with_errors(steps, jnp.array([1e-9]))[0] / 1e-9
        below = map_with_errors(steps, _log_grid(1e-9, low, 10_000))
        numbers = {"slope": slope, "least": y.min(), "maximum": jnp.maximum(y.max(), below.max())}
        return {name: float(number) for name, number in numbers.items()}


def objective_terms(design: Design, free: np.ndarray | jax.Array) -> jax.Array:
    """Returns the terms that the module's docstring sums the squares of.

    Args:
        design: of the schedule.
        free: its `free_coefficients`.

    Returns:
        Float64, shape `(terms,)`.
    """
    steps, low = steps_of_free(design, free), design.low
    rounding = np.concatenate(
        [
            [_ROUNDING_OF_R, *[_ROUNDING_OF_S] * (len(indices) - 1), _ROUNDING_OF_OUTPUT]
            for indices in design.addends
        ]
    )[:-1]  # coefficients cannot change the rounding of the last output
    terms = [
        *_distances(design, steps, rounding),
        *_bounds(design, steps, rounding),
        *_couplings(design, steps, rounding),
    ]
    x = jnp.append(_log_grid(low / 10, 1.0, 100), np.linspace(0.05, 1.0, 100))
    terms.append(_excess(worst_outputs(steps, x, design.worst * design.unit) - design.most))
    at_one = map_with_errors(steps, jnp.ones(1)) - 1.0
    terms += [design.spike * at_one, design.spike * turns_of_spike(steps[0], design.unit)]
    return jnp.concatenate([term.ravel() for term in terms])


def _distances(
    design: Design, steps: Sequence[Step], rounding: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """The terms of distance and rounding."""
    low, each = design.low, np.eye(rounding.size, rounding.size + 1)
    x = jnp.append(_log_grid(low / 8, low, 40)[:-1], _log_grid(low, 1.0, 240))
    weights = np.append(np.full(39, 0.1 / 39), np.full(240, 1 / 240)) ** 0.5
    y, response = jax.linearize(
        lambda errors: map_with_errors(steps, x, errors), jnp.zeros(each.shape[1])
    )
    responses = jax.vmap(response)(design.noise * rounding[:, None] * each)
    return weights * (y - 1.0), weights * responses


def _bounds(
    design: Design, steps: Sequence[Step], rounding: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """The terms of bounds, from above and from below."""
    low, each = design.low, np.eye(rounding.size, rounding.size + 1)
    x = jnp.append(_log_grid(low / 30, 1.01, 130), np.linspace(0.02, 1.01, 150))
    drifts = design.drift * each[rounding == _ROUNDING_OF_OUTPUT]
    errors = np.concatenate([0 * each[:1], drifts, -drifts])
    off = jax.vmap(lambda errors: map_with_errors(steps, x, errors))(errors)
    floor = 0.3 * jnp.minimum(1.0, x / (2 * low))
    return _excess(off - design.cap), _excess(floor - off)


def _couplings(design: Design, steps: Sequence[Step], rounding: np.ndarray) -> list[jax.Array]:
    """The terms of coupling."""
    each = np.eye(rounding.size, rounding.size + 1)[rounding != _ROUNDING_OF_OUTPUT]
    errors, x = design.coupling * pair_errors(each), _log_grid(design.low / 10, 0.15, 12)
    terms = []
    for largest in (1.0, 0.7, 0.45):
        pairs = jax.vmap(lambda e, y=largest**0.5: largest_of_pair(steps, y, x, e))(errors)
        terms.append(0.7 * _excess(pairs - 1.33))
    return terms


def _log_grid(low: float, high: float, points: int) -> np.ndarray:
    """Log-uniform points, shape `(points,)`."""
    return low * (high / low) ** np.linspace(0.0, 1.0, points)


def _excess(amount: jax.Array) -> jax.Array:
    """6·log(1 + amount₊), so scaled that a sum of squares is a mean over the last axis."""
    return 6.0 * jnp.log1p(jax.nn.relu(amount)) / np.sqrt(amount.shape[-1])
