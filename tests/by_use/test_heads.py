"""`per_head`: a matrix for each head of a projection to heads; output projections stay whole."""

import jax.numpy as jnp
import pytest
import real_language_models  # noqa: F401
import small_models  # noqa: F401
from optax.contrib import MuonDimensionNumbers as Dims
from use_models import IN_OUT, MODELS, OUT_IN, attention, f32, heads, i32, merged

from muon_jax import Split, Unfold, by_use

TOKENS = i32(2, 16)


def per_head(name):
    fn, params, inputs, *_ = MODELS[name]()
    return by_use(fn, params, *inputs, per_head=True)


def unfolded(axis, width, view):
    return Unfold(axis, (-1, width), view)


# Axis 1 unfolds to heads and columns: the matrix of a head is axes 0 and 2.
OWN = Dims(0, 2)


@pytest.mark.parametrize(
    ("name", "views"),
    [
        (
            "nnx_gpt",
            {f"b/0/a/{k}/kernel": Dims(0, 2) for k in ("query", "key", "value")}
            | {"b/0/a/out/kernel": Dims((0, 1), 2), "b/0/u/kernel": IN_OUT},
        ),
        (
            "gemma_einsum_layers",
            {
                "layers/0/q_einsum": Dims(1, 2),
                "layers/0/attn_vec_einsum": Dims((0, 1), 2),
                "layers/0/linear": IN_OUT,
            },
        ),
        (
            "gpt2",
            {
                "h/0/attn/c_attn/weight": Split(1, (768,) * 3, unfolded(1, 64, OWN)),
                "h/0/attn/c_proj/weight": IN_OUT,
                "h/0/mlp/c_fc/weight": IN_OUT,
            },
        ),
        (
            "llama3_8b_scanned",
            {
                "layers/q": unfolded(2, 128, Dims(1, 3)),
                "layers/k": unfolded(2, 128, Dims(1, 3)),
                "layers/v": unfolded(2, 128, Dims(1, 3)),
                "layers/o": Dims(1, 2),
                "layers/gate": Dims(1, 2),
            },
        ),
        (
            "qwen3_moe_sorted",
            {
                "layers/0/q": unfolded(1, 128, OWN),
                "layers/0/k": unfolded(1, 128, OWN),
                "layers/0/o": IN_OUT,
            },
        ),
        (
            "gpt_oss",
            {
                "block/0/qkv/weight": Split(0, (4096, 512, 512), Unfold(0, (-1, 64), Dims(2, 1))),
                "block/0/out/weight": OUT_IN,
            },
        ),
        (
            "deepseek_v3",
            {
                "layers/0/q_b": unfolded(1, 192, OWN),
                "layers/0/kv_b": Unfold(1, (16, 256), Split(2, (128, 128), OWN)),
                "layers/0/q_a": IN_OUT,
                "layers/0/o": IN_OUT,
            },
        ),
        (
            "neox_interleaved",
            {"qkv": Unfold(1, (4, 24), Split(2, (8, 8, 8), OWN)), "o": IN_OUT},
        ),
        ("eqx_attention", {"0/query_proj/weight": Unfold(0, (-1, 8), Dims(2, 1))}),
        (
            "maxtext_attention_scanned_axis_1",
            {"layers/qkv_proj/kernel": Split(2, (1, 1, 1), Dims(0, (2, 4)))},
        ),
    ],
)
def test_heads_are_matrices(name, views):
    routes = per_head(name)
    assert {path: routes[path].view for path in views} == views


def test_without_heads_it_raises():
    def fn(p, x):
        return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]

    params = {"a": f32(8, 16), "b": f32(16, 16), "c": f32(16, 4)}
    with pytest.raises(ValueError, match="per_head=True finds no projection to heads among the 3"):
        by_use(fn, params, f32(2, 8), per_head=True)


def test_heads_of_grouped_queries_have_one_width():
    def fn(p, t):
        x = p["embed"][t]
        q, k, v = heads(x @ p["q"], 8), heads(x @ p["k"], 2), heads(x @ p["v"], 2)
        o = attention(q, jnp.repeat(k, 4, 2), jnp.repeat(v, 4, 2))
        return (x + merged(o) @ p["o"]) @ p["head"]

    params = {
        "embed": f32(100, 64),
        "q": f32(64, 128),
        "k": f32(64, 32),
        "v": f32(64, 32),
        "o": f32(128, 64),
        "head": f32(64, 100),
    }
    routes = by_use(fn, params, TOKENS, per_head=True)
    assert {routes[k].view for k in "qkv"} == {unfolded(1, 16, OWN)}
    assert routes["o"].view == IN_OUT
    assert "heads on axis 1" in routes["q"].reason
