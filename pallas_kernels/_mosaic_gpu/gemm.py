"""A·B by Hopper's own instructions, TMA and wgmma, where nothing is symmetric.

A kernel of the same programs as that of the symmetric products (`_mosaic_gpu_ring`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _device
from pallas_kernels._mosaic_gpu.config import ROWS, TILE_K, RingConfig
from pallas_kernels._mosaic_gpu.ring import Ref, RingProgram, Tile, launch
from pallas_kernels._mosaic_gpu.work_list import deal_rectangles
from pallas_kernels._stacked import call_on_stacks, padded


class Config(RingConfig):
    """A tile of 128 rows, and its ring; blocks are stored once."""

    def deal(self, batch: int, m: int, n: int, num_programs: int) -> np.ndarray:
        """Returns the work list of `deal_rectangles`."""
        return deal_rectangles(batch, m, n, self.tile_m, self.tile_n, num_programs=num_programs)


_FLOPS = 5.6e6  # of a multiprocessor, per µs

CONFIGS = (
    Config(128, 128, 6, in_turns=True),
    Config(128, 192, 4, in_turns=True),
    Config(128, 256, 4),
)


def gemm(
    a_matrix: jax.Array,
    b_matrix: jax.Array,
    *,
    out_dtype: jnp.dtype | None = None,
    config: Config | None = None,
    num_programs: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """A·B, of `(..., m, k)` and `(..., k, n)`, in one launch, also under `vmap`.

    None as `out_dtype` is that of the operands.

    Operands are padded with zeros to multiples of 64, which are passes of their own.
    """
    kernel = functools.partial(
        _launch,
        out_dtype=out_dtype or a_matrix.dtype,
        config=config,
        num_programs=num_programs or _device.num_multiprocessors(),
        interpret=interpret,
    )

    (out,) = call_on_stacks(kernel, "mosaic_gpu", padded(a_matrix), padded(b_matrix))
    return out[..., : a_matrix.shape[-2], : b_matrix.shape[-1]]


def default_config(shape: tuple[int, ...], n: int, num_programs: int) -> Config:
    """Returns the fastest config for stacks `(batch, m, k)` and n columns, by a model."""
    return min(CONFIGS, key=lambda config: predict(shape, n, config, num_programs))


def efficiency(shape: tuple[int, ...], n: int, num_programs: int) -> float:
    """Returns the part of the multiprocessors' time that goes into products, by the model."""
    batch, m, k = shape
    config = default_config(shape, n, num_programs)
    products = 2 * batch * m * k * n / _FLOPS / num_programs
    return products / predict(shape, n, config, num_programs)


def predict(shape: tuple[int, ...], n: int, config: Config, num_programs: int) -> float:
    """Returns a model's time in µs on an H200, for the program with the most to do.

    Fitted to measured times from 2048×2048 to 24×2048×8192, in runs at the power limit. It leaves a
    multiprocessor `_FLOPS`, or 5.25e6 where tiles are small and their operands come from L2 more
    often. Of a tile that is not in turns the storing is 1.2 µs.
    """
    batch, m, k = shape
    tiles = batch * pl.cdiv(m, config.tile_m) * pl.cdiv(n, config.tile_n)
    rate = 5.25e6 if config.tile_n == 128 else _FLOPS
    storing = 0 if config.in_turns else 1.2
    return pl.cdiv(tiles, num_programs) * (2 * config.tile_m * config.tile_n * k / rate + storing)


# Jitted, so that calls of equal shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("out_dtype", "config", "num_programs", "interpret"))
def _launch(a, b, *, out_dtype, config, num_programs, interpret):
    (batch, m, _), n = a.shape, b.shape[-1]
    config = config or default_config(a.shape, n, num_programs)
    work = config.deal(batch, m, n, num_programs)

    def program(a, b, out, **ring):
        return _Program(a=a, b=b, out=out, **ring)

    return launch(
        program,
        config,
        work,
        (a, b),
        (jax.ShapeDtypeStruct((batch, m, n), out_dtype),),
        b_block=(TILE_K, config.tile_n),
        buffers={"buffers": (ROWS, 2 * config.block_n // out_dtype.itemsize)},
        interpret=interpret,
        kernel_name="gemm",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program(RingProgram):
    """A `RingProgram` with its operands and result in global memory, and its staging buffers."""

    a: Ref
    b: Ref
    out: Ref
    buffers: Ref

    @property
    def num_products(self) -> int:
        """The blocks of A in a strip of rows."""
        return self.a.shape[-1] // TILE_K

    def load(self, tile: Tile, width: int) -> None:
        """Copies A and B; beyond the last column nothing is read."""

        def load_factors(k, _):
            slot, block = self.empty_slot(tile.step + k), pl.ds(k * TILE_K, TILE_K)
            plgpu.copy_gmem_to_smem(
                self.a.at[tile.batch, pl.ds(tile.row, self.config.tile_m), block],
                self.a_ring.at[slot],
                self.full.at[tile.turn, slot],
            )
            plgpu.copy_gmem_to_smem(
                self.b.at[tile.batch, block, pl.ds(tile.col, width)],
                self.b_ring.at[slot],
                self.full.at[tile.turn, slot],
            )

        lax.fori_loop(0, self.num_products, load_factors, None)

    def b_block(self, slot: jax.Array, width: int) -> Ref:
        """B."""
        return self.b_ring.at[slot]

    def storing(self, tile: Tile, width: int) -> Callable[[jax.Array], None]:
        """Needs nothing before."""
        return functools.partial(self._store, tile)

    def _store(self, tile, product):
        num_buffers, columns = self.config.num_buffers, self.buffers.shape[-1]
        product = product.astype(self.out.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        height, width = product.shape
        starts = itertools.product(range(0, height, ROWS), range(0, width, columns))
        for i, (row, col) in enumerate(starts):
            if i >= num_buffers:
                plgpu.wait_smem_to_gmem(num_buffers - 1, wait_read_only=True)
            buffer = self.buffers.at[self.warpgroup, i % num_buffers]
            buffer[...] = product[row : row + ROWS, col : col + columns]
            plgpu.commit_smem()
            # What is beyond the last row and the last column is not written.
            rows = pl.ds(tile.row + self.first_row + row, ROWS)
            block = pl.ds(tile.col + col, columns)
            plgpu.copy_smem_to_gmem(buffer, self.out.at[tile.batch, rows, block])
