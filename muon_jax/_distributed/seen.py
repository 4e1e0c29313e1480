"""What an optimizer has seen of shardings outside `jit`, for compilers that ask nothing.

Arrays outside `jit` say how they are sharded. Where the compiler cannot tell, an optimizer takes
them to be sharded alike in `jit`. Were they not, XLA would move them, and results be the same.
"""

from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from muon_jax._distributed.devices import asks_how_to_partition
from muon_jax._distributed.sharding import Shardings, mesh_of


class _Seen(NamedTuple):
    """A tree of arrays outside `jit`: their mesh, the tree's structure, shapes and specs."""

    mesh: AbstractMesh
    treedef: Any
    shapes: list[tuple[int, ...]]
    specs: list[PartitionSpec]


class SeenShardings:
    """The shardings of the latest parameters that an optimizer met outside `jit`."""

    def __init__(self) -> None:
        self._latest: _Seen | None = None

    def see(self, tree: Any) -> None:
        """Remembers the shardings of the arrays, if all of them have one, on one mesh.

        An array on a single device, such as one that was never put on the mesh, counts as
        replicated.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if any(isinstance(x, Tracer) for x in leaves):
            return
        shardings = [getattr(x, "sharding", None) for x in leaves]
        named = [s if isinstance(s, NamedSharding) else None for s in shardings]
        meshes = {s.mesh.abstract_mesh for s in named if s}
        on_one = (
            n or s is None or len(s.device_set) == 1 for n, s in zip(named, shardings, strict=True)
        )
        if len(meshes) == 1 and all(on_one):
            specs = [s.spec if s else PartitionSpec() for s in named]
            self._latest = _Seen(meshes.pop(), treedef, [x.shape for x in leaves], specs)

    def known(self, tree: Any, shardings: Shardings) -> Shardings:
        """Returns `shardings`, or in place of None what was seen of such a tree.

        It stays None where the compiler asks how to partition an operation, or types tell.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if shardings is not None or not leaves or self._latest is None:
            return shardings
        mesh = mesh_of(leaves).abstract_mesh
        is_automatic = all(kind == AxisType.Auto for kind in mesh.axis_types)
        found = (mesh, treedef, [x.shape for x in leaves])
        if not is_automatic or asks_how_to_partition(mesh) or found != self._latest[:3]:
            return None
        return treedef.unflatten(self._latest.specs)
