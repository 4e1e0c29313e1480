"""From parameters to a plan: the forms of their matrices, their owners, and what the plan costs."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from muon_jax._distributed.cost import Collective, Links, MeshAxes, size_of
from muon_jax._distributed.exchange import Exchange
from muon_jax._distributed.kept_sharded import estimate, sharded_form_of
from muon_jax._distributed.placement import placed, with_forms
from muon_jax._distributed.plan import Bucket, Chunk, Leaf, Plan, parts_between
from muon_jax._distributed.sharding import Parameter
from muon_jax._distributed.shares import gathers_of, shares_of
from muon_jax._iteration.grouping import even
from muon_jax._iteration.newton_schulz import Iterations, NewtonSchulz

# The largest bucket in bytes, and the most that a device sends of a gather; a single unit may be
# larger. Matrices of this size fill a GPU, and what is sent of one part overlaps with the
# computation of another.
MAX_BUCKET_BYTES = 2**28


def max_bucket_bytes(iterations: Sequence[NewtonSchulz]) -> int:
    """Returns the most bytes that a device sends at once, unless a unit is larger."""
    stated = [x.max_group_bytes for x in iterations if x.max_group_bytes is not None]
    return min([*stated, MAX_BUCKET_BYTES])


def leaves_of(
    parameters: Sequence[Parameter], dtypes: Sequence[np.dtype], iterations: Iterations
) -> list[Leaf]:
    """Returns the parameters for plans, as arrays of these dtypes, on no mesh yet."""
    found = zip(parameters, dtypes, iterations.of_leaves, strict=True)
    leaves = [
        Leaf(i, own.name, own.shape, jnp.dtype(dtype), own.view, number)
        for i, (own, dtype, number) in enumerate(found)
    ]
    return [with_forms(leaf, iterations.distinct[leaf.iteration]) for leaf in leaves]


def make_plan(
    units: Sequence[Leaf],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[str, int],
    exchange: Exchange,
    iterations: Sequence[NewtonSchulz],
) -> Plan:
    """Returns the plan for parameters with these specs.

    Where replicas do what is faster, that is the faster of two plans, in which all of them repeat
    the work or split it. Both keep the same matrices sharded.

    Raises:
        ValueError: no sharded matrix can stay sharded, as `"gram_or_exchange"` asks; the
            mesh lacks an axis that `exchange` names; or as `placed`.
    """
    exchange.check_names(mesh)
    is_modeled = any(size > 1 and exchange.replicas(k) == "faster" for k, size in mesh.items())
    words = ("repeat", "split") if is_modeled else ("repeat",)
    plans = [_plan(units, specs, mesh, exchange, word, iterations) for word in words]
    if not is_modeled:
        return plans[0]
    return min(plans, key=lambda plan: microseconds_of(plan, exchange.links))


def _plan(
    units: Sequence[Leaf],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[str, int],
    exchange: Exchange,
    faster: str,
    iterations: Sequence[NewtonSchulz],
) -> Plan:
    """The plan where `faster` is the word for replicas in place of `"faster"`."""

    def hindrances(chunk: Chunk) -> list[str]:
        """Why parameters cannot stay sharded."""
        found = ((leaf.name, leaf.sharded_form) for leaf in chunk.leaves)
        return [f"{name}: {reason}" for name, reason in found if isinstance(reason, str)]

    def asks_for_sums(chunk: Chunk) -> bool:
        return "gram_or_exchange" in map(exchange.sharded, dict(chunk.axes))

    def stays_sharded(chunk: Chunk) -> bool:
        if chunk.leaf.gram_side:
            return True
        if "exchange" in map(exchange.sharded, dict(chunk.axes)) or hindrances(chunk):
            return False
        is_replicated = any(leaf.is_replicated for leaf in chunk.leaves)
        return asks_for_sums(chunk) or not (
            is_replicated or _is_faster_whole(chunk, exchange.links)
        )

    leaves = [
        placed(leaf, spec, mesh, exchange, faster, iterations)
        for leaf, spec in zip(units, specs, strict=True)
    ]
    max_bytes = max_bucket_bytes(iterations)
    shares = shares_of(leaves, max_bytes)
    given = [leaf for leaf in leaves if not leaf.split] + [share.stack for share in shares]
    plan = deal(given, mesh, max_bytes, stays_sharded)
    asked = [chunk for chunk in plan.whole if asks_for_sums(chunk)]
    found = [*itertools.chain.from_iterable(map(hindrances, asked))]
    if found and not plan.grams:
        raise ValueError(
            "Exchange says 'gram_or_exchange', but no sharded matrix can stay sharded; the"
            f" parameter {found[0]}. Leave the word out"
        )
    dtypes = {leaf.index: c.dtype for c in (*plan.whole, *plan.grams) for leaf in c.leaves}
    shares = [dataclasses.replace(share, dtype=dtypes[share.stack.index]) for share in shares]
    return dataclasses.replace(plan, gathers=tuple(gathers_of(shares, max_bytes)))


def _is_faster_whole(chunk: Chunk, links: Links) -> bool:
    """Whether matrices are orthogonalized faster whole, or are as many as the devices."""
    if chunk.count >= chunk.owners:
        return True
    ((_, m, n),), (form,) = chunk.leaf.matrices, chunk.leaf.forms
    moved = Collective(m * n * chunk.dtype.itemsize, chunk.axes)
    compute, collectives = estimate(chunk)
    sharded = compute + sum(each.microseconds(links) for each in collectives)
    return form.products.microseconds((m, n)) + 2 * moved.microseconds(links) <= sharded


def deal(
    leaves: Sequence[Leaf],
    mesh: Mapping[str, int],
    max_bucket_bytes: int,
    stays_sharded: Callable[[Chunk], bool],
) -> Plan:
    """Returns which devices of the mesh orthogonalize which matrices of these leaves.

    Args:
        leaves: the parameters, placed.
        mesh: sizes of the mesh's axes, in its order.
        max_bucket_bytes: the most that a device sends at once; a single unit may be larger.
        stays_sharded: whether the units of a chunk, which are all of one kind, stay sharded.
    """
    local: list[Chunk] = []
    groups: dict[Any, dict[Any, list[Leaf]]] = {}
    for leaf in leaves:
        axes = tuple((axis, size) for axis, size in mesh.items() if axis in sum(leaf.axes, ()))
        if axes:
            kinds = groups.setdefault((axes, leaf.wire, leaf.varying), {})
            kinds.setdefault(leaf.kind, []).append(leaf)
        else:
            local.append(_chunk((), leaf.wire if leaf.split else leaf.dtype, [leaf]))
    moved, grams = [], []
    for (axes, dtype, _), kinds in groups.items():
        chunks = []
        for members in kinds.values():
            chunk = _chunk(axes, dtype, sorted(members, key=lambda leaf: leaf.layout))
            if stays_sharded(chunk):
                in_sums = chunk.leaf.wire_of([sharded_form_of(chunk.leaf)])
                chunk = dataclasses.replace(chunk, dtype=in_sums)
                grams += [_slots(chunk, slot, slot + 1) for slot in range(chunk.slots)]
            else:
                chunks.append(chunk)
        # Costs are in whole ns, whose sums are exact.
        costs = [round(1e3 * chunk.leaf.microseconds(1)) for chunk in chunks]
        remainders = [(c.count % c.owners, cost) for c, cost in zip(chunks, costs, strict=True)]
        firsts = _first_owners(remainders, size_of(axes))
        moved += [dataclasses.replace(c, first=i) for c, i in zip(chunks, firsts, strict=True)]
    return Plan(tuple(local), tuple(_buckets(moved, max_bucket_bytes)), tuple(grams))


def _chunk(axes: MeshAxes, dtype: np.dtype, leaves: Sequence[Leaf]) -> Chunk:
    """All units of these leaves."""
    return Chunk(axes, dtype, tuple((leaf, 0, leaf.units) for leaf in leaves))


def _first_owners(remainders: Sequence[tuple[int, int]], owners: int) -> list[int]:
    """Returns the first owner of each remainder.

    Remainders of the most costly units are dealt first. Each goes to neighbours of whom the one
    with the most work has the least; of equal places to the one with the least work in all, and
    then to the next after the last remainder. So units of equal cost go to the owners in turn.
    """
    loads, firsts, end = np.zeros(owners, np.int64), [0] * len(remainders), 0
    for i in sorted(range(len(remainders)), key=lambda i: -remainders[i][1]):
        count, cost = remainders[i]
        if not count:
            continue
        order = (end + np.arange(owners + count - 1)) % owners
        places = np.lib.stride_tricks.sliding_window_view(loads[order], count)
        firsts[i] = int(order[np.lexsort((places.sum(1), places.max(1)))[0]])
        loads[(firsts[i] + np.arange(count)) % owners] += cost
        end = (firsts[i] + count) % owners
    return firsts


def _slots(chunk: Chunk, first_slot: int, last_slot: int) -> Chunk:
    """The slots [first_slot, last_slot) of a chunk. Slots that are all full need no rotation."""
    start, stop = first_slot * chunk.owners, min(last_slot * chunk.owners, chunk.count)
    parts = parts_between(chunk.parts, start, stop)
    is_full = (stop - start) % chunk.owners == 0
    return dataclasses.replace(chunk, parts=parts, first=0 if is_full else chunk.first)


def _buckets(chunks: Sequence[Chunk], limit: int) -> list[Bucket]:
    """Cuts chunks of one kind each into buckets of at most `limit` bytes, and unites small ones.

    Nothing is computed while the first and the last bucket are on the wire. So these two hold at
    most a quarter of the limit, of one kind.
    """
    small = limit // 4
    if sum(chunk.bytes for chunk in chunks) <= small:
        return _united(chunks, small)
    outer = max(chunks, key=lambda chunk: (min(chunk.bytes, small), chunk.slots))
    first, *others = _cut(outer, min(outer.bytes // 2, small), chunks)
    between = [x for chunk in chunks if chunk is not outer for x in _cut(chunk, limit, chunks)]
    return [(first,), *_united(between + others[:-1], small), *((last,) for last in others[-1:])]


def _cut(chunk: Chunk, limit: int, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Cuts a chunk into `even` ones of at most `limit` bytes, each of at least a slot."""

    def rows(chunk: Chunk) -> tuple[Any, ...]:
        return chunk.dtype, [shape[:2] for shape in chunk.leaf.matrices]

    alike = [other.slots for other in chunks if rows(other) == rows(chunk)]
    most = max(1, min(chunk.slots, limit * chunk.slots // max(1, chunk.bytes)))
    ends = [*range(0, chunk.slots, even(chunk.slots, most, alike)), chunk.slots]
    return [_slots(chunk, start, stop) for start, stop in itertools.pairwise(ends)]


def _united(chunks: Sequence[Chunk], limit: int) -> list[Bucket]:
    """Unites neighbors of different kinds, where one exchange can take both."""

    def wire(chunk: Chunk) -> tuple[Any, ...]:
        return chunk.axes, chunk.dtype, chunk.leaf.varying

    buckets: list[Bucket] = []
    for chunk in chunks:
        last = buckets[-1] if buckets else ()
        if (
            last
            and last[-1].leaf.kind != chunk.leaf.kind
            and wire(last[-1]) == wire(chunk)
            and bytes_of(last) + chunk.bytes <= limit
        ):
            buckets[-1] = (*last, chunk)
        else:
            buckets.append((chunk,))
    return buckets


def bytes_of(bucket: Bucket) -> int:
    """Returns the bytes of all chunks on each device, padding included."""
    return sum(chunk.bytes for chunk in bucket)


def collectives_of(plan: Plan) -> list[Collective]:
    """Returns all collectives of an update: exchanges, what pieces need, and gathers of updates."""
    found = [
        Collective(bytes_of(bucket), bucket[0].axes) for bucket in plan.buckets for _ in range(2)
    ]
    found += [each for chunk in plan.grams for each in estimate(chunk)[1]]
    for gather in plan.gathers:
        num_bytes = sum(share.bytes_of(share.stack.units) * share.replicas for share in gather)
        found.append(Collective(num_bytes, gather[0].axes, shares=True))
    return found


def microseconds_of(plan: Plan, links: Links) -> float:
    """Returns a model's time of all products and collectives, one after the other."""
    each: dict[Any, tuple[Leaf, int]] = {}
    for chunk in plan.whole:
        key = chunk.leaf.kind, chunk.axes
        leaf, count = each.get(key, (chunk.leaf, 0))
        each[key] = leaf, count + chunk.slots
    compute = sum(leaf.microseconds(count) for leaf, count in each.values())
    compute += sum(estimate(chunk)[0] for chunk in plan.grams)
    return compute + sum(each.microseconds(links) for each in collectives_of(plan))
