"""What one program of the kernel `"mosaic_gpu"` of the symmetric products does with a tile.

The blocks of C come through the ring after the blocks of A and B. Then the sums are scaled, and C
and the diagonal are added. Each block is rounded and stored twice, the second time transposed,
through staging buffers of its warpgroup.

Blocks above the diagonal are skipped. Blocks on the diagonal are stored once, so no element of the
result has two writers. The kernel makes blocks on the diagonal symmetric:

- A·Aᵀ gives symmetric blocks: the elements (i, j) and (j, i) add the same products in the same
  order.
- A·Bᵀ does not, so the lower half of the block is mirrored.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic_gpu.config import ROWS, TILE_K
from pallas_kernels._mosaic_gpu.ring import Ref, RingProgram, Tile, in_stack, width_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyrkxProgram(RingProgram):
    """A `RingProgram` with its operands and results in global memory, and its staging buffers.

    A and B may be in several stacks `(batch, m, n)`, each with an n of its own.
    """

    mirrored_on_diagonal: bool
    coefficients: Ref
    a: tuple[Ref, ...]
    b: tuple[Ref, ...]
    cs: tuple[Ref, ...]
    outs: tuple[Ref, ...]  # the result, then its residual if wanted
    out_buffers: Ref
    mirror_buffers: Ref

    def num_products(self, tile: Tile) -> int | jax.Array:
        """Returns the number of blocks of the tile's A in a strip of rows."""
        return width_of(self.a, tile, unit=TILE_K)

    def num_others(self, width: jax.Array) -> jax.Array:
        """Returns the number of blocks of all C."""
        return len(self.cs) * pl.cdiv(width, TILE_K)

    def load(self, tile: Tile, width: int) -> None:
        """Copies A and B, then one C after another, in chunks of TILE_K columns."""
        tile_m = self.config.tile_m

        def load_factors(number: int, index: jax.Array) -> None:
            a, b = self.a[number], self.b[number]

            def load(k: jax.Array, _: None) -> None:
                slot, columns = self.empty_slot(tile.step + k), pl.ds(k * TILE_K, TILE_K)
                plgpu.copy_gmem_to_smem(
                    a.at[index, pl.ds(tile.row, tile_m), columns],
                    self.a_ring.at[slot],
                    self.full.at[tile.turn, slot],
                )
                plgpu.copy_gmem_to_smem(
                    b.at[index, pl.ds(tile.col, width), columns],
                    self.b_ring.at[slot, pl.ds(0, width)],
                    self.full.at[tile.turn, slot],
                )

            lax.fori_loop(0, a.shape[-1] // TILE_K, load, None)

        in_stack(self.a, tile, load_factors)
        first = tile.step + self.num_products(tile)
        chunks = itertools.product(self.cs, range(pl.cdiv(width, TILE_K)))
        for step, (c, i) in enumerate(chunks):
            slot = self.empty_slot(first + step)
            columns = pl.ds((lax.div(tile.col, TILE_K) + i) * TILE_K, TILE_K)
            batch = tile.batch if c.shape[0] > 1 else 0  # one C may serve for all
            for half in (0, tile_m // 2):  # every step is two copies
                plgpu.copy_gmem_to_smem(
                    c.at[batch, pl.ds(tile.row + half, tile_m // 2), columns],
                    self.a_ring.at[slot, pl.ds(half, tile_m // 2)],
                    self.full.at[tile.turn, slot],
                )

    def b_block(self, slot: jax.Array, width: int) -> Ref:
        """Returns the block of Bᵀ in a slot."""
        return self.b_ring.at[slot, pl.ds(0, width)].transpose((1, 0))

    def storing(self, tile: Tile, width: int) -> Callable[[jax.Array], None]:
        """Reads the coefficients, and returns what stores the tile."""
        coefficients = [self.coefficients[tile.batch, i] for i in range(2 + len(self.cs))]
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
        row_ids, col_ids = self._ids(ROWS)
        # Without barriers, some configs add the diagonal to α·A·Aᵀ in one instruction, which rounds
        # once. In other configs sums wait for the buffers.
        blocks = [
            (row, col, lax.optimization_barrier(block))
            for row, col, block in self._blocks(product, tile, alpha, betas)
        ]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, (row, col, block) in enumerate(blocks):
            is_stored = (row < self.outs[0].shape[1]) & (col < row + ROWS)

            @pl.when(is_stored)
            def _(
                i: int = i, row: jax.Array = row, col: jax.Array = col, block: jax.Array = block
            ) -> None:
                block = jnp.where(row_ids + row == col_ids + col, block + diagonal, block)
                below_diagonal = row_ids + row >= col_ids + col
                for index, out in enumerate(self.outs, i * len(self.outs)):
                    rounded = block.astype(out.dtype)
                    block -= rounded.astype(jnp.float32)
                    self._store_block(rounded, out, tile.batch, row, col, index, below_diagonal)

            @pl.when(~is_stored)  # later blocks count on the buffers as if this one were stored
            def _() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _ids(self, num_rows: int) -> Iterator[jax.Array]:
        """Returns the rows and the columns of a block's elements."""
        shape, layout = (num_rows, self.config.block_n), plgpu.Layout.WGMMA
        return (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1))

    def _store_block(
        self,
        block: jax.Array,
        out: Ref,
        batch: jax.Array,
        row: jax.Array,
        col: jax.Array,
        index: int,
        below_diagonal: jax.Array,
    ) -> None:
        """Stores a block, and off the diagonal also its transpose, through staging buffers.

        Args:
            block: rounded, `(ROWS, block_n)`.
            out: the result in global memory.
            batch, row, col: where the block begins.
            index: the number of blocks that the tile has stored before.
            below_diagonal: which elements are on or below the diagonal of the result.
        """
        num_buffers = self.config.num_buffers
        if index >= num_buffers:
            plgpu.wait_smem_to_gmem(num_buffers - 1, wait_read_only=True)
        buffer = (self.warpgroup, index % num_buffers)
        direct, mirror = self.out_buffers.at[buffer], self.mirror_buffers.at[buffer]
        mirror.transpose((1, 0))[...] = block
        if self.mirrored_on_diagonal:
            plgpu.commit_smem()  # all threads have written it
            mirrored = plgpu.load(mirror, layout=plgpu.Layout.WGMMA)
            block = jnp.where(below_diagonal, block, mirrored)
        direct[...] = block
        plgpu.commit_smem()
        rows, cols = pl.ds(row, ROWS), pl.ds(col, self.config.block_n)
        plgpu.copy_smem_to_gmem(direct, out.at[batch, rows, cols], commit_group=False)

        @pl.when(col < row)
        def _() -> None:
            plgpu.copy_smem_to_gmem(mirror, out.at[batch, cols, rows], commit_group=False)

        plgpu.commit_smem_to_gmem_group()

    def _blocks(
        self, product: jax.Array, tile: Tile, alpha: jax.Array, betas: tuple[jax.Array, ...]
    ) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        """Returns (row, col, block) for each block of α·product + Σ β·C."""
        block_n, width = self.config.block_n, product.shape[1]
        # With the barrier, sums are fused as in the kernel of a chain.
        sums = [
            lax.optimization_barrier(alpha * product[:, i : i + block_n])
            for i in range(0, width, block_n)
        ]
        for index, beta in enumerate(betas):
            for i, c in enumerate(self._blocks_of_c(index, tile, width)):
                sums[i] += beta * c.astype(jnp.float32)
        return [
            (tile.row + self.first_row + j, tile.col + i * block_n, columns[j : j + ROWS])
            for i, columns in enumerate(sums)
            for j in range(0, self.config.rows, ROWS)
        ]

    def _blocks_of_c(self, index: int, tile: Tile, width: int) -> Iterator[jax.Array]:
        """Yields the block of the C of that index for each `block_n` columns.

        C comes in chunks of TILE_K columns. Each chunk is read when a block needs it. Where the
        width is no multiple of TILE_K, tiles start at the start or in the middle of a chunk.
        """
        block_n, num_chunks = self.config.block_n, pl.cdiv(width, TILE_K)
        first_step = tile.step + self.num_products(tile) + index * num_chunks

        @functools.cache
        def chunk(j: int) -> jax.Array:
            slot = self.slot(first_step + j)
            plgpu.barrier_wait(self.full.at[tile.turn, slot])
            values = plgpu.load(self.own_rows(slot), layout=plgpu.Layout.WGMMA)
            plgpu.commit_smem()  # all threads have read it
            self.release(first_step + j)
            return values

        for column in range(0, width, block_n):
            j, offset = divmod(column, TILE_K)
            block = chunk(j)[:, offset : offset + block_n]
            if width % TILE_K:
                shifted = chunk(j + 1)[:, :block_n] if offset else chunk(j)[:, block_n:]
                _, col_ids = self._ids(self.config.rows)
                block = jnp.where(col_ids < lax.rem(tile.col, TILE_K), shifted, block)
            yield block
