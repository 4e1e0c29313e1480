"""What is known of the sharding of parameters while an optimizer is traced.

Explicit mesh axes are part of the arrays' types, and `shardings=` says it for any mesh. Under
automatic axes only the compiler knows. Inside a `shard_map` arrays are shards, and nothing tells of
what.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax._trees import broadcast

# At the leaves PartitionSpec, NamedSharding, or None for a parameter that is not sharded; a prefix
# of the parameters' tree.
type ShardingTree = Any
type Shardings = ShardingTree | Callable[[Any], ShardingTree] | None


class Placed(NamedTuple):
    """Where the leaves of a tree are.

    Attributes:
        mesh: concrete or abstract.
        kind: of its axes, Explicit where specs are stated; None where nothing is sharded.
        specs: of the leaves; none under automatic axes.
        whole: the tree, in a shard_map shapes of the arrays of which it has the shards.
    """

    mesh: Any
    kind: AxisType | None
    specs: list[PartitionSpec]
    whole: Any


def names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes of an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes of a PartitionSpec."""
    return sum(map(names, spec), ())


def entries(spec: PartitionSpec, ndim: int, mesh: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Returns the axes of the mesh that divide each axis of an array of rank `ndim`.

    Raises:
        ValueError: `spec` has an axis that the mesh lacks, one twice, or too many entries.
    """
    named = axes_of(spec)
    if len(spec) > ndim or any(axis not in mesh for axis in named):
        raise ValueError(
            f"its sharding {spec} must name axes of the mesh {dict(mesh)} for at most {ndim} axes"
        )
    if len({*named}) < len(named):
        raise ValueError(f"its sharding {spec} must name each mesh axis once")
    return _padded(spec, ndim)


def spec_of(sharding: PartitionSpec | NamedSharding) -> PartitionSpec:
    """Returns the PartitionSpec that a sharding is or has."""
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding


def locate(tree: Any, shardings: Shardings) -> Placed:
    """Returns where the leaves of `tree` are, arrays that are traced or not.

    Raises:
        ValueError: that cannot be known, or `shardings` does not fit.
        NotImplementedError: some mesh axes are manual, others are not.
    """
    leaves = jax.tree.leaves(tree)
    stated = None if shardings is None else shardings_of_leaves(shardings, tree)
    mesh = _mesh(leaves)
    pairs = [*zip(mesh.axis_names, mesh.axis_types, strict=True)]
    types = {name: kind for name, kind in pairs if mesh.shape[name] > 1} if leaves else {}
    kinds = [kind for kind in AxisType if kind in types.values()]
    specs = [*map(spec_of, stated or [])]
    if stated is not None:
        _check_types(tree, specs)
    if AxisType.Manual in mesh.axis_types and {*kinds} - {AxisType.Manual}:
        raise NotImplementedError(
            f"in a shard_map over some axes of a mesh, {dict(pairs)}: call the optimizer outside"
            " it, or in a shard_map over all axes"
        )
    typed = [jax.typeof(x).sharding.spec for x in leaves]
    if stated is None and kinds == [AxisType.Explicit]:
        specs = typed
    elif stated is None and (
        kinds not in ([], [AxisType.Auto]) or (kinds and any(map(axes_of, typed)))  # of one device
    ):
        raise ValueError(
            f"the sharding of the parameters cannot be known on mesh axes {dict(pairs)}: pass"
            " shardings=, the PartitionSpec of each parameter; PartitionSpec() where devices have"
            " them whole, as under jax.pmap"
        )
    elif mesh.empty and any(map(axes_of, specs)):
        kinds, specs = [AxisType.Auto], []  # the compiler knows it, by `jit(in_shardings=…)`
    elif stated is not None and kinds and kinds != [AxisType.Manual]:
        kinds = [AxisType.Explicit]
    if kinds == [AxisType.Manual]:
        shapes = [_whole(x, spec, mesh.shape) for x, spec in zip(leaves, specs, strict=True)]
        tree = jax.tree.structure(tree).unflatten(shapes)
    return Placed(mesh, kinds[0] if kinds else None, specs, tree)


def whole(tree: Any, shardings: Shardings) -> Any:
    """Returns `Placed.whole`, outside a shard_map without a need to know the sharding.

    Raises:
        ValueError: the sharding is not known, or does not fit the parameters.
        NotImplementedError: some mesh axes are manual, others are not.
    """
    if AxisType.Manual not in jax.sharding.get_abstract_mesh().axis_types:
        return tree
    return locate(tree, shardings).whole


def shardings_of_leaves(shardings: Shardings, tree: Any) -> list[PartitionSpec | NamedSharding]:
    """Returns the sharding of each leaf of `tree`.

    Raises:
        ValueError: one is neither a PartitionSpec nor a NamedSharding nor None, or leaves an axis
            unconstrained.
    """

    def checked(path, sharding):
        sharding = PartitionSpec() if sharding is None else sharding
        if not isinstance(sharding, PartitionSpec | NamedSharding):
            raise ValueError(
                f"shardings{jax.tree_util.keystr(path)} must be a PartitionSpec, a"
                f" NamedSharding or None, got {sharding!r}"
            )
        spec = spec_of(sharding)
        if any(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
            raise ValueError(
                f"shardings{jax.tree_util.keystr(path)} must say how every axis is divided, got"
                f" {spec}"
            )
        return sharding

    def is_sharding(node):
        return node is None or isinstance(node, PartitionSpec | NamedSharding)

    return broadcast(checked, shardings, tree, is_sharding)


def _check_types(tree, specs):
    """Raises ValueError where a stated spec is another than that in the type of an array."""
    for (path, x), spec in zip(jax.tree.leaves_with_path(tree), specs, strict=True):
        typed = jax.typeof(x).sharding
        of_spec, of_type = (_padded(s, x.ndim)[: x.ndim] for s in (spec, typed.spec))
        if {*typed.mesh.axis_types} == {AxisType.Explicit} and of_spec != of_type:
            raise ValueError(
                f"shardings= says {spec} of the parameter {jax.tree_util.keystr(path)}, its type"
                f" {typed.spec}: leave out shardings= on explicit axes, or jax.reshard the array"
            )


def _padded(spec, ndim):
    """The mesh axes of each entry, none where the array has more axes than entries."""
    return [*map(names, spec)] + [()] * (ndim - len(spec))


def _mesh(leaves):
    """The mesh of the arrays, else that in force."""
    meshes = [jax.typeof(x).sharding.mesh for x in leaves] + [jax.sharding.get_abstract_mesh()]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def _whole(shard, spec, mesh):
    """The array of which `shard` is the local part."""
    entries = _padded(spec, len(shard.shape))
    pieces = [math.prod(mesh.get(name, 1) for name in entry) for entry in entries]
    shape = tuple(size * count for size, count in zip(shard.shape, pieces, strict=False))
    return jax.ShapeDtypeStruct(shape, shard.dtype)
