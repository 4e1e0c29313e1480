"""The plan at work, on the local shards: pack, exchange, whole matrices, exchange, unpack.

Each bucket is one `all_to_all` to the owners and one back. What a chunk sends is an array

    (owner, slot, elements of the piece of a unit),

flat, so that chunks of any shapes and layouts go together. The exchange makes it

    (device that held the piece, slot, elements).
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax._distributed import in_pieces as _distributed_gram
from muon_jax._distributed.plan import Bucket, Chunk, Leaf, Plan
from muon_jax._iteration.grouping import map_by_shape
from muon_jax._iteration.normalization import largest_entries, powers_of_two
from muon_jax._iteration.passes import bounded, is_tall, split_apart, unknown
from muon_jax._matrices.axes import MatrixAxes, from_matrices, to_matrices
from muon_jax._matrices.views import from_stacks, to_stacks


def run_plan(
    plan: Plan,
    shards: Sequence[jax.Array],
    function: functools.partial,
    max_group_bytes: int | None,
) -> list[jax.Array]:
    """Returns the shards of the results. The plan's mesh axes must be manual.

    Args:
        plan: of the parameters.
        shards: the local part of each parameter.
        function: `orthogonalize` with keywords.
        max_group_bytes: as for `map_by_shape`.
    """
    mapped = functools.partial(map_by_shape, function, max_group_bytes=max_group_bytes)
    stacks = [to_stacks(shards[leaf.index], leaf.view) for leaf in plan.local]
    local = iter(mapped(stacks=sum(stacks, [])))
    results = list(shards)
    for leaf in plan.local:
        results[leaf.index] = from_stacks(local, leaf.view, shards[leaf.index].shape)
    returned: list[jax.Array] = []
    for i, bucket in enumerate(plan.buckets):
        sent = _pack(bucket, shards)
        if i > 1:  # or XLA brings back all buckets at the end, where nothing hides it
            sent, returned[i - 2] = jax.lax.optimization_barrier((sent, returned[i - 2]))
        returned.append(_run(bucket, sent, mapped))
    units: dict[int, list[jax.Array]] = {}
    leaves = {}
    for bucket, flat in zip(plan.buckets, returned, strict=True):
        for chunk, pieces in zip(bucket.chunks, _unpack(bucket, flat), strict=True):
            for leaf, part in _parts(chunk, pieces):
                units.setdefault(leaf.index, []).append(part)
                leaves[leaf.index] = leaf
    for i, leaf in leaves.items():
        together = jnp.concatenate(units[i]).astype(leaf.dtype)
        results[i] = from_matrices(together, _unit_axes(leaf), shards[i].shape)
    for i, result in _distributed_gram.run_in_pieces(plan.grams, shards, function.keywords).items():
        results[i] = result
    return results


def _run(bucket, sent, mapped) -> jax.Array:
    """Exchanges what is packed, orthogonalizes, and exchanges it back."""
    names = tuple(name for name, _ in bucket.axes)
    received = _unpack(bucket, jax.lax.all_to_all(sent, names, 0, 0))
    stacks, positions = [], []
    for chunk, pieces in zip(bucket.chunks, received, strict=True):
        positions.append((jax.lax.axis_index(names) - chunk.first) % bucket.owners)
        stacks.append(_assemble(chunk, bucket, pieces, positions[-1]))
    done = iter(mapped(stacks=[jax.lax.collapse(x, 0, 2) for x in sum(stacks, [])]))
    back = [
        _take_apart(chunk, bucket, [next(done).reshape(x.shape) for x in whole], position)
        for chunk, whole, position in zip(bucket.chunks, stacks, positions, strict=True)
    ]
    return jax.lax.all_to_all(_flat(back, bucket), names, 0, 0)


def _pack(bucket: Bucket, shards: Sequence[jax.Array]) -> jax.Array:
    """The pieces of all chunks, in the dtype of the wire: (owner, elements).

    Each parameter is written to its place by the kernel that computes it: to concatenate dozens of
    them takes XLA twice as long.

    Those in float16 come with the exponents of the powers of two that each was multiplied by, which
    makes its largest entry 2¹⁵: no more is lost than where a whole matrix is cast.
    """
    slots = [chunk.slots for chunk in bucket.chunks]
    elements = [bucket.elements(chunk) for chunk in bucket.chunks]
    sizes = [*map(operator.mul, slots, elements)]
    columns, last = itertools.accumulate(sizes, initial=0), sum(sizes)
    is_scaled = bucket.dtype == jnp.float16
    tail = sum(slots) + -sum(slots) % 64 if is_scaled else 0  # aligns the next row
    block = math.gcd(64, *elements)
    packed = jax.lax.empty((bucket.owners, (last + tail) // block, block), bucket.dtype)
    for column, size, chunk in zip(columns, elements, bucket.chunks, strict=False):
        parts = [
            bounded(
                to_matrices(shards[leaf.index], _unit_axes(leaf))[start:stop, :, 0], bucket.dtype
            )
            for leaf, start, stop in chunk.parts
        ]
        absent = chunk.slots * bucket.owners - chunk.count
        begins = [*itertools.accumulate(map(len, parts), initial=0)]
        if is_scaled:
            # By rows of the shards.
            rows = [
                x.reshape(len(x), -1, math.gcd(x.shape[1], shards[leaf.index].shape[-1]))
                for x, (leaf, _, _) in zip(parts, chunk.parts, strict=True)
            ]
            factors = powers_of_two(largest_entries(rows), -15)
            exponents = jnp.pad(jnp.frexp(math.prod(factors))[1] - 1, (0, absent))
            flat = packed.reshape(bucket.owners, -1, 1)
            packed = _write(flat, chunk, last, 0, exponents[:, None]).reshape(packed.shape)
            last += chunk.slots
            factors = split_apart([f[:, None] for f in factors], parts)
            parts = [x * f * g for x, f, g in zip(parts, *factors, strict=True)]
        parts.append(jnp.zeros((absent, size)))
        for begin, units in zip(begins, parts, strict=True):
            packed = _write(packed, chunk, column, begin, units)
    return packed.reshape(bucket.owners, -1)


def _write(packed: jax.Array, chunk: Chunk, column: int, begin: int, units: jax.Array) -> jax.Array:
    """Writes the units (unit, elements) from `begin` on to (owner, slot, elements).

    That is `packed`, (owner, blocks, block), flat, from `column` on, where a block begins. All
    sizes are of whole blocks, for XLA to see that it can store many elements at once.
    """
    (owners, _, block), size, end = packed.shape, units.shape[1], begin + len(units)
    # The end of one slot, whole slots, the beginning of another.
    whole = min(-(-begin // owners) * owners, end)
    for start, stop in itertools.pairwise((begin, whole, max(end // owners * owners, whole), end)):
        if start == stop:
            continue
        slot, owner = divmod(start, owners)
        num_slots = -(-(stop - start) // owners)
        num_owners = (stop - start) // num_slots
        part = units[start - begin : stop - begin].astype(packed.dtype)
        part = part.reshape(num_slots, num_owners, size).swapaxes(0, 1)
        part = part.reshape(num_owners, -1, block)
        owner += chunk.first
        cut = max(0, owners - owner)  # from there on, the first owners' turn is next
        for rows, at in ((part[:cut], owner), (part[cut:], (owner + cut) % owners)):
            if len(rows):
                place = unknown([at, (column + slot * size) // block, 0])
                packed = jax.lax.dynamic_update_slice(packed, rows, place)
    return packed


def _unpack(bucket: Bucket, flat: jax.Array) -> list[jax.Array]:
    """The pieces of each chunk: (device, slot, elements)."""
    slots = [chunk.slots for chunk in bucket.chunks]
    sizes = [bucket.elements(chunk) for chunk in bucket.chunks]
    *parts, exponents = jnp.split(flat, [*itertools.accumulate(map(operator.mul, slots, sizes))], 1)
    pieces = [part.reshape(len(flat), k, -1) for part, k in zip(parts, slots, strict=True)]
    if not exponents.size:
        return pieces
    factors = jnp.ldexp(jnp.float32(1), -exponents.astype(jnp.int32))[..., None]
    *split, _ = jnp.split(factors, [*itertools.accumulate(slots)], 1)
    return [x * factor for x, factor in zip(pieces, split, strict=True)]


def _flat(arrays: Sequence[jax.Array], bucket: Bucket) -> jax.Array:
    return jnp.concatenate([x.astype(bucket.dtype).reshape(len(x), -1) for x in arrays], 1)


def _parts(chunk: Chunk, pieces: jax.Array) -> Iterator[tuple[Leaf, jax.Array]]:
    """Yields the units of each part from (owner, slot, elements): (unit, elements)."""
    units = jnp.roll(pieces.swapaxes(0, 1), -chunk.first, 1).reshape(-1, pieces.shape[-1])
    begin = 0
    for leaf, start, stop in chunk.parts:
        yield leaf, units[begin : begin + stop - start]
        begin += stop - start


def _assemble(chunk: Chunk, bucket: Bucket, pieces: jax.Array, position) -> list[jax.Array]:
    """Whole matrices, in stacks (slot, batch, m, n) with m ≤ n."""
    runs = []
    for leaf, begin, slots in _runs(chunk, bucket):
        sizes, order = _cuts(leaf, bucket, slots)
        units = pieces[:, slots].reshape(sizes).transpose(order).reshape(-1, *leaf.shape)
        stacks = jax.vmap(functools.partial(to_stacks, view=leaf.view))(units)
        runs.append((begin % bucket.owners, [_wide(stack) for stack in stacks]))
    begins, stacks = zip(*runs, strict=True)
    return [
        _join([*zip(begins, each, strict=True)], position) for each in zip(*stacks, strict=True)
    ]


def _take_apart(chunk: Chunk, bucket: Bucket, stacks: list[jax.Array], position) -> jax.Array:
    """The inverse of `_assemble`, in the dtype of the wire."""
    runs = []
    for leaf, begin, slots in _runs(chunk, bucket):
        parts = [
            (stack if rows <= cols else stack.mT)[slots].astype(bucket.dtype)
            for stack, (_, rows, cols) in zip(stacks, leaf.stacks, strict=True)
        ]

        def unit(parts, leaf=leaf):
            return from_stacks(iter(parts), leaf.view, leaf.shape)

        sizes, order = _cuts(leaf, bucket, slots)
        cut = jax.vmap(unit)(parts).reshape([sizes[i] for i in order]).transpose(np.argsort(order))
        pieces = cut.reshape(bucket.owners, slots.stop - slots.start, -1)
        runs.append((begin % bucket.owners, pieces.swapaxes(0, 1)))
    return _join(runs, position).swapaxes(0, 1)


def _runs(chunk: Chunk, bucket: Bucket) -> Iterator[tuple[Leaf, int, slice]]:
    """Yields for each layout a leaf that has it, its first unit, and the slots with such units."""
    for leaf, begin, end in chunk.layouts():
        yield leaf, begin, slice(begin // bucket.owners, -(-end // bucket.owners))


def _join(runs: list[tuple[int, jax.Array]], position) -> jax.Array:
    """One array of all slots, from those of each layout.

    Two runs may share a slot: the later begins there on the owner that is so many after the first.
    """
    parts: list[jax.Array] = []
    for begin, run in runs:
        if begin:
            *parts, last = parts
            parts += [last[:-1], jnp.where(position < begin, last[-1:], run[:1])]
            run = run[1:]
        if len(run):
            parts.append(run)
    return jnp.concatenate(parts)


def _cuts(leaf: Leaf, bucket: Bucket, slots: slice) -> tuple[list[int], list[int]]:
    """Sizes of (mesh axes…, slot, axes of the piece…), and the order that makes units of them."""
    mesh = dict(bucket.axes)
    piece = [
        size // math.prod(mesh[name] for name in names)
        for size, names in zip(leaf.shape, leaf.axes, strict=True)
    ]
    names, slot = [*mesh], len(mesh)
    order = [slot]
    for i, entry in enumerate(leaf.axes):
        order += [*map(names.index, entry), slot + 1 + i]
    return [*mesh.values(), slots.stop - slots.start, *piece], order


def _wide(x):
    return x.mT if is_tall(x) else x


def _unit_axes(leaf: Leaf) -> MatrixAxes:
    """For which `to_matrices` makes (unit, elements, 1) of a shard."""
    others = (axis for axis in range(len(leaf.shape)) if axis not in leaf.batch)
    return MatrixAxes(leaf.batch, tuple(others), ())
