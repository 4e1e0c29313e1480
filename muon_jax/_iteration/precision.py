"""The precision of float32 products, which JAX rounds to fewer bits on GPUs and TPUs."""

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import device as _device


class Backend(NamedTuple):
    """What a choice of form or implementation depends on, beside its arguments.

    Attributes:
        platform, kind: of the device that functions are traced for.
        matmul_precision: JAX's setting.
    """

    platform: str
    kind: str
    matmul_precision: str | None


def backend_in_force() -> Backend:
    """Returns the device and the precision that functions are traced for."""
    precision = jax.config.jax_default_matmul_precision
    return Backend(_device.platform(), _device.kind(), precision)


def roundoff(dtype: jax.typing.DTypeLike) -> float:
    """Returns the unit roundoff of operands.

    GPUs take float32 as TF32, cut off after ten bits, unless the user has set a precision that
    keeps float32.
    """
    is_float32 = jnp.finfo(dtype).dtype == jnp.float32
    kept = jax.config.jax_default_matmul_precision in ("highest", "float32")
    if is_float32 and _device.platform() == "gpu" and not kept:
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
        if _device.platform() == "tpu":
            return jax.default_matmul_precision("high")
        if _device.platform() == "gpu" and full:
            return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
