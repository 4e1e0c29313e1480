"""Vision models at real size, with answers read off their sources."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from optax.contrib import MuonDimensionNumbers as Dims
from use_models import (
    CONV,
    IN_OUT,
    KEY,
    OUT_IN,
    attention,
    conv,
    cross_entropy,
    equinox,
    f32,
    first,
    haiku,
    heads,
    hidden,
    i32,
    linen,
    merged,
    norm,
    real_size,
)

from muon_jax import Split, Unfold

IMAGES = f32(2, 224, 224, 3)
LABELS = i32(2)
POINTWISE = Dims(2, 3)  # of a kernel (1, 1, in, out)


@real_size
def flax_resnet50():
    """Flax's imagenet example: bottlenecks, batch norm whose averages are mutable."""
    norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
    conv = functools.partial(nn.Conv, use_bias=False)

    class Bottleneck(nn.Module):
        width: int
        strides: tuple

        @nn.compact
        def __call__(self, x):
            y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
            y = nn.relu(norm()(conv(self.width, (3, 3), self.strides)(y)))
            y = norm(scale_init=nn.initializers.zeros_init())(conv(self.width * 4, (1, 1))(y))
            if x.shape != y.shape:
                x = norm()(conv(self.width * 4, (1, 1), self.strides, name="conv_proj")(x))
            return nn.relu(x + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = conv(64, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(x)
            x = nn.max_pool(nn.relu(norm()(x)), (3, 3), (2, 2), "SAME")
            for i, size in enumerate((3, 4, 6, 3)):
                for j in range(size):
                    x = Bottleneck(64 * 2**i, (2, 2) if i > 0 and j == 0 else (1, 1))(x)
            return nn.Dense(1000)(x.mean((1, 2)))

    return (
        *linen(ResNet(), IMAGES),
        {
            "conv_init": first(CONV),
            "^Dense_0/kernel": "output",
            "Conv_1/kernel": hidden(CONV),
            "(Conv_[02]|conv_proj)/kernel": hidden(POINTWISE),
        },
    )


@real_size
def haiku_resnet50():
    """The one of `hk.nets`."""
    import haiku as hk

    return (
        *haiku(lambda x: hk.nets.ResNet50(1000)(x, is_training=True), IMAGES),
        {
            "initial_conv/": first(CONV),
            "logits/w": "output",
            "conv_1/w": hidden(CONV),
            "(conv_[02]|shortcut_conv)/w": hidden(POINTWISE),
            "batchnorm": "vector",
        },
    )


@real_size
def haiku_mobilenet():
    import haiku as hk

    return (
        *haiku(lambda x: hk.nets.MobileNetV1(num_classes=1000)(x, is_training=True), IMAGES),
        {
            "depthwise": "depthwise",
            "mobile_net_v1/conv2_d/w": first(CONV),
            "logits": "output",
            "(batchnorm|batch_norm)": "vector",
            "pointwise|mobilenet.*/w": hidden(POINTWISE),
        },
    )


@real_size
def haiku_vq_vae():
    """`hk.nets.VectorQuantizer`: a code book that distances and a lookup use."""
    import haiku as hk

    def fn(x):
        h = jax.nn.relu(hk.Conv2D(128, 4, 2, name="e0")(x))
        h = jax.nn.relu(hk.Conv2D(256, 4, 2, name="e1")(h))
        h = hk.Conv2D(64, 1, name="to_codes")(h)
        quantized = hk.nets.VectorQuantizer(64, 512, 0.25, name="vq")(h, is_training=True)
        h = jax.nn.relu(hk.Conv2D(256, 3, name="d0")(quantized["quantize"]))
        h = jax.nn.relu(hk.Conv2DTranspose(128, 4, 2, name="d1")(h))
        y = hk.Conv2DTranspose(3, 4, 2, name="d2")(h)
        return jnp.square(y - x).mean() + quantized["loss"]

    return (
        *haiku(fn, f32(4, 64, 64, 3)),
        {
            "^e0/w": first(CONV),
            "^to_codes/w": hidden(POINTWISE),
            "^vq": "embedding",
            "^d2/w": "output",
            "^d1/w": hidden(Dims((0, 1, 3), 2)),  # Haiku's transposed kernels are (…, out, in)
            "^(e1|d0)/w": hidden(CONV),
        },
    )


class EncoderBlock(nn.Module):
    n: int = 12

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.n)(y, y)
        y = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


ENCODER = {
    "(query|key|value)/kernel": hidden(Dims(0, (1, 2))),
    "(query|key|value)/bias": "vector",
    "out/kernel": hidden(Dims((0, 1), 2)),
    "Dense_[01]/kernel": hidden(),
}


@real_size
def flax_vit_b16():
    class ViT(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(768, (16, 16), (16, 16), padding="VALID", name="embedding")(x)
            x = x.reshape(x.shape[0], -1, 768)
            cls = self.param("cls", nn.initializers.zeros, (1, 1, 768))
            x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], 1)
            x = x + self.param("posembed", nn.initializers.normal(), (1, 197, 768))
            for i in range(3):
                x = EncoderBlock(name=f"encoderblock_{i}")(x)
            x = nn.LayerNorm()(x)[:, 0]
            return nn.Dense(1000, name="head")(jnp.tanh(nn.Dense(768, name="pre_logits")(x)))

    return (
        *linen(ViT(), IMAGES),
        {
            "^embedding/kernel": first(CONV),
            "cls|posembed": "vector",
            "head/kernel": "output",
            "pre_logits/kernel": hidden(),
            **ENCODER,
        },
    )


@real_size
def siglip_map_head():
    """Pooling by attention whose query is a learned probe."""

    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            probe = self.param("probe", nn.initializers.normal(), (1, 1, 768))
            x = nn.MultiHeadDotProductAttention(12)(jnp.tile(probe, (x.shape[0], 1, 1)), x)
            return (x + nn.Dense(768)(nn.gelu(nn.Dense(3072)(nn.LayerNorm()(x)))))[:, 0]

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(768, (16, 16), (16, 16), padding="VALID", name="embedding")(x)
            x = x.reshape(x.shape[0], -1, 768)
            x = x + self.param("pos", nn.initializers.normal(), (1, x.shape[1], 768))
            return nn.Dense(1000, name="head")(Head()(EncoderBlock()(x)))

    return (
        *linen(Net(), IMAGES),
        {
            "^embedding/kernel": first(CONV),
            "pos": "vector",
            "probe": "vector",  # one query of attention
            "head/kernel": "output",
            **ENCODER,
        },
    )


@real_size
def clip_two_towers():
    """Both projections meet only in the product of the two towers: neither is a head."""

    class Text(nn.Module):
        @nn.compact
        def __call__(self, t):
            x = nn.Embed(49408, 512)(t)
            x = x + self.param("positions", nn.initializers.normal(), (77, 512))
            x = EncoderBlock(8)(x)
            last = x[jnp.arange(t.shape[0]), t.argmax(-1)]
            return nn.Dense(512, use_bias=False, name="projection")(last)

    class Vision(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(768, (32, 32), (32, 32), use_bias=False, name="patches")(x)
            x = EncoderBlock(12)(x.reshape(x.shape[0], -1, 768))
            return nn.Dense(512, use_bias=False, name="projection")(x.mean(1))

    class Clip(nn.Module):
        @nn.compact
        def __call__(self, x, t):
            a, b = Vision(name="vision")(x), Text(name="text")(t)
            a, b = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (a, b))
            logits = jnp.exp(self.param("scale", nn.initializers.zeros, ())) * a @ b.T
            y = jnp.arange(2)
            return cross_entropy(logits, y) + cross_entropy(logits.T, y)

    return (
        *linen(Clip(), IMAGES, i32(2, 77)),
        {
            "patches": first(CONV),
            "embedding": "embedding",
            "positions": "vector",
            "projection/kernel": hidden(),
            **ENCODER,
        },
    )


@real_size
def diffusion_unet():
    """Time embeddings, residual blocks with group norms, self and cross attention, skips."""

    class Res(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x, t):
            h = nn.Conv(self.width, (3, 3), name="conv1")(nn.silu(nn.GroupNorm()(x)))
            scale, shift = jnp.split(nn.Dense(2 * self.width, name="time")(nn.silu(t)), 2, -1)
            h = nn.GroupNorm()(h) * (1 + scale[:, None, None]) + shift[:, None, None]
            h = nn.Conv(self.width, (3, 3), name="conv2")(nn.silu(h))
            if x.shape != h.shape:
                x = nn.Conv(self.width, (1, 1), name="skip")(x)
            return x + h

    class Attend(nn.Module):
        @nn.compact
        def __call__(self, x, context):
            b, h, w, c = x.shape
            y = nn.GroupNorm()(x).reshape(b, h * w, c)
            y = y + nn.MultiHeadDotProductAttention(8, name="self")(nn.LayerNorm()(y))
            y = y + nn.MultiHeadDotProductAttention(8, name="cross")(nn.LayerNorm()(y), context)
            gate, up = jnp.split(nn.Dense(8 * c, name="geglu")(nn.LayerNorm()(y)), 2, -1)
            y = y + nn.Dense(c, name="down")(up * nn.gelu(gate))
            return x + y.reshape(x.shape)

    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x, t, context):
            angles = t[:, None] * jnp.exp(-jnp.arange(160) / 16)
            t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
            t = nn.Dense(1280, name="time2")(nn.silu(nn.Dense(1280, name="time1")(t)))
            x = nn.Conv(320, (3, 3), name="conv_in")(x)
            a = Attend()(Res(320)(x, t), context)
            b = nn.Conv(320, (3, 3), (2, 2), name="downsample")(a)
            b = Attend()(Res(640)(b, t), context)
            m = Res(640)(b, t)
            u = Res(640)(jnp.concatenate([m, b], -1), t)
            u = jax.image.resize(u, (2, 64, 64, 640), "nearest")
            u = nn.Conv(640, (3, 3), name="upsample")(u)
            u = Attend()(Res(320)(jnp.concatenate([u, a], -1), t), context)
            return nn.Conv(4, (3, 3), name="conv_out")(nn.silu(nn.GroupNorm()(u)))

    module = UNet()
    inputs = (f32(2, 64, 64, 4), f32(2), f32(2, 77, 768))

    def up(width):
        return hidden(Split(1, (width, width), IN_OUT))

    return (
        *linen(module, *inputs),
        {
            "conv_in": first(CONV),
            "time1": first(),
            "conv_out": "output",
            "cross/(key|value)/kernel": first(Dims(0, (1, 2))),
            "(query|key|value)/kernel": hidden(Dims(0, (1, 2))),
            "(query|key|value)/bias": "vector",
            "out/kernel": hidden(Dims((0, 1), 2)),
            "time2|down/kernel": hidden(),
            "Res_[04]/time": up(320),
            "Res_[123]/time": up(640),
            "Attend_[02]/geglu": up(1280),
            "Attend_1/geglu": up(2560),
            "(conv1|conv2|sample)/kernel": hidden(CONV),
            "skip/kernel": hidden(POINTWISE),
        },
    )


@real_size
def dit_xl_adaln_zero():
    d, n = 1152, 16

    def fn(p, x, t, y):
        angles = t[:, None] * jnp.exp(-jnp.arange(128) / 16)
        c = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1) @ p["t1"]
        c = jax.nn.silu(c) @ p["t2"] + p["labels"][y]
        x = conv_patches(x, p["patch"]) + p["pos"]
        for b in p["blocks"]:
            ada = (jax.nn.silu(c) @ b["ada"])[:, None]
            s1, c1, g1, s2, c2, g2 = jnp.split(ada, 6, -1)
            qkv = ((norm(x) * (1 + c1) + s1) @ b["qkv"]).reshape(2, -1, 3, n, d // n)
            q, k, v = (qkv[:, :, i] for i in range(3))
            x = x + g1 * (merged(attention(q, k, v)) @ b["proj"])
            h = jax.nn.gelu((norm(x) * (1 + c2) + s2) @ b["fc1"])
            x = x + g2 * (h @ b["fc2"])
        shift, scale = jnp.split((jax.nn.silu(c) @ p["final_ada"])[:, None], 2, -1)
        return (norm(x) * (1 + scale) + shift) @ p["final"]

    def conv_patches(x, w):
        return conv(x, w, 2).reshape(x.shape[0], -1, d)

    block = {
        "ada": f32(d, 6 * d),
        "qkv": f32(d, 3 * d),
        "proj": f32(d, d),
        "fc1": f32(d, 4 * d),
        "fc2": f32(4 * d, d),
    }
    params = {
        "t1": f32(256, d),
        "t2": f32(d, d),
        "labels": f32(1001, d),
        "patch": f32(2, 2, 4, d),
        "pos": f32(256, d),
        "blocks": [block] * 3,
        "final_ada": f32(d, 2 * d),
        "final": f32(d, 32),
    }
    return (
        fn,
        params,
        (f32(2, 32, 32, 4), f32(2), LABELS),
        {
            "^t1": first(),
            "^t2": hidden(),
            "labels": "embedding",
            "patch": first(CONV),
            "pos": "vector",
            "final_ada": hidden(Split(1, (d, d), IN_OUT)),
            "final$": "output",
            "/ada": hidden(Split(1, (d,) * 6, IN_OUT)),
            "/qkv": hidden(Split(1, (d,) * 3, IN_OUT)),
            "blocks": hidden(),
        },
    )


@real_size
def flux():
    """Double blocks with two streams; single blocks whose first layer makes q, k, v and the MLP,
    and whose second takes attention and MLP concatenated."""
    d, n, f = 3072, 24, 12288

    def qkv_of(h):
        qkv = h.reshape(*h.shape[:2], 3, n, d // n)
        return norm(qkv[:, :, 0]), norm(qkv[:, :, 1]), qkv[:, :, 2]

    def fn(p, image, text, t):
        angles = t[:, None] * jnp.exp(-jnp.arange(128) / 16)
        c = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
        c = jax.nn.silu(jax.nn.silu(c @ p["time_in"]["in"]) @ p["time_in"]["out"])
        x, y = image @ p["img_in"], text @ p["txt_in"]
        for b in p["double"]:
            sx, cx, gx = jnp.split((c @ b["img"]["mod"])[:, None], 3, -1)
            sy, cy, gy = jnp.split((c @ b["txt"]["mod"])[:, None], 3, -1)
            of_x = qkv_of((norm(x) * (1 + cx) + sx) @ b["img"]["qkv"])
            of_y = qkv_of((norm(y) * (1 + cy) + sy) @ b["txt"]["qkv"])
            q, k, v = (jnp.concatenate(pair, 1) for pair in zip(of_y, of_x, strict=True))
            o = merged(attention(q, k, v))
            x = x + gx * (o[:, y.shape[1] :] @ b["img"]["proj"])
            y = y + gy * (o[:, : y.shape[1]] @ b["txt"]["proj"])
        x = jnp.concatenate([y, x], 1)
        for b in p["single"]:
            s, sc, g = jnp.split((c @ b["mod"])[:, None], 3, -1)
            qkv, mlp = jnp.split((norm(x) * (1 + sc) + s) @ b["linear1"], [3 * d], -1)
            o = merged(attention(*qkv_of(qkv)))
            x = x + g * (jnp.concatenate([o, jax.nn.gelu(mlp)], -1) @ b["linear2"])
        s, sc = jnp.split((c @ p["final_mod"])[:, None], 2, -1)
        return (norm(x[:, text.shape[1] :]) * (1 + sc) + s) @ p["final"]

    stream = {"mod": f32(d, 3 * d), "qkv": f32(d, 3 * d), "proj": f32(d, d)}
    single = {"mod": f32(d, 3 * d), "linear1": f32(d, 3 * d + f), "linear2": f32(d + f, d)}
    params = {
        "time_in": {"in": f32(256, d), "out": f32(d, d)},
        "img_in": f32(64, d),
        "txt_in": f32(4096, d),
        "double": [{"img": stream, "txt": stream}] * 2,
        "single": [single] * 2,
        "final_mod": f32(d, 2 * d),
        "final": f32(d, 64),
    }
    return (
        fn,
        params,
        (f32(2, 256, 64), f32(2, 64, 4096), f32(2)),
        {
            "time_in/in|img_in|txt_in": first(),
            "time_in/out": hidden(),
            "final_mod": hidden(Split(1, (d, d), IN_OUT)),
            "final$": "output",
            "mod|qkv": hidden(Split(1, (d, d, d), IN_OUT)),
            "linear1": hidden(Split(1, (d, d, d, f), IN_OUT)),
            "proj|linear2": hidden(),
        },
    )


@real_size
def mlp_mixer():
    """Tokens are mixed in a transpose."""

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(768, (16, 16), (16, 16), name="stem")(x).reshape(2, -1, 768)
            for _ in range(3):
                y = nn.LayerNorm()(x).swapaxes(1, 2)
                x = x + nn.Dense(196)(nn.gelu(nn.Dense(384)(y))).swapaxes(1, 2)
                x = x + nn.Dense(768)(nn.gelu(nn.Dense(3072)(nn.LayerNorm()(x))))
            return nn.Dense(1000, name="head")(nn.LayerNorm()(x).mean(1))

    return (
        *linen(Mixer(), IMAGES),
        {"stem/kernel": first(CONV), "head/kernel": "output", "Dense_": hidden()},
    )


@real_size
def convnext():
    """Depthwise filters, pointwise layers as Dense, scales of layers."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            c = x.shape[-1]
            y = nn.LayerNorm()(nn.Conv(c, (7, 7), feature_group_count=c, name="dw")(x))
            y = nn.Dense(c, name="pw2")(nn.gelu(nn.Dense(4 * c, name="pw1")(y)))
            return x + self.param("gamma", nn.initializers.ones, (c,)) * y

    class ConvNeXt(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(nn.Conv(96, (4, 4), (4, 4), name="stem")(x))
            for i, width in enumerate((96, 192, 384)):
                if i:
                    x = nn.Conv(width, (2, 2), (2, 2), name=f"down_{i}")(nn.LayerNorm()(x))
                x = Block()(x)
            return nn.Dense(1000, name="head")(nn.LayerNorm()(x.mean((1, 2))))

    return (
        *linen(ConvNeXt(), IMAGES),
        {
            "stem/kernel": first(CONV),
            "dw": "depthwise",
            "pw": hidden(),
            "down": hidden(CONV),
            "head/kernel": "output",
        },
    )


@real_size
def efficientnet():
    """Inverted bottlenecks with squeeze and excitation."""

    class Block(nn.Module):
        out: int

        @nn.compact
        def __call__(self, x):
            c = 6 * x.shape[-1]
            h = nn.silu(nn.GroupNorm(8)(nn.Conv(c, (1, 1), name="expand")(x)))
            h = nn.Conv(c, (5, 5), feature_group_count=c, use_bias=False, name="depthwise")(h)
            s = nn.silu(nn.Conv(c // 24, (1, 1), name="se_reduce")(h.mean((1, 2), keepdims=True)))
            h = h * nn.sigmoid(nn.Conv(c, (1, 1), name="se_expand")(s))
            return nn.Conv(self.out, (1, 1), name="project")(h)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.silu(nn.Conv(32, (3, 3), (2, 2), name="stem")(x))
            x = Block(64)(Block(64)(x))
            x = nn.silu(nn.Conv(1280, (1, 1), name="top")(x)).mean((1, 2))
            return nn.Dense(1000, name="head")(nn.Dropout(0.2, deterministic=False)(x))

    return (
        *linen(Net(), IMAGES),
        {
            "stem/kernel": first(CONV),
            "depthwise": "depthwise",
            "head/kernel": "output",
            "(expand|se_reduce|se_expand|project|top)/kernel": hidden(POINTWISE),
        },
    )


@real_size
def densenet():
    """Each layer takes all before it, concatenated."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(64, (7, 7), (2, 2), name="stem")(x))
            for stage in range(2):
                for _ in range(4):
                    h = nn.Conv(128, (1, 1), name=f"narrow_{stage}_{_}")(nn.relu(nn.GroupNorm()(x)))
                    h = nn.Conv(32, (3, 3), name=f"grow_{stage}_{_}")(nn.relu(h))
                    x = jnp.concatenate([x, h], -1)
                x = nn.Conv(x.shape[-1] // 2, (1, 1), name=f"transition_{stage}")(nn.relu(x))
                x = nn.avg_pool(x, (2, 2), (2, 2))
            return nn.Dense(1000, name="head")(x.mean((1, 2)))

    return (
        *linen(Net(), IMAGES),
        {
            "stem/kernel": first(CONV),
            "grow.*kernel": hidden(CONV),
            "head/kernel": "output",
            "(narrow|transition).*kernel": hidden(POINTWISE),
        },
    )


@real_size
def swin_windows_with_shift():
    """Windows by reshape and roll, a table of relative positions, patch merging."""

    def windows(x, w):
        b, h, _, c = x.shape
        x = x.reshape(b, h // w, w, h // w, w, c).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, w * w, c)

    def fn(p, x):
        x = conv(x, p["patch"], 4)
        for i, b in enumerate(p["blocks"]):
            y = jnp.roll(norm(x), -3 * (i % 2), (1, 2))
            qkv = (windows(y, 7) @ b["qkv"]).reshape(-1, 49, 3, 3, 32)
            q, k, v = jnp.moveaxis(qkv, 2, 0)
            bias = b["table"][jnp.arange(49)[:, None] - jnp.arange(49) + 48].transpose(2, 0, 1)
            y = merged(attention(q, k, v, bias)) @ b["proj"]
            y = y.reshape(2, 8, 8, 7, 7, 96).transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)
            x = x + jnp.roll(y, 3 * (i % 2), (1, 2))
            x = x + jax.nn.gelu(norm(x) @ b["fc1"]) @ b["fc2"]
        x = jnp.concatenate([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        x = norm(x) @ p["merge"]
        return x.mean((1, 2)) @ p["head"]

    block = {
        "qkv": f32(96, 288),
        "table": f32(97, 3),
        "proj": f32(96, 96),
        "fc1": f32(96, 384),
        "fc2": f32(384, 96),
    }
    params = {
        "patch": f32(4, 4, 3, 96),
        "blocks": [block] * 2,
        "merge": f32(384, 192),
        "head": f32(192, 1000),
    }
    return (
        fn,
        params,
        (IMAGES,),
        {
            "patch": first(CONV),
            "qkv": hidden(Split(1, (96,) * 3, IN_OUT)),
            "table": "embedding",
            "proj|fc|merge": hidden(),
            "head": "output",
        },
    )


@real_size
def resnext_grouped():
    """32 groups: a matrix for each."""

    def fn(p, x):
        x = jax.nn.relu(conv(x, p["stem"], 2))
        for b in p["blocks"]:
            y = jax.nn.relu(conv(x, b["narrow"]))
            y = jax.nn.relu(conv(y, b["grouped"], groups=32))
            x = jax.nn.relu(x + conv(y, b["wide"]))
        return x.mean((1, 2)) @ p["head"]

    block = {
        "narrow": f32(1, 1, 256, 128),
        "grouped": f32(3, 3, 4, 128),
        "wide": f32(1, 1, 128, 256),
    }
    return (
        fn,
        {"stem": f32(7, 7, 3, 256), "blocks": [block] * 2, "head": f32(256, 1000)},
        (IMAGES,),
        {
            "stem": first(CONV),
            "narrow|wide": hidden(POINTWISE),
            "grouped": hidden(Unfold(3, (32, 4), Dims((0, 1, 2), 4))),
            "head": "output",
        },
    )


@real_size
def equinox_cnn():
    """Equinox's MNIST example: kernels are (out, in, height, width)."""
    import equinox as eqx

    def make(key):
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(1, 32, 4, key=key),
                eqx.nn.MaxPool2d(2),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Conv2d(32, 64, 3, key=key),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(64 * 22 * 22, 512, key=key),
                eqx.nn.Lambda(jax.nn.sigmoid),
                eqx.nn.Linear(512, 64, key=key),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Linear(64, 10, key=key),
                eqx.nn.Lambda(jax.nn.log_softmax),
            ]
        )

    return (
        *equinox(make, f32(8, 1, 28, 28)),
        {
            "layers/0/weight": first(Dims((2, 3), 0)),  # axis 1 has size 1
            "layers/3/weight": hidden(Dims((1, 2, 3), 0)),
            "layers/9/weight": "output",
            "layers/[57]/weight": hidden(OUT_IN),
            "bias": "vector",
        },
    )


@real_size
def flax_vae():
    """The example of Flax: two heads of the encoder, mean and log-variance."""

    class Vae(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            h = nn.relu(nn.Dense(500, name="fc1")(x))
            mean = nn.Dense(20, name="fc2_mean")(h)
            logvar = nn.Dense(20, name="fc2_logvar")(h)
            z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, logvar.shape)
            y = nn.Dense(784, name="fc4")(nn.relu(nn.Dense(500, name="fc3")(z)))
            kl = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar))
            return jnp.mean((nn.sigmoid(y) - x) ** 2) + kl

    return (
        *linen(Vae(), f32(8, 784), KEY),
        {
            "fc1/kernel": first(),
            "fc4/kernel": "output",
            "fc": hidden(),
        },
    )


@real_size
def pixelcnn_masked():
    """Kernels are masked, two streams, weight norm by `nn.WeightNorm`."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = jnp.ones((5, 5, 3, 160)).at[3:].set(0).at[2, 2:].set(0)
            x = nn.Conv(160, (5, 5), mask=mask, name="causal")(x)
            for i in range(2):
                mask = jnp.ones((3, 3, 320, 320)).at[2:].set(0)
                y = nn.Conv(320, (3, 3), mask=mask, name=f"masked_{i}")(
                    jnp.concatenate([nn.elu(x), nn.elu(-x)], -1)
                )
                a, b = jnp.split(y, 2, -1)
                x = x + a * nn.sigmoid(b)
                x = x + nn.WeightNorm(nn.Conv(160, (1, 1), name=f"nin_{i}"))(nn.elu(x))
            return nn.Conv(100, (1, 1), name="out")(nn.elu(x))

    return (
        *linen(Net(), f32(2, 32, 32, 3)),
        {
            "causal/kernel": first(CONV),
            "masked.*kernel": hidden(Split(3, (160, 160), CONV)),
            "WeightNorm": "vector",
            "nin.*kernel": hidden(POINTWISE),
            "out/kernel": "output",
        },
    )


@real_size
def masked_autoencoder():
    """Visible patches are gathered, a mask token fills the rest, the target are the pixels."""

    def fn(p, x, order):
        x = x @ p["patch"] + p["pos"]
        visible = jnp.take_along_axis(x, order[:, :49, None], 1)
        for b in p["encoder"]:
            visible = visible + jax.nn.gelu(norm(visible) @ b["up"]) @ b["down"]
        y = visible @ p["to_decoder"]
        y = jnp.concatenate([y, jnp.broadcast_to(p["mask"], (2, 147, 512))], 1)
        y = jnp.take_along_axis(y, jnp.argsort(order, 1)[..., None], 1) + p["decoder_pos"]
        for b in p["decoder"]:
            q, k, v = (heads(norm(y) @ b[n], 8) for n in "qkv")
            y = y + merged(attention(q, k, v)) @ b["o"]
        return y @ p["pixels"]

    params = {
        "patch": f32(768, 1024),
        "pos": f32(196, 1024),
        "encoder": [{"up": f32(1024, 4096), "down": f32(4096, 1024)}] * 2,
        "to_decoder": f32(1024, 512),
        "mask": f32(1, 1, 512),
        "decoder_pos": f32(196, 512),
        "decoder": [{k: f32(512, 512) for k in "qkvo"}] * 2,
        "pixels": f32(512, 768),
    }
    return (
        fn,
        params,
        (f32(2, 196, 768), i32(2, 196)),
        {
            "patch": first(),
            "pos|mask": "vector",
            "pixels": "output",
            "coder": hidden(),
        },
    )
