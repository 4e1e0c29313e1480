"""The plan at work, on the local shards: pack, exchange, whole matrices, exchange, unpack.

Each bucket is one `all_to_all` to the owners and one back.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from muon_jax._distributed.exchange import BlockStep
from muon_jax._distributed.kept_sharded import run_kept_sharded
from muon_jax._distributed.packing import pack, pack_results, unit_axes, units_of_parts, unpack
from muon_jax._distributed.plan import Bucket, Chunk, Leaf, Plan
from muon_jax._distributed.sharding import local_part
from muon_jax._distributed.shares import gathered, own_units
from muon_jax._iteration.newton_schulz import NewtonSchulz, map_by_iteration
from muon_jax._iteration.operand import is_tall
from muon_jax._matrices.views import from_matrices, from_stacks, to_stacks, values_per_matrix

# The results of stacks, of which each sequence has the iteration of a number.
type _Orthogonalize = Callable[[Sequence[int], Sequence[Sequence[jax.Array]]], list[jax.Array]]


def run_plan(
    plan: Plan,
    shards: Sequence[jax.Array],
    iterations: Sequence[NewtonSchulz],
) -> list[jax.Array]:
    """Returns the shards of the results. The plan's mesh axes must be manual."""

    def orthogonalize(
        numbers: Sequence[int], stacks: Sequence[Sequence[jax.Array]]
    ) -> list[jax.Array]:
        return map_by_iteration(iterations, numbers, stacks)

    given, shards = shards, [*shards]
    for leaf in plan.leaves:
        shards[leaf.index] = given[leaf.index].reshape(leaf.local_shape)
    shards += [own_units(share, shards) for share in plan.shares]
    results = [*shards]
    for i, result in _run_local(plan.local, shards, orthogonalize).items():
        results[i] = result
    for i, result in _run_buckets(plan.buckets, shards, orthogonalize).items():
        results[i] = result
    for i, result in run_kept_sharded(plan.grams, shards, iterations).items():
        results[i] = result
    for i, result in gathered(plan.shares, results, shards).items():
        results[i] = result
    for leaf in {leaf.index: leaf for leaf in plan.leaves if leaf.gains}.values():
        results[leaf.index] = _scaled(results[leaf.index], leaf)
    return [result.reshape(x.shape) for result, x in zip(results, given, strict=False)]


def run_either(
    step: BlockStep | None,
    whole: Plan,
    blocks: Plan,
    shards: Sequence[jax.Array],
    iterations: Sequence[NewtonSchulz],
) -> list[jax.Array]:
    """Returns the results of the plan of this step, as `run_plan`.

    The gain is that of parameters which block steps cut further than steps of whole matrices do.
    """
    if step is None or whole == blocks:
        return run_plan(whole, shards, iterations)
    cuts = [{leaf.index: leaf.blocks for leaf in plan.leaves} for plan in (whole, blocks)]

    def with_gain(i: int, x: jax.Array) -> jax.Array:
        if cuts[0][i] == cuts[1][i]:
            return x
        gain = jnp.asarray(step.gain, jnp.promote_types(x.dtype, jnp.float32))
        return (x * gain).astype(x.dtype)

    def of_blocks(shards: Sequence[jax.Array]) -> list[jax.Array]:
        return [with_gain(i, x) for i, x in enumerate(run_plan(blocks, shards, iterations))]

    def of_whole(shards: Sequence[jax.Array]) -> list[jax.Array]:
        return run_plan(whole, shards, iterations)

    return jax.lax.cond(step.is_of_blocks, of_blocks, of_whole, [*shards])


def _scaled(x: jax.Array, leaf: Leaf) -> jax.Array:
    """The local part of the results for a leaf, each block times its gain."""
    gains = iter(leaf.gains)
    values = values_per_matrix(lambda *_: next(gains), leaf.view, leaf.parameter_shape)
    values = jnp.asarray(values, jnp.promote_types(x.dtype, jnp.float32))
    return (x * local_part(values, PartitionSpec(*leaf.axes))).astype(x.dtype)


def _run_local(
    leaves: Sequence[Leaf], shards: Sequence[jax.Array], orthogonalize: _Orthogonalize
) -> dict[int, jax.Array]:
    """The results for leaves whose units are whole on each device."""
    stacks = [to_stacks(shards[leaf.index], leaf.view) for leaf in leaves]
    done = iter(orthogonalize([leaf.iteration for leaf in leaves], stacks))
    return {leaf.index: from_stacks(done, leaf.view, shards[leaf.index].shape) for leaf in leaves}


def _run_buckets(
    buckets: Sequence[Bucket], shards: Sequence[jax.Array], orthogonalize: _Orthogonalize
) -> dict[int, jax.Array]:
    """The results for units that their owners orthogonalize."""
    returned: list[jax.Array] = []
    for i, bucket in enumerate(buckets):
        sent = pack(bucket, shards)
        if i > 1:  # XLA would bring back all buckets at the end, where nothing hides it
            sent, returned[i - 2] = jax.lax.optimization_barrier((sent, returned[i - 2]))
        returned.append(_run_bucket(bucket, sent, orthogonalize))
    units: dict[int, list[jax.Array]] = {}
    leaves = {}
    for bucket, flat in zip(buckets, returned, strict=True):
        for chunk, pieces in zip(bucket.chunks, unpack(bucket, flat), strict=True):
            for leaf, part in units_of_parts(chunk, pieces):
                units.setdefault(leaf.index, []).append(part)
                leaves[leaf.index] = leaf
    return {
        i: from_matrices(
            jnp.concatenate(units[i]).astype(leaf.dtype), unit_axes(leaf), shards[i].shape
        )
        for i, leaf in leaves.items()
    }


def _run_bucket(bucket: Bucket, sent: jax.Array, orthogonalize: _Orthogonalize) -> jax.Array:
    """Exchanges what is packed, orthogonalizes, and exchanges it back."""
    names = tuple(name for name, _ in bucket.axes)
    received = unpack(bucket, jax.lax.all_to_all(sent, names, 0, 0))
    stacks, positions = [], []
    for chunk, pieces in zip(bucket.chunks, received, strict=True):
        positions.append((jax.lax.axis_index(names) - chunk.first) % bucket.owners)
        stacks.append(_assemble(chunk, bucket, pieces, positions[-1]))
    numbers = [chunk.leaf.iteration for chunk in bucket.chunks]
    flat = [[jax.lax.collapse(x, 0, 2) for x in whole] for whole in stacks]
    done = iter(orthogonalize(numbers, flat))
    back = [
        _take_apart(chunk, bucket, [next(done).reshape(x.shape) for x in whole], position)
        for chunk, whole, position in zip(bucket.chunks, stacks, positions, strict=True)
    ]
    return jax.lax.all_to_all(pack_results(back, bucket), names, 0, 0)


def _assemble(
    chunk: Chunk, bucket: Bucket, pieces: jax.Array, position: jax.Array
) -> list[jax.Array]:
    """Returns whole matrices, in stacks `(slot, batch, m, n)` with m ≤ n.

    Args:
        chunk: that the pieces are of.
        bucket: that the chunk is of.
        pieces: shape `(device, slot, elements)`.
        position: which owner this device is, counted from the owner of the first unit.
    """
    runs = []
    for leaf, begin, slots in _runs(chunk, bucket):
        sizes, order = _cuts(leaf, bucket, slots)
        units = pieces[:, slots].reshape(sizes).transpose(order).reshape(-1, *leaf.shape)
        stacks = jax.vmap(functools.partial(to_stacks, view=leaf.view))(units)
        runs.append((begin % bucket.owners, [_as_wide(stack) for stack in stacks]))
    begins, stacks = zip(*runs, strict=True)
    return [
        _join_runs([*zip(begins, each, strict=True)], position)
        for each in zip(*stacks, strict=True)
    ]


def _take_apart(
    chunk: Chunk, bucket: Bucket, stacks: list[jax.Array], position: jax.Array
) -> jax.Array:
    """The inverse of `_assemble`, in the dtype on the wire."""
    runs = []
    for leaf, begin, slots in _runs(chunk, bucket):
        parts = [
            (stack if rows <= cols else stack.mT)[slots].astype(bucket.dtype)
            for stack, (_, rows, cols) in zip(stacks, leaf.stacks, strict=True)
        ]

        def unit(parts: list[jax.Array], leaf: Leaf = leaf) -> jax.Array:
            return from_stacks(iter(parts), leaf.view, leaf.shape)

        sizes, order = _cuts(leaf, bucket, slots)
        cut = jax.vmap(unit)(parts).reshape([sizes[i] for i in order]).transpose(np.argsort(order))
        pieces = cut.reshape(bucket.owners, slots.stop - slots.start, -1)
        runs.append((begin % bucket.owners, pieces.swapaxes(0, 1)))
    return _join_runs(runs, position).swapaxes(0, 1)


def _runs(chunk: Chunk, bucket: Bucket) -> Iterator[tuple[Leaf, int, slice]]:
    """Yields for each layout a leaf that has it, its first unit, and the slots that have units."""
    for leaf, begin, end in chunk.layouts():
        yield leaf, begin, slice(begin // bucket.owners, -(-end // bucket.owners))


def _join_runs(runs: list[tuple[int, jax.Array]], position: jax.Array) -> jax.Array:
    """Returns one array of all slots, from the slots of each layout.

    Two runs may share a slot.

    Args:
        runs: for each layout the owner, counted from the first, on which it begins in its first
            slot, and its slots `(slot, …)`.
        position: as for `_assemble`.
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
    """Returns the sizes of (mesh axes…, slot, axes of a piece…), and the order that makes units."""
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


def _as_wide(x: jax.Array) -> jax.Array:
    return x.mT if is_tall(x) else x
