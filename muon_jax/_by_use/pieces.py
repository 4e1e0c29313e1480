"""Where the entries of a value come from: boxes whose axes are digits of the axes of a source.

A source is a parameter, or the output of a product with one. If an axis of an activation comes from
axis 1 of a weight, `x.reshape(…, heads, dim)` turns it into two axes of atoms of axis 1: heads
(stride dim) and dim (stride 1). Reshapes, transposes and slices only move atoms, so a later
operation shows which indices of which axis it takes, whatever happened in between.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

type Shape = tuple[int, ...]
type Axis = tuple[Atom, ...]


class Atom(NamedTuple):
    """A digit of an index: `start`, `start + stride`, …, of `size` values.

    The index on `axis` of the source is the sum of all atoms of that axis. The axis is None where
    entries are of no axis of the source, such as those of a broadcast. The stride of an axis of
    size 1 is 0, which tells it from one index of a longer axis.
    """

    axis: int | None
    start: int
    stride: int
    size: int


class Piece(NamedTuple):
    """A box of a value: its source, the index where it begins, and the atoms of each axis."""

    source: int
    at: Shape
    axes: tuple[Axis, ...]


def whole(source: int, shape: Shape) -> Piece:
    """Returns the piece that is an array of this shape itself."""
    axes = tuple((Atom(axis, 0, int(n > 1), n),) for axis, n in enumerate(shape))
    return Piece(source, (0,) * len(shape), axes)


def size_of(axis: Iterable[Atom]) -> int:
    """Returns the size of an axis of these atoms."""
    return math.prod(atom.size for atom in axis)


def known(atoms: Iterable[Atom]) -> Axis:
    """Returns the atoms that are of an axis of the source."""
    return tuple(atom for atom in atoms if atom.axis is not None)


def no_axis(n: int) -> Axis:
    """Returns an axis of n entries that is of no axis of a source."""
    return (Atom(None, 0, 0, n),)


def atoms_at(axes: Sequence[Axis], indices: Iterable[int]) -> Axis:
    """Returns the atoms of the axes with these indices, one after the other."""
    return tuple(atom for index in indices for atom in axes[index])


def all_atoms(piece: Piece) -> Axis:
    """Returns the atoms of all axes."""
    return atoms_at(piece.axes, range(len(piece.axes)))


def picked(piece: Piece) -> Axis:
    """Returns the atoms that are one index of a longer axis of the source."""
    return tuple(atom for atom in all_atoms(piece) if atom.size == 1 and atom.stride)


def fused(atoms: Iterable[Atom]) -> Axis:
    """Returns the same axis in the fewest atoms."""
    found: list[Atom] = []
    for atom in atoms:
        outer = found[-1] if found else None
        is_next = outer is not None and outer.axis == atom.axis
        if outer and is_next and (atom.axis is None or outer.stride == atom.stride * atom.size):
            start, size = atom.start + outer.start, atom.size * outer.size
            found[-1] = Atom(atom.axis, start, atom.stride, size)
        elif atom.size > 1 or atom.stride:
            found.append(atom)
    return tuple(found)


def regrouped(atoms: Iterable[Atom], sizes: Sequence[int]) -> list[Axis] | None:
    """Returns the axes of these sizes that one axis is reshaped to, None where an atom is cut."""
    rest = [*fused(atoms)]
    found: list[Axis] = []
    for size in sizes:
        own = [rest.pop(0)] if rest and rest[0].size == 1 else []
        while size > 1:
            if not rest:
                return None
            atom = rest.pop(0)
            if size % atom.size == 0:
                own.append(atom)
                size //= atom.size
            elif atom.size % size == 0:
                inner = atom.size // size
                own.append(Atom(atom.axis, atom.start, atom.stride * inner, size))
                rest.insert(0, Atom(atom.axis, 0, atom.stride, inner))
                size = 1
            else:
                return None
        found.append(tuple(own))
    if found and all(atom.size == 1 for atom in rest):
        return [*found[:-1], (*found[-1], *rest)]
    return None if rest else found


def sliced_axis(axis: Axis, start: int, stop: int, step: int) -> Axis | None:
    """Returns the atoms of `axis[start:stop:step]`, None where that is no box of them."""
    if (start, stop, step) == (0, size_of(axis), 1):
        return axis
    if not axis:
        return axis if stop > start else None
    first, *rest = axis
    inner = size_of(rest)
    begin = first.start + start // inner * first.stride
    if start % inner == 0 and stop % inner == 0 and (step == 1 or inner == 1):
        size = -(-(stop - start) // inner // step)
        return (first._replace(start=begin, stride=first.stride * step, size=size), *rest)
    if start // inner != (stop - 1) // inner:
        return None
    found = sliced_axis(tuple(rest), start % inner, (stop - 1) % inner + 1, step)
    return found and (first._replace(start=begin, size=1), *found)


def without_lost(piece: Piece, lost: Iterable[Atom]) -> Piece:
    """Returns the piece without the axes of the source of which atoms are lost."""
    gone = {atom.axis for atom in known(lost)}
    if not gone:
        return piece

    def kept(atom: Atom) -> Atom:
        return Atom(None, 0, 0, atom.size) if atom.axis in gone else atom

    return piece._replace(axes=tuple(tuple(map(kept, axis)) for axis in piece.axes))


def source_axes(piece: Piece) -> set[int | None]:
    """Returns the axes of the source that the piece has atoms of."""
    return {atom.axis for axis in piece.axes for atom in known(axis) if atom.stride}


def permuted(piece: Piece, permutation: Sequence[int]) -> Piece:
    """Returns the piece of a transpose."""
    return Piece(
        piece.source,
        tuple(piece.at[axis] for axis in permutation),
        tuple(piece.axes[axis] for axis in permutation),
    )


def sliced(
    piece: Piece, starts: Sequence[int], stops: Sequence[int], steps: Sequence[int]
) -> Piece | None:
    """Returns what a slice has of the piece, None for nothing, or for no box of it."""
    at, axes = [], []
    each = zip(piece.at, piece.axes, starts, stops, steps, strict=True)
    for begin, axis, start, stop, step in each:
        low, high = max(start, begin), min(stop, begin + size_of(axis))
        low += -(low - start) % step
        found = sliced_axis(axis, low - begin, high - begin, step) if low < high else None
        if found is None:
            return None
        at.append((low - start) // step)
        axes.append(found)
    return Piece(piece.source, tuple(at), tuple(axes))


def sliced_along(piece: Piece, shape: Shape, axis: int, start: int, stop: int) -> Piece | None:
    """Returns what a slice of one axis has of the piece."""
    ranges = [(start, stop) if k == axis else (0, n) for k, n in enumerate(shape)]
    starts, stops = zip(*ranges, strict=True)
    return sliced(piece, starts, stops, (1,) * len(shape))


def reshaped(piece: Piece, shape: Shape, new: Shape) -> Piece | None:
    """Returns the piece of a reshape, None where it would be no box.

    Both shapes fall into runs of axes with equal products. In each run the piece may be a part of
    the first axis that is longer than 1. It should have the other axes whole, and is widened where
    it does not, as if its entries were repeated.
    """
    at: list[int] = []
    axes: list[Axis] = []
    for old_axes, new_axes in _runs_of_axes(shape, new):
        first = next((k for k in old_axes if shape[k] > 1), None)
        longest = next((k for k in new_axes if new[k] > 1), None)
        if first is None or longest is None:
            at += [0] * len(new_axes)
            atoms = atoms_at(piece.axes, old_axes)
            axes += [atoms, *[()] * (len(new_axes) - 1)] if new_axes else []
            continue
        widened = [
            piece.axes[k] if k <= first else _widened(piece.axes[k], shape[k]) for k in old_axes
        ]
        if None in widened:
            return None
        atoms = tuple(atom for axis in widened for atom in axis or ())
        inner = math.prod(shape[k] for k in old_axes if k > first)
        tail = math.prod(new[k] for k in new_axes if k > longest)
        begin, size = piece.at[first] * inner, size_of(piece.axes[first]) * inner
        if begin % tail or size % tail:
            return None
        sizes = [size // tail if k == longest else new[k] for k in new_axes]
        found = regrouped(atoms, sizes)
        if found is None:
            return None
        at += [begin // tail if k == longest else 0 for k in new_axes]
        axes += found
    return Piece(piece.source, tuple(at), tuple(axes))


def _widened(axis: Axis, size: int) -> Axis | None:
    """The atoms, repeated until they fill an axis of this size, None where they do not fit."""
    repeats, rest = divmod(size, size_of(axis))
    if rest:
        return None
    return axis if repeats == 1 else (*no_axis(repeats), *axis)


def _runs_of_axes(shape: Shape, new: Shape) -> list[tuple[range, range]]:
    """The shortest runs of axes of two shapes whose products are equal."""
    found, i, j = [], 0, 0
    while i < len(shape) or j < len(new):
        begin, of_old, of_new = (i, j), 1, 1
        while i == begin[0] < len(shape) or j == begin[1] < len(new) or of_old != of_new:
            if (of_old <= of_new and i < len(shape)) or j >= len(new):
                of_old *= shape[i]
                i += 1
            else:
                of_new *= new[j]
                j += 1
        found.append((range(begin[0], i), range(begin[1], j)))
    return found


def atoms_in(axis: Axis, size: int, new: int) -> Axis:
    """Returns the atoms of an axis of one size in an axis of another."""
    return axis if size == new else (*axis, *no_axis(new)) if size == 1 else no_axis(new)


def kept_where_equal(piece: Piece, shape: Shape, new: Shape) -> Piece:
    """Returns the piece of an operation that keeps the rank, such as padding or pooling.

    An axis of another size has none of its atoms, unless its one entry is repeated.
    """
    if shape == new:
        return piece
    keeps = [old == n for old, n in zip(shape, new, strict=True)]
    at = tuple(begin if keep else 0 for begin, keep in zip(piece.at, keeps, strict=True))
    axes = tuple(map(atoms_in, piece.axes, shape, new))
    changed = [k for k, keep in enumerate(keeps) if not keep and shape[k] != 1]
    return without_lost(Piece(piece.source, at, axes), atoms_at(piece.axes, changed))
