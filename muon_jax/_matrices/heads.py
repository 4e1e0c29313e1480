"""Axes of heads, confirmed by what takes the heads that a projection makes."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from muon_jax._matrices.roles import FROM_HEADS, FUSED_QKV, LEAF, TO_HEADS, Found
from muon_jax._matrices.shapes import UNKNOWN
from muon_jax._matrices.stacked_layers import Layers


def without_unconfirmed_heads(
    names: Sequence[str], layers: Sequence[Layers], found: Sequence[Found]
) -> list[Found]:
    """Returns what is found, with no view for axes of heads that nothing confirms.

    A projection to heads, `(in, heads, dim)`, looks like a stack of layers below an unknown name.
    What takes its result tells one from the other: see `_confirmed_heads`. A stack of layers says
    that its parameters have no others, up to the three axes of such a projection.
    """
    modules = defaultdict(list)
    for name, of_one in zip(names, found, strict=True):
        if len(of_one.shape) > 1:
            modules[attention_of(name)].append(of_one)
    confirmed = {module: _confirmed_heads(members) for module, members in modules.items()}

    def is_confirmed(name: str, of_parameter: Layers, of_one: Found) -> bool:
        rank, heads = len(of_one.shape), confirmed.get(attention_of(name), set())
        if of_one.role not in (TO_HEADS, FROM_HEADS) or rank < 3 or of_one.view is None:
            return True
        if of_parameter.axes and rank == 3:
            return True
        return bool(heads) if of_one.role == TO_HEADS else math.prod(of_one.shape[:-2]) in heads

    return [
        of_one if is_confirmed(name, of_parameter, of_one) else of_one._replace(view=UNKNOWN)
        for name, of_parameter, of_one in zip(names, layers, found, strict=True)
    ]


def _confirmed_heads(members: Sequence[Found]) -> set[int]:
    """The numbers of heads that one parameter of a module makes and another one takes.

    `(in, heads, dim)` makes heads, and so does `(in, 3, heads, dim)`. `(heads, dim, out)`, perhaps
    with another dim, takes them; so does `(heads·dim, out)`, or half of them beside gates.
    """
    made, taken = set(), set()
    for role, _, shape, _ in members:
        if role == TO_HEADS and len(shape) > 2:
            made.add((math.prod(shape[1:-1]), shape[-1]))
        elif role == FUSED_QKV and len(shape) == 4:
            made.add(shape[-2:])
        elif role == FROM_HEADS and len(shape) > 2:
            taken.add(math.prod(shape[:-2]))
    rows = {member.shape[-2] for member in members}
    merged = {heads for heads, dim in made if rows & {heads * dim, heads * dim / 2}}
    return {heads for heads, _ in made} & (taken | merged)


def attention_of(name: str) -> str:
    """Returns the path of the module that a projection is in."""
    return re.sub(rf"(/[^/]+)?/({LEAF})$|/[^/]+$", "", name)
