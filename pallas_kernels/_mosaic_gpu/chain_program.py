"""How a chain's results are stored: the consumers' part. `chain_loads` says how programs work."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic_gpu.chain_loads import ChainLoads
from pallas_kernels._mosaic_gpu.chain_plan import COUNT, RESIDUAL, RESULT
from pallas_kernels._mosaic_gpu.config import ROWS, TILE_K
from pallas_kernels._mosaic_gpu.ring import Ref, Tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainProgram(ChainLoads):
    """A program of chains."""

    def multiply(self, tile: Tile, width: int, accumulator: Ref) -> None:
        """Multiplies this warpgroup's rows of the tile, on the diagonal by their own strip."""

        def multiply_by(ring: Ref) -> None:
            self.accumulate(tile, accumulator, lambda slot: ring.at[slot].transpose((1, 0)))

        pl.when(self.is_diagonal(tile))(functools.partial(multiply_by, self.a_ring))
        pl.when(~self.is_diagonal(tile))(functools.partial(multiply_by, self.b_ring))

    def storing(self, tile: Tile, width: int) -> Callable[[jax.Array], None]:
        """Reads the product's coefficients, and returns what stores the tile."""
        coefficients = [
            self.coefficients[tile.batch, tile.product, i]
            for i in range(self.coefficients.shape[-1])
        ]
        return lambda product: self._store(product, tile, *coefficients)

    def _store(
        self,
        product: jax.Array,
        tile: Tile,
        alpha: jax.Array,
        diagonal: jax.Array,
        *betas: jax.Array,
    ) -> None:
        """Finishes, rounds and stores the sums of this warpgroup's rows, block by block."""
        place, residual_place = (self.plan[tile.product, i] for i in (RESULT, RESIDUAL))
        row_ids, col_ids = (
            plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE_K), axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        blocks = [
            (tile.row + self.first_row + j, tile.col + i * TILE_K, columns[j : j + ROWS])
            for i, columns in enumerate(self._with_addends(product, tile, alpha, betas))
            for j in range(0, self.config.rows, ROWS)
        ]
        for i, (row, col, block) in enumerate(blocks):
            is_stored = (row < self.out.shape[1]) & (col < row + ROWS)

            @pl.when(is_stored)
            def _(
                i: int = i, row: jax.Array = row, col: jax.Array = col, block: jax.Array = block
            ) -> None:
                if i >= self.config.num_buffers:
                    plgpu.wait_smem_to_gmem(self.config.num_buffers - 1, wait_read_only=True)
                buffer = self.buffers.at[self.warpgroup, i % self.config.num_buffers]
                store = functools.partial(self._store_block, tile, row, col, buffer)
                block = jnp.where(row_ids + row == col_ids + col, block + diagonal, block)
                rounded = block.astype(self.out.dtype)
                store(rounded, place)

                @pl.when(residual_place >= 0)
                def _() -> None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    store(
                        (block - rounded.astype(jnp.float32)).astype(rounded.dtype), residual_place
                    )
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when(~is_stored)  # later blocks count on the buffers as if this one were stored
            def _() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        plgpu.wait_smem_to_gmem(0)  # until all is in global memory
        self.count(tile)

    def count(self, tile: Tile) -> None:
        """Counts this warpgroup's part of the tile as stored."""
        plgpu.semaphore_signal(self.counter(tile.batch, tile.product), memory_scope="gpu")

    def _with_addends(
        self, product: jax.Array, tile: Tile, alpha: jax.Array, betas: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Returns α·product + Σ β·C, for each TILE_K columns.

        Barriers keep the compiler from fusing what the kernel of one product does not fuse.
        """
        starts = range(0, self.config.tile_n, TILE_K)
        sums = tuple(lax.optimization_barrier(alpha * product[:, i : i + TILE_K]) for i in starts)
        rows = pl.ds(self.first_row, self.config.rows)

        def add(number: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            step = tile.step + self.num_products() + number
            slot = self.slot(step)
            plgpu.barrier_wait(self.full.at[tile.turn, slot])
            cs = [
                plgpu.load(ring.at[slot, rows], layout=plgpu.Layout.WGMMA)
                for ring in (self.a_ring, self.b_ring)[: len(sums)]
            ]
            plgpu.commit_smem()  # all threads have read it
            self.release(step)
            beta = jnp.float32(0)
            for i, candidate in enumerate(betas):
                beta = jnp.where(number == i, candidate, beta)
            return tuple(
                total + beta * c.astype(jnp.float32) for total, c in zip(sums, cs, strict=True)
            )

        sums = lax.fori_loop(0, self.plan[tile.product, COUNT], add, sums)
        return tuple(map(lax.optimization_barrier, sums))

    def _store_block(
        self,
        tile: Tile,
        row: jax.Array,
        col: jax.Array,
        buffer: Ref,
        block: jax.Array,
        place: jax.Array,
    ) -> None:
        """Stores a rounded block, and off the diagonal also its transpose, through a buffer."""
        direct, mirror = buffer.at[pl.ds(0, ROWS)], buffer.at[pl.ds(ROWS, ROWS)]
        mirror.transpose((1, 0))[...] = block
        direct[...] = block
        plgpu.commit_smem()
        rows, cols = pl.ds(row, ROWS), pl.ds(col, TILE_K)

        def copy(stack: Ref, matrix: jax.Array) -> None:
            plgpu.copy_smem_to_gmem(direct, stack.at[matrix, rows, cols], commit_group=False)

            @pl.when(col < row)
            def _() -> None:
                plgpu.copy_smem_to_gmem(mirror, stack.at[matrix, cols, rows], commit_group=False)

        pl.when(place < 0)(functools.partial(copy, self.out, tile.batch))
        pl.when(place >= 0)(functools.partial(copy, self.terms, self.term(place, tile)))
        plgpu.commit_smem_to_gmem_group()
