"""Errors of `by_role` for what it does not know are short, and what they say to paste works."""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers import nested, pasted
from model_shapes import shapes

from muon_jax import Split, by_role, describe, muon
from muon_jax._matrices.views import MATRICES, is_view


def error_of(tree, *arguments, **keywords):
    with pytest.raises(ValueError, match=r"by_role does not know .*by_use\(fn, params") as raised:
        by_role(shapes(tree), *arguments, **keywords)
    return str(raised.value)


def test_one_call_covers_all_and_is_short():
    blocks = {
        str(i): {
            "mixer": {"a": (4, 2), "b_out": {"thing": (4, 3)}, "kernel": (4, 4)},
            "up": {"kernel": (4, 8)},
        }
        for i in range(96)
    }
    tree = {"blocks": blocks, "Dense_0": {"kernel": (4, 4)}, "Dense_1": {"kernel": (4, 2)}}
    message = error_of(tree)
    assert "blocks/0/mixer/a of shape (4, 2) and 95 like it, " in message
    assert len(message) < 800
    views = pasted(message)
    assert views.keywords["rules"] == {
        r"^Dense_\d+/kernel$": None,
        r"^blocks/\d+/mixer/a$": None,
        r"^blocks/\d+/mixer/b_out/thing$": None,
        r"^blocks/\d+/mixer/kernel$": None,
    }
    found = views(shapes(tree))
    assert found["blocks"]["7"]["up"]["kernel"] == MATRICES
    few = shapes({**tree, "blocks": {"0": blocks["0"]}})
    params = jax.tree.map(lambda x: jnp.ones(x.shape), few)
    muon(0.1, muon_weight_dimension_numbers=views).init(params)


def test_a_rule_for_many_numbers_matches_no_known_path():
    tree = {
        "a": {
            "layer_0": {"thing": (4, 2)},
            "layer_1": {"thing": (8,)},
            "layer_2": {"thing": (4, 2)},
        },
        "b": {"0": {"x": {"1": {"thing": (4, 2)}}}, "3": {"x": {"1": {"thing": (5, 3)}}}},
    }
    rules = pasted(error_of(tree)).keywords["rules"]
    assert [*rules] == [
        r"^a/layer_0/thing$",
        r"^a/layer_2/thing$",
        r"^b/\d+/x/1/thing$",
    ]
    views = {"a/layer_1": MATRICES, **rules}
    assert jax.tree.leaves(by_role(shapes(tree), views), is_leaf=is_view).count(MATRICES) == 1


def test_the_call_keeps_what_was_passed():
    tree = {"it's[0]": {"thing": (4, 2)}, "b": {"thing": (4, 2)}, "qkv": {"kernel": (8, 12)}}
    given = {"^qkv": Split(-1, (8, 2, 2)), "'": None}
    views = pasted(error_of(tree, given))
    assert views.keywords["rules"] == {**given, "^b/thing$": None}
    assert views(shapes(tree)) == by_role(shapes(tree), {**given, "b/": None})
    views = pasted(error_of({**tree, "c": {"weight": (3, 2)}}, layout="out_in"))
    assert views.keywords["layout"] == "out_in"
    assert r"^it's\[0\]/thing$" in views.keywords["rules"]


EXPERTS = {"h_0/moe/experts/up": (4, 8, 6), "h_0/moe/experts/down": (4, 6, 8)}
K_V_O = {f"a/{name}_proj/kernel": (8, 4) for name in "kv"} | {"a/o_proj/kernel": (8, 8)}
# Trees, and the parameters of which no name tells what they are.
TOLD_BY_THE_MODEL = [
    # A hidden layer, or the output head.
    ({"Dense_0/kernel": (8, 16), "logits/kernel": (16, 5)}, "Dense_0"),
    ({"0/w": (4, 8), "1/w": (8, 8), "2/w": (8, 2)}, "[012]/w"),
    ({"embed/embedding": (50, 8), "w_in": (8, 32), "w_out": (32, 8)}, "w_(in|out)"),
    ({"shared/weight": (32, 8), "lm_head/weight": (8, 32)}, "shared"),
    ({"cls/predictions/decoder/kernel": (8, 50), "cls/predictions/bias": (50,)}, "decoder"),
    ({"head/fc1/kernel": (8, 8), "head/fc2/kernel": (8, 5)}, "fc"),
    # Experts, stacked layers, or axes of heads.
    ({"ffn/w_in": (4, 8, 32), "ffn/w_out": (4, 32, 8)}, "w_(in|out)"),
    ({"b/wi": (4, 8, 6), "b/gate": (4, 8, 6), "b/wo": (4, 6, 8)}, "b/"),
    ({"h_0/query": (4, 4, 8), "h_0/wi": (4, 8, 6), "h_0/wo": (4, 6, 8)}, "h_0"),
    ({"h_0/mlp/wi/kernel": (8, 2, 6)}, "wi"),
    ({"h_0/mlp/gating_einsum": (2, 8, 24), "h_0/mlp/linear": (24, 8)}, "gating"),
    # The gate of an MLP, or a router.
    ({"h_0/mlp/gate/kernel": (8, 4), **EXPERTS}, "gate"),
    # Several matrices, side by side or by turns.
    ({"a/q_proj/kernel": (8, 16), **K_V_O}, "[qo]_proj"),
    ({"h_0/experts/gate_up": (4, 8, 12), "h_0/experts/gate_up_bias": (4, 12)}, "gate_up$"),
    ({"gru/w_i": (5, 24), "gru/w_h": (8, 24)}, "w_[ih]"),
    ({"a/i2h/kernel": (5, 8), "a/h2h/kernel": (8, 8)}, "2h"),
    ({"lstm_1/linear/w": (13, 32)}, "linear"),
    ({"h/0/attn/query_key_value/kernel": (8, 24)}, "query"),
    # Learned queries, a stack of convolutions, and weights for each place.
    ({"h_0/query": (4, 8), "h_0/key/kernel": (8, 8)}, "query"),
    ({"h_0/conv/kernel": (2, 3, 3, 4, 8), "h_0/conv/bias": (2, 8)}, "kernel"),
    ({"h_0/conv/kernel": (6, 6, 36, 8), "h_0/conv/bias": (6, 6, 8)}, "kernel"),
]


@pytest.mark.parametrize(("flat", "unknown"), TOLD_BY_THE_MODEL)
def test_what_only_the_model_tells_raises_and_names_by_use(flat, unknown):
    rules = pasted(error_of(nested(flat))).keywords["rules"]
    for path in flat:
        is_proposed = any(re.search(rule, path) for rule in rules)
        assert is_proposed == bool(re.search(unknown, path)), path


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        ("h_0/mlp/fc1/kernel", "h_0/mlp/fc2/kernel", 2),
        ("h_0/mlp/wi/kernel", "h_0/mlp/wo/kernel", 2),
        ("h_0/b/Dense_0/kernel", "h_0/b/Dense_1/kernel", 3),
        ("h_0/b/linear_in/kernel", "h_0/b/linear_out/kernel", 2),
        ("h_0/mlp/layers/0/kernel", "h_0/mlp/layers/3/kernel", 2),
        ("h_0/b/dense_h_to_4h/kernel", "h_0/b/dense_4h_to_h/kernel", 2),
        ("h_0/LinearBlock_0/Dense_0/kernel", "h_0/LinearBlock_1/Dense_0/kernel", 2),
    ],
)
def test_a_layer_wider_than_what_is_taken_has_several_matrices(first, second, parts):
    flat = {first: (8, parts * 16), second: (16, 8)}
    message = error_of(nested(flat))
    assert f"{first} of shape {flat[first]}, which is {parts} times as wide as " in message
    assert [*pasted(message).keywords["rules"]] == [f"^{first}$"]
    views = by_role(shapes(nested({first: (8, 16), second: (16, 8)})))
    assert jax.tree.leaves(views, is_leaf=is_view) == [MATRICES] * 2


def test_modules_with_functions_raise_with_the_filter():
    module = {"layers": [{"weight": jnp.ones((4, 2))}], "activation": jnp.tanh}
    optimizer = muon(0.1, muon_weight_dimension_numbers=by_role)
    for use in (describe, by_role, optimizer.init):
        with pytest.raises(
            TypeError, match=r"'activation'\] must be an array, got .*eqx\.filter\(model, eqx"
        ):
            use(module)
