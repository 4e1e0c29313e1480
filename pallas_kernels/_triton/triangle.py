"""Tile id <-> (row, col) of the lower triangle of a tiled square matrix.

Tiles are numbered row by row, the diagonal included:

    row 0 |  0
    row 1 |  1  2
    row 2 |  3  4  5
    row 3 |  6  7  8  9
          +------------
       col   0  1  2  3
"""

import jax
import jax.numpy as jnp


def num_tiles(rows: int) -> int:
    """Returns how many tiles the lower triangle of a `rows` × `rows` grid of tiles has."""
    return rows * (rows + 1) // 2


def row_col(tile_id: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the (row, col) of an int32 tile id, for ids below 2²⁷.

    `row` is the largest r with r(r + 1)/2 ≤ id. The float32 root can be one off on either side
    of a row's first id, never more. Two integer comparisons correct it.
    """
    row = ((jnp.sqrt(8.0 * tile_id.astype(jnp.float32) + 1.0) - 1.0) * 0.5).astype(jnp.int32)
    row = jnp.where(row * (row + 1) // 2 > tile_id, row - 1, row)
    row = jnp.where((row + 1) * (row + 2) // 2 <= tile_id, row + 1, row)
    return row, tile_id - row * (row + 1) // 2
