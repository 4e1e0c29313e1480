"""The gram form of quintic steps: most products are m × m, few touch the (m, n) matrix.

In exact arithmetic the steps give q₅(R)…q₁(R)·X, where R = XXᵀ. All factors are polynomials of R,
symmetric and commuting. So R is carried from step to step,

    Z = bR + cR²,   T = RZ + aR,   R <- TZ + aT,

and the last factor, Q = aI + Z, is multiplied by the factors before it, Q <- ZQ + aQ. That is four
symmetric products a step, and one application X <- QX in the end.

In 16 bits two things go wrong. Q grows with the amplification of the smallest singular values, and
is rounded relative to its largest entry. R gets negative eigenvalues, which the polynomials
amplify. A restart, X <- QX and then R = XXᵀ, repairs both. The steps between two restarts are a
segment. All products are mirrored, or their halves would drift apart.

Reference: `Gram Newton–Schulz <https://github.com/Dao-AILab/gram-newton-schulz>`_, 2026.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from muon_jax._iteration.cost import Products
from muon_jax._iteration.noise import noise_addend
from muon_jax._iteration.normalization import Normalization
from muon_jax._iteration.operand import WholeMatrices
from muon_jax._iteration.precision import roundoff
from muon_jax._iteration.steps import Schedule, Step
from pallas_kernels import syrkx

type _Segments = tuple[tuple[Step, ...], ...]

# The largest noise of a segment, over the room that the following steps leave above its largest
# singular value. At 7.7 "aol_nvidia" had a singular value of 1.7 on 10,000 random spectra
# (docs/numerics.md, section 3.5). The noise is at most 0.5, for matrices whose rounding errors add
# up: at 0.7 and more a search found singular values of 1.53 to 4.4.
_NOISE_TO_ROOM, _MOST_NOISE = 7.0, 0.5
# The rounding of this form is at most 6u, of the standard form 2u. Where the error of the map
# itself (RMS for σ in [0.01, 1]) is more than this many u, the error of both together grows by less
# than a tenth (docs/numerics.md, section 3.5).
_LEAST_ERROR = 8.0


@np.errstate(over="ignore", invalid="ignore")  # of steps that diverge
def loses_accuracy(schedule: Schedule, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether rounding makes the form less accurate than the standard one."""
    u, sigma = roundoff(dtype), np.geomspace(0.01, 1, 1000)
    for step in schedule.steps:
        sigma = _map(step, sigma)
    return u > 2**-12 and bool(np.sqrt(np.mean((sigma - 1) ** 2)) < _LEAST_ERROR * u)


def segments(schedule: Schedule, dtype: jax.typing.DTypeLike) -> _Segments:
    """Returns the steps between restarts.

    - There are as few segments as are safe.
    - Of equally few, the worst segment is as good as can be.

    A segment amplifies the rounding of R, u‖R‖, by the square of its slope ∏a. Its noise is
    (∏a·σ)²·u, with the largest singular value σ where the segment begins. The noise is bounded by
    the room above the largest singular value where the segment ends.

    Steps that have noise are a segment each: with two in the last, a search found 1.52.
    """
    steps = schedule.steps_in(dtype)
    if steps[0].noisy:
        return tuple((step,) for step in steps)
    return _segments(steps, roundoff(dtype))


@functools.lru_cache(maxsize=256)
def _segments(steps: tuple[Step, ...], u: float) -> _Segments:
    sigma, largest = np.linspace(0, 1, 1001), [1.0]
    for step in steps:
        sigma = abs(_map(step, sigma))
        largest.append(float(sigma.max()))
    # For each number of steps the number of segments, the largest noise, and where they begin.
    best: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for stop in range(1, len(steps) + 1):
        allowed = _NOISE_TO_ROOM * _room(steps[stop:], largest[stop])
        candidates = []
        for start in reversed(range(stop)):
            slope = largest[start] * math.prod(step.triple[0] for step in steps[start:stop])
            noise = u * slope * slope
            if noise <= allowed or start == stop - 1:
                count, others, starts = best[start]
                candidates.append((count + 1, max(others, noise), (*starts, start)))
        best.append(min(candidates, key=lambda candidate: candidate[:2]))
    starts = best[-1][2]
    return tuple(steps[i:j] for i, j in zip(starts, (*starts[1:], len(steps)), strict=True))


@np.errstate(over="ignore", invalid="ignore")  # of steps that diverge
def _room(steps: tuple[Step, ...], largest: float) -> float:
    """How far above `largest`, relatively, singular values may be that `steps` take to 1.5."""
    room = np.linspace(0.0, _MOST_NOISE / _NOISE_TO_ROOM, 101)
    sigma = largest * (1.0 + room)
    for step in steps:
        sigma = abs(_map(step, sigma))
    return float(room[sigma <= 1.5].max(initial=0.0))


@np.errstate(over="ignore", invalid="ignore")  # of steps that diverge
def _map(step: Step, sigma: np.ndarray) -> np.ndarray:
    """The singular values after a step."""
    a, b, c = map(float, step.triple)
    return a * sigma + b * sigma**3 + c * sigma**5


def products_of_gram_form(schedule: Schedule, dtype: jax.typing.DTypeLike) -> Products:
    """Returns the products of these steps."""
    parts = segments(schedule, dtype)
    num_steps = sum(map(len, parts))
    return Products(
        grams=len(parts),
        # The last step of a segment needs no T and no new R, and its Q is no further product.
        squares=num_steps,
        applications=len(parts),
        mixed=3 * (num_steps - len(parts)),
    )


def run_gram_form(
    x: Any, schedule: Schedule, normalization: Normalization, operand: WholeMatrices
) -> Any:
    """Returns the result of the steps on X over its norm.

    Args:
        x: shape `(..., m, n)`, or several stacks, as `operand` takes them.
        schedule: quintic steps, none of them traced.
        normalization: of X.
        operand: the matrices whole, or sharded.
    """
    (gram,) = operand.gram(x, normalization.gain**2)
    x, gram, s, factor = normalization(x, gram, operand.spread)
    product = functools.partial(syrkx, implementation=operand.implementation)
    parts = segments(schedule, gram.dtype)
    for index, steps in enumerate(parts):
        if index:
            (gram,), s, factor = operand.gram(x), 1.0, 1.0
        q = _segment(product, gram, steps, s, factor)
        x = operand.apply(q, x, last=index == len(parts) - 1)
    return x


def _segment(
    syrkx: Callable[..., jax.Array],
    gram: jax.Array,
    steps: tuple[Step, ...],
    s: float | jax.Array,
    factor: float | jax.Array,
) -> jax.Array:
    """factor times the product of the steps' factors, from R = s²·gram on; shape `(..., m, m)`.

    All products are of one kind, for one program: R² is R·Rᵀ by `syrkx`, with R for an addend.
    """
    r, scale, factors = gram, s**2, []
    *others, (a, b, c) = (step.triple for step in steps)
    for a_i, b_i, c_i in others:
        z = syrkx(r, r, r, alpha=c_i * scale**2, beta=b_i * scale)
        t = syrkx(r, z, r, alpha=scale, beta=a_i * scale)
        r, scale = syrkx(t, z, t, beta=a_i), 1.0
        factors.append((z, a_i))
    c_matrix, beta = r, factor * b * scale
    if steps[-1].noisy:
        amplitude, noise = noise_addend(r)
        c_matrix, beta = (r, noise), (beta, amplitude * factor * a)
    q = syrkx(r, r, c_matrix, alpha=factor * c * scale**2, beta=beta, diagonal=factor * a)
    for z, a_i in reversed(factors):
        q = syrkx(z, q, q, beta=a_i)
    return q
