"""Products known to be symmetric, computed by half: `syrk` and `syrkx`.

`implementation="xla"` is the definition in plain jnp. `"triton"` is a Pallas kernel for NVIDIA GPUs
that computes the lower triangle only, with the whole epilogue fused. `select_implementation` tells
which one `None` stands for, `unsupported_reason` why one cannot run.
"""

from pallas_kernels._dispatch import select_implementation, syrk, syrkx, unsupported_reason

__all__ = ["select_implementation", "syrk", "syrkx", "unsupported_reason"]
