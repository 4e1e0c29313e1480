"""Errors of `by_role` for what it does not know are short, and what they say to paste works."""

import jax
import jax.numpy as jnp
import model_shapes
import pytest
from helpers import pasted
from model_shapes import shapes

from muon_jax import MuonDimensionNumbers, Split, Unfold, by_role, describe, muon
from muon_jax._matrices.views import MATRICES, is_view


def error_of(tree, *arguments, **keywords):
    with pytest.raises(ValueError, match="no rule knows the role of") as raised:
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
    assert len(message) < 700
    views = pasted(message)
    assert views.keywords["rules"] == {
        r"^Dense_1/kernel$": None,
        r"^blocks/\d+/mixer/a$": None,
        r"^blocks/\d+/mixer/b_out/thing$": None,
    }
    found = views(shapes(tree))
    assert found["Dense_0"]["kernel"] == found["blocks"]["7"]["mixer"]["kernel"] == MATRICES
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


def test_heads_that_alternate_have_their_unfold():
    message = error_of(model_shapes.bloom(layers=30))
    path = "transformer/h/0/self_attention/query_key_value/kernel"
    assert f"{path} of shape (8, 24) and 29 like it, whose q, k and v alternate by heads" in message
    views = pasted(message, heads=2)(shapes(model_shapes.bloom(layers=30)))
    expected = Unfold(-1, (2, 3, -1), MuonDimensionNumbers(-4, (-3, -1)))
    block = views["transformer"]["h"]["29"]
    assert block["self_attention"]["query_key_value"]["kernel"] == expected
    assert block["mlp"]["dense_h_to_4h"]["kernel"] == MATRICES
    out_in = {"attention": {"query_key_value": {"weight": (24, 8)}, "up": {"weight": (32, 8)}}}
    call = pasted(error_of(out_in, layout="out_in"), heads=2)
    (stacks,) = (
        p.matrices
        for p in describe(shapes(out_in), muon_weight_dimension_numbers=call).parameters
        if "query" in p.path
    )
    assert stacks == ((3, 8, 8),)
    assert call(shapes(out_in))["attention"]["query_key_value"]["weight"] == Unfold(
        -2, (2, 3, -1), MuonDimensionNumbers(-1, (-4, -2))
    )


def test_the_parts_of_a_fused_layer_are_proposed():
    tree = {"h_0": {"fc1": {"kernel": (8, 32)}, "fc2": {"kernel": (16, 8)}}}
    message = error_of(tree)
    assert "of shape (8, 32), which is 2 times as wide as the layer after it takes: pass" in message
    assert pasted(message)(shapes(tree))["h_0"]["fc1"]["kernel"] == Split(-1, (16, 16))
    tree = {"h_0": {"fc1": {"weight": (32, 8)}, "fc2": {"weight": (8, 16)}}}
    views = pasted(error_of(tree, layout="out_in"))(shapes(tree))
    assert views["h_0"]["fc1"]["weight"] == Split(-2, (16, 16), MuonDimensionNumbers(-1, -2))


def test_modules_with_functions_raise_with_the_filter():
    module = {"layers": [{"weight": jnp.ones((4, 2))}], "activation": jnp.tanh}
    optimizer = muon(0.1, muon_weight_dimension_numbers=by_role)
    for use in (describe, by_role, optimizer.init):
        with pytest.raises(
            TypeError, match=r"'activation'\] must be an array, got .*eqx\.filter\(model, eqx"
        ):
            use(module)
