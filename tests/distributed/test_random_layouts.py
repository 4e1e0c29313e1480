"""Updates over random meshes, of parameters of random shapes, layouts and views."""

import math

import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import MuonDimensionNumbers

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
def parameters(draw, mesh):
    """A shape, the spec of axes that divide it, on any dimensions, and dimension numbers."""
    batch = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), max_size=2))
    shape = (*batch, draw(st.sampled_from([24, 40, 48])), draw(st.sampled_from([24, 120, 240])))
    entries = [() for _ in shape]
    for axis in draw(st.permutations([*mesh])):
        dimension = draw(st.integers(-1, len(shape) - 1))
        entry = (*entries[dimension], axis)
        if dimension >= 0 and shape[dimension] % math.prod(mesh[name] for name in entry) == 0:
            entries[dimension] = entry
    *reduced, output = draw(st.permutations(range(len(shape))))
    numbers = [(-2, -1), (-1, -2), (reduced[0], output), (tuple(reduced), output)]
    return shape, PartitionSpec(*entries), MuonDimensionNumbers(*draw(st.sampled_from(numbers)))


@st.composite
def problems(draw):
    mesh = draw(st.sampled_from(MESHES))
    kwargs = {
        "max_group_bytes": draw(st.sampled_from([None, 1, 2**15])),
        "distributed_gram": draw(st.sampled_from([None, False])),
    }
    found_by = draw(st.sampled_from(["specs", "automatic axes", "explicit axes"]))
    return mesh, draw(st.lists(parameters(mesh), min_size=1, max_size=5)), found_by, kwargs


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(problems())
def test_updates_are_those_of_one_device(problem):
    sizes, drawn, found_by, kwargs = problem
    axis_type = AxisType.Explicit if found_by == "explicit axes" else AxisType.Auto
    mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(axis_type,) * len(sizes),
        devices=jax.devices()[: math.prod(sizes.values())],
    )
    rng = np.random.default_rng(0)
    grads, specs, views = {}, {}, {}
    for i, (shape, spec, view) in enumerate(drawn):
        x = rng.standard_normal(shape).astype(np.float32)
        grads[f"{i}"], specs[f"{i}"], views[f"{i}"] = x, spec, view
    expected = helpers.on_one_device(grads, weight_dimension_numbers=views)
    grads = {key: jax.device_put(x, NamedSharding(mesh, specs[key])) for key, x in grads.items()}
    _, updates = helpers.compiled_update(
        grads,
        weight_dimension_numbers=views,
        shardings=specs if found_by == "specs" else None,
        **kwargs,
    )
    for key, update in expected.items():
        np.testing.assert_allclose(updates[key], update, atol=4e-6, err_msg=key)
