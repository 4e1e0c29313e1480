"""What programs do that compute whole chains of symmetric products: the list, and the loads.

The chains of a few matrices at a time stay in the L2 cache, and no product waits for a launch.

Programs walk one list of the tiles of all products of all matrices. A counter in global memory for
each matrix and product says how many parts of the result are stored. A tile waits until the result
before it is complete. All earlier results are then complete, too. In the list every product comes
before those that need it, all programs run at the same time, and each keeps to the list. So the
first tile of the list that is not done waits for nothing, and no program waits for ever.

What a product is made of is data: what it reads, how many addends it has, and where it goes.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic_gpu.chain_plan import ADDENDS, COUNT, FACTOR
from pallas_kernels._mosaic_gpu.config import ROWS, TILE_K
from pallas_kernels._mosaic_gpu.ring import Ref, RingProgram, Tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainLoads(RingProgram):
    """What the warpgroups of a chain's program have in common, and the producer's part.

    A source is the number of an input, or the number of inputs plus the number of a place in
    `terms`.

    Attributes:
        num_programs: how many programs there are.
        num_tiles: how many tiles a result has.
        together: how many matrices go through their chains together. Each next matrix has the
            places of the one so many before.
        plan: for each product the source of its factor, the place of its result, the place of its
            residual, the number of its addends, and their sources. The place of the last result is
            -1, as is that of a residual that nobody reads.
        coefficients: alpha, the diagonal and all beta; shape `(batch, products, 2 + addends)`.
        inputs: stacks `(batch, m, m)` or `(1, m, m)`. The first one is a factor.
        terms: the results that later products read, `(places · together, m, m)`.
        out: the last result.
        counters: a semaphore for each matrix and product.
        buffers: where blocks of the result and their transposes are stored from.
    """

    num_programs: int
    num_tiles: int
    together: int
    plan: Ref
    coefficients: Ref
    inputs: tuple[Ref, ...]
    terms: Ref
    out: Ref
    counters: Ref
    buffers: Ref

    def num_products(self, tile: Tile | None = None) -> int:
        """Returns the number of blocks of the factor in a strip of rows, the same in all tiles."""
        del tile
        return self.out.shape[-1] // TILE_K

    def visit_tiles(self, visit: Callable[[Tile, int], None]) -> jax.Array:
        """Calls `visit(tile, width)` for each tile, or for those of this warpgroup's turns.

        Returns:
            The number of steps of the ring.
        """
        turns = self.config.num_turns
        is_producer = self.warpgroup == self.config.num_warpgroups
        first = jnp.where(is_producer | (turns == 1), 0, self.warpgroup)
        stride = jnp.where(is_producer, 1, turns)
        count = lax.div(self.tiles.shape[0] - 1 - self.index, self.num_programs) + 1

        def read(i: jax.Array) -> tuple[jax.Array, ...]:
            row = lax.min(i, count - 1) * self.num_programs + self.index
            return tuple(self.tiles[row, j] for j in range(5))

        def visit_one(number: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            i = first + number * stride
            following = read(i + stride)  # in advance, so that no tile waits for the list
            batch, row, col, product, step = found
            tile = Tile(batch, row * ROWS, col * TILE_K, lax.rem(i, turns), step, product)
            visit(tile, self.config.tile_n)
            return following

        lax.fori_loop(0, lax.div(count - first + stride - 1, stride), visit_one, read(first))
        *_, product, step = read(count - 1)
        return step + self.num_products() + self.plan[product, COUNT]

    @staticmethod
    def make_counters(number: int) -> Ref:
        """Returns that many counters, all 0, that all programs share."""
        return pl.get_global(plgpu.SemaphoreType.REGULAR((number,)))

    def load(self, tile: Tile, width: int) -> None:
        """Waits for the result before, and copies its strips and then the addends' tiles."""
        self.wait_for_result_before(tile)
        load_factors = functools.partial(self._load_factors, tile, width)
        self._with_matrix(self.plan[tile.product, FACTOR], tile, load_factors, self.inputs[:1])

        def load_addend(number: jax.Array, _: None) -> None:
            slot = self.empty_slot(tile.step + self.num_products() + number)
            load = functools.partial(self._load_addend, tile, slot)
            self._with_matrix(self.plan[tile.product, ADDENDS + number], tile, load, self.inputs)

        lax.fori_loop(0, self.plan[tile.product, COUNT], load_addend, None)

    def wait_for_result_before(self, tile: Tile) -> None:
        """Waits until all parts of the result before the tile's are stored.

        Before a matrix' first result come those of the matrix that had its places.
        """
        last = self.plan.shape[0] - 1
        is_first = tile.product == 0
        batch = jnp.where(is_first, tile.batch - self.together, tile.batch)
        product = jnp.where(is_first, last, tile.product - 1)

        @pl.when(batch >= 0)
        def _() -> None:
            plgpu.semaphore_wait(
                self.counter(batch, product),
                self.num_tiles * self.config.tile_m // self.config.rows,
                decrement=False,
                memory_scope="gpu",
            )

    def counter(self, batch: jax.Array, product: jax.Array | int) -> Ref:
        """Returns the counter of a product of a matrix."""
        return self.counters.at[batch * self.plan.shape[0] + product]

    def _with_matrix(
        self,
        source: jax.Array,
        tile: Tile,
        function: Callable[[Ref, jax.Array | int], None],
        inputs: tuple[Ref, ...],
    ) -> None:
        """Calls `function(stack, index)` for the tile's matrix of a source, one of these inputs."""
        for number, stack in enumerate(inputs):
            index = tile.batch if stack.shape[0] > 1 else 0
            pl.when(source == number)(functools.partial(function, stack, index))
        place = source - len(self.inputs)
        pl.when(place >= 0)(functools.partial(function, self.terms, self.term(place, tile)))

    def term(self, place: jax.Array, tile: Tile) -> jax.Array:
        """Returns the index among `terms` of the tile's matrix in a place."""
        return place * self.together + lax.rem(tile.batch, self.together)

    def _load_factors(self, tile: Tile, width: int, stack: Ref, index: jax.Array | int) -> None:
        """Copies the strips of rows that make the tile. On the diagonal they are one."""
        tile_m = self.config.tile_m

        def load(k: jax.Array, _: None) -> None:
            slot, columns = self.empty_slot(tile.step + k), pl.ds(k * TILE_K, TILE_K)

            def copy(ring: Ref, row: jax.Array, first: int, size: int) -> None:
                plgpu.copy_gmem_to_smem(
                    stack.at[index, pl.ds(row + first, size), columns],
                    ring.at[slot, pl.ds(first, size)],
                    self.full.at[tile.turn, slot],
                )

            @pl.when(self.is_diagonal(tile))  # every step is two copies
            def _() -> None:
                copy(self.a_ring, tile.row, 0, tile_m // 2)
                copy(self.a_ring, tile.row, tile_m // 2, tile_m // 2)

            @pl.when(~self.is_diagonal(tile))
            def _() -> None:
                copy(self.a_ring, tile.row, 0, tile_m)
                copy(self.b_ring, tile.col, 0, width)

        lax.fori_loop(0, self.num_products(), load, None)

    def is_diagonal(self, tile: Tile) -> jax.Array:
        """Whether the strips of the tile, which is square, are one."""
        return tile.row == tile.col

    def _load_addend(self, tile: Tile, slot: jax.Array, stack: Ref, index: jax.Array | int) -> None:
        """Copies the tile of an addend to one slot of both rings."""
        for ring, first, size, col in self._halves():
            rows, columns = pl.ds(tile.row + first, size), pl.ds(tile.col + col, TILE_K)
            plgpu.copy_gmem_to_smem(
                stack.at[index, rows, columns],
                ring.at[slot, pl.ds(first, size)],
                self.full.at[tile.turn, slot],
            )

    def _halves(self) -> list[tuple[Ref, int, int, int]]:
        """Returns ring, first row, number of rows and first column of the halves of a tile."""
        m = self.config.tile_m
        if self.config.tile_n == TILE_K:
            return [(self.a_ring, 0, m // 2, 0), (self.a_ring, m // 2, m // 2, 0)]
        return [(self.a_ring, 0, m, 0), (self.b_ring, 0, m, TILE_K)]
