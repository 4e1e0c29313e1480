"""Programs that compile to machine code for GPUs that are not there."""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Compute capability (major, minor), multiprocessors, shared memory per multiprocessor and block,
# memory in GB, which decides whether XLA hides exchanges.
TARGETS = {
    "NVIDIA A100": (8, 0, 108, 167936, 166912, 40),
    "NVIDIA H200": (9, 0, 132, 233472, 232448, 141),
    "NVIDIA B200": (10, 0, 148, 233472, 232448, 180),
    "NVIDIA GeForce RTX 4090": (8, 9, 128, 102400, 101376, 24),
    "NVIDIA RTX PRO 6000": (12, 0, 188, 102400, 101376, 96),
}
# Too old for the kernels.
OLD_TARGETS = {
    "Tesla V100-SXM2-16GB": (7, 0, 80, 98304, 98304, 16),
    "Tesla T4": (7, 5, 40, 65536, 65536, 16),
}

DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 1536
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_per_core}
  shared_memory_per_block_optin: {shared_per_block} core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 2000000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.5
  device_memory_size: {memory}000000000 registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{name}"
"""

# In a process of its own: the plugin must not become the other tests' backend.
PROLOGUE = """
import functools, itertools, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from muon_jax import Exchange, MuonDimensionNumbers, NewtonSchulz, newton_schulz, scale_by_muon
from pallas_kernels import syrk
from pallas_kernels._mosaic_gpu.config import MOSAIC_GEMM_CONFIGS, MOSAIC_SYRKX_CONFIGS
from pallas_kernels._mosaic_gpu.products import gemm as mosaic_gpu_gemm
from pallas_kernels._mosaic_gpu.products import syrkx as mosaic_gpu_syrkx
from pallas_kernels._triton import gemm as triton_gemm

jax.devices()  # loads the plugins
target = sys.stdin.read()

def mesh_of(hosts, devices):
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=target, topology=f"1x{hosts}x{devices}"
    )
    return Mesh(np.array(topology.devices), ("x",))

mesh = mesh_of(1, 1)

def compiled(function, *shapes, dtype=jnp.bfloat16):
    sharding = NamedSharding(mesh, PartitionSpec())
    operands = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(*operands).compile().as_text()
"""


@functools.cache
def ptxas_folder() -> str | None:
    """The folder of a ptxas: the one on the PATH, or that of the dependency group."""
    if path := shutil.which("ptxas"):
        return str(Path(path).parent)
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(root).glob("*/bin/ptxas"):
            return str(path.parent)
    return None


needs_compiler = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda12_plugin") or not ptxas_folder(),
    reason="needs the dependency group `compile`",
)


def output_of(program: str, name: str, **environment: str) -> str:
    """What the program prints, which compiles for the GPU of that name."""
    major, minor, cores, shared_per_core, shared_per_block, memory = (TARGETS | OLD_TARGETS)[name]
    extension = "feature_extension: ACCELERATED_FEATURES" if major >= 10 else ""  # sm_100a, …
    process = subprocess.run(
        [sys.executable, "-c", PROLOGUE + program],
        input=DESCRIPTION.format(**locals()),
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PATH": f"{ptxas_folder()}{os.pathsep}{os.environ['PATH']}",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout
