"""What an optimizer has seen of shardings outside `jit`, for compilers that ask nothing.

Arrays outside `jit` say how they are sharded. Where the compiler cannot tell, an optimizer takes
them to be sharded alike in `jit`. Were they not, XLA would move them, and results be the same.
"""

import warnings
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from muon_jax._distributed.devices import asks_how_to_partition
from muon_jax._distributed.sharding import (
    Shardings,
    mesh_axes_by_dim,
    mesh_of,
    meshes_of,
    shardings_of_leaves,
    spec_of,
)


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
        seen, said = ([[a for a in dim if sizes[a] > 1] for dim in dims] for dims in by_dim)
        if seen != said:
            warnings.warn(
                f"shardings= says {spec} for the parameter {jax.tree_util.keystr(path)}, but the"
                f" array is sharded as {own.spec}. Each update would move it from one to the other,"
                " and gather it on all devices along mesh axes that shardings= leaves out. Leave"
                f" out shardings=, or pass {own.spec}",
                stacklevel=4,
            )
            return


class _Seen(NamedTuple):
    """A tree of arrays outside `jit`: their meshes, the tree's structure, shapes and specs."""

    meshes: set[AbstractMesh]
    treedef: Any
    shapes: list[tuple[int, ...]]
    specs: list[PartitionSpec]


class SeenShardings:
    """The shardings of the latest parameters that an optimizer met outside `jit`."""

    def __init__(self) -> None:
        self._latest: _Seen | None = None

    def see(self, tree: Any) -> None:
        """Remembers the shardings of the arrays, if all of them have one, on any meshes.

        An array on a single device, such as one that was never put on a mesh, counts as
        replicated.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if any(isinstance(x, Tracer) for x in leaves):
            return
        shardings = [getattr(x, "sharding", None) for x in leaves]
        named = [s if isinstance(s, NamedSharding) else None for s in shardings]
        meshes = {s.mesh.abstract_mesh for s in named if s}
        on_mesh = (
            n or s is None or len(s.device_set) == 1 for n, s in zip(named, shardings, strict=True)
        )
        if meshes and all(on_mesh):
            specs = [s.spec if s else PartitionSpec() for s in named]
            self._latest = _Seen(meshes, treedef, [x.shape for x in leaves], specs)

    def known(self, tree: Any, shardings: Shardings) -> Shardings:
        """Returns `shardings`, or in place of None what was seen of such a tree.

        It stays None where types tell. It also stays None where the compiler asks how to partition
        an operation, which it does in programs of one mesh.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if shardings is not None or not leaves or self._latest is None:
            return shardings
        meshes = {*meshes_of(leaves)} or {mesh_of(leaves).abstract_mesh}
        kinds = [{*mesh.axis_types} for mesh in meshes]
        is_known = {AxisType.Auto} in kinds and all(len(of_mesh) == 1 for of_mesh in kinds)
        asked = len(meshes) == 1 and all(map(asks_how_to_partition, meshes))
        found = (meshes, treedef, [x.shape for x in leaves])
        if not is_known or asked or found != self._latest[:3]:
            return None
        types = (jax.typeof(x).sharding for x in leaves)
        pairs = zip(types, self._latest.specs, strict=True)
        return treedef.unflatten(
            own.spec if AxisType.Explicit in own.mesh.axis_types else seen for own, seen in pairs
        )
