"""What an error says of parameters whose views nothing tells: groups of paths, a call to paste."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from muon_jax._matrices.layouts import Layout, Shape
from muon_jax._matrices.shapes import Unknown
from muon_jax._matrices.views import View

# How to view matrices and convolutions of each layout.
VIEWS_OF_LAYOUT: dict[Layout, str] = {
    "in_out": "MuonDimensionNumbers(-2, -1) views matrices in the last two axes,"
    " MuonDimensionNumbers((0, 1, 2), 3) a convolution (height, width, in, out)",
    "out_in": "MuonDimensionNumbers(-1, -2) views matrices in the last two axes,"
    " MuonDimensionNumbers((1, 2, 3), 0) a convolution (out, in, height, width)",
}


class UnknownParameter(NamedTuple):
    """A parameter whose view nothing tells."""

    name: str
    shape: Shape
    unknown: Unknown

    def with_view(self, view: View | None | Unknown) -> Self:
        """The parameter with this view as the proposal, or with what an answer proposes."""
        proposal = view.proposal if isinstance(view, Unknown) else str(view)
        return self._replace(unknown=dataclasses.replace(self.unknown, proposal=proposal))


class Group(NamedTuple):
    """Parameters whose paths differ in numbers alone."""

    pattern: str
    members: Sequence[UnknownParameter]


def groups_of_unknown(leaves: Sequence[UnknownParameter], others: Sequence[str]) -> list[Group]:
    """Returns the parameters in groups, each with an expression that matches no other path.

    Args:
        leaves: the parameters.
        others: the paths of parameters whose roles are known.
    """
    alike = defaultdict(list)
    for leaf in leaves:
        alike[re.sub(r"\d+", "0", leaf.name), leaf.unknown].append(leaf)
    return [group for members in alike.values() for group in _groups(members, leaves, others)]


def _groups(
    members: Sequence[UnknownParameter],
    leaves: Sequence[UnknownParameter],
    others: Sequence[str],
) -> Iterator[Group]:
    """One group of parameters that are alike, or a group for each where it would have others."""
    pattern = _pattern([leaf.name for leaf in members])
    own = {leaf.name for leaf in members}
    names = [*others, *(leaf.name for leaf in leaves)]
    if any(re.search(pattern, name) for name in names if name not in own):
        yield from (Group(_pattern([leaf.name]), [leaf]) for leaf in members)
    else:
        yield Group(pattern, members)


def _pattern(names: Sequence[str]) -> str:
    """An expression for paths that differ in numbers alone."""
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    varied = (re.escape(column[0]) if len({*column}) == 1 else r"\d+" for column in columns)
    return f"^{''.join(varied)}$"


def listed(groups: Sequence[Group]) -> str:
    """Returns the first path of each group, its shape, how many are like it, and the reason."""
    said = []
    for _, ((name, shape, unknown), *others) in groups:
        alike = f" and {len(others)} like it" if others else ""
        reason = f", {unknown.reason}" if unknown.reason else ""
        said.append(f"{name} of shape {shape}{alike}{reason}")
    return ", ".join(said)


def call_of_by_role(
    rules: Mapping[str, View | None], groups: Sequence[Group], **arguments: Any
) -> str:
    """Returns the code of `by_role` with these rules, a rule for each group, and the arguments."""
    entries = [f"{literal(rule)}: {view}" for rule, view in rules.items()]
    entries += [
        f"{literal(group.pattern)}: {group.members[0].unknown.proposal}" for group in groups
    ]
    given = [
        f"{name}={value!r}"
        for name, value in arguments.items()
        if value not in ("in_out", False, None)
    ]
    given += [f"rules={{{', '.join(entries)}}}"] * bool(entries)
    return f"by_role({', '.join(given)})"


def literal(pattern: str) -> str:
    """Returns the code of an expression."""
    is_raw = repr(pattern) == "'" + pattern.replace("\\", "\\\\") + "'"
    return f"r'{pattern}'" if is_raw and not pattern.endswith("\\") else repr(pattern)
