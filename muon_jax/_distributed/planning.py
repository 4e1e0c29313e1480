"""From parameters to a plan: the forms of their matrices, their owners, and what the plan costs."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from muon_jax._distributed.cost import Collective, Estimate, Links
from muon_jax._distributed.exchange import Exchange
from muon_jax._distributed.kept_sharded import estimate, why_not_kept_sharded
from muon_jax._distributed.placement import leaf_of, placed_within
from muon_jax._distributed.plan import Bucket, Chunk, Leaf, Plan, Share
from muon_jax._distributed.sharding import Parameter
from muon_jax._distributed.shares import gathered_together, shares_of
from muon_jax._iteration.form import Form
from muon_jax._iteration.grouping import even
from muon_jax._iteration.newton_schulz import Iterations, NewtonSchulz

# The largest number of bytes that a device sends at once. Matrices of this size fill a GPU, and the
# exchange of one bucket overlaps with the computation of another.
MAX_BUCKET_BYTES = 2**28


def max_bucket_bytes(iterations: Sequence[NewtonSchulz]) -> int:
    """Returns the most bytes that a device sends at once."""
    stated = [x.max_group_bytes for x in iterations if x.max_group_bytes is not None]
    return min([*stated, MAX_BUCKET_BYTES])


def leaves_of(
    parameters: Sequence[Parameter], dtypes: Sequence[np.dtype], iterations: Iterations
) -> list[Leaf]:
    """Returns the parameters for plans, as arrays of these dtypes, with their matrices' forms."""
    leaves = [
        leaf_of(i, own.name, jax.ShapeDtypeStruct(own.shape, dtype), own.view)
        for i, (own, dtype) in enumerate(zip(parameters, dtypes, strict=True))
    ]
    return [
        _with_forms(dataclasses.replace(leaf, iteration=i), iterations.distinct[i])
        for leaf, i in zip(leaves, iterations.of_leaves, strict=True)
    ]


def _with_forms(leaf: Leaf, iteration: NewtonSchulz) -> Leaf:
    """The leaf with its forms.

    Float32 matrices that the iteration multiplies in 16 bits are exchanged in those 16 bits. All
    others are exchanged in their own dtype.
    """
    forms = tuple(iteration.form((m, n), leaf.dtype) for _, m, n in leaf.matrices)
    return dataclasses.replace(
        leaf,
        wire=_wire_dtype(leaf, forms),
        forms=forms,
        sharded_form=why_not_kept_sharded(leaf) or iteration.sharded_form(leaf.dtype),
    )


def _wire_dtype(leaf: Leaf, forms: Sequence[Form]) -> np.dtype:
    """The dtype in which matrices of these forms, or their results, are exchanged."""
    dtypes = {form.dtype for form in forms}
    is_half = len(dtypes) == 1 and jnp.finfo(*dtypes).bits == 16
    return jnp.dtype(dtypes.pop() if is_half and leaf.dtype == jnp.float32 else leaf.dtype)


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
            mesh lacks an axis that `exchange` names; or as `placed_within`.
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

    def stays_sharded(bucket: Bucket) -> bool:
        if bucket.chunks[0].leaf.gram_side:
            return True
        words = {exchange.sharded(axis) for axis, _ in bucket.axes}
        if "exchange" in words or _hindrances(bucket):
            return False
        return "gram_or_exchange" in words or (
            not any(leaf.is_replicated for leaf in bucket.leaves)
            and _is_faster_sharded(bucket, exchange.links)
        )

    pairs = zip(units, specs, strict=True)
    leaves = [placed_within(leaf, spec, mesh, exchange, faster) for leaf, spec in pairs]
    leaves = [_with_forms(x, iterations[x.iteration]) if x.blocks else x for x in leaves]
    for leaf in leaves:
        if leaf.gram_side and isinstance(leaf.sharded_form, str):
            raise ValueError(
                f"the parameter {leaf.name} of shape {leaf.parameter_shape}: its matrices cannot"
                f" stay sharded: {leaf.sharded_form}. Pass Exchange with 'block' or 'exchange' in"
                " place of 'gram'"
            )
    shares = shares_of(leaves)
    stacks = [share.stack for share in shares]
    unsplit = [leaf for leaf in leaves if not leaf.split]
    plan = deal(unsplit + stacks, mesh, max_bucket_bytes(iterations), stays_sharded)
    asked = [b for b in plan.buckets if "gram_or_exchange" in map(exchange.sharded, dict(b.axes))]
    found = [*itertools.chain.from_iterable(map(_hindrances, asked))]
    if found and not plan.grams:
        name, reason = found[0]
        raise ValueError(
            f"Exchange says 'gram_or_exchange', but no sharded matrix can stay sharded; the"
            f" parameter {name}: {reason}. Leave the word out"
        )
    return dataclasses.replace(plan, shares=tuple(_with_dtype(share, plan) for share in shares))


def _with_dtype(share: Share, plan: Plan) -> Share:
    """The share with the dtype of its results in that plan, which its all-gather is in."""
    kept_sharded = {leaf.index for bucket in plan.grams for leaf in bucket.leaves}
    forms = share.stack.forms
    if share.stack.index in kept_sharded:
        assert isinstance(share.stack.sharded_form, Form)
        forms = (share.stack.sharded_form,)
    return dataclasses.replace(share, dtype=_wire_dtype(share.stack, forms))


def _hindrances(bucket: Bucket) -> list[tuple[str, str]]:
    """The parameters of the bucket that cannot stay sharded, by name, and why."""
    found = ((leaf.name, leaf.sharded_form) for leaf in bucket.leaves)
    return [(name, reason) for name, reason in found if isinstance(reason, str)]


def _is_faster_sharded(bucket: Bucket, links: Links) -> bool:
    """Whether matrices, fewer than the devices, are orthogonalized faster sharded than whole."""
    (chunk,) = bucket.chunks
    if chunk.count >= bucket.owners:
        return False
    leaf = chunk.leaf
    ((_, m, n),), (form,) = leaf.matrices, leaf.forms
    moved = Collective(m * n * bucket.dtype.itemsize, bucket.axes)
    whole = Estimate(form.products.microseconds((m, n)), (moved, moved))
    return estimate(bucket).microseconds(links) < whole.microseconds(links)


def deal(
    leaves: Sequence[Leaf],
    mesh: Mapping[str, int],
    max_bucket_bytes: int,
    stays_sharded: Callable[[Bucket], bool],
) -> Plan:
    """Returns which devices of the mesh orthogonalize which matrices of these leaves.

    Args:
        leaves: the parameters, placed.
        mesh: sizes of the mesh's axes, in its order.
        max_bucket_bytes: the most that a device sends at once; a single unit may be larger.
        stays_sharded: whether the units of a bucket, which are all of one kind, stay sharded.
    """
    local, groups = [], {}
    for leaf in leaves:
        axes = tuple((axis, size) for axis, size in mesh.items() if axis in sum(leaf.axes, ()))
        if axes:
            kinds = groups.setdefault((axes, leaf.wire, leaf.varying), {})
            kinds.setdefault(leaf.kind, []).append(leaf)
        else:
            local.append(leaf)
    buckets, grams = [], []
    for (axes, dtype, _), kinds in groups.items():
        owners, moved = math.prod(size for _, size in axes), []
        for kind in kinds.values():
            (chunk,) = _chunks([kind], owners)
            if stays_sharded(Bucket(axes, dtype, (chunk,))):
                for slot in range(chunk.slots):
                    part = _slice(chunk, slot, slot + 1, owners)
                    grams.append(Bucket(axes, dtype, (part,)))
            else:
                moved.append(kind)
        buckets += [Bucket(axes, dtype, (chunk,)) for chunk in _chunks(moved, owners)]
    return Plan(tuple(local), tuple(_cut(buckets, max_bucket_bytes)), tuple(grams))


def _chunks(kinds: Sequence[Sequence[Leaf]], owners: int) -> list[Chunk]:
    """Each kind as one chunk, with its remainder where other kinds have the least."""
    chunks = []
    for leaves in kinds:
        leaves = sorted(leaves, key=lambda leaf: leaf.layout)
        chunk = Chunk(tuple((leaf, 0, leaf.units) for leaf in leaves), 0, 0)
        chunks.append(dataclasses.replace(chunk, slots=-(-chunk.count // owners)))
    # Costs are in whole ns, whose sums are exact.
    costs = (round(1e3 * chunk.leaf.microseconds(1)) for chunk in chunks)
    remainders = [(c.count % owners, cost) for c, cost in zip(chunks, costs, strict=True)]
    firsts = _first_owners(remainders, owners)
    return [dataclasses.replace(c, first=first) for c, first in zip(chunks, firsts, strict=True)]


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


def _slice(chunk: Chunk, first_slot: int, last_slot: int, owners: int) -> Chunk:
    """The slots [first_slot, last_slot) of a chunk. Slots that are all full need no rotation."""
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
    """Cuts buckets of one kind each into buckets of at most `limit` bytes, and unites small ones.

    Nothing is computed while the first and the last bucket are on the wire. So these two hold at
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
    """Cuts a kind in `even` parts of at most `limit` bytes, each of at least a slot."""

    def rows(kind: Bucket) -> tuple[Any, ...]:
        return kind.dtype, [shape[:2] for shape in kind.chunks[0].leaf.matrices]

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
        old, new = last.chunks[-1].leaf, part.chunks[0].leaf
        if (
            old.kind != new.kind
            and (last.axes, last.dtype, old.varying) == (part.axes, part.dtype, new.varying)
            and last.bytes + part.bytes <= limit
        ):
            buckets[-1] = dataclasses.replace(last, chunks=last.chunks + part.chunks)
        else:
            buckets.append(part)
    return buckets


def collectives_of(plan: Plan) -> list[Collective]:
    """Returns all collectives of an update: exchanges, what pieces need, and gathers of updates."""
    found = [Collective(bucket.bytes, bucket.axes) for bucket in plan.buckets for _ in range(2)]
    for bucket in plan.grams:
        found += estimate(bucket).collectives
    for together in gathered_together(plan.shares):
        num_bytes = sum(share.bytes_of(share.stack.units) * share.replicas for share in together)
        found.append(Collective(num_bytes, together[0].axes, shares=True))
    return found


def microseconds_of(plan: Plan, links: Links) -> float:
    """Returns a model's time of all products and collectives, one after the other."""
    each: dict[Any, tuple[Leaf, int]] = {}
    works = [(leaf, (), leaf.units) for leaf in plan.local]
    works += [(c.leaf, b.axes, c.slots) for b in plan.buckets for c in b.chunks]
    for leaf, axes, count in works:
        _, before = each.get((leaf.kind, axes), (leaf, 0))
        each[leaf.kind, axes] = (leaf, before + count)
    compute = sum(leaf.microseconds(count) for leaf, count in each.values())
    compute += sum(estimate(bucket).compute for bucket in plan.grams)
    return compute + sum(each.microseconds(links) for each in collectives_of(plan))
