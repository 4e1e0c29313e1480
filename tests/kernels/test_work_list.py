import itertools

import numpy as np
import pytest

from pallas_kernels._mosaic_gpu.config import MOSAIC_SYRKX_CONFIGS
from pallas_kernels._mosaic_gpu.work_list import deal_rectangles, deal_triangles

BLOCK = 32  # every side of a tile is a multiple
TILES = sorted(
    {(config.tile_m, config.tile_n, config.narrow_tiles) for config in MOSAIC_SYRKX_CONFIGS}
)

each_tile = pytest.mark.parametrize(("tile_m", "tile_n", "narrow_tiles"), TILES)


def work_lists(tile_m, tile_n, narrow_tiles):
    sizes = itertools.product((1, 3, 24), (64, 128, 320, 448, 1024, 2048), (1, 2, 5, 132))
    for batch, m, num_programs in sizes:
        if batch * m <= 10_000:
            tiles = deal_triangles(
                batch, m, tile_m, tile_n, narrow_tiles=narrow_tiles, num_programs=num_programs
            )
            yield batch, m, num_programs, tiles


def longest_share(batch, m, tile_m, tile_n, narrow_tiles, num_programs=132):
    tiles = deal_triangles(
        batch, m, tile_m, tile_n, narrow_tiles=narrow_tiles, num_programs=num_programs
    )
    return tiles[..., 3].sum(axis=0).max()


@each_tile
def test_every_block_of_the_lower_triangle_is_in_one_tile(tile_m, tile_n, narrow_tiles):
    for batch, m, _, tiles in work_lists(tile_m, tile_n, narrow_tiles):
        size = m // BLOCK + 256 // BLOCK
        times = np.zeros((batch, size, size), int)
        for image, row, col, width in tiles.reshape(-1, 4) // [1, BLOCK, BLOCK, BLOCK]:
            times[image, row : row + tile_m // BLOCK, col : col + width] += width > 0
        assert times.max() == 1
        # Those that are stored are 64 rows high.
        rows, cols = np.ogrid[: m // BLOCK, : m // BLOCK]
        assert times[:, : m // BLOCK, : m // BLOCK][:, cols // 2 <= rows // 2].min() == 1


@each_tile
def test_tiles_start_in_the_triangle_and_have_few_widths(tile_m, tile_n, narrow_tiles):
    widths = {tile_n, 3 * tile_n // 4} if narrow_tiles else {tile_n}
    found = set()
    for batch, m, _, tiles in work_lists(tile_m, tile_n, narrow_tiles):
        image, row, col, width = tiles[tiles[..., 3] > 0].T
        assert not (row % tile_m).any() and not (col[width == tile_n] % tile_n).any()
        assert image.max() < batch and row.max() < m
        assert (col < np.minimum(row + tile_m, m)).all()
        found |= {*width.tolist()}
    assert found == widths


@each_tile
def test_programs_have_equal_shares_but_for_one_tile(tile_m, tile_n, narrow_tiles):
    for _, _, num_programs, tiles in work_lists(tile_m, tile_n, narrow_tiles):
        shares = tiles[..., 3].sum(axis=0) / tile_n
        assert len(shares) <= num_programs
        assert shares.min() > 0
        assert shares.max() - shares.min() <= 1
        assert shares.max() < shares.sum() / len(shares) + 1
        is_tile = tiles[..., 3] > 0
        assert (is_tile[:-1] >= is_tile[1:]).all()  # no gaps


@each_tile
def test_programs_visit_matrices_in_order(tile_m, tile_n, narrow_tiles):
    for *_, tiles in work_lists(tile_m, tile_n, narrow_tiles):
        image = np.where(tiles[..., 3] > 0, tiles[..., 0], tiles[..., 0].max())
        assert (np.diff(image, axis=0) >= 0).all()


@pytest.mark.parametrize("sizes", [(1, 128, 64), (3, 192, 448), (24, 1024, 4096)], ids=str)
@pytest.mark.parametrize("tile_n", [64, 192, 256])
def test_rectangles_are_covered_once_in_equal_shares(sizes, tile_n):
    batch, m, n = sizes
    for num_programs in (1, 5, 132):
        tiles = deal_rectangles(m, ((batch, n),), 128, tile_n, num_programs=num_programs)
        times = np.zeros((batch, m // 64 + 1, n // 64 + 4), int)
        for image, row, col, width in tiles.reshape(-1, 4) // [1, 64, 64, 64]:
            times[image, row : row + 2, col : col + width] += width > 0
        assert times[:, : m // 64, : n // 64].min() == times.max() == 1
        shares = tiles[..., 3].sum(axis=0)
        assert len(shares) <= num_programs and shares.max() - shares.min() <= tile_n


@pytest.mark.parametrize(
    ("batch", "m", "whole", "narrowed", "mean"),
    [
        (1, 4096, 4 * 128, 4 * 128, 512),
        (1, 3584, 4 * 128, 128 + 3 * 96, 394),
        (8, 2048, 9 * 128, 6 * 128 + 3 * 96, 1055),
        (24, 1024, 7 * 128, 6 * 128 + 96, 838),
        (24, 768, 4 * 128, 4 * 128, 489),  # too few to give every program a narrow one
        (200, 512, 16 * 128, 13 * 128 + 3 * 96, 1939),
    ],
)
def test_narrow_tiles_shorten_the_longest_share_of_132_programs(batch, m, whole, narrowed, mean):
    assert longest_share(batch, m, 128, 128, narrow_tiles=False) == whole
    assert longest_share(batch, m, 128, 128, narrow_tiles=True) == narrowed
    total = longest_share(batch, m, 128, 128, narrow_tiles=False, num_programs=1)
    assert total / 132 == pytest.approx(mean, abs=0.5)
