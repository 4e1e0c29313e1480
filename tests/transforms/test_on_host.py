"""A state on the host: where its arrays are, that updates stream them, and that no bit differs."""

import functools
from types import SimpleNamespace

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import MuonDimensionNumbers, NewtonSchulz, muon, scale_by_muon
from muon_jax.contrib import (
    _on_host,
    cast_momentum,
    convert_momentum,
    metrics,
    on_host,
    with_metrics,
)

SHAPES = {"up": (64, 96), "down": (96, 64), "head": (64, 128), "bias": (64,)}
VIEWS = {"up": MuonDimensionNumbers(), "down": MuonDimensionNumbers(), "head": None, "bias": None}
SPECS = {
    "up": PartitionSpec("fsdp"),
    "down": PartitionSpec(None, "fsdp"),
    "head": PartitionSpec("fsdp", None),
    "bias": PartitionSpec(),
}
MUON = functools.partial(
    helpers.any_muon,
    0.1,
    ns_steps=1,
    ns_coeffs=NewtonSchulz(dtype="float32"),
    muon_weight_dimension_numbers=VIEWS,
)


def ON_HOST(mu_dtype=None, **given):
    return MUON(mu_dtype=on_host(mu_dtype), **given)


HOST, DEVICE = _on_host.HOST, _on_host.DEVICE


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch):
    """Matrices are large, and two are under way at once."""
    monkeypatch.setattr(_on_host, "LEAST_ENTRIES_ON_HOST", 2**12)
    monkeypatch.setattr(_on_host, "MOST_BYTES_UNDER_WAY", 2 * 4 * 64 * 96)


def drawn(seed, axis_type=None):
    """Random arrays, on eight devices where mesh axes have a type."""
    arrays = helpers.random_tree(SHAPES, seed)
    if axis_type is None:
        return jax.device_put(arrays, jax.devices()[0])
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(axis_type,))
    return {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in arrays.items()}


def trained(optimizer, axis_type=None, steps=2):
    """Parameters and state after jitted steps that take both as donations."""
    params = drawn(0, axis_type)
    everywhere = params["bias"].sharding
    state = jax.tree.map(  # counts are on no mesh yet
        lambda x: x if x.ndim else jax.device_put(x, everywhere), optimizer.init(params)
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        given = state
        params, state = step(params, given, drawn(1 + i, axis_type))
        assert all(x.is_deleted() for x in jax.tree.leaves(given))
    return params, state


def kinds(tree):
    """The kinds of memory: those of large arrays, and those of small arrays."""
    found = set(), set()
    for x in jax.tree.leaves(tree):
        found[x.size < _on_host.LEAST_ENTRIES_ON_HOST].add(jax.typeof(x).memory_space)
    return found


def moved_like(state, like):
    """The state, moved as errors say."""
    return jax.tree.map(
        lambda x, like: jax.device_put(x, jax.typeof(like).memory_space), state, like
    )


def assert_equal_bits(found, expected):
    chex.assert_trees_all_equal(jax.device_get(found), jax.device_get(expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis_type", "given"),
    [
        pytest.param(None, {"mu_dtype": "int8", "mu_rounding": "nearest"}, marks=helpers.slow),
        (AxisType.Auto, {}),
        (AxisType.Explicit, {"mu_dtype": "bfloat16", "mu_rounding": "stochastic"}),
        *(
            pytest.param(axis_type, given, marks=helpers.nightly)
            for axis_type in (None, AxisType.Auto, AxisType.Explicit)
            for given in (
                {"normuon_b2": 0.9, "mu_dtype": "int8"},
                {"adamh": "head"},
                {"momentum": "heavy_ball", "nesterov": False, "adam_b2": 0.95},
                {"nesterov": False, "mu_dtype": "bfloat16"},
            )
            if axis_type != AxisType.Explicit or given.get("mu_dtype") != "int8"
        ),
    ],
)
def test_each_bit_is_that_of_a_state_on_the_device(axis_type, given):
    expected, found = (
        trained(optax.chain(optax.clip_by_global_norm(1.0), make(**given)), axis_type)
        for make in (MUON, ON_HOST)
    )
    assert_equal_bits(found, expected)
    assert kinds(expected) == ({DEVICE}, {DEVICE})
    assert kinds(found[0]) == ({DEVICE}, {DEVICE})
    assert kinds(found[1]) == ({HOST}, {DEVICE})
    for x, like in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert x.sharding.memory_kind == ("pinned_host" if _on_host.is_on_host(x) else "device")
        on_device = x.sharding.with_memory_kind("device")
        assert on_device.is_equivalent_to(like.sharding, x.ndim)


def test_bytes_under_way_are_bounded():
    """Fetches wait for the gradient, and for leaves that are back on the host."""
    gradients = {f"w{i}": jnp.ones((64, 96)) for i in range(5)}
    transform = scale_by_muon(mu_dtype=on_host())
    state = transform.init(gradients)
    jaxpr = jax.make_jaxpr(lambda g, s: transform.update(g, s))(gradients, state).jaxpr
    given = dict(zip(jaxpr.invars, [*gradients, "count", *gradients], strict=True))
    back = [v for v in jaxpr.outvars if v.aval.memory_space == HOST]
    waits = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            old, *awaited = eqn.invars
            if old.aval.memory_space == HOST:
                assert given[old] == given[awaited[0]]
                waits.append([back.index(v) for v in awaited[1:]])
    assert waits == [[], [], [0], [1], [2]]


def test_arrays_that_optax_and_flax_wrap_stay_where_they_are():
    params = drawn(0)
    tx = optax.apply_if_finite(
        optax.inject_hyperparams(muon)(
            0.1, ns_steps=1, muon_weight_dimension_numbers=VIEWS, mu_dtype=on_host()
        ),
        3,
    )
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    stepped = jax.make_jaxpr(lambda s, g: s.apply_gradients(grads=g))(state, params).jaxpr
    before, after = (
        [v.aval.memory_space for v in variables] for variables in (stepped.invars, stepped.outvars)
    )
    assert before[: len(after)] == after
    assert after.count(HOST) == 4  # two momenta, and two moments of the head


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_in_a_shard_map(axis_type):
    params = drawn(0, axis_type)
    optimizer = ON_HOST(shardings=SPECS)
    state = optimizer.init(params)
    specs = jax.tree.map(lambda x: x.sharding.spec if x.ndim else PartitionSpec(), state)
    mesh = params["up"].sharding.mesh
    run = jax.shard_map(
        optimizer.update, mesh=mesh, in_specs=(SPECS, specs, SPECS), out_specs=(SPECS, specs)
    )
    made = jax.make_jaxpr(run)(params, state, params).jaxpr
    assert [v.aval.memory_space for v in made.outvars].count(HOST) == 4


@helpers.nightly
def test_metrics_are_those_of_a_state_on_the_device():
    gradients = {"w": drawn(0)["up"]}
    found = []
    for mu_dtype in (None, on_host()):
        transform = with_metrics(scale_by_muon(ns_steps=1, mu_dtype=mu_dtype))
        _, state = jax.jit(transform.update)(gradients, transform.init(gradients))
        found.append(metrics(state))
    assert_equal_bits(*found)


@pytest.mark.slow
def test_converted_states_stay_on_the_host():
    def converted(state):
        state = convert_momentum(state, source="ema", target="heavy_ball", beta=0.9)
        return cast_momentum(state, "int8"), cast_momentum(state, "bfloat16")

    expected, found = (jax.jit(converted)(make().init(drawn(0))) for make in (MUON, ON_HOST))
    assert_equal_bits(found, expected)
    assert kinds(found) == ({HOST}, {DEVICE})


def test_cast_momentum_moves_a_state_to_the_host():
    params, optimizer = drawn(0), ON_HOST("bfloat16")
    state = cast_momentum(MUON().init(params), on_host("bfloat16"))
    assert kinds(state) == ({HOST}, {DEVICE})
    chex.assert_trees_all_equal_shapes_and_dtypes(state, optimizer.init(params))
    jax.eval_shape(optimizer.update, params, state, params)


def test_a_checkpoint_is_restored_to_the_host(tmp_path):
    optimizer = ON_HOST()
    blank = optimizer.init(drawn(0))
    saved = jax.tree.map(lambda x: jax.device_put(np.full(x.shape, 3, x.dtype), x.sharding), blank)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", blank)
    assert [x.sharding for x in jax.tree.leaves(restored)] == [
        x.sharding for x in jax.tree.leaves(saved)
    ]
    # JAX forgets the memory in the type of an array that is made of arrays on each device.
    restored = moved_like(restored, blank)
    assert_equal_bits(restored, saved)
    assert kinds(restored) == ({HOST}, {DEVICE})


def test_a_state_in_the_other_memory_is_refused_and_can_be_moved():
    params = drawn(0)
    states = {make: make().init(params) for make in (MUON, ON_HOST)}
    for make, other, message in (
        (
            ON_HOST,
            MUON,
            r"on the host, got \.mu\['\w+'\] of type float32\[.*\]: pass jax\.tree\.map",
        ),
        (MUON, ON_HOST, r"on the device, got \.mu\['\w+'\] of type float32<host>\[.*\]: pass jax"),
    ):
        with pytest.raises(ValueError, match=message):
            make().update(params, states[other], params)
        moved = moved_like(states[other], states[make])
        jax.eval_shape(make().update, params, moved, params)


def test_a_device_without_pinned_memory_is_refused(monkeypatch):
    device = SimpleNamespace(
        device_kind="toaster", addressable_memories=lambda: [SimpleNamespace(kind="device")]
    )
    monkeypatch.setattr(_on_host.backend, "get_default_device", lambda: device)
    with pytest.raises(
        NotImplementedError, match=r"got toaster with the memory kinds \['device'\]"
    ):
        ON_HOST().init(drawn(0))
    with pytest.raises(ValueError, match="mu_dtype must be the name of a float dtype, got 'host'"):
        on_host("host")


@pytest.mark.gpu
@pytest.mark.parametrize("given", [{}, {"mu_dtype": "int8"}, {"mu_dtype": "bfloat16"}])
def test_on_a_gpu(given, monkeypatch):
    """No bit differs, and the state leaves the memory of the device."""
    monkeypatch.undo()  # the bounds of users
    shapes = {f"layer_{i}": (1024, 2048) for i in range(4)} | {"head": (1024, 4096), "bias": (64,)}
    views = {name: MuonDimensionNumbers() if "layer" in name else None for name in shapes}
    params, *gradients = (
        jax.device_put(helpers.random_tree(shapes, seed), jax.devices()[0]) for seed in range(4)
    )
    found, sizes = [], []
    mu_dtype = given.get("mu_dtype")
    for stored in (mu_dtype, on_host(mu_dtype)):
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            muon(0.1, muon_weight_dimension_numbers=views, mu_dtype=stored),
        )

        def step(params, state, gradients, optimizer=optimizer):
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        result = params, jax.jit(optimizer.init)(params)
        compiled = jax.jit(step).lower(*result, params).compile()
        for each in gradients:
            result = compiled(*result, each)
        found.append(result)
        sizes.append(compiled.memory_analysis())
    assert_equal_bits(*found)
    assert kinds(found[1]) == ({HOST, DEVICE}, {DEVICE}) and kinds(found[1][1]) == (
        {HOST},
        {DEVICE},
    )
    of_state = sum(x.nbytes for x in jax.tree.leaves(found[1][1]) if _on_host.is_on_host(x))
    assert sizes[1].host_argument_size_in_bytes == of_state > 2**22
    assert sizes[0].argument_size_in_bytes - sizes[1].argument_size_in_bytes == of_state
