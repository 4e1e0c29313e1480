"""Who orthogonalizes what: plans, as data.

A *unit* is one element of the batch axes of a parameter, with all of its matrices.

-   Mesh axes on batch axes leave units whole: each device orthogonalizes its own.
-   Mesh axes D on the other axes of a parameter cut its units in parts. The O devices along D then
    own the units in turn,

        unit q  ->  owner (first + q) mod O,  slot q div O,

    at most ⌈N/O⌉ of the N units of a kind. Units of a kind have equal matrices and one iteration,
    whatever their layout. `first` is chosen by cost, so that remainders are spread.
-   All kinds with equal D share one exchange. Exchanges are cut into buckets bounded in bytes, so
    that one bucket is on the wire while another is computed.
-   Kinds that are better left sharded (`kept_sharded`) have buckets of their own, of at most O
    units.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from muon_jax._iteration.form import Form
from muon_jax._matrices.views import View


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter, as its units.

    Attributes:
        index: in the list of parameters.
        name: of the parameter, for messages.
        parameter_shape: of the whole parameter.
        dtype: of its elements.
        shape: of a unit, with all axes of the parameter: batch axes have size 1.
        batch: the batch axes.
        view: where its matrices are.
        stacks: shapes `(batch, rows, cols)` of the matrices of a unit.
        axes: for each axis of a unit the mesh axes, of size 2 or more, that shard it.
        local_shape: of the part on each device.
        varying: the mesh axes along which the caller's `shard_map` knows that its values differ.
        wire: the dtype in which units are exchanged whole.
        forms: in which each matrix of a unit is orthogonalized whole.
        sharded_form: in which sharded matrices are orthogonalized, or why they cannot be.
        iteration: the index of their iteration.
        split: names and sizes of the mesh axes over which replicas split the units, in the mesh's
            order.
        is_replicated: whether several devices have the same shard, and repeat the work unless a
            model of the times finds it faster to split it.
        blocks: the mesh axes that cut each matrix in blocks, which are the leaf's matrices: its
            shapes are those of blocks.
        gains: what the result of each stack is multiplied by; none where all are 1.
        gram_side: the side of matrices that have to stay sharded, over which Gram matrices sum.
    """

    index: int
    name: str
    parameter_shape: tuple[int, ...]
    dtype: np.dtype
    shape: tuple[int, ...]
    batch: tuple[int, ...]
    view: View
    stacks: tuple[tuple[int, int, int], ...]
    wire: np.dtype
    axes: tuple[tuple[str, ...], ...] = ()
    local_shape: tuple[int, ...] = ()
    varying: frozenset[str] = frozenset()
    forms: tuple[Form, ...] = ()
    sharded_form: Form | str = "no form was chosen"
    iteration: int = 0
    split: tuple[tuple[str, int], ...] = ()
    is_replicated: bool = False
    blocks: tuple[str, ...] = ()
    gains: tuple[float, ...] = ()
    gram_side: Literal["rows", "columns"] | None = None

    @property
    def units(self) -> int:
        """How many units each device has."""
        return math.prod(self.local_shape[i] for i in self.batch)

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes `(batch, m, n)` of the matrices of a unit, m ≤ n."""
        return tuple((b, min(rows, cols), max(rows, cols)) for b, rows, cols in self.stacks)

    def microseconds(self, count: int) -> float:
        """Returns a model's time for so many whole units, orthogonalized together."""
        pairs = zip(self.forms, self.matrices, strict=True)
        return sum(form.products.microseconds((count * b, m, n)) for form, (b, m, n) in pairs)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What two leaves have in common whose units one iteration can take."""
        kept_sharded = self.gram_side and self.kept_shape
        return self.iteration, self.dtype, self.matrices, kept_sharded, self.blocks, self.split

    @property
    def kept_shape(self) -> tuple[int, int]:
        """The rows m and the columns n of a sharded matrix: XXᵀ is m × m, a sum over columns."""
        ((_, rows, cols),) = self.stacks
        return (cols, rows) if self.is_transposed else (rows, cols)

    @property
    def is_transposed(self) -> bool:
        """Whether the rows of a sharded matrix are the columns of the parameter's matrix."""
        ((_, rows, cols),) = self.stacks
        return self.gram_side == "rows" if self.gram_side else rows > cols

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
    def leaf(self) -> Leaf:
        """The first leaf, whose kind all have."""
        return self.parts[0][0]

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

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves of all chunks."""
        return [leaf for chunk in self.chunks for leaf, _, _ in chunk.parts]

    def elements(self, chunk: Chunk) -> int:
        """The number of elements of the pieces of units in a chunk."""
        return math.prod(chunk.leaf.shape) // self.owners

    def bytes_of(self, chunk: Chunk) -> int:
        """The bytes of a chunk on each device, padding included."""
        return chunk.slots * self.owners * self.elements(chunk) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """The bytes of all chunks on each device."""
        return sum(map(self.bytes_of, self.chunks))


@dataclasses.dataclass(frozen=True)
class Share:
    """Units of equal layout that replicas split: each has a stack of ⌈N/R⌉ of the N units.

    Attributes:
        leaves: that the units are of, in their order.
        stack: the units of one replica, as a leaf of its own.
        dtype: in which results are gathered.
    """

    leaves: tuple[Leaf, ...]
    stack: Leaf
    dtype: np.dtype

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the mesh axes that the replicas are along."""
        return self.stack.split

    @property
    def replicas(self) -> int:
        """How many replicas split the units."""
        return math.prod(size for _, size in self.axes)

    @property
    def count(self) -> int:
        """The number of units of all replicas."""
        return sum(leaf.units for leaf in self.leaves)

    def count_within(self, start: int, stop: int) -> int:
        """The number of units that all replicas have in places [start, stop) of their stacks."""
        size = self.stack.units
        rests = (self.count - replica * size - start for replica in range(self.replicas))
        return sum(min(max(rest, 0), stop - start) for rest in rests)

    def bytes_of(self, count: int) -> int:
        """The bytes of the results of so many units of a stack on each device."""
        return count * math.prod(self.stack.local_shape[1:]) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who orthogonalizes what.

    Attributes:
        local: leaves whose units are whole on each device.
        buckets: units that their owners orthogonalize.
        grams: units that stay sharded, in buckets of one chunk of one slot.
        shares: units that replicas split. Their stacks are among the leaves of the above.
    """

    local: tuple[Leaf, ...]
    buckets: tuple[Bucket, ...]
    grams: tuple[Bucket, ...] = ()
    shares: tuple[Share, ...] = ()

    @property
    def leaves(self) -> list[Leaf]:
        """All parameters; those that several chunks share, several times."""
        leaves = [*self.local, *(x for b in self.buckets + self.grams for x in b.leaves)]
        stacks = {share.stack.index for share in self.shares}
        of_shares = [leaf for share in self.shares for leaf in share.leaves]
        return [leaf for leaf in leaves if leaf.index not in stacks] + of_shares
