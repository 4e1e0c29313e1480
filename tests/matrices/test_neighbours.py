"""What parameters tell of those beside them, in trees of published models."""

import helpers
import model_shapes
import pytest
from model_shapes import shapes

from muon_jax import MuonDimensionNumbers, Split, Unfold, by_role, describe
from muon_jax._matrices.by_role import routes
from muon_jax._matrices.shapes import Unknown
from muon_jax._matrices.views import MATRICES


def roles_of(tree):
    return {p.path: p.role for p in describe(shapes(tree)).parameters}


# A tree, the matrices of its kernels in (in, out), and the paths that only a rule can tell.
MODELS = {
    "ResNet-18": (model_shapes.resnet18(), {"Dense_0"}),
    "CNN": (model_shapes.cnn(), {"Dense_1"}),
    "VAE": (
        model_shapes.vae(),
        {"decoder/fc2", "encoder/fc1", "encoder/fc2_mean", "encoder/fc2_logvar"},
    ),
    "PPO": (model_shapes.ppo(), set()),
    "PureJaxRL": (model_shapes.purejaxrl(), {"Dense_2"}),
    "Gemma": (model_shapes.gemma(), set()),
    "transposed gates": (model_shapes.gemma(transposed=True), set()),
    "BLOOM": (
        model_shapes.bloom(),
        {f"transformer/h/{i}/self_attention/query_key_value" for i in range(2)},
    ),
    "adapters": (model_shapes.qwix_lora(), set()),
}


@pytest.mark.parametrize(("tree", "unknown"), MODELS.values(), ids=MODELS)
def test_only_what_nothing_tells_is_unknown(tree, unknown):
    found = {path for path, role in roles_of(tree).items() if role == "unknown"}
    assert found == {f"{path}/kernel" for path in unknown}


def test_layers_between_layers_are_hidden():
    roles = roles_of(model_shapes.cnn())
    assert roles["Dense_0/kernel"] == "matrix"
    roles = roles_of(model_shapes.purejaxrl())
    hidden = {path for path, role in roles.items() if role == "matrix"}
    assert hidden == {f"Dense_{i}/kernel" for i in (0, 1, 3, 4)}
    assert roles["Dense_5/kernel"] == "vector"
    roles = roles_of(model_shapes.ppo())
    assert [roles[f"{name}/kernel"] for name in ("hidden", "logits", "value")] == [
        "matrix",
        "head",
        "vector",
    ]


EXPERTS = {"m/experts/up": (4, 8, 6), "m/experts/down": (4, 6, 8)}
NUMBERED_EXPERTS = {f"m/experts/{i}/up/kernel": (8, 6) for i in range(2)}
TO_HEADS, FROM_HEADS = "projection to heads", "projection from heads"
ATTENTION = [TO_HEADS, TO_HEADS, TO_HEADS, FROM_HEADS]
K_V_O = {f"a/{name}_proj/kernel": (8, 4) for name in "kv"} | {"a/o_proj/kernel": (8, 8)}
OF_HEAD = ["head", "vector"]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"Dense_0/kernel": (8, 16), "logits/kernel": (16, 5)}, ["matrix", "head"]),
        ({"Dense_0/kernel": (8, 16), "logits/kernel": (8, 5)}, ["unknown", "head"]),
        ({"shared/weight": (32, 8), "lm_head/weight": (8, 32)}, ["unknown", "head"]),
        ({"0/w": (4, 8), "1/w": (8, 8), "2/w": (8, 2)}, ["matrix", "matrix", "unknown"]),
        ({"linear/w": (4, 8), "linear_1/w": (8, 2)}, ["matrix", "unknown"]),
        ({"layers/2/kernel": (4, 8), "layers/10/kernel": (8, 2)}, ["matrix", "unknown"]),
        ({"heads/0/kernel": (8, 8), "heads/1/kernel": (8, 8)}, ["unknown"] * 2),
        ({"w_in": (8, 32), "w_out": (32, 8)}, ["matrix", "unknown"]),  # the last?
        (
            {"embed/embedding": (50, 8), "w_in": (8, 32), "w_out": (32, 8)},
            ["embedding", "matrix", "matrix"],
        ),
        ({"ffn/w_in": (4, 8, 32), "ffn/w_out": (4, 32, 8)}, ["experts"] * 2),
        (
            {"b/wi": (4, 8, 6), "b/gate": (4, 8, 6), "b/wo": (4, 6, 8)},
            ["experts"] * 3,
        ),
        ({"ffn/w_in": (4, 8, 32), "ffn/w_out": (3, 32, 8)}, ["unknown"] * 2),
        ({"b/wi_0": (4, 8, 6), "b/wi_1": (4, 8, 6), "b/wo": (4, 6, 8)}, ["experts"] * 3),
        (
            {"h_0/mlp/wi/kernel": (8, 2, 6), "h_0/mlp/wo/kernel": (6, 8)},
            ["einsum of gate and up", FROM_HEADS],
        ),
        ({"h_0/mlp/wi/kernel": (8, 2, 6), "h_0/mlp/wo/kernel": (7, 8)}, ["unknown", FROM_HEADS]),
        ({"b/adapter/up": (4, 8, 6), "b/adapter/down": (4, 6, 8)}, ["adapter"] * 2),
        # A gate to as many outputs as there are experts.
        ({"m/gate/kernel": (8, 4), **EXPERTS}, ["router", "experts", "experts"]),
        ({"m/gate/kernel": (8, 3), **EXPERTS}, ["unknown", "experts", "experts"]),
        ({"m/gate/kernel": (8, 2), **NUMBERED_EXPERTS}, ["router", "experts", "experts"]),
        ({"m/gate/kernel": (8, 3), **NUMBERED_EXPERTS}, ["unknown", "experts", "experts"]),
        # The heads have one layer, two layers, and one layer beside tied weights.
        ({"head/mlp/fc1/kernel": (8, 8), "head/norm/scale": (8,)}, ["head", "vector"]),
        ({"head/fc1/kernel": (8, 8), "head/fc2/kernel": (8, 5)}, ["unknown"] * 2),
        ({"head/fc1/kernel": (8, 8), "head/fc2/kernel": (8, 1)}, ["head"] * 2),
        ({"lm_head/dense/kernel": (8, 8), "lm_head/bias": (50,)}, ["unknown", "vector"]),
        ({"cls/predictions/decoder/kernel": (8, 50), "cls/predictions/bias": (50,)}, OF_HEAD),
        # q that makes a gate as well: k and v tell that it should be as wide as what o takes.
        ({"a/q_proj/kernel": (8, 16), **K_V_O}, ["unknown", TO_HEADS, TO_HEADS, FROM_HEADS]),
        ({"a/wq": (8, 16), "a/wk": (8, 4), "a/wv": (8, 2), "a/wo": (8, 8)}, ATTENTION),
        ({"a/wq": (8, 8), "a/wk": (8, 4), "a/wv": (8, 4), "a/wo": (8, 8)}, ATTENTION),
        ({"a/wq": (8, 16), "a/wo": (8, 8)}, [TO_HEADS, FROM_HEADS]),
        # Learned queries, or projections beside others.
        ({"a/query": (4, 8), "a/key/kernel": (8, 8)}, ["unknown", TO_HEADS]),
        ({"a/query": (8, 8), "a/kv": (8, 16)}, [TO_HEADS, "fused kv"]),
        # A stack of convolutions, and weights for each place.
        ({"a/conv/kernel": (2, 3, 3, 4, 8), "a/conv/bias": (2, 8)}, ["unknown", "bias"]),
        ({"a/conv/kernel": (6, 6, 36, 8), "a/conv/bias": (6, 6, 8)}, ["unknown", "bias"]),
        ({"h_0/conv/kernel": (3, 3, 4, 8), "h_0/conv/bias": (8, 1, 1)}, ["convolution", "bias"]),
        # Gates side by side, in Haiku's cells and in cells with other names.
        ({"gru/w_i": (5, 24), "gru/w_h": (8, 24)}, ["unknown"] * 2),
        ({"a/i2h/kernel": (5, 32), "a/h2h/kernel": (8, 32)}, ["unknown"] * 2),
        ({"a/i2h/kernel": (5, 8), "a/h2h/kernel": (8, 8)}, ["matrix"] * 2),
        ({"lstm_1/linear/w": (13, 32)}, ["unknown"]),
    ],
)
def test_what_takes_the_result_tells(named, expected):
    assert [route.role for route in routes([*named.items()], {})] == expected


def test_an_embedding_tells_a_width_in_each_layout():
    named = {"embed/weight": (50, 8), "w_in": (32, 8), "w_out": (8, 32)}
    roles = [route.role for route in routes([*named.items()], {}, "out_in")]
    assert roles == ["embedding", "matrix", "matrix"]


def test_gate_and_up_may_alternate_where_their_bias_is_an_array():
    fused, bias = ("m/experts/gate_up_proj", (4, 8, 12)), ("m/experts/gate_up_proj_bias", (4, 12))
    assert routes([fused], {})[0].view == Split(-1, (6, 6))
    view = routes([fused, bias], {})[0].view
    assert isinstance(view, Unknown)
    assert eval(view.proposal) == Unfold(-1, (-1, 2), MuonDimensionNumbers(-3, -2))


@pytest.mark.parametrize(
    ("query", "layout", "view"),
    [
        ((8, 2, 8), "in_out", Split(-1, (4, 4), MuonDimensionNumbers(-3, (-2, -1)))),
        ((2, 8, 8), "out_in", Split(-2, (4, 4), MuonDimensionNumbers(-1, (-3, -2)))),
        ((8, 16), "in_out", None),
    ],
)
def test_the_rule_for_a_query_with_a_gate_has_both(query, layout, view):
    key = {3: {"in_out": (8, 1, 4), "out_in": (1, 4, 8)}[layout], 2: (8, 4)}[len(query)]
    attention = {"query": query, "key": key, "value": key, "out": (8, 8)}
    tree = shapes({"attention": {name: {"kernel": s} for name, s in attention.items()}})
    with pytest.raises(ValueError, match="which makes twice what the output projection") as raised:
        by_role(tree, layout=layout)
    views = helpers.pasted(str(raised.value))
    assert views.keywords["rules"] == {"^attention/query/kernel$": view}
    assert views(tree)["attention"]["query"]["kernel"] == view


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        ("mlp/fc1/kernel", "mlp/fc2/kernel", 2),
        ("mlp/wi/kernel", "mlp/wo/kernel", 2),
        ("b/Dense_0/kernel", "b/Dense_1/kernel", 3),
        ("b/linear_in/kernel", "b/linear_out/kernel", 2),
        ("b/linear1/kernel", "b/linear2/kernel", 2),
        ("mlp/layers/0/kernel", "mlp/layers/3/kernel", 2),
        ("b/dense_h_to_4h/kernel", "b/dense_4h_to_h/kernel", 2),
        ("ff/net_0/proj/kernel", "ff/net_2/kernel", 2),
    ],
)
def test_a_layer_wider_than_what_is_taken_has_several_matrices(first, second, parts):
    route, _ = routes([(first, (8, parts * 16)), (second, (16, 8))], {})
    assert route.role == "unknown"
    assert isinstance(route.view, Unknown)
    assert eval(route.view.proposal) == Split(-1, (16,) * parts)
    route, _ = routes([(first, (8, 16)), (second, (16, 8))], {})
    assert route == ("matrix", MATRICES)


def test_einsums_of_gemma():
    views = by_role(shapes(model_shapes.gemma()))["transformer"]
    attention = views["layer_0"]["attn"]
    heads_first = MuonDimensionNumbers(-2, (-3, -1))
    assert attention["q_einsum"]["w"] == attention["kv_einsum"]["w"] == heads_first
    assert views["layer_1"]["attn"]["qkv_einsum"]["w"] == heads_first
    assert attention["attn_vec_einsum"]["w"] == MuonDimensionNumbers((-3, -2), -1)
    assert views["layer_0"]["mlp"] == {"gating_einsum": MATRICES, "linear": MATRICES}
    transposed = by_role(shapes(model_shapes.gemma(transposed=True)))["transformer"]["layer_0"]
    assert transposed["mlp"]["gating_einsum"] == MuonDimensionNumbers(-1, -2)


def test_adapters_are_left_to_adamw_unless_a_rule_says_otherwise():
    tree = shapes(model_shapes.qwix_lora())
    parameters = describe(tree, muon_weight_dimension_numbers=by_role).parameters
    of_muon = {p.path.partition("/")[2] for p in parameters if p.optimizer == "muon"}
    kernels = {"gate_proj/kernel", "up_proj/kernel", "down_proj/wrapped/weight"}
    einsums = {"q_einsum/w", "attn_vec_einsum/w"}
    assert of_muon == {f"{i}/{path}" for i in range(2) for path in kernels | einsums}
    assert {p.role for p in parameters if p.optimizer == "adamw"} == {"adapter"}
    views = by_role(tree, {r"kernel_lora_[ab]$": MATRICES})
    assert views["layers"]["0"]["gate_proj"]["kernel_lora_a"] == MATRICES
