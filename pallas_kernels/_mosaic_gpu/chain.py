"""Chains of symmetric products by `"mosaic_gpu"` in one launch.

The chains of a few matrices at a time stay in the L2 cache, and no product waits for a launch.

Programs walk one list of the tiles of all products of all matrices. A counter in global memory for
each matrix and product says how many parts of the result are stored, and a tile waits until the
result before it is complete. In the list every product comes before those that need it, all
programs run at the same time, and each keeps to the list. So the first tile of the list that is not
done waits for nothing, and no program waits for ever.

What a product is made of is data: what it reads, how many addends it has, and where it goes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels._mosaic_gpu.config import ROWS, TILE_K, MosaicSyrkxConfig
from pallas_kernels._mosaic_gpu.ring import (
    Ref,
    SymmetricProgram,
    Tile,
    ids,
    launch_ring,
    pick,
)
from pallas_kernels._mosaic_gpu.small_chain import fits_shared_memory, launch_small_chain
from pallas_kernels._mosaic_gpu.work_list import (
    Column,
    Structure,
    deal_chains,
    lower_triangle,
    plan_chain,
)
from pallas_kernels._reference import ChainLink
from pallas_kernels._stacked import Arrays, call_on_stacks, jitted, stack_coefficients

SMALL, LARGE = MosaicSyrkxConfig(64, 64, 8), MosaicSyrkxConfig(128, 128, 6, in_turns=True)


def fastest_chain_config(
    batch: int, m: int, num_programs: int | None = None
) -> MosaicSyrkxConfig | None:
    """Returns the config for `(batch, m, m)`; None where a launch for each product is faster.

    Measured on an H100. Each product of a single matrix waits for the last tile of the one before,
    so it gains nothing. Large tiles must fill three quarters of the programs. Small tiles take 1.85
    times as long for the same elements, and compute fewer elements above the diagonal.
    """
    num_programs = num_programs or device.current().num_multiprocessors
    large, small = (_num_tiles(m, config) for config in (LARGE, SMALL))
    if batch == 1:
        return None
    if large * LARGE.tile_m**2 >= 1.85 * small * SMALL.tile_m**2:
        return SMALL
    if batch * large >= 0.75 * num_programs:
        return LARGE
    return SMALL if batch * small <= 1.25 * num_programs else None


def num_together(num_tiles: int, num_programs: int) -> int:
    """Returns how many matrices go through their chains together.

    Their tiles fill all programs more than twice, so that programs have tiles of others while they
    wait for the results of one. More matrices would not stay in the L2 cache.
    """
    return 1 + -(-2 * num_programs // num_tiles)


def _num_tiles(m: int, config: MosaicSyrkxConfig) -> int:
    return len(lower_triangle(m, config.tile_m, config.tile_n))


def is_faster(inputs: Sequence[jax.Array], links: Sequence[ChainLink], *, by_kernels: bool) -> bool:
    """Returns whether one launch is faster than one for each product.

    `by_kernels` says that each product would be by `"mosaic_gpu"`, too. A chain that stays in
    shared memory is faster than those of any implementation.
    """
    *batch, m, _ = inputs[0].shape
    if len(links) < 2 or m % ROWS:
        return False
    if fits_shared_memory(m, structure_of(links), len(inputs)):
        return True
    return by_kernels and fastest_chain_config(math.prod(batch), m) is not None


def structure_of(links: Sequence[ChainLink]) -> Structure:
    """Returns what of the links is no coefficient."""
    return tuple((tuple(c for _, c in link.addends), link.residual) for link in links)


def syrk_chain(
    inputs: Sequence[jax.Array], links: Sequence[ChainLink], **options: Any
) -> jax.Array:
    """Computes what `Implementation.syrk_chain` documents, in one launch, also under `vmap`.

    Without a config, programs hold the whole chain of a matrix in shared memory where it fits.
    Options are those of `launch_chain`.
    """
    first, *others = inputs
    batch, structure = first.shape[:-2], structure_of(links)
    width = 2 + max(len(link.addends) for link in links)
    rows = [(link.alpha, link.diagonal, *(beta for beta, _ in link.addends)) for link in links]
    flat = [c for row in rows for c in (*row, *[0.0] * (width - len(row)))]
    fits = fits_shared_memory(first.shape[-1], structure, len(inputs))
    kernel = launch_chain if "config" in options or not fits else launch_small_chain
    others = [c if c.ndim == first.ndim else c.reshape(*[1] * len(batch), *c.shape) for c in others]
    stacked = stack_coefficients(tuple(flat), batch).reshape(*batch, len(links), width)
    operands = (first, tuple(others), stacked)
    (out,) = call_on_stacks(kernel, "mosaic_gpu", *operands, structure=structure, **options)
    return out


@jitted
def launch_chain(
    first: jax.Array,
    others: Arrays,
    coefficients: jax.Array,
    *,
    structure: Structure,
    num_programs: int,
    config: MosaicSyrkxConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Arrays:
    """Computes stacks `(batch, m, m)`, with coefficients `(batch, products, number)`."""
    batch, m, _ = first.shape
    config = config or fastest_chain_config(batch, m, num_programs) or SMALL
    num_tiles = _num_tiles(m, config)
    num_programs = min(num_programs, batch * num_tiles)
    together = min(batch, num_together(num_tiles, num_programs))
    sizes = {"together": together, "num_programs": num_programs}
    plan, num_places = plan_chain(structure, 1 + len(others))
    nums_addends = tuple(len(addends) for addends, _ in structure)
    _, out = launch_ring(
        functools.partial(ChainProgram, num_tiles=num_tiles, **sizes),
        {"coefficients": coefficients, "plan": plan, "inputs": (first, *others)},
        tuple(
            jax.ShapeDtypeStruct((number, m, m), first.dtype)
            for number in (num_places * together, batch)
        ),
        config=config,
        tiles=deal_chains(batch, m, config.tile_m, nums_addends, **sizes),
        num_programs=num_programs,
        b_block=(config.tile_n, TILE_K),
        buffers={"buffers": (2 * ROWS, TILE_K)},
        interpret=interpret,
        kernel_name="syrk_chain",
    )
    return (out,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainProgram(SymmetricProgram):
    """A program of chains.

    A source is the number of an input, or the number of inputs plus the number of a place. Results
    are the places, each `(together, m, m)` of `(places · together, m, m)`, and the last product.
    """

    num_programs: int
    num_tiles: int  # of a result
    together: int  # matrices; each next one has the places of the one so many before
    plan: Ref  # of `plan_chain`
    coefficients: Ref  # alpha, the diagonal and all beta; `(batch, products, 2 + addends)`
    inputs: tuple[Ref, ...]  # `(batch, m, m)` or `(1, m, m)`; the first one is a factor
    buffers: Ref  # of blocks and their transposes
    counters: Ref = None  # a semaphore for each matrix and product, shared by all programs

    def run(self) -> None:
        """Does this warpgroup's work, with counters that begin at 0."""
        number = self.out.shape[0] * self.plan.shape[0]
        counters = pl.get_global(plgpu.SemaphoreType.REGULAR((number,)))
        SymmetricProgram.run(dataclasses.replace(self, counters=counters))

    @property
    def out(self) -> Ref:
        """The last product."""
        return self.outs[1]

    def num_products(self, tile: Tile | None = None) -> int:
        """Returns the number of blocks of the factor in a strip of rows."""
        del tile
        return self.out.shape[-1] // TILE_K

    def visit_tiles(self, visit: Callable[[Tile], None]) -> jax.Array:
        """Visits each tile, or those of this warpgroup's turns; returns the ring's steps."""
        turns = self.config.num_turns
        is_producer = self.warpgroup == self.config.num_warpgroups
        first = jnp.where(is_producer | (turns == 1), 0, self.warpgroup)
        stride = jnp.where(is_producer, 1, turns)
        count = lax.div(self.tiles.shape[0] - 1 - self.index, self.num_programs) + 1

        def read(i: jax.Array) -> Arrays:
            row = lax.min(i, count - 1) * self.num_programs + self.index
            return tuple(self.tiles[row, j] for j in range(5))

        def visit_one(number: jax.Array, found: Arrays) -> Arrays:
            i = first + number * stride
            following = read(i + stride)  # in advance, so that no tile waits for the list
            batch, row, col, product, step = found
            visit(Tile(batch, row * ROWS, col * TILE_K, lax.rem(i, turns), step, product))
            return following

        lax.fori_loop(0, lax.div(count - first + stride - 1, stride), visit_one, read(first))
        *_, product, step = read(count - 1)
        return step + self.num_products() + self.plan[product, Column.COUNT]

    def _counter(self, batch: jax.Array, product: jax.Array | int) -> Ref:
        return self.counters.at[batch * self.plan.shape[0] + product]

    def wait_for_result_before(self, tile: Tile) -> None:
        """Waits until all parts of the result before the tile's are stored.

        Before a matrix' first result come those of the matrix that had its places.
        """
        last = self.plan.shape[0] - 1
        is_first = tile.product == 0
        batch = jnp.where(is_first, tile.batch - self.together, tile.batch)
        product = jnp.where(is_first, last, tile.product - 1)
        num_parts = self.num_tiles * self.config.tile_m // self.config.rows
        wait = functools.partial(plgpu.semaphore_wait, decrement=False, memory_scope="gpu")
        pl.when(batch >= 0)(lambda: wait(self._counter(batch, product), num_parts))

    def count(self, tile: Tile) -> None:
        """Counts this warpgroup's part of the tile as stored."""
        plgpu.semaphore_signal(self._counter(tile.batch, tile.product), memory_scope="gpu")

    def load(self, tile: Tile) -> None:
        """Waits for the result before, and copies its strips and then the addends' tiles."""
        self.wait_for_result_before(tile)
        load_factors = functools.partial(self._load_factors, tile)
        factor = self.plan[tile.product, Column.FACTOR]
        self._with_matrix(factor, tile, load_factors, self.inputs[:1])

        def load_addend(number: jax.Array, _: None) -> None:
            slot = self.empty_slot(tile.step + self.num_products() + number)
            load = functools.partial(self._load_addend, tile, slot)
            addend = self.plan[tile.product, Column.ADDENDS + number]
            self._with_matrix(addend, tile, load, self.inputs)

        lax.fori_loop(0, self.plan[tile.product, Column.COUNT], load_addend, None)

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
        pl.when(place >= 0)(functools.partial(function, self.outs[0], self._term(place, tile)))

    def _term(self, place: jax.Array, tile: Tile) -> jax.Array:
        return place * self.together + lax.rem(tile.batch, self.together)

    def _load_factors(self, tile: Tile, stack: Ref, index: jax.Array | int) -> None:
        """Copies the strips of rows that make the tile. On the diagonal they are one."""
        tile_m, tile_n = self.config.tile_m, self.config.tile_n

        def load(slot: jax.Array, columns: Any) -> None:
            def copy(ring: Ref, row: jax.Array, first: int, size: int) -> None:
                source = stack.at[index, pl.ds(row + first, size), columns]
                self.copy(tile, slot, source, ring.at[slot, pl.ds(first, size)])

            def copy_one_strip() -> None:
                copy(self.a_ring, tile.row, 0, tile_m // 2)
                copy(self.a_ring, tile.row, tile_m // 2, tile_m // 2)

            def copy_both() -> None:
                copy(self.a_ring, tile.row, 0, tile_m)
                copy(self.b_ring, tile.col, 0, tile_n)

            pl.when(_is_diagonal(tile))(copy_one_strip)
            pl.when(~_is_diagonal(tile))(copy_both)

        self.load_steps(tile, load)

    def _load_addend(self, tile: Tile, slot: jax.Array, stack: Ref, index: jax.Array | int) -> None:
        """Copies the tile of an addend to one slot, its second block of columns to B's ring."""
        m = self.config.tile_m
        halves = [(self.a_ring, 0, m, 0), (self.b_ring, 0, m, TILE_K)]
        if self.config.tile_n == TILE_K:
            halves = [(self.a_ring, first, m // 2, 0) for first in (0, m // 2)]
        for ring, first, size, col in halves:
            rows, columns = pl.ds(tile.row + first, size), pl.ds(tile.col + col, TILE_K)
            block = ring.at[slot, pl.ds(first, size)]
            self.copy(tile, slot, stack.at[index, rows, columns], block)

    def multiply(self, tile: Tile, accumulator: Ref) -> None:
        """Multiplies this warpgroup's rows of the tile, on the diagonal by their own strip."""

        def multiply_by(ring: Ref) -> None:
            self.accumulate(tile, accumulator, lambda slot: ring.at[slot].transpose((1, 0)))

        pl.when(_is_diagonal(tile))(functools.partial(multiply_by, self.a_ring))
        pl.when(~_is_diagonal(tile))(functools.partial(multiply_by, self.b_ring))

    def storing(self, tile: Tile) -> Callable[[jax.Array], None]:
        """Reads the product's coefficients, and returns what stores the tile."""
        numbers = range(self.coefficients.shape[-1])
        coefficients = [self.coefficients[tile.batch, tile.product, i] for i in numbers]
        return functools.partial(self._store, tile, coefficients)

    def _store(self, tile: Tile, coefficients: list[jax.Array], product: jax.Array) -> None:
        """Finishes, rounds and stores the sums of this warpgroup's rows, block by block."""
        alpha, diagonal, *betas = coefficients
        columns = Column.RESULT, Column.RESIDUAL
        place, residual_place = (self.plan[tile.product, i] for i in columns)
        row_ids, col_ids = ids(ROWS, ROWS)

        def store(i: int, row: jax.Array, col: jax.Array, block: jax.Array) -> None:
            buffer = self.free_buffer(self.buffers, i)
            store = functools.partial(self._store_block, tile, (row, col), buffer)
            block = jnp.where(row_ids + row == col_ids + col, block + diagonal, block)
            rounded = block.astype(self.out.dtype)
            store(rounded, place)

            @pl.when(residual_place >= 0)
            def _() -> None:
                self.await_stores()
                store((block - rounded.astype(jnp.float32)).astype(rounded.dtype), residual_place)
                self.await_stores()

        blocks = self.blocks(tile, self._sums(product, tile, alpha, betas))
        for i, (row, col, block) in enumerate(blocks):
            is_stored = (row < self.out.shape[1]) & (col < row + ROWS)
            self.store_where(is_stored, functools.partial(store, i, row, col, block))
        plgpu.wait_smem_to_gmem(0)  # until all is in global memory
        self.count(tile)

    def _sums(
        self, product: jax.Array, tile: Tile, alpha: jax.Array, betas: list[jax.Array]
    ) -> list[jax.Array]:
        """Returns α·product + Σ β·C, for each TILE_K columns.

        Barriers keep the compiler from fusing what the kernel of one product does not fuse.
        """
        starts = range(0, self.config.tile_n, TILE_K)
        sums = [lax.optimization_barrier(alpha * product[:, i : i + TILE_K]) for i in starts]
        rings, rows = (self.a_ring, self.b_ring)[: len(sums)], self.own_rows

        def add(number: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
            step = tile.step + self.num_products() + number
            cs = self.take(tile, step, *rings, rows=rows)
            beta = pick(betas, number, jnp.float32(0))
            return [total + beta * c.astype(jnp.float32) for total, c in zip(sums, cs, strict=True)]

        sums = lax.fori_loop(0, self.plan[tile.product, Column.COUNT], add, sums)
        return [*map(lax.optimization_barrier, sums)]

    def _store_block(
        self, tile: Tile, start: Arrays, buffer: Ref, block: jax.Array, place: Any
    ) -> None:
        """Stores a rounded block and its transpose to a place, or to the last result for -1."""
        direct, mirror = buffer.at[pl.ds(0, ROWS)], buffer.at[pl.ds(ROWS, ROWS)]
        mirror.transpose((1, 0))[...] = block
        direct[...] = block
        self.commit()

        def copy(stack: Ref, matrix: jax.Array) -> None:
            self.copy_out(direct, mirror, stack, matrix, *start)

        pl.when(place < 0)(functools.partial(copy, self.out, tile.batch))
        pl.when(place >= 0)(functools.partial(copy, self.outs[0], self._term(place, tile)))
        self.end_group()


def _is_diagonal(tile: Tile) -> jax.Array:
    return tile.row == tile.col
