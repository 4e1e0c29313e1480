"""Tile shapes of the kernels `"mosaic_gpu"`, and models of their times on an H200.

This module imports no back end of Pallas, because the models choose the implementation.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import ClassVar

from pallas_kernels import _tuning
from pallas_kernels._mosaic_gpu.work_list import lower_triangle

ROWS = 64  # rows of a block, and of a warpgroup's share of a tile
TILE_K = 64  # columns of A in a step of the ring: 128 bytes, the widest swizzle
SHARED_MEMORY = 226 * 1024  # bytes for ring and staging buffers; the 227th KiB holds the barriers


@dataclasses.dataclass(frozen=True)
class RingConfig:
    """A tile of `tile_m` × `tile_n` elements, and a ring of `num_stages` steps.

    Every warpgroup has 64 rows of each tile. With `in_turns`, two warpgroups instead have every
    other tile, so that one stores while the other multiplies.
    """

    tile_m: int
    tile_n: int
    num_stages: int
    in_turns: bool = False
    num_stores: ClassVar[int] = 1  # how often each block is stored
    num_producers: ClassVar[int] = 1  # warpgroups that do not store
    block_m: ClassVar[int] = ROWS  # rows of the blocks that are stored
    multiple: ClassVar[int] = 64  # of all sizes
    implementation: ClassVar[str] = "mosaic_gpu"

    @property
    def num_turns(self) -> int:
        """The number of tiles in progress at a time."""
        return 2 if self.in_turns else 1

    @property
    def rows(self) -> int:
        """The number of rows of a tile that one warpgroup has."""
        return self.tile_m if self.in_turns else ROWS

    @property
    def num_warpgroups(self) -> int:
        """The number of warpgroups that multiply."""
        return self.num_turns * self.tile_m // self.rows

    @property
    def block_n(self) -> int:
        """The width of the blocks that are stored."""
        return 64

    @property
    def num_buffers(self) -> int:
        """The number of blocks that a warpgroup can be storing at a time."""
        free = SHARED_MEMORY - self.num_stages * (self.tile_m + self.tile_n) * TILE_K * 2
        buffer = self.num_stores * self.block_m * self.block_n * 2
        return min(self.tile_n // self.block_n, free // (self.num_warpgroups * buffer))


@dataclasses.dataclass(frozen=True)
class MosaicSyrkxConfig(RingConfig):
    """A tile of a symmetric product, whose blocks are stored twice, once transposed."""

    num_stores: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128):
            raise ValueError(f"tile_m must be 64 or 128, got {self.tile_m}")
        widest = 64 * 256 // self.rows  # half of a warpgroup's registers
        if self.tile_n not in range(32, widest + 1, 32):
            raise ValueError(
                f"tile_n must be a multiple of 32, at most {widest}, got {self.tile_n}"
            )
        if self.num_stages < 2 or self.num_buffers < 1:
            raise ValueError(f"num_stages must be at least 2, and fit in shared memory, got {self}")

    @property
    def name(self) -> str:
        """The name in the tables of measured times."""
        tile = f"{self.tile_m}x{self.tile_n}x{self.num_stages}"
        return f"{self.implementation} {tile}{' in turns' * self.in_turns}"

    @property
    def block_n(self) -> int:
        """The width of the blocks that are stored."""
        return 32 if self.tile_n % 64 else 64


class MosaicGemmConfig(RingConfig):
    """A tile of a product that is not symmetric, whose blocks are stored once."""


class MmaConfig(RingConfig):
    """A tile of one warpgroup, which copies, multiplies and stores it."""

    num_producers: ClassVar[int] = 0
    multiple: ClassVar[int] = 128
    implementation: ClassVar[str] = "mosaic_gpu_mma"

    @property
    def rows(self) -> int:
        """The number of rows of the tile."""
        return self.tile_m

    @property
    def num_buffers(self) -> int:
        """The number of blocks that are stored at a time."""
        return min(1, super().num_buffers)


class MmaSyrkxConfig(MmaConfig, MosaicSyrkxConfig):
    """A tile of a symmetric product by mma."""


class MmaGemmConfig(MmaConfig, MosaicGemmConfig):
    """A tile of another product by mma."""


@dataclasses.dataclass(frozen=True)
class Tcgen05Config(RingConfig):
    """A tile whose sums have one of two places in tensor memory, in turns."""

    tile_m: int = 128
    tile_n: int = 128
    num_stages: int = 4
    in_turns: bool = True
    num_producers: ClassVar[int] = 2  # one copies, and one multiplies
    block_m: ClassVar[int] = 128
    multiple: ClassVar[int] = 128
    implementation: ClassVar[str] = "mosaic_gpu_tcgen05"

    @property
    def num_warpgroups(self) -> int:
        """The number of warpgroups that store."""
        return 1


class Tcgen05SyrkxConfig(Tcgen05Config, MosaicSyrkxConfig):
    """A tile of a symmetric product by tcgen05."""


class Tcgen05GemmConfig(Tcgen05Config, MosaicGemmConfig):
    """A tile of another product by tcgen05."""


# The tuner measures these. Hopper's rings are as long as fits beside the staging buffers: two for
# each warpgroup, or one where tiles are in turns and the other warpgroup multiplies meanwhile.
MOSAIC_SYRKX_CONFIGS = (
    MosaicSyrkxConfig(64, 64, 8),
    MosaicSyrkxConfig(64, 96, 6),
    MosaicSyrkxConfig(64, 128, 6),
    MosaicSyrkxConfig(128, 64, 8),
    MosaicSyrkxConfig(128, 96, 6),
    MosaicSyrkxConfig(128, 128, 6, in_turns=True),
    MosaicSyrkxConfig(128, 160, 4),
    MosaicSyrkxConfig(128, 192, 4),
    MosaicSyrkxConfig(128, 224, 4),
)

# These fit in the 99 KB that a program has at most on Ada.
MMA_SYRKX_CONFIGS = (
    MmaSyrkxConfig(128, 64, 2),
    MmaSyrkxConfig(128, 64, 3),
    MmaSyrkxConfig(128, 128, 2),
)


def default_mosaic_syrkx_config(
    shape: tuple[int, ...], *, addend: bool, mirrored_on_diagonal: bool = False
) -> MosaicSyrkxConfig:
    """Returns the fastest config for stacks `(batch, m, n)`, as measured or else by the model."""
    configs = [
        config
        for config in MOSAIC_SYRKX_CONFIGS
        if config.block_n == ROWS or not mirrored_on_diagonal
    ]
    predict = functools.partial(predict_syrkx_microseconds, shape, addend=addend)
    return measured_config(configs, shape, addend=addend) or min(configs, key=predict)


def measured_config(
    configs: Iterable[MosaicSyrkxConfig], shape: tuple[int, ...], *, addend: bool
) -> MosaicSyrkxConfig | None:
    """Returns the config that was the fastest on this device, or None where none was measured."""
    times = _tuning.lookup(shape, addend=addend) or {}
    measured = [config for config in configs if config.name in times]
    return min(measured, key=lambda config: times[config.name], default=None)


def mosaic_syrkx_beats_xla(shape: tuple[int, ...], *, addend: bool) -> bool:
    """Returns whether the model expects the kernel to beat XLA on stacks `(batch, m, n)`.

    XLA takes 6.5 µs, the product at 780 TFLOP/s, and reading the operand at 4.8 TB/s; with an
    addend 2 µs more, and reading two matrices and writing one. Among the measured shapes with 64 to
    384 rows, the choice is up to 9% slower than the faster one. XLA wins on very wide matrices,
    whose sums it splits.
    """
    batch, m, n = shape
    xla = 6.5 + 2 * batch * m * m * n / 780e6 + 2 * batch * m * n / 4.8e6
    xla += addend * (2 + 6 * batch * m * m / 4.8e6)
    return xla >= min(
        predict_syrkx_microseconds(shape, config, addend=addend) for config in MOSAIC_SYRKX_CONFIGS
    )


@functools.cache
def predict_syrkx_microseconds(
    shape: tuple[int, ...], config: MosaicSyrkxConfig, *, addend: bool
) -> float:
    """Returns the time in µs of the program with the most to do, for stacks `(batch, m, n)`.

    Fitted to measured times from 64×64 to 16×2048×5504. Over the products of the table, the config
    that the model picks takes 0.5% longer than the fastest in the mean, and 8% at most.

    Products run at 6.6 TFLOP/s, or as fast as L2 delivers the operands. Each tile takes 1.2 µs
    beside them; in turns 0.3 µs, and storing the last one 1 µs. The power limit leaves 820 TFLOP/s
    to all programs together.
    """
    batch, m, n = shape
    tile_m, tile_n = config.tile_m, config.tile_n
    num_tiles = batch * len(lower_triangle(m, tile_m, tile_n))
    flops = 2.0 * tile_m * tile_n * n
    l2 = 4096 * (1 / tile_m + 1 / tile_n) / 74
    per_tile, last = (0.3, 1.0) if config.in_turns else (1.2, 0.0)
    longest = -(-num_tiles // 132) * (flops / 6.6e6 * max(1.0, l2) + per_tile) + last
    num_bytes = 2 * batch * (m * n + (1 + addend) * m * m)
    return 1.5 + max(longest, num_tiles * flops / 820e6) + num_bytes / 14e6


_MULTIPROCESSOR_FLOPS = 5.6e6  # per µs, as the power limit leaves

MOSAIC_GEMM_CONFIGS = (
    MosaicGemmConfig(128, 128, 6, in_turns=True),
    MosaicGemmConfig(128, 192, 4, in_turns=True),
    MosaicGemmConfig(128, 256, 4),
)


def default_mosaic_gemm_config(
    shape: tuple[int, ...], n: int, num_programs: int
) -> MosaicGemmConfig:
    """Returns the config that is fastest by the model for stacks `(batch, m, k)` and n columns."""
    return min(
        MOSAIC_GEMM_CONFIGS,
        key=lambda config: _predict_gemm_microseconds(shape, n, config, num_programs),
    )


def predict_gemm_efficiency(shape: tuple[int, ...], n: int, num_programs: int) -> float:
    """Returns the part of the multiprocessors' time that goes into products, by the model."""
    batch, m, k = shape
    config = default_mosaic_gemm_config(shape, n, num_programs)
    products = 2 * batch * m * k * n / _MULTIPROCESSOR_FLOPS / num_programs
    return products / _predict_gemm_microseconds(shape, n, config, num_programs)


def _predict_gemm_microseconds(
    shape: tuple[int, ...], n: int, config: MosaicGemmConfig, num_programs: int
) -> float:
    """Returns the time in µs of the program with the most to do.

    Fitted to measured times from 2048×2048 to 24×2048×8192, in runs at the power limit. Small tiles
    get their operands from L2 more often. A tile that is not in turns takes 1.2 µs to store.
    """
    batch, m, k = shape
    tiles = batch * -(-m // config.tile_m) * -(-n // config.tile_n)
    rate = 5.25e6 if config.tile_n == 128 else _MULTIPROCESSOR_FLOPS
    storing = 0 if config.in_turns else 1.2
    return -(-tiles // num_programs) * (2 * config.tile_m * config.tile_n * k / rate + storing)
