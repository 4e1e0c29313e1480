"""Arguments that are one of several names, or in a range, or dtypes."""

import math
from typing import Any, TypeAliasType, get_args

import jax
import jax.numpy as jnp


def check(name: str, value: Any, choices: TypeAliasType) -> None:
    """Raises ValueError unless `value` is one of `choices`, a type of literals."""
    names = get_args(choices.__value__)
    if value not in names:
        raise ValueError(f"{name} must be one of {names}, got {value!r}")


def check_number(name: str, value: Any, below: float = math.inf) -> None:
    """Raises unless `value` is a number in [0, below), or an array, which may be traced.

    Raises:
        TypeError: it is a schedule.
        ValueError: it is another number.
    """
    if callable(value):
        raise TypeError(
            f"{name} must be a number, got {value}: optax.inject_hyperparams takes schedules of it"
        )
    if not isinstance(value, jax.Array) and not 0 <= value < below:
        raise ValueError(f"{name} must be in [0, {below}), got {value}")


def check_float(name: str, dtype: jax.typing.DTypeLike | None) -> None:
    """Raises ValueError where `dtype` is neither None nor `"auto"` nor that of floats."""
    if dtype not in (None, "auto") and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"{name} must be a float dtype, got {jnp.dtype(dtype)}")
