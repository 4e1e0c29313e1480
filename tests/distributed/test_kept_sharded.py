"""Matrices that stay sharded: results, collectives, and when they are chosen."""

import dataclasses
import functools
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from benchmarks._times.sharded import collectives
from muon_jax import Exchange, MuonDimensionNumbers, NewtonSchulz, scale_by_muon
from muon_jax._matrices.views import Split

MATRICES = MuonDimensionNumbers(-2, -1)
GRAM = Exchange("gram_or_exchange")


def sharded(axis_type, sizes, **parameters):
    """Gradients of these shapes and specs on a mesh of axes x, y."""
    devices = jax.devices()[: np.prod(sizes)]
    types = (axis_type,) * len(sizes)
    mesh = jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=types, devices=devices)
    rng = np.random.default_rng(0)
    return {
        name: jax.device_put(
            rng.standard_normal(shape).astype(np.float32),
            NamedSharding(mesh, PartitionSpec(*spec)),
        )
        for name, (shape, spec) in parameters.items()
    }


@pytest.mark.parametrize(
    ("sizes", "shape", "spec", "exchanges"),
    [
        pytest.param((8,), (16, 104), (None, "x"), 0, marks=helpers.nightly),
        # columns that 8 does not divide
        pytest.param((4, 2), (16, 100), (("x", "y"),), 2, marks=helpers.nightly),
        ((4, 2), (104, 24), ("x", "y"), 2),
    ],
    ids=["columns", "rows", "both, tall"],
)
def test_one_matrix(sizes, shape, spec, exchanges):
    grads = sharded(AxisType.Auto, sizes, w=(shape, spec))
    expected = helpers.on_one_device(grads, method="gram")
    for stated, axis_type in (
        (PartitionSpec(*spec), AxisType.Auto),
        (None, AxisType.Auto),
        (None, AxisType.Explicit),
    ):
        grads = sharded(axis_type, sizes, w=(shape, spec))
        exchange = dataclasses.replace(GRAM, shardings=stated)
        compiled, updates = helpers.compiled_update(grads, shardings=exchange)
        moved = {"all-to-all": exchanges} if exchanges else {}
        assert collectives(compiled) == {"all-reduce": 2, **moved}  # the largest entry, XXᵀ
        helpers.assert_close(updates, expected)
        zeros = jax.tree.map(jnp.zeros_like, grads)
        assert not np.any(compiled(zeros, scale_by_muon().init(zeros))[0]["w"])


@helpers.slow
def test_it_has_a_derivative():
    grads = sharded(AxisType.Explicit, (8,), w=((16, 104), (None, "x")))

    def loss(grads, method=None, **kwargs):
        iteration = NewtonSchulz(steps=2, dtype="float32", method=method, implementation="xla")
        transform = scale_by_muon(iteration, **kwargs)
        return jnp.sum(transform.update(grads, transform.init(grads))[0]["w"] ** 3)

    derivative = jax.jit(jax.grad(functools.partial(loss, shardings=GRAM)))(grads)
    assert derivative["w"].sharding == grads["w"].sharding
    whole = {"w": jnp.asarray(np.asarray(grads["w"]))}
    expected = jax.grad(functools.partial(loss, method="gram"))(whole)["w"]
    np.testing.assert_allclose(derivative["w"], expected, atol=1e-5 * jnp.abs(expected).max())


@pytest.mark.parametrize(
    "axis_type", helpers.mostly_nightly([AxisType.Explicit, AxisType.Auto], [AxisType.Auto])
)
def test_several_matrices_have_teams(axis_type):
    """Three, of which one comes with its short axis divided: of four teams one has none."""
    both = ("x", "y")
    parameters = {"wide": ((2, 16, 104), (None, None, both)), "tall": ((104, 16), ("y", "x"))}
    grads = sharded(axis_type, (4, 2), **parameters)
    kwargs = {"weight_dimension_numbers": dict.fromkeys(grads, MATRICES)}
    compiled, updates = helpers.compiled_update(grads, shardings=GRAM, **kwargs)
    assert collectives(compiled) == {
        "all-reduce": 1,
        "reduce-scatter": 1,
        "all-to-all": 2,  # of the one
        "all-gather": 2,
    }
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", compiled.as_text())
    assert gathered == ["2,8,16", "8,8,16"]  # XXᵀ of a team, Q of all teams
    helpers.assert_close(updates, helpers.on_one_device(grads, method="gram", **kwargs))


@helpers.slow
def test_more_matrices_than_owners_go_in_rounds():
    """Three and one, of 16 rows, which 3 does not divide."""
    grads = sharded(AxisType.Explicit, (3,), w=((4, 16, 96), (None, None, "x")))
    kwargs = {"weight_dimension_numbers": {"w": MATRICES}}
    compiled, updates = helpers.compiled_update(grads, shardings=GRAM, **kwargs)
    assert collectives(compiled)["reduce-scatter"] == 1
    helpers.assert_close(updates, helpers.on_one_device(grads, method="gram", **kwargs))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_the_caller_s_shard_map(check_vma):
    """One matrix, and two."""
    specs = {"one": PartitionSpec(None, "x"), "two": PartitionSpec(None, "x")}
    parameters = {"one": ((8, 32), (None, "x")), "two": ((2, 32, 16), (None, "x"))}
    grads = sharded(AxisType.Auto, (4,), **parameters)
    views = {"one": MATRICES, "two": MATRICES}
    kwargs = {"ns_steps": 1, "weight_dimension_numbers": views}
    exchange = dataclasses.replace(GRAM, shardings=specs)
    transform = helpers.two_steps(shardings=exchange, **kwargs)
    updates = jax.jit(
        jax.shard_map(
            lambda grads: transform.update(grads, transform.init(grads))[0],
            mesh=jax.typeof(grads["one"]).sharding.mesh,
            in_specs=(specs,),
            out_specs=specs,
            check_vma=check_vma,
        )
    )(grads)
    helpers.assert_close(updates, helpers.on_one_device(grads, method="gram", **kwargs))


@pytest.mark.parametrize(
    ("kwargs", "sums"),
    [
        pytest.param({}, 3, marks=helpers.nightly),  # in float16 the five steps restart twice
        ({"ns_coeffs": "balanced"}, 1),  # one step, with the residual of XXᵀ
        pytest.param({"ns_coeffs": "fast"}, 1, marks=helpers.nightly),  # one step
        pytest.param({"ns_coeffs": "accurate"}, 2, marks=helpers.nightly),
        pytest.param({"ns_coeffs": "aol", "preconditioning": "aol"}, 3, marks=helpers.nightly),
    ],
)
def test_half_precision_of_any_scale(kwargs, sums):
    """A power of two changes no bit; zeros stay zeros, and NaN stays in its matrix."""
    kwargs |= {"weight_dimension_numbers": {"w": MATRICES}, "eps": 0.0}
    kwargs |= {"ns_steps": 5, "dtype": "auto"}
    grads = sharded(AxisType.Auto, (4,), w=((3, 16, 64), (None, None, "x")))
    grads["w"] = grads["w"].at[1].set(0).at[2, 3, 5].set(jnp.nan)
    compiled, updates = helpers.compiled_update(grads, shardings=GRAM, **kwargs)
    counts = collectives(compiled)
    assert counts["reduce-scatter"] == sums
    if "preconditioning" not in kwargs:  # AOL's scales are spread as well
        assert counts == {"all-reduce": 1, "reduce-scatter": sums, "all-gather": sums}
    expected = helpers.on_one_device(grads, method="gram", **kwargs)
    np.testing.assert_allclose(updates["w"], expected["w"], atol=1e-3)
    assert not np.any(updates["w"][1])
    assert np.isnan(updates["w"][2]).all()
    for exponent in (-100, 100):
        scaled = {"w": grads["w"] * 2.0**exponent}
        state = helpers.two_steps(**kwargs).init(scaled)
        np.testing.assert_array_equal(compiled(scaled, state)[0]["w"], updates["w"])


def modes(count, shape, axes=(), spec=("x",), owners=8, replicas=1, **kwargs):
    """What `describe` says of so many matrices: mode of each group, and all of it."""
    params = {str(i): jax.ShapeDtypeStruct(shape, jnp.float32) for i in range(count)}
    mesh = AbstractMesh((replicas, owners), ("replica", "x"))
    exchange = Exchange(axes, shardings=PartitionSpec(*spec))
    explanation = helpers.exchanges(params, exchange, mesh, **kwargs)
    return [group.mode for group in explanation.groups], explanation


@pytest.mark.parametrize(
    ("count", "shape", "kwargs", "mode"),
    [
        (1, (4096, 65536), {}, "gram over x"),
        (1, (65536, 4096), {"owners": 2}, "gram over x"),
        (3, (4096, 65536), {}, "gram over x"),
        (1, (4096, 4096), {}, "exchange over x"),
        (1, (64, 1024), {}, "exchange over x"),
        (8, (4096, 65536), {}, "exchange over x"),
        (1, (4096, 65536), {"axes": "exchange"}, "exchange over x"),
        (1, (4096, 65536), {"ns_coeffs": NewtonSchulz(method="standard")}, "exchange over x"),
        (1, (4096, 65536), {"preconditioning": "spectral"}, "exchange over x"),
        (1, (4096, 65536), {"replicas": 2}, "exchange over x"),
        (1, (4096, 65536), {"replicas": 2, "axes": "gram_or_exchange"}, "gram over x"),
        (8, (64, 64), {"axes": "gram_or_exchange"}, "gram over x"),
    ],
    ids=str,
)
def test_a_model_chooses_and_the_argument_overrides(count, shape, kwargs, mode):
    assert modes(count, shape, **kwargs)[0] == [mode]


def test_describe_tells_what_is_sent():
    _, explanation = modes(1, (4096, 65536))
    (group,) = explanation.groups
    assert (group.count, group.owners, group.each, group.dtype) == (1, 1, 1, "float16")
    # XXᵀ in float32, reduced and spread, three times; and X, there and back in 16 bits.
    sent = 3 * 2 * 4096**2 * 4 + 2 * 4096 * 65536 * 2 / 8
    assert group.megabytes == pytest.approx(sent * 7 / 8 / 1e6)
    assert "4096×65536  standard      gram over x  1      1       1     0% " in str(explanation)
    assert "0 exchanges and 3 sums of Gram matrices, " in str(explanation)
    (exchanged,) = modes(1, (4096, 65536), "exchange")[1].groups
    assert group.microseconds < exchanged.microseconds / 3


def test_parts_of_an_axis_stay_with_owners():
    params = {k: jax.ShapeDtypeStruct((64, 96), jnp.float32) for k in ("w", "qkv")}
    views = {"w": MATRICES, "qkv": Split(-1, (64, 32))}
    mesh = AbstractMesh((8,), ("x",))
    exchange = dataclasses.replace(GRAM, shardings=PartitionSpec("x"))
    groups = helpers.exchanges(params, exchange, mesh, muon_weight_dimension_numbers=views).groups
    assert {group.matrices: group.mode for group in groups} == {
        ((1, 64, 96),): "gram over x",
        ((1, 64, 64), (1, 32, 64)): "exchange over x",
    }


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"ns_coeffs": NewtonSchulz(method="standard")},
            r"the parameter \['0'\]: the standard form was asked for",
        ),
        ({"preconditioning": "spectral"}, r"needs more than the Gram matrix\. Leave the word out"),
        (
            {"muon_weight_dimension_numbers": Split(-1, (16, 48))},
            r"no sharded matrix can stay sharded; .* its view, Split\(.*parts of an axis",
        ),
    ],
)
def test_where_no_matrix_can_the_error_says_why(kwargs, message):
    with pytest.raises(ValueError, match=message):
        modes(1, (64, 64), "gram_or_exchange", **kwargs)
