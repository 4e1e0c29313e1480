"""The recipes of `distributed.md`: what is exchanged, and the parameters of one device."""

import re
from pathlib import Path
from types import SimpleNamespace

import chex
import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import muon_jax
from benchmarks._times.sharded import collectives
from muon_jax import NewtonSchulz, muon

PAGE = Path(muon_jax.__file__).parents[1] / "docs" / "distributed.md"


def recipe(title, kind=AxisType.Auto):
    """The names that the code under a heading of the page defines, on axes of a kind."""
    (code,) = re.findall(rf"^## {title}\n.*?^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    if kind == AxisType.Explicit:
        code = code.replace("AxisType.Auto", "AxisType.Explicit")
        code = code.replace("jax.lax.with_sharding_constraint(updates", "jax.reshard(updates")
    names = {}
    exec(compile(code, title, "exec"), names)
    return SimpleNamespace(**names)


def assert_one_device_agrees(found, params, optimizer, gradients_of):
    params = jax.tree.map(jnp.asarray, jax.device_get(params))
    updates, _ = optimizer.update(gradients_of(params), optimizer.init(params), params)
    expected = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(jax.device_get(found), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("title", "kind", "exchanged"),
    [
        ("ZeRO-1", AxisType.Auto, {"all-reduce": 1, "all-gather": 3, "all-to-all": 2}),
        ("ZeRO-2", AxisType.Auto, {"reduce-scatter": 3, "all-gather": 3, "all-to-all": 2}),
        ("ZeRO-2", AxisType.Explicit, {"reduce-scatter": 3, "all-gather": 3, "all-to-all": 2}),
    ],
)
@helpers.slow
def test_zero(title, kind, exchanged):
    """Gradients and state are divided; XLA on CPUs makes no reduce-scatter of ZeRO-1's sums."""
    ours = recipe(title, kind)
    params = jax.device_put(
        helpers.random_tree({name: x.shape for name, x in ours.params.items()}, 0), ours.replicated
    )
    state = ours.optimizer.init(jax.device_put(params, ours.divided))
    batch = jax.device_put(helpers.random_tree({"x": (16, 16)}, 1)["x"], ours.divided)
    program = ours.step.lower(params, state, batch).compile()
    assert collectives(program) == exchanged
    found, state = program(params, state, batch)
    whole = jnp.asarray(jax.device_get(batch))
    assert_one_device_agrees(found, params, ours.optimizer, lambda p: jax.grad(ours.loss)(p, whole))
    for x in jax.tree.leaves(state.inner_states["muon"].inner_state[0].mu):
        assert x.sharding.is_equivalent_to(ours.divided, x.ndim)
    assert all(x.sharding.is_fully_replicated for x in found.values())


@helpers.slow
def test_owners_that_keep_the_momentum():
    ours = recipe("Owners keep the momentum")
    whole = helpers.random_tree({"layers": (16, 32, 64)}, 0)
    params, gradients = (jax.device_put(whole, s) for s in (ours.replicated, ours.by_layer))
    state = ours.optimizer.init(gradients)
    program = ours.step.lower(params, state, gradients).compile()
    assert collectives(program) == {"all-gather": 1}
    found, state = program(params, state, gradients)
    assert_one_device_agrees(found, whole, ours.optimizer, lambda p: p)
    update = jax.jit(ours.optimizer.update)
    assert collectives(update.lower(gradients, state, gradients).compile()) == {}


@pytest.mark.parametrize("kind", helpers.mostly_nightly(["Auto", "Explicit"], ["Explicit"]))
@helpers.slow
def test_steps_inside_a_scan(kind):
    """The two exchanges are in the body of the loop."""
    optimizer = muon(0.1, ns_steps=2, ns_coeffs=NewtonSchulz(dtype="float32"))
    mesh = jax.make_mesh((8,), ("fsdp",), (AxisType[kind],))
    params = helpers.random_tree({"a": (16, 32), "b": (32, 16), "bias": (16,)}, 0)

    @jax.jit
    def steps(params, state):
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(params, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), length=3)[0][0]

    expected = steps(params, optimizer.init(params))
    sharded = jax.device_put(params, NamedSharding(mesh, PartitionSpec("fsdp")))
    program = steps.lower(sharded, optimizer.init(sharded)).compile()
    assert collectives(program) == {"all-to-all": 2}
    found = program(sharded, optimizer.init(sharded))
    chex.assert_trees_all_close(jax.device_get(found), expected, atol=1e-5)
