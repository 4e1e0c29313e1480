"""A·B by a Pallas kernel lowered through Triton, where nothing is symmetric.

One program computes one tile of the result, and rounds its sums once, to whatever dtype. They run
over the columns of A in order: a product depends neither on the tile nor on what else is in the
stack, to the last bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._stacked import call_on_stacks
from pallas_kernels._triton.syrkx import Tile


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of one program: a `tile_m` × `tile_n` block of the result, in steps of `tile_k`."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int


# From the smallest tile on. Measured on an H200 in 16 bits, untuned elsewhere.
CONFIGS = (
    Config(32, 32, 64, num_warps=4, num_stages=4),
    Config(64, 64, 64, num_warps=4, num_stages=3),
    Config(64, 128, 64, num_warps=4, num_stages=3),
    Config(128, 128, 64, num_warps=4, num_stages=3),
)


def default_config(batch: int, m: int, n: int, itemsize: int) -> Config:
    """Returns the smallest tile with which an H200 runs all programs at once, or the largest.

    Wider elements come in as many bytes at a time, for what is on their way to fit on the chip.
    """

    def fits(config):
        return batch * pl.cdiv(m, config.tile_m) * pl.cdiv(n, config.tile_n) <= 132

    config = next(filter(fits, CONFIGS), CONFIGS[-1])
    return dataclasses.replace(config, tile_k=2 * config.tile_k // itemsize)


def gemm(
    a_matrix: jax.Array,
    b_matrix: jax.Array,
    *,
    out_dtype: jnp.dtype,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """A·B, of `(..., m, k)` and `(..., k, n)`, in one launch, also under `vmap`."""
    kernel = functools.partial(_launch, out_dtype=out_dtype, config=config, interpret=interpret)
    (out,) = call_on_stacks(kernel, "triton", a_matrix, b_matrix)
    return out


# Jitted, so that calls of equal shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("out_dtype", "config", "interpret"))
def _launch(a_matrix, b_matrix, *, out_dtype, config, interpret):
    (batch, m, _), n = a_matrix.shape, b_matrix.shape[-1]
    config = config or default_config(batch, m, n, a_matrix.dtype.itemsize)
    out_shape = jax.ShapeDtypeStruct(
        (batch, m, n), out_dtype, manual_axis_type=jax.typeof(a_matrix).manual_axis_type
    )
    return pl.pallas_call(
        functools.partial(_kernel, config=config),
        grid=(batch * pl.cdiv(m, config.tile_m) * pl.cdiv(n, config.tile_n),),
        out_shape=(out_shape,),
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="gemm",
    )(a_matrix, b_matrix)


def _kernel(a_gmem, b_gmem, out_gmem, *, config: Config):
    (_, m, k), n = a_gmem.shape, b_gmem.shape[-1]
    tiles_m, tiles_n = pl.cdiv(m, config.tile_m), pl.cdiv(n, config.tile_n)
    program = pl.program_id(0)
    batch, index = program // (tiles_m * tiles_n), program % (tiles_m * tiles_n)
    # Down the columns of tiles, which have B in common: it is the wider matrix.
    row, col = index % tiles_m * config.tile_m, index // tiles_m * config.tile_n

    def accumulate(step, accumulator):
        depth = step * config.tile_k
        a_tile = Tile(a_gmem, batch, row, depth, (config.tile_m, config.tile_k)).load()
        b_tile = Tile(b_gmem, batch, depth, col, (config.tile_k, config.tile_n)).load()
        return accumulator + plt.dot(a_tile, b_tile)

    tile = (config.tile_m, config.tile_n)
    steps = pl.cdiv(k, config.tile_k)
    total = jax.lax.fori_loop(0, steps, accumulate, jnp.zeros(tile, jnp.float32))
    Tile(out_gmem, batch, row, col, tile).store(total.astype(out_gmem.dtype))
