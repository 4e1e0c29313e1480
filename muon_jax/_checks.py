"""The one place where arguments are checked: what each public argument may be, by its name.

An annotation declares which names there are (`Literal`), what is a boolean, and where None or a
schedule is taken. `_DECLARED`, or `Annotated`, declares the rest. Values are checked where they are
known: numbers, and arrays outside of a trace. A traced number is known to be real and to be one
number.
"""

import collections.abc
import dataclasses
import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAliasType, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from muon_jax._foreign import check_call, way_of_other_form
from pallas_kernels import IMPLEMENTATIONS
from pallas_kernels.arguments import (
    check_array,
    check_flag,
    check_name,
    is_integer,
    is_real,
    shown,
    suggestion,
)

type Check = Callable[[str, Any], None]

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
        is_static: whether it may not be an array.
    """

    interval: str
    example: float
    is_whole: bool = False
    is_exact: bool = False
    is_static: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Raises TypeError or ValueError unless `value` is such a number."""
        if self.is_static:
            _check_static(name, value)
        if callable(value):
            raise TypeError(
                f"{name} must be a number, got the callable {value}: to give it a schedule, wrap"
                " the optimizer in optax.inject_hyperparams"
            )
        self.check(name, value, f"pass {name}={self.example}")

    def check(self, what: str, value: Any, remedy: str) -> None:
        """Raises as a call does; errors name `what` the value is, and the remedy."""
        if not is_real(value) or np.ndim(value) > 0:
            raise TypeError(
                f"{what} must be one real number, got {shown(value)}: {remedy}, for example"
            )
        dtype = getattr(value, "dtype", int)
        if self.is_exact and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
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
        """Returns what the schedule returns, or raises as `number` does."""
        value = self.schedule(count)
        what = f"the number that the schedule {self.name} returns"
        self.number.check(what, value, f"return {self.number.example}")
        return value

    def __repr__(self) -> str:
        return repr(self.schedule)


def _check_static(name: str, value: Any) -> None:
    """Raises ValueError where `value` is an array, as `optax.inject_hyperparams` makes of it."""
    if isinstance(value, jax.Array):
        raise ValueError(
            f"{name} must be no array, got {value}: optax.inject_hyperparams makes one of it;"
            f" give it static_args={name.partition('[')[0]!r}"
        )


def _check_dtype(name: str, value: Any, *, of_momenta: bool = False) -> None:
    """Raises ValueError unless `value` is a float or complex dtype, or None.

    Products may have the dtype "auto". Momenta may have int8 or a `Storage`, and no fewer bits.
    """
    _check_static(name, value)
    is_storage = hasattr(value, "load") and hasattr(value, "save")
    is_own = is_storage if of_momenta else isinstance(value, str) and value == "auto"
    if value is None or is_own:
        return
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError, SyntaxError):
        is_narrow = of_momenta and re.search(r"(?<!\d)[48](?!\d)", str(value))
        names = _FLOATS if of_momenta else (*_FLOATS, "auto")
        hint = f": pass {_INT8}" if is_narrow else suggestion(value, names)
        raise ValueError(
            f"{name} must be the name of a float dtype, got {shown(value)}{hint}"
        ) from None
    bits = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.inexact) else 0
    if bits >= 16 or (dtype == jnp.int8 if of_momenta else bits):
        return
    kinds, example = "a float dtype", f"{name}='float32', for example"
    if of_momenta:
        kinds, example = "a float dtype of 16 bits or more, or int8", _INT8
    raise ValueError(f"{name} must be {kinds}, got {dtype}: pass {example}")


def check_patterns(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a dict by regular expressions."""
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name} must be a dict by regular expressions of paths, got {shown(value)}: pass"
            f" {name}={{'kernel$': ...}}"
        )
    for pattern in value:
        check_pattern(f"each key of {name}", pattern)


def check_pattern(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a regular expression."""
    try:
        re.compile(value)
    except (TypeError, re.error) as error:
        raise TypeError(
            f"{name} must be a regular expression, got {shown(value)} ({error}): pass 'kernel$',"
            " for example"
        ) from None


def check_axis(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is an integer."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {shown(value)}: pass {name}=-1, the last")


def _check_coeffs(name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        check_patterns(name, value)
        if not value:
            raise ValueError(
                f"{name} has no coefficients, got {{}}: pass {{'.*': 'standard'}}, for example"
            )


def _check_sizes(name: str, value: Any) -> None:
    if not isinstance(value, tuple | list) or not all(map(is_integer, value)):
        raise TypeError(
            f"{name} must be a tuple of integers, got {shown(value)}: pass {name}=(8, 8), for"
            " example"
        )


def _check_mask(name: str, value: Any) -> None:
    if not callable(value):
        for path, leaf in jax.tree.leaves_with_path(value):
            check_flag(f"{name}{jax.tree_util.keystr(path)}", leaf)


BLOCK_GAIN = Number("[0, inf)", 1.0)
_RATE, _DECAY = Number("[0, inf)", 0.02), Number("[0, inf)", 0.1)
_EPS, BETA = Number("[0, inf)", 1e-8, is_exact=True), Number("[0, 1)", 0.95, is_exact=True)
_STEPS = Number("[1, 100]", 5, is_whole=True)
_PERIOD = Number(f"[1, {2**31 - 1}]", 4, is_whole=True, is_static=True)  # as counts, int32


# What annotations do not say, by the names that arguments have in every function.
def _check_function(name: str, value: Any) -> None:
    if not callable(value):
        example = "jnp.sign" if name == "before" else "lambda o, x: o * jnp.sign(x)"
        raise TypeError(
            f"{name} must be a function of matrices, got {shown(value)}: pass {name}={example}, for"
            " example"
        )
    if isinstance(value, jax.tree_util.Partial):
        return
    remedy = "pass a jax.tree_util.Partial of a function and of the arrays that it needs"
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name} must be hashable, got {shown(value)}: {remedy}") from None
    if inspect.isfunction(value):
        held = inspect.getclosurevars(value).nonlocals
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(held)):
            raise TypeError(
                f"{name} must not close over a traced array, got {shown(value)}: {remedy}"
            )


_DECLARED: dict[str, Check] = {
    "learning_rate": _RATE,
    "adam_learning_rate": _RATE,
    "weight_decay": _DECAY,
    "adam_weight_decay": _DECAY,
    "beta": BETA,
    "adam_b1": Number("[0, 1)", 0.9, is_exact=True),
    "adam_b2": Number("[0, 1)", 0.999, is_exact=True),
    "eps": _EPS,
    "adam_eps": _EPS,
    "adam_eps_root": _EPS,
    "consistent_rms": Number("[0, inf)", 0.2),
    "ns_coeffs": _check_coeffs,
    "ns_steps": _STEPS,
    "steps": _STEPS,
    "before": _check_function,
    "after": _check_function,
    "max_group_bytes": Number("[0, inf)", 2**30, is_whole=True, is_static=True),
    "block_period": _PERIOD,
    "block_gain": BLOCK_GAIN,
    "bandwidth": Number("(0, inf)", 50e9, is_static=True),
    "latency": Number("[0, inf)", 2e-5, is_static=True),
    "dtype": _check_dtype,
    "mu_dtype": functools.partial(_check_dtype, of_momenta=True),
    "implementation": functools.partial(check_name, names=sorted(IMPLEMENTATIONS), or_none=True),
    "x": check_array,
    "weight_decay_mask": _check_mask,
    "axis": check_axis,
    "sizes": _check_sizes,
    "rules": check_patterns,
}


def checks_arguments[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function` with a check of each argument that a call gives.

    The result raises TypeError for an argument that `function` does not have, and TypeError or
    ValueError for a value that is not as declared. `function` gets each schedule of a number as a
    `CheckedSchedule`, which checks what it returns.
    """
    signature = inspect.signature(function)
    checks = _checks_of(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        check_call(function.__name__, signature, args, kwargs)
        given = signature.bind_partial(*args, **kwargs)
        for name, value in given.arguments.items():
            _check(checks, name, value, [*signature.parameters])
            number = _DECLARED.get(name)
            is_schedule = callable(value) and not isinstance(value, CheckedSchedule)
            if is_schedule and isinstance(number, Number):
                given.arguments[name] = CheckedSchedule(name, number, value)
        return function(*given.args, **given.kwargs)

    return wrapper


def check_fields(instance: Any) -> None:
    """Raises TypeError or ValueError where a field of a dataclass is not as declared."""
    checks = _checks_of(type(instance))
    for name in checks:
        _check(checks, name, getattr(instance, name), [*checks])


def _check(checks: Mapping[str, Check], name: str, value: Any, names: Sequence[str]) -> None:
    """Checks a value. Where another optimizer would take it, the error says what to write here."""
    try:
        if name in checks:
            checks[name](name, value)
    except (TypeError, ValueError) as error:
        if way := way_of_other_form(name, value, names):
            error.args = (f"{str(error).partition(', got ')[0]}, got {shown(value)}: pass {way}",)
        raise


@functools.cache
def _checks_of(called: Callable[..., Any]) -> dict[str, Check]:
    """The checks of a function's arguments, or a dataclass' fields, without those that take all."""
    parameters = inspect.signature(called).parameters.values()
    checks = {p.name: _check_of(p.name, p.annotation) for p in parameters}
    return {name: check for name, check in checks.items() if check}


def _check_of(name: str, annotation: Any) -> Check | None:
    """The check of the argument of this name and annotation, None where all is taken."""
    declared = _DECLARED.get(name)
    if get_origin(annotation) is Annotated:
        annotation, declared = get_args(annotation)
    members = get_args(annotation) or (annotation,)
    or_none = types.NoneType in members
    if bool in members:
        return functools.partial(check_flag, or_none=or_none)
    for member in members:
        if isinstance(member, TypeAliasType) and get_origin(member.__value__) is Literal:
            names = get_args(member.__value__)
            return functools.partial(check_name, names=names, or_none=or_none)
    if declared is None:
        return None
    or_schedule = declared is not _check_function and any(
        get_origin(member) is collections.abc.Callable for member in members
    )
    or_tuple = any(get_origin(member) is tuple for member in members)
    checked = tuple(m for m in members if isinstance(m, type) and dataclasses.is_dataclass(m))

    def check(name: str, value: Any) -> None:
        is_checked = isinstance(value, checked)
        if is_checked or or_none and value is None or or_schedule and callable(value):
            return
        for each in value if or_tuple and isinstance(value, tuple) else (value,):
            declared(name, each)

    return check
