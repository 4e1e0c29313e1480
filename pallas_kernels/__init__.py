"""Products known to be symmetric, computed by half, `syrk` and `syrkx`, and others, `gemm`.

`implementation="xla"` is the definition in plain jnp. The others are Pallas kernels that compute
the lower triangle only, with the whole epilogue fused: `"mosaic_gpu"` for Hopper GPUs, `"triton"`
for NVIDIA GPUs since Ampere. `select_implementation` tells which one `None` stands for,
`unsupported_reason` why one cannot run.
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
