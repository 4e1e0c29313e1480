"""Implementation `"triton"`: a Pallas kernel lowered through Triton, for NVIDIA GPUs since Ampere.

One program computes one square tile of the lower triangle and stores it twice: as it is, and
transposed into the upper triangle. A tile on the diagonal is stored once, so no element of the
result has two writers. Of A·Aᵀ that tile is symmetric as it comes: the elements (i, j) and (j, i)
add the same products in the same order. Of A·Bᵀ it is not, and its lower half is mirrored.

Of a tiny A·Aᵀ the tiles above the diagonal, mirror images for the same reason, are computed, too:
that takes less time than to transpose.

JAX has deprecated this lowering (no removal date is announced as of 0.12.0). Nothing else in the
package imports from this file and `_pallas_triton_gemm` but the tables of the dispatch, so they can
be deleted whole.
"""

import dataclasses
import functools
import math
import operator
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._stacked import call_on_stacks, stack_coefficients
from pallas_kernels._triton.triangle import num_tiles, row_col

# Raised while lowering, so it cannot be filtered around the call.
warnings.filterwarnings(
    "ignore", "The Pallas Triton backend is deprecated", category=DeprecationWarning
)

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of one program: a `tile` × `tile` block of the result, in steps of `tile_k`."""

    tile: int
    tile_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        for name in ("tile", "tile_k", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if min(self.tile, self.tile_k) < 16:
            raise ValueError(f"tiles of a matrix product are at least 16 wide, got {self}")


def unsupported_reason(a_matrix: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Returns why this implementation cannot take `(..., m, n)` operands here, or None."""
    if a_matrix.dtype not in _DTYPES:
        supported = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"the dtype {a_matrix.dtype} is not one of {supported}"
    if not math.prod(a_matrix.shape):
        return f"the shape {a_matrix.shape} has no elements"
    if not plt.is_gpu_device():
        return "the default device is not a GPU"
    try:
        info = plt.get_gpu_info()
    except ValueError as error:
        return str(error)
    if info.compute_capability < 80:
        return f"{info.arch_name} is not an NVIDIA GPU of compute capability 8.0 or higher"
    return None


def is_fastest(a_matrix: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether None should mean this kernel for `(..., m, n)` operands.

    Measured on an H200 against `_reference.syrkx` by `python -m muon_jax.benchmarks syrk`, untuned
    elsewhere. XLA is faster in float32, on rows that do not start on 16 bytes, and on operands that
    are not small, but wide, with too few tiles to fill the GPU (1024×4096: 17.7 µs against 19.6),
    whose sums it splits.
    """
    *batch, m, n = a_matrix.shape
    aligned = jnp.dtype(a_matrix.dtype).itemsize == 2 and m % 8 == n % 8 == 0
    has_enough_tiles = n < 4 * m or _programs(batch, m, tile=64) > 264
    return aligned and (has_enough_tiles or is_small(a_matrix))


def is_small(a_matrix: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether `(..., m, n)` operands are so small that no other kernel is faster.

    That is batch·m²·n < 2²⁶: measured on an H200 with m from 64 to 384 and stacks of 1 to 64. Next
    to it either kernel is slower by 12% at most.
    """
    return math.prod(a_matrix.shape) * a_matrix.shape[-2] < 2**26


def default_config(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Config:
    """Returns the fastest tile shape for `(..., m, n)` operands.

    Fitted to an H200, untuned elsewhere. Its 132 multiprocessors take 4 programs each of tile 64, 2
    of tile 128 with 4 warps or 1 with 8. The small tile wins as long as all programs fit at once,
    but for wide operands that fill the GPU with large ones (2048×8192: 87 µs against 95, it reads
    twice as much); of the large ones the variant whose rounds take less time, 13.2 and 7.5 ns per
    column of A. Tiny matrices want as many programs as there are multiprocessors, with few steps.
    """
    *batch, m, n = shape
    programs = _programs(batch, m, tile=128)
    if jnp.dtype(dtype).itemsize == 4:
        return Config(tile=64, tile_k=32, num_warps=4, num_stages=3)
    for tile in (16, 32, 64):
        if _is_tiny(batch, m, tile):
            tile_k = 64 if n <= 64 else 128
            num_warps = 2 if (tile, tile_k) == (16, 64) else 4
            return Config(tile=tile, tile_k=tile_k, num_warps=num_warps, num_stages=4)
    if m <= 256 and _programs(batch, m, tile=32) <= 528:
        return Config(tile=32, tile_k=128, num_warps=4, num_stages=4)
    if _programs(batch, m, tile=64) <= 528 and not (n >= 4 * m and programs >= 132):
        return Config(tile=64, tile_k=64, num_warps=4, num_stages=3)
    is_hopper = plt.get_gpu_info().compute_capability == 90  # the next takes 128 KiB on chip
    if is_hopper and 7.5 * pl.cdiv(programs, 132) < 13.2 * pl.cdiv(programs, 264):
        return Config(tile=128, tile_k=64, num_warps=8, num_stages=4)
    return Config(tile=128, tile_k=64, num_warps=4, num_stages=3)


def _is_tiny(batch, m: int, tile: int) -> bool:
    """Whether programs for both triangles fit at once, one on each multiprocessor.

    Measured on an H200: then they are faster than half as many that store each tile twice
    (64×64: 1.15 µs against 1.27, 32×128×128: 2.03 against 2.19), and four times as many slower.
    """
    return m <= 128 and _programs(batch, m, tile, mirrors=False) <= 132


def _programs(batch, m: int, tile: int, mirrors: bool = True) -> int:
    across = pl.cdiv(m, tile)
    return math.prod(batch) * (num_tiles(across) if mirrors else across**2)


def syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrices: tuple[jax.Array, ...],
    coefficients: tuple[jax.Array, ...],
    *,
    symmetrize_output: bool,
    residual: bool,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """As `_reference.syrkx`; every leading dimension is part of one launch, also under `vmap`."""
    kernel = functools.partial(
        _launch,
        config=config,
        mirrored_on_diagonal=symmetrize_output and b_matrix is not None,
        residual=residual,
        interpret=interpret,
    )
    stacked = stack_coefficients(coefficients, a_matrix.shape[:-2])
    return call_on_stacks(kernel, "triton", a_matrix, b_matrix, c_matrices, stacked)


# Jitted, so that calls of equal shapes are traced and lowered once.
@functools.partial(
    jax.jit, static_argnames=("config", "mirrored_on_diagonal", "residual", "interpret")
)
def _launch(
    a_matrix,
    b_matrix,
    c_matrices,
    coefficients,
    *,
    config,
    mirrored_on_diagonal,
    residual,
    interpret,
):
    batch, m, _ = a_matrix.shape
    config = config or default_config(a_matrix.shape, a_matrix.dtype)
    is_tiny = _is_tiny([batch], m, config.tile)
    mirrors = not is_tiny or b_matrix is not None or bool(c_matrices)
    out_shape = jax.ShapeDtypeStruct(
        (batch, m, m), a_matrix.dtype, manual_axis_type=jax.typeof(a_matrix).manual_axis_type
    )
    return pl.pallas_call(
        functools.partial(
            _kernel, config=config, mirrors=mirrors, mirrored_on_diagonal=mirrored_on_diagonal
        ),
        grid=(_programs([batch], m, config.tile, mirrors),),
        out_shape=(out_shape,) * (1 + residual),
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="syrkx",
    )(coefficients, a_matrix, b_matrix, c_matrices)


def _kernel(
    coefficients_gmem,
    a_gmem,
    b_gmem,
    c_gmems,
    *out_gmems,
    config: Config,
    mirrors: bool,
    mirrored_on_diagonal: bool,
):
    _, m, n = a_gmem.shape
    tile, tile_k = config.tile, config.tile_k
    program = pl.program_id(0)
    tiles_per_matrix = _programs([], m, tile, mirrors)
    batch, index = program // tiles_per_matrix, program % tiles_per_matrix
    if mirrors:
        tile_row, tile_col = row_col(index)
    else:
        tile_row, tile_col = index // pl.cdiv(m, tile), index % pl.cdiv(m, tile)
    row, col = tile_row * tile, tile_col * tile

    def accumulate(step, accumulator):
        depth = step * tile_k
        a_tile = Tile(a_gmem, batch, row, depth, (tile, tile_k)).load()
        b = a_gmem if b_gmem is None else b_gmem
        b_tile = Tile(b, batch, col, depth, (tile, tile_k)).load()
        return accumulator + plt.dot(a_tile, b_tile, trans_b=True)

    accumulator = jax.lax.fori_loop(
        0, pl.cdiv(n, tile_k), accumulate, jnp.zeros((tile, tile), jnp.float32)
    )

    alpha, diagonal, *betas = (
        plt.load(coefficients_gmem.at[batch, jnp.int32(i)]) for i in range(2 + len(c_gmems))
    )
    total = alpha * accumulator
    for beta, c_gmem in zip(betas, c_gmems, strict=True):
        c_tile = Tile(c_gmem, batch, row, col, (tile, tile)).load()
        total += beta * c_tile.astype(jnp.float32)
    row_ids, col_ids = (start + jnp.arange(tile) for start in (row, col))
    total += jnp.where(row_ids[:, None] == col_ids[None, :], diagonal, 0.0)
    for out_gmem in out_gmems:  # the result, then what its rounding left
        out = total.astype(out_gmem.dtype)
        total -= out.astype(jnp.float32)
        if mirrored_on_diagonal:
            out = jnp.where(row_ids[:, None] >= col_ids[None, :], out, out.T)
        Tile(out_gmem, batch, row, col, (tile, tile)).store(out)

        @pl.when(mirrors and tile_row != tile_col)
        def _(out_gmem=out_gmem, out=out):
            Tile(out_gmem, batch, col, row, (tile, tile)).store(out.T)


class Tile(NamedTuple):
    """A block of a matrix of a stack in global memory, some of it perhaps out of bounds."""

    gmem: Any
    batch: jax.Array
    row: jax.Array
    col: jax.Array
    shape: tuple[int, int]

    def load(self) -> jax.Array:
        """Returns the block, zeros where it is out of bounds."""
        mask = self._mask()
        return plt.load(self._ref(), mask=mask, other=None if mask is None else 0.0)

    def store(self, values: jax.Array) -> None:
        """Writes what is within bounds."""
        plt.store(self._ref(), values, mask=self._mask())

    def _ref(self):
        rows, cols = map(pl.ds, (self.row, self.col), self.shape)
        return self.gmem.at[self.batch, rows, cols]

    def _mask(self):
        """What is within bounds, or None where every tile is."""
        _, m, n = self.gmem.shape
        if m % self.shape[0] == 0 and n % self.shape[1] == 0:
            return None
        row_ids, col_ids = map(operator.add, (self.row, self.col), map(jnp.arange, self.shape))
        return (row_ids < m)[:, None] & (col_ids < n)[None, :]
