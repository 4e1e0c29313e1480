"""All matrices of a tree, orthogonalized as whole matrices, wherever their shards are."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from muon_jax._distributed.automatic import Planned, run_when_partitioned
from muon_jax._distributed.exchange import run_plan
from muon_jax._distributed.on_shards import by_device
from muon_jax._distributed.plan import Leaf
from muon_jax._distributed.planning import Limits, make_plan, units_of
from muon_jax._distributed.sharding import Placed, Shardings, locate
from muon_jax._iteration.grouping import map_by_shape
from muon_jax._iteration.iteration import Iteration
from muon_jax._matrices.views import Views, stacked_view, stacks_of_tree


def map_matrices(
    iteration: Iteration, views: Views, tree: Any, shardings: Shardings, limits: Limits
) -> Any:
    """Returns the tree with `iteration` applied to all matrices.

    | mesh axes | who knows the shardings      | where the plan runs                           |
    | --------- | ---------------------------- | --------------------------------------------- |
    | none      | nothing is sharded           | there is no plan                              |
    | manual    | `shardings`                  | here: arrays are shards                       |
    | explicit  | the types, or `shardings`    | in a shard_map                                |
    | automatic | the compiler                 | in an operation that the compiler partitions  |

    Args:
        iteration: the iteration, whose leaves may be traced.
        views: which matrices, as for `views_of_leaves`.
        tree: the arrays.
        shardings: as for `scale_by_muon`.
        limits: of groups and exchanges.

    Raises:
        ValueError: the sharding is not known, or does not fit the parameters, or no matrix can
            stay in pieces as `distributed_gram` says.
        NotImplementedError: some mesh axes are manual, others are not.
    """
    place = locate(tree, shardings)
    if place.kind is None:
        return _map_unsharded(iteration, views, tree, limits)
    leaves, treedef = jax.tree.flatten(tree)
    is_empty = [not x.size for x in leaves]
    if any(is_empty):  # arrays without elements are results already
        place = _without_empty(place, is_empty)
    full = [x for x, empty in zip(leaves, is_empty, strict=True) if not empty]
    results = iter(_map_sharded(iteration, views, full, place, limits) if full else [])
    return treedef.unflatten(
        x if empty else next(results) for x, empty in zip(leaves, is_empty, strict=True)
    )


def _map_unsharded(iteration: Iteration, views: Views, tree: Any, limits: Limits) -> Any:
    def of_whole(tree: Any) -> Any:
        stacks, unflatten = stacks_of_tree(views, tree)
        return unflatten(map_by_shape(iteration, stacks, limits.max_group_bytes))

    return by_device(of_whole, tree)


def _without_empty(place: Placed, is_empty: Sequence[bool]) -> Placed:
    """The same place of a tree in which None stands for arrays without elements."""
    wholes, treedef = jax.tree.flatten(place.whole)
    pairs = [*zip(wholes, is_empty, strict=True)]
    whole = treedef.unflatten(None if empty else x for x, empty in pairs)
    specs = [s for s, empty in zip(place.specs, is_empty, strict=False) if not empty]
    return place._replace(specs=specs, whole=whole)


def _map_sharded(
    iteration: Iteration,
    views: Views,
    leaves: Sequence[jax.Array],
    place: Placed,
    limits: Limits,
) -> list[jax.Array]:
    """The results for these leaves, of `place.whole`, none of them empty."""
    units = units_of(views, place.whole, iteration)
    arrays, bind = _arrays_of(iteration)

    def planned(specs: Sequence[PartitionSpec], mesh: Mapping[str, int]) -> Planned:
        plan = make_plan(units, specs, mesh, limits)

        def run(shards: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
            return run_plan(plan, shards, bind(arrays), limits.max_group_bytes)

        return run

    if place.kind == AxisType.Manual:
        units = [_varying_like(unit, x) for unit, x in zip(units, leaves, strict=True)]
        return planned(place.specs, place.mesh.shape)(leaves, arrays)
    if place.kind == AxisType.Explicit:
        run = jax.shard_map(
            planned(place.specs, place.mesh.shape),
            mesh=place.mesh,
            in_specs=(place.specs, PartitionSpec()),
            out_specs=place.specs,
            check_vma=False,
        )
        return jax.jit(run)(leaves, arrays)

    def of_stacks(stacks: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        views = [stacked_view(unit.view) for unit in units]
        return map_matrices(bind(arrays), lambda _: views, [*stacks], None, limits)

    settings = repr((bind([None] * len(arrays)), units, limits))
    return run_when_partitioned(planned, of_stacks, leaves, arrays, settings)


def _varying_like(unit: Leaf, x: jax.Array) -> Leaf:
    """The unit with the mesh axes along which the caller's shard_map knows that `x` differs."""
    return dataclasses.replace(unit, varying=jax.typeof(x).manual_axis_type.varying)


def _arrays_of(iteration: Iteration) -> tuple[list[jax.Array], Any]:
    """The arrays in an iteration, and a function of arrays that gives the iteration with them."""
    leaves, treedef = jax.tree.flatten(iteration)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def bind(arrays: Sequence[Any]) -> Iteration:
        values = dict(zip(where, arrays, strict=True))
        return treedef.unflatten(values.get(i, leaf) for i, leaf in enumerate(leaves))

    return [leaves[i] for i in where], bind
