"""Matrices of one shape are orthogonalized together, from whatever parameters they come.

A model of 24 layers has hundreds of matrices and a handful of shapes. One iteration for each shape,
on a stack, is hundreds of kernels in place of thousands: less to compile, and small matrices fill
the device.
"""

import collections
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from muon_jax._iteration.passes import is_tall

# By default, the bytes of the Gram matrices of a group, and of its matrices: what fills a device
# many times over; more needs more memory, and is no faster. Shapes with as many rows then go in as
# large groups, whose products of Gram matrices are one program to compile.
GRAM_BYTES, MATRIX_BYTES = 2**28, 2**30


def map_by_shape(
    function: Callable[[list[jax.Array]], Sequence[jax.Array]],
    stacks: Sequence[jax.Array],
    max_group_bytes: int | None,
) -> list[jax.Array]:
    """Returns the results of `function` for all stacks, called with those that go together.

    Args:
        function: maps stacks of equal matrices, each matrix by itself.
        stacks: shapes `(batch, rows, cols)`; matrices with rows and cols exchanged are equal.
        max_group_bytes: the most that goes together, in bytes, None for `GRAM_BYTES` of Gram
            matrices and `MATRIX_BYTES`. A stack that is larger goes alone.
    """
    results: dict[int, jax.Array] = {}
    for group in groups(stacks, max_group_bytes):
        results |= zip(group, function([stacks[i] for i in group]), strict=True)
    return [results[i] for i in range(len(stacks))]


def groups(
    stacks: Sequence[jax.Array | jax.ShapeDtypeStruct], max_group_bytes: int | None
) -> list[list[int]]:
    """Returns the indices of the stacks that go together, those of tall matrices first."""

    def kind(i):
        # Where a shard_map tracks which values differ along its axes, those that do not stay apart.
        varying = jax.typeof(stacks[i]).manual_axis_type.varying
        return (*sorted(stacks[i].shape[1:]), (stacks[i].dtype.name, *sorted(varying)))

    def limit(m, n, others):
        gram, matrix = (max(1, m * size * jnp.dtype(others[0]).itemsize) for size in (m, n))
        if max_group_bytes is None:
            return max(1, min(GRAM_BYTES // gram, MATRIX_BYTES // matrix))
        return max(1, max_group_bytes // matrix)

    counts = collections.Counter[tuple]()
    for i, stack in enumerate(stacks):
        counts[kind(i)] += stack.shape[0]
    found = []
    tall_first = sorted(range(len(stacks)), key=lambda i: not is_tall(stacks[i]))
    for (m, n, others), members in itertools.groupby(sorted(tall_first, key=kind), key=kind):
        most = limit(m, n, others)
        alike = [c for k, c in counts.items() if (k[0], k[2]) == (m, others) and c > limit(*k)]
        size = even(counts[m, n, others], most, alike)
        free = -1  # matrices, in the last group
        for i in members:
            if stacks[i].shape[0] > free:
                found.append([])
                free = size
            found[-1].append(i)
            free -= stacks[i].shape[0]
    return found


def even(count: int, most: int, alike: Sequence[int] = ()) -> int:
    """Returns the size of the parts that so many matrices are cut in, at most `most`.

    Every other number of matrices is another program to compile. So parts are equal, for this count
    and for those that are `alike`, or for this one, unless they would be half of `most` or less.
    """
    if count <= most:
        return count
    for common in (math.gcd(count, *alike), count):
        size = max(size for size in range(1, most + 1) if common % size == 0)
        if 2 * size > most:
            return size
    return -(-count // -(-count // most))
