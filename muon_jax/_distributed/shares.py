"""Replicas that split the work: each orthogonalizes a share of the units, and all gather.

The units of parameters of one layout are one list, which is cut so that the results of one part are
gathered while the next is computed. Of the N units of a part, replica r of R has those from r·⌈N/R⌉
on, padded with zeros, as a stack that the plan treats like a parameter. Small shares over the same
mesh axes are gathered at once.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from muon_jax._distributed.cost import names_of, size_of
from muon_jax._distributed.plan import Gather, Leaf, Part, Share, parts_between
from muon_jax._distributed.units import by_part, take_units
from muon_jax._iteration.grouping import even
from muon_jax._matrices.views import stacked_view


def shares_of(leaves: Sequence[Leaf], max_bytes: int) -> list[Share]:
    """Returns the shares of all leaves that replicas split. Their stacks come after the leaves.

    Args:
        leaves: the parameters, placed.
        max_bytes: the most that a device sends of a share; of a single unit it may be more.
    """

    def alike(leaf: Leaf) -> str:
        local = _local_unit(leaf)
        return repr((leaf.split, leaf.kind, leaf.layout, leaf.wire, sorted(leaf.varying), local))

    split = sorted((leaf for leaf in leaves if leaf.split), key=alike)
    cuts = (_cut([*group], max_bytes) for _, group in itertools.groupby(split, alike))
    return [
        Share(parts, _stack_of(parts, len(leaves) + i), parts[0][0].wire)
        for i, parts in enumerate(itertools.chain.from_iterable(cuts))
    ]


def _cut(leaves: Sequence[Leaf], max_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Yields the units of the shares of leaves that are alike, each share of one unit at least."""
    first, units = leaves[0], [(leaf, 0, leaf.units) for leaf in leaves]
    replicas = size_of(first.split)
    count = -(-sum(leaf.units for leaf in leaves) // replicas)
    sent = (replicas - 1) * math.prod(_local_unit(first)) * first.wire.itemsize
    most = even(count, max(1, max_bytes // sent))
    for start in range(0, count, most):
        yield parts_between(units, replicas * start, replicas * min(start + most, count))


def _stack_of(parts: Sequence[Part], index: int) -> Leaf:
    """The units of one replica, as a leaf of this index."""
    leaf = parts[0][0]
    count = -(-sum(stop - start for _, start, stop in parts) // size_of(leaf.split))
    return dataclasses.replace(
        leaf,
        index=index,
        parameter_shape=(count, *leaf.shape),
        view=stacked_view(leaf.view),
        axes=((), *leaf.axes),
        local_shape=(count, *_local_unit(leaf)),
        varying=leaf.varying.union(names_of(leaf.split)),
        gains=(),
    )


def _local_unit(leaf: Leaf) -> tuple[int, ...]:
    """The shape of the part of a unit on each device."""
    return tuple(1 if i in leaf.batch else size for i, size in enumerate(leaf.local_shape))


def after(sent: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Returns `x`, which has to wait until what was sent has arrived."""
    # XLA keeps the barrier as long as another operation reads what was sent.
    return jax.lax.optimization_barrier((x, [*sent]))[0] if sent else x


def own_units(
    share: Share, shards: Mapping[int, jax.Array], sent: Sequence[jax.Array] = ()
) -> jax.Array:
    """Returns the stack of this device's replica, computed after what was sent has arrived.

    The index waits, not the units: they would be copied.
    """
    units, count = jnp.concatenate(take_units(share.parts, shards)), share.stack.units
    units = jnp.pad(units, [(0, count * share.replicas - len(units)), (0, 0), (0, 0)])
    replica = after(sent, jax.lax.axis_index(names_of(share.axes)))
    own = jax.lax.dynamic_slice_in_dim(units, replica * count, count)
    return own.reshape(share.stack.local_shape)


def gathers_of(shares: Sequence[Share], max_bytes: int) -> Iterator[Gather]:
    """Yields the shares of each all-gather, over equal mesh axes and in one dtype.

    Args:
        shares: the shares.
        max_bytes: the most that a device sends at once; of a single share it may be more.
    """

    def alike(share: Share) -> str:
        return repr((share.axes, share.dtype, sorted(share.stack.varying)))

    for _, group in itertools.groupby(sorted(shares, key=alike), alike):
        together: list[Share] = []
        sent = 0
        for share in group:
            own = share.bytes_of(share.stack.units) * (share.replicas - 1)
            if together and sent + own > max_bytes:
                yield tuple(together)
                together, sent = [], 0
            together.append(share)
            sent += own
        yield tuple(together)


def gathered(gather: Gather, results: Mapping[int, jax.Array]) -> jax.Array:
    """Returns the results of all replicas, `(replica, elements of all shares)`."""
    flat = [results[share.stack.index].astype(share.dtype).reshape(-1) for share in gather]
    names = names_of(gather[0].axes)
    own = jnp.concatenate(flat)
    # If the caller's shard_map tracks what differs, tell it that all devices now have the same.
    is_known = jax.typeof(own).manual_axis_type.varying.issuperset(names)
    return jax.lax.all_gather(own, names, to="invarying" if is_known else "varying")


def gathered_units(gather: Gather, whole: jax.Array) -> Iterator[tuple[Part, jax.Array]]:
    """Yields the units of each part of what `gathered` returns."""
    *ends, _ = itertools.accumulate(math.prod(share.stack.local_shape) for share in gather)
    for share, x in zip(gather, jnp.split(whole, ends, axis=1), strict=True):
        yield from by_part(share.parts, x.reshape(share.replicas * share.stack.units, -1))
