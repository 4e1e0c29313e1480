"""Shardings of arrays outside `jit`: what optimizers keep of them, and compare with those stated.

Arrays outside `jit` say how they are sharded, and traced ones on automatic axes do not. Compilers
for CPUs and GPUs are asked for it. That for TPUs cannot be.
"""

import warnings
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from muon_jax._distributed.exchange import Exchange
from muon_jax._distributed.sharding import (
    Mesh,
    Shardings,
    asks_how_to_partition,
    mesh_axes_by_dim,
    mesh_of,
    meshes_of,
    shardings_of_leaves,
    spec_of,
)


def are_from_init(mesh: Mesh) -> bool:
    """Returns whether `InitShardings` decides how arrays of the mesh are taken to be sharded."""
    return {*mesh.axis_types} == {AxisType.Auto} and not asks_how_to_partition(mesh)


class _Kept(NamedTuple):
    """A tree of arrays outside `jit`: their meshes, the tree's structure, shapes and specs."""

    meshes: set[AbstractMesh]
    treedef: Any
    shapes: list[tuple[int, ...]]
    specs: list[PartitionSpec]


class InitShardings:
    """The shardings of the parameters of the latest `init` or update outside `jit`.

    It is the only memory that an optimizer has beside its state, and has effects on automatic axes
    of TPUs alone, where it saves an exchange by XLA. If arrays in `jit` are sharded otherwise, XLA
    moves them, and results are the same. `shardings=` takes its place.
    """

    def __init__(self) -> None:
        self._latest: _Kept | None = None

    def keep(self, tree: Any) -> None:
        """Keeps the shardings of the arrays, if all of them have one, on any meshes of TPUs.

        An array on a single device, such as one that was never put on a mesh, counts as
        replicated.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if any(isinstance(x, Tracer) for x in leaves):
            return
        shardings = [getattr(x, "sharding", None) for x in leaves]
        meshes = {s.mesh.abstract_mesh for s in shardings if isinstance(s, NamedSharding)}
        on_mesh = (isinstance(s, NamedSharding | None) or len(s.device_set) == 1 for s in shardings)
        if meshes and not any(map(asks_how_to_partition, meshes)) and all(on_mesh):
            specs = [getattr(s, "spec", PartitionSpec()) for s in shardings]
            self._latest = _Kept(meshes, treedef, [x.shape for x in leaves], specs)

    def fill(self, tree: Any, exchange: Exchange) -> Exchange:
        """Returns the exchange with what was kept of such a tree, if it has no shardings."""
        leaves, treedef = jax.tree.flatten(tree)
        if exchange.shardings is not None or not leaves or self._latest is None:
            return exchange
        meshes = {*meshes_of(leaves)} or {mesh_of(leaves).abstract_mesh}
        are_typed = all({*mesh.axis_types} == {AxisType.Explicit} for mesh in meshes)
        are_known = all(len({*mesh.axis_types}) == 1 for mesh in meshes)
        if are_typed or not are_known:
            return exchange
        if (meshes, treedef, [x.shape for x in leaves]) != self._latest[:3]:
            return exchange
        types = (jax.typeof(x).sharding for x in leaves)
        specs = [
            own.spec if AxisType.Explicit in own.mesh.axis_types else kept
            for own, kept in zip(types, self._latest.specs, strict=True)
        ]
        return exchange.with_(shardings=treedef.unflatten(specs))


def warn_of_other_shardings(tree: Any, stated: Shardings) -> None:
    """Warns if an array is sharded over other mesh axes than `shardings=` says.

    It ignores traced arrays and mesh axes of one device.
    """
    leaves = jax.tree.leaves_with_path(tree)
    if stated is None or any(isinstance(x, Tracer) for _, x in leaves):
        return
    for (path, x), sharding in zip(leaves, shardings_of_leaves(stated, tree), strict=True):
        own, spec = getattr(x, "sharding", None), spec_of(sharding)
        if not isinstance(own, NamedSharding) or len(own.device_set) == 1:
            continue
        if {*own.mesh.axis_types} == {AxisType.Explicit}:  # `update` raises
            continue
        sizes = dict(own.mesh.shape)
        try:
            by_dim = [mesh_axes_by_dim(each, x.ndim, sizes) for each in (own.spec, spec)]
        except ValueError:  # from `update`, or of another mesh than the array's
            continue
        own_axes, said = ([[a for a in dim if sizes[a] > 1] for dim in dims] for dims in by_dim)
        if own_axes != said:
            warnings.warn(
                f"shardings= says {spec} for the parameter {jax.tree_util.keystr(path)}, but the"
                f" array is sharded as {own.spec}. Each update would move it from one to the other,"
                " and gather it on all devices along mesh axes that shardings= leaves out. Leave"
                f" out shardings=, or pass {own.spec}",
                stacklevel=4,
            )
            return
