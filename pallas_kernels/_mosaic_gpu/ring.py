"""Programs with a ring in shared memory, one a multiprocessor: what they share, and their launch.

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
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._lowered import call_lowered
from pallas_kernels._mosaic_gpu.config import ROWS, TILE_K, RingConfig
from pallas_kernels._stacked import Arrays

type Ref = Any  # a reference to memory, or to barriers


def launch(
    program: functools.partial[Any],
    operands: Mapping[str, Any],
    out_type: tuple[jax.ShapeDtypeStruct, ...],
    *,
    num_programs: int,
    num_threads: int,
    scratch: Mapping[str, Any],
    **options: Any,
) -> Arrays:
    """Runs that many programs of that many warpgroups. Options are those of `plgpu.kernel`.

    `program` is a class with `run`, and some of its fields. The others are by name `warpgroup`,
    `index` (of the program), the scratch, the operands, which are trees of arrays, and the results
    `outs`, both in global memory. A kernel is kept by these and the class's name.
    """
    arrays, tree = jax.tree.flatten(tuple(operands.values()))

    def body(*refs: Ref, **scratch: Ref) -> None:
        place = {"warpgroup": lax.axis_index("warpgroup"), "index": lax.axis_index("program")}
        inputs = zip(operands, jax.tree.unflatten(tree, refs[: len(arrays)]), strict=True)
        program(outs=refs[len(arrays) :], **dict(inputs), **place, **scratch).run()

    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=num_threads,
        thread_name="warpgroup",
        scratch_types=scratch,
        **options,
    )
    if options["interpret"] is not None:
        return kernel(*arrays)
    name = f"{program.func.__module__}.{program.func.__qualname__}"
    settings = sorted(program.keywords.items()), num_programs, scratch
    return call_lowered(kernel, repr((name, settings, [*operands], tree)), *arrays)


def launch_ring(
    program: functools.partial[Any],
    operands: Mapping[str, Any],
    out_type: tuple[jax.ShapeDtypeStruct, ...],
    *,
    config: RingConfig,
    tiles: np.ndarray,
    b_block: tuple[int, int],
    buffers: Mapping[str, tuple[int, int]],
    **options: Any,
) -> Arrays:
    """Runs programs of `RingProgram`. The last operand has the dtype of the ring.

    `b_block` is the shape of a step's block of B. Of each shape in `buffers` every warpgroup has
    `config.num_buffers`, by name, to store from. Options are those of `launch`.
    """
    program = functools.partial(program, config=config)
    if tiles.ndim == 3:  # a work list
        options["num_programs"] = tiles.shape[1]
        # In blocks, so that the compiler sees that rows and columns are multiples of a block.
        tiles = tiles // np.array([1, ROWS, config.block_n], np.int32)
    operands = jax.tree.map(jnp.asarray, OrderedDict(tiles=tiles, **operands))
    stages, dtype = config.num_stages, jax.tree.leaves(operands)[-1].dtype
    staging = (config.num_warpgroups, config.num_buffers)
    scratch = {
        "a_ring": shared(dtype, stages, config.tile_m, TILE_K),
        "b_ring": shared(dtype, stages, *b_block),
        **program.func.scratch(config),  # pyright: ignore[reportFunctionMemberAccess]
        **{name: shared(out_type[-1].dtype, *staging, *x) for name, x in buffers.items()},
    }
    num_threads = config.num_warpgroups + config.num_producers
    return launch(program, operands, out_type, num_threads=num_threads, scratch=scratch, **options)


def shared(dtype: jnp.dtype, *shape: int) -> Any:
    """Returns the type of a buffer in shared memory, swizzled as the matrix units need it."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(dtype, shape[-1]))


def transforms(dtype: jnp.dtype, columns: int) -> tuple[Any, Any]:
    """Returns those of a buffer with that many columns."""
    swizzle = plgpu.find_swizzle(8 * dtype.itemsize * columns)
    # The transforms are abstract to pyright, because a decorator adds their methods.
    tiled = plgpu.TilingTransform((8, swizzle // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiled, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


class Tile(NamedTuple):
    """A tile of the work list."""

    batch: jax.Array  # where it begins
    row: jax.Array
    col: jax.Array
    turn: jax.Array  # which warpgroup multiplies it, where tiles are in turns
    step: jax.Array  # the number of steps of the ring before it
    product: int | jax.Array = 0  # of a chain


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingProgram:
    """One warpgroup of one program, with the ring and its barriers."""

    config: RingConfig
    warpgroup: jax.Array
    index: jax.Array  # of the program
    tiles: Ref  # the work list, in units of the blocks that are stored
    outs: tuple[Ref, ...]
    a_ring: Ref
    b_ring: Ref
    full: Ref  # barriers of each slot of the ring, for each turn
    empty: Ref  # barriers of each slot of the ring

    layout: ClassVar[Any] = plgpu.Layout.WGMMA  # of the sums
    max_registers: ClassVar[int] = 232  # of a thread that stores

    @staticmethod
    def scratch(config: RingConfig) -> dict[str, Any]:
        """Returns the types of the barriers."""
        stages, num_arrivals = config.num_stages, config.tile_m // config.rows
        return {
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=(config.num_turns, stages)),
            "empty": plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=stages),
        }

    # Each kernel defines these.

    def num_products(self, tile: Tile) -> int | jax.Array:
        """Returns the number of steps in which the tile is multiplied."""
        raise NotImplementedError

    @property
    def stacks(self) -> tuple[Ref, ...]:
        """The operands whose stack of a tile says what is copied for it."""
        raise NotImplementedError

    def load_factors(
        self, tile: Tile, number: int, index: jax.Array, slot: jax.Array, columns: Any
    ) -> None:
        """Copies the factors of a step, those of a matrix of the stack of that number."""
        raise NotImplementedError

    @property
    def others(self) -> tuple[Any, ...]:
        """What the steps after the products copy."""
        return ()

    def load_other(self, tile: Tile, slot: jax.Array, other: Any) -> None:
        """Copies one of `others`."""
        raise NotImplementedError

    def b_block(self, slot: jax.Array) -> Ref:
        """Returns the block of the second factor of a step, `(TILE_K, tile_n)`."""
        raise NotImplementedError

    def storing(self, tile: Tile) -> Callable[[jax.Array], None]:
        """Returns what stores the tile's sums; called before they are computed."""
        raise NotImplementedError

    # All kernels share these.

    def run(self) -> None:
        """Does this warpgroup's work."""
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
            plgpu.set_max_registers(self.max_registers, action="increase")
            self.visit_tiles(self._take_turn)
            self.await_stores()

    def visit_tiles(self, visit: Callable[[Tile], None]) -> jax.Array:
        """Visits each tile; returns the ring's steps."""

        def visit_one(index: jax.Array, step: jax.Array) -> jax.Array:
            batch, row, col = (self.tiles[index, self.index, i] for i in range(3))
            turn = lax.rem(index, self.config.num_turns)
            tile = Tile(batch, row * ROWS, col * self.config.block_n, turn, step)
            pl.when(batch >= 0)(functools.partial(visit, tile))
            return step + jnp.where(batch >= 0, self.num_products(tile) + len(self.others), 0)

        return lax.fori_loop(0, self.tiles.shape[0], visit_one, jnp.int32(0))

    def slot(self, step: jax.Array) -> jax.Array:
        """Returns the slot of the ring that the step is in."""
        return lax.rem(step, self.config.num_stages)

    def empty_slot(self, step: jax.Array) -> jax.Array:
        """Waits until the step's slot is empty, and returns it."""
        slot = self.slot(step)
        wait = functools.partial(plgpu.barrier_wait, self.empty.at[slot])
        pl.when(step >= self.config.num_stages)(wait)
        return slot

    def full_slot(self, tile: Tile, step: jax.Array) -> jax.Array:
        """Waits until one of the tile's steps has come, and returns its slot."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.full.at[tile.turn, slot])
        return slot

    def release(self, step: jax.Array) -> None:
        """Gives the step's slot back to the producer."""
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def load(self, tile: Tile) -> None:
        """Fills the slots of the tile's steps, each with two copies."""

        def load_factors(number: int, index: jax.Array) -> None:
            self.load_steps(tile, functools.partial(self.load_factors, tile, number, index))

        in_stack(self.stacks, tile, load_factors)
        first = tile.step + self.num_products(tile)
        for step, other in enumerate(self.others):
            self.load_other(tile, self.empty_slot(first + step), other)

    def load_steps(self, tile: Tile, load: Callable[[jax.Array, Any], None]) -> None:
        """Calls `load(slot, columns)` for the steps of the products, in empty slots."""

        def load_step(k: jax.Array, _: None) -> None:
            load(self.empty_slot(tile.step + k), pl.ds(k * TILE_K, TILE_K))

        lax.fori_loop(0, self.num_products(tile), load_step, None)

    def copy(self, tile: Tile, slot: jax.Array, source: Ref, block: Ref) -> None:
        """Starts one of a step's two copies."""
        plgpu.copy_gmem_to_smem(source, block, self.full.at[tile.turn, slot])

    @property
    def first_row(self) -> int | jax.Array:
        """The first of this warpgroup's rows of a tile."""
        return 0 if self.config.in_turns else self.warpgroup * ROWS

    @property
    def own_rows(self) -> Any:
        """This warpgroup's rows of a tile."""
        return pl.ds(self.first_row, self.config.rows)

    def _take_turn(self, tile: Tile) -> None:
        own_turn = pl.when(not self.config.in_turns or tile.turn == self.warpgroup)
        own_turn(functools.partial(self._multiply_and_store, tile))

    def _multiply_and_store(self, tile: Tile) -> None:
        store = self.storing(tile)
        sums = self.config.rows, self.config.tile_n
        # The stubs of plgpu do not export this documented name.
        in_registers = plgpu.ACC(sums, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]

        @functools.partial(pl.run_scoped, accumulator=in_registers)
        def _(accumulator: Ref) -> None:
            self.multiply(tile, accumulator)
            product = accumulator[...]
            self.release(tile.step + self.num_products(tile) - 1)
            store(product)

    def multiply(self, tile: Tile, accumulator: Ref) -> None:
        """Multiplies this warpgroup's rows of the tile."""
        self.accumulate(tile, accumulator, self.b_block)

    def accumulate(self, tile: Tile, accumulator: Ref, b_block: Callable[[jax.Array], Ref]) -> None:
        """Adds up the products of all steps, by the blocks `b_block(slot)`, `(TILE_K, tile_n)`."""

        def multiply(k: jax.Array, _: None) -> None:
            slot = self.full_slot(tile, tile.step + k)
            plgpu.wgmma(accumulator, self.a_ring.at[slot, self.own_rows], b_block(slot))
            plgpu.wgmma_wait(1)  # the wgmma of the step before is done
            pl.when(k > 0)(lambda: self.release(tile.step + k - 1))

        lax.fori_loop(0, self.num_products(tile), multiply, None)

    def take(self, tile: Tile, step: jax.Array, *rings: Ref, rows: Any = None) -> list[jax.Array]:
        """Waits for a step, reads this warpgroup's rows of it, and gives the slot back."""
        slot = self.full_slot(tile, step)
        place = slot, rows or self.own_rows
        blocks = [plgpu.load(ring.at[place], layout=self.layout) for ring in rings]
        self.give_back(step)
        return blocks

    def give_back(self, step: jax.Array) -> None:
        """Gives the step's slot back to the producer, once all threads have read it."""
        self.commit()
        self.release(step)

    def free_buffer(self, buffers: Ref, index: int) -> Ref:
        """Returns a buffer of this warpgroup to store from; `index` blocks were stored before."""
        num_buffers = self.config.num_buffers
        if index >= num_buffers:
            self.await_stores(num_buffers - 1)
        return buffers.at[self.warpgroup, index % num_buffers]

    def store_where(self, is_stored: jax.Array, store: Callable[[], None]) -> None:
        """Stores a block or skips it. Later blocks count on the buffers as if it were stored."""
        pl.when(is_stored)(store)
        pl.when(~is_stored)(self.await_stores)

    def commit(self) -> None:
        """Lets all threads and TMA see what this warpgroup has done in shared memory."""
        plgpu.commit_smem()

    def start_store(self, buffer: Ref, block: Ref) -> None:
        """Starts to copy a buffer to global memory."""
        plgpu.copy_smem_to_gmem(buffer, block, commit_group=False)

    def end_group(self) -> None:
        """Makes one group of all stores since the last one."""
        plgpu.commit_smem_to_gmem_group()

    def await_stores(self, num_groups: int = 0) -> None:
        """Waits until the buffers of all but the last groups are free."""
        plgpu.wait_smem_to_gmem(num_groups, wait_read_only=True)


class SymmetricProgram(RingProgram):
    """A `RingProgram` of symmetric results, whose blocks above the diagonal are skipped."""

    def blocks(
        self, tile: Tile, strips: list[jax.Array]
    ) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        """Returns (row, col, block) for each block of strips of `block_n` columns."""
        rows = self.config.block_m
        return [
            (tile.row + self.first_row + j, tile.col + i * self.config.block_n, strip[j : j + rows])
            for i, strip in enumerate(strips)
            for j in range(0, self.config.rows, rows)
        ]

    def copy_out(self, direct: Ref, mirror: Ref, stack: Ref, *place: jax.Array) -> None:
        """Starts to store a block to (matrix, row, col), and off the diagonal its transpose."""
        matrix, row, col = place
        rows, cols = pl.ds(row, ROWS), pl.ds(col, self.config.block_n)
        self.start_store(direct, stack.at[matrix, rows, cols])
        pl.when(col < row)(lambda: self.start_store(mirror, stack.at[matrix, cols, rows]))


def ids(*shape: int, layout: Any = plgpu.Layout.WGMMA) -> Iterator[jax.Array]:
    """Returns the rows and the columns of a block's elements."""
    return (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1))


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
    """Returns the numbers of the stacks' first matrices, among those of all stacks."""
    *begins, _ = itertools.accumulate((stack.shape[0] for stack in stacks), initial=0)
    return begins


def pick(
    values: Sequence[jax.typing.ArrayLike], index: jax.Array | int, otherwise: jax.typing.ArrayLike
) -> jax.Array:
    """Returns the value of that index, or otherwise."""
    found = jnp.asarray(otherwise)
    for i, value in enumerate(values):
        found = jnp.where(index == i, value, found)
    return found
