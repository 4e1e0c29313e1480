"""Composed schedules: two or three steps X <- h(XXᵀ)·X of high degree, in place of five quintics.

A polynomial h of degree 2ᵏ is evaluated by k symmetric products, each a square with one addend:

    S₀ = R,   Sⱼ = αⱼ·Sⱼ₋₁² + βⱼ·(one earlier S) + δⱼ·I,   h(R) = Sₖ.

So a step costs a Gram matrix, k products and the application of h, where a quintic step costs a
Gram matrix, one product and the application. On the square matrix of size m, in units of one
symmetric product, that is 12 for "fast", 14 for "balanced" and 17 for "accurate", against 20 for
five quintics; on wide matrices the three products with X weigh more, and the schedules save more.

The coefficients were fitted jointly by nonlinear least squares in float64, for singular values of
[l, 1] over the Schatten-4 norm, together with the response to the rounding of every intermediate,
and are ours. All |Sⱼ| ≤ 1 and h ≤ 98 on that interval, R ≤ 14 after the first step, so that
nothing leaves float16.
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
# Safe means that no singular value exceeded 1.5 on about a thousand random spectra (condition to
# 1e9, low rank, clusters, spikes, repeated rows). In bfloat16 8 of them exceed it under "balanced",
# up to 23, and "fast" reaches it. "accurate" stays below 1.17 in both dtypes, its polar errors
# are within 0.005 of each other, and bfloat16 is the one that every backend multiplies.
_FAST = Schedule(  # (8, 8), l = 0.004, slope 155, maximum 1.22
    "fast",
    steps=(
        Step(
            (
                Product(5.496012768928692, -6.035377878709518, 0, 1.0),
                Product(1.4235742668882962, 0.19469263619312469, 0, -0.42357426688829636),
                Product(29.159494168883985, 0.3404784084032448, 1, 0.47146633446891234),
            )
        ),
        Step(
            (
                Product(0.12470616442269944, -0.9159068428694926, 0, 1.0),
                Product(1.1482083865021944, -0.050994820696434656, 0, -0.14820838650219426),
                Product(3.8216307529690035, 0.5469953846573656, 1, 0.7915929331811273),
            )
        ),
    ),
    half_dtypes=("float16",),
)

_BALANCED = Schedule(  # (16, 16), l = 0.002, slope 427, maximum 1.19
    "balanced",
    steps=(
        Step(
            (
                Product(3.65710942722427, -5.1544123644345605, 0, 1.0),
                Product(1.6639888469982274, 0.03442624807254729, 0, -0.6639888469982272),
                Product(1.415355395423577, 0.41021562323723443, 0, -0.41535539542357697),
                Product(58.15984876068054, 0.5140796431263912, 2, 0.6372754637065252),
            )
        ),
        Step(
            (
                Product(0.07135957591663367, -0.6264003228539974, 0, 1.0),
                Product(1.4032182401924245, 0.04659495163611767, 0, -0.4032182401924243),
                Product(1.43238268922692, -0.5982683405320721, 1, 0.16588565130515212),
                Product(5.399391611751371, 1.5546309647205505, 1, 0.251944096005003),
            )
        ),
    ),
    half_dtypes=("float16",),
)

_ACCURATE = Schedule(  # (8, 8, 4), l = 0.001, slope 912, maximum 1.17
    "accurate",
    steps=(
        Step(
            (
                Product(3.9229693200810263, -5.103602623738047, 0, 1.0),
                Product(1.4338369292149133, 0.15992949613489946, 0, -0.43383692921491335),
                Product(30.934624586119703, 0.009139422061712173, 1, 0.11723041793662045),
            )
        ),
        Step(
            (
                Product(0.11215779914028161, -0.8257593828932697, 0, 1.0),
                Product(1.3866451555840071, 0.04622249313263173, 0, -0.38664515558400697),
                Product(18.409969054556438, -0.19417575981776583, 1, 0.9682737441686184),
            )
        ),
        Step(
            (
                Product(0.010906469546787768, -0.22270235316816187, 0, 1.0),
                Product(1.058469769611705, -0.015735836439506844, 0, 0.4714246858229034),
            )
        ),
    ),
    half_dtypes=("bfloat16", "float16"),
)

SCHEDULES = {schedule.name: schedule for schedule in (_FAST, _BALANCED, _ACCURATE)}
