"""An array as a stack of matrices whose axes `MuonDimensionNumbers` name, and back."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from optax.contrib import MuonDimensionNumbers

from pallas_kernels.arguments import is_integer


class MatrixAxes(NamedTuple):
    """All axes of an array, in three groups; a group keeps the order that it was given."""

    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]


def are_dimension_numbers(node: Any) -> bool:
    """Returns whether `node` has the fields of `MuonDimensionNumbers`, as MaxText's class does."""
    return hasattr(node, "reduction_axis") and hasattr(node, "output_axis")


def with_own_numbers(view: Any) -> Any:
    """Returns a view, or views, with the dimension numbers of other packages as ours."""
    if are_dimension_numbers(view):
        return MuonDimensionNumbers(view.reduction_axis, view.output_axis)
    return type(view)(map(with_own_numbers, view)) if isinstance(view, list | tuple) else view


def matrix_axes(ndim: int, dimension_numbers: MuonDimensionNumbers) -> MatrixAxes:
    """Returns the axes of an array of rank `ndim`, counted from the front.

    Raises:
        ValueError: `dimension_numbers` are of another type, lack a reduction or an output axis,
            name an axis twice, or name one that is out of range.
    """
    if not isinstance(dimension_numbers, MuonDimensionNumbers):
        raise ValueError(
            f"a view must be MuonDimensionNumbers, Split or Unfold, got {dimension_numbers!r}:"
            " AdamW takes whole parameters only, so every part of a parameter needs a view"
        )

    def counted_from_front(axes: int | Sequence[int]) -> tuple[int, ...]:
        axes = tuple(axes) if isinstance(axes, Sequence) else (axes,)
        if not all(map(is_integer, axes)):
            raise ValueError(
                f"{dimension_numbers} must name axes by integers: pass MuonDimensionNumbers(-2, -1)"
                " for matrices in the last two axes, for example"
            )
        if not axes:
            raise ValueError(
                f"{dimension_numbers} must name at least one reduction axis and one output axis"
            )
        for axis in axes:
            if not -ndim <= axis < ndim:
                raise ValueError(
                    f"{dimension_numbers} names axis {axis}, which is out of range for an array of"
                    f" rank {ndim}: name axes in [-{ndim}, {ndim})"
                )
        return tuple(axis % ndim for axis in axes)

    reduction = counted_from_front(dimension_numbers.reduction_axis)
    output = counted_from_front(dimension_numbers.output_axis)
    if len({*reduction, *output}) != len(reduction) + len(output):
        raise ValueError(
            f"{dimension_numbers} names an axis twice in an array of rank {ndim}: reduction"
            f" {reduction}, output {output}. Name each axis once"
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
