"""A state saved on one mesh goes on, on another and on one device, as if nothing had happened."""

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import MuonDimensionNumbers, NewtonSchulz, muon

SHAPES = {"q": (16, 16), "layers": (6, 16, 32), "bias": (16,)}
NUMBERS = {"q": MuonDimensionNumbers(), "layers": MuonDimensionNumbers(1, 2), "bias": None}
OPTIMIZER = muon(
    0.1, muon_weight_dimension_numbers=NUMBERS, ns_coeffs=NewtonSchulz(dtype="float32")
)
MESHES = {
    "4×2": ((4, 2), ("fsdp", "tp"), PartitionSpec("fsdp", "tp"), PartitionSpec(None, "fsdp", "tp")),
    "8": ((8,), ("fsdp",), PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")),
    "1": ((1,), ("fsdp",), PartitionSpec(), PartitionSpec()),
}


def shardings(name):
    """Of the parameters on that mesh."""
    shape, axes, matrix, stack = MESHES[name]
    devices = jax.devices()[: np.prod(shape)]
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Explicit,) * len(axes), devices=devices)
    specs = {"q": matrix, "layers": stack, "bias": PartitionSpec()}
    return {key: NamedSharding(mesh, spec) for key, spec in specs.items()}


def drawn(step, where):
    rng = np.random.default_rng(step)
    values = {key: rng.standard_normal(s).astype(np.float32) for key, s in SHAPES.items()}
    return jax.tree.map(jax.device_put, values, where)


@jax.jit
def train_step(params, state, gradients):
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def train(params, state, steps, where):
    for step in steps:
        params, state = train_step(params, state, drawn(step, where))
    return params, state


@pytest.mark.parametrize("other", helpers.mostly_nightly(["8", "1"], ["8"]))
def test_restored_on_another_mesh(other, tmp_path):
    here, there = shardings("4×2"), shardings(other)
    params = drawn(0, here)
    saved = train(params, OPTIMIZER.init(params), (1, 2), here)
    expected, _ = train(*saved, (3, 4), here)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        blank = jax.tree.map(jnp.zeros_like, drawn(0, there))
        target = jax.tree.map(  # counts are on no mesh yet
            lambda x: x if x.ndim else jax.device_put(x, there["bias"]),
            (blank, OPTIMIZER.init(blank)),
        )
        params, state = checkpointer.restore(tmp_path / "state", target)
    mu = state.inner_states["muon"].inner_state[0].mu
    for key in ("q", "layers"):
        assert mu[key].sharding.is_equivalent_to(there[key], len(SHAPES[key]))
    restored, _ = train(params, state, (3, 4), there)
    chex.assert_trees_all_close(jax.device_get(restored), jax.device_get(expected), atol=1e-5)
    for key in SHAPES:  # the steps after the restoration did something
        assert (
            jnp.max(jnp.abs(jax.device_get(saved[0][key]) - jax.device_get(expected[key]))) > 1e-2
        )
