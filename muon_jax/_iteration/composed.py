"""Composed schedules at work: each step a Gram matrix, products of m × m matrices, one application.

    R = XXᵀ,  Q = h(R),  X <- QX.

Each step but the first forms R from the rounded X, so rounding does not add up between steps.
Within a step rounding does add up: rounding R hides small singular values, which h amplifies by its
slope at 0. Steep steps therefore keep the residuals of R and of the first products
(`Step.residual_betas`), and have noise, which keeps rounding errors from adding up (`Step.noisy`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from muon_jax._iteration.cost import Products
from muon_jax._iteration.normalization import Normalization
from muon_jax._iteration.operand import WholeMatrices
from muon_jax._iteration.steps import Step


def products_of_composed(steps: tuple[Step, ...]) -> Products:
    """Returns the products of these steps."""
    return Products(
        grams=len(steps),
        squares=sum(len(step.products) for step in steps),
        applications=len(steps),
    )


def run_composed(
    x: Any, steps: tuple[Step, ...], normalization: Normalization, operand: WholeMatrices
) -> Any:
    """Returns the result of the steps on X/ν, with the Schatten-4 norm ν = ‖XXᵀ‖_F^½.

    - Entries of X are at most n^-¼. So entries of h/ν, at most 318/ν, are within float16 for every
      shape and spectrum.
    - R = gain²·XXᵀ is the Gram matrix of gain·X. Its entries are at most 2¹⁵, and its small entries
      are not subnormal in float16.

    Args:
        x: shape `(..., m, n)`, or several stacks, as `operand` takes them.
        steps: those for the dtype of `x`.
        normalization: of X; its norm is the Schatten-4 norm in any case.
        operand: the matrices whole, or in pieces.
    """
    gain, (dtype, *_) = normalization.gain, (leaf.dtype for leaf in jax.tree.leaves(x))
    for index, step in enumerate(steps):
        alpha = 1.0 if index else gain**2
        residual = bool(step.residual_betas) and jnp.finfo(dtype).bits == 16
        gram, *low = operand.gram(x, alpha, residual=residual, symmetrize_output=False)
        if index == 0:
            s = normalization.inverse_schatten_norm(gram)
            step = step.scaled(s, s * gain)
        q = step.polynomial(
            gram, *low, symmetrize_output=False, implementation=operand.implementation
        )
        x = operand.apply(q, x, last=index == len(steps) - 1)
    return x
