"""Implementation `"mosaic_gpu"` of A·B, where nothing is symmetric, by programs of `ring`."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels._mosaic_gpu.config import (
    ROWS,
    TILE_K,
    MosaicGemmConfig,
    default_mosaic_gemm_config,
)
from pallas_kernels._mosaic_gpu.ring import (
    Ref,
    RingProgram,
    Tile,
    in_stack,
    launch_ring,
    store_where,
    width_of,
)
from pallas_kernels._stacked import call_on_stacks, call_together, ends_of, jitted, padded


def gemm(
    a_matrix: jax.Array,
    b_matrix: jax.Array,
    *,
    out_dtype: jnp.dtype | None = None,
    num_programs: int | None = None,
    **options: Any,
) -> jax.Array:
    """A·B, of `(..., m, k)` and `(..., k, n)`, in one launch, also under `vmap`.

    Operands are padded with zeros to multiples of 64, each in a pass of its own. `out_dtype` is
    None for the operands', and `num_programs` for one on each multiprocessor. Options are those of
    `launch_mosaic_gemm`.
    """
    options["out_dtype"] = out_dtype or a_matrix.dtype
    options["num_programs"] = num_programs or device.num_multiprocessors()
    kernel = functools.partial(launch_mosaic_gemm, **options)
    (out,) = call_on_stacks(kernel, "mosaic_gpu", padded(a_matrix), (padded(b_matrix),))
    return out[..., : a_matrix.shape[-2], : b_matrix.shape[-1]]


def gemm_of_stacks(
    a_matrix: jax.Array,
    stacks: Sequence[jax.Array],
    *,
    out_dtype: jnp.dtype | None = None,
    num_programs: int | None = None,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Computes what the public `gemm_of_stacks` documents, with the options of `gemm`."""
    options["out_dtype"] = jnp.dtype(out_dtype or a_matrix.dtype)
    options["num_programs"] = num_programs or device.num_multiprocessors()

    def together(a: jax.Array, bs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return launch_mosaic_gemm(a, bs, **options)

    def alone(a: jax.Array, bs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        parts = jnp.split(a, ends_of(bs))
        return tuple(gemm(x, b, **options) for x, b in zip(parts, bs, strict=True))

    return call_together(together, alone, "mosaic_gpu", a_matrix, tuple(stacks))


@jitted
def launch_mosaic_gemm(
    a: jax.Array,
    bs: tuple[jax.Array, ...],
    *,
    out_dtype: jnp.dtype,
    num_programs: int,
    config: MosaicGemmConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, ...]:
    """Computes a stack times others that follow one another, each with an n of its own.

    Shapes are `(batch, m, k)`, and `(batchᵢ, k, nᵢ)` with the sum `batch`. All sizes are multiples
    of 64.
    """
    batch, m, _ = a.shape
    if config is None:
        mean_n = sum(len(b) * b.shape[-1] for b in bs) // batch
        config = default_mosaic_gemm_config(a.shape, mean_n, num_programs)
    return launch_ring(
        functools.partial(GemmProgram),
        {"a": a, "bs": bs},
        tuple(jax.ShapeDtypeStruct((len(b), m, b.shape[-1]), out_dtype) for b in bs),
        config=config,
        tiles=config.deal(m, tuple((len(b), b.shape[-1]) for b in bs), num_programs),
        b_block=(TILE_K, config.tile_n),
        buffers={"buffers": (ROWS, 2 * config.block_n // out_dtype.itemsize)},
        interpret=interpret,
        kernel_name="gemm",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmProgram(RingProgram):
    """A program of products. B and the result may be in several stacks, each with its own n."""

    a: Ref
    bs: tuple[Ref, ...]
    buffers: Ref

    def num_products(self, tile: Tile) -> int:
        """Returns the number of blocks of A in a strip of rows, the same in all tiles."""
        del tile
        return self.a.shape[-1] // TILE_K

    def load(self, tile: Tile, width: int) -> None:
        """Copies A and B. TMA reads nothing beyond the last column."""

        def load_factors(number: int, index: jax.Array) -> None:
            def load(slot: jax.Array, block: Any) -> None:
                a = self.a.at[tile.batch, pl.ds(tile.row, self.config.tile_m), block]
                self.copy(tile, slot, a, self.a_ring.at[slot])
                b = self.bs[number].at[index, block, pl.ds(tile.col, width)]
                self.copy(tile, slot, b, self.b_ring.at[slot])

            self.load_steps(tile, self.num_products(tile), load)

        in_stack(self.bs, tile, load_factors)

    def b_block(self, slot: jax.Array, width: int) -> Ref:
        """Returns the block of B in a slot, as B has it."""
        return self.b_ring.at[slot]

    def storing(self, tile: Tile, width: int) -> Callable[[jax.Array], None]:
        """Returns what stores the tile. It needs nothing in advance."""
        return functools.partial(self._store, tile)

    def _store(self, tile: Tile, product: jax.Array) -> None:
        """Rounds the sums of this warpgroup's rows and stores them block by block."""
        columns = self.buffers.shape[-1]
        product = product.astype(self.outs[0].dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        height, width = product.shape
        starts = itertools.product(range(0, height, ROWS), range(0, width, columns))
        for i, (row, col) in enumerate(starts):
            buffer = self.free_buffer(self.buffers, i)
            buffer[...] = product[row : row + ROWS, col : col + columns]
            plgpu.commit_smem()
            rows = pl.ds(tile.row + self.first_row + row, ROWS)
            copy = functools.partial(self._copy, buffer, rows, pl.ds(tile.col + col, columns))
            # TMA writes nothing beyond the last row. Beyond the last column it does write where the
            # result has one block of columns, because its map of the result has no axis for them.
            is_stored = tile.col + col < width_of(self.outs, tile)

            def store(copy: Callable[[int, jax.Array], None] = copy) -> None:
                in_stack(self.outs, tile, copy)
                plgpu.commit_smem_to_gmem_group()

            store_where(is_stored, store)

    def _copy(self, buffer: Ref, rows: Any, columns: Any, number: int, index: jax.Array) -> None:
        out = self.outs[number].at[index, rows, columns]
        plgpu.copy_smem_to_gmem(buffer, out, commit_group=False)
