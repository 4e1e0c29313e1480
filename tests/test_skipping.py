"""A gradient of None skips its parameter, as in torch: nothing of it changes."""

import functools

import chex
import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from muon_jax import Exchange, NewtonSchulz, by_role, muon, scale_by_muon
from muon_jax.contrib import (
    KeyHeads,
    adamuon,
    keep_param_norm,
    metrics,
    muonh,
    normuon,
    on_host,
    qk_clip,
    scale_by_adamuon,
    scale_by_normuon,
    scale_to_param_norm,
    with_metrics,
)

SHAPES = {"a": (12, 20), "b": (20, 12), "frozen": (12, 20), "bias": (7,), "scale": (5,)}
FROZEN = ("frozen", "scale")


def params_of(shapes=SHAPES, dtype=jnp.float32):
    return helpers.random_tree(shapes, 0, dtype)


def without(tree, names=FROZEN):
    return {name: None if name in names else x for name, x in tree.items()}


def only(tree, names=FROZEN):
    return {name: x for name, x in tree.items() if name not in names}


def moments_of(state, name):
    """What a state has of the parameter of this name, by path."""
    leaves = jax.tree.leaves_with_path(state)
    key = jax.tree_util.DictKey(name)
    return {jax.tree_util.keystr(path): x for path, x in leaves if key in path}


def counts_of(state):
    leaves = jax.tree.leaves_with_path(state)
    return [x for path, x in leaves if jax.tree_util.keystr(path).endswith(".count")]


MATRIX = optax.contrib.MuonDimensionNumbers()
MUONS = {
    "default": {},
    "decay": {"weight_decay": 0.1, "adam_weight_decay": 0.1},
    "l2": {"weight_decay": 0.1, "adam_weight_decay": 0.1, "weight_decay_form": "l2"},
    "independent": {"weight_decay": 0.1, "weight_decay_form": "independent"},
    "cautious independent": {
        "weight_decay": 0.1,
        "adam_weight_decay": 0.1,
        "weight_decay_form": "independent",
        "cautious_weight_decay": True,
    },
    "palm": {"weight_decay": 0.1, "adam_weight_decay": 0.1, "weight_decay_form": "palm"},
    "scaled palm": {"weight_decay": 0.1, "weight_decay_form": "scaled_palm"},
    "cautious": {"weight_decay": 0.1, "adam_weight_decay": 0.1, "cautious_weight_decay": True},
    "decay mask": {
        "weight_decay": 0.1,
        "weight_decay_mask": {name: name != "a" for name in SHAPES},
    },
    "fixed norms": {"adamh": None},
    "adamh": {
        "preset": "muonh",
        "adamh": "^(b|frozen)$",
        "muon_weight_dimension_numbers": {**dict.fromkeys(SHAPES), "a": MATRIX},
    },
    "normuon": {"normuon_b2": 0.9, "normuon_averaged": "shorter"},
    "adamuon": {"preset": "adamuon"},
    "adaptive": {"adaptive": True},
    "stochastic": {"mu_rounding": "stochastic", "mu_dtype": "bfloat16"},
    "heavy ball": {"preset": "keller"},
    "optax": {"preset": "optax", "weight_decay": 0.1, "adam_weight_decay": 0.1},
    "moonlight": {"preset": "moonlight"},
    "schedules": {
        "learning_rate": optax.linear_schedule(0.1, 0.01, 5),
        "weight_decay": lambda count: 0.1 / (1 + count),
    },
    "blocks": {"shardings": Exchange(block_period=2, block_gain=0.5)},
    "no groups": {"ns_coeffs": NewtonSchulz(max_group_bytes=0)},
    "by path": {"ns_coeffs": {"^a|frozen": "dion", ".*": "standard"}},
}


CASES = [*((name, True) for name in MUONS), ("decay", False), ("l2", False)]
QUICK = [(name, True) for name in ("l2", "normuon", "stochastic")]


@pytest.mark.parametrize(
    ("name", "jitted"),
    [case if case in QUICK else pytest.param(*case, marks=helpers.nightly) for case in CASES],
)
def test_a_skipped_parameter_stays_and_others_move_as_without_it(name, jitted):
    """First all parameters move, so that momenta are there; then some are skipped twice."""
    arguments = {"learning_rate": 0.1, "ns_steps": 2, **MUONS[name]}
    optimizer, params = helpers.any_muon(**arguments), params_of()
    smaller = helpers.any_muon(**{**arguments, **smaller_arguments(arguments)})
    update = jax.jit(optimizer.update) if jitted else optimizer.update
    of_smaller = jax.jit(smaller.update) if jitted else smaller.update
    state, state_of_smaller = optimizer.init(params), smaller.init(only(params))
    gradients = helpers.random_tree(SHAPES, 1)
    if name != "stochastic":  # random bits are by the place among the parameters of a step
        _, state = update(gradients, state, params)
        _, state_of_smaller = of_smaller(only(gradients), state_of_smaller, only(params))
    for seed in (2, 3):
        before = state
        gradients = helpers.random_tree(SHAPES, seed)
        updates, state = update(without(gradients), state, params)
        expected, state_of_smaller = of_smaller(only(gradients), state_of_smaller, only(params))
        chex.assert_trees_all_equal(only(updates), expected)
        for frozen in FROZEN:
            assert updates[frozen].shape == params[frozen].shape
            assert updates[frozen].dtype == params[frozen].dtype
            assert not np.any(updates[frozen])
            chex.assert_trees_all_equal(moments_of(state, frozen), moments_of(before, frozen))
            assert moments_of(state, frozen)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(params))
    counts = 2 if name == "stochastic" else 3
    assert counts_of(state) and all(count == counts for count in counts_of(state))


def smaller_arguments(arguments):
    """The arguments that name parameters, for a tree without the skipped ones."""
    named = ("weight_decay_mask", "muon_weight_dimension_numbers")
    return {key: only(arguments[key]) for key in named if isinstance(arguments.get(key), dict)}


@pytest.mark.parametrize("value", helpers.mostly_nightly([np.nan, np.inf], (), [np.inf]))
@pytest.mark.parametrize(
    "make",
    [
        lambda: muon(0.1, weight_decay=0.1),
        lambda: normuon(0.1),
        lambda: adamuon(0.1),
        lambda: muonh(0.1, adamh=None),
        scale_by_muon,
    ],
)
def test_momenta_that_are_not_finite_do_not_reach_a_skipped_parameter(make, value):
    params = {name: x for name, x in params_of().items() if x.ndim == 2}
    optimizer = make()
    _, state = optimizer.update(
        params | {"frozen": params["frozen"] * value}, optimizer.init(params), params
    )
    updates, after = optimizer.update(without(params), state, params)
    assert not np.any(updates["frozen"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))
    chex.assert_trees_all_equal(moments_of(after, "frozen"), moments_of(state, "frozen"))


@pytest.mark.slow
@pytest.mark.parametrize("with_params", helpers.mostly_nightly([True, False], [False]))
def test_momenta_in_8_bits_stay_bit_for_bit(with_params):
    shapes = {"a": (64, 128), "frozen": (64, 128), "small": (8, 16)}
    params = helpers.random_tree(shapes, 0, jnp.bfloat16)
    optimizer = scale_by_muon(mu_dtype="int8", ns_steps=2)
    _, state = optimizer.update(params, optimizer.init(params), params)
    given = params if with_params else None
    updates, after = jax.jit(optimizer.update)(without(params), state, given)
    assert not np.any(updates["frozen"]) and np.any(updates["a"])
    assert updates["frozen"].dtype == updates["a"].dtype == jnp.float32
    chex.assert_trees_all_equal(after.mu["frozen"], state.mu["frozen"])
    assert np.any(after.mu["a"].codes != state.mu["a"].codes)


@helpers.slow
def test_all_skipped():
    """Nothing changes but counts."""
    params = params_of()
    for optimizer in (
        normuon(0.1, weight_decay=0.1, normuon_b2=0.9, adam_weight_decay=0.1),
        adamuon(0.1),
        muonh(0.1, adamh=None),
        with_metrics(muon(0.1, mu_dtype="int8")),
        optax.inject_hyperparams(muon)(0.1, weight_decay=0.1),
    ):
        _, state = optimizer.update(params, optimizer.init(params), params)
        updates, after = jax.jit(optimizer.update)(
            jax.tree.map(lambda _: None, params), state, params
        )
        chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
        for name in params:
            chex.assert_trees_all_equal(moments_of(after, name), moments_of(state, name))


def test_a_momentum_on_the_host_stays_there():
    params = helpers.random_tree({"a": (256, 256), "frozen": (256, 256), "bias": (2**16,)}, 0)
    optimizer = muon(0.1, ns_steps=1, weight_decay=0.1, mu_dtype=on_host())
    update = jax.jit(optimizer.update)
    _, state = optimizer.update(params, optimizer.init(params), params)
    updates, after = update(without(params, ("frozen", "bias")), state, params)
    for name in ("frozen", "bias"):
        assert not np.any(updates[name])
        moments = moments_of(after, name)
        chex.assert_trees_all_equal(moments, moments_of(state, name))
        assert all(x.sharding.memory_kind == "pinned_host" for x in moments.values())
    assert np.any(updates["a"])


@pytest.mark.slow
def test_members_of_an_ensemble_skip_together():
    params = {name: jnp.stack([x, 2 * x]) for name, x in params_of().items()}
    optimizer = muon(0.1, ns_steps=2, weight_decay=0.1)
    state = jax.vmap(optimizer.init)(params)
    updates, after = jax.vmap(optimizer.update)(without(params), state, params)
    for frozen in FROZEN:
        assert updates[frozen].shape == params[frozen].shape and not np.any(updates[frozen])
    one = jax.tree.map(lambda x: x[1], params)
    expected, _ = optimizer.update(without(one), optimizer.init(one), one)
    for name, update in expected.items():
        np.testing.assert_allclose(updates[name][1], update, atol=1e-5)


@pytest.mark.slow
def test_none_stands_for_a_subtree():
    params = {"trunk": {"x": jnp.ones((4, 6)), "y": {"z": jnp.ones(3)}}, "head": jnp.eye(4, 6)}
    for optimizer in (muon(0.1, weight_decay=0.1), with_metrics(muon(0.1, weight_decay=0.1))):
        _, state = optimizer.update(params, optimizer.init(params), params)
        updates, after = optimizer.update({"trunk": None, "head": params["head"]}, state, params)
        zeros = jax.tree.map(jnp.zeros_like, params["trunk"])
        chex.assert_trees_all_equal(updates["trunk"], zeros)
        assert np.any(updates["head"])
        chex.assert_trees_all_equal(moments_of(after, "trunk"), moments_of(state, "trunk"))


def test_without_parameters_shapes_are_those_of_the_momenta():
    params = {name: x for name, x in params_of().items() if x.ndim == 2}
    optimizer = scale_by_muon()
    state = optimizer.init(params)
    updates, _ = optimizer.update(without(params), state)
    expected, _ = optimizer.update(without(params), state, params)
    chex.assert_trees_all_equal(updates, expected)
    for optimizer in (muon(0.1), scale_by_normuon(), qk_clip(1.0, {"a": KeyHeads(((4, 1),))})):
        with pytest.raises(ValueError, match="needs the param"):
            optimizer.update(without(params), optimizer.init(params))


def test_skipped_matrices_are_not_orthogonalized():
    params = {"a": jnp.ones((12, 20)), "frozen": jnp.ones((13, 40))}
    optimizer = muon(0.1)
    state = optimizer.init(params)
    program = str(jax.make_jaxpr(optimizer.update)(without(params), state, params))
    assert "dot_general" in program and "13,13]" not in program
    none = str(jax.make_jaxpr(optimizer.update)({"a": None, "frozen": None}, state, params))
    assert "dot_general" not in none


def test_moments_and_norms_alone():
    params = {name: x for name, x in params_of().items() if x.ndim == 2}
    transforms = (scale_by_normuon(), scale_by_adamuon(), scale_to_param_norm(), keep_param_norm())
    for transform in transforms:
        _, state = transform.update(params, transform.init(params), params)
        updates, after = transform.update(without(params), state, params)
        expected, _ = transform.update(only(params), state_without(state), only(params))
        chex.assert_trees_all_equal(only(updates), expected)
        assert not np.any(updates["frozen"])
        chex.assert_trees_all_equal(moments_of(after, "frozen"), moments_of(state, "frozen"))


def state_without(state):
    return state._replace(nu=only(state.nu)) if hasattr(state, "nu") else state


def test_qk_clip_leaves_skipped_heads():
    params = {"a": {"key": jnp.ones((6, 8))}, "frozen": {"key": jnp.ones((6, 8))}}
    clip = qk_clip(1.0, {"^a/key": KeyHeads(((4, 1),)), "^frozen/key": KeyHeads(((4, 1),))})
    logits = {name: jnp.full(2, 4.0) for name in params}
    updates, _ = clip.update(
        {"a": {"key": jnp.zeros((6, 8))}, "frozen": None},
        clip.init(params),
        params,
        max_logits=logits,
    )
    np.testing.assert_allclose(updates["a"]["key"], np.full((6, 8), -0.75))
    assert not np.any(updates["frozen"]["key"])


@pytest.mark.slow
def test_metrics_are_those_of_the_matrices_that_move():
    params = {name: x for name, x in params_of().items() if x.ndim == 2} | {"other": jnp.eye(6)}
    optimizer = with_metrics(scale_by_muon())
    state = optimizer.init(params)
    _, after = optimizer.update(without(params, ("frozen", "other")), state, params)
    moving = only(params, ("frozen", "other"))
    _, expected = optimizer.update(moving, optimizer.init(moving), moving)
    found = metrics(after)
    assert {*found} == {*metrics(state)}
    for name, value in metrics(expected).items():
        assert found[name] == value
    assert all(found[name] == 0 for name in found if name.startswith("6x6"))


def test_by_role_sees_the_whole_tree():
    """The views of a layer depend on what lies beside it, skipped or not."""
    layer = {"attention": {name: {"kernel": (16, 16)} for name in ("query", "key", "value", "out")}}
    layer["mlp"] = {"up": {"kernel": (16, 64)}, "down": {"kernel": (64, 16)}}
    shapes = {"embed": {"embedding": (40, 16)}, "layers_0": layer, "head": {"kernel": (16, 40)}}
    params = jax.tree.map(
        lambda shape: jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    optimizer = muon(0.1, weight_decay=0.1, muon_weight_dimension_numbers=by_role)
    _, state = optimizer.update(params, optimizer.init(params), params)
    expected, _ = optimizer.update(params, state, params)
    gradients = {**params, "embed": None, "head": {"kernel": None}}
    gradients["layers_0"] = {"attention": params["layers_0"]["attention"], "mlp": None}
    updates, _ = optimizer.update(gradients, state, params)
    chex.assert_trees_all_equal(updates["layers_0"]["attention"], expected["layers_0"]["attention"])
    for skipped in (updates["embed"], updates["head"], updates["layers_0"]["mlp"]):
        assert not any(map(np.any, jax.tree.leaves(skipped)))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["multi_transform", "masked", "chain"])
def test_within_wrappers_of_optax(wrap):
    params = params_of()
    inner = muon(0.1, weight_decay=0.1)
    optimizer = {
        "multi_transform": lambda: optax.multi_transform(
            {"m": inner, "zero": optax.set_to_zero()},
            {name: "zero" if name == "b" else "m" for name in params},
        ),
        "masked": lambda: optax.masked(inner, {name: name != "b" for name in params}),
        "chain": lambda: optax.chain(optax.clip(1.0), inner),
    }[wrap]()
    state = optimizer.init(params)
    _, state = optimizer.update(params, state, params)
    updates, after = optimizer.update(without(params), state, params)
    for frozen in FROZEN:
        assert not np.any(updates[frozen])
        chex.assert_trees_all_equal(moments_of(after, frozen), moments_of(state, frozen))
    assert np.any(updates["a"])


@pytest.mark.slow
def test_train_state_of_flax():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("a", "b"))
            return nn.Dense(4)(nn.Dense(6, kernel_init=kernel)(x))

    model = Model()
    params = model.init(jax.random.key(0), jnp.ones((2, 5)))["params"]
    optimizer = normuon(0.1, weight_decay=0.1, normuon_b2=0.9, adam_weight_decay=0.1)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    state = state.apply_gradients(grads=params)
    after = state.apply_gradients(grads={**params, "Dense_0": None})
    chex.assert_trees_all_equal(after.params["Dense_0"], state.params["Dense_0"])
    chex.assert_trees_all_equal(
        moments_of(after.opt_state, "Dense_0"), moments_of(state.opt_state, "Dense_0")
    )
    moved = after.params["Dense_1"]["kernel"].value != state.params["Dense_1"]["kernel"].value
    assert np.any(moved)
    gradients = jax.tree.map(jnp.ones_like, params)
    boxed = gradients["Dense_1"]["kernel"]
    gradients["Dense_1"]["kernel"] = boxed.replace(value=None)
    after = state.apply_gradients(grads=gradients)
    layer, before = after.params["Dense_1"], state.params["Dense_1"]
    chex.assert_trees_all_equal(layer["kernel"], before["kernel"])
    assert np.any(layer["bias"] != before["bias"])
    moments = [moments_of(x.opt_state, "kernel") for x in (after, state)]
    names = [name for name in moments[0] if "Dense_1" in name]
    assert names
    for name in names:
        np.testing.assert_array_equal(moments[0][name], moments[1][name])


@pytest.mark.slow
def test_optimizer_of_nnx():
    model = nnx.Sequential(
        nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1))
    )
    optimizer = nnx.Optimizer(model, muon(0.1, weight_decay=0.1, mu_dtype="int8"), wrt=nnx.Param)
    gradients = nnx.state(model, nnx.Param)
    optimizer.update(model, gradients)
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    skipping = jax.tree.map(lambda x: x, nnx.state(model, nnx.Param))
    skipping["layers"][0]["kernel"] = nnx.Param(None)
    optimizer.update(model, skipping)
    after = nnx.state(model, nnx.Param)
    first = after["layers"][0]["kernel"].get_value()
    np.testing.assert_array_equal(first, before["layers"][0]["kernel"].get_value())
    assert np.any(
        after["layers"][1]["kernel"].get_value() != before["layers"][1]["kernel"].get_value()
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, "shard_map"])
def test_sharded(kind):
    mesh_kind = AxisType.Explicit if kind == AxisType.Explicit else AxisType.Auto
    mesh = jax.make_mesh((4,), ("x",), (mesh_kind,), devices=jax.devices()[:4])
    specs = {"a": P("x"), "frozen": P(None, "x"), "bias": P(), "b": P("x", None), "scale": P()}
    host = helpers.random_tree({**SHAPES, "frozen": (12, 20)}, 0)
    params = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in host.items()}
    arguments = {"weight_decay": 0.1, "normuon_b2": 0.9, "adam_weight_decay": 0.1, "ns_steps": 2}
    alone = normuon(0.1, **arguments)
    reference = alone.init(host)
    expected, _ = alone.update(without(host), reference, host)
    if kind == "shard_map":
        optimizer = normuon(0.1, **arguments, shardings=specs)
        state = alone.init(host)
        of_state = jax.tree.map_with_path(functools.partial(spec_in_state, specs), state)

        def in_shard_map(gradients, state, params):
            gradients = {**dict.fromkeys(SHAPES), **gradients}
            return optimizer.update(gradients, state, params)

        run = jax.shard_map(
            in_shard_map,
            mesh=mesh,
            in_specs=(only(specs), of_state, specs),
            out_specs=(specs, of_state),
        )
        updates, _ = jax.jit(run)(only(params), state, params)
    else:
        optimizer = normuon(0.1, **arguments)
        state = optimizer.init(params)
        updates, after = jax.jit(optimizer.update)(without(params), state, params)
        chex.assert_trees_all_equal(moments_of(after, "frozen"), moments_of(state, "frozen"))
    for frozen in FROZEN:
        assert not np.any(updates[frozen])
    for name, update in expected.items():
        np.testing.assert_allclose(updates[name], update, atol=1e-5, err_msg=name)


def spec_in_state(specs, path, x):
    """The spec of an array of the state; second moments of NorMuon are (1, fan_out)."""
    names = [key.key for key in path if getattr(key, "key", None) in specs]
    spec = specs[names[0]] if names else P()
    return P(None, *spec[1:]) if x.ndim == 2 and x.shape[0] == 1 else spec


def test_patterns_may_match_skipped_parameters_alone():
    params = params_of()
    for arguments in (
        {"ns_coeffs": {"frozen": "dion", ".*": "standard"}},
        {"ns_coeffs": lambda path, shape: "dion" if path == "frozen" else "standard"},
        {
            "adamh": "frozen",
            "muon_weight_dimension_numbers": {**dict.fromkeys(SHAPES), "a": MATRIX},
        },
    ):
        optimizer = helpers.any_muon(0.1, **arguments)
        _, state = optimizer.update(params, optimizer.init(params), params)
        updates, after = optimizer.update(without(params), state, params)
        assert not np.any(updates["frozen"]) and np.any(updates["a"])
        chex.assert_trees_all_equal(moments_of(after, "frozen"), moments_of(state, "frozen"))


def test_a_callable_of_views_of_one_transformation_sees_the_whole_tree():
    def views(params):
        assert len(jax.tree.leaves(params)) == 3
        return jax.tree.map(lambda _: MATRIX, params)

    params = {name: x for name, x in params_of().items() if x.ndim == 2}
    for make in (scale_by_muon, scale_by_normuon, scale_by_adamuon, scale_to_param_norm):
        transform = make(weight_dimension_numbers=views)
        updates, _ = transform.update(without(params), transform.init(params), params)
        assert not np.any(updates["frozen"])


def test_an_optimizer_takes_trees_in_turn_and_calls_views_once_for_each():
    seen = []

    def views(params):
        seen.append({*params})
        return jax.tree.map(lambda x: MATRIX if x.ndim == 2 else None, params)

    params = params_of()
    fewer = {name: params[name] for name in ("a", "bias")}
    optimizer = normuon(0.1, muon_weight_dimension_numbers=views)
    states = [optimizer.init(tree) for tree in (params, fewer)]
    found = [
        optimizer.update(tree, state, tree)[0]
        for tree, state in zip((params, fewer), states, strict=True)
    ]
    assert seen == [{*params}, {*fewer}] * 2
    chex.assert_trees_all_equal(found[1], {name: found[0][name] for name in fewer})


def test_a_wrong_tree_with_none_is_named():
    params = params_of()
    optimizer = muon(0.1)
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"tree and the shapes of the parameters: at \['a'\]"):
        optimizer.update({**without(params), "a": jnp.ones((3, 3))}, state, params)
    direction = scale_by_muon()
    of_others = direction.init({"a": params["a"], "frozen": params["frozen"].T})
    gradients = {"a": params["a"], "frozen": None}
    with pytest.raises(ValueError, match=r"shapes of the state: at \['b'\]"):
        direction.update({**gradients, "b": params["b"]}, of_others)
    with pytest.raises(TypeError, match="inner_states"):
        optimizer.update(without(params), params, params)
