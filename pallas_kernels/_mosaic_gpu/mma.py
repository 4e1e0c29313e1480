"""Implementation `"mosaic_gpu_mma"`: the kernels of `products`, by mma and cp.async.

GPUs since Ampere have these instructions. One warpgroup holds a tile in its registers, fills its
own ring, and stores from registers. Meanwhile another program of the multiprocessor multiplies,
where shared memory has room for two.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.interpreters.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_kernels import device
from pallas_kernels._mosaic_gpu import config as configs
from pallas_kernels._mosaic_gpu import products, ring
from pallas_kernels._mosaic_gpu.config import TILE_K
from pallas_kernels._mosaic_gpu.ring import Ref, RingProgram, Tile
from pallas_kernels._mosaic_gpu.work_list import lower_triangle
from pallas_kernels._stacked import Arrays


def syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrices: Arrays,
    coefficients: Arrays,
    **options: Any,
) -> Arrays:
    """Computes what `_reference.syrkx` defines, with the options of `products.syrkx`."""
    *batch, m, n = a_matrix.shape
    shape = math.prod(batch), m, n
    measured = configs.measured_config(configs.MMA_SYRKX_CONFIGS, shape, addend=bool(c_matrices))
    num_tiles = math.prod(batch) * len(lower_triangle(m, 128, 128))
    config = measured or configs.MmaSyrkxConfig(128, _tile_n(num_tiles), 2)
    chosen = {"program": MmaSyrkxProgram, "config": config, "num_programs": _num_programs()}
    return products.syrkx(a_matrix, b_matrix, c_matrices, coefficients, **chosen | options)


def gemm(a_matrix: jax.Array, b_matrix: jax.Array, **options: Any) -> jax.Array:
    """A·B, with the options of `products.gemm`."""
    *batch, m, _ = a_matrix.shape
    num_tiles = math.prod(batch) * pl.cdiv(m, 128) * pl.cdiv(b_matrix.shape[-1], 128)
    config = configs.MmaGemmConfig(128, _tile_n(num_tiles), 2)
    chosen = {"program": MmaGemmProgram, "config": config, "num_programs": _num_programs()}
    return products.gemm(a_matrix, b_matrix, **chosen | options)


def _num_programs() -> int:
    """Returns how many run at a time. Where shared memory is 100 KB, it has room for one each."""
    here = device.current()
    return here.num_multiprocessors * (2 if here.capability in {(8, 0), (9, 0), (10, 0)} else 1)


def _tile_n(num_tiles: int) -> int:
    """Returns the width of tiles, of which there would be so many of 128×128."""
    return 128 if num_tiles >= _num_programs() else 64


class MmaProgram(RingProgram):
    """A `RingProgram` of one warpgroup."""

    # Two warps share rows, and two share columns: Pallas itself gives each warp rows of its own,
    # which takes more registers and reads B twice as often.
    layout, lhs, rhs = (
        of(jnp.dtype("bfloat16"), m_warps=2)  # or float16
        for of in (plgpu.Layout.MMA_ACC, plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS)
    )

    def run(self) -> None:
        """Does all of the program's work."""
        self.visit_tiles(self._multiply_and_store)

    def _multiply_and_store(self, tile: Tile) -> None:
        for k in range(self.config.num_stages - 1):
            self._load_step(tile, jnp.int32(k))
        store = self.storing(tile)
        sums = jnp.zeros((self.config.tile_m, self.config.tile_n), jnp.float32)
        sums = plgpu.layout_cast(sums, self.layout)
        multiply = functools.partial(self._multiply, tile)
        store(lax.fori_loop(0, self.num_products(tile), multiply, sums))
        self.commit()  # all threads have read the ring

    def _multiply(self, tile: Tile, k: jax.Array, sums: jax.Array) -> jax.Array:
        slot = self.full_slot(tile, tile.step + k)
        a = plgpu.load(self.a_ring.at[slot], layout=self.lhs)
        b = plgpu.load(self.b_block(slot), layout=self.rhs)
        return self.mma(sums, a, b)

    def mma(self, sums: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns sums + a·b."""
        result = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, self.layout)
        inline = plgpu.inline_mgpu(arg_types=(self.layout, self.lhs, self.rhs), return_type=result)
        return inline(lambda _, *operands: mgpu.mma(*operands))(sums, a, b)

    # Copies to the ring. Each step has two groups of them, since waiting counts groups.

    def _load_step(self, tile: Tile, k: jax.Array) -> None:
        """Starts the copies of the tile's step k, of those that it has."""
        slot, columns = self.slot(tile.step + k), pl.ds(k * TILE_K, TILE_K)
        number = self.num_products(tile)

        def load_factors(stack: int, index: jax.Array) -> None:
            self.load_factors(tile, stack, index, slot, columns)

        pl.when(k < number)(lambda: ring.in_stack(self.stacks, tile, load_factors))
        for step, other in enumerate(self.others):
            pl.when(k == number + step)(functools.partial(self.load_other, tile, slot, other))
        pl.when(k >= number + len(self.others))(self.skip_copies)

    def full_slot(self, tile: Tile, step: jax.Array) -> jax.Array:
        """Waits for a step, and starts the copies of a later one to the slot before."""
        slot = self.slot(step)
        self.await_copies(tile, slot)
        self._load_step(tile, step - tile.step + self.config.num_stages - 1)
        return slot

    def give_back(self, step: jax.Array) -> None:
        """Does nothing: the next `full_slot` waits until all threads have read this one."""

    def copy(self, tile: Tile, slot: jax.Array, source: Ref, block: Ref) -> None:
        """Starts a copy by cp.async, which Pallas itself has for compute capability 8 alone."""
        del tile, slot
        (indexer,) = source.transforms
        index, rows, cols = indexer.indices
        starts = [jnp.asarray(x, jnp.int32) for x in (index, rows.start, cols.start)]
        transforms = ring.transforms(block.dtype, block.shape[-1])
        types = plgpu.RefType(), plgpu.RefType(transforms), *[plgpu.Layout.WG_SPLAT(())] * 3

        @plgpu.inline_mgpu(arg_types=types)
        def copy(ctx: Any, source: Any, block: Any, *starts: Any) -> None:
            places = (arith.index_cast(ir.IndexType.get(), x.registers.item()) for x in starts)
            index, row, col = places
            ctx.async_copy(
                src_ref=source,
                dst_ref=block,
                gmem_slice=(index, mgpu.ds(row, rows.size), mgpu.ds(col, cols.size)),
                gmem_transform=mgpu.TileTransform(transforms[0].tiling),
                swizzle=transforms[1].swizzle,
                implementation=mgpu.AsyncCopyImplementation.CP_ASYNC,
            )

        copy(source.ref, block, *starts)

    def skip_copies(self) -> None:
        """Counts a step without copies."""

        @plgpu.inline_mgpu()
        def skip(_: Any) -> None:
            nvvm.cp_async_commit_group()
            nvvm.cp_async_commit_group()

        skip()  # pyright: ignore[reportCallIssue]

    def await_copies(self, tile: Tile, slot: jax.Array) -> None:
        """Waits for the copies of a step. All threads have read the slot before."""
        del tile, slot
        allowed = 2 * (self.config.num_stages - 2)
        plgpu.inline_mgpu()(lambda ctx: ctx.await_cp_async_copy(allowed))()

    # Stores, which are not asynchronous.

    def commit(self) -> None:
        """Waits for all threads. `plgpu.commit_smem` has a fence that came with Hopper."""
        plgpu.inline_mgpu()(lambda _: utils.warpgroup_barrier())()

    def start_store(self, buffer: Ref, block: Ref) -> None:
        """Copies a buffer to global memory."""
        layout = plgpu.Layout.SMEM_GMEM_COPY(buffer.shape, buffer.dtype, 128)
        block[...] = plgpu.load(buffer, layout=layout)

    def end_group(self) -> None:
        """Does nothing."""

    def await_stores(self, num_groups: int = 0) -> None:
        """Waits until all threads have stored."""
        del num_groups
        self.commit()


class MmaSyrkxProgram(MmaProgram, products.SyrkxProgram):
    """A program of symmetric products by mma."""

    def stage(self, block: jax.Array, index: int, below_diagonal: jax.Array) -> tuple[Ref, Ref]:
        """Writes a rounded block and its transpose to buffers: loads transpose on all GPUs."""
        direct, mirror = self.free_buffer(self.out_buffers, index), self.mirror_buffers.at[0, 0]
        direct[...] = block
        self.commit()
        mirrored = plgpu.load(direct.transpose((1, 0)), layout=self.layout)
        mirror[...] = mirrored
        if self.mirrored_on_diagonal:
            self.commit()
            direct[...] = jnp.where(below_diagonal, block, mirrored)
        self.commit()
        return direct, mirror


class MmaGemmProgram(MmaProgram, products.GemmProgram):
    """A program of other products by mma."""
