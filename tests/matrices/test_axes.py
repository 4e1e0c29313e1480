import math

import chex
import jax.numpy as jnp
import pytest

from muon_jax import MuonDimensionNumbers
from muon_jax._matrices.views import from_matrices, matrix_axes, to_matrices


@pytest.mark.parametrize(
    ("shape", "reduction", "output", "expected"),
    [
        ((2, 3), 0, 1, (1, 2, 3)),
        ((2, 3), 1, 0, (1, 3, 2)),
        ((2, 3, 4), 0, 2, (3, 2, 4)),
        ((2, 3, 4), -3, -1, (3, 2, 4)),
        ((2, 3, 4, 5), 2, 3, (6, 4, 5)),
        ((2, 3, 4, 5), 2, (0, 3), (3, 4, 10)),
        ((3, 3, 8, 16), (0, 1, 2), 3, (1, 72, 16)),
    ],
)
def test_a_view_and_its_inverse(shape, reduction, output, expected):
    x = jnp.arange(math.prod(shape)).reshape(shape)
    axes = matrix_axes(len(shape), MuonDimensionNumbers(reduction, output))
    matrices = to_matrices(x, axes)
    chex.assert_shape(matrices, expected)
    chex.assert_trees_all_equal(from_matrices(matrices, axes, shape), x)


def test_rows_are_the_reduction_axes():
    x = jnp.arange(24).reshape(2, 3, 4)
    axes = matrix_axes(3, MuonDimensionNumbers((2, 0), 1))
    matrix = to_matrices(x, axes)[0]
    for i, j, k in [(0, 0, 0), (1, 2, 3), (0, 1, 2)]:
        assert matrix[k * 2 + i, j] == x[i, j, k]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            MuonDimensionNumbers(0, 2),
            r"names axis 2, which is out of range for an array of rank 2: .*in \[-2, 2\)",
        ),
        (MuonDimensionNumbers((), 1), r"must name at least one reduction axis and one output axis"),
        (MuonDimensionNumbers(0, -2), r"names an axis twice.*reduction \(0,\), output \(0,\)"),
        (MuonDimensionNumbers((0, 0), 1), r"names an axis twice"),
    ],
)
def test_wrong_numbers_say_what_was_wrong(numbers, message):
    with pytest.raises(ValueError, match=message):
        matrix_axes(2, numbers)
