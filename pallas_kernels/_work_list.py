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
import itertools

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
    num_programs = min(num_programs, len(tiles))
    programs = [list(tiles[is_whole][p::num_programs]) for p in range(num_programs)]
    halves = [(2 * len(tiles_), p) for p, tiles_ in enumerate(programs)]
    heapq.heapify(halves)
    for tile in tiles[~is_whole]:
        least, p = halves[0]
        heapq.heapreplace(halves, (least + 1, p))
        programs[p].append(tile)
    none = np.zeros(4, np.int32)
    return np.array([*itertools.zip_longest(*programs, fillvalue=none)], np.int32)


def _lower_triangle(m: int, tile_m: int, tile_n: int, half_tiles: bool) -> np.ndarray:
    """Rows of (row, col, width)."""
    tiles = []
    for row in range(0, m, tile_m):
        end = min(row + tile_m, m)
        for col in range(0, end, tile_n):
            is_half = half_tiles and end - col <= tile_n // 2
            tiles.append((row, col, tile_n // 2 if is_half else tile_n))
    return np.array(tiles)
