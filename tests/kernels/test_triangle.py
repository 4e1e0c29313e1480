import chex
import jax.numpy as jnp
import numpy as np

from pallas_kernels._triton import num_tiles, row_col


def test_row_col_enumerates_the_lower_triangle_row_by_row():
    rows = 3000
    ids = jnp.arange(num_tiles(rows))
    chex.assert_trees_all_equal(row_col(ids), np.tril_indices(rows))


def test_row_col_is_right_at_the_ends_of_rows_of_the_largest_matrices():
    row = np.arange(1, 16_000)
    first = row * (row + 1) // 2
    assert first[-1] < 2**27
    chex.assert_trees_all_equal(row_col(jnp.asarray(first)), (row, 0 * row))
    chex.assert_trees_all_equal(row_col(jnp.asarray(first - 1)), (row - 1, row - 1))
