"""Mesh axes that matrices are not exchanged over: what each parameter becomes there.

With D the mesh axes that shard the matrices of a parameter, and R those that do not shard it:

| mesh axis                | choice     | the parameter becomes                              |
| ------------------------ | ---------- | -------------------------------------------------- |
| in R                     | `"repeat"` | what it is; each replica does the work             |
| in R                     | `"split"`  | units that replicas split                          |
| in R                     | `"faster"` | one of these two, as `make_plan` decides           |
| in D, exchanged over     |            | what it is                                         |
| in D, not exchanged over | `"raise"`  | an error                                           |
| in D, not exchanged over | `"block"`  | blocks, each a matrix that the rest of D shards    |
| in D, not exchanged over | `"gram"`   | matrices that stay in pieces, over all of D        |

The devices with equal coordinates along the axes of blocks have one block: its rows and columns
need not be side by side where a dimension is sharded over axes of both kinds.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

from muon_jax._distributed.exchange_axes import ExchangeAxes
from muon_jax._distributed.placement import leaf_of, placed
from muon_jax._distributed.plan import Leaf
from muon_jax._distributed.sharding import axes_of_spec
from muon_jax._matrices.axes import matrix_axes
from muon_jax._matrices.parts import axes_taken_apart
from muon_jax._matrices.shape_factors import ScaleOfBlocks, shape_factor
from muon_jax._matrices.views import MuonDimensionNumbers
from muon_jax._trees import errors_naming


def placed_within(
    leaf: Leaf,
    spec: PartitionSpec,
    mesh: Mapping[str, int],
    exchange_axes: ExchangeAxes,
    scale: ScaleOfBlocks,
) -> Leaf:
    """Returns `placed(leaf, spec, mesh)`, with what happens outside of the exchange axes.

    Blocks have no forms yet.

    Args:
        leaf: the parameter.
        spec: of the parameter.
        mesh: sizes of the mesh's axes, in its order.
        exchange_axes: which matrices are exchanged over.
        scale: of the updates, for the gains of blocks.

    Raises:
        ValueError: as `placed`; or matrices are sharded over an axis that they must not be
            exchanged over, and cannot be blocks or pieces.
    """
    choices = {axis: exchange_axes.choice(axis) for axis in mesh}
    blocks = [axis for axis, choice in choices.items() if choice.sharded == "block"]
    leaf = placed(leaf, spec, mesh, blocks)
    idle = [axis for axis, size in mesh.items() if size > 1 and axis not in axes_of_spec(spec)]
    split = tuple((axis, mesh[axis]) for axis in idle if choices[axis].replicas == "split")
    stated = [axis for axis, _ in split if not choices[axis].is_modeled]
    leaf = dataclasses.replace(leaf, split=split, is_replicated=len(stated) < len(idle))
    outside = {axis: choices[axis].sharded for axis in sum(leaf.axes, ())}
    with errors_naming(leaf.name, leaf.parameter_shape):
        for axis, choice in outside.items():
            if choice == "raise":
                raise ValueError(
                    f"{spec} shards its matrices over {axis!r}, which exchange_axes="
                    f"{exchange_axes.names} leaves out: name {axis!r} there, or pass"
                    " outside='gram', which sums Gram matrices over it, or outside='block', which"
                    " orthogonalizes each block by itself"
                )
        if names := tuple(axis for axis, choice in outside.items() if choice == "block"):
            leaf = _of_blocks(leaf, names, mesh, scale)
        if names := [axis for axis, choice in outside.items() if choice == "gram"]:
            leaf = _in_pieces_over(leaf, names)
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
                " another axis over them, or name them in exchange_axes, without block_period"
            )
    shape = [size // cut for size, cut in zip(leaf.parameter_shape, cuts, strict=True)]
    block = leaf_of(leaf.index, leaf.name, jax.ShapeDtypeStruct(shape, leaf.dtype), leaf.view)
    factor = functools.partial(shape_factor, scale)
    pairs = zip(block.stacks, leaf.stacks, strict=True)
    gains = tuple(factor(*of_block[1:]) / factor(*whole[1:]) for of_block, whole in pairs)
    return dataclasses.replace(
        leaf,
        parameter_shape=block.parameter_shape,
        shape=block.shape,
        stacks=block.stacks,
        axes=tuple(tuple(name for name in entry if name not in names) for entry in leaf.axes),
        blocks=tuple(names),
        gains=gains if any(gain != 1 for gain in gains) else (),
    )


def _in_pieces_over(leaf: Leaf, names: Sequence[str]) -> Leaf:
    """The leaf whose matrices stay in pieces over these mesh axes, and over all that shard them."""
    if not isinstance(leaf.view, MuonDimensionNumbers):
        return dataclasses.replace(leaf, summed="columns")
    _, *sides = matrix_axes(len(leaf.shape), leaf.view)
    sharded = [
        side
        for side, axes in zip(("rows", "columns"), sides, strict=True)
        if any(name in names for axis in axes for name in leaf.axes[axis])
    ]
    if len(sharded) > 1:
        raise ValueError(
            f"{[*names]} shard rows and columns of its matrices, and a sum of Gram matrices is over"
            " one side: name the axes of one side in exchange_axes, or pass outside='block'"
        )
    return dataclasses.replace(leaf, summed=sharded[0])
