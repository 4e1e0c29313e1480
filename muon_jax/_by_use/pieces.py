"""Where the entries of an array come from: boxes whose axes are digits of the axes of a source.

A source is a parameter, or the output of a product with one. If an axis of an activation comes from
axis 1 of a weight, `x.reshape(…, heads, dim)` turns it into two axes of atoms of axis 1: heads
(stride dim) and dim (stride 1). Reshapes, transposes and slices only move atoms, so a later
operation shows which indices of which axis it takes, whatever happened in between.
"""

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

type Shape = tuple[int, ...]
type Atoms = tuple[Atom, ...]

# They move entries and change none, but for their dtype: those that keep each in its place, and
# those that may not.
_CASTS = frozenset(
    "convert_element_type copy device_put name optimization_barrier pcast pvary reduce_precision"
    " reshard sharding_constraint stop_gradient".split()
)
RELAYOUTS = _CASTS | frozenset(
    "all_gather broadcast_in_dim expand_dims reshape rev slice split squeeze stack tile transpose"
    " unstack".split()
)
MOVES = RELAYOUTS - _CASTS | frozenset("concatenate dynamic_slice gather pad".split())
# Entry by entry. A weight may go through these and is a weight after them.
ELEMENTWISE = RELAYOUTS | frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex concatenate"
    " conj cos cosh div dynamic_slice eq erf erf_inv erfc exp exp2 expm1 floor gather ge gt imag"
    " integer_pow is_finite le log log1p log2 logistic lt max min mul ne neg nextafter not or pad"
    " pow real rem round rsqrt select_n sign sin sinh sqrt square sub tan tanh xor".split()
)
REDUCTIONS = ("reduce_", "arg", "cum")


class Atom(NamedTuple):
    """A digit of an index: `start`, `start + stride`, …, of `size` values.

    The index on `axis` of the source is the sum of all atoms of that axis. The axis is None where
    entries are of no axis of the source, such as those of a broadcast. An axis of size 1
    has a stride of 0; one index of a longer axis keeps that axis's stride. A stride of 0 and a
    longer size are entries of an axis in an order that is not known.
    """

    axis: int | None
    start: int
    stride: int
    size: int


class Axis(NamedTuple):
    """An axis of a box: the index where the box begins, and the atoms, the slowest first."""

    at: int
    atoms: Atoms


class Piece(NamedTuple):
    """A box of an array, and the source of its entries.

    `picks` are indices of axes of the source that no axis of the box has any more, and `steps` the
    axes that loops around run over, each with the depth of its loop.
    """

    source: int
    axes: tuple[Axis, ...]
    picks: Atoms = ()
    steps: tuple[tuple[int, Axis], ...] = ()

    def atoms(self, dims: Iterable[int] | None = None) -> Atoms:
        """Returns the atoms of these axes that are of an axis of the source, or of the piece."""
        axes = self.axes if dims is None else [self.axes[k] for k in dims]
        found = _of_source(axes)
        return found + self.elsewhere() if dims is None else found

    def elsewhere(self) -> Atoms:
        """Returns the atoms of axes of the source that are on no axis of the box."""
        return self.picks + _of_source(axis for _, axis in self.steps)

    def only(self, dim: int) -> Atom | None:
        """Returns the atom of an axis that has one."""
        found = self.atoms((dim,))
        return found[0] if len(found) == 1 else None

    def with_axis(self, n: int, axis: Axis, replaced: int = 0) -> "Piece":
        """Returns the piece with one more axis before axis n, in the place of `replaced` axes."""
        return self._replace(axes=(*self.axes[:n], axis, *self.axes[n + replaced :]))

    def without(self, lost: Iterable[Atom]) -> "Piece":
        """Returns the piece without the axes of the source of which atoms are lost."""
        gone = {atom.axis for atom in lost if atom.axis is not None}
        if not gone:
            return self

        def kept(axis: Axis) -> Axis:
            own = (Atom(None, 0, 0, a.size) if a.axis in gone else a for a in axis.atoms)
            return axis._replace(atoms=tuple(own))

        return self._replace(
            axes=tuple(map(kept, self.axes)),
            picks=tuple(atom for atom in self.picks if atom.axis not in gone),
            steps=tuple((depth, kept(axis)) for depth, axis in self.steps),
        )

    def without_steps(self, depth: int) -> "Piece":
        """Returns the piece after a loop, of whose steps it comes from one that is not known."""
        kept = tuple(step for step in self.steps if step[0] != depth)
        lost = itertools.chain(*(axis.atoms for k, axis in self.steps if k == depth))
        return self._replace(steps=kept).without(lost)

    def placed(
        self,
        shape: Shape,
        out: Shape,
        pairs: Iterable[tuple[int, int]],
        in_no_order: Iterable[tuple[int, int]] = (),
    ) -> "Piece":
        """Returns the piece with axis k of an array as axis n of the output, for each pair (k, n).

        The entries of the pairs `in_no_order` have an order there that is not known. Axes of the
        source of which atoms find no place are lost: those of an axis in no pair, and of one that
        has another size in the output, unless its one entry is repeated.
        """
        piece, axes, lost = self, [*map(of_no_source, out)], {*range(len(shape))}
        others = {(k, n) for k, n in in_no_order if out[n] > 1}
        for k, n in (*pairs, *others):
            if (k, n) in others:
                axes[n] = Axis(0, mixed(piece.axes[k].atoms, out[n]))
                piece = piece.with_axis(k, axes[n], 1)
            elif shape[k] == out[n]:
                axes[n] = piece.axes[k]
            elif shape[k] == 1:
                axes[n] = Axis(0, piece.axes[k].atoms + axes[n].atoms)
            else:
                continue
            lost.discard(k)
        return piece._replace(axes=tuple(axes)).without(piece.atoms(lost))

    def sliced(
        self, starts: Sequence[int], stops: Sequence[int], steps: Sequence[int] | None = None
    ) -> "Piece | None":
        """Returns what a slice has of the piece, None for nothing."""
        axes = []
        steps = steps or (1,) * len(self.axes)
        for (at, atoms), start, stop, step in zip(self.axes, starts, stops, steps, strict=True):
            low, high = max(start, at), min(stop, at + size_of(atoms))
            low += -(low - start) % step
            if low >= high:
                return None
            found = _sliced_atoms(atoms, low - at, high - at, step)
            if found is None:
                found = mixed(atoms, -(-(high - low) // step))
            axes.append(Axis((low - start) // step, found))
        return self._replace(axes=tuple(axes))

    def reshaped(self, shape: Shape, new: Shape) -> "Piece | None":
        """Returns the piece of a reshape, None where it would be no box.

        Both shapes fall into runs of axes with equal products. In each run the piece may be a part
        of the first axis. It should have the other axes whole, and is widened where it does not, as
        if its entries were repeated.
        """
        if 0 in shape:
            return None
        (ones, new_ones), *runs = _runs_of_axes(shape, new)
        axes = [Axis(0, ())] * len(new_ones)
        picks = self.picks + _picked(atom for k in ones for atom in self.axes[k].atoms)
        for (first, *others), (_, *new_others) in runs:
            at, atoms = self.axes[first]
            for k in others:
                repeats, rest = divmod(shape[k], size_of(self.axes[k].atoms))
                if rest and repeats > 1:
                    return None
                atoms += of_no_source(repeats).atoms + self.axes[k].atoms
            sizes = [new[k] for k in new_others]
            tail, begin = math.prod(sizes), at * math.prod(shape[k] for k in others)
            found = _cut(atoms, [size_of(atoms) // tail, *sizes])
            if begin % tail or not found:
                return None
            # One index of the first axis stays on it, and others are on no axis any more.
            one, is_one = _picked(fused(atoms)), size_of(self.axes[first].atoms) == 1
            slowest = one + found[0] if is_one else found[0]
            axes += [Axis(begin // tail, slowest), *(Axis(0, own) for own in found[1:])]
            picks += () if is_one else one
        return self._replace(axes=tuple(axes), picks=picks)


def whole(source: int, shape: Shape) -> Piece:
    """Returns the piece that is an array of this shape itself."""
    atoms = (Atom(axis, 0, int(n > 1), n) for axis, n in enumerate(shape))
    return Piece(source, tuple(Axis(0, (atom,)) for atom in atoms))


def size_of(atoms: Iterable[Atom]) -> int:
    """Returns the size of an axis of these atoms."""
    return math.prod([atom.size for atom in atoms])


def of_no_source(n: int) -> Axis:
    """Returns an axis of n entries that are of no axis of a source."""
    return Axis(0, (Atom(None, 0, 0, n),))


def mixed(atoms: Atoms, n: int) -> Atoms:
    """Returns the atoms of n entries of these in an order that is not known."""
    axes = {atom.axis for atom in atoms}
    return (Atom(axes.pop() if len(axes) == 1 else None, 0, 0, n),)


def fused(atoms: Iterable[Atom]) -> Atoms:
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


def _of_source(axes: Iterable[Axis]) -> Atoms:
    """The atoms that are of an axis of the source."""
    return tuple([atom for axis in axes for atom in axis.atoms if atom.axis is not None])


def _sliced_atoms(atoms: Atoms, start: int, stop: int, step: int) -> Atoms | None:
    """The atoms of `axis[start:stop:step]`, None where that is no box of them."""
    if not atoms:
        return atoms
    first, *rest = atoms
    inner = size_of(rest)
    begin = first.start + start // inner * first.stride
    if start % inner == 0 and stop % inner == 0 and (step == 1 or inner == 1):
        size = -(-(stop - start) // inner // step)
        return (first._replace(start=begin, stride=first.stride * step, size=size), *rest)
    if step % inner == 0:
        outer = _sliced_atoms((first,), start // inner, (stop - 1) // inner + 1, step // inner)
        one = _sliced_atoms(tuple(rest), start % inner, start % inner + 1, 1)
        return outer and one and outer + one
    if start // inner != (stop - 1) // inner:
        return None
    found = _sliced_atoms(tuple(rest), start % inner, (stop - 1) % inner + 1, step)
    return found and (first._replace(start=begin, size=1), *found)


def _picked(atoms: Iterable[Atom]) -> Atoms:
    """The atoms that are one index of a longer axis."""
    return tuple([atom for atom in atoms if atom.size == 1 and atom.stride])


def _cut(atoms: Iterable[Atom], sizes: Sequence[int]) -> list[Atoms] | None:
    """The axes of these sizes that one axis is reshaped to, None where an atom is cut."""
    rest = [atom for atom in fused(atoms)[::-1] if atom.size > 1]
    found: list[Atoms] = []
    for size in sizes:
        own: list[Atom] = []
        while size > 1:
            if not rest:
                return None
            atom = rest.pop()
            n = min(size, atom.size)
            if size % n or atom.size % n:
                return None
            own.append(atom._replace(stride=atom.stride * (atom.size // n), size=n))
            if n < atom.size:
                rest.append(atom._replace(start=0, size=atom.size // n))
            size //= n
        found.append(tuple(own))
    return None if rest else found


def _runs_of_axes(shape: Shape, new: Shape) -> list[tuple[range, range]]:
    """The shortest runs of axes of two shapes whose products are equal.

    Those of the first run have size 1. Each other run begins with an axis that is longer.
    """
    ends_of_old, ends_of_new = (
        {n: end for end, n in enumerate(itertools.accumulate(own, operator.mul, initial=1))}
        for own in (shape, new)
    )
    ends = [(end, ends_of_new[n]) for n, end in ends_of_old.items() if n in ends_of_new]
    runs = itertools.pairwise([(0, 0), *ends])
    return [(range(i, k), range(j, m)) for (i, j), (k, m) in runs]


def joined(pieces: Iterable[Piece], k: int) -> frozenset[Piece]:
    """Returns the pieces, of which those are one that have index after index side by side."""
    found: set[Piece] = set()
    groups: defaultdict[Any, list[Piece]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda piece: piece.axes[k].at):
        own = Axis(0, fused(piece.axes[k].atoms))
        picks = [atom._replace(start=0) for atom in piece.picks[-1:]]
        groups[piece.with_axis(k, own, 1)._replace(picks=(*piece.picks[:-1], *picks))].append(piece)
    for rest, own in groups.items():
        inner = rest.axes[k].atoms
        last = [piece.picks[-1].start for piece in own if piece.picks]
        ats = [piece.axes[k].at for piece in own]
        steps = {after - start for start, after in itertools.pairwise(last)}
        is_run = {b - a for a, b in itertools.pairwise(ats)} == {size_of(inner)}
        if is_run and len(steps) == 1 and 0 not in steps:
            atom = own[0].picks[-1]._replace(stride=steps.pop(), size=len(own))
            axis = Axis(ats[0], (atom, *inner))
            found.add(rest.with_axis(k, axis, 1)._replace(picks=rest.picks[:-1]))
        else:
            found |= {*own}
    return frozenset(found)


class Operation(NamedTuple):
    """An equation, and which of its outputs is asked for.

    `is_fixed` says whether the indices that it takes are constants.
    """

    name: str
    params: dict[str, Any]
    shapes: Sequence[Shape]
    out: Shape
    output: int
    is_fixed: bool = False


def moved(op: Operation, pieces: Iterable[frozenset[Piece]]) -> list[frozenset[Piece]]:
    """Returns for each operand the pieces that the output has of it."""
    found, begin = [], 0  # where a concatenation has the operand
    for i, (own, shape) in enumerate(zip(pieces, op.shapes, strict=False)):
        if i and op.name in ("gather", "dynamic_slice"):
            own = frozenset()  # indices
        if own and (shape != op.out or op.name in MOVES):
            own = frozenset(p for piece in own if (p := _moved(op, piece, shape, begin)))
        found.append(own)
        begin += shape[op.params["dimension"]] if op.name == "concatenate" else 1
    return found


def _moved(op: Operation, piece: Piece, shape: Shape, begin: int) -> Piece | None:
    """What the output has of a piece, None for nothing, or where it is no box."""
    name, params, _, out, output, _ = op
    match name:
        case "squeeze" | "expand_dims":
            return piece.reshaped(shape, out)
        case "reshape":
            order = params["dimensions"] or range(len(shape))
            turned = tuple(shape[k] for k in order)
            turns = ((k, n) for n, k in enumerate(order))
            return piece.placed(shape, turned, turns).reshaped(turned, out)
        case "concatenate":
            return _shifted(piece, {params["dimension"]: begin})
        case "stack":
            return piece.with_axis(params["axis"], Axis(begin, ()))
        case "split" | "unstack":
            axis, (starts, stops) = params["axis"], ([0] * len(shape), [*shape])
            sizes = params.get("sizes", (1,) * shape[axis])
            starts[axis] = int(sum(sizes[:output]))
            stops[axis] = starts[axis] + int(sizes[output])
            part = piece.sliced(starts, stops)
            one = (*shape[:axis], 1, *shape[axis + 1 :])
            return part.reshaped(one, out) if part and name == "unstack" else part
        case "slice":
            return piece.sliced(params["start_indices"], params["limit_indices"], params["strides"])
        case "pad" if all(min(ends) >= 0 and not ends[2] for ends in params["padding_config"]):
            return _shifted(piece, {k: low for k, (low, *_) in enumerate(params["padding_config"])})
        case "all_gather":  # the first shard stands for all
            axis, shards = params["all_gather_dimension"], params["axis_size"]
            if not params["tiled"]:
                return piece.with_axis(axis, of_no_source(shards))
            at, atoms = piece.axes[axis].at, fused(piece.axes[axis].atoms)
            if len(atoms) != 1 or atoms[0].size != shape[axis]:
                return None
            return piece.with_axis(axis, Axis(at, (atoms[0]._replace(size=out[axis]),)), 1)
        case "tile":  # repeats and entries of each axis, which are then one
            wide = (*itertools.chain(*zip(params["reps"], shape, strict=True)),)
            pairs = ((k, 2 * k + 1) for k in range(len(shape)))
            return piece.placed(shape, wide, pairs).reshaped(wide, out)
        case "transpose":
            pairs = ((k, n) for n, k in enumerate(params["permutation"]))
        case "broadcast_in_dim":
            pairs = enumerate(params["broadcast_dimensions"])
        case "gather":
            numbers = params["dimension_numbers"]
            gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
            kept = (k for k in range(len(shape)) if k not in gone)
            pairs = [*zip(kept, numbers.offset_dims, strict=True)]
            batch = [n for n in range(len(out)) if n not in numbers.offset_dims]
            of_batch = zip(
                numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
            )
            pairs += [(k, batch[n]) for k, n in of_batch]
            rest = {*batch} - {n for _, n in pairs}
            indexed = [k for k in numbers.start_index_map if k in gone]
            if op.is_fixed and len(rest) == len(indexed) == 1:
                return piece.placed(shape, out, pairs, zip(indexed, rest, strict=True))
        case _ if name.startswith(REDUCTIONS) and "axes" in params:
            kept = (k for k in range(len(shape)) if k not in params["axes"])
            pairs = ((k, n) for n, k in enumerate(kept))
        case _ if len(shape) == len(out):
            pairs = ((k, k) for k in range(len(out)))
        case _:
            return None
    pairs = [*pairs]
    in_no_order = [(k, n) for k, n in pairs if op.is_fixed and out[n] < shape[k]]
    return piece.placed(shape, out, pairs, in_no_order)


def _shifted(piece: Piece, by: dict[int, int]) -> Piece:
    axes = (Axis(at + by.get(k, 0), atoms) for k, (at, atoms) in enumerate(piece.axes))
    return piece._replace(axes=tuple(axes))
