"""Implementation `"triton"`: Pallas kernels lowered through Triton, for NVIDIA GPUs since Ampere.

`syrkx`: one program computes one square tile of the lower triangle and stores it twice: as it is,
and transposed into the upper triangle. A tile on the diagonal is stored once, so no element of the
result has two writers. Tiles of A·Aᵀ are symmetric: the elements (i, j) and (j, i) add the same
products in the same order. Of A·Bᵀ, the lower half of a tile on the diagonal is mirrored.

A tiny A·Aᵀ has programs for the tiles above the diagonal, too. Those tiles are mirror images for
the same reason, and computing them takes less time than transposing.

`gemm`: one program computes one tile. In both kernels sums run over the columns of A in order. So a
product depends neither on the tile nor on the other matrices of the stack, to the last bit.

JAX has deprecated this lowering, without a date of removal as of 0.12.0. The rest of the package
imports this module only to dispatch, so it can be deleted whole, together with `_momentum`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._stacked import Arrays, call_on_stacks, jitted, stack_coefficients

type GmemRef = Any  # a reference to global memory


class TritonConfig(NamedTuple):
    """Shape of one program: a tile of the result, in steps of `tile_k` columns of A."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int

    @property
    def params(self) -> plt.CompilerParams:
        """The options of the compiler."""
        return plt.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)


def default_triton_syrkx_config(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> TritonConfig:
    """Returns the fastest shape of square tiles for `(..., m, n)` operands.

    Fitted to an H200, untuned elsewhere. Each of its 132 multiprocessors runs at a time 4 programs
    of tile 64, or of tile 128 two with 4 warps or one with 8. The small tile wins as long as all
    programs fit at once, but for wide operands that fill the GPU with large tiles: small ones read
    twice as much (2048×8192: 95 µs against 87). Rounds of large tiles take 13.2 ns per column of A
    with 4 warps, 7.5 with 8. Tiny matrices want a program for each multiprocessor, with few steps.
    """
    *batch, m, n = shape
    programs = count_programs(batch, m, tile=128)
    if jnp.dtype(dtype).itemsize == 4:
        return TritonConfig(64, 64, 32, num_warps=4, num_stages=3)
    for tile in (16, 32, 64):
        if is_tiny(batch, m, tile):
            tile_k = 64 if n <= 64 else 128
            num_warps = 2 if (tile, tile_k) == (16, 64) else 4
            return TritonConfig(tile, tile, tile_k, num_warps=num_warps, num_stages=4)
    if m <= 256 and count_programs(batch, m, tile=32) <= 528:
        return TritonConfig(32, 32, 128, num_warps=4, num_stages=4)
    if count_programs(batch, m, tile=64) <= 528 and not (n >= 4 * m and programs >= 132):
        return TritonConfig(64, 64, 64, num_warps=4, num_stages=3)
    # With 8 warps, a program takes 128 KiB of shared memory.
    is_hopper = plt.get_gpu_info().compute_capability == 90
    if is_hopper and 7.5 * pl.cdiv(programs, 132) < 13.2 * pl.cdiv(programs, 264):
        return TritonConfig(128, 128, 64, num_warps=8, num_stages=4)
    return TritonConfig(128, 128, 64, num_warps=4, num_stages=3)


def is_tiny(batch: Sequence[int], m: int, tile: int) -> bool:
    """Returns whether programs for both triangles fit at once, one on each multiprocessor.

    On an H200 such programs are faster than half as many that store each tile twice (64×64: 1.15 µs
    against 1.27, 32×128×128: 2.03 against 2.19). Four times as many programs are slower.
    """
    return m <= 128 and count_programs(batch, m, tile, mirrors=False) <= 132


def count_programs(batch: Sequence[int], m: int, tile: int, mirrors: bool = True) -> int:
    """Returns the number of programs: one for each tile that is computed."""
    across = pl.cdiv(m, tile)
    return math.prod(batch) * (num_tiles(across) if mirrors else across**2)


# In order of their size. Measured on an H200 in 16 bits, untuned elsewhere.
TRITON_GEMM_CONFIGS = (
    TritonConfig(32, 32, 64, num_warps=4, num_stages=4),
    TritonConfig(64, 64, 64, num_warps=4, num_stages=3),
    TritonConfig(64, 128, 64, num_warps=4, num_stages=3),
    TritonConfig(128, 128, 64, num_warps=4, num_stages=3),
)


def default_triton_gemm_config(batch: int, m: int, n: int, itemsize: int) -> TritonConfig:
    """Returns the smallest tile with which an H200 runs all programs at once, or the largest.

    A step has the same number of bytes for all dtypes, so that `num_stages` steps fit in shared
    memory.
    """

    def fits(config: TritonConfig) -> bool:
        return batch * pl.cdiv(m, config.tile_m) * pl.cdiv(n, config.tile_n) <= 132

    config = next(filter(fits, TRITON_GEMM_CONFIGS), TRITON_GEMM_CONFIGS[-1])
    return config._replace(tile_k=2 * config.tile_k // itemsize)


def syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrices: Arrays,
    coefficients: Arrays,
    *,
    symmetrize_output: bool,
    **options: Any,
) -> Arrays:
    """Computes what `_reference.syrkx` defines, with the options of `_launch_triton_syrkx`."""
    options["mirrored_on_diagonal"] = symmetrize_output and b_matrix is not None
    stacked = stack_coefficients(coefficients, a_matrix.shape[:-2])
    operands = (a_matrix, b_matrix, c_matrices, stacked)
    return call_on_stacks(_launch_triton_syrkx, "triton", *operands, **options)


def gemm(a_matrix: jax.Array, b_matrix: jax.Array, **options: Any) -> jax.Array:
    """A·B, with the options of `_launch_triton_gemm`."""
    (out,) = call_on_stacks(_launch_triton_gemm, "triton", a_matrix, b_matrix, **options)
    return out


@jitted
def _launch_triton_syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrices: Arrays,
    coefficients: jax.Array,
    *,
    mirrored_on_diagonal: bool,
    residual: bool,
    config: TritonConfig | None = None,
    interpret: bool = False,
) -> Arrays:
    """Computes stacks `(batch, m, n)` with coefficients `(batch, number)`."""
    batch, m, _ = a_matrix.shape
    config = config or default_triton_syrkx_config(a_matrix.shape, a_matrix.dtype)
    is_gram = b_matrix is None and not c_matrices
    mirrors = not (is_gram and is_tiny([batch], m, config.tile_m))
    body = functools.partial(
        _triton_syrkx_kernel,
        config=config,
        mirrors=mirrors,
        mirrored_on_diagonal=mirrored_on_diagonal,
    )
    kernel = pl.pallas_call(
        body,
        out_shape=(_type_like(a_matrix, (batch, m, m), a_matrix.dtype),) * (1 + residual),
        grid=(count_programs([batch], m, config.tile_m, mirrors),),
        compiler_params=config.params,
        interpret=interpret,
        name="syrkx",
    )
    return kernel(coefficients, a_matrix, b_matrix, c_matrices)


@jitted
def _launch_triton_gemm(
    a_matrix: jax.Array,
    b_matrix: jax.Array,
    *,
    out_dtype: jnp.dtype,
    config: TritonConfig | None = None,
    interpret: bool = False,
) -> Arrays:
    """Computes stacks `(batch, m, k)` times `(batch, k, n)`."""
    (batch, m, _), n = a_matrix.shape, b_matrix.shape[-1]
    config = config or default_triton_gemm_config(batch, m, n, a_matrix.dtype.itemsize)
    kernel = pl.pallas_call(
        functools.partial(_triton_gemm_kernel, config=config),
        out_shape=(_type_like(a_matrix, (batch, m, n), out_dtype),),
        grid=(batch * pl.cdiv(m, config.tile_m) * pl.cdiv(n, config.tile_n),),
        compiler_params=config.params,
        interpret=interpret,
        name="gemm",
    )
    return kernel(a_matrix, b_matrix)


def _type_like(x: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """Returns a type that varies over a mesh as `x` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _triton_syrkx_kernel(
    coefficients_gmem: GmemRef,
    a_gmem: GmemRef,
    b_gmem: GmemRef | None,
    c_gmems: tuple[GmemRef, ...],
    *out_gmems: GmemRef,
    config: TritonConfig,
    mirrors: bool,
    mirrored_on_diagonal: bool,
) -> None:
    """The body of the kernel: one program's tile, and its mirror image if `mirrors`."""
    m, tile = a_gmem.shape[1], config.tile_m
    program = pl.program_id(0)
    tiles_per_matrix = count_programs([], m, tile, mirrors)
    batch, index = program // tiles_per_matrix, program % tiles_per_matrix
    if mirrors:
        tile_row, tile_col = row_col(index)
    else:
        tile_row, tile_col = index // pl.cdiv(m, tile), index % pl.cdiv(m, tile)
    row, col = tile_row * tile, tile_col * tile

    b = a_gmem if b_gmem is None else b_gmem
    accumulator = _sums(
        config,
        a_gmem,
        (batch, row),
        lambda depth: load(b, batch, col, depth, (tile, config.tile_k)),
        trans_b=True,
    )
    alpha, diagonal, *betas = (
        plt.load(coefficients_gmem.at[batch, jnp.int32(i)]) for i in range(2 + len(c_gmems))
    )
    total = alpha * accumulator
    for beta, c_gmem in zip(betas, c_gmems, strict=True):
        c_tile = load(c_gmem, batch, row, col, (tile, tile))
        total += beta * c_tile.astype(jnp.float32)
    row_ids, col_ids = (start + jnp.arange(tile) for start in (row, col))
    total += jnp.where(row_ids[:, None] == col_ids[None, :], diagonal, 0.0)

    def store_mirrored(out_gmem: GmemRef, out: jax.Array) -> None:
        store(out_gmem, batch, row, col, out)
        is_mirrored = mirrors and tile_row != tile_col
        pl.when(is_mirrored)(lambda: store(out_gmem, batch, col, row, out.T))

    for out_gmem in out_gmems:  # the result, then what its rounding left
        out = total.astype(out_gmem.dtype)
        total -= out.astype(jnp.float32)
        if mirrored_on_diagonal:
            out = jnp.where(row_ids[:, None] >= col_ids[None, :], out, out.T)
        store_mirrored(out_gmem, out)


def _triton_gemm_kernel(
    a_gmem: GmemRef, b_gmem: GmemRef, out_gmem: GmemRef, *, config: TritonConfig
) -> None:
    """The body of the kernel: one program's tile."""
    m, n = a_gmem.shape[1], b_gmem.shape[-1]
    tiles_m, tiles_n = pl.cdiv(m, config.tile_m), pl.cdiv(n, config.tile_n)
    program = pl.program_id(0)
    batch, index = program // (tiles_m * tiles_n), program % (tiles_m * tiles_n)
    # Programs go down the columns of tiles. The tiles of a column share B, the wider matrix.
    row, col = index % tiles_m * config.tile_m, index // tiles_m * config.tile_n
    b_shape = config.tile_k, config.tile_n
    total = _sums(
        config, a_gmem, (batch, row), lambda depth: load(b_gmem, batch, depth, col, b_shape)
    )
    store(out_gmem, batch, row, col, total.astype(out_gmem.dtype))


def _sums(
    config: TritonConfig,
    a_gmem: GmemRef,
    start: tuple[jax.Array, jax.Array],
    load_b: Callable[[jax.Array], jax.Array],
    *,
    trans_b: bool = False,
) -> jax.Array:
    """Returns a tile of the product with the blocks `load_b(depth)`, where a strip of A starts."""

    def accumulate(step: jax.Array, accumulator: jax.Array) -> jax.Array:
        depth = step * config.tile_k
        a_tile = load(a_gmem, *start, depth, (config.tile_m, config.tile_k))
        return accumulator + plt.dot(a_tile, load_b(depth), trans_b=trans_b)

    zeros = jnp.zeros((config.tile_m, config.tile_n), jnp.float32)
    return jax.lax.fori_loop(0, pl.cdiv(a_gmem.shape[-1], config.tile_k), accumulate, zeros)


def load(gmem: GmemRef, batch: jax.Array, *place: Any, **options: Any) -> jax.Array:
    """Returns a `_block`, with zeros where it is out of bounds."""
    ref, mask = _block(gmem, batch, *place, **options)
    return plt.load(ref, mask=mask, other=None if mask is None else 0.0)


def store(
    gmem: GmemRef,
    batch: jax.Array,
    row: jax.Array,
    col: jax.Array,
    out: jax.Array,
    **options: Any,
) -> None:
    """Writes the part of a `_block` that is within bounds."""
    ref, mask = _block(gmem, batch, row, col, out.shape, **options)
    plt.store(ref, out, mask=mask)


def _block(
    gmem: GmemRef,
    batch: jax.Array,
    row: jax.Array,
    col: jax.Array,
    shape: tuple[int, ...],
    *,
    covered: tuple[int, ...] | None = None,
) -> tuple[GmemRef, jax.Array | None]:
    """Returns a block of a matrix, and where it is within bounds; None where every block is.

    A stack of one matrix has that matrix at every index.

    Args:
        gmem: the stack.
        batch: the index of the matrix.
        row: the first of the block.
        col: the first of the block.
        shape: of the block.
        covered: the sizes that all blocks cover; None for those of the matrix.
    """
    (number, m, n), (rows, cols) = gmem.shape, shape
    batch = batch if number > 1 else jnp.int32(0)
    ref = gmem.at[batch, pl.ds(row, rows), pl.ds(col, cols)]
    if m % rows == 0 and n % cols == 0 and covered in (None, (m, n)):
        return ref, None
    row_ids, col_ids = row + jnp.arange(rows), col + jnp.arange(cols)
    return ref, (row_ids < m)[:, None] & (col_ids < n)[None, :]


def num_tiles(rows: int) -> int:
    """Returns how many tiles the lower triangle of a `rows` × `rows` grid of tiles has."""
    return rows * (rows + 1) // 2


def row_col(tile_id: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the (row, col) of an int32 tile id, for ids below 2²⁷: row by row from (0, 0).

    `row` is the largest r with r(r + 1)/2 ≤ id. The float32 root can be one off on either side
    of a row's first id, never more. Two integer comparisons correct it.
    """
    row = ((jnp.sqrt(8.0 * tile_id.astype(jnp.float32) + 1.0) - 1.0) * 0.5).astype(jnp.int32)
    row = jnp.where(row * (row + 1) // 2 > tile_id, row - 1, row)
    row = jnp.where((row + 1) * (row + 2) // 2 <= tile_id, row + 1, row)
    return row, tile_id - row * (row + 1) // 2
