"""Products of several stacks in one launch: their matrices have one m, and several n.

Each result is that of the launch for its stack alone, bit for bit.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _device
from pallas_kernels._mosaic_gpu.gemm import gemm, launch_mosaic_gemm
from pallas_kernels._mosaic_gpu.syrkx import launch_mosaic_syrkx, syrkx
from pallas_kernels._stacked import stack_coefficients, undifferentiable


def syrk_of_stacks(
    stacks: Sequence[jax.Array],
    *,
    alpha: float | jax.Array = 1.0,
    residual: bool = False,
    num_programs: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, ...]:
    """alpha·A·Aᵀ of all matrices of all stacks.

    Args:
        stacks: shapes `(batchᵢ, m, nᵢ)`, of sizes that are multiples of 64; the largest n first.
        alpha: a coefficient, or one for each matrix.
        residual: whether to return the residual, too.
        num_programs: the number of programs, or None for one on each multiprocessor.
        interpret: runs the kernel in Pallas' interpreter.

    Returns:
        The products `(Σ batchᵢ, m, m)`, followed by their residuals if wanted.
    """
    options: dict[str, Any] = {
        "config": None,
        "residual": residual,
        "num_programs": num_programs or _device.num_multiprocessors(),
        "interpret": interpret,
    }

    def together(a: tuple[jax.Array, ...], coefficients: jax.Array) -> tuple[jax.Array, ...]:
        return launch_mosaic_syrkx(a, a, (), coefficients, mirrored_on_diagonal=False, **options)

    def alone(a: tuple[jax.Array, ...], coefficients: jax.Array) -> tuple[jax.Array, ...]:
        of_stacks = jnp.split(coefficients, _ends(a))
        results = [
            syrkx(x, None, (), (row[:, 0], row[:, 1]), symmetrize_output=True, **options)
            for x, row in zip(a, of_stacks, strict=True)
        ]
        return tuple(map(jnp.concatenate, zip(*results, strict=True)))

    coefficients = stack_coefficients((alpha, 0.0), (sum(map(len, stacks)),))
    return _with_rules(together, alone)(tuple(stacks), coefficients)


def gemm_of_stacks(
    a_matrix: jax.Array,
    stacks: Sequence[jax.Array],
    *,
    out_dtype: jnp.dtype | None = None,
    num_programs: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, ...]:
    """A·B of all matrices A, with the B of all stacks.

    Args:
        a_matrix: shape `(Σ batchᵢ, m, k)`, of sizes that are multiples of 64.
        stacks: shapes `(batchᵢ, k, nᵢ)`, of sizes that are multiples of 64.
        out_dtype: dtype of the results, or None for the operands'.
        num_programs: the number of programs, or None for one on each multiprocessor.
        interpret: runs the kernel in Pallas' interpreter.

    Returns:
        The products `(batchᵢ, m, nᵢ)`.
    """
    options: dict[str, Any] = {
        "out_dtype": jnp.dtype(out_dtype or a_matrix.dtype),
        "config": None,
        "num_programs": num_programs or _device.num_multiprocessors(),
        "interpret": interpret,
    }

    def together(a: jax.Array, bs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return launch_mosaic_gemm(a, bs, **options)

    def alone(a: jax.Array, bs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(
            gemm(x, b, **options) for x, b in zip(jnp.split(a, _ends(bs)), bs, strict=True)
        )

    return _with_rules(together, alone)(a_matrix, tuple(stacks))


def _ends(stacks: Sequence[jax.Array]) -> list[int]:
    """Returns where stacks end in an array of all, without the last one."""
    return [*itertools.accumulate(map(len, stacks[:-1]))]


def _with_rules(
    together: Callable[..., tuple[jax.Array, ...]], alone: Callable[..., tuple[jax.Array, ...]]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns what computes the stacks together, and under `vmap` each stack alone."""

    @jax.custom_batching.custom_vmap
    def call(*operands: Any) -> tuple[jax.Array, ...]:
        return together(*operands)

    @call.def_vmap
    def _(
        axis_size: int, in_batched: Sequence[Any], *operands: Any
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        results = jax.vmap(alone, axes, axis_size=axis_size)(*operands)
        return results, (True,) * len(results)

    return undifferentiable(call, "mosaic_gpu")
