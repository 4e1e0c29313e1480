"""Where sharded matrices are orthogonalized: a pure function of shapes, views, specs and the mesh.

A *unit* is one element of the batch axes of a parameter, with all of its matrices. Mesh axes on
batch axes leave units whole: each device orthogonalizes its own. Mesh axes D on the other axes of a
parameter cut its units in pieces. The O devices along D then own the units in turn,

    unit q  ->  owner (first + q) mod O,  slot q div O,

each of them at most ⌈N/O⌉ of N units of a kind (equal matrices, whatever their layout), and `first`
goes on from kind to kind, so that remainders are spread. All kinds with equal D share one exchange,
in buckets bounded in bytes, so that one bucket is on the wire while another is computed. Kinds that
are better left in pieces (`_distributed_gram`) go by themselves, at most O units at a time.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax._distributed import sharding as _sharding
from muon_jax._iteration.grouping import even
from muon_jax._matrices.views import View, batch_axes, naming, shapes_of_stacks


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter, as its units.

    Attributes:
        index: in the list of parameters.
        name: of the parameter, for messages.
        whole, dtype: its shape, and the dtype of its elements.
        shape: of a unit, with all axes of the parameter: batch axes have size 1.
        batch: the batch axes.
        view: what its matrices are.
        stacks: shapes `(batch, rows, cols)` of the matrices of a unit.
        axes: for each axis of a unit the mesh axes, of size 2 or more, that split it.
        units: how many there are on each device.
        varying: the mesh axes along which the caller's `shard_map` knows that its values differ.
    """

    index: int
    name: str
    whole: tuple[int, ...]
    dtype: np.dtype
    shape: tuple[int, ...]
    batch: tuple[int, ...]
    view: View
    stacks: tuple[tuple[int, int, int], ...]
    axes: tuple[tuple[str, ...], ...] = ()
    units: int = 0
    varying: frozenset[str] = frozenset()

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes `(batch, m, n)` of the matrices of a unit, m ≤ n."""
        return tuple((b, min(rows, cols), max(rows, cols)) for b, rows, cols in self.stacks)

    @property
    def kind(self) -> tuple[np.dtype, tuple[tuple[int, int, int], ...]]:
        """What two leaves have in common whose units one iteration can take."""
        return self.dtype, self.matrices

    @property
    def layout(self) -> str:
        """What two leaves have in common whose units are put together alike."""
        return repr((self.shape, self.batch, self.axes, self.view))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Units of one kind in one bucket, in their order, those of equal layout side by side.

    Attributes:
        parts: `(leaf, start, stop)`, the units [start, stop) of a leaf.
        slots: for how many units each owner has room.
        first: the owner of the first unit.
    """

    parts: tuple[tuple[Leaf, int, int], ...]
    slots: int
    first: int

    @property
    def count(self) -> int:
        """The number of units."""
        return sum(stop - start for _, start, stop in self.parts)

    def layouts(self) -> Iterator[tuple[Leaf, int, int]]:
        """Yields for each layout a leaf that has it, and which units of the chunk [begin, end)."""
        begin = 0
        for _, parts in itertools.groupby(self.parts, key=lambda part: part[0].layout):
            (leaf, start, stop), *others = parts
            end = begin + stop - start + sum(stop - start for _, start, stop in others)
            yield leaf, begin, end
            begin = end


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What is exchanged together.

    Attributes:
        axes: names and sizes of the mesh axes that the owners are along, in the mesh's order.
        dtype: on the wire.
        chunks: of the kinds in it.
    """

    axes: tuple[tuple[str, int], ...]
    dtype: np.dtype
    chunks: tuple[Chunk, ...]

    @property
    def owners(self) -> int:
        """The number of devices that exchange."""
        return math.prod(size for _, size in self.axes)

    def elements(self, chunk: Chunk) -> int:
        """The number of elements of the pieces of units in a chunk."""
        return math.prod(chunk.parts[0][0].shape) // self.owners

    def bytes_of(self, chunk: Chunk) -> int:
        """The bytes of a chunk on each device, padding included."""
        return chunk.slots * self.owners * self.elements(chunk) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """The bytes of all chunks on each device."""
        return sum(map(self.bytes_of, self.chunks))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who orthogonalizes what.

    Attributes:
        local: leaves whose units are whole on each device.
        buckets: units that their owners orthogonalize.
        grams: units that stay in pieces, in buckets of one chunk of one slot.
    """

    local: tuple[Leaf, ...]
    buckets: tuple[Bucket, ...]
    grams: tuple[Bucket, ...] = ()


def leaf(index: int, name: str, x: jax.ShapeDtypeStruct, view: View) -> Leaf:
    """Returns parameter number `index`, of that whole shape, on no mesh yet.

    Raises:
        ValueError: the view does not fit.
    """
    with naming(name, x.shape):
        batch = batch_axes(view, len(x.shape))
        shape = tuple(1 if i in batch else size for i, size in enumerate(x.shape))
        unit = jax.ShapeDtypeStruct(shape, x.dtype)
        stacks = shapes_of_stacks(unit, view)
    shapes = tuple(stack.shape for stack in stacks)
    return Leaf(index, name, x.shape, jnp.dtype(x.dtype), shape, batch, view, shapes)


def placed(leaf: Leaf, spec: jax.sharding.PartitionSpec, mesh: Mapping[str, int]) -> Leaf:
    """Returns the parameter, sharded over a mesh of these axes.

    Raises:
        ValueError: `spec` has an axis that the mesh lacks, one twice, or one that does not fit.
    """
    with naming(leaf.name, leaf.whole):
        entries = _sharding.entries(spec, len(leaf.whole), mesh)
        axes = [tuple(axis for axis in entry if mesh[axis] > 1) for entry in entries]
        cuts = [math.prod(mesh[axis] for axis in entry) for entry in axes]
        if any(size % cut for size, cut in zip(leaf.whole, cuts, strict=True)):
            raise ValueError(f"{spec} does not divide it evenly on the mesh {dict(mesh)}")
    return dataclasses.replace(
        leaf,
        axes=tuple(() if i in leaf.batch else entry for i, entry in enumerate(axes)),
        units=math.prod(leaf.whole[i] // cuts[i] for i in leaf.batch),
    )


def plan(
    leaves: Sequence[Leaf],
    mesh: Mapping[str, int],
    wires: Sequence[jax.typing.DTypeLike],
    max_bucket_bytes: int,
    stays: Callable[[Bucket], bool],
) -> Plan:
    """Returns who orthogonalizes what, of these leaves on this mesh.

    Args:
        leaves: the parameters, placed.
        mesh: sizes of the mesh's axes, in its order.
        wires: the dtype in which each is exchanged.
        max_bucket_bytes: the most that a device sends at once; a single unit may be larger.
        stays: whether the units of a bucket, which are all of one kind, stay in pieces.
    """
    local, groups = [], {}
    for item, wire in zip(leaves, wires, strict=True):
        axes = tuple((axis, size) for axis, size in mesh.items() if axis in sum(item.axes, ()))
        if axes:
            kinds = groups.setdefault((axes, jnp.dtype(wire), item.varying), {})
            kinds.setdefault(item.kind, []).append(item)
        else:
            local.append(item)
    buckets, grams = [], []
    for (axes, dtype, _), kinds in groups.items():
        owners, moved = math.prod(size for _, size in axes), []
        for kind in kinds.values():
            (chunk,) = _chunks([kind], owners)
            if stays(Bucket(axes, dtype, (chunk,))):
                for slot in range(chunk.slots):
                    part = _slice(chunk, slot, slot + 1, owners)
                    grams.append(Bucket(axes, dtype, (part,)))
            else:
                moved.append(kind)
        buckets += [Bucket(axes, dtype, (chunk,)) for chunk in _chunks(moved, owners)]
    return Plan(tuple(local), tuple(_cut(buckets, max_bucket_bytes)), tuple(grams))


def _chunks(kinds: Sequence[Sequence[Leaf]], owners: int) -> list[Chunk]:
    """Each kind as one chunk, its remainder on the owners after those of the last kind's."""
    chunks, first = [], 0
    for leaves in kinds:
        leaves = sorted(leaves, key=lambda leaf: leaf.layout)
        chunk = Chunk(tuple((leaf, 0, leaf.units) for leaf in leaves), 0, first)
        chunks.append(dataclasses.replace(chunk, slots=-(-chunk.count // owners)))
        first = (first + chunk.count) % owners
    return chunks


def _slice(chunk: Chunk, first_slot: int, last_slot: int, owners: int) -> Chunk:
    """The slots [first_slot, last_slot) of a chunk. All of them full need no rotation."""
    start, stop = first_slot * owners, min(last_slot * owners, chunk.count)
    parts, begin = [], 0
    for leaf, low, high in chunk.parts:
        end = begin + high - low
        if max(start, begin) < min(stop, end):
            parts.append((leaf, low + max(start - begin, 0), high - max(end - stop, 0)))
        begin = end
    is_full = (stop - start) % owners == 0
    return Chunk(tuple(parts), last_slot - first_slot, 0 if is_full else chunk.first)


def _cut(kinds: Sequence[Bucket], limit: int) -> list[Bucket]:
    """Cuts buckets of a kind each into such of at most `limit` bytes, and unites small ones.

    What the first and the last bucket hold is on the wire while nothing is computed: they hold at
    most a quarter of the limit, of one kind.
    """
    small = limit // 4
    if sum(kind.bytes for kind in kinds) <= small:
        return _united(kinds, small)
    outer = max(kinds, key=lambda kind: (min(kind.bytes, small), kind.chunks[0].slots))
    first, *others = _parts(outer, min(outer.bytes // 2, small), kinds)
    between = [part for kind in kinds if kind is not outer for part in _parts(kind, limit, kinds)]
    return [first, *_united(between + others[:-1], small), *others[-1:]]


def _parts(kind: Bucket, limit: int, kinds: Sequence[Bucket]) -> list[Bucket]:
    """Cuts a kind in `even` parts of at most `limit` bytes, but at least a slot."""

    def rows(kind):
        return kind.dtype, [shape[:2] for shape in kind.chunks[0].parts[0][0].matrices]

    (chunk,) = kind.chunks
    alike = [other.chunks[0].slots for other in kinds if rows(other) == rows(kind)]
    most = max(1, min(chunk.slots, limit * chunk.slots // max(1, kind.bytes)))
    size = even(chunk.slots, most, alike)
    ends = [*range(0, chunk.slots, size), chunk.slots]
    cut = [_slice(chunk, start, stop, kind.owners) for start, stop in itertools.pairwise(ends)]
    return [dataclasses.replace(kind, chunks=(part,)) for part in cut]


def _united(parts: Sequence[Bucket], limit: int) -> list[Bucket]:
    """Unites neighbours of different kinds, where one exchange can take both."""
    buckets: list[Bucket] = []
    for part in parts:
        last = buckets[-1] if buckets else part
        old, new = last.chunks[-1].parts[0][0], part.chunks[0].parts[0][0]
        if (
            old.kind != new.kind
            and (last.axes, last.dtype, old.varying) == (part.axes, part.dtype, new.varying)
            and last.bytes + part.bytes <= limit
        ):
            buckets[-1] = dataclasses.replace(last, chunks=last.chunks + part.chunks)
        else:
            buckets.append(part)
    return buckets
