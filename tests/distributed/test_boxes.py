"""States in Flax' boxes: the names of mesh axes in a box fit the array in it."""

import functools

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from muon_jax import MuonDimensionNumbers, NewtonSchulz
from muon_jax._matrices.views import Split, Unfold
from muon_jax.contrib import adamuon, scale_by_normuon

NORMUONS = {"argument": {"normuon_b2": 0.9}, "nanogpt": {"preset": "nanogpt"}}
MUON = functools.partial(
    helpers.any_muon, 1e-2, ns_steps=2, ns_coeffs=NewtonSchulz(dtype="float32")
)
each_normuon = pytest.mark.parametrize("name", helpers.mostly_nightly(NORMUONS, (), ["argument"]))


def mesh_of_two_axes():
    return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("fsdp", "tp"))
        return nn.Dense(24, kernel_init=init)(x)


@each_normuon
def test_linen_s_state_is_sharded_as_its_boxes_say(name):
    mesh, optimizer = mesh_of_two_axes(), MUON(**NORMUONS[name])

    def init():
        variables = Layer().init(jax.random.key(0), jnp.ones((2, 16)))
        return variables, optimizer.init(variables)

    specs = nn.get_partition_spec(jax.eval_shape(init))
    normuon = specs[1].inner_states["muon"].inner_state[0][1]
    assert normuon.nu["params"]["Dense_0"]["kernel"] == [P(None, "tp")]
    shardings = nn.get_sharding(jax.eval_shape(init), mesh)
    variables, state = jax.jit(init, out_shardings=shardings)()
    updates, new_state = jax.jit(optimizer.update)(variables, state, variables)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    plain = nn.unbox(variables)
    expected, _ = optimizer.update(plain, optimizer.init(plain), plain)
    for update, other in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(update, other, atol=1e-4)


def test_adamuon_s_moments_are_in_boxes_like_the_parameters():
    def init():
        variables = Layer().init(jax.random.key(0), jnp.ones((2, 16)))
        return variables, adamuon(0.1).init(variables)

    specs = nn.get_partition_spec(jax.eval_shape(init))
    of_adamuon = specs[1].inner_states["muon"].inner_state[0][1]
    assert of_adamuon.nu["params"]["Dense_0"]["kernel"] == P("fsdp", "tp")
    variables, state = init()
    updates, new_state = adamuon(0.1).update(variables, state, variables)
    assert jax.tree.structure((updates, new_state)) == jax.tree.structure((variables, state))


@each_normuon
def test_nnx_s_state_is_sharded_as_its_variables_say(name):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", "tp"))
    with jax.set_mesh(mesh_of_two_axes()):

        @nnx.jit
        def make():
            model = nnx.Linear(16, 24, kernel_init=init, rngs=nnx.Rngs(0))
            transform = MUON(**NORMUONS[name])
            return model, nnx.Optimizer(model, transform, wrt=nnx.Param)

        model, optimizer = make()
        specs = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(optimizer)))
        found = [x.get_value() for path, x in specs if {"muon", "nu", "kernel"} <= {*path}]
        assert found == [P(None, "tp")]
        before = np.asarray(model.kernel[...])
        nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))(
            model, optimizer, nnx.state(model, nnx.Param)
        )
        assert not np.allclose(model.kernel[...], before)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (MuonDimensionNumbers(1, 2), [("a", None, "c")]),
        (MuonDimensionNumbers(2, 1), [("a", "b", None)]),
        (Split(2, (4, 8), MuonDimensionNumbers(1, 2)), [("a", None, None)] * 2),
        (Split(0, (1, 1), MuonDimensionNumbers(1, 2)), [(None, None, "c")] * 2),
        (
            Unfold(1, (2, 4), MuonDimensionNumbers((0, 1, 2), 3)),
            [(None, None, None, "c")],
        ),
        (
            Unfold(2, (3, 4), MuonDimensionNumbers(1, (2, 3))),
            [("a", None, None, None)],
        ),
    ],
    ids=str,
)
def test_axes_that_are_averaged_or_taken_apart_have_no_names(view, expected):
    params = {"w": nn.Partitioned(jnp.ones((2, 8, 12)), ("a", "b", "c"))}
    found = scale_by_normuon(weight_dimension_numbers=view).init(params).nu["w"]
    assert [box.names for box in found] == expected
    assert [box.value.ndim for box in found] == [*map(len, expected)]


def test_variables_keep_their_other_metadata():
    variable = nnx.Param(jnp.ones((4, 6)), optimizer_sharding=("a", "b"), note="kept")
    (found,) = scale_by_normuon().init({"w": variable}).nu["w"]
    assert found.get_metadata("optimizer_sharding") == (None, "b")
    assert found.get_metadata("note") == "kept" and found.shape == (1, 6)
    short = nnx.Param(jnp.ones((4, 6)), out_sharding=("a",), eager_sharding=False)
    (found,) = scale_by_normuon().init({"w": short}).nu["w"]
    assert found.get_metadata("out_sharding") == (None, None)
