"""Matrices of sharded parameters, orthogonalized whole: who knows the sharding, and what runs.

Explicit mesh axes are part of the arrays' types, and `shardings=` says it for any mesh: a
`shard_map` runs the plan. Under automatic axes only the compiler knows, so that the plan is made
when it asks how to partition the operation (`custom_partitioning`). Inside the caller's own
`shard_map` the plan runs as it is.
"""

import functools
import itertools
import math
import operator
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import _exchange, _grouping, _placement, _views
from muon_jax._newton_schulz import products_dtype

# PartitionSpec or NamedSharding at the leaves, a prefix of the parameters' tree.
type ShardingTree = Any
type Shardings = ShardingTree | Callable[[Any], ShardingTree] | None

# The most that a device sends at once, in bytes: large enough for the bandwidth of NVLink, small
# enough that several buckets overlap exchange and computation.
MAX_BUCKET_BYTES = 2**27

# Part of the compiled program's key in JAX's cache; another one for another plan or execution.
_VERSION = 1


def map_matrices(
    function: functools.partial,
    views: _views.Views,
    tree: Any,
    shardings: Shardings,
    max_group_bytes: int,
) -> Any:
    """Returns the tree with `function` applied to all matrices, wherever their shards are.

    Args:
        function: `newton_schulz` with keywords, of which some may be arrays.
        views: which matrices, as for `of_leaves`.
        tree: the arrays.
        shardings: as for `scale_by_muon`.
        max_group_bytes: as for `map_by_shape`.

    Raises:
        ValueError: the sharding is not known, or does not fit the parameters.
        NotImplementedError: some mesh axes are manual, others are not.
    """
    leaves, treedef = jax.tree.flatten(tree)
    stated = None if shardings is None else of_leaves(shardings, tree)
    mesh = _mesh(leaves, stated)
    sizes = dict(mesh.shape)
    types = {
        name: kind
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if sizes[name] > 1
    }
    kinds = [kind for kind in AxisType if kind in types.values()]
    specs = [s.spec if isinstance(s, NamedSharding) else s for s in stated or []]
    if not kinds:
        stacks, unflatten = _views.flatten(views, tree)
        return unflatten(_grouping.map_by_shape(function, stacks, max_group_bytes))
    if stated is None and kinds == [AxisType.Explicit]:
        specs = [jax.typeof(x).sharding.spec for x in leaves]
    elif stated is None and kinds != [AxisType.Auto]:
        raise ValueError(
            f"the sharding of the parameters cannot be known on a mesh of axes {types}: pass"
            " shardings=, the PartitionSpec of each parameter"
        )
    elif AxisType.Manual in kinds and len(kinds) > 1:
        raise NotImplementedError(
            f"inside a shard_map over some axes of a mesh, {types}: call the optimizer outside it,"
            " or in a shard_map over all axes"
        )

    viewed = _views.of_leaves(views, tree)
    arrays, bind = _arrays_of(function)

    def planned(sizes, specs, shapes):
        """The function of shards and arrays that runs the plan."""
        plan = make_plan(viewed, shapes, specs, sizes, function.keywords, max_group_bytes)
        return lambda shards, arrays: _exchange.execute(plan, shards, bind(arrays), max_group_bytes)

    if kinds == [AxisType.Manual]:
        whole = [_whole(x, spec, sizes) for x, spec in zip(leaves, specs, strict=True)]
        results = planned(sizes, specs, whole)(leaves, arrays)
    elif specs:
        run = jax.shard_map(
            planned(sizes, specs, leaves),
            mesh=mesh,
            in_specs=(specs, PartitionSpec()),
            out_specs=specs,
            check_vma=False,
        )
        results = jax.jit(run)(leaves, arrays)
    else:
        static = bind([None] * len(arrays)).keywords
        settings = repr((_VERSION, static, viewed, max_group_bytes))
        results = _when_partitioned(planned, leaves, arrays, settings)
    return treedef.unflatten(results)


def make_plan(
    viewed: Sequence[tuple[str, _views.View]],
    shapes: Sequence[Any],
    specs: Sequence[PartitionSpec],
    mesh: dict[str, int],
    keywords: dict[str, Any],
    max_group_bytes: int,
) -> _placement.Plan:
    """Returns the plan for parameters with these paths and views, global shapes and specs.

    In the dtype of 16 bits that float32 momenta are multiplied in they are exchanged too; all
    others in their own.
    """
    keywords = {k: v for k, v in keywords.items() if k not in ("eps", "implementation")}

    def wire(leaf):
        if leaf.dtype != np.float32:
            return leaf.dtype
        dtypes = [products_dtype(shape[1:], leaf.dtype, **keywords) for shape in leaf.stacks]
        return dtypes[0] if len({*dtypes}) == 1 and np.dtype(dtypes[0]).itemsize == 2 else leaf.dtype

    leaves = [
        _placement.leaf(i, name, x, view, spec, mesh)
        for i, ((name, view), x, spec) in enumerate(zip(viewed, shapes, specs, strict=True))
    ]
    return _placement.plan(leaves, mesh, wire, min(max_group_bytes, MAX_BUCKET_BYTES))


def of_leaves(shardings: Shardings, tree: Any) -> list[PartitionSpec | NamedSharding]:
    """Returns the sharding of each leaf of `tree`.

    Raises:
        ValueError: one is neither a PartitionSpec nor a NamedSharding.
    """
    found = []

    def find(path, sharding, subtree):
        if not isinstance(sharding, PartitionSpec | NamedSharding):
            raise ValueError(
                f"shardings{jax.tree_util.keystr(path)} must be a PartitionSpec or a"
                f" NamedSharding, got {sharding!r}"
            )
        found.extend([sharding] * len(jax.tree.leaves(subtree)))

    shardings = shardings(tree) if callable(shardings) else shardings
    jax.tree.map_with_path(
        find,
        shardings,
        tree,
        is_leaf=lambda node: node is None or isinstance(node, PartitionSpec | NamedSharding),
    )
    return found


def _mesh(leaves, shardings):
    """The mesh of the arrays, else that in force, else that of the shardings."""
    meshes = [jax.typeof(x).sharding.mesh for x in leaves] + [jax.sharding.get_abstract_mesh()]
    meshes += [s.mesh.abstract_mesh for s in shardings or [] if isinstance(s, NamedSharding)]
    known = [mesh for mesh in meshes if not mesh.empty]
    if not known and any(entry for spec in shardings or [] for entry in spec):
        raise ValueError(
            "shardings name axes, but there is no mesh: call the optimizer under jax.set_mesh, on"
            " arrays that are on a mesh, or with NamedShardings"
        )
    return known[0] if known else meshes[0]


def _whole(shard, spec, sizes):
    """The array of which `shard` is the local part."""
    pieces = [math.prod(sizes.get(name, 1) for name in _placement.names(entry)) for entry in spec]
    pieces += [1] * (shard.ndim - len(pieces))
    shape = tuple(map(operator.mul, shard.shape, pieces))
    return jax.ShapeDtypeStruct(shape, shard.dtype)


def _arrays_of(function):
    """The arrays among the keywords of a partial, and what makes the partial of them again."""
    leaves, treedef = jax.tree.flatten(function.keywords)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def bind(arrays):
        values = dict(zip(where, arrays, strict=True))
        merged = [values.get(i, leaf) for i, leaf in enumerate(leaves)]
        return functools.partial(function.func, **treedef.unflatten(merged))

    return [leaves[i] for i in where], bind


def _when_partitioned(planned, leaves, arrays, settings):
    """Runs the plan that is made for the shardings that the compiler has arrived at.

    `settings` become an operand: they decide what is compiled, and JAX's cache of compiled programs
    knows operations of this kind by their operands alone.
    """

    @custom_partitioning
    def operation(leaves, arrays, _):
        return planned({}, [PartitionSpec()] * len(leaves), leaves)(leaves, arrays)

    def partition(mesh, operands, results):
        del results
        leaves, arrays, digest = operands
        shardings = [NamedSharding(mesh, _even(x, mesh)) for x in leaves]
        replicated = NamedSharding(mesh, PartitionSpec())
        run = planned(dict(mesh.shape), [s.spec for s in shardings], leaves)
        operand_shardings = (shardings, [replicated] * len(arrays), replicated)
        return mesh, lambda leaves, arrays, _: run(leaves, arrays), shardings, operand_shardings

    def rule(mesh, operands, results):
        """Each result is sharded like its leaf, whatever the others."""
        del mesh
        names = (f"i{i}" for i in itertools.count())
        mappings = [tuple(itertools.islice(names, len(x.shape))) for x in operands]
        return SdyShardingRule(tuple(mappings), tuple(mappings[: len(results)]))

    operation.def_partition(partition, sharding_rule=rule)
    digest = np.uint32(zlib.crc32(settings.encode()))
    return jax.jit(operation)(leaves, arrays, digest)


def _even(x, mesh):
    """The spec of an operand, without the mesh axes that would cut it unevenly."""
    cuts = [math.prod(mesh.shape[name] for name in _placement.names(entry)) for entry in x.sharding.spec]
    entries = zip(x.sharding.spec, x.shape, cuts, strict=True)
    return PartitionSpec(*(entry if size % cut == 0 else None for entry, size, cut in entries))
