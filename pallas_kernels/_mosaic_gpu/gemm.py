"""A·B by Hopper's own instructions, TMA and wgmma, where nothing is symmetric.

The kernel runs the same kind of program as the kernel of the symmetric products: `ring`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _device
from pallas_kernels._mosaic_gpu.config import ROWS, TILE_K, RingConfig
from pallas_kernels._mosaic_gpu.launch import launch_programs
from pallas_kernels._mosaic_gpu.ring import Ref, RingProgram, Tile, in_stack, width_of
from pallas_kernels._mosaic_gpu.work_list import deal_rectangles
from pallas_kernels._stacked import call_on_stacks, padded


class MosaicGemmConfig(RingConfig):
    """A tile of 128 rows, and its ring. Blocks are stored once."""

    def deal(self, m: int, stacks: tuple[tuple[int, int], ...], num_programs: int) -> np.ndarray:
        """Returns the work list of `deal_rectangles`."""
        return deal_rectangles(m, stacks, self.tile_m, self.tile_n, num_programs=num_programs)


_MULTIPROCESSOR_FLOPS = 5.6e6  # per µs

MOSAIC_GEMM_CONFIGS = (
    MosaicGemmConfig(128, 128, 6, in_turns=True),
    MosaicGemmConfig(128, 192, 4, in_turns=True),
    MosaicGemmConfig(128, 256, 4),
)


def gemm(
    a_matrix: jax.Array,
    b_matrix: jax.Array,
    *,
    out_dtype: jnp.dtype | None = None,
    config: MosaicGemmConfig | None = None,
    num_programs: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """A·B, of `(..., m, k)` and `(..., k, n)`, in one launch, also under `vmap`.

    Operands are padded with zeros to multiples of 64, each in a pass of its own.

    Args:
        a_matrix: shape `(..., m, k)`.
        b_matrix: shape `(..., k, n)`.
        out_dtype: dtype of the result, or None for the operands'.
        config: the tile and the ring, or None for the default.
        num_programs: the number of programs, or None for one on each multiprocessor.
        interpret: runs the kernel in Pallas' interpreter.
    """
    kernel = functools.partial(
        launch_mosaic_gemm,
        out_dtype=out_dtype or a_matrix.dtype,
        config=config,
        num_programs=num_programs or _device.num_multiprocessors(),
        interpret=interpret,
    )

    (out,) = call_on_stacks(kernel, "mosaic_gpu", padded(a_matrix), (padded(b_matrix),))
    return out[..., : a_matrix.shape[-2], : b_matrix.shape[-1]]


def default_mosaic_gemm_config(
    shape: tuple[int, ...], n: int, num_programs: int
) -> MosaicGemmConfig:
    """Returns the config that is fastest by the model for stacks `(batch, m, k)` and n columns."""
    return min(
        MOSAIC_GEMM_CONFIGS,
        key=lambda config: predict_gemm_microseconds(shape, n, config, num_programs),
    )


def predict_gemm_efficiency(shape: tuple[int, ...], n: int, num_programs: int) -> float:
    """Returns the part of the multiprocessors' time that goes into products, by the model."""
    batch, m, k = shape
    config = default_mosaic_gemm_config(shape, n, num_programs)
    products = 2 * batch * m * k * n / _MULTIPROCESSOR_FLOPS / num_programs
    return products / predict_gemm_microseconds(shape, n, config, num_programs)


def predict_gemm_microseconds(
    shape: tuple[int, ...], n: int, config: MosaicGemmConfig, num_programs: int
) -> float:
    """Returns a model's time in µs on an H200, for the program with the most to do.

    Fitted to measured times from 2048×2048 to 24×2048×8192, in runs at the power limit. The limit
    leaves `_MULTIPROCESSOR_FLOPS`. Small tiles get their operands from L2 more often, which leaves
    5.25e6. A tile that is not in turns takes 1.2 µs to store.
    """
    batch, m, k = shape
    tiles = batch * pl.cdiv(m, config.tile_m) * pl.cdiv(n, config.tile_n)
    rate = 5.25e6 if config.tile_n == 128 else _MULTIPROCESSOR_FLOPS
    storing = 0 if config.in_turns else 1.2
    return pl.cdiv(tiles, num_programs) * (2 * config.tile_m * config.tile_n * k / rate + storing)


# Jitted, so that calls of equal shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("out_dtype", "config", "num_programs", "interpret"))
def launch_mosaic_gemm(
    a: jax.Array,
    bs: tuple[jax.Array, ...],
    *,
    out_dtype: jnp.dtype,
    config: MosaicGemmConfig | None,
    num_programs: int,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, ...]:
    """Computes a stack times others that follow one another, each with an n of its own.

    Shapes are `(batch, m, k)`, and `(batchᵢ, k, nᵢ)` with the sum `batch`. All sizes are multiples
    of 64.
    """
    batch, m, _ = a.shape
    if config is None:
        mean_n = sum(len(b) * b.shape[-1] for b in bs) // batch
        config = default_mosaic_gemm_config(a.shape, mean_n, num_programs)
    work = config.deal(m, tuple((len(b), b.shape[-1]) for b in bs), num_programs)

    return launch_programs(
        functools.partial(_gemm_program, num_stacks=len(bs)),
        config,
        work,
        (a, *bs),
        tuple(jax.ShapeDtypeStruct((len(b), m, b.shape[-1]), out_dtype) for b in bs),
        b_block=(TILE_K, config.tile_n),
        buffers={"buffers": (ROWS, 2 * config.block_n // out_dtype.itemsize)},
        interpret=interpret,
        kernel_name="gemm",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmProgram(RingProgram):
    """A `RingProgram` with its operands and results in global memory, and its staging buffers.

    B and the result may be in several stacks, each with an n of its own.
    """

    a: Ref
    bs: tuple[Ref, ...]
    outs: tuple[Ref, ...]
    buffers: Ref

    def num_products(self, tile: Tile) -> int:
        """Returns the number of blocks of A in a strip of rows, the same in all tiles."""
        del tile
        return self.a.shape[-1] // TILE_K

    def load(self, tile: Tile, width: int) -> None:
        """Copies A and B. TMA reads nothing beyond the last column."""

        def load_factors(number: int, index: jax.Array) -> None:
            def load(k: jax.Array, _: None) -> None:
                slot, block = self.empty_slot(tile.step + k), pl.ds(k * TILE_K, TILE_K)
                plgpu.copy_gmem_to_smem(
                    self.a.at[tile.batch, pl.ds(tile.row, self.config.tile_m), block],
                    self.a_ring.at[slot],
                    self.full.at[tile.turn, slot],
                )
                plgpu.copy_gmem_to_smem(
                    self.bs[number].at[index, block, pl.ds(tile.col, width)],
                    self.b_ring.at[slot],
                    self.full.at[tile.turn, slot],
                )

            lax.fori_loop(0, self.num_products(tile), load, None)

        in_stack(self.bs, tile, load_factors)

    def b_block(self, slot: jax.Array, width: int) -> Ref:
        """Returns the block of B in a slot, as B has it."""
        return self.b_ring.at[slot]

    def storing(self, tile: Tile, width: int) -> Callable[[jax.Array], None]:
        """Returns what stores the tile. It needs nothing in advance."""
        return functools.partial(self._store, tile)

    def _store(self, tile: Tile, product: jax.Array) -> None:
        """Rounds the sums of this warpgroup's rows and stores them block by block."""
        num_buffers, columns = self.config.num_buffers, self.buffers.shape[-1]
        product = product.astype(self.outs[0].dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        height, width = product.shape
        starts = itertools.product(range(0, height, ROWS), range(0, width, columns))
        for i, (row, col) in enumerate(starts):
            if i >= num_buffers:
                plgpu.wait_smem_to_gmem(num_buffers - 1, wait_read_only=True)
            buffer = self.buffers.at[self.warpgroup, i % num_buffers]
            buffer[...] = product[row : row + ROWS, col : col + columns]
            plgpu.commit_smem()
            rows = pl.ds(tile.row + self.first_row + row, ROWS)
            place = buffer, rows, pl.ds(tile.col + col, columns)
            # TMA writes nothing beyond the last row. Beyond the last column it does write where the
            # result has one block of columns, because its map of the result has no axis for them.
            is_stored = tile.col + col < width_of(self.outs, tile)

            @pl.when(is_stored)
            def _(place: tuple[Any, ...] = place) -> None:
                in_stack(self.outs, tile, functools.partial(self._copy, *place))
                plgpu.commit_smem_to_gmem_group()

            @pl.when(~is_stored)  # later blocks count on the buffers as if this one were stored
            def _() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _copy(self, buffer: Ref, rows: Any, columns: Any, number: int, index: jax.Array) -> None:
        out = self.outs[number].at[index, rows, columns]
        plgpu.copy_smem_to_gmem(buffer, out, commit_group=False)


def _gemm_program(a: Ref, *refs: Ref, num_stacks: int, **settings: Any) -> GemmProgram:
    return GemmProgram(a=a, bs=refs[:num_stacks], outs=refs[num_stacks:], **settings)
