"""How programs with a ring in shared memory are launched."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._lowered import call_lowered
from pallas_kernels._mosaic_gpu.config import ROWS, TILE_K, RingConfig
from pallas_kernels._mosaic_gpu.ring import Ref


def launch_programs(
    program: functools.partial[Any],
    config: RingConfig,
    work: np.ndarray,
    operands: tuple[jax.Array, ...],
    out_type: tuple[jax.ShapeDtypeStruct, ...],
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Runs a program for each column of a work list.

    Args:
        program, config, out_type, options: as for `launch_ring`.
        work: as from `work_list`.
        operands: what programs read beside the list.
    """
    # In units of blocks, so that the compiler sees that rows and columns are multiples of a block.
    tiles = work // np.array([1, ROWS, config.block_n, 1], np.int32)
    return launch_ring(
        functools.partial(program, widths=tuple({*work[..., 3].ravel().tolist()} - {0})),
        config,
        (jnp.asarray(tiles), *operands),
        out_type,
        num_programs=work.shape[1],
        **options,
    )


def launch_ring(
    program: functools.partial[Any],
    config: RingConfig,
    operands: tuple[jax.Array, ...],
    out_type: tuple[jax.ShapeDtypeStruct, ...],
    *,
    num_programs: int,
    b_block: tuple[int, int],
    buffers: Mapping[str, tuple[int, int]],
    interpret: plgpu.InterpretGPUParams | None,
    kernel_name: str,
) -> tuple[jax.Array, ...]:
    """Runs that many programs, each with a ring in shared memory.

    Args:
        program: makes a program. It takes references to the operands and the results in global
            memory, and by name the buffers and the attributes of a `RingProgram`. Its function is
            one of a module, so that its name and its arguments tell what programs do.
        config: the tile and the ring.
        operands: what programs read, the list of tiles first. The last one has the dtype of the
            ring.
        out_type: the results.
        num_programs: how many programs there are.
        b_block: the shape of a step's block of B.
        buffers: the shapes of staging buffers, by name. Each warpgroup has `config.num_buffers` of
            every name.
        interpret: runs the kernel in Pallas' interpreter.
        kernel_name: the name that profilers show.
    """
    stages, dtype = config.num_stages, operands[-1].dtype
    staging = (config.num_warpgroups, config.num_buffers)

    def body(tiles: Ref, *refs: Ref, **scratch: Ref) -> None:
        program(
            *refs,
            warpgroup=lax.axis_index("warpgroup"),
            index=lax.axis_index("program"),
            config=config,
            tiles=tiles,
            **scratch,
        ).run()

    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=config.num_warpgroups + 1,
        thread_name="warpgroup",
        scratch_types={
            "a_ring": shared(dtype, stages, config.tile_m, TILE_K),
            "b_ring": shared(dtype, stages, *b_block),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=(config.num_turns, stages)),
            "empty": plgpu.Barrier(num_arrivals=config.tile_m // config.rows, num_barriers=stages),
            **{name: shared(out_type[-1].dtype, *staging, *x) for name, x in buffers.items()},
        },
        interpret=interpret,
        kernel_name=kernel_name,
    )
    if interpret is not None:
        return kernel(*operands)
    function, settings = program.func, sorted(program.keywords.items())
    name = f"{function.__module__}.{function.__qualname__}"
    identity = repr((kernel_name, name, settings, config, num_programs, b_block, buffers))
    return call_lowered(kernel, identity, *operands)


def shared(dtype: jnp.dtype, *shape: int) -> Any:
    """Returns the type of a buffer in shared memory, swizzled as TMA and wgmma need it."""
    swizzle = plgpu.find_swizzle(8 * dtype.itemsize * shape[-1])
    # The transforms are abstract to pyright, because a decorator adds their methods.
    tile = (8, swizzle // dtype.itemsize)
    tiled = plgpu.TilingTransform(tile)  # pyright: ignore[reportAbstractUsage]
    swizzled = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiled, swizzled))
