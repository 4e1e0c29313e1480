"""The kernels of `products` by TMA and tcgen05, for GPUs of compute capability 10.

One warpgroup copies, one multiplies, and one stores. Sums are in tensor memory, which has room for
two tiles. So the next tile is multiplied while this tile is stored.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic_gpu import config as configs
from pallas_kernels._mosaic_gpu import products
from pallas_kernels._mosaic_gpu.config import ROWS
from pallas_kernels._mosaic_gpu.ring import Ref, RingProgram, Tile, ids
from pallas_kernels._stacked import Arrays


def syrkx(a_matrix: jax.Array, *operands: Any, **options: Any) -> Arrays:
    """Computes what `_reference.syrkx` defines, with the options of `products.syrkx`."""
    chosen = {"program": Tcgen05SyrkxProgram, "config": configs.Tcgen05SyrkxConfig()}
    return products.syrkx(a_matrix, *operands, **chosen | options)


def gemm(a_matrix: jax.Array, b_matrix: jax.Array, **options: Any) -> jax.Array:
    """A·B, with the options of `products.gemm`."""
    chosen = {"program": Tcgen05GemmProgram, "config": configs.Tcgen05GemmConfig()}
    return products.gemm(a_matrix, b_matrix, **chosen | options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tcgen05Program(RingProgram):
    """A `RingProgram` whose sums are in tensor memory. A tile's turn says in which place."""

    sums: Ref
    done: Ref  # barriers of each place of sums
    free: Ref  # barriers of each place of sums

    layout = plgpu.Layout.TCGEN05
    max_registers = 256

    @staticmethod
    def scratch(config: configs.RingConfig) -> dict[str, Any]:
        """Returns the types of the barriers and of the sums."""
        ordered = functools.partial(plgpu.Barrier, num_arrivals=1, orders_tensor_core=True)
        num_turns = config.num_turns
        return RingProgram.scratch(config) | {
            "empty": ordered(num_barriers=config.num_stages),
            "sums": plgpu.TMEM((config.tile_m, num_turns * config.tile_n), jnp.float32),
            "done": ordered(num_barriers=num_turns),
            "free": ordered(num_barriers=num_turns),
        }

    def run(self) -> None:
        """Does this warpgroup's work. The first one stores, and the second one copies."""
        super().run()

        @pl.when(self.warpgroup == self.config.num_warpgroups + 1)
        def _() -> None:
            turns = range(self.config.num_turns)
            for turn in turns:
                plgpu.barrier_arrive(self.free.at[turn])
            self.visit_tiles(self._multiply)
            # A program must have waited for every completion of a barrier before it ends.
            for turn in turns:
                plgpu.barrier_wait(self.free.at[turn])

    def _place(self, tile: Tile) -> Ref:
        """Returns where the tile's sums are."""
        width = self.config.tile_n
        return self.sums.at[:, pl.ds(tile.turn * width, width)]

    def _multiply(self, tile: Tile) -> None:
        """Adds up the products of all steps. Slots are given back when these are done."""
        plgpu.barrier_wait(self.free.at[tile.turn])

        def multiply(k: jax.Array, _: None) -> None:
            slot = self.slot(tile.step + k)
            plgpu.barrier_wait(self.full.at[0, slot])
            a, b, is_read = self.a_ring.at[slot], self.b_block(slot), self.empty.at[slot]
            plgpu.tcgen05_mma(self._place(tile), a, b, is_read, accumulate=k > 0)

        lax.fori_loop(0, self.num_products(tile), multiply, None)
        plgpu.tcgen05_commit_arrive(self.done.at[tile.turn])

    def _take_turn(self, tile: Tile) -> None:
        """Reads and stores the tile's sums."""
        store = self.storing(tile)
        plgpu.barrier_wait(self.done.at[tile.turn])
        product = plgpu.async_load_tmem(self._place(tile), layout=self.layout)
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(self.free.at[tile.turn])
        store(product)

    # A barrier of each slot for the warpgroup that multiplies, and one for the one that stores.

    def load(self, tile: Tile) -> None:
        """Fills the slots of the tile's steps."""
        super().load(tile._replace(turn=jnp.int32(0)))

    def load_other(self, tile: Tile, slot: jax.Array, other: Any) -> None:
        """Copies one of `others`."""
        super().load_other(tile._replace(turn=jnp.int32(1)), slot, other)

    def full_slot(self, tile: Tile, step: jax.Array) -> jax.Array:
        """Waits until one of `others` has come, and returns its slot."""
        return super().full_slot(tile._replace(turn=jnp.int32(1)), step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tcgen05SyrkxProgram(Tcgen05Program, products.SyrkxProgram):
    """A program of symmetric products by tcgen05, whose blocks have 128 rows."""

    def copy_out(self, direct: Ref, mirror: Ref, stack: Ref, *place: jax.Array) -> None:
        """Stores a block and its transpose. A square on the diagonal is part of one of them."""
        matrix, row, col = place
        if self.mirrored_on_diagonal:
            half = pl.ds(pl.multiple_of(col - row, ROWS), ROWS)
            squares = direct.at[half], mirror.at[:, half]
            pl.when(col >= row)(functools.partial(self._mirror, *squares))
        rows, lower, cols = pl.ds(row, 2 * ROWS), pl.ds(row + ROWS, ROWS), pl.ds(col, ROWS)
        below = direct.at[pl.ds(ROWS, ROWS)], stack.at[matrix, lower, cols]
        pl.when(col < row)(lambda: self.start_store(direct, stack.at[matrix, rows, cols]))
        pl.when(col >= row)(lambda: self.start_store(*below))
        pl.when(col <= row)(lambda: self.start_store(mirror, stack.at[matrix, cols, rows]))

    def _mirror(self, square: Ref, mirror: Ref) -> None:
        """Mirrors the lower triangle of a square on the diagonal, in both buffers."""
        rows, cols = ids(*square.shape)
        whole, mirrored = (plgpu.load(x, layout=plgpu.Layout.WGMMA) for x in (square, mirror))
        square[...] = mirror[...] = jnp.where(rows >= cols, whole, mirrored)
        self.commit()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tcgen05GemmProgram(Tcgen05Program, products.GemmProgram):
    """A program of other products by tcgen05."""
