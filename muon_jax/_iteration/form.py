"""Which form an iteration runs in: on X or on XXᵀ, in which dtype, by which implementation.

The gram form of quintic steps has most products on m × m matrices, and few on the (m, n) matrix. In
exact arithmetic the steps give q₅(R)…q₁(R)·X, where R = XXᵀ. All factors are polynomials of R,
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

import contextlib
import functools
import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax._iteration.normalization import Preconditioning
from muon_jax._iteration.steps import Products, Schedule, Step
from pallas_kernels import Implementation
from pallas_kernels import device as _device

type Method = Literal["standard", "gram"]
type ProductsDType = jax.typing.DTypeLike | Literal["auto"] | None

# Inside an optimizer the form and the implementation are chosen once per shape, as if this many
# matrices were stacked.
GROUP = 16


class Form(NamedTuple):
    """How an iteration runs on matrices of one shape.

    Attributes:
        method: `"standard"`, where every step multiplies with X, or `"gram"`.
        dtype: of the products.
        products: how many there are.
        implementation: of all products; None for the fastest of each product.
    """

    method: Method
    dtype: jnp.dtype
    products: Products
    implementation: str | None = None

    def chosen(self, shape: tuple[int, ...], out_dtype: jnp.dtype | None = None) -> Implementation:
        """Returns the implementation of the products of a stack.

        Raises:
            NotImplementedError: the named implementation cannot run here.
        """
        stack = jax.ShapeDtypeStruct(shape, self.dtype)
        return Implementation.chosen(self.implementation, stack, out_dtype=out_dtype)


class Wanted(NamedTuple):
    """What the caller says of the form.

    Attributes:
        schedule: the steps, without arrays.
        method: `"standard"`, `"gram"`, or None for the faster by a model of the times.
        preconditioning, dtype, implementation: as for `newton_schulz`.
    """

    schedule: Schedule
    method: Method | None
    preconditioning: Preconditioning
    dtype: ProductsDType
    implementation: str | None


@_device.memoized
def form_of_group(wanted: Wanted, shape: tuple[int, int], in_dtype: jnp.dtype) -> Form:
    """Returns the form of an optimizer's matrices `(m, n)`, m ≤ n: that of a stack of 16.

    So an update never depends on its group. The implementation is the one that is named, or else:

    - On Hopper GPUs, in 16 bits, it is one of the kernels. Their product of a matrix is the same in
      every stack, bit for bit. XLA, which splits sums, is faster for some very wide matrices.
      Composed schedules have `"mosaic_gpu"`, which runs their chains in one launch.
    - Elsewhere it is None: the fastest of each product.

    Raises:
        ValueError: as `form_of_stack`.
    """
    form = form_of_stack(wanted, (GROUP, *shape), in_dtype)
    if form.implementation:
        return form
    chosen = form.chosen(shape)
    if "mosaic_gpu" not in chosen.names:
        return form
    padded = (size + -size % 64 for size in shape)
    name = chosen.name_for(jax.ShapeDtypeStruct((GROUP, *padded), form.dtype))
    needs_mosaic = wanted.schedule.is_composed or name == "xla"
    return form._replace(implementation="mosaic_gpu" if needs_mosaic else name)


def form_of_stack(wanted: Wanted, shape: tuple[int, ...], in_dtype: jnp.dtype) -> Form:
    """Returns the form of a stack `(..., m, n)` of `in_dtype`, m ≤ n.

    Raises:
        ValueError: the schedule has no form of that method, or no safe one.
    """
    offered = _offered_forms(wanted, in_dtype)
    forms = [form for form in offered if isinstance(form, Form)]
    if not forms:
        raise ValueError(f"method='gram' is not offered here: {offered[0]}. Pass method='standard'")
    return min(forms, key=lambda form: form.products.microseconds(shape))


def gram_form(wanted: Wanted, in_dtype: jnp.dtype) -> Form | str:
    """Returns the gram form, which sharded matrices run in, or why there is none."""
    if wanted.method == "standard":
        return "the standard form was asked for, where every step multiplies with X"
    return _offered_forms(wanted, in_dtype)[-1]


@_device.memoized
def _offered_forms(wanted: Wanted, in_dtype: jnp.dtype) -> list[Form | str]:
    """Returns the form of each method that the caller takes, or why there is no gram form."""
    schedule, offered = wanted.schedule, []
    methods: list[Method] = [wanted.method] if wanted.method else [*get_args(Method.__value__)]
    for method in methods:
        dtype = _products_dtype(schedule, method, wanted.dtype, in_dtype)
        if method == "standard" or schedule.is_composed:  # which has one form for both methods
            products = schedule.products(dtype)
        elif reason := _no_gram_form(schedule, wanted.preconditioning, dtype):
            offered.append(reason)
            continue
        else:
            products = products_of_gram_form(schedule, dtype)
        offered.append(Form(method, dtype, products, wanted.implementation))
    return offered


def _no_gram_form(
    schedule: Schedule, preconditioning: Preconditioning, dtype: jnp.dtype
) -> str | None:
    """Returns why quintic steps have no gram form in that dtype, or None."""
    if schedule.traced:
        return "traced coefficients or steps have the standard form only"
    if schedule.diverging == "16 bits":
        return "rounding XXᵀ makes these coefficients diverge"
    if preconditioning == "spectral":
        return "preconditioning='spectral' needs more than the Gram matrix"
    if loses_accuracy(schedule, dtype):
        return f"these coefficients come so close to 1 that rounding XXᵀ to {dtype} would show"
    return None


def _products_dtype(
    schedule: Schedule, method: Method, dtype: ProductsDType, in_dtype: jnp.dtype
) -> jnp.dtype:
    """Returns the dtype of the products.

    | dtype  | of the products                                                      |
    | ------ | -------------------------------------------------------------------- |
    | "auto" | float32 for coefficients that rounding to 16 bits makes diverge;     |
    |        | else bfloat16 for quintic steps in the standard form, and on TPUs,   |
    |        | which multiply no float16; else float16. Coefficients that diverge   |
    |        | in bfloat16 alone have float16, and float32 on TPUs                  |
    | None   | that of the matrices                                                 |
    | other  | as it says                                                           |

    For complex matrices the dtype is complex64 at least.

    Raises:
        ValueError: quintic steps in a dtype that is not safe.
    """
    is_quintic, diverging = not schedule.is_composed, schedule.diverging
    if isinstance(dtype, str) and dtype == "auto":
        on_tpu = _device.current().platform == "tpu"
        dtype = "bfloat16" if on_tpu or (is_quintic and method == "standard") else "float16"
        if diverging and dtype == "bfloat16":
            dtype = "float32" if on_tpu else "float16"
        if diverging == "16 bits":
            dtype = "float32"
    dtype = jnp.dtype(in_dtype if dtype is None else dtype)
    least = 32 if diverging == "16 bits" else 16
    unsafe = is_quintic and jnp.finfo(dtype).bits < least
    if unsafe or (diverging and dtype == jnp.bfloat16):
        needed = (
            "float16 or 32 bits or more" if diverging == "bfloat16" else f"{least} bits or more"
        )
        reason = ", or rounding makes these coefficients diverge" * bool(diverging)
        raise ValueError(f"dtype must have {needed}{reason}, got {dtype}: pass dtype='auto'")
    if jnp.issubdtype(in_dtype, jnp.complexfloating):
        dtype = jnp.promote_types(dtype, jnp.complex64)
    return dtype


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
    """Returns whether rounding makes the gram form less accurate than the standard one."""
    u, sigma = roundoff(dtype), np.geomspace(0.01, 1, 1000)
    for step in schedule.steps:
        a, b, c = map(float, step.triple)
        sigma = a * sigma + b * sigma**3 + c * sigma**5
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
@np.errstate(over="ignore", invalid="ignore")  # of steps that diverge
def _segments(steps: tuple[Step, ...], u: float) -> _Segments:
    triples = [tuple(map(float, step.triple)) for step in steps]
    # The singular values after the steps so far; then those that may come, at most, where a segment
    # stops, after the steps that follow it.
    room = np.linspace(0.0, _MOST_NOISE / _NOISE_TO_ROOM, 101)
    values, largest = [np.linspace(0, 1, 1001)], [1.0]
    for a, b, c in triples:
        values = [a * x + b * x**3 + c * x**5 for x in values]
        largest.append(float(abs(values[0]).max()))
        values.append(largest[-1] * (1.0 + room))
    # For each number of steps the number of segments, the largest noise, and where they begin.
    best: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for stop in range(1, len(steps) + 1):
        allowed = _NOISE_TO_ROOM * float(room[abs(values[stop]) <= 1.5].max(initial=0.0))
        candidates = []
        for start in reversed(range(stop)):
            slope = largest[start] * math.prod(a for a, _, _ in triples[start:stop])
            noise = u * slope * slope
            if noise <= allowed or start == stop - 1:
                count, others, starts = best[start]
                candidates.append((count + 1, max(others, noise), (*starts, start)))
        best.append(min(candidates, key=lambda candidate: candidate[:2]))
    starts = best[-1][2]
    return tuple(steps[i:j] for i, j in zip(starts, (*starts[1:], len(steps)), strict=True))


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


def roundoff(dtype: jax.typing.DTypeLike) -> float:
    """Returns the unit roundoff of operands.

    GPUs take float32 as TF32, cut off after ten bits, unless the user has set a precision that
    keeps float32.
    """
    is_float32 = jnp.finfo(dtype).dtype == jnp.float32
    kept = jax.config.jax_default_matmul_precision in ("highest", "float32")
    if is_float32 and _device.current().platform == "gpu" and not kept:
        return 2.0**-10
    return float(jnp.finfo(dtype).eps) / 2


def matmul_precision(
    dtype: jax.typing.DTypeLike, *, full: bool
) -> contextlib.AbstractContextManager:
    """Returns a context for products of `dtype`: a precision where the user has set none.

    | platform | float32 without the context | in the context                            |
    | -------- | --------------------------- | ----------------------------------------- |
    | TPU      | bfloat16                    | three products of bfloat16 (`"high"`)     |
    | GPU      | TF32                        | float32 (`"highest"`) where `full`        |

    `full` is for composed schedules, of which "accurate" exceeds 1.5 in TF32 on 3 of 2016 random
    spectra, and for coefficients that rounding makes diverge.
    """
    if jax.config.jax_default_matmul_precision is None and jnp.finfo(dtype).dtype == jnp.float32:
        if _device.current().platform == "tpu":
            return jax.default_matmul_precision("high")
        if _device.current().platform == "gpu" and full:
            return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
