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
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAliasType, get_args, get_origin

import jax

from muon_jax._argument_kinds import CheckedSchedule, FloatDType, Number, check_static
from muon_jax._foreign.calls import (
    check_names,
    check_order,
    check_positions,
    way_of_other_form,
)
from pallas_kernels import IMPLEMENTATIONS
from pallas_kernels.arguments import (
    check_array,
    check_flag,
    check_name,
    is_integer,
    shown,
)

type Check = Callable[[str, Any], None]


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


def check_axis(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is an integer."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {shown(value)}: pass {name}=-1, the last")


def _check_mask(name: str, value: Any) -> None:
    if not callable(value):
        for path, leaf in jax.tree.leaves_with_path(value):
            check_flag(f"{name}{jax.tree_util.keystr(path)}", leaf)


def _check_mu_dtype(name: str, value: Any) -> None:
    if not (hasattr(value, "load") and hasattr(value, "save")):  # no `Storage`
        FloatDType(least_bits=16, or_int8=True)(name, value)


def _check_implementation(name: str, value: Any) -> None:
    check_name(name, value, sorted(IMPLEMENTATIONS), or_none=True)


@dataclasses.dataclass(frozen=True)
class _Static:
    """A number that is no array."""

    number: Number

    def __call__(self, name: str, value: Any) -> None:
        """Raises unless `value` is such a number."""
        check_static(name, value)
        self.number(name, value)


BLOCK_GAIN = Number("[0, inf)", 1.0)
_RATE, _DECAY = Number("[0, inf)", 0.02), Number("[0, inf)", 0.1)
_EPS, BETA = Number("[0, inf)", 1e-8, is_exact=True), Number("[0, 1)", 0.95, is_exact=True)
# What annotations do not say, by the names that arguments have in every function.
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
    **dict.fromkeys(("ns_steps", "steps"), Number("[1, 100]", 5, is_whole=True)),
    "max_group_bytes": _Static(Number("[0, inf)", 2**30, is_whole=True)),
    "block_period": _Static(Number(f"[1, {2**31 - 1}]", 4, is_whole=True)),  # as counts, int32
    "block_gain": BLOCK_GAIN,
    "bandwidth": _Static(Number("(0, inf)", 50e9)),
    "latency": _Static(Number("[0, inf)", 2e-5)),
    "dtype": FloatDType(or_auto=True),
    "mu_dtype": _check_mu_dtype,
    "implementation": _check_implementation,
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
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    checks = _checks_of({p.name: p.annotation for p in parameters})
    takes_any = len(names) < len(parameters)
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    called = function.__name__

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        check_order(called, args, kwargs, by_position, names)
        if not takes_more:
            check_positions(called, args, kwargs, by_position)
        if not takes_any:
            given_by_name = dict(zip(by_position, args, strict=False)) | kwargs
            check_names(called, given_by_name, names, takes_inputs=takes_more)
        given = signature.bind_partial(*args, **kwargs)
        for name, value in given.arguments.items():
            if name in checks:
                _check_or_translate(checks[name], name, value, names)
            number = _DECLARED.get(name)
            is_schedule = callable(value) and not isinstance(value, CheckedSchedule)
            if is_schedule and isinstance(number, Number):
                given.arguments[name] = CheckedSchedule(name, number, value)
        return function(*given.args, **given.kwargs)

    return wrapper


def _check_or_translate(check: Check, name: str, value: Any, names: Sequence[str]) -> None:
    """Checks a value. Where another optimizer would take it, the error says what to write here."""
    try:
        check(name, value)
    except (TypeError, ValueError) as error:
        if way := way_of_other_form(name, value, names):
            error.args = (f"{str(error).partition(', got ')[0]}, got {shown(value)}: pass {way}",)
        raise


def check_fields(instance: Any) -> None:
    """Raises TypeError or ValueError where a field of a dataclass is not as declared."""
    checks = _checks_of_class(type(instance))
    for name, check in checks.items():
        _check_or_translate(check, name, getattr(instance, name), [*checks])


@functools.cache
def _checks_of_class(of_class: type) -> dict[str, Check]:
    return _checks_of({field.name: field.type for field in dataclasses.fields(of_class)})


def _checks_of(annotations: Mapping[str, Any]) -> dict[str, Check]:
    found = {name: _check_of(name, annotation) for name, annotation in annotations.items()}
    return {name: check for name, check in found.items() if check}


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
    or_schedule = any(get_origin(member) is collections.abc.Callable for member in members)
    or_tuple = any(get_origin(member) is tuple for member in members)

    def check(name: str, value: Any) -> None:
        if or_none and value is None or or_schedule and callable(value):
            return
        for each in value if or_tuple and isinstance(value, tuple) else (value,):
            declared(name, each)

    return check
