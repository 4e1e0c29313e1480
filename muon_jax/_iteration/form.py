"""The form of an iteration: on X or on XXᵀ, in which dtype, with how many products."""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from muon_jax._iteration.composed import products_of_composed
from muon_jax._iteration.cost import Products
from muon_jax._iteration.gram import loses_accuracy, products_of_gram_form
from muon_jax._iteration.normalization import Preconditioning
from muon_jax._iteration.recipes import Quintics, Recipe
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


def fastest_form(
    recipe: Recipe,
    method: Method | None,
    preconditioning: Preconditioning,
    dtype: ProductsDType,
    wide_shape: tuple[int, ...],
    in_dtype: jnp.dtype,
) -> Form:
    """Returns the form for stacks `(..., m, n)` of `in_dtype`, m ≤ n.

    Args:
        recipe: the steps.
        method: the form's; None for the fastest by a model of the times.
        preconditioning: as for `newton_schulz`.
        dtype: as for `newton_schulz`.
        wide_shape: of the stack.
        in_dtype: of the stack.

    Raises:
        ValueError: the recipe has no form of that method, or no safe one.
    """
    offered = []
    candidates: list[Method] = [method] if method else [*get_args(Method.__value__)]
    for name in candidates:
        form = offered_form(recipe, name, preconditioning, dtype, in_dtype)
        if isinstance(form, Form):
            offered.append(form)
        elif method:
            raise ValueError(
                f"ns_method='gram' is not offered here: {form}. Pass ns_method='standard'"
            )
    return min(offered, key=lambda form: form.products.microseconds(wide_shape))


def offered_form(
    recipe: Recipe,
    method: Method,
    preconditioning: Preconditioning,
    dtype: ProductsDType,
    in_dtype: jnp.dtype,
) -> Form | str:
    """Returns the form of that method, or why the recipe does not have it."""
    products_dtype = _products_dtype(recipe, method, dtype, in_dtype)
    reason = None
    if method == "gram":
        reason = _no_gram_form(recipe, preconditioning, products_dtype)
    return reason or Form(method, products_dtype, _products(recipe, method, products_dtype))


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


def _no_gram_form(recipe: Recipe, preconditioning: Preconditioning, dtype: jnp.dtype) -> str | None:
    """Returns why the recipe has no gram form in that dtype, or None."""
    if isinstance(recipe, Schedule):
        return None  # a composed schedule has one form, under either name
    if recipe.traced:
        return "traced coefficients or steps have the standard form only"
    if recipe.diverging == "16 bits":
        return "rounding XXᵀ makes these coefficients diverge"
    if preconditioning == "spectral":
        return "preconditioning='spectral' needs more than the Gram matrix"
    if loses_accuracy(recipe, dtype):
        return f"these coefficients come so close to 1 that rounding XXᵀ to {dtype} would show"
    return None


def _products(recipe: Recipe, method: Method, dtype: jnp.dtype) -> Products:
    if isinstance(recipe, Schedule):
        return products_of_composed(recipe.steps_in(dtype))
    if method == "gram":
        return products_of_gram_form(recipe, dtype)
    return Products(grams=recipe.num_steps, squares=recipe.num_steps, applications=recipe.num_steps)


def _products_dtype(
    recipe: Recipe, method: Method, dtype: ProductsDType, in_dtype: jnp.dtype
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
    is_quintic = isinstance(recipe, Quintics)
    diverging = recipe.diverging if isinstance(recipe, Quintics) else None
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
        raise ValueError(f"ns_dtype must have {needed}{reason}, got {dtype}: pass ns_dtype='auto'")
    if jnp.issubdtype(in_dtype, jnp.complexfloating):
        dtype = jnp.promote_types(dtype, jnp.complex64)
    return dtype
