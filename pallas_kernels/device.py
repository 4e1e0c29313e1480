"""The device that functions are traced for, and JAX's settings: what programs depend on.

The device is the abstract mesh's, where one is set, or the default.

The answers depend on the context, so what is kept of them is `memoized` by the context, too.
"""

import contextlib
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
        capability: the compute capability of an NVIDIA GPU, or None where it is not known.
    """

    platform: str
    kind: str
    num_multiprocessors: int
    default: str
    capability: tuple[int, int] | None

    @property
    def is_hopper(self) -> bool:
        """Whether the device is an NVIDIA GPU of compute capability 9.0."""
        return self.capability == (9, 0)


def current() -> Device:
    """Returns the device that functions are traced for."""
    default = backend.get_default_device()
    device = jax.sharding.get_abstract_mesh().abstract_device or default
    cores = getattr(device, "num_cores", None) or getattr(device, "core_count", None) or 0
    kind = device.device_kind
    # An abstract mesh says no more than the device's name, which may be the default device's.
    said = getattr(default if default.device_kind == kind else device, "compute_capability", "")
    default = str(jax.config.jax_default_device)
    return Device(device.platform, kind, cores, default, _capability_of(said, kind))


@functools.cache
def _capability_of(said: str, kind: str) -> tuple[int, int] | None:
    """Returns the compute capability of an NVIDIA GPU, or None where it is not known.

    Of a GPU that does not say it, it is known for Hopper alone: there Pallas takes 9.0 in any case.
    """
    if said:
        found = re.fullmatch(r"(\d+)\.(\d+)", said)
        return (int(found[1]), int(found[2])) if found else None
    return (9, 0) if _HOPPER.search(kind) else None


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


def standard_promotion[**P, R]() -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator of functions in which dtypes and ranks promote as in JAX by default.

    It matters under `jax_numpy_dtype_promotion="strict"`, where JAX refuses a float32 sum of
    bfloat16 numbers, and under `jax_numpy_rank_promotion`. Where promotion is standard, nothing is
    set: JAX compiles a program once more for every setting. cloudpickle can pickle the decorated
    function, which it cannot where a context manager decorates.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            with contextlib.ExitStack() as settings:
                if jax.config.jax_numpy_dtype_promotion != "standard":
                    settings.enter_context(jax.numpy_dtype_promotion("standard"))
                if jax.config.jax_numpy_rank_promotion != "allow":
                    settings.enter_context(jax.numpy_rank_promotion("allow"))
                return function(*args, **kwargs)

        return wrapper

    return decorate
