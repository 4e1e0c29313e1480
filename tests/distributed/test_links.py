"""Links by mesh axis: what is sent over which, and what the model makes of it."""

import fractions
import itertools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from benchmarks._times.sharded import collectives
from muon_jax import Exchange, Link, MuonDimensionNumbers, NewtonSchulz
from muon_jax._distributed.cost import Collective

AXES = (("data", 4), ("expert", 2), ("tensor", 8))
SPEEDS = ({}, {"data": 50e9, "tensor": 450e9}, {"data": 900e9, "expert": 1e9})


def links_of(bandwidth, **latency):
    """Links with these bandwidths and latencies, and the defaults of others."""
    fields = {name: {"bandwidth": x} for name, x in bandwidth.items()}
    for name, x in latency.items():
        fields.setdefault(name, {})["latency"] = x
    return {name: Link(**of_axis) for name, of_axis in fields.items()}


@pytest.mark.parametrize("bandwidth", SPEEDS, ids=str)
def test_a_part_of_an_exchange_goes_over_the_slowest_axis_between_two_devices(bandwidth):
    speed = {name: 250e9 for name, _ in AXES} | bandwidth
    slowest_first = sorted((name for name, _ in AXES), key=lambda name: speed[name])
    crossed = dict.fromkeys(slowest_first, 0)
    for place in itertools.product(*(range(size) for _, size in AXES)):
        differs = [name for (name, _), i in zip(AXES, place, strict=True) if i]
        if differs:
            crossed[min(differs, key=slowest_first.index)] += 1  # one byte for each device
    sent = Collective(64, AXES).sent(links_of(bandwidth))
    assert {name: x.bytes for name, x in sent.items()} == crossed
    assert sum(crossed.values()) == Collective(64, AXES).sent_bytes == 63


@pytest.mark.parametrize("bandwidth", SPEEDS, ids=str)
def test_what_all_get_goes_over_slow_axes_once_for_the_devices_of_fast_ones(bandwidth):
    """An all-gather of 64 bytes, axis after axis: a device sends what it has to all but itself."""
    speed = {name: 250e9 for name, _ in AXES} | bandwidth
    has, expected = 1, {}
    for name in sorted((name for name, _ in AXES), key=lambda name: speed[name]):
        expected[name] = has * (dict(AXES)[name] - 1)
        has *= dict(AXES)[name]
    sent = Collective(64, AXES, shares=True).sent(links_of(bandwidth))
    assert {name: x.bytes for name, x in sent.items()} == expected


def test_times_are_bytes_over_bandwidth_and_the_largest_latency():
    links = links_of({"data": 1e6, "tensor": 2e6}, data=0.003, tensor=0.001)
    sent = Collective(64e3, (("data", 4), ("tensor", 8))).sent(links)
    assert {name: round(x.microseconds, 6) for name, x in sent.items()} == {
        "data": 51_000,  # 3 ms and 48 kB
        "tensor": 7_000,  # 14 kB
    }
    assert Collective(0, AXES[:1]).microseconds(links) == 3_000


@pytest.mark.parametrize("shares", [True, False])
def test_the_default_is_one_link_between_all(shares):
    for axes in (AXES, AXES[::-1], (("x", 64),)):
        time = Collective(64e6, axes, shares).microseconds({})
        assert time == pytest.approx(20 + 63e6 / 250e3)


def explained(shape, sizes, spec, axes=(), links=None):
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    views = {"w": MuonDimensionNumbers(-2, -1)}
    exchange = Exchange(axes, links or {}, PartitionSpec(*spec))
    return helpers.exchanges(params, exchange, mesh, muon_weight_dimension_numbers=views)


def test_describe_says_what_is_sent_over_each_axis():
    links = links_of({"data": 50e9, "tensor": 450e9}, tensor=0.0)
    sizes = {"data": 4, "tensor": 8}
    said = explained((24, 1024, 4096), sizes, (None, "data", "tensor"), links=links)
    (group,) = said.groups
    num_bytes = 2 * 1024 * 4096 * 2  # there and back, in 16 bits
    data, tensor = num_bytes * 3 / 4, num_bytes / 4 * 7 / 8
    assert {name: x.bytes for name, x in said.links.items()} == {"data": data, "tensor": tensor}
    assert group.megabytes * 1e6 == data + tensor
    assert said.exchange_microseconds == pytest.approx(40 + data / 50e3 + tensor / 450e3)
    assert str(said).endswith("over data: 12.6 MB, 292 µs\nover tensor: 3.7 MB, 8 µs")
    assert "(model of H200s on the stated links)" in str(said)
    plain = explained((24, 1024, 4096), sizes, (None, "data", "tensor"))
    assert "(model of H200s on NVLink)" in str(plain)
    assert plain.groups == said.groups and plain.links != said.links


@pytest.mark.parametrize(
    ("count", "owners", "each"), [(24, 64, 1), (48, 64, 1), (13, 8, 2), (16, 8, 2)]
)
def test_counts_that_do_not_divide(count, owners, each):
    """The largest owner has `each` matrices, the mean is count/owners, alone it would have all."""
    said = explained((count, 4096, 4096), {"x": owners}, (None, "x"))
    (group,) = said.groups
    assert (group.count, group.owners, group.each) == (count, owners, each)
    mean = fractions.Fraction(count, owners)
    assert group.padding == pytest.approx(float(1 - mean / each))
    assert said.imbalance == pytest.approx(float(each / mean))
    alone = explained((count, 4096, 4096), {"x": owners}, (), "repeat")
    assert said.repeated_microseconds == alone.compute_microseconds
    saved = alone.compute_microseconds / said.compute_microseconds
    assert saved == pytest.approx(count / each, rel=0.1)
    assert alone.imbalance == 1 and not alone.links
    assert f"computation: {each / mean:.2f} times the mean of the owners" in str(said)


SLOW, QUICK = links_of({"x": 1e9}), links_of({"x": 1e12})


@pytest.mark.parametrize(
    ("shape", "links", "mode"),
    [
        ((2, 4096, 16384), {}, "gram over x"),
        ((2, 4096, 16384), SLOW, "exchange over x"),  # Gram matrices are more bytes
        ((2, 4096, 16384), links_of({}, x=0.01), "exchange over x"),  # and more collectives
        ((3, 4096, 12288), {}, "exchange over x"),
        ((3, 4096, 12288), QUICK, "gram over x"),
    ],
    ids=str,
)
def test_whole_or_sharded(shape, links, mode):
    (group,) = explained(shape, {"x": 8}, (None, None, "x"), links=links).groups
    assert group.mode == mode


@pytest.mark.parametrize(
    ("axes", "links", "mode"),
    [
        ("faster", {}, "split over replica; exchange over x"),
        ("faster", links_of({"replica": 1e8}), "exchange over x"),
        ("faster", links_of({}, replica=1.0), "exchange over x"),
        ("faster", links_of({"x": 1e8}), "split over replica; exchange over x"),
        ({"x": "faster"}, {}, "split over replica; exchange over x"),
        ({"replica": "repeat", "x": "faster"}, {}, "exchange over x"),
    ],
    ids=str,
)
def test_replicas_do_what_is_faster(axes, links, mode):
    sizes, shape = {"replica": 2, "x": 8}, (64, 2048, 2048)
    said = explained(shape, sizes, (None, "x"), axes, links)
    (group,) = said.groups
    assert group.mode == mode
    word = "split" if mode.startswith("split") else "repeat"
    assert explained(shape, sizes, (None, "x"), word, links) == said


@helpers.slow
@pytest.mark.parametrize(
    ("latency", "gathers"), [({"replica": 0, "x": 0}, {"all-gather": 1}), ({"replica": 1}, {})]
)
def test_replicas_that_do_what_is_faster_have_the_bits_of_others(latency, gathers):
    mesh = jax.make_mesh((2, 4), ("replica", "x"), (AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    gradient = np.random.default_rng(0).standard_normal((8, 16, 32), np.float32)
    grads = {"w": jax.device_put(gradient, sharding)}
    kwargs = {"weight_dimension_numbers": {"w": MuonDimensionNumbers(-2, -1)}}
    _, expected = helpers.compiled_update(grads, **kwargs)
    exchange = Exchange("faster", links_of({"replica": 1e12}, **latency))
    compiled, updates = helpers.compiled_update(grads, shardings=exchange, **kwargs)
    assert collectives(compiled) == {"all-to-all": 2, **gathers}
    chex.assert_trees_all_equal(updates, expected)


def test_what_describe_shows_is_what_runs():
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    gradient = np.random.default_rng(0).standard_normal((16, 256), np.float32)
    grads = {"w": jax.device_put(gradient, sharding)}
    for links, mode, kinds in (
        ({}, "exchange over x", {"all-to-all": 2}),
        ({"x": Link(1e5, 0)}, "gram over x", {"all-reduce": 2}),
    ):
        exchange = Exchange(links=links)
        (group,) = helpers.exchanges(
            grads, exchange, ns_coeffs=NewtonSchulz(dtype="float32"), ns_steps=2
        ).groups
        compiled, updates = helpers.compiled_update(grads, shardings=exchange)
        assert (group.mode, collectives(compiled)) == (mode, kinds)
        helpers.assert_close(updates, helpers.on_one_device(grads), atol=4e-6)


def test_an_axis_that_the_mesh_lacks():
    message = r"links of Exchange must name axes of the mesh, got 'data', .* name some of \['x'\]"
    with pytest.raises(ValueError, match=message):
        explained((16, 16), {"x": 8}, ("x",), links={"data": Link(1.0)})
