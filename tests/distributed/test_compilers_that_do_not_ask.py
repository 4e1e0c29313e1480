"""Automatic axes where no compiler asks how to partition an operation, as on TPUs: on CPUs here."""

import warnings

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_layouts import LAYOUTS, problem

from benchmarks._times.sharded import collectives
from muon_jax import Exchange, NewtonSchulz, muon, scale_by_muon
from muon_jax._distributed import sharding as devices

UNKNOWN = "shardings of the parameters are not known.*cpu devices.*Pass shardings=.*optimizer.init"
# What XLA exchanges where nobody knows shardings: two all-to-alls for each stack and mesh axis.
UNKNOWN_LAYOUTS = {
    "DDP": {"all-gather": 4},
    "FSDP": {"all-to-all": 2 * 4},
    "HSDP": {"all-to-all": 2 * 4, "all-gather": 4},
    "TP": {"all-to-all": 2 * 4},
    "TP + FSDP": {"all-to-all": 2 * 2 * 4},
    "EP": {},
    "EP + FSDP": {"all-to-all": 2 * 2},
    "TP + EP + FSDP": {"all-to-all": 14, "all-gather": 1},
    "layers stacked": {"all-to-all": 2 * 2 * 2},
    "stages stacked": {"all-to-all": 2, "collective-permute": 2},
    "uneven counts": {"all-to-all": 2 * 4},
    "views": {"all-to-all": 24, "all-gather": 6, "collective-permute": 2},
}


@pytest.fixture(autouse=True)
def _no_compiler_asks(monkeypatch):
    monkeypatch.setattr(devices, "PARTITIONING", frozenset())


def state_of(optimizer, grads):
    """The state of an optimizer that has seen no parameter outside `jit`."""
    state = jax.jit(optimizer.init)(grads)
    return state._replace(mu={k: jnp.zeros_like(g, device=g.sharding) for k, g in grads.items()})


def matrix(spec):
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    x = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    return x, NamedSharding(mesh, PartitionSpec(*spec))


def lowered(optimizer, grads, state):
    return jax.jit(optimizer.update).lower(grads, state)


@pytest.mark.parametrize("name", helpers.mostly_nightly(LAYOUTS, ["TP + FSDP"]))
def test_layouts_that_nobody_knows(name):
    grads, _, views = problem(name, AxisType.Auto)
    expected = helpers.on_one_device(grads, weight_dimension_numbers=views)
    optimizer = helpers.two_steps(weight_dimension_numbers=views)
    state = state_of(optimizer, grads)
    with pytest.warns(UserWarning, match=UNKNOWN) as warned:
        compiled = lowered(optimizer, grads, state).compile()
    assert len(warned) == 1
    assert collectives(compiled) == UNKNOWN_LAYOUTS[name]
    updates, _ = compiled(grads, state)
    helpers.assert_close(updates, expected)
    for key, update in updates.items():
        assert update.sharding.is_equivalent_to(grads[key].sharding, update.ndim)


@pytest.mark.parametrize("name", helpers.mostly_nightly(LAYOUTS, ["TP + FSDP", "DDP"]))
def test_what_init_saw_outside_jit_makes_the_plan(name):
    grads, specs, views = problem(name, AxisType.Auto)
    plain = scale_by_muon(weight_dimension_numbers=views)
    stated = scale_by_muon(weight_dimension_numbers=views, shardings=specs)
    state = plain.init(grads)
    program = lowered(plain, grads, state).as_text()
    assert program == lowered(stated, grads, state).as_text()
    assert ("all_to_all" in program) == bool(LAYOUTS[name][2])


def test_describe_says_that_init_makes_the_plan(monkeypatch):
    grads, specs, views = problem("FSDP", AxisType.Auto)

    def said(shardings=None):
        mesh = jax.typeof(jax.tree.leaves(grads)[0]).sharding.mesh
        return helpers.exchanges(grads, shardings, mesh, muon_weight_dimension_numbers=views)

    assert said().are_shardings_from_init
    assert "if the latest `init` outside of jit had these shardings" in str(said())
    assert not said(specs).are_shardings_from_init
    monkeypatch.undo()
    assert not said().are_shardings_from_init


def test_what_is_stated_makes_the_program_that_it_made_before(monkeypatch):
    grads, specs, views = problem("TP + FSDP", AxisType.Auto)
    optimizer = scale_by_muon(weight_dimension_numbers=views, shardings=specs)
    state = optimizer.init(grads)
    program = lowered(optimizer, grads, state).as_text()
    monkeypatch.undo()
    assert lowered(optimizer, grads, state).as_text() == program


def test_the_warning_comes_once_for_all_parameters_and_steps():
    x, sharding = matrix(["x"])
    grads = {f"layer {i}": jax.device_put(x, sharding) for i in range(2)}
    grads["bias"] = jnp.ones(8)
    optimizer = muon(0.02, ns_steps=1)
    state = jax.jit(optimizer.init)(grads)
    update = jax.jit(optimizer.update)
    with pytest.warns(UserWarning, match=UNKNOWN) as warned:
        for _ in range(2):
            update(grads, state, grads)
    assert len(warned) == 1


def test_an_update_outside_jit_sees_its_arrays():
    x, sharding = matrix(["x"])
    grads = {"w": jax.device_put(x, sharding)}
    optimizer = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"), ns_steps=1)
    updates, _ = optimizer.update(grads, state_of(optimizer, grads))
    expected, _ = optimizer.update({"w": x}, optimizer.init({"w": x}))
    helpers.assert_close(updates, expected)


def test_what_was_seen_of_another_tree_or_mesh_counts_for_nothing():
    grads, _, _ = problem("FSDP", AxisType.Auto)
    optimizer = scale_by_muon(ns_steps=1)
    optimizer.init(problem("HSDP", AxisType.Auto)[0])
    optimizer.init(jax.device_get(grads))
    with pytest.warns(UserWarning, match=UNKNOWN):
        lowered(optimizer, grads, state_of(optimizer, grads))


def test_what_was_seen_on_a_mesh_of_mixed_axes_counts_for_nothing():
    """The types tell a part of it."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Auto, AxisType.Explicit))
    grads = {"w": jax.device_put(jnp.ones((16, 16)), NamedSharding(mesh, PartitionSpec("x")))}
    optimizer = scale_by_muon(ns_steps=1)
    with pytest.raises(ValueError, match="cannot be known.*pass shardings="):
        jax.eval_shape(optimizer.update, grads, optimizer.init(grads))


@pytest.mark.parametrize("named", [True, False])
def test_shardings_that_only_jit_knows(named):
    """A NamedSharding has the mesh; with a PartitionSpec alone XLA is left to itself."""
    x, sharding = matrix(["x"])
    stated = sharding if named else sharding.spec
    optimizer = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"), ns_steps=1, shardings=stated)

    def update(x):
        return optimizer.update(x, optimizer.init(x))[0]

    expected, _ = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"), ns_steps=1).update(
        x, optimizer.init(x)
    )
    jitted = jax.jit(update, in_shardings=sharding, out_shardings=sharding)
    if named:
        compiled = jitted.lower(x).compile()
        assert collectives(compiled) == {"all-to-all": 2}
    else:
        with pytest.warns(UserWarning, match="XLA may gather each matrix.*NamedSharding"):
            compiled = jitted.lower(x).compile()
    np.testing.assert_allclose(compiled(x), expected, atol=2e-6)


def test_matrices_that_are_to_stay_sharded_need_shardings():
    x, sharding = matrix([None, "x"])
    optimizer = scale_by_muon(shardings=Exchange("gram_or_exchange"))
    x = {"w": jax.device_put(x, sharding)}
    state = state_of(optimizer, x)
    with pytest.raises(
        ValueError, match=r"\('gram_or_exchange'\) needs to know.*pass .*shardings="
    ):
        lowered(optimizer, x, state)
    optimizer.init(x)
    assert "psum" in str(jax.make_jaxpr(optimizer.update)(x, state))


@pytest.mark.parametrize("axes", ["raise", {"y": "raise"}, {"x": "gram"}, "split"], ids=str)
def test_words_that_need_shardings(axes):
    x, sharding = matrix([None, "x"])
    optimizer = scale_by_muon(shardings=Exchange(axes))
    x = {"w": jax.device_put(x, sharding)}
    with pytest.raises(ValueError, match="shardings=Exchange.* needs to know.*pass .*shardings="):
        lowered(optimizer, x, state_of(optimizer, x))


@helpers.slow
def test_an_ensemble_that_nobody_knows():
    mesh = jax.make_mesh((2, 4), ("member", "fsdp"), (AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("member", "fsdp"))
    x = np.random.default_rng(0).standard_normal((2, 16, 32)).astype(np.float32)
    optimizer = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"), ns_steps=1)
    update = jax.jit(jax.vmap(lambda x: optimizer.update(x, optimizer.init(x))[0]))
    expected = update(x)
    with pytest.warns(UserWarning, match=UNKNOWN):
        updates = update(jax.device_put(x, sharding))
    np.testing.assert_allclose(updates, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("max_group_bytes", "count"),
    [(None, 2), pytest.param(16 * 32 * 4, 4, marks=helpers.nightly)],
)
@helpers.slow
def test_stacks_are_bounded_in_bytes_of_a_device(max_group_bytes, count):
    """16 matrices on 8 devices: one stack of two for each, or two stacks of one for each."""
    x, sharding = matrix(["x"])
    grads = {f"layer {i}": jax.device_put(x * (i + 1), sharding) for i in range(16)}
    optimizer = scale_by_muon(
        ns_coeffs=NewtonSchulz(dtype="float32", max_group_bytes=max_group_bytes), ns_steps=1
    )
    state = state_of(optimizer, grads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = lowered(optimizer, grads, state).compile()
    assert collectives(compiled) == {"all-to-all": count}
