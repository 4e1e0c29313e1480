"""Checks of arguments: one of several names, a number in a range, a float dtype."""

import math
from typing import Any, TypeAliasType, get_args

import jax
import jax.numpy as jnp


def check_choice(name: str, value: Any, choices: TypeAliasType) -> None:
    """Raises ValueError unless `value` is one of `choices`, an alias of a `Literal` type."""
    names = get_args(choices.__value__)
    if value not in names:
        raise ValueError(f"{name} must be one of {names}, got {value!r}")


def check_number(name: str, value: Any, below: float = math.inf) -> None:
    """Raises unless `value` is a number in [0, below) or an array, which may be traced.

    The entries of an array are not checked.

    Raises:
        TypeError: `value` is callable, as schedules are.
        ValueError: `value` is a number outside of [0, below).
    """
    if callable(value):
        raise TypeError(
            f"{name} must be a number, got the callable {value}: to give it a schedule, wrap the"
            " optimizer in optax.inject_hyperparams"
        )
    if not isinstance(value, jax.Array) and not 0 <= value < below:
        raise ValueError(f"{name} must be in [0, {below}), got {value}")


def check_float_dtype(name: str, dtype: jax.typing.DTypeLike | None) -> None:
    """Raises ValueError unless `dtype` is None, `"auto"`, or a float or complex dtype."""
    if dtype not in (None, "auto") and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"{name} must be a float dtype, got {jnp.dtype(dtype)}: pass 'float32', for example"
        )
