"""Chains of symmetric products of small matrices in one launch, with all terms in shared memory.

A team of warpgroups runs the chain of one matrix after another. Each warpgroup has one block of
64 × 64 elements of the lower triangle of every result, and stores it, off the diagonal also
transposed. Then it waits for the others of its team. S₀ of the next matrix comes while the chain of
this one runs, and has two places in turn for that.

Sums are those of `ring` and `chain`, in the same order. What a product is made of is data,
as there. It is read one product in advance.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic_gpu.config import ROWS, SHARED_MEMORY, TILE_K
from pallas_kernels._mosaic_gpu.ring import Ref, ids, launch, pick, shared
from pallas_kernels._mosaic_gpu.work_list import Column, Structure, lower_triangle, plan_chain
from pallas_kernels._stacked import Arrays, jitted

_MOST_WARPGROUPS = 4  # of a program, so that each thread can have 128 registers


def fits_shared_memory(m: int, structure: Structure, num_inputs: int) -> bool:
    """Returns whether a program can hold all terms of the chain of an (m, m) matrix."""
    return 0 < m and m % ROWS == 0 and _most_teams(m, structure, num_inputs) > 0


@functools.cache
def _most_teams(m: int, structure: Structure, num_inputs: int) -> int:
    _, num_places = plan_chain(structure, num_inputs, all_in_places=True)
    num_bytes = (num_places + 1) * m * m * 2
    if num_bytes > SHARED_MEMORY:
        return 0
    return min(SHARED_MEMORY // num_bytes, _MOST_WARPGROUPS // len(_blocks_of(m)))


def _blocks_of(m: int) -> list[list[int]]:
    """Returns row and column of the blocks that a team's warpgroups have, in blocks."""
    return (lower_triangle(m, ROWS, ROWS) // ROWS).tolist()


@jitted
def launch_small_chain(
    first: jax.Array,
    others: Arrays,
    coefficients: jax.Array,
    *,
    structure: Structure,
    num_programs: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Arrays:
    """Computes stacks `(batch, m, m)`, with coefficients `(batch, products, number)`."""
    (batch, m, _), dtype = first.shape, first.dtype
    plan, num_places = plan_chain(structure, 1 + len(others), all_in_places=True)
    num_programs = min(num_programs, batch)
    most_teams = _most_teams(m, structure, 1 + len(others))
    num_teams = min(most_teams, pl.cdiv(batch, num_programs))
    num_blocks, num_panels = len(_blocks_of(m)), m // TILE_K
    num_others = max(len(others), 1) * num_panels
    return launch(
        functools.partial(SmallChainProgram, num_programs=num_programs, num_teams=num_teams),
        {"coefficients": coefficients, "plan": jnp.asarray(plan), "inputs": (first, *others)},
        (jax.ShapeDtypeStruct((batch, m, m), dtype),),
        num_programs=num_programs,
        num_threads=num_teams * num_blocks,
        scratch={
            "terms": shared(dtype, num_teams, num_places + 1, num_panels, m, TILE_K),
            "first_loaded": plgpu.Barrier(num_arrivals=num_panels, num_barriers=(num_teams, 2)),
            "others_loaded": plgpu.Barrier(num_arrivals=num_others, num_barriers=num_teams),
            "stored": plgpu.Barrier(num_arrivals=num_blocks, num_barriers=num_teams),
        },
        interpret=interpret,
        kernel_name="small_syrk_chain",
    )


# What a product of a matrix is made of: its row of the plan; alpha, the diagonal and all beta.
type Product = tuple[Arrays, Arrays]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallChainProgram:
    """One warpgroup of one program.

    The places in `terms` have panels of 64 columns, `(teams, places + 1, m / 64, m, 64)`. Every
    other matrix has the last one for place 0.
    """

    warpgroup: jax.Array
    index: jax.Array  # of the program
    num_programs: int
    num_teams: int  # of a program
    coefficients: Ref  # alpha, the diagonal and all beta; `(batch, products, 2 + addends)`
    plan: Ref  # of `plan_chain`, with all in places
    inputs: tuple[Ref, ...]  # `(batch, m, m)` or `(1, m, m)`; the first one is S₀
    outs: tuple[Ref, ...]
    terms: Ref
    first_loaded: Ref  # barriers of each team, for the two S₀ in turn
    others_loaded: Ref  # a barrier of each team, for the other inputs
    stored: Ref  # a barrier of each team, for the results

    @property
    def blocks(self) -> list[list[int]]:
        """Row and column of each warpgroup's block, in blocks."""
        return _blocks_of(self.outs[0].shape[-1])

    @property
    def team(self) -> jax.Array:
        """Which of the program's teams this warpgroup is in."""
        return lax.div(self.warpgroup, len(self.blocks))

    @property
    def member(self) -> jax.Array:
        """Which of the team's warpgroups this is."""
        return lax.rem(self.warpgroup, len(self.blocks))

    @property
    def start(self) -> Arrays:
        """The first row and the first column of this warpgroup's block."""
        rows, cols = zip(*self.blocks, strict=True)
        return pick(rows, self.member, 0) * ROWS, pick(cols, self.member, 0) * ROWS

    def run(self) -> None:
        """Runs the chains of this team's matrices."""
        batch = self.outs[0].shape[0]
        first = self.index + self.num_programs * self.team
        stride = self.num_programs * self.num_teams

        def visit(i: jax.Array, product: Product) -> Product:
            matrix, turn = first + i * stride, lax.rem(i, 2)
            pl.when(self.member == 0)(lambda: self._load_others(matrix))
            self._load_first(matrix + stride, 1 - turn)
            plgpu.barrier_wait(self.first_loaded.at[self.team, turn])
            return self._run_chain(matrix, lax.min(matrix + stride, batch - 1), turn, product)

        self._load_first(first, 0)
        count = lax.div(batch - first + stride - 1, stride)
        lax.fori_loop(0, count, visit, self._read(lax.min(first, batch - 1), 0))

    def _load_first(self, matrix: jax.Array, turn: jax.Array | int) -> None:
        """Copies S₀ of the matrix, where there is one."""

        def load() -> None:
            loaded = self.first_loaded.at[self.team, turn]
            self._load(self.inputs[0], matrix, self._place(0, turn), loaded)

        pl.when((self.member == 0) & (matrix < self.outs[0].shape[0]))(load)

    def _load_others(self, matrix: jax.Array) -> None:
        for place, stack in enumerate(self.inputs[1:], 1):
            loaded = self.others_loaded.at[self.team]
            self._load(stack, matrix, self.terms.at[self.team, place], loaded)

    def _load(self, stack: Ref, matrix: jax.Array, term: Ref, loaded: Ref) -> None:
        index = matrix if stack.shape[0] > 1 else 0  # one matrix may serve for all
        for panel in range(term.shape[0]):
            source = stack.at[index, :, pl.ds(panel * TILE_K, TILE_K)]
            plgpu.copy_gmem_to_smem(source, term.at[panel], loaded)

    def _place(self, place: jax.Array | int, turn: jax.Array | int) -> Ref:
        last = self.terms.shape[1] - 1
        return self.terms.at[self.team, jnp.where(place == 0, turn * last, place)]

    def _read(self, matrix: jax.Array, product: jax.Array | int) -> Product:
        columns, numbers = (range(x.shape[-1]) for x in (self.plan, self.coefficients))
        plan = tuple(self.plan[product, i] for i in columns)
        return plan, tuple(self.coefficients[matrix, product, i] for i in numbers)

    def _run_chain(
        self, matrix: jax.Array, following: jax.Array, turn: jax.Array, product: Product
    ) -> Product:
        """Runs the chain of a matrix, and returns the first product of the following matrix."""
        last = self.plan.shape[0] - 1

        def visit(number: jax.Array, product: Product) -> Product:
            is_last = number == last
            place = jnp.where(is_last, following, matrix), jnp.where(is_last, 0, number + 1)
            ahead = self._read(*place)
            self._store(product, turn, self._multiply(product, turn, number == 0))
            pl.when(is_last)(lambda: self._copy_out(matrix, product, turn))
            if len(self.blocks) > 1:
                plgpu.barrier_arrive(self.stored.at[self.team])
                plgpu.barrier_wait(self.stored.at[self.team])
            return ahead

        return lax.fori_loop(0, last + 1, visit, product)

    def _multiply(self, product: Product, turn: jax.Array, is_first: jax.Array) -> jax.Array:
        """Returns α·product + Σ β·C of this warpgroup's block.

        Barriers keep the compiler from fusing what the kernel of one product does not fuse.
        """
        plan, (alpha, _, *betas) = product
        factor = self._place(plan[Column.FACTOR], turn)
        rows, cols = (pl.ds(start, ROWS) for start in self.start)

        def addend(number: jax.Array | int) -> jax.Array:  # the factor after the last one
            place = self._place(pick(plan[Column.ADDENDS :], number, plan[Column.FACTOR]), turn)
            return plgpu.load(self._block(place), layout=plgpu.Layout.WGMMA)

        def add(number: jax.Array, found: Arrays) -> Arrays:
            total, c = found
            following = addend(number + 1)
            return total + pick(betas, number, 0.0) * c.astype(jnp.float32), following

        # The stubs of plgpu do not export this documented name.
        in_registers = plgpu.ACC((ROWS, ROWS), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]

        @functools.partial(pl.run_scoped, accumulator=in_registers)
        def total(accumulator: Ref) -> jax.Array:
            for panel in range(self.terms.shape[2]):
                strips = factor.at[panel, rows], factor.at[panel, cols].transpose((1, 0))
                plgpu.wgmma(accumulator, *strips)
            if len(self.inputs) > 1:
                pl.when(is_first)(lambda: plgpu.barrier_wait(self.others_loaded.at[self.team]))
            c = addend(0)  # while the tensor cores multiply
            scaled = lax.optimization_barrier(alpha * accumulator[...])
            total, _ = lax.fori_loop(0, plan[Column.COUNT], add, (scaled, c))
            return lax.optimization_barrier(total)

        return total

    def _store(self, product: Product, turn: jax.Array, block: jax.Array) -> None:
        """Adds the diagonal, rounds the block, and stores it and its residual."""
        (row, col), (plan, coefficients) = self.start, product
        row_ids, col_ids = ids(ROWS, ROWS)
        block = jnp.where(row_ids + row == col_ids + col, block + coefficients[1], block)
        rounded = block.astype(self.outs[0].dtype)

        def store(place: jax.Array, block: jax.Array) -> None:
            term = self._place(place, turn)
            self._block(term)[...] = block

            @pl.when(col < row)
            def _() -> None:
                self._mirror(term).transpose((1, 0))[...] = block

        store(plan[Column.RESULT], rounded)

        @pl.when(plan[Column.RESIDUAL] >= 0)
        def _() -> None:
            residual = block - rounded.astype(jnp.float32)
            store(plan[Column.RESIDUAL], residual.astype(rounded.dtype))

        plgpu.commit_smem()

    def _copy_out(self, matrix: jax.Array, product: Product, turn: jax.Array) -> None:
        """Copies the block of the last result to global memory, and its transpose."""
        term, (row, col) = self._place(product[0][Column.RESULT], turn), self.start
        rows, cols, copy = pl.ds(row, ROWS), pl.ds(col, ROWS), plgpu.copy_smem_to_gmem
        copy(self._block(term), self.outs[0].at[matrix, rows, cols])
        pl.when(col < row)(lambda: copy(self._mirror(term), self.outs[0].at[matrix, cols, rows]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _block(self, term: Ref) -> Ref:
        """Returns this warpgroup's block of a term."""
        row, col = self.start
        return term.at[lax.div(col, TILE_K), pl.ds(row, ROWS)]

    def _mirror(self, term: Ref) -> Ref:
        """Returns the block of a term that is the transpose of this warpgroup's block."""
        row, col = self.start
        return term.at[lax.div(row, TILE_K), pl.ds(col, ROWS)]
