"""The gram form of quintic steps: most products are m × m, few touch the (m, n) matrix.

In exact arithmetic the steps give q₅(R)…q₁(R)·X, where R = XXᵀ and all factors are polynomials of
R, symmetric and commuting. So R is carried from step to step,

    Z = bR + cR²,   T = RZ + aR,   R <- TZ + aT,

and the last factor, Q = aI + Z, is multiplied by those before it, Q <- ZQ + aQ: four symmetric
products a step, and X <- QX in the end. In half precision Q, whose entries grow with the
amplification of the smallest singular values, is rounded relative to its largest entry, and R gets
negative eigenvalues that the polynomials amplify. A restart, X <- QX and R = XXᵀ anew, repairs
both. All products are mirrored, or their halves drift apart.

Reference: `Gram Newton–Schulz <https://github.com/Dao-AILab/gram-newton-schulz>`_, 2026.
"""

import functools
import math

import jax
import numpy as np

from muon_jax._iteration.cost import Products
from muon_jax._iteration.normalization import EpsMode, gram_gain, normalize
from muon_jax._iteration.operand import Whole
from muon_jax._iteration.precision import roundoff
from muon_jax._iteration.recipes import Quintics
from pallas_kernels import syrkx

type _Triple = tuple[float, ...]

# What a segment's noise may be, over what the following steps endure beyond its largest singular
# value: at 7.7 "aol_nvidia" had one of 1.7 on 10,000 random spectra (NUMERICS.md, section 3.5). Its
# most is 1.2: "polar_express" had one of 1.7 at 1.3.
_NOISE_TO_ROOM, _MOST_NOISE = 7.0, 1.2
# The rounding of this form comes to as much as 6u, of the standard one to 2u. If the error of the
# map itself (RMS for σ in [0.01, 1]) is more than so many u, the error of both together is larger
# by less than a tenth (NUMERICS.md, section 3.5).
_LEAST_ERROR = 8.0


@np.errstate(over="ignore", invalid="ignore")  # of steps that diverge
def loses_accuracy(quintics: Quintics, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether rounding makes the form less accurate than the standard one."""
    u, sigma = roundoff(dtype), np.geomspace(0.01, 1, 1000)
    for step in _steps(quintics):
        sigma = _map(step, sigma)
    return u > 2**-12 and bool(np.sqrt(np.mean((sigma - 1) ** 2)) < _LEAST_ERROR * u)


def segments(quintics: Quintics, dtype: jax.typing.DTypeLike) -> list[list[_Triple]]:
    """Returns the steps between restarts: as few segments as are safe, the worst as good as can be.

    The rounding of R, u‖R‖, is amplified by the square of a segment's slope ∏a. Its noise is
    (∏a·σ)²·u, σ being the largest singular value where the segment begins. It is bounded by the
    room that there is above the largest one where the segment ends.
    """
    steps = _steps(quintics)
    sigma, largest = np.linspace(0, 1, 1001), [1.0]
    for step in steps:
        sigma = abs(_map(step, sigma))
        largest.append(float(sigma.max()))
    u = roundoff(dtype)
    # For each number of steps the number of segments, the largest noise, and where they begin.
    best: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for stop in range(1, len(steps) + 1):
        allowed = _NOISE_TO_ROOM * _room(steps[stop:], largest[stop])
        candidates = []
        for start in reversed(range(stop)):
            slope = largest[start] * math.prod(a for a, _, _ in steps[start:stop])
            noise = u * slope * slope
            if noise <= allowed or start == stop - 1:
                count, others, starts = best[start]
                candidates.append((count + 1, max(others, noise), (*starts, start)))
        best.append(min(candidates, key=lambda candidate: candidate[:2]))
    starts = best[-1][2]
    return [steps[i:j] for i, j in zip(starts, (*starts[1:], len(steps)), strict=True)]


@np.errstate(over="ignore", invalid="ignore")  # of steps that diverge
def _room(steps: list[_Triple], largest: float) -> float:
    """How far above `largest`, relatively, singular values may be that `steps` take to 1.5."""
    room = np.linspace(0.0, _MOST_NOISE / _NOISE_TO_ROOM, 101)
    sigma = largest * (1.0 + room)
    for step in steps:
        sigma = abs(_map(step, sigma))
    return float(room[sigma <= 1.5].max(initial=0.0))


def _steps(quintics: Quintics) -> list[_Triple]:
    rows, first, last, _ = quintics
    return [*(rows * last if len(rows) == 1 else rows[first:last])]


@np.errstate(over="ignore", invalid="ignore")  # of steps that diverge
def _map(step: _Triple, sigma: np.ndarray) -> np.ndarray:
    a, b, c = step
    return a * sigma + b * sigma**3 + c * sigma**5


def products(quintics: Quintics, dtype: jax.typing.DTypeLike) -> Products:
    """Returns the products of these steps."""
    parts = segments(quintics, dtype)
    num_steps = sum(map(len, parts))
    return Products(
        grams=len(parts),
        # The last step of a segment needs no T and no new R, and its Q is no further product.
        squares=num_steps,
        applications=len(parts),
        mixed=3 * (num_steps - len(parts)),
    )


def run(
    x: jax.Array,
    quintics: Quintics,
    eps: float | jax.Array,
    eps_mode: EpsMode,
    scale: jax.Array,
    preconditioning: str,
    log2_n: int,
    held: Whole,
) -> jax.Array:
    """Returns the result of the steps on X over its norm; arguments as for `_composed.run`."""
    gain = gram_gain(log2_n)
    (gram,) = held.gram(x, gain**2)
    x, gram, s, factor = normalize(
        x, gram, gain, eps, eps_mode, scale, preconditioning, held.spread
    )
    product = functools.partial(syrkx, implementation=held.implementation)
    parts = segments(quintics, x.dtype)
    for index, triples in enumerate(parts):
        if index:
            (gram,), s, factor = held.gram(x), 1.0, 1.0
        q = _segment(product, gram, triples, s, factor)
        x = held.apply(q, x, last=index == len(parts) - 1)
    return x


def _segment(syrkx, gram, triples, s, factor):
    """factor times the product of the steps' factors, from R = s²·gram on.

    All are products of one kind, for one program: R² is R·Rᵀ by `syrkx`, and has R for an addend.
    """
    r, scale, factors = gram, s**2, []
    *others, (a, b, c) = triples
    for a_i, b_i, c_i in others:
        z = syrkx(r, r, r, alpha=c_i * scale**2, beta=b_i * scale)
        t = syrkx(r, z, r, alpha=scale, beta=a_i * scale)
        r, scale = syrkx(t, z, t, beta=a_i), 1.0
        factors.append((z, a_i))
    alpha, beta = factor * c * scale**2, factor * b * scale
    q = syrkx(r, r, r, alpha=alpha, beta=beta, diagonal=factor * a)
    for z, a_i in reversed(factors):
        q = syrkx(z, q, q, beta=a_i)
    return q
