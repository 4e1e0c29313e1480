"""Implementation `"mosaic_gpu"`: a Pallas kernel of Hopper's own instructions, TMA and wgmma.

This is the part on the host; `_mosaic_gpu_program` is what runs on each multiprocessor.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _device, _tuning, _work_list
from pallas_kernels._mosaic_gpu_program import ROWS, TILE_K, Program
from pallas_kernels._stacked import stacked

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


def unsupported_reason(a_matrix: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Returns why this implementation cannot take `(..., m, n)` operands here, or None."""
    if a_matrix.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the dtype {a_matrix.dtype} is neither bfloat16 nor float16"
    if not a_matrix.size:
        return f"the shape {a_matrix.shape} has no elements"
    if not _device.is_hopper():
        return f"the default device, {_device.kind()}, is no Hopper GPU (H100, H200, GH200)"
    return None


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
    """Returns whether the model expects this kernel to be the fastest for stacks `(batch, m, n)`.

    Triton's kernel is faster on small matrices. XLA's product takes 3 µs and what 780 TFLOP/s take,
    and the addend as long again as 4.8 TB/s take to read two matrices and write one.
    """
    batch, m, n = shape
    xla = 3 + 2 * batch * m * m * n / 780e6 + addend * (2 + 6 * batch * m * m / 4.8e6)
    here = min(predict(shape, config, addend=addend) for config in CONFIGS)
    return m % 64 == n % 64 == 0 and m > 384 and here <= xla


def predict(shape: tuple[int, ...], config: Config, *, addend: bool) -> float:
    """Returns a model's time in µs on an H200 for stacks `(batch, m, n)`.

    Fitted to 136 measured times, from 64×64 to 16×2048×5504, which it meets within 5% in the mean.
    A program with the most to do needs 1.2 µs for each tile beside its products; those run at 6.6
    TFLOP/s, or as fast as L2 delivers the operands, and those of half a tile take 0.6 of the time.
    The power limit leaves 820 TFLOP/s to all programs together.
    """
    batch, m, n = shape
    widths = _deal(batch, m, config, num_programs=132)[..., 3]
    flops = 2 * config.tile_m * config.tile_n * n
    l2 = 4096 * (1 / config.tile_m + 1 / config.tile_n) / 74
    products = flops / 6.6e6 * max(1.0, l2)
    is_half = (widths > 0) & (widths < config.tile_n)
    tiles = np.where(is_half, 1.2 + 0.6 * products, np.where(widths > 0, 1.2 + products, 0))
    power = flops / 820e6 * widths.sum() / config.tile_n
    num_bytes = 2 * batch * (m * n + (1 + addend) * m * m)
    return 1.5 + max(tiles.sum(axis=0).max(), power) + num_bytes / 14e6


def syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrix: jax.Array | None,
    alpha: jax.Array,
    beta: jax.Array,
    diagonal: jax.Array,
    symmetrize_output: bool,
    *,
    config: Config | None = None,
    num_programs: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """As `_reference.syrkx`; every leading dimension is part of one launch, also under `vmap`.

    Operands are padded with zeros to multiples of 64, which are passes of their own.
    """
    *batch, m, n = a_matrix.shape
    coefficients = jnp.stack(
        [jnp.broadcast_to(x, batch).astype(jnp.float32) for x in (alpha, beta, diagonal)], axis=-1
    )
    kernel = functools.partial(
        _kernel,
        config=config,
        mirrored_on_diagonal=symmetrize_output and b_matrix is not None,
        num_programs=num_programs or _device.num_multiprocessors(),
        interpret=interpret,
    )

    def stack(x):
        if x is None:
            return None
        *_, rows, cols = x.shape
        return jnp.pad(x.reshape(-1, rows, cols), ((0, 0), (0, -rows % 64), (0, -cols % 64)))

    out = stacked(kernel, "mosaic_gpu")(
        stack(a_matrix), stack(b_matrix), stack(c_matrix), coefficients.reshape(-1, 3)
    )
    return out[:, :m, :m].reshape(*batch, m, m)


def _kernel(a, b, c, coefficients, *, config, mirrored_on_diagonal, num_programs, interpret):
    batch, m, _ = a.shape
    config = config or default_config(
        a.shape, addend=c is not None, mirrored_on_diagonal=mirrored_on_diagonal
    )
    if mirrored_on_diagonal and config.block_n != ROWS:
        raise ValueError(f"A·Bᵀ needs a config that stores square blocks, got {config}")
    work = _deal(batch, m, config, num_programs)
    stages, staging = config.num_stages, (config.num_warpgroups, config.num_buffers)

    def shared(*shape):
        swizzle = plgpu.find_swizzle(16 * shape[-1])
        transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM(shape, a.dtype, transforms=transforms)

    def body(tiles, coefficients, a_gmem, *refs, **scratch):
        *others, out = refs
        b_gmem = a_gmem if b is None else others[0]
        c_gmem = None if c is None else others[-1]
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
            c=c_gmem,
            out=out,
            **scratch,
        ).run()

    # In units of the blocks, for the compiler to see that rows and columns are multiples of them.
    tiles = work // np.array([1, ROWS, config.block_n, 1], np.int32)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, m, m), a.dtype),
        grid=(work.shape[1],),
        grid_names=("program",),
        num_threads=config.num_warpgroups + 1,
        thread_name="warpgroup",
        scratch_types={
            "a_ring": shared(stages, config.tile_m, TILE_K),
            "b_ring": shared(stages, config.tile_n, TILE_K),
            "out_buffers": shared(*staging, ROWS, config.block_n),
            "mirror_buffers": shared(*staging, config.block_n, ROWS),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=config.num_warpgroups, num_barriers=stages),
        },
        interpret=interpret,
        kernel_name="syrkx",
    )(jnp.asarray(tiles), coefficients, a, *(x for x in (b, c) if x is not None))


def _deal(batch: int, m: int, config: Config, num_programs: int) -> np.ndarray:
    return _work_list.deal(
        batch,
        m,
        config.tile_m,
        config.tile_n,
        half_tiles=config.half_tiles,
        num_programs=num_programs,
    )
