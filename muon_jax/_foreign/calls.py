"""What to write in the place of a call in the words of another optimizer."""

import difflib
import itertools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from muon_jax._foreign.names import CONTRIB
from muon_jax._foreign.ways import (
    BY_NAME,
    CALL_OF_BY_USE,
    arguments_of_way,
    each_once,
    factor_beside_shape,
    is_betas,
    is_number,
    is_pair,
    renamed,
    row_of,
    shown_views,
    way_of,
    ways_by_kind,
    written,
)
from pallas_kernels.arguments import shown, suggestion

_VIEWS = ("muon_weight_dimension_numbers", "weight_dimension_numbers")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def check_names(
    function: str, given: Mapping[str, Any], parameters: Sequence[str], takes_inputs: bool = False
) -> None:
    """Raises TypeError where `given` has names that `parameters` lacks.

    Args:
        function: the name of the function.
        given: what the call gives by name.
        parameters: the names of all arguments.
        takes_inputs: whether it takes the inputs of a model by position, as `by_use`.
    """
    unknown = {name: value for name, value in given.items() if name not in parameters}
    if unknown:
        *first, last = (repr(name) for name in unknown)
        named = f"{', '.join(first)} or {last}" if first else last
        advise = _advice_on_inputs if takes_inputs else _advice
        raise TypeError(
            f"{function} has no argument {named}{advise(function, unknown, given, parameters)}"
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
    if views := shown_views(value):
        way = f"{_VIEWS[0]}={views}"
    elif any(map(is_transformation, args)):
        way = "the parameters, and by name the arguments of muon in place of an optimizer"
    raise TypeError(
        f"{function} takes {', '.join(by_position)} by position, got {len(args)} arguments: pass"
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
        TypeError: parameters came as a learning rate; or `by_role`, `by_use`, what it returns, an
            optimizer or a mesh came as something else.
        ValueError: a number, or another package's name, came as coefficients.
    """
    given = dict(kwargs) | dict(zip(by_position, args, strict=False))
    for name, value in given.items():
        what, way = _out_of_place(name, value, parameters)
        if what:
            raise TypeError(f"{name} must not be {what}: pass {way}")
    rate = given.get("learning_rate")
    if _is_params(rate):
        values = args[2:] if args[1:2] == (None,) else args[1:]  # Dion's mesh may be None
        ways = [f"learning_rate={written(value)}" for value in values[:1]]
        ways += ways_by_kind(values[1:], parameters)
        ways += _passed({k: v for k, v in kwargs.items() if v is not rate}, parameters)
        if not any(way.startswith("learning_rate") for way in ways):
            ways = ["0.02", *ways]
        ways = each_once(ways)
        raise TypeError(
            f"{function} takes no parameters, got {_kind(rate)} as learning_rate: call optimizer ="
            f" {function}({', '.join(ways)}), and then optimizer.init(params)"
        )
    coeffs = given.get("ns_coeffs")
    if isinstance(coeffs, str) and coeffs in ("simple", "quintic"):
        way = BY_NAME["coefficient_type"].by_value[coeffs]
        raise ValueError(f"ns_coeffs has another name for {coeffs!r}: pass {way}")
    is_wrong = coeffs is None or isinstance(coeffs, bool) or is_number(coeffs) or is_betas(coeffs)
    if "ns_coeffs" in given and is_wrong:
        values, where = [coeffs], ""
        if "ns_coeffs" in [*by_position][: len(args)]:
            place = [*by_position].index("ns_coeffs")
            values, where = args[place:], f" as the {_ORDINALS[place]} argument of {function}"
        ways = ways_by_kind(values, parameters)
        # `scale_by_muon` has no learning rate.
        if not ways and is_number(coeffs) and "beta" in parameters:
            ways = [f"optax.scale_by_learning_rate({written(coeffs)}) to optax.chain"]
        raise ValueError(
            f"ns_coeffs must be a name or numbers (a, b, c), got {coeffs}{where}: pass"
            f" {', '.join(ways) or '(3.4445, -4.775, 2.0315)'}"
        )


def way_of_other_form(name: str, value: Any, parameters: Sequence[str]) -> str | None:
    """Returns what to write for a value that another optimizer's argument of this name has."""
    ways: dict[str, str] = {}
    if name in ("momentum", "nesterov") and is_number(value) and 0 <= value < 1:
        ways = {"": f"beta={written(value)}"}
    elif name == "momentum" and callable(value):
        ways = {"": "beta=... to optax.inject_hyperparams(muon), which takes schedules"}
    elif name in ("beta", "adam_b1", "adam_b2") and is_pair(value):
        ways = {"": "adam_b1={}, adam_b2={}".format(*map(written, value))}
    elif name == "eps" and value in ("frobenius", "spectral", "aol", "schatten"):
        ways = {"": f"preconditioning={value!r}"}
    elif name in ("shape_scale", "consistent_rms"):
        if isinstance(value, bool):
            ways = {"": "consistent_rms=0.2" if value else "consistent_rms=None"}
        of = ("adjust_lr_fn", "adjust_lr", "scale_mode")
        ways = ways or {k: v for n in of for k, v in BY_NAME[n].by_value.items() if k}
    elif name in ("ns_method", "method"):
        ways = dict(BY_NAME["ns_algorithm"].by_value)
    way = ways.get("") or (ways.get(value) if isinstance(value, str) else None)
    way = renamed(way, parameters) if way else None
    return way if way and arguments_of_way(way) <= {*parameters} else None


def is_transformation(value: Any) -> bool:
    """Returns whether `value` is a transformation of optax, such as an optimizer."""
    return isinstance(value, tuple) and hasattr(value, "init") and hasattr(value, "update")


def _advice(
    function: str, unknown: Mapping[str, Any], given: Mapping[str, Any], parameters: Sequence[str]
) -> str:
    """What to write for names, of those given, that the function does not have."""
    passed, elsewhere, others, near = [], [], [], []
    moved: dict[str, list[str]] = {}
    for name, value in unknown.items():
        row, known = row_of(name, parameters)
        if row is None and known:
            passed.append(f"{known}={written(value)}")
        elif row is None:
            near.append(_nearest(name, parameters))
        elif way := way_of(row, value, parameters):
            passed.append(way)
            others += [row.note] if row.note and row.ways else []
        elif row.chained and function.startswith("scale_by"):
            elsewhere.append(f"chain {function} with {row.chained.format(written(value))}")
        elif row.taker.startswith(CONTRIB):
            moved.setdefault(row.taker, ["..."]).append(way_of(row, value, None) or "")
        elif way := way_of(row, value, None):
            elsewhere.append(f"{row.taker} takes {way}")
        elif row.note:
            others.append(f"leave out {name}: {row.note}")
        else:
            choices = [f"{way} for {key!r}" for key, way in row.by_value.items()]
            others.append(f"in its place {', '.join(choices)}")
    found = [f"pass {_with_given(', '.join(each_once(passed)), given)}"] if passed else []
    if factor := factor_beside_shape(passed):
        others.append(
            f"shape_scale has no factor: multiply learning_rate by {factor} and divide weight_decay"
            " by it"
        )
    found += [f"use {f}({', '.join(filter(None, ways))})" for f, ways in moved.items()]
    found += dict.fromkeys(elsewhere + others + [text for text in near if text])
    return f": {'; '.join(found)}" if found else ""


def _with_given(ways: str, given: Mapping[str, Any]) -> str:
    """The ways, with what the call or its preset says in a `NewtonSchulz` or an `Exchange`."""
    coeffs, preset = given.get("ns_coeffs"), given.get("preset")
    made = "NewtonSchulz("
    if isinstance(coeffs, str | tuple):
        made += f"{written(coeffs)}, "
    elif preset and coeffs is None:
        made = f"dataclasses.replace(PRESETS[{preset!r}]['ns_coeffs'], "
    if given.get("shardings") is not None:
        ways = ways.replace("Exchange(", "Exchange(shardings=..., ")
    return ways.replace("NewtonSchulz(", made)


def _advice_on_inputs(
    function: str,
    unknown: Mapping[str, Any],
    given: Mapping[str, Any],
    parameters: Sequence[str],
) -> str:
    """What to write for names that a function of a model and its inputs does not have."""
    del given
    found = dict.fromkeys(_nearest(name, parameters) for name in unknown)
    for name in unknown:
        if name in BY_NAME and BY_NAME[name].names[name] == "by_role":
            found[f"leave out {name}, which the model shows"] = None
        elif not _nearest(name, parameters):
            found[
                f"pass arrays by position, as in {function}(fn, params, x), and bind the rest to"
                f" fn, as in {function}(functools.partial(fn, train=True), params, x)"
            ] = None
    return f": {'; '.join(filter(None, found))}"


def _passed(given: Mapping[str, Any], parameters: Sequence[str]) -> list[str]:
    """The arguments of a call by our names, without those that the function does not take."""
    found: list[str | None] = []
    for name, value in given.items():
        if name in parameters:
            own = f"{name}={written(value)}"
            found.append(way_of_other_form(name, value, parameters) or own)
        elif row := BY_NAME.get(name):
            found.append(way_of(row, value, parameters))
    return [way for way in found if way]


def _out_of_place(name: str, value: Any, parameters: Sequence[str]) -> tuple[str, str]:
    """What a value is that no argument of this name is, and what to pass; empty for others."""
    if (made := shown_views(value)) and (name not in _VIEWS or made == CALL_OF_BY_USE):
        views = next((view for view in _VIEWS if view in parameters), _VIEWS[0])
        what = {"routes": "what by_use returns", CALL_OF_BY_USE: "by_use itself"}
        return what.get(made, "by_role"), f"{views}={made}{' by name' * (name not in _VIEWS)}"
    if is_transformation(value) and name not in ("transform", "params", "state"):
        return "an optimizer", "the arguments of muon by name"
    if isinstance(value, jax.sharding.Mesh | jax.sharding.AbstractMesh) and name == "shardings":
        by_name = "it as mesh, by name"
        return "a mesh", by_name if "mesh" in parameters else "PartitionSpecs on its axes"
    return "", ""


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


def _alike(known: str, name: str) -> bool:
    """Whether two names are alike word by word, as `nu_dtype` and `ns_dtype` are not."""
    pairs = [*itertools.zip_longest(known.split("_"), name.split("_"), fillvalue="")]
    words_differ = any(difflib.SequenceMatcher(None, *pair).ratio() < 0.65 for pair in pairs)
    return not words_differ or known.replace("_", "") == name.replace("_", "")


def _nearest(name: str, parameters: Sequence[str]) -> str:
    """A question after an argument whose name is nearly this one, of the same side and number."""

    def kind(of: str) -> tuple[bool, str]:
        return "adam" in of, re.sub(r"\D", "", of)

    alike = [known for known in parameters if kind(known) == kind(name) and _alike(known, name)]
    return suggestion(name, alike, cutoff=0.75).removeprefix(": ")
