"""Tile shapes of the kernel `"mosaic_gpu"`, and the choice among them."""

import dataclasses
import functools

import numpy as np

from pallas_kernels import _tuning, _work_list

ROWS = 64  # of a warpgroup's share of a tile, and of the blocks that are stored
TILE_K = 64  # columns of A in a step of the ring: 128 bytes, the widest swizzle
_SHARED_MEMORY = 226 * 1024  # bytes for ring and staging buffers; the barriers are in the 227th KiB


@dataclasses.dataclass(frozen=True)
class Config:
    """A tile of `tile_m` × `tile_n` elements, and `num_stages` steps in the ring."""

    tile_m: int
    tile_n: int
    num_stages: int

    def __post_init__(self):
        if self.tile_m not in (64, 128):
            raise ValueError(f"tile_m must be 64 or 128, 64 a warpgroup, got {self.tile_m}")
        if self.tile_n not in range(32, 257, 32):
            raise ValueError(f"tile_n must be a multiple of 32, at most 256, got {self.tile_n}")
        if self.num_stages < 2 or self.num_buffers < 1:
            raise ValueError(f"num_stages must be 2 at least, and fit in shared memory, got {self}")

    @property
    def name(self) -> str:
        """As it stands in the tables of measured times."""
        return f"mosaic_gpu {self.tile_m}x{self.tile_n}x{self.num_stages}"

    @property
    def num_warpgroups(self) -> int:
        """The warpgroups that multiply."""
        return self.tile_m // ROWS

    @property
    def block_n(self) -> int:
        """The width of the blocks that are stored: 64, or 32 where two of 64 find no room."""
        if self.tile_n % 64:
            return 32
        return 64 if self._num_buffers(64) >= min(2, self.tile_n // 64) else 32

    @property
    def half_tiles(self) -> bool:
        """Whether there are tiles of half the width; below 128 columns they would be no faster."""
        return self.tile_n == 256

    @property
    def num_buffers(self) -> int:
        """The blocks that a warpgroup may have on their way to memory."""
        return self._num_buffers(self.block_n)

    def _num_buffers(self, block_n: int) -> int:
        free = _SHARED_MEMORY - self.num_stages * (self.tile_m + self.tile_n) * TILE_K * 2
        return min(self.tile_n // block_n, free // (2 * self.tile_m * block_n * 2))

    def deal(self, batch: int, m: int, num_programs: int) -> np.ndarray:
        """Returns the work list of `_work_list.deal`."""
        return _work_list.deal(
            batch,
            m,
            self.tile_m,
            self.tile_n,
            half_tiles=self.half_tiles,
            num_programs=num_programs,
        )


# What the tuner measures. Rings are as long as fits beside two staging buffers for each warpgroup.
CONFIGS = tuple(
    Config(*sizes)
    for sizes in (
        (64, 64, 8),
        (64, 96, 6),
        (64, 128, 6),
        (128, 64, 8),
        (128, 96, 6),
        (128, 128, 5),
        (128, 128, 6),
        (128, 160, 4),
        (128, 192, 4),
        (128, 224, 4),
        (128, 256, 4),
    )
)


def default_config(
    shape: tuple[int, ...], *, addend: bool, mirrored_on_diagonal: bool = False
) -> Config:
    """Returns the fastest config for stacks `(batch, m, n)`, measured or else by `predict`."""
    configs = [c for c in CONFIGS if c.block_n == ROWS or not mirrored_on_diagonal]
    times = _tuning.lookup(shape, addend=addend) or {}
    measured = [config for config in configs if config.name in times]
    if measured:
        return min(measured, key=lambda config: times[config.name])
    return min(configs, key=lambda config: predict(shape, config, addend=addend))


def is_fastest(shape: tuple[int, ...], *, addend: bool) -> bool:
    """Returns whether the model expects the kernel to beat XLA on stacks `(batch, m, n)`.

    XLA's product takes 6 µs, for the m > 384 of this question, and what 780 TFLOP/s take; the
    addend takes as long again as 4.8 TB/s take to read two matrices and write one. The kernel was
    the faster one on all shapes that were measured; very wide matrices, whose sums XLA splits, are
    those where the model says otherwise.
    """
    batch, m, n = shape
    xla = 6 + 2 * batch * m * m * n / 780e6 + addend * (2 + 6 * batch * m * m / 4.8e6)
    return min(predict(shape, config, addend=addend) for config in CONFIGS) <= xla


@functools.cache
def predict(shape: tuple[int, ...], config: Config, *, addend: bool) -> float:
    """Returns a model's time in µs on an H200 for stacks `(batch, m, n)`.

    Fitted to measured times from 64×64 to 16×2048×5504. Over the products of the table the config
    that it picks takes 1% longer than the fastest in the mean, 11% at most.
    A program with the most to do needs 1.2 µs for each tile beside its products; those run at 6.6
    TFLOP/s, or as fast as L2 delivers the operands, and those of half a tile take 0.6 of the time.
    The power limit leaves 820 TFLOP/s to all programs together.
    """
    batch, m, n = shape
    widths = config.deal(batch, m, num_programs=132)[..., 3]
    flops = 2 * config.tile_m * config.tile_n * n
    l2 = 4096 * (1 / config.tile_m + 1 / config.tile_n) / 74
    products = flops / 6.6e6 * max(1.0, l2)
    is_half = (widths > 0) & (widths < config.tile_n)
    tiles = np.where(is_half, 1.2 + 0.6 * products, np.where(widths > 0, 1.2 + products, 0))
    power = flops / 820e6 * widths.sum() / config.tile_n
    num_bytes = 2 * batch * (m * n + (1 + addend) * m * m)
    return 1.5 + max(tiles.sum(axis=0).max(), power) + num_bytes / 14e6
