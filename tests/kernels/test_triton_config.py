import functools

import helpers
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import syrk
from pallas_kernels._triton import default_triton_syrkx_config


@pytest.mark.parametrize(
    ("shape", "tile", "num_warps"),
    [
        ((64, 64), 16, 2),
        ((128, 128), 16, 4),
        ((8, 128, 128), 32, 4),  # 16 programs each for both triangles, one a multiprocessor
        ((32, 128, 128), 64, 4),
        ((256, 256), 32, 4),
        ((1024, 4096), 64, 4),
        ((2048, 2048), 64, 4),
        ((2048, 8192), 128, 4),
        ((3072, 3072), 128, 8),  # 300 tiles: 3 rounds of 132, not 2 of 264
        ((4096, 4096), 128, 4),  # 528 tiles: 2 full rounds of 264
        ((48, 768, 768), 128, 4),
    ],
)
def test_the_tile_follows_the_number_of_programs(shape, tile, num_warps):
    with helpers.described_gpu("H200"):
        config = default_triton_syrkx_config(shape, jnp.bfloat16)
    assert (config.tile_m, config.num_warps) == (tile, num_warps)


def test_large_configs_are_hopper_s_alone():
    for gpu in ("A100", "RTX 4090"):
        with helpers.described_gpu(gpu):
            assert default_triton_syrkx_config((3072, 3072), jnp.bfloat16).num_stages == 3


def test_vmap_chooses_for_the_whole_stack():
    matrices = jax.ShapeDtypeStruct((48, 768, 768), jnp.bfloat16)
    by_triton = functools.partial(syrk, implementation="triton")
    with helpers.described_gpu("H200"):
        alone = jax.make_jaxpr(by_triton)(matrices)
        mapped = jax.make_jaxpr(jax.vmap(by_triton))(matrices)
    grid = f"grid=({48 * 21},)"  # 6 rows of tiles of 128
    assert grid in str(alone) and grid in str(mapped)
