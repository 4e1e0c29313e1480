"""Composed schedules at work, in the standard form or the joined one.

The standard form makes each step X <- h(XXᵀ)·X by itself. Where n is several times m, most of the
work is products with X, three units of m³ per n/m: a Gram matrix and twice that to apply h. The
joined form has one Gram matrix R for several steps, and applies the product of their polynomials:

    Q₁ = h₁(R),  R₂ = Q₁RQ₁,  Q₂ = h₂(R₂),  …,  X <- (…Q₂Q₁)·X.

In half precision three things decide whether that is safe. R must be known better than one number
of 16 bits tells: its rounding hides small singular values, which the polynomials amplify by their
slope at 0. So Q₁R = Q₁R_high + Q₁R_low, where R_low is what the rounding of R left. Q₁R and Q₂Q₁
are full products, since rounding makes them unsymmetric; a mirrored half would not belong to the
other. R₂ is symmetric, and computed by half. And the slopes of the joined steps must not multiply
to more than `_MOST_SLOPE`.
"""

import functools
import math

import jax
import jax.numpy as jnp

from muon_jax._cost import Products
from muon_jax._normalization import EpsMode, gram_gain, inverse_norm, regularize
from muon_jax._pieces import Whole
from muon_jax._schedules import Schedule, Step
from pallas_kernels import syrk, syrkx

type Segment = tuple[Step, ...]

# Of joined steps; NUMERICS.md has the reasons. In float16 "balanced", 465, has no singular value
# above 1.5 in 10,000 random spectra, and all of "accurate", 872, exceeds it in 8 of 2016. No two
# steps are safe in bfloat16, all are in 32 bits.
_MOST_SLOPE = {"bfloat16": 0.0, "float16": 500.0}
# Up to this slope R_low is not needed: without it steps of 158 exceed 1.5 in 20 of 2016 spectra.
_MOST_SLOPE_WITHOUT_RESIDUAL = 100.0


def segments(schedule: Schedule, method: str, dtype: jax.typing.DTypeLike) -> tuple[Segment, ...]:
    """Returns which steps are joined: none in the standard form, in the other as many as is safe.

    Segments are filled from the last step on, whose polynomials are the tamest.
    """
    most = 0.0 if method == "standard" else _MOST_SLOPE.get(jnp.dtype(dtype).name, math.inf)
    result: list[Segment] = []
    for step in reversed(schedule.steps_in(dtype)):
        if result and step.slope * _slope(result[0]) <= most:
            result[0] = (step, *result[0])
        else:
            result.insert(0, (step,))
    return tuple(result)


def products(schedule: Schedule, method: str, dtype: jax.typing.DTypeLike) -> Products:
    """Returns the products of the schedule in that form."""
    parts = segments(schedule, method, dtype)
    steps = [step for part in parts for step in part]
    joins, residuals = len(steps) - len(parts), sum(_has_residual(part, dtype) for part in parts)
    return Products(
        grams=len(parts),
        squares=sum(len(step.products) for step in steps) + joins,  # the R of each step joined
        fulls=2 * joins + residuals,  # Q₁R, Q₂Q₁, and Q₁R_low
        applications=len(parts),
        passes=residuals,
    )


def run(
    x: jax.Array,
    segments: tuple[Segment, ...],
    eps: float | jax.Array,
    eps_mode: EpsMode,
    scale: jax.Array,
    log2_n: int,
    held: Whole,
) -> jax.Array:
    """Returns the result of the steps on X/ν, with its Schatten-4 norm ν = ‖XXᵀ‖_F^½.

    Entries of X are at most n^-¼, which keeps those of h/ν, at most 91/ν, within float16 whatever
    the shape and the spectrum. R = gain²·XXᵀ then has entries up to 2¹⁵, and small ones that are
    not subnormal in float16: it is the Gram matrix of gain·X.

    Args:
        x: shape `(..., m, n)`, `scale` times the caller's.
        segments: the steps, as the function `segments` returns them.
        eps: added to ν, or its least value.
        eps_mode: `"add"` or `"max"`.
        scale: of shape `(...)`.
        log2_n: log₂ n, rounded up.
        held: the matrices whole, or in pieces.
    """
    gain = gram_gain(log2_n)
    for index, segment in enumerate(segments):
        alpha = 1.0 if index else gain**2
        residual = _has_residual(segment, x.dtype)
        gram, *low = held.gram(x, alpha, residual=residual, symmetrize_output=False)
        s = factor = 1.0
        if index == 0:
            s = inverse_norm(x, gram, 0.0, eps_mode, 1.0, "schatten")
            # 1/(ν + eps), both of them times gain·scale.
            s = s / regularize(1.0, eps * gain * scale * s, eps_mode)
            factor = gain
        q = _polynomial(segment, gram, low, s, factor, held)
        x = held.apply(q, x, last=index == len(segments) - 1)
    return x


def _polynomial(segment, gram, low, s, factor, held):
    """factor·s times the polynomial of all steps of the segment, at R = s²·(gram + low)."""
    square, product_of = (
        functools.partial(f, symmetrize_output=False, implementation=held.implementation)
        for f in (syrk, syrkx)
    )
    first, *others = segment
    q = product = first.scaled(s, s if others else s * factor).polynomial(square, gram)
    for step in others:
        gram, low = product_of(q, held.gemm(q, (gram, *low))), []
        q = step.scaled(1.0, factor if step is others[-1] else 1.0).polynomial(square, gram)
        product = held.gemm(q, product)
    return product


def _has_residual(segment, dtype):
    is_joined = len(segment) > 1 and jnp.finfo(dtype).bits == 16
    return is_joined and _slope(segment) > _MOST_SLOPE_WITHOUT_RESIDUAL


def _slope(segment):
    return math.prod(step.slope for step in segment)
