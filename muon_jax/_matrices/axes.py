"""An array as a stack of matrices, declared by `MuonDimensionNumbers`, and back."""

import math
from typing import NamedTuple

import jax
from optax.contrib import MuonDimensionNumbers


class MatrixAxes(NamedTuple):
    """The axes of an array in three groups: each keeps its order, together they are all axes."""

    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]


def matrix_axes(ndim: int, dimension_numbers: MuonDimensionNumbers) -> MatrixAxes:
    """Returns the axes of an array of rank `ndim`, counted from the front.

    Raises:
        ValueError: no dimension numbers, no axis, an axis twice, or one that is not there.
    """
    if not isinstance(dimension_numbers, MuonDimensionNumbers):
        raise ValueError(
            f"a view must be MuonDimensionNumbers, Split or Unfold, got {dimension_numbers!r}:"
            " AdamW can have whole parameters only"
        )

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
