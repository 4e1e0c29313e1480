"""Fits composed schedules under the noise of rounding: where the numbers of `_schedules` are from.

All steps are fitted jointly, by nonlinear least squares in float64. With σ ↦ y(σ) the map of the
schedule, the sum of squares is that of

- y - 1 on 420 points of [l, 1], and with a tenth of their weight on [l/8, l], log-uniform;
- there too, the first-order response of y to the rounding of every intermediate on its own: of R
  by 2·10⁻⁴ of its maximum, of every Sⱼ but h by 2·10⁻³ of its own, of the output of each step but
  the last by 5·10⁻³ of itself, all times `noise`;
- 6·log(1 + excess) of y above `cap` or below min(0.3, 0.15σ/l) on 560 points of [l/30, 1.01], as
  it is and with the output of each step but the last off by ±`drift`;
- 4.2·log(1 + excess) of y above 1.33 there, with an Sⱼ off by ±`shift` of its maximum, or R by half
  of that: noise where it is not independent, but of one sign;
- the same of the largest singular value of h(R)·diag(√λ, σ), for λ from 0.45 to 1 and 30 points of
  [l/10, 0.15], with R, S₁ or S₂ off by `coupling` of its maximum between the two directions, and,
  twelve times, all of them by half of that, there and in the small direction, of random signs.

Of an S with a residual the next product takes the error back, as far as it does in `Step`. Each
kind is a mean over its points. Two scalings are free, and are set: Sⱼ(0) = 1 for all but h,
and beta = -1 in the first product of all steps but the first. But an Sⱼ that has a residual itself
has Sⱼ(0) = 0, which leaves it small, and its rounding with it, in small directions (the next
product adds it, so that I can be taken off). Its scale is set by beta = 4.
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
from muon_jax.benchmarks._designs import Addends, Design

_ROUNDING_OF_R, _ROUNDING_OF_S, _ROUNDING_OF_OUTPUT = 2e-4, 2e-3, 5e-3
_MARGIN = 1.05  # a step alone is fitted up to it, lest it explode right above 1


def fit(design: Design) -> tuple[Step, ...]:
    """Returns the steps of `design` at the minimum that is reached from its start.

    A trust region of Gauss and Newton's method leads near, Newton's own to the minimum itself.
    """
    with jax.enable_x64(True), np.errstate(over="ignore"):  # far steps overflow, and are not taken
        function = functools.partial(residuals, design)
        free = np.array(design.start or free_coefficients(greedy(design.addends, design.low)))
        free = _newton(function, _least_squares(function, free, [design.low]), design.low)
        return tuple(map(_rounded, _steps(design.addends, free.tolist(), design.residuals)))


def properties(steps: tuple[Step, ...], low: float) -> dict[str, float]:
    """Returns the slope of y at 0, its least value on [low, 1] and its maximum on [0, 1]."""
    with jax.enable_x64(True):
        y = _map(steps, _grid(low, 1.0, 10_000))
        slope = _map(steps, jnp.array([1e-9]))[0] / 1e-9
        below = _map(steps, _grid(1e-9, low, 10_000))
        numbers = {"slope": slope, "least": y.min(), "maximum": jnp.maximum(y.max(), below.max())}
        return {name: float(number) for name, number in numbers.items()}


def greedy(addends: Addends, low: float) -> tuple[Step, ...]:
    """Returns steps that are each fitted alone: the first on [low, 1], others on what it leaves.

    Each has the least mean square of log y, found on intervals that grow to that in twelve fits,
    from Sⱼ = (I - R)^(2ʲ) and all coefficients of h one.
    """
    steps: list[Step] = []
    highest = 1.0
    for indices in addends:

        def logarithm(free, least, indices=indices):
            y = _map(_steps((indices,), free), _grid(least, _MARGIN, 300))
            return jnp.log(jnp.maximum(y, 1e-3)) / np.sqrt(y.size)

        first, *middle, last = indices
        free = [1.0, *[-2.0] * len(first)]
        free += itertools.chain.from_iterable([1.0, *[0.0] * len(each)] for each in middle)
        free = np.array([*free, 1.0, *[1.0] * len(last), 1.0])
        free = _least_squares(logarithm, free, np.geomspace(0.3, low, 12))
        (step,) = _steps((indices,), free.tolist())
        y = np.asarray(_map((step,), _grid(low, _MARGIN, 300)))
        if steps:  # scaled so that beta is -1, and the step before to enter it
            s = (-step.products[0].addends[0][0]) ** -0.5
            steps[-1] = steps[-1].scaled(1.0, 1.0 / (highest * s))
            step = step.scaled(s, s)
        steps.append(step)
        highest, low = y.max(), y.min() / y.max()
    return tuple(steps)


def residuals(design: Design, free: np.ndarray | jax.Array, low: float) -> jax.Array:
    """Returns all that the module's docstring has the squares of, for `free_coefficients`."""
    steps = _steps(design.addends, free, design.residuals)
    rounding = np.concatenate(
        [
            [_ROUNDING_OF_R, *[_ROUNDING_OF_S] * (len(indices) - 1), _ROUNDING_OF_OUTPUT]
            for indices in design.addends
        ]
    )[:-1]  # the last output's is no matter of the coefficients
    each = np.eye(rounding.size, rounding.size + 1)

    x = jnp.append(_grid(low / 8, low, 70)[:-1], _grid(low, 1.0, 420))
    weights = np.append(np.full(69, 0.1 / 69), np.full(420, 1 / 420)) ** 0.5
    y, response = jax.linearize(lambda errors: _map(steps, x, errors), jnp.zeros(each.shape[1]))
    responses = jax.vmap(response)(design.noise * rounding[:, None] * each)

    x = jnp.append(_grid(low / 30, 1.01, 260), np.linspace(0.02, 1.01, 300))
    bounded = jax.vmap(lambda errors: _map(steps, x, errors))
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
        errors = design.coupling * _couplings(each[~is_output])
        x = _grid(low / 10, 0.15, 30)
        for largest in (1.0, 0.85, 0.7, 0.57, 0.45):
            pairs = jax.vmap(lambda e, y=largest**0.5: _largest_of_pair(steps, y, x, e))(errors)
            terms.append(0.7 * _excess(pairs - 1.33))
    return jnp.concatenate([term.ravel() for term in terms])


def free_coefficients(steps: Sequence[Step]) -> np.ndarray:
    """Returns those that no scaling sets: alpha and beta of each product, and h's diagonal."""
    values = []
    for index, step in enumerate(steps):
        for j, product in enumerate(step.products):
            known = j < step.residuals - 1 or (index and j == 0)
            betas = () if known else (beta for beta, _ in product.addends)
            values += [product.alpha, *betas]
        values.append(step.products[-1].diagonal)
    return np.array(values)


def _rounded(step):
    """The step with eight significant digits."""

    def rounded(value):
        return float(f"{value:.8g}")

    products = []
    for product in step.products:
        addends = tuple((rounded(beta), i) for beta, i in product.addends)
        products.append(Product(rounded(product.alpha), addends, rounded(product.diagonal)))
    return Step(tuple(products), step.residuals)


def _steps(addends, free, residuals=0):
    """The steps of these free coefficients, with the other ones."""
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


def _map(steps, x, errors=None):
    """y(x), with errors of every R and Sⱼ, relative to its maximum, and of every output."""
    errors = np.zeros(_count(steps)) if errors is None else errors
    return _run(steps, x[:, None, None], errors)[:, 0, 0]


def _largest_of_pair(steps, first, second, errors):
    """The largest singular value of h(R)·diag(first, second), with (2, 2) errors as of `_map`."""
    x = jnp.zeros((*second.shape, 2, 2)).at[:, 0, 0].set(first).at[:, 1, 1].set(second)
    x = _run(steps, x, errors)
    total = jnp.sum(x * x, axis=(1, 2))
    determinant = x[:, 0, 0] * x[:, 1, 1] - x[:, 0, 1] * x[:, 1, 0]
    gap = (total - 2 * determinant) * (total + 2 * determinant)
    return jnp.sqrt((total + jnp.sqrt(jnp.maximum(gap, 1e-20))) / 2)


def _couplings(each):
    """Errors of a pair for each row, of R, S₁ and S₂ alone, and twelve of all together."""
    between, small = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[0.0, 0.0], [0.0, 1.0]])
    signs = np.random.default_rng(0).choice([-0.5, 0.5], (2, 12, len(each))) @ each
    mixed = signs[..., None, None] * np.stack([between, small])[:, None, None]
    return np.concatenate([each[:3, :, None, None] * between, mixed.sum(axis=0)])


def _run(steps, x, errors):
    """The result for matrices `(points, k, k)`."""
    errors = iter(errors)
    for step in steps:
        error = _of_largest(next(errors), _product(x, x.mT))
        terms = [_product(x, x.mT) + error]
        for j, product in enumerate(step.products):
            added = sum(beta * terms[i] for beta, i in product.addends)
            term = product.alpha * _product(terms[-1], terms[-1]) + added
            term += product.diagonal * np.eye(x.shape[-1])
            if j < step.residuals:
                term -= step.residual_beta(j) * error
            if product is not step.products[-1]:
                error = _of_largest(next(errors), term)
                term += error
            terms.append(term)
        x = _product(terms[-1], x) * (1.0 + next(errors))
    return x


def _product(a, b):
    """AB, of small matrices in one pass."""
    return (a[..., :, None] * b[..., None, :, :]).sum(axis=-2)


def _of_largest(error, term):
    return error * jnp.max(jnp.abs(term))


def _count(steps):
    return sum(len(step.products) + 1 for step in steps)


def _grid(low, high, points):
    """Log-uniform points; `low` can be traced."""
    return low * (high / low) ** np.linspace(0.0, 1.0, points)


def _excess(amount):
    return 6.0 * jnp.log1p(jax.nn.relu(amount)) / np.sqrt(amount.shape[-1])


def _least_squares(function: Callable, free: np.ndarray, lows: Iterable[float]) -> np.ndarray:
    """Minimizes the sum of squares for one interval after the other."""
    compiled = jax.jit(function)
    jacobian: Any = jax.jit(jax.jacfwd(function))  # scipy's type for it is str
    for low in lows:
        free = scipy.optimize.least_squares(
            compiled, free, jacobian, x_scale="jac", max_nfev=200, args=(low,)
        ).x
    return free


def _newton(function: Callable, free: np.ndarray, low: float) -> np.ndarray:
    """Minimizes the sum of squares from nearby, to what float64 can tell apart."""
    scale = np.abs(free)

    def cost(scaled):
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
