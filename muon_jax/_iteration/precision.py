"""The precision of products of float32, which JAX rounds to fewer bits on GPUs and TPUs."""

import contextlib

import jax
import jax.numpy as jnp

from pallas_kernels import _device


def roundoff(dtype: jax.typing.DTypeLike) -> float:
    """Returns the unit roundoff of operands: GPUs take float32 as TF32, cut off after ten bits.

    Unless the user has set a precision that keeps it.
    """
    is_float32 = jnp.finfo(dtype).dtype == jnp.float32
    kept = jax.config.jax_default_matmul_precision in ("highest", "float32")
    if is_float32 and _device.platform() == "gpu" and not kept:
        return 2.0**-10
    return float(jnp.finfo(dtype).eps) / 2


def context(dtype: jax.typing.DTypeLike, *, full: bool) -> contextlib.AbstractContextManager:
    """A context for products of `dtype`: a precision for float32, where the user has set none.

    TPUs would round it to bfloat16. GPUs may take it as TF32, unless it is needed in full: under
    composed schedules ("accurate" exceeds 1.5 in TF32, on 3 of 2016 random spectra) and under
    coefficients that rounding makes diverge.
    """
    if jax.config.jax_default_matmul_precision is None and jnp.finfo(dtype).dtype == jnp.float32:
        if _device.platform() == "tpu":
            return jax.default_matmul_precision("high")
        if _device.platform() == "gpu" and full:
            return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
