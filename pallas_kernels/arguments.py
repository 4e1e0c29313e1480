"""Checks of arguments, for both packages."""

import difflib
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_name(name: str, value: Any, names: Collection[str], *, or_none: bool = False) -> None:
    """Raises ValueError unless `value` is one of `names`, or None where `or_none` says so."""
    if (value is None and or_none) or (isinstance(value, str) and value in names):
        return
    raise ValueError(
        f"{name} must be one of {names}{' or None' * or_none}, got"
        f" {shown(value)}{suggestion(value, names)}"
    )


def check_flag(name: str, value: Any, *, or_none: bool = False) -> None:
    """Raises TypeError unless `value` is a boolean, or None where `or_none` says so."""
    if not isinstance(value, bool | np.bool_) and not (value is None and or_none):
        flags = "True, False or None" if or_none else "True or False"
        raise TypeError(
            f"{name} must be {flags}, got {shown(value)}: pass {name}=True or {name}=False"
        )


def check_array(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is an array, of JAX or of NumPy, traced or not."""
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be an array, got {shown(value)}: pass jnp.asarray({name})")


def check_operand(name: str, value: Any) -> None:
    """Raises TypeError unless `value` has the shape of matrices, and a dtype."""
    if not hasattr(value, "dtype") or len(getattr(value, "shape", ())) < 2:
        raise TypeError(
            f"{name} must have a dtype and the shape (..., m, n), got {shown(value)}: pass a"
            " matrix, or jax.ShapeDtypeStruct((m, n), dtype)"
        )


def is_real(value: Any) -> bool:
    """Returns whether `value` is a real number or an array of such, and no boolean."""
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    return isinstance(value, np.generic | np.ndarray | jax.Array) and any(
        jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer)
    )


def is_integer(value: Any) -> bool:
    """Returns whether `value` is an integer that is no array and no boolean."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def suggestion(value: Any, names: Collection[str], cutoff: float = 0.6) -> str:
    """Returns the nearest of the names as a question, or nothing where none is near."""
    near = difflib.get_close_matches(str(value), names, 1, cutoff)
    return f": did you mean {near[0]!r}?" if near else ""


def shown(value: Any) -> str:
    """Returns a value as errors show it: an array by dtype and shape."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.dtype}{list(value.shape)}"
    return repr(value)


def check_supported(implementation: str, reason: str | None) -> None:
    """Raises NotImplementedError where there is a reason why the implementation cannot run."""
    if reason:
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run: {reason}. Pass implementation=None to"
            f" have one chosen that can."
        )
