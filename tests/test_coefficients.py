"""Coefficients by path: each matrix has those of its path, whatever is grouped and exchanged."""

import functools
import re

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks._times.sharded import collectives
from muon_jax import (
    PRESETS,
    Exchange,
    MuonDimensionNumbers,
    NewtonSchulz,
    Split,
    describe,
    muon,
    newton_schulz,
    scale_by_muon,
)
from muon_jax._distributed import sharding as devices
from muon_jax._distributed.planning import leaves_of, make_plan
from muon_jax._distributed.sharding import parameters_of
from muon_jax._scale_by_muon import iterations_by_path

MATRICES = MuonDimensionNumbers()
TABLE = ((4.0, -6.0, 3.0), (3.4445, -4.775, 2.0315))
BY_PATH = {"layers/[23]/": TABLE, ".*": "standard"}


def by_callable(path, shape):
    assert shape == (8, 16)
    return TABLE if path in ("layers/2/w", "layers/3/w") else "standard"


def layers(shape=(8, 16), count=4):
    rng = np.random.default_rng(0)
    return {"layers": [{"w": rng.standard_normal(shape).astype("f")} for _ in range(count)]}


def in_float32(ns_coeffs, **attributes):
    if callable(ns_coeffs):
        return lambda path, shape: in_float32(ns_coeffs(path, shape), **attributes)
    if isinstance(ns_coeffs, dict):
        return {pattern: in_float32(x, **attributes) for pattern, x in ns_coeffs.items()}
    return NewtonSchulz(ns_coeffs, dtype="float32", **attributes)


def updates_of(grads, ns_coeffs="standard", method=None, **kwargs):
    optimizer = scale_by_muon(in_float32(ns_coeffs, method=method), **kwargs)
    return jax.jit(optimizer.update)(grads, optimizer.init(grads))[0]


def expected_updates(grads, **kwargs):
    """The updates where each layer is updated by an optimizer with its coefficients alone."""
    return {
        "layers": [
            updates_of(layer, ns_coeffs=TABLE if i > 1 else "standard", **kwargs)
            for i, layer in enumerate(grads["layers"])
        ]
    }


@pytest.mark.parametrize("ns_coeffs", [BY_PATH, by_callable])
def test_each_matrix_has_the_coefficients_of_its_path(ns_coeffs):
    grads = layers() | {"none": np.zeros((0, 4), "f")} if ns_coeffs is BY_PATH else layers()
    updates = updates_of(grads, ns_coeffs=ns_coeffs)
    chex.assert_trees_all_equal({"layers": updates["layers"]}, expected_updates(layers()))


def test_matrices_with_other_coefficients_are_other_groups():
    params = layers() | {"bias": np.zeros(3, "f")}
    described = describe(params, ns_coeffs=BY_PATH)
    found = [(group.shape, group.coefficients) for group in described.groups]
    assert found == [((2, 8, 16), "standard"), ((2, 8, 16), "2 triples")]
    assert [p.groups for p in described.parameters] == [(), (0,), (0,), (1,), (1,)]
    # The first pattern that matches decides, and `.*` comes before the third.
    with pytest.raises(ValueError, match=r"ns_coeffs\['layers/1'\] never decides: '.*' before it"):
        describe(params, ns_coeffs=BY_PATH | {"layers/1": (3.0, -3.0, 1.0)})
    by_shape = {"layers/1": (3.0, -3.0, 1.0)} | BY_PATH
    assert "(3, -3, 1)" in [g.coefficients for g in describe(params, ns_coeffs=by_shape).groups]


def sharded(kind, grads, spec):
    mesh = jax.make_mesh((4,), ("x",), (kind,), devices=jax.devices()[:4])
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), grads)


@pytest.mark.parametrize(
    "kind", helpers.mostly_nightly([AxisType.Auto, AxisType.Explicit], [AxisType.Explicit])
)
def test_owners_share_all_matrices_in_one_exchange(kind):
    spec, grads = PartitionSpec("x"), layers()
    on_mesh = sharded(kind, grads, spec)
    optimizer = scale_by_muon(in_float32(BY_PATH))
    compiled = jax.jit(optimizer.update).lower(on_mesh, optimizer.init(on_mesh)).compile()
    assert collectives(compiled) == {"all-to-all": 2}
    updates, _ = compiled(on_mesh, optimizer.init(on_mesh))
    chex.assert_trees_all_close(jax.device_get(updates), expected_updates(grads), atol=2e-6)
    explained = helpers.exchanges(on_mesh, ns_coeffs=in_float32(BY_PATH))
    assert [(g.coefficients, g.count, g.each) for g in explained.groups] == [
        ("standard", 2, 1),
        ("2 triples", 2, 1),
    ]
    assert explained.buckets == 1 and "2 triples" in str(explained)


def test_owners_of_the_second_coefficients_come_after_those_of_the_first():
    """Four matrices on four devices: each device has one."""
    grads = layers()
    iterations = iterations_by_path(BY_PATH)(grads)
    parameters = parameters_of(None, grads, None)
    units = leaves_of(parameters, [x.dtype for x in jax.tree.leaves(grads)], iterations)
    plan = make_plan(units, [PartitionSpec("x")] * 4, {"x": 4}, Exchange(), iterations.distinct)
    assert [(c.first, c.count) for c in plan.buckets[0]] == [(0, 2), (2, 2)]


@pytest.mark.parametrize(
    ("case", "kind", "shape", "kwargs"),
    [
        pytest.param(
            "kept sharded",
            AxisType.Explicit,
            (8, 64),
            {"shardings": Exchange("gram_or_exchange")},
            marks=helpers.slow,
        ),
        pytest.param("manual", AxisType.Auto, (8, 16), {}, marks=helpers.nightly),
        pytest.param("nobody knows", AxisType.Auto, (8, 16), {}, marks=helpers.nightly),
        pytest.param("vmap", AxisType.Auto, (8, 16), {}, marks=helpers.nightly),
    ],
)
def test_on_a_mesh(case, kind, shape, kwargs, monkeypatch):
    spec, grads = PartitionSpec(None, "x"), layers(shape)
    on_mesh = sharded(kind, grads, spec)
    method = {"method": "gram"} if case == "kept sharded" else {}
    expected = expected_updates(grads, **method)
    run = functools.partial(updates_of, ns_coeffs=BY_PATH, **kwargs)
    if case == "manual":
        mesh = jax.tree.leaves(on_mesh)[0].sharding.mesh
        run = functools.partial(run, shardings=spec)
        run = jax.shard_map(run, mesh=mesh, in_specs=(spec,), out_specs=spec)
    if case == "vmap":
        twice = functools.partial(jax.tree.map, lambda x: jnp.stack([x, x]))
        on_mesh, expected = twice(on_mesh), twice(expected)
        run = jax.vmap(run)
    if case == "nobody knows":
        monkeypatch.setattr(devices, "PARTITIONING", frozenset())
    chex.assert_trees_all_close(jax.device_get(run(on_mesh)), expected, atol=5e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_takes_coefficients_by_path(preset):
    params = jax.eval_shape(lambda: layers() | {"lm_head": jnp.zeros((8, 20))})
    kwargs = {"preset": preset, "ns_coeffs": {"layers/0": TABLE, ".*": "standard"}}
    kwargs["muon_weight_dimension_numbers"] = {"layers": MATRICES, "lm_head": None}
    jax.eval_shape(muon(0.1, **kwargs).init, params)
    described = describe(params, **kwargs)
    assert [g.coefficients for g in described.groups] == ["2 triples", "standard"]


def test_hyperparameters_are_injected_beside_coefficients_by_path():
    grads = layers()
    called = []

    def recording(path, shape):
        called.append(path)
        return by_callable(path, shape)

    for ns_coeffs, static in ((BY_PATH, ()), (recording, ("ns_coeffs",))):
        optimizer = optax.inject_hyperparams(muon, static_args=static)(0.1, ns_coeffs=ns_coeffs)
        state = optimizer.init(grads)
        assert "ns_coeffs" not in state.hyperparams
        updates, _ = jax.eval_shape(optimizer.update, grads, state, grads)
        chex.assert_trees_all_equal_shapes(updates, grads)
    assert {*called} == {f"layers/{i}/w" for i in range(4)}


def test_parts_of_a_parameter_have_its_coefficients():
    params = {"qkv": np.ones((8, 24), "f"), "o": np.ones((8, 8), "f")}
    views = {"qkv": Split(-1, (8, 8, 8)), "o": MuonDimensionNumbers()}
    groups = describe(
        params, ns_coeffs={"^qkv$": TABLE, "^o$": "fast"}, muon_weight_dimension_numbers=views
    ).groups
    assert {(g.shape[0], g.coefficients) for g in groups} == {(3, "2 triples"), (1, "fast")}


@pytest.mark.parametrize(
    ("ns_coeffs", "error", "message"),
    [
        ({"layers/[23]": "fast"}, ValueError, r"layers/0/w of .*: no pattern .*add '.\*'"),
        (BY_PATH | {"embed": "fast"}, ValueError, r"\['embed'\] of ns_coeffs match none of the 4"),
        ({}, ValueError, "ns_coeffs has no coefficients, got {}"),
        ({"(": "fast"}, TypeError, r"each key of ns_coeffs must be a regular .* got '\('"),
        ({".*": "fats"}, ValueError, "got 'fats': did you mean 'fast'"),
        ({".*": {"w": "fast"}}, TypeError, "ns_coeffs of one matrix must be a name.*got {'w'"),
        (lambda path, shape: "fats", ValueError, "the parameter layers/0/w of .*got 'fats'"),
        (lambda path, shape: (-1, 2, 3), ValueError, "layers/0/w of .*with a > 0"),
    ],
)
def test_wrong_coefficients_say_what_was_wrong(ns_coeffs, error, message):
    params = layers() | {"embed": np.zeros(4, "f")}
    with pytest.raises(error, match=message):
        muon(0.1, ns_coeffs).init(params)


HALVES = {"layers/0/": TABLE, "layers/3/": "fast", ".*": "standard"}


@pytest.mark.parametrize("of_half", [functools.partial(muon, 0.1), scale_by_muon])
def test_two_halves_of_a_model_share_coefficients_by_path(of_half):
    params, of_half = layers(), of_half(ns_coeffs=HALVES)
    halves = {"layers": [{"w": "first"}] * 2 + [{"w": "second"}] * 2}
    optimizer = optax.partition({"first": of_half, "second": of_half}, halves)
    jax.eval_shape(optimizer.update, params, optimizer.init(params), params)
    is_first = jax.tree.map(lambda half: half == "first", halves)
    optax.masked(of_half, is_first).init(params)
    with pytest.raises(ValueError, match=r"\['layers/3/'\] of ns_coeffs match none of the 2"):
        of_half.init({"layers": params["layers"][:2]})


def test_reports_of_a_masked_tree_take_idle_patterns():
    whole = {"layers": layers()["layers"][:2], "bias": np.zeros(3, "f")}
    masked = whole | {"head": optax.MaskedNode()}
    groups = describe(masked, ns_coeffs=HALVES).groups
    assert {g.coefficients for g in groups} == {"2 triples", "standard"}
    with pytest.raises(ValueError, match=r"\['layers/3/'\] of ns_coeffs match none of the 2"):
        describe(whole, ns_coeffs=HALVES)


def test_schedules_by_path_are_checked_like_any():
    for ns_coeffs in ({".*": "fast"}, lambda path, shape: "fast"):
        with pytest.raises(ValueError, match="'fast' is a whole of 1 step"):
            scale_by_muon(ns_coeffs, ns_steps=3).init(layers())
        with pytest.raises(TypeError, match="of one matrix must be .*: pass coefficients by path"):
            newton_schulz(jnp.eye(4), ns_coeffs)


def test_patterns_that_never_decide_raise():
    kernels = {name: np.ones((4, 8), "f") for name in ("q", "k", "up", "down")}
    params = {"layers": [kernels], "head": np.ones((8, 3), "f"), "bias": np.ones(3, "f")}
    views = {"layers": MATRICES, "head": None, "bias": None}
    of_muon = {"muon_weight_dimension_numbers": views}
    rest = {".*": "standard"}
    for shadowed, mend in (
        ({"layers": "dion", "layers/0/up": "balanced"}, "put 'layers/0/up' first, or leave it out"),
        ({"[qk]$": "dion", "q": "balanced", **rest}, "put 'q' first"),
        ({"q": "dion", "k": "dion", "^layers/0/[qk]$": "balanced", **rest}, "'q', 'k' before it"),
        ({"up|down": "dion", "(up|down)$": "balanced", **rest}, r"'layers/0/down': leave it out"),
    ):
        pattern = re.escape([p for p in shadowed if p != ".*"][-1])
        message = rf"ns_coeffs\['{pattern}'\] never decides: .*{mend}"
        for use in (
            muon(0.1, shadowed, **of_muon).init,
            lambda p, c=shadowed: describe(p, ns_coeffs=c, **of_muon),
        ):
            with pytest.raises(ValueError, match=message):
                use(params)
        with pytest.raises(ValueError, match=message):
            scale_by_muon(shadowed).init(params["layers"] and {"layers": params["layers"]})
    # A path that AdamW has lets no pattern decide.
    with pytest.raises(
        ValueError, match=r"\['head'\] of ns_coeffs match none of the 4 .* Muon has"
    ):
        muon(0.1, {"head": "dion", **rest}, **of_muon).init(params)
    masked = {**params, "layers": [{**kernels, "up": optax.MaskedNode()}]}
    muon(0.1, {"q|down": "dion", "q|up": "balanced", **rest}).init(masked)
