"""Chains of symmetric products of small matrices in one launch: the part on the host."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._lowered import call_lowered
from pallas_kernels._mosaic_gpu.chain_plan import Structure, plan_chain
from pallas_kernels._mosaic_gpu.config import ROWS, SHARED_MEMORY, TILE_K
from pallas_kernels._mosaic_gpu.launch import shared
from pallas_kernels._mosaic_gpu.ring import Ref
from pallas_kernels._mosaic_gpu.small_chain_program import SmallChainProgram, blocks_of

_MOST_WARPGROUPS = 4  # of a program, so that each thread can have 128 registers


def fits_shared_memory(m: int, structure: Structure, num_inputs: int) -> bool:
    """Returns whether a program can hold all terms of the chain of an (m, m) matrix."""
    return 0 < m and m % ROWS == 0 and _most_teams(m, structure, num_inputs) > 0


@functools.cache
def _most_teams(m: int, structure: Structure, num_inputs: int) -> int:
    """Returns how many matrices a program can hold."""
    _, num_places = plan_chain(structure, num_inputs, all_in_places=True)
    num_bytes = (num_places + 1) * m * m * 2
    if num_bytes > SHARED_MEMORY:
        return 0
    return min(SHARED_MEMORY // num_bytes, _MOST_WARPGROUPS // len(blocks_of(m)))


# Jitted, so that calls of equal shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("structure", "num_programs", "interpret"))
def launch_small_chain(
    first: jax.Array,
    others: tuple[jax.Array, ...],
    coefficients: jax.Array,
    *,
    structure: Structure,
    num_programs: int,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, ...]:
    """Computes stacks `(batch, m, m)`, with coefficients `(batch, products, number)`.

    Args:
        first, others, coefficients, structure: as for `mosaic_syrk_chain`.
        num_programs: the most programs.
        interpret: runs the kernel in Pallas' interpreter.
    """
    (batch, m, _), dtype = first.shape, first.dtype
    plan, num_places = plan_chain(structure, 1 + len(others), all_in_places=True)
    num_programs = min(num_programs, batch)
    most_teams = _most_teams(m, structure, 1 + len(others))
    num_teams = min(most_teams, pl.cdiv(batch, num_programs))
    num_blocks, num_panels = len(blocks_of(m)), m // TILE_K

    def body(coefficients: Ref, plan: Ref, *refs: Ref, **scratch: Ref) -> None:
        *inputs, out = refs
        SmallChainProgram(
            warpgroup=lax.axis_index("warpgroup"),
            index=lax.axis_index("program"),
            num_programs=num_programs,
            num_teams=num_teams,
            coefficients=coefficients,
            plan=plan,
            inputs=tuple(inputs),
            out=out,
            **scratch,
        ).run()

    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((batch, m, m), dtype),),
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=num_teams * num_blocks,
        thread_name="warpgroup",
        scratch_types={
            "terms": shared(dtype, num_teams, num_places + 1, num_panels, m, TILE_K),
            "first_loaded": plgpu.Barrier(num_arrivals=num_panels, num_barriers=(num_teams, 2)),
            "others_loaded": plgpu.Barrier(
                num_arrivals=max(len(others), 1) * num_panels, num_barriers=num_teams
            ),
            "stored": plgpu.Barrier(num_arrivals=num_blocks, num_barriers=num_teams),
        },
        interpret=interpret,
        kernel_name="small_syrk_chain",
    )
    operands = (coefficients, jnp.asarray(plan), first, *others)
    if interpret is not None:
        return kernel(*operands)
    identity = repr((__name__, num_programs, num_teams, num_places))
    return call_lowered(kernel, identity, *operands)
