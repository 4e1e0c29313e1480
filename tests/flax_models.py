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


def nnx_shapes(module):
    """The shapes of what trains in a module of nnx that takes `nnx.Rngs`."""
    return nnx.state(nnx.eval_shape(lambda: module(nnx.Rngs(0))), nnx.Param)
