"""Parameters as leaves of a plan: their units, where those are on a mesh, and what happens there.

With D the mesh axes that shard the matrices of a parameter, and R those that do not shard it:

| mesh axis | word                | the parameter becomes                                |
| --------- | ------------------- | ---------------------------------------------------- |
| in R      | `"repeat"`          | what it is; each replica does the work               |
| in R      | `"split"`           | units that replicas split                            |
| in D      | `"block"`           | blocks, each a matrix that the rest of D shards      |
| in D      | `"gram"`            | matrices in the Gram form, that all of D shards      |
| in D      | `"raise"`           | an error                                             |
| in D      | any other, or none  | what it is                                           |

The devices with equal coordinates along the axes of blocks have one block: its rows and columns
need not be side by side where a dimension is sharded over axes of both kinds.
"""

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from muon_jax._distributed.exchange import Exchange
from muon_jax._distributed.plan import Leaf
from muon_jax._distributed.sharding import axes_of_spec, mesh_axes_by_dim
from muon_jax._matrices.views import (
    MuonDimensionNumbers,
    ScaleOfBlocks,
    Unfold,
    View,
    axes_taken_apart,
    axis_of,
    batch_axes,
    matrix_axes,
    parts_of,
    shape_factor,
)
from muon_jax._trees import errors_naming


def leaf_of(index: int, name: str, x: jax.ShapeDtypeStruct, view: View) -> Leaf:
    """Returns parameter number `index`, of that whole shape, on no mesh yet and without forms."""
    with errors_naming(name, x.shape):
        batch = batch_axes(view, x.shape)
        shape = tuple(1 if i in batch else size for i, size in enumerate(x.shape))
        shapes = tuple(part.stack for part in parts_of(view, shape))
    dtype = jnp.dtype(x.dtype)
    return Leaf(index, name, x.shape, dtype, shape, batch, view, shapes, wire=dtype)


def placed(
    leaf: Leaf,
    spec: PartitionSpec,
    mesh: Mapping[str, int],
    blocks: Container[str] = (),
) -> Leaf:
    """Returns the parameter, sharded over a mesh of these axes.

    Where a view unfolds an axis and each device has whole elements of a batch axis, such as heads,
    that batch axis is the sharded one: the leaf is of the unfolded array. So it is where each
    device has whole elements of an axis of matrices, and mesh axes cut those in blocks.
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
        of_whole = ("varying", "wire", "forms", "sharded_form", "iteration")
        leaf = dataclasses.replace(inner, **{name: getattr(leaf, name) for name in of_whole})
    return dataclasses.replace(
        leaf,
        axes=tuple(() if i in leaf.batch else entry for i, entry in enumerate(axes)),
        local_shape=tuple(s // cut for s, cut in zip(leaf.parameter_shape, cuts, strict=True)),
    )


def _unfolded_by_shards(
    leaf: Leaf, axes: Sequence[tuple[str, ...]], cuts: Sequence[int], blocks: Container[str]
) -> Unfold | None:
    """The view of the leaf, if it unfolds a sharded axis to one that shards cut evenly."""
    view = leaf.view
    if not isinstance(view, Unfold):
        return None
    axis, shape = axis_of(leaf.parameter_shape, view), view.shape(leaf.parameter_shape)
    is_cut = cuts[axis] > 1 and shape[axis] % cuts[axis] == 0
    is_batch = axis in batch_axes(view.view, shape)
    return view if is_cut and (is_batch or any(name in blocks for name in axes[axis])) else None


def placed_within(
    leaf: Leaf,
    spec: PartitionSpec,
    mesh: Mapping[str, int],
    exchange: Exchange,
    faster: str,
) -> Leaf:
    """Returns `placed(leaf, spec, mesh)`, as what the exchange makes of it.

    `faster` is the word for replicas that a model of the times tries. Blocks have no forms yet.
    """
    word = {axis: exchange.sharded(axis) for axis in mesh}
    leaf = placed(leaf, spec, mesh, [axis for axis in mesh if word[axis] == "block"])
    idle = [axis for axis, size in mesh.items() if size > 1 and axis not in axes_of_spec(spec)]
    said = {axis: exchange.replicas(axis) for axis in idle}
    words = {axis: faster if own == "faster" else own for axis, own in said.items()}
    split = tuple((axis, mesh[axis]) for axis in idle if words[axis] == "split")
    is_replicated = any(own != "split" for own in said.values())
    leaf = dataclasses.replace(leaf, split=split, is_replicated=is_replicated)
    sharding = sum(leaf.axes, ())
    with errors_naming(leaf.name, leaf.parameter_shape):
        for axis in sharding:
            if word[axis] == "raise":
                raise ValueError(
                    f"{spec} shards its matrices over {axis!r}, where Exchange says 'raise':"
                    f" pass Exchange({{{axis!r}: 'exchange'}}), or 'gram', which sums Gram"
                    " matrices over it, or 'block', which orthogonalizes each block by itself"
                )
        if names := tuple(axis for axis in sharding if word[axis] == "block"):
            leaf = _of_blocks(leaf, names, mesh, exchange._scale_of_blocks)
        if names := [axis for axis in sharding if word[axis] == "gram"]:
            leaf = _kept_sharded_over(leaf, names)
    return leaf


def _of_blocks(
    leaf: Leaf, names: Sequence[str], mesh: Mapping[str, int], scale: ScaleOfBlocks
) -> Leaf:
    """The leaf whose matrices are the blocks that these mesh axes cut matrices in."""
    cuts = [math.prod(mesh[name] for name in entry if name in names) for entry in leaf.axes]
    for i in axes_taken_apart(leaf.view, leaf.parameter_shape):
        if cuts[i] > 1:
            raise ValueError(
                f"its view {leaf.view} takes axis {i} apart, where {[*names]} cut blocks: shard"
                " another axis over them, or pass Exchange without 'block' there and without"
                " block_period"
            )
    shape = [size // cut for size, cut in zip(leaf.parameter_shape, cuts, strict=True)]
    block = leaf_of(leaf.index, leaf.name, jax.ShapeDtypeStruct(shape, leaf.dtype), leaf.view)
    gains = tuple(
        shape_factor(scale, *of_block[1:]) / shape_factor(scale, *whole[1:])
        for of_block, whole in zip(block.stacks, leaf.stacks, strict=True)
    )
    return dataclasses.replace(
        leaf,
        parameter_shape=block.parameter_shape,
        shape=block.shape,
        stacks=block.stacks,
        axes=tuple(tuple(name for name in entry if name not in names) for entry in leaf.axes),
        blocks=tuple(names),
        gains=gains if any(gain != 1 for gain in gains) else (),
    )


def _kept_sharded_over(leaf: Leaf, names: Sequence[str]) -> Leaf:
    """The leaf whose matrices stay sharded over these mesh axes, and over all that shard them."""
    if not isinstance(leaf.view, MuonDimensionNumbers):
        return dataclasses.replace(leaf, gram_side="columns")
    _, *sides = matrix_axes(len(leaf.shape), leaf.view)
    sharded = [
        side
        for side, axes in zip(("rows", "columns"), sides, strict=True)
        if any(name in names for axis in axes for name in leaf.axes[axis])
    ]
    if len(sharded) > 1:
        raise ValueError(
            f"{[*names]} shard rows and columns of its matrices, and a sum of Gram matrices is over"
            " one side: pass Exchange with 'exchange' or 'block' for the axes of the other"
        )
    return dataclasses.replace(leaf, gram_side=sharded[0])
