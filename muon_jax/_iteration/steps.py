"""The steps of an iteration: polynomials of the Gram matrix, evaluated by symmetric products.

Every step is X <- h(XXᵀ)·X with a polynomial h of degree 2ᵏ, evaluated by k symmetric products,
squares with a few addends:

    S₀ = R = XXᵀ,   Sⱼ = αⱼ·Sⱼ₋₁² + Σᵢ βⱼᵢ·Sᵢ + δⱼ·I  (some i < j),   h(R) = Sₖ.

A published triple (a, b, c) is the step with one product, h(R) = c·R² + b·R + a·I. The steps of a
composed schedule have several.

Some steps add noise to one Sⱼ. Where singular vectors are structured, as signs are, the entries of
an Sⱼ have few different values. Equal entries round alike, so the rounding error has a norm of up
to √m times that of independent errors. Noise below the last digit of one Sⱼ makes equal entries
differ. Every later Sⱼ is a polynomial of that one, so its entries differ too (docs/numerics.md,
section 3.7).
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels import ChainLink

DEFAULT_STEPS = 5  # the default of ns_steps, here as in optax

type Triple = tuple[float | jax.Array, float | jax.Array, float | jax.Array]

# Of an H200: the FLOPs of products per µs, the bytes per µs of passes and small products, and the
# µs of a launch. Fitted to 136 measured times of both forms, from 896×896 to 16×2048×5464, which
# the model meets within 7% (RMS). Of 26 pairs of forms the model mistakes the faster in one
# (2048×3072, by 5%). Only ratios decide, and ratios differ less between devices.
_FLOPS, _BYTES, _LAUNCH = 671e6, 3.42e6, 3.95


def is_traced(value: Any) -> bool:
    """Returns whether any leaf of `value` is known only when the traced function runs."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))


class Products(NamedTuple):
    """How many products of each kind an iteration on (m, n) matrices has.

    Attributes:
        grams: XXᵀ, of which half is computed.
        squares: of m × m matrices, half computed, most with an addend.
        applications: of an m × m matrix to X.
        mixed: symmetric products of two m × m matrices, half computed, with an addend.
    """

    grams: int
    squares: int
    applications: int
    mixed: int = 0

    def units(self, aspect: float) -> float:
        """Returns the FLOPs for n = aspect·m; the unit is one symmetric m × m product."""
        return self.squares + self.mixed + aspect * (self.grams + 2 * self.applications)

    def microseconds(self, shape: tuple[int, ...]) -> float:
        """Returns a model's time for stacks `(..., m, n)` of 16-bit matrices.

        A product takes √(t² + t'²). The time t is that of its FLOPs, t' that of its operands and
        result.
        """
        *batch, m, n = shape
        square, wide = (2 * math.prod(batch) * m * size for size in (m, n))  # bytes
        products = (  # how many, their FLOPs, and the bytes of their operands and results
            (self.grams, m * wide / 2, wide + square),
            (self.squares, m * square / 2, 3 * square),
            (self.mixed, m * square / 2, 4 * square),
            (self.applications, m * wide, 2 * wide + square),
        )
        return sum(
            number * (_LAUNCH + math.hypot(flops / _FLOPS, num_bytes / _BYTES))
            for number, flops, num_bytes in products
        )


# In units of u/√m: less does not separate equal entries enough, more costs accuracy.
_AMPLITUDE = 0.5


def noise_addend(operand: jax.Array) -> tuple[float, jax.Array]:
    """Returns an addend beta·N of noise, for an Sⱼ whose largest eigenvalue is about 1.

    N is symmetric, and its entries are uniform in [-1, 1). beta is u/(2√m), with the unit roundoff
    u, so the norm of the noise is 0.6u. An entry depends on its two indices alone: it is the same
    on every device, for every matrix and call.

        Nᵢⱼ = wᵢ·wⱼ mod 2³², as a signed integer, over 2³¹,   for random odd words w of 32 bits.

    Args:
        operand: shape `(..., m, m)`.

    Returns:
        beta, and N of shape `(m, m)` and the dtype of `operand`.
    """
    m = operand.shape[-1]
    words = jnp.asarray(np.random.PCG64(0).random_raw(m) >> 32 | 1, jnp.uint32)
    products = jax.lax.bitcast_convert_type(words[:, None] * words[None], jnp.int32)
    noise = products.astype(jnp.float32) * 2.0**-31
    beta = _AMPLITUDE * float(jnp.finfo(operand.dtype).eps) / 2 / max(m, 1) ** 0.5
    return beta, noise.astype(operand.dtype)


@dataclasses.dataclass(frozen=True)
class Product:
    """One symmetric product, Sⱼ = alpha·Sⱼ₋₁² + Σ beta·Sᵢ + diagonal·I; S₀ is R.

    Attributes:
        alpha, diagonal: see above.
        addends: the pairs (beta, i).
    """

    alpha: float | jax.Array
    addends: tuple[tuple[float | jax.Array, int], ...]
    diagonal: float | jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """The polynomial h of one step X <- h(XXᵀ)·X, of degree 2ᵏ for k products.

    Attributes:
        products: the k products.
        residual_betas: in 16 bits Sⱼ₊₁ has the residual of Sⱼ, what the rounding of Sⱼ left, for
            one more addend. These are its coefficients, for S₀, S₁, … as far as they go.

            With the derivative of Sⱼ₊₁ by Sⱼ for a coefficient, Sⱼ₊₁ is as if Sⱼ had twice the
            digits. The addend needs no product. The derivative is 2·alpha·Sⱼ + beta, another
            number in each direction. The coefficients are a compromise between small directions,
            where digits matter most, and large ones.
        noisy: the index j of the Sⱼ that has noise in 16 bits (`noise_addend`); None for no noise.
            The noise of h itself, j = k, is in proportion to the slope h(0).
    """

    products: tuple[Product, ...]
    residual_betas: tuple[float | jax.Array, ...] = ()
    noisy: int | None = None

    @classmethod
    def of_triple(cls, a: Any, b: Any, c: Any, noisy: int | None = None) -> "Step":
        """Returns the quintic step X <- aX + bRX + cR²X."""
        return cls((Product(c, ((b, 0),), a),), noisy=noisy)

    @functools.cached_property
    def triple(self) -> Triple:
        """The coefficients (a, b, c) of a quintic step."""
        (product,) = self.products
        ((b, _),) = product.addends
        return product.diagonal, b, product.alpha

    def terms(self, eigenvalue: Any) -> list[Any]:
        """Returns S₀, S₁, …, h for an eigenvalue of R, or an array of them."""
        terms = [eigenvalue]
        for p in self.products:
            added = sum(beta * terms[i] for beta, i in p.addends)
            terms.append(p.alpha * terms[-1] ** 2 + added + p.diagonal)
        return terms

    def scaled(self, s: float | jax.Array, factor: float | jax.Array) -> "Step":
        """Returns the step with the polynomial factor·h(s²·R), as a polynomial of R.

        Args:
            s: a number, or one for each matrix, of shape `(...)`.
            factor: likewise.
        """

        def scaled_beta(j: int, beta: float | jax.Array, i: int) -> float | jax.Array:
            return out[j] * beta * (1.0 if i else s**2)

        out = [*[1.0] * (len(self.products) - 1), factor]
        products = tuple(
            Product(
                out[j] * product.alpha * (1.0 if j else s**4),
                tuple((scaled_beta(j, beta, i), i) for beta, i in product.addends),
                out[j] * product.diagonal,
            )
            for j, product in enumerate(self.products)
        )
        betas = tuple(scaled_beta(j, beta, j) for j, beta in enumerate(self.residual_betas))
        return Step(products, betas, self.noisy)

    def chain(
        self, gram: jax.Array, residual: jax.Array | None = None
    ) -> tuple[list[jax.Array], list[ChainLink]]:
        """Returns the inputs and the links for which `Implementation.syrk_chain` computes h(R).

        Args:
            gram: R, of shape `(..., m, m)`.
            residual: of R, where the step has residuals and the dtype has 16 bits.
        """
        inputs, low, noise = [gram], None, None
        if residual is not None:
            inputs, low = [gram, residual], 1
        if self.noisy is not None and jnp.finfo(gram.dtype).bits == 16:
            amplitude, matrix = noise_addend(gram)
            inputs, noise = [*inputs, matrix], (amplitude, len(inputs))
        numbers, made, links = [0], len(inputs), []  # the numbers of S₀, S₁, …, and the next one
        for j, product in enumerate(self.products):
            addends = [(beta, numbers[i]) for beta, i in product.addends]
            if low is not None:
                addends.append((self.residual_betas[j], low))
            if noise is not None and j + 1 == self.noisy:
                amplitude, number = noise
                is_last = j + 1 == len(self.products)
                addends.append((amplitude * product.diagonal if is_last else amplitude, number))
            has_residual = low is not None and j + 1 < len(self.residual_betas)
            links.append(ChainLink(product.alpha, tuple(addends), product.diagonal, has_residual))
            numbers.append(made)
            low = made + 1 if has_residual else None
            made += 1 + has_residual
        return inputs, links


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps of an iteration, in this order.

    Attributes:
        steps: in float16 and in 32 bits or more.
        bfloat16_steps: those for the rounding of bfloat16; None for the same.
        name: what `ns_coeffs` calls it; empty where it is the caller's own.
        diverging: where rounding makes the coefficients diverge.
        loop: which steps run, [first, end), where a trace does not know that. A single step is
            then repeated. None for all steps, once.
        traced: whether a trace does not know the coefficients, or which steps run.
    """

    steps: tuple[Step, ...]
    bfloat16_steps: tuple[Step, ...] | None = None
    name: str = ""
    diverging: Literal["bfloat16", "16 bits"] | None = None
    loop: tuple[int | jax.Array, int | jax.Array] | None = None
    traced: bool = False

    @functools.cached_property
    def is_composed(self) -> bool:
        """Whether steps have several products. X is then divided by its Schatten-4 norm."""
        return any(len(step.products) > 1 for step in self.steps)

    def without_arrays(self) -> "Schedule":
        """Returns what is known while tracing, which hashes: `DEFAULT_STEPS` if it is not more."""
        if not self.traced:
            return self
        steps = (Step.of_triple(0.0, 0.0, 0.0),) * DEFAULT_STEPS
        return Schedule(steps, diverging=self.diverging, traced=True)

    def steps_in(self, dtype: jax.typing.DTypeLike) -> tuple[Step, ...]:
        """Returns the steps for products in `dtype`.

        Raises:
            ValueError: the schedule is composed, and not safe in `dtype`.
        """
        name, bits = jnp.dtype(dtype).name, jnp.finfo(dtype).bits
        if self.is_composed and bits < 32 and name not in ("float16", "bfloat16"):
            raise ValueError(
                f"ns_coeffs={self.name!r} is unsafe in {name}: its rounding can make singular"
                " values exceed 1.5. It needs float16 or bfloat16, or 32 bits or more: pass"
                " dtype='auto'"
            )
        return (self.bfloat16_steps or self.steps) if name == "bfloat16" else self.steps

    def step_at(self, i: int | jax.Array, dtype: jax.typing.DTypeLike) -> Step:
        """Returns a step of a `loop` for products in `dtype`."""
        steps = self.steps_in(dtype)
        if len(steps) == 1:
            return steps[0]
        # Stacked from scalars: custom_partitioning takes no program with constant arrays.
        triples = jnp.stack([jnp.stack(step.triple) for step in steps])
        a, b, c = triples[i]
        return Step.of_triple(a, b, c)

    def products(self, dtype: jax.typing.DTypeLike) -> Products:
        """Returns how many products the steps in `dtype` take, where every step multiplies X."""
        steps = self.steps_in(dtype)
        squares = sum(len(step.products) for step in steps)
        return Products(grams=len(steps), squares=squares, applications=len(steps))
