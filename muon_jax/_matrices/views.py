"""Views: what a parameter's matrices are, as a pure pair of functions, there and back.

`MuonDimensionNumbers` names the axes of rows and of columns. `Split` and `Unfold` reach matrices
that are no axes of the array: the parts of a fused projection, the heads in a merged axis. They
nest:

    # Query, key and value side by side, 16 heads for queries and 4 for keys and values: 3 matrices.
    Split(-1, (16 * 128, 4 * 128, 4 * 128))
    # The same, a matrix for each head.
    Split(-1, (16 * 128, 4 * 128, 4 * 128), Unfold(-1, (-1, 128), MuonDimensionNumbers(-3, -1)))
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from optax.contrib import MuonDimensionNumbers

from muon_jax._matrices.axes import from_matrices, matrix_axes, to_matrices
from muon_jax._trees import broadcast, naming

MATRICES = MuonDimensionNumbers(-2, -1)  # the last two axes


@dataclasses.dataclass(frozen=True)
class Split:
    """Parts of one axis, side by side, that are matrices of their own.

    Attributes:
        axis: which one; counted from the end where it is negative.
        sizes: of the parts; together that of the axis.
        view: of every part, or a list or tuple with one for each.
    """

    axis: int
    sizes: tuple[int, ...]
    view: "View | list[View] | tuple[View, ...]" = MATRICES

    @property
    def views(self) -> "list[View]":
        """Of each part."""
        if isinstance(self.view, list | tuple) and not isinstance(self.view, MuonDimensionNumbers):
            return [*self.view]
        return [self.view] * len(self.sizes)

    def parts(self, shape: tuple[int, ...]) -> "list[tuple[slice, View]]":
        """Returns the place of each part on the axis of an array of that shape, and its view."""
        whole, views = _size(shape, self), self.views
        if min(self.sizes, default=0) < 0 or sum(self.sizes) != whole:
            raise ValueError(f"{self} needs sizes that add up to {whole}, that of its axis")
        if len(views) != len(self.sizes):
            raise ValueError(f"{self} needs as many views as sizes")
        ends = itertools.accumulate(self.sizes)
        slices = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        return [*zip(slices, views, strict=True)]


@dataclasses.dataclass(frozen=True)
class Unfold:
    """One axis as several, of which the last runs fastest.

    Attributes:
        axis: which one; counted from the end where it is negative.
        sizes: of the axes in its place. One may be -1, for what the others leave.
        view: of the array with those axes.
    """

    axis: int
    sizes: tuple[int, ...]
    view: "View" = MATRICES

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape with those axes of an array of the given shape."""
        size, axis = _size(shape, self), self.axis % len(shape)
        stated = math.prod(self.sizes)
        sizes = (
            [size // -stated if i == -1 else i for i in self.sizes] if stated < 0 else self.sizes
        )
        if math.prod(sizes) != size or min(sizes, default=1) < 0:
            raise ValueError(f"{self} needs axes whose sizes multiply to {size}")
        return (*shape[:axis], *sizes, *shape[axis + 1 :])


type View = MuonDimensionNumbers | Split | Unfold
# Views at the leaves, a prefix of the parameters' tree; None where there are none.
type ViewTree = Any
type Views = ViewTree | Callable[[Any], ViewTree] | None


def is_view(node: Any) -> bool:
    """Returns whether `node` is a leaf of a tree of views: a view, or None."""
    return node is None or isinstance(node, MuonDimensionNumbers | Split | Unfold)


def to_stacks(x: jax.Array, view: View) -> list[jax.Array]:
    """Returns the matrices of `x` (reduction × output) in stacks `(batch, rows, cols)`.

    Raises:
        ValueError: the array has no such axes, or not of such sizes.
    """
    if isinstance(view, Split):
        before = (slice(None),) * (view.axis % x.ndim)
        parts = view.parts(x.shape)
        return [stack for part, inner in parts for stack in to_stacks(x[(*before, part)], inner)]
    if isinstance(view, Unfold):
        return to_stacks(x.reshape(view.shape(x.shape)), view.view)
    return [to_matrices(x, matrix_axes(x.ndim, view))]


def from_stacks(stacks: Iterator[jax.Array], view: View, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_stacks` for an array of the given shape; takes as many stacks as that."""
    if isinstance(view, Split):
        axis = view.axis % len(shape)
        parts = [
            from_stacks(stacks, inner, (*shape[:axis], part.stop - part.start, *shape[axis + 1 :]))
            for part, inner in view.parts(shape)
        ]
        return jnp.concatenate(parts, axis)
    if isinstance(view, Unfold):
        return from_stacks(stacks, view.view, view.shape(shape)).reshape(shape)
    return from_matrices(next(stacks), matrix_axes(len(shape), view), shape)


def shapes_of_stacks(x: jax.ShapeDtypeStruct, view: View) -> list[jax.ShapeDtypeStruct]:
    """Returns what `to_stacks` would, as shapes."""
    return jax.eval_shape(lambda x: to_stacks(x, view), x)


def assign(views: Views, params: Any) -> list[View | None]:
    """Returns the view of each parameter, None for AdamW.

    Args:
        views: a prefix of `params`, or a callable that makes one from them. None itself stands for
            matrices wherever the rank is 2.
        params: the parameters, or shapes of them.
    """
    if views is None:
        return [MuonDimensionNumbers() if p.ndim == 2 else None for p in jax.tree.leaves(params)]
    return _broadcast(views, params)


def batch_axes(view: View, ndim: int) -> tuple[int, ...]:
    """Returns the axes of an array of rank `ndim` that are batch axes of all its matrices."""
    if isinstance(view, Split):
        common = [batch_axes(inner, ndim) for inner in view.views]
        kept = (axis for axis in range(ndim) if all(axis in axes for axes in common))
        return tuple(axis for axis in kept if axis != view.axis % ndim)
    if isinstance(view, Unfold):
        unfolded, more = view.axis % ndim, len(view.sizes) - 1
        inner = batch_axes(view.view, ndim + more)
        others = (axis for axis in range(ndim) if axis != unfolded)
        return tuple(axis for axis in others if axis + more * (axis > unfolded) in inner)
    return matrix_axes(ndim, view).batch


def by_matrix(
    function: Callable[[int, int], float], view: View, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns `function(rows, cols)` of each element's matrix, in a shape that broadcasts."""
    if isinstance(view, Split):
        axis, values = view.axis % len(shape), []
        for part, inner in view.parts(shape):
            size = part.stop - part.start
            value = by_matrix(function, inner, (*shape[:axis], size, *shape[axis + 1 :]))
            values.append(value.repeat(size // value.shape[axis], axis))
        common = np.max([(*v.shape[:axis], 1, *v.shape[axis + 1 :]) for v in values], axis=0)
        return np.concatenate([v * np.ones(common) for v in values], axis)
    if isinstance(view, Unfold):
        axis, unfolded = view.axis % len(shape), view.shape(shape)
        axes = slice(axis, axis + len(view.sizes))
        value = by_matrix(function, view.view, unfolded)
        if max(value.shape[axes]) > 1:
            value = value * np.ones(unfolded[axes] + (1,) * (len(unfolded) - axes.stop))
        return value.reshape(*value.shape[:axis], -1, *value.shape[axes.stop :])
    _, reduction, output = matrix_axes(len(shape), view)
    rows, cols = (math.prod(shape[axis] for axis in axes) for axes in (reduction, output))
    return np.full([1] * len(shape), function(rows, cols))


def views_of_leaves(views: Views, tree: Any) -> list[tuple[str, View]]:
    """Returns the path and the view of each leaf of `tree`.

    Args:
        views: a prefix of `tree`, or a callable that makes one from it. None at a leaf or above
            stands for matrices: leaves of rank 2, axis 0 the reduction axis.
        tree: the arrays.

    Raises:
        ValueError: a leaf without a view is no matrix.
    """
    found = []
    leaves = jax.tree.leaves_with_path(tree)
    for (path, leaf), view in zip(leaves, _broadcast(views, tree), strict=True):
        name = jax.tree_util.keystr(path)
        if view is None and leaf.ndim != 2:
            raise ValueError(
                f"the parameter {name} of shape {leaf.shape} is no matrix: give it"
                " MuonDimensionNumbers, or leave it to another optimizer"
            )
        found.append((name, MuonDimensionNumbers() if view is None else view))
    return found


def stacked(view: View) -> View:
    """Returns the view of arrays of this view in a stack of them, along a new first axis."""
    if isinstance(view, MuonDimensionNumbers):
        return jax.tree.map(lambda axis: axis + (axis >= 0), view)
    inner = [*map(stacked, view.views)] if isinstance(view, Split) else stacked(view.view)
    return dataclasses.replace(view, axis=view.axis + (view.axis >= 0), view=inner)


def stacks_of_tree(
    views: Views, tree: Any
) -> tuple[list[jax.Array], Callable[[Iterable[jax.Array]], Any]]:
    """Returns the stacks `(batch, rows, cols)` of all leaves of `tree`, and the inverse.

    Raises:
        ValueError: a leaf has no view, or one that does not fit.
    """
    leaves, treedef = jax.tree.flatten(tree)
    viewed = views_of_leaves(views, tree)
    flat = []
    for leaf, (name, view) in zip(leaves, viewed, strict=True):
        with naming(name, leaf.shape):
            flat += to_stacks(leaf, view)

    def unflatten(stacks):
        stacks = iter(stacks)
        return treedef.unflatten(
            from_stacks(stacks, view, leaf.shape)
            for leaf, (_, view) in zip(leaves, viewed, strict=True)
        )

    return flat, unflatten


def _broadcast(views, tree):
    return broadcast(lambda _, view: view, views, tree, is_view)


def _size(shape, view):
    if not -len(shape) <= view.axis < len(shape):
        raise ValueError(f"{view} names an axis that an array of rank {len(shape)} does not have")
    return shape[view.axis]
