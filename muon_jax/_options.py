"""Arguments that are one of several names, or in a range, or dtypes."""

from typing import Any, TypeAliasType, get_args

import jax
import jax.numpy as jnp


def check(name: str, value: Any, choices: TypeAliasType) -> None:
    """Raises ValueError unless `value` is one of `choices`, a type of literals."""
    names = get_args(choices.__value__)
    if value not in names:
        raise ValueError(f"{name} must be one of {names}, got {value!r}")


def check_decay(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is in [0, 1), or an array, which may be traced."""
    if isinstance(value, int | float) and not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")


def check_float(name: str, dtype: jax.typing.DTypeLike | None) -> None:
    """Raises ValueError where `dtype` is neither None nor `"auto"` nor that of floats."""
    if dtype not in (None, "auto") and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"{name} must be a float dtype, got {jnp.dtype(dtype)}")
