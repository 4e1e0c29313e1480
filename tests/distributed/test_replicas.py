"""Replicas do what is faster by default, with the bits of those that repeat the work."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from test_words import collectives_over

from benchmarks._times.sharded import collectives
from muon_jax import Exchange, Link, MuonDimensionNumbers, NewtonSchulz, scale_by_muon

P = PartitionSpec
# Sizes of the mesh, and the spec of four matrices and of a stack of experts.
LAYOUTS = {
    "DDP": ({"data": 8}, P(), P()),
    "HSDP": ({"replica": 2, "fsdp": 4}, P("fsdp"), P(None, "fsdp")),
    "HSDP, replicas inside": ({"fsdp": 4, "replica": 2}, P(None, "fsdp"), P(None, "fsdp")),
    "TP and DP": ({"data": 4, "tensor": 2}, P(None, "tensor"), P(None, "tensor")),
    "EP and DP": ({"data": 4, "expert": 2}, P(), P("expert")),
    "some exchanged, some local": ({"data": 2, "fsdp": 4}, P("fsdp"), P("fsdp")),
}
VIEWS = {name: MuonDimensionNumbers() for name in "abcd"} | {"experts": MuonDimensionNumbers(1, 2)}
kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def free(mesh, axes=(), shardings=None):
    """With links over which everything is faster exchanged."""
    return Exchange(axes, dict.fromkeys(mesh, Link(1e15, 0.0)), shardings)


def parameters(layout, kind):
    sizes, spec, of_experts = LAYOUTS[layout]
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), (kind,) * len(sizes))
    keys = jax.random.split(jax.random.key(0), 5)
    whole = {name: jax.random.normal(keys[i], (16, 32)) for i, name in enumerate("abcd")}
    whole["experts"] = jax.random.normal(keys[4], (16, 256, 128))
    specs = dict.fromkeys("abcd", spec) | {"experts": of_experts}
    return {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in whole.items()}, sizes


def two_updates(transform, grads):
    """The updates of two steps, and the program of one."""
    state = transform.init(grads)
    update = jax.jit(transform.update).lower(grads, state, grads).compile()
    first, state = update(grads, state, grads)
    return (first, update(grads, state, grads)[0]), update


@pytest.mark.parametrize(
    "kind", helpers.mostly_nightly([AxisType.Auto, AxisType.Explicit], [AxisType.Auto])
)
@pytest.mark.parametrize("layout", helpers.mostly_nightly(LAYOUTS, ["DDP", "HSDP", "EP and DP"]))
@pytest.mark.parametrize(
    "arguments",
    helpers.mostly_nightly(
        [{}, {"mu_dtype": "int8"}, {"preset": "muonh", "adamh": None}, {"preset": "nanogpt"}], [{}]
    ),
    ids=str,
)
def test_the_default_has_the_bits_of_repeat(arguments, layout, kind):
    grads, sizes = parameters(layout, kind)
    arguments = {"weight_decay": 0.0, "muon_weight_dimension_numbers": VIEWS, **arguments}
    if "preset" in arguments:
        del arguments["weight_decay"]
    default, program = two_updates(helpers.any_muon(0.1, **arguments, shardings=free(sizes)), grads)
    repeat, repeating = two_updates(
        helpers.any_muon(0.1, **arguments, shardings=Exchange("repeat")), grads
    )
    if arguments.get("preset") == "muonh":  # XLA fuses the norms with what they are of
        chex.assert_trees_all_close(default, repeat, rtol=0, atol=5e-7)
    else:
        chex.assert_trees_all_equal(default, repeat)
    gathers = [collectives(each).get("all-gather", 0) for each in (program, repeating)]
    assert gathers[0] > gathers[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["HSDP", "HSDP, replicas inside"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_default_keeps_no_matrix_sharded_that_repeat_does_not(layout, kind):
    """Over so slow a link, matrices stay sharded where no device has a replica."""
    sizes, _, _ = LAYOUTS[layout]
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), (kind,) * 2)
    grads = {str(i): jax.random.normal(jax.random.key(i), (16, 256)) for i in range(6)}
    grads = jax.device_put(grads, NamedSharding(mesh, P(None, "fsdp")))
    links = {"fsdp": Link(1e5, 0.0), "replica": Link(1e15, 0.0)}
    arguments = {"ns_coeffs": NewtonSchulz(dtype="float32"), "ns_steps": 2}
    faster, repeat, split = (Exchange(word, links) for word in ((), "repeat", "split"))
    modes = {group.mode for group in helpers.exchanges(grads, faster, **arguments).groups}
    assert modes == {"split over replica; exchange over fsdp"}
    (stated,) = helpers.exchanges(grads, split, **arguments).groups
    assert "gram" in stated.mode
    default, _ = two_updates(scale_by_muon(**arguments, shardings=faster), grads)
    repeated, _ = two_updates(scale_by_muon(**arguments, shardings=repeat), grads)
    chex.assert_trees_all_equal(default, repeated)


def of_layers(count, size, **arguments):
    layers = {str(i): jax.ShapeDtypeStruct((size, size), jnp.float32) for i in range(count)}
    return helpers.exchanges(layers, P(), AbstractMesh((8,), ("data",)), **arguments)


@pytest.mark.parametrize(
    ("count", "size", "gathers"),
    [(24, 1024, 1), (24, 64, 0), (2, 256, 0), (8, 4096, 1), (1, 4096, 0), (96, 768, 1)],
)
def test_small_matrices_repeat(count, size, gathers):
    """One matrix has nothing to share, either."""
    assert of_layers(count, size).gathers == gathers


@pytest.mark.parametrize(
    ("count", "size", "gathers"),
    [
        (96, 1024, 1),  # 12 for each device, each of which sends 2 MiB to 7 others
        (96, 2048, 3),  # of 8 MiB, 4 at once: 7 · 4 · 8 MiB ≤ 256 MiB
        (88, 2048, 3),  # 11 for each device, as 4, 4 and 3
        (24, 8192, 3),  # of 128 MiB, one at once, though that is more
    ],
)
def test_large_updates_are_gathered_in_parts_of_256_mib_or_of_one_matrix(count, size, gathers):
    exchanges = of_layers(count, size)
    assert exchanges.gathers == gathers
    (group,) = exchanges.groups
    assert (group.count, group.each, group.owners) == (count, count // 8, 8)
    assert group.megabytes == pytest.approx(7 / 8 * count * 2 * size**2 / 1e6)


@pytest.mark.parametrize(
    "kind", helpers.mostly_nightly([AxisType.Auto, AxisType.Explicit], [AxisType.Explicit])
)
@pytest.mark.parametrize(
    "layout", helpers.mostly_nightly(LAYOUTS, ["DDP", "some exchanged, some local"])
)
def test_updates_in_parts_have_the_bits_of_those_at_once(layout, kind):
    """A bucket, or a part of what is gathered, for each matrix; the last has padding."""
    grads, sizes = parameters(layout, kind)
    grads["e"] = 2 * grads["a"]
    views = VIEWS | {"e": MuonDimensionNumbers()}
    found = [
        two_updates(
            scale_by_muon(
                NewtonSchulz(max_group_bytes=max_bytes),
                weight_dimension_numbers=views,
                shardings=free(sizes),
            ),
            grads,
        )
        for max_bytes in (None, 1)
    ]
    chex.assert_trees_all_equal(found[0][0], found[1][0])
    gathers = [collectives(program)["all-gather"] for _, program in found]
    assert gathers[0] < gathers[1]


@kinds
def test_units_are_in_order_though_the_second_half_is_gathered_first(kind):
    """The first is gathered with x, which needs no exchange and so is computed last."""
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), (kind,) * 2)
    keys = jax.random.split(jax.random.key(0))
    grads = {
        "x": jax.device_put(
            jax.random.normal(keys[0], (8, 10, 10)), NamedSharding(mesh, P("fsdp"))
        ),
        "a": jax.device_put(
            jax.random.normal(keys[1], (8, 16, 16)), NamedSharding(mesh, P(None, "fsdp"))
        ),
    }
    newton_schulz = NewtonSchulz(dtype="float32", max_group_bytes=1000)
    (split, program), (repeated, _) = (
        two_updates(
            scale_by_muon(
                newton_schulz,
                weight_dimension_numbers=MuonDimensionNumbers(-2, -1),
                shardings=Exchange(word),
            ),
            grads,
        )
        for word in ("split", "repeat")
    )
    assert collectives(program)["all-gather"] == 2
    chex.assert_trees_all_equal(split, repeated)


@kinds
@pytest.mark.parametrize(
    ("count", "size", "gathers"),
    [(24, 32, {}), pytest.param(24, 1024, {"all-gather": 1}, marks=pytest.mark.slow)],
)
def test_programs_have_one_all_gather_or_none(count, size, gathers, kind):
    mesh = jax.make_mesh((8,), ("data",), (kind,))
    whole = NamedSharding(mesh, P())
    grads = {
        str(i): jax.ShapeDtypeStruct((size, size), jnp.float32, sharding=whole)
        for i in range(count)
    }
    transform = scale_by_muon()
    state = jax.eval_shape(transform.init, grads)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state)
    assert collectives(jax.jit(transform.update).lower(grads, state).compile()) == gathers


def in_shard_map(transform, check_vma, in_spec, out_spec, mesh, grads):
    """The compiled program of an update in the caller's shard_map."""

    def update(grads):
        grads = jax.tree.map(lambda x: x.reshape(16, 32), grads)
        return transform.update(grads, transform.init(grads))[0]

    run = jax.shard_map(
        update, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=check_vma
    )
    return jax.jit(run).lower(grads).compile()


def alone(stack):
    """Each matrix orthogonalized on one device."""
    transform = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"))
    return [np.asarray(transform.update({"w": x}, transform.init({"w": x}))[0]["w"]) for x in stack]


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("names", [("data",), ("data", "one")])
def test_gradients_of_each_replica_stay_its_own(names, check_vma):
    """Nothing is averaged: each device orthogonalizes what it has."""
    mesh = jax.make_mesh((8, 1)[: len(names)], names, (AxisType.Auto,) * len(names))
    own = {str(i): jax.random.normal(jax.random.key(i), (8, 16, 32)) for i in range(8)}
    exchange = free(names, shardings=P())
    transform = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"), shardings=exchange)
    program = in_shard_map(transform, check_vma, P(names), P(names), mesh, own)
    assert collectives(program) == {}
    found = jax.tree.map(lambda x: x.reshape(8, 16, 32), program(own))
    expected = {name: np.stack(alone(each)) for name, each in own.items()}
    helpers.assert_close(found, expected, atol=1e-5)


def test_gradients_of_each_replica_stated_as_equal():
    """Without `check_vma` nothing says that they are not: the first device's come back."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    own = {str(i): jax.random.normal(jax.random.key(i), (8, 16, 32)) for i in range(8)}
    iteration = NewtonSchulz(dtype="float32")
    transforms = {
        name: scale_by_muon(iteration, shardings=free(["data"], words, P()))
        for name, words in {"default": (), "repeat": "repeat"}.items()
    }
    found = {
        name: in_shard_map(transform, False, P("data"), P(), mesh, own)(own)
        for name, transform in transforms.items()
    }
    chex.assert_trees_all_equal(found["default"], found["repeat"])
    for name, x in found["default"].items():
        for i, shard in enumerate(x.addressable_shards):
            (expected,) = alone(own[name][i : i + 1])
            np.testing.assert_allclose(shard.data, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "check_vma", "gathers"),
    [
        ((), True, {"all-gather": 1}),
        ((), False, {}),
        ("faster", False, {}),
        ("split", False, {"all-gather": 1}),
        ("split", True, {"all-gather": 1}),
        ("repeat", True, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "names", helpers.mostly_nightly([("data",), ("data", "one")], (), [("data",)])
)
def test_the_caller_s_shard_map_with_equal_gradients(names, axes, check_vma, gathers):
    mesh = jax.make_mesh((8, 1)[: len(names)], names, (AxisType.Auto,) * len(names))
    grads = {str(i): jax.random.normal(jax.random.key(i), (16, 32)) for i in range(9)}
    transforms = (
        scale_by_muon(NewtonSchulz(dtype="float32"), shardings=free(names, words, P()))
        for words in (axes, "repeat")
    )
    program, repeat = (
        in_shard_map(transform, check_vma, P(), P(), mesh, grads) for transform in transforms
    )
    assert collectives(program) == gathers
    chex.assert_trees_all_equal(program(grads), repeat(grads))


@pytest.mark.parametrize("words", ["split", ("gram", "split")])
def test_shares_of_what_is_sharded_where_a_shard_map_tracks_what_varies(words):
    """In float16, whose pieces come with exponents."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), (AxisType.Auto,) * 2)
    specs = dict.fromkeys("ab", P(None, "fsdp"))
    grads = {name: jax.random.normal(jax.random.key(i), (8, 64)) for i, name in enumerate("ab")}
    grads["b"] *= 1e-30
    iteration = NewtonSchulz(dtype="float16")

    def update(grads, shardings=None):
        transform = scale_by_muon(iteration, shardings=shardings)
        return transform.update(grads, transform.init(grads))[0]

    on_shards = functools.partial(update, shardings=Exchange(words, shardings=specs))
    sharded = jax.shard_map(on_shards, mesh=mesh, in_specs=(specs,), out_specs=specs)
    program = jax.jit(sharded).lower(grads).compile()
    assert ("all-gather", ("data",)) in collectives_over(program, dict(mesh.shape))
    helpers.assert_close(program(grads), jax.jit(update)(grads), atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stated", helpers.mostly_slow([False, True], [True]))
@kinds
def test_derivatives_are_those_of_repeat(kind, stated):
    grads, sizes = parameters("DDP", kind)
    grads = {name: grads[name] for name in "ab"}
    found = []
    for word in ("faster", "repeat", "split"):
        exchange = free(sizes, word, P() if stated else None)
        transform = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"), shardings=exchange)

        def loss(g, transform=transform):
            updates, _ = transform.update(g, transform.init(g))
            return sum(jnp.sum(x**3) for x in updates.values())

        found.append(jax.jit(jax.grad(loss))(grads))
    for each in found[1:]:
        helpers.assert_close(found[0], each, atol=1e-5)
