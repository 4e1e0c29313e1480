"""Chains of symmetric products by `"mosaic_gpu"` in one launch: the part on the host."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _device
from pallas_kernels._mosaic_gpu.chain_plan import Structure, plan_chain
from pallas_kernels._mosaic_gpu.chain_program import ChainProgram
from pallas_kernels._mosaic_gpu.config import ROWS, TILE_K, RingConfig
from pallas_kernels._mosaic_gpu.launch import launch_ring
from pallas_kernels._mosaic_gpu.ring import Ref
from pallas_kernels._mosaic_gpu.small_chain import fits_shared_memory, launch_small_chain
from pallas_kernels._mosaic_gpu.work_list import deal_chains, lower_triangle
from pallas_kernels._stacked import call_on_stacks, stack_coefficients


@dataclasses.dataclass(frozen=True)
class ChainConfig(RingConfig):
    """A square tile of a symmetric product, whose blocks are stored twice."""

    num_stores = 2


SMALL, LARGE = ChainConfig(64, 64, 8), ChainConfig(128, 128, 6, in_turns=True)


def fastest_chain_config(batch: int, m: int, num_programs: int) -> ChainConfig | None:
    """Returns the config for `(batch, m, m)`; None where a launch for each product is faster.

    Measured on an H100. Each product of a single matrix waits for the last tile of the product
    before, so a single matrix gains nothing. Large tiles must fill three quarters of the programs.
    Small tiles take 1.85 times as long for the same elements, and compute fewer elements above the
    diagonal.
    """
    large, small = (_num_tiles(m, config) for config in (LARGE, SMALL))
    if batch == 1:
        return None
    if large * LARGE.tile_m**2 >= 1.85 * small * SMALL.tile_m**2:
        return SMALL
    if batch * large >= 0.75 * num_programs:
        return LARGE
    return SMALL if batch * small <= 1.25 * num_programs else None


def mosaic_syrk_chain(
    inputs: Sequence[jax.Array],
    structure: Structure,
    coefficients: Sequence[tuple[float | jax.Array, ...]],
    *,
    config: ChainConfig | None = None,
    num_programs: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
    program_type: type[ChainProgram] = ChainProgram,
) -> jax.Array:
    """Computes what `_chain.syrk_chain` defines, in one launch, also under `vmap`.

    Args:
        inputs: S₀ of shape `(..., m, m)`, of a size that is a multiple of 64, and other addends of
            shape `(..., m, m)` or `(m, m)`.
        structure: of the chain.
        coefficients: for each product alpha, the diagonal, and a beta for each addend, each of
            shape `()` or `(...)`.
        config: the tile and the ring. Pass None for the default, which is no ring where programs
            hold a whole chain in shared memory.
        num_programs: the number of programs, or None for one on each multiprocessor.
        interpret: runs the kernel in Pallas' interpreter.
        program_type: of the programs, where there is a ring.
    """
    first, *others = inputs
    batch = first.shape[:-2]
    width = 2 + max(len(addends) for addends, _ in structure)
    flat = [c for row in coefficients for c in (*row, *[0.0] * (width - len(row)))]
    num_programs = num_programs or _device.num_multiprocessors()
    kernel = functools.partial(_launch_chain, config=config, program_type=program_type)
    if config is None and fits_shared_memory(first.shape[-1], structure, len(inputs)):
        kernel = launch_small_chain
    kernel = functools.partial(
        kernel, structure=structure, num_programs=num_programs, interpret=interpret
    )
    others = [c if c.ndim == first.ndim else c.reshape(*[1] * len(batch), *c.shape) for c in others]
    stacked = stack_coefficients(tuple(flat), batch).reshape(*batch, len(structure), width)
    (out,) = call_on_stacks(kernel, "mosaic_gpu", first, tuple(others), stacked)
    return out


# Jitted, so that calls of equal shapes are traced and lowered once.
@functools.partial(
    jax.jit, static_argnames=("structure", "config", "num_programs", "interpret", "program_type")
)
def _launch_chain(
    first: jax.Array,
    others: tuple[jax.Array, ...],
    coefficients: jax.Array,
    *,
    structure: Structure,
    config: ChainConfig | None,
    num_programs: int,
    interpret: plgpu.InterpretGPUParams | None,
    program_type: type[ChainProgram],
) -> tuple[jax.Array, ...]:
    """Computes stacks `(batch, m, m)`, with coefficients `(batch, products, number)`."""
    (batch, m, _), dtype = first.shape, first.dtype
    config = config or fastest_chain_config(batch, m, num_programs) or SMALL
    num_inputs, num_tiles = 1 + len(others), _num_tiles(m, config)
    num_programs = min(num_programs, batch * num_tiles)
    together = min(batch, num_together(num_tiles, num_programs))
    plan, num_places = plan_chain(structure, num_inputs)
    tiles = deal_chains(
        batch,
        m,
        config.tile_m,
        tuple(len(addends) for addends, _ in structure),
        together=together,
        num_programs=num_programs,
    )

    program = functools.partial(
        _chain_program,
        program_type=program_type,
        widths=(config.tile_n,),
        num_programs=num_programs,
        num_tiles=num_tiles,
        together=together,
        num_counters=batch * len(structure),
    )
    _, out = launch_ring(
        program,
        config,
        (jnp.asarray(tiles), coefficients, jnp.asarray(plan), first, *others),
        (
            jax.ShapeDtypeStruct((num_places * together, m, m), dtype),
            jax.ShapeDtypeStruct((batch, m, m), dtype),
        ),
        num_programs=num_programs,
        b_block=(config.tile_n, TILE_K),
        buffers={"buffers": (2 * ROWS, TILE_K)},
        interpret=interpret,
        kernel_name="syrk_chain",
    )
    return (out,)


def num_together(num_tiles: int, num_programs: int) -> int:
    """Returns how many matrices go through their chains together.

    Their tiles fill all programs more than twice. So programs have tiles of others while they wait
    for the results of one. More matrices would not stay in the L2 cache.
    """
    return 1 + -(-2 * num_programs // num_tiles)


def _chain_program(
    coefficients: Ref,
    plan: Ref,
    *refs: Ref,
    program_type: type[ChainProgram],
    num_counters: int,
    **settings: Any,
) -> ChainProgram:
    *inputs, terms, out = refs
    return program_type(
        coefficients=coefficients,
        plan=plan,
        inputs=tuple(inputs),
        terms=terms,
        out=out,
        counters=program_type.make_counters(num_counters),
        **settings,
    )


def _num_tiles(m: int, config: ChainConfig) -> int:
    return len(lower_triangle(m, config.tile_m, config.tile_n))
