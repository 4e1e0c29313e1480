"""The device that functions are traced for: the abstract mesh's, where one is set, or the default.

The answers depend on the context, so what is kept of them is `memoized` by the context, too.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import backend

_HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")


class Device(NamedTuple):
    """What the products depend on: equal devices have equal programs.

    Attributes:
        platform: JAX's name, `"cpu"`, `"gpu"`, `"tpu"` or another.
        kind: the name that its maker gives it.
        num_multiprocessors: of a GPU.
        default: JAX's default device, by name, since a cached device would keep its backend alive.
            Pallas asks it for the compute capability of a described GPU that it does not know.
    """

    platform: str
    kind: str
    num_multiprocessors: int
    default: str

    @property
    def is_hopper(self) -> bool:
        """Whether the device is an NVIDIA GPU of compute capability 9.0."""
        return bool(_HOPPER.search(self.kind))


def current() -> Device:
    """Returns the device that functions are traced for."""
    device = jax.sharding.get_abstract_mesh().abstract_device or backend.get_default_device()
    cores = getattr(device, "num_cores", None) or getattr(device, "core_count", None) or 0
    return Device(device.platform, device.device_kind, cores, str(jax.config.jax_default_device))


def memoized[R](function: Callable[..., R]) -> Callable[..., R]:
    """Keeps answers by the arguments, the device, and the precision of JAX's products.

    Of an operand the shape and the dtype count.
    """
    kept = functools.lru_cache(1024)(lambda _, *args: function(*args))

    @functools.wraps(function)
    def wrapper(*args: Any) -> R:
        described = (
            jax.ShapeDtypeStruct(x.shape, x.dtype)
            if hasattr(x, "shape") and hasattr(x, "dtype")
            else x
            for x in args
        )
        return kept((current(), jax.config.jax_default_matmul_precision), *described)

    return wrapper
