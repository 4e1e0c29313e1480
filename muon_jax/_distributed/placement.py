"""Parameters as leaves of a plan: their units, and where those are on a mesh."""

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence

import jax
import jax.numpy as jnp

from muon_jax._distributed.plan import Leaf
from muon_jax._distributed.sharding import mesh_axes_by_dim
from muon_jax._matrices.parts import batch_axes, parts_of
from muon_jax._matrices.views import Unfold, View, axis_of
from muon_jax._trees import errors_naming


def leaf_of(index: int, name: str, x: jax.ShapeDtypeStruct, view: View) -> Leaf:
    """Returns parameter number `index`, of that whole shape, on no mesh yet and without forms.

    Raises:
        ValueError: the view does not fit.
    """
    with errors_naming(name, x.shape):
        batch = batch_axes(view, x.shape)
        shape = tuple(1 if i in batch else size for i, size in enumerate(x.shape))
        shapes = tuple(part.stack for part in parts_of(view, shape))
    dtype = jnp.dtype(x.dtype)
    return Leaf(index, name, x.shape, dtype, shape, batch, view, shapes, wire=dtype)


def placed(
    leaf: Leaf,
    spec: jax.sharding.PartitionSpec,
    mesh: Mapping[str, int],
    blocks: Container[str] = (),
) -> Leaf:
    """Returns the parameter, sharded over a mesh of these axes.

    Where a view unfolds an axis and each device has whole elements of a batch axis, such as heads,
    that batch axis is the sharded one: the leaf is of the unfolded array. So it is where each
    device has whole elements of an axis of matrices, and mesh axes cut those in blocks.

    Args:
        leaf: the parameter.
        spec: of the parameter.
        mesh: sizes of the mesh's axes, in its order.
        blocks: the mesh axes that cut matrices in blocks.

    Raises:
        ValueError: `spec` has an axis that the mesh lacks, an axis twice, or an axis that does not
            fit.
    """
    with errors_naming(leaf.name, leaf.parameter_shape):
        entries = mesh_axes_by_dim(spec, len(leaf.parameter_shape), mesh)
        axes = [tuple(axis for axis in entry if mesh[axis] > 1) for entry in entries]
        cuts = [math.prod(mesh[axis] for axis in entry) for entry in axes]
        if any(size % cut for size, cut in zip(leaf.parameter_shape, cuts, strict=True)):
            raise ValueError(
                f"{spec} does not divide it evenly on the mesh {dict(mesh)}: pass a spec whose mesh"
                " axes divide each size"
            )
    if view := _unfolded_by_shards(leaf, axes, cuts, blocks):
        i, added = axis_of(leaf.parameter_shape, view), len(view.sizes) - 1
        axes[i + 1 : i + 1], cuts[i + 1 : i + 1] = [()] * added, [1] * added
        x = jax.ShapeDtypeStruct(view.shape(leaf.parameter_shape), leaf.dtype)
        inner = leaf_of(leaf.index, leaf.name, x, view.view)
        of_whole = ("varying", "wire", "forms", "form_in_pieces", "iteration")
        leaf = dataclasses.replace(inner, **{name: getattr(leaf, name) for name in of_whole})
    return dataclasses.replace(
        leaf,
        axes=tuple(() if i in leaf.batch else entry for i, entry in enumerate(axes)),
        local_shape=tuple(s // cut for s, cut in zip(leaf.parameter_shape, cuts, strict=True)),
    )


def _unfolded_by_shards(
    leaf: Leaf, axes: Sequence[tuple[str, ...]], cuts: Sequence[int], blocks: Container[str]
) -> Unfold | None:
    """The view of the leaf, if it unfolds a sharded axis to one that shards cut evenly.

    Args:
        leaf: the parameter.
        axes: the mesh axes that shard each of its axes.
        cuts: how many shards each of its axes is cut in.
        blocks: as for `placed`.
    """
    view = leaf.view
    if not isinstance(view, Unfold):
        return None
    axis, shape = axis_of(leaf.parameter_shape, view), view.shape(leaf.parameter_shape)
    is_cut = cuts[axis] > 1 and shape[axis] % cuts[axis] == 0
    is_batch = axis in batch_axes(view.view, shape)
    return view if is_cut and (is_batch or any(name in blocks for name in axes[axis])) else None
