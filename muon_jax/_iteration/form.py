"""The form of an iteration: on X or on XXᵀ, in which dtype, with how many products."""

import functools
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from muon_jax._iteration.cost import Products
from muon_jax._iteration.gram import loses_accuracy, products_of_gram_form
from muon_jax._iteration.normalization import Preconditioning
from muon_jax._iteration.precision import Backend
from muon_jax._iteration.steps import Schedule
from pallas_kernels import device as _device
from pallas_kernels import select_implementation, unsupported_reason

type Method = Literal["standard", "gram"]
type ProductsDType = jax.typing.DTypeLike | Literal["auto"] | None

# Inside an optimizer the form and the implementation are chosen once per shape, as if this many
# matrices were stacked. So an update never depends on its group.
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


class Wanted(NamedTuple):
    """What the caller says of the form.

    Attributes:
        schedule: the steps, without arrays.
        method: `"standard"`, `"gram"`, or None for the faster by a model of the times.
        preconditioning, dtype: as for `newton_schulz`.
    """

    schedule: Schedule
    method: Method | None
    preconditioning: Preconditioning
    dtype: ProductsDType


@functools.lru_cache(maxsize=1024)
def fastest_form(
    wanted: Wanted, shape: tuple[int, ...], in_dtype: jnp.dtype, backend: Backend
) -> Form:
    """Returns the form for stacks `(..., m, n)` of `in_dtype`, m ≤ n.

    Raises:
        ValueError: the schedule has no form of that method, or no safe one.
    """
    methods: list[Method] = [wanted.method] if wanted.method else [*get_args(Method.__value__)]
    offered = [_offered_form(wanted, method, in_dtype) for method in methods]
    forms = [form for form in offered if isinstance(form, Form)]
    if not forms:
        raise ValueError(f"method='gram' is not offered here: {offered[0]}. Pass method='standard'")
    return min(forms, key=lambda form: form.products.microseconds(shape))


@functools.lru_cache(maxsize=1024)
def gram_form(wanted: Wanted, in_dtype: jnp.dtype, backend: Backend) -> Form | str:
    """Returns the gram form, or why there is none."""
    return _offered_form(wanted, "gram", in_dtype)


def _offered_form(wanted: Wanted, method: Method, in_dtype: jnp.dtype) -> Form | str:
    schedule = wanted.schedule
    dtype = _products_dtype(schedule, method, wanted.dtype, in_dtype)
    if method == "gram":
        if reason := _no_gram_form(schedule, wanted.preconditioning, dtype):
            return reason
        if not schedule.is_composed:
            return Form(method, dtype, products_of_gram_form(schedule, dtype))
    return Form(method, dtype, schedule.products(dtype))


def implementation_of_group(
    shape: tuple[int, int], dtype: jnp.dtype, *, is_composed: bool
) -> str | None:
    """Returns the implementation by which an optimizer multiplies matrices `(m, n)`, m ≤ n.

    - On Hopper GPUs, in 16 bits, it is one of the kernels. Their product of a matrix is the same in
      every stack, bit for bit. XLA, which splits sums, is faster for some very wide matrices.
      Composed schedules have `"mosaic_gpu"`, which runs their chains in one launch.
    - Elsewhere it is None: the fastest of each product.

    Args:
        shape: of the matrices.
        dtype: of the products.
        is_composed: whether the steps are those of a composed schedule.
    """
    padded = (size + -size % 64 for size in shape)
    operand = jax.ShapeDtypeStruct((GROUP, *padded), dtype)
    if unsupported_reason("mosaic_gpu", operand):
        return None
    chosen = select_implementation(operand).implementation
    return "mosaic_gpu" if is_composed or chosen == "xla" else chosen


def _no_gram_form(
    schedule: Schedule, preconditioning: Preconditioning, dtype: jnp.dtype
) -> str | None:
    """Returns why the schedule has no gram form in that dtype, or None."""
    if schedule.is_composed:
        return None  # a composed schedule has one form, under either name
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
        on_tpu = _device.platform() == "tpu"
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
