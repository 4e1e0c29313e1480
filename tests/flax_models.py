"""Flax models of the kinds that people train, small, with the names that people give."""

import functools

import jax
import jax.numpy as jnp
from flax import linen, nnx

# nnx: a GPT whose output head is its embedding.


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.ln_1 = nnx.LayerNorm(width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.ln_2 = nnx.LayerNorm(width, rngs=rngs)
        self.fc_in = nnx.Linear(width, 4 * width, rngs=rngs)
        self.fc_out = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.fc_out(nnx.gelu(self.fc_in(self.ln_2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs, layers=2, width=8, vocabulary=32, context=16):
        self.wte = nnx.Embed(vocabulary, width, rngs=rngs)
        self.wpe = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.ln_f = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


def nnx_gpt():
    return nnx.state(nnx.eval_shape(lambda: GPT(nnx.Rngs(0))), nnx.Param)


# linen: layers under nn.scan, with Dense projections that split heads by themselves.


class ScannedLayer(linen.Module):
    width: int = 8

    @linen.compact
    def __call__(self, x, _):
        y = linen.RMSNorm(name="attn_norm")(x)
        q, k, v = (linen.Dense(self.width, name=name)(y) for name in ("q", "k", "v"))
        x = x + linen.Dense(self.width, name="o")(linen.dot_product_attention(q, k, v))
        y = linen.RMSNorm(name="mlp_norm")(x)
        y = linen.silu(linen.Dense(24, name="gate")(y)) * linen.Dense(24, name="up")(y)
        return x + linen.Dense(self.width, name="down")(y), None


class ScannedTransformer(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(32, 8, name="embed_tokens")(tokens)
        scan = linen.scan(
            ScannedLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        x, _ = scan(name="layers")(x, None)
        x = linen.RMSNorm(name="final_norm")(x)
        return linen.Dense(32, use_bias=False, name="lm_head")(x)


# linen: a ResNet with the names that linen makes up.


class ResNetBlock(linen.Module):
    features: int

    @linen.compact
    def __call__(self, x):
        y = linen.Conv(self.features, (3, 3), use_bias=False)(x)
        y = linen.relu(linen.BatchNorm(use_running_average=True)(y))
        y = linen.Conv(self.features, (3, 3), use_bias=False)(y)
        y = linen.BatchNorm(use_running_average=True)(y)
        if x.shape != y.shape:
            x = linen.Conv(self.features, (1, 1), use_bias=False, name="conv_proj")(x)
        return linen.relu(x + y)


class ResNet(linen.Module):
    @linen.compact
    def __call__(self, images):
        x = linen.Conv(8, (3, 3), use_bias=False, name="conv_init")(images)
        x = ResNetBlock(16)(ResNetBlock(8)(x))
        return linen.Dense(10)(x.mean((1, 2)))


# linen: a vision transformer.


class ViT(linen.Module):
    @linen.compact
    def __call__(self, images):
        x = linen.Conv(8, (4, 4), strides=(4, 4), name="patch_embed")(images)
        x = x.reshape(len(x), -1, 8)
        token = self.param("cls_token", linen.initializers.zeros, (1, 1, 8))
        x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], 1)
        x = x + self.param("pos_embed", linen.initializers.normal(), (1, x.shape[1], 8))
        for i in range(2):
            y = linen.LayerNorm(name=f"norm_{i}")(x)
            x = x + linen.MultiHeadDotProductAttention(2, name=f"attention_{i}")(y, y)
            x = x + linen.Dense(8, name=f"mlp_out_{i}")(linen.Dense(32, name=f"mlp_in_{i}")(x))
        return linen.Dense(10, name="head")(x[:, 0])


# linen: a router and stacked experts.


class Experts(linen.Module):
    experts: int = 4
    width: int = 8
    hidden: int = 6

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.normal()
        gate, up = (
            self.param(name, init, (self.experts, self.width, self.hidden))
            for name in ("gate", "up")
        )
        down = self.param("down", init, (self.experts, self.hidden, self.width))
        hidden = linen.silu(jnp.einsum("td,edh->teh", x, gate)) * jnp.einsum("td,edh->teh", x, up)
        return jnp.einsum("teh,ehd->ted", hidden, down)


class MoE(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(32, 8, name="embed")(tokens)
        for i in range(2):
            weights = linen.softmax(linen.Dense(4, use_bias=False, name=f"router_{i}")(x))
            x = x + jnp.einsum("te,ted->td", weights, Experts(name=f"experts_{i}")(x))
        return linen.Dense(32, name="lm_head")(x)


# nnx: 4 heads of queries for one of keys and values, all in one projection.


class GroupedQueries(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 8, rngs=rngs)
        self.qkv = nnx.Linear(8, (4 + 1 + 1) * 2, use_bias=False, rngs=rngs)
        self.q_norm, self.k_norm = (nnx.RMSNorm(2, rngs=rngs) for _ in range(2))
        self.o_proj = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.gate_up = nnx.Linear(8, 2 * 12, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(12, 8, use_bias=False, rngs=rngs)
        self.lm_head = nnx.Linear(8, 32, use_bias=False, rngs=rngs)


def grouped_queries():
    return nnx.state(nnx.eval_shape(lambda: GroupedQueries(nnx.Rngs(0))), nnx.Param)


def linen_params(module, *shape, dtype=jnp.float32):
    """The shapes of a module's parameters for an input of that shape."""
    arguments = (jax.random.key(0), jax.ShapeDtypeStruct(shape, dtype))
    return jax.eval_shape(module.init, *arguments)["params"]


# The modules of Flax' examples at 18f8f31, small, with the same names.


class Lm1bBlock(linen.Module):
    """`EncoderDecoder1DBlock` of lm1b: its modules are named by their classes and numbers."""

    @linen.compact
    def __call__(self, x):
        y = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(2, use_bias=False)(y)
        return x + MlpBlock()(linen.LayerNorm()(x))


class MlpBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        y = linen.relu(linen.Dense(32)(x))
        return linen.Dense(x.shape[-1])(y)


class AddPositionEmbs(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.initializers.normal()
        return x + self.param("pos_embedding", init, (1, 16, x.shape[-1]))[:, : x.shape[1]]


class Lm1bDecoder(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = AddPositionEmbs(name="posembed_output")(linen.Embed(50, 16)(tokens))
        for i in range(2):
            x = Lm1bBlock(name=f"encoderdecoderblock_{i}")(x)
        x = linen.LayerNorm(name="encoderdecoder_norm")(x)
        return linen.Dense(50, name="logitdense")(x)


class Lm1b(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        return Lm1bDecoder(name="decoder")(tokens)


class GemmaAttention(nnx.Module):
    def __init__(self, heads, key_heads, rngs, width=12, dim=8):
        def einsum(equation, *shape):
            return nnx.Einsum(equation, shape, rngs=rngs)

        self.attn_vec_einsum = einsum("BTNH,NHD->BTD", heads, dim, width)
        if heads == key_heads:
            self.qkv_einsum = einsum("BTD,SNDH->SBTNH", 3, heads, width, dim)
        else:
            self.q_einsum = einsum("BTD,NDH->BTNH", heads, width, dim)
            self.kv_einsum = einsum("BTD,CKDH->CBTKH", 2, key_heads, width, dim)
        self._query_norm, self._key_norm = (nnx.RMSNorm(dim, rngs=rngs) for _ in range(2))


class GemmaLayer(nnx.Module):
    def __init__(self, heads, key_heads, rngs, width=12):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.pre_attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attn = GemmaAttention(heads, key_heads, rngs)
        self.pre_ffw_norm = nnx.RMSNorm(width, rngs=rngs)
        projections = {"gate_proj": linear(width, 32), "up_proj": linear(width, 32)}
        self.mlp = nnx.Dict(**projections, down_proj=linear(32, width))


class Gemma(nnx.Module):
    """With as few key heads as Gemma 2B in its first layer, as many as Gemma 7B in the second."""

    def __init__(self, rngs):
        self.embedder = nnx.Embed(50, 12, rngs=rngs)
        self.layers = nnx.List([GemmaLayer(4, 1, rngs), GemmaLayer(4, 4, rngs)])
        self.final_norm = nnx.RMSNorm(12, rngs=rngs)


# nnx: the linear attention of Kimi K3 (arXiv 2607.24653, section 2.1.1), named as in MaxText and in
# Moonshot's code for PyTorch. Kimi Linear has g_a_proj and g_b_proj in the place of g_proj.


class ShortConvolution(nnx.Module):
    def __init__(self, channels, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (4, 1, channels)))

    def __call__(self, x):
        x = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        names = ("NWC", "WIO", "NWC")
        x = jax.lax.conv_general_dilated(
            x, self.kernel[...], (1,), "VALID", None, None, names, x.shape[-1]
        )
        return nnx.silu(x)


def delta_rule_in_chunks(q, k, v, decay, beta, size):
    """o of S <- Diag(exp(decay))S; S <- S + beta·k(v - kᵀS)ᵀ; o = qᵀS, `size` steps at a time.

    q, k, v and the decay have shapes (batch, steps, heads, dim), beta (batch, steps, heads).
    """

    def chunks(x):  # (chunks, batch, heads, size, ...)
        x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    q, k, v, decay, beta = map(chunks, (q, k, v, decay, beta[..., None]))
    total = jnp.cumsum(decay, -2)
    later = jnp.exp(total[..., None, :] - total[..., None, :, :])  # (..., size, size, dim)
    of_keys = jnp.sum(k[..., None, :] * k[..., None, :, :] * later, -1)
    of_queries = jnp.tril(jnp.sum(q[..., None, :] * k[..., None, :, :] * later, -1))
    lower = jnp.eye(size) + jnp.tril(beta * of_keys, -1)
    unit = jnp.broadcast_to(jnp.eye(size), lower.shape)
    inverse = jax.scipy.linalg.solve_triangular(lower, unit, lower=True, unit_diagonal=True)
    new = inverse @ (beta * v)
    old = inverse @ (beta * k * jnp.exp(total))

    def step(state, chunk):
        q, k, new, old, total, of_queries = chunk
        errors = new - old @ state
        o = (q * jnp.exp(total)) @ state + of_queries @ errors
        rest = jnp.exp(total[..., -1:, :] - total)
        state = jnp.exp(total[..., -1, :, None]) * state
        return state + (k * rest).swapaxes(-1, -2) @ errors, o

    state = jnp.zeros((*q.shape[1:3], q.shape[-1], v.shape[-1]))
    _, o = jax.lax.scan(step, state, (q, k, new, old, total, of_queries))
    o = jnp.moveaxis(o, (0, 2), (1, 3))  # (batch, chunks, size, heads, dim)
    return o.reshape(o.shape[0], -1, *o.shape[3:])


class KimiDeltaAttention(nnx.Module):
    def __init__(self, width, heads, dim, low_rank_gate, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.heads, full = heads, heads * dim
        self.q_proj, self.k_proj, self.v_proj = (linear(width, full) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConvolution(full, rngs) for _ in range(3)
        )
        self.f_a_proj, self.f_b_proj = linear(width, dim), linear(dim, full)
        self.A_log = nnx.Param(jnp.zeros(heads))
        self.dt_bias = nnx.Param(jnp.zeros(full))
        self.b_proj = linear(width, heads)
        if low_rank_gate:
            self.g_a_proj, self.g_b_proj = linear(width, dim), linear(dim, full)
        else:
            self.g_proj = linear(width, full)
        self.o_norm = nnx.RMSNorm(dim, rngs=rngs)
        self.o_proj = linear(full, width)

    def __call__(self, x):
        def by_head(x):
            return x.reshape(*x.shape[:-1], self.heads, -1)

        def unit(x):
            return x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6)

        q = by_head(self.q_conv1d(self.q_proj(x)))
        k = by_head(self.k_conv1d(self.k_proj(x)))
        v = by_head(self.v_conv1d(self.v_proj(x)))
        decay = by_head(self.f_b_proj(self.f_a_proj(x)) + self.dt_bias[...])
        decay = -5 * nnx.sigmoid(jnp.exp(self.A_log[...])[:, None] * decay)
        beta = nnx.sigmoid(self.b_proj(x))
        o = delta_rule_in_chunks(unit(q), unit(k), v, decay, beta, 4)
        has_full_gate = hasattr(self, "g_proj")
        gate = self.g_proj(x) if has_full_gate else self.g_b_proj(self.g_a_proj(x))
        o = self.o_norm(o) * nnx.sigmoid(by_head(gate))
        return self.o_proj(o.reshape(x.shape[0], x.shape[1], -1))


class KimiLayer(nnx.Module):
    def __init__(self, width, low_rank_gate, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.input_layernorm = nnx.RMSNorm(width, rngs=rngs)
        self.self_attn = KimiDeltaAttention(width, 3, 8, low_rank_gate, rngs)
        self.post_attention_layernorm = nnx.RMSNorm(width, rngs=rngs)
        self.mlp = nnx.Dict(up_proj=linear(width, 44), down_proj=linear(44, width))

    def __call__(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        y = nnx.silu(self.mlp["up_proj"](self.post_attention_layernorm(x)))
        return x + self.mlp["down_proj"](y)


class Kimi(nnx.Module):
    """Layers of Kimi K3; with a gate of low rank those of Kimi Linear."""

    def __init__(self, rngs, low_rank_gate=False, width=30):
        self.embed_tokens = nnx.Embed(61, width, rngs=rngs)
        self.layers = nnx.List([KimiLayer(width, low_rank_gate, rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.lm_head = nnx.Linear(width, 61, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def nnx_shapes(module):
    """The shapes of what trains in a module of nnx that takes `nnx.Rngs`."""
    return nnx.state(nnx.eval_shape(lambda: module(nnx.Rngs(0))), nnx.Param)
