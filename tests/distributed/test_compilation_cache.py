"""A second process takes compiled updates from JAX's cache."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import mostly_nightly, slow
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import NewtonSchulz, scale_by_muon

PROGRAM = """
import sys
from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import muon

folder, kind, ns_coeffs = sys.argv[1:]
events = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)

mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), (AxisType[kind],) * 2)
divided = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
params = {name: jax.device_put(jnp.ones((16, 32)), divided) for name in "ab"}
optimizer = muon(0.1, ns_coeffs=ns_coeffs)
state = optimizer.init(params)
lowered = jax.jit(optimizer.update).lower(params, state, params)
events.clear()
lowered.compile()
print(*(events[f"/jax/compilation_cache/cache_{what}"] for what in ("hits", "misses")))
"""


@pytest.mark.parametrize("kind", mostly_nightly(["Explicit", "Auto"], (), ["Auto"]))
def test_a_second_process_compiles_no_update_again(tmp_path, kind):
    def hits_and_misses(ns_coeffs):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), kind, ns_coeffs]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert run.returncode == 0, run.stderr[-3000:]
        return run.stdout.split()

    assert hits_and_misses("standard") == ["0", "1"]
    assert hits_and_misses("standard") == ["1", "0"]
    assert hits_and_misses("dion") == ["0", "1"]


@slow
def test_an_update_that_is_not_jitted_has_its_own_coefficients():
    """Its digest is a constant of the program, not an operand that the cache does not see."""
    mesh = jax.make_mesh((8,), ("fsdp",), (AxisType.Auto,))
    whole = {"w": jax.random.normal(jax.random.key(0), (16, 32))}
    divided = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("fsdp")))
    for ns_coeffs in ("standard", "cubic"):
        transform = scale_by_muon(NewtonSchulz(ns_coeffs, dtype="float32"))
        updates, _ = transform.update(divided, transform.init(divided))
        expected, _ = transform.update(whole, transform.init(whole))
        np.testing.assert_allclose(updates["w"], expected["w"], atol=1e-5)
