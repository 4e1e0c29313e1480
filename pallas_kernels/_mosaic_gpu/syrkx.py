"""Implementation `"mosaic_gpu"`: a Pallas kernel of Hopper's own instructions, TMA and wgmma.

This module is the part on the host. `program` and its base, `ring`, run on each multiprocessor.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _device
from pallas_kernels._mosaic_gpu.config import (
    ROWS,
    TILE_K,
    MosaicSyrkxConfig,
    default_mosaic_syrkx_config,
)
from pallas_kernels._mosaic_gpu.launch import launch_programs
from pallas_kernels._mosaic_gpu.program import SyrkxProgram
from pallas_kernels._mosaic_gpu.ring import Ref
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
    """Returns whether this kernel, with padding of `(..., m, n)` operands, beats `"triton"`.

    Measured on an H200. It is faster

    - where m is a multiple of 64, so that the result is not padded;
    - where rows do not start on 16 bytes (1001×1500: 15.3 µs against 19.0).

    It is slower elsewhere (4000×4000: 137 µs against 117).
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
    config: MosaicSyrkxConfig | None = None,
    num_programs: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, ...]:
    """Computes what `_reference.syrkx` defines, in one launch, also under `vmap`.

    Operands are padded with zeros to multiples of 64, each in a pass of its own.
    """
    kernel = functools.partial(
        launch_mosaic_syrkx,
        config=config,
        mirrored_on_diagonal=symmetrize_output and b_matrix is not None,
        residual=residual,
        num_programs=num_programs or _device.num_multiprocessors(),
        interpret=interpret,
    )
    # A·Aᵀ also passes A twice, so that its program is the one of A·Bᵀ.
    b_matrix = a_matrix if b_matrix is None else b_matrix
    a, b, cs = jax.tree.map(padded, (a_matrix, b_matrix, c_matrices))
    *batch, m, _ = a_matrix.shape
    stacked = stack_coefficients(coefficients, tuple(batch))
    results = call_on_stacks(kernel, "mosaic_gpu", (a,), (b,), cs, stacked)
    return tuple(out[..., :m, :m] for out in results)


# Jitted, so that calls of equal shapes are traced and lowered once.
@functools.partial(
    jax.jit,
    static_argnames=("config", "mirrored_on_diagonal", "residual", "num_programs", "interpret"),
)
def launch_mosaic_syrkx(
    a: tuple[jax.Array, ...],
    b: tuple[jax.Array, ...],
    cs: tuple[jax.Array, ...],
    coefficients: jax.Array,
    *,
    config: MosaicSyrkxConfig | None,
    mirrored_on_diagonal: bool,
    residual: bool,
    num_programs: int,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, ...]:
    """Computes stacks that follow one another, each with an n of its own.

    A and B have shapes `(batchᵢ, m, nᵢ)`, of sizes that are multiples of 64. Coefficients have
    shape `(batch, number)`, and the results `(batch, m, m)`, for the sum `batch`.
    """
    batch, m, dtype = sum(map(len, a)), a[0].shape[1], a[0].dtype
    if config is None:
        mean_n = sum(len(x) * x.shape[-1] for x in a) // batch
        config = default_mosaic_syrkx_config(
            (batch, m, mean_n), addend=bool(cs), mirrored_on_diagonal=mirrored_on_diagonal
        )
    if mirrored_on_diagonal and config.block_n != ROWS:
        raise ValueError(f"config must have a block_n of {ROWS} for A·Bᵀ, got {config}")
    work = config.deal(batch, m, num_programs)

    program = functools.partial(
        _syrkx_program,
        num_stacks=len(a),
        num_addends=len(cs),
        mirrored_on_diagonal=mirrored_on_diagonal,
    )
    return launch_programs(
        program,
        config,
        work,
        (coefficients, *cs, *a, *b),
        (jax.ShapeDtypeStruct((batch, m, m), dtype),) * (1 + residual),
        b_block=(config.tile_n, TILE_K),
        buffers={
            "out_buffers": (ROWS, config.block_n),
            "mirror_buffers": (config.block_n, ROWS),
        },
        interpret=interpret,
        kernel_name="syrkx",
    )


def _syrkx_program(
    coefficients: Ref, *refs: Ref, num_stacks: int, num_addends: int, **settings: Any
) -> SyrkxProgram:
    ends = itertools.accumulate((num_addends, num_stacks, num_stacks))
    cs, a, b, outs = (refs[i:j] for i, j in itertools.pairwise((0, *ends, None)))
    return SyrkxProgram(coefficients=coefficients, a=a, b=b, cs=cs, outs=outs, **settings)
