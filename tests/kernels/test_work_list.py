import itertools

import numpy as np
import pytest

from pallas_kernels._mosaic_gpu.config import MOSAIC_SYRKX_CONFIGS
from pallas_kernels._mosaic_gpu.work_list import deal_rectangles, deal_triangles

BLOCK = 32  # every side of a tile is a multiple
TILES = sorted({(config.tile_m, config.tile_n) for config in MOSAIC_SYRKX_CONFIGS})

each_tile = pytest.mark.parametrize(("tile_m", "tile_n"), TILES)


def work_lists(tile_m, tile_n):
    sizes = itertools.product((1, 3, 24), (64, 128, 320, 448, 1024, 2048), (1, 2, 5, 132))
    for batch, m, num_programs in sizes:
        if batch * m <= 10_000:
            tiles = deal_triangles(batch, m, tile_m, tile_n, num_programs=num_programs)
            yield batch, m, num_programs, tiles


@each_tile
def test_every_block_of_the_lower_triangle_is_in_one_tile(tile_m, tile_n):
    for batch, m, _, tiles in work_lists(tile_m, tile_n):
        size = m // BLOCK + 256 // BLOCK
        times = np.zeros((batch, size, size), int)
        for image, row, col in tiles[tiles[..., 0] >= 0] // [1, BLOCK, BLOCK]:
            times[image, row : row + tile_m // BLOCK, col : col + tile_n // BLOCK] += 1
        assert times.max() == 1
        # Those that are stored are 64 rows high.
        rows, cols = np.ogrid[: m // BLOCK, : m // BLOCK]
        assert times[:, : m // BLOCK, : m // BLOCK][:, cols // 2 <= rows // 2].min() == 1


@each_tile
def test_tiles_start_in_the_triangle(tile_m, tile_n):
    for batch, m, _, tiles in work_lists(tile_m, tile_n):
        image, row, col = tiles[tiles[..., 0] >= 0].T
        assert not (row % tile_m).any() and not (col % tile_n).any()
        assert image.max() < batch and row.max() < m
        assert (col < np.minimum(row + tile_m, m)).all()


@each_tile
def test_programs_have_equal_shares_but_for_one_tile(tile_m, tile_n):
    for _, _, num_programs, tiles in work_lists(tile_m, tile_n):
        is_tile = tiles[..., 0] >= 0
        shares = is_tile.sum(axis=0)
        assert len(shares) <= num_programs
        assert shares.min() > 0
        assert shares.max() - shares.min() <= 1
        assert shares.max() < shares.sum() / len(shares) + 1
        assert (is_tile[:-1] >= is_tile[1:]).all()  # no gaps


@each_tile
def test_programs_visit_matrices_in_order(tile_m, tile_n):
    for *_, tiles in work_lists(tile_m, tile_n):
        image = np.where(tiles[..., 0] >= 0, tiles[..., 0], tiles[..., 0].max())
        assert (np.diff(image, axis=0) >= 0).all()


@pytest.mark.parametrize("sizes", [(1, 128, 64), (3, 192, 448), (24, 1024, 4096)], ids=str)
@pytest.mark.parametrize("tile_n", [64, 192, 256])
def test_rectangles_are_covered_once_in_equal_shares(sizes, tile_n):
    batch, m, n = sizes
    for num_programs in (1, 5, 132):
        tiles = deal_rectangles(m, ((batch, n),), 128, tile_n, num_programs=num_programs)
        times = np.zeros((batch, m // 64 + 1, n // 64 + 4), int)
        for image, row, col in tiles[tiles[..., 0] >= 0] // [1, 64, 64]:
            times[image, row : row + 2, col : col + tile_n // 64] += 1
        assert times[:, : m // 64, : n // 64].min() == times.max() == 1
        shares = (tiles[..., 0] >= 0).sum(axis=0)
        assert len(shares) <= num_programs and shares.max() - shares.min() <= 1
