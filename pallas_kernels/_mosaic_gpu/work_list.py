"""The tiles of stacks of products, dealt out to a fixed number of programs.

A result is cut into strips of `tile_m` rows, and each strip into tiles of `tile_n` columns. A
symmetric (m, m) result needs the tiles that touch the lower triangle. Three whole tiles in a row
may become four narrow ones:

    rows   0–127 |   whole   |
    rows 128–255 |   whole   |   whole   |
    rows 256–383 |   whole   |   whole   |   whole   |
    rows 384–511 | narrow | narrow | narrow | narrow |   whole   |

Work lists are int32 arrays. Element [r, p] is the r-th tile of program p, (batch, row, col, width),
or no tile where the width is 0. Whole tiles go round, so that at any time all programs work on
neighbouring tiles. Narrow tiles go to the program with the least to do.
"""

import functools
import heapq

import numpy as np


@functools.cache
def deal_triangles(
    batch: int, m: int, tile_m: int, tile_n: int, *, narrow_tiles: bool, num_programs: int
) -> np.ndarray:
    """Deals the lower triangles of `batch` (m, m) results to at most `num_programs` programs."""
    one = np.pad(lower_triangle(m, tile_m, tile_n), [(0, 0), (1, 1)], constant_values=tile_n)
    tiles = np.tile(one, (batch, 1))
    tiles[:, 0] = np.repeat(np.arange(batch), len(one))
    if narrow_tiles:
        tiles = _narrowed(tiles, tile_n, num_programs)
    return _deal(tiles, 4 * tile_m, tile_n, num_programs)


@functools.cache
def deal_chains(
    batch: int,
    m: int,
    tile: int,
    nums_addends: tuple[int, ...],
    *,
    together: int,
    num_programs: int,
) -> np.ndarray:
    """Returns the tiles of all products of `batch` chains of symmetric (m, m) results.

    `together` matrices go through their chains together. Tile i is of program i modulo
    `num_programs`. Rows are (batch, row, col, product, step), in units of 64 rows and columns;
    `step` is the number of steps of the program's ring before the tile.
    """
    one = lower_triangle(m, tile, tile)
    row, col = one.T
    one = one[np.lexsort((row, col, row // (4 * tile)))] // 64
    matrices = np.array(
        [
            (image, product)
            for first in range(0, batch, together)
            for product in range(len(nums_addends))
            for image in range(first, min(first + together, batch))
        ]
    )
    images, products = np.repeat(matrices, len(one), axis=0).T
    row, col = np.tile(one, (len(matrices), 1)).T
    steps = m // 64 + np.array(nums_addends)[products]
    before = np.zeros(len(steps), int)
    for program in range(num_programs):
        before[program::num_programs] = np.cumsum(steps[program::num_programs])
    return np.stack([images, row, col, products, before - steps], axis=1).astype(np.int32)


@functools.cache
def deal_rectangles(
    m: int, stacks: tuple[tuple[int, int], ...], tile_m: int, tile_n: int, *, num_programs: int
) -> np.ndarray:
    """Deals (m, n) results to at most `num_programs` programs, for stacks of (batch, n) results."""
    tiles, begin = [], 0
    for batch, n in stacks:
        sizes = batch, -(-m // tile_m), -(-n // tile_n)
        found = np.indices(sizes, np.int32).reshape(3, -1).T
        tiles.append(found * np.array([1, tile_m, tile_n], np.int32) + np.array([begin, 0, 0]))
        begin += batch
    tiles = np.concatenate(tiles).astype(np.int32)
    tiles = np.pad(tiles, [(0, 0), (0, 1)], constant_values=tile_n)
    return _deal(tiles, 8 * tile_m, tile_n, num_programs)


def _deal(tiles: np.ndarray, num_rows: int, tile_n: int, num_programs: int) -> np.ndarray:
    """Returns the work list of tiles, which are rows of (batch, row, col, width).

    Programs visit `num_rows` rows of the result together, column by column. So the operands of the
    tiles that are computed at one time stay in the L2 cache.
    """
    image, row, col, _ = tiles.T
    tiles = tiles[np.lexsort((row, col, row // num_rows, image))]
    is_whole = tiles[:, 3] == tile_n
    whole, narrow = np.flatnonzero(is_whole), np.flatnonzero(~is_whole)
    num_programs = min(num_programs, len(tiles))
    # Place r·num_programs + p is round r of program p. An empty place holds len(tiles).
    dealt = np.full(len(tiles) + 3 * num_programs, len(tiles))
    dealt[: len(whole)] = whole
    places = range(len(whole), len(whole) + num_programs)
    programs = [(tile_n * (i // num_programs), i % num_programs, i) for i in places]
    heapq.heapify(programs)  # each is (columns to do, program, its next free place)
    for tile in narrow:
        columns, p, place = programs[0]
        heapq.heapreplace(programs, (columns + tiles[tile, 3], p, place + num_programs))
        dealt[place] = tile
    num_rounds = 1 + np.flatnonzero(dealt < len(tiles))[-1] // num_programs
    dealt = dealt[: num_rounds * num_programs].reshape(num_rounds, num_programs)
    tiles = np.append(tiles, np.zeros((1, 4), np.int32), axis=0)
    return tiles[np.sort(dealt, axis=0)]  # programs keep to the order of the list


@functools.cache
def lower_triangle(m: int, tile_m: int, tile_n: int) -> np.ndarray:
    """Returns where the tiles begin that touch the lower triangle, as rows of (row, col)."""
    starts = [
        (row, col) for row in range(0, m, tile_m) for col in range(0, min(row + tile_m, m), tile_n)
    ]
    return np.array(starts, np.int32)


def _narrowed(tiles: np.ndarray, tile_n: int, num_programs: int) -> np.ndarray:
    """Replaces whole tiles by narrow ones where the last round has room for more tiles.

    Every program gets the same number of narrow tiles.
    """
    starts = np.flatnonzero(tiles[:, 2] % (3 * tile_n) == 0)
    threes = starts[np.diff(starts, append=len(tiles)) == 3]
    num_replaced = min(-len(tiles) % num_programs, len(threes))
    narrow_each = 4 * num_replaced // num_programs
    threes = threes[len(threes) - -(-narrow_each * num_programs // 4) :]
    narrow = np.repeat(tiles[threes], 4, axis=0)
    narrow[:, 3] = 3 * tile_n // 4
    narrow[:, 2] += narrow[:, 3] * np.tile(np.arange(4, dtype=np.int32), len(threes))
    others = np.delete(tiles, threes[:, None] + np.arange(3), axis=0)
    return np.concatenate([others, narrow])
