"""Kinds of arguments: one real number in an interval, a float dtype, and what is static."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.arguments import is_real, shown, suggestion

_INT8 = "mu_dtype='int8' for momenta in 8 bits, or mu_dtype='bfloat16'"
_FLOATS = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")


@dataclasses.dataclass(frozen=True)
class Number:
    """One real number in an interval.

    Attributes:
        interval: such as "[0, 1)", with the number 0 and without the number 1.
        example: a number that is mostly right, for errors.
        is_whole: whether it is an integer.
        is_exact: whether 16 bits are too few for it: 0.999 is 1 in bfloat16, and 1e-8 is 0 in
            float16.
    """

    interval: str
    example: float
    is_whole: bool = False
    is_exact: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Raises unless `value` is such a number.

        Raises:
            TypeError: `value` is no real number, or is an array of several.
            ValueError: `value` is outside of the interval, or an array of too few bits.
        """
        if callable(value):
            raise TypeError(
                f"{name} must be a number, got the callable {value}: to give it a schedule, wrap"
                " the optimizer in optax.inject_hyperparams"
            )
        self.check(name, value, f"pass {name}={self.example}")

    def check(self, what: str, value: Any, remedy: str) -> None:
        """Raises as a call does, unless `value` is such a number.

        Args:
            what: the value, for errors.
            value: anything.
            remedy: what to do instead, for errors.
        """
        if not is_real(value) or np.ndim(value) > 0:
            raise TypeError(
                f"{what} must be one real number, got {shown(value)}: {remedy}, for example"
            )
        if self.is_exact and _has_few_bits(value):
            raise ValueError(
                f"{what} must have 32 bits, got {shown(value)}: 0.999 is 1 in bfloat16, and 1e-8 is"
                " 0 in float16. optax.inject_hyperparams makes arrays in the dtype of the"
                " parameters: pass hyperparam_dtype=jnp.float32 to it"
            )
        if not isinstance(value, Tracer) and not self._holds(value):
            kind = "an integer in" if self.is_whole else "in"
            raise ValueError(
                f"{what} must be {kind} {self.interval}, got {value}: {remedy}, for example"
            )

    def _holds(self, value: Any) -> bool:
        try:
            value = float(value)
        except OverflowError:  # an integer beyond all floats
            value = math.inf
        low, high = map(float, self.interval[1:-1].split(","))
        above = low <= value if self.interval[0] == "[" else low < value
        below = value <= high if self.interval[-1] == "]" else value < high
        return above and below and not (self.is_whole and value % 1)


def _has_few_bits(value: Any) -> bool:
    """Whether a real number is an array, traced or not, of floats below 32 bits."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


@dataclasses.dataclass(frozen=True)
class CheckedSchedule:
    """A schedule whose results are checked when it is called.

    The shape and the dtype of a result are always checked, and its value where it is known: outside
    of a trace, or where the schedule returns a number of Python.

    Attributes:
        name: the argument that has the schedule.
        number: what a result must be.
        schedule: maps the count of a step to the number.
    """

    name: str
    number: Number
    schedule: Callable[[Any], Any]

    def __call__(self, count: Any) -> Any:
        """Returns what the schedule returns.

        Raises:
            TypeError: that is no real number, or is an array of several.
            ValueError: it is outside of the interval.
        """
        value = self.schedule(count)
        what = f"the number that the schedule {self.name} returns"
        self.number.check(what, value, f"return {self.number.example}")
        return value

    def __repr__(self) -> str:
        return repr(self.schedule)


@dataclasses.dataclass(frozen=True)
class FloatDType:
    """A float or complex dtype, or None.

    Attributes:
        least_bits: how many bits it has at least.
        or_auto: whether `"auto"` is taken.
        or_int8: whether int8 is taken.
    """

    least_bits: int = 0
    or_auto: bool = False
    or_int8: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Raises unless `value` is such a dtype.

        Raises:
            ValueError: `value` is none. `optax.inject_hyperparams` makes an array of a dtype that
                is callable.
        """
        check_static(name, value)
        if value is None or (self.or_auto and isinstance(value, str) and value == "auto"):
            return
        try:
            dtype = jnp.dtype(value)
        except (TypeError, ValueError, SyntaxError):
            is_narrow = self.or_int8 and re.search(r"(?<!\d)[48](?!\d)", str(value))
            names = (*_FLOATS, "auto") if self.or_auto else _FLOATS
            hint = f": pass {_INT8}" if is_narrow else suggestion(value, names)
            raise ValueError(
                f"{name} must be the name of a float dtype, got {shown(value)}{hint}"
            ) from None
        if self.or_int8 and dtype == jnp.int8:
            return
        if not jnp.issubdtype(dtype, jnp.inexact):
            kinds = "a float dtype or int8" if self.or_int8 else "a float dtype"
            example = _INT8 if self.or_int8 else f"{name}='float32', for example"
            raise ValueError(f"{name} must be {kinds}, got {dtype}: pass {example}")
        if jnp.finfo(dtype).bits < self.least_bits:
            raise ValueError(
                f"{name} must have {self.least_bits} bits or more, or be int8, got {dtype}: pass"
                f" {_INT8}"
            )


def check_static(name: str, value: Any) -> None:
    """Raises ValueError where `value` is an array, as `optax.inject_hyperparams` makes of it."""
    if isinstance(value, jax.Array):
        raise ValueError(
            f"{name} must be no array, got {value}: optax.inject_hyperparams makes one of it;"
            f" give it static_args={name.partition('[')[0]!r}"
        )
