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
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax._distributed import sharding as _sharding
from muon_jax._matrices.views import View, batch_axes, shapes_of_stacks
from muon_jax._trees import naming


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
