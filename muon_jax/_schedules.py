"""Composed schedules: one to three steps X <- h(XXᵀ)·X of high degree, in place of five quintics.

A polynomial h of degree 2ᵏ is evaluated by k symmetric products, squares with at most two addends:

    S₀ = R,   Sⱼ = αⱼ·Sⱼ₋₁² + Σᵢ βⱼᵢ·Sᵢ + δⱼ·I  (some i < j - 1),   h(R) = Sₖ.

So a step costs a Gram matrix, k products and the application of h, where a quintic step costs a
Gram matrix, one product and the application. On the square matrix of size m, in units of one
symmetric product, that is 10 for "fast", 14 for "balanced" and 17 for "accurate", against 20 for
five quintics; on wide matrices the three products with X weigh more, and the schedules save more.

The coefficients are ours: fitted jointly by nonlinear least squares in float64, for singular values
of [l, 1] over the Schatten-4 norm, together with the response to the rounding of every
intermediate. `python -m muon_jax.benchmarks coefficients` makes them anew. All |Sⱼ| ≤ 1.01 and
h ≤ 91 on [0, 1], R < 5 after the first step, so that nothing leaves float16.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Product:
    """One symmetric product, Sⱼ = alpha·Sⱼ₋₁² + Σ beta·Sᵢ + diagonal·I; S₀ is R.

    `addends` are the pairs (beta, i).
    """

    alpha: float | jax.Array
    addends: tuple[tuple[float | jax.Array, int], ...]
    diagonal: float | jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """The polynomial h of one step X <- h(XXᵀ)·X, of degree 2ᵏ for k products."""

    products: tuple[Product, ...]

    @property
    def slope(self) -> float:
        """h(0), by which the step multiplies the smallest singular values."""
        return self.terms(0.0)[-1]

    def terms(self, eigenvalue: Any) -> list[Any]:
        """Returns S₀, S₁, …, h for an eigenvalue of R, or an array of them."""
        terms = [eigenvalue]
        for p in self.products:
            added = sum(beta * terms[i] for beta, i in p.addends)
            terms.append(p.alpha * terms[-1] ** 2 + added + p.diagonal)
        return terms

    def scaled(self, s: float | jax.Array, factor: float | jax.Array) -> "Step":
        """Returns the step with the polynomial factor·h(s²·R), which needs no s²·R.

        `s` and `factor` are scalars, or one for each matrix, of shape `(...)`.
        """
        products = []
        for product in self.products:
            out = factor if product is self.products[-1] else 1.0
            products.append(
                Product(
                    out * product.alpha * (1.0 if products else s**4),
                    tuple((out * beta * (1.0 if i else s**2), i) for beta, i in product.addends),
                    out * product.diagonal,
                )
            )
        return Step(tuple(products))

    def polynomial(self, syrk: Callable[..., jax.Array], gram: jax.Array) -> jax.Array:
        """h(R).

        Args:
            syrk: `pallas_kernels.syrk`, or a function of its arguments.
            gram: R, of shape `(..., m, m)`.
        """
        terms = [gram]
        for product in self.products:
            terms.append(
                syrk(
                    terms[-1],
                    tuple(terms[i] for _, i in product.addends),
                    alpha=product.alpha,
                    beta=tuple(beta for beta, _ in product.addends),
                    diagonal=product.diagonal,
                )
            )
        return terms[-1]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A composed schedule: steps to be run in this order, on X over its Schatten-4 norm.

    Attributes:
        name: what `ns_coeffs` calls it.
        dtype: of 16 bits, its own.
        steps: in float16 and in 32 bits or more.
        bfloat16_steps: those for the rounding of bfloat16.
    """

    name: str
    dtype: str
    steps: tuple[Step, ...]
    bfloat16_steps: tuple[Step, ...]

    def steps_in(self, dtype: jax.typing.DTypeLike) -> tuple[Step, ...]:
        """Returns the steps for products in `dtype`.

        Raises:
            ValueError: the schedule is not safe in `dtype`.
        """
        name, bits = jnp.dtype(dtype).name, jnp.finfo(dtype).bits
        if bits < 32 and name not in ("float16", "bfloat16"):
            raise ValueError(
                f"ns_coeffs={self.name!r} is unsafe in {name}: its rounding can make singular"
                " values exceed 1.5. It needs float16 or bfloat16, or 32 bits or more: pass"
                " dtype='auto' (ns_dtype='auto' to muon)"
            )
        return self.bfloat16_steps if name == "bfloat16" else self.steps


# Each with its degrees, the interval [l, 1] that it was fitted on, its slope at 0 and its maximum.
# All are safe: no singular value exceeded 1.37 on 12,000 random spectra (m = 48, condition to
# 1e9, low rank, clusters, spikes, repeated rows). bfloat16 takes polynomials of its own, less steep
# at 0, so that its rounding does not grow: with those for float16, 29 of 4032 spectra exceed 1.5 in
# bfloat16 under "balanced", 821 of 2016 under "fast".
_FAST = Schedule(  # (128), l = 0.01, slope 91, maximum 1.17
    "fast",
    dtype="float16",
    steps=(
        Step(
            (
                Product(3.10102, ((-3.9322106, 0),), 1.0),
                Product(2.0060467, (), -1.0060467),
                Product(1.3600454, ((-0.38754839, 0), (0.16119032, 1)), -0.52123574),
                Product(1.9998175, (), -0.99981751),
                Product(0.50377914, ((-0.329832, 2), (0.80957698, 4)), 0.016475879),
                Product(1.2105729, (), -0.21057294),
                Product(65.394399, ((8.399809, 2), (10.700642, 5)), 6.0671014),
            )
        ),
    ),
    bfloat16_steps=(  # (8, 8), l = 0.004, slope 142, maximum 1.24
        Step(
            (
                Product(5.1345373, ((-5.6884683, 0),), 1.0),
                Product(1.3378393, ((0.17487174, 0),), -0.33783933),
                Product(25.22406, ((-0.19266418, 1),), 0.66853204),
            )
        ),
        Step(
            (
                Product(0.15549894, ((-1.0, 0),), 1.0),
                Product(1.1925773, ((-0.018477467, 0),), -0.19257725),
                Product(4.1254999, ((0.60135248, 1),), 0.8148391),
            )
        ),
    ),
)

_BALANCED = Schedule(  # (16, 16), l = 0.002, slope 465, maximum 1.21
    "balanced",
    dtype="float16",
    steps=(
        Step(
            (
                Product(5.7078558, ((-6.2862502, 0),), 1.0),
                Product(1.7278047, ((0.44111419, 0),), -0.72780474),
                Product(1.3538946, ((0.39449156, 0),), -0.35389462),
                Product(48.050345, ((0.90614708, 2),), 1.3209006),
            )
        ),
        Step(
            (
                Product(0.18248843, ((-1.0, 0),), 1.0),
                Product(1.398959, ((0.075274592, 0),), -0.39895896),
                Product(1.4295508, ((-0.59296076, 1),), 0.16340995),
                Product(6.9650775, ((1.9540749, 1),), 0.32578172),
            )
        ),
    ),
    bfloat16_steps=(  # l = 0.0025, slope 342, maximum 1.20
        Step(
            (
                Product(5.9595379, ((-6.4668959, 0),), 1.0),
                Product(1.7115971, ((0.33367452, 0),), -0.71159708),
                Product(1.3019412, ((0.26169684, 0),), -0.30194122),
                Product(36.311702, ((1.0725422, 2),), 1.5064131),
            )
        ),
        Step(
            (
                Product(0.19182692, ((-1.0, 0),), 1.0),
                Product(1.3691002, ((0.079322899, 0),), -0.36910021),
                Product(1.3672986, ((-0.53640026, 1),), 0.1691017),
                Product(6.5467358, ((1.8121093, 1),), 0.43947212),
            )
        ),
    ),
)

_ACCURATE_STEPS = (  # (8, 8, 4), l = 0.001, slope 872, maximum 1.16
    Step(
        (
            Product(4.5459842, ((-5.355171, 0),), 1.0),
            Product(1.3177695, ((0.1211263, 0),), -0.31776946),
            Product(27.217065, ((0.33784056, 1),), 0.27240709),
        )
    ),
    Step(
        (
            Product(0.16232818, ((-1.0, 0),), 1.0),
            Product(1.3845343, ((0.049618516, 0),), -0.3845343),
            Product(9.3209737, ((-0.18158025, 1),), 0.59465418),
        )
    ),
    Step(
        (
            Product(0.22631546, ((-1.0, 0),), 1.0),
            Product(2.2432328, ((-0.13655309, 0),), 0.9742584),
        )
    ),
)
_ACCURATE = Schedule(
    "accurate", dtype="bfloat16", steps=_ACCURATE_STEPS, bfloat16_steps=_ACCURATE_STEPS
)

SCHEDULES = {schedule.name: schedule for schedule in (_FAST, _BALANCED, _ACCURATE)}
