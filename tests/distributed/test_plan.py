"""Plans: every unit once, in equal shares, in bounded buckets."""

import collections
import math

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from muon_jax import Exchange, MuonDimensionNumbers
from muon_jax._distributed import planning
from muon_jax._distributed.placement import placed
from muon_jax._distributed.planning import _first_owners, bytes_of, deal
from muon_jax._distributed.sharding import Parameter
from muon_jax._iteration.form import Form
from muon_jax._iteration.newton_schulz import Iterations, NewtonSchulz
from muon_jax._matrices.views import Split, Unfold, batch_axes

MATRICES = MuonDimensionNumbers(-2, -1)
ITERATION = NewtonSchulz(dtype="float32")  # as they are exchanged


def leaves_of(parameters, mesh):
    named = [Parameter(str(i), shape, view) for i, (shape, _, view) in enumerate(parameters)]
    iterations = Iterations((ITERATION,), ("standard",), (0,) * len(named))
    leaves = planning.leaves_of(named, [jnp.float32] * len(named), iterations)
    return [
        placed(leaf, spec, mesh, Exchange("repeat"), "repeat", [ITERATION])
        for leaf, (_, spec, _) in zip(leaves, parameters, strict=True)
    ]


def plan_of(leaves, mesh, limit, stays=lambda chunk: False):
    return deal(leaves, mesh, limit, stays)


def can_stay(chunk):
    return isinstance(chunk.leaf.sharded_form, Form)


def is_one_slot(chunk):
    return can_stay(chunk) and chunk.slots == 1


@st.composite
def problems(draw):
    mesh = {"x": draw(st.sampled_from([1, 2, 3, 8])), "y": draw(st.sampled_from([1, 2, 4]))}
    entries = st.sampled_from(
        [(None, None, None), (None, "x", None), (None, "y", "x"), (None, "x", "y"), ("x",)]
        + [("y", None, "x"), ("x", ("y",), None), (None, ("x", "y"), None), (None, None, "y")]
    )
    shapes = st.tuples(
        st.sampled_from([96, 192]), st.sampled_from([96, 192]), st.sampled_from([48])
    )
    views = st.sampled_from([MATRICES, Split(-1, (16, 32)), MuonDimensionNumbers((1, 2), 0)])
    parameter = st.tuples(shapes, entries.map(lambda e: PartitionSpec(*e)), views)
    parameters = draw(st.lists(parameter, min_size=1, max_size=12))
    stays = draw(st.sampled_from([lambda chunk: False, can_stay, is_one_slot]))
    return parameters, mesh, draw(st.sampled_from([1, 2**14, 2**17, 2**40])), stays


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(problems())
def test_every_unit_has_one_owner_and_every_owner_its_share(problem):
    parameters, mesh, limit, stays = problem
    leaves = leaves_of(parameters, mesh)
    plan = plan_of(leaves, mesh, limit, stays)
    units = collections.Counter()
    for chunk in (*plan.whole, *plan.grams):
        for leaf, start, stop in chunk.parts:
            units.update((leaf.index, i) for i in range(start, stop))
    for chunk in plan.local:
        assert chunk.owners == 1 and len(chunk.parts) == 1
    for chunk in plan.grams:
        assert chunk.slots == 1 and chunk.count <= chunk.owners
    kinds, loads = {}, {}
    for bucket in plan.buckets:
        for chunk in bucket:
            assert {name for name, _ in chunk.axes} <= {n for n, size in mesh.items() if size > 1}
            load = loads.setdefault(chunk.axes, [0] * chunk.owners)
            leaf = chunk.leaf
            kind = kinds.setdefault((chunk.axes, leaf.matrices), [0, 0])
            kind[0] += chunk.count
            kind[1] += chunk.slots
            for q in range(chunk.count):
                load[(chunk.first + q) % chunk.owners] += leaf.microseconds(1)
        assert bytes_of(bucket) <= limit or sum(chunk.slots for chunk in bucket) == 1
    expected = {(leaf.index, i) for leaf in leaves for i in range(leaf.units)}
    assert units == collections.Counter(expected)
    for (axes, _), (count, slots) in kinds.items():
        assert slots == math.ceil(count / math.prod(size for _, size in axes))
    most = max(leaf.microseconds(1) for leaf in leaves) + 0.1  # costs are rounded
    for load in loads.values():
        assert max(load) <= sum(load) / len(load) + most


def test_equal_shapes_of_all_layouts_share_owners():
    mesh = {"x": 2, "y": 4}
    parameters = [
        ((16, 24), PartitionSpec("x", "y"), MATRICES),
        ((24, 16), PartitionSpec("y", "x"), MATRICES),
        ((24, 16), PartitionSpec(("x", "y")), MATRICES),
        ((5, 16, 24), PartitionSpec(None, None, ("x", "y")), MATRICES),
    ]
    plan = plan_of(leaves_of(parameters, mesh), mesh, 2**30)
    ((chunk,),) = plan.buckets
    assert (chunk.count, chunk.slots) == (8, 1)
    assert len([*chunk.layouts()]) == 4


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((64,), [{0: 8}]),
        ((128,), [{0: 8}, {0: 8}]),
        ((136,), [{0: 6}, {0: 6}, {0: 5}]),
        ((128, 96, 40), [{0: 8}, {1: 12}, {2: 5}, {0: 8}]),
        ((128, 320), [{1: 8}, {0: 16}, {1: 8}, {1: 8}, {1: 8}, {1: 8}]),
        ((128, 16, 16, 33), [{0: 8}, {1: 2, 2: 2}, {3: 5}, {0: 8}]),
        ((16, 8, 80), [{2: 5}, {0: 2, 1: 1}, {2: 5}]),
    ],
)
def test_buckets_of_few_sizes_and_small_ones_at_the_ends(counts, expected):
    """Kinds of so many units, of equal sizes, on 8 devices, 32 slots a bucket, 8 a small one."""
    mesh, shapes = {"x": 8}, [(16, 24), (8, 48), (32, 12), (64, 6)]
    kinds = zip(counts, shapes, strict=False)
    sharded = [((n, *shape), PartitionSpec(None, "x"), MATRICES) for n, shape in kinds]
    plan = plan_of(leaves_of(sharded, mesh), mesh, 32 * 16 * 24 * 4)
    slots = [{c.leaf.index: c.slots for c in bucket} for bucket in plan.buckets]
    assert slots == expected


def test_kinds_with_as_many_rows_have_buckets_of_as_many_matrices():
    """24 and 12 slots of which 8 fit in a bucket, of wide ones, or in a small bucket."""
    mesh = {"x": 8}
    sharded = [
        ((8 * slots, 16, n), PartitionSpec(None, "x"), MATRICES)
        for slots, n in ((24, 16), (12, 64))
    ]
    plan = plan_of(leaves_of(sharded, mesh), mesh, 8 * 16 * 64 * 4)
    slots = [{c.leaf.index: c.slots for c in bucket} for bucket in plan.buckets]
    assert slots == [{0: 6}, {1: 6}, {1: 6}, {0: 6}, {0: 6}, {0: 6}]


def test_remainders_go_to_different_owners_the_costly_ones_first():
    mesh = {"x": 8}
    shapes = [(16, 16), (16, 2400), (16, 320), (1600, 1600)]
    leaves = leaves_of([(shape, PartitionSpec("x"), MATRICES) for shape in shapes], mesh)
    (bucket,) = plan_of(leaves, mesh, 2**30).buckets
    assert [chunk.first for chunk in bucket] == [3, 1, 2, 0]


@pytest.mark.parametrize(
    ("remainders", "expected"),
    [
        ([(3, 5), (3, 5), (3, 5)], [0, 3, 2]),  # in turn
        ([(2, 5), (0, 9), (2, 5)], [0, 0, 2]),
        ([(1, 1), (1, 2), (3, 8)], [3, 3, 0]),  # two cheap ones beside one of three costly ones
    ],
)
def test_first_owners(remainders, expected):
    assert _first_owners(remainders, 4) == expected


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    st.sampled_from([2, 3, 8, 64]),
    st.lists(st.tuples(st.integers(0, 63), st.integers(1, 100)), min_size=1, max_size=12),
    st.booleans(),
)
def test_no_owner_has_more_than_the_mean_and_one_unit(owners, remainders, is_equal):
    remainders = [(count % owners, 7 if is_equal else cost) for count, cost in remainders]
    loads = [0] * owners
    for (count, cost), first in zip(remainders, _first_owners(remainders, owners), strict=True):
        for q in range(count):
            loads[(first + q) % owners] += cost
    assert max(loads) <= sum(loads) / owners + max(cost for _, cost in remainders)
    if is_equal:
        assert max(loads) - min(loads) <= 7


@pytest.mark.parametrize(
    ("view", "shape", "expected"),
    [
        (MATRICES, (2, 3, 4, 5), (0, 1)),
        (MuonDimensionNumbers((0, 2), 3), (2, 3, 4, 5), (1,)),
        (Split(-1, (8, 16)), (2, 3, 24), (0,)),
        (
            Split(1, (8, 16), [MuonDimensionNumbers(1, 2), MuonDimensionNumbers(1, 0)]),
            (2, 24, 5),
            (),
        ),
        (Unfold(1, (-1, 4), MuonDimensionNumbers(2, 3)), (2, 8, 5), (0,)),
        (Unfold(0, (2, 4), MuonDimensionNumbers(1, 3)), (8, 3, 5), (1,)),
        (Split(-1, (8, 4), Unfold(-1, (-1, 4), MuonDimensionNumbers(-3, -1))), (2, 3, 12), (0,)),
    ],
)
def test_batch_axes(view, shape, expected):
    assert batch_axes(view, shape) == expected


def test_heads_that_are_not_exchanged_keep_their_matrices():
    view = Unfold(-1, (-1, 4), MuonDimensionNumbers(-3, -1))
    (of_heads,) = leaves_of([((16, 32), PartitionSpec(None, "x"), view)], {"x": 8})
    assert (of_heads.units, of_heads.shape, of_heads.matrices) == (1, (16, 1, 4), ((1, 4, 16),))


@pytest.mark.parametrize(
    ("shape", "spec", "view", "message"),
    [
        ((12, 8), ("x",), MATRICES, r"\(12, 8\).*does not divide it evenly on the mesh.*'x': 8"),
        ((8, 8), ("z",), MATRICES, r"must name axes of the mesh \{'x': 8\} for at most 2"),
        ((8, 8), ("x", "x"), MATRICES, r"P\('x', 'x'\) must name each mesh axis once"),
        ((8, 8), (None, None, "x"), MATRICES, r"for at most 2 axes"),
    ],
)
def test_what_does_not_fit_is_said(shape, spec, view, message):
    with pytest.raises(ValueError, match=message):
        leaves_of([(shape, PartitionSpec(*spec), view)], {"x": 8})
