"""Trees of training frameworks: the route of every parameter, one call where rules are due."""

import functools
import re
from collections import defaultdict
from typing import Any, NamedTuple

import flax_models
import framework_shapes
import helpers
import jax
import jax.numpy as jnp
import model_shapes
import pytest
from flax import linen, nnx
from helpers import nested
from model_shapes import shapes

from muon_jax import MuonDimensionNumbers, by_role, describe
from muon_jax._matrices.views import MATRICES, is_view
from muon_jax._trees import path_name

OUT_IN = {"layout": "out_in"}


def numbers(reduction_axis, output_axis):
    return MuonDimensionNumbers(reduction_axis, output_axis)


def assert_routes(tree, views, muon):
    """That paths have the view of the expression in `muon` that finds them, and others None."""
    leaves = jax.tree.leaves_with_path(views(tree), is_leaf=is_view)
    found = {path_name(path): view for path, view in leaves}
    assert len(found) == len(jax.tree.leaves(tree))
    unused = {*muon}
    for path, view in found.items():
        finds = [expression for expression in muon if re.search(expression, path)]
        assert view == (muon[finds[0]] if finds else None), path
        unused -= {*finds}
    assert not unused


# Layers along axis 1: one of four axes is that of layers, or one of three.
ALONG_AXIS_1 = {
    r"(query|key|value|w(q|kv)_b)/kernel$": numbers(-4, (-2, -1)),
    "(self_attention|GptOssAttention)/out/kernel$": numbers((-4, -2), -1),
}
MLP_ALONG_AXIS_1 = {r"(mlp|shared_experts?)/w(i_[01]|o)/kernel$": numbers(-3, -1)}
DEEPSEEK = {
    **ALONG_AXIS_1,
    **MLP_ALONG_AXIS_1,
    r"w(q|kv)_a/kernel$": numbers(-3, -1),
    r"MoeBlock_0/w(i_[01]|o)$": MATRICES,
}
EINSUMS = {
    r"(q|k|v|kv|qkv)_einsum/": numbers(-2, (-3, -1)),
    "attn_vec_einsum/": numbers((-3, -2), -1),
    r"mlp/\w+_proj/kernel": MATRICES,
}
LM1B = {
    "(query|key|value)/kernel$": numbers(-3, (-2, -1)),
    "out/kernel$": numbers((-3, -2), -1),
    r"MlpBlock_0/Dense_\d/kernel$": MATRICES,
}
TOKENS = functools.partial(flax_models.linen_params, dtype=jnp.int32)
# Trees and the matrices of the parameters that Muon has.
WITHOUT_RULES = {
    "MaxText, Llama 3": (
        framework_shapes.maxtext_llama3,
        ALONG_AXIS_1 | MLP_ALONG_AXIS_1,
    ),
    "MaxText, repeats and stages of a pipeline": (
        framework_shapes.maxtext_pipeline,
        {
            "(query|key|value)/kernel$": numbers(-3, (-2, -1)),
            "out/kernel$": numbers((-3, -2), -1),
            "mlp/.*kernel$": MATRICES,
        },
    ),
    "MaxText, Qwen3 MoE": (
        framework_shapes.maxtext_qwen3_moe,
        ALONG_AXIS_1 | {r"moe_block/w(i_[01]|o)$": MATRICES},
    ),
    "MaxText, DeepSeek V3": (framework_shapes.maxtext_deepseek3, DEEPSEEK),
    "MaxText, Kimi K2": (framework_shapes.maxtext_kimi_k2, DEEPSEEK),
    "MaxText, Gemma 3": (
        framework_shapes.maxtext_gemma3,
        {
            "remainder/.*(query|key|value)/kernel$": numbers(-3, (-2, -1)),
            "remainder/.*out/kernel$": numbers((-3, -2), -1),
            "remainder/.*mlp/.*kernel$": MATRICES,
            **ALONG_AXIS_1,
            **MLP_ALONG_AXIS_1,
        },
    ),
    "MaxText, Gemma 4, a stack in a stack": (
        framework_shapes.maxtext_gemma4,
        {
            "local_layers/.*(query|key|value)/kernel$": numbers(-5, (-2, -1)),
            "local_layers/.*out/kernel$": numbers((-5, -2), -1),
            r"local_layers/.*shared_experts/w(i_[01]|o)/kernel$": numbers(-4, -1),
            r"MoeBlock_0/w(i_[01]|o)$": MATRICES,
            **ALONG_AXIS_1,
            **MLP_ALONG_AXIS_1,
        },
    ),
    "Flax' example lm1b": (lambda: TOKENS(flax_models.Lm1b(), 2, 8), LM1B),
    "Flax' example gemma": (lambda: flax_models.nnx_shapes(flax_models.Gemma), EINSUMS),
    "nnx, the factors of LoRA alone": (
        lambda: nnx.state(nnx.eval_shape(lambda: WithLoRA(nnx.Rngs(0))), nnx.LoRAParam),
        {},
    ),
}


class WithLoRA(nnx.Module):
    def __init__(self, rngs):
        down = nnx.Linear(16, 8, rngs=rngs)
        self.up_proj = nnx.LoRALinear(8, 16, lora_rank=2, rngs=rngs)
        self.down_proj = nnx.LoRA(16, 2, 8, base_module=down, rngs=rngs)


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        cells = nnx.GRUCell(6, 8, rngs=rngs), nnx.OptimizedLSTMCell(6, 8, rngs=rngs)
        self.gru, self.lstm = (nnx.RNN(cell) for cell in cells)


def tree_of(make):
    tree = make()
    is_flat = all(isinstance(leaf, tuple) for leaf in tree.values())
    return shapes(nested(tree)) if is_flat else tree


@pytest.mark.parametrize(("make", "muon"), WITHOUT_RULES.values(), ids=WITHOUT_RULES)
def test_routes_without_rules(make, muon):
    assert_routes(tree_of(make), by_role, muon)


GATE = "^decoder/layers/layer_3/attention/attention/query/kernel$"
HEADS_OF_TUNIX = {
    "[qkv]_proj/w$": numbers(-3, (-2, -1)),
    "o_proj/w$": numbers((-3, -2), -1),
}
# Trees, arguments, the expressions that the error says to pass, and the matrices with AdamW there.
WITH_RULES = {
    "MaxText, Qwen3-Next": (
        framework_shapes.maxtext_qwen3_next,
        {},
        [
            r"^decoder/layers/layer_\d+/attention/in_proj_ba/kernel$",
            r"^decoder/layers/layer_\d+/attention/in_proj_qkvz/kernel$",
            r"^decoder/layers/layer_\d+/mlp/routed_experts/gate/kernel$",
            GATE,
        ],
        {
            "(key|value)/kernel": numbers(-4, (-2, -1)),
            "out(_proj)?/kernel$": numbers(-3, -1),
            r"routed_experts/w(i_[01]|o)$": MATRICES,
            **MLP_ALONG_AXIS_1,
            r"shared_expert/w(i_[01]|o)/kernel$": numbers(-3, -1),
        },
    ),
    "Grug, of marin": (
        framework_shapes.grug,
        {},
        ["^output_proj$"],
        {"attn/w_[qkvo]$": MATRICES, "mlp/mlp_(up|down)$": MATRICES},
    ),
    "Flax' example seq2seq": (
        framework_shapes.flax_seq2seq,
        {},
        [
            "^DecoderLSTMCell_0/Dense_0/kernel$",
            *(
                f"^{above}LSTMCell_0/{of}{gate}/kernel$"
                for above in ("DecoderLSTMCell_0/", "")
                for of in "hi"
                for gate in "fgio"
            ),
        ],
        {},
    ),
    "Flax' example sst2": (
        framework_shapes.flax_sst2,
        {},
        [
            "^classifier/keys_only_mlp_attention/keys/kernel$",
            "^classifier/mlp/intermediate_layer/kernel$",
        ],
        {},
    ),
    "Flax RoBERTa of Hugging Face": (
        framework_shapes.hugging_face_roberta,
        {},
        ["^classifier/dense/kernel$", "^classifier/out_proj/kernel$"],
        {"encoder/.*kernel$": MATRICES},
    ),
    "nnx, layers with LoRA": (
        lambda: flax_models.nnx_shapes(WithLoRA),
        {},
        ["^down_proj/base_module/kernel$", "^up_proj/kernel$"],
        {},
    ),
    "recurrent cells of nnx": (
        lambda: flax_models.nnx_shapes(Recurrent),
        {},
        [f"^{name}/cell/dense_{of}/kernel$" for name in ("gru", "lstm") for of in "hi"],
        {},
    ),
    "MaxText, gpt-oss": (
        framework_shapes.maxtext_gpt_oss,
        {},
        [
            rf"^decoder/layers/layers_\d+/GptOssMlp/{name}$"
            for name in ("gate/kernel", r"wi_\d+", "wo")
        ],
        ALONG_AXIS_1,
    ),
    "Tunix, Qwen3 MoE": (
        framework_shapes.tunix_qwen3_moe,
        {},
        [rf"^layers/\d+/mlp/{name}_proj$" for name in ("down", "gate", "up")],
        HEADS_OF_TUNIX,
    ),
    "Tunix, Gemma 4 MoE": (
        framework_shapes.tunix_gemma4_moe,
        {},
        [r"^layers/\d+/moe/gating_einsum$"],
        EINSUMS | {"moe/linear": MATRICES},
    ),
}


@pytest.mark.parametrize(
    ("make", "arguments", "rules", "muon"), WITH_RULES.values(), ids=WITH_RULES
)
def test_one_call_to_paste(make, arguments, rules, muon):
    tree = tree_of(make)
    with pytest.raises(ValueError, match="by_role does not know") as raised:
        by_role(tree, **arguments)
    views = helpers.pasted(str(raised.value))
    assert views.keywords == {**arguments, "rules": dict.fromkeys(rules)}
    assert_routes(tree, views, muon)


ROUTER = {"mlp/gate/weight$": None}
OF_TORCH = {
    "self_attn/[^/]*proj[^/]*/weight$": numbers(-1, -2),
    r"experts/0/\w+_proj/weight$": numbers(-1, -2),
}
# Trees, arguments that do not fit, why, and the matrices in the other order; None for no order.
IN_ANOTHER_ORDER = {
    "Qwen3 MoE of PyTorch": (
        lambda: shapes(model_shapes.qwen3_moe()),
        {"rules": ROUTER},
        "2048 is the width of the embedding",
        OF_TORCH,
    ),
    "DeepSeek V3 of PyTorch": (
        lambda: shapes(model_shapes.deepseek()),
        {"rules": ROUTER},
        "7168 is the width of the embedding",
        OF_TORCH,
    ),
    "gpt-oss of PyTorch, whose experts have their inputs first": (
        framework_shapes.pytorch_gpt_oss,
        OUT_IN,
        "experts/gate_up_proj .* whose bias has the size of its input",
        None,
    ),
    "Levanter, Mixtral": (
        framework_shapes.levanter_mixtral,
        OUT_IN,
        r"w1/weight of shape \(3, 8, 64, 192\) and 2 like it, where 64 is the width of the emb",
        None,
    ),
    "Levanter, GPT-2": (
        framework_shapes.levanter_gpt2,
        OUT_IN,
        "c_fc/weight .* whose bias has the size of its input",
        {
            "c_attn/weight": numbers(-4, (-2, -1)),
            "attn/c_proj/weight": numbers((-3, -2), -1),
            "mlp/c_(fc|proj)/weight": MATRICES,
        },
    ),
}


@pytest.mark.parametrize(
    ("make", "arguments", "why", "muon"), IN_ANOTHER_ORDER.values(), ids=IN_ANOTHER_ORDER
)
def test_a_tree_in_another_order_raises_with_the_remedy(make, arguments, why, muon):
    tree = tree_of(make)
    with pytest.raises(ValueError, match=rf"layout='\w+' does not fit .*{why}") as raised:
        by_role(tree, **arguments)
    (call,) = re.findall(r"pass (by_role\(.*?\)) if all", str(raised.value))
    if muon is not None:
        assert_routes(tree, eval(call), muon)


class NumbersOfMaxText(NamedTuple):
    """As `maxtext.optimizers.muon.MuonDimensionNumbers`."""

    reduction_axis: Any = 0
    output_axis: Any = 1
    sharding: Any = None


def test_the_numbers_of_maxtext_are_taken_and_those_of_by_role_agree():
    """As `maxtext.utils.muon_utils` makes them, beside boxes, which MaxText has at first."""

    def of_path(path):
        if re.search("scale$|embedding$|logits_dense", path):
            return None
        if "self_attention" not in path:
            return NumbersOfMaxText((0,), (-1,))
        return (
            NumbersOfMaxText((0, -2), (-1,))
            if "/out/" in path
            else NumbersOfMaxText((0,), (-2, -1))
        )

    flat = framework_shapes.maxtext_llama3()
    theirs = {"params": nested({path: of_path(path) for path in flat})}
    params = {"params": shapes(nested(flat))}
    boxed = jax.tree.map(lambda x: linen.LogicallyPartitioned(x, ("a",) * len(x.shape)), params)
    expected = describe(params, muon_weight_dimension_numbers=by_role).parameters
    for tree in (params, boxed):
        found = describe(tree, muon_weight_dimension_numbers=theirs).parameters
        assert [p.matrices for p in found] == [p.matrices for p in expected]


# Published models: arguments, the matrices of Muon, and what AdamW has besides vectors.
PUBLISHED = {
    "GPT-2, Hugging Face's Flax": (
        lambda: shapes(model_shapes.gpt2(12, 768, 50257)),
        OUT_IN,
        [
            "c_attn 36 of 768×768",
            "attn/c_proj 12 of 768×768",
            "c_fc 12 of 768×3072",
            "mlp/c_proj 12 of 3072×768",
        ],
        ["wpe", "wte"],
    ),
    "Llama 3 8B, MaxText": (
        framework_shapes.maxtext_llama3,
        {},
        [
            "wi_0, wi_1 32 of 4096×14336",
            "wo 32 of 14336×4096",
            "key, value 32 of 4096×1024",
            "out, query 32 of 4096×4096",
        ],
        ["logits_dense", "token_embedder"],
    ),
    "Gemma 3 4B, MaxText": (
        framework_shapes.maxtext_gemma3,
        {},
        [
            "wi_0, wi_1 34 of 2560×10240",
            "wo 34 of 10240×2560",
            "key, value 34 of 2560×1024",
            "out 34 of 2048×2560",
            "query 34 of 2560×2048",
        ],
        ["token_embedder"],
    ),
    "Qwen3 30B-A3B, MaxText": (
        framework_shapes.maxtext_qwen3_moe,
        {},
        [
            "wi_0, wi_1 6144 of 2048×768",
            "wo 6144 of 768×2048",
            "key, value 48 of 2048×512",
            "out 48 of 4096×2048",
            "query 48 of 2048×4096",
        ],
        ["gate", "logits_dense", "token_embedder"],
    ),
    "DeepSeek V3, MaxText": (
        framework_shapes.maxtext_deepseek3,
        {},
        [
            "mlp/wi_0, mlp/wi_1 3 of 7168×18432",
            "mlp/wo 3 of 18432×7168",
            "out 61 of 16384×7168",
            "wkv_a 61 of 7168×576",
            "wkv_b 61 of 512×32768",
            "wq_a 61 of 7168×1536",
            "wq_b 61 of 1536×24576",
            "MoeBlock_0/wi_0, MoeBlock_0/wi_1 14848 of 7168×2048",
            "MoeBlock_0/wo 14848 of 2048×7168",
            "shared_experts/wi_0, shared_experts/wi_1 58 of 7168×2048",
            "shared_experts/wo 58 of 2048×7168",
        ],
        ["logits_dense", "gate", "token_embedder"],
    ),
    "Kimi K2, MaxText": (
        framework_shapes.maxtext_kimi_k2,
        {},
        [
            "mlp/wi_0, mlp/wi_1 1 of 7168×18432",
            "mlp/wo 1 of 18432×7168",
            "out 61 of 8192×7168",
            "wkv_a 61 of 7168×576",
            "wkv_b 61 of 512×16384",
            "wq_a 61 of 7168×1536",
            "wq_b 61 of 1536×12288",
            "MoeBlock_0/wi_0, MoeBlock_0/wi_1 23040 of 7168×2048",
            "MoeBlock_0/wo 23040 of 2048×7168",
            "shared_experts/wi_0, shared_experts/wi_1 60 of 7168×2048",
            "shared_experts/wo 60 of 2048×7168",
        ],
        ["logits_dense", "gate", "token_embedder"],
    ),
}


def published_routes(make, arguments):
    """The matrices of Muon, by module where its name alone is ambiguous; AdamW's of rank 2."""
    views = by_role(**arguments)
    parameters = describe(tree_of(make), muon_weight_dimension_numbers=views).parameters
    counts, modules, of_adamw = defaultdict(int), defaultdict(set), {}
    for p in parameters:
        *_, module, last = ("", *re.sub("/(kernel|embedding)$", "", p.path).split("/"))
        for n, rows, cols in p.matrices:
            counts[module, last, rows, cols] += n
            modules[last].add(module)
        if p.optimizer == "adamw" and p.role in ("embedding", "head", "router", "position"):
            of_adamw[last] = None
    alike = defaultdict(list)
    for (module, last, rows, cols), n in counts.items():
        name = f"{module}/{last}" if len(modules[last]) > 1 else last
        alike[f"{n} of {rows}×{cols}"].append(name)
    return [f"{', '.join(names)} {stack}" for stack, names in alike.items()], [*of_adamw]


@pytest.mark.parametrize(("make", "arguments", "muon", "adamw"), PUBLISHED.values(), ids=PUBLISHED)
def test_routes_of_published_models(make, arguments, muon, adamw):
    assert published_routes(make, arguments) == (muon, adamw)
