"""Groups: matrices of one shape are orthogonalized together, whatever parameters they are in.

A model of 24 layers has hundreds of matrices and a handful of shapes. One iteration for each shape,
on a stack, is hundreds of kernels in place of thousands: there is less to compile, and small
matrices fill the device.
"""

import collections
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon_jax._iteration.operand import Accumulated, is_tall

# The default bounds of a group: the bytes of its Gram matrices and the bytes of its matrices. A
# group of this size fills a device many times over; a larger group needs more memory and is no
# faster. The first bound gives shapes with equally many rows equally large groups, whose products
# of Gram matrices are one program to compile.
GRAM_BYTES, MATRIX_BYTES = 2**28, 2**30
# Groups of one m are joined up to this many bytes, and up to the bytes of the largest of them. For
# gpt2-small that is all of them: three kernels to compile for "balanced" in place of five, 1% less
# time, and 420 MB of temporary memory in place of 280.
JOINED_BYTES = 2**29


def map_by_shape(
    function: Callable[[list[Any]], Sequence[Any]],
    stacks: Sequence[Any],
    max_group_bytes: int | None,
    shares_launches: Callable[[Any], bool] = lambda _: False,
) -> list[Any]:
    """Returns the results of `function` for all stacks, called once for each group.

    Args:
        function: maps stacks of matrices of one shape, each matrix by itself. Where they share
            launches, it maps matrices of one m and several n, those of the largest n first.
        stacks: arrays of shapes `(batch, rows, cols)`, or `Accumulated`. A matrix and one of the
            transposed shape are equal.
        max_group_bytes: the largest size of a group in bytes; None for `GRAM_BYTES` of Gram
            matrices and `MATRIX_BYTES`. A larger stack is a group of its own.
        shares_launches: whether such matrices share launches with others of one m and any n.
    """
    found = groups(stacks, max_group_bytes)
    if len(found) > 1:
        found = _sharing_launches(found, stacks, max_group_bytes, shares_launches)
    results: dict[int, Any] = {}
    for group in found:
        results |= zip(group, function([stacks[i] for i in group]), strict=True)
    return [results[i] for i in range(len(stacks))]


class _Kind(NamedTuple):
    """What the matrices of a group have in common.

    Attributes:
        m, n: their sizes, m ≤ n.
        others: the name of their dtype, whether they are `Accumulated`, and the mesh axes along
            which a shard_map knows that their values differ. Values that do not differ stay apart.
    """

    m: int
    n: int
    others: tuple[str, ...]


def groups(
    stacks: Sequence[jax.Array | jax.ShapeDtypeStruct | Accumulated], max_group_bytes: int | None
) -> list[list[int]]:
    """Returns the indices of the stacks of each group, those of tall matrices first.

    Args:
        stacks: as for `map_by_shape`.
        max_group_bytes: as for `map_by_shape`.
    """
    kinds = [_kind_of(stack) for stack in stacks]
    counts = collections.Counter[_Kind]()
    for kind, stack in zip(kinds, stacks, strict=True):
        counts[kind] += stack.shape[0]
    found = []
    tall_first = sorted(range(len(stacks)), key=lambda i: not is_tall(stacks[i]))
    ordered = sorted(tall_first, key=kinds.__getitem__)
    for kind, members in itertools.groupby(ordered, key=kinds.__getitem__):
        size = _group_size(kind, counts, max_group_bytes)
        free = -1  # the number of matrices for which the last group has room
        for i in members:
            if stacks[i].shape[0] > free:
                found.append([])
                free = size
            found[-1].append(i)
            free -= stacks[i].shape[0]
    return found


def _sharing_launches(
    found: Sequence[list[int]],
    stacks: Sequence[Any],
    max_group_bytes: int | None,
    shares_launches: Callable[[Any], bool],
) -> list[list[int]]:
    """Returns the groups, those joined that share launches.

    Together they are within the bounds, and need no more memory than the largest group of their m,
    or `JOINED_BYTES`. Of a shape with several groups none is joined: its groups are equal, for one
    program.
    """
    kinds = [_kind_of(stacks[group[0]]) for group in found]
    counts = [sum(len(stacks[i]) for i in group) for group in found]
    sizes = [count * _bytes_of(kind) for kind, count in zip(kinds, counts, strict=True)]
    most = collections.defaultdict(lambda: JOINED_BYTES)
    for kind, size in zip(kinds, sizes, strict=True):
        most[kind.m] = max(most[kind.m], size)
    nums_groups = collections.Counter(kinds)
    joined: list[list[int]] = []
    open_groups: dict[Any, tuple[list[int], float]] = {}  # and their parts of the bounds
    for i in reversed(range(len(found))):  # from the largest n
        kind, group = kinds[i], found[i]
        if nums_groups[kind] > 1 or not shares_launches(stacks[group[0]]):
            joined.append(group)
            continue
        part = max(counts[i] / _largest_group(kind, max_group_bytes), sizes[i] / most[kind.m])
        key = (kind.m, kind.others)
        others, used = open_groups.get(key, ([], 0.0))
        if not others or used + part > 1:
            others, used = [], 0.0
            joined.append(others)
        others += group
        open_groups[key] = others, used + part
    return joined[::-1]


def _bytes_of(kind: _Kind) -> int:
    """Returns the bytes of a matrix and its Gram matrix."""
    return kind.m * (kind.m + kind.n) * jnp.dtype(kind.others[0]).itemsize


def _kind_of(stack: jax.Array | jax.ShapeDtypeStruct | Accumulated) -> _Kind:
    m, n = sorted(stack.shape[1:])
    if isinstance(stack, Accumulated):
        return _Kind(m, n, (stack.dtype.name, "accumulated"))
    varying = jax.typeof(stack).manual_axis_type.varying
    return _Kind(m, n, (stack.dtype.name, *sorted(varying)))


def _group_size(
    kind: _Kind, counts: collections.Counter[_Kind], max_group_bytes: int | None
) -> int:
    """Returns how many matrices a group of this kind has."""
    alike = [
        count
        for other, count in counts.items()
        if (other.m, other.others) == (kind.m, kind.others)
        and count > _largest_group(other, max_group_bytes)
    ]
    return even(counts[kind], _largest_group(kind, max_group_bytes), alike)


def _largest_group(kind: _Kind, max_group_bytes: int | None) -> int:
    """Returns how many matrices of this kind are within the bounds, at least 1."""
    itemsize = jnp.dtype(kind.others[0]).itemsize
    gram, matrix = (max(1, kind.m * size * itemsize) for size in (kind.m, kind.n))
    if max_group_bytes is None:
        return max(1, min(GRAM_BYTES // gram, MATRIX_BYTES // matrix))
    return max(1, max_group_bytes // matrix)


def even(count: int, most: int, alike: Sequence[int] = ()) -> int:
    """Returns the size of the parts that `count` matrices are cut into, at most `most`.

    Each size of a part is a program to compile. The parts are therefore equal,

    1.  for this count and all counts in `alike`, or else
    2.  for this count alone, or else, where equal parts would be half of `most` or less,
    3.  as few as possible, the last one smaller.
    """
    if count <= most:
        return count
    for common in (math.gcd(count, *alike), count):
        size = max(size for size in range(1, most + 1) if common % size == 0)
        if 2 * size > most:
            return size
    return -(-count // -(-count // most))
