"""The tiles that touch the lower triangle, dealt out to a fixed number of programs.

A symmetric (m, m) result is cut into strips of `tile_m` rows, and each strip, from the first column
to the diagonal, into tiles of `tile_n` columns. Where half a tile reaches the diagonal, the strip
may end with a half tile:

    rows   0–127 |  half |
    rows 128–255 |     whole     |
    rows 256–383 |     whole     |  half |
    rows 384–511 |     whole     |     whole     |
"""

import functools
import heapq

import numpy as np

# Strips whose tiles are visited together, column by column, so that the operands of the tiles that
# are computed at one time stay in the L2 cache.
_STRIPS = 4


@functools.cache
def deal(
    batch: int, m: int, tile_m: int, tile_n: int, *, half_tiles: bool, num_programs: int
) -> np.ndarray:
    """Deals the tiles of a stack of `batch` results to at most `num_programs` programs.

    Returns an int32 array: [r, p] is the r-th tile of program p, (batch, row, col, width), and none
    where the width is 0. Whole tiles go round, so that the programs are at neighbouring tiles at
    any time; half tiles come last, and each goes to the program with the least to do.
    """
    one = _lower_triangle(m, tile_m, tile_n, half_tiles)
    one = one[np.lexsort((one[:, 0], one[:, 1], one[:, 0] // (_STRIPS * tile_m)))]
    tiles = np.column_stack([np.repeat(np.arange(batch), len(one)), np.tile(one, (batch, 1))])
    is_whole = tiles[:, 3] == tile_n
    num_whole, num_programs = np.count_nonzero(is_whole), min(num_programs, len(tiles))
    # Place r·num_programs + p of the flat list is round r of program p.
    dealt = np.zeros((len(tiles) + 3 * num_programs, 4), np.int32)
    dealt[:num_whole] = tiles[is_whole]
    places = range(num_whole, num_whole + num_programs)
    programs = [(2 * (place // num_programs), place % num_programs, place) for place in places]
    heapq.heapify(programs)  # by how many halves each has to do; with its next free place
    for tile in tiles[~is_whole]:
        load, p, place = programs[0]
        heapq.heapreplace(programs, (load + 1, p, place + num_programs))
        dealt[place] = tile
    num_rounds = 1 + np.flatnonzero(dealt[:, 3])[-1] // num_programs
    return dealt[: num_rounds * num_programs].reshape(num_rounds, num_programs, 4)


def _lower_triangle(m: int, tile_m: int, tile_n: int, half_tiles: bool) -> np.ndarray:
    """Rows of (row, col, width)."""
    tiles = []
    for row in range(0, m, tile_m):
        end = min(row + tile_m, m)
        for col in range(0, end, tile_n):
            is_half = half_tiles and end - col <= tile_n // 2
            tiles.append((row, col, tile_n // 2 if is_half else tile_n))
    return np.array(tiles)
