"""All matrices of a tree, orthogonalized as whole ones, wherever their shards are.

Where the sharding is known, a `shard_map` runs the plan. Under automatic mesh axes the plan is made
when the compiler asks how to partition the operation (`custom_partitioning`). Inside the caller's
own `shard_map` it runs as it is.
"""

import dataclasses
import functools
import itertools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax._distributed import sharding as _sharding
from muon_jax._distributed import sources as _sources
from muon_jax._distributed.exchange import run_plan
from muon_jax._distributed.on_shards import by_device
from muon_jax._distributed.planning import forms_of, make, units_of
from muon_jax._iteration.grouping import map_by_shape
from muon_jax._matrices.views import Views, stacked, stacks_of_tree


def map_matrices(
    function: functools.partial,
    views: Views,
    tree: Any,
    shardings: _sharding.Shardings,
    max_group_bytes: int | None,
    distributed_gram: bool | None,
) -> Any:
    """Returns the tree with `function` applied to all matrices.

    Args:
        function: `orthogonalize` with keywords, of which some may be arrays.
        views: which matrices, as for `_views.of_leaves`.
        tree: the arrays.
        shardings: as for `scale_by_muon`.
        max_group_bytes: as for `map_by_shape`, and of buckets; None for the defaults.
        distributed_gram: as for `scale_by_muon`.

    Raises:
        ValueError: the sharding is not known, or does not fit the parameters, or no matrix can be
            left in pieces as `distributed_gram` says.
        NotImplementedError: some mesh axes are manual, others are not.
    """
    limits = (max_group_bytes, distributed_gram)
    mesh, kind, specs, whole = _sharding.locate(tree, shardings)
    if kind is None:

        def of_whole(tree):
            stacks, unflatten = stacks_of_tree(views, tree)
            return unflatten(map_by_shape(function, stacks, max_group_bytes))

        return by_device(of_whole, tree)
    leaves, treedef = jax.tree.flatten(tree)
    if not all(x.size for x in leaves):
        full = treedef.unflatten(x if x.size else None for x in leaves)
        done = iter(jax.tree.leaves(map_matrices(function, views, full, shardings, *limits)))
        return treedef.unflatten(next(done) if x.size else x for x in leaves)
    units = units_of(views, whole)
    forms = [forms_of(leaf, function.keywords) for leaf in units]
    arrays, bind = _arrays_of(function)

    def planned(specs, mesh):
        """The function of shards and arrays that runs the plan."""
        plan = make(units, specs, mesh, forms, *limits)
        return lambda shards, arrays: run_plan(plan, shards, bind(arrays), max_group_bytes)

    if kind == AxisType.Manual:
        units = [
            dataclasses.replace(unit, varying=jax.typeof(x).manual_axis_type.varying)
            for unit, x in zip(units, leaves, strict=True)
        ]
        results = planned(specs, mesh.shape)(leaves, arrays)
    elif kind == AxisType.Explicit:
        run = jax.shard_map(
            planned(specs, mesh.shape),
            mesh=mesh,
            in_specs=(specs, PartitionSpec()),
            out_specs=specs,
            check_vma=False,
        )
        results = jax.jit(run)(leaves, arrays)
    else:
        static = bind([None] * len(arrays)).keywords
        # By this alone JAX's cache of compiled programs may know the operation.
        precision = jax.config.jax_default_matmul_precision
        settings = repr((_sources.digest(), precision, static, units, limits))

        def of_stacks(leaves, arrays):
            views = treedef.unflatten(stacked(unit.view) for unit in units)
            stacks = treedef.unflatten(leaves)
            # Not the views as they stand: a tree may be callable.
            results = map_matrices(bind(arrays), lambda _: views, stacks, None, *limits)
            return jax.tree.leaves(results)

        results = _when_partitioned(planned, of_stacks, leaves, arrays, settings)
    return treedef.unflatten(results)


def _arrays_of(function):
    """The arrays among the keywords of a partial, and what makes the partial of them again."""
    leaves, treedef = jax.tree.flatten(function.keywords)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def bind(arrays):
        values = dict(zip(where, arrays, strict=True))
        merged = [values.get(i, leaf) for i, leaf in enumerate(leaves)]
        return functools.partial(function.func, **treedef.unflatten(merged))

    return [leaves[i] for i in where], bind


def _when_partitioned(planned, of_stacks, leaves, arrays, settings):
    """Runs the plan that is made for the shardings that the compiler has arrived at.

    Under `vmap` it is the plan for `of_stacks`, or, where `arrays` are mapped, one run after the
    other. `settings` become an operand: they decide what is compiled, and JAX's cache of compiled
    programs knows operations of this kind by their operands alone.
    """

    @custom_partitioning
    def operation(leaves, arrays, _):
        return planned([PartitionSpec()] * len(leaves), {})(leaves, arrays)

    def partition(mesh, operands, results):
        del results
        leaves, arrays, _ = operands
        shardings = [NamedSharding(mesh, _even(x, mesh)) for x in leaves]
        replicated = NamedSharding(mesh, PartitionSpec())
        run = planned([s.spec for s in shardings], mesh.shape)

        def of_shards(leaves, arrays, _):
            in_force = jax.sharding.get_abstract_mesh()  # its explicit axes would be in all types
            types = dict.fromkeys(in_force.axis_names, AxisType.Auto)
            with jax.sharding.use_abstract_mesh(in_force.update_axis_types(types)):
                return run(leaves, arrays)

        return mesh, of_shards, shardings, (shardings, [replicated] * len(arrays), replicated)

    def rule(mesh, operands, results):
        """Each result is sharded like its leaf, whatever the others."""
        del mesh
        names = (f"i{i}" for i in itertools.count())
        mappings = [ArrayMapping(*itertools.islice(names, len(x.shape))) for x in operands]
        return SdyShardingRule(tuple(mappings), tuple(mappings[: len(results)]))

    operation.def_partition(partition, sharding_rule=rule)
    digest = np.uint32(zlib.crc32(settings.encode()))
    run = jax.custom_batching.custom_vmap(operation)

    @run.def_vmap
    def _(axis_size, in_batched, leaves, arrays, digest):
        mapped_leaves, mapped_arrays, _ = in_batched
        if any(mapped_arrays):
            in_axes = jax.tree.map(lambda mapped: 0 if mapped else None, tuple(in_batched))
            sequential = jax.custom_batching.sequential_vmap(operation)
            results = jax.vmap(sequential, in_axes)(leaves, arrays, digest)
        else:
            stacks = [
                x if mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
                for x, mapped in zip(leaves, mapped_leaves, strict=True)
            ]
            results = of_stacks(stacks, arrays)
        return results, [True] * len(results)

    return jax.jit(run)(leaves, arrays, digest)


def _even(x, mesh):
    """The spec of an operand, without the mesh axes that would cut it unevenly."""
    if x.sharding.is_fully_replicated:  # and of no mesh, perhaps, where no argument is on one
        return PartitionSpec()
    if not isinstance(x.sharding, NamedSharding):
        raise ValueError(
            f"the mesh that a parameter of shape {x.shape} is sharded over, {x.sharding}, cannot be"
            " known, as no argument of the program is on it: pass shardings=, or put one there"
        )

    def cuts(entry):
        return math.prod(mesh.shape[name] for name in _sharding.names(entry))

    entries = zip(x.sharding.spec, x.shape, strict=True)
    return PartitionSpec(*(None if size % cuts(entry) else entry for entry, size in entries))
