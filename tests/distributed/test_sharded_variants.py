"""NorMuon, fixed norms and metrics of sharded parameters, beside those of one device."""

import functools
import math

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._times.sharded import collectives
from muon_jax import MuonDimensionNumbers, NewtonSchulz, scale_by_muon
from muon_jax._matrices.views import Split, Unfold
from muon_jax.contrib import (
    keep_param_norm,
    metrics,
    scale_by_adamuon,
    scale_by_normuon,
    scale_to_param_norm,
    with_metrics,
)

PARAMETERS = {
    "plain": ((16, 32), MuonDimensionNumbers(), P("x", "y")),
    "tall": ((32, 16), MuonDimensionNumbers(), P(None, "y")),
    "experts": ((2, 4, 8, 16), MuonDimensionNumbers(-2, -1), P(None, "y", "x")),
    "filters": ((3, 3, 8, 16), MuonDimensionNumbers((0, 1, 2), 3), P(None, None, "x", "y")),
    "heads": ((16, 8, 4), MuonDimensionNumbers(0, (1, 2)), P("x", "y")),
    "fused": ((16, 32), Split(-1, (16, 8, 8)), P(("x", "y"))),
    "merged": ((16, 32), Unfold(-1, (1, -1, 4), MuonDimensionNumbers(-4, -1)), P("x", "y")),
}
SHAPES, VIEWS, SPECS = (
    dict(zip(PARAMETERS, each, strict=True)) for each in zip(*PARAMETERS.values(), strict=True)
)
SUMS, MUONS = {"all-reduce"}, {"all-reduce", "all-to-all"}


def of_muon(**kwargs):
    return functools.partial(
        helpers.any_muon,
        1e-2,
        ns_coeffs=NewtonSchulz(dtype="float32"),
        muon_weight_dimension_numbers=VIEWS,
        **kwargs,
    )


# Transforms, and the collectives that they may need.
TRANSFORMS = {
    "normuon": (functools.partial(scale_by_normuon, 0.9, 1e-8, VIEWS), SUMS),
    "shorter": (functools.partial(scale_by_normuon, 0.9, 1e-8, VIEWS, "shorter"), SUMS),
    "adamuon": (functools.partial(scale_by_adamuon, 0.9, 1e-8, VIEWS), SUMS),
    "to norm": (functools.partial(scale_to_param_norm, VIEWS), SUMS),
    "keep norm": (functools.partial(keep_param_norm, VIEWS), SUMS),
    "muon": (of_muon(normuon_b2=0.9), MUONS),
    "nanogpt": (of_muon(preset="nanogpt"), MUONS),
    "of signs": (of_muon(preset="adamuon"), MUONS),
}


def arrays(seed, names=PARAMETERS):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(SHAPES[name]).astype("f") for name in names}


def mesh_of(kind, sizes=(2, 4)):
    kind = AxisType.Auto if kind == AxisType.Manual else kind
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, ("x", "y"), axis_types=(kind,) * 2, devices=devices)


def shard(tree, mesh, specs):
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in tree.items()}


def second_updates(transform, gradients, params):
    _, state = transform.update(params, transform.init(params), params)
    return transform.update(gradients, state, params)[0]


def compile_updates(make, kind, mesh, specs, gradients, params):
    """The second updates of trees with these specs, in a shard_map where axes are manual."""
    if kind == AxisType.Manual:
        update = functools.partial(second_updates, make(shardings=specs))
        update = jax.shard_map(update, mesh=mesh, in_specs=(specs, specs), out_specs=specs)
    else:
        update = functools.partial(second_updates, make())
    gradients, params = (shard(tree, mesh, specs) for tree in (gradients, params))
    compiled = jax.jit(update).lower(gradients, params).compile()
    return compiled, compiled(gradients, params)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (AxisType.Auto, "to norm"),
        (AxisType.Auto, "normuon"),
        (AxisType.Manual, "normuon"),
        (AxisType.Manual, "adamuon"),
        pytest.param(AxisType.Auto, "adamuon", marks=helpers.nightly),
        pytest.param(AxisType.Explicit, "of signs", marks=helpers.nightly),
        pytest.param(AxisType.Manual, "of signs", marks=helpers.nightly),
        pytest.param(AxisType.Auto, "of signs", marks=helpers.nightly),
        pytest.param(AxisType.Auto, "keep norm", marks=helpers.nightly),
        pytest.param(AxisType.Explicit, "keep norm", marks=helpers.nightly),
        pytest.param(AxisType.Manual, "to norm", marks=helpers.nightly),
        pytest.param(AxisType.Auto, "shorter", marks=helpers.nightly),
        pytest.param(AxisType.Auto, "muon", marks=helpers.nightly),
        pytest.param(AxisType.Auto, "nanogpt", marks=helpers.nightly),
        pytest.param(AxisType.Explicit, "shorter", marks=helpers.nightly),
        pytest.param(AxisType.Explicit, "nanogpt", marks=helpers.nightly),
        pytest.param(AxisType.Manual, "muon", marks=helpers.nightly),
    ],
)
def test_updates_are_those_of_one_device_and_sums_alone_are_exchanged(kind, name):
    (make, allowed), mesh, trees = TRANSFORMS[name], mesh_of(kind), (arrays(0), arrays(1))
    compiled, updates = compile_updates(make, kind, mesh, SPECS, *trees)
    assert {*collectives(compiled)} == allowed
    expected = jax.jit(functools.partial(second_updates, make()))(*trees)
    chex.assert_trees_all_close(jax.device_get(updates), expected, atol=2e-6)
    for name, update in updates.items():
        assert update.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), update.ndim), name


@pytest.mark.parametrize(
    "kind", helpers.mostly_nightly([AxisType.Auto, AxisType.Explicit], [AxisType.Auto])
)
def test_moments_are_sharded_like_their_neurons(kind):
    mesh = mesh_of(kind)
    state = scale_by_normuon(0.9, 1e-8, VIEWS).init(shard(arrays(0), mesh, SPECS))
    expected = {
        "plain": [((1, 32), P(None, "y"))],
        "tall": [((1, 16), P(None, "y"))],
        "experts": [((2, 4, 1, 16), P(None, "y"))],
        "filters": [((1, 1, 1, 16), P(None, None, None, "y"))],
        "heads": [((1, 8, 4), P(None, "y"))],
        "fused": [((1, size), P()) for size in (16, 8, 8)],
        "merged": [((1, 1, 8, 4), P(None, None, "y"))],
    }
    for name, parts in expected.items():
        for moment, (shape, spec) in zip(state.nu[name], parts, strict=True):
            assert moment.shape == shape and moment.dtype == jnp.float32
            assert moment.sharding.is_equivalent_to(NamedSharding(mesh, spec), len(shape)), name


@pytest.mark.parametrize("sizes", [(2, 4), (1, 1)])
def test_moments_of_a_shard_map_vary_with_their_neurons_alone(sizes):
    mesh, spec = mesh_of(AxisType.Manual, sizes), P("x", "y")

    def moments(x, **kwargs):
        transform = scale_by_normuon(**kwargs)
        return transform.update(x, transform.init(x))[1].nu

    run = functools.partial(moments, shardings=spec)
    run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=P(None, "y"))
    x = arrays(0)["plain"]
    chex.assert_trees_all_close(jax.jit(run)(x), moments(x), rtol=1e-5)


def measured(gradients, params, **kwargs):
    def views(tree):
        return {name: VIEWS[name] for name in tree}

    muon = scale_by_muon(
        ns_coeffs=NewtonSchulz(dtype="float32"), weight_dimension_numbers=views, **kwargs
    )
    transform = with_metrics(muon, views, **kwargs)
    return metrics(transform.update(gradients, transform.init(params), params)[1])


LONG = {"experts": P("x", "y"), "filters": P(None, None, ("x", "y"))}  # the shorter sides are whole


@pytest.mark.parametrize(
    ("kind", "specs", "allowed"),
    [
        pytest.param(
            AxisType.Explicit,
            SPECS,
            {*MUONS, "all-gather", "collective-permute"},
            marks=helpers.nightly,
        ),
        pytest.param(AxisType.Explicit, LONG, MUONS, marks=helpers.nightly),
        (AxisType.Auto, LONG, MUONS),
    ],
)
@helpers.slow
def test_metrics_of_sharded_parameters(kind, specs, allowed):
    trees = [arrays(seed, specs) for seed in range(2)]
    sharded = [shard(tree, mesh_of(kind), specs) for tree in trees]
    compiled = jax.jit(measured).lower(*sharded).compile()
    assert {*collectives(compiled)} == allowed
    found = compiled(*sharded)
    assert all(value.sharding.is_fully_replicated for value in found.values())
    chex.assert_trees_all_close(jax.device_get(found), jax.jit(measured)(*trees), rtol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@helpers.nightly
def test_metrics_of_equal_layers_are_one_loop(kind):
    specs = {f"layer {i}": P(None, "x") for i in range(4)} | {"other": P("y")}
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal((16, 32)).astype("f") for name in specs}
    transform = with_metrics(scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32")))

    def found(params):
        return metrics(transform.update(params, transform.init(params))[1])

    sharded = shard(params, mesh_of(kind), specs)
    # Power iterations and Lanczos steps, of the layers and of the other.
    assert str(jax.make_jaxpr(found)(sharded)).count("scan[") == 4
    compiled = jax.jit(found).lower(sharded).compile()
    # One gathers the shorter side of the other parameter, one the vector of its Lanczos steps.
    assert collectives(compiled).get("all-gather", 0) <= 2
    chex.assert_trees_all_close(jax.device_get(compiled(sharded)), found(params), rtol=1e-4)


def test_metrics_in_a_shard_map_are_of_whole_parameters():
    trees = [arrays(seed, ["plain"]) for seed in range(2)]

    def run(spec, **kwargs):
        function = functools.partial(measured, **kwargs)
        mesh = mesh_of(AxisType.Manual)
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=P()))(*trees)

    chex.assert_trees_all_close(run(P(), shardings=P()), jax.jit(measured)(*trees), rtol=1e-4)
    message = r"whole.*, got a shard of .* \(8, 32\) of \['plain'\]"
    with pytest.raises(NotImplementedError, match=message):
        run(P("x"), shardings=P("x"))
    with pytest.raises(ValueError, match="pass shardings="):
        run(P())


@helpers.slow
def test_metrics_in_a_shard_map_over_axes_of_one_device():
    spec = P("x", "y")
    transform = with_metrics(scale_by_muon(shardings=spec), shardings=spec)

    def update(x):
        updates, state = transform.update(x, transform.init(x))
        return updates, jax.tree.map(lambda value: value[None], metrics(state))

    specs = {"in_specs": spec, "out_specs": (spec, P(("x", "y")))}
    run = jax.jit(jax.shard_map(update, mesh=mesh_of(AxisType.Manual, (1, 1)), **specs))
    x = arrays(0)["plain"]
    chex.assert_trees_all_close(run(x), update(x), rtol=1e-4)


def test_norms_of_any_size_of_matrices_in_pieces():
    """Squares are beyond float32, and pieces are of different sizes."""
    size, kind = np.geomspace(1, 1e25, 32).astype("f"), AxisType.Manual
    trees = [{"plain": arrays(seed)["plain"] * size} for seed in range(2)]
    specs = {"plain": P("x", "y")}
    _, updates = compile_updates(scale_to_param_norm, kind, mesh_of(kind), specs, *trees)
    u, p = (np.float64(tree["plain"]) for tree in trees)
    expected = u * np.linalg.norm(p) / np.linalg.norm(u)
    np.testing.assert_allclose(updates["plain"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "kind", helpers.mostly_nightly([AxisType.Explicit, AxisType.Manual], [AxisType.Manual])
)
@pytest.mark.parametrize(
    "view", [Split(-1, (18, 14)), Unfold(-1, (2, 16), MuonDimensionNumbers(-3, -1))]
)
def test_an_axis_is_not_taken_apart_where_its_sharding_does_not(kind, view):
    make = functools.partial(keep_param_norm, {"plain": view})
    trees = [arrays(seed, ["plain"]) for seed in range(2)]
    specs = {"plain": P("x", "y")}
    _, updates = compile_updates(make, kind, mesh_of(kind, (8, 1)), specs, *trees)
    chex.assert_trees_all_close(jax.device_get(updates), second_updates(make(), *trees), atol=2e-6)
    message = r"\['plain'\] of shape \(16, 32\).* takes axis 1 apart.*P\('x', 'y'\).*shard another"
    with pytest.raises(NotImplementedError, match=message):
        compile_updates(make, kind, mesh_of(kind), specs, *trees)


@pytest.mark.parametrize("make", [scale_by_normuon, scale_by_adamuon, keep_param_norm])
@helpers.slow
def test_a_part_of_size_one_on_explicit_axes_of_one_device(make):
    view = Split(-1, (8, 1), Unfold(-1, (-1, 1), MuonDimensionNumbers(-3, -2)))
    transform, x = make(weight_dimension_numbers=view), np.arange(72, dtype="f").reshape(8, 9)
    sharding = NamedSharding(mesh_of(AxisType.Explicit, (8, 1)), P("x", "y"))

    def update(x):
        return transform.update(x, transform.init(x), x)[0]

    found = jax.jit(update)(jax.device_put(x, sharding))
    assert found.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_allclose(found, update(jnp.asarray(x)), rtol=1e-6)


def test_the_mesh_axes_of_norms_are_checked():
    def update(u):
        return keep_param_norm(shardings=P("embed")).update(u, optax.EmptyState(), u)[0]

    run = jax.shard_map(update, mesh=mesh_of(AxisType.Manual), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ValueError, match=r"\['w'\].*\('embed',\) must name axes of the mesh"):
        jax.jit(run)({"w": jnp.ones((16, 32))})


def test_fixed_norms_of_an_ensemble_on_explicit_axes():
    mesh, transform = mesh_of(AxisType.Explicit), keep_param_norm()
    update = jax.vmap(lambda u, p: transform.update(u, optax.EmptyState(), p)[0])
    u, p = np.random.default_rng(0).standard_normal((2, 4, 16, 32)).astype("f")
    sharding = NamedSharding(mesh, P("x", None, "y"))
    found = jax.jit(update)(*(jax.device_put(x, sharding) for x in (u, p)))
    assert found.sharding.is_equivalent_to(sharding, 3)
    np.testing.assert_allclose(found, update(u, p), atol=2e-6)
