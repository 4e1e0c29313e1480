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
h ≤ 314 on [0, 1], R < 6 after the first step, so that nothing leaves float16.
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
# All are safe: no singular value exceeded 1.38 on 14,000 random spectra (m = 48, condition to
# 1e9, low rank, clusters, spikes, repeated rows). bfloat16 takes polynomials of its own, less steep
# at 0, so that its rounding does not grow: with those for float16, 821 of 2016 spectra exceed 1.5
# in bfloat16 under "fast", 1144 under "balanced", 206 under "accurate".
_FAST = Schedule(  # (128), l = 0.01, slope 91, maximum 1.17
    "fast",
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

_BALANCED = Schedule(  # (512), l = 0.0025, slope 313, maximum 1.15
    "balanced",
    steps=(
        Step(
            (
                Product(-3.8002315, ((4.0, 0),), 0.0),
                Product(-3.6844922, ((4.0, 1),), 0.0),
                Product(2.865102, ((-4.4787178, 2),), 1.0),
                Product(2.0000286, (), -1.0000286),
                Product(1.2691914, ((1.3063719, 4),), -1.5755633),
                Product(0.2842287, ((-0.47381628, 3), (0.939726, 5)), 0.24986157),
                Product(2.1167255, ((-0.69749423, 3), (0.2454782, 5)), -0.66470949),
                Product(
                    0.53321842,
                    ((-0.092246588, 0), (-0.12528519, 1), (0.081637909, 3), (0.64021028, 7)),
                    -0.25506661,
                ),
                Product(
                    141.93093,
                    (
                        (-11.274548, 0),
                        (-13.718657, 1),
                        (23.189313, 3),
                        (29.865153, 6),
                        (9.0920552, 7),
                        (75.172094, 8),
                    ),
                    34.00712,
                ),
            ),
            residuals=2,
        ),
    ),
    bfloat16_steps=(  # (16, 16), l = 0.003, slope 311, maximum 1.16
        Step(
            (
                Product(6.3346628, ((-6.7489174, 0),), 1.0),
                Product(1.6719749, ((0.25913381, 0),), -0.67197488),
                Product(1.2726044, ((0.16634596, 0),), -0.27260439),
                Product(36.678151, ((-0.24895183, 2),), 0.97197572),
            ),
        ),
        Step(
            (
                Product(0.18435323, ((-1.0, 0),), 1.0),
                Product(1.341985, ((0.072558456, 0),), -0.34198501),
                Product(1.3489066, ((-0.52027984, 1),), 0.17137325),
                Product(6.0931936, ((1.7160439, 1),), 0.50225212),
            ),
        ),
    ),
)

_ACCURATE = Schedule(  # (32, 16), l = 0.0016, slope 797, maximum 1.14
    "accurate",
    steps=(
        Step(
            (
                Product(6.6016275, ((-6.9880275, 0),), 1.0),
                Product(1.8656343, ((0.3811268, 0),), -0.86563432),
                Product(1.5688152, ((0.39016872, 0),), -0.56881523),
                Product(
                    1.3639614,
                    ((0.25071331, 0), (-0.061895555, 1), (-0.051044336, 2)),
                    -0.25102155,
                ),
                Product(104.82963, (), 1.9457867),
            )
        ),
        Step(
            (
                Product(0.15065499, ((-1.0, 0),), 1.0),
                Product(1.3177595, (), -0.31775954),
                Product(1.0536622, (), -0.053662221),
                Product(
                    5.4087569,
                    ((-0.089379669, 0), (0.56957871, 1), (0.3594076, 2)),
                    1.130102,
                ),
            )
        ),
    ),
    bfloat16_steps=(  # (8, 8, 4), l = 0.001, slope 872, maximum 1.16
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
    ),
)

SCHEDULES = {schedule.name: schedule for schedule in (_FAST, _BALANCED, _ACCURATE)}
