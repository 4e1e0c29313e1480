"""What to write in the place of a call in the words of another optimizer."""

import functools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from muon_jax._foreign.names import FOREIGN, Foreign
from pallas_kernels._checks import is_integer, is_real, shown, suggestion

_BY_NAME = {name: row for row in FOREIGN for name in row.names}
# The rows by our own names, for functions that do not have them.
_OURS = {way.removesuffix("={}"): row for row in FOREIGN for way in row.ways if "={}" in way[-3:]}
_VIEWS = ("muon_weight_dimension_numbers", "weight_dimension_numbers")
# The words in names that say whose an argument is.
_ADAM, _MUON = {"adam", "adamw", "aux"}, {"muon", "matrix", "hidden"}
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def check_names(function: str, given: Mapping[str, Any], parameters: Sequence[str]) -> None:
    """Raises TypeError where `given` has names that `parameters` lacks."""
    unknown = {name: value for name, value in given.items() if name not in parameters}
    if unknown:
        *first, last = (repr(name) for name in unknown)
        named = f"{', '.join(first)} or {last}" if first else last
        raise TypeError(
            f"{function} has no argument {named}{_advice(function, unknown, parameters)}"
        )


def check_positions(
    function: str, args: Sequence[Any], kwargs: Mapping[str, Any], by_position: Sequence[str]
) -> None:
    """Raises TypeError where a call has too many arguments by position, or gives one twice."""
    twice = [name for name, _ in zip(by_position, args, strict=False) if name in kwargs]
    if twice:
        raise TypeError(f"{function} got {twice[0]} by position and by name: pass it once")
    if len(args) <= len(by_position):
        return
    value = args[len(by_position)]
    way = "the others by name"
    if is_by_role(value):
        way = f"{_VIEWS[0]}={_shown_by_role(value)}"
    elif any(map(is_transformation, args)):
        way = "the parameters, and by name the arguments of muon in place of an optimizer"
    raise TypeError(
        f"{function} takes by position {', '.join(by_position)}, got {len(args)} arguments: pass"
        f" {way}"
    )


def check_order(
    function: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    by_position: Sequence[str],
    parameters: Sequence[str],
) -> None:
    """Raises where values have the order or the place of another optimizer's.

    Args:
        function: the name of the function.
        args: what the call gives by position.
        kwargs: what it gives by name, by whatever names.
        by_position: the names of the arguments that `function` takes by position.
        parameters: the names of all arguments.

    Raises:
        TypeError: parameters came as a learning rate, or `by_role` as something else than views.
        ValueError: a number, or another package's name, came as coefficients.
    """
    given = dict(kwargs) | dict(zip(by_position, args, strict=False))
    rate = given.get("learning_rate")
    if _is_params(rate):
        ways = [f"learning_rate={_literal(value)}" for value in args[1:2]]
        ways += _ways_by_kind(args[2:], parameters)
        ways += _passed({k: v for k, v in kwargs.items() if v is not rate}, parameters)
        if not any(way.startswith("learning_rate") for way in ways):
            ways = ["0.02", *ways]
        raise TypeError(
            f"{function} takes no parameters, got {_kind(rate)} as learning_rate: call optimizer ="
            f" {function}({', '.join(ways)}), and then optimizer.init(params)"
        )
    for name, value in given.items():
        if is_by_role(value) and name not in _VIEWS:
            views = next((view for view in _VIEWS if view in parameters), _VIEWS[0])
            raise TypeError(
                f"{name} must not be by_role: pass {views}={_shown_by_role(value)} by name"
            )
    coeffs = given.get("ns_coeffs")
    if isinstance(coeffs, str) and coeffs in ("simple", "quintic"):
        way = _BY_NAME["coefficient_type"].by_value[coeffs]
        raise ValueError(f"ns_coeffs has another name for {coeffs!r}: pass {way}")
    if _is_number(coeffs):
        place = [*by_position].index("ns_coeffs")
        is_by_position = place < len(args)
        ways = _ways_by_kind(args[place:] if is_by_position else [coeffs], parameters)
        where = f" as the {_ORDINALS[place]} argument of {function}" if is_by_position else ""
        if not ways and "beta" in parameters:  # those of `scale_by_muon`, which has no rate
            ways = [f"optax.scale_by_learning_rate({_literal(coeffs)}) to optax.chain"]
        raise ValueError(
            f"ns_coeffs must be a name or numbers (a, b, c), got {coeffs}{where}: pass"
            f" {', '.join(ways) or '(3.4445, -4.775, 2.0315)'}"
        )


def way_of_other_form(name: str, value: Any, parameters: Sequence[str]) -> str | None:
    """Returns what to write for a value that another optimizer's argument of this name has."""
    ways: dict[str, str] = {}
    if name in ("momentum", "nesterov") and _is_number(value) and 0 < value < 1:
        ways = {"": f"beta={_literal(value)}"}
    elif name in ("beta", "adam_b1", "adam_b2") and _is_pair(value):
        ways = {"": "adam_b1={}, adam_b2={}".format(*map(_literal, value))}
    elif name == "eps" and value in ("frobenius", "spectral", "aol", "schatten"):
        ways = {"": f"preconditioning={value!r}"}
    elif name in ("shape_scale", "consistent_rms"):
        if isinstance(value, bool):
            ways = {"": "consistent_rms=0.2" if value else "consistent_rms=None"}
        of = ("adjust_lr_fn", "adjust_lr", "scale_mode")
        ways = ways or {k: v for n in of for k, v in _BY_NAME[n].by_value.items() if k}
    elif name in ("ns_method", "method"):
        ways = dict(_BY_NAME["ns_algorithm"].by_value)
    way = ways.get("") or (ways.get(value) if isinstance(value, str) else None)
    way = _renamed(way, parameters) if way else None
    return way if way and _arguments_of(way) <= {*parameters} else None


def is_by_role(value: Any) -> bool:
    """Returns whether `value` is `by_role`, or a partial of it."""
    while isinstance(value, functools.partial):
        value = value.func
    module = str(getattr(value, "__module__", ""))
    return getattr(value, "__name__", "") == "by_role" and module.startswith("muon_jax")


def is_transformation(value: Any) -> bool:
    """Returns whether `value` is a transformation of optax, such as an optimizer."""
    return isinstance(value, tuple) and hasattr(value, "init") and hasattr(value, "update")


def _advice(function: str, unknown: Mapping[str, Any], parameters: Sequence[str]) -> str:
    """What to write for names that the function does not have."""
    passed, elsewhere, others, near = [], [], [], []
    for name, value in unknown.items():
        row, known = _found(name, parameters)
        if row is None and known:
            passed.append(f"{known}={_literal(value)}")
        elif row is None:
            near.append(_nearest(name, parameters))
        elif way := _way(row, value, parameters):
            passed.append(way)
            others += [row.note] if row.note and row.ways else []
        elif row.chained and function.startswith("scale_by"):
            elsewhere.append(f"chain {function} with {row.chained.format(_literal(value))}")
        elif way := _way(row, value, None):
            elsewhere.append(f"{row.taker} takes {way}")
        elif row.note:
            others.append(f"leave out {name}: {row.note}")
        else:
            choices = [f"{way} for {key!r}" for key, way in row.by_value.items()]
            others.append(f"in its place {', '.join(choices)}")
    found = [f"pass {', '.join(passed)}"] if passed else []
    found += dict.fromkeys(elsewhere + others + [text for text in near if text])
    return f": {'; '.join(found)}" if found else ""


def _passed(given: Mapping[str, Any], parameters: Sequence[str]) -> list[str]:
    """The arguments of a call by our names, without those that the function does not take."""
    found: list[str | None] = []
    for name, value in given.items():
        if name in parameters:
            own = f"{name}={_literal(value)}"
            found.append(way_of_other_form(name, value, parameters) or own)
        elif row := _BY_NAME.get(name):
            found.append(_way(row, value, parameters))
    return [way for way in found if way]


def _found(name: str, parameters: Sequence[str]) -> tuple[Foreign | None, str]:
    """The row of the name, or an argument of the function that is the same in other words."""
    if row := _BY_NAME.get(name) or _OURS.get(name):
        return row, ""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    whose = {*words} & (_ADAM | _MUON)
    base = "_".join(word for word in words if word not in whose)
    if whose & _ADAM:
        candidates = [f"adam_{base}"]
    else:
        candidates = [f"muon_{base}", base] if whose else ["_".join(words)]
    for candidate in candidates:
        if candidate in _BY_NAME:
            return _BY_NAME[candidate], ""
        if candidate in parameters and candidate != name:
            return None, candidate
    return None, ""


def _nearest(name: str, parameters: Sequence[str]) -> str:
    """A question after an argument whose name is nearly this one, of the same side and number."""

    def kind(of: str) -> tuple[bool, str]:
        return "adam" in of, re.sub(r"\D", "", of)

    alike = [known for known in parameters if kind(known) == kind(name)]
    return suggestion(name, alike, cutoff=0.75).removeprefix(": ")


def _way(row: Foreign, value: Any, parameters: Sequence[str] | None) -> str | None:
    """What to write for the value to a function with these parameters; None for any function."""
    is_key = isinstance(value, str | bool | None)
    ways: Sequence[str] = [row.by_value[value]] if is_key and value in row.by_value else row.ways
    for way in ways:
        way = way if parameters is None else _renamed(way, parameters)
        if parameters is None or _arguments_of(way) <= {*parameters}:
            pair = map(_literal, value) if _is_pair(value) else ("...", "...")
            return way.format(*pair) if "{0}" in way else way.format(_literal(value))
    return None


def _renamed(way: str, parameters: Sequence[str]) -> str:
    """The way in the names of `newton_schulz`, which has `dtype` and `method`."""
    if "ns_dtype" in parameters:
        return way
    return re.sub(r"\bns_(dtype|method)\b", r"\1", way)


def _arguments_of(way: str) -> set[str]:
    """The arguments that a way passes, without those of a call within it."""
    return {*re.findall(r"(\w+)=", re.sub(r"\(.*\)", "", way))}


def _ways_by_kind(values: Sequence[Any], parameters: Sequence[str]) -> list[str]:
    """What numbers in the order of another optimizer are, by their kind and size."""
    kinds: list[tuple[str, Any]] = []
    for value in values:
        if isinstance(value, bool):
            kinds.append(("nesterov", value))
        elif is_integer(value) and value > 1:
            kinds.append(("ns_steps", value))
        elif _is_number(value):
            small = "eps" if 0 < value < 1e-4 else "weight_decay"
            kinds.append(("beta" if value >= 0.5 else small, value))
    if [name for name, _ in kinds].count("beta") == 2:  # optax.adamw's order
        of_adam = iter(("adam_b1", "adam_b2"))
        renamed = {"eps": "adam_eps"}
        kinds = [
            (next(of_adam) if name == "beta" else renamed.get(name, name), value)
            for name, value in kinds
        ]
    return [f"{name}={_literal(value)}" for name, value in kinds if name in parameters]


def _is_number(value: Any) -> bool:
    is_known = is_real(value) and not isinstance(value, jax.core.Tracer)
    return is_known and np.ndim(value) == 0


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_number, value))


def _is_params(value: Any) -> bool:
    """Whether a learning rate is parameters, or a model."""
    if isinstance(value, Mapping | list | tuple | Iterator | types.GeneratorType):
        return True
    if hasattr(value, "named_parameters") or hasattr(value, "init_with_output"):
        return True  # a module of PyTorch, or of linen
    return any(getattr(leaf, "ndim", 0) >= 2 for leaf in jax.tree.leaves(value))


def _kind(value: Any) -> str:
    is_array = isinstance(value, jax.Array | np.ndarray)
    return shown(value) if is_array else f"a {type(value).__name__}"


def _shown_by_role(value: Any) -> str:
    if not isinstance(value, functools.partial):
        return "by_role"
    words = (f", {name}={_literal(each)}" for name, each in value.keywords.items())
    return f"functools.partial(by_role{''.join(words)})"


def _literal(value: Any) -> str:
    """The value as it is written in a call; `...` for what is long."""
    if isinstance(value, np.generic | np.ndarray | jax.Array) and _is_number(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if is_by_role(value):
        return _shown_by_role(value)
    if isinstance(value, tuple | list) and len(value) <= 8:
        parts = [_literal(each) for each in value]
        if "..." not in parts:
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    if isinstance(value, type) or hasattr(value, "dtype") and hasattr(value, "__name__"):
        return f"jnp.{value.__name__}" if hasattr(value, "dtype") else "..."
    return "..."
