"""Implementation `"mosaic_gpu"`: a Pallas kernel of Hopper's own instructions, TMA and wgmma.

This is the part on the host; `_mosaic_gpu_program` and what it is made of, `_mosaic_gpu_ring`, run
on each multiprocessor.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _device
from pallas_kernels._mosaic_gpu_config import ROWS, TILE_K, Config, default_config
from pallas_kernels._mosaic_gpu_program import Program
from pallas_kernels._stacked import call_on_stacks, padded, stack_coefficients


def unsupported_reason(a_matrix: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Returns why this implementation cannot take `(..., m, n)` operands here, or None."""
    if a_matrix.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the dtype {a_matrix.dtype} is neither bfloat16 nor float16"
    if not a_matrix.size:
        return f"the shape {a_matrix.shape} has no elements"
    if not _device.is_hopper():
        return f"the default device, {_device.kind()}, is no Hopper GPU (H100, H200, GH200)"
    return None


def pads_little(a_matrix: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether padding `(..., m, n)` operands costs less than the kernel `"triton"` loses.

    Measured on an H200: it does where m is a multiple of 64, so that the result needs no passes, or
    where rows do not start on 16 bytes (1001×1500: 15.3 µs against 19.0), but not else (4000×4000:
    137 against 117).
    """
    *_, m, n = a_matrix.shape
    return m % 64 == 0 or m % 8 != 0 or n % 8 != 0


def syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrices: tuple[jax.Array, ...],
    coefficients: tuple[jax.Array, ...],
    *,
    symmetrize_output: bool,
    residual: bool,
    config: Config | None = None,
    num_programs: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, ...]:
    """As `_reference.syrkx`; every leading dimension is part of one launch, also under `vmap`.

    Operands are padded with zeros to multiples of 64, which are passes of their own.
    """
    kernel = functools.partial(
        _launch,
        config=config,
        mirrored_on_diagonal=symmetrize_output and b_matrix is not None,
        residual=residual,
        num_programs=num_programs or _device.num_multiprocessors(),
        interpret=interpret,
    )

    # Of A·Aᵀ too A is passed twice, so that it is the same program as A·Bᵀ.
    b_matrix = a_matrix if b_matrix is None else b_matrix
    a, b, cs = jax.tree.map(padded, (a_matrix, b_matrix, c_matrices))
    *batch, m, _ = a_matrix.shape
    stacked = stack_coefficients(coefficients, tuple(batch))
    results = call_on_stacks(kernel, "mosaic_gpu", a, b, cs, stacked)
    return tuple(out[..., :m, :m] for out in results)


# Jitted, so that calls of equal shapes are traced and lowered once.
@functools.partial(
    jax.jit,
    static_argnames=("config", "mirrored_on_diagonal", "residual", "num_programs", "interpret"),
)
def _launch(
    a, b, cs, coefficients, *, config, mirrored_on_diagonal, residual, num_programs, interpret
):
    batch, m, _ = a.shape
    config = config or default_config(
        a.shape, addend=bool(cs), mirrored_on_diagonal=mirrored_on_diagonal
    )
    if mirrored_on_diagonal and config.block_n != ROWS:
        raise ValueError(f"A·Bᵀ needs a config that stores square blocks, got {config}")
    work = config.deal(batch, m, num_programs)
    stages, staging = config.num_stages, (config.num_warpgroups, config.num_buffers)

    def shared(*shape):
        swizzle = plgpu.find_swizzle(16 * shape[-1])
        # Abstract to pyright: methods come from a decorator.
        tiled = plgpu.TilingTransform((8, swizzle // 2))  # pyright: ignore[reportAbstractUsage]
        swizzled = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, a.dtype, transforms=(tiled, swizzled))

    def body(tiles, coefficients, a_gmem, b_gmem, *refs, **scratch):
        Program(
            warpgroup=lax.axis_index("warpgroup"),
            index=lax.axis_index("program"),
            config=config,
            widths=tuple({*work[..., 3].ravel().tolist()} - {0}),
            mirrored_on_diagonal=mirrored_on_diagonal,
            tiles=tiles,
            coefficients=coefficients,
            a=a_gmem,
            b=b_gmem,
            cs=refs[: len(cs)],
            outs=refs[len(cs) :],
            **scratch,
        ).run()

    out_type = (jax.ShapeDtypeStruct((batch, m, m), a.dtype),) * (1 + residual)
    # In units of the blocks, for the compiler to see that rows and columns are multiples of them.
    tiles = work // np.array([1, ROWS, config.block_n, 1], np.int32)
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(work.shape[1],),
        grid_names=("program",),
        num_threads=config.num_warpgroups + 1,
        thread_name="warpgroup",
        scratch_types={
            "a_ring": shared(stages, config.tile_m, TILE_K),
            "b_ring": shared(stages, config.tile_n, TILE_K),
            "out_buffers": shared(*staging, ROWS, config.block_n),
            "mirror_buffers": shared(*staging, config.block_n, ROWS),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=(config.num_turns, stages)),
            "empty": plgpu.Barrier(num_arrivals=config.tile_m // config.rows, num_barriers=stages),
        },
        interpret=interpret,
        kernel_name="syrkx",
    )(jnp.asarray(tiles), coefficients, a, b, *cs)
