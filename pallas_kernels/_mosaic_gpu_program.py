"""What one program of the kernel `"mosaic_gpu"` does: a multiprocessor's share of the work.

One warpgroup, the producer, copies blocks of A and B into a ring in shared memory, and after those
of a tile its blocks of C. To the ring all are steps of one sequence, so the producer is already at
the next tile while this one is stored.

The other warpgroups each hold 64 rows of the tile in their registers. They multiply, with one wgmma
always in flight; then they scale, add C and the diagonal, round, and store each block twice, the
second time transposed, through staging buffers of their own. Or two of them take turns and hold a
whole tile each: what is in the ring for the next tile is multiplied while this one is stored.

Blocks above the diagonal are skipped and those on it stored once, so no element of the result has
two writers. On the diagonal of A·Aᵀ, blocks are symmetric as they come: the elements (i, j) and
(j, i) add the same products in the same order. Those of A·Bᵀ are mirrored first.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic_gpu_config import ROWS, TILE_K, Config

type _Ref = Any  # a reference to memory, or to barriers


@dataclasses.dataclass(frozen=True)
class Program:
    """One warpgroup of one program, with the operands, the shared memory and the barriers."""

    config: Config
    widths: tuple[int, ...]  # of tiles
    mirrored_on_diagonal: bool
    warpgroup: jax.Array
    index: jax.Array
    # In global memory. `tiles` are those of the work list, in units of the blocks that are stored.
    tiles: _Ref
    coefficients: _Ref
    a: _Ref
    b: _Ref
    cs: tuple[_Ref, ...]
    outs: tuple[_Ref, ...]  # the result, and what its rounding left where that is wanted
    # In shared memory.
    a_ring: _Ref
    b_ring: _Ref
    out_buffers: _Ref
    mirror_buffers: _Ref
    # For each slot of the ring, and `full` for each turn.
    full: _Ref
    empty: _Ref

    def run(self) -> None:
        """The body of the kernel."""
        consumers = self.config.num_warpgroups

        @pl.when(self.warpgroup == consumers)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            self._produce()

        @pl.when(self.warpgroup < consumers)
        def _():
            plgpu.set_max_registers(232, action="increase")
            self._visit_tiles(self._take_turn)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _visit_tiles(self, visit: Callable) -> jax.Array:
        """Calls `visit(tile, width)` for each tile, with its width as a static number.

        Returns the number of steps of the ring.
        """

        def visit_one(index, step):
            batch, row, col, width = (self.tiles[index, self.index, i] for i in range(4))
            row, col = row * ROWS, col * self.config.block_n
            turn = lax.rem(index, self.config.num_turns)
            tile = _Tile(batch, row, col, turn, step, step + self._num_products)
            for static in self.widths:
                pl.when(width == static)(functools.partial(visit, tile, static))
            steps = self._num_products + len(self.cs) * pl.cdiv(width, TILE_K)
            return step + jnp.where(width > 0, steps, 0)

        return lax.fori_loop(0, self.tiles.shape[0], visit_one, jnp.int32(0))

    @property
    def _num_products(self):
        """The steps in which a tile is multiplied."""
        return self.a.shape[-1] // TILE_K

    def _slot(self, step):
        return lax.rem(step, self.config.num_stages)

    # The producer.

    def _produce(self):
        end = self._visit_tiles(self._load)
        # Every completion of a barrier must have been waited for when the program ends.
        lax.fori_loop(
            lax.max(end - self.config.num_stages, 0),
            end,
            lambda step, _: plgpu.barrier_wait(self.empty.at[self._slot(step)]),
            None,
        )

    def _load(self, tile, width):
        tile_m = self.config.tile_m

        def load_factors(k, _):
            slot, columns = self._empty_slot(tile.step + k), pl.ds(k * TILE_K, TILE_K)
            plgpu.copy_gmem_to_smem(
                self.a.at[tile.batch, pl.ds(tile.row, tile_m), columns],
                self.a_ring.at[slot],
                self.full.at[tile.turn, slot],
            )
            plgpu.copy_gmem_to_smem(
                self.b.at[tile.batch, pl.ds(tile.col, width), columns],
                self.b_ring.at[slot, pl.ds(0, width)],
                self.full.at[tile.turn, slot],
            )

        lax.fori_loop(0, self._num_products, load_factors, None)
        chunks = itertools.product(range(pl.cdiv(width, TILE_K)), self.cs)
        for step, (i, c) in enumerate(chunks):
            slot = self._empty_slot(tile.c_step + step)
            columns = pl.ds((lax.div(tile.col, TILE_K) + i) * TILE_K, TILE_K)
            for half in (0, tile_m // 2):  # every step is two copies
                plgpu.copy_gmem_to_smem(
                    c.at[tile.batch, pl.ds(tile.row + half, tile_m // 2), columns],
                    self.a_ring.at[slot, pl.ds(half, tile_m // 2)],
                    self.full.at[tile.turn, slot],
                )

    def _empty_slot(self, step):
        slot = self._slot(step)

        @pl.when(step >= self.config.num_stages)
        def _():
            plgpu.barrier_wait(self.empty.at[slot])

        return slot

    # The other warpgroups.

    def _take_turn(self, tile, width):
        own_turn = pl.when(not self.config.in_turns or tile.turn == self.warpgroup)
        own_turn(functools.partial(self._multiply_and_store, tile, width))

    @property
    def _first_row(self):
        return 0 if self.config.in_turns else self.warpgroup * ROWS

    def _own_rows(self, slot):
        return self.a_ring.at[slot, pl.ds(self._first_row, self.config.rows)]

    def _release(self, step):
        plgpu.barrier_arrive(self.empty.at[self._slot(step)])

    def _multiply_and_store(self, tile, width):
        # Needed in the end.
        coefficients = [self.coefficients[tile.batch, i] for i in range(2 + len(self.cs))]

        # Of plgpu's documented names, the one that its stubs do not export.
        in_registers = plgpu.ACC((self.config.rows, width), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]

        @functools.partial(pl.run_scoped, accumulator=in_registers)
        def _(accumulator):
            def multiply(k, _):
                slot = self._slot(tile.step + k)
                plgpu.barrier_wait(self.full.at[tile.turn, slot])
                b_block = self.b_ring.at[slot, pl.ds(0, width)]
                plgpu.wgmma(accumulator, self._own_rows(slot), b_block.transpose((1, 0)))
                plgpu.wgmma_wait(1)  # the one before is done

                @pl.when(k > 0)
                def _():
                    self._release(tile.step + k - 1)

            lax.fori_loop(0, self._num_products, multiply, None)
            product = accumulator[...]
            self._release(tile.step + self._num_products - 1)
            self._store(product, tile, *coefficients)

    def _store(self, product, tile, alpha, diagonal, *betas):
        row_ids, col_ids = self._ids(ROWS)
        blocks = self._blocks(product, tile, alpha, betas)
        if self.config.in_turns and self.cs:
            # At once, to leave the ring to the next tile; the barrier keeps sums from waiting.
            blocks = [(*place, lax.optimization_barrier(block)) for *place, block in blocks]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, (row, col, block) in enumerate(blocks):
            is_stored = (row < self.outs[0].shape[1]) & (col < row + ROWS)

            @pl.when(is_stored)
            def _(i=i, row=row, col=col, block=block):
                block = jnp.where(row_ids + row == col_ids + col, block + diagonal, block)
                below_diagonal = row_ids + row >= col_ids + col
                for index, out in enumerate(self.outs, i * len(self.outs)):
                    rounded = block.astype(out.dtype)
                    block -= rounded.astype(jnp.float32)
                    self._store_block(rounded, out, tile.batch, row, col, index, below_diagonal)

            @pl.when(~is_stored)  # the next blocks count what is on its way as if it were
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _ids(self, num_rows):
        """The rows and the columns of a block's elements."""
        shape, layout = (num_rows, self.config.block_n), plgpu.Layout.WGMMA
        return (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1))

    def _store_block(self, block, out, batch, row, col, index, below_diagonal):
        """Stores the block, and where it is off the diagonal its transpose, through buffers.

        `index` counts what the tile stores.
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
        def _():
            plgpu.copy_smem_to_gmem(mirror, out.at[batch, cols, rows], commit_group=False)

        plgpu.commit_smem_to_gmem_group()

    def _blocks(self, product, tile, alpha, betas):
        """Yields (row, col, block) for each block of α·product + Σ β·C."""
        block_n, width = self.config.block_n, product.shape[1]
        blocks_of_c = self._blocks_of_c(tile, width)
        for i in range(0, width, block_n):
            columns = alpha * product[:, i : i + block_n]
            for beta, c in zip(betas, blocks_of_c(i), strict=True):
                columns += beta * c.astype(jnp.float32)
            for j in range(0, self.config.rows, ROWS):
                yield tile.row + self._first_row + j, tile.col + i, columns[j : j + ROWS]

    def _blocks_of_c(self, tile, width):
        """Returns a function of 0, block_n, 2·block_n, …: the block of each C from that column on.

        C comes in chunks of TILE_K columns. Where the width is no multiple of that, tiles start
        where a chunk does, or in the middle of one.
        """
        block_n = self.config.block_n
        chunks = []

        def chunk(j):
            if j == len(chunks):
                chunks.append([])
                for step in range(j * len(self.cs), (j + 1) * len(self.cs)):
                    slot = self._slot(tile.c_step + step)
                    plgpu.barrier_wait(self.full.at[tile.turn, slot])
                    chunks[j].append(plgpu.load(self._own_rows(slot), layout=plgpu.Layout.WGMMA))
                    plgpu.commit_smem()  # all threads have read it
                    self._release(tile.c_step + step)
            return chunks[j]

        def blocks(column):
            j, offset = divmod(column, TILE_K)
            here = [c[:, offset : offset + block_n] for c in chunk(j)]
            if width % TILE_K == 0:
                return here
            if offset:
                shifted = [c[:, :block_n] for c in chunk(j + 1)]
            else:
                shifted = [c[:, block_n:] for c in chunk(j)]
            _, col_ids = self._ids(self.config.rows)
            is_shifted = col_ids < lax.rem(tile.col, TILE_K)
            return [jnp.where(is_shifted, *pair) for pair in zip(shifted, here, strict=True)]

        return blocks


class _Tile(NamedTuple):
    """A tile of the work list, the steps of the ring before it, and before its C."""

    batch: jax.Array
    row: jax.Array
    col: jax.Array
    turn: jax.Array
    step: jax.Array
    c_step: jax.Array
