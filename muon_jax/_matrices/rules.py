"""Rules: views by regular expressions of paths, and the code of the rules that errors propose."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from muon_jax._matrices.views import View, as_view

type Rules = Mapping[str, View | None]


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Takes the place of a view that is not known, and says why, if there is a reason.

    It may be that the other layout fits.
    """

    reason: str = ""
    is_of_layout: bool = False


class Route(NamedTuple):
    """What is known of a parameter.

    Attributes:
        path: its path, names joined by slashes.
        shape: its shape.
        role: what it is for; "unclear" or "unknown" where that is not decided.
        view: its matrices; None leaves it to AdamW.
        reason: what was seen.
    """

    path: str
    shape: tuple[int, ...]
    role: str
    view: View | None | Unknown
    reason: str = ""


# Parameters whose paths differ in numbers alone, by an expression that matches no other path.
type Groups = Mapping[str, Sequence[Route]]


def checked_rules(rules: Mapping[str, Any]) -> dict[str, View | None]:
    """Returns the rules, each with a view or None.

    Raises:
        ValueError: a rule has something else.
    """
    return {
        rule: as_view("rules", (jax.tree_util.DictKey(rule),), view) for rule, view in rules.items()
    }


def check_is_tree(router: str, params: Any) -> None:
    """Raises ValueError where the parameters are one array."""
    if jax.tree_util.all_leaves([params]):
        raise ValueError(
            f"{router} needs a tree of parameters, got one array of shape {np.shape(params)}: pass"
            " static_args='muon_weight_dimension_numbers' to optax.inject_hyperparams"
        )


def groups_of(undecided: Sequence[Route], others: Sequence[str]) -> dict[str, Sequence[Route]]:
    """Returns the parameters in groups that have one view and one reason each.

    Args:
        undecided: the parameters.
        others: the paths of all parameters that need no rule.
    """
    alike = defaultdict(list)
    for route in undecided:
        alike[re.sub(r"\d+", "0", route.path), route.reason, code_of_view(route.view)].append(route)
    names = {*others, *(route.path for route in undecided)}
    groups: dict[str, Sequence[Route]] = {}
    for members in alike.values():
        paths = [route.path for route in members]
        pattern = _pattern(paths)
        if any(re.search(pattern, name) for name in names.difference(paths)):
            groups |= {_pattern([route.path]): [route] for route in members}
        else:
            groups[pattern] = members
    return groups


def _pattern(paths: Sequence[str]) -> str:
    """An expression for paths that differ in numbers alone."""
    columns = zip(*(re.split(r"(\d+)", path) for path in paths), strict=True)
    varied = (re.escape(column[0]) if len({*column}) == 1 else r"\d+" for column in columns)
    return f"^{''.join(varied)}$"


def listed(groups: Groups) -> str:
    """Returns the first path of each group, its shape, how many are like it, and the reason."""
    said = []
    for first, *others in groups.values():
        alike = f" and {len(others)} like it" if others else ""
        reason = f", {first.reason}" if first.reason else ""
        said.append(f"{first.path} of shape {first.shape}{alike}{reason}")
    return ", ".join(said)


def code_of_rules(rules: Rules, groups: Groups) -> str:
    """Returns the code of a dict of these rules and of a rule for each group."""
    entries = [f"{_literal(rule)}: {code_of_view(view)}" for rule, view in rules.items()]
    entries += [
        f"{_literal(pattern)}: {code_of_view(group[0].view)}" for pattern, group in groups.items()
    ]
    return f"{{{', '.join(entries)}}}"


def code_of_view(view: View | None | Unknown) -> str:
    """Returns the shortest code of a view, None for one that is not known."""
    view = None if isinstance(view, Unknown) else view
    return str(view).replace("reduction_axis=", "").replace("output_axis=", "")


def _literal(pattern: str) -> str:
    """The code of an expression."""
    is_raw = repr(pattern) == "'" + pattern.replace("\\", "\\\\") + "'"
    return f"r'{pattern}'" if is_raw and not pattern.endswith("\\") else repr(pattern)
