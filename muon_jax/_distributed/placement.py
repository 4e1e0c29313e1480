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
from collections.abc import Mapping, Sequence
from typing import Literal

from jax.sharding import PartitionSpec

from muon_jax._distributed.exchange import Exchange
from muon_jax._distributed.plan import Leaf
from muon_jax._distributed.sharding import axes_of_spec, mesh_axes_by_dim
from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._matrices.views import (
    MuonDimensionNumbers,
    Unfold,
    axes_taken_apart,
    axis_of,
    batch_axes,
    matrix_axes,
    shape_factor,
)
from muon_jax._trees import errors_naming


def with_forms(leaf: Leaf, iteration: NewtonSchulz) -> Leaf:
    """Returns the leaf with the forms of its matrices."""
    why_not = f"its view, {leaf.view}, is of matrices that are parts of an axis"
    is_whole = isinstance(leaf.view, MuonDimensionNumbers)
    return dataclasses.replace(
        leaf,
        forms=tuple(iteration.form((m, n), leaf.dtype) for _, m, n in leaf.matrices),
        sharded_form=iteration.sharded_form(leaf.dtype) if is_whole else why_not,
        keeps_dtype=iteration.has_functions,
    )


def placed(
    leaf: Leaf,
    spec: PartitionSpec,
    mesh: Mapping[str, int],
    exchange: Exchange,
    faster: str,
    iterations: Sequence[NewtonSchulz],
) -> Leaf:
    """Returns the parameter, sharded over a mesh of these axes, as what the exchange makes of it.

    `faster` is the word for replicas that a model of the times tries.
    """
    with errors_naming(leaf.name, leaf.parameter_shape):
        leaf = _sharded(leaf, spec, mesh, exchange)
        sharding = sum(leaf.axes, ())
        word = {axis: exchange.sharded(axis) for axis in sharding}
        for axis in sharding:
            if word[axis] == "raise":
                raise ValueError(
                    f"{spec} shards its matrices over {axis!r}, where Exchange says 'raise':"
                    f" pass Exchange({{{axis!r}: 'exchange'}}), or 'gram', which sums Gram"
                    " matrices over it, or 'block', which orthogonalizes each block by itself"
                )
        if names := [axis for axis in sharding if word[axis] == "block"]:
            leaf = _of_blocks(leaf, names, mesh, exchange, iterations)
        if names := [axis for axis in sharding if word[axis] == "gram"]:
            leaf = dataclasses.replace(leaf, gram_side=_side_of_sums(leaf, names))
    idle = [axis for axis, size in mesh.items() if size > 1 and axis not in axes_of_spec(spec)]
    said = {axis: exchange.replicas(axis) for axis in idle}
    split = [axis for axis in idle if "split" in (said[axis], said[axis] == "faster" and faster)]
    return dataclasses.replace(
        leaf,
        split=tuple((axis, mesh[axis]) for axis in split),
        is_replicated=any(word != "split" for word in said.values()),
    )


def _sharded(leaf: Leaf, spec: PartitionSpec, mesh: Mapping[str, int], exchange: Exchange) -> Leaf:
    """The leaf on the mesh.

    Where a view unfolds an axis and each device has whole elements of a batch axis, such as heads,
    that batch axis is the sharded one: the leaf is of the unfolded array. So it is where each
    device has whole elements of an axis of matrices, and mesh axes cut those in blocks.
    """
    shape, view = leaf.parameter_shape, leaf.view
    by_dim = mesh_axes_by_dim(spec, len(shape), mesh)
    axes = [tuple(axis for axis in entry if mesh[axis] > 1) for entry in by_dim]
    cuts = [math.prod(mesh[axis] for axis in entry) for entry in axes]
    if any(size % cut for size, cut in zip(shape, cuts, strict=True)):
        raise ValueError(
            f"{spec} does not divide it evenly on the mesh {dict(mesh)}: pass a spec whose mesh"
            " axes divide each size"
        )
    if isinstance(view, Unfold):
        i, unfolded, added = axis_of(shape, view), view.shape(shape), len(view.sizes) - 1
        is_of_blocks = "block" in map(exchange.sharded, axes[i])
        is_batch = i in batch_axes(view.view, unfolded)
        if cuts[i] > 1 and unfolded[i] % cuts[i] == 0 and (is_batch or is_of_blocks):
            axes[i + 1 : i + 1], cuts[i + 1 : i + 1] = [()] * added, [1] * added
            shape, view = unfolded, view.view
    batch = batch_axes(view, shape)
    return dataclasses.replace(
        leaf,
        parameter_shape=shape,
        view=view,
        axes=tuple(() if i in batch else entry for i, entry in enumerate(axes)),
        local_shape=tuple(size // cut for size, cut in zip(shape, cuts, strict=True)),
    )


def _of_blocks(
    leaf: Leaf,
    names: Sequence[str],
    mesh: Mapping[str, int],
    exchange: Exchange,
    iterations: Sequence[NewtonSchulz],
) -> Leaf:
    """The leaf whose matrices are the blocks that these mesh axes cut matrices in."""
    if iterations[leaf.iteration].has_functions:
        raise ValueError(
            "NewtonSchulz(before=, after=) take whole matrices, and 'block' and block_period cut"
            f" these over {[*names]}: pass Exchange without them, or ns_coeffs without functions"
        )
    cuts = [math.prod(mesh[name] for name in entry if name in names) for entry in leaf.axes]
    for i in axes_taken_apart(leaf.view, leaf.parameter_shape):
        if cuts[i] > 1:
            raise ValueError(
                f"its view {leaf.view} takes axis {i} apart, where {[*names]} cut blocks: shard"
                " another axis over them, or pass Exchange without 'block' there and without"
                " block_period"
            )
    block = dataclasses.replace(
        leaf,
        parameter_shape=tuple(n // cut for n, cut in zip(leaf.parameter_shape, cuts, strict=True)),
        axes=tuple(tuple(name for name in entry if name not in names) for entry in leaf.axes),
        blocks=tuple(names),
    )
    factors = [
        [shape_factor(exchange._scale_of_blocks, rows, cols) for _, rows, cols in each.stacks]
        for each in (block, leaf)
    ]
    gains = tuple(of_block / of_whole for of_block, of_whole in zip(*factors, strict=True))
    block = dataclasses.replace(block, gains=gains if any(gain != 1 for gain in gains) else ())
    return with_forms(block, iterations[leaf.iteration])


def _side_of_sums(leaf: Leaf, names: Sequence[str]) -> Literal["rows", "columns"]:
    """The side of matrices that these mesh axes shard, over which Gram matrices sum."""
    if isinstance(leaf.sharded_form, str):
        raise ValueError(
            f"its matrices cannot stay sharded: {leaf.sharded_form}. Pass Exchange with 'block' or"
            " 'exchange' in place of 'gram'"
        )
    assert isinstance(leaf.view, MuonDimensionNumbers)
    _, *sides = matrix_axes(len(leaf.shape), leaf.view)
    rows, columns = (any(name in names for i in side for name in leaf.axes[i]) for side in sides)
    if rows and columns:
        raise ValueError(
            f"{[*names]} shard rows and columns of its matrices, and a sum of Gram matrices is over"
            " one side: pass Exchange with 'exchange' or 'block' for the axes of the other"
        )
    return "rows" if rows else "columns"
