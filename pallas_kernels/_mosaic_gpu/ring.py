"""What one program of a Mosaic GPU kernel does: a multiprocessor's share of the work.

One warpgroup is the producer. For each tile it copies blocks of A and B into a ring in shared
memory, then what else its kernel needs. The steps of all tiles are one sequence in the ring, so the
producer already works on the next tile while this tile is stored.

The other warpgroups multiply and store, with one wgmma always in flight. Either each holds 64 rows
of the tile in its registers, or two of them take turns and hold a whole tile each. In turns, one
warpgroup multiplies what is in the ring for the next tile while the other stores this tile.

Sums run over the columns of A in order, whatever the tile. So a product depends neither on the
config nor on the other matrices of the stack, to the last bit.
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

from pallas_kernels._mosaic_gpu.config import ROWS, RingConfig

type Ref = Any  # a reference to memory, or to barriers


class Tile(NamedTuple):
    """A tile of the work list.

    Attributes:
        batch, row, col: where the tile begins.
        turn: which warpgroup multiplies it, where tiles are in turns.
        step: the number of steps of the ring before the tile.
        product: which product of a chain it is of.
    """

    batch: jax.Array
    row: jax.Array
    col: jax.Array
    turn: jax.Array
    step: jax.Array
    product: int | jax.Array = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingProgram:
    """One warpgroup of one program, with the ring and its barriers.

    Attributes:
        config: the tile and the ring.
        widths: the widths that tiles have.
        warpgroup: which of the program's warpgroups this is.
        index: which of the programs this is.
        tiles: the work list in global memory, in units of the blocks that are stored.
        a_ring, b_ring: the ring in shared memory.
        full: barriers of each slot of the ring, for each turn.
        empty: barriers of each slot of the ring.
    """

    config: RingConfig
    widths: tuple[int, ...]
    warpgroup: jax.Array
    index: jax.Array
    tiles: Ref
    a_ring: Ref
    b_ring: Ref
    full: Ref
    empty: Ref

    # Each kernel defines these.

    def num_products(self, tile: Tile) -> int | jax.Array:
        """Returns the number of steps in which the tile is multiplied."""
        raise NotImplementedError

    def num_others(self, width: jax.Array) -> jax.Array | int:
        """Returns the number of steps after the products, for a tile of that width."""
        del width
        return 0

    def load(self, tile: Tile, width: int) -> None:
        """Fills the slots of the tile's steps, each with two copies."""
        raise NotImplementedError

    def b_block(self, slot: jax.Array, width: int) -> Ref:
        """Returns the block of B in a slot, `(TILE_K, width)`."""
        raise NotImplementedError

    def storing(self, tile: Tile, width: int) -> Callable[[jax.Array], None]:
        """Returns what stores the tile's sums. It is called before the sums are computed."""
        raise NotImplementedError

    # All kernels share these.

    def run(self) -> None:
        """Does this warpgroup's work: the body of the kernel."""
        consumers = self.config.num_warpgroups

        @pl.when(self.warpgroup == consumers)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            end = self.visit_tiles(self.load)
            # A program must have waited for every completion of a barrier before it ends.
            lax.fori_loop(
                lax.max(end - self.config.num_stages, 0),
                end,
                lambda step, _: plgpu.barrier_wait(self.empty.at[self.slot(step)]),
                None,
            )

        @pl.when(self.warpgroup < consumers)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            self.visit_tiles(self._take_turn)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def visit_tiles(self, visit: Callable[[Tile, int], None]) -> jax.Array:
        """Calls `visit(tile, width)` for each tile, with its width as a static number.

        Returns:
            The number of steps of the ring.
        """

        def visit_one(index: jax.Array, step: jax.Array) -> jax.Array:
            batch, row, col, width = (self.tiles[index, self.index, i] for i in range(4))
            turn = lax.rem(index, self.config.num_turns)
            tile = Tile(batch, row * ROWS, col * self.config.block_n, turn, step)
            for static in self.widths:
                pl.when(width == static)(functools.partial(visit, tile, static))
            steps = self.num_products(tile) + self.num_others(width)
            return step + jnp.where(width > 0, steps, 0)

        return lax.fori_loop(0, self.tiles.shape[0], visit_one, jnp.int32(0))

    def slot(self, step: jax.Array) -> jax.Array:
        """Returns the slot of the ring that the step is in."""
        return lax.rem(step, self.config.num_stages)

    def empty_slot(self, step: jax.Array) -> jax.Array:
        """Waits until the step's slot is empty, and returns it."""
        slot = self.slot(step)

        @pl.when(step >= self.config.num_stages)
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[slot])

        return slot

    def release(self, step: jax.Array) -> None:
        """Gives the step's slot back to the producer."""
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    @property
    def first_row(self) -> int | jax.Array:
        """The first of this warpgroup's rows of a tile."""
        return 0 if self.config.in_turns else self.warpgroup * ROWS

    def own_rows(self, slot: jax.Array) -> Ref:
        """Returns this warpgroup's rows of a slot in the ring of A."""
        return self.a_ring.at[slot, pl.ds(self.first_row, self.config.rows)]

    def _take_turn(self, tile: Tile, width: int) -> None:
        """Computes the tile, unless it is the other warpgroup's turn."""
        own_turn = pl.when(not self.config.in_turns or tile.turn == self.warpgroup)
        own_turn(functools.partial(self._multiply_and_store, tile, width))

    def _multiply_and_store(self, tile: Tile, width: int) -> None:
        """Computes this warpgroup's rows of the tile."""
        store = self.storing(tile, width)
        # The stubs of plgpu do not export this documented name.
        in_registers = plgpu.ACC((self.config.rows, width), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]

        @functools.partial(pl.run_scoped, accumulator=in_registers)
        def _(accumulator: Ref) -> None:
            self.multiply(tile, width, accumulator)
            product = accumulator[...]
            self.release(tile.step + self.num_products(tile) - 1)
            store(product)

    def multiply(self, tile: Tile, width: int, accumulator: Ref) -> None:
        """Multiplies this warpgroup's rows of the tile."""
        self.accumulate(tile, accumulator, functools.partial(self.b_block, width=width))

    def accumulate(self, tile: Tile, accumulator: Ref, b_block: Callable[[jax.Array], Ref]) -> None:
        """Adds up the products of all steps, with the block of B that `b_block(slot)` is."""

        def multiply(k: jax.Array, _: None) -> None:
            slot = self.slot(tile.step + k)
            plgpu.barrier_wait(self.full.at[tile.turn, slot])
            plgpu.wgmma(accumulator, self.own_rows(slot), b_block(slot))
            plgpu.wgmma_wait(1)  # the wgmma of the step before is done

            @pl.when(k > 0)
            def _() -> None:
                self.release(tile.step + k - 1)

        lax.fori_loop(0, self.num_products(tile), multiply, None)


def width_of(stacks: tuple[Ref, ...], tile: Tile, unit: int = 1) -> int | jax.Array:
    """Returns the number of columns, in this unit, of the stack that has the tile's matrix."""
    width = stacks[0].shape[-1] // unit
    for stack, begin in zip(stacks[1:], _begins_of(stacks)[1:], strict=True):
        width = jnp.where(tile.batch >= begin, stack.shape[-1] // unit, width)
    return width


def in_stack(
    stacks: tuple[Ref, ...], tile: Tile, function: Callable[[int, jax.Array], None]
) -> None:
    """Calls `function(number, index)` for the stack that has the tile's matrix, at that index."""
    if len(stacks) == 1:
        function(0, tile.batch)
        return
    for number, begin in enumerate(_begins_of(stacks)):
        is_inside = (tile.batch >= begin) & (tile.batch < begin + stacks[number].shape[0])
        pl.when(is_inside)(functools.partial(function, number, tile.batch - begin))


def _begins_of(stacks: tuple[Ref, ...]) -> list[int]:
    """Returns the number of each stack's first matrix among the matrices of all stacks."""
    *begins, _ = itertools.accumulate((stack.shape[0] for stack in stacks), initial=0)
    return begins
