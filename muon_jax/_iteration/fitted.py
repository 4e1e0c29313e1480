"""Composed schedules: one to three steps X <- h(XXᵀ)·X of high degree, in place of five quintics.

A polynomial h of degree 2ᵏ is evaluated by k symmetric products, squares with a few addends:

    S₀ = R,   Sⱼ = αⱼ·Sⱼ₋₁² + Σᵢ βⱼᵢ·Sᵢ + δⱼ·I  (some i < j),   h(R) = Sₖ.

So a step costs a Gram matrix, k products and the application of h, where a quintic step costs a
Gram matrix, one product and the application. On the square matrix of size m, in units of one
symmetric product, that is 10 for "fast", 12 for "balanced" and 15 for "accurate", against 20 for
five quintics; on wide matrices the three products with X weigh more, and the schedules save more.

The coefficients are ours: fitted jointly by nonlinear least squares in float64, for singular values
of [l, 1] over the Schatten-4 norm, together with the response to the rounding of every
intermediate. `python -m muon_jax.benchmarks coefficients` makes them anew. All |Sⱼ| ≤ 2 and
h ≤ 318 on [0, 1], R < 6 after the first step, so that nothing leaves float16.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import syrk, syrk_with_residual


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
    """The polynomial h of one step X <- h(XXᵀ)·X, of degree 2ᵏ for k products.

    Of the first S, as many as `residuals` says, 16 bits need the residual too: what is left of S
    when it is rounded. See `residual_beta`.
    """

    products: tuple[Product, ...]
    residuals: int = 0

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

    def residual_beta(self, j: int) -> float | jax.Array:
        """Returns the coefficient of the residual of Sⱼ in Sⱼ₊₁: dSⱼ₊₁/dSⱼ where R is 0.

        So Sⱼ₊₁ is as if Sⱼ had twice the digits wherever R is small, which is where they matter,
        and no product is needed for that.
        """
        product, at_zero = self.products[j], Step(self.products[:j]).terms(0.0)[-1]
        beta = sum(beta for beta, i in product.addends if i == j)
        return 2 * product.alpha * at_zero + beta

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
        return Step(tuple(products), self.residuals)

    def polynomial(
        self, gram: jax.Array, residual: jax.Array | None = None, **options: Any
    ) -> jax.Array:
        """h(R).

        Args:
            gram: R, of shape `(..., m, m)`.
            residual: of R, where the step has residuals and the dtype has 16 bits.
            options: of `pallas_kernels.syrk`.
        """
        terms = [gram]
        for j, product in enumerate(self.products):
            addends = [(beta, terms[i]) for beta, i in product.addends]
            if residual is not None:
                addends.append((self.residual_beta(j), residual))
            arguments = (terms[-1], tuple(c_matrix for _, c_matrix in addends))
            options |= {
                "alpha": product.alpha,
                "beta": tuple(beta for beta, _ in addends),
                "diagonal": product.diagonal,
            }
            if residual is not None and j + 1 < self.residuals:
                term, residual = syrk_with_residual(*arguments, **options)
            else:
                term, residual = syrk(*arguments, **options), None
            terms.append(term)
        return terms[-1]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A composed schedule: steps to be run in this order, on X over its Schatten-4 norm.

    Attributes:
        name: what `ns_coeffs` calls it.
        steps: in float16 and in 32 bits or more.
        bfloat16_steps: those for the rounding of bfloat16.
    """

    name: str
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
# No singular value exceeded 1.34 on 14,000 random spectra (m = 48, condition to
# 1e9, low rank, clusters, spikes, rows that repeat, have two lengths or are sums of few signs).
# bfloat16 takes polynomials of its own, less steep at 0, so that its rounding does not grow: with
# those for float16, 480 of 2016 spectra exceed 1.5 in bfloat16 under "fast", 813 under "balanced",
# 230 under "accurate".
_FAST = Schedule(  # (128), l = 0.01, slope 91, maximum 1.17
    "fast",
    steps=(
        Step(
            (
                Product(3.1052428, ((-3.9363297, 0),), 1.0),
                Product(2.0041144, (), -1.0041144),
                Product(1.3670261, ((-0.38550149, 0), (0.15459846, 1)), -0.52162455),
                Product(1.9997467, (), -0.99974672),
                Product(0.50650422, ((-0.32946153, 2), (0.80892581, 4)), 0.014031493),
                Product(1.2107756, (), -0.21077557),
                Product(65.909816, ((8.4328706, 2), (10.730156, 5)), 6.0619874),
            ),
            residuals=1,
        ),
    ),
    bfloat16_steps=(  # (8, 8), l = 0.004, slope 141, maximum 1.24
        Step(
            (
                Product(5.1526525, ((-5.7403688, 0),), 1.0),
                Product(1.4113181, ((0.20109088, 0),), -0.41131813),
                Product(25.115161, ((-0.14972012, 1),), 0.67045843),
            ),
            residuals=1,
        ),
        Step(
            (
                Product(0.15206744, ((-1.0, 0),), 1.0),
                Product(1.1611063, ((-0.042022181, 0),), -0.16110629),
                Product(4.1085577, ((0.57993094, 1),), 0.82246562),
            ),
        ),
    ),
)

_BALANCED = Schedule(  # (512), l = 0.006, slope 318, maximum 1.14
    "balanced",
    steps=(
        Step(
            (
                Product(-3.4924588, ((4.0, 0),), 0.0),
                Product(-3.1089363, ((4.0, 1),), 0.0),
                Product(2.0524735, ((-3.8139995, 2),), 1.0),
                Product(2.0027632, (), -1.0027632),
                Product(1.0431912, ((0.80766416, 4),), -0.85085538),
                Product(0.61858193, ((-0.32683381, 3), (0.99573976, 5)), -0.28748787),
                Product(2.2996498, ((-0.60421386, 3), (0.4608366, 5)), -1.1562725),
                Product(
                    0.52956333,
                    ((-0.05127648, 0), (-0.13858826, 1), (0.11735758, 3), (0.75273268, 7)),
                    -0.3996536,
                ),
                Product(
                    121.61318,
                    (
                        (-7.6745307, 0),
                        (-17.36896, 1),
                        (22.983931, 3),
                        (28.307565, 6),
                        (8.3071747, 7),
                        (94.424845, 8),
                    ),
                    42.142067,
                ),
            ),
            residuals=3,
        ),
    ),
    bfloat16_steps=(  # (16, 16), l = 0.003, slope 299, maximum 1.17
        Step(
            (
                Product(5.8162066, ((-6.4671937, 0),), 1.0),
                Product(1.6699444, ((0.2459221, 0),), -0.66994444),
                Product(1.2689888, ((0.15615165, 0),), -0.26898883),
                Product(35.06212, ((-0.22938222, 2),), 0.92611686),
            ),
        ),
        Step(
            (
                Product(0.17862088, ((-1.0, 0),), 1.0),
                Product(1.3435058, ((0.072665305, 0),), -0.34350582),
                Product(1.3558791, ((-0.52843431, 1),), 0.17255521),
                Product(6.1449357, ((1.7320693, 1),), 0.49320067),
            ),
        ),
    ),
)

_ACCURATE = Schedule(  # (32, 16), l = 0.0016, slope 865, maximum 1.16
    "accurate",
    steps=(
        Step(
            (
                Product(6.4958255, ((-6.9970976, 0),), 1.0),
                Product(1.8388393, ((0.22678032, 0),), -0.83883929),
                Product(1.5078785, ((0.22714798, 0),), -0.50787852),
                Product(
                    1.4189795, ((0.17317768, 0), (-0.096281757, 1), (-0.073214986, 2)), -0.24948274
                ),
                Product(108.16171, (), 1.5512189),
            ),
            residuals=1,
        ),
        Step(
            (
                Product(0.14730898, ((-1.0, 0),), 1.0),
                Product(1.357747, (), -0.35774702),
                Product(1.0669597, (), -0.066959693),
                Product(
                    5.8212763, ((-0.085350896, 0), (0.57902656, 1), (0.34839463, 2)), 1.1316638
                ),
            ),
        ),
    ),
    bfloat16_steps=(  # (8, 8, 4), l = 0.001, slope 896, maximum 1.16
        Step(
            (
                Product(5.0885206, ((-5.6384073, 0),), 1.0),
                Product(1.4415407, ((0.23840519, 0),), -0.44154072),
                Product(29.005547, ((0.12843035, 1),), 0.20473108),
            ),
            residuals=1,
        ),
        Step(
            (
                Product(0.16397809, ((-1.0, 0),), 1.0),
                Product(1.3973711, ((0.057005642, 0),), -0.39737114),
                Product(9.1427296, ((-0.16700562, 1),), 0.57388723),
            ),
        ),
        Step(
            (
                Product(0.22619045, ((-1.0, 0),), 1.0),
                Product(2.1929383, ((-0.15200835, 0),), 1.0060728),
            ),
        ),
    ),
)

SCHEDULES = {schedule.name: schedule for schedule in (_FAST, _BALANCED, _ACCURATE)}
