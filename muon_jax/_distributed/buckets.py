"""Dealing: units of matrices to owners, in buckets bounded in bytes."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from muon_jax._distributed.plan import Bucket, Chunk, Leaf, Plan
from muon_jax._iteration.grouping import even


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
    costs = (round(1e3 * chunk.parts[0][0].microseconds(1)) for chunk in chunks)
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
