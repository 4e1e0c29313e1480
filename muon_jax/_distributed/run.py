"""The plan at work, on the local shards: pack, exchange, whole matrices, exchange, unpack.

Each bucket is one `all_to_all` to the owners and one back. A gather of what replicas split is one
`all_gather`. What is sent after one stage of the work overlaps with the next stage.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from muon_jax._distributed.cost import names_of
from muon_jax._distributed.exchange import BlockStep
from muon_jax._distributed.kept_sharded import run_kept_sharded, sides_of
from muon_jax._distributed.packing import pack, pack_results, unpack
from muon_jax._distributed.plan import Bucket, Chunk, Gather, Leaf, Part, Plan
from muon_jax._distributed.sharding import local_part
from muon_jax._distributed.shares import after, gathered, gathered_units, own_units
from muon_jax._distributed.units import by_part, put_units_back
from muon_jax._iteration.newton_schulz import NewtonSchulz, map_by_iteration
from muon_jax._iteration.operand import is_tall
from muon_jax._matrices.views import from_stacks, to_stacks, values_per_matrix


def run_plan(
    plan: Plan, given: Sequence[jax.Array], iterations: Sequence[NewtonSchulz]
) -> list[jax.Array]:
    """Returns the shards of the results. The plan's mesh axes must be manual."""
    leaves, shares, found = plan.leaves, plan.shares, _Results(plan.gathers)
    shards = {i: x.reshape(leaves[i].local_shape) for i, x in enumerate(given)}
    local = {chunk.leaf.index for chunk in plan.local}
    shards |= {i: own_units(x, shards) for i, x in shares.items() if i not in local}
    kept = (run_kept_sharded(chunk, shards, iterations) for chunk in plan.grams)
    found.results |= put_units_back(itertools.chain.from_iterable(kept), sides_of)
    # A stage waits for what was sent before the last one. XLA would send all results at the end,
    # where nothing hides it.
    before, last = [], found.gather()
    for stage in _stages(plan):
        sent = []
        if stage[0].axes:  # a bucket
            packed = after(before, pack(stage, shards))
            sent.append(_run_bucket(stage, packed, iterations))
            found.add(_units_of(stage, *sent))
        else:
            split = [chunk.leaf.index for chunk in stage if chunk.leaf.split]
            shards |= {i: own_units(shares[i], shards, before) for i in split}
            found.results |= _run_local(stage, shards, iterations)
        before, last = last, sent + found.gather()
    return [_scaled(found.results[i], leaves[i]).reshape(x.shape) for i, x in enumerate(given)]


class _Results:
    """The results for leaves, by their indices, as units of leaves and stacks of shares come."""

    def __init__(self, gathers: Iterable[Gather]) -> None:
        self.results: dict[int, jax.Array] = {}
        self._units: dict[int, list[tuple[Part, jax.Array]]] = {}
        self._gathers = [*gathers]

    def add(self, units: Iterable[tuple[Part, jax.Array]]) -> None:
        """Adds the units of parts, `(unit, elements)`, in any order."""
        for part, x in units:
            leaf, _, _ = part
            own = self._units.setdefault(leaf.index, [])
            own.append((part, x))
            if sum(len(x) for _, x in own) == leaf.units:
                self.results |= put_units_back(own)

    def gather(self) -> list[jax.Array]:
        """Gathers the shares whose stacks have all come, adds their units, and returns them."""
        incomplete, sent = [], []
        for gather in self._gathers:
            if all(share.stack.index in self.results for share in gather):
                sent.append(gathered(gather, self.results))
                self.add(gathered_units(gather, sent[-1]))
            else:
                incomplete.append(gather)
        self._gathers = incomplete
        return sent


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
    in_whole, in_blocks = whole.leaves, blocks.leaves

    def with_gain(i: int, x: jax.Array) -> jax.Array:
        if in_whole[i].blocks == in_blocks[i].blocks:
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
    if not leaf.gains:
        return x
    gains = iter(leaf.gains)
    values = values_per_matrix(lambda *_: next(gains), leaf.view, leaf.parameter_shape)
    values = jnp.asarray(values, jnp.promote_types(x.dtype, jnp.float32))
    return (x * local_part(values, PartitionSpec(*leaf.axes))).astype(x.dtype)


def _stages(plan: Plan) -> Iterator[tuple[Chunk, ...]]:
    """Yields what is computed together: buckets, the stacks of each gather, and what sends nothing.

    That hides the last gather.
    """
    yield from plan.buckets
    local = {chunk.leaf.index: chunk for chunk in plan.local}
    for gather in plan.gathers:
        stacks = [share.stack.index for share in gather]
        if own := tuple(local.pop(i) for i in stacks if i in local):
            yield own
    if local:
        yield tuple(local.values())


def _run_local(
    chunks: Sequence[Chunk], shards: Mapping[int, jax.Array], iterations: Sequence[NewtonSchulz]
) -> dict[int, jax.Array]:
    """The results for units that are whole on each device, by the index of their leaf."""
    leaves = [chunk.leaf for chunk in chunks]
    stacks = [to_stacks(shards[leaf.index], leaf.view) for leaf in leaves]
    done = iter(map_by_iteration(iterations, [leaf.iteration for leaf in leaves], stacks))
    return {leaf.index: from_stacks(done, leaf.view, leaf.local_shape) for leaf in leaves}


def _run_bucket(bucket: Bucket, sent: jax.Array, iterations: Sequence[NewtonSchulz]) -> jax.Array:
    """Exchanges what is packed, orthogonalizes, and exchanges it back."""
    names = names_of(bucket[0].axes)
    received = unpack(bucket, jax.lax.all_to_all(sent, names, 0, 0))
    # Which owner this device is, counted from the owner of the first unit.
    positions = [(jax.lax.axis_index(names) - chunk.first) % chunk.owners for chunk in bucket]
    stacks = [*map(_assemble, bucket, received, positions)]
    flat = [[jax.lax.collapse(x, 0, 2) for x in whole] for whole in stacks]
    done = iter(map_by_iteration(iterations, [chunk.leaf.iteration for chunk in bucket], flat))
    results = [[next(done).reshape(x.shape) for x in whole] for whole in stacks]
    back = [*map(_take_apart, bucket, results, positions)]
    return jax.lax.all_to_all(pack_results(back, bucket), names, 0, 0)


def _units_of(bucket: Bucket, flat: jax.Array) -> Iterator[tuple[Part, jax.Array]]:
    """Yields the results for units, `(unit, elements)`, of what `_run_bucket` returns."""
    for chunk, pieces in zip(bucket, unpack(bucket, flat), strict=True):
        units = jnp.roll(pieces.swapaxes(0, 1), -chunk.first, 1)
        yield from by_part(chunk.parts, units.reshape(-1, chunk.elements))


def _assemble(chunk: Chunk, pieces: jax.Array, position: jax.Array) -> list[jax.Array]:
    """Returns whole matrices, in stacks `(slot, batch, m, n)` with m ≤ n.

    `pieces` is `(device, slot, elements)`.
    """
    begins, runs = [], []
    for leaf, begin, slots in chunk.layouts():
        sizes, order = _cuts(leaf, chunk, slots)
        units = pieces[:, slots].reshape(sizes).transpose(order).reshape(-1, *leaf.shape)
        stacks = jax.vmap(functools.partial(to_stacks, view=leaf.view))(units)
        begins.append(begin)
        runs.append([x.mT if is_tall(x) else x for x in stacks])
    return [_join(begins, each, position) for each in zip(*runs, strict=True)]


def _take_apart(chunk: Chunk, stacks: list[jax.Array], position: jax.Array) -> jax.Array:
    """The inverse of `_assemble`, in the dtype on the wire."""
    begins, runs = [], []
    for leaf, begin, slots in chunk.layouts():
        parts = [
            (stack if rows <= cols else stack.mT)[slots].astype(chunk.dtype)
            for stack, (_, rows, cols) in zip(stacks, leaf.stacks, strict=True)
        ]

        def unit(parts: list[jax.Array], leaf: Leaf = leaf) -> jax.Array:
            return from_stacks(iter(parts), leaf.view, leaf.shape)

        sizes, order = _cuts(leaf, chunk, slots)
        cut = jax.vmap(unit)(parts).reshape([sizes[i] for i in order]).transpose(np.argsort(order))
        begins.append(begin)
        runs.append(cut.reshape(chunk.owners, -1, chunk.elements).swapaxes(0, 1))
    return _join(begins, runs, position).swapaxes(0, 1)


def _join(begins: Sequence[int], runs: Sequence[jax.Array], position: jax.Array) -> jax.Array:
    """Returns one array of all slots, from the slots `(slot, …)` of each layout."""
    parts: list[jax.Array] = []
    for begin, run in zip(begins, runs, strict=True):
        if begin:  # its first slot is also the last one of the layout before
            *parts, last = parts
            parts += [last[:-1], jnp.where(position < begin, last[-1:], run[:1])]
            run = run[1:]
        if len(run):
            parts.append(run)
    return jnp.concatenate(parts)


def _cuts(leaf: Leaf, chunk: Chunk, slots: slice) -> tuple[list[int], list[int]]:
    """Returns the sizes of (mesh axes…, slot, axes of a piece…), and the order that makes units."""
    mesh = dict(chunk.axes)
    piece = [
        size // math.prod(mesh[name] for name in names)
        for size, names in zip(leaf.shape, leaf.axes, strict=True)
    ]
    names, slot = [*mesh], len(mesh)
    order = [slot]
    for i, entry in enumerate(leaf.axes):
        order += [*map(names.index, entry), slot + 1 + i]
    return [*mesh.values(), slots.stop - slots.start, *piece], order
