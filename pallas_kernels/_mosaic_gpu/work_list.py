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
from collections.abc import Iterable

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
    """Replaces whole tiles by narrow ones, the same number for every program.

    That pays where the last round has room for more tiles.
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


# For each product the sources of its addends, and whether its residual is a source. Sources number
# the inputs, then the results and residuals in the order in which they are made.
type Structure = tuple[tuple[tuple[int, ...], bool], ...]


class Column:
    """The columns of a product's row in a plan.

    They hold the source of the factor, the places of the result and of its residual, the number of
    addends, and their sources. A place of -1 says that no product reads the term. After the sources
    of all addends stands the factor's.
    """

    FACTOR, RESULT, RESIDUAL, COUNT, ADDENDS = range(5)


def plan_chain(
    structure: Structure, num_inputs: int, *, all_in_places: bool = False
) -> tuple[np.ndarray, int]:
    """Returns a plan, and how many places its terms have.

    A result takes the place of a term that is not read any more. That can be one of its own
    addends, because each tile reads its addends before it is stored. It cannot be its factor.

    With `all_in_places`, inputs and the last result have places, too. Input i has place i at first,
    and a source is a place. Otherwise inputs stay, the last result has the place -1, and a source
    is the number of an input, or the number of inputs plus a place.
    """
    made, factor = num_inputs, 0  # the numbers of the next result and of the next factor
    products = []
    last_read: dict[int, int] = {}
    for product, (addends, residual) in enumerate(structure):
        last_read |= dict.fromkeys((factor, *addends), product)
        products.append((factor, addends, made, made + 1 if residual else None))
        factor, made = made, made + 1 + residual
    if all_in_places:
        last_read[factor] = len(structure)
    sources = {i: i for i in range(num_inputs)}
    num_sources, free = num_inputs, []
    first = 0 if all_in_places else num_inputs  # source that is a place

    def place(term: int | None) -> int:
        nonlocal num_sources
        if term is None or term not in last_read:
            return -1
        if not free:
            free.append(num_sources)
            num_sources += 1
        sources[term] = free.pop()
        return sources[term] - first

    def release(terms: Iterable[int], product: int) -> None:
        free.extend(sources[x] for x in terms if x >= first and last_read[x] == product)

    width = Column.ADDENDS + max(len(addends) for addends, _ in structure)
    plan = np.empty((len(structure), width), np.int32)
    for product, (factor, addends, result, residual) in enumerate(products):
        read = [sources[x] for x in (factor, *addends)]
        release({*addends} - {factor}, product)
        row = (read[0], place(result), place(residual), len(addends), *read[1:])
        plan[product] = row[0]
        plan[product, : len(row)] = row
        release([factor], product)
    return plan, max(num_sources - first, 1)
