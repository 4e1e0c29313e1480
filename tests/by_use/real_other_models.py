"""Other models at real size: agents, graphs, audio, proteins, recurrent networks, scenes."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from optax.contrib import MuonDimensionNumbers as Dims
from use_models import (
    CONV,
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
    nnx_module,
    norm,
    real_size,
)

from muon_jax import Split, Unfold


@real_size
def ppo_atari():
    """Flax's PPO: a convolutional trunk, heads of the policy and of the value."""

    class ActorCritic(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x.astype(jnp.float32) / 255.0
            x = nn.relu(nn.Conv(32, (8, 8), (4, 4), name="conv1")(x))
            x = nn.relu(nn.Conv(64, (4, 4), (2, 2), name="conv2")(x))
            x = nn.relu(nn.Conv(64, (3, 3), (1, 1), name="conv3")(x))
            x = nn.relu(nn.Dense(512, name="hidden")(x.reshape(x.shape[0], -1)))
            policy = jax.nn.log_softmax(nn.Dense(6, name="logits")(x))
            return policy, nn.Dense(1, name="value")(x)

    def loss(outputs):
        policy, value = outputs
        entropy = -(jnp.exp(policy) * policy).sum(-1).mean()
        return -policy[:, 0].mean() + 0.5 * jnp.square(value).mean() - 0.01 * entropy

    return (
        *linen(ActorCritic(), f32(8, 84, 84, 4), finish=loss),
        {
            "conv1/kernel": first(CONV),
            "conv[23]/kernel": hidden(CONV),
            "hidden/kernel": hidden(),
            "(logits|value)/kernel": "output",
        },
    )


@real_size
def sac_actor():
    """The actor by itself: mean and standard deviation, tanh of a sample."""

    class Actor(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            x = nn.relu(nn.Dense(256)(nn.relu(nn.Dense(256)(x))))
            mean, log_std = nn.Dense(17)(x), jnp.clip(nn.Dense(17)(x), -20, 2)
            noise = jax.random.normal(key, mean.shape)
            return jnp.tanh(mean + jnp.exp(log_std) * noise), -0.5 * noise**2 - log_std

    return (
        *linen(Actor(), f32(32, 376), KEY),
        {"Dense_1/kernel": first(), "Dense_0/kernel": hidden(), "Dense_[23]/kernel": "output"},
    )


@real_size
def sac_critics():
    """An ensemble of critics by `nn.vmap`, by itself."""

    class Critic(nn.Module):
        @nn.compact
        def __call__(self, x, action):
            x = jnp.concatenate([x, action], -1)
            x = nn.relu(nn.LayerNorm()(nn.Dense(256)(x)))
            return nn.Dense(1)(nn.relu(nn.LayerNorm()(nn.Dense(256)(x))))

    critics = nn.vmap(
        Critic,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=None,
        out_axes=0,
        axis_size=10,
    )
    return (
        *linen(critics(), f32(32, 376), f32(32, 17)),
        {
            "Dense_0/kernel": first(Dims(1, 2)),
            "Dense_2/kernel": hidden(Dims(1, 2)),
            "Dense_1/kernel": "output",  # Flax counts the outer call first
            "LayerNorm|bias": "vector",
        },
    )


@real_size
def dreamer_world_model():
    """A recurrent model with discrete latents, an encoder, a decoder and heads of reward."""

    def mlp(p, x):
        for w in p:
            x = jax.nn.silu(norm(x @ w))
        return x

    def fn(p, images, actions, key):
        x = images
        for w in p["encoder"]:
            x = jax.nn.silu(norm(conv(x.reshape(-1, *x.shape[-3:]), w, 2)))
        embed = x.reshape(4, 16, -1)

        def step(state, inputs):
            h, z = state
            e, a, key = inputs
            x = mlp(p["img_in"], jnp.concatenate([z, a], -1))
            parts = jnp.concatenate([h, x], -1) @ p["gru"]
            reset, candidate, update = jnp.split(norm(parts), 3, -1)
            candidate = jnp.tanh(jax.nn.sigmoid(reset) * candidate)
            update = jax.nn.sigmoid(update - 1)
            h = update * candidate + (1 - update) * h
            prior = (mlp(p["img_out"], h) @ p["prior"]).reshape(4, 32, 32)
            post = mlp(p["obs_out"], jnp.concatenate([h, e], -1)) @ p["post"]
            post = post.reshape(4, 32, 32)
            probs = jax.nn.softmax(post)
            sample = jax.nn.one_hot(jax.random.categorical(key, post), 32)
            z = (jax.lax.stop_gradient(sample - probs) + probs).reshape(4, -1)
            return (h, z), (h, z, prior, post)

        swapped = embed.swapaxes(0, 1), actions.swapaxes(0, 1), jax.random.split(key, 16)
        start = jnp.zeros((4, 512)), jnp.zeros((4, 1024))
        _, (h, z, prior, post) = jax.lax.scan(step, start, swapped)
        kl = (jax.nn.softmax(post) * (jax.nn.log_softmax(post) - jax.nn.log_softmax(prior))).sum()
        feature = jnp.concatenate([h, z], -1)
        y = (mlp(p["dec_in"], feature)).reshape(-1, 4, 4, 256)
        dims = ("NHWC", "HWIO", "NHWC")
        y = jax.nn.silu(
            jax.lax.conv_transpose(y, p["dec1"], (2, 2), "SAME", dimension_numbers=dims)
        )
        y = jax.lax.conv_transpose(y, p["dec2"], (2, 2), "SAME", dimension_numbers=dims)
        reward = mlp(p["reward"], feature) @ p["reward_out"]
        return kl + jnp.square(y).mean(), cross_entropy(reward, jnp.zeros((16, 4), int))

    params = {
        "encoder": [f32(4, 4, 3, 32), f32(4, 4, 32, 64), f32(4, 4, 64, 128)],
        "img_in": [f32(1024 + 6, 512)],
        "gru": f32(1024, 1536),
        "img_out": [f32(512, 512)],
        "prior": f32(512, 1024),
        "obs_out": [f32(512 + 8 * 8 * 128, 512)],
        "post": f32(512, 1024),
        "dec_in": [f32(1536, 4096)],
        "dec1": f32(4, 4, 256, 64),
        "dec2": f32(4, 4, 64, 3),
        "reward": [f32(1536, 512), f32(512, 512)],
        "reward_out": f32(512, 255),
    }
    return (
        fn,
        params,
        (f32(4, 16, 64, 64, 3), f32(4, 16, 6), KEY),
        {
            "encoder/0": first(CONV),
            "encoder|dec1": hidden(CONV),
            "dec2|reward_out": "output",
            "gru": hidden(Split(1, (512,) * 3, Dims(0, 1))),
            "post": "router",  # categories are sampled from it
            "prior": "output",  # a product follows in no step: it enters the divergence alone
            "img|obs_out|dec_in|reward": hidden(),
        },
    )


@real_size
def gcn():
    """Normalized adjacency as a dense matrix that is an input."""

    def fn(p, x, adjacency):
        x = jax.nn.relu(adjacency @ (x @ p["w0"]))
        x = jax.nn.relu(adjacency @ (x @ p["w1"]))
        return adjacency @ (x @ p["w2"])

    params = {"w0": f32(1433, 256), "w1": f32(256, 256), "w2": f32(256, 7)}
    return (
        fn,
        params,
        (f32(2708, 1433), f32(2708, 2708)),
        {"w0": first(), "w1": hidden(), "w2": "output"},
    )


@real_size
def gat():
    """Attention of edges by vectors of each head, segments by receivers."""
    n, dim, nodes = 8, 32, 1000

    def fn(p, x, senders, receivers):
        for b in p["layers"]:
            h = heads(x @ b["w"], n)
            source, target = (h * b["a_src"]).sum(-1), (h * b["a_dst"]).sum(-1)
            e = jnp.exp(jax.nn.leaky_relu(source[senders] + target[receivers]))
            total = jax.ops.segment_sum(e, receivers, nodes)[receivers]
            m = h[senders] * (e / total)[..., None]
            x = jax.nn.elu(merged(jax.ops.segment_sum(m, receivers, nodes)))
        return x @ p["out"]

    own = {"a_src": f32(n, dim), "a_dst": f32(n, dim)}
    layers = [{"w": f32(500, n * dim), **own}, {"w": f32(n * dim, n * dim), **own}]
    return (
        fn,
        {"layers": layers, "out": f32(n * dim, 3)},
        (f32(nodes, 500), i32(5000), i32(5000)),
        {"layers/0/w": first(), "layers/1/w": hidden(), "a_": "vector", "out": "output"},
    )


@real_size
def nerf():
    """The encoded point enters again at a skip; the color branch takes the view direction."""

    class Nerf(nn.Module):
        @nn.compact
        def __call__(self, x, d):
            def encoded(x, n):
                x = x[..., None] * 2.0 ** jnp.arange(n)
                return jnp.concatenate([jnp.sin(x), jnp.cos(x)], -1).reshape(*x.shape[:-2], -1)

            point = x = encoded(x, 10)
            for i in range(8):
                x = nn.relu(nn.Dense(256, name=f"layer_{i}")(x))
                if i == 4:
                    x = jnp.concatenate([x, point], -1)
            density = nn.relu(nn.Dense(1, name="density")(x))
            x = jnp.concatenate([nn.Dense(256, name="bottleneck")(x), encoded(d, 4)], -1)
            color = nn.sigmoid(nn.Dense(3, name="color")(nn.relu(nn.Dense(128, name="view")(x))))
            weights = 1 - jnp.exp(-density)
            return (weights * color).sum(1)

    return (
        *linen(Nerf(), f32(128, 64, 3), f32(128, 64, 3)),
        {
            "layer_0/kernel": first(),
            "(density|color)/kernel": "output",
            "kernel": hidden(),
        },
    )


@real_size
def wav2vec2():
    """Convolutions of the waveform, grouped positional convolution with weight norm."""
    d, groups = 768, 16

    def conv1d(x, w, stride, n=1):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (stride,),
            "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=n,
        )

    def fn(p, wave):
        x = wave[..., None]
        for w, stride in zip(p["features"], (5, 2, 2), strict=True):
            x = jax.nn.gelu(conv1d(x, w, stride))
        x = norm(x) @ p["projection"]
        v = p["pos"]["v"]
        w = p["pos"]["g"] * v / jnp.sqrt((v**2).sum((1, 2), keepdims=True))
        x = x + jax.nn.gelu(conv1d(x, w, 1, groups))
        for b in p["layers"]:
            q, k, v = (heads(x @ b[n], 12) for n in "qkv")
            x = norm(x + merged(attention(q, k, v)) @ b["o"])
            x = norm(x + jax.nn.gelu(x @ b["up"]) @ b["down"])
        return x @ p["ctc"]

    block = {k: f32(d, d) for k in "qkvo"} | {"up": f32(d, 4 * d), "down": f32(4 * d, d)}
    params = {
        "features": [f32(10, 1, 512), f32(3, 512, 512), f32(3, 512, 512)],
        "projection": f32(512, d),
        "pos": {"v": f32(128, d // groups, d), "g": f32(128, 1, 1)},
        "layers": [block] * 2,
        "ctc": f32(d, 32),
    }
    return (
        fn,
        params,
        (f32(2, 4000),),
        {
            "features/0": first(Dims(0, 2)),  # axis 1 has size 1
            "features": hidden(Dims((0, 1), 2)),
            "pos/v": hidden(Unfold(2, (groups, d // groups), Dims((0, 1), 3))),
            "pos/g": "vector",
            "projection|layers": hidden(),
            "ctc": "output",
        },
    )


@real_size
def alphafold_evoformer():
    """Triangle multiplication, outer product mean, attention with a gate and a bias of pairs."""
    s, r, c_m, c_z, n = 16, 64, 256, 128, 8

    def fn(p, msa, pairs):
        m, z = msa @ p["msa_in"], pairs @ p["pair_in"]
        for b in p["blocks"]:
            x, a = norm(m), b["row"]
            q = jnp.einsum("sra,ahc->srhc", x, a["query_w"])
            k = jnp.einsum("sra,ahc->srhc", x, a["key_w"])
            v = jnp.einsum("sra,ahc->srhc", x, a["value_w"])
            bias = jnp.einsum("qkc,ch->hqk", norm(z), a["feat_2d_weights"])
            gate = jax.nn.sigmoid(jnp.einsum("sra,ahc->srhc", x, a["gating_w"]) + a["gating_b"])
            o = jnp.einsum("srhc,hco->sro", attention(q, k, v, bias) * gate, a["output_w"])
            m = m + o
            m = m + jax.nn.relu(norm(m) @ b["up"]) @ b["down"]
            left, right = norm(m) @ b["opm_left"], norm(m) @ b["opm_right"]
            outer = jnp.einsum("sic,sjd->ijcd", left, right)
            z = z + jnp.einsum("ijcd,cdf->ijf", outer, b["opm_out"]) / s
            x, t = norm(z), b["triangle"]
            ab = (x @ t["projection"]) * jax.nn.sigmoid(x @ t["gate"])
            left, right = jnp.split(ab, 2, -1)
            x = norm(jnp.einsum("ikc,jkc->ijc", left, right)) @ t["output_projection"]
            z = z + x * jax.nn.sigmoid(norm(z) @ t["gating_linear"])
        return z @ p["distogram"], m @ p["masked_msa"]

    row = {k: f32(c_m, n, 32) for k in ("query_w", "key_w", "value_w", "gating_w")}
    row |= {"gating_b": f32(n, 32), "feat_2d_weights": f32(c_z, n), "output_w": f32(n, 32, c_m)}
    triangle = {
        "projection": f32(c_z, 2 * c_z),
        "gate": f32(c_z, 2 * c_z),
        "output_projection": f32(c_z, c_z),
        "gating_linear": f32(c_z, c_z),
    }
    block = {
        "row": row,
        "up": f32(c_m, 4 * c_m),
        "down": f32(4 * c_m, c_m),
        "opm_left": f32(c_m, 32),
        "opm_right": f32(c_m, 32),
        "opm_out": f32(32, 32, c_z),
        "triangle": triangle,
    }
    params = {
        "msa_in": f32(49, c_m),
        "pair_in": f32(65, c_z),
        "blocks": [block] * 2,
        "distogram": f32(c_z, 64),
        "masked_msa": f32(c_m, 23),
    }
    in_halves = hidden(Split(1, (c_z, c_z), Dims(0, 1)))
    return (
        fn,
        params,
        (f32(s, r, 49), f32(r, r, 65)),
        {
            "_in$": first(),
            "distogram|masked_msa": "output",
            "gating_b": "vector",
            "(query|key|value|gating)_w": hidden(Dims(0, (1, 2))),
            "output_w": hidden(Dims((0, 1), 2)),
            "opm_out": hidden(Dims((0, 1), 2)),
            "triangle/(projection|gate)$": in_halves,
            "blocks": hidden(),
        },
    )


@real_size
def perceiver_io():
    """Latents that cross-attend to inputs, queries of the outputs that cross-attend to latents."""

    class Cross(nn.Module):
        @nn.compact
        def __call__(self, q, x):
            q = q + nn.MultiHeadDotProductAttention(8)(nn.LayerNorm()(q), x)
            return q + nn.Dense(1024)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(q))))

    class Perceiver(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(512, name="inputs")(x)
            z = self.param("latents", nn.initializers.normal(), (256, 1024))
            z = jnp.broadcast_to(z, (x.shape[0], 256, 1024))
            z = Cross(name="encode")(z, x)
            for i in range(2):
                z = Cross(name=f"process_{i}")(z, z)
            q = self.param("queries", nn.initializers.normal(), (64, 1024))
            y = Cross(name="decode")(jnp.broadcast_to(q, (x.shape[0], 64, 1024)), z)
            return nn.Dense(10, name="head")(y)

    return (
        *linen(Perceiver(), f32(2, 512, 64)),
        {
            "inputs/kernel": first(),
            "latents|queries": "latents",  # attention has them for queries
            "head/kernel": "output",
            "(query|key|value)/kernel": hidden(Dims(0, (1, 2))),
            "(query|key|value)/bias": "vector",
            "out/kernel": hidden(Dims((0, 1), 2)),
            "Dense": hidden(),
        },
    )


@real_size
def sst2_bilstm():
    """Flax's sst2: both directions of an LSTM, attention by a vector, a classifier."""

    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, t):
            x = nn.Embed(20000, 300)(t)
            forward = nn.RNN(nn.OptimizedLSTMCell(256, name="forward_cell"))
            backward = nn.RNN(nn.OptimizedLSTMCell(256, name="backward_cell"))
            x = nn.Bidirectional(forward, backward)(x)
            scores = nn.Dense(1, use_bias=False, name="score")(
                jnp.tanh(nn.Dense(256, use_bias=False, name="keys")(x))
            )
            context = jnp.einsum("bt,btd->bd", jax.nn.softmax(scores[..., 0]), x)
            return nn.Dense(2, name="out")(jnp.tanh(nn.Dense(256, name="mlp")(context)))

    return (
        *linen(Classifier(), i32(4, 24)),
        {
            "embedding": "embedding",
            "_cell.*kernel": hidden(),
            "score": "vector",
            "out/kernel": "output",
            "(keys|mlp)/kernel": hidden(),
        },
    )


@real_size
def seq2seq_lstm():
    """Flax's seq2seq: the decoder takes one-hot letters and the state of the encoder."""

    class Seq2seq(nn.Module):
        @nn.compact
        def __call__(self, x, y):
            cell = nn.OptimizedLSTMCell(512, name="encoder")
            carry, _ = nn.RNN(cell, return_carry=True)(x)
            h = nn.RNN(nn.OptimizedLSTMCell(512, name="decoder"))(y, initial_carry=carry)
            return nn.Dense(16, name="logits")(h)

    return (
        *linen(Seq2seq(), f32(8, 12, 16), f32(8, 5, 16)),
        {
            "coder/i./kernel": first(),
            "coder/h./kernel": hidden(),
            "logits/kernel": "output",
        },
    )


@real_size
def grus_of_four_libraries():
    """One after the other, each on what the one before gives."""
    import equinox as eqx
    import haiku as hk

    n, x = 512, f32(4, 512)
    of_linen = nn.GRUCell(n)
    of_haiku = hk.without_apply_rng(hk.transform(lambda x, h: hk.GRU(n)(x, h)[1]))
    made = nnx.eval_shape(lambda: nnx.GRUCell(n, n, rngs=nnx.Rngs(0)))
    graph, of_nnx, rest = nnx.split(made, nnx.Param, ...)
    made = eqx.filter_eval_shape(lambda k: eqx.nn.GRUCell(n, n, key=k), jax.random.key(0))
    of_equinox, static = eqx.partition(made, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    steps = {
        "linen": lambda p, rest, h, x: of_linen.apply({"params": p}, h, x)[0],
        "nnx": lambda p, rest, h, x: nnx.merge(graph, p, rest)(h, x)[0],
        "haiku": lambda p, rest, h, x: of_haiku.apply(p, x, h),
        "equinox": lambda p, rest, h, x: jax.vmap(eqx.combine(p, static))(x, h),
    }

    def fn(p, rest, t):
        x = p["embed"][t].swapaxes(0, 1)
        for name, step in steps.items():

            def body(h, x, name=name, step=step):
                h = step(p[name], rest, h, x)
                return h, h

            _, x = jax.lax.scan(body, jnp.zeros((4, n)), x)
        return x @ p["head"]

    params = {
        "embed": f32(32000, n),
        "linen": jax.eval_shape(of_linen.init, KEY, x, x)["params"],
        "nnx": of_nnx,
        "haiku": jax.eval_shape(of_haiku.init, KEY, x, x),
        "equinox": of_equinox,
        "head": f32(n, 32000),
    }
    return (
        fn,
        params,
        (rest, i32(4, 12)),
        {
            "embed": "embedding",
            "head": "output",
            "linen": hidden(),
            "nnx/.*kernel|haiku/gru/w_": hidden(Split(1, (n,) * 3, Dims(0, 1))),
            "equinox/weight": hidden(Split(0, (n,) * 3, OUT_IN)),
        },
    )


@real_size
def nnx_autoencoder():
    class Autoencoder(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(
                [
                    nnx.Linear(a, b, rngs=rngs)
                    for a, b in ((784, 512), (512, 64), (64, 512), (512, 784))
                ]
            )

        def __call__(self, x):
            for layer in self.layers[:-1]:
                x = nnx.relu(layer(x))
            return jnp.square(nnx.sigmoid(self.layers[-1](x)) - 0.5).mean()

    return (
        *nnx_module(Autoencoder, f32(8, 784)),
        {"layers/0/kernel": first(), "layers/3/kernel": "output", "kernel": hidden()},
    )


@real_size
def equinox_mlp():
    import equinox as eqx

    return (
        *equinox(lambda k: eqx.nn.MLP(64, 10, 512, 3, key=k), f32(8, 64)),
        {
            "layers/0/weight": first(OUT_IN),
            "layers/3/weight": "output",
            "weight": hidden(OUT_IN),
        },
    )


@real_size
def haiku_lstm_stack():
    import haiku as hk

    def fn(t):
        x = hk.Embed(10000, 650)(t)
        core = hk.DeepRNN([hk.LSTM(650), jax.nn.relu, hk.LSTM(650)])
        y, _ = hk.dynamic_unroll(core, x, core.initial_state(4), time_major=False)
        return hk.Linear(10000, name="head")(y)

    return (
        *haiku(fn, i32(4, 35)),
        {
            "embeddings": "embedding",
            "lstm.*/w": hidden(Split(1, (650,) * 4, Dims(0, 1))),
            "head/w": "output",
        },
    )


@real_size
def spectral_norm_gan_discriminator():
    class Discriminator(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i, width in enumerate((64, 128, 256)):
                layer = nn.Conv(width, (4, 4), (2, 2), name=f"conv_{i}")
                x = nn.leaky_relu(nn.SpectralNorm(layer)(x, update_stats=True), 0.2)
            head = nn.Dense(16, name="head")
            return nn.SpectralNorm(head)(x.reshape(x.shape[0], -1), update_stats=True)

    return (
        *linen(Discriminator(), f32(4, 32, 32, 3)),
        {
            "conv_0/kernel": first(CONV),
            "conv_[12]/kernel": hidden(CONV),
            "head/kernel": "output",
        },
    )
