"""What is not clear raises, says what was seen, and has a rule that mends it."""

import functools
import pickle
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax.experimental import pallas as pl
from optax.contrib import MuonDimensionNumbers
from use_models import IN_OUT, conv, f32, heads, i32, norm

import muon_jax
from muon_jax import Split, Unfold, by_role, by_use, muon

X = f32(4, 16)
MLP = {"a": f32(16, 32), "w": f32(32, 32), "out": f32(32, 4)}


def mlp(p, x, product=jnp.matmul):
    return jnp.tanh(product(jnp.tanh(x @ p["a"]), p["w"])) @ p["out"]


def raises_and_is_mended(fn, params, *inputs, path, says, rule=None):
    """The error names the parameter, and the rule that it shows decides it."""
    with pytest.raises(ValueError, match=says) as caught:
        by_use(fn, params, *inputs)
    message = str(caught.value)
    assert f"by_use cannot decide on {path}" in message
    code = message.split("pass rules=")[1].split(", with None")[0]
    rules = eval(code, {"MuonDimensionNumbers": MuonDimensionNumbers})
    assert rules == {rule or rf"^{path}$": None}
    routes = by_use(fn, params, *inputs, rules=rules)
    assert (routes[path].role, routes[path].view) == ("rule", None)
    mended = by_use(fn, params, *inputs, rules=dict.fromkeys(rules, IN_OUT))
    assert mended[path].view == IN_OUT
    assert {r.path for r in mended.parameters if r.role == "rule"} == {path}


def test_used_in_two_ways():
    def fn(p, t):
        x = p["emb"][t]
        one = jnp.einsum("btd,hdk->bthk", x, p["w"]).sum((2, 3))
        return one + jnp.einsum("bth,hdk->btdk", x[..., :8], p["w"]).sum((2, 3))

    raises_and_is_mended(
        fn,
        {"emb": f32(50, 32), "w": f32(8, 32, 4)},
        i32(2, 16),
        path="w",
        says="one product contracts axis 1, keeps axes 0 and 2, another contracts axis 0",
    )


def in_pallas(x, w):
    def kernel(x, w, o):
        o[...] = x[...] @ w[...]

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=shape)(x, w)


def in_callback(x, w):
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return jax.pure_callback(np.matmul, shape, x, w)


def in_ffi(x, w):
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return jax.ffi.ffi_call("a_product", shape)(x, w)


def partitioned(x, w):
    from jax.experimental.custom_partitioning import custom_partitioning

    product = custom_partitioning(lambda x, w: jnp.matmul(x, w))
    product.def_partition(
        partition=lambda *_: None,
        infer_sharding_from_operands=lambda *_: None,
        sharding_rule="b i, i o -> b o",
    )
    return product(x, w)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        (in_pallas, "pallas_call"),
        (in_callback, "pure_callback"),
        (in_ffi, "ffi_call"),
        (partitioned, "custom_partitioning"),
        (lambda x, w: x @ jnp.cumsum(w, 0), "cumsum"),
        (lambda x, w: x @ jnp.sort(w, 0), "sort"),
        (lambda x, w: x @ jnp.linalg.qr(w)[0], "householder_product|geqrf|qr"),
        (lambda x, w: x @ jax.lax.linalg.cholesky(w), "cholesky"),
        (lambda x, w: x @ w.reshape(48, -1)[:32, :20].reshape(32, 20), "reshape"),
    ],
)
def test_opaque(product, name):
    params = {"a": f32(16, 32), "w": f32(32, 32), "out": f32(32, 4)}
    if name == "reshape":
        params = {"a": f32(16, 32), "w": f32(32, 30), "out": f32(20, 4)}
    raises_and_is_mended(
        lambda p, x: mlp(p, x, product),
        params,
        X,
        path="w",
        says=rf"({name}).* takes it, and does not show what for",
    )


def test_activations_may_go_through_opaque_calls():
    def fn(p, x):
        h = jnp.tanh(x @ p["a"])
        h = in_pallas(h, (h.T @ h) @ jnp.ones((32, 32)))
        return jnp.tanh(h @ p["w"]) @ p["out"]

    assert by_use(fn, MLP, X)["w"].view == IN_OUT
    assert by_use(fn, MLP, X)["a"].view == IN_OUT


def modulated_convolution(p, z):
    w = p["w"][None] * (z @ p["style"])[:, None, None, :, None]
    w = w * jax.lax.rsqrt((w**2).sum((1, 2, 3), keepdims=True) + 1e-6)
    x = jnp.ones((1, 8, 8, 64))
    y = conv(x, w.transpose(1, 2, 3, 0, 4).reshape(3, 3, 16, 64), groups=4)
    return y.reshape(8, 8, 4, 16) @ p["rgb"]


def modulated_product(p, z):
    w = p["w"] * (z @ p["style"])[:, :, None]
    return jnp.tanh(jnp.einsum("bi,bio->bo", z @ p["style"], w)) @ p["rgb"]


def product_by_hand(p, z):
    h = jnp.tanh(z @ p["style"])
    return jnp.tanh((h[:, :, None] * p["w"]).sum(1)) @ p["rgb"]


def product_by_hand_with_vmap(p, z):
    h = jnp.tanh(z @ p["style"])
    return jnp.tanh(jax.vmap(lambda h: (h[:, None] * p["w"]).sum(0))(h)) @ p["rgb"]


def masked_by_an_input(p, z):
    h = jnp.tanh(z @ p["style"])
    return jnp.tanh(h @ (p["w"] * (z.T @ z > 0))) @ p["rgb"]


def selected_by_data(p, z):
    h = jnp.tanh(z @ p["style"])
    return jnp.tanh(h @ jnp.where(z[:1].T > 0, p["w"], 0.0)) @ p["rgb"]


def averaged_with_an_input(p, z):
    h = jnp.tanh(z @ p["style"])
    return jnp.tanh(h @ (0.9 * (z.T @ z) + 0.1 * p["w"])) @ p["rgb"]


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (masked_by_an_input, (16, 16)),
        (selected_by_data, (16, 16)),
        (averaged_with_an_input, (16, 16)),
        (modulated_convolution, (3, 3, 16, 16)),
        (modulated_product, (16, 16)),
        (product_by_hand, (16, 16)),
        (product_by_hand_with_vmap, (16, 16)),
    ],
)
def test_modulated_weights(fn, shape):
    params = {"style": f32(16, 16), "w": f32(*shape), "rgb": f32(16, 3)}
    raises_and_is_mended(
        fn, params, X, path="w", says="data change it, entry by entry, before a product takes it"
    )


def test_scales_of_heads_are_no_modulated_weights():
    def fn(p, x):
        h = heads(x @ p["a"], 4)
        a = jax.nn.softmax((h * p["scale"]).sum(-1))
        return (norm(h * p["scale"]) * a[..., None]).reshape(4, 32) @ p["out"]

    params = {"a": f32(16, 32), "scale": f32(4, 8), "out": f32(32, 4)}
    assert by_use(fn, params, X)["scale"].role == "vector"


def actor_critic(p, x):
    h = jnp.tanh(jnp.tanh(x @ p["actor"]["l0"]) @ p["actor"]["l1"])
    action = jnp.tanh(h @ p["actor"]["l2"])
    q = jnp.tanh(jnp.concatenate([x, action], -1) @ p["critic"]["l0"]) @ p["critic"]["l1"]
    return -q.mean()


ACTOR_CRITIC = {
    "actor": {"l0": f32(16, 32), "l1": f32(32, 32), "l2": f32(32, 6)},
    "critic": {"l0": f32(22, 32), "l1": f32(32, 1)},
}


def test_an_actor_that_feeds_a_critic():
    raises_and_is_mended(
        actor_critic,
        ACTOR_CRITIC,
        X,
        path="actor/l2",
        says="feed critic: .* pass by_use the forward pass of each network by itself",
    )


def forces(p, x):
    return jax.grad(lambda x: mlp(p, x).sum())(x)


def laplacians(p, x):
    return jnp.trace(jax.hessian(lambda x: mlp(p, x[None]).sum())(x[0]))


def decoded(p, x):
    """The same as h @ w.T, in whose place it stands."""
    h = jnp.tanh(x @ p["a"])
    (y,) = jax.linear_transpose(lambda y: y @ p["w"].T, f32(4, 32))(h)
    return jnp.tanh(y) @ p["out"]


@pytest.mark.parametrize(
    ("fn", "unclear"),
    [(forces, {"w", "out"}), (laplacians, {"w", "out"}), (decoded, {"w"})],
)
def test_derivatives_alone(fn, unclear):
    """What is differentiated is no output, so nothing shows what takes its last layers."""
    with pytest.raises(ValueError, match="pass by_use the forward pass that is diff") as caught:
        by_use(fn, MLP, X)
    assert {path for path in MLP if f"{path} of shape" in str(caught.value)} == unclear


def test_a_head_of_one_output_in_a_derivative_alone():
    params = {**MLP, "out": f32(32, 1)}
    with pytest.raises(ValueError, match=r"decide on w of shape .*forward pass that is diff"):
        by_use(forces, params, X)
    shared = {**params, "classes": f32(32, 4)}

    def forces_and_classes(p, x):
        h = jnp.tanh(jnp.tanh(x @ p["a"]) @ p["w"])
        return forces(p, x), h @ p["classes"]

    routes = by_use(forces_and_classes, shared, X)
    assert [routes[path].role for path in shared] == ["input", "hidden", "vector", "output"]


def test_an_inner_loss_whose_value_nothing_uses():
    def outer(p, x, y):
        inner = jax.grad(lambda own: p["scale"] * jnp.mean((mlp(own, x) - y) ** 2))
        return mlp(jax.tree.map(jnp.subtract, p, inner(p)), x)

    params = {**MLP, "scale": f32()}
    routes = by_use(outer, params, X, f32(4, 4))
    assert [routes[path].role for path in params] == ["input", "hidden", "output", "vector"]


def test_derivatives_beside_the_outputs():
    def energies_and_forces(p, x):
        return jax.value_and_grad(lambda x: mlp(p, x).sum())(x)

    def in_forward_mode(p, x):
        return jax.jacfwd(lambda x: mlp(p, x))(x)

    def in_a_scope_of_that_name(p, x):
        with jax.named_scope("transpose(x)"):
            return mlp(p, x)

    for fn in (energies_and_forces, in_forward_mode, in_a_scope_of_that_name):
        routes = by_use(fn, MLP, X)
        assert [routes[path].role for path in MLP] == ["input", "hidden", "output"]


def test_networks_by_themselves_need_no_rule():
    def actor(p, x):
        return jnp.tanh(jnp.tanh(x @ p["l0"]) @ p["l1"]) @ p["l2"]

    routes = by_use(actor, ACTOR_CRITIC["actor"], X)
    assert [r.role for r in routes.parameters] == ["input", "hidden", "output"]


def falcon(y):
    y = heads(y, 6)
    return y[:, :-2], y[:, np.array([-2])], y[:, np.array([-1])]


def taken(y):
    y = y.reshape(4, 3, 2, 8)
    return (jnp.take(y, i, 1) for i in range(3))


def dynamic(y):
    return (heads(jax.lax.dynamic_slice_in_dim(y, jnp.int32(16 * i), 16, 1), 2) for i in range(3))


@pytest.mark.parametrize("parts", [falcon, taken, dynamic])
def test_parts_that_indices_hide(parts):
    """Which outputs are q, k and v is in the values of arrays: neither one matrix nor a guess."""

    def fn(p, x):
        q, k, v = parts(jnp.tanh(x @ p["a"]) @ p["qkv"])
        return (jnp.einsum("bhd,bkd->bhk", q, k) @ v).reshape(4, -1)[:, :16] @ p["out"]

    params = {"a": f32(16, 32), "qkv": f32(32, 48), "out": f32(16, 4)}
    raises_and_is_mended(fn, params, X, path="qkv", says="relayout such as indexing by an array")


def test_a_rule_that_decides_nothing():
    with pytest.raises(ValueError, match=r"\['nothing'\] of rules match none of the 3"):
        by_use(mlp, MLP, X, rules={"nothing": None})
    with pytest.raises(ValueError, match=r"rules\['\^w'\] never decides: 'w\$' before it"):
        by_use(mlp, MLP, X, rules={"w$": None, "^w": IN_OUT})


def test_leaves_that_are_no_arrays():
    with pytest.raises(TypeError):
        by_use(mlp, {**MLP, "name": "mlp"}, X)
    with pytest.raises(TypeError):
        by_use(mlp, MLP, X, rules=["w"])


MODULE = eqx.nn.MLP(16, 4, 32, 2, key=jax.random.key(0))
PARTITION = r"params, static = eqx.partition\(.*eqx.combine\(params, static\)"
BIND = r"bind it to fn, as in by_use\(functools.partial\(fn, "
VIEWS = "muon_weight_dimension_numbers"


class Stateful(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.layer(x))


GRAPH, OF_NNX, REST = nnx.split(Stateful(), nnx.Param, ...)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: by_use(mlp, None, X), r"got None: call by_use\(fn, params, \*inputs\)"),
        (lambda: by_use(None, MLP, X), r"got None: call by_use\(fn, params, \*inputs\)"),
        (lambda: by_use(MLP, mlp, X), r"got a dict: call by_use\(fn, params, \*inputs\)"),
        (lambda: by_use(lambda m, x: m(x[0]), MODULE, X), rf"\.activation must .* {PARTITION}"),
        (
            lambda: by_use(lambda m, x: m(x[0]), eqx.filter(MODULE, eqx.is_array), X),
            rf"by_use: params has None where a module of Equinox has functions: {PARTITION}",
        ),
        (
            lambda: by_use(lambda m, x: m(x), Stateful(), X),
            r"call by_use.* nnx\.split\(model, nnx\.Param, .* rest as an input.* nnx\.merge\(",
        ),
        (
            lambda: by_use(lambda p, x, _: mlp(p, x), MLP, X, "train"),
            rf"inputs\[1\] must be an array or the shape of one, got 'train': {BIND}",
        ),
        (
            lambda: by_use(lambda p, x, f: f["f"](mlp(p, x)), MLP, X, {"f": jnp.tanh}),
            rf"inputs\[1\]\['f'\] must be an array or the shape of one, got .*: {BIND}",
        ),
        (
            lambda: by_use(lambda p, x, train: mlp(p, x) if train else x, MLP, X, True),
            rf"fn needs the value of inputs\[1\], got True, .*: {BIND}",
        ),
        (
            lambda: by_use(lambda p, x, n: mlp(p, x).reshape(n, -1), MLP, X, 2),
            rf"fn needs the value of inputs\[1\], got 2, .*: {BIND}",
        ),
        (
            lambda: by_use(lambda p, x: (mlp(p, x), "a"), MLP, X),
            r"fn must return arrays alone, got 'a' at \[1\]: return the loss or the outputs",
        ),
        (lambda: by_use(mlp, MLP, x=X), r"no argument 'x': pass arrays by position, as in by_use"),
        (lambda: by_use(mlp, MLP, X, rule={}), "no argument 'rule': did you mean 'rules'"),
        (
            lambda: by_use(mlp, MLP, X, layout="in_out"),
            "'layout': leave out layout, which the model",
        ),
        (lambda: muon(1e-3, by_use(mlp, MLP, X)), f"what by_use returns: pass {VIEWS}=routes by"),
        (lambda: muon(1e-3, by_use), rf"by_use itself: pass {VIEWS}=by_use\(loss, params, batch\)"),
        (
            lambda: muon(1e-3, muon_weight_dimension_numbers=by_use),
            rf"by_use itself: pass {VIEWS}=by_use\(loss, params, batch\)$",
        ),
        (
            lambda: muon(1e-3, mask={"w": True}),
            r"weight_decay_mask=\.\.\.; .* matrices alone.* chain optax.add_decayed_weights\(-",
        ),
    ],
)
def test_calls_that_are_mended_in_words(call, says):
    with pytest.raises(TypeError, match=says):
        call()


def test_flags_that_need_no_value_are_inputs():
    routes = by_use(lambda p, x, scale, on: mlp(p, x) * scale * on, MLP, X, 2, True)
    assert routes["w"].view == IN_OUT


def test_errors_of_data_stay_those_of_jax():
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"inputs\[0\]"):
        by_use(lambda p, x: mlp(p, x) if x.sum() > 0 else x, MLP, X)


def test_state_of_nnx_must_be_an_input():
    with pytest.raises(TraceContextError, match=r"by_use: .* must be an input: .* nnx\.merge\("):
        by_use(lambda p, x: nnx.merge(GRAPH, p, REST)(x), OF_NNX, X)
    routes = by_use(lambda p, rest, x: nnx.merge(GRAPH, p, rest)(x), OF_NNX, REST, X)
    assert routes["layer/kernel"].role == "output"


@pytest.mark.parametrize("returned", [None, (), {"aux": None}])
def test_a_function_without_outputs(returned):
    with pytest.raises(ValueError, match=r"fn must return .* of params, got .*: return the loss"):
        by_use(lambda p, x: returned, MLP, X)


def test_paths_that_are_equal():
    params = {"a/b": f32(16, 32), "a": {"b": f32(32, 7)}}
    with pytest.raises(ValueError, match="two parameters have the path 'a/b', .*: rename one"):
        by_use(lambda p, x: jnp.tanh(x @ p["a/b"]) @ p["a"]["b"], params, X)


def test_no_parameters():
    routes = by_use(lambda p, x: x, {}, X)
    assert routes.parameters == () and routes({}) == {}
    assert str(routes).endswith("by_role(rules={})")
    with pytest.raises(ValueError, match=r"\['w'\] of rules match none of the 0 parameters"):
        by_use(lambda p, x: x, {}, X, rules={"w": None})


@pytest.mark.parametrize("view", ["muon", True, (0, 1), {"w": None}])
def test_rules_that_are_no_views(view):
    says = rf"rules\['w'\] must be .* or None, got {re.escape(repr(view))}: pass MuonDimension"
    for call in (lambda r: by_use(mlp, MLP, X, rules=r), lambda r: by_role(rules=r)):
        with pytest.raises(ValueError, match=says):
            call({"w": view})


@pytest.mark.parametrize(
    ("view", "mend"),
    [
        (MuonDimensionNumbers(0, 5), r"name axes in \[-2, 2\)"),
        (MuonDimensionNumbers((0, 1), 2), r"name axes in \[-2, 2\)"),
        (Split(1, (8, 8)), "add up to 32"),
        (Unfold(1, (5, -1)), "multiply to 32"),
    ],
)
def test_rules_that_do_not_fit(view, mend):
    says = rf"rules\['\^w'\] does not fit w of shape \(32, 32\): {re.escape(str(view))} .*{mend}"
    with pytest.raises(ValueError, match=says):
        by_use(mlp, MLP, X, rules={"^w": view})


def test_routes_are_like_a_dict_of_paths():
    routes = by_use(mlp, MLP, X)
    assert "w" in routes and "b" not in routes
    assert {*routes} == {*MLP}


def test_schedules_that_are_routes():
    params = jax.tree.map(lambda x: jnp.ones(x.shape), MLP)
    arguments = {"learning_rate": 0.1, "muon_weight_dimension_numbers": by_use(mlp, MLP, X)}
    says = r"got one array of shape \(\): pass static_args='muon_weight_dimension_numbers' to"
    with pytest.raises(ValueError, match=says):
        optax.inject_hyperparams(muon)(**arguments).init(params)
    optax.inject_hyperparams(muon, static_args=VIEWS)(**arguments).init(params)


def test_one_array_is_a_tree():
    routes = by_use(lambda w, x: jnp.tanh(x @ w) @ jnp.ones((32, 4)), f32(16, 32), X)
    assert routes(jnp.ones((16, 32))) == routes[""].view


def test_an_update_of_equinox_without_parameters():
    params, static = eqx.partition(MODULE, eqx.is_inexact_array)
    routes = by_use(lambda p, x: jax.vmap(eqx.combine(p, static))(x), params, X)
    optimizer = muon(0.1, muon_weight_dimension_numbers=routes)
    with pytest.raises(ValueError, match=r"which Equinox leaves .* update\(updates, state, params"):
        optimizer.update(params, optimizer.init(params))


def test_parameters_that_are_alike_share_a_row():
    def fn(p, x):
        x = jnp.tanh(x @ p["b"])
        for name in ("0", "1", "2"):
            layer = p["layers"][name]
            x = jnp.tanh(x) + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
        return jnp.tanh(x @ p["a1"]["c2"] @ p["a3"]["c4"]) @ p["wide"]

    layer = {"up": f32(16, 32), "down": f32(32, 16), "bias": f32(32)}
    params = {
        "a1": {"c2": f32(16, 16)},
        "a3": {"c4": f32(16, 16)},
        "b": f32(16, 16),
        "layers": {"0": layer, "1": layer, "2": layer},
        "wide": f32(16, 3),
    }
    routes = by_use(fn, params, X)
    printed, code = str(routes).split("\n\n")
    rows = [line.split()[:3] for line in printed.splitlines()[1:]]
    assert rows == [
        ["a*/c*", "(2)", "16×16"],
        ["b", "16×16", "input"],
        ["layers/{0..2}/bias", "32", "vector"],
        ["layers/{0..2}/down", "32×16", "hidden"],
        ["layers/{0..2}/up", "16×32", "hidden"],
        ["wide", "16×3", "output"],
    ]
    names = {"by_role": functools.partial(functools.partial, by_role)}
    pasted = eval(code, names | {"MuonDimensionNumbers": MuonDimensionNumbers})
    assert pasted(params) == routes(params)


def test_vectors_share_a_row_and_others_do_not():
    def fn(p, x):
        x = jnp.tanh(x @ p["in"] + p["first"]["bias"]) * p["mlp"]["bias"] + p["m"]["bias"]
        return jnp.tanh(x * p["t"]["gain"][0] + p["u"]["gain"][0]) @ p["out"]

    of_each = {"first": 32, "mlp": 32, "m": 32}
    params = {name: {"bias": f32(n)} for name, n in of_each.items()}
    params |= {"t": {"gain": f32(2, 32)}, "u": {"gain": f32(2, 32)}}
    params |= {"in": f32(16, 32), "out": f32(32, 4)}
    rows = [line.split()[:3] for line in str(by_use(fn, params, X)).splitlines()[1:6]]
    assert ["*/bias", "(3)", "32"] in rows
    assert [row[0] for row in rows] == ["*/bias", "in", "out", "t/gain", "u/gain"]


def test_numbers_with_gaps():
    def fn(p, x):
        x = jnp.tanh(x @ p["in"])
        for layer in p["layers"].values():
            x = jnp.tanh(x @ layer)
        return x @ p["out"]

    layers = {str(i): f32(32, 32) for i in (0, 2, 10)}
    routes = by_use(fn, {"in": f32(16, 32), "layers": layers, "out": f32(32, 4)}, X)
    assert "\nlayers/{0,2,10}  32×32  hidden" in str(routes)


def test_routes_of_other_parameters():
    routes = by_use(mlp, MLP, X)
    with pytest.raises(ValueError, match=r"by_use saw no parameter 'b' of shape \(2, 2\)"):
        routes({"b": jnp.ones((2, 2))})
    with pytest.raises(ValueError, match=r"by_use saw no parameter 'w' of shape \(2, 32, 32\)"):
        routes({**MLP, "w": jnp.ones((2, 32, 32))})
    with pytest.raises(KeyError):
        routes["b"]


def fused(p, x):
    gate, up = jnp.split(jnp.tanh(x @ p["a"]) @ p["gate_up"], 2, -1)
    pairs = (jax.nn.silu(gate) * up) @ p["pairs"]
    return (pairs[..., ::2] * pairs[..., 1::2]) @ p["out"] + p["bias"]


FUSED = {
    "a": f32(16, 32),
    "gate_up": f32(32, 64),
    "pairs": f32(32, 40),
    "out": f32(20, 4),
    "bias": f32(4),
}


@pytest.mark.parametrize(("fn", "params"), [(mlp, MLP), (fused, FUSED)])
def test_pickles_and_pastes(fn, params):
    routes = by_use(fn, params, X)
    again = pickle.loads(pickle.dumps(routes))
    assert again == routes and again(params) == routes(params)
    table, code = str(routes).split("\n\n")
    lines = table.splitlines()
    assert lines[0].split() == ["path", "shape", "role", "view", "reason"]
    assert len(lines) == 1 + len(params)
    assert any("contracts axis 0, keeps axis 1" in line for line in lines)
    names = {
        "by_role": functools.partial(functools.partial, by_role),  # by_role(rules=…) needs params
        "Split": Split,
        "Unfold": Unfold,
        "MuonDimensionNumbers": MuonDimensionNumbers,
    }
    assert eval(code, names)(params) == routes(params)


def test_a_tree_of_views_in_the_shape_of_an_equinox_module():
    """It is callable, as the module is, and still a tree."""
    module = eqx.nn.MLP(16, 4, 32, 2, key=jax.random.key(0))
    params, static = eqx.partition(module, eqx.is_array)
    routes = by_use(lambda p, x: jax.vmap(eqx.combine(p, static))(x), params, jnp.ones((2, 16)))
    views = routes(params)
    assert callable(views)
    grads = jax.tree.map(jnp.ones_like, params)

    def updates(views, **arguments):
        optimizer = muon(0.02, muon_weight_dimension_numbers=views, **arguments)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), params)
    assert callable(specs)
    wanted = jax.tree.leaves(updates(routes))
    for found in (
        updates(views),
        updates(views, shardings=specs),
    ):
        for a, b in zip(jax.tree.leaves(found), wanted, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "combine",
    [
        lambda w: w.sum(0),
        lambda w: w.mean(0),
        lambda w: jnp.pad(w, ((0, 0), (0, 8), (0, 0)))[1, :32],
        lambda w: jax.lax.reduce_precision(w, 8, 7)[0],
        lambda w: jax.lax.dynamic_index_in_dim(w, 2, 0, keepdims=False),
    ],
)
def test_reparametrizations_stay_weights(combine):
    params = {**MLP, "w": f32(3, 32, 32)}
    routes = by_use(lambda p, x: mlp({**p, "w": combine(p["w"])}, x), params, X)
    assert routes["w"].view == MuonDimensionNumbers(1, 2)


def kernels_of_a_hypernetwork(p, x):
    h = jnp.tanh(x @ p["a"])
    w = (jnp.tanh(x @ p["b"]) @ p["w"]).reshape(4, 32, 8)
    return jnp.tanh(jnp.einsum("bi,bio->bo", h, w)) @ p["out"]


def kernel_of_an_embedding(p, x):
    w = (p["b"][0] @ p["w"]).reshape(32, 8)
    return jnp.tanh(jnp.tanh(x @ p["a"]) @ w) @ p["out"]


def kernel_on_the_inputs(p, x):
    w = (jnp.tanh(x @ p["b"]) @ p["w"]).reshape(4, 16, 16)
    return jnp.tanh(jax.vmap(jnp.dot)(x, w)) @ p["a"][:, :8] @ p["out"]


def mixture_of_kernels(p, x):
    h, gates = jnp.tanh(x @ p["a"]), jax.nn.softmax(x.mean(0) @ p["b"])
    w = jnp.einsum("n,nio->io", gates, p["w"])
    return jnp.tanh(h @ w) @ p["out"]


def mixture_of_kernels_by_example(p, x):
    h, gates = jnp.tanh(x @ p["a"]), jax.nn.softmax(x @ p["b"])
    w = jnp.einsum("bn,nio->bio", gates, p["w"])
    return jnp.tanh(jax.vmap(jnp.dot)(h, w)) @ p["out"]


def mixture_of_convolutions(p, x):
    gates = jax.nn.softmax(x.mean(0) @ p["b"])
    y = conv((x @ p["a"])[:, None, None], jnp.einsum("n,nhwio->hwio", gates, p["w"]))
    return jnp.tanh(y[:, 0, 0]) @ p["out"]


@pytest.mark.parametrize(
    ("fn", "b", "w"),
    [
        (kernels_of_a_hypernetwork, (16, 6), (6, 256)),
        (kernel_of_an_embedding, (5, 6), (6, 256)),
        (kernel_on_the_inputs, (16, 6), (6, 256)),
        (mixture_of_kernels, (16, 3), (3, 32, 8)),
        (mixture_of_kernels_by_example, (16, 3), (3, 32, 8)),
        (mixture_of_convolutions, (16, 3), (3, 3, 3, 32, 8)),
    ],
)
def test_products_that_make_weights(fn, b, w):
    params = {"a": f32(16, 32), "b": f32(*b), "w": f32(*w), "out": f32(8, 4)}
    raises_and_is_mended(fn, params, X, path="w", says="what its product makes is used as weights")


def keys_of_one_head(p, x):
    """Scores of several heads of queries with the keys of one: no weights are made."""
    q, k, v = heads(x @ p["q"], 4), x @ p["k"], x @ p["v"]
    y = jnp.einsum("hts,sd->thd", jax.nn.softmax(jnp.einsum("thd,sd->hts", q, k)), v)
    return y.reshape(4, 32) @ p["o"] @ p["out"]


def test_attention_makes_no_weights():
    params = {"q": f32(16, 32), "k": f32(16, 8), "v": f32(16, 8), "o": f32(32, 64)}
    routes = by_use(keys_of_one_head, params | {"out": f32(64, 4)}, X)
    assert [routes[name].view for name in "qkvo"] == [IN_OUT] * 4


def scattered(z):
    values, chosen = jax.lax.top_k(z, 4)
    return jnp.zeros_like(z).at[jnp.arange(4)[:, None], chosen].set(values)


def above_the_least(z):
    return jnp.where(z >= jax.lax.top_k(z, 4)[0][:, -1:], z, 0)


def one_hot_mask(z):
    return z * jax.nn.one_hot(jax.lax.top_k(z, 4)[1], 64).sum(1)


def sorted_threshold(z):
    return z * (z > jnp.sort(z, -1)[:, -5:-4])


@pytest.mark.parametrize("largest", [scattered, above_the_least, one_hot_mask, sorted_threshold])
def test_the_largest_features_are_no_experts(largest):
    """As in a sparse autoencoder, whose decoder is a weight with no axis of experts."""

    def fn(p, x):
        h = jnp.tanh(x @ p["a"])
        return (h + largest(jax.nn.relu(h @ p["enc"])) @ p["dec"]) @ p["out"]

    params = {"a": f32(16, 32), "enc": f32(32, 64), "dec": f32(64, 32), "out": f32(32, 4)}
    routes = by_use(fn, params, X)
    assert [(r.role, r.view) for r in map(routes.__getitem__, ("enc", "dec"))] == [
        ("hidden", IN_OUT),
        ("hidden", IN_OUT),
    ]


def test_positions_are_no_modulated_weights():
    """Added to raw features of their own shape, without a batch, and normalized."""

    def fn(p, x):
        x = norm(x + p["positions"]) - x.mean(-1, keepdims=True)
        return jnp.tanh(x @ p["a"]) @ p["w"] @ p["out"]

    routes = by_use(fn, {**MLP, "positions": f32(4, 16)}, X)
    assert routes["positions"].role == "vector"
    assert routes["a"].role == "input"


def test_integers_are_unused():
    params = {**MLP, "table": i32(3, 3)}
    routes = by_use(lambda p, x: mlp(p, x) * p["table"].sum(), params, X)
    assert (routes["table"].role, routes["table"].view) == ("unused", None)


def test_the_public_names():
    assert muon_jax.by_use is by_use
    assert by_use(mlp, MLP, X).__class__ is muon_jax.Routes


@pytest.mark.parametrize("divides", ["weight", "activation"])
def test_a_norm_from_a_product_of_the_weight_makes_no_factor(divides):
    def fn(p, x):
        norm = jnp.sqrt(jnp.trace(p["w"] @ p["w"].T))
        h = jnp.tanh(x @ p["a"])
        h = h @ (p["w"] / norm) if divides == "weight" else h @ p["w"] / norm
        return jnp.tanh(h) @ p["out"]

    assert by_use(fn, MLP, X)["w"][2:4] == ("hidden", IN_OUT)
