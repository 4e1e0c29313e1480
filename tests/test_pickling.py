"""cloudpickle takes optimizers and functions that close over one, for Ray, submitit and joblib."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import muon_jax
import muon_jax.contrib
from muon_jax import (
    Exchange,
    MuonDimensionNumbers,
    NewtonSchulz,
    Split,
    Unfold,
    by_role,
    describe,
    muon,
    newton_schulz,
    scale_by_muon,
)
from muon_jax.contrib import (
    KeyHeads,
    keep_param_norm,
    normuon,
    on_host,
    qk_clip,
    scale_by_normuon,
    scale_to_param_norm,
    with_metrics,
)

VIEWS = {
    "up": MuonDimensionNumbers(-2, -1),
    "qkv": Split(-1, (8, 8, 8), Unfold(-1, (2, 4), MuonDimensionNumbers(-3, -1))),
    "head": None,
    "bias": None,
}
SHAPES = {"up": (8, 12), "qkv": (8, 24), "head": (8, 10), "bias": (6,)}
MATRICES = ("up", "head")
ADAMH = {"muonh": {"adamh": "^head$", "muon_weight_dimension_numbers": VIEWS}}
OPTIMIZERS = {
    **{
        f"muon, {preset}": functools.partial(
            helpers.any_muon, 0.02, preset=preset, **ADAMH.get(preset, {})
        )
        for preset in helpers.FUNCTIONS
    },
    "muon": lambda: muon(0.02),
    "muon, schedules": lambda: muon(
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 9),
        weight_decay=lambda count: 0.1 / (1 + count),
        weight_decay_mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    ),
    "muon, views": lambda: normuon(0.02, muon_weight_dimension_numbers=VIEWS),
    "muon, by_role": lambda: muon(
        0.02,
        muon_weight_dimension_numbers=functools.partial(by_role, rules={"qkv|up": VIEWS["up"]}),
    ),
    "muon, int8 on the host": lambda: muon(0.02, mu_dtype=on_host("int8")),
    "muon, int8": lambda: muon(0.02, mu_dtype="int8", weight_decay=0.1),
    "muon, coefficients": lambda: muon(0.02, ns_coeffs={"^up$": "balanced", ".*": "dion"}),
    "muon, callable coefficients": lambda: muon(
        0.02, ns_coeffs=lambda path, shape: "dion" if path == "up" else "standard"
    ),
    "muon, blocks": lambda: muon(
        0.02, shardings=Exchange(block_period=3, block_gain=lambda count: 0.5)
    ),
    "injected": lambda: optax.inject_hyperparams(muon)(0.02, beta=lambda count: 0.9),
    "metrics": lambda: with_metrics(muon(0.02)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), muon(0.02, preset="moonlight")),
    "masked": lambda: optax.masked(muon(0.02), {name: name != "up" for name in SHAPES}),
}
DIRECTIONS = {
    "scale_by_muon": scale_by_muon,
    "scale_by_muon, adaptive": lambda: scale_by_muon(
        adaptive=True, ns_coeffs=NewtonSchulz(method="standard")
    ),
    "normuon": lambda: optax.chain(scale_by_muon("balanced"), scale_by_normuon(averaged="shorter")),
    "norms": lambda: optax.chain(
        scale_by_muon(), scale_to_param_norm(), optax.scale(-0.1), keep_param_norm()
    ),
    "qk_clip": lambda: optax.chain(scale_by_muon(), qk_clip(1.0, {"^up": KeyHeads(((4, 0.5),))})),
}
# What a fresh process does with the pickles of its folder.
RUN = """
import cloudpickle, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.pickle")):
    step, arguments = cloudpickle.loads(path.read_bytes())
    path.with_suffix(".done").write_bytes(cloudpickle.dumps(step(*arguments)))
"""


def step_of(optimizer, **extra):
    """A train step that closes over the optimizer."""

    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state, updates

    return step


def tasks():
    """The functions and their arguments, by name."""
    for names, optimizers in ((SHAPES, OPTIMIZERS), (MATRICES, DIRECTIONS)):
        params, gradients = (
            helpers.random_tree({name: SHAPES[name] for name in names}, seed) for seed in (0, 1)
        )
        for name, make in optimizers.items():
            optimizer = make()
            extra = {"max_logits": jnp.full(3, 4.0)} if "qk_clip" in name else {}
            state = optimizer.init(params)
            step = step_of(optimizer, **extra)
            yield name, jax.jit(step), (params, state, gradients)
    x = gradients["up"]
    yield "newton_schulz", functools.partial(newton_schulz, ns_coeffs="balanced"), (x,)
    yield "newton_schulz in jit", jax.jit(lambda x: newton_schulz(x) @ x.T), (x,)
    yield "newton_schulz in vmap", jax.vmap(lambda x: newton_schulz(x)), (x[None],)
    yield "describe", lambda params: str(describe(params)), (params,)


# Few kinds of optimizers; the nightly test takes all.
QUICK = ("muon, schedules", "muon, by_role", "muon, int8 on the host")


@pytest.mark.parametrize("quick", helpers.mostly_nightly([True, False], [True]))
def test_functions_go_to_a_fresh_process_and_give_the_same_bits(tmp_path, quick):
    expected = {}
    for i, (name, function, arguments) in enumerate(tasks()):
        if quick and name in {*OPTIMIZERS, *DIRECTIONS} - {*QUICK}:
            continue
        task = function, jax.tree.map(np.asarray, arguments)
        (tmp_path / f"{i:02}.pickle").write_bytes(cloudpickle.dumps(task))
        expected[i] = name, function(*task[1])
    tree = Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "JAX_PLATFORMS": jax.default_backend(),
        "JAX_NUM_CPU_DEVICES": str(jax.config.jax_num_cpu_devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(jax.config.read("jax_disable_most_optimizations")),
    }
    subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], env=environment, check=True, cwd=tmp_path
    )
    for i, (name, value) in expected.items():
        found = cloudpickle.loads((tmp_path / f"{i:02}.done").read_bytes())
        assert jax.tree.structure(found) == jax.tree.structure(value), name
        for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(value), strict=True):
            np.testing.assert_array_equal(new, old, err_msg=name)


@pytest.mark.parametrize(
    "function",
    [muon, scale_by_muon, newton_schulz, by_role, describe, muon_jax.contrib.metrics],
)
def test_public_functions_are_pickled_by_name(function):
    assert cloudpickle.loads(cloudpickle.dumps(function)) is function


def test_an_optimizer_goes_on_after_a_round_trip():
    params = helpers.random_tree(SHAPES, 0)
    optimizer = muon(0.02, weight_decay=0.1)
    _, state = optimizer.update(params, optimizer.init(params), params)
    again, state_again = cloudpickle.loads(cloudpickle.dumps((optimizer, state)))
    expected = optimizer.update(params, state, params)
    found = again.update(params, state_again, params)
    for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("views", [None, by_role])
def test_what_an_optimizer_has_seen_of_shardings_goes_along(views):
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    mlp = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8)), "bias": jnp.ones(16)}
    params = {"block_0": {"mlp": mlp}}
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec("x")))
    optimizer = muon(0.02, muon_weight_dimension_numbers=views)
    _, state = optimizer.update(params, optimizer.init(params), params)
    again = cloudpickle.loads(cloudpickle.dumps(optimizer))
    found, expected = (each.update(params, state, params)[0] for each in (again, optimizer))
    for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_description_is_pickled():
    params = helpers.random_tree(SHAPES, 0)
    for report in (describe(params), describe(params, ns_coeffs="dion")):
        assert str(cloudpickle.loads(cloudpickle.dumps(report))) == str(report)
