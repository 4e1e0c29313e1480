"""Parameters on two meshes over the same devices in one program: a plan for each mesh."""

import chex
import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks._times.sharded import collectives
from muon_jax import Exchange, Link, MuonDimensionNumbers, NewtonSchulz, scale_by_muon
from muon_jax.contrib import with_metrics

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SHAPES = {"dense": (16, 32), "experts": (4, 16, 32), "bias": (16,), "last": (32, 16)}
SPECS = {
    "dense": PartitionSpec("fsdp"),
    "experts": PartitionSpec("expert", None, "tensor"),
    "bias": PartitionSpec(),
    "last": PartitionSpec("fsdp"),
}
# Of both meshes.
AXES = {"fsdp": "split", "expert": ("split", "block"), "tensor": "exchange", ...: "raise"}
LINKS = {"fsdp": Link(1e9), "expert": Link(1e9), "tensor": Link(latency=1e-4)}
VIEWS = {**dict.fromkeys(SHAPES, MuonDimensionNumbers(-2, -1)), "bias": None}


def parameters(dense_type, expert_type):
    """On ("expert", "tensor"), and all others on ("fsdp",)."""
    fsdp = jax.make_mesh((8,), ("fsdp",), (dense_type,))
    experts = jax.make_mesh((4, 2), ("expert", "tensor"), (expert_type,) * 2)
    meshes = {name: experts if name == "experts" else fsdp for name in SHAPES}
    shardings = {name: NamedSharding(meshes[name], spec) for name, spec in SPECS.items()}
    return jax.device_put(helpers.random_tree(SHAPES, 0), shardings)


def of_muon(**kwargs):
    return helpers.any_muon(
        0.1,
        ns_steps=2,
        ns_coeffs=NewtonSchulz(dtype="float32"),
        muon_weight_dimension_numbers=VIEWS,
        **kwargs,
    )


@pytest.mark.parametrize(
    ("dense_type", "expert_type", "kwargs"),
    [
        (AUTO, EXPLICIT, {"shardings": SPECS}),
        pytest.param(AUTO, AUTO, {"shardings": SPECS}, marks=helpers.slow),
        pytest.param(EXPLICIT, AUTO, {"shardings": SPECS}, marks=helpers.nightly),
        pytest.param(EXPLICIT, EXPLICIT, {}, marks=helpers.nightly),
        pytest.param(EXPLICIT, EXPLICIT, {"normuon_b2": 0.9}, marks=helpers.slow),
        pytest.param(
            AUTO, AUTO, {"shardings": Exchange(AXES, LINKS, SPECS)}, marks=helpers.nightly
        ),
    ],
)
def test_each_mesh_has_a_plan(dense_type, expert_type, kwargs):
    optimizer, params = of_muon(**kwargs), parameters(dense_type, expert_type)
    state = optimizer.init(params)
    compiled = jax.jit(optimizer.update).lower(params, state, params).compile()
    sums = {"all-reduce": 2} if kwargs.get("normuon_b2") else {}  # of neurons, one for each mesh
    assert collectives(compiled) == {"all-to-all": 2 * 2, **sums}
    updates, _ = compiled(params, state, params)
    one = jax.tree.map(jnp.asarray, jax.device_get(params))
    expected, _ = optimizer.update(one, optimizer.init(one), one)
    chex.assert_trees_all_close(jax.device_get(updates), expected, atol=1e-6)
    for name, x in params.items():
        assert updates[name].sharding.is_equivalent_to(x.sharding, x.ndim), name


def test_axes_of_all_meshes_may_be_named_and_no_others():
    params = parameters(EXPLICIT, EXPLICIT)

    def traced(axes=AXES, links=LINKS):
        optimizer = of_muon(shardings=Exchange(axes, links))
        return jax.eval_shape(optimizer.update, params, optimizer.init(params), params)[0]

    chex.assert_trees_all_equal_shapes(traced(), params)
    for argument, value in {"axes": {"data": "exchange"}, "links": {"data": Link()}}.items():
        lacking = rf"{argument} of .* must name axes .*, got 'data'.*\['fsdp', 'expert', 'tensor'"
        with pytest.raises(ValueError, match=lacking):
            traced(**{argument: value})
    with pytest.raises(
        ValueError, match="shards its matrices over 'tensor', where Exchange says 'raise'"
    ):
        traced({"fsdp": "exchange", ...: "raise"})


def test_exchanges_are_for_one_mesh():
    params = parameters(AUTO, EXPLICIT)
    with pytest.raises(ValueError, match=r"one mesh, got .* on \{'fsdp': 8\} and \{'expert': 4"):
        helpers.exchanges(params, muon_weight_dimension_numbers=VIEWS)


@helpers.slow
def test_two_optimizers_with_a_mesh_each():
    """JAX refuses an operation that the compiler partitions in a program of two meshes."""
    params = parameters(AUTO, AUTO)
    params = {name: params[name] for name in ("dense", "experts")}
    labels = {name: name for name in params}
    kwargs = {"ns_steps": 1, "weight_dimension_numbers": MuonDimensionNumbers(-2, -1)}

    def lowered(**stated):
        exchanges = {name: Exchange("exchange", shardings=stated.get(name)) for name in params}
        own = {name: scale_by_muon(**kwargs, shardings=exchanges[name]) for name in params}
        optimizer = optax.partition(own, labels)
        return jax.jit(optimizer.update).lower(params, optimizer.init(params))

    with pytest.raises(ValueError, match="mesh should be the same"):
        lowered()
    compiled = lowered(**{name: SPECS[name] for name in params}).compile()
    assert collectives(compiled) == {"all-to-all": 2 * 2}


@pytest.mark.parametrize("seen", [False, True])
def test_unknown_shardings_on_two_meshes_are_refused(seen):
    """Whether `init` ran on sharded parameters outside `jit` changes nothing."""
    params = {name: parameters(EXPLICIT, AUTO)[name] for name in ("dense", "experts")}
    optimizer = scale_by_muon(weight_dimension_numbers=MuonDimensionNumbers(-2, -1))
    state = optimizer.init(params if seen else jax.device_get(params))
    with pytest.raises(ValueError, match=r"2 meshes, of which \{'expert': 4.*pass shardings="):
        jax.eval_shape(optimizer.update, params, state)


def test_metrics_of_two_meshes_are_not_mixed():
    params = {name: parameters(EXPLICIT, AUTO)[name] for name in ("dense", "experts")}
    kwargs = {"weight_dimension_numbers": MuonDimensionNumbers(-2, -1)}
    measured = with_metrics(scale_by_muon(**kwargs), **kwargs)
    with pytest.raises(NotImplementedError, match="2 meshes.*optax.partition"):
        measured.init(params)
