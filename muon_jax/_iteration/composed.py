"""Composed schedules at work: each step a Gram matrix, products of m × m matrices, one application.

    R = XXᵀ,  Q = h(R),  X <- QX.

All steps but the first form R from the X that there is, so that rounding does not add up. Within a
step it does: the rounding of R hides small singular values, which h amplifies by its slope at 0.
Steep steps have R, and the first of what is made of it, with residuals (`Step.residual_beta`).
"""

import jax
import jax.numpy as jnp

from muon_jax._iteration.cost import Products
from muon_jax._iteration.normalization import EpsMode, gram_gain, inverse_norm, regularize
from muon_jax._iteration.operand import Whole
from muon_jax._iteration.steps import Step


def products(steps: tuple[Step, ...]) -> Products:
    """Returns the products of these steps."""
    return Products(
        grams=len(steps),
        squares=sum(len(step.products) for step in steps),
        applications=len(steps),
    )


def run(
    x: jax.Array,
    steps: tuple[Step, ...],
    eps: float | jax.Array,
    eps_mode: EpsMode,
    scale: jax.Array,
    log2_n: int,
    held: Whole,
) -> jax.Array:
    """Returns the result of the steps on X/ν, with its Schatten-4 norm ν = ‖XXᵀ‖_F^½.

    Entries of X are at most n^-¼, which keeps those of h/ν, at most 318/ν, within float16
    whatever the shape and the spectrum. R = gain²·XXᵀ then has entries up to 2¹⁵, and small ones
    that are not subnormal in float16: it is the Gram matrix of gain·X.

    Args:
        x: shape `(..., m, n)`, `scale` times the caller's.
        steps: those for the dtype of `x`.
        eps: added to ν, or its least value.
        eps_mode: `"add"` or `"max"`.
        scale: of shape `(...)`.
        log2_n: log₂ n, rounded up.
        held: the matrices whole, or in pieces.
    """
    gain = gram_gain(log2_n)
    for index, step in enumerate(steps):
        alpha = 1.0 if index else gain**2
        residual = step.residuals > 0 and jnp.finfo(x.dtype).bits == 16
        gram, *low = held.gram(x, alpha, residual=residual, symmetrize_output=False)
        if index == 0:
            s = inverse_norm(x, gram, 0.0, eps_mode, 1.0, "schatten")
            # 1/(ν + eps), both of them times gain·scale.
            s = s / regularize(1.0, eps * gain * scale * s, eps_mode)
            step = step.scaled(s, s * gain)
        q = step.polynomial(gram, *low, symmetrize_output=False, implementation=held.implementation)
        x = held.apply(q, x, last=index == len(steps) - 1)
    return x
