"""Shardings of states: what `state_shardings` returns, and that states and updates fit them."""

import functools

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import spmd
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from muon_jax import MuonDimensionNumbers, NewtonSchulz, muon, state_shardings
from muon_jax.contrib import Quantized

MUON = functools.partial(helpers.any_muon, 0.1, ns_steps=2, ns_coeffs=NewtonSchulz(dtype="float32"))
SHAPES = {"in": {"kernel": (256, 96), "bias": (96,)}, "heads": (64, 4, 32)}
SPECS = {"in": {"kernel": P("x"), "bias": P("x")}, "heads": P("x")}
VIEWS = {
    "in": {"kernel": MuonDimensionNumbers(), "bias": None},
    "heads": MuonDimensionNumbers(0, (1, 2)),
}
OF_MUON = functools.partial(MUON, muon_weight_dimension_numbers=VIEWS)
OPTIMIZERS = {
    "muon": OF_MUON(),
    "int8": OF_MUON(mu_dtype="int8"),
    "nanogpt": OF_MUON(preset="nanogpt", mu_dtype="int8"),
    "muonh": OF_MUON(preset="muonh", adamh=None),
    "adamw": optax.adamw(0.1),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), OF_MUON(mu_dtype="int8"), optax.ema(0.9)),
    "injected": optax.inject_hyperparams(muon)(
        **{"learning_rate": 0.1, **OF_MUON.keywords}, mu_dtype="int8"
    ),
    "accumulated": optax.MultiSteps(OF_MUON(mu_dtype="int8"), 2),
}


def mesh_of_eight(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("x",), (kind,))


def is_spec(node):
    return isinstance(node, P)


def random_params():
    shapes, treedef = jax.tree.flatten(SHAPES, is_leaf=lambda node: isinstance(node, tuple))
    arrays = helpers.random_tree(dict(enumerate(shapes)), 0)
    return treedef.unflatten(arrays[i] for i in range(len(shapes)))


@pytest.mark.parametrize("name", helpers.mostly_nightly(OPTIMIZERS, ["muon", "int8", "adamw"]))
def test_init_and_updates_take_the_shardings_of_a_state(name):
    optimizer, mesh = OPTIMIZERS[name], mesh_of_eight()
    params = random_params()
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS, is_leaf=is_spec)
    shapes = jax.eval_shape(lambda: params)
    found = state_shardings(optimizer, shapes, where)
    there = jax.device_put(params, where)
    state = jax.jit(optimizer.init, out_shardings=found)(there)
    alone = optimizer.init(params)
    for array, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        assert array.sharding == sharding
    # All that is as large as a parameter is sharded, and more than 9/10 of the bytes.
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    of_one = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert of_one < whole / 6
    step = jax.jit(optimizer.update, out_shardings=(where, found))
    updates, state = step(there, state, there)
    expected, alone = jax.jit(optimizer.update)(params, alone, params)
    for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
    of_both = (jax.tree.leaves(tree, is_leaf=is_codes) for tree in (state, alone))
    for x, y in zip(*of_both, strict=True):
        if is_codes(x) and name != "chain":  # whose clipping sums over devices
            jax.tree.map(np.testing.assert_array_equal, x, y)


def is_codes(node):
    return isinstance(node, Quantized)


def test_axes_that_count_blocks_keep_mesh_axes_that_divide_them():
    mesh = jax.sharding.AbstractMesh((128, 16), ("fsdp", "tp"))
    shapes = {"a": (8192, 768), "b": (8448, 512)}
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    optimizer = muon(0.1, mu_dtype="int8")
    found = state_shardings(optimizer, params, NamedSharding(mesh, P("fsdp", "tp")))
    mu = found.inner_states["muon"].inner_state[0].mu
    assert [s.spec for s in mu["a"]] == [P("fsdp", "tp")] * 3
    # 8448 is 128 · 66: blocks of 66 rows, 128 of them.
    assert [s.spec for s in mu["b"]] == [P("fsdp", "tp")] * 3
    params = {"w": jax.ShapeDtypeStruct((768, 4096), jnp.float32)}
    found = state_shardings(optimizer, params, NamedSharding(mesh, P("fsdp")))
    (of_codes, of_scales, of_columns) = found.inner_states["muon"].inner_state[0].mu["w"]
    assert of_codes.spec[0] == of_scales.spec[0] == "fsdp" and not any(of_columns.spec)


def test_specs_give_specs_of_the_mesh_in_force():
    params = {"w": jnp.ones((64, 128))}
    with jax.set_mesh(mesh_of_eight()):
        found = state_shardings(muon(0.1), params, P(None, "x"))
    assert found.inner_states["muon"].inner_state[0].mu == {"w": P(None, "x")}
    assert found.inner_states["muon"].inner_state[0].count == P()


def test_a_parameter_named_like_a_field_and_a_single_array():
    params = {"muon": jnp.ones((64, 64)), "mu": jnp.ones((64, 64))}
    specs = {"muon": P("x"), "mu": P(None, "x")}
    with jax.set_mesh(mesh_of_eight()):
        found = state_shardings(muon(0.1), params, specs)
        alone = state_shardings(optax.adam(0.1), jnp.ones((64, 64)), P("x"))
    assert found.inner_states["muon"].inner_state[0].mu == specs
    assert alone[0].mu == alone[0].nu == P("x") and alone[0].count == P()


def test_errors_say_what_to_pass():
    params = {"w": jnp.ones((64, 64))}
    mesh = mesh_of_eight()
    with pytest.raises(ValueError, match="need a mesh.*jax.set_mesh"):
        state_shardings(muon(0.1), params, P("x"))
    with pytest.raises(TypeError, match="optimizer must be an optax.GradientTransformation, got d"):
        state_shardings(params, muon(0.1), P("x"))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"parameter \['w'\] .*64.*: .*'y'"):
        state_shardings(muon(0.1), params, P("y"))
    with pytest.raises(ValueError, match="shardings must be a tree like the parameters'"):
        state_shardings(muon(0.1), params, {"v": NamedSharding(mesh, P())})


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return nn.Dense(192, kernel_init=kernel)(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules", helpers.mostly_nightly([[("embed", "x")], [("mlp", "x")]], [[("mlp", "x")]]), ids=str
)
@pytest.mark.parametrize(
    "name", helpers.mostly_nightly(["int8", "nanogpt", "muonh", "injected"], ["int8"])
)
def test_states_in_logical_boxes_are_made_where_their_boxes_say(name, rules):
    optimizer = {
        "int8": MUON(mu_dtype="int8"),
        "nanogpt": MUON(preset="nanogpt", mu_dtype="int8"),
        "muonh": MUON(preset="muonh", adamh=None, mu_dtype="int8"),
        "injected": optax.inject_hyperparams(muon)(0.1, **MUON.keywords, mu_dtype="int8"),
    }[name]
    mesh = mesh_of_eight()

    def init():
        variables = Layer().init(jax.random.key(0), jnp.ones((2, 96)))
        return variables, optimizer.init(variables)

    specs = nn.get_partition_spec(jax.eval_shape(init))
    shardings = spmd.logical_to_mesh_sharding(specs, mesh, [*rules, ("embed", None), ("mlp", None)])
    variables, state = jax.jit(init, out_shardings=shardings)()
    updates, after = jax.jit(optimizer.update)(variables, state, variables)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    plain = nn.unbox(variables)
    expected, _ = optimizer.update(plain, optimizer.init(plain), plain)
    for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 4096), (768, 3072)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("devices", [8, 64, 128])
def test_boxes_of_momenta_in_8_bits_fit_meshes_of_many_devices(shape, axis, devices):
    names = ("fsdp", None) if axis == 0 else (None, "fsdp")
    params = {"w": nn.Partitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)}
    state = jax.eval_shape(muon(0.1, mu_dtype="int8").init, params)
    specs = nn.get_partition_spec(state).inner_states["muon"].inner_state[0].mu["w"]
    mu = nn.unbox(state).inner_states["muon"].inner_state[0].mu["w"]
    assert specs.codes == P(*names)
    for spec, x in zip(specs, mu, strict=True):
        for entry, n in zip(spec, x.shape, strict=True):
            assert entry is None or n % devices == 0


@pytest.mark.slow
def test_nnx_s_momenta_in_8_bits_are_sharded_as_their_variables_say():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", None))
    with jax.set_mesh(mesh_of_eight()):

        @nnx.jit
        def make():
            model = nnx.Linear(256, 96, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))
            return model, nnx.Optimizer(model, MUON(mu_dtype="int8"), wrt=nnx.Param)

        model, optimizer = make()
        specs = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(optimizer)))
        found = {path[-1]: x.get_value() for path, x in specs if {"mu", "kernel"} <= {*path}}
        assert found["codes"] == P("x", None) and found["scales"] == P("x", None)
        assert found["columns"] == P(None, None)
        before = np.asarray(model.kernel[...])
        for _ in range(2):
            optimizer.update(model, nnx.state(model, nnx.Param))
        assert not np.allclose(model.kernel[...], before)
