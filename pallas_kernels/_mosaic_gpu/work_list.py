"""The tiles of stacks of products, dealt out to a fixed number of programs.

A result is cut into strips of `tile_m` rows, and each strip into tiles of `tile_n` columns. A
symmetric (m, m) result needs the tiles that touch the lower triangle.

Work lists are int32 arrays. Element [r, p] is the r-th tile of program p, (batch, row, col), or no
tile where batch is -1. Tiles go round, so that at any time all programs work on neighbouring tiles.
"""

import functools
from collections.abc import Iterable

import numpy as np


@functools.cache
def deal_triangles(
    batch: int, m: int, tile_m: int, tile_n: int, *, num_programs: int
) -> np.ndarray:
    """Deals the lower triangles of `batch` (m, m) results to at most `num_programs` programs."""
    one = lower_triangle(m, tile_m, tile_n)
    images = np.repeat(np.arange(batch, dtype=np.int32), len(one))
    return _deal(np.column_stack([images, np.tile(one, (batch, 1))]), 4 * tile_m, num_programs)


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
    return _deal(np.concatenate(tiles).astype(np.int32), 8 * tile_m, num_programs)


def _deal(tiles: np.ndarray, num_rows: int, num_programs: int) -> np.ndarray:
    """Returns the work list of tiles, which are rows of (batch, row, col).

    Programs visit `num_rows` rows of the result together, column by column. So the operands of the
    tiles that are computed at one time stay in the L2 cache.
    """
    image, row, col = tiles.T
    tiles = tiles[np.lexsort((row, col, row // num_rows, image))]
    num_programs = min(num_programs, len(tiles))
    missing = [(0, -len(tiles) % num_programs), (0, 0)]
    return np.pad(tiles, missing, constant_values=-1).reshape(-1, num_programs, 3)


@functools.cache
def lower_triangle(m: int, tile_m: int, tile_n: int) -> np.ndarray:
    """Returns where the tiles begin that touch the lower triangle, as rows of (row, col)."""
    starts = [
        (row, col) for row in range(0, m, tile_m) for col in range(0, min(row + tile_m, m), tile_n)
    ]
    return np.array(starts, np.int32)


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
