"""Fits composed schedules under the noise of rounding: the origin of `_iteration.fitted`.

All steps are fitted jointly, by nonlinear least squares in float64. Let σ ↦ y(σ) be the map of the
schedule. The objective is a sum of squares, where each kind of term is a mean over its points:

- Distance: y - 1, on 420 log-uniform points of [l, 1] and, with a tenth of their weight, on 69 of
  [l/8, l].
- Rounding: on the same points the first-order response of y to the rounding of each intermediate
  on its own. The errors are `noise` times 2·10⁻⁴ of the maximum for R, 2·10⁻³ of the maximum for an
  Sⱼ other than h, and 5·10⁻³ of itself for the output of each step but the last.
- Bounds: 6·log(1 + excess) of y above `cap`, and of y below min(0.3, 0.15σ/l), on 560 points of
  [l/30, 1.01]. There y is without errors, or with the output of one step, not the last, off by
  ±`drift`.
- Shift: 4.2·log(1 + excess) of y above 1.33, on the points of the bounds, with one Sⱼ off by
  ±`shift` of its maximum, or R by half of that. This models rounding errors of one sign.
- Coupling: 4.2·log(1 + excess) above 1.33 of the largest singular value of h(R)·diag(√λ, σ), for
  five λ from 0.45 to 1 and 30 points σ of [l/10, 0.15]. R, S₁ or S₂ is off by `coupling` of its
  maximum between the two directions. Or, twelve times, all intermediates are off by half of that,
  with random signs, between the directions and in the direction of σ.

Where an S has a residual, the next product takes its error back, as far as `Step` does.

Two scalings are free, and are fixed:

- Sⱼ(0) = 1 for all Sⱼ but h.
- beta = -1 in the first product of all steps but the first.

An Sⱼ with a residual of its own has Sⱼ(0) = 0 instead, which keeps Sⱼ and its rounding small in
small directions. The next product adds Sⱼ, so I can be taken off. beta = 4 fixes its scale.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from muon_jax._iteration.steps import Product, Step
from muon_jax.benchmarks._coefficients.designs import AddendIndices, Design
from muon_jax.benchmarks._coefficients.perturbed_map import (
    largest_of_pair,
    map_with_errors,
    pair_errors,
)

_ROUNDING_OF_R, _ROUNDING_OF_S, _ROUNDING_OF_OUTPUT = 2e-4, 2e-3, 5e-3
_MARGIN = 1.05  # `greedy` fits a step up to here, or it could explode right above 1


def fit(design: Design) -> tuple[Step, ...]:
    """Returns the steps of `design` at the minimum that the fit reaches from its start.

    A trust region of Gauss and Newton's method leads near the minimum, Newton's own method to it.
    """
    with jax.enable_x64(True), np.errstate(over="ignore"):  # steps that overflow are rejected
        function = functools.partial(objective_terms, design)
        free = np.array(design.start or free_coefficients(greedy(design.addends, design.low)))
        free = _newton(function, _least_squares(function, free, [design.low]), design.low)
        steps = _steps_of_free(design.addends, free.tolist(), design.residuals)
        return tuple(map(_to_eight_digits, steps))


def properties(steps: tuple[Step, ...], low: float) -> dict[str, float]:
    """Returns the slope of y at 0, its least value on [low, 1] and its maximum on [0, 1]."""
    with jax.enable_x64(True):
        y = map_with_errors(steps, _log_grid(low, 1.0, 10_000))
        slope = map_with_errors(steps, jnp.array([1e-9]))[0] / 1e-9
        below = map_with_errors(steps, _log_grid(1e-9, low, 10_000))
        numbers = {"slope": slope, "least": y.min(), "maximum": jnp.maximum(y.max(), below.max())}
        return {name: float(number) for name, number in numbers.items()}


def greedy(addends: AddendIndices, low: float) -> tuple[Step, ...]:
    """Returns steps that are each fitted alone: the first on [low, 1], others on its image.

    A step minimizes the mean square of log y. It is fitted twelve times, on intervals that grow to
    the whole one. The start is Sⱼ = (I - R)^(2ʲ), with all coefficients of h one.
    """
    steps: list[Step] = []
    highest = 1.0
    for indices in addends:

        def logarithm(
            free: jax.Array,
            least: jax.Array | float,
            indices: tuple[tuple[int, ...], ...] = indices,
        ) -> jax.Array:
            y = map_with_errors(_steps_of_free((indices,), free), _log_grid(least, _MARGIN, 300))
            return jnp.log(jnp.maximum(y, 1e-3)) / np.sqrt(y.size)

        first, *middle, last = indices
        free = [1.0, *[-2.0] * len(first)]
        free += itertools.chain.from_iterable([1.0, *[0.0] * len(each)] for each in middle)
        free = np.array([*free, 1.0, *[1.0] * len(last), 1.0])
        free = _least_squares(logarithm, free, np.geomspace(0.3, low, 12))
        (step,) = _steps_of_free((indices,), free.tolist())
        y = np.asarray(map_with_errors((step,), _log_grid(low, _MARGIN, 300)))
        if steps:  # scale the step to beta = -1, and the one before to the input that it expects
            s = (-step.products[0].addends[0][0]) ** -0.5
            steps[-1] = steps[-1].scaled(1.0, 1.0 / (highest * s))
            step = step.scaled(s, s)
        steps.append(step)
        highest, low = y.max(), y.min() / y.max()
    return tuple(steps)


def objective_terms(
    design: Design, free: np.ndarray | jax.Array, low: jax.Array | float
) -> jax.Array:
    """Returns the terms that the module's docstring sums the squares of.

    Args:
        design: of the schedule.
        free: its `free_coefficients`.
        low: l.

    Returns:
        Float64, shape `(terms,)`.
    """
    steps = _steps_of_free(design.addends, free, design.residuals)
    rounding = np.concatenate(
        [
            [_ROUNDING_OF_R, *[_ROUNDING_OF_S] * (len(indices) - 1), _ROUNDING_OF_OUTPUT]
            for indices in design.addends
        ]
    )[:-1]  # coefficients cannot change the rounding of the last output
    each = np.eye(rounding.size, rounding.size + 1)

    x = jnp.append(_log_grid(low / 8, low, 70)[:-1], _log_grid(low, 1.0, 420))
    weights = np.append(np.full(69, 0.1 / 69), np.full(420, 1 / 420)) ** 0.5
    y, response = jax.linearize(
        lambda errors: map_with_errors(steps, x, errors), jnp.zeros(each.shape[1])
    )
    responses = jax.vmap(response)(design.noise * rounding[:, None] * each)

    x = jnp.append(_log_grid(low / 30, 1.01, 260), np.linspace(0.02, 1.01, 300))
    bounded = jax.vmap(lambda errors: map_with_errors(steps, x, errors))
    is_output = rounding == _ROUNDING_OF_OUTPUT
    drifts = design.drift * each[is_output]
    off = bounded(np.concatenate([0 * each[:1], drifts, -drifts]))
    floor = 0.3 * jnp.minimum(1.0, x / (2 * low))
    excess = _excess(off - design.cap)
    terms = [weights * (y - 1.0), weights * responses, excess, _excess(floor - off)]
    if design.shift:
        shifts = np.where(rounding == _ROUNDING_OF_R, 0.5, 1.0) * design.shift
        shifts = (shifts[:, None] * each)[~is_output]
        terms.append(0.7 * _excess(bounded(np.concatenate([shifts, -shifts])) - 1.33))
    if design.coupling:
        errors = design.coupling * pair_errors(each[~is_output])
        x = _log_grid(low / 10, 0.15, 30)
        for largest in (1.0, 0.85, 0.7, 0.57, 0.45):
            pairs = jax.vmap(lambda e, y=largest**0.5: largest_of_pair(steps, y, x, e))(errors)
            terms.append(0.7 * _excess(pairs - 1.33))
    return jnp.concatenate([term.ravel() for term in terms])


def free_coefficients(steps: Sequence[Step]) -> np.ndarray:
    """Returns the coefficients that no scaling fixes: alphas, betas and the diagonal of h.

    They are in the order of the products, shape `(coefficients,)`.
    """
    values = []
    for index, step in enumerate(steps):
        for j, product in enumerate(step.products):
            known = j < step.residuals - 1 or (index and j == 0)
            betas = () if known else (beta for beta, _ in product.addends)
            values += [product.alpha, *betas]
        values.append(step.products[-1].diagonal)
    return np.array(values)


def _to_eight_digits(step: Step) -> Step:
    """The step with eight significant digits."""

    def rounded(value: float | jax.Array) -> float:
        return float(f"{value:.8g}")

    products = []
    for product in step.products:
        addends = tuple((rounded(beta), i) for beta, i in product.addends)
        products.append(Product(rounded(product.alpha), addends, rounded(product.diagonal)))
    return Step(tuple(products), step.residuals)


def _steps_of_free(
    addends: AddendIndices, free: Iterable[Any], residuals: int = 0
) -> tuple[Step, ...]:
    """The steps with these free coefficients: the inverse of `free_coefficients`."""
    values, steps = iter(free), []
    for indices in addends:
        products = []
        residuals = 0 if steps else residuals
        zero = [0.0] * max(residuals, 1) + [1.0] * len(indices)  # Sⱼ(0)
        for j, added in enumerate(indices, 1):
            alpha = next(values)
            known = 4.0 if j < residuals else -1.0 if steps and j == 1 else None
            pairs = tuple((known or next(values), i) for i in added)
            at_zero = alpha * zero[j - 1] ** 2 + sum(beta * zero[i] for beta, i in pairs)
            diagonal = next(values) if j == len(indices) else zero[j] - at_zero
            products.append(Product(alpha, pairs, diagonal))
        steps.append(Step(tuple(products), residuals))
    return tuple(steps)


def _log_grid(
    low: jax.Array | float, high: jax.Array | float, points: int
) -> jax.Array | np.ndarray:
    """Log-uniform points, shape `(points,)`; `low` can be traced."""
    return low * (high / low) ** np.linspace(0.0, 1.0, points)


def _excess(amount: jax.Array) -> jax.Array:
    """6·log(1 + amount₊), so scaled that a sum of squares is a mean over the last axis."""
    return 6.0 * jnp.log1p(jax.nn.relu(amount)) / np.sqrt(amount.shape[-1])


def _least_squares(
    function: Callable[..., jax.Array], free: np.ndarray, lows: Iterable[float]
) -> np.ndarray:
    """Minimizes the sum of squares for one interval after the other."""
    compiled = jax.jit(function)
    jacobian: Any = jax.jit(jax.jacfwd(function))  # scipy annotates this argument as str
    for low in lows:
        free = scipy.optimize.least_squares(
            compiled, free, jacobian, x_scale="jac", max_nfev=200, args=(low,)
        ).x
    return free


def _newton(function: Callable[..., jax.Array], free: np.ndarray, low: float) -> np.ndarray:
    """Minimizes the sum of squares from nearby, to what float64 can tell apart."""
    scale = np.abs(free)

    def cost(scaled: jax.Array) -> jax.Array:
        total = jnp.sum(function(scaled * scale, low) ** 2)
        return jnp.where(jnp.isnan(total), jnp.inf, total)  # far steps overflow

    gradient = jax.grad(cost)
    hessian = jax.jit(jax.jacfwd(gradient))
    found = scipy.optimize.minimize(
        jax.jit(cost),
        free / scale,
        jac=jax.jit(gradient),
        hess=lambda scaled: np.nan_to_num(hessian(scaled)),
        method="trust-exact",
        options={"gtol": 1e-9, "maxiter": 500},
    )
    return found.x * scale
