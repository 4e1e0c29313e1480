"""Ensembles, and replicas that do what is faster."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import scale_by_muon


def _transforms():
    links = {"bandwidth": {"data": 1e15}, "latency": {"data": 0.0}}  # any split is faster
    stated = scale_by_muon(outside="repeat", ns_dtype="float32")
    return stated, scale_by_muon(ns_dtype="float32", **links)


def _compiled(transform, params, mapped):
    def update(g):
        return transform.update(g, transform.init(g))[0]

    return jax.jit(jax.vmap(update) if mapped else update).lower(params).compile()


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("spec", [("member",), (), ("member", "rows")])
def test_an_ensemble_repeats_the_work(kind, spec, request):
    if kind == "Explicit" and "rows" in spec:
        reason = "packing writes arrays without the members' axis in their type"
        request.applymarker(pytest.mark.xfail(reason=reason))
    mesh = jax.make_mesh((2, 2, 2), ("member", "data", "rows"), (AxisType[kind],) * 3)
    whole = {
        name: jax.random.normal(jax.random.key(i), (2, 64, 96)) for i, name in enumerate("abcd")
    }
    params = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*spec)))
    repeat, default = (_compiled(t, params, mapped=True)(params) for t in _transforms())
    for name in whole:
        np.testing.assert_array_equal(repeat[name], default[name])


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_replicas_split_the_work_by_default_where_that_is_faster(kind):
    mesh = jax.make_mesh((8,), ("data",), (AxisType[kind],))
    whole = {str(i): jax.random.normal(jax.random.key(i), (64, 96)) for i in range(8)}
    params = jax.device_put(whole, NamedSharding(mesh, PartitionSpec()))
    repeat, default = (_compiled(t, params, mapped=False) for t in _transforms())
    assert repeat.as_text().count(" all-gather(") == 0
    assert default.as_text().count(" all-gather(") == 1
    for name, expected in repeat(params).items():
        np.testing.assert_array_equal(expected, default(params)[name])
