"""The device that functions are traced for: that of the abstract mesh, if set, or the default."""

import re

import jax
from jax.extend import backend

_HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")


def kind() -> str:
    """Returns the name of the device, as its maker gives it."""
    return _device().device_kind


def platform() -> str:
    """Returns `"cpu"`, `"gpu"`, `"tpu"` or what else JAX calls the device's platform."""
    return _device().platform


def num_multiprocessors() -> int:
    """Returns the number of multiprocessors of the GPU."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return abstract.num_cores if abstract else backend.get_default_device().core_count


def is_hopper() -> bool:
    """Returns whether the device is an NVIDIA GPU of compute capability 9.0."""
    return bool(_HOPPER.search(kind()))


def _device():
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return abstract or backend.get_default_device()
