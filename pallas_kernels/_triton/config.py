"""Tile shapes of the symmetric products' kernel `"triton"`, and when the kernel is the fastest."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._triton.triangle import num_tiles


@dataclasses.dataclass(frozen=True)
class TritonSyrkxConfig:
    """Shape of one program: `tile` rows and columns of the result, in steps of `tile_k`."""

    tile: int
    tile_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("tile", "tile_k", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if min(self.tile, self.tile_k) < 16:
            raise ValueError(f"tile and tile_k must be at least 16, got {self}")


def triton_syrkx_beats_xla(a_matrix: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether this kernel is faster than XLA for `(..., m, n)` operands.

    Measured on an H200 against `_reference.syrkx` by `python -m benchmarks syrk`, untuned
    elsewhere. XLA is faster

    - in float32;
    - on rows that do not start on 16 bytes;
    - on wide operands that are not small and have too few tiles to fill the GPU. XLA splits their
      sums (1024×4096: 17.7 µs against 19.6).
    """
    *batch, m, n = a_matrix.shape
    aligned = jnp.dtype(a_matrix.dtype).itemsize == 2 and m % 8 == n % 8 == 0
    has_enough_tiles = n < 4 * m or count_programs(batch, m, tile=64) > 264
    return aligned and (has_enough_tiles or is_small_syrkx(a_matrix))


def is_small_syrkx(a_matrix: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether `(..., m, n)` operands are so small that this kernel beats `"mosaic_gpu"`.

    The limit is batch·m²·n < 2²⁶, measured on an H200 with m from 64 to 384 and stacks of 1 to 64.
    Near the limit either kernel is slower by 12% at most.
    """
    return math.prod(a_matrix.shape) * a_matrix.shape[-2] < 2**26


def default_triton_syrkx_config(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> TritonSyrkxConfig:
    """Returns the fastest tile shape for `(..., m, n)` operands.

    Fitted to an H200, untuned elsewhere. Each of its 132 multiprocessors runs at a time

    - 4 programs of tile 64, or
    - 2 programs of tile 128 with 4 warps, or
    - 1 program of tile 128 with 8 warps.

    The small tile wins as long as all programs fit at once. The exception is wide operands that
    fill the GPU with large tiles, because small tiles read twice as much (2048×8192: 95 µs against
    87). Of the two large variants the one is chosen whose rounds take less time: 13.2 ns per column
    of A with 4 warps, 7.5 with 8. Tiny matrices want as many programs as there are multiprocessors,
    with few steps.
    """
    *batch, m, n = shape
    programs = count_programs(batch, m, tile=128)
    if jnp.dtype(dtype).itemsize == 4:
        return TritonSyrkxConfig(tile=64, tile_k=32, num_warps=4, num_stages=3)
    for tile in (16, 32, 64):
        if is_tiny(batch, m, tile):
            tile_k = 64 if n <= 64 else 128
            num_warps = 2 if (tile, tile_k) == (16, 64) else 4
            return TritonSyrkxConfig(tile=tile, tile_k=tile_k, num_warps=num_warps, num_stages=4)
    if m <= 256 and count_programs(batch, m, tile=32) <= 528:
        return TritonSyrkxConfig(tile=32, tile_k=128, num_warps=4, num_stages=4)
    if count_programs(batch, m, tile=64) <= 528 and not (n >= 4 * m and programs >= 132):
        return TritonSyrkxConfig(tile=64, tile_k=64, num_warps=4, num_stages=3)
    # With 8 warps, a program takes 128 KiB of shared memory.
    is_hopper = plt.get_gpu_info().compute_capability == 90
    if is_hopper and 7.5 * pl.cdiv(programs, 132) < 13.2 * pl.cdiv(programs, 264):
        return TritonSyrkxConfig(tile=128, tile_k=64, num_warps=8, num_stages=4)
    return TritonSyrkxConfig(tile=128, tile_k=64, num_warps=4, num_stages=3)


def is_tiny(batch: Sequence[int], m: int, tile: int) -> bool:
    """Returns whether programs for both triangles fit at once, one on each multiprocessor.

    Measured on an H200: there, such programs are faster than half as many that store each tile
    twice (64×64: 1.15 µs against 1.27, 32×128×128: 2.03 against 2.19). Four times as many programs
    are slower.
    """
    return m <= 128 and count_programs(batch, m, tile, mirrors=False) <= 132


def count_programs(batch: Sequence[int], m: int, tile: int, mirrors: bool = True) -> int:
    """Returns the number of programs: one for each tile that is computed."""
    across = pl.cdiv(m, tile)
    return math.prod(batch) * (num_tiles(across) if mirrors else across**2)
