"""Which implementation runs: why one cannot, and which one `None` stands for."""

import math
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _device, _reference, _tuning
from pallas_kernels._mosaic_gpu import config as mosaic_gpu_config
from pallas_kernels._mosaic_gpu import syrkx as mosaic_gpu
from pallas_kernels._triton import syrkx as triton

# Each has a function `syrkx`, and `unsupported_reason`.
IMPLEMENTATIONS: dict[str, ModuleType] = {
    "xla": _reference,
    "triton": triton,
    "mosaic_gpu": mosaic_gpu,
}

type Operand = jax.Array | jax.ShapeDtypeStruct


def unsupported_reason(implementation: str, a_matrix: Operand) -> str | None:
    """Returns why `syrkx(a_matrix, …, implementation=implementation)` would raise, or None.

    Args:
        implementation: `"xla"`, `"triton"` or `"mosaic_gpu"`.
        a_matrix: the operand, or anything with its `shape` and `dtype`.

    Raises:
        ValueError: `implementation` is not one of those.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {sorted(IMPLEMENTATIONS)} or None,"
            f" got {implementation!r}"
        )
    return IMPLEMENTATIONS[implementation].unsupported_reason(a_matrix)


def check_supported(implementation: str, reason: str | None) -> None:
    """Raises NotImplementedError where there is a reason why the implementation cannot run."""
    if reason:
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run: {reason}. Pass implementation=None to"
            f" have one chosen that can."
        )


class Selection(NamedTuple):
    """An implementation, and what the choice rests on: "measured …", "modelled …" or "only …"."""

    implementation: str
    basis: str


def select_implementation(
    a_matrix: Operand, *, addend: bool = False, symmetrize_output: bool = True
) -> Selection:
    """Returns the implementation that `implementation=None` stands for, and why.

    It is chosen by shape and dtype and by the default device (the abstract mesh's device, where one
    is set), never by trying: the fastest of a table of measured times where the shape is in the
    table of that device, and what a model or a rule fitted to such times says elsewhere.

    Args:
        a_matrix: the operand, or anything with its `shape` and `dtype`.
        addend: whether there is a `c_matrix`.
        symmetrize_output: as for `syrkx`.
    """
    supported = [name for name in IMPLEMENTATIONS if unsupported_reason(name, a_matrix) is None]
    if len(supported) == 1:
        return Selection(supported[0], "only this implementation runs here")
    *batch, m, n = a_matrix.shape
    shape = (math.prod(batch), m, n)
    half_precision = jnp.dtype(a_matrix.dtype).itemsize == 2
    times = _tuning.lookup(shape, addend=addend) if half_precision else None
    if times:
        skipped = "xla, not symmetrized" if symmetrize_output else "xla"
        candidates = [
            name for name in times if name != skipped and _implementation(name) in supported
        ]
        fastest = min(candidates, key=lambda name: times[name])
        return Selection(_implementation(fastest), f"measured on an {_device.kind()}")
    is_large = not triton.is_small(a_matrix)
    if "mosaic_gpu" in supported and is_large and mosaic_gpu.pads_little(a_matrix):
        is_fastest = mosaic_gpu_config.is_fastest(shape, addend=addend)
        implementation = "mosaic_gpu" if is_fastest else "xla"
    elif "triton" in supported and triton.is_fastest(a_matrix):
        implementation = "triton"
    else:
        implementation = "xla"
    return Selection(implementation, "modelled after times on an NVIDIA H200")


def _implementation(name: str) -> str:
    """That of a name in the tables, which has a config or an option behind it."""
    return name.replace(",", " ").split()[0]
