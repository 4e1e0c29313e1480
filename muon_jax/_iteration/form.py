"""The form of an iteration: on X or on XXᵀ, in which dtype, with how many products."""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from muon_jax._iteration import composed as _composed
from muon_jax._iteration import gram as _gram
from muon_jax._iteration.cost import Products
from muon_jax._iteration.recipes import NSCoeffs, Quintics, is_traced, resolve_recipe
from muon_jax._iteration.steps import Schedule
from pallas_kernels import _device, select_implementation, unsupported_reason

type Method = Literal["standard", "gram"]
type ProductsDType = jax.typing.DTypeLike | Literal["auto"] | None


# The form and the kernels of an optimizer's matrices are those of a stack of so many, however many
# are grouped: their updates do not depend on the grouping.
GROUP = 16


class Form(NamedTuple):
    """How an iteration runs: its method, the dtype of its products, and how many they are."""

    method: Method
    dtype: jnp.dtype
    products: Products


def choose(
    recipe: Quintics | Schedule,
    method: Method | None,
    preconditioning: str,
    dtype: ProductsDType,
    wide_shape: tuple[int, ...],
    in_dtype: jnp.dtype,
) -> Form:
    """Returns the form for stacks `(..., m, n)` of `in_dtype`, m ≤ n; None as method: the fastest.

    Raises:
        ValueError: the method is none, or there is no such form of this recipe, or it is unsafe.
    """
    names = get_args(Method.__value__)
    if method not in (None, *names):
        raise ValueError(f"method must be 'standard', 'gram' or None, got {method!r}")
    offered = []
    candidates: list[Method] = [method] if method else [*names]
    for name in candidates:
        form = _offer(recipe, name, preconditioning, dtype, in_dtype)
        if isinstance(form, Form):
            offered.append(form)
        elif method:
            raise ValueError(f"method='gram' is not offered here: {form}. Pass method='standard'")
    return min(offered, key=lambda form: form.products.microseconds(wide_shape))


def of(
    shape: tuple[int, ...],
    in_dtype: jnp.dtype,
    *,
    ns_coeffs: NSCoeffs,
    ns_steps: int | jax.Array,
    dtype: ProductsDType,
    preconditioning: str,
    method: Method | None,
) -> Form:
    """Returns the form in which an optimizer with these arguments runs on `(..., m, n)`."""
    recipe = resolve_recipe(ns_coeffs, ns_steps, preconditioning)
    return choose(recipe, method, preconditioning, dtype, (GROUP, *shape[-2:]), in_dtype)


def implementation_of(shape: tuple[int, int], dtype: jnp.dtype) -> str | None:
    """Returns what an optimizer multiplies matrices `(m, n)`, m ≤ n, of the products' dtype with.

    On Hopper GPUs, in 16 bits, that is one of the kernels, whose products of a matrix are the same
    in any stack, bit for bit, though XLA, which splits sums, is faster for some very wide matrices.
    Elsewhere None: the fastest of each product.
    """
    padded = (size + -size % 64 for size in shape)
    operand = jax.ShapeDtypeStruct((GROUP, *padded), dtype)
    if unsupported_reason("mosaic_gpu", operand):
        return None
    chosen = select_implementation(operand).implementation
    return "mosaic_gpu" if chosen == "xla" else chosen


def gram_form(
    in_dtype: jnp.dtype,
    *,
    ns_coeffs: NSCoeffs,
    ns_steps: int | jax.Array,
    dtype: ProductsDType,
    preconditioning: str,
    method: Method | None,
) -> Form | str:
    """Returns the gram form of `newton_schulz` with these arguments, or why there is none."""
    if method == "standard":
        return "the standard form was asked for, where every step multiplies with X"
    recipe = resolve_recipe(ns_coeffs, ns_steps, preconditioning)
    return _offer(recipe, "gram", preconditioning, dtype, in_dtype)


def _offer(recipe, method, preconditioning, dtype, in_dtype) -> Form | str:
    """The form of that method, or why there is none."""
    dtype = _products_dtype(recipe, method, dtype, in_dtype)
    reason = _no_gram_form(recipe, preconditioning, dtype) if method == "gram" else None
    return reason or Form(method, dtype, _products(recipe, method, dtype))


def _no_gram_form(recipe, preconditioning, dtype):
    """Returns why there is no gram form of the iteration in that dtype, or None."""
    if isinstance(recipe, Schedule):
        return None  # each step has that form, whatever it is called
    if is_traced(recipe):
        return "traced coefficients or steps have the standard form only"
    if recipe.diverging:
        return "rounding XXᵀ makes these coefficients diverge"
    if preconditioning == "spectral":
        return "preconditioning='spectral' needs more than the Gram matrix"
    if _gram.loses_accuracy(recipe, dtype):
        return f"these coefficients come so close to 1 that rounding XXᵀ to {dtype} would show"
    return None


def _products(recipe, method, dtype) -> Products:
    if isinstance(recipe, Schedule):
        return _composed.products(recipe.steps_in(dtype))
    if method == "gram":
        return _gram.products(recipe, dtype)
    num_steps = recipe.last - recipe.first
    return Products(grams=num_steps, squares=num_steps, applications=num_steps)


def _products_dtype(recipe, method, dtype, in_dtype):
    """The dtype that `dtype` stands for."""
    is_quintic = isinstance(recipe, Quintics)
    diverging = is_quintic and recipe.diverging
    if isinstance(dtype, str) and dtype == "auto":
        dtype = "bfloat16" if is_quintic and method == "standard" else "float16"
        if _device.platform() == "tpu":  # whose matrix units lack float16
            dtype = "bfloat16"
        if diverging:
            dtype = "float32"
    dtype = jnp.dtype(in_dtype if dtype is None else dtype)
    least = 32 if diverging else 16
    if is_quintic and jnp.finfo(dtype).bits < least:
        reason = ", or rounding makes these coefficients diverge" * diverging
        raise ValueError(
            f"dtype must have {least} bits or more{reason}, got {dtype}: pass dtype='auto'"
            " (ns_dtype='auto' to muon)"
        )
    if jnp.issubdtype(in_dtype, jnp.complexfloating):
        dtype = jnp.promote_types(dtype, jnp.complex64)
    return dtype
