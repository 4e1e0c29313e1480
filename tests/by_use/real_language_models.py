"""Language models at real size, with answers read off their sources."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from optax.contrib import MuonDimensionNumbers as Dims
from use_models import (
    IN_OUT,
    KEY,
    OUT_IN,
    attention,
    cross_entropy,
    equinox,
    f32,
    first,
    haiku,
    halves,
    heads,
    hidden,
    i32,
    interleaved,
    linen,
    merged,
    nnx_module,
    norm,
    real_size,
    rope,
)

from muon_jax import Split, Unfold

TOKENS = i32(2, 128)
STACKED = Dims(1, 2)


@real_size
def gpt2():
    """Conv1D has (in, out), q, k and v are fused, the embedding is tied."""

    def fn(p, t):
        x = p["wte"][t] + p["wpe"][: t.shape[1]]
        for b in p["h"]:
            qkv = norm(x) @ b["attn"]["c_attn"]["weight"] + b["attn"]["c_attn"]["bias"]
            q, k, v = (heads(y, 12) for y in jnp.split(qkv, 3, -1))
            x = x + merged(attention(q, k, v)) @ b["attn"]["c_proj"]["weight"]
            h = jax.nn.gelu(norm(x) @ b["mlp"]["c_fc"]["weight"])
            x = x + h @ b["mlp"]["c_proj"]["weight"]
        return cross_entropy(norm(x) @ p["wte"].T, t)

    block = {
        "attn": {
            "c_attn": {"weight": f32(768, 2304), "bias": f32(2304)},
            "c_proj": {"weight": f32(768, 768)},
        },
        "mlp": {"c_fc": {"weight": f32(768, 3072)}, "c_proj": {"weight": f32(3072, 768)}},
    }
    params = {"wte": f32(50257, 768), "wpe": f32(1024, 768), "h": [block] * 12}
    return (
        fn,
        params,
        (TOKENS,),
        {
            "wte": "embedding",
            "wpe": "vector",
            "c_attn/weight": hidden(Split(1, (768,) * 3, IN_OUT)),
            "(c_proj|c_fc)/weight": hidden(),
        },
    )


def llama_block(x, b, n, kv):
    y = norm(x) * b["norm1"]
    q, k, v = rope(heads(y @ b["q"], n)), rope(heads(y @ b["k"], kv)), heads(y @ b["v"], kv)
    k, v = jnp.repeat(k, n // kv, 2), jnp.repeat(v, n // kv, 2)
    x = x + merged(attention(q, k, v)) @ b["o"]
    y = norm(x) * b["norm2"]
    return x + (jax.nn.silu(y @ b["gate"]) * (y @ b["up"])) @ b["down"]


@real_size
def llama3_8b_scanned():
    def fn(p, t):
        p = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)

        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
        def block(x, b):
            return llama_block(x, b, 32, 8).astype(x.dtype), None

        x, _ = jax.lax.scan(block, p["embed"][t], p["layers"])
        return cross_entropy((norm(x) @ p["head"]).astype(jnp.float32), t)

    d, f, n = 4096, 14336, 32
    layers = {
        "q": f32(n, d, d),
        "k": f32(n, d, 1024),
        "v": f32(n, d, 1024),
        "o": f32(n, d, d),
        "gate": f32(n, d, f),
        "up": f32(n, d, f),
        "down": f32(n, f, d),
        "norm1": f32(n, d),
        "norm2": f32(n, d),
    }
    params = {"embed": f32(128256, d), "layers": layers, "head": f32(d, 128256)}
    return (
        fn,
        params,
        (TOKENS,),
        {"embed": "embedding", "head": "output", "norm": "vector", "layers": hidden(STACKED)},
    )


@real_size
def llama_torch_layout():
    """Weights are (out, in), as in PyTorch, and heads are grouped by an einsum."""

    def fn(p, t):
        x = p["tok"][t]
        for b in p["layers"]:
            y = norm(x)
            q = rope(heads(y @ b["wq"].T, 32)).reshape(2, 128, 8, 4, 64)
            k, v = rope(heads(y @ b["wk"].T, 8)), heads(y @ b["wv"].T, 8)
            a = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k))
            o = jnp.einsum("bkgts,bskd->btkgd", a, v).reshape(2, 128, 2048)
            x = x + o @ b["wo"].T
            y = norm(x)
            x = x + (jax.nn.silu(y @ b["w1"].T) * (y @ b["w3"].T)) @ b["w2"].T
        return norm(x) @ p["head"].T

    block = {
        "wq": f32(2048, 2048),
        "wk": f32(512, 2048),
        "wv": f32(512, 2048),
        "wo": f32(2048, 2048),
        "w1": f32(8192, 2048),
        "w2": f32(2048, 8192),
        "w3": f32(8192, 2048),
    }
    params = {"tok": f32(128256, 2048), "layers": [block] * 2, "head": f32(128256, 2048)}
    return (
        fn,
        params,
        (TOKENS,),
        {"tok": "embedding", "head": "output", "layers": hidden(OUT_IN)},
    )


@real_size
def gemma_einsum_layers():
    """Flax's gemma: q (heads, in, dim), k and v (2, heads, in, dim), gate and up (2, in, out)."""

    def fn(p, t):
        x = p["input_embedding"][t] * 2048**0.5
        for b in p["layers"]:
            y = norm(x) * (1 + b["scale"])
            q = rope(jnp.einsum("BTD,NDH->BTNH", y, b["q_einsum"]))
            k, v = jnp.einsum("BSD,CKDH->CBSKH", y, b["kv_einsum"])
            k, v = (jnp.repeat(z, 8, 2) for z in (rope(k), v))
            x = x + jnp.einsum("BTNH,NHD->BTD", attention(q, k, v), b["attn_vec_einsum"])
            y = norm(x)
            gate = jax.nn.gelu(jnp.dot(y, b["gating_einsum"][0]))
            x = x + jnp.dot(gate * jnp.dot(y, b["gating_einsum"][1]), b["linear"])
        logits = jnp.dot(norm(x), p["input_embedding"].T)
        return cross_entropy(jnp.tanh(logits / 30) * 30, t)

    block = {
        "scale": f32(2048),
        "q_einsum": f32(8, 2048, 256),
        "kv_einsum": f32(2, 1, 2048, 256),
        "attn_vec_einsum": f32(8, 256, 2048),
        "gating_einsum": f32(2, 2048, 16384),
        "linear": f32(16384, 2048),
    }
    return (
        fn,
        {"input_embedding": f32(256128, 2048), "layers": [block] * 2},
        (TOKENS,),
        {
            "input_embedding": "embedding",
            "q_einsum": hidden(Dims(1, (0, 2))),
            "kv_einsum": hidden(Split(0, (1, 1), Dims(2, (0, 3)))),
            "attn_vec": hidden(Dims((0, 1), 2)),
            "gating": hidden(STACKED),
            "linear": hidden(),
        },
    )


def swiglu(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


@real_size
def deepseek_v3():
    """Multi-head latent attention, a sigmoid router with a bias, shared experts, and one more
    token predicted by a block of its own."""
    n, nope, pe, v_dim, rank, experts = 16, 128, 64, 128, 512, 64

    def attend(b, x):
        q = heads(norm(x @ b["q_a"]) @ b["q_b"], n)
        q = jnp.concatenate([q[..., :nope], rope(q[..., nope:], True)], -1)
        kv = x @ b["kv_a"]
        c, k_pe = norm(kv[..., :rank]), rope(kv[..., None, rank:], True)
        k, v = jnp.split(heads(c @ b["kv_b"], n), [nope], -1)
        k_pe = jnp.broadcast_to(k_pe, (*k.shape[:-1], pe))
        return merged(attention(q, jnp.concatenate([k, k_pe], -1), v)) @ b["o"]

    def moe(b, x):
        scores = jax.nn.sigmoid(x @ b["router"])
        _, chosen = jax.lax.top_k(scores + b["bias"], 6)
        mask = jax.nn.one_hot(chosen, experts).sum(-2)
        gates = scores * mask / (scores * mask).sum(-1, keepdims=True)
        e = b["experts"]
        h = jax.nn.silu(jnp.einsum("btd,edf->btef", x, e["gate"]))
        h = h * jnp.einsum("btd,edf->btef", x, e["up"]) * gates[..., None]
        return jnp.einsum("btef,efd->btd", h, e["down"]) + swiglu(b["shared"], x)

    def block(b, x):
        x = x + attend(b, norm(x))
        return x + (moe(b, norm(x)) if "router" in b else swiglu(b["mlp"], norm(x)))

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            x = block(b, x)
        later = jnp.concatenate([norm(p["embed"][t]), norm(x)], -1) @ p["mtp"]["proj"]
        later = block(p["mtp"]["block"], later)
        return [cross_entropy(norm(y) @ p["head"], t) for y in (x, later)]

    d = 2048
    own = {
        "q_a": f32(d, 1536),
        "q_b": f32(1536, n * (nope + pe)),
        "kv_a": f32(d, rank + pe),
        "kv_b": f32(rank, n * (nope + v_dim)),
        "o": f32(n * v_dim, d),
    }

    def mlp(f, *batch):
        return {"gate": f32(*batch, d, f), "up": f32(*batch, d, f), "down": f32(*batch, f, d)}

    dense = {**own, "mlp": mlp(10944)}
    sparse = {
        **own,
        "router": f32(d, experts),
        "bias": f32(experts),
        "experts": mlp(1408, experts),
        "shared": mlp(2816),
    }
    params = {
        "embed": f32(102400, d),
        "layers": [dense, sparse, sparse],
        "mtp": {"proj": f32(2 * d, d), "block": sparse},
        "head": f32(d, 102400),
    }
    kv_b = Unfold(1, (n, nope + v_dim), Split(2, (nope, v_dim), Dims(0, (1, 2))))
    return (
        fn,
        params,
        (TOKENS,),
        {
            "embed": "embedding",
            "head": "output",
            "router": "router",
            "kv_a": hidden(Split(1, (rank, pe), IN_OUT)),
            "kv_b": hidden(kv_b),
            "experts": hidden(STACKED),
            "q_a|q_b|/o$|mlp|shared|proj": hidden(),
        },
    )


@real_size
def qwen3_moe_sorted():
    """Norms of q and k, experts by `ragged_dot` over sorted tokens, gate and up fused."""
    experts, k_top, d, f = 128, 8, 2048, 768

    def moe(b, x):
        flat = x.reshape(-1, d)
        probabilities = jax.nn.softmax(flat @ b["router"])
        weights, chosen = jax.lax.top_k(probabilities, k_top)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        h = jax.lax.ragged_dot(flat[order // k_top], b["gate_up"], sizes)
        gate, up = jnp.split(h, 2, -1)
        y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, b["down"], sizes)
        y = y[jnp.argsort(order)].reshape(-1, k_top, d)
        balance = (probabilities.mean(0) * sizes).sum()
        return (y * weights[..., None]).sum(1).reshape(x.shape), balance

    def fn(p, t):
        x, total = p["embed"][t], 0.0
        for b in p["layers"]:
            y = norm(x)
            q, k = (
                rope(norm(heads(y @ b[n], h)) * b[n + "_norm"]) for n, h in (("q", 32), ("k", 4))
            )
            v = heads(y @ b["v"], 4)
            o = attention(q, jnp.repeat(k, 8, 2), jnp.repeat(v, 8, 2))
            x = x + merged(o) @ b["o"]
            y, balance = moe(b, norm(x))
            x, total = x + y, total + balance
        return cross_entropy(norm(x) @ p["head"], t) + 0.001 * total

    block = {
        "q": f32(d, 4096),
        "k": f32(d, 512),
        "v": f32(d, 512),
        "o": f32(4096, d),
        "q_norm": f32(128),
        "k_norm": f32(128),
        "router": f32(d, experts),
        "gate_up": f32(experts, d, 2 * f),
        "down": f32(experts, f, d),
    }
    params = {"embed": f32(151936, d), "layers": [block] * 2, "head": f32(d, 151936)}
    return (
        fn,
        params,
        (TOKENS,),
        {
            "embed": "embedding",
            "head": "output",
            "router": "router",
            "gate_up": hidden(Split(2, (f, f), STACKED)),
            "down": hidden(STACKED),
            "/[qkvo]$": hidden(),
        },
    )


@real_size
def mixtral_loop_over_experts():
    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            q, k, v = (heads(norm(x) @ b[n], 32) for n in "qkv")
            x = x + merged(attention(rope(q), rope(k), v)) @ b["o"]
            y = norm(x)
            top, chosen = jax.lax.top_k(y @ b["gate"], 2)
            top = jax.nn.softmax(top)
            for i, e in enumerate(b["experts"]):
                weight = (top * (chosen == i)).sum(-1, keepdims=True)
                x = x + weight * ((jax.nn.silu(y @ e["w1"]) * (y @ e["w3"])) @ e["w2"])
        return cross_entropy(norm(x) @ p["head"], t)

    expert = {"w1": f32(4096, 14336), "w3": f32(4096, 14336), "w2": f32(14336, 4096)}
    block = {n: f32(4096, 4096) for n in "qkvo"} | {"gate": f32(4096, 8), "experts": [expert] * 8}
    params = {"embed": f32(32000, 4096), "layers": [block] * 2, "head": f32(4096, 32000)}
    return (
        fn,
        params,
        (TOKENS,),
        {
            "embed": "embedding",
            "head": "output",
            "gate": "router",
            "experts|[qkvo]$": hidden(),
        },
    )


@real_size
def gpt_oss():
    """Fused q, k and v, sinks, experts that are gathered, gate and up in alternate rows."""
    n, kv, dim, d, f, experts = 64, 8, 64, 2880, 2880, 32

    def fn(p, t):
        x = p["embedding"][t]
        for b in p["block"]:
            qkv = norm(x) @ b["qkv"]["weight"].T + b["qkv"]["bias"]
            q, k, v = jnp.split(qkv, [n * dim, (n + kv) * dim], -1)
            q, k, v = rope(heads(q, n)), rope(heads(k, kv)), heads(v, kv)
            scores = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, n // kv, 2))
            sinks = jnp.broadcast_to(b["sinks"][:, None, None], (*scores.shape[:-1], 1))
            a = jax.nn.softmax(jnp.concatenate([scores, sinks], -1))[..., :-1]
            o = jnp.einsum("bhts,bshd->bthd", a, jnp.repeat(v, n // kv, 2))
            x = x + merged(o) @ b["out"]["weight"].T
            y = norm(x).reshape(-1, d)
            top, chosen = jax.lax.top_k(y @ b["gate"]["weight"].T + b["gate"]["bias"], 4)
            top = jax.nn.softmax(top)
            h = jnp.einsum("beck,bk->bec", b["mlp1_weight"][chosen], y) + b["mlp1_bias"][chosen]
            gate, up = h[..., ::2], h[..., 1::2]
            h = gate * jax.nn.sigmoid(1.7 * gate) * (up + 1)
            h = jnp.einsum("beck,bek->bec", b["mlp2_weight"][chosen], h) + b["mlp2_bias"][chosen]
            x = x + jnp.einsum("bec,be->bc", h, top).reshape(x.shape)
        return cross_entropy(norm(x) @ p["unembedding"]["weight"].T, t)

    rows = (n + 2 * kv) * dim
    block = {
        "qkv": {"weight": f32(rows, d), "bias": f32(rows)},
        "sinks": f32(n),
        "out": {"weight": f32(d, n * dim)},
        "gate": {"weight": f32(experts, d), "bias": f32(experts)},
        "mlp1_weight": f32(experts, 2 * f, d),
        "mlp1_bias": f32(experts, 2 * f),
        "mlp2_weight": f32(experts, d, f),
        "mlp2_bias": f32(experts, d),
    }
    params = {
        "embedding": f32(201088, d),
        "block": [block] * 2,
        "unembedding": {"weight": f32(201088, d)},
    }
    return (
        fn,
        params,
        (TOKENS,),
        {
            "unembedding": "output",
            "embedding": "embedding",
            "qkv/weight": hidden(Split(0, (n * dim, kv * dim, kv * dim), OUT_IN)),
            "out/weight": hidden(OUT_IN),
            "gate/weight": "router",
            "mlp1_weight": hidden(interleaved(1, f, 2, Dims(3, (1, 2)))),
            "mlp2_weight": hidden(Dims(2, 1)),
            "_bias": "embedding",
        },
    )


@real_size
def t5_v1_1():
    """Relative bias that all layers share, gated GELU, encoder and decoder, untied head."""
    n, d, f = 12, 768, 2048

    def attend(b, x, y, bias):
        q, k, v = heads(x @ b["q"], n), heads(y @ b["k"], n), heads(y @ b["v"], n)
        return merged(attention(q, k, v, bias)) @ b["o"]

    def mlp(b, x):
        return (jax.nn.gelu(x @ b["wi_0"]) * (x @ b["wi_1"])) @ b["wo"]

    def biases(table, t):
        distance = jnp.clip(jnp.arange(t)[None] - jnp.arange(t)[:, None], -16, 15) + 16
        return table[distance].transpose(2, 0, 1)

    def fn(p, t, u):
        x, y = p["shared"][t], p["shared"][u]
        bias = biases(p["encoder"]["relative_bias"], t.shape[1])
        for b in p["encoder"]["blocks"]:
            x = x + attend(b["self"], norm(x), norm(x), bias)
            x = x + mlp(b["mlp"], norm(x))
        x, bias = norm(x), biases(p["decoder"]["relative_bias"], u.shape[1])
        for b in p["decoder"]["blocks"]:
            y = y + attend(b["self"], norm(y), norm(y), bias)
            y = y + attend(b["cross"], norm(y), x, 0.0)
            y = y + mlp(b["mlp"], norm(y))
        return cross_entropy(norm(y) @ p["lm_head"], u)

    attn = {k: f32(d, d) for k in "qkvo"}
    ffn = {"wi_0": f32(d, f), "wi_1": f32(d, f), "wo": f32(f, d)}
    params = {
        "shared": f32(32128, d),
        "encoder": {"relative_bias": f32(32, n), "blocks": [{"self": attn, "mlp": ffn}] * 2},
        "decoder": {
            "relative_bias": f32(32, n),
            "blocks": [{"self": attn, "cross": attn, "mlp": ffn}] * 2,
        },
        "lm_head": f32(d, 32128),
    }
    return (
        fn,
        params,
        (TOKENS, TOKENS),
        {
            "shared|relative_bias": "embedding",
            "lm_head": "output",
            "blocks": hidden(),
        },
    )


@real_size
def whisper():
    n, d = 8, 512

    def attend(b, x, y):
        q, k, v = heads(x @ b["q"], n), heads(y @ b["k"], n), heads(y @ b["v"], n)
        return merged(attention(q, k, v)) @ b["o"]

    def conv1d(x, w, stride):
        return jax.lax.conv_general_dilated(
            x, w, (stride,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    def fn(p, mel, t):
        x = jax.nn.gelu(conv1d(mel, p["encoder"]["conv1"], 1))
        x = jax.nn.gelu(conv1d(x, p["encoder"]["conv2"], 2))
        x = x + jnp.sin(jnp.arange(x.shape[1])[:, None] / 10 ** jnp.linspace(0, 4, d))
        for b in p["encoder"]["blocks"]:
            x = x + attend(b["self"], norm(x), norm(x))
            x = x + jax.nn.gelu(norm(x) @ b["fc1"]) @ b["fc2"]
        y = p["decoder"]["embed"][t] + p["decoder"]["positions"][: t.shape[1]]
        for b in p["decoder"]["blocks"]:
            y = y + attend(b["self"], norm(y), norm(y))
            y = y + attend(b["cross"], norm(y), norm(x))
            y = y + jax.nn.gelu(norm(y) @ b["fc1"]) @ b["fc2"]
        return cross_entropy(norm(y) @ p["decoder"]["embed"].T, t)

    attn = {k: f32(d, d) for k in "qkvo"}
    block = {"self": attn, "fc1": f32(d, 4 * d), "fc2": f32(4 * d, d)}
    params = {
        "encoder": {"conv1": f32(3, 80, d), "conv2": f32(3, d, d), "blocks": [block] * 2},
        "decoder": {
            "embed": f32(51865, d),
            "positions": f32(448, d),
            "blocks": [{**block, "cross": attn}] * 2,
        },
    }
    return (
        fn,
        params,
        (f32(2, 3000, 80), TOKENS),
        {
            "conv1": first(Dims((0, 1), 2)),
            "conv2": hidden(Dims((0, 1), 2)),
            "embed": "embedding",
            "positions": "vector",
            "blocks": hidden(),
        },
    )


class EncoderDecoderBlock(nn.Module):
    cross: bool = False

    @nn.compact
    def __call__(self, x, encoded=None, train=True):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(16, dropout_rate=0.1, deterministic=not train)(
            y, mask=mask
        )
        x = x + nn.Dropout(0.1, deterministic=not train)(y)
        if encoded is not None:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(16, dropout_rate=0.1)(
                y, encoded, deterministic=not train
            )
        y = nn.Dense(x.shape[-1])(nn.relu(nn.Dense(4096)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=not train)(y)


FLAX_ATTENTION = {
    "(query|key|value)/kernel": hidden(Dims(0, (1, 2))),
    "(query|key|value)/bias": "vector",
    "out/kernel": hidden(Dims((0, 1), 2)),
}


@real_size
def flax_lm1b():
    """With the modules of Flax; the embedding makes the logits by `attend`."""

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, t):
            embed = nn.Embed(30000, 1024)
            x = nn.Dropout(0.1, deterministic=False)(embed(t))
            for _ in range(3):
                x = EncoderDecoderBlock()(x)
            return embed.attend(nn.LayerNorm()(x)) / np.sqrt(1024)

    expected = {"embedding": "embedding", **FLAX_ATTENTION, "Dense_./kernel": hidden()}
    return *linen(Transformer(), TOKENS), expected


@real_size
def flax_wmt():
    """Encoder and decoder share an embedding, the head is a Dense."""

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, t, u):
            embed = nn.Embed(32000, 1024)
            positions = self.param("positions", nn.initializers.normal(), (1, 256, 1024))
            x, y = embed(t) + positions[:, :128], embed(u) + positions[:, :128]
            for _ in range(2):
                x = EncoderDecoderBlock(name=f"encoder_{_}")(x)
            x = nn.LayerNorm()(x)
            for _ in range(2):
                y = EncoderDecoderBlock(name=f"decoder_{_}")(y, x)
            return nn.Dense(32000, name="logits")(nn.LayerNorm()(y))

    expected = {
        "embedding": "embedding",
        "positions": "vector",
        "logits/kernel": "output",
        **FLAX_ATTENTION,
        "Dense_./kernel": hidden(),
    }
    return *linen(Transformer(), TOKENS, TOKENS), expected


@real_size
def nnx_decoder_with_cache():
    """`nnx.MultiHeadAttention` in decode mode: k and v go through a cache."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(12, 768, rngs=rngs, decode=True)
            self.norm = nnx.LayerNorm(768, rngs=rngs)
            self.up = nnx.Linear(768, 3072, rngs=rngs)
            self.down = nnx.Linear(3072, 768, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norm(x))
            return x + self.dropout(self.down(nnx.gelu(self.up(x))))

    class Decoder(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32000, 768, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.head = nnx.Linear(768, 32000, rngs=rngs)

        def __call__(self, t):
            x = self.embed(t)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def make(rngs):
        decoder = Decoder(rngs)
        for block in decoder.blocks:
            block.attention.init_cache((2, 128, 768))
        return decoder

    return (
        *nnx_module(make, i32(2, 1)),
        {
            "embed/": "embedding",
            "head/kernel": "output",
            **FLAX_ATTENTION,
            "(up|down)/kernel": hidden(),
        },
    )


@real_size
def nnx_scanned_over_layers():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(1024, 4096, rngs=rngs)
            self.down = nnx.Linear(4096, 1024, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(x)))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=6)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def blocks(rngs):
                return Block(rngs)

            self.inp = nnx.Linear(512, 1024, rngs=rngs)
            self.blocks = blocks(rngs)
            self.out = nnx.Linear(1024, 10, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x, block):
                return block(x)

            return self.out(forward(self.inp(x), self.blocks))

    return (
        *nnx_module(Stack, f32(8, 512)),
        {
            "inp/kernel": first(),
            "out/kernel": "output",
            "blocks.*kernel": hidden(STACKED),
            "blocks.*bias": "vector",
        },
    )


@real_size
def nnx_lora():
    """`nnx.LoRALinear`: only linear operations are between the factors, beside a kernel."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32000, 1024, rngs=rngs)
            self.q = nnx.LoRALinear(1024, 4096, lora_rank=16, rngs=rngs)
            self.down = nnx.LoRALinear(4096, 1024, lora_rank=16, rngs=rngs)
            self.head = nnx.Linear(1024, 32000, rngs=rngs)

        def __call__(self, t):
            return self.head(self.down(nnx.gelu(self.q(self.embed(t)))))

    return (
        *nnx_module(Net, TOKENS),
        {
            "embed": "embedding",
            "head/kernel": "output",
            "lora_[ab]": "factor",
            "(q|down)/kernel": hidden(),
        },
    )


@real_size
def equinox_bert():
    """As in Equinox's documentation: tables of tokens, positions and segments, a pooler."""
    import equinox as eqx

    class Layer(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.Linear
        output: eqx.nn.Linear
        layernorm: eqx.nn.LayerNorm

        def __init__(self, key):
            self.attention = eqx.nn.MultiheadAttention(
                12, 768, use_query_bias=True, dropout_p=0.1, key=key
            )
            self.mlp = eqx.nn.Linear(768, 3072, key=key)
            self.output = eqx.nn.Linear(3072, 768, key=key)
            self.layernorm = eqx.nn.LayerNorm(768)

        def __call__(self, x, key):
            x = jax.vmap(self.layernorm)(x + self.attention(x, x, x, key=key))
            return x + jax.vmap(self.output)(jax.nn.gelu(jax.vmap(self.mlp)(x)))

    class Bert(eqx.Module):
        tokens: eqx.nn.Embedding
        positions: eqx.nn.Embedding
        segments: eqx.nn.Embedding
        layers: list
        pooler: eqx.nn.Linear
        classifier: eqx.nn.Linear

        def __init__(self, key):
            self.tokens = eqx.nn.Embedding(30522, 768, key=key)
            self.positions = eqx.nn.Embedding(512, 768, key=key)
            self.segments = eqx.nn.Embedding(2, 768, key=key)
            self.layers = [Layer(key) for _ in range(2)]
            self.pooler = eqx.nn.Linear(768, 768, key=key)
            self.classifier = eqx.nn.Linear(768, 2, key=key)

        def __call__(self, t, s, key):
            x = jax.vmap(self.tokens)(t) + jax.vmap(self.segments)(s)
            x = x + jax.vmap(self.positions)(jnp.arange(t.shape[0]))
            for layer in self.layers:
                x = layer(x, key)
            return self.classifier(jnp.tanh(self.pooler(x[0])))

    def call(m, t, s, key):
        return jax.vmap(m, in_axes=(0, 0, None))(t, s, key)

    return (
        *equinox(Bert, TOKENS, TOKENS, KEY, call=call),
        {
            "tokens|positions|segments": "embedding",
            "classifier/weight": "output",
            "(proj|mlp|output|pooler)/weight": hidden(OUT_IN),
        },
    )


@real_size
def haiku_transformer_xl_size():
    import haiku as hk

    def fn(t):
        x = hk.Embed(32000, 1024)(t)
        init = hk.initializers.VarianceScaling()
        for _ in range(2):
            y = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.MultiHeadAttention(16, 64, model_size=1024, w_init=init)(y, y, y)
            y = hk.Linear(4096)(hk.LayerNorm(-1, True, True)(x))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(1024)(jax.nn.gelu(y)))
        return hk.Linear(32000, name="head")(x)

    return (
        *haiku(fn, TOKENS),
        {
            "embeddings": "embedding",
            "head/w": "output",
            "(query|key|value)/w$|linear.*/w": hidden(),
        },
    )


@real_size
def mamba2():
    """One projection to z, x, B, C and dt; the first of them after it pass a depthwise filter."""
    d, d_in, state, n = 768, 1536, 128, 24

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            h = norm(x) @ b["in_proj"]
            z, xbc, dt = jnp.split(h, [d_in, 2 * d_in + 2 * state], -1)
            xbc = jax.nn.silu(
                jax.lax.conv_general_dilated(
                    xbc,
                    b["conv"],
                    (1,),
                    [(3, 0)],
                    dimension_numbers=("NWC", "WIO", "NWC"),
                    feature_group_count=xbc.shape[-1],
                )
                + b["conv_bias"]
            )
            u, bb, cc = jnp.split(xbc, [d_in, d_in + state], -1)
            dt = jax.nn.softplus(dt + b["dt_bias"])
            u = heads(u, n)
            decay = jnp.cumsum(-dt * jnp.exp(b["A_log"]), 1)
            mask = jnp.exp(decay[:, :, None] - decay[:, None])
            scores = jnp.einsum("btn,bsn->bts", cc, bb)[..., None] * mask
            y = jnp.einsum("btsh,bshp->bthp", scores, u * dt[..., None])
            y = merged(y + u * b["D"][:, None])
            x = x + norm(y * jax.nn.silu(z)) @ b["out_proj"]
        return cross_entropy(norm(x) @ p["embed"].T, t)

    block = {
        "in_proj": f32(d, 2 * d_in + 2 * state + n),
        "conv": f32(4, 1, d_in + 2 * state),
        "conv_bias": f32(d_in + 2 * state),
        "dt_bias": f32(n),
        "A_log": f32(n),
        "D": f32(n),
        "out_proj": f32(d_in, d),
    }
    sizes = (d_in, d_in, state, state, n)
    return (
        fn,
        {"embed": f32(50288, d), "layers": [block] * 2},
        (TOKENS,),
        {
            "embed": "embedding",
            "in_proj": hidden(Split(1, sizes, IN_OUT)),
            "conv": "depthwise",
            "out_proj": hidden(),
        },
    )


@real_size
def rwkv6():
    """Data-dependent shifts by a small network whose second layer is a matrix for each of five."""
    d, n = 2048, 32

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            y = norm(x)
            delta = jnp.pad(y, ((0, 0), (1, 0), (0, 0)))[:, :-1] - y
            mix = jnp.tanh((y + delta * b["maa_x"]) @ b["maa_w1"])
            mix = jnp.einsum("btfr,frd->fbtd", heads(mix, 5), b["maa_w2"])
            w, k, v, r, g = (y + delta * (b["maa"][i] + mix[i]) for i in range(5))
            w = jnp.exp(-jnp.exp(b["decay"] + jnp.tanh(w @ b["decay_w1"]) @ b["decay_w2"]))
            r, k, v, w = (
                heads(r @ b["r"], n),
                heads(k @ b["k"], n),
                heads(v @ b["v"], n),
                heads(w, n),
            )
            g = jax.nn.silu(g @ b["g"])

            def step(s, i, u=b["u"]):
                r, k, v, w = i
                kv = k[..., :, None] * v[..., None, :]
                y = jnp.einsum("bhi,bhij->bhj", r, s + u[..., None] * kv)
                return s * w[..., None] + kv, y

            swapped = [a.swapaxes(0, 1) for a in (r, k, v, w)]
            _, y = jax.lax.scan(step, jnp.zeros((2, n, d // n, d // n)), swapped)
            x = x + (merged(norm(y.swapaxes(0, 1))) * g) @ b["o"]
            y = norm(x)
            k = jnp.square(jax.nn.relu(y @ b["ffn_k"]))
            x = x + jax.nn.sigmoid(y @ b["ffn_r"]) * (k @ b["ffn_v"])
        return cross_entropy(norm(x) @ p["head"], t)

    block = {k: f32(d, d) for k in "rkvgo"} | {
        "maa_x": f32(d),
        "maa": f32(5, d),
        "maa_w1": f32(d, 5 * 32),
        "maa_w2": f32(5, 32, d),
        "decay": f32(d),
        "decay_w1": f32(d, 64),
        "decay_w2": f32(64, d),
        "u": f32(n, d // n),
        "ffn_k": f32(d, 7168),
        "ffn_v": f32(7168, d),
        "ffn_r": f32(d, d),
    }
    return (
        fn,
        {"embed": f32(65536, d), "layers": [block] * 2, "head": f32(d, 65536)},
        (TOKENS,),
        {
            "embed": "embedding",
            "head": "output",
            "maa_w1": hidden(),
            "maa_w2": hidden(STACKED),
            "maa$|/u$": "vector",
            "decay_w|/[rkvgo]$|ffn": hidden(),
        },
    )


@real_size
def xlstm():
    """sLSTM: gates of the input beside recurrent matrices that are block diagonal, by head."""
    d, n = 1024, 4

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            gates = norm(x) @ b["w"]

            def step(s, gate, b=b):
                c, h = s
                own = jnp.einsum("bhd,hdge->bghe", heads(h, n), b["r"]).reshape(2, 4 * d)
                i, f, z, o = jnp.split(gate + own + b["bias"], 4, -1)
                c = jax.nn.sigmoid(f) * c + jnp.exp(-jax.nn.softplus(i)) * jnp.tanh(z)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
                return (c, h), h

            zeros = jnp.zeros((2, d))
            _, h = jax.lax.scan(step, (zeros, zeros), gates.swapaxes(0, 1))
            x = x + norm(h.swapaxes(0, 1)) @ b["proj"]
        return cross_entropy(norm(x) @ p["head"], t)

    block = {
        "w": f32(d, 4 * d),
        "r": f32(n, d // n, 4, d // n),
        "bias": f32(4 * d),
        "proj": f32(d, d),
    }
    return (
        fn,
        {"embed": f32(50304, d), "layers": [block] * 2, "head": f32(d, 50304)},
        (TOKENS,),
        {
            "embed": "embedding",
            "head": "output",
            "/w$": hidden(Split(1, (d,) * 4, IN_OUT)),
            "/r$": hidden(Split(2, (1,) * 4, Dims(1, (2, 3)))),
            "proj": hidden(),
        },
    )


@real_size
def multi_token_prediction():
    """Heads of several tokens, each with a layer of its own before a head that all share."""

    def fn(p, t):
        x = p["embed"][t]
        for b in p["trunk"]:
            x = llama_block(x, b, 16, 16)
        losses = [cross_entropy(norm(llama_block(x, b, 16, 16)) @ p["head"], t) for b in p["heads"]]
        return sum(losses)

    d = 1024
    block = {k: f32(d, d) for k in "qkvo"} | {
        "gate": f32(d, 2816),
        "up": f32(d, 2816),
        "down": f32(2816, d),
        "norm1": f32(d),
        "norm2": f32(d),
    }
    params = {
        "embed": f32(32000, d),
        "trunk": [block] * 2,
        "heads": [block] * 4,
        "head": f32(d, 32000),
    }
    return (
        fn,
        params,
        (TOKENS,),
        {"embed": "embedding", "head$": "output", "trunk|heads": hidden()},
    )


@real_size
def medusa_heads():
    """A stack of heads by vmap: a residual layer each, then an output layer each."""

    def fn(p, t):
        x = p["embed"][t]
        x = x + jax.nn.silu(x @ p["up"]) @ p["down"]
        own = jax.vmap(lambda h: (x + jax.nn.silu(x @ h["res"])) @ h["out"])(p["medusa"])
        return cross_entropy(x @ p["head"], t), own

    params = {
        "embed": f32(32000, 1024),
        "up": f32(1024, 4096),
        "down": f32(4096, 1024),
        "medusa": {"res": f32(4, 1024, 1024), "out": f32(4, 1024, 32000)},
        "head": f32(1024, 32000),
    }
    return (
        fn,
        params,
        (TOKENS,),
        {
            "embed": "embedding",
            "head|medusa/out": "output",
            "up|down": hidden(),
            "medusa/res": hidden(STACKED),
        },
    )


@real_size
def maxtext_attention_scanned_axis_1():
    """Fused qkv (in, 3, heads, dim) as one DenseGeneral, stacked along axis 1 by `nn.scan`."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = with_logical_constraint(nn.RMSNorm()(x), ("batch", "length", "embed"))
            qkv = nn.DenseGeneral((3, 16, 128), use_bias=False, name="qkv_proj")(y)
            q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
            o = attention(rope(q), rope(k), v)
            x = x + nn.DenseGeneral(2048, axis=(-2, -1), use_bias=False, name="out")(o)
            y = nn.RMSNorm()(x)
            h = nn.silu(nn.Dense(5632, use_bias=False, name="wi_0")(y))
            h = h * nn.Dense(5632, use_bias=False, name="wi_1")(y)
            return x + nn.Dense(2048, use_bias=False, name="wo")(h), None

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, t):
            x = nn.Embed(32000, 2048)(t)
            block = nn.remat(Block, prevent_cse=False)
            layers = nn.scan(
                block, variable_axes={"params": 1}, split_rngs={"params": True}, length=24
            )
            x, _ = layers(name="layers")(x, None)
            return nn.Dense(32000, use_bias=False, name="logits")(nn.RMSNorm()(x))

    return (
        *linen(Decoder(), TOKENS),
        {
            "embedding": "embedding",
            "logits": "output",
            "scale": "vector",
            "qkv_proj": hidden(Split(2, (1, 1, 1), Dims(0, (2, 3, 4)))),
            "layers/out": hidden(Dims((0, 2), 3)),
            "layers/w": hidden(Dims(0, 2)),
        },
    )


@real_size
def switch_transformer_with_capacity():
    """Dispatch and combine by einsum, a balance loss and a z loss of the router."""
    experts, d, f = 32, 768, 3072

    class Switch(nn.Module):
        @nn.compact
        def __call__(self, x):
            flat = x.reshape(-1, d)
            capacity = 2 * flat.shape[0] // experts
            logits = nn.Dense(experts, use_bias=False, name="router")(flat)
            probabilities = jax.nn.softmax(logits)
            one_hot = jax.nn.one_hot(jnp.argmax(probabilities, -1), experts)
            place = jnp.cumsum(one_hot, 0) * one_hot - 1
            dispatch = one_hot[..., None] * jax.nn.one_hot(place.astype(int), capacity)
            wi = self.param("wi", nn.initializers.normal(), (experts, d, f))
            wo = self.param("wo", nn.initializers.normal(), (experts, f, d))
            h = nn.relu(jnp.einsum("tec,td,edf->ecf", dispatch, flat, wi))
            y = jnp.einsum("ecf,efd->ecd", h, wo)
            gate = (probabilities * one_hot).sum(-1)
            y = jnp.einsum("tec,ecd->td", dispatch * gate[:, None, None], y)
            balance = (probabilities.mean(0) * one_hot.mean(0)).sum() * experts
            z = jnp.square(jax.nn.logsumexp(logits, -1)).mean()
            return y.reshape(x.shape), balance + z

    class Net(nn.Module):
        @nn.compact
        def __call__(self, t):
            x, total = nn.Embed(32128, d)(t), 0.0
            for _ in range(2):
                x = x + nn.MultiHeadDotProductAttention(12)(nn.RMSNorm()(x))
                y, loss = Switch()(nn.RMSNorm()(x))
                x, total = x + y, total + loss
            return cross_entropy(nn.Dense(32128, name="head")(nn.RMSNorm()(x)), t) + total

    return (
        *linen(Net(), TOKENS),
        {
            "embedding": "embedding",
            "head/kernel": "output",
            "router": "router",
            **FLAX_ATTENTION,
            "w[io]$": hidden(STACKED),
        },
    )


@real_size
def pipeline_stages():
    """vmap over stages of a scan over layers; microbatches shift from stage to stage."""
    stages, layers, d = 4, 6, 1024

    def fn(p, t):
        x = p["embed"][t].reshape(8, -1, d)

        def layer(x, b):
            return x + jax.nn.gelu(norm(x) @ b["up"]) @ b["down"], None

        def stage(x, b):
            return jax.lax.scan(jax.checkpoint(layer), x, b)[0]

        def step(state, x):
            state = jnp.concatenate([x[None], state[:-1]])
            state = jax.vmap(stage)(state, p["stages"])
            return state, state[-1]

        state = jnp.zeros((stages, *x.shape[1:]))
        _, y = jax.lax.scan(step, state, x)
        return norm(y) @ p["head"]

    params = {
        "embed": f32(32000, d),
        "stages": {"up": f32(stages, layers, d, 4 * d), "down": f32(stages, layers, 4 * d, d)},
        "head": f32(d, 32000),
    }
    return (
        fn,
        params,
        (TOKENS,),
        {"embed": "embedding", "head": "output", "stages": hidden(Dims(2, 3))},
    )


MESH = jax.sharding.AbstractMesh(
    (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)
P = jax.sharding.PartitionSpec


@real_size
def sharding_constraints_in_jit():
    def fn(p, t):
        def put(x, *spec):
            return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(MESH, P(*spec)))

        @jax.jit
        def block(x, b):
            wq = put(b["qkv"], None, "model")
            q, k, v = (heads(y, 16) for y in jnp.split(put(norm(x) @ wq, "data"), 3, -1))
            x = x + put(merged(attention(q, k, v)), "data", None, "model") @ b["o"]
            return x + jax.nn.gelu(put(norm(x) @ b["up"], "data", None, "model")) @ b["down"]

        x = put(p["embed"], "model")[t]
        for b in p["layers"]:
            x = block(x, b)
        return jax.jit(lambda x, w: cross_entropy(x @ w, t))(x, p["head"])

    d = 1024
    block = {"qkv": f32(d, 3 * d), "o": f32(d, d), "up": f32(d, 4 * d), "down": f32(4 * d, d)}
    return (
        fn,
        {"embed": f32(32000, d), "layers": [block] * 2, "head": f32(d, 32000)},
        (TOKENS,),
        {
            "embed": "embedding",
            "head": "output",
            "qkv": hidden(Split(1, (d, d, d), IN_OUT)),
            "/o$|up|down": hidden(),
        },
    )


@real_size
def tensor_parallel_shard_map():
    """Column-parallel, then row-parallel layers with psum; a weight that is gathered (FSDP)."""
    d, n = 2048, 16

    def block(x, q, k, v, o, gate, up, down):
        q, k, v = (heads(norm(x) @ w, n // 4) for w in (q, k, v))
        x = x + jax.lax.psum(merged(attention(rope(q), rope(k), v)) @ o, "model")
        up = jax.lax.all_gather(up, "data", axis=0, tiled=True)
        h = jax.nn.silu(norm(x) @ gate) * (norm(x) @ up)
        return x + jax.lax.psum(h @ down, "model")

    columns, rows = P(None, "model"), P("model", None)
    sharded = jax.shard_map(
        block,
        mesh=MESH,
        in_specs=(P("data"), columns, columns, columns, rows, columns, P("data", "model"), rows),
        out_specs=P("data"),
    )

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            x = sharded(x, *(b[k] for k in ("q", "k", "v", "o", "gate", "up", "down")))
        return cross_entropy(norm(x) @ p["head"], t)

    own = {k: f32(d, d) for k in "qkvo"}
    own |= {"gate": f32(d, 5632), "up": f32(d, 5632), "down": f32(5632, d)}
    return (
        fn,
        {"embed": f32(32000, d), "layers": [own] * 2, "head": f32(d, 32000)},
        (TOKENS,),
        {"embed": "embedding", "head": "output", "layers": hidden()},
    )


@real_size
def custom_vjp_layers():
    """A product with a rule of its own for derivatives, and a fused loss that takes the head."""

    @jax.custom_vjp
    def linear(x, w):
        return x @ w

    linear.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda saved, g: (g @ saved[1].T, jnp.einsum("bti,bto->io", saved[0], g)),
    )

    @jax.custom_vjp
    def fused_loss(x, w, t):
        return cross_entropy(x @ w, t)

    fused_loss.defvjp(
        lambda x, w, t: (fused_loss(x, w, t), (x, w)),
        lambda saved, g: (g * saved[0], g * saved[1], None),
    )

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            x = x + linear(jax.nn.gelu(linear(norm(x), b["up"])), b["down"])
        return fused_loss(norm(x), p["head"], t)

    block = {"up": f32(1024, 4096), "down": f32(4096, 1024)}
    return (
        fn,
        {"embed": f32(32000, 1024), "layers": [block] * 2, "head": f32(1024, 32000)},
        (TOKENS,),
        {"embed": "embedding", "head": "output", "layers": hidden()},
    )


@real_size
def flash_attention():
    """The kernel is opaque, but takes activations; q, k, v and the output stay matrices."""
    from jax.experimental import pallas as pl

    def flash(q, k, v):
        def kernel(q, k, v, o):
            o[...] = q[...] + k[...] + v[...]

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype))(q, k, v)

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            q, k, v = (heads(norm(x) @ b[n], 16) for n in "qkv")
            x = x + merged(flash(q, k, v)) @ b["o"]
            q, k, v = (heads(y, 16) for y in jnp.split(norm(x) @ b["qkv"], 3, -1))
            x = x + merged(jax.nn.dot_product_attention(q, k, v, is_causal=True)) @ b["o2"]
        return cross_entropy(norm(x) @ p["head"], t)

    d = 1024
    block = {k: f32(d, d) for k in ("q", "k", "v", "o", "o2")} | {"qkv": f32(d, 3 * d)}
    return (
        fn,
        {"embed": f32(32000, d), "layers": [block] * 2, "head": f32(d, 32000)},
        (TOKENS,),
        {
            "embed": "embedding",
            "head": "output",
            "qkv": hidden(Split(1, (d, d, d), IN_OUT)),
            "layers": hidden(),
        },
    )


@real_size
def quantization_aware():
    """Fake quantization with a straight-through estimator, scales of columns, casts to float8."""

    def fake(w):
        scale = jnp.max(jnp.abs(w), 0, keepdims=True) / 127
        return w + jax.lax.stop_gradient(jnp.round(w / scale) * scale - w)

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            h = jax.nn.gelu(norm(x) @ fake(b["up"]).astype(jnp.bfloat16))
            down = b["down"].astype(jnp.float8_e4m3fn).astype(jnp.bfloat16)
            x = x + (h @ down).astype(jnp.float32)
            x = x + norm(x) @ (jnp.clip(b["bits"], -1, 1) * b["alpha"])
        return cross_entropy(norm(x) @ p["head"], t)

    block = {
        "up": f32(1024, 4096),
        "down": f32(4096, 1024),
        "bits": f32(1024, 1024),
        "alpha": f32(1, 1024),
    }
    return (
        fn,
        {"embed": f32(32000, 1024), "layers": [block] * 2, "head": f32(1024, 32000)},
        (TOKENS,),
        {"embed": "embedding", "head": "output", "alpha": "vector", "layers": hidden()},
    )


@real_size
def lora_merged_on_llama():
    """LoRA's product is added to a frozen-size kernel of a GQA attention before the product."""

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            lora = {k: b[k] + 2.0 * (b["lora"][k]["a"] @ b["lora"][k]["b"]) for k in "qkvo"}
            x = llama_block(x, {**b, **lora}, 16, 16)
        return cross_entropy(norm(x) @ p["head"], t)

    d = 1024
    block = {k: f32(d, d) for k in "qkvo"} | {
        "gate": f32(d, 2816),
        "up": f32(d, 2816),
        "down": f32(2816, d),
        "norm1": f32(d),
        "norm2": f32(d),
        "lora": {k: {"a": f32(d, 8), "b": f32(8, d)} for k in "qkvo"},
    }
    return (
        fn,
        {"embed": f32(32000, d), "layers": [block] * 2, "head": f32(d, 32000)},
        (TOKENS,),
        {"embed": "embedding", "head": "output", "lora": "factor", "layers": hidden()},
    )


@real_size
def falcon_parallel_multi_query():
    """One projection to 71 heads of q and one of k and v, attention and MLP side by side."""
    n, dim, d = 71, 64, 4544

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            y = norm(x)
            fused = heads(y @ b["qkv"], n + 2)
            q, k, v = fused[..., :-2, :], fused[..., -2:-1, :], fused[..., -1:, :]
            k, v = (jnp.broadcast_to(z, q.shape) for z in (rope(k), v))
            x = x + merged(attention(rope(q), k, v)) @ b["dense"]
            x = x + jax.nn.gelu(y @ b["up"]) @ b["down"]
        return cross_entropy(norm(x) @ p["embed"].T, t)

    block = {
        "qkv": f32(d, (n + 2) * dim),
        "dense": f32(d, d),
        "up": f32(d, 4 * d),
        "down": f32(4 * d, d),
    }
    return (
        fn,
        {"embed": f32(65024, d), "layers": [block] * 2},
        (TOKENS,),
        {
            "embed": "embedding",
            "qkv": hidden(Split(1, (n * dim, dim, dim), IN_OUT)),
            "layers": hidden(),
        },
    )


@real_size
def mup_and_tied_scaled():
    """Stacked weights by `lax.scan` over groups of two layers, of which one attends locally."""

    def fn(p, t):
        x = p["embed"][t] * 32.0

        def pair(x, b):
            for i in (0, 1):
                own = jax.tree.map(lambda a, i=i: a[i], b)
                x = llama_block(x, own, 8, 4)
            return x, None

        x, _ = jax.lax.scan(pair, x, p["pairs"])
        return cross_entropy(norm(x) @ p["embed"].T / 32.0, t)

    d, n = 1024, 6
    own = {
        "q": f32(n, 2, d, d),
        "k": f32(n, 2, d, d // 2),
        "v": f32(n, 2, d, d // 2),
        "o": f32(n, 2, d, d),
        "gate": f32(n, 2, d, 2816),
        "up": f32(n, 2, d, 2816),
        "down": f32(n, 2, 2816, d),
        "norm1": f32(n, 2, d),
        "norm2": f32(n, 2, d),
    }
    return (
        fn,
        {"embed": f32(32000, d), "pairs": own},
        (TOKENS,),
        {"embed": "embedding", "norm": "vector", "pairs": hidden(Dims(2, 3))},
    )


@real_size
def fused_gate_up_in_both_layouts():
    """Gate and up as halves of (in, 2·f), of (2·f, in), and as (in, 2, f)."""

    def fn(p, t):
        x = p["embed"][t]
        gate, up = jnp.split(x @ p["a"]["gu"], 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ p["a"]["down"]
        gate, up = jnp.split(x @ p["b"]["gu"].T, 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ p["b"]["down"].T
        h = jnp.einsum("btd,dcf->btcf", x, p["c"]["gu"])
        x = x + (jax.nn.silu(h[:, :, 0]) * h[:, :, 1]) @ p["c"]["down"]
        return cross_entropy(norm(x) @ p["head"], t)

    d, f = 1024, 2816
    params = {
        "embed": f32(32000, d),
        "a": {"gu": f32(d, 2 * f), "down": f32(f, d)},
        "b": {"gu": f32(2 * f, d), "down": f32(d, f)},
        "c": {"gu": f32(d, 2, f), "down": f32(f, d)},
        "head": f32(d, 32000),
    }
    return (
        fn,
        params,
        (TOKENS,),
        {
            "embed": "embedding",
            "head": "output",
            "a/gu": hidden(halves(1, f)),
            "b/gu": hidden(halves(0, f, OUT_IN)),
            "c/gu": hidden(halves(1, 1, Dims(0, (1, 2)))),
            "b/down": hidden(OUT_IN),
            "down": hidden(),
        },
    )
