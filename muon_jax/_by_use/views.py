"""From what products do with the axes of a parameter to a view of its matrices."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from optax.contrib import MuonDimensionNumbers

from muon_jax._by_use.pieces import Atoms, Shape, size_of
from muon_jax._matrices.views import Split, Unfold, View

# Contracted (rows), kept (columns), or one matrix for each index.
type Side = Literal["C", "F", "B"]


class Digit(NamedTuple):
    """A factor of an axis, the slowest first, and the side of the matrices that it is on."""

    size: int
    side: Side


type Entries = frozenset[tuple[Atoms, Any, int]]


def labels_of_parts(
    taken: Iterable[Entries],
    gated: Iterable[tuple[Entries, Entries]],
    n: int,
    some_hidden: bool,
) -> list[int] | None:
    """Returns the part that each index of an axis is in, None where a product takes all.

    Parts are what later products take, not what slices cut: a rotary embedding that takes halves of
    a head and joins them makes no parts.

    Args:
        taken: for each operand of a product the entries that it has: atoms, the box of the operand
            that they fill, and how many indices of this axis the box has room for. Those that share
            a box were added or multiplied, as gate and up are, and are parts each.
        gated: the entries of two operands that are multiplied with each other.
        n: the size of the axis.
        some_hidden: whether a product takes indices that are not known.

    Raises:
        ValueError: a relayout hides which indices a product takes.
    """
    if any(size_of(atoms) == n for entries in taken for atoms, *_ in entries):
        return None
    sides = [side for pair in gated if _union(pair[0]) != _union(pair[1]) for side in pair]
    factors = [indices for side in sides for indices in _sets(side) if len(indices) < n]
    sets = [
        indices
        for entries in taken
        for indices in ([_indices(e[0]) for e in entries] if sides else _sets(entries))
        if not any(indices < factor for factor in factors)
    ]
    if any(len(indices) == n for indices in sets):
        return None
    some_hidden |= any(a.size > 1 and not a.stride for each in taken for e in each for a in e[0])
    if some_hidden:
        raise ValueError(
            f"a relayout such as indexing by an array hides which of its {n} outputs later products"
            " take"
        )
    sets = sorted({indices for indices in sets + factors if indices}, key=min)
    if len(sets) < 2:
        return None
    numbers: dict[tuple[bool, ...], int] = {}
    memberships = (tuple(i in indices for indices in sets) for i in range(n))
    return [numbers.setdefault(membership, len(numbers)) for membership in memberships]


def _sets(entries: Entries) -> list[frozenset[int]]:
    """The sets of indices of an operand: one, or one for each part where parts share a box."""
    boxes = {(box, n) for _, box, n in entries}
    room = sum(n for box, n in boxes if not any(o != box and _is_inside(box, o) for o, _ in boxes))
    if len(_union(entries)) > room:
        return [_indices(atoms) for atoms, *_ in entries]
    return [_union(entries)]


def _is_inside(box: Any, outer: Any) -> bool:
    """Whether a box, of an axis, a begin and a size for each axis, is in another."""
    return len(box) == len(outer) and all(
        k == n and begin <= at and at + size <= begin + most
        for (k, at, size), (n, begin, most) in zip(box, outer, strict=True)
    )


def _union(entries: Entries) -> frozenset[int]:
    return frozenset[int]().union(*(_indices(atoms) for atoms, *_ in entries))


def _indices(atoms: Atoms) -> frozenset[int]:
    """The indices of an axis that these atoms of it run over."""
    digits = (
        range(a.start, a.start + a.size * a.stride, a.stride) if a.stride else (a.start,)
        for a in atoms
    )
    return frozenset(map(sum, itertools.product(*digits)))


def view_of_use(
    shape: Shape,
    digits: Sequence[Sequence[Digit]],
    labels: Mapping[int, Sequence[int]],
    heads: Mapping[int, Mapping[int, tuple[int, int]]],
) -> View:
    """Returns the view of a parameter.

    Args:
        shape: of the parameter.
        digits: of each axis.
        labels: for axes in parts the part of each index.
        heads: for axes with heads, the stride of a head and how many there are, by the index where
            the heads begin.

    Raises:
        ValueError: the parts of an axis do not repeat with a period.
    """

    def of_axes(axis: int, sides: tuple[Side, ...]) -> View:
        """The view of an array whose axes after `axis` have these sides."""
        if axis < 0:
            return MuonDimensionNumbers(_axes_of(sides, "C"), _axes_of(sides, "F"))
        if len(digits[axis]) > 1:
            inner = of_axes(axis - 1, (*(digit.side for digit in digits[axis]), *sides))
            return Unfold(axis, tuple(digit.size for digit in digits[axis]), inner)
        side = digits[axis][0].side

        def of_part(size: int, begin: int) -> View:
            width, n = heads.get(axis, {}).get(begin, (0, 0))
            if width == 1:  # they alternate
                if n < size:
                    return Unfold(axis, (-1, n), of_axes(axis - 1, (side, "B", *sides)))
                return of_axes(axis - 1, ("B", *sides))
            if width and width < size and size % width == 0:
                return Unfold(axis, (-1, width), of_axes(axis - 1, ("B", side, *sides)))
            return of_axes(axis - 1, (side, *sides))

        own = labels.get(axis)
        if own is None:
            return of_part(shape[axis], 0)
        sizes = _lengths_of_runs(own)
        if len(sizes) == len({*own}):  # each part is one run
            begins = itertools.accumulate(sizes, initial=0)
            views = [of_part(size, begin) for size, begin in zip(sizes, begins, strict=False)]
            is_same = all(view == views[0] for view in views)
            return Split(axis, tuple(sizes), views[0] if is_same else tuple(views))
        n = shape[axis]
        period = next(p for p in range(1, n + 1) if n % p == 0 and [*own] == [*own[:p]] * (n // p))
        if period == n:
            shown = f"{sizes[:5]}"[:-1] + ", …]" if len(sizes) > 5 else f"{sizes}"
            raise ValueError(f"later products take parts of axis {axis} of unequal sizes, {shown}")
        width = max((width for width, _ in heads.get(axis, {}).values()), default=0)
        repeats: Side = "B" if width else side
        before: tuple[Side, ...] = (repeats,)
        counts = n // period, period
        if width > period:  # a head has several periods
            counts = n // width, width // period, period
            before = "B", side
        inner = of_axes(axis - 1, (*before, side, *sides))
        split = Split(axis + len(before), tuple(_lengths_of_runs(own[:period])), inner)
        return Unfold(axis, counts, split)

    return of_axes(len(shape) - 1, ())


def _lengths_of_runs(labels: Sequence[int]) -> list[int]:
    return [len([*group]) for _, group in itertools.groupby(labels)]


def _axes_of(sides: Sequence[Side], side: Side) -> int | tuple[int, ...]:
    axes = tuple(axis for axis, own in enumerate(sides) if own == side)
    return axes[0] if len(axes) == 1 else axes
