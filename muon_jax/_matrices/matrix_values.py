"""What depends on the shape of a matrix alone, laid out like the parameter."""

import math
from collections.abc import Callable

import numpy as np

from muon_jax._matrices.axes import matrix_axes
from muon_jax._matrices.views import Split, Unfold, View, axis_of


def values_per_matrix(
    function: Callable[[int, int], float], view: View, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns `function(rows, cols)` of each element's matrix, in a shape that broadcasts."""
    if isinstance(view, Split):
        axis = axis_of(shape, view)
        of_parts = []
        for part, inner in view.parts(shape):
            size = part.stop - part.start
            values = values_per_matrix(function, inner, (*shape[:axis], size, *shape[axis + 1 :]))
            of_parts.append(values.repeat(size // values.shape[axis], axis))
        common = np.max([(*v.shape[:axis], 1, *v.shape[axis + 1 :]) for v in of_parts], axis=0)
        return np.concatenate([v * np.ones(common) for v in of_parts], axis)
    if isinstance(view, Unfold):
        axis, unfolded = axis_of(shape, view), view.shape(shape)
        end = axis + len(view.sizes)
        values = values_per_matrix(function, view.view, unfolded)
        if max(values.shape[axis:end]) > 1:  # else one size 1 stands for the whole axis
            values = values * np.ones(unfolded[axis:end] + (1,) * (len(unfolded) - end))
        return values.reshape(*values.shape[:axis], -1, *values.shape[end:])
    _, reduction, output = matrix_axes(len(shape), view)
    rows, cols = (math.prod(shape[axis] for axis in axes) for axes in (reduction, output))
    return np.full([1] * len(shape), function(rows, cols))
