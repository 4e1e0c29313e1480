"""A·B by a Pallas kernel lowered through Triton, where nothing is symmetric.

One program computes one tile of the result, and rounds its sums once, to the dtype of the result.
Sums run over the columns of A in order. So a product depends neither on the tile nor on the other
matrices of the stack, to the last bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._stacked import call_on_stacks
from pallas_kernels._triton.gmem import GmemBlock, GmemRef


@dataclasses.dataclass(frozen=True)
class TritonGemmConfig:
    """Shape of one program: a `tile_m` × `tile_n` tile of the result, in steps of `tile_k`."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int


# In order of their size. Measured on an H200 in 16 bits, untuned elsewhere.
TRITON_GEMM_CONFIGS = (
    TritonGemmConfig(32, 32, 64, num_warps=4, num_stages=4),
    TritonGemmConfig(64, 64, 64, num_warps=4, num_stages=3),
    TritonGemmConfig(64, 128, 64, num_warps=4, num_stages=3),
    TritonGemmConfig(128, 128, 64, num_warps=4, num_stages=3),
)


def default_triton_gemm_config(batch: int, m: int, n: int, itemsize: int) -> TritonGemmConfig:
    """Returns the smallest tile with which an H200 runs all programs at once, or the largest.

    A step has the same number of bytes for all dtypes, so that `num_stages` steps fit in shared
    memory.
    """

    def fits(config: TritonGemmConfig) -> bool:
        return batch * pl.cdiv(m, config.tile_m) * pl.cdiv(n, config.tile_n) <= 132

    config = next(filter(fits, TRITON_GEMM_CONFIGS), TRITON_GEMM_CONFIGS[-1])
    return dataclasses.replace(config, tile_k=2 * config.tile_k // itemsize)


def gemm(
    a_matrix: jax.Array,
    b_matrix: jax.Array,
    *,
    out_dtype: jnp.dtype,
    config: TritonGemmConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """A·B, of `(..., m, k)` and `(..., k, n)`, in one launch, also under `vmap`.

    Args:
        a_matrix: shape `(..., m, k)`.
        b_matrix: shape `(..., k, n)`.
        out_dtype: dtype of the result.
        config: the tile, or None for the default.
        interpret: runs the kernel in Pallas' interpreter.
    """
    kernel = functools.partial(
        _launch_triton_gemm, out_dtype=out_dtype, config=config, interpret=interpret
    )
    (out,) = call_on_stacks(kernel, "triton", a_matrix, b_matrix)
    return out


# Jitted, so that calls of equal shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("out_dtype", "config", "interpret"))
def _launch_triton_gemm(
    a_matrix: jax.Array,
    b_matrix: jax.Array,
    *,
    out_dtype: jnp.dtype,
    config: TritonGemmConfig | None,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Computes stacks `(batch, m, k)` times `(batch, k, n)`."""
    (batch, m, _), n = a_matrix.shape, b_matrix.shape[-1]
    config = config or default_triton_gemm_config(batch, m, n, a_matrix.dtype.itemsize)
    out_shape = jax.ShapeDtypeStruct(
        (batch, m, n), out_dtype, manual_axis_type=jax.typeof(a_matrix).manual_axis_type
    )
    return pl.pallas_call(
        functools.partial(_triton_gemm_kernel, config=config),
        grid=(batch * pl.cdiv(m, config.tile_m) * pl.cdiv(n, config.tile_n),),
        out_shape=(out_shape,),
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="gemm",
    )(a_matrix, b_matrix)


def _triton_gemm_kernel(
    a_gmem: GmemRef, b_gmem: GmemRef, out_gmem: GmemRef, *, config: TritonGemmConfig
) -> None:
    """The body of the kernel: one program's tile."""
    (_, m, k), n = a_gmem.shape, b_gmem.shape[-1]
    tiles_m, tiles_n = pl.cdiv(m, config.tile_m), pl.cdiv(n, config.tile_n)
    program = pl.program_id(0)
    batch, index = program // (tiles_m * tiles_n), program % (tiles_m * tiles_n)
    # Programs go down the columns of tiles. The tiles of a column share B, the wider matrix.
    row, col = index % tiles_m * config.tile_m, index // tiles_m * config.tile_n

    def accumulate(step: jax.Array, accumulator: jax.Array) -> jax.Array:
        depth = step * config.tile_k
        a_tile = GmemBlock(a_gmem, batch, row, depth, (config.tile_m, config.tile_k)).load()
        b_tile = GmemBlock(b_gmem, batch, depth, col, (config.tile_k, config.tile_n)).load()
        return accumulator + plt.dot(a_tile, b_tile)

    tile = (config.tile_m, config.tile_n)
    steps = pl.cdiv(k, config.tile_k)
    total = jax.lax.fori_loop(0, steps, accumulate, jnp.zeros(tile, jnp.float32))
    GmemBlock(out_gmem, batch, row, col, tile).store(total.astype(out_gmem.dtype))
