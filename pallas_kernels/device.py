"""The device that functions are traced for: the abstract mesh's, where one is set, or the default.

The answers depend on the context, so a cached function that needs one takes `cache_key()` too.
"""

import re
from collections.abc import Hashable
from typing import Any

import jax
from jax.extend import backend

_HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")


def kind() -> str:
    """Returns the device's name, as its maker gives it."""
    return _current().device_kind


def platform() -> str:
    """Returns JAX's name of the device's platform: `"cpu"`, `"gpu"`, `"tpu"` or another."""
    return _current().platform


def num_multiprocessors() -> int:
    """Returns the number of multiprocessors of the GPU."""
    device = _current()
    return device.num_cores if hasattr(device, "num_cores") else device.core_count


def is_hopper() -> bool:
    """Returns whether the device is an NVIDIA GPU of compute capability 9.0."""
    return bool(_HOPPER.search(kind()))


def cache_key() -> Hashable:
    """Returns a value that is equal wherever all questions about the device have equal answers."""
    device = jax.sharding.get_abstract_mesh().abstract_device or backend.get_default_device()
    cores = getattr(device, "num_cores", None) or getattr(device, "core_count", None)
    # Pallas asks the default device for the compute capability of a described GPU that it does not
    # know by name. A string, because a cached device would keep its backend alive.
    default = str(jax.config.jax_default_device)
    return device.device_kind, device.platform, cores, default


def _current() -> Any:
    return jax.sharding.get_abstract_mesh().abstract_device or backend.get_default_device()
