"""Shardings that contradict those of the parameters warn; names of axes are checked in tracing."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import scale_by_muon
from muon_jax._distributed import automatic

P = PartitionSpec


def _sharded(spec):
    mesh = jax.make_mesh((4, 2, 1), ("fsdp", "tensor", "one"), (AxisType.Auto,) * 3)
    return {"w": jax.device_put(jnp.ones((16, 32)), NamedSharding(mesh, spec))}


@pytest.mark.parametrize(
    ("own", "stated"),
    [
        (P("fsdp"), P()),
        (P("fsdp", "tensor"), P("fsdp")),
        (P("fsdp"), P(None, "fsdp")),
        (P(), P("tensor")),
        (P(("fsdp", "tensor")), P(("tensor", "fsdp"))),
    ],
)
def test_a_stated_sharding_that_is_not_the_parameters_warns(own, stated):
    with pytest.warns(UserWarning, match=r"\['w'\], which is sharded by"):
        scale_by_muon(shardings=stated).init(_sharded(own))


@pytest.mark.parametrize(
    ("own", "stated"),
    [(P("fsdp"), P("fsdp", None)), (P("fsdp", "one"), P("fsdp")), (P(), None), (P("one"), P())],
)
def test_a_stated_sharding_that_is_the_parameters_does_not_warn(own, stated):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale_by_muon(shardings=stated).init(_sharded(own))


@pytest.mark.parametrize(
    "arguments",
    [
        {"exchange_axes": ("fdsp",)},
        {"outside": {"datta": "split"}},
        {"bandwidth": {"nvlink": 1e9}},
        {"latency": {"nvlink": 1e-6}},
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_wrong_name_on_automatic_axes_is_one_sentence(arguments, jitted):
    params = _sharded(P("fsdp"))
    transform = scale_by_muon(**arguments)
    state = transform.init(params)
    update = jax.jit(transform.update) if jitted else transform.update
    with pytest.raises(ValueError, match="must name axes of the mesh") as caught:
        update(params, state)
    assert "\n" not in str(caught.value)


def test_a_cache_that_never_hits_warns_once():
    params = _sharded(P("fsdp"))
    transform = scale_by_muon()
    state = transform.init(params)
    flag = "jax_remove_custom_partitioning_ptr_from_cache_key"
    before = getattr(jax.config, flag)
    automatic._warn_of_cache.cache_clear()
    try:
        jax.config.update(flag, False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jax.jit(transform.update).lower(params, state)
            jax.jit(lambda g, s: transform.update(g, s)).lower(params, state)
    finally:
        jax.config.update(flag, before)
        automatic._warn_of_cache.cache_clear()
    found = [str(w.message) for w in caught if "compilation cache is on" in str(w.message)]
    assert len(found) == (1 if jax.config.jax_compilation_cache_dir else 0)
