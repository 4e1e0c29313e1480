"""Ensembles: updates under `vmap`, on both kinds of mesh axes."""

import chex
import helpers
import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks._times.sharded import collectives
from muon_jax import Exchange, Link, NewtonSchulz, scale_by_muon

AXES = ("member", "data", "rows")
FREE = dict.fromkeys(AXES, Link(1e15, 0.0))
P = PartitionSpec


def _members(kind, spec, count=2):
    mesh = jax.make_mesh((2, 2, 2), AXES, (kind,) * 3)
    whole = {
        name: jax.random.normal(jax.random.key(i), (count, 16, 32)) for i, name in enumerate("abcd")
    }
    return jax.device_put(whole, NamedSharding(mesh, spec))


def _mapped(grads, exchange, mapping=None):
    transform = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"), shardings=exchange)

    def update(g):
        return transform.update(g, transform.init(g))[0]

    return jax.jit(jax.vmap(update, **(mapping or {}))).lower(grads).compile()


def _one_by_one(grads):
    transform = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"))
    grads = jax.device_get(grads)
    count = len(grads["a"])
    members = [{name: x[i] for name, x in grads.items()} for i in range(count)]
    results = [transform.update(g, transform.init(g))[0] for g in members]
    return jax.tree.map(lambda *xs: jax.numpy.stack(xs), *results)


@pytest.mark.parametrize(
    "kind", helpers.mostly_nightly([AxisType.Explicit, AxisType.Auto], [AxisType.Auto])
)
@pytest.mark.parametrize(
    "spec",
    [P("member"), P(), P("member", "rows"), P(None, "rows"), P("member", None, ("data", "rows"))],
)
def test_an_ensemble_repeats_the_work_by_default(kind, spec):
    grads = _members(kind, spec)
    default, repeat = (_mapped(grads, Exchange(axes, FREE)) for axes in ((), "repeat"))
    assert collectives(default) == collectives(repeat)
    assert "all-gather" not in collectives(default)
    found = default(grads)
    chex.assert_trees_all_equal(found, repeat(grads))
    chex.assert_trees_all_close(jax.device_get(found), _one_by_one(grads), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", helpers.mostly_nightly([AxisType.Explicit, AxisType.Auto], (), [AxisType.Auto])
)
@pytest.mark.parametrize("spec", [P("member"), P(), P("member", "rows")])
@pytest.mark.parametrize("axes", ["split", {"data": "split"}], ids=str)
def test_an_ensemble_that_splits_the_work_has_the_same_bits(kind, spec, axes):
    grads = _members(kind, spec)
    split, repeat = (_mapped(grads, Exchange(said)) for said in (axes, "repeat"))
    assert collectives(split)["all-gather"] == 1
    chex.assert_trees_all_equal(split(grads), repeat(grads))


@pytest.mark.slow
@pytest.mark.parametrize("word", ["faster", "split", "repeat"])
@pytest.mark.parametrize("mapping", [{}, {"spmd_axis_name": "member"}], ids=str)
def test_members_on_automatic_axes_with_stated_shardings(mapping, word):
    grads = _members(AxisType.Auto, P("member", "rows"))
    found = _mapped(grads, Exchange(word, FREE, P("rows")), mapping)(grads)
    chex.assert_trees_all_close(jax.device_get(found), _one_by_one(grads), atol=1e-5)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("mapping", [{}, {"spmd_axis_name": "member"}], ids=str)
def test_members_over_the_caller_s_shard_map(mapping, check_vma):
    grads = _members(AxisType.Auto, P("member"))
    mesh = grads["a"].sharding.mesh
    exchange = Exchange(links=FREE, shardings=P("rows"))
    transform = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"), shardings=exchange)

    def update(g):
        return transform.update(g, transform.init(g))[0]

    run = jax.shard_map(
        update, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"), check_vma=check_vma
    )
    found = jax.jit(jax.vmap(run, **mapping))(grads)
    chex.assert_trees_all_close(jax.device_get(found), _one_by_one(grads), atol=1e-5)
