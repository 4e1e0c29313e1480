"""A·(B₁ + B₂ + …) by Hopper's own instructions, TMA and wgmma, where nothing is symmetric.

A kernel of the same programs as that of the symmetric products (`_mosaic_gpu_ring`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _device, _work_list
from pallas_kernels._mosaic_gpu_config import ROWS, SHARED_MEMORY, TILE_K
from pallas_kernels._mosaic_gpu_ring import Ref, RingProgram, Tile
from pallas_kernels._stacked import call_on_stacks, padded


@dataclasses.dataclass(frozen=True)
class Config:
    """A tile of 128 × `tile_n` elements, and `num_stages` steps in the ring."""

    tile_n: int
    num_stages: int
    in_turns: bool
    tile_m: ClassVar[int] = 128
    block_n: ClassVar[int] = 64  # of the blocks that are stored
    num_warpgroups: ClassVar[int] = 2  # that multiply

    @property
    def rows(self) -> int:
        """The rows of a tile that one warpgroup has."""
        return self.tile_m if self.in_turns else self.tile_m // 2

    @property
    def num_turns(self) -> int:
        """The tiles that are under way at a time."""
        return 2 if self.in_turns else 1

    @property
    def num_buffers(self) -> int:
        """The blocks that a warpgroup may have on their way to memory."""
        free = SHARED_MEMORY - self.num_stages * (self.tile_m + self.tile_n) * TILE_K * 2
        return min(self.tile_n // self.block_n, free // (2 * ROWS * self.block_n * 2))

    def deal(self, batch: int, m: int, n: int, num_programs: int) -> np.ndarray:
        """Returns the work list of `_work_list.deal_rectangles`."""
        return _work_list.deal_rectangles(
            batch, m, n, self.tile_m, self.tile_n, num_programs=num_programs
        )


CONFIGS = (
    Config(128, 6, in_turns=True),
    Config(192, 4, in_turns=True),
    Config(256, 4, in_turns=False),
)


def gemm(
    a_matrix: jax.Array,
    b_matrices: tuple[jax.Array, ...],
    *,
    config: Config | None = None,
    num_programs: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """A·(B₁ + B₂ + …), of `(..., m, k)` and `(..., k, n)`, in one launch, also under `vmap`.

    Operands are padded with zeros to multiples of 64, which are passes of their own.
    """
    kernel = functools.partial(
        _launch,
        config=config,
        num_programs=num_programs or _device.num_multiprocessors(),
        interpret=interpret,
    )

    operands = map(padded, (a_matrix, *b_matrices))
    (out,) = call_on_stacks(kernel, "mosaic_gpu", *operands)
    return out[..., : a_matrix.shape[-2], : b_matrices[0].shape[-1]]


def default_config(shape: tuple[int, ...], n: int, num_programs: int) -> Config:
    """Returns the fastest config for stacks `(batch, m, k)` and n columns, by a model."""
    return min(CONFIGS, key=lambda config: predict(shape, n, config, num_programs))


def predict(shape: tuple[int, ...], n: int, config: Config, num_programs: int) -> float:
    """Returns a model's time in µs on an H200, for the program with the most to do.

    Fitted to measured times from 2048×2048 to 24×2048×8192, in runs at the power limit. It leaves a
    multiprocessor 5.6 TFLOP/s, or 5.25 where tiles are small and their operands come from L2 more
    often. Of a tile that is not in turns the storing is 1.2 µs.
    """
    batch, m, k = shape
    num_rounds, *_ = config.deal(batch, m, n, num_programs).shape
    rate = 5.25e6 if config.tile_n == 128 else 5.6e6
    storing = 0 if config.in_turns else 1.2
    return num_rounds * (2 * config.tile_m * config.tile_n * k / rate + storing)


# Jitted, so that calls of equal shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("config", "num_programs", "interpret"))
def _launch(a, *bs, config, num_programs, interpret):
    (batch, m, _), n = a.shape, bs[0].shape[-1]
    config = config or default_config(a.shape, n, num_programs)
    work = config.deal(batch, m, n, num_programs)

    def shared(*shape):
        # Abstract to pyright: methods come from a decorator.
        tiled = plgpu.TilingTransform((8, 64))  # pyright: ignore[reportAbstractUsage]
        swizzled = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, a.dtype, transforms=(tiled, swizzled))

    def body(tiles, a_gmem, *refs, **scratch):
        _Program(
            config=config,
            widths=(config.tile_n,),
            warpgroup=lax.axis_index("warpgroup"),
            index=lax.axis_index("program"),
            tiles=tiles,
            a=a_gmem,
            bs=refs[: len(bs)],
            out=refs[-1],
            **scratch,
        ).run()

    # In units of the blocks, for the compiler to see that rows and columns are multiples of them.
    tiles = work // np.array([1, ROWS, config.block_n, 1], np.int32)
    stages = config.num_stages
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, m, n), a.dtype),
        grid=(work.shape[1],),
        grid_names=("program",),
        num_threads=config.num_warpgroups + 1,
        thread_name="warpgroup",
        scratch_types={
            "a_ring": shared(stages, config.tile_m, TILE_K),
            "b_ring": shared(stages, TILE_K, config.tile_n),
            "buffers": shared(config.num_warpgroups, config.num_buffers, ROWS, config.block_n),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=(config.num_turns, stages)),
            "empty": plgpu.Barrier(num_arrivals=config.tile_m // config.rows, num_barriers=stages),
        },
        interpret=interpret,
        kernel_name="gemm",
    )(jnp.asarray(tiles), a, *bs)
    return (out,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program(RingProgram):
    """A `RingProgram` with its operands and result in global memory, and its staging buffers."""

    a: Ref
    bs: tuple[Ref, ...]
    out: Ref
    buffers: Ref

    @property
    def num_products(self) -> int:
        """The blocks of A in a strip of rows, once for each B."""
        return len(self.bs) * self._num_blocks

    @property
    def _num_blocks(self):
        return self.a.shape[-1] // TILE_K

    def load(self, tile: Tile, width: int) -> None:
        """Copies A and B, for one B after the other; beyond the last column nothing is read."""
        for i, b in enumerate(self.bs):

            def load_factors(k, _, b=b, first_step=tile.step + i * self._num_blocks):
                slot, block = self.empty_slot(first_step + k), pl.ds(k * TILE_K, TILE_K)
                plgpu.copy_gmem_to_smem(
                    self.a.at[tile.batch, pl.ds(tile.row, self.config.tile_m), block],
                    self.a_ring.at[slot],
                    self.full.at[tile.turn, slot],
                )
                plgpu.copy_gmem_to_smem(
                    b.at[tile.batch, block, pl.ds(tile.col, width)],
                    self.b_ring.at[slot],
                    self.full.at[tile.turn, slot],
                )

            lax.fori_loop(0, self._num_blocks, load_factors, None)

    def b_block(self, slot: jax.Array, width: int) -> Ref:
        """B."""
        return self.b_ring.at[slot]

    def storing(self, tile: Tile, width: int) -> Callable[[jax.Array], None]:
        """Needs nothing before."""
        return functools.partial(self._store, tile)

    def _store(self, tile, product):
        num_buffers = self.config.num_buffers
        product = product.astype(self.out.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        starts = itertools.product(*(range(0, size, 64) for size in product.shape))
        for i, (row, col) in enumerate(starts):
            if i >= num_buffers:
                plgpu.wait_smem_to_gmem(num_buffers - 1, wait_read_only=True)
            buffer = self.buffers.at[self.warpgroup, i % num_buffers]
            buffer[...] = product[row : row + ROWS, col : col + self.config.block_n]
            plgpu.commit_smem()
            # What is beyond the last row and the last column is not written.
            rows = pl.ds(tile.row + self.first_row + row, ROWS)
            columns = pl.ds(tile.col + col, self.config.block_n)
            plgpu.copy_smem_to_gmem(buffer, self.out.at[tile.batch, rows, columns])
