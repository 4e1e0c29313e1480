"""Every layout: what is exchanged, the results of one device, the sharding of the parameters."""

import math
import re

import chex
import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks._times.sharded import collectives
from muon_jax import Exchange, Link, MuonDimensionNumbers, NewtonSchulz, muon
from muon_jax._matrices.views import Split, Unfold

MATRICES, HEADS = MuonDimensionNumbers(-2, -1), MuonDimensionNumbers(-3, -1)


def layer(qkv, out, up, down, count=1):
    one = {
        "q": ((16, 16), qkv),
        "o": ((16, 16), out),
        "up": ((16, 32), up),
        "down": ((32, 16), down),
    }
    return {f"{name} {i}": leaf for i in range(count) for name, leaf in one.items()}


EXPERTS = {"up": (8, 16, 32), "down": (8, 32, 16)}
# Mesh, parameters with their specs and, where they are not the last two axes, views; for each
# bucket the elements on each device: those of ⌈N/O⌉ of N equal matrices with O owners.
LAYOUTS = {
    "DDP": ({"data": 8}, layer((), (), (), ()), []),
    "FSDP": ({"fsdp": 8}, layer(*[("fsdp",)] * 4, count=3), [16 * 16 + 16 * 32]),
    "HSDP": ({"replica": 2, "fsdp": 4}, layer(*[("fsdp",)] * 4), [16 * 16 + 16 * 32]),
    "TP": (
        {"tp": 8},
        layer((None, "tp"), ("tp",), (None, "tp"), ("tp",)),
        [16 * 16 + 16 * 32],
    ),
    "TP + FSDP": (
        {"fsdp": 4, "tp": 2},
        layer(("fsdp", "tp"), ("tp", "fsdp"), ("fsdp", "tp"), ("tp", "fsdp")),
        [16 * 16 + 16 * 32],
    ),
    "EP": ({"ep": 8}, {name: (shape, ("ep",)) for name, shape in EXPERTS.items()}, []),
    "EP + FSDP": (
        {"ep": 4, "fsdp": 2},
        {"up": (EXPERTS["up"], ("ep", "fsdp")), "down": (EXPERTS["down"], ("ep", None, "fsdp"))},
        [2 * 16 * 32],
    ),
    "TP + EP + FSDP": (
        {"ep": 2, "fsdp": 2, "tp": 2},
        {
            "experts": (EXPERTS["up"], ("ep", "fsdp", "tp")),
            "dense": ((16, 32), ("fsdp", "tp")),
            "across": ((16, 16), ("fsdp", ("ep", "tp"))),
        },
        [2 * 16 * 32, 16 * 16],  # over (fsdp, tp), over all three
    ),
    "layers stacked": (
        {"fsdp": 4, "tp": 2},
        {"up": ((5, 16, 32), (None, "fsdp", "tp")), "down": ((5, 32, 16), (None, ("tp", "fsdp")))},
        [2 * 16 * 32],
    ),
    "stages stacked": (
        {"stage": 2, "fsdp": 4},
        {"o": ((2, 3, 16, 16), ("stage", None, "fsdp"))},
        [16 * 16],
    ),
    "uneven counts": (
        {"fsdp": 8},
        {
            **{f"q {i}": ((16, 16), ("fsdp",)) for i in range(9)},
            **{f"up {i}": ((16, 24), ("fsdp",)) for i in range(3)},
            **{f"down {i}": ((24, 16), ("fsdp",)) for i in range(3)},
            **{f"columns {i}": ((16, 24), (None, "fsdp")) for i in range(5)},
        },
        [2 * 16 * 16 + 2 * 16 * 24],
    ),
    "views": (
        {"fsdp": 2, "tp": 4},
        {
            "conv": ((3, 3, 4, 24), (None, None, None, ("fsdp", "tp")), ((0, 1, 2), 3)),
            "qkv": (
                (16, 32),
                ("fsdp", "tp"),
                Split(-1, (16, 8, 8), Unfold(-1, (-1, 4), MuonDimensionNumbers(-3, -1))),
            ),
            "heads": ((5, 32, 16), (None, "tp", "fsdp"), Unfold(1, (-1, 4))),
            "gated": ((16, 24), ("tp", "fsdp"), Split(-1, (16, 8))),
            "batch between": ((16, 3, 16), ("fsdp", None, "tp"), (0, 2)),
        },
        [36 * 24 + 16 * 32 + 16 * 24 + 16 * 16, 5 * 4 * 16],  # whole heads are along tp
    ),
    "heads": (
        {"tp": 8},
        {
            "q": ((16, 64), (None, "tp"), Unfold(-1, (-1, 4), HEADS)),
            "kv": ((8, 96), (None, "tp"), Unfold(-1, (8, 12), Split(-1, (4, 8), HEADS))),
            "out_in": ((3, 64, 16), (None, "tp"), Unfold(1, (-1, 4), MuonDimensionNumbers(-1, -2))),
        },
        [],
    ),
}  # fmt: skip


def problem(name, axis_type):
    return placed(*LAYOUTS[name][:2], axis_type)


def placed(sizes, parameters, axis_type):
    """Gradients on a mesh, their specs and views."""
    mesh = jax.make_mesh(
        (*sizes.values(),),
        (*sizes,),
        axis_types=(axis_type,) * len(sizes),
        devices=jax.devices()[: math.prod(sizes.values())],
    )
    rng = np.random.default_rng(0)
    grads, specs, views = {}, {}, {}
    for key, (shape, spec, *view) in parameters.items():
        specs[key] = PartitionSpec(*spec)
        views[key] = view[0] if view else MATRICES
        if type(views[key]) is tuple:
            views[key] = MuonDimensionNumbers(*views[key])
        x = rng.standard_normal(shape).astype(np.float32)
        grads[key] = jax.device_put(x, NamedSharding(mesh, specs[key]))
    return grads, specs, views


def exchanged(compiled):
    """For each all-to-all the bytes that a device has for each device."""
    results = re.findall(r" = \((.*)\) all-to-all\(", compiled.as_text())
    parts = [re.findall(r"[a-z](\d+)\[([\d,]+)\]", result) for result in results]
    return [
        [int(bits) // 8 * math.prod(map(int, sizes.split(","))) for bits, sizes in each]
        for each in parts
    ]


REMATERIALIZATION = "Involuntary full rematerialization"


QUICK = ("TP + FSDP", "layers stacked")


@pytest.mark.uncached
@pytest.mark.parametrize("name", helpers.mostly_nightly(LAYOUTS, QUICK))
def test_layouts(name, capfd):
    grads, specs, views = problem(name, AxisType.Auto)
    expected = helpers.on_one_device(grads, weight_dimension_numbers=views)
    sizes = sorted(4 * elements for elements in 2 * LAYOUTS[name][2])  # there and back
    for stated, axis_type in (
        (specs, AxisType.Auto),
        (None, AxisType.Auto),
        (None, AxisType.Explicit),
    ):
        grads = problem(name, axis_type)[0]
        compiled, updates = helpers.compiled_update(
            grads, weight_dimension_numbers=views, shardings=stated
        )
        assert collectives(compiled) == ({"all-to-all": len(sizes)} if sizes else {})
        parts = exchanged(compiled)
        assert sorted(map(sum, parts)) == sizes
        helpers.assert_close(updates, expected)
    assert REMATERIALIZATION not in capfd.readouterr().err
    explained = helpers.exchanges(
        grads, muon_weight_dimension_numbers=views, ns_coeffs=NewtonSchulz(dtype="float32")
    )
    megabytes = sum(group.megabytes for group in explained.groups)
    assert 1e6 * megabytes == pytest.approx(sum(sum(others) for _, *others in parts))


@pytest.mark.uncached
def test_xla_says_what_it_rematerializes(capfd):
    """Left to it, stacked matrices go to their owners that way."""
    sizes, parameters, _ = LAYOUTS["layers stacked"]
    (_, *matrix), spec = parameters["up"]
    grads, _, _ = placed(sizes, {"up": ((8, *matrix), spec)}, AxisType.Auto)
    owners = NamedSharding(grads["up"].sharding.mesh, PartitionSpec(("fsdp", "tp")))
    jax.jit(lambda x: x + 1, out_shardings=owners).lower(grads["up"]).compile()
    assert REMATERIALIZATION in capfd.readouterr().err


@pytest.mark.parametrize(
    ("max_group_bytes", "buckets"),
    [(4 * 16 * (16 + 24), 3), pytest.param(1, 4, marks=helpers.nightly)],
)
@helpers.slow
def test_buckets(max_group_bytes, buckets):
    """9 matrices in 2 slots for each owner, and 11 in 2."""
    grads, _, views = problem("uneven counts", AxisType.Explicit)
    expected = helpers.on_one_device(grads, weight_dimension_numbers=views)
    compiled, updates = helpers.compiled_update(
        grads, weight_dimension_numbers=views, max_group_bytes=max_group_bytes
    )
    assert collectives(compiled) == {"all-to-all": 2 * buckets}
    helpers.assert_close(updates, expected)


@pytest.mark.parametrize(
    ("kwargs", "wire", "atol"),
    [
        ({"dtype": "auto"}, "bf16", 2e-2),
        pytest.param(
            {"ns_coeffs": "balanced", "dtype": "auto", "ns_steps": 5},
            "f16",
            1e-2,
            marks=helpers.nightly,
        ),
        pytest.param({"dtype": None}, "f32", 2e-6, marks=helpers.nightly),
    ],
)
@helpers.slow
def test_what_is_on_the_wire(kwargs, wire, atol):
    """In float16 the pieces bring their exponents, so that their scale does not matter."""
    grads, _, views = problem("uneven counts", AxisType.Explicit)
    grads = {key: 2.0 ** (6 * i - 60) * grad for i, (key, grad) in enumerate(grads.items())}
    kwargs = {"weight_dimension_numbers": views, "eps": 0.0, **kwargs}
    optimizer = helpers.two_steps(**kwargs)
    text = jax.jit(optimizer.update).lower(grads, optimizer.init(grads)).as_text()
    exchanged = re.findall(r"all_to_all\".*tensor<\d+x\d+x(\w+)>\) -> ", text)
    assert exchanged == [wire] * 2
    helpers.assert_close(
        helpers.compiled_update(grads, **kwargs)[1], helpers.on_one_device(grads, **kwargs), atol
    )


@pytest.mark.parametrize(
    "coefficients", helpers.mostly_nightly(["standard", "balanced"], ["standard"])
)
@helpers.slow
def test_a_nan_stays_in_its_matrix(coefficients):
    grads, _, views = problem("uneven counts", AxisType.Auto)
    grads["up 1"] = grads["up 1"].at[3, 3].set(jnp.nan)
    _, updates = helpers.compiled_update(
        grads,
        weight_dimension_numbers=views,
        ns_steps=5,
        ns_coeffs=coefficients,
        dtype="auto",
    )
    bad = {name: np.isnan(update) for name, update in updates.items()}
    assert bad.pop("up 1").all()
    assert not any(b.any() for b in bad.values())


MESHES = [
    {"x": 8},
    {"x": 2, "y": 4},
    {"x": 4, "y": 2},
    {"x": 2, "y": 2, "z": 2},
    {"x": 2, "y": 3},
    {"x": 5},
    {"x": 1, "y": 2},
]


@st.composite
def layouts(draw, sizes):
    """A shape, the spec of axes that divide it, on any dimensions, and a view, as in `LAYOUTS`."""
    batch = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), max_size=2))
    shape = (*batch, draw(st.sampled_from([24, 40, 48])), draw(st.sampled_from([24, 120, 240])))
    spec = [() for _ in shape]
    for axis in draw(st.permutations([*sizes])):
        dimension = draw(st.integers(-1, len(shape) - 1))
        entry = (*spec[dimension], axis)
        if dimension >= 0 and shape[dimension] % math.prod(sizes[name] for name in entry) == 0:
            spec[dimension] = entry
    *reduced, output = draw(st.permutations(range(len(shape))))
    views = [(-2, -1), (-1, -2), (reduced[0], output), (tuple(reduced), output)]
    return shape, spec, draw(st.sampled_from(views))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("examples", helpers.mostly_nightly([2, 60], (), [2]))
def test_random_layouts(examples):
    settings = hypothesis.settings(max_examples=examples, deadline=None, derandomize=True)
    settings(hypothesis.given(st.data())(assert_a_random_layout_is_right))()


def assert_a_random_layout_is_right(data):
    sizes = data.draw(st.sampled_from(MESHES))
    drawn = data.draw(st.lists(layouts(sizes), min_size=1, max_size=5))
    parameters = {str(i): layout for i, layout in enumerate(drawn)}
    axis_type, is_stated = data.draw(
        st.sampled_from([(AxisType.Auto, True), (AxisType.Auto, False), (AxisType.Explicit, False)])
    )
    kwargs = {
        "max_group_bytes": data.draw(st.sampled_from([None, 1, 1000, 2**15])),
    }
    axes = data.draw(st.sampled_from([(), "exchange", "split"]))
    # As slow and as fast as it takes for small matrices to stay sharded.
    bandwidth = {name: data.draw(st.sampled_from([1e4, 1e6, 1e12])) for name in sizes}
    latency = data.draw(st.sampled_from([0, 1e-6, 1e-3]))
    links = {name: Link(bandwidth[name], latency) for name in sizes}
    grads, specs, views = placed(sizes, parameters, axis_type)
    expected = helpers.on_one_device(grads, weight_dimension_numbers=views)
    exchange = Exchange(axes, links, specs if is_stated else None)
    compiled, updates = helpers.compiled_update(
        grads, weight_dimension_numbers=views, shardings=exchange, **kwargs
    )
    are_whole = {*collectives(compiled)} <= {"all-to-all", "all-gather"}  # of replicas' shares
    assert are_whole or axes != "exchange"
    # Matrices that stay sharded have the Gram form, whose rounding is another.
    helpers.assert_close(updates, expected, atol=4e-6 if are_whole else 2e-5)


@pytest.mark.gpu
@helpers.needs_hopper
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("spec", [PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")], ids=str)
@pytest.mark.parametrize("ns_coeffs", ["standard", "balanced"])
def test_on_hopper_gpus_updates_are_those_of_one_bit_for_bit(ns_coeffs, spec):
    shapes = {"square": (768, 768), "wide": (1000, 1500), "tall": (4096, 2048)}
    grads = helpers.random_tree(
        {f"{name} {i}": shape for name, shape in shapes.items() for i in range(3)}, seed=0
    )
    optimizer = muon(0.02, ns_coeffs=ns_coeffs)

    def update(grads):
        return jax.jit(optimizer.update)(grads, optimizer.init(grads), grads)[0]

    sharding = NamedSharding(jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2]), spec)
    sharded = {name: jax.device_put(x, sharding) for name, x in grads.items()}
    chex.assert_trees_all_equal(update(sharded), update(grads))
