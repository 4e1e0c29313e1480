"""Symmetric matrix products at half the work, `syrk` and `syrkx`, and general ones, `gemm`.

======================  =====================================  ==========================
`implementation`        what it is                             where it runs
======================  =====================================  ==========================
`"xla"`                 the definition in plain jnp            everywhere
`"triton"`              Pallas kernels lowered through Triton  NVIDIA GPUs since Ampere
`"mosaic_gpu"`          Pallas kernels of Mosaic GPU, others   NVIDIA GPUs since Ampere,
                        for each architecture                  in 16 bits
======================  =====================================  ==========================

`"mosaic_gpu_mma"` and `"mosaic_gpu_tcgen05"` name those of Ampere and of data-center Blackwell.

The kernels of symmetric products compute the lower triangle only, and fuse the whole epilogue.
`select_implementation` tells which implementation `None` stands for, and `unsupported_reason` tells
why an implementation cannot run. An `Implementation` is chosen once for many products, which check
nothing and may share launches. Public, too, are the modules `arguments` and `device`, which
muon_jax shares, and the command `python -m pallas_kernels.tune`.

Pallas' back ends are imported when a kernel is first chosen.
"""

from pallas_kernels._implementation import (
    IMPLEMENTATIONS,
    Implementation,
    Selection,
    select_implementation,
    unsupported_reason,
)
from pallas_kernels._products import gemm, syrk, syrk_with_residual, syrkx
from pallas_kernels._reference import ChainLink

__all__ = [
    "IMPLEMENTATIONS",
    "ChainLink",
    "Implementation",
    "Selection",
    "gemm",
    "select_implementation",
    "syrk",
    "syrk_with_residual",
    "syrkx",
    "unsupported_reason",
]
