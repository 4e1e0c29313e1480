"""What happens along mesh axes: work repeated or split, Gram matrices summed, blocks."""

import collections
import itertools
import math
import pickle
import re
from typing import NamedTuple

import chex
import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from test_layouts import MESHES, layouts, placed

from muon_jax import (
    Exchange,
    Link,
    MuonDimensionNumbers,
    NewtonSchulz,
    Split,
    Unfold,
    muon,
    scale_by_muon,
)
from muon_jax._distributed.sharding import axes_of_entry
from muon_jax._matrices.views import matrix_axes

MATRICES = MuonDimensionNumbers(-2, -1)
SIZES = {"replica": 2, "fsdp": 2, "tp": 2}
COLLECTIVE = r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-[a-z]+)(?:-start)?\("
# Layers of experts, parts of an axis.
TREE = {
    "up": ((16, 32), ("fsdp", "tp")),
    "experts": ((3, 2, 16, 16), (None, "tp", None, "fsdp")),
    "gated": ((16, 32), ("tp",), Split(-1, (16, 16))),
}


def axes_of(instruction, sizes):
    """The mesh axes that the replica groups of a collective are along."""
    stated = re.search(r"replica_groups=(mesh\[.*?\] )?(\{+.*?\}+|\[.*?\]<=\S+?),? ", instruction)
    assert stated, instruction
    is_named, text = stated.groups()
    if is_named:
        named = re.findall(r"'(\w+)'", text)
        return tuple(name for name in sizes if name in named)
    if text[0] == "{":
        groups = np.array([[*map(int, row.split(","))] for row in re.findall(r"[\d,]*\d", text)])
    else:
        iota = re.fullmatch(r"\[(.*?)\]<=\[(.*?)\](?:T\((.*)\))?", text)
        assert iota, text
        shape, dims, order = iota.groups()
        groups = np.arange(math.prod(sizes.values())).reshape([*map(int, dims.split(","))])
        groups = groups.transpose([*map(int, order.split(","))]) if order else groups
        groups = groups.reshape([*map(int, shape.split(","))])
    places = np.unravel_index(groups, [*sizes.values()])
    return tuple(
        name for name, place in zip(sizes, places, strict=True) if (place != place[:, :1]).any()
    )


def collectives_over(compiled, sizes):
    """How many collectives of each kind a program has over each set of mesh axes."""
    lines = compiled.as_text().splitlines()
    found = [(re.search(COLLECTIVE, line), line) for line in lines]
    return dict(collections.Counter((kind[1], axes_of(x, sizes)) for kind, x in found if kind))


def test_an_exchange_is_a_value():
    for exchange in (
        Exchange(),
        Exchange("gram"),
        Exchange({"b": ("split", "block"), "a": "raise", ...: "repeat"}, {"b": Link(1e9)}),
        Exchange(shardings={"w": PartitionSpec("x")}, block_period=4, block_gain=0.5),
    ):
        again = eval(repr(exchange), {"Exchange": Exchange, "Link": Link, "P": PartitionSpec})
        assert again == exchange == pickle.loads(pickle.dumps(exchange))
        assert hash(again) == hash(exchange)
    assert repr(Exchange({"b": ("split", "block"), "a": ()})) == (
        "Exchange({'a': (), 'b': ('block', 'split')})"
    )
    assert Exchange({"b": "split", "a": "gram"}) == Exchange({"a": "gram", "b": ("split",)})
    assert Exchange("gram") != Exchange("block") != Exchange({"x": "block"})


def test_replica_groups_are_read_in_every_notation():
    for text, axes in {
        "{{0,4},{1,5},{2,6},{3,7}}": ("replica",),
        "[4,2]<=[2,4]T(1,0)": ("replica",),
        "[2,4]<=[8]": ("fsdp", "tp"),
        "mesh['replica'=2,'fsdp'=2,'tp'=2] {'replica'}": ("replica",),
        "mesh['replica'=2,'fsdp'=2,'tp'=2] {'fsdp', 'tp'}": ("fsdp", "tp"),
    }.items():
        assert axes_of(f"all-gather(x), replica_groups={text}, dimensions={{0}}", SIZES) == axes


def blocks_of(grad, spec, sizes, names):
    """For each block that these mesh axes cut an array in the indices of its elements."""
    entries = [axes_of_entry(entry) for entry in spec] + [()] * (grad.ndim - len(spec))
    cutting = [name for entry in entries for name in entry if name in names]
    for place in itertools.product(*(range(sizes[name]) for name in cutting)):
        where, indices = dict(zip(cutting, place, strict=True)), []
        for size, entry in zip(grad.shape, entries, strict=True):
            # The axis as (mesh axes…, rest): a block has one place along some of them.
            grid = np.arange(size).reshape([*(sizes[name] for name in entry), -1])
            index = tuple(where.get(name, slice(None)) for name in entry)
            indices.append(grid[index].reshape(-1))
        yield np.ix_(*indices)


def block_by_block(update, grads, specs, views, sizes, names):
    """The updates of the blocks that these mesh axes cut, each as a parameter of its own.

    Args:
        update: of gradients and views, the updates on one device.
        grads: the gradients.
        specs: of the parameters.
        views: of the parameters.
        sizes: of the mesh.
        names: the mesh axes.
    """
    places = {
        (key, i): index
        for key, grad in grads.items()
        for i, index in enumerate(blocks_of(grad, specs[key], sizes, names))
    }
    blocks = {place: np.asarray(grads[place[0]])[index] for place, index in places.items()}
    updates = update(blocks, {place: views[place[0]] for place in places})
    results = {key: np.zeros(grad.shape, np.float32) for key, grad in grads.items()}
    for place, index in places.items():
        results[place[0]][index] = updates[place]
    return results


def on_one_device(grads, views, **kwargs):
    return helpers.on_one_device(grads, weight_dimension_numbers=views, **kwargs)


FRONT_ENDS = [(AxisType.Auto, True), (AxisType.Auto, False), (AxisType.Explicit, False)]
front_ends = pytest.mark.parametrize(
    "front_end", helpers.mostly_nightly(FRONT_ENDS, FRONT_ENDS[1:2]), ids=str
)
every_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS, ids=str)


def compiled_update(parameters, front_end, axes=(), **kwargs):
    """Gradients, specs, views; the program and its updates."""
    axis_type, is_stated = front_end
    grads, specs, views = placed(SIZES, parameters, axis_type)
    compiled, updates = helpers.compiled_update(
        grads,
        weight_dimension_numbers=views,
        shardings=Exchange(axes, shardings=specs if is_stated else None),
        **kwargs,
    )
    return (grads, specs, views), compiled, updates


@pytest.mark.slow
@front_ends
def test_replicas_that_split_the_work_have_the_bits_of_those_that_repeat_it(front_end):
    parameters = {name: TREE[name] for name in ("up", "experts")}
    _, _, repeated = compiled_update(parameters, front_end, dtype="auto")
    _, compiled, split = compiled_update(parameters, front_end, {"replica": "split"}, dtype="auto")
    chex.assert_trees_all_equal(split, repeated)
    found = collectives_over(compiled, SIZES)
    (of_replicas,) = [(kind, n) for kind, n in found.items() if "replica" in kind[1]]
    assert of_replicas == (("all-gather", ("replica",)), 1)
    assert {kind for kind, _ in found} == {"all-to-all", "all-gather"}


# Whole heads, rows over both kinds of axes, and whole elements of an axis that is taken apart.
BLOCKS = TREE | {
    "heads": ((16, 32), ("fsdp", "tp"), Unfold(-1, (-1, 16), MuonDimensionNumbers(-3, -1))),
    "both": ((16, 24), (("fsdp", "tp"),)),
    "rows": ((16, 24), ("tp", "fsdp"), Unfold(0, (-1, 4), MuonDimensionNumbers((0, 1), 2))),
}


@helpers.nightly
@every_front_end
def test_blocks_are_matrices_of_their_own(front_end):
    (grads, specs, views), compiled, updates = compiled_update(BLOCKS, front_end, {"tp": "block"})
    assert {axes for _, axes in collectives_over(compiled, SIZES)} == {("fsdp",)}
    expected = block_by_block(on_one_device, grads, specs, views, SIZES, ["tp"])
    helpers.assert_close(updates, expected)
    assert np.abs(updates["up"] - on_one_device(grads, views)["up"]).max() > 0.1


@helpers.nightly
def test_blocks_that_need_no_exchange_have_the_bits_of_a_loop():
    (grads, specs, views), compiled, updates = compiled_update(
        {"up": BLOCKS["up"], "both": BLOCKS["both"]},
        FRONT_ENDS[0],
        "block",
        dtype="auto",
    )
    assert not collectives_over(compiled, SIZES)
    expected = block_by_block(
        lambda *block: on_one_device(*block, dtype="auto"),
        *(grads, specs, views, SIZES, ["fsdp", "tp"]),
    )
    chex.assert_trees_all_equal(updates, expected)


# Wide, tall, one that no mesh axis shards the long side of, square.
GRAMS = {
    "wide": ((2, 16, 256), (None, "fsdp", "tp")),
    "tall": ((256, 16), ("tp", "fsdp")),
    "short": ((16, 64), ("tp",)),
    "square": ((24, 24), ("tp", "fsdp")),
}


@pytest.mark.parametrize(
    ("names", "front_end"),
    [
        (("wide", "short"), FRONT_ENDS[1]),
        *(pytest.param((*GRAMS,), front_end, marks=helpers.nightly) for front_end in FRONT_ENDS),
    ],
    ids=str,
)
def test_sums_of_gram_matrices_alone_are_over_axes_outside(names, front_end):
    (grads, _, views), compiled, updates = compiled_update(
        {name: GRAMS[name] for name in names}, front_end, {"tp": "gram"}
    )
    assert {axes for _, axes in collectives_over(compiled, SIZES)} == {
        ("fsdp",),
        ("fsdp", "tp"),
        ("tp",),
    }
    text = compiled.as_text()
    assert text
    for line in text.splitlines():
        collective = re.search(COLLECTIVE, line)
        if collective and "tp" in axes_of(line, SIZES):
            assert collective[1] in ("all-reduce", "reduce-scatter", "all-gather")
            result = line.partition(" = ")[2].partition(collective[0])[0]
            sizes = re.findall(r"\[([\d,]*)\]", result)
            elements = sum(math.prod(map(int, filter(None, size.split(",")))) for size in sizes)
            assert elements <= 64 * 64, line  # a part of "wide" has 2·16·256/4
    helpers.assert_close(updates, on_one_device(grads, views, method="gram"), 4e-6)


SCALES = [{"consistent_rms": 0.2}, {"shape_scale": "ratio"}, {}, {"shape_scale": "none"}]


@pytest.mark.parametrize("scale", helpers.mostly_nightly(SCALES, SCALES[:1]), ids=str)
def test_the_scale_of_a_block_is_that_of_its_shape(scale):
    """Blocks along rows, of parts of an axis; along columns; of whole elements of an axis."""
    parameters = {
        "gated": ((16, 24), ("tp", "fsdp"), Split(-1, (16, 8))),
        "up": ((16, 48), ("fsdp", "tp")),
        "rows": BLOCKS["rows"],
    }
    grads, specs, views = placed(SIZES, parameters, AxisType.Auto)

    def update(grads, views, **kwargs):
        optimizer = muon(
            0.5,
            ns_steps=2,
            ns_coeffs=NewtonSchulz(dtype="float32"),
            muon_weight_dimension_numbers=views,
            **scale,
            **kwargs,
        )
        return jax.jit(optimizer.update)(grads, optimizer.init(grads), grads)[0]

    updates = update(grads, views, shardings=Exchange({"tp": "block"}))
    helpers.assert_close(updates, block_by_block(update, grads, specs, views, SIZES, ["tp"]))


@pytest.mark.parametrize("check_vma", helpers.mostly_nightly([True, False], [True]))
def test_inside_the_caller_s_shard_map(check_vma):
    parameters = {"up": TREE["up"], "layers": ((3, 16, 16), (None, "tp"))}
    grads, specs, views = placed(SIZES, parameters, AxisType.Auto)
    kwargs = {
        "ns_steps": 2,
        "ns_coeffs": NewtonSchulz(dtype="float32"),
        "weight_dimension_numbers": views,
    }
    exchange = Exchange({"tp": ("block", "split"), ...: "split"}, shardings=specs)
    transform = scale_by_muon(shardings=exchange, **kwargs)
    run = jax.jit(
        jax.shard_map(
            lambda grads: transform.update(grads, transform.init(grads))[0],
            mesh=jax.typeof(grads["up"]).sharding.mesh,
            in_specs=(specs,),
            out_specs=specs,
            check_vma=check_vma,
        )
    )
    assert collectives_over(run.lower(grads).compile(), SIZES) == {
        ("all-to-all", ("fsdp",)): 2,
        ("all-gather", ("replica",)): 1,
        ("all-gather", ("replica", "fsdp")): 1,
    }
    expected = block_by_block(on_one_device, grads, specs, views, SIZES, ["tp"])
    helpers.assert_close(run(grads), expected)


class Case(NamedTuple):
    """A mesh, parameters as in `LAYOUTS`, words and a link for each mesh axis, and a front end."""

    sizes: dict
    parameters: dict
    axes: dict
    links: dict
    front_end: tuple = FRONT_ENDS[1]

    def over(self, *words):
        """The mesh axes over which one of these words says what becomes of sharded matrices."""
        said = {n: words for n, words in self.axes.items() if self.sizes[n] > 1}
        return [name for name in said if {*words} & {*said[name]}]


@st.composite
def cases(draw):
    sizes = draw(st.sampled_from(MESHES))
    drawn = draw(st.lists(layouts(sizes), min_size=1, max_size=4))
    replicas = st.sampled_from([("repeat",), ("split",), ("faster",)])
    own = st.sampled_from([(word,) for word in ("block", "gram", "block", "gram", "raise")])
    sharded = own | st.sampled_from([(), (), ("exchange",), ("gram_or_exchange",)])
    # As slow and as fast as it takes for replicas to split the work, and for small matrices to stay
    # sharded.
    links = st.builds(Link, st.sampled_from([1e4, 1e6, 1e12]), st.sampled_from([0, 1e-6, 1e-3]))
    return Case(
        sizes,
        {str(i): layout for i, layout in enumerate(drawn)},
        {name: draw(sharded) + draw(replicas) for name in sizes},
        {name: draw(links) for name in sizes},
        draw(st.sampled_from(FRONT_ENDS)),
    )


@pytest.mark.timeout(1800)
@helpers.nightly
def test_random_exchange_axes():
    @hypothesis.settings(max_examples=120, deadline=None, derandomize=True)
    @hypothesis.given(cases())
    def is_right(case):
        check(case)

    is_right()


def test_faster_replicas_have_the_results_of_one_device_whatever_the_links():
    """Replicas split the work over a fast axis, and repeat it over a slow one."""
    parameters = {"0": ((3, 24, 40), ((), ("fsdp",), ("tp",)), (-2, -1))}
    axes = {"replica": ("raise", "faster"), "fsdp": ("repeat",), "tp": ("block", "split")}
    found = []
    for replica in (1e3, 1e12):
        links = {"replica": Link(replica, 0), "fsdp": Link(1e6)}
        found.append(check(Case(SIZES, parameters, axes, links)))
    gather = ("all-gather", ("replica",))
    assert [gather in collectives for collectives in found] == [False, True]


def check(case):
    """Returns the collectives of the update, whose results have to be right."""
    axis_type, is_stated = case.front_end
    grads, specs, views = placed(case.sizes, case.parameters, axis_type)

    def update():
        return helpers.compiled_update(
            grads,
            weight_dimension_numbers=views,
            shardings=Exchange(case.axes, case.links, specs if is_stated else None),
        )

    def sides(*words):
        return [
            sides_over(case.over(*words), specs[key], view, grads[key].ndim)
            for key, view in views.items()
        ]

    if any(map(any, sides("raise"))) or any(map(all, sides("gram"))):
        said = "shards its matrices over .* says 'raise'|shard rows and columns of its matrices"
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=said):
            update()
        return {}
    compiled, updates = update()
    found = collectives_over(compiled, case.sizes)
    whole_outside = {*case.over("block", "raise")}
    for kind, axes in found:
        assert kind != "all-to-all" or not {*axes} & {*whole_outside, *case.over("gram")}
        assert kind == "all-gather" or not {*axes} & whole_outside
        assert not {*axes} & whole_outside & {*case.over("repeat")}
    of_matrices = {key: over_matrices(specs[key], views[key], x.ndim) for key, x in grads.items()}
    expected = block_by_block(
        on_one_device, grads, of_matrices, views, case.sizes, case.over("block")
    )
    # Matrices that stay sharded have the Gram form, whose rounding is another.
    is_whole = {kind for kind, _ in found} <= {"all-to-all", "all-gather"}
    helpers.assert_close(updates, expected, atol=4e-6 if is_whole else 2e-5)
    return found


def sides_over(names, spec, view, ndim):
    """Whether any of these mesh axes shards the rows of matrices, and whether one the columns."""
    _, *sides = matrix_axes(ndim, view)
    entries = [*map(axes_of_entry, spec)] + [()] * (ndim - len(spec))
    return [any(name in names for i in side for name in entries[i]) for side in sides]


def over_matrices(spec, view, ndim):
    """The spec without the mesh axes that shard a batch."""
    batch = matrix_axes(ndim, view).batch
    return PartitionSpec(*(None if i in batch else entry for i, entry in enumerate(spec)))


MESH = AbstractMesh((2, 4, 2), ("replica", "fsdp", "tp"))


def modes(axes=(), shape=(24, 1024, 4096), spec=(None, "fsdp", "tp"), view=MATRICES, **kwargs):
    """What `describe` says of one parameter: mode, count, owners and each of its only group."""
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    views = {"w": view}
    exchange = Exchange(axes, shardings=PartitionSpec(*spec))
    explanation = helpers.exchanges(
        params, exchange, MESH, muon_weight_dimension_numbers=views, **kwargs
    )
    groups = {(g.mode, g.matrices[0][1:], g.count, g.owners, g.each) for g in explanation.groups}
    return explanation, *groups


@pytest.mark.parametrize(
    ("kwargs", "group"),
    [
        ({}, ("split over replica; exchange over fsdp, tp", (1024, 4096), 24, 16, 2)),
        ({"shape": (24, 64, 128)}, ("exchange over fsdp, tp", (64, 128), 24, 8, 3)),
        ({"axes": "repeat"}, ("exchange over fsdp, tp", (1024, 4096), 24, 8, 3)),
        (
            {"axes": "split"},
            ("split over replica; exchange over fsdp, tp", (1024, 4096), 24, 16, 2),
        ),
        (
            {"axes": {"tp": ("block", "repeat"), ...: "repeat"}},
            ("blocks over tp; exchange over fsdp", (1024, 2048), 24, 4, 6),
        ),
        (
            {"axes": ("split", "block")},
            ("split over replica; blocks over fsdp, tp; local", (256, 2048), 24, 2, 12),
        ),
        (
            {
                "axes": {"replica": "repeat", "tp": "gram"},
                "shape": (8, 1024, 4096),
            },
            ("gram over fsdp, tp", (1024, 4096), 8, 1, 8),
        ),
        (
            {
                "axes": {"replica": "split", "fsdp": "block", "tp": "gram"},
                "shape": (3, 1024, 4096),
            },
            ("split over replica; blocks over fsdp; gram over tp", (256, 4096), 3, 2, 2),
        ),
    ],
    ids=str,
)
def test_describe_says_what_happens_where(kwargs, group):
    assert modes(**kwargs)[1:] == (group,)


def test_describe_counts_what_is_gathered():
    explanation, _ = modes("split")
    (group,) = explanation.groups
    exchanged = 2 * 2 * 8 * 1024 * 4096 / 8 * 2 * 7 / 8  # 2 slots of 8 owners, in 16 bits
    assert group.megabytes == pytest.approx((exchanged + 12 * 1024 * 4096 / 8 * 2) / 1e6)
    assert explanation.gathers == 1
    assert "2 exchanges and 1 all-gather of updates" in str(explanation)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"axes": {"tp": "raise"}},
            r"\['w'\] of shape .* over 'tp', where Exchange says 'raise': pass"
            r" Exchange\(\{'tp': 'exchange'\}\), or 'gram', .*, or 'block'",
        ),
        (
            {"axes": {"tensor": "exchange"}},
            r"axes of Exchange must name axes of .*, got 'tensor', .*\['replica', 'fsdp', 'tp",
        ),
        ({"axes": {"data": "split"}}, r"axes of Exchange must name axes of the mesh, got 'data'"),
        (
            {"axes": "gram"},
            r"\['fsdp', 'tp'\] shard rows and columns .* or 'block' for the axes of the other",
        ),
        (
            {"axes": {"tp": "gram"}, "view": Split(-2, (512, 512))},
            r"its matrices cannot stay sharded: its view, Split.*Pass Exchange with 'block'",
        ),
        (
            {"axes": {"tp": "gram"}, "ns_coeffs": NewtonSchulz(method="standard")},
            r"cannot stay sharded: the standard form was asked for.*'exchange' in place of 'gram'",
        ),
        (
            {"axes": {"tp": "block"}, "view": Split(-1, (1024, 3072))},
            r"takes axis 2 apart, where \['tp'\] cut blocks: shard another axis",
        ),
    ],
)
def test_what_cannot_be_is_said(kwargs, message):
    with pytest.raises(ValueError, match=message):
        modes(**kwargs)


def test_under_jit_the_compiler_says_that_a_matrix_must_not_travel():
    grads, _, views = placed(SIZES, {"up": TREE["up"]}, AxisType.Auto)
    with pytest.raises(jax.errors.JaxRuntimeError, match="over 'tp', where Exchange says 'raise'"):
        helpers.compiled_update(
            grads, weight_dimension_numbers=views, shardings=Exchange({"tp": "raise"})
        )
