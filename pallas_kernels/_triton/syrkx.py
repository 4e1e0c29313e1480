"""Implementation `"triton"`: a Pallas kernel lowered through Triton, for NVIDIA GPUs since Ampere.

One program computes one square tile of the lower triangle and stores it twice: as it is, and
transposed into the upper triangle. A tile on the diagonal is stored once, so no element of the
result has two writers. The kernel makes tiles on the diagonal symmetric:

- A·Aᵀ gives symmetric tiles: the elements (i, j) and (j, i) add the same products in the same
  order.
- A·Bᵀ does not, so the lower half of the tile is mirrored.

A tiny A·Aᵀ has programs for the tiles above the diagonal, too. Those tiles are mirror images for
the same reason, and computing them takes less time than transposing.

JAX has deprecated this lowering, without a date of removal as of 0.12.0. The rest of the package
imports from this folder only to dispatch, so the folder can be deleted whole.
"""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._stacked import call_on_stacks, stack_coefficients
from pallas_kernels._triton.config import (
    TritonSyrkxConfig,
    count_programs,
    default_triton_syrkx_config,
    is_tiny,
)
from pallas_kernels._triton.gmem import GmemBlock, GmemRef
from pallas_kernels._triton.triangle import row_col

# JAX warns while lowering, so a filter around the call would not see the warning.
warnings.filterwarnings(
    "ignore", "The Pallas Triton backend is deprecated", category=DeprecationWarning
)

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


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


def syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrices: tuple[jax.Array, ...],
    coefficients: tuple[jax.Array, ...],
    *,
    symmetrize_output: bool,
    residual: bool,
    config: TritonSyrkxConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes what `_reference.syrkx` defines, in one launch, also under `vmap`."""
    kernel = functools.partial(
        _launch_triton_syrkx,
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
def _launch_triton_syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrices: tuple[jax.Array, ...],
    coefficients: jax.Array,
    *,
    config: TritonSyrkxConfig | None,
    mirrored_on_diagonal: bool,
    residual: bool,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Computes stacks `(batch, m, n)` with coefficients `(batch, number)`."""
    batch, m, _ = a_matrix.shape
    config = config or default_triton_syrkx_config(a_matrix.shape, a_matrix.dtype)
    is_gram = b_matrix is None and not c_matrices
    mirrors = not (is_gram and is_tiny([batch], m, config.tile))
    out_shape = jax.ShapeDtypeStruct(
        (batch, m, m), a_matrix.dtype, manual_axis_type=jax.typeof(a_matrix).manual_axis_type
    )
    return pl.pallas_call(
        functools.partial(
            _triton_syrkx_kernel,
            config=config,
            mirrors=mirrors,
            mirrored_on_diagonal=mirrored_on_diagonal,
        ),
        grid=(count_programs([batch], m, config.tile, mirrors),),
        out_shape=(out_shape,) * (1 + residual),
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="syrkx",
    )(coefficients, a_matrix, b_matrix, c_matrices)


def _triton_syrkx_kernel(
    coefficients_gmem: GmemRef,
    a_gmem: GmemRef,
    b_gmem: GmemRef | None,
    c_gmems: tuple[GmemRef, ...],
    *out_gmems: GmemRef,
    config: TritonSyrkxConfig,
    mirrors: bool,
    mirrored_on_diagonal: bool,
) -> None:
    """The body of the kernel: one program's tile, and its mirror image if `mirrors`."""
    _, m, n = a_gmem.shape
    tile, tile_k = config.tile, config.tile_k
    program = pl.program_id(0)
    tiles_per_matrix = count_programs([], m, tile, mirrors)
    batch, index = program // tiles_per_matrix, program % tiles_per_matrix
    if mirrors:
        tile_row, tile_col = row_col(index)
    else:
        tile_row, tile_col = index // pl.cdiv(m, tile), index % pl.cdiv(m, tile)
    row, col = tile_row * tile, tile_col * tile

    def accumulate(step: jax.Array, accumulator: jax.Array) -> jax.Array:
        depth = step * tile_k
        a_tile = GmemBlock(a_gmem, batch, row, depth, (tile, tile_k)).load()
        b = a_gmem if b_gmem is None else b_gmem
        b_tile = GmemBlock(b, batch, col, depth, (tile, tile_k)).load()
        return accumulator + plt.dot(a_tile, b_tile, trans_b=True)

    accumulator = jax.lax.fori_loop(
        0, pl.cdiv(n, tile_k), accumulate, jnp.zeros((tile, tile), jnp.float32)
    )

    alpha, diagonal, *betas = (
        plt.load(coefficients_gmem.at[batch, jnp.int32(i)]) for i in range(2 + len(c_gmems))
    )
    total = alpha * accumulator
    for beta, c_gmem in zip(betas, c_gmems, strict=True):
        c_tile = GmemBlock(c_gmem, batch, row, col, (tile, tile)).load()
        total += beta * c_tile.astype(jnp.float32)
    row_ids, col_ids = (start + jnp.arange(tile) for start in (row, col))
    total += jnp.where(row_ids[:, None] == col_ids[None, :], diagonal, 0.0)
    for out_gmem in out_gmems:  # the result, then what its rounding left
        out = total.astype(out_gmem.dtype)
        total -= out.astype(jnp.float32)
        if mirrored_on_diagonal:
            out = jnp.where(row_ids[:, None] >= col_ids[None, :], out, out.T)
        GmemBlock(out_gmem, batch, row, col, (tile, tile)).store(out)

        @pl.when(mirrors and tile_row != tile_col)
        def _(out_gmem: GmemRef = out_gmem, out: jax.Array = out) -> None:
            GmemBlock(out_gmem, batch, col, row, (tile, tile)).store(out.T)
