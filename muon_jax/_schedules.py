"""Composed schedules: two or three steps X <- h(XXᵀ)·X of high degree, in place of five quintics.

A polynomial h of degree 2ᵏ is evaluated by k symmetric products, each a square with one addend:

    S₀ = R,   Sⱼ = αⱼ·Sⱼ₋₁² + βⱼ·(one earlier S) + δⱼ·I,   h(R) = Sₖ.

So a step costs a Gram matrix, k products and the application of h, where a quintic step costs a
Gram matrix, one product and the application. On the square matrix of size m, in units of one
symmetric product, that is 12 for "fast", 14 for "balanced" and 17 for "accurate", against 20 for
five quintics; on wide matrices the three products with X weigh more, and the schedules save more.

The coefficients are ours: fitted jointly by nonlinear least squares in float64, for singular values
of [l, 1] over the Schatten-4 norm, together with the response to the rounding of every
intermediate. `python -m muon_jax.benchmarks coefficients` makes them anew. All |Sⱼ| ≤ 1 and h ≤ 51
on [0, 1], R < 5 after the first step, so that nothing leaves float16.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Product:
    """One symmetric product, Sⱼ = alpha·Sⱼ₋₁² + beta·S_addend + diagonal·I; S₀ is R."""

    alpha: float
    beta: float
    addend: int
    diagonal: float


@dataclasses.dataclass(frozen=True)
class Step:
    """The polynomial h of one step X <- h(XXᵀ)·X, of degree 2ᵏ for k products."""

    products: tuple[Product, ...]

    @property
    def slope(self) -> float:
        """h(0), by which the step multiplies the smallest singular values."""
        terms = [0.0]
        for p in self.products:
            terms.append(p.alpha * terms[-1] ** 2 + p.beta * terms[p.addend] + p.diagonal)
        return terms[-1]

    def polynomial(
        self,
        syrk: Callable[..., jax.Array],
        gram: jax.Array,
        s: float | jax.Array = 1.0,
        factor: float | jax.Array = 1.0,
    ) -> jax.Array:
        """factor·h(s²·gram), without forming s²·gram.

        Args:
            syrk: `pallas_kernels.syrk`, or a function of its arguments.
            gram: shape `(..., m, m)`.
            s, factor: scalars, or one for each matrix, of shape `(...)`.
        """
        terms = [gram]
        for product in self.products:
            out = factor if product is self.products[-1] else 1.0
            terms.append(
                syrk(
                    terms[-1],
                    terms[product.addend],
                    alpha=out * product.alpha * (s**4 if len(terms) == 1 else 1.0),
                    beta=out * product.beta * (s**2 if product.addend == 0 else 1.0),
                    diagonal=out * product.diagonal,
                )
            )
        return terms[-1]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A composed schedule: its name, its steps and where it is safe.

    Attributes:
        name: what `ns_coeffs` calls it.
        steps: to be run in this order, on X over its Schatten-4 norm.
        half_dtypes: the dtypes of 16 bits that it is safe in, its own first. It is safe in all
            wider ones.
    """

    name: str
    steps: tuple[Step, ...]
    half_dtypes: tuple[str, ...]

    def default_dtype(self, platform: str) -> str:
        """Returns its own dtype; where the matrix units lack float16 (TPU), bfloat16 or float32."""
        if platform != "tpu":
            return self.half_dtypes[0]
        return "bfloat16" if "bfloat16" in self.half_dtypes else "float32"

    def check_dtype(self, dtype: jax.typing.DTypeLike) -> None:
        """Raises ValueError unless the schedule is safe in `dtype`."""
        if jnp.finfo(dtype).bits < 32 and jnp.dtype(dtype).name not in self.half_dtypes:
            raise ValueError(
                f"ns_coeffs={self.name!r} is unsafe in {jnp.dtype(dtype)}: its rounding can make"
                f" singular values exceed 1.5. It needs {' or '.join(self.half_dtypes)}, or 32 bits"
                " or more: pass dtype='auto' (ns_dtype='auto' to muon), or ns_coeffs='accurate'"
            )


# Each with its degrees, the interval [l, 1] that it was fitted on, its slope at 0 and its maximum.
# Safe means that no singular value exceeded 1.5 on 4032 random spectra (m = 48, condition to 1e9,
# low rank, clusters, spikes, repeated rows). In bfloat16 29 of them exceed it under "balanced", 6
# under "fast". "accurate" stays below 1.3 there and 1.18 in float16, its polar errors on
# σ > 0.01σ₁ are mostly within 0.01 of each other, and bfloat16 is what every backend multiplies.
_FAST = Schedule(  # (8, 8), l = 0.004, slope 158, maximum 1.22
    "fast",
    steps=(
        Step(
            (
                Product(5.4492477, -5.9847528, 0, 1.0),
                Product(1.4160953, 0.19866704, 0, -0.41609533),
                Product(26.685861, -0.20070544, 0, 0.64411391),
            )
        ),
        Step(
            (
                Product(0.19119527, -1.0, 0, 1.0),
                Product(1.4036461, 0.18530347, 0, -0.40364609),
                Product(4.5011484, -0.31615076, 0, 1.2709181),
            )
        ),
    ),
    half_dtypes=("float16",),
)

_BALANCED = Schedule(  # (16, 16), l = 0.002, slope 465, maximum 1.21
    "balanced",
    steps=(
        Step(
            (
                Product(5.7078558, -6.2862502, 0, 1.0),
                Product(1.7278047, 0.44111419, 0, -0.72780474),
                Product(1.3538946, 0.39449156, 0, -0.35389462),
                Product(48.050345, 0.90614708, 2, 1.3209006),
            )
        ),
        Step(
            (
                Product(0.18248843, -1.0, 0, 1.0),
                Product(1.398959, 0.075274592, 0, -0.39895896),
                Product(1.4295508, -0.59296076, 1, 0.16340995),
                Product(6.9650775, 1.9540749, 1, 0.32578172),
            )
        ),
    ),
    half_dtypes=("float16",),
)

_ACCURATE = Schedule(  # (8, 8, 4), l = 0.001, slope 926, maximum 1.17
    "accurate",
    steps=(
        Step(
            (
                Product(4.6510411, -5.4227304, 0, 1.0),
                Product(1.323331, 0.10088981, 0, -0.32333104),
                Product(27.752293, 0.32337193, 1, 0.27751865),
            )
        ),
        Step(
            (
                Product(0.16010462, -1.0, 0, 1.0),
                Product(1.3921233, 0.046399076, 0, -0.3921233),
                Product(9.5423577, -0.16672187, 1, 0.54774824),
            )
        ),
        Step(
            (
                Product(0.22136083, -1.0, 0, 1.0),
                Product(2.328733, -0.13340416, 0, 0.96307641),
            )
        ),
    ),
    half_dtypes=("bfloat16", "float16"),
)

SCHEDULES = {schedule.name: schedule for schedule in (_FAST, _BALANCED, _ACCURATE)}
