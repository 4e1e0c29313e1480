"""Views of a parameter as a stack of matrices, declared by `MuonDimensionNumbers`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from optax.contrib import MuonDimensionNumbers

# MuonDimensionNumbers at the leaves, a prefix of the parameters' tree; None where there are none.
type DimensionNumbersTree = Any
type DimensionNumbersFn = Callable[[Any], DimensionNumbersTree]


class MatrixAxes(NamedTuple):
    """The axes of an array in three groups: each keeps its order, together they are all axes."""

    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]


def matrix_axes(ndim: int, dimension_numbers: MuonDimensionNumbers) -> MatrixAxes:
    """Returns the axes of an array of rank `ndim`, counted from the front.

    Raises:
        ValueError: no axis, an axis twice, or one that is not there.
    """

    def normalize(axes) -> tuple[int, ...]:
        axes = (axes,) if isinstance(axes, int) else tuple(axes)
        if not axes or any(not -ndim <= axis < ndim for axis in axes):
            raise ValueError(
                f"{dimension_numbers} must name axes of an array of rank {ndim}: at least one"
                f" reduction axis and one output axis, each in [-{ndim}, {ndim})"
            )
        return tuple(axis % ndim for axis in axes)

    reduction = normalize(dimension_numbers.reduction_axis)
    output = normalize(dimension_numbers.output_axis)
    if len({*reduction, *output}) != len(reduction) + len(output):
        raise ValueError(
            f"{dimension_numbers} names an axis twice in an array of rank {ndim}: reduction"
            f" {reduction}, output {output}"
        )
    batch = tuple(axis for axis in range(ndim) if axis not in {*reduction, *output})
    return MatrixAxes(batch, reduction, output)


def to_matrices(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    """Returns `x` as a stack `(batch, rows, cols)` of matrices (reduction × output)."""
    shape = [math.prod(x.shape[axis] for axis in group) for group in axes]
    return x.transpose(sum(axes, ())).reshape(shape)


def from_matrices(matrices: jax.Array, axes: MatrixAxes, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_matrices` for an array of the given shape."""
    order = sum(axes, ())
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return matrices.reshape([shape[axis] for axis in order]).transpose(inverse)


def tree_map_matrices(
    function: Callable[..., Any],
    dimension_numbers: DimensionNumbersTree | DimensionNumbersFn | None,
    tree: Any,
    *rest: Any,
) -> Any:
    """Maps `function(axes, leaf, *leaves_of_rest)` over the leaves of `tree`.

    Args:
        function: takes the `MatrixAxes` of a leaf and the leaf.
        dimension_numbers: a prefix of `tree`, or a callable that makes one from it. None at a leaf
            or above stands for matrices: leaves of rank 2, axis 0 the reduction axis.
        tree: the arrays.
        *rest: further trees of the same structure.
    """
    if callable(dimension_numbers):
        dimension_numbers = dimension_numbers(tree)

    def map_subtree(numbers, subtree, *rest):
        def map_leaf(path, leaf, *leaves):
            if numbers is None and leaf.ndim != 2:
                raise ValueError(
                    f"the parameter {jax.tree_util.keystr(path)} of shape {leaf.shape} is no"
                    " matrix: give it MuonDimensionNumbers, or leave it to another optimizer"
                )
            axes = matrix_axes(leaf.ndim, numbers or MuonDimensionNumbers())
            return function(axes, leaf, *leaves)

        return jax.tree.map_with_path(map_leaf, subtree, *rest)

    return jax.tree.map(map_subtree, dimension_numbers, tree, *rest, is_leaf=is_dimension_numbers)


def is_dimension_numbers(node: Any) -> bool:
    """Returns whether `node` is a leaf of a tree of dimension numbers: numbers, or None."""
    return node is None or isinstance(node, MuonDimensionNumbers)
