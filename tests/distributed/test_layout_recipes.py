"""Recipes for ZeRO, that of `layouts.md` too: what is exchanged, and one device's parameters."""

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
from muon_jax import MuonDimensionNumbers, NewtonSchulz, muon

PAGE = Path(muon_jax.__file__).parents[1] / "docs" / "layouts.md"


def zero_1(kind):
    """The names that the code of the page defines."""
    assert kind == AxisType.Auto
    (code,) = re.findall(r"^## ZeRO-1\n.*?^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    names = {}
    exec(compile(code, "ZeRO-1", "exec"), names)
    ours = SimpleNamespace(**names)

    @jax.jit
    def step(params, state, batch):
        return ours.step(params, state, jax.grad(loss)(params, batch))

    return SimpleNamespace(**{**names, "step": step})


def shardings_on(kind):
    """Replicated, and divided along the first axis."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(kind,))
    return (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))


def replicate(updates, sharding, kind):
    """The one all-gather that brings updates to replicated parameters."""
    if kind == AxisType.Explicit:
        return jax.reshard(updates, sharding)
    return jax.lax.with_sharding_constraint(updates, sharding)


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] + params["bias"] - 1) ** 2)


def zero_2(kind):
    """ZeRO-2: gradients are divided, too, and no device ever has all of them.

    The gradients of a batch are the mean of those of its parts. Where the devices do not divide the
    first axis of a parameter, name another as `scatter_dimension`.
    """
    replicated, divided = shardings_on(kind)
    params = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16)), "bias": jnp.zeros(16)}
    optimizer = muon(0.02)

    def summed_and_divided(gradient):
        summed = jax.lax.psum_scatter(gradient, "data", scatter_dimension=0, tiled=True)
        return summed / divided.mesh.size

    @jax.shard_map(
        mesh=divided.mesh,
        in_specs=(PartitionSpec(), divided.spec),
        out_specs=divided.spec,
        check_vma=False,  # else JAX sums the gradients of replicated parameters itself
    )
    def gradients_of(params, batch):
        return jax.tree.map(summed_and_divided, jax.grad(loss)(params, batch))

    @jax.jit
    def step(params, state, batch):
        updates, state = optimizer.update(gradients_of(params, batch), state, params)
        return optax.apply_updates(params, replicate(updates, replicated, kind)), state

    return SimpleNamespace(
        params=params, replicated=replicated, divided=divided, optimizer=optimizer, step=step
    )


def assert_one_device_agrees(found, params, optimizer, gradients_of):
    params = jax.tree.map(jnp.asarray, jax.device_get(params))
    updates, _ = optimizer.update(gradients_of(params), optimizer.init(params), params)
    expected = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(jax.device_get(found), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("recipe", "kind", "exchanged"),
    [
        (zero_1, AxisType.Auto, {"all-reduce": 1, "all-gather": 3, "all-to-all": 2}),
        (zero_2, AxisType.Auto, {"reduce-scatter": 3, "all-gather": 3, "all-to-all": 2}),
        (zero_2, AxisType.Explicit, {"reduce-scatter": 3, "all-gather": 3, "all-to-all": 2}),
    ],
)
@helpers.slow
def test_zero(recipe, kind, exchanged):
    """Gradients and state are divided; XLA on CPUs makes no reduce-scatter of ZeRO-1's sums."""
    ours = recipe(kind)
    params = jax.device_put(
        helpers.random_tree({name: x.shape for name, x in ours.params.items()}, 0), ours.replicated
    )
    state = ours.optimizer.init(jax.device_put(params, ours.divided))
    batch = jax.device_put(helpers.random_tree({"x": (16, 16)}, 1)["x"], ours.divided)
    program = ours.step.lower(params, state, batch).compile()
    assert collectives(program) == exchanged
    found, state = program(params, state, batch)
    whole = jnp.asarray(jax.device_get(batch))
    assert_one_device_agrees(found, params, ours.optimizer, lambda p: jax.grad(loss)(p, whole))
    for x in jax.tree.leaves(state.inner_states["muon"].inner_state[0].mu):
        assert x.sharding.is_equivalent_to(ours.divided, x.ndim)
    assert all(x.sharding.is_fully_replicated for x in found.values())


@helpers.slow
def test_owners_that_keep_the_momentum():
    """Stacked layers (L, m, n), divided along L, with gradients that `psum_scatter` divided so.

    Each device has whole matrices with their momentum, and one all-gather brings the updates to
    replicated parameters. Parameters that are divided along L themselves need none.
    """
    replicated, by_layer = shardings_on(AxisType.Auto)
    optimizer = muon(0.02, muon_weight_dimension_numbers={"layers": MuonDimensionNumbers(1, 2)})

    @jax.jit
    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, replicate(updates, replicated, AxisType.Auto)), state

    whole = helpers.random_tree({"layers": (16, 32, 64)}, 0)
    params, gradients = (jax.device_put(whole, s) for s in (replicated, by_layer))
    state = optimizer.init(gradients)
    program = step.lower(params, state, gradients).compile()
    assert collectives(program) == {"all-gather": 1}
    found, state = program(params, state, gradients)
    assert_one_device_agrees(found, whole, optimizer, lambda p: p)
    update = jax.jit(optimizer.update)
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
