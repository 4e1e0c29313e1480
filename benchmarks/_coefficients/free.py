"""The coefficients of composed schedules that a fit is free to change.

Scalings of an Sⱼ change no result, and are fixed:

- Sⱼ(0) = 1 for all Sⱼ but h, and the first `vanishing` ones of the first step.
- These have Sⱼ(0) = 0, which keeps Sⱼ and its rounding small in small directions. The next product
  adds Sⱼ, so I can be taken off. beta = 4 in the first product fixes the scale of S₁, and that of
  S₂ in the second.
- beta = -1 in the first product of all steps but the first.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks._coefficients.designs import Design
from muon_jax._iteration.steps import Product, Step


def free_coefficients(design: Design, steps: Sequence[Step]) -> np.ndarray:
    """Returns the free coefficients of each step, one after the other: shape `(coefficients,)`.

    They are, in the order of the products, alphas and betas; the diagonal of h; the betas of
    residuals.
    """
    values = []
    for index, step in enumerate(steps):
        for j, product in enumerate(step.products, 1):
            is_known = _known_beta(design, index, j) is not None
            betas = () if is_known else (beta for beta, _ in product.addends)
            values += [product.alpha, *betas]
        values += [step.products[-1].diagonal, *step.residual_betas]
    return np.array(values)


def steps_of_free(design: Design, free: Iterable[Any]) -> tuple[Step, ...]:
    """Returns the steps with these free coefficients: the inverse of `free_coefficients`."""
    values, steps = iter(free), []
    for index, (indices, residuals) in enumerate(
        zip(design.addends, design.residuals, strict=True)
    ):
        products = []
        vanishing = 0 if index else design.vanishing
        zero = [0.0] * (vanishing + 1) + [1.0] * len(indices)  # Sⱼ(0)
        for j, added in enumerate(indices, 1):
            alpha, known = next(values), _known_beta(design, index, j)
            pairs = tuple((known or next(values), i) for i in added)
            at_zero = alpha * zero[j - 1] ** 2 + sum(beta * zero[i] for beta, i in pairs)
            diagonal = next(values) if j == len(indices) else zero[j] - at_zero
            products.append(Product(alpha, pairs, diagonal))
        betas = tuple(next(values) for _ in range(residuals))
        steps.append(Step(tuple(products), betas, None if index else design.noisy))
    return tuple(steps)


def to_eight_digits(step: Step) -> Step:
    """Returns the step with eight significant digits."""

    def rounded(value: float | jax.Array) -> float:
        return float(f"{value:.8g}")

    products = tuple(
        Product(
            rounded(product.alpha),
            tuple((rounded(beta), i) for beta, i in product.addends),
            rounded(product.diagonal),
        )
        for product in step.products
    )
    return Step(products, tuple(map(rounded, step.residual_betas)), step.noisy)


def _known_beta(design: Design, index: int, j: int) -> float | None:
    """The beta that is fixed in product j of a step, counted from 1, or None."""
    if index:
        return -1.0 if j == 1 else None
    return 4.0 if j <= design.vanishing else None
