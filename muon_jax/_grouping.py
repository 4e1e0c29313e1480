"""Matrices of one shape are orthogonalized together, from whatever parameters they come.

A model of 24 layers has hundreds of matrices and a handful of shapes. One iteration for each shape,
on a stack, is a handful of kernels in place of thousands: less to compile, and small matrices fill
the device.
"""

import itertools
from collections.abc import Callable, Sequence

import jax

# What fills a device many times over; more needs more memory, and is no faster.
MAX_GROUP_BYTES = 2**28


def map_by_shape(
    function: Callable[[list[jax.Array]], Sequence[jax.Array]],
    stacks: Sequence[jax.Array],
    max_group_bytes: int | None,
) -> list[jax.Array]:
    """Returns the results of `function` for all stacks, called with those that go together.

    Args:
        function: maps stacks of equal matrices, each matrix by itself.
        stacks: shapes `(batch, rows, cols)`; matrices with rows and cols exchanged are equal.
        max_group_bytes: the most that goes together, in bytes, None for `MAX_GROUP_BYTES`. A stack
            that is larger goes alone.
    """
    results: dict[int, jax.Array] = {}
    for group in groups(stacks, max_group_bytes):
        results |= zip(group, function([stacks[i] for i in group]), strict=True)
    return [results[i] for i in range(len(stacks))]


def groups(
    stacks: Sequence[jax.Array | jax.ShapeDtypeStruct], max_group_bytes: int | None
) -> list[list[int]]:
    """Returns the indices of the stacks that go together, in their order."""

    def kind(i):
        return (*sorted(stacks[i].shape[1:]), stacks[i].dtype.name)

    found = []
    for _, members in itertools.groupby(sorted(range(len(stacks)), key=kind), key=kind):
        free = -1  # bytes in the last group
        for i in members:
            num_bytes = stacks[i].size * stacks[i].dtype.itemsize
            if num_bytes > free:
                found.append([])
                free = MAX_GROUP_BYTES if max_group_bytes is None else max_group_bytes
            found[-1].append(i)
            free -= num_bytes
    return found
