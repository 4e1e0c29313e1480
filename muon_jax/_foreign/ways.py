"""Names and values of other optimizers, each turned into what to write here."""

import functools
import re
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.core import Tracer

from muon_jax._foreign.names import FOREIGN, Foreign
from pallas_kernels.arguments import is_integer, is_real

BY_NAME = {name: row for row in FOREIGN for name in row.names}
# The rows by our own names, for functions that do not have them.
_OURS = {
    way.removesuffix("={}"): row
    for row in reversed(FOREIGN)
    for way in row.ways
    if re.fullmatch(r"\w+=\{\}", way)
}
# The arguments of `optax.adamw` after the learning rate, in its order.
_ORDER_OF_ADAMW = (
    "adam_b1",
    "adam_b2",
    "adam_eps",
    "adam_eps_root",
    "mu_dtype",
    "weight_decay",
    "weight_decay_mask",
)
# The scale by the longer side, which has a factor.
_FACTOR, _NO_FACTOR = re.compile(r"consistent_rms=([\d.e-]+)$"), "consistent_rms=1.0"
_CALL = re.compile(r"(\w+=(?:by_role|NewtonSchulz|Exchange))(?:\((.*)\))?$")
CALL_OF_BY_USE = "by_use(loss, params, batch)"
# The words in names that say whose an argument is.
_ADAM, _MUON = {"adam", "adamw", "aux"}, {"muon", "matrix", "hidden"}


def row_of(name: str, parameters: Sequence[str]) -> tuple[Foreign | None, str]:
    """Returns the row of a name, or our name for the same argument with the words in order."""
    if row := BY_NAME.get(name) or _OURS.get(name):
        return row, ""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    whose = {*words} & (_ADAM | _MUON)
    base = "_".join(word for word in words if word not in whose)
    if whose & _ADAM:
        candidates = [f"adam_{base}"]
    else:
        candidates = [f"muon_{base}", base] if whose else ["_".join(words)]
    for candidate in candidates:
        if candidate in BY_NAME:
            return BY_NAME[candidate], ""
        if candidate in parameters and candidate != name:
            return None, candidate
    return None, ""


def way_of(row: Foreign, value: Any, parameters: Sequence[str] | None) -> str | None:
    """Returns what to write to a function with these parameters, or, for None, to the taker."""
    is_key = isinstance(value, str | bool | None)
    ways: Sequence[str] = [row.by_value[value]] if is_key and value in row.by_value else row.ways
    for way in ways:
        way = way if parameters is None else renamed(way, parameters)
        if parameters is None or arguments_of_way(way) <= {*parameters}:
            if "{0}" in way:
                pair = [written(each) for each in value] if is_pair(value) else ["...", "..."]
                return way.format(*pair)
            return way.replace("{}", written(value))
    return None


def renamed(way: str, parameters: Sequence[str]) -> str:
    """Returns the way for `newton_schulz`, which has the arguments of `NewtonSchulz` itself."""
    found = re.fullmatch(r"ns_coeffs=NewtonSchulz\((.*)\)", way)
    return found[1] if found and "method" in parameters else way


def arguments_of_way(way: str) -> set[str]:
    """Returns the arguments that a way passes, without those of a call within it."""
    return {*re.findall(r"(\w+)=", re.sub(r"\(.*\)", "", way))}


def ways_by_kind(values: Any, parameters: Sequence[str]) -> list[str]:
    """Returns what numbers in the order of another optimizer are, by their kind and size."""
    kinds: list[tuple[str, Any]] = []
    if values and is_betas(values[0]):  # torch.optim.AdamW's betas, eps and weight_decay
        values = [*values[0], *values[1:2], None, None, *values[2:3]]
    for value in values:
        if _is_triple(value):
            kinds.append(("ns_coeffs", value))
        elif isinstance(value, bool):
            kinds.append(("nesterov", value))
        elif is_integer(value) and value > 1:
            kinds.append(("ns_steps", value))
        elif is_number(value):
            small = "eps" if 0 < value < 1e-4 else "weight_decay"
            kinds.append(("beta" if value >= 0.5 else small, value))
    if [name for name, _ in kinds[:2]] == ["beta", "beta"]:
        kinds = [*zip(_ORDER_OF_ADAMW, values, strict=False)]
        kinds = [(name, value) for name, value in kinds if value is not None]
    return [f"{name}={written(value)}" for name, value in kinds if name in parameters]


def each_once(ways: Sequence[str]) -> list[str]:
    """Returns the ways with one for each argument, the first, and one call of each function.

    A factor of the scale comes in place of 1, and it is no way where a scale by shape, which has no
    factor, is another: see `factor_beside_shape`.
    """
    calls: dict[str, list[str]] = {}
    for match in filter(None, map(_CALL.match, ways)):
        calls.setdefault(match[1], []).extend([match[2]] if match[2] else [])
    inner = {called: ", ".join(each_once(own)) for called, own in calls.items()}
    ways = [way for way in ways if not _CALL.match(way)]
    ways += [f"{called}({own})" if own else called for called, own in inner.items()]
    parts = [part for way in ways for part in ([way] if "(" in way else way.split(", "))]
    has_shape = any(part.startswith("shape_scale=") for part in parts)
    has_factor = any(_FACTOR.match(part) and part != _NO_FACTOR for part in parts)
    found: list[str] = []
    passed: set[str] = set()
    for part in parts:
        is_idle = has_shape and _FACTOR.match(part) or has_factor and part == _NO_FACTOR
        if not (is_idle or part in found or arguments_of_way(part) & passed):
            found.append(part)
            passed |= arguments_of_way(part)
    return found


def factor_beside_shape(ways: Sequence[str]) -> str:
    """Returns the factor of the scale where a scale by shape is a way, too; "" for none or 1."""
    has_shape = any(way.startswith("shape_scale=") for way in ways)
    factors = [match[1] for way in ways if (match := _FACTOR.match(way)) and way != _NO_FACTOR]
    return factors[0] if has_shape and factors else ""


def is_number(value: Any) -> bool:
    """Returns whether `value` is one real number that is known, and no boolean."""
    is_known = is_real(value) and not isinstance(value, Tracer)
    return is_known and np.ndim(value) == 0


def is_pair(value: Any) -> TypeGuard[Sequence[Any]]:
    """Returns whether `value` is a tuple or a list of two numbers."""
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(is_number, value))


def _is_triple(value: Any) -> bool:
    """Whether `value` is coefficients (a, b, c)."""
    return isinstance(value, tuple | list) and len(value) == 3 and all(map(is_number, value))


def is_betas(value: Any) -> bool:
    """Returns whether `value` is a pair of decay rates."""
    return is_pair(value) and all(0 <= each < 1 for each in value)


def shown_views(value: Any) -> str:
    """Returns how `by_role`, a partial of it, or what `by_use` returns is written in a call.

    `by_use` itself, which must be called, is written as its call; all else is "".
    """
    inner = value
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not str(getattr(inner, "__module__", "")).startswith("muon_jax"):
        return ""
    name = getattr(inner, "__name__", type(inner).__name__)
    if name == "by_role" and inner is not value:
        words = (f"{name}={written(each)}" for name, each in value.keywords.items())
        return f"by_role({', '.join(words)})"
    calls = {"by_role": "by_role", "Routes": "routes", "by_use": CALL_OF_BY_USE}
    return calls.get(name, "")


def written(value: Any) -> str:
    """Returns the value as it is written in a call; `...` for what is long."""
    if isinstance(value, np.generic | np.ndarray | jax.Array) and is_number(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if views := shown_views(value):
        return views
    if isinstance(value, tuple | list) and len(value) <= 8:
        parts = [written(each) for each in value]
        if "..." not in parts:
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    name = getattr(value, "__name__", "")
    return f"jnp.{name}" if name and hasattr(value, "dtype") else "..."  # of dtypes
