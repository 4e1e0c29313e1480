"""Replicas that split the work: each orthogonalizes a share of the units, and all gather.

The units of parameters of one layout are one list. Of N units, replica r of R has those from
r·⌈N/R⌉ on, padded with zeros, as a stack that the plan treats like a parameter. The results of all
shares over the same mesh axes are gathered at once.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from muon_jax._distributed.cost import names_of, size_of
from muon_jax._distributed.plan import Leaf, Share
from muon_jax._distributed.units import by_part, take_units
from muon_jax._matrices.views import stacked_view


def shares_of(leaves: Sequence[Leaf]) -> list[Share]:
    """Returns the shares of all leaves that replicas split. Their stacks come after the leaves."""

    def alike(leaf: Leaf) -> str:
        local = _local_unit(leaf)
        return repr((leaf.split, leaf.kind, leaf.layout, leaf.wire, sorted(leaf.varying), local))

    split = sorted((leaf for leaf in leaves if leaf.split), key=alike)
    groups = [[*group] for _, group in itertools.groupby(split, alike)]
    return [_share(group, len(leaves) + i) for i, group in enumerate(groups)]


def _share(leaves: Sequence[Leaf], index: int) -> Share:
    """The share of units of one layout, whose stack has this index."""
    leaf = leaves[0]
    count = -(-sum(each.units for each in leaves) // size_of(leaf.split))
    stack = dataclasses.replace(
        leaf,
        index=index,
        parameter_shape=(count, *leaf.shape),
        view=stacked_view(leaf.view),
        axes=((), *leaf.axes),
        local_shape=(count, *_local_unit(leaf)),
        varying=leaf.varying.union(names_of(leaf.split)),
        gains=(),
    )
    return Share(tuple((leaf, 0, leaf.units) for leaf in leaves), stack, leaf.wire)


def _local_unit(leaf: Leaf) -> tuple[int, ...]:
    """The shape of the part of a unit on each device."""
    return tuple(1 if i in leaf.batch else size for i, size in enumerate(leaf.local_shape))


def own_units(share: Share, shards: Sequence[jax.Array]) -> jax.Array:
    """Returns the stack of this device's replica."""
    units, count = jnp.concatenate(take_units(share.parts, shards)), share.stack.units
    units = jnp.pad(units, [(0, count * share.replicas - len(units)), (0, 0), (0, 0)])
    replica = jax.lax.axis_index(names_of(share.axes))
    own = jax.lax.dynamic_slice_in_dim(units, replica * count, count)
    return own.reshape(share.stack.local_shape)


def gathered_together(shares: Sequence[Share]) -> list[list[Share]]:
    """Returns the shares of each all-gather: those over equal mesh axes in one dtype."""

    def alike(share: Share) -> str:
        return repr((share.axes, share.dtype, sorted(share.stack.varying)))

    return [[*group] for _, group in itertools.groupby(sorted(shares, key=alike), alike)]


def gathered(
    shares: Sequence[Share], results: Mapping[int, jax.Array]
) -> Iterator[tuple[Leaf, jax.Array]]:
    """Yields the results of all replicas for the units of each parameter."""
    for group in gathered_together(shares):
        flat = [results[share.stack.index].astype(share.dtype).reshape(-1) for share in group]
        names = names_of(group[0].axes)
        own = jnp.concatenate(flat)
        # If the caller's shard_map tracks what differs, tell it that all devices now have the same.
        is_known = jax.typeof(own).manual_axis_type.varying.issuperset(names)
        whole = jax.lax.all_gather(own, names, to="invarying" if is_known else "varying")
        *ends, _ = itertools.accumulate(x.size for x in flat)
        for share, x in zip(group, jnp.split(whole, ends, axis=1), strict=True):
            yield from by_part(share.parts, x.reshape(share.replicas * share.stack.units, -1))
