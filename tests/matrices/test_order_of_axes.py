"""The order of axes: right in float64 where a layout states it, an error where it is another."""

import functools
import math
import re

import helpers
import jax
import jax.numpy as jnp
import model_shapes
import numpy as np
import oracles
import pytest
from helpers import flat, nested, slow
from model_shapes import shapes

from muon_jax import MuonDimensionNumbers, NewtonSchulz, Unfold, by_role, describe, muon
from muon_jax._matrices.by_role import routes
from muon_jax._matrices.rules import Unknown

OUT_IN = by_role(layout="out_in")
TOLERANCE = 2e-4  # of float32 beside float64


def expected_update(matrix):
    """The first update of a matrix (in, out) by Keller Jordan's formulas, in float64."""
    x = np.asarray(matrix, np.float64)
    iterate = functools.partial(oracles.newton_schulz, triples=oracles.SIMPLE)
    scale = math.sqrt(max(1, x.shape[1] / x.shape[0]))
    return -scale * oracles.on_wide(iterate, x / np.linalg.norm(x))


def updates_of(tree, views):
    """Standard normal arrays of the shapes of the tree, and their first updates."""
    params = {
        name: jax.random.normal(jax.random.key(i), shape)
        for i, (name, shape) in enumerate(tree.items())
    }
    tree = nested(params)
    optimizer = muon(
        1.0, ns_coeffs=NewtonSchulz(dtype="float32"), muon_weight_dimension_numbers=views
    )
    updates, _ = jax.jit(optimizer.update)(tree, optimizer.init(tree), tree)
    return params, flat(updates)


def assert_updates(tree, views, matrices_of):
    """That each parameter's matrices, in the order (in, out), have the updates of the oracle."""
    params, updates = updates_of(tree, views)
    for name, matrices in matrices_of.items():
        got = matrices(np.asarray(updates[name]))
        assert len(got) > 0
        for found, matrix in zip(got, matrices(np.asarray(params[name])), strict=True):
            np.testing.assert_allclose(found, expected_update(matrix), atol=TOLERANCE, err_msg=name)


def test_updates_of_out_in_are_those_of_float64():
    tree = {  # each of matrices 24 × 48 or 48 × 24, which are orthogonalized together
        "h_0/a/conv/weight": (24, 12, 2, 2),
        "h_1/a/conv/weight": (24, 48, 1, 1),
        "layers/0/mlp/fc1/weight": (48, 24),
        "layers/0/mlp/gate_up/weight": (96, 24),
        "layers/0/attn/kv/weight": (96, 24),
        "layers/0/attn/q_proj/weight": (2, 3, 8, 24),
        "layers/0/attn/o_proj/weight": (24, 6, 8),
        "layers/0/experts/up/weight": (2, 48, 24),
    }
    halves = lambda w: [w[:48].T, w[48:].T]  # noqa: E731
    matrices = {
        "h_0/a/conv/weight": lambda w: [w.transpose(2, 3, 1, 0).reshape(48, 24)],
        "h_1/a/conv/weight": lambda w: [w[:, :, 0, 0].T],
        "layers/0/mlp/fc1/weight": lambda w: [w.T],
        "layers/0/mlp/gate_up/weight": halves,
        "layers/0/attn/kv/weight": halves,
        "layers/0/attn/q_proj/weight": lambda w: [w.reshape(48, 24).T],
        "layers/0/attn/o_proj/weight": lambda w: [w.reshape(24, 48).T],
        "layers/0/experts/up/weight": lambda w: [w[0].T, w[1].T],
    }
    assert_updates(tree, OUT_IN, matrices)


@slow
def test_updates_of_einsums_alternating_heads_and_layers_along_axis_1_are_those_of_float64():
    tree = {
        "net/layers/up/kernel": (24, 5, 48),
        "net/layers/up/bias": (48, 5),
        "h/0/self_attention/query_key_value/kernel": (24, 144),
        "t/layer_0/attn/q_einsum/w": (4, 24, 12),
        "t/layer_0/attn/kv_einsum/w": (2, 1, 24, 48),
        "t/layer_0/attn/attn_vec_einsum/w": (4, 12, 24),
        "t/layer_0/mlp/linear": (48, 24),
    }
    matrices = {
        "net/layers/up/kernel": lambda w: [w[:, i] for i in range(5)],
        "h/0/self_attention/query_key_value/kernel": lambda w: [
            w.reshape(24, 4, 3, 12)[:, :, i].reshape(24, 48) for i in range(3)
        ],
        "t/layer_0/attn/q_einsum/w": lambda w: [w.transpose(1, 0, 2).reshape(24, 48)],
        "t/layer_0/attn/kv_einsum/w": lambda w: [w[0, 0], w[1, 0]],
        "t/layer_0/attn/attn_vec_einsum/w": lambda w: [w.reshape(48, 24)],
        "t/layer_0/mlp/linear": lambda w: [w],
    }
    alternating = Unfold(-1, (4, 3, -1), MuonDimensionNumbers(-4, (-3, -1)))
    views = by_role(rules={"query_key_value": alternating})
    assert_updates(tree, views, matrices)


def matrices_of(tree, views):
    parameters = describe(shapes(tree), muon_weight_dimension_numbers=views).parameters
    assert all(p.role != "unknown" for p in parameters)
    return {p.path: p.matrices for p in parameters if p.optimizer == "muon"}


@pytest.mark.parametrize("block", [0, 1])
def test_gpt2_of_hugging_face(block):
    attention, mlp = (f"transformer/h/{block}/{name}" for name in ("attn", "mlp"))
    found = matrices_of(model_shapes.gpt2(), OUT_IN)
    assert {path: found[path] for path in found if f"/{block}/" in path} == {
        f"{attention}/c_attn/kernel": ((1, 8, 8),) * 3,
        f"{attention}/c_proj/kernel": ((1, 8, 8),),
        f"{mlp}/c_fc/kernel": ((1, 8, 32),),
        f"{mlp}/c_proj/kernel": ((1, 32, 8),),
    }


def test_llama_of_levanter():
    below = "transformer/layers/stacked"
    assert matrices_of(model_shapes.levanter_llama(), OUT_IN) == {
        f"{below}/self_attn/q_proj/weight": ((3, 8, 16),),
        f"{below}/self_attn/k_proj/weight": ((3, 8, 8),),
        f"{below}/self_attn/v_proj/weight": ((3, 8, 8),),
        f"{below}/self_attn/o_proj/weight": ((3, 16, 8),),
        f"{below}/mlp/gate_proj/weight": ((3, 8, 24),),
        f"{below}/mlp/up_proj/weight": ((3, 8, 24),),
        f"{below}/mlp/down_proj/weight": ((3, 24, 8),),
    }


class Named:
    """As the arrays of Haliax are: a node with one child, and no key for it."""

    def __init__(self, array):
        self.array = array


jax.tree_util.register_pytree_node(Named, lambda x: ((x.array,), None), lambda _, x: Named(*x))


def test_boxes_of_haliax_are_no_part_of_the_path():
    tree = {"layers": {"up_proj": {"weight": Named(jnp.zeros((3, 24, 8)))}}}
    (parameter,) = describe(tree, muon_weight_dimension_numbers=OUT_IN).parameters
    assert parameter.path == "layers/up_proj/weight"
    assert parameter.matrices == ((3, 8, 24),)


@pytest.mark.parametrize(
    ("kernel", "bias", "layout", "expected"),
    [
        ((16, 5, 16), (16, 5), "in_out", (-3, -1)),  # 5 layers of 16 × 16
        ((5, 16, 16), (5, 16), "in_out", (-2, -1)),
        ((16, 5, 24), (24, 5), "in_out", (-3, -1)),
        ((16, 5, 16), (16, 16), "in_out", (-2, -1)),  # 16 layers of 5 × 16
        ((16, 5, 16), (16, 5), "out_in", (-1, -2)),  # 16 layers, each with 5 outputs
    ],
)
def test_a_bias_tells_the_axis_of_layers(kernel, bias, layout, expected):
    named = [("layers/up/kernel", kernel), ("layers/up/bias", bias)]
    assert routes(named, {}, layout)[0].view == MuonDimensionNumbers(*expected)


# A tree, and the layout that it has. The other is refused.
ONE_LAYOUT = {
    "a window at the end": ({"h_0": {"a": {"conv": {"weight": (64, 32, 3, 3)}}}}, "out_in"),
    "one of a kernel": ({"h_0": {"a": {"conv": {"kernel": (64, 32, 3, 3)}}}}, "out_in"),
    "a window of one element": ({"h_0": {"a": {"conv": {"weight": (2048, 512, 1, 1)}}}}, "out_in"),
    "patches": ({"patch_embed": {"proj": {"weight": (768, 3, 16, 16)}}}, "out_in"),
    "patches of a kernel": ({"patch_embed": {"kernel": (768, 3, 16, 16)}}, "out_in"),
    "patches of videos": ({"embed": {"conv": {"weight": (768, 3, 2, 16, 16)}}}, "out_in"),
    "few channels": ({"h_0": {"a": {"conv": {"kernel": (8, 3, 3, 3)}}}}, "out_in"),
    "one axis of a window": ({"h_0": {"a": {"conv": {"weight": (64, 32, 3)}}}}, "out_in"),
    "a window at the front": ({"h_0": {"a": {"conv": {"kernel": (3, 3, 64, 32)}}}}, "in_out"),
    "an MLP": ({"layers": [{"mlp": {"fc1": {"weight": (256, 64)}}}]}, "out_in"),
    "its second layer": ({"h_0": {"mlp": {"down_proj": {"weight": (64, 256)}}}}, "out_in"),
    "gate and up": ({"h_0": {"mlp": {"gate_up": {"weight": (512, 64)}}}}, "out_in"),
    "q, k and v": ({"h_0": {"attn": {"qkv": {"kernel": (192, 64)}}}}, "out_in"),
    "a bias": ({"h_0": {"mlp": {"proj": {"kernel": (24, 8), "bias": (24,)}}}}, "out_in"),
    "a bias of (in, out)": (
        {"h_0": {"mlp": {"proj": {"kernel": (24, 8), "bias": (8,)}}}},
        "in_out",
    ),
    "stacked layers": ({"layers": {"up": {"weight": (3, 24, 8), "bias": (3, 24)}}}, "out_in"),
    "experts": ({"h_0": {"experts": {"up": {"weight": (4, 24, 8), "bias": (4, 24)}}}}, "out_in"),
    "GPT-2": (model_shapes.gpt2(), "out_in"),
    "Equinox": (
        {"h_0": {"conv": {"weight": (8, 3, 5, 5)}, "proj": {"weight": (8, 8), "bias": (8,)}}},
        "out_in",
    ),
}


@pytest.mark.parametrize(("tree", "layout"), ONE_LAYOUT.values(), ids=ONE_LAYOUT)
def test_the_other_layout_raises_and_names_this_one(tree, layout):
    tree = shapes(tree)
    right = by_role(tree, layout=layout)
    other = "in_out" if layout == "out_in" else "out_in"
    with pytest.raises(ValueError, match=f"layout='{other}' does not fit") as raised:
        by_role(tree, layout=other)
    (call,) = re.findall(r"pass (by_role\(.*?\)) if all", str(raised.value))
    assert eval(call)(tree) == right
    rules = helpers.pasted(str(raised.value)).keywords["rules"]
    assert set(rules.values()) == {None}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("h_0/a/conv/kernel", (3, 3, 64, 3)),  # few channels
        ("h_0/a/conv/kernel", (1, 7, 32, 32)),
        ("h_0/a/conv/kernel", (7, 64, 2)),
        ("h_0/a/conv/weight", (3, 3, 64, 32)),  # as in AXLearn
        ("layers/0/experts/up/weight", (24, 8)),  # experts may be narrow
        ("layers/0/se/fc1/kernel", (64, 16)),  # squeeze and excitation
    ],
)
def test_what_may_be_in_out_is(name, shape):
    assert isinstance(routes([(name, shape)], {})[0].view, MuonDimensionNumbers)


@pytest.mark.parametrize(("name", "shape"), [("se/fc1", (64, 16)), ("a/conv", (3, 3, 3, 8))])
def test_a_bias_decides_for_in_out_too(name, shape):
    named = [(f"h_0/{name}/weight", shape), (f"h_0/{name}/bias", shape[-1:])]
    assert isinstance(routes(named, {})[0].view, MuonDimensionNumbers)
    assert isinstance(routes(named[:1], {})[0].view, Unknown)


TABLE = ("embed/embedding", (50, 64))


@pytest.mark.parametrize(
    ("named", "is_known"),
    [
        ([("h_0/mlp/fc1/weight", (64, 16))], True),  # narrow, but it takes what the embedding gives
        ([("h_0/mlp/fc1/weight", (16, 64))], False),
        ([("h_0/mlp/fc2/weight", (16, 64))], True),
        ([("h_0/experts/up/weight", (4, 16, 64))], False),
        ([("h_0/attn/q_proj/kernel", (96, 64))], False),
        ([("h_0/attn/k_proj/kernel", (96, 64))], True),  # of another stream, perhaps
        ([("h_0/attn/q_proj/kernel", (96, 64)), ("h_0/norm/scale", (96,))], True),
        ([("h_0/mlp/fc1/kernel", (96, 64)), ("h_0/mlp/fc1/bias", (64,))], True),
        ([("h_0/mlp/gate_up/kernel", (96, 64))], False),
        ([("h_0/mlp/wo/kernel", (64, 96))], False),
    ],
)
def test_the_width_of_the_embedding_tells_the_order(named, is_known):
    view = routes([*named, TABLE], {})[0].view
    assert isinstance(view, Unknown) != is_known
    assert isinstance(routes(named, {})[0].view, Unknown) <= named[0][0].endswith("weight")


def test_a_bias_of_experts_with_one_output_tells_nothing():
    named = [("critic/Dense_1/kernel", (2, 256, 1)), ("critic/Dense_1/bias", (2, 1))]
    view = routes(named, {})[0].view
    assert isinstance(view, Unknown) and not view.is_of_layout


def test_layouts_are_two():
    with pytest.raises(ValueError, match=r"layout must be one of \('in_out', 'out_in'\), got 'oi'"):
        by_role({}, layout="oi")
