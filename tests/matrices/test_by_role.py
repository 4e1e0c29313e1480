"""Which parameters of real models are matrices, and the table that tells it."""

import dataclasses
import functools
import math
import pickle
import re
from collections import Counter

import chex
import flax_models
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import mostly_nightly, nested
from model_shapes import shapes

from muon_jax import (
    PRESETS,
    MuonDimensionNumbers,
    NewtonSchulz,
    Split,
    by_role,
    describe,
    muon,
    scale_by_muon,
)
from muon_jax._matrices.by_role import routes
from muon_jax._matrices.rules import Unknown
from muon_jax._matrices.views import MATRICES
from muon_jax.contrib import normuon

QKV = {"^qkv/": Split(-1, (8, 2, 2)), "^(o_proj|down)/": MATRICES}
MLP = r"^mlp_\w+/kernel$"
TOKENS = functools.partial(flax_models.linen_params, dtype=jnp.int32)
IMAGES = (2, 8, 8, 3)
# Parameters, rules, the role and the stacks of each matrix, and how many have which other role.
MODELS = {
    "nnx GPT, tied": (
        flax_models.nnx_gpt,
        {},
        {
            f"blocks/{i}/{name}/kernel": (role, shape)
            for i in range(2)
            for name, role, shape in [
                ("attn/query", "projection to heads", "1×8×8"),
                ("attn/key", "projection to heads", "1×8×8"),
                ("attn/value", "projection to heads", "1×8×8"),
                ("attn/out", "projection from heads", "1×8×8"),
                ("fc_in", "matrix", "1×8×32"),
                ("fc_out", "matrix", "1×32×8"),
            ]
        },
        {"embedding": 1, "position": 1, "bias": 6, "vector": 16},
    ),
    "linen scanned transformer": (
        lambda: TOKENS(flax_models.ScannedTransformer(), 2, 5),
        {},
        {
            **{f"layers/{name}/kernel": ("projection to heads", "3×8×8") for name in "qkv"},
            "layers/o/kernel": ("projection from heads", "3×8×8"),
            "layers/gate/kernel": ("gate", "3×8×24"),
            "layers/up/kernel": ("matrix", "3×8×24"),
            "layers/down/kernel": ("matrix", "3×24×8"),
        },
        {"embedding": 1, "head": 1, "norm": 2, "bias": 7, "vector": 1},
    ),
    "linen ResNet": (
        lambda: flax_models.linen_params(flax_models.ResNet(), *IMAGES),
        {"^Dense_0/": None},
        {
            "conv_init/kernel": ("convolution", "1×27×8"),
            "ResNetBlock_1/Conv_0/kernel": ("convolution", "1×72×8"),
            "ResNetBlock_1/Conv_1/kernel": ("convolution", "1×72×8"),
            "ResNetBlock_0/Conv_0/kernel": ("convolution", "1×72×16"),
            "ResNetBlock_0/Conv_1/kernel": ("convolution", "1×144×16"),
            "ResNetBlock_0/conv_proj/kernel": ("convolution", "1×8×16"),
        },
        {"vector": 8, "rule '^Dense_0/'": 2},
    ),
    "linen ViT": (
        lambda: flax_models.linen_params(flax_models.ViT(), *IMAGES),
        {MLP: MATRICES},
        {
            "patch_embed/kernel": ("convolution", "1×48×8"),
            **{
                f"{name}_{i}{rest}/kernel": (role, shape)
                for i in range(2)
                for name, rest, role, shape in [
                    ("attention", "/query", "projection to heads", "1×8×8"),
                    ("attention", "/key", "projection to heads", "1×8×8"),
                    ("attention", "/value", "projection to heads", "1×8×8"),
                    ("attention", "/out", "projection from heads", "1×8×8"),
                    ("mlp_in", "", f"rule {MLP!r}", "1×8×32"),
                    ("mlp_out", "", f"rule {MLP!r}", "1×32×8"),
                ]
            },
        },
        {"head": 1, "token": 1, "position": 1, "bias": 6, "vector": 12},
    ),
    "linen MoE": (
        lambda: TOKENS(flax_models.MoE(), 5),
        {},
        {
            f"experts_{i}/{name}": ("experts", shape)
            for i in range(2)
            for name, shape in [("gate", "4×8×6"), ("up", "4×8×6"), ("down", "4×6×8")]
        },
        {"embedding": 1, "router": 2, "head": 1, "vector": 1},
    ),
    "nnx grouped queries, fused": (
        flax_models.grouped_queries,
        QKV,
        {
            "qkv/kernel": ("rule '^qkv/'", "1×8×8, 1×8×2, 1×8×2"),
            "o_proj/kernel": ("rule '^(o_proj|down)/'", "1×8×8"),
            "gate_up/kernel": ("fused gate and up", "1×8×12, 1×8×12"),
            "down/kernel": ("rule '^(o_proj|down)/'", "1×12×8"),
        },
        {"embedding": 1, "head": 1, "vector": 2},
    ),
}


def views(rules):
    return {"muon_weight_dimension_numbers": by_role(rules=rules)}


@pytest.mark.parametrize(("params", "rules", "matrices", "others"), MODELS.values(), ids=MODELS)
def test_models(params, rules, matrices, others):
    parameters = describe(params(), **views(rules)).parameters
    assert len(parameters) == len(jax.tree.leaves(params()))
    found = {
        p.path: (p.role, ", ".join("×".join(map(str, shape)) for shape in p.matrices))
        for p in parameters
        if p.optimizer == "muon"
    }
    assert found == matrices
    assert Counter(p.role for p in parameters if p.optimizer == "adamw") == others


@pytest.mark.parametrize(
    "name",
    mostly_nightly(["linen MoE", "nnx GPT, tied", "nnx grouped queries, fused"], ["linen MoE"]),
)
def test_updates_follow_the_routes(name):
    params, rules, matrices, _ = MODELS[name]
    params = jax.tree.map(lambda p: jnp.ones(p.shape).at[..., 0].set(2), params())
    optimizer = muon(
        1e-3, consistent_rms=0.2, ns_coeffs=NewtonSchulz(dtype="float32"), **views(rules)
    )
    state = optimizer.init(params)
    updates, _ = jax.jit(optimizer.update)(params, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    paths = {p.path: p.optimizer for p in describe(params, **views(rules)).parameters}
    for path, update in zip(paths, jax.tree.leaves(updates), strict=True):
        is_adamw = jnp.ptp(update) < 1e-6  # its first update is a sign
        assert is_adamw == (path not in matrices), path


GATE_AND_UP = ("fused gate and up", Split(-1, (32, 32)))
PATCHES = ("convolution", ((-4, -3, -2), -1))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers/attn/q/kernel", (3, 8, 8), ("projection to heads", MATRICES)),
        ("layers/attn/qkv/kernel", (5, 8, 3, 2, 4), ("fused qkv", (-4, (-2, -1)))),
        ("h/0/attn/c_attn/kernel", (8, 24), ("fused qkv", Split(-1, (8, 8, 8)))),
        ("stages/layers/moe/experts/up", (2, 3, 4, 8, 6), ("experts", MATRICES)),
        ("layers/0/moe/gate/kernel", (8, 4), ("router", None)),
        ("layers/smear_gate/kernel", (3, 12, 1), ("gate", None)),
        ("layers/attn/q_norm/scale", (3, 4), ("norm", None)),
        ("blocks/0/a/conv_1/kernel", (5, 4, 8), ("convolution", ((-3, -2), -1))),
        ("depthwise_conv/kernel", (3, 3, 1, 8), ("convolution", None)),
        ("encoder/codebook", (64, 8), ("embedding", None)),
        ("item_table/weight", (100, 8), ("embedding", None)),
        ("lookup/weight", (100, 8), ("embedding", None)),
        ("score/weight", (8, 8), ("head", None)),
        ("qa_outputs/kernel", (8, 2), ("head", None)),
        ("score/layers/0/mlp/fc/kernel", (8, 8), ("matrix", MATRICES)),
        ("layers/0/ffn/switch/kernel", (8, 4), ("router", None)),
        ("switch/layers/0/up/kernel", (8, 4), ("matrix", MATRICES)),
        ("layers/0/experts/gate", (4, 8, 6), ("experts", MATRICES)),
        ("layers/0/experts/1/gate/kernel", (8, 6), ("experts", MATRICES)),
        ("blocks/0/attn/in_proj/kernel", (8, 24), ("fused qkv", Split(-1, (8, 8, 8)))),
        ("blocks/0/proj_out/kernel", (8, 8), ("matrix", MATRICES)),
        ("decoder/moe_layers_0/self_attention/wq_a/kernel", (8, 4), ("matrix", MATRICES)),
        ("moe_gpt/blocks/0/attn/c_proj/kernel", (8, 8), ("projection from heads", MATRICES)),
        ("layers/0/moe/shared_mlp/up/kernel", (8, 16), ("matrix", MATRICES)),
        ("layers/0/moe/up", (4, 8, 16), ("experts", MATRICES)),
        ("conv_vit/layers_0/Mlp_0/Dense_0/kernel", (8, 16), ("matrix", MATRICES)),
        ("ConvNeXtBlock_0/pwconv1/kernel", (8, 32), ("convolution", MATRICES)),
        ("layers_0/a/pointwise_conv1/kernel", (1, 8, 16), ("convolution", ((-3, -2), -1))),
        ("embeddings/patch_embeddings/projection/kernel", (4, 4, 3, 8), PATCHES),
        ("embeddings/patch_embedding/kernel", (4, 4, 3, 8), ("embedding", PATCHES[1])),
        ("x_embedder/proj/kernel", (4, 4, 3, 8), PATCHES),
        ("embedding/kernel", (4, 4, 3, 8), ("embedding", ((-4, -3, -2), -1))),
        ("embeddings/word_embeddings/weight", (100, 8), ("embedding", None)),
        ("embed/tok/weight", (100, 8), ("embedding", None)),
        ("relative_attention_bias/weight", (32, 4), ("bias", None)),
        ("t_embedder/mlp/0/kernel", (8, 16), ("matrix", MATRICES)),
        ("time_embedding/linear_1/kernel", (8, 16), ("matrix", MATRICES)),
        ("embedder/layers/0/attn/q/kernel", (8, 8), ("projection to heads", MATRICES)),
        ("cls/predictions/transform/dense/kernel", (8, 8), ("matrix", MATRICES)),
        ("layers_0/mlp/~/up/w", (8, 16), ("matrix", MATRICES)),
        ("cls/seq_relationship/kernel", (8, 2), ("head", None)),
        ("blocks/0/moe/gate_w", (8, 4), ("router", None)),
        ("blocks/0/moe/gate", (4, 8, 16), ("router", MATRICES)),
        ("blocks/0/attn/wq_b", (8, 16), ("projection to heads", MATRICES)),
        ("blocks/0/att/time_mix_k", (1, 1, 8), ("vector", None)),
        ("blocks/0/h0_mlp/linear/w", (8, 32), ("matrix", MATRICES)),
        ("ve/0/weight", (100, 8), ("embedding", None)),
        ("heads/0/query/kernel", (8, 4), ("projection to heads", MATRICES)),
        ("layers/0/final_linear/kernel", (8, 8), ("matrix", MATRICES)),
        ("mask_token", (1, 1, 8), ("token", None)),
        ("rel_pos_bias", (7, 7), ("bias", None)),
        ("output_head/kernel", (8, 5), ("head", None)),
        ("decoder/logitdense/kernel", (8, 5), ("head", None)),
        ("vocab_proj/kernel", (8, 5), ("head", None)),
        ("multi_head/query/kernel", (8, 8), ("projection to heads", MATRICES)),
        ("PositionwiseFeedForward_0/Dense_0/kernel", (8, 32), ("matrix", MATRICES)),
        ("position_wise_ffn/Dense_0/kernel", (8, 32), ("matrix", MATRICES)),
        ("PreNorm_0/Attention_0/query/kernel", (8, 8), ("projection to heads", MATRICES)),
        ("experts/b1", (4, 8), ("bias", None)),
        ("experts/b_in", (4, 8), ("bias", None)),
        ("experts/gate_up", (4, 8, 12), ("fused gate and up", Split(-1, (6, 6)))),
        ("experts/up_proj_b", (4, 8), ("bias", None)),
        ("experts/biases", (4, 8), ("bias", None)),
        ("model/embed_tokens/weight", (100, 8), ("embedding", None)),
        ("decoder/embed_positions/weight", (50, 8), ("embedding", None)),
        ("emb/weight", (100, 8), ("embedding", None)),
        ("token_embedding_table/weight", (100, 8), ("embedding", None)),
        ("mlp/up_gate/kernel", (8, 64), ("fused gate and up", Split(-1, (32, 32)))),
        ("mlp/fused_gate_up/kernel", (8, 64), ("fused gate and up", Split(-1, (32, 32)))),
        ("attn/key_value/kernel", (8, 16), ("fused kv", Split(-1, (8, 8)))),
        ("attn/fused_qkv/kernel", (8, 24), ("fused qkv", Split(-1, (8, 8, 8)))),
        ("attn/to_qkv/kernel", (8, 24), ("fused qkv", Split(-1, (8, 8, 8)))),
        ("attn/W_pack/weight", (8, 24), ("fused qkv", Split(-1, (8, 8, 8)))),
        ("attn/wq_wk_wv/kernel", (8, 24), ("fused qkv", Split(-1, (8, 8, 8)))),
        ("attn/k_and_v/kernel", (8, 16), ("fused kv", Split(-1, (8, 8)))),
        ("mlp/wi_fused/kernel", (8, 64), GATE_AND_UP),
        ("mlp/up_and_gate/kernel", (8, 64), GATE_AND_UP),
        ("mlp/gateup_proj/kernel", (8, 64), GATE_AND_UP),
        ("mlp/w1_w3/kernel", (8, 64), GATE_AND_UP),
        ("h_0/mlp/w12/kernel", (8, 64), GATE_AND_UP),
        ("lora_a/kernel", (8, 4), ("adapter", None)),
        ("attn/q_lora_b", (8, 4), ("adapter", None)),
        ("attn/q_proj/lora/lora_a", (8, 4), ("adapter", None)),
        ("attn/q_proj/lora/lora_B/weight", (4, 8), ("adapter", None)),
        ("attn/q_einsum/w_lora_b", (4, 2, 8), ("adapter", None)),
        ("blocks/0/adapter/down/kernel", (8, 4), ("adapter", None)),
        ("value/kernel", (8, 1), ("vector", None)),  # of a critic
        ("blocks/0/gate/kernel", (8, 1), ("vector", None)),
        ("Dense_0/kernel", (1, 1), ("vector", None)),
        ("rope/cos", (32, 4), ("position", None)),
        ("layers/0/attn/sin_cached", (32, 4), ("position", None)),
        ("freqs_cis", (32, 4), ("position", None)),
        ("layers/0/mlp/linear", (16, 8), ("matrix", MATRICES)),
        ("attn/qkv_einsum/w", (3, 2, 8, 4), ("einsum to heads", (-2, (-3, -1)))),
        ("decoder/input_embedder/model_projection/kernel", (8, 16), ("matrix", MATRICES)),
        ("blocks/0/gated_norm/w_down", (8, 4), ("matrix", MATRICES)),
        ("moe_layers/norm/scale", (3, 8), ("norm", None)),
        ("model.layers.0.mlp.up_proj.kernel", (8, 16), ("matrix", MATRICES)),
        ("text/token-embedding/weight", (100, 8), ("embedding", None)),
    ],
)
def test_roles(name, shape, expected):
    role, view = expected
    if type(view) is tuple:
        view = MuonDimensionNumbers(*view)
    assert routes([(name, shape)], {})[0][2:4] == (role, view)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Dense_0/kernel", (8, 10)),  # a hidden layer or the output head
        ("linear2/kernel", (8, 10)),
        ("fc2/kernel", (8, 10)),
        ("linear_out/kernel", (8, 10)),
        ("output/kernel", (8, 10)),
        ("layers/layers/2/kernel", (8, 10)),  # of nnx.Sequential, likewise
        ("layers/kernel", (3, 4)),  # a matrix or stacked vectors
        ("attn/qkv/kernel", (8, 12)),  # how wide are keys?
        ("attn/qkvg/kernel", (8, 32)),
        ("mlp/gate/kernel", (8, 4)),  # a router, or the gate of an MLP
        ("ffn/wg/kernel", (8, 4)),  # likewise
        ("LoRALinear_0/kernel", (8, 4)),  # what the factors are added to, or a factor
        ("patch_embedding_layer/kernel", (8, 64)),
        ("attn/kqv/kernel", (8, 12)),
        ("out/kernel", (8, 10)),
        ("model/output/kernel", (8, 10)),
        ("something", (8, 4)),
        ("shared/weight", (100, 8)),  # an embedding in T5
        ("proj_out/kernel", (8, 10)),
        ("model/lin_out/kernel", (8, 10)),
        ("w_out", (8, 10)),
        ("decoder/final_layer/linear/kernel", (8, 10)),
        ("model/decoder/linear/kernel", (8, 10)),
        ("backbone/fc/kernel", (8, 10)),
        ("language_model/linear/w", (8, 10)),
        ("actor/mean/kernel", (8, 10)),
        ("q_network/Dense_2/kernel", (8, 10)),
        ("heads/policy/kernel", (8, 10)),
        ("seq/B", (16, 4, 2)),
        ("layers/0/prefix/key", (10, 8)),
        ("ssm/conv1d/weight", (4, 8)),  # a filter for each channel, or a matrix
        ("experts/gate/kernel", (8, 4)),  # a router, or of one expert
        ("experts/alpha", (4, 8)),  # a vector for each expert, or one matrix
        ("ssm/in_proj/kernel", (8, 24)),  # of three projections, or of one
        ("encoder_layers/q_proj/kernel", (3, 8, 8)),  # a stack, or axes of heads
        ("layers/blocks/0/q_proj/kernel", (3, 8, 8)),
        ("ffn/wo", (3, 16, 8)),
        ("attn/query_key_value/kernel", (8, 32)),  # of fewer heads for keys
        ("mlp/fused_dense/kernel", (8, 64)),  # of how many?
        ("mlp/gating_einsum", (2, 8, 16)),  # (2, in, out) or (2, out, in)
        ("DecoderLSTMCell_0/Dense_0/kernel", (8, 10)),
        ("blocks/0/attn/in_proj_ba/kernel", (8, 4)),  # of two projections
        ("vocab_transform/kernel", (8, 8)),
        ("moe_layers/up", (3, 8, 16)),
        ("resampler/query", (16, 8)),  # a projection, or learned vectors
        ("blocks/0/ssm/in_proj/kernel", (8, 40)),
        ("blocks/0/film/gamma/kernel", (8, 8)),
        ("blocks/0/prenorm_mlp/kernel", (8, 8)),
        ("cls/predictions/decoder/kernel", (8, 100)),
        ("attn/query_key_value/kernel", (8, 3, 2, 4)),
        ("layers/0/aggregate_update/kernel", (8, 64)),
        ("blocks/0/exploration/kernel", (8, 4)),
        ("lm_head/dense/kernel", (8, 10)),
        ("GRUCell_0/hn/kernel", (8, 8)),
    ],
)
def test_what_is_ambiguous_raises_with_the_remedy(name, shape):
    tree = jax.ShapeDtypeStruct(shape, jnp.float32)
    for part in reversed(name.split("/")):
        tree = {part: tree}
    tree["bias"] = jnp.zeros(4)
    message = (
        rf"does not know {name} of shape .*: pass muon_weight_dimension_numbers=by_use\(fn, params,"
        rf" \*inputs\), .*rules=\{{r'\^{name}\$': None\}}\), with None for.*view"
    )
    with pytest.raises(ValueError, match=message):
        by_role(tree)
    assert jax.tree.leaves(by_role(tree, {f"^{name}$": None})) == []
    numbers = by_role(tree, {f"^{name}$": MATRICES})
    assert jax.tree.leaves(numbers, is_leaf=lambda x: x == MATRICES) == [MATRICES]


QUERY_AND_OUT = {"query": {"kernel": (8, 2, 4)}, "out": {"kernel": (2, 4, 8)}}


@pytest.mark.parametrize("out", [(2, 4, 8), (2, 3, 8)])
def test_axes_of_heads_are_confirmed_by_what_takes_them(out):
    tree = {"self": {**QUERY_AND_OUT, "out": {"kernel": out}}}
    parameters = describe(shapes(tree), muon_weight_dimension_numbers=by_role).parameters
    assert [p.matrices for p in parameters] == [((1, math.prod(out[:-1]), 8),), ((1, 8, 8),)]
    stacked = {"query": {"kernel": (3, 8, 8)}, "out": {"kernel": (3, 8, 8)}, "scale": (3, 8)}
    with pytest.raises(ValueError, match=r"know self/out/kernel.*self/query/kernel"):
        by_role(shapes({"self": stacked}))


def test_a_rule_for_one_parameter_changes_no_other():
    heads = {name: {"kernel": (16, 4, 4)} for name in ("query", "key", "value")}
    tree = shapes({"h": {**heads, "out": {"kernel": (4, 4, 16)}}})  # else a stack of 16
    with pytest.raises(ValueError, match="know h/key/kernel.*h/query/kernel"):
        by_role(tree, {"out": MuonDimensionNumbers((-3, -2), -1)})


@pytest.mark.parametrize("root", ["moe_layers_0", "ConvViT_0"])
def test_attention_below_other_names_has_its_axes_of_heads(root):
    views = by_role(shapes({"decoder": {root: {"attention": QUERY_AND_OUT}}}))
    assert jax.tree.leaves(views, is_leaf=lambda x: isinstance(x, MuonDimensionNumbers)) == [
        MuonDimensionNumbers((-3, -2), -1),
        MuonDimensionNumbers(-3, (-2, -1)),
    ]


def test_the_one_module_that_has_all_says_nothing_of_places():
    tree = {"Conv_0": {"kernel": (3, 3, 3, 8)}, "Dense_0": {"kernel": (8, 10)}}
    for params in (tree, {"ResNet_0": tree}):
        with pytest.raises(
            ValueError, match=r"know \S*Conv_0/kernel .*Dense_0/kernel of shape \(8, 10\): pass"
        ):
            by_role(shapes(params))


def test_windows_of_convolutions_are_no_layers():
    convs = {f"Conv_{i}": {"kernel": (3, 3, 8, 8)} for i in range(2)}
    blocks = {f"Block_{i}": convs for i in range(2)}
    views = by_role(shapes({"stages": blocks}))  # as of `optax.partition`, without norms
    assert views["stages"]["Block_0"]["Conv_0"]["kernel"] == ((-4, -3, -2), -1)
    with pytest.raises(ValueError, match="know stages/conv1/kernel"):
        by_role(shapes({"stages": {"conv1": {"kernel": (3, 3, 8, 8)}}}))


def test_the_remedy_s_expression_is_of_that_parameter_alone():
    with pytest.raises(ValueError, match="rules=") as raised:
        by_role({"x[0]": {"thing": jnp.ones((4, 8))}})
    (expression,) = re.findall(r"rules=\{r'(.*)': None\}", str(raised.value))
    assert by_role({"x[0]": {"thing": jnp.ones((4, 8))}}, {expression: None}) is not None


def test_rules_that_match_nothing_raise_unless_parameters_are_masked():
    tree = shapes({"up": {"kernel": (8, 16)}})
    rules = {"up": MATRICES, "^embed/": None}
    with pytest.raises(ValueError, match=r"\['\^embed/'\] of rules match none .* 'up/kernel'"):
        by_role(tree, rules)
    masked = {**tree, "embed": optax.MaskedNode()}
    assert by_role(masked, rules)["up"]["kernel"] == MATRICES


SHADOWED = [
    ({".*": None, "up": MATRICES}, "up", "'.*' before it already matches all .* put 'up' first"),
    ({"mlp": MATRICES, "mlp/up": None}, "mlp/up", "'mlp' .* put 'mlp/up' first, or leave it out"),
    ({"kernel$": None, "^head/": None}, "^head/", r"'kernel\$' .* put '\^head/' first"),
    ({"up": None, "down": MATRICES, "(up|down)/": None}, "(up|down)/", "'up', 'down' .*: leave it"),
    ({"mlp/down": None, "down/kernel": None}, "down/kernel", "'mlp/down' .*down/kernel': leave it"),
]


@pytest.mark.parametrize(("rules", "shadowed", "message"), SHADOWED)
def test_rules_that_never_decide_raise_unless_parameters_are_masked(rules, shadowed, message):
    paths = {"0/mlp/up/kernel": (8, 16), "0/mlp/down/kernel": (16, 8)}
    paths = {f"h/{path}": shape for path, shape in paths.items()} | {"head/kernel": (8, 3)}
    tree = shapes(nested(paths | {"embed/embedding": (9, 8)}))
    message = rf"rules\['{re.escape(shadowed)}'\] never decides: {message}"
    optimizer = muon(0.1, muon_weight_dimension_numbers=by_role(rules=rules))
    for use in (lambda t: by_role(t, rules), optimizer.init, lambda t: describe(t, **views(rules))):
        with pytest.raises(ValueError, match=message):
            use(tree)
    left = {rule: view for rule, view in rules.items() if rule != shadowed}
    first = {shadowed: rules[shadowed], **left}
    by_role(tree, left if message.endswith("leave it") else first)
    by_role({**tree, "other": optax.MaskedNode()}, rules)


def kernel_of(name, shape, layout="in_out", rules=None, **beside):
    named = [(f"blocks/0/a/{path}", s) for path, s in {name: shape, **beside}.items()]
    return routes(named, rules, layout)[0]


@pytest.mark.parametrize(
    ("name", "shape", "layout"),
    [
        ("conv/kernel", (3, 3, 64, 1), "in_out"),
        ("conv/weight", (1, 64, 3, 3), "out_in"),
        ("Conv_2/kernel", (5, 64, 1), "in_out"),
        ("conv1d/weight", (1, 64, 5), "out_in"),
        ("conv/kernel", (3, 3, 3, 16, 1), "in_out"),
        ("conv3d/weight", (1, 16, 3, 3, 3), "out_in"),
        ("ConvTranspose_0/kernel", (4, 4, 64, 1), "in_out"),
        ("conv_transpose/weight", (64, 1, 4, 4), "out_in"),  # PyTorch has (in, out, *window) there
        ("pointwise_conv/kernel", (1, 1, 64, 1), "in_out"),
        ("pwconv/kernel", (64, 1), "in_out"),
        ("pwconv/weight", (1, 64), "out_in"),
        ("conv/kernel", (3, 3, 1, 64), "in_out"),  # of one input, or depthwise
        ("conv/weight", (64, 1, 3, 3), "out_in"),
        ("experts/down", (4, 8, 1), "in_out"),
        ("attn/query/kernel", (8, 1, 1), "in_out"),
    ],
)
def test_kernels_with_one_output_are_vectors(name, shape, layout):
    assert kernel_of(name, shape, layout).view is None
    rules = {name: MATRICES}
    assert kernel_of(name, shape, layout, rules).view == MATRICES  # a rule has the last word


def test_stacked_convolutions_with_one_output_are_vectors():
    tree = shapes({"layers": {"conv": {"kernel": (5, 3, 3, 64, 1)}, "norm": {"scale": (5, 64)}}})
    assert by_role(tree)["layers"]["conv"]["kernel"] is None
    optimizer = muon(0.1, muon_weight_dimension_numbers=by_role)
    params = {"blocks": [{"conv": {"kernel": jnp.full((3, 3, 8, 1), 2.0)}}]}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert jnp.ptp(updates["blocks"][0]["conv"]["kernel"]) < 1e-6  # a sign, as AdamW's


def test_a_window_at_the_end_of_one_element_is_no_output():
    assert isinstance(kernel_of("conv/weight", (64, 32, 1)).view, Unknown)
    assert isinstance(kernel_of("conv/kernel", (64, 32, 1)).view, Unknown)
    assert kernel_of("conv/weight", (64, 32, 1), "out_in").view == ((-2, -1), -3)


def test_by_role_takes_its_arguments_before_the_parameters():
    tree = shapes({"mlp": {"up": {"kernel": (16, 8)}}, "embed": {"weight": (9, 8)}})
    rules = {"up": MuonDimensionNumbers(-1, -2)}
    bound = by_role(layout="out_in", rules=rules)
    assert repr(bound) == f"by_role(rules={rules!r}, layout='out_in')"
    assert eval(repr(bound)).keywords == bound.keywords
    found = bound(tree)
    assert found == by_role(tree, rules, "out_in") == pickle.loads(pickle.dumps(bound))(tree)
    assert by_role()(tree | {"mlp": {}}) == by_role(tree | {"mlp": {}})
    rules["embed"] = MuonDimensionNumbers(-2, -1)  # a later change of the caller's own dict
    assert bound(tree) == found and "embed" not in repr(bound)
    with pytest.raises(ValueError, match="layout must be one of"):
        by_role(layout="oi")
    with pytest.raises(TypeError, match="rules must be a dict"):
        by_role(rules=["up"])
    with pytest.raises(TypeError, match="params must be a tree of arrays"):
        by_role(None)


def test_describe_shows_which_rule_decides():
    tree = shapes({"mlp": {"up": {"kernel": (8, 16)}, "down": {"kernel": (16, 8)}}, "b": (3,)})
    rules = {"up": MATRICES, "^mlp/": None}
    for given in (by_role(rules=rules), functools.partial(by_role, rules=rules)):
        parameters = describe(tree, muon_weight_dimension_numbers=given).parameters
        assert {p.path: (p.role, p.optimizer) for p in parameters} == {
            "b": ("vector", "adamw"),
            "mlp/down/kernel": ("rule '^mlp/'", "adamw"),
            "mlp/up/kernel": ("rule 'up'", "muon"),
        }


@pytest.mark.parametrize(
    ("use", "argument"),
    [
        (lambda p, v: muon(0.1, muon_weight_dimension_numbers=v).init(p), "muon_"),
        (lambda p, v: muon(0.1, muon_weight_dimension_numbers=lambda _: v).init(p), "muon_"),
        (lambda p, v: describe(p, muon_weight_dimension_numbers=v), "muon_"),
        (lambda p, v: scale_by_muon(weight_dimension_numbers=v).init(p), ""),
    ],
)
def test_errors_name_the_argument_of_the_function_that_was_called(use, argument):
    params = {"w": jnp.ones((4, 8)), "v": jnp.ones((8, 4))}
    name = rf"(?<!\w){argument}weight_dimension_numbers"
    with pytest.raises(ValueError, match=rf"{name}\['w'\] must be MuonDim.* got 3"):
        use(params, {"w": 3, "v": None})
    with pytest.raises(ValueError, match=rf"{name} must be a tree like .* {name} has"):
        use(params, {"w": None, "v": None, "x": None})


def test_a_stack_has_its_layers_first_in_all_of_its_parameters():
    first = {
        "up": {"kernel": (3, 8, 16)},
        "down": {"kernel": (3, 16, 8)},
        "norm": {"scale": (3, 8)},
        "mixer": {"d": (3, 8)},
    }
    second = {"up": {"kernel": (8, 3, 16)}, "down": {"kernel": (16, 3, 8)}}
    views = jax.tree.leaves(by_role(shapes({"layers": first})), is_leaf=lambda x: x == MATRICES)
    assert views == [MATRICES, MATRICES]
    with pytest.raises(ValueError, match=r"know layers/down/kernel.*layers/up/kernel"):
        by_role(shapes({"layers": second}))
    rules = {"^layers/": MuonDimensionNumbers(0, 2)}
    assert by_role(shapes({"layers": second}), rules)["layers"]["up"]["kernel"] == (0, 2)


UP = {"kernel": (2, 3, 8, 16)}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        # Norms show layers below a name that stacks may have, and further axes of layers.
        ({"moe_layers": {"up": {"kernel": (3, 8, 16)}, "norm": {"scale": (3, 8)}}}, (-2, -1)),
        ({"moe_layers": {"up": {"kernel": (8, 16)}, "norm": {"scale": (8,)}}}, None),
        ({"layers": {"up": UP, "norm": {"scale": (2, 3, 8)}}}, (-2, -1)),
        ({"layers": {"up": UP, "norm": {"weight": (2, 3, 8)}}}, (-2, -1)),
        ({"layers": {"up": UP, "mixer": {"d": (2, 3, 8)}}}, None),
        ({"layers": {"up": UP, "norm": {"scale": (2, 3, 8)}, "a": (2, 3)}}, (-2, -1)),
    ],
)
def test_norms_show_layers(tree, expected):
    tree = shapes(tree)
    if expected is None:
        with pytest.raises(ValueError, match="know .*layers/up/kernel"):
            by_role(tree)
    else:
        (container,) = by_role(tree).values()
        assert container["up"]["kernel"] == expected


@pytest.mark.parametrize("container", ["blocks", "stack", "layers", "h"])
def test_numbers_in_names_say_that_a_container_is_no_stack(container):
    with_conv = {**QUERY_AND_OUT, "Conv_0": {"kernel": (3, 3, 8, 8)}}
    tree = shapes({container: {"block_0": QUERY_AND_OUT, "block_1": with_conv}})
    parameters = describe(tree, muon_weight_dimension_numbers=by_role).parameters
    assert {p.path.rsplit("/", 2)[1]: p.matrices for p in parameters} == {
        "query": ((1, 8, 8),),
        "out": ((1, 8, 8),),
        "Conv_0": ((1, 72, 8),),
    }


def test_an_update_has_the_views_of_the_whole_tree():
    def block(i):
        kernel = jax.random.normal(jax.random.key(i), (3, 3, 8, 8))
        return {
            "Conv_0": {"kernel": kernel},
            "Conv_1": {"kernel": kernel},
            "Norm_0": {"scale": jnp.ones(8)},
        }

    params = {"stages": {f"Block_{i}": block(i) for i in range(2)}}  # a stack, but for the norms
    updates = []
    for views in (by_role, by_role(params)):
        optimizer = normuon(1.0, muon_weight_dimension_numbers=views, normuon_b2=0.9)
        updates.append(optimizer.update(params, optimizer.init(params), params)[0])
    chex.assert_trees_all_equal(*updates)


def test_a_callable_sees_every_tree():
    def unless_zero(tree):
        return jax.tree.map(lambda x: MATRICES if np.any(x) else None, tree)

    optimizer = muon(0.1, muon_weight_dimension_numbers=unless_zero)
    for value in (1.0, 0.0, 1.0):
        params = {"w": jnp.full((4, 4), value), "scalar": 0.0}
        state = optimizer.init(params)
        expected = muon(0.1, muon_weight_dimension_numbers=unless_zero(params)).init(params)
        chex.assert_trees_all_equal_structs(state, expected)


@pytest.mark.parametrize("routes", [by_role, by_role(rules={"up": MATRICES})])
def test_hyperparameters_are_injected_beside_routes(routes):
    params = {"embed": {"embedding": jnp.ones((6, 4))}, "h_0": {"up": {"kernel": jnp.ones((4, 8))}}}
    arguments = {"learning_rate": 0.1, "muon_weight_dimension_numbers": routes}
    with pytest.raises(
        ValueError, match=r"one array of shape \(\).*static_args='muon_weight_dimens"
    ):
        optax.inject_hyperparams(muon)(**arguments).init(params)
    inject = optax.inject_hyperparams(muon, static_args="muon_weight_dimension_numbers")
    expected = muon(**arguments)
    state, injected = expected.init(params), inject(**arguments).init(params)
    chex.assert_trees_all_close(
        inject(**arguments).update(params, injected, params)[0],
        expected.update(params, state, params)[0],
        rtol=1e-4,
    )


def test_boxes_of_flax_are_no_part_of_the_path():
    class Module(linen.Module):
        @linen.compact
        def __call__(self, x):
            init = linen.with_partitioning(linen.initializers.ones, ("a", "b"))
            return linen.Dense(4, kernel_init=init, name="value")(x)

    boxed = jax.eval_shape(Module().init, jax.random.key(0), jnp.zeros((1, 6)))
    nested = {"value": {"value": jnp.zeros((3, 4))}}
    assert [p.path for p in describe(boxed).parameters] == ["value/bias", "value/kernel"]
    assert [p.path for p in describe(nested).parameters] == ["value/value"]


def test_the_table(capsys):
    params = {"up": {"kernel": jnp.zeros((8, 16))}, "norm": jnp.zeros(8)}
    description = describe(params, ns_coeffs=NewtonSchulz("balanced", implementation="xla"))
    assert capsys.readouterr().out == f"{description}\n"
    assert str(description).splitlines() == [
        "path       shape  role     optimizer  matrices  group",
        "norm       8      vector   adamw",
        "up/kernel  8×16   unknown  muon       1×8×16    0",
        "",
        "group  shape   coefficients  method    dtype    products  GFLOP",
        "0      1×8×16  balanced      standard  float16  xla       7.68e-06",  # 15 units of 8³
    ]


def test_groups_are_those_of_the_update():
    params = nnx.to_pure_dict(flax_models.nnx_gpt())
    one, many = (
        describe(params, ns_coeffs=NewtonSchulz(max_group_bytes=size), **views({})).groups
        for size in (2**30, 0)
    )
    assert [group.shape for group in one] == [(8, 8, 8), (4, 8, 32)]
    assert len(many) == 12
    assert sum(g.flops for g in one) == sum(g.flops for g in many)


def test_arguments_are_those_of_muon():
    params = {"up": {"kernel": jnp.zeros((8, 16))}}
    (group,) = describe(params, preset="gram").groups
    assert (group.method, group.dtype) == ("gram", "float16")
    standard = dataclasses.replace(PRESETS["gram"]["ns_coeffs"], method="standard")
    (group,) = describe(params, preset="gram", ns_coeffs=standard).groups
    assert group.method == "standard"
    half = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)
    for kwargs, expected in (
        ({}, "bfloat16"),
        ({"mu_dtype": "float32"}, "float32"),
        ({"mu_rounding": "stochastic"}, "float32"),
    ):
        (group,) = describe({"w": half}, ns_coeffs=NewtonSchulz(dtype=None), **kwargs).groups
        assert group.dtype == expected
    with pytest.raises(ValueError, match=r"preset must be one of .*'keller'.*, got 'kj'"):
        describe(params, preset="kj")
    with pytest.raises(
        TypeError, match="describe has no argument 'ns_coefficients': pass ns_coeffs="
    ):
        describe({}, ns_coefficients="fast")
    with pytest.raises(ValueError, match=r"mu_rounding must be one of .*, got 'up'"):
        describe({}, mu_rounding="up")
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' cannot run: the default device"):
        describe({"w": half}, ns_coeffs=NewtonSchulz(implementation="mosaic_gpu"))
    with pytest.raises(ValueError, match=r"parameter \['w'\] of shape \(16, 32\): Split"):
        describe({"w": half}, muon_weight_dimension_numbers={"w": Split(0, (3, 4))})
