"""Symmetric matrix products at half the work, `syrk` and `syrkx`, and general ones, `gemm`.

================  =====================================  ========================
`implementation`  what it is                             where it runs
================  =====================================  ========================
`"xla"`           the definition in plain jnp            everywhere
`"triton"`        Pallas kernels lowered through Triton  NVIDIA GPUs since Ampere
`"mosaic_gpu"`    Pallas kernels of TMA and wgmma        Hopper GPUs
================  =====================================  ========================

The kernels of symmetric products compute the lower triangle only, and fuse the whole epilogue.
`select_implementation` tells which implementation `None` stands for, and `unsupported_reason` tells
why an implementation cannot run.

=============  ======================================================
module         what it holds
=============  ======================================================
`_syrk`        `syrk`, `syrkx` and `syrk_with_residual`
`_gemm`        `gemm`
`_selection`   the choice of an implementation
`_tuning`      tables of measured times: `tuned/*.json`
`_device`      the device that functions are traced for
`_reference`   the implementation `"xla"`, which is the specification
`_triton`      the kernels of `"triton"`
`_mosaic_gpu`  the kernels of `"mosaic_gpu"`
`_stacked`     what all kernels share: batches, `vmap`, no derivative
=============  ======================================================
"""

from pallas_kernels._gemm import gemm
from pallas_kernels._selection import Selection, select_implementation, unsupported_reason
from pallas_kernels._syrk import syrk, syrk_with_residual, syrkx

__all__ = [
    "Selection",
    "gemm",
    "select_implementation",
    "syrk",
    "syrk_with_residual",
    "syrkx",
    "unsupported_reason",
]
