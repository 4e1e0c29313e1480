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
-   Kinds that are better left sharded (`kept_sharded`) are in chunks of at most O units.
-   Units that replicas split are in shares (`shares`), whose results are gathered part by part.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from muon_jax._distributed.cost import MeshAxes, size_of
from muon_jax._iteration.form import Form
from muon_jax._matrices.views import View, batch_axes, parts_of


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter, as its units.

    Attributes:
        index: in the list of parameters.
        name: of the parameter, for messages.
        parameter_shape: of the whole parameter.
        dtype: of its elements.
        view: where its matrices are.
        iteration: the index of their iteration.
        forms: in which each matrix of a unit is orthogonalized whole.
        sharded_form: in which sharded matrices are orthogonalized, or why they cannot be.
        varying: the mesh axes along which the caller's `shard_map` knows that its values differ.
        axes: for each axis of a unit the mesh axes, of size 2 or more, that shard it.
        local_shape: of the part on each device.
        split: names and sizes of the mesh axes over which replicas split the units, in the mesh's
            order.
        is_replicated: whether several devices have the same shard, and repeat the work unless a
            model of the times finds it faster to split it.
        blocks: the mesh axes that cut each matrix in blocks, which are the leaf's matrices: its
            shapes are those of blocks.
        gains: what the result of each stack is multiplied by; none where all are 1.
        gram_side: the side of matrices that have to stay sharded, over which Gram matrices sum.
        keeps_dtype: whether units are exchanged in their own dtype, because a function of the
            caller's gets them.
    """

    index: int
    name: str
    parameter_shape: tuple[int, ...]
    dtype: np.dtype
    view: View
    iteration: int
    forms: tuple[Form, ...] = ()
    sharded_form: Form | str = "no form was chosen"
    varying: frozenset[str] = frozenset()
    axes: tuple[tuple[str, ...], ...] = ()
    local_shape: tuple[int, ...] = ()
    split: MeshAxes = ()
    is_replicated: bool = False
    blocks: tuple[str, ...] = ()
    gains: tuple[float, ...] = ()
    gram_side: Literal["rows", "columns"] | None = None
    keeps_dtype: bool = False

    @functools.cached_property
    def batch(self) -> tuple[int, ...]:
        """The batch axes."""
        return batch_axes(self.view, self.parameter_shape)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of a unit, with all axes of the parameter: batch axes have size 1."""
        return tuple(1 if i in self.batch else n for i, n in enumerate(self.parameter_shape))

    @functools.cached_property
    def stacks(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes `(batch, rows, cols)` of the matrices of a unit."""
        return tuple(part.stack for part in parts_of(self.view, self.shape))

    @property
    def units(self) -> int:
        """How many units each device has."""
        return math.prod(self.local_shape[i] for i in self.batch)

    @functools.cached_property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes `(batch, m, n)` of the matrices of a unit, m ≤ n."""
        return tuple((b, min(rows, cols), max(rows, cols)) for b, rows, cols in self.stacks)

    def wire_of(self, forms: Sequence[Form]) -> np.dtype:
        """Returns the dtype in which matrices of these forms, or their results, are exchanged.

        Float32 matrices that the iteration multiplies in 16 bits are exchanged in those 16 bits.
        All others are exchanged in their own dtype.
        """
        dtypes = {form.dtype for form in forms}
        is_half = len(dtypes) == 1 and jnp.finfo(*dtypes).bits == 16
        return jnp.dtype(dtypes.pop() if is_half and self.dtype == jnp.float32 else self.dtype)

    @property
    def wire(self) -> np.dtype:
        """The dtype in which units are exchanged whole."""
        return jnp.dtype(self.dtype) if self.keeps_dtype else self.wire_of(self.forms)

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


# The units [start, stop) of a leaf.
type Part = tuple[Leaf, int, int]


def parts_between(parts: Sequence[Part], start: int, stop: int) -> tuple[Part, ...]:
    """Returns the parts of the units [start, stop) of all units."""
    found: list[Part] = []
    begin = 0
    for leaf, low, high in parts:
        end = begin + high - low
        if max(start, begin) < min(stop, end):
            found.append((leaf, low + max(start - begin, 0), high - max(end - stop, 0)))
        begin = end
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Units of one kind, in their order, those of equal layout side by side.

    Attributes:
        axes: names and sizes of the mesh axes that their owners are along, in the mesh's order;
            none where the units are whole on each device.
        dtype: of what is sent of them.
        parts: the units.
        first: the owner of the first unit.
    """

    axes: MeshAxes
    dtype: np.dtype
    parts: tuple[Part, ...]
    first: int = 0

    @property
    def leaf(self) -> Leaf:
        """The first leaf, whose kind all have."""
        return self.parts[0][0]

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves of all parts."""
        return [leaf for leaf, _, _ in self.parts]

    @property
    def owners(self) -> int:
        """The number of devices that share the units."""
        return size_of(self.axes)

    @property
    def count(self) -> int:
        """The number of units."""
        return sum(stop - start for _, start, stop in self.parts)

    @property
    def slots(self) -> int:
        """For how many units each owner has room."""
        return -(-self.count // self.owners)

    @property
    def elements(self) -> int:
        """The number of elements of the piece of a unit that a device has."""
        return math.prod(self.leaf.shape) // self.owners

    @property
    def bytes(self) -> int:
        """The bytes on each device, padding included."""
        return self.slots * self.owners * self.elements * self.dtype.itemsize

    def layouts(self) -> Iterator[tuple[Leaf, int, slice]]:
        """Yields for each layout a leaf that has it, and the slots that have units of it.

        Two layouts may share a slot. Between them is the number of the owner, counted from `first`,
        from which on the first slot has units of this layout.
        """
        begin = 0
        for _, group in itertools.groupby(self.parts, key=lambda part: part[0].layout):
            parts = [*group]
            end = begin + sum(stop - start for _, start, stop in parts)
            slots = slice(begin // self.owners, -(-end // self.owners))
            yield parts[0][0], begin % self.owners, slots
            begin = end


# Chunks with equal axes and dtype that are exchanged together.
type Bucket = tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True)
class Share:
    """Units of equal layout that replicas split: each has a stack of ⌈N/R⌉ of the N units.

    Attributes:
        parts: the units of all replicas, in their order.
        stack: the units of one replica, as a leaf of its own.
        dtype: in which results are gathered.
    """

    parts: tuple[Part, ...]
    stack: Leaf
    dtype: np.dtype

    @property
    def axes(self) -> MeshAxes:
        """Names and sizes of the mesh axes that the replicas are along."""
        return self.stack.split

    @property
    def replicas(self) -> int:
        """How many replicas split the units."""
        return size_of(self.axes)

    def count_within(self, start: int, stop: int) -> int:
        """The number of units that all replicas have in places [start, stop) of their stacks."""
        count, size = sum(stop - start for _, start, stop in self.parts), self.stack.units
        rests = (count - replica * size - start for replica in range(self.replicas))
        return sum(min(max(rest, 0), stop - start) for rest in rests)

    def bytes_of(self, count: int) -> int:
        """The bytes of the results of so many units of a stack on each device."""
        return count * math.prod(self.stack.local_shape[1:]) * self.dtype.itemsize


# Shares with equal axes and dtype, which vary alike, whose results are gathered together.
type Gather = tuple[Share, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who orthogonalizes what.

    Attributes:
        local: units that are whole on each device, of one leaf each.
        buckets: units that their owners orthogonalize.
        grams: units that stay sharded, in chunks of one slot.
        gathers: shares of what replicas split, whose stacks are among the leaves of the above.
    """

    local: tuple[Chunk, ...]
    buckets: tuple[Bucket, ...]
    grams: tuple[Chunk, ...] = ()
    gathers: tuple[Gather, ...] = ()

    @property
    def shares(self) -> dict[int, Share]:
        """The shares of all gathers, by the index of their stack."""
        return {share.stack.index: share for gather in self.gathers for share in gather}

    @property
    def whole(self) -> list[Chunk]:
        """The chunks of matrices that are orthogonalized whole."""
        return [*self.local, *itertools.chain.from_iterable(self.buckets)]

    @property
    def leaves(self) -> dict[int, Leaf]:
        """All parameters, by their indices."""
        shares = self.shares
        of_shares = [leaf for share in shares.values() for leaf, _, _ in share.parts]
        leaves = [leaf for chunk in (*self.whole, *self.grams) for leaf in chunk.leaves]
        return {leaf.index: leaf for leaf in leaves + of_shares if leaf.index not in shares}
