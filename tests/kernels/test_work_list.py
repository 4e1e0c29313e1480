import itertools

import numpy as np
import pytest

from pallas_kernels import _work_list
from pallas_kernels._mosaic_gpu_config import CONFIGS

BLOCK = 32  # every side of a tile is a multiple
TILES = sorted({(config.tile_m, config.tile_n, config.half_tiles) for config in CONFIGS})

each_tile = pytest.mark.parametrize(("tile_m", "tile_n", "half_tiles"), TILES)


def work_lists(tile_m, tile_n, half_tiles):
    sizes = itertools.product((1, 3, 24), (64, 128, 320, 448, 1024, 2048), (1, 2, 5, 132))
    for batch, m, num_programs in sizes:
        if batch * m <= 10_000:
            tiles = _work_list.deal(
                batch, m, tile_m, tile_n, half_tiles=half_tiles, num_programs=num_programs
            )
            yield batch, m, num_programs, tiles


@each_tile
def test_every_block_of_the_lower_triangle_is_in_one_tile(tile_m, tile_n, half_tiles):
    for batch, m, _, tiles in work_lists(tile_m, tile_n, half_tiles):
        size = m // BLOCK + 256 // BLOCK
        times = np.zeros((batch, size, size), int)
        for image, row, col, width in tiles.reshape(-1, 4) // [1, BLOCK, BLOCK, BLOCK]:
            times[image, row : row + tile_m // BLOCK, col : col + width] += width > 0
        assert times.max() == 1
        # Those that are stored are 64 rows high.
        rows, cols = np.ogrid[: m // BLOCK, : m // BLOCK]
        assert times[:, : m // BLOCK, : m // BLOCK][:, cols // 2 <= rows // 2].min() == 1


@each_tile
def test_tiles_start_in_the_triangle_and_are_half_where_that_is_enough(tile_m, tile_n, half_tiles):
    for batch, m, _, tiles in work_lists(tile_m, tile_n, half_tiles):
        image, row, col, width = tiles[tiles[..., 3] > 0].T
        end = np.minimum(row + tile_m, m)
        assert not (row % tile_m).any() and not (col % tile_n).any()
        assert image.max() < batch and row.max() < m and (col < end).all()
        is_half = half_tiles & (end - col <= tile_n // 2)
        np.testing.assert_array_equal(width, np.where(is_half, tile_n // 2, tile_n))


@each_tile
def test_programs_have_equal_shares_but_for_one_tile(tile_m, tile_n, half_tiles):
    for _, _, num_programs, tiles in work_lists(tile_m, tile_n, half_tiles):
        shares = tiles[..., 3].sum(axis=0) / tile_n
        assert len(shares) <= num_programs
        assert shares.min() > 0
        assert shares.max() - shares.min() <= 1
        assert shares.max() < shares.sum() / len(shares) + 1
        is_tile = tiles[..., 3] > 0
        assert (is_tile[:-1] >= is_tile[1:]).all()  # no gaps


@pytest.mark.parametrize(
    ("batch", "m", "tile_m", "tile_n", "longest", "mean"),
    [
        (1, 4096, 128, 256, 2, 2),  # 256 whole and 16 half tiles
        (8, 2048, 128, 128, 9, 8.25),
        (24, 1024, 128, 128, 7, 6.5),
        (200, 512, 128, 128, 16, 15.2),
    ],
)
def test_the_longest_share_of_132_programs(batch, m, tile_m, tile_n, longest, mean):
    tiles = _work_list.deal(batch, m, tile_m, tile_n, half_tiles=tile_n == 256, num_programs=132)
    shares = tiles[..., 3].sum(axis=0) / tile_n
    assert shares.max() == longest
    assert shares.mean() == pytest.approx(mean, abs=0.06)
