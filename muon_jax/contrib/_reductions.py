"""Reductions over the matrices of a parameter, in its own layout and sharding.

Stacks (`to_stacks`) merge axes, and XLA gathers merged axes that are sharded. Reductions that keep
the axes do not move any shard.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from muon_jax._distributed.sharding import (
    Parameter,
    mesh_axes_by_dim,
    mesh_of,
)
from muon_jax._iteration.normalization import over, root
from muon_jax._matrices.views import Cut, MatrixAxes, Reshape, View, join, parts_of
from muon_jax._trees import errors_naming


class Axis(NamedTuple):
    """An axis of an array.

    Attributes:
        size: of the whole array.
        pieces: how many shards it has; 1 if only XLA knows.
        mesh_axes: in a shard_map, the mesh axes that it is sharded over.
        of_parameter: the axis of the parameter that it is; None if a view takes that axis apart.
    """

    size: int
    pieces: int = 1
    mesh_axes: tuple[str, ...] = ()
    of_parameter: int | None = None


class Matrices(NamedTuple):
    """An array whose axes are those of matrices and of a batch of them.

    Attributes:
        array: the array; in a shard_map its local part.
        axes: the batch, reduction and output axes.
        layout: of each axis.
    """

    array: jax.Array
    axes: MatrixAxes
    layout: tuple[Axis, ...]

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of the shorter side, then of the longer side; of equal sides rows come first."""
        _, rows, cols = self.axes
        return (cols, rows) if self.size(rows) > self.size(cols) else (rows, cols)

    def size(self, axes: Sequence[int]) -> int:
        """The product of the sizes of these axes."""
        return math.prod(self.layout[axis].size for axis in axes)

    def sum(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        """Returns Σx along these axes, which keep the size 1; x is sharded like the array."""
        return self._of_shards(jax.lax.psum, jnp.sum(x, axes, keepdims=True), axes)

    def largest(self, x: jax.Array) -> jax.Array:
        """Returns max |X| of each matrix of an x sharded like the array, its axes kept."""
        axes = self.axes.reduction + self.axes.output
        shards = jnp.max(jnp.abs(x), axes, keepdims=True, initial=0)
        return self._of_shards(jax.lax.pmax, shards, axes)

    def norm(self, x: jax.Array) -> jax.Array:
        """Returns ‖X‖_F of each matrix of an x sharded like the array, its axes kept.

        Entries may have any size.
        """
        axes = self.axes.reduction + self.axes.output
        return norm_of_any_size(x, self.largest, lambda x: self.sum(x, axes))

    def _of_shards(
        self,
        collective: Callable[[jax.Array, tuple[str, ...]], jax.Array],
        x: jax.Array,
        axes: Sequence[int],
    ) -> jax.Array:
        """The collective of what each shard's reduction along these axes gave."""
        mesh_axes = sum((self.layout[axis].mesh_axes for axis in axes), ())
        return collective(x, mesh_axes) if mesh_axes else x


def stack(matrices: Sequence[Matrices]) -> Matrices:
    """Returns the matrices of arrays of equal layout as one array, along a first batch axis."""
    _, (batch, rows, cols), layout = matrices[0]
    after = [tuple(axis + 1 for axis in axes) for axes in (batch, rows, cols)]
    array = jnp.stack([x.array for x in matrices])
    return Matrices(array, MatrixAxes((0, *after[0]), *after[1:]), (Axis(len(matrices)), *layout))


def matrices_of_tree(
    parameters: Sequence[Parameter], tree: Any
) -> tuple[list[list[Matrices]], Callable[[Iterable[jax.Array]], Any]]:
    """Returns the matrices of each leaf, one of these parameters, and a function back to the tree.

    The matrices of a leaf are a list with one entry for each part of its view. The function takes
    arrays in the same order, each of the shape of its matrices.
    """
    leaves, treedef = jax.tree.flatten(tree)
    found, joins = [], []
    for x, own in zip(leaves, parameters, strict=True):
        # Outside of a shard_map, XLA takes any view of arrays whose types do not tell.
        of_type, is_local = jax.typeof(x).sharding, own.spec is not None
        spec = of_type.spec if own.spec is None else own.spec
        mesh = mesh_of(leaves) if is_local else of_type.mesh
        with errors_naming(own.name, own.shape):
            entries = mesh_axes_by_dim(spec, x.ndim, mesh.shape)
            pieces = [math.prod(mesh.shape[axis] for axis in entry) for entry in entries]
            mesh_axes = entries if is_local else [()] * x.ndim
            layout = (*map(Axis, own.shape, pieces, mesh_axes, range(x.ndim)),)
            matrices, join = _matrices_of_array(x, own.view, layout, spec)
        found.append(matrices)
        joins.append(join)

    def unflatten(arrays: Iterable[jax.Array]) -> Any:
        arrays = iter(arrays)
        return treedef.unflatten([join(arrays) for join in joins])

    return found, unflatten


def _matrices_of_array(
    x: jax.Array, view: View, layout: tuple[Axis, ...], spec: PartitionSpec
) -> tuple[list[Matrices], Callable[[Iterator[jax.Array]], jax.Array]]:
    """The matrices of an array of that layout, and a function that joins arrays of their shapes."""
    parts = parts_of(view, tuple(axis.size for axis in layout))
    shardings: dict[tuple[Any, ...], Any] = {(): jax.typeof(x).sharding}  # by the ops so far
    found = []
    for part in parts:
        array, axes = x, layout
        for depth, op in enumerate(part.ops, 1):
            new = _axes_after(op, axes)
            if new is None:
                raise NotImplementedError(
                    f"{view} takes axis {op.axis} apart where its sharding {spec} does not: shard"
                    " another axis, or call the optimizer on automatic mesh axes, outside any"
                    " shard_map"
                )
            local = [a.size // a.pieces if a.mesh_axes else a.size for a in new]
            axes = (*axes[: op.axis], *new, *axes[op.axis + 1 :])
            array = Reshape(op.axis, tuple(local))(array) if isinstance(op, Reshape) else op(array)
            shardings[part.ops[:depth]] = jax.typeof(array).sharding
        found.append(Matrices(array, part.axes, axes))

    def concatenate(arrays: Sequence[jax.Array], axis: int, ops: tuple[Any, ...]) -> jax.Array:
        sharding = shardings[ops]
        if any(sharding.spec):  # a part of size 1 may have lost mesh axes of one device
            arrays = [jax.reshard(array, sharding) for array in arrays]
        return jnp.concatenate(arrays, axis)

    return found, lambda arrays: join(parts, [next(arrays) for _ in parts], concatenate)


def _axes_after(op: Cut | Reshape, layout: Sequence[Axis]) -> list[Axis] | None:
    """The axes that an op makes of one; None if shards would not hold whole entries of them."""
    axis = layout[op.axis]._replace(of_parameter=None)
    if isinstance(op, Cut):
        size = op.end - op.begin
        fits = axis.pieces == 1 or not (axis.mesh_axes or size % axis.pieces)
        return [axis._replace(size=size)] if fits else None
    outer = next((j for j, size in enumerate(op.sizes) if size > 1), 0)
    axes = [axis._replace(size=n) if j == outer else Axis(n) for j, n in enumerate(op.sizes)]
    return axes if all(new.size % new.pieces == 0 for new in axes) else None


def norm_of_any_size(
    x: jax.Array,
    max_of: Callable[[jax.Array], jax.Array],
    sum_of: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """√Σ|x|², also where the squares of entries are out of the dtype's range.

    The derivative at zeros is 0.

    Args:
        x: the entries.
        max_of: returns max |x|, in a shape that broadcasts to that of x.
        sum_of: returns the sum of its argument, in a shape that broadcasts to that of x.
    """
    largest = max_of(jax.lax.stop_gradient(x))  # the norm does not depend on the power
    mantissa, _ = jnp.frexp(largest)
    # A power of two, so that quotients are exact. The factor 4 keeps 1/power in range.
    power = over(largest, 4 * mantissa)
    return power * root(sum_of(jnp.abs(over(x, power)) ** 2))
