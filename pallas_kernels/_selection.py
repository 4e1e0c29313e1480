"""Which implementation runs: why one cannot, and which one `None` stands for.

Both answers are memoized: a traced update asks dozens of times about the same few shapes. Measured
times are looked up each time.
"""

import functools
import math
from collections.abc import Hashable
from typing import NamedTuple, Protocol

import jax

from pallas_kernels import _device, _reference, _tuning
from pallas_kernels._checks import check_flag, check_name, check_operand
from pallas_kernels._mosaic_gpu import syrkx as mosaic_gpu
from pallas_kernels._mosaic_gpu.config import mosaic_syrkx_beats_xla
from pallas_kernels._triton import syrkx as triton
from pallas_kernels._triton.config import is_small_syrkx, triton_syrkx_beats_xla

type Operand = jax.Array | jax.ShapeDtypeStruct


class Implementation(Protocol):
    """What each module of an implementation has; `_reference` documents both functions."""

    def unsupported_reason(self, a_matrix: Operand) -> str | None:
        """Returns why this implementation cannot take `(..., m, n)` operands here, or None."""
        ...

    def syrkx(
        self,
        a_matrix: jax.Array,
        b_matrix: jax.Array | None,
        c_matrices: tuple[jax.Array, ...],
        coefficients: tuple[jax.Array, ...],
        *,
        symmetrize_output: bool,
        residual: bool,
    ) -> tuple[jax.Array, ...]:
        """Computes alpha·A·Bᴴ + Σᵢ betaᵢ·Cᵢ + diagonal·I."""
        ...


IMPLEMENTATIONS: dict[str, Implementation] = {
    "xla": _reference,
    "triton": triton,
    "mosaic_gpu": mosaic_gpu,
}


def unsupported_reason(implementation: str, a_matrix: Operand) -> str | None:
    """Returns why `syrkx(a_matrix, …, implementation=implementation)` would raise, or None.

    Args:
        implementation: `"xla"`, `"triton"` or `"mosaic_gpu"`.
        a_matrix: the operand, or anything with its `shape` and `dtype`.

    Raises:
        TypeError: `a_matrix` has no shape of a matrix.
        ValueError: `implementation` is not one of the three.
    """
    check_name("implementation", implementation, sorted(IMPLEMENTATIONS))
    check_operand("a_matrix", a_matrix)
    return _unsupported_reason(implementation, described(a_matrix), _device.cache_key())


def check_supported(implementation: str, reason: str | None) -> None:
    """Raises NotImplementedError where there is a reason why the implementation cannot run."""
    if reason:
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run: {reason}. Pass implementation=None to"
            f" have one chosen that can."
        )


class Selection(NamedTuple):
    """An implementation and the basis of its choice.

    Attributes:
        implementation: `"xla"`, `"triton"` or `"mosaic_gpu"`.
        basis: `"measured …"`, `"modelled …"` or `"only …"`.
    """

    implementation: str
    basis: str


def select_implementation(
    a_matrix: Operand, *, addend: bool = False, symmetrize_output: bool = True
) -> Selection:
    """Returns the implementation that `implementation=None` stands for, and why.

    The choice depends on shape, dtype and the default device, or on the abstract mesh's device
    where one is set. Nothing is tried out. Where the device has a table of measured times with this
    shape, the fastest implementation of the table is chosen. Elsewhere a model or a rule chooses,
    both fitted to measured times.

    Args:
        a_matrix: the operand, or anything with its `shape` and `dtype`.
        addend: whether there is a `c_matrix`.
        symmetrize_output: as for `syrkx`.
    """
    check_operand("a_matrix", a_matrix)
    check_flag("addend", addend)
    check_flag("symmetrize_output", symmetrize_output)
    operand, device = described(a_matrix), _device.cache_key()
    supported = _supported(operand, device)
    if len(supported) == 1:
        return Selection(supported[0], "only this implementation runs here")
    stack = as_one_stack(operand.shape)
    times = _tuning.lookup(stack, addend=addend) if operand.dtype.itemsize == 2 else None
    if times:
        skipped = "xla, not symmetrized" if symmetrize_output else "xla"
        candidates = [
            name for name in times if name != skipped and _implementation_of(name) in supported
        ]
        fastest = min(candidates, key=lambda name: times[name])
        return Selection(_implementation_of(fastest), f"measured on an {_device.kind()}")
    return Selection(
        _modelled_fastest(operand, addend, device), "modelled after times on an NVIDIA H200"
    )


def described(a_matrix: Operand) -> jax.ShapeDtypeStruct:
    """Returns the shape and the dtype of an operand alone, which hash."""
    return jax.ShapeDtypeStruct(a_matrix.shape, a_matrix.dtype)


def as_one_stack(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the shape `(batch, m, n)` of `(..., m, n)` operands with one batch axis."""
    *batch, m, n = shape
    return math.prod(batch), m, n


@functools.lru_cache(1024)
def _unsupported_reason(
    implementation: str, operand: jax.ShapeDtypeStruct, device: Hashable
) -> str | None:
    del device  # a part of the key
    return IMPLEMENTATIONS[implementation].unsupported_reason(operand)


@functools.lru_cache(1024)
def _supported(operand: jax.ShapeDtypeStruct, device: Hashable) -> tuple[str, ...]:
    """Returns the implementations that can run."""
    return tuple(
        name for name in IMPLEMENTATIONS if _unsupported_reason(name, operand, device) is None
    )


@functools.lru_cache(1024)
def _modelled_fastest(operand: jax.ShapeDtypeStruct, addend: bool, device: Hashable) -> str:
    """Returns the implementation that the models and rules expect to be the fastest."""
    supported = _supported(operand, device)
    is_large = not is_small_syrkx(operand)
    if "mosaic_gpu" in supported and is_large and mosaic_gpu.pads_little(operand):
        stack = as_one_stack(operand.shape)
        return "mosaic_gpu" if mosaic_syrkx_beats_xla(stack, addend=addend) else "xla"
    if "triton" in supported and triton_syrkx_beats_xla(operand):
        return "triton"
    return "xla"


def _implementation_of(name: str) -> str:
    """Returns the implementation of a name in the tables, without its config or option."""
    return name.replace(",", " ").split()[0]
