"""Small models of all kinds, most of them plain functions, with answers read off their sources."""

import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from optax.contrib import MuonDimensionNumbers as Dims
from use_models import (
    CONV,
    IN_OUT,
    OUT_IN,
    attention,
    cross_entropy,
    first,
    heads,
    hidden,
    linen,
    model,
    nnx_module,
    norm,
    rope,
)

from muon_jax import Split, Unfold


def zeros(*shape):
    return jnp.zeros(shape)


KEY = jax.random.key(0)
TOKENS = jnp.zeros((2, 16), int)
MOE = {
    "emb": zeros(50, 32),
    "router": zeros(32, 6),
    "up": zeros(6, 32, 64),
    "down": zeros(6, 64, 32),
    "head": zeros(32, 50),
}
OF_MOE = {
    "router": "router",
    "up": hidden(Dims(1, 2)),
    "down": hidden(Dims(1, 2)),
    "emb": "embedding",
    "head": "output",
}


def rope2(x):
    t, d = (x.shape[1], x.shape[-1])
    a = jnp.arange(t)[:, None] / 10 ** (jnp.arange(d) / d)
    x1, x2 = jnp.split(x, 2, -1)
    return x * jnp.cos(a)[:, None] + jnp.concatenate([-x2, x1], -1) * jnp.sin(a)[:, None]


@model
def linen_lstm():

    class L(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.RNN(nn.OptimizedLSTMCell(16))(x)[:, -1])

    return (
        *linen(L(), zeros(2, 5, 7)),
        {"/h./kernel": hidden(), "/i./kernel": "input", "Dense_0/kernel": "output"},
    )


@model
def linen_gru_embed():

    class L(nn.Module):
        @nn.compact
        def __call__(self, t):
            return nn.Dense(3)(nn.RNN(nn.GRUCell(16))(nn.Embed(9, 8)(t)))

    return (
        *linen(L(), TOKENS),
        {"Cell.*kernel": hidden(), "Dense_0/kernel": "output", "embedding": "embedding"},
    )


@model
def nnx_lstm():

    class L(nnx.Module):
        def __init__(self, g):
            self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(8, 16, rngs=g), rngs=g)
            self.e = nnx.Embed(9, 8, rngs=g)
            self.o = nnx.Linear(16, 3, rngs=g)

        def __call__(self, t):
            return self.o(self.rnn(self.e(t)))

    return (
        *nnx_module(L, TOKENS),
        {
            "cell/dense_[hi]/kernel": hidden(Split(1, (16,) * 4, IN_OUT)),
            "^o/kernel": "output",
            "^e/": "embedding",
        },
    )


@model
def nnx_gpt():

    class Bl(nnx.Module):
        def __init__(self, g):
            self.a = nnx.MultiHeadAttention(4, 32, rngs=g, decode=False)
            self.n1 = nnx.LayerNorm(32, rngs=g)
            self.n2 = nnx.LayerNorm(32, rngs=g)
            self.u = nnx.Linear(32, 64, rngs=g)
            self.d = nnx.Linear(64, 32, rngs=g)

        def __call__(self, x):
            x = x + self.a(self.n1(x), mask=nn.make_causal_mask(jnp.ones(x.shape[:2])))
            return x + self.d(jax.nn.gelu(self.u(self.n2(x))))

    class G(nnx.Module):
        def __init__(self, g):
            self.e = nnx.Embed(50, 32, rngs=g)
            self.p = nnx.Embed(16, 32, rngs=g)
            self.b = nnx.List([Bl(g), Bl(g)])
            self.h = nnx.Linear(32, 50, rngs=g)

        def __call__(self, t):
            x = self.e(t) + self.p(jnp.arange(t.shape[1]))
            for b in self.b:
                x = b(x)
            return self.h(x)

    g, p, rest = nnx.split(G(nnx.Rngs(0)), nnx.Param, ...)
    return (
        lambda p, t: cross_entropy(nnx.merge(g, p, rest)(t), t),
        p,
        (TOKENS,),
        {
            "(query|key|value)/kernel": hidden(Dims(0, (1, 2))),
            "(query|key|value)/bias": "vector",
            "out/kernel": hidden(Dims((0, 1), 2)),
            "/[ud]/kernel": hidden(),
            "^[ep]/": "embedding",
            "^h/kernel": "output",
        },
    )


@model
def eqx_lstm():
    c = eqx.nn.LSTMCell(7, 16, key=KEY)
    o = eqx.nn.Linear(16, 3, key=KEY)
    p, st = eqx.partition((c, o), eqx.is_array)

    def f(p, x):
        c, o = eqx.combine(p, st)
        return jax.vmap(
            lambda x: o(
                jax.lax.scan(lambda s, x: (c(x, s), None), (jnp.zeros(16), jnp.zeros(16)), x)[0][0]
            )
        )(x)

    return (
        f,
        p,
        (zeros(2, 5, 7),),
        {
            "weight_hh": hidden(Split(0, (16,) * 4, OUT_IN)),
            "weight_ih": first(Split(0, (16,) * 4, OUT_IN)),
            "1/weight": "output",
        },
    )


@model
def eqx_gru():
    c = eqx.nn.GRUCell(7, 16, key=KEY)
    o = eqx.nn.Linear(16, 3, key=KEY)
    p, st = eqx.partition((c, o), eqx.is_array)

    def f(p, x):
        c, o = eqx.combine(p, st)
        return jax.vmap(
            lambda x: o(jax.lax.scan(lambda s, x: (c(x, s), None), jnp.zeros(16), x)[0])
        )(x)

    return (
        f,
        p,
        (zeros(2, 5, 7),),
        {
            "weight_hh": hidden(Split(0, (16,) * 3, OUT_IN)),
            "weight_ih": first(Split(0, (16,) * 3, OUT_IN)),
            "1/weight": "output",
        },
    )


@model
def eqx_attention():
    m = eqx.nn.MultiheadAttention(4, 32, key=KEY)
    logits = eqx.nn.Linear(32, 5, key=KEY)
    e = eqx.nn.Embedding(9, 32, key=KEY)
    p, st = eqx.partition((m, logits, e), eqx.is_array)

    def f(p, t):
        m, logits, e = eqx.combine(p, st)
        return jax.vmap(lambda t: jax.vmap(logits)(m(*[jax.vmap(e)(t)] * 3)))(t)

    return (
        f,
        p,
        (TOKENS,),
        {
            "(query|key|value|output)_proj/weight": hidden(OUT_IN),
            "1/weight": "output",
            "2/weight": "embedding",
        },
    )


@model
def haiku_transformer():

    def f(t):
        x = hk.Embed(50, 32)(t) + hk.get_parameter("pos", (16, 32), init=jnp.zeros)
        for _ in range(2):
            x = x + hk.MultiHeadAttention(
                4, 8, model_size=32, w_init=hk.initializers.VarianceScaling()
            )(*[hk.LayerNorm(-1, True, True)(x)] * 3)
            x = x + hk.Linear(32)(jax.nn.gelu(hk.Linear(64)(hk.LayerNorm(-1, True, True)(x))))
        return hk.Linear(50, name="o")(x)

    m = hk.without_apply_rng(hk.transform(f))
    p = m.init(KEY, TOKENS)
    return (
        m.apply,
        p,
        (TOKENS,),
        {
            "(query|key|value|attention.*linear)/w$": hidden(),
            "^linear.*/w": hidden(),
            "embeddings": "embedding",
            "^o/w": "output",
            "pos": "vector",
        },
    )


@model
def haiku_lstm():

    def f(x):
        c = hk.LSTM(16)
        y, _ = hk.dynamic_unroll(c, x, c.initial_state(2), time_major=False)
        return hk.Linear(3)(y)

    m = hk.without_apply_rng(hk.transform(f))
    x = zeros(2, 5, 7)
    p = m.init(KEY, x)
    return (
        m.apply,
        p,
        (x,),
        {"lstm/linear/w": hidden(Split(1, (16,) * 4, IN_OUT)), "^linear/w": "output"},
    )


@model
def moe_dense():

    def f(p, t):
        x = p["emb"][t]
        g = jax.nn.softmax(x @ p["router"])
        top, i = jax.lax.top_k(g, 2)
        g = (
            jnp.zeros_like(g)
            .at[jnp.arange(2)[:, None, None], jnp.arange(16)[None, :, None], i]
            .set(top)
        )
        h = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["up"]))
        return (x + jnp.einsum("bted,bte->btd", jnp.einsum("btef,efd->bted", h, p["down"]), g)) @ p[
            "head"
        ]

    return f, MOE, (TOKENS,), OF_MOE


@model
def moe_joint_contraction():

    def f(p, t):
        x = p["emb"][t]
        g = jax.nn.softmax(x @ p["router"])
        top, i = jax.lax.top_k(g, 2)
        g = (jax.nn.one_hot(i, 6) * top[..., None]).sum(-2) * g
        h = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["up"])) * g[..., None]
        return (x + jnp.einsum("btef,efd->btd", h, p["down"])) @ p["head"]

    return f, MOE, (TOKENS,), OF_MOE


@model
def moe_ragged():

    def f(p, t):
        x = p["emb"][t].reshape(-1, 32)
        g = jax.nn.softmax(x @ p["router"])
        top, i = jax.lax.top_k(g, 2)
        order = jnp.argsort(i.reshape(-1))
        xs = jnp.repeat(x, 2, 0)[order]
        n = jnp.bincount(i.reshape(-1), length=6)
        h = jax.lax.ragged_dot(xs, p["gate_up"], n)
        g_, u = jnp.split(h, 2, -1)
        y = jax.lax.ragged_dot(jax.nn.silu(g_) * u, p["down"], n)
        y = y[jnp.argsort(order)].reshape(-1, 2, 32)
        return (x + (y * top[..., None]).sum(1)) @ p["head"]

    return (
        f,
        {
            "emb": zeros(50, 32),
            "router": zeros(32, 6),
            "gate_up": zeros(6, 32, 128),
            "down": zeros(6, 64, 32),
            "head": zeros(32, 50),
        },
        (TOKENS,),
        {
            "router": "router",
            "gate_up": hidden(Split(2, (64, 64), Dims(1, 2))),
            "down": hidden(Dims(1, 2)),
            "emb": "embedding",
            "head": "output",
        },
    )


@model
def moe_capacity():

    def f(p, t):
        x = p["emb"][t].reshape(-1, 32)
        g = jax.nn.softmax(x @ p["router"])
        i = jnp.argmax(g, -1)
        oh = jax.nn.one_hot(i, 6)
        pos = jnp.cumsum(oh, 0) * oh - 1
        d = oh[..., None] * jax.nn.one_hot(pos.astype(int), 8)
        c = d * g[..., None]
        xe = jnp.einsum("tec,td->ecd", d, x)
        h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", xe, p["up"]))
        y = jnp.einsum("ecf,efd->ecd", h, p["down"])
        aux = (g.mean(0) * oh.mean(0)).sum()
        return ((x + jnp.einsum("tec,ecd->td", c, y)) @ p["head"], aux)

    return f, MOE, (TOKENS,), OF_MOE


@model
def moe_gathered():

    def f(p, t):
        x = p["emb"][t].reshape(-1, 32)
        g = jax.nn.softmax(x @ p["router"])
        i = jnp.argmax(g, -1)
        h = jax.nn.silu(jnp.einsum("td,tdf->tf", x, p["up"][i]))
        return (x + jnp.einsum("tf,tfd->td", h, p["down"][i]) * g.max(-1)[:, None]) @ p["head"]

    return f, MOE, (TOKENS,), OF_MOE


@model
def mla():
    h, nope, rp = (4, 8, 4)

    def f(p, t):
        x = p["emb"][t]
        q = heads(norm(x @ p["q_a"]) @ p["q_b"], h)
        qn, qr = (q[..., :nope], rope(q[..., nope:]))
        kv = x @ p["kv_a"]
        c, kr = (norm(kv[..., :16]), rope(kv[..., None, 16:]))
        k = heads(c @ p["kv_b"], h)
        kn, vv = (k[..., :nope], k[..., nope:])
        kk = jnp.concatenate([kn, jnp.broadcast_to(kr, (*kr.shape[:2], h, rp))], -1)
        o = attention(jnp.concatenate([qn, qr], -1), kk, vv)
        return (x + o.reshape(2, 16, -1) @ p["o"]) @ p["head"]

    return (
        f,
        {
            "emb": zeros(50, 32),
            "q_a": zeros(32, 24),
            "q_b": zeros(24, 48),
            "kv_a": zeros(32, 20),
            "kv_b": zeros(16, 56),
            "o": zeros(24, 32),
            "head": zeros(32, 50),
        },
        (TOKENS,),
        {
            "q_a": hidden(),
            "q_b": hidden(),
            "kv_a": hidden(Split(1, (16, 4), IN_OUT)),
            "kv_b": hidden(Unfold(1, (4, 14), Split(2, (8, 6), Dims(0, (1, 2))))),
            "^o": hidden(),
            "emb": "embedding",
            "head": "output",
        },
    )


def decoder(qkv, params, expect, post=lambda x: x):

    def f(p, t):
        x = p["emb"][t]
        q, k, v = qkv(p, x)
        return cross_entropy((x + attention(q, k, v).reshape(2, 16, 32) @ p["o"]) @ p["head"], t)

    return (
        f,
        {"emb": zeros(50, 32), "o": zeros(32, 32), "head": zeros(32, 50), **params},
        (TOKENS,),
        {"emb": "embedding", "^o": hidden(), "head": "output", **expect},
    )


@model
def gqa_repeat_rope():
    return decoder(
        lambda p, x: (
            rope(heads(x @ p["q"], 4)),
            jnp.repeat(rope(heads(x @ p["k"], 2)), 2, 2),
            jnp.repeat(heads(x @ p["v"], 2), 2, 2),
        ),
        {"q": zeros(32, 32), "k": zeros(32, 16), "v": zeros(32, 16)},
        {"^[qkv]": hidden()},
    )


@model
def rope_other_forms():
    return decoder(
        lambda p, x: (
            rope2(heads(x @ p["q"], 4)),
            rope(heads(x @ p["k"], 4), True),
            heads(x @ p["v"], 4),
        ),
        {k: zeros(32, 32) for k in "qkv"},
        {"^[qkv]": hidden()},
    )


@model
def gqa_grouped_einsum():

    def f(p, t):
        x = p["emb"][t]
        q = rope(heads(x @ p["q"], 4)).reshape(2, 16, 2, 2, 8)
        k, v = (rope(heads(x @ p["k"], 2)), heads(x @ p["v"], 2))
        a = jnp.einsum("btkgd,bskd->bkgts", q, k) + jnp.arange(4).reshape(2, 2, 1, 1)
        return (
            x + jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(a), v).reshape(2, 16, 32) @ p["o"]
        ) @ p["head"]

    return (
        f,
        {
            "emb": zeros(50, 32),
            "q": zeros(32, 32),
            "k": zeros(32, 16),
            "v": zeros(32, 16),
            "o": zeros(32, 32),
            "head": zeros(32, 50),
        },
        (TOKENS,),
        {"^[qkv]": hidden(), "^o": hidden(), "emb": "embedding", "head": "output"},
    )


@model
def neox_interleaved():
    return decoder(
        lambda p, x: [
            z[..., 0, :] for z in jnp.split((x @ p["qkv"]).reshape(2, 16, 4, 3, 8), 3, -2)
        ],
        {"qkv": zeros(32, 96)},
        {"qkv": hidden(Unfold(1, (4, 24), Split(2, (8, 8, 8), Dims(0, (1, 2)))))},
    )


@model
def qkv_unstacked():
    return decoder(
        lambda p, x: [norm(z) for z in jnp.moveaxis((x @ p["qkv"]).reshape(2, 16, 3, 4, 8), 2, 0)],
        {"qkv": zeros(32, 96)},
        {"qkv": hidden(Split(1, (32, 32, 32), IN_OUT))},
    )


@model
def qkv_sliced_weight():
    return decoder(
        lambda p, x: [heads(x @ w.T, 4) for w in jnp.split(p["qkv"], 3, 0)],
        {"qkv": zeros(96, 32)},
        {"qkv": hidden(Split(0, (32, 32, 32), OUT_IN))},
    )


@model
def qkv_own_axis():
    return decoder(
        lambda p, x: [*jnp.einsum("btd,dchk->cbthk", x, p["qkv"])],
        {"qkv": zeros(32, 3, 4, 8)},
        {"qkv": hidden(Split(1, (1, 1, 1), Dims(0, (1, 2, 3))))},
    )


@model
def gqa_fused_grouped():

    def qkv(p, x):
        z = (x @ p["qkv"]).reshape(2, 16, 2, 32)
        q, k, v = (z[..., :16], z[..., 16:24], z[..., 24:])
        return (rope(q.reshape(2, 16, 4, 8)), jnp.repeat(rope(k), 2, 2), jnp.repeat(v, 2, 2))

    return decoder(
        qkv,
        {"qkv": zeros(32, 64)},
        {"qkv": hidden(Unfold(1, (2, 32), Split(2, (16, 8, 8), Dims(0, (1, 2)))))},
    )


@model
def swiglu_fused_alibi_remat():

    def f(p, t):
        x = p["emb"][t]

        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        def block(x, b):
            q, k, v = (heads(x @ b[n], 4) for n in "qkv")
            a = jnp.einsum("bthd,bshd->bhts", q, k) - jnp.arange(4)[:, None, None] * (
                jnp.arange(16)[:, None] - jnp.arange(16)
            )
            x = x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(a), v).reshape(x.shape) @ b["o"]
            g, u = jnp.split(x @ b["gu"], 2, -1)
            return (x + jax.nn.silu(g) * u @ b["down"], None)

        x, _ = jax.lax.scan(block, x, p["blocks"])
        return cross_entropy(norm(x) @ p["emb"].T * 0.1, t)

    return (
        f,
        {
            "emb": zeros(50, 32),
            "blocks": {
                **{n: zeros(3, 32, 32) for n in "qkvo"},
                "gu": zeros(3, 32, 128),
                "down": zeros(3, 64, 32),
            },
        },
        (TOKENS,),
        {
            "blocks/[qkvo]": hidden(Dims(1, 2)),
            "gu": hidden(Split(2, (64, 64), Dims(1, 2))),
            "down": hidden(Dims(1, 2)),
            "emb": "embedding",
        },
    )


@model
def geglu_interleaved():

    def f(p, t):
        x = p["emb"][t]
        h = x @ p["gu"]
        return (x + jax.nn.silu(h[..., ::2]) * h[..., 1::2] @ p["down"]) @ p["head"]

    return (
        f,
        {"emb": zeros(50, 32), "gu": zeros(32, 128), "down": zeros(64, 32), "head": zeros(32, 50)},
        (TOKENS,),
        {
            "gu": hidden(Unfold(1, (64, 2), Split(2, (1, 1), Dims(0, (1, 2))))),
            "down": hidden(),
            "emb": "embedding",
            "head": "output",
        },
    )


@model
def dit():

    def f(p, x, t):
        f_ = t[:, None] * jnp.exp(-jnp.arange(8))
        c = jax.nn.silu(jnp.concatenate([jnp.sin(f_), jnp.cos(f_)], -1) @ p["t1"]) @ p["t2"]
        x = (
            jnp.einsum("bhpwqc,pqcd->bhwd", x.reshape(2, 4, 2, 4, 2, 3), p["patch"]).reshape(
                2, 16, 32
            )
            + p["pos"]
        )
        for b in p["blocks"]:
            s1, c1, g1, s2, c2, g2 = (
                z[:, None] for z in jnp.split(jax.nn.silu(c) @ b["ada"], 6, -1)
            )
            y = norm(x) * (1 + c1) + s1
            q, k, v = (heads(y @ b[n], 4) for n in "qkv")
            x = x + g1 * (attention(q, k, v).reshape(x.shape) @ b["o"])
            y = norm(x) * (1 + c2) + s2
            x = x + g2 * (jax.nn.gelu(y @ b["up"]) @ b["down"])
        s, final_scale = jnp.split(jax.nn.silu(c) @ p["ada"], 2, -1)
        return (norm(x) * (1 + final_scale[:, None]) + s[:, None]) @ p["out"]

    return (
        f,
        {
            "t1": zeros(16, 32),
            "t2": zeros(32, 32),
            "patch": zeros(2, 2, 3, 32),
            "pos": zeros(16, 32),
            "ada": zeros(32, 64),
            "out": zeros(32, 12),
            "blocks": [
                {
                    **{n: zeros(32, 32) for n in "qkvo"},
                    "ada": zeros(32, 192),
                    "up": zeros(32, 64),
                    "down": zeros(64, 32),
                }
            ]
            * 2,
        },
        (zeros(2, 8, 8, 3), zeros(2)),
        {
            "t1": "input",
            "t2": hidden(),
            "patch": "input",
            "pos": "vector",
            "blocks/./ada": hidden(Split(1, (32,) * 6, IN_OUT)),
            "^ada": hidden(Split(1, (32, 32), IN_OUT)),
            "out": "output",
            "blocks/./([qkvo]|up|down)$": hidden(),
        },
    )


@model
def mamba():

    def f(p, t):
        x = p["emb"][t]
        u, z = jnp.split(norm(x) @ p["in"], 2, -1)
        u = jax.nn.silu(
            jax.lax.conv_general_dilated(
                u,
                p["conv"],
                (1,),
                [(3, 0)],
                dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=64,
            )
        )
        d, b_in, C = jnp.split(u @ p["x"], [4, 12], -1)
        delta = jax.nn.softplus(d @ p["dt"])
        A = -jnp.exp(p["A_log"])
        da, db = (jnp.exp(delta[..., None] * A), delta[..., None] * b_in[:, :, None] * u[..., None])
        _, ys = jax.lax.scan(
            lambda h, i: ((h := (i[0] * h + i[1])), jnp.einsum("bdn,bn->bd", h, i[2])),
            jnp.zeros((2, 64, 8)),
            jax.tree.map(lambda a: a.swapaxes(0, 1), (da, db, C)),
        )
        y = ys.swapaxes(0, 1) + p["D"] * u
        return (x + y * jax.nn.silu(z) @ p["out"]) @ p["emb"].T

    return (
        f,
        {
            "emb": zeros(50, 32),
            "in": zeros(32, 128),
            "conv": zeros(4, 1, 64),
            "x": zeros(64, 20),
            "dt": zeros(4, 64),
            "A_log": zeros(64, 8),
            "D": zeros(64),
            "out": zeros(64, 32),
        },
        (TOKENS,),
        {
            "in": hidden(Split(1, (64, 64), IN_OUT)),
            "conv": "depthwise",
            "^x": hidden(Split(1, (4, 8, 8), IN_OUT)),
            "dt": hidden(),
            "A_log": "vector",
            "out": hidden(),
            "emb": "embedding",
        },
    )


@model
def rwkv():

    def f(p, t):
        x = p["emb"][t]
        xx = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]

        def mix(m):
            return x * m + xx * (1 - m)

        k, v, rr = (
            mix(p["mk"]) @ p["k"],
            mix(p["mv"]) @ p["v"],
            jax.nn.sigmoid(mix(p["mr"]) @ p["r"]),
        )
        w = jnp.exp(-jnp.exp(p["w"]))
        _, y = jax.lax.scan(
            lambda s, i: (
                (s[0] * w + jnp.exp(i[0]) * i[1], s[1] * w + jnp.exp(i[0])),
                s[0] / (s[1] + 1),
            ),
            (zeros(2, 32), zeros(2, 32)),
            (k.swapaxes(0, 1), v.swapaxes(0, 1)),
        )
        x = x + rr * y.swapaxes(0, 1) @ p["o"]
        return x @ p["head"]

    return (
        f,
        {
            "emb": zeros(50, 32),
            **{n: zeros(32, 32) for n in "kvro"},
            **{n: zeros(32) for n in ("mk", "mv", "mr", "w")},
            "head": zeros(32, 50),
        },
        (TOKENS,),
        {"^[kvro]$": hidden(), "emb": "embedding", "head": "output"},
    )


@model
def unet():

    class U(nn.Module):
        @nn.compact
        def __call__(self, x):
            a = nn.relu(nn.Conv(8, (3, 3))(x))
            b = nn.relu(nn.Conv(16, (3, 3), (2, 2))(a))
            c = nn.relu(nn.Conv(16, (3, 3))(b))
            u = nn.ConvTranspose(8, (2, 2), (2, 2))(c)
            return nn.Conv(1, (1, 1))(nn.relu(nn.Conv(8, (3, 3))(jnp.concatenate([u, a], -1))))

    return (
        *linen(U(), zeros(2, 8, 8, 3)),
        {
            "Conv_0/k": "input",
            "Conv_[124]/k": hidden(CONV),
            "ConvT.*k": hidden(CONV),
            "Conv_3/k": "output",
        },
    )


@model
def resnet_bn():

    class N(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.BatchNorm(False)(nn.Conv(8, (3, 3))(x)))
            y = nn.relu(nn.BatchNorm(False)(nn.Conv(16, (3, 3), (2, 2))(x)))
            y = nn.BatchNorm(False)(nn.Conv(16, (3, 3))(y))
            return nn.Dense(10)(nn.relu(y + nn.Conv(16, (1, 1), (2, 2))(x)).mean((1, 2)))

    m = N()
    v = m.init(KEY, zeros(2, 8, 8, 3))

    def f(p, bs, x):
        return m.apply({"params": p, "batch_stats": bs}, x, mutable=["batch_stats"])

    return (
        f,
        v["params"],
        (v["batch_stats"], zeros(2, 8, 8, 3)),
        {
            "Conv_0/k": "input",
            "Conv_[12]/k": hidden(CONV),
            "Conv_3/k": hidden(Dims(2, 3)),
            "Dense_0/kernel": "output",
        },
    )


@model
def vit():

    class N(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(32, (4, 4), (4, 4))(x).reshape(2, -1, 32)
            x = jnp.concatenate(
                [
                    jnp.broadcast_to(
                        self.param("cls", nn.initializers.zeros, (1, 1, 32)), (2, 1, 32)
                    ),
                    x,
                ],
                1,
            ) + self.param("pos", nn.initializers.zeros, (1, 5, 32))
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x = x + nn.Dense(32)(nn.gelu(nn.Dense(64)(x)))
            return nn.Dense(10)(x[:, 0])

    return (
        *linen(N(), zeros(2, 8, 8, 3)),
        {
            "Conv_0/k": "input",
            "cls|pos": "vector",
            "(query|key|value)/bias": "vector",
            "(query|key|value)/k": hidden(Dims(0, (1, 2))),
            "out/k": hidden(Dims((0, 1), 2)),
            "Dense_[01]/k": hidden(),
            "Dense_2/k": "output",
        },
    )


@model
def clip():

    def f(p, x, t):
        a = jax.nn.relu(x @ p["i1"]) @ p["i2"]
        b = jax.nn.relu(p["emb"][t] @ p["t1"]).mean(1) @ p["t2"]
        a, b = (
            a / jnp.linalg.norm(a, axis=-1, keepdims=True),
            b / jnp.linalg.norm(b, axis=-1, keepdims=True),
        )
        logits = jnp.exp(p["temp"]) * a @ b.T
        y = jnp.arange(2)
        return cross_entropy(logits, y) + cross_entropy(logits.T, y)

    return (
        f,
        {
            "i1": zeros(12, 32),
            "i2": zeros(32, 16),
            "emb": zeros(50, 32),
            "t1": zeros(32, 32),
            "t2": zeros(32, 16),
            "temp": zeros(),
        },
        (zeros(2, 12), TOKENS),
        {"i1": "input", "i2|t1|t2": hidden(), "emb": "embedding"},
    )


@model
def vae():

    def f(p, x, k):
        h = jax.nn.relu(x @ p["e1"])
        m, s = jnp.split(h @ p["e2"], 2, -1)
        z = m + jnp.exp(s) * jax.random.normal(k, m.shape)
        y = jax.nn.relu(z @ p["d1"]) @ p["d2"]
        return ((y - x) ** 2).mean() + (m**2 + jnp.exp(2 * s) - s).sum()

    return (
        f,
        {"e1": zeros(12, 32), "e2": zeros(32, 16), "d1": zeros(8, 32), "d2": zeros(32, 12)},
        (zeros(4, 12), KEY),
        {
            "e1": "input",
            "e2": hidden(Split(1, (8, 8), IN_OUT)),
            "d1": hidden(),
            "d2": "output",
        },
    )


@model
def autoencoder_tied():
    return (
        lambda p, x: jnp.vdot(
            (
                e := (
                    jnp.tanh(jnp.tanh(jnp.tanh(x @ p["w1"]) @ p["w2"]) @ p["w2"].T) @ p["w1"].T - x
                )
            ),
            e,
        ),
        {"w1": zeros(12, 32), "w2": zeros(32, 8)},
        (zeros(4, 12),),
        {"w1": "output", "w2": hidden()},
    )


@model
def ppo():

    def f(p, o, a):
        h = jnp.tanh(jnp.tanh(o @ p["t1"]) @ p["t2"])
        pi, v = (h @ p["pi"], h @ p["v"])
        lp = jax.nn.log_softmax(pi)
        return (-lp[jnp.arange(4), a].mean() + (v**2).mean(), (jnp.argmax(pi, -1), v))

    return (
        f,
        {"t1": zeros(12, 32), "t2": zeros(32, 32), "pi": zeros(32, 5), "v": zeros(32, 1)},
        (zeros(4, 12), jnp.zeros(4, int)),
        {"t1": "input", "t2": hidden(), "pi|v": "output"},
    )


@model
def actor_that_feeds_a_critic():
    """In one flat loss the actor's head looks hidden, as documented: pass networks apart."""

    def f(p, o, k):
        h = jnp.tanh(jnp.tanh(o @ p["t1"]) @ p["t2"])
        m, s = jnp.split(h @ p["pi"], 2, -1)
        a = jnp.tanh(m + jnp.exp(s) * jax.random.normal(k, m.shape))
        q = jax.nn.relu(jnp.concatenate([o, a], -1) @ p["q1"]) @ p["q2"]
        return -q.mean()

    return (
        f,
        {
            "t1": zeros(12, 32),
            "t2": zeros(32, 32),
            "pi": zeros(32, 6),
            "q1": zeros(15, 32),
            "q2": zeros(32, 1),
        },
        (zeros(4, 12), KEY),
        {
            "t1": "input",
            "t2": hidden(),
            "pi": hidden(Split(1, (3, 3), IN_OUT)),
            "q1": hidden(),
            "q2": "output",
        },
    )


@model
def detr():

    def f(p, x):
        x = x @ p["inp"]
        q = jnp.broadcast_to(p["query"], (2, 10, 32))
        for b in p["blocks"]:
            q = (
                q
                + attention(
                    heads(q @ b["q"], 4), heads(x @ b["k"], 4), heads(x @ b["v"], 4)
                ).reshape(q.shape)
                @ b["o"]
            )
        return (
            q @ p["cls"],
            jax.nn.relu(q @ p["b1"]) @ p["b2"],
            jnp.einsum("bqd,bsd->bqs", jax.nn.relu(q @ p["m1"]) @ p["m2"], x),
        )

    return (
        f,
        {
            "inp": zeros(12, 32),
            "query": zeros(10, 32),
            "cls": zeros(32, 7),
            "b1": zeros(32, 32),
            "b2": zeros(32, 4),
            "m1": zeros(32, 32),
            "m2": zeros(32, 32),
            "blocks": [{n: zeros(32, 32) for n in "qkvo"}] * 2,
        },
        (zeros(2, 16, 12),),
        {"inp": "input", "query": "latents", "cls|b2": "output", "b1|m1|m2|blocks": hidden()},
    )


@model
def perceiver_unbatched():

    def f(p, x):

        def one(x):
            q = p["lat"]
            x = x @ p["inp"]
            q = q + jax.nn.softmax(norm(q) @ p["q"] @ (x @ p["k"]).T) @ (x @ p["v"]) @ p["o"]
            return q.mean(0) @ p["head"]

        return jax.vmap(one)(x)

    return (
        f,
        {
            "inp": zeros(12, 32),
            "lat": zeros(10, 32),
            "head": zeros(32, 7),
            **{n: zeros(32, 32) for n in "qkvo"},
        },
        (zeros(2, 16, 12),),
        {"inp": "input", "lat": "latents", "head": "output", "^[qkvo]$": hidden()},
    )


@model
def gnn():

    def f(p, x, s, t):
        x = x @ p["inp"]
        for b in p["layers"]:
            m = jax.nn.relu(jnp.concatenate([x[s], x[t]], -1) @ b["m"])
            x = x + jax.ops.segment_sum(m, t, 6) @ b["u"]
        return x.sum(0) @ p["out"]

    return (
        f,
        {
            "inp": zeros(5, 16),
            "layers": [{"m": zeros(32, 16), "u": zeros(16, 16)}] * 2,
            "out": zeros(16, 2),
        },
        (zeros(6, 5), jnp.zeros(9, int), jnp.zeros(9, int)),
        {"inp": "input", "layers": hidden(), "out": "output"},
    )


@model
def lora_merged():
    return (
        lambda p, t: jax.nn.silu(p["emb"][t] @ (p["w"] + 0.1 * p["a"] @ p["b"])) @ p["head"],
        {
            "emb": zeros(50, 32),
            "w": zeros(32, 32),
            "a": zeros(32, 4),
            "b": zeros(4, 32),
            "head": zeros(32, 50),
        },
        (TOKENS,),
        {"w": hidden(), "^[ab]$": "factor", "emb": "embedding", "head": "output"},
    )


@model
def lora_beside():

    def f(p, t):
        x = p["emb"][t]
        return jax.nn.silu(x @ p["w"] + x @ p["a"] @ p["b"]) @ p["head"]

    return (
        f,
        {
            "emb": zeros(50, 32),
            "w": zeros(32, 32),
            "a": zeros(32, 4),
            "b": zeros(4, 32),
            "head": zeros(32, 50),
        },
        (TOKENS,),
        {"w": hidden(), "^[ab]$": "factor", "emb": "embedding", "head": "output"},
    )


@model
def weight_norms():

    def f(p, x):
        v = p["v"]
        x = jax.nn.relu(x @ p["in"])
        x = jax.nn.relu(x @ (p["g"] * v / jnp.linalg.norm(v, axis=0, keepdims=True)))
        w = p["ws"]
        x = jax.nn.relu(x @ ((w - w.mean(0)) / w.std(0)))
        u = p["sn"] @ jnp.ones(32)
        u = u / jnp.linalg.norm(u)
        s = u @ p["sn"] @ jnp.ones(32)
        x = jax.nn.relu(x @ (p["sn"] / s))
        q = p["q"]
        x = x @ (q + jax.lax.stop_gradient(jnp.round(q * 7) / 7 - q))
        return x @ p["out"]

    return (
        f,
        {
            "in": zeros(12, 32),
            "v": zeros(32, 32),
            "g": zeros(32),
            "ws": zeros(32, 32),
            "sn": zeros(32, 32),
            "q": zeros(32, 32),
            "out": zeros(32, 3),
        },
        (zeros(4, 12),),
        {"in": "input", "v|ws|sn|q": hidden(), "out": "output", "^g": "vector"},
    )


@model
def linen_spectral_norm():

    class N(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(
                nn.relu(nn.SpectralNorm(nn.Dense(32))(nn.relu(nn.Dense(32)(x)), update_stats=True))
            )

    m = N()
    v = m.init(KEY, zeros(2, 8))
    return (
        lambda p, b, x: m.apply({"params": p, "batch_stats": b}, x, mutable=["batch_stats"]),
        v["params"],
        (v["batch_stats"], zeros(2, 8)),
        {"Dense_2/kernel": "input", "Dense_1/kernel": hidden(), "Dense_0/kernel": "output"},
    )


@model
def mixed_precision_tied():

    def f(p, t):
        p = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
        x = p["emb"][t] * 32**0.5
        x = x + jax.nn.silu(x @ p["up"]) @ p["down"]
        return cross_entropy((x @ p["emb"].T).astype(jnp.float32), t)

    return (
        f,
        {"emb": zeros(50, 32), "up": zeros(32, 64), "down": zeros(64, 32)},
        (TOKENS,),
        {"up|down": hidden(), "emb": "embedding"},
    )


@model
def linen_scan_axis1():

    class Bl(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return (x + nn.Dense(32)(nn.gelu(nn.Dense(64)(x))), None)

    class N(nn.Module):
        @nn.compact
        def __call__(self, x):
            x, _ = nn.scan(
                nn.remat(Bl, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
                variable_axes={"params": 1},
                split_rngs={"params": True},
                length=3,
            )()(nn.Dense(32)(x), None)
            return nn.Dense(5)(x)

    return (
        *linen(N(), zeros(4, 12)),
        {
            "Scan.*bias": "vector",
            "Scan.*kernel": hidden(Dims(0, 2)),
            "^Dense_0/k": "input",
            "^Dense_1/k": "output",
        },
    )


@model
def fori_loop_layers():
    return (
        lambda p, x: (
            jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["w"][i]), x @ p["in"]) @ p["out"]
        ),
        {"in": zeros(12, 32), "w": zeros(3, 32, 32), "out": zeros(32, 5)},
        (zeros(4, 12),),
        {"in": "input", "w": hidden(Dims(1, 2)), "out": "output"},
    )


@model
def stacked_then_scanned():

    def f(p, x):
        w = jnp.stack([b["w"] for b in p["l"]])
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x @ p["in"], w)[0] @ p["out"]

    return (
        f,
        {"in": zeros(12, 32), "l": [{"w": zeros(32, 32)}] * 3, "out": zeros(32, 5)},
        (zeros(4, 12),),
        {"in": "input", "l/": hidden(), "out": "output"},
    )


@model
def lax_map():
    return (
        lambda p, x: jax.lax.map(lambda x: jnp.tanh(jnp.tanh(x @ p["in"]) @ p["w"]) @ p["out"], x),
        {"in": zeros(12, 32), "w": zeros(32, 32), "out": zeros(32, 5)},
        (zeros(4, 12),),
        {"in": "input", "w": hidden(), "out": "output"},
    )


@model
def ensemble_vmap():
    return (
        lambda p, x: jax.vmap(lambda p: jnp.tanh(jnp.tanh(x @ p["in"]) @ p["w"]) @ p["out"])(p),
        {"in": zeros(6, 12, 32), "w": zeros(6, 32, 32), "out": zeros(6, 32, 5)},
        (zeros(4, 12),),
        {"in": first(Dims(1, 2)), "w": hidden(Dims(1, 2)), "out": "output"},
    )


@model
def ensemble_vmap_conv():
    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    return (
        lambda p, x: jax.vmap(
            lambda p: conv(jnp.tanh(conv(jnp.tanh(conv(x, p["in"])), p["w"])), p["out"])
        )(p),
        {"in": zeros(6, 3, 3, 2, 4), "w": zeros(6, 3, 3, 4, 4), "out": zeros(6, 1, 1, 4, 5)},
        (zeros(4, 8, 8, 2),),
        {"in": first(Dims((1, 2, 3), 4)), "w": hidden(Dims((1, 2, 3), 4)), "out": "output"},
    )


@model
def grouped_conv():
    def conv(x, w, g=1):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=g
        )

    return (
        lambda p, x: conv(jnp.tanh(conv(jnp.tanh(conv(x, p["in"])), p["w"], 4)), p["out"]),
        {"in": zeros(3, 3, 2, 16), "w": zeros(3, 3, 4, 32), "out": zeros(1, 1, 32, 5)},
        (zeros(4, 8, 8, 2),),
        {"in": "input", "w": hidden(Unfold(3, (4, 8), Dims((0, 1, 2), 4))), "out": "output"},
    )


def mlp(p, x):
    return jnp.tanh(jnp.tanh(x @ p["in"]) @ p["w"]) @ p["out"]


MLP = {"in": zeros(12, 32), "w": zeros(32, 32), "out": zeros(32, 5)}


MLP_X = {"in": "input", "w": hidden(), "out": "output"}


@model
def grad_inside():
    return (
        lambda p, x: jax.value_and_grad(lambda p: (mlp(p, x) ** 2).mean())(p),
        MLP,
        (zeros(4, 12),),
        MLP_X,
    )


@model
def forces_gradient_penalty():
    return (
        lambda p, x: (jax.grad(lambda x: mlp(p, x).sum())(x) ** 2).mean() + mlp(p, x).mean(),
        MLP,
        (zeros(4, 12),),
        MLP_X,
    )


@model
def custom_vjp_loss():
    logits = jax.custom_vjp(lambda z, y: cross_entropy(z, y))
    logits.defvjp(lambda z, y: (cross_entropy(z, y), (z, y)), lambda res, g: (g * res[0], None))
    return (lambda p, x, y: logits(mlp(p, x), y), MLP, (zeros(4, 12), jnp.zeros(4, int)), MLP_X)


@model
def shard_mapped():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    blk = jax.shard_map(
        lambda x, w, o: jax.lax.psum(jnp.tanh(x @ w) @ o, "d"),
        mesh=mesh,
        in_specs=(P(), P(None, "d"), P("d")),
        out_specs=P(),
    )
    return (
        lambda p, x: blk(jnp.tanh(x @ p["in"]), p["w"], p["o"]) @ p["out"],
        {**MLP, "o": zeros(32, 32)},
        (zeros(4, 12),),
        {"in": "input", "w": hidden(), "^o$": hidden(), "out": "output"},
    )


@model
def shard_mapped_2_abstract():
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    blk = jax.shard_map(
        lambda x, w, o: jax.lax.psum(jnp.tanh(x @ w) @ o, "d"),
        mesh=mesh,
        in_specs=(P(), P(None, "d"), P("d")),
        out_specs=P(),
    )
    return (
        lambda p, x: blk(jnp.tanh(x @ p["in"]), p["w"], p["o"]) @ p["out"],
        {**MLP, "o": zeros(32, 32)},
        (zeros(4, 12),),
        {"in": "input", "w": hidden(), "^o$": hidden(), "out": "output"},
    )


@model
def intermediates_deep_supervision():

    def f(p, x):
        h1 = jnp.tanh(x @ p["in"])
        h2 = jnp.tanh(h1 @ p["w"])
        return (h2 @ p["out"], h1 @ p["aux"], (h1, h2))

    return (f, {**MLP, "aux": zeros(32, 5)}, (zeros(4, 12),), {**MLP_X, "aux": "output"})


@model
def onehot_embedding():
    return (
        lambda p, t: jax.nn.silu(jax.nn.one_hot(t, 50) @ p["emb"] @ p["w"]) @ p["out"],
        {"emb": zeros(50, 32), "w": zeros(32, 32), "out": zeros(32, 50)},
        (TOKENS,),
        {"emb": "embedding", "w": hidden(), "out": "output"},
    )


@model
def neural_ode():
    return (
        lambda p, x: jax.lax.fori_loop(
            0, 5, lambda i, x: x + jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"], x
        ),
        {"a": zeros(8, 32), "b": zeros(32, 32), "c": zeros(32, 8)},
        (zeros(4, 8),),
        {"[abc]": hidden()},  # the last layer of a step feeds the next one
    )


@model
def decoder_feeds_back():

    def f(p, t0):

        def step(s, _):
            h, t = s
            h = jnp.tanh(h @ p["hh"] + p["emb"][t] @ p["ih"])
            logits = h @ p["out"]
            return ((h, jnp.argmax(logits, -1)), logits)

        return jax.lax.scan(step, (zeros(2, 32), t0), None, length=5)[1]

    return (
        f,
        {"emb": zeros(50, 16), "hh": zeros(32, 32), "ih": zeros(16, 32), "out": zeros(32, 50)},
        (jnp.zeros(2, int),),
        {"emb": "embedding", "hh|ih": hidden(), "out": "output"},
    )


@model
def shared_universal():
    return (
        lambda p, t: (
            lambda x: (
                jax.nn.silu(jax.nn.silu(jax.nn.silu(x @ p["w"]) @ p["w"]) @ p["w"]) @ p["head"]
            )
        )(p["emb"][t]),
        {"emb": zeros(50, 32), "w": zeros(32, 32), "head": zeros(32, 50)},
        (TOKENS,),
        {"w": hidden(), "emb": "embedding", "head": "output"},
    )


@model
def relative_position_xl():

    def f(p, t):
        x = p["emb"][t]
        pos = jnp.sin(jnp.arange(16.0)[:, None] / 10 ** jnp.arange(32))
        q, k, v, kr = (
            heads(x @ p["q"], 4),
            heads(x @ p["k"], 4),
            heads(x @ p["v"], 4),
            (pos @ p["r"]).reshape(16, 4, 8),
        )
        a = jnp.einsum("bthd,bshd->bhts", q + p["u"], k) + jnp.einsum(
            "bthd,shd->bhts", q + p["vb"], kr
        )
        return (
            x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(a), v).reshape(x.shape) @ p["o"]
        ) @ p["head"]

    return (
        f,
        {
            "emb": zeros(50, 32),
            **{n: zeros(32, 32) for n in "qkvro"},
            "u": zeros(4, 8),
            "vb": zeros(4, 8),
            "head": zeros(32, 50),
        },
        (TOKENS,),
        {"^[qkvro]$": hidden(), "^(u|vb)$": "vector", "emb": "embedding", "head": "output"},
    )


@model
def t5_bias_dropout():

    def f(p, t, k):
        x = p["emb"][t]
        b = p["bias"][jnp.arange(16)[:, None] - jnp.arange(16) + 15]
        q, kk, v = (heads(x @ p[n], 4) for n in "qkv")
        a = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, kk) + b.transpose(2, 0, 1))
        a = a * jax.random.bernoulli(k, 0.9, a.shape)
        return (x + jnp.einsum("bhts,bshd->bthd", a, v).reshape(x.shape) @ p["o"]) @ p["head"]

    return (
        f,
        {
            "emb": zeros(50, 32),
            "bias": zeros(31, 4),
            **{n: zeros(32, 32) for n in "qkvo"},
            "head": zeros(32, 50),
        },
        (TOKENS, KEY),
        {"^[qkvo]$": hidden(), "bias|emb": "embedding", "head": "output"},
    )


@model
def attention_library():
    return decoder(
        lambda p, x: (
            heads(x @ p["q"], 4),
            heads(x @ p["k"], 4),
            jax.nn.dot_product_attention(
                heads(x @ p["q"], 4), heads(x @ p["k"], 4), heads(x @ p["v"], 4)
            ),
        ),
        {k: zeros(32, 32) for k in "qkv"},
        {"^[qkv]": hidden()},
    )
