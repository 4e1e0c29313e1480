"""Machine code for GPUs that are not there: needs the dependency group `compile`."""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Compute capability (major, minor), multiprocessors, shared memory per multiprocessor and block.
TARGETS = {
    "NVIDIA A100": (8, 0, 108, 167936, 166912),
    "NVIDIA H200": (9, 0, 132, 233472, 232448),
    "NVIDIA B200": (10, 0, 148, 233472, 232448),
    "NVIDIA GeForce RTX 4090": (8, 9, 128, 102400, 101376),
}

DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 1536
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_per_core}
  shared_memory_per_block_optin: {shared_per_block} core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 2000000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.5
  device_memory_size: 40000000000 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{name}"
"""

# In a process of its own: the plugin must not become the other tests' backend.
PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from muon_jax import newton_schulz
from pallas_kernels import syrk

jax.devices()  # loads the plugins
topology = topologies.get_topology_desc(
    "", "cuda", target_config=sys.stdin.read(), topology="1x1x1"
)
mesh = Mesh(np.array(topology.devices).reshape(1), ("x",))

def compiled(function, *shapes, dtype):
    sharding = NamedSharding(mesh, PartitionSpec())
    operands = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(*operands).compile().as_text()

for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
    for n in (256, 1024, 3072, 4096, 100):
        text = compiled(
            lambda a, c: syrk(a, c, beta=1.0, diagonal=2.0, implementation="triton"),
            (n, n), (n, n), dtype=dtype,
        )
        assert text.count('"__gpu$xla.gpu.triton"') == 1

text = compiled(newton_schulz.__wrapped__, (4096, 2048), dtype=jnp.float32)
assert text.count('"__gpu$xla.gpu.triton"') == 10, text.count('"__gpu$xla.gpu.triton"')
print("compiled")
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


@pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda12_plugin") or not ptxas_folder(),
    reason="needs the dependency group `compile`",
)
@pytest.mark.parametrize("name", TARGETS)
def test_kernels_and_iteration_compile_to_machine_code(name):
    major, minor, cores, shared_per_core, shared_per_block = TARGETS[name]
    description = DESCRIPTION.format(**locals())
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PATH": f"{ptxas_folder()}{os.pathsep}{os.environ['PATH']}",
    }
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=description,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout.strip() == "compiled", process.stderr[-3000:]
