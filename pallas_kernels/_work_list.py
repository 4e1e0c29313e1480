"""The tiles that touch the lower triangle, dealt out to a fixed number of programs.

A symmetric (m, m) result is cut into strips of `tile_m` rows, and each strip, from the first column
to the diagonal, into tiles of `tile_n` columns. Each 64 rows of a tile are computed as far as they
need: in whole width, or in half of it where that reaches the diagonal.

        tile_n = 256                                  tile_n = 128
    rows   0–63  |  half |                            | half|
    rows  64–127 |  half |                            |  whole  |
    rows 128–191 |     whole     |                    |  whole  | half|
    rows 192–255 |     whole     |                    |  whole  |  whole  |
    rows 256–319 |     whole     |  half |            |  whole  |  whole  | half|
"""

import dataclasses
import functools
import math

import numpy as np

ROWS = 64  # that are computed together
# Strips whose tiles are visited together, column by column, so that the operands of the tiles that
# are computed at one time stay in the L2 cache.
_STRIPS = 4


_TWELFTHS = 12  # of a whole tile: the unit of work


@dataclasses.dataclass(frozen=True)
class WorkList:
    """`tiles[r, p]` is the r-th tile of program p: (batch, row, col, width), width 0 for none.

    In whole tiles, `total` is what all programs compute, and `longest` the most that one does.
    """

    tiles: np.ndarray
    total: float
    longest: float
    has_halves: bool


@functools.cache
def deal(
    batch: int, m: int, tile_m: int, tile_n: int, *, half_widths: bool, num_programs: int
) -> WorkList:
    """Deals the tiles of a stack of `batch` results to at most `num_programs` programs.

    Whole tiles go round, so that the programs are at neighbouring tiles at any time. The tiles that
    are computed in part come last.
    """
    tiles, work = _lower_triangle(m, tile_m, tile_n, half_widths)
    order = np.lexsort((tiles[:, 0], tiles[:, 1], tiles[:, 0] // (_STRIPS * tile_m)))
    stack = np.column_stack([np.repeat(np.arange(batch), len(tiles)), np.tile(tiles[order], (batch, 1))])
    is_whole = np.tile(work[order] == _TWELFTHS, batch)
    whole, parts = stack[is_whole], stack[~is_whole]
    num_programs = min(num_programs, len(stack))
    part = max(work[work < _TWELFTHS], default=0)
    longest, limits, parts_each = _balance(len(whole), len(parts), part, num_programs)

    dealt = np.zeros((max(limits) + parts_each, num_programs, 4), np.int32)
    turns = np.argwhere(np.arange(max(limits))[:, None] < limits)[: len(whole)]
    dealt[*turns.T] = whole
    next_turn = np.count_nonzero(dealt[..., 3], axis=0)
    program = np.arange(len(parts)) // parts_each
    dealt[next_turn[program] + np.arange(len(parts)) % parts_each, program] = parts
    return WorkList(
        tiles=dealt[dealt[..., 3].any(axis=1)],
        total=batch * sum(work) / _TWELFTHS,
        longest=longest / _TWELFTHS,
        has_halves=len(parts) > 0,
    )


def _lower_triangle(m: int, tile_m: int, tile_n: int, half_widths: bool):
    """Returns the tiles (row, col, width), and how much of each is computed."""
    tiles, work = [], []
    for row in range(0, m, tile_m):
        ends = np.minimum(np.arange(row, row + tile_m, ROWS) + ROWS, m)
        for col in range(0, ends[-1], tile_n):
            is_half = half_widths & (ends - col <= tile_n // 2)
            tiles.append((row, col, tile_n // 2 if is_half[-1] else tile_n))
            work.append(round(_TWELFTHS * (1 - is_half.mean() / 2)))
    return np.array(tiles), np.array(work)


def _balance(whole: int, parts: int, part: int, num_programs: int):
    """Returns the least work in which all can be done, and who does what.

    That is, for each program how many whole tiles it may take; the first programs take the parts, so
    many each.
    """
    least = math.ceil((_TWELFTHS * whole + part * parts) / num_programs)
    longest = least
    while True:
        for each in range(1, longest // (part or _TWELFTHS) + 1):
            with_parts = math.ceil(parts / each)
            limits = np.full(num_programs, longest // _TWELFTHS)
            limits[:with_parts] = (longest - each * part) // _TWELFTHS
            if with_parts <= num_programs and limits.sum() >= whole:
                return longest, limits, each
        longest += 1
