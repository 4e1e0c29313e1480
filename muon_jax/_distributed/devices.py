"""The devices of a mesh: what functions are traced for, and what the compiler for them takes."""

import contextlib
from collections.abc import Sequence

import jax

from muon_jax._distributed.sharding import Mesh, mesh_of
from pallas_kernels import device as _device

# Where JAX wires `custom_partitioning` through. TPUs lack it (jax #38196).
PARTITIONING = frozenset({"cpu", "gpu", "cuda", "rocm"})


def asks_how_to_partition(mesh: Mesh) -> bool:
    """Returns whether the compiler for the devices of a mesh asks how to partition an operation."""
    return platform_of(mesh) in PARTITIONING


def platform_of(mesh: Mesh) -> str:
    """Returns the platform of the devices of a mesh, described ones included."""
    device = mesh.abstract_mesh.abstract_device
    return device.platform if device else _device.current().platform


def traced_for(arrays: Sequence[jax.Array]) -> contextlib.AbstractContextManager:
    """Returns a context in which functions are traced for the TPUs that arrays are on.

    It matters where TPUs are described on a machine whose default device is another. The context is
    that of `jax.set_mesh`, which Pallas kernels for a described GPU need from the caller.
    """
    mesh = mesh_of(arrays).abstract_mesh if arrays else jax.sharding.get_abstract_mesh()
    if platform_of(mesh) != "tpu" or _device.current().platform == "tpu":
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)
