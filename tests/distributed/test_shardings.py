"""What is stated of shardings, what types say, and what only the compiler knows."""

import contextlib
import functools
import re
import warnings

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks._times.sharded import collectives
from muon_jax import MuonDimensionNumbers, NewtonSchulz, by_role, muon, scale_by_muon
from muon_jax._matrices.views import MATRICES, Split

SPEC = PartitionSpec(None, "x")


def mesh_of(axis_type):
    return jax.make_mesh((8,), ("x",), axis_types=(axis_type,))


@helpers.slow
def test_only_jit_knows_the_mesh():
    grads = helpers.random_tree({"a": (16, 32), "b": (32, 64)}, 0)
    sharding = NamedSharding(mesh_of(AxisType.Auto), SPEC)
    expected = helpers.on_one_device(grads)
    for stated in (SPEC, sharding):
        optimizer = scale_by_muon(
            ns_steps=2, ns_coeffs=NewtonSchulz(dtype="float32"), shardings=stated
        )
        state = optimizer.init(grads)
        jitted = jax.jit(optimizer.update, in_shardings=(sharding, None))
        for arguments in (grads, jax.eval_shape(lambda: grads)):
            compiled = jitted.lower(arguments, state).compile()
            assert collectives(compiled) == {"all-to-all": 2}
        helpers.assert_close(compiled(jax.device_put(grads, sharding), state)[0], expected)
        helpers.assert_close(jax.jit(optimizer.update)(grads, state)[0], expected)  # on one device


@pytest.mark.parametrize(
    "told",
    helpers.mostly_nightly(["in_shardings", "out_shardings", "legacy"], ["in_shardings"]),
)
def test_shardings_of_which_only_the_compiler_knows(told):
    """The parameters are on no mesh, and nothing is stated."""
    grads = helpers.random_tree({"a": (16, 32), "b": (32, 64)}, 0)
    sharding = NamedSharding(mesh_of(AxisType.Auto), SPEC)
    optimizer = scale_by_muon(ns_steps=2, ns_coeffs=NewtonSchulz(dtype="float32"))
    state = optimizer.init(grads)
    keywords = {told: sharding} if told == "out_shardings" else {"in_shardings": (sharding, None)}
    update = jax.jit(lambda grads, state: optimizer.update(grads, state)[0], **keywords)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        with sharding.mesh if told == "legacy" else contextlib.nullcontext():
            compiled = update.lower(grads, state).compile()
    assert collectives(compiled) == {"all-to-all": 2}
    grads = jax.device_put(grads, compiled.input_shardings[0][0])
    helpers.assert_close(compiled(grads, state), helpers.on_one_device(grads))


def norm_of_update(x, eps):
    optimizer = scale_by_muon(ns_steps=1, ns_coeffs=NewtonSchulz(dtype="float32"), eps=eps)
    updates, _ = optimizer.update({"a": x, "b": x.T}, optimizer.init({"a": x, "b": x.T}))
    return jnp.linalg.norm(updates["a"]) + jnp.sum(updates["b"] ** 3)


@pytest.mark.parametrize(
    ("transform", "in_axes"),
    [
        (lambda f: f, (None, None)),
        pytest.param(jax.grad, (0, None), marks=helpers.slow),
        pytest.param(lambda f: f, (None, 0), marks=helpers.slow),
    ],
)
def test_a_program_of_one_device_does_not_change(monkeypatch, transform, in_axes):
    """Derivatives and `vmap` included, although the process has eight devices."""
    x, eps = helpers.random_tree({"x": (2, 4, 6), "eps": (2,)}, 0).values()
    arguments = [a if axis == 0 else a[0] for a, axis in zip((x, eps), in_axes, strict=True)]

    def program():
        function = transform(norm_of_update)
        if in_axes != (None, None):
            function = jax.vmap(function, in_axes)
        text = jax.jit(function).lower(*arguments).compile().as_text() or ""
        lines = text[text.index("\n\n%") :].splitlines()  # in an order that XLA chooses
        return sorted(re.sub(r", metadata=\{.*?\}|%[\w.-]+", "", line) for line in lines)

    found = program()
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert program() == found


@helpers.slow
def test_derivatives_on_automatic_axes():
    (x,) = helpers.random_tree({"x": (16, 32)}, 0).values()
    sharded = jax.device_put(x, NamedSharding(mesh_of(AxisType.Auto), SPEC))
    derivative = jax.jit(jax.grad(norm_of_update))
    np.testing.assert_allclose(derivative(sharded, 1e-8), derivative(x, 1e-8), atol=1e-5)


def test_what_is_stated_is_what_the_type_says():
    grads = jax.device_put(
        {"w": jnp.ones((16, 32))}, NamedSharding(mesh_of(AxisType.Explicit), SPEC)
    )
    for stated in (SPEC, PartitionSpec(None, ("x",))):
        helpers.compiled_update(grads, shardings=stated)
    with pytest.raises(
        ValueError, match=r"P\('x',\) of the parameter \['w'\], its type P\(None, 'x'"
    ):
        helpers.compiled_update(grads, shardings=PartitionSpec("x"))


@helpers.slow
def test_automatic_axes_of_an_explicit_mesh():
    grads = helpers.random_tree({"a": (16, 32), "b": (32, 64)}, 0)
    optimizer = scale_by_muon(ns_steps=2, ns_coeffs=NewtonSchulz(dtype="float32"))
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        sharded = jax.device_put(grads, SPEC)
        state = optimizer.init(sharded)
        update = jax.sharding.auto_axes(lambda g, s: optimizer.update(g, s)[0], out_sharding=SPEC)
        compiled = jax.jit(update).lower(sharded, state).compile()
        assert collectives(compiled) == {"all-to-all": 2}
        helpers.assert_close(compiled(sharded, state), helpers.on_one_device(grads))


def test_matrices_without_elements():
    mesh = mesh_of(AxisType.Explicit)
    shapes = {"rows": ((0, 16), SPEC), "columns": ((8, 0), PartitionSpec("x"))}
    shapes |= {"stack": ((0, 16, 16), SPEC), "full": ((16, 32), SPEC)}
    grads = {
        name: jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))
        for name, (shape, spec) in shapes.items()
    }
    compiled, updates = helpers.compiled_update(grads, weight_dimension_numbers=lambda _: MATRICES)
    assert collectives(compiled) == {"all-to-all": 2}
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, grads)
    full = {"full": grads["full"]}
    _, updates = helpers.compiled_update(full, weight_dimension_numbers=Split(0, (16, 0)))
    helpers.assert_close(updates, helpers.on_one_device(full))
    (group,) = helpers.exchanges(grads, muon_weight_dimension_numbers=lambda _: MATRICES).groups
    assert group.matrices == ((1, 16, 32),)


@helpers.slow
def test_in_a_shard_map_roles_are_those_of_whole_parameters():
    """A shard of the convolution looks depthwise, the others are too narrow or no multiples."""
    shapes = {
        "block_1": {"mlp": {"conv": {"kernel": (3, 3, 8, 16)}}},
        "attn": {"qkv": {"kernel": (16, 48)}},
        "ffn": {"gate": {"kernel": (16, 32)}},
        "norm": {"scale": (16,)},
    }
    params = jax.tree.map(
        lambda shape: jax.random.normal(jax.random.key(len(shape)), shape),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    specs = {
        "block_1": {"mlp": {"conv": {"kernel": PartitionSpec(None, None, "x")}}},
        "attn": {"qkv": {"kernel": PartitionSpec("x")}},
        "ffn": {"gate": {"kernel": SPEC}},
        "norm": {"scale": PartitionSpec()},
    }
    of_muon = functools.partial(
        muon, 1.0, ns_steps=2, ns_coeffs=NewtonSchulz(dtype="float32"), shardings=specs
    )

    def update(optimizer, params):
        return optimizer.update(params, optimizer.init(params), params)[0]

    for optimizer in (
        of_muon(muon_weight_dimension_numbers=by_role),
        of_muon(muon_weight_dimension_numbers=by_role(params)),
    ):
        run = jax.shard_map(
            functools.partial(update, optimizer),
            mesh=mesh_of(AxisType.Auto),
            in_specs=(specs,),
            out_specs=specs,
        )
        chex.assert_trees_all_close(jax.jit(run)(params), update(optimizer, params), atol=1e-5)


def test_in_a_shard_map_callables_see_whole_shapes():
    spec, seen = PartitionSpec("x"), []

    def views(tree):
        seen.append(jax.tree.map(np.shape, tree))
        return MuonDimensionNumbers()

    optimizer = scale_by_muon(weight_dimension_numbers=views, shardings=spec)
    run = jax.shard_map(
        lambda g: optimizer.update(g, optimizer.init(g))[0],
        mesh=mesh_of(AxisType.Auto),
        in_specs=spec,
        out_specs=spec,
    )
    jax.eval_shape(run, {"w": jnp.ones((16, 32))})
    assert seen and all(shapes == {"w": (16, 32)} for shapes in seen)
