"""Implementation `"mosaic_gpu"`: products by Hopper's own instructions, TMA and wgmma.

In a symmetric product the blocks of C come through the ring after the blocks of A and B. Then the
sums are scaled, and C and the diagonal are added. Each block is rounded and stored twice, once
transposed, through staging buffers of its warpgroup.

Blocks above the diagonal are skipped. Blocks on the diagonal are stored once, so no element of the
result has two writers. A·Aᵀ gives symmetric ones: the elements (i, j) and (j, i) add the same
products in the same order. A·Bᵀ does not, so the lower half of the block is mirrored.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _stacked
from pallas_kernels._mosaic_gpu import config as configs
from pallas_kernels._mosaic_gpu import ring
from pallas_kernels._mosaic_gpu.config import ROWS, TILE_K
from pallas_kernels._mosaic_gpu.ring import Ref, Tile, ids
from pallas_kernels._mosaic_gpu.work_list import deal_rectangles, deal_triangles
from pallas_kernels._stacked import Arrays, call_on_stacks, padded


def syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrices: Arrays,
    coefficients: Arrays,
    *,
    symmetrize_output: bool,
    config: configs.MosaicSyrkxConfig | None = None,
    **options: Any,
) -> Arrays:
    """Computes what `_reference.syrkx` defines, with the options of `launch_mosaic_syrkx`.

    Operands are padded with zeros to the config's multiples, each in a pass of its own.
    """
    kind = config or configs.RingConfig
    mirrored_on_diagonal = symmetrize_output and b_matrix is not None
    options |= {"config": config, "mirrored_on_diagonal": mirrored_on_diagonal}
    # A·Aᵀ also passes A twice, so that its program is the one of A·Bᵀ.
    b_matrix = a_matrix if b_matrix is None else b_matrix
    pad = functools.partial(padded, multiple=kind.multiple)
    a, b, cs = jax.tree.map(pad, (a_matrix, b_matrix, c_matrices))
    *batch, m, _ = a_matrix.shape
    operands = ((a,), (b,), cs, _stacked.stack_coefficients(coefficients, tuple(batch)))
    results = call_on_stacks(launch_mosaic_syrkx, kind.implementation, *operands, **options)
    return tuple(out[..., :m, :m] for out in results)


def syrk_of_stacks(stacks: Sequence[jax.Array], alpha: float | jax.Array, **options: Any) -> Arrays:
    """Computes what `Implementation.syrk_of_stacks` documents, with the options of `syrkx`."""

    def together(a: Arrays, coefficients: jax.Array) -> Arrays:
        return launch_mosaic_syrkx(a, a, (), coefficients, mirrored_on_diagonal=False, **options)

    def alone(a: Arrays, coefficients: jax.Array) -> Arrays:
        results = [
            syrkx(x, None, (), (row[:, 0], row[:, 1]), symmetrize_output=True, **options)
            for x, row in zip(a, jnp.split(coefficients, _stacked.ends_of(a)), strict=True)
        ]
        return tuple(map(jnp.concatenate, zip(*results, strict=True)))

    coefficients = _stacked.stack_coefficients((alpha, 0.0), (sum(map(len, stacks)),))
    return _stacked.call_together(together, alone, "mosaic_gpu", tuple(stacks), coefficients)


def gemm(
    a_matrix: jax.Array,
    b_matrix: jax.Array,
    *,
    out_dtype: Any = None,
    config: configs.MosaicGemmConfig | None = None,
    **options: Any,
) -> jax.Array:
    """A·B, padded as by `syrkx`, with the options of `launch_mosaic_gemm`."""
    kind = config or configs.RingConfig
    options |= {"out_dtype": jnp.dtype(out_dtype or a_matrix.dtype), "config": config}
    a, b = (padded(x, kind.multiple) for x in (a_matrix, b_matrix))
    (out,) = call_on_stacks(launch_mosaic_gemm, kind.implementation, a, (b,), **options)
    return out[..., : a_matrix.shape[-2], : b_matrix.shape[-1]]


def gemm_of_stacks(
    a_matrix: jax.Array, stacks: Sequence[jax.Array], *, out_dtype: Any = None, **options: Any
) -> Arrays:
    """Computes what `Implementation.gemm_of_stacks` documents, with the options of `gemm`."""
    options["out_dtype"] = jnp.dtype(out_dtype or a_matrix.dtype)

    def alone(a: jax.Array, bs: Arrays) -> Arrays:
        parts = jnp.split(a, _stacked.ends_of(bs))
        return tuple(gemm(x, b, **options) for x, b in zip(parts, bs, strict=True))

    together = functools.partial(launch_mosaic_gemm, **options)
    return _stacked.call_together(together, alone, "mosaic_gpu", a_matrix, tuple(stacks))


@_stacked.jitted
def launch_mosaic_syrkx(
    a: Arrays,
    b: Arrays,
    cs: Arrays,
    coefficients: jax.Array,
    *,
    mirrored_on_diagonal: bool,
    residual: bool,
    num_programs: int,
    program: type[ring.RingProgram] | None = None,
    config: configs.MosaicSyrkxConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Arrays:
    """Computes stacks `(batchᵢ, m, nᵢ)` that follow one another, of multiples of 64.

    Coefficients have shape `(batch, number)`, and results `(batch, m, m)`, for the sum `batch`.
    """
    batch, m, dtype = sum(map(len, a)), a[0].shape[1], a[0].dtype
    if config is None:
        mean_n = sum(len(x) * x.shape[-1] for x in a) // batch
        config = configs.default_mosaic_syrkx_config(
            (batch, m, mean_n), addend=bool(cs), mirrored_on_diagonal=mirrored_on_diagonal
        )
    if mirrored_on_diagonal and config.block_n != ROWS:
        raise ValueError(f"config must have a block_n of {ROWS} for A·Bᵀ, got {config}")
    rows, columns = config.block_m, config.block_n
    return ring.launch_ring(
        functools.partial(program or SyrkxProgram, mirrored_on_diagonal=mirrored_on_diagonal),
        {"coefficients": coefficients, "cs": cs, "a": a, "b": b},
        (jax.ShapeDtypeStruct((batch, m, m), dtype),) * (1 + residual),
        config=config,
        tiles=deal_triangles(batch, m, config.tile_m, config.tile_n, num_programs=num_programs),
        b_block=(config.tile_n, TILE_K),
        buffers={"out_buffers": (rows, columns), "mirror_buffers": (columns, rows)},
        interpret=interpret,
        kernel_name="syrkx",
    )


@_stacked.jitted
def launch_mosaic_gemm(
    a: jax.Array,
    bs: Arrays,
    *,
    out_dtype: jnp.dtype,
    num_programs: int,
    program: type[ring.RingProgram] | None = None,
    config: configs.MosaicGemmConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Arrays:
    """Computes a stack `(batch, m, k)` times stacks `(batchᵢ, k, nᵢ)`, of multiples of 64."""
    (batch, m, _), stacks = a.shape, tuple((len(b), b.shape[-1]) for b in bs)
    if config is None:
        mean_n = sum(number * n for number, n in stacks) // batch
        config = configs.default_mosaic_gemm_config(a.shape, mean_n, num_programs)
    return ring.launch_ring(
        functools.partial(program or GemmProgram),
        {"a": a, "bs": bs},
        tuple(jax.ShapeDtypeStruct((number, m, n), out_dtype) for number, n in stacks),
        config=config,
        tiles=deal_rectangles(m, stacks, config.tile_m, config.tile_n, num_programs=num_programs),
        b_block=(TILE_K, config.tile_n),
        buffers={"buffers": (config.block_m, 2 * config.block_n // out_dtype.itemsize)},
        interpret=interpret,
        kernel_name="gemm",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyrkxProgram(ring.SymmetricProgram):
    """A program of symmetric products. Results are the product, then its residual if wanted."""

    mirrored_on_diagonal: bool
    coefficients: Ref
    a: tuple[Ref, ...]
    b: tuple[Ref, ...]
    cs: tuple[Ref, ...]
    out_buffers: Ref
    mirror_buffers: Ref

    def num_products(self, tile: Tile) -> int | jax.Array:
        """Returns the number of blocks of the tile's A in a strip of rows."""
        return ring.width_of(self.a, tile, unit=TILE_K)

    @property
    def stacks(self) -> tuple[Ref, ...]:
        """Those of A."""
        return self.a

    def load_factors(
        self, tile: Tile, number: int, index: jax.Array, slot: jax.Array, columns: Any
    ) -> None:
        """Copies A and B."""
        rows, cols = pl.ds(tile.row, self.config.tile_m), pl.ds(tile.col, self.config.tile_n)
        a, b = self.a[number].at[index, rows, columns], self.b[number].at[index, cols, columns]
        self.copy(tile, slot, a, self.a_ring.at[slot])
        self.copy(tile, slot, b, self.b_ring.at[slot])

    @property
    def others(self) -> tuple[tuple[Ref, int], ...]:
        """One C after another, in chunks of TILE_K columns."""
        return (*itertools.product(self.cs, range(self._num_chunks)),)

    @property
    def _num_chunks(self) -> int:
        return pl.cdiv(self.config.tile_n, TILE_K)

    def load_other(self, tile: Tile, slot: jax.Array, other: tuple[Ref, int]) -> None:
        """Copies a chunk of C in two halves."""
        (c, i), size = other, self.config.tile_m // 2
        columns = pl.ds((lax.div(tile.col, TILE_K) + i) * TILE_K, TILE_K)
        batch = tile.batch if c.shape[0] > 1 else 0  # one C may serve for all
        for half in (0, size):
            source = c.at[batch, pl.ds(tile.row + half, size), columns]
            self.copy(tile, slot, source, self.a_ring.at[slot, pl.ds(half, size)])

    def b_block(self, slot: jax.Array) -> Ref:
        """Returns the block of Bᵀ."""
        return self.b_ring.at[slot].transpose((1, 0))

    def storing(self, tile: Tile) -> Callable[[jax.Array], None]:
        """Reads the coefficients, and returns what stores the tile."""
        coefficients = [self.coefficients[tile.batch, i] for i in range(2 + len(self.cs))]
        return functools.partial(self._store, tile, coefficients)

    def _store(self, tile: Tile, coefficients: list[jax.Array], product: jax.Array) -> None:
        """Finishes, rounds and stores the sums of this warpgroup's rows, block by block."""
        alpha, diagonal, *betas = coefficients
        rows = self.config.block_m
        row_ids, col_ids = ids(rows, self.config.block_n, layout=self.layout)
        # Without barriers, some configs add the diagonal to α·A·Aᵀ in one instruction, which rounds
        # once. In other configs sums wait for the buffers.
        blocks = [
            (row, col, lax.optimization_barrier(block))
            for row, col, block in self.blocks(tile, self._sums(product, tile, alpha, betas))
        ]
        self.await_stores()

        def store(i: int, row: jax.Array, col: jax.Array, block: jax.Array) -> None:
            block = jnp.where(row_ids + row == col_ids + col, block + diagonal, block)
            below_diagonal = row_ids + row >= col_ids + col
            for index, out in enumerate(self.outs, i * len(self.outs)):
                rounded = block.astype(out.dtype)
                block -= rounded.astype(jnp.float32)
                direct, mirror = self.stage(rounded, index, below_diagonal)
                self.copy_out(direct, mirror, out, tile.batch, row, col)
                self.end_group()

        for i, (row, col, block) in enumerate(blocks):
            is_stored = (row < self.outs[0].shape[1]) & (col < row + rows)
            self.store_where(is_stored, functools.partial(store, i, row, col, block))

    def stage(self, block: jax.Array, index: int, below_diagonal: jax.Array) -> tuple[Ref, Ref]:
        """Writes a rounded block and its transpose to buffers, and returns these."""
        direct = self.free_buffer(self.out_buffers, index)
        mirror = self.mirror_buffers.at[self.warpgroup, index % self.config.num_buffers]
        mirror.transpose((1, 0))[...] = block
        if self.mirrored_on_diagonal and mirror.shape == direct.shape:  # else `copy_out` mirrors
            self.commit()  # all threads have written it
            mirrored = plgpu.load(mirror, layout=plgpu.Layout.WGMMA)
            block = jnp.where(below_diagonal, block, mirrored)
        direct[...] = block
        self.commit()
        return direct, mirror

    def _sums(
        self, product: jax.Array, tile: Tile, alpha: jax.Array, betas: list[jax.Array]
    ) -> list[jax.Array]:
        """Returns α·product + Σ β·C, for each `block_n` columns."""
        block_n, width = self.config.block_n, self.config.tile_n
        # With the barrier, sums are fused as in the kernel of a chain.
        sums = [
            lax.optimization_barrier(alpha * product[:, i : i + block_n])
            for i in range(0, width, block_n)
        ]
        for index, beta in enumerate(betas):
            for i, c in enumerate(self._blocks_of_c(index, tile)):
                sums[i] += beta * c.astype(jnp.float32)
        return sums

    def _blocks_of_c(self, index: int, tile: Tile) -> Iterator[jax.Array]:
        """Yields the block of the C of that index for each `block_n` columns.

        C comes in chunks of TILE_K columns, read when a block needs them. Where the width is no
        multiple of TILE_K, tiles start at the start or in the middle of a chunk.
        """
        block_n, width = self.config.block_n, self.config.tile_n
        first_step = tile.step + self.num_products(tile) + index * self._num_chunks

        @functools.cache
        def chunk(j: int) -> jax.Array:
            (values,) = self.take(tile, first_step + j, self.a_ring)
            return values

        for column in range(0, width, block_n):
            j, offset = divmod(column, TILE_K)
            block = chunk(j)[:, offset : offset + block_n]
            if width % TILE_K:
                shifted = chunk(j + 1)[:, :block_n] if offset else chunk(j)[:, block_n:]
                _, col_ids = ids(self.config.rows, block_n)
                block = jnp.where(col_ids < lax.rem(tile.col, TILE_K), shifted, block)
            yield block


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmProgram(ring.RingProgram):
    """A program of products, where nothing is symmetric."""

    a: Ref
    bs: tuple[Ref, ...]
    buffers: Ref

    def num_products(self, tile: Tile) -> int:
        """Returns the number of blocks of A in a strip of rows, the same in all tiles."""
        del tile
        return self.a.shape[-1] // TILE_K

    @property
    def stacks(self) -> tuple[Ref, ...]:
        """Those of B."""
        return self.bs

    def load_factors(
        self, tile: Tile, number: int, index: jax.Array, slot: jax.Array, columns: Any
    ) -> None:
        """Copies A and B. TMA reads nothing beyond the last column."""
        a = self.a.at[tile.batch, pl.ds(tile.row, self.config.tile_m), columns]
        b = self.bs[number].at[index, columns, pl.ds(tile.col, self.config.tile_n)]
        self.copy(tile, slot, a, self.a_ring.at[slot])
        self.copy(tile, slot, b, self.b_ring.at[slot])

    def b_block(self, slot: jax.Array) -> Ref:
        """Returns the block of B."""
        return self.b_ring.at[slot]

    def storing(self, tile: Tile) -> Callable[[jax.Array], None]:
        """Returns what stores the tile. It needs nothing in advance."""
        return functools.partial(self._store, tile)

    def _store(self, tile: Tile, product: jax.Array) -> None:
        """Rounds the sums of this warpgroup's rows and stores them block by block."""
        columns = self.buffers.shape[-1]
        rows, product = self.config.block_m, product.astype(self.outs[0].dtype)
        self.await_stores()
        height, width = product.shape
        starts = itertools.product(range(0, height, rows), range(0, width, columns))
        for i, (row, col) in enumerate(starts):
            buffer = self.free_buffer(self.buffers, i)
            buffer[...] = product[row : row + rows, col : col + columns]
            self.commit()
            place = pl.ds(tile.row + self.first_row + row, rows), pl.ds(tile.col + col, columns)
            copy = functools.partial(self._copy, buffer, place)
            # TMA writes nothing beyond the last row. Beyond the last column it does write where the
            # result has one block of columns, because its map of the result has no axis for them.
            is_stored = tile.col + col < ring.width_of(self.outs, tile)

            def store(copy: Callable[[int, jax.Array], None] = copy) -> None:
                ring.in_stack(self.outs, tile, copy)
                self.end_group()

            self.store_where(is_stored, store)

    def _copy(self, buffer: Ref, place: tuple[Any, Any], number: int, index: jax.Array) -> None:
        self.start_store(buffer, self.outs[number].at[index, *place])
