"""Small models of the literature, with answers read off their sources; sizes are distinct."""

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
    linen,
    merged,
    model,
    nnx_module,
    norm,
)

from muon_jax import Split, Unfold

TOKENS = i32(2, 7)


def conv1d(x, w, dilation=1, groups=1):
    return jax.lax.conv_general_dilated(
        x,
        w,
        (1,),
        [((w.shape[0] - 1) * dilation, 0)],
        rhs_dilation=(dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=groups,
    )


def depthwise(x, w):
    return conv1d(x, w, groups=x.shape[-1])


def feed_forward(p, x):
    return jax.nn.silu(x @ p["up"]) @ p["down"]


def attend(p, x, y, n):
    q, k, v = heads(x @ p["q"], n), heads(y @ p["k"], n), heads(y @ p["v"], n)
    return merged(attention(q, k, v)) @ p["o"]


@model
def kimi_delta_attention():
    """Gated delta rule by head: filters after q, k and v, decay and output gate of low rank."""
    d, n, dim = 30, 3, 8
    full, low = n * dim, 5

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            y = norm(x)
            q, k, v = (heads(jax.nn.silu(depthwise(y @ b[c], b[f"conv_{c}"])), n) for c in "qkv")
            beta = jax.nn.sigmoid(y @ b["beta"])
            decay = heads((y @ b["f_a"]) @ b["f_b"], n)
            decay = jnp.exp(-jnp.exp(b["A_log"])[:, None] * jax.nn.softplus(decay + b["dt_bias"]))

            def step(s, now):
                q, k, v, beta, decay = now
                s = s * decay[..., None]
                error = v - jnp.einsum("bhk,bhkv->bhv", k, s)
                s = s + jnp.einsum("bhk,bhv->bhkv", k, error * beta[..., None])
                return s, jnp.einsum("bhk,bhkv->bhv", q, s)

            now = [a.swapaxes(0, 1) for a in (norm(q), norm(k), v, beta, decay)]
            _, o = jax.lax.scan(step, jnp.zeros((2, n, dim, dim)), now)
            gate = jax.nn.sigmoid(heads((y @ b["g_a"]) @ b["g_b"], n))
            x = x + merged(norm(o.swapaxes(0, 1)) * b["norm"] * gate) @ b["o"]
            x = x + feed_forward(b, norm(x))
        return cross_entropy(norm(x) @ p["head"], t)

    block = {k: f32(d, full) for k in "qkv"} | {f"conv_{k}": f32(4, 1, full) for k in "qkv"}
    block |= {"beta": f32(d, n), "A_log": f32(n), "dt_bias": f32(n, dim), "norm": f32(dim)}
    block |= {"f_a": f32(d, low), "f_b": f32(low, full), "g_a": f32(d, low), "g_b": f32(low, full)}
    block |= {"o": f32(full, d), "up": f32(d, 44), "down": f32(44, d)}
    return (
        fn,
        {"embed": f32(61, d), "layers": [block] * 2, "head": f32(d, 61)},
        (TOKENS,),
        {
            "embed": "embedding",
            "head": "output",
            "conv": "depthwise",
            "_[ab]$": "factor",
            "dt_bias": "vector",
            "layers": hidden(),
        },
    )


@model
def retnet():
    """Retention in its parallel form, with a decay for each head and a gate."""
    d, n = 24, 3

    def fn(p, t):
        x = p["embed"][t]
        time = jnp.arange(7)
        gap = time[:, None] - time[None]
        decay = jnp.where(gap >= 0, (1 - 2.0 ** (-5 - jnp.arange(n)))[:, None, None] ** gap, 0)
        for b in p["layers"]:
            y = norm(x)
            q, k, v = heads(y @ b["q"], n), heads(y @ b["k"], n), heads(y @ b["v"], n)
            scores = jnp.einsum("bthd,bshd->bhts", q, k) * decay
            scores = scores / jnp.maximum(jnp.abs(scores.sum(-1, keepdims=True)), 1)
            o = norm(jnp.einsum("bhts,bshd->bthd", scores, v))
            x = x + (jax.nn.silu(y @ b["g"]) * merged(o)) @ b["o"]
            x = x + feed_forward(b, norm(x))
        return cross_entropy(norm(x) @ p["embed"].T, t)

    block = {"q": f32(d, d), "k": f32(d, d), "v": f32(d, 2 * d), "g": f32(d, 2 * d)}
    block |= {"o": f32(2 * d, d), "up": f32(d, 34), "down": f32(34, d)}
    return (
        fn,
        {"embed": f32(61, d), "layers": [block] * 2},
        (TOKENS,),
        {"embed": "embedding", "layers": hidden()},
    )


@model
def griffin():
    """RG-LRU with gates that are block diagonal, an associative scan, and Gemma's einsums."""
    d, width, n = 20, 24, 4

    def fn(p, t):
        x = p["embed"][t] * d**0.5
        for b in p["layers"]:
            y = norm(x)
            left, right = jax.nn.gelu(y @ b["linear_y"]), y @ b["linear_x"]
            right = depthwise(right, b["conv"])
            blocks = heads(right, n)
            gate_x, gate_a = (
                merged(jax.nn.sigmoid(jnp.einsum("bthi,hij->bthj", blocks, b[g]))) for g in "xa"
            )
            log_a = -8.0 * gate_a * jax.nn.softplus(b["a_param"])
            u = jnp.sqrt(1 - jnp.exp(2 * log_a)) * gate_x * right

            def both(one, other):
                return one[0] * other[0], other[0] * one[1] + other[1]

            _, h = jax.lax.associative_scan(both, (jnp.exp(log_a), u), axis=1)
            x = x + (left * h) @ b["linear_out"]
            gate, up = jnp.einsum("btd,cdf->cbtf", norm(x), b["ffw_up"])
            x = x + (jax.nn.gelu(gate) * up) @ b["ffw_down"]
        logits = norm(x) @ p["embed"].T
        return cross_entropy(30 * jnp.tanh(logits / 30), t)

    block = {"linear_x": f32(d, width), "linear_y": f32(d, width), "conv": f32(4, 1, width)}
    block |= {k: f32(n, width // n, width // n) for k in "xa"} | {"a_param": f32(width)}
    block |= {"linear_out": f32(width, d), "ffw_up": f32(2, d, 34), "ffw_down": f32(34, d)}
    return (
        fn,
        {"embed": f32(61, d), "layers": [block] * 2},
        (TOKENS,),
        {
            "embed": "embedding",
            "conv": "depthwise",
            "/[xa]$": hidden(Dims(1, 2)),
            "ffw_up": hidden(Split(0, (1, 1), Dims(1, (0, 2)))),
            "layers": hidden(),
        },
    )


@model
def conformer():
    """Strided convolutions, two half feed-forwards, attention, a gated convolution."""
    d, n = 24, 3

    def fn(p, x):
        x = x[..., None]
        for w in p["subsample"]:
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(
                    x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        x = x.reshape(*x.shape[:2], -1) @ p["project"]
        for b in p["layers"]:
            x = x + 0.5 * feed_forward(b["ff1"], norm(x))
            y = norm(x)
            x = x + attend(b, y, y, n)
            gate, y = jnp.split(conv1d(norm(x), b["pointwise1"]), 2, -1)
            y = depthwise(jax.nn.sigmoid(gate) * y, b["depthwise"])
            x = x + conv1d(jax.nn.silu(norm(y) * b["scale"]), b["pointwise2"])
            x = norm(x + 0.5 * feed_forward(b["ff2"], norm(x)))
        return jax.nn.log_softmax(x @ p["ctc"])

    ff = {"up": f32(d, 44), "down": f32(44, d)}
    block = {k: f32(d, d) for k in "qkvo"} | {"ff1": ff, "ff2": ff, "scale": f32(d)}
    block |= {"pointwise1": f32(1, d, 2 * d), "pointwise2": f32(1, d, d)}
    block |= {"depthwise": f32(5, 1, d)}
    params = {"subsample": [f32(3, 3, 1, 6), f32(3, 3, 6, 10)], "project": f32(10 * 5, d)}
    return (
        fn,
        {**params, "layers": [block] * 2, "ctc": f32(d, 29)},
        (f32(2, 28, 20),),
        {
            "subsample/0": first(Dims((0, 1), 3)),  # an axis of size 1 is in no matrix
            "subsample/1": hidden(CONV),
            "ctc": "output",
            "pointwise1": hidden(halves(2, d, Dims(1, 2))),
            "pointwise2": hidden(Dims(1, 2)),
            "depthwise": "depthwise",
            "project|layers": hidden(),
        },
    )


@model
def wavenet():
    """Dilated causal convolutions, filter and gate in one, residual and skip apart."""
    c, skip = 12, 18

    def fn(p, wave):
        x, total = conv1d(jax.nn.one_hot(wave, 31), p["in"]), 0
        for i, b in enumerate(p["layers"]):
            f, g = jnp.split(conv1d(x, b["gated"], 2**i) + b["bias"], 2, -1)
            z = jnp.tanh(f) * jax.nn.sigmoid(g)
            total = total + z @ b["skip"]
            x = x + z @ b["residual"] if "residual" in b else x
        return jax.nn.relu(jax.nn.relu(total) @ p["post"]) @ p["out"]

    block = {"gated": f32(2, c, 2 * c), "bias": f32(2 * c), "skip": f32(c, skip)}
    layers = [{**block, "residual": f32(c, c)}] * 2 + [block]
    return (
        fn,
        {"in": f32(2, 31, c), "layers": layers, "post": f32(skip, 22), "out": f32(22, 31)},
        (i32(2, 16),),
        {
            "^in$": first(Dims((0, 1), 2)),
            "gated": hidden(halves(2, c, Dims((0, 1), 2))),
            "^out$": "output",
            "layers|post": hidden(),
        },
    )


@model
def gemma_3n():
    """AltUp's streams, Laurel's branch of low rank, embeddings of each layer."""
    d, n, low, per_layer, layers = 20, 3, 4, 6, 2

    def fn(p, t):
        x = p["embed"][t]
        own = p["embed_per_layer"][t].reshape(*t.shape, layers, per_layer)
        own = own + heads(x @ p["project_per_layer"], layers)
        streams = jnp.stack([x, *(x @ w for w in p["altup_projections"])])
        for i, b in enumerate(p["layers"]):
            modes = jnp.tanh(norm(streams[0]) @ b["modality_router"])
            coefficients = (modes @ b["prediction"]).reshape(*t.shape, n, n)
            predicted = streams + jnp.einsum("sbtd,btsr->rbtd", streams, coefficients)
            x = predicted[0]
            y = norm(x)
            laurel = y + norm((y @ b["laurel_left"]) @ b["laurel_right"])
            h = (x + attend(b, y, y, 2) + laurel) / 2**0.5
            gate = norm(h) @ b["gate"]
            cutoff = gate.mean(-1, keepdims=True) + gate.std(-1, keepdims=True)
            h = h + (jax.nn.gelu(jax.nn.relu(gate - cutoff)) * (norm(h) @ b["up"])) @ b["down"]
            modes = jnp.tanh(norm(h) @ b["modality_router"])
            innovation = (modes @ b["correction"] + 1)[..., None] * (h - predicted[0])[..., None, :]
            streams = predicted + jnp.moveaxis(innovation, 2, 0)
            first_stream = jax.nn.gelu(streams[0] @ b["layer_gate"]) * own[:, :, i]
            streams = streams.at[1:].add(norm(first_stream @ b["layer_projection"]))
        x = (streams[0] + sum(s @ w for s, w in zip(streams[1:], p["unembed"], strict=True))) / n
        return cross_entropy(norm(x) @ p["embed"].T, t)

    block = {k: f32(d, d) for k in "qkvo"}
    block |= {"modality_router": f32(d, n), "prediction": f32(n, n * n), "correction": f32(n, n)}
    block |= {"laurel_left": f32(d, low), "laurel_right": f32(low, d)}
    block |= {"gate": f32(d, 34), "up": f32(d, 34), "down": f32(34, d)}
    block |= {"layer_gate": f32(d, per_layer), "layer_projection": f32(per_layer, d)}
    return (
        fn,
        {
            "embed": f32(61, d),
            "embed_per_layer": f32(61, layers * per_layer),
            "project_per_layer": f32(d, layers * per_layer),
            "altup_projections": [f32(d, d)] * (n - 1),
            "unembed": [f32(d, d)] * (n - 1),
            "layers": [block] * layers,
        },
        (TOKENS,),
        {
            "^embed": "embedding",
            "laurel": "factor",
            "project_per_layer": hidden(halves(1, per_layer)),  # each layer takes its own
            # Each stream goes on by itself after the last layer.
            "prediction": "unclear",  # its outputs are matrices that mix the streams
            "layers/1/correction": hidden(Split(1, (1,) * n, IN_OUT)),
            "": hidden(),
        },
    )


@model
def dlrm():
    """Dot products between embeddings and dense features, of which the upper triangle goes on."""
    d = 6

    def fn(p, dense, ids):
        x = dense
        for w in p["bottom"]:
            x = jax.nn.relu(x @ w)
        rows = [p["tables"][i][ids[:, i]] for i in range(3)]
        all_rows = jnp.stack([x, *rows], 1)
        products = jnp.einsum("bid,bjd->bij", all_rows, all_rows)
        i, j = jnp.triu_indices(4, 1)
        x = jnp.concatenate([x, products[:, i, j]], -1)
        return jax.nn.sigmoid(jax.nn.relu(x @ p["top"][0]) @ p["top"][1])

    tables = [f32(n, d) for n in (11, 29, 47)]
    return (
        fn,
        {
            "bottom": [f32(13, 22), f32(22, d)],
            "tables": tables,
            "top": [f32(12, 18), f32(18, 1)],
        },
        (f32(5, 13), i32(5, 3)),
        {
            "bottom/0": first(),
            "tables": "embedding",
            "top/1": "output",
            "bottom/1|top/0": hidden(),
        },
    )


@model
def two_tower_recommender():
    """User and item towers that meet in a softmax over the batch, with sampled corrections."""

    def tower(p, ids, x):
        y = jnp.concatenate([p["table"][ids].mean(1), jax.nn.relu(x @ p["dense"])], -1)
        return norm(jax.nn.relu(y @ p["up"]) @ p["out"])

    def fn(p, user, item):
        logits = tower(p["user"], *user) @ tower(p["item"], *item).T / 0.1
        return cross_entropy(logits, jnp.arange(9))

    def own(rows, n):
        layers = {"dense": f32(n, 10), "up": f32(8 + 10, 26), "out": f32(26, 14)}
        return {"table": f32(rows, 8), **layers}

    return (
        fn,
        {"user": own(53, 5), "item": own(67, 11)},
        ((i32(9, 3), f32(9, 5)), (i32(9, 2), f32(9, 11))),
        {"table": "embedding", "dense": first(), "up|out": hidden()},
    )


@model
def set_transformer():
    """Induced attention blocks, pooling by seeds."""
    d, n = 24, 3

    def mab(p, x, y):
        q = x @ p["q"]
        k, v = heads(y @ p["k"], n), heads(y @ p["v"], n)
        h = norm(q + merged(attention(heads(q, n), k, v)))
        return norm(h + jax.nn.relu(h @ p["ff"]))

    def fn(p, x):
        x = x @ p["in"]
        for b in p["isab"]:
            inducing = jnp.broadcast_to(b["points"], (2, *b["points"].shape))
            x = mab(b["outer"], x, mab(b["inner"], inducing, x))
        seeds = jnp.broadcast_to(p["seeds"], (2, *p["seeds"].shape))
        return mab(p["pma"], seeds, x) @ p["out"]

    own = {k: f32(d, d) for k in ("q", "k", "v", "ff")}
    isab = {"points": f32(5, d), "inner": own, "outer": own}
    return (
        fn,
        {"in": f32(3, d), "isab": [isab] * 2, "seeds": f32(4, d), "pma": own, "out": f32(d, 10)},
        (f32(2, 17, 3),),
        {"^in$": first(), "^out$": "output", "points|seeds": None, "": hidden()},
    )


@model
def gat_v2():
    """Scores of edges from a vector of each head, after the sum of both ends."""
    n, dim, nodes = 3, 6, 13

    def fn(p, x, senders, receivers):
        for b in p["layers"]:
            left, right = heads(x @ b["left"], n), heads(x @ b["right"], n)
            e = jax.nn.leaky_relu(left[senders] + right[receivers])
            scores = jnp.exp(jnp.einsum("ehd,hd->eh", e, b["a"]))
            total = jax.ops.segment_sum(scores, receivers, nodes)[receivers]
            m = left[senders] * (scores / total)[..., None]
            x = jax.nn.elu(merged(jax.ops.segment_sum(m, receivers, nodes)))
        return x @ p["out"]

    full = n * dim
    layers = [{"left": f32(k, full), "right": f32(k, full), "a": f32(n, dim)} for k in (10, full)]
    return (
        fn,
        {"layers": layers, "out": f32(full, 5)},
        (f32(nodes, 10), i32(31), i32(31)),
        {"/a$": None, "layers/0": first(), "layers/1": hidden(), "out": "output"},
    )


@model
def egnn():
    """Equivariant messages; coordinates move along differences, by a scalar of each edge."""
    d, nodes = 14, 9

    def fn(p, h, x, senders, receivers):
        h = h @ p["in"]
        for b in p["layers"]:
            gap = x[senders] - x[receivers]
            squared = (gap**2).sum(-1, keepdims=True)
            m = jnp.concatenate([h[senders], h[receivers], squared], -1)
            m = jax.nn.silu(jax.nn.silu(m @ b["edge"][0]) @ b["edge"][1])
            move = jax.nn.silu(m @ b["coord"][0]) @ b["coord"][1]
            x = x + jax.ops.segment_sum(gap * move, receivers, nodes)
            total = jax.ops.segment_sum(m, receivers, nodes)
            y = jnp.concatenate([h, total], -1)
            h = h + jax.nn.silu(y @ b["node"][0]) @ b["node"][1]
        return h.sum(0) @ p["energy"], x

    block = {"edge": [f32(2 * d + 1, 18), f32(18, 22)], "node": [f32(d + 22, 26), f32(26, d)]}
    layers = [{**block, "coord": [f32(22, 10), f32(10, 1)]}] * 2
    return (
        fn,
        {"in": f32(5, d), "layers": layers, "energy": f32(d, 1)},
        (f32(nodes, 5), f32(nodes, 3), i32(31), i32(31)),
        {
            "^in": first(),
            "energy": "output",
            "coord/1": None,  # one output each: a vector, or the output of coordinates
            "layers": hidden(),
        },
    )


@model
def schnet_with_forces():
    """Continuous filters by a network of distances; forces are a gradient inside the loss."""
    d, nodes = 14, 9

    def energy(p, x, kinds, senders, receivers):
        h = p["atoms"][kinds]
        r = jnp.sqrt(((x[senders] - x[receivers]) ** 2).sum(-1) + 1e-6)
        basis = jnp.exp(-((r[:, None] - jnp.linspace(0, 5, 11)) ** 2))
        for b in p["layers"]:
            filters = jax.nn.softplus(basis @ b["filter"][0]) @ b["filter"][1]
            m = jax.ops.segment_sum((h @ b["in"])[senders] * filters, receivers, nodes)
            h = h + jax.nn.softplus(m @ b["mid"]) @ b["out"]
        return (jax.nn.softplus(h @ p["readout"][0]) @ p["readout"][1]).sum()

    def fn(p, x, *graph):
        e, g = jax.value_and_grad(energy, 1)(p, x, *graph)
        return e**2 + (g**2).sum()

    block = {"filter": [f32(11, 17), f32(17, 18)], "in": f32(d, 18), "mid": f32(18, 22)}
    return (
        fn,
        {
            "atoms": f32(29, d),
            "layers": [{**block, "out": f32(22, d)}] * 2,
            "readout": [f32(d, 7), f32(7, 1)],
        },
        (f32(nodes, 3), i32(nodes), i32(31), i32(31)),
        {
            "atoms": "embedding",
            "filter/0": first(),
            "readout/1": "output",
            "layers|readout/0": hidden(),
        },
    )


@model
def decision_transformer():
    """Returns, states and actions, interleaved in time; actions are read from states."""
    d = 24

    def fn(p, returns, states, actions, times):
        time = p["times"][times]
        r, s, a = returns @ p["r"] + time, states @ p["s"] + time, actions @ p["a"] + time
        x = norm(jnp.stack([r, s, a], 2).reshape(2, -1, d))
        for b in p["layers"]:
            q, k, v = (heads(y, 3) for y in jnp.split(norm(x) @ b["qkv"], 3, -1))
            x = x + merged(attention(q, k, v)) @ b["o"]
            x = x + feed_forward(b, norm(x))
        x = x.reshape(2, 5, 3, d)
        return jnp.tanh(x[:, :, 1] @ p["to_action"]), x[:, :, 2] @ p["to_state"]

    block = {"qkv": f32(d, 3 * d), "o": f32(d, d), "up": f32(d, 34), "down": f32(34, d)}
    return (
        fn,
        {
            "times": f32(41, d),
            "r": f32(1, d),
            "s": f32(11, d),
            "a": f32(4, d),
            "layers": [block] * 2,
            "to_action": f32(d, 4),
            "to_state": f32(d, 11),
        },
        (f32(2, 5, 1), f32(2, 5, 11), f32(2, 5, 4), i32(2, 5)),
        {
            "times": "embedding",
            "^r$": "vector",
            "^[sa]$": first(),
            "qkv": hidden(Split(1, (d, d, d), IN_OUT)),
            "^to_": "output",
            "layers": hidden(),
        },
    )


@model
def real_nvp():
    """Affine couplings: what a network gives moves the half that the next network sees."""
    half = 6

    def fn(p, x):
        log_det = 0
        for b in p:
            a, z = jnp.split(x, 2, -1)
            h = jax.nn.relu(jax.nn.relu(a @ b["l0"]) @ b["l1"])
            scale, shift = jnp.split(h @ b["l2"], 2, -1)
            scale = jnp.tanh(scale)
            x = jnp.concatenate([z * jnp.exp(scale) + shift, a], -1)
            log_det = log_det + scale.sum(-1)
        return (0.5 * (x**2).sum(-1) - log_det).mean()

    block = {"l0": f32(half, 22), "l1": f32(22, 26), "l2": f32(26, 2 * half)}
    return (
        fn,
        [block] * 3,
        (f32(5, 2 * half),),
        {
            "0/l0": first(),
            "2/l2": "output",
            "[01]/l2": hidden(halves(1, half)),
            "": hidden(),
        },
    )


@model
def fourier_neural_operator():
    """A matrix for each mode that is kept, of real and imaginary parts."""
    c, modes = 10, 3

    def fn(p, x):
        x = x @ p["lift"]
        for b in p["layers"]:
            z = jnp.fft.rfft(x, axis=1)
            low = jnp.einsum("bmi,iom->bmo", z[:, :modes], b["re"] + 1j * b["im"])
            z = jnp.zeros_like(z).at[:, :modes].set(low)
            x = jax.nn.gelu(jnp.fft.irfft(z, x.shape[1], axis=1) + x @ b["skip"])
        return jax.nn.gelu(x @ p["project"]) @ p["out"]

    block = {"re": f32(c, c, modes), "im": f32(c, c, modes), "skip": f32(c, c)}
    return (
        fn,
        {"lift": f32(2, c), "layers": [block] * 2, "project": f32(c, 22), "out": f32(22, 1)},
        (f32(2, 16, 2),),
        {"lift": first(), "out": "output", "": hidden()},
    )


@model
def s5():
    """A diagonal state space of complex numbers, given by real parts."""
    d, n = 10, 14

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            step = jnp.exp(b["log_step"])
            rates = (-jnp.exp(b["rate_re"]) + 1j * b["rate_im"]) * step
            u = jnp.einsum("btd,nd->btn", norm(x), b["B_re"] + 1j * b["B_im"])
            rates = jnp.broadcast_to(jnp.exp(rates), u.shape)

            def both(one, other):
                return one[0] * other[0], other[0] * one[1] + other[1]

            _, s = jax.lax.associative_scan(both, (rates, u), axis=1)
            y = jnp.einsum("btn,dn->btd", s, jax.lax.complex(b["C_re"], b["C_im"])).real
            y = jax.nn.gelu(y + b["D"] * x)
            x = x + y * jax.nn.sigmoid(y @ b["gate"])
        return cross_entropy(norm(x) @ p["head"], t)

    vectors = {k: f32(n) for k in ("log_step", "rate_re", "rate_im")} | {"D": f32(d)}
    block = vectors | {"B_re": f32(n, d), "B_im": f32(n, d), "C_re": f32(d, n), "C_im": f32(d, n)}
    return (
        fn,
        {"embed": f32(61, d), "layers": [block | {"gate": f32(d, d)}] * 2, "head": f32(d, 61)},
        (TOKENS,),
        {"embed": "embedding", "head": "output", "gate": hidden(), "layers": hidden(OUT_IN)},
    )


@model
def generation_in_a_while_loop():
    """Greedy decoding with a cache; only tokens come out."""
    d, n, most = 24, 3, 8

    def fn(p, start):
        def more(state):
            return (state[0] < most - 1) & ~jnp.all(state[1][:, -1] == 1)

        def step(state):
            i, tokens, keys, values = state
            x = p["embed"][jax.lax.dynamic_index_in_dim(tokens, i, 1, keepdims=False)]
            q, k, v = (heads(norm(x) @ p[c], n) for c in "qkv")
            keys = jax.lax.dynamic_update_index_in_dim(keys, k, i, 1)
            values = jax.lax.dynamic_update_index_in_dim(values, v, i, 1)
            scores = jnp.einsum("bhd,bshd->bhs", q, keys)
            scores = jnp.where(jnp.arange(most) <= i, scores, -jnp.inf)
            o = jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores), values)
            x = x + merged(o) @ p["o"]
            x = x + feed_forward(p, norm(x))
            token = jnp.argmax(norm(x) @ p["head"], -1)
            tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, i + 1, 1)
            return i + 1, tokens, keys, values

        cache = jnp.zeros((2, most, n, d // n))
        return jax.lax.while_loop(more, step, (0, start, cache, cache))[1]

    params = {k: f32(d, d) for k in "qkvo"} | {"up": f32(d, 34), "down": f32(34, d)}
    return (
        fn,
        {**params, "embed": f32(61, d), "head": f32(d, 61)},
        (i32(2, most),),
        {"embed": "embedding", "head": "output", "": hidden()},
    )


@model
def maml():
    """Two steps of descent inside, and the loss of the adapted network."""

    def net(p, x):
        return jnp.tanh(jnp.tanh(x @ p["l0"] + p["b0"]) @ p["l1"]) @ p["l2"]

    def loss(p, x, y):
        return ((net(p, x) - y) ** 2).mean()

    def fn(p, x, y, x_query, y_query):
        def adapt(p, _):
            return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, x, y)), None

        return loss(jax.lax.scan(adapt, p, None, 2)[0], x_query, y_query)

    return (
        fn,
        {"l0": f32(5, 22), "b0": f32(22), "l1": f32(22, 26), "l2": f32(26, 3)},
        (f32(7, 5), f32(7, 3), f32(9, 5), f32(9, 3)),
        {"l0": first(), "l1": hidden(), "l2": "output"},
    )


@model
def remat_scan_with_dropout():
    """A checkpointed scan over layers that splits a key, and stochastic depth."""
    d = 20

    def fn(p, t, key):
        def layer(carry, b):
            x, key = carry
            key, k1, k2 = jax.random.split(key, 3)
            y = norm(x)
            y = attend(b, y, y, 2)
            x = x + jnp.where(jax.random.bernoulli(k1, 0.9, y.shape), y / 0.9, 0)
            y = feed_forward(b, norm(x))
            keep = jax.random.bernoulli(k2, 0.8, (y.shape[0], 1, 1))
            return (x + y * keep / 0.8, key), None

        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        layer = jax.checkpoint(layer, policy=policy)
        (x, _), _ = jax.lax.scan(layer, (p["embed"][t], key), p["layers"])
        return cross_entropy(norm(x) @ p["head"], t)

    block = {k: f32(3, d, d) for k in "qkvo"} | {"up": f32(3, d, 34), "down": f32(3, 34, d)}
    return (
        fn,
        {"embed": f32(61, d), "layers": block, "head": f32(d, 61)},
        (TOKENS, KEY),
        {"embed": "embedding", "head": "output", "layers": hidden(Dims(1, 2))},
    )


@model
def linen_scan_of_remat():
    """`nn.scan` of `nn.remat`, with a broadcast mask and a dropout key."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            y = nn.MultiHeadDotProductAttention(3)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dropout(0.1, deterministic=False)(y)
            x = x + nn.Dense(24)(nn.gelu(nn.Dense(34)(nn.LayerNorm()(x))))
            return x, None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, t):
            x = nn.Embed(61, 24)(t)
            blocks = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=3,
            )
            x, _ = blocks()(x, nn.make_causal_mask(t))
            return nn.Dense(61, name="head")(nn.LayerNorm()(x))

    return (
        *linen(Net(), TOKENS),
        {
            "embedding": "embedding",
            "head/kernel": "output",
            "bias|scale": "vector",
            "(query|key|value)/kernel": hidden(Dims(1, (2, 3))),
            "out/kernel": hidden(Dims((1, 2), 3)),
            "Dense": hidden(Dims(1, 2)),
        },
    )


@model
def nnx_vmapped_ensemble():
    """`nnx.vmap` makes and runs five networks."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(7, 22, rngs=rngs)
            self.n = nnx.LayerNorm(22, rngs=rngs)
            self.b = nnx.Linear(22, 26, rngs=rngs)
            self.c = nnx.Linear(26, 3, rngs=rngs)

        def __call__(self, x):
            return self.c(nnx.relu(self.b(self.n(nnx.relu(self.a(x))))))

    @nnx.split_rngs(splits=5)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Net(rngs)

    run = nnx.vmap(lambda module, x: module(x), in_axes=(0, None), out_axes=0)
    return (
        *nnx_module(make, f32(9, 7), call=run),
        {
            "a/kernel": first(Dims(1, 2)),
            "b/kernel": hidden(Dims(1, 2)),
            "c/kernel": "output",
            "": "vector",
        },
    )


@model
def haiku_layer_stack():
    from haiku.experimental import layer_stack

    def fn(t):
        x = hk.Embed(61, 24)(t)

        @layer_stack(3)
        def block(x):
            y = hk.LayerNorm(-1, True, True)(x)
            init = hk.initializers.VarianceScaling()
            x = x + hk.MultiHeadAttention(3, 8, w_init=init, model_size=24)(y, y, y)
            y = hk.LayerNorm(-1, True, True)(x)
            return x + hk.Linear(24, name="down")(jax.nn.gelu(hk.Linear(34, name="up")(y)))

        return hk.Linear(61, name="head")(block(x))

    return (
        *haiku(fn, TOKENS),
        {
            "embeddings": "embedding",
            "head/w": "output",
            "/w$": hidden(Dims(1, 2)),
            "": "vector",
        },
    )


@model
def equinox_filter_vmapped():
    """An ensemble of MLPs by `filter_vmap`, each with the same inputs."""

    def make(key):
        keys = jax.random.split(key, 5)
        return eqx.filter_vmap(lambda k: eqx.nn.MLP(7, 3, 22, 2, key=k))(keys)

    def call(mlps, x):
        of_one = lambda mlp, x: jax.vmap(mlp)(x)  # noqa: E731
        return eqx.filter_vmap(of_one, in_axes=(eqx.if_array(0), None))(mlps, x)

    return (
        *equinox(make, f32(9, 7), call=call),
        {
            "0/weight": first(Dims(2, 1)),
            "1/weight": hidden(Dims(2, 1)),
            "2/weight": "output",
            "": "vector",
        },
    )


@model
def kan():
    """Splines of each input, of which a layer contracts inputs and basis."""

    def layer(p, x):
        basis = jnp.exp(-((x[..., None] - jnp.linspace(-1, 1, 5)) ** 2))
        return jnp.einsum("bik,oik->bo", basis, p["spline"]) + jax.nn.silu(x) @ p["base"].T

    def fn(p, x):
        for b in p:
            x = layer(b, x)
        return x

    sizes = ((7, 22), (22, 13), (13, 3))
    return (
        fn,
        [{"spline": f32(o, i, 5), "base": f32(o, i)} for i, o in sizes],
        (f32(9, 7),),
        {
            "2/": "output",
            "0/spline": first(Dims((1, 2), 0)),
            "0/base": first(OUT_IN),
            "spline": hidden(Dims((1, 2), 0)),
            "base": hidden(OUT_IN),
        },
    )


@model
def soft_moe():
    """Slots are mixtures of tokens; a table of slots decides the mixture."""
    d, count, slots, f = 20, 3, 4, 26

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            y = norm(x)
            logits = jnp.einsum("btd,dns->btns", y, b["phi"])
            dispatch = jax.nn.softmax(logits, 1)
            combine = jax.nn.softmax(logits, (2, 3))
            z = jnp.einsum("btd,btns->bnsd", y, dispatch)
            z = jax.nn.gelu(jnp.einsum("bnsd,ndf->bnsf", z, b["w1"]))
            z = jnp.einsum("bnsf,nfd->bnsd", z, b["w2"])
            x = x + jnp.einsum("bnsd,btns->btd", z, combine)
        return norm(x).mean(1) @ p["head"]

    block = {"phi": f32(d, count, slots), "w1": f32(count, d, f), "w2": f32(count, f, d)}
    return (
        fn,
        {"embed": f32(61, d), "layers": [block] * 2, "head": f32(d, 5)},
        (TOKENS,),
        {
            "embed": "embedding",
            "phi": "router",
            "head": "output",
            "layers": hidden(Dims(1, 2)),
        },
    )


@model
def conv_lstm():
    """Gates are channels of one convolution of the input and the state."""
    c = 6

    def fn(p, frames):
        def step(state, x):
            h, s = state
            z = conv2d(jnp.concatenate([x, h], -1), p["gates"]) + p["bias"]
            i, f, o, g = jnp.split(z, 4, -1)
            s = jax.nn.sigmoid(f) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(s)
            return (h, s), h

        zero = jnp.zeros((2, 8, 10, c))
        _, h = jax.lax.scan(step, (zero, zero), frames)
        return conv2d(h[-1], p["out"])

    return (
        fn,
        {"gates": f32(3, 3, 2 + c, 4 * c), "bias": f32(4 * c), "out": f32(1, 1, c, 2)},
        (f32(5, 2, 8, 10, 2),),
        {"gates": hidden(Split(3, (c,) * 4, CONV)), "out": "output"},
    )


def conv2d(x, w, stride=1, groups=1):
    return jax.lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@model
def sam_mask_decoder():
    """Tokens and pixels attend to each other; masks are products of both."""
    d, n = 24, 3

    def fn(p, image, points, labels):
        x = image @ p["neck"]
        prompts = p["labels"][labels] + jnp.sin(points @ p["gauss"])
        tokens = jnp.broadcast_to(p["mask_tokens"], (2, 5, d))
        q = jnp.concatenate([tokens, prompts], 1)
        for b in p["layers"]:
            q = norm(q + attend(b["self"], q, q, n))
            q = norm(q + attend(b["cross"], q, x, n))
            q = norm(q + feed_forward(b, q))
            x = norm(x + attend(b["back"], x, q, n))
        pixels = x.reshape(2, 4, 4, d)
        pixels = jax.lax.conv_transpose(pixels, p["up1"], (2, 2), "SAME")
        pixels = jax.nn.gelu(
            jax.lax.conv_transpose(jax.nn.gelu(norm(pixels)), p["up2"], (2, 2), "SAME")
        )
        weights = [jax.nn.relu(q[:, 1 + i] @ w["l0"]) @ w["l1"] for i, w in enumerate(p["hyper"])]
        masks = jnp.einsum("bmc,bhwc->bmhw", jnp.stack(weights, 1), pixels)
        return masks, jax.nn.relu(q[:, 0] @ p["iou"][0]) @ p["iou"][1]

    own = {k: f32(d, d) for k in "qkvo"}
    block = {"self": own, "cross": own, "back": own, "up": f32(d, 34), "down": f32(34, d)}
    return (
        fn,
        {
            "neck": f32(11, d),
            "gauss": f32(2, d),
            "labels": f32(3, d),
            "mask_tokens": f32(5, d),
            "layers": [block] * 2,
            "up1": f32(2, 2, d, 14),
            "up2": f32(2, 2, 14, 10),
            "hyper": [{"l0": f32(d, 26), "l1": f32(26, 10)}] * 4,
            "iou": [f32(d, 22), f32(22, 4)],
        },
        (f32(2, 16, 11), f32(2, 4, 2), i32(2, 4)),
        {
            "neck|gauss": first(),
            "labels": "embedding",
            "mask_tokens": None,
            "^up": hidden(CONV),
            "iou/1": "output",
            "": hidden(),
        },
    )


@model
def siren():
    def fn(p, x):
        for w, b in p["layers"]:
            x = jnp.sin(30 * (x @ w + b))
        return x @ p["out"]

    layers = [(f32(a, b), f32(b)) for a, b in ((2, 22), (22, 26), (26, 14))]
    return (
        fn,
        {"layers": layers, "out": f32(14, 3)},
        (f32(31, 2),),
        {"layers/0/0": first(), "layers/./0": hidden(), "out": "output", "": "vector"},
    )


@model
def biaffine_parser():
    """Scores of arcs: a matrix between heads and dependents, and one for each label."""
    d, low, labels = 24, 10, 7

    def fn(p, t):
        x = p["embed"][t]
        head, tail = jax.nn.relu(x @ p["head"]), jax.nn.relu(x @ p["tail"])
        arcs = jnp.einsum("bik,bjk->bij", head @ p["arc"], tail)
        names = jnp.einsum("bilk,bjk->bijl", jnp.einsum("bih,lhk->bilk", head, p["label"]), tail)
        return arcs, names

    return (
        fn,
        {
            "embed": f32(61, d),
            "head": f32(d, low),
            "tail": f32(d, 14),
            "arc": f32(low, 14),
            "label": f32(labels, low, 14),
        },
        (TOKENS,),
        {"embed": "embedding", "head|tail|arc": hidden(), "label": hidden(Dims(1, (0, 2)))},
    )


@model
def tied_three_ways():
    """One table for the encoder's letters, the decoder's, and the logits; a scan of both."""
    d = 20

    def fn(p, source, target):
        x = p["table"][source]
        _, x = jax.lax.scan(
            lambda h, x: 2 * (jnp.tanh(x @ p["in"] + h @ p["rec"]),), x[:, 0], x.swapaxes(0, 1)
        )
        y = p["table"][target] + attend(p, p["table"][target], x.swapaxes(0, 1), 2)
        return cross_entropy(norm(y) @ p["table"].T * d**-0.5, target)

    return (
        fn,
        {"table": f32(61, d), "in": f32(d, d), "rec": f32(d, d), **{k: f32(d, d) for k in "qkvo"}},
        (TOKENS, i32(2, 5)),
        {"table": "embedding", "": hidden()},
    )


@model
def shuffled_groups():
    """ShuffleNet's grouped convolutions, channels shuffled between them."""
    c, groups = 12, 3

    def fn(p, x):
        x = conv2d(x, p["stem"])
        for b in p["layers"]:
            y = jax.nn.relu(conv2d(x, b["in"], groups=groups))
            y = y.reshape(*y.shape[:-1], groups, -1).swapaxes(-1, -2).reshape(y.shape)
            y = conv2d(y, b["depthwise"], groups=y.shape[-1])
            x = jax.nn.relu(x + conv2d(y, b["out"], groups=groups))
        return x.mean((1, 2)) @ p["head"]

    block = {"in": f32(1, 1, c // groups, 18), "depthwise": f32(3, 3, 1, 18)}
    block |= {"out": f32(1, 1, 18 // groups, c)}
    view = lambda n: Unfold(3, (groups, n // groups), Dims(2, 4))  # noqa: E731
    return (
        fn,
        {"stem": f32(3, 3, 3, c), "layers": [block] * 2, "head": f32(c, 7)},
        (f32(2, 8, 10, 3),),
        {
            "stem": first(CONV),
            "depthwise": "depthwise",
            "/in": hidden(view(18)),
            "/out": hidden(view(c)),
            "head": "output",
        },
    )


@model
def hyena():
    """Long convolutions by FFT, whose filters a network of positions makes; q, k, v in one."""
    d, length = 20, 9

    def fn(p, t):
        x = p["embed"][t]
        time = jnp.linspace(0, 1, length)[:, None]
        features = jnp.concatenate([time, jnp.sin(6 * time), jnp.cos(6 * time)], -1)
        for b in p["layers"]:
            z = depthwise(norm(x) @ b["in"], b["short"])
            q, k, v = jnp.split(z, 3, -1)
            h = jnp.sin(jnp.sin(features @ b["f0"]) @ b["f1"]) @ b["f2"] * jnp.exp(-time)
            u = jnp.fft.rfft(k * v, 2 * length, axis=1) * jnp.fft.rfft(h, 2 * length, axis=0)
            y = jnp.fft.irfft(u, 2 * length, axis=1)[:, :length]
            x = x + (q * y) @ b["out"]
            x = x + feed_forward(b, norm(x))
        return cross_entropy(norm(x) @ p["head"], t)

    block = {"in": f32(d, 3 * d), "short": f32(3, 1, 3 * d), "out": f32(d, d)}
    block |= {"f0": f32(3, 11), "f1": f32(11, 13), "f2": f32(13, d)}
    block |= {"up": f32(d, 34), "down": f32(34, d)}
    return (
        fn,
        {"embed": f32(61, d), "layers": [block] * 2, "head": f32(d, 61)},
        (i32(2, length),),
        {
            "embed": "embedding",
            "head": "output",
            "/in": hidden(Split(1, (d,) * 3, IN_OUT)),
            "short": "depthwise",
            "layers": hidden(),  # positions are constants, not inputs
        },
    )


@model
def quasi_recurrent():
    """QRNN: candidates, forget gates and output gates are channels of a masked convolution."""
    d, n = 14, 18

    def fn(p, t):
        x = p["embed"][t]
        for w in p["layers"]:
            z, f, o = jnp.split(conv1d(x, w), 3, -1)
            z, f = jnp.tanh(z), jax.nn.sigmoid(f)

            def step(c, now):
                z, f = now
                c = f * c + (1 - f) * z
                return c, c

            _, c = jax.lax.scan(step, jnp.zeros((2, n)), (z.swapaxes(0, 1), f.swapaxes(0, 1)))
            x = jax.nn.sigmoid(o) * c.swapaxes(0, 1)
        return cross_entropy(x @ p["head"], t)

    return (
        fn,
        {
            "embed": f32(61, d),
            "layers": [f32(2, d, 3 * n), f32(2, n, 3 * n)],
            "head": f32(n, 61),
        },
        (TOKENS,),
        {
            "embed": "embedding",
            "head": "output",
            "layers": hidden(Split(2, (n,) * 3, Dims((0, 1), 2))),
        },
    )


@model
def highway_char_cnn():
    """Filters of several widths over letters, maxima over time, highway layers, an LSTM."""
    d, n = 10, 22

    def fn(p, letters):
        x = p["letters"][letters].reshape(-1, 9, d)
        x = jnp.concatenate([jnp.tanh(conv1d(x, w)).max(1) for w in p["filters"]], -1)
        for b in p["highway"]:
            gate = jax.nn.sigmoid(x @ b["gate"] - 2)
            x = gate * jax.nn.relu(x @ b["transform"]) + (1 - gate) * x
        x = x.reshape(2, 5, -1)

        def step(s, x):
            h, c = s
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ p["lstm"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = (jax.nn.sigmoid(o) * jnp.tanh(c)) @ p["project"]
            return (h, c), h

        _, h = jax.lax.scan(step, (jnp.zeros((2, 14)), jnp.zeros((2, n))), x.swapaxes(0, 1))
        return h @ p["head"]

    widths = {1: 6, 2: 8, 3: 12}
    full = sum(widths.values())
    return (
        fn,
        {
            "letters": f32(37, d),
            "filters": [f32(k, d, c) for k, c in widths.items()],
            "highway": [{"gate": f32(full, full), "transform": f32(full, full)}] * 2,
            "lstm": f32(full + 14, 4 * n),
            "project": f32(n, 14),
            "head": f32(14, 53),
        },
        (i32(2, 5, 9),),
        {
            "letters": "embedding",
            "filters/0": hidden(Dims(1, 2)),
            "filters": hidden(Dims((0, 1), 2)),
            "lstm": hidden(Split(1, (n,) * 4, IN_OUT)),
            "head": "output",
            "highway|project": hidden(),
        },
    )


@model
def byol():
    """A predictor of what another network of the same form says; its weights are inputs."""

    def project(p, x):
        h = jax.nn.relu(jax.nn.relu(x @ p["e0"]) @ p["e1"])
        return jax.nn.relu(h @ p["p0"]) @ p["p1"]

    def fn(p, target, one, other):
        y = norm(jax.nn.relu(project(p, one) @ p["q0"]) @ p["q1"])
        z = jax.lax.stop_gradient(norm(project(target, other)))
        return ((y - z) ** 2).sum(-1).mean()

    own = {"e0": f32(11, 22), "e1": f32(22, 26), "p0": f32(26, 34), "p1": f32(34, 14)}
    return (
        fn,
        own | {"q0": f32(14, 18), "q1": f32(18, 14)},
        (own, f32(9, 11), f32(9, 11)),
        {"e0": first(), "q1": "output", "": hidden()},
    )


@model
def point_net():
    """A matrix that a small network of the points makes turns the points."""

    def trunk(ws, x):
        for w in ws:
            x = jax.nn.relu(x @ w)
        return x

    def fn(p, x):
        turn = (trunk(p["t"], x).max(1) @ p["t_out"]).reshape(-1, 3, 3) + jnp.eye(3)
        x = jnp.einsum("bni,bij->bnj", x, turn)
        local = trunk(p["local"], x)
        whole = trunk(p["whole"], local).max(1, keepdims=True)
        x = jnp.concatenate([local, jnp.broadcast_to(whole, (*local.shape[:2], 26))], -1)
        return jax.nn.relu(x @ p["mix"]) @ p["out"]

    return (
        fn,
        {
            "t": [f32(3, 10), f32(10, 14)],
            "t_out": f32(14, 9),
            "local": [f32(3, 18), f32(18, 22)],
            "whole": [f32(22, 26)],
            "mix": f32(48, 34),
            "out": f32(34, 5),
        },
        (f32(2, 31, 3),),
        {"t_out": "unclear", "t/0": first(), "^out": "output", "": hidden()},
    )


@model
def bahdanau_attention():
    """Scores by a vector; the decoder's LSTM takes contexts and letters, input feeding."""
    d, n = 14, 18

    def fn(p, source, target):
        memory = jnp.tanh(p["source"][source] @ p["encoder"])
        keys = memory @ p["keys"]

        def step(s, y):
            h, c, context = s
            z = jnp.concatenate([y, context], -1) @ p["x"] + h @ p["h"]
            i, f, g, o = jnp.split(z, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            scores = jnp.tanh(keys + (h @ p["query"])[:, None]) @ p["v"]
            context = jnp.einsum("bs,bsd->bd", jax.nn.softmax(scores), memory)
            out = jnp.tanh(jnp.concatenate([h, context], -1) @ p["mix"])
            return (h, c, context), out

        zero = jnp.zeros((2, n))
        start = zero, zero, jnp.zeros((2, 22))
        _, y = jax.lax.scan(step, start, p["target"][target].swapaxes(0, 1))
        return y @ p["head"]

    return (
        fn,
        {
            "source": f32(61, d),
            "target": f32(53, d),
            "encoder": f32(d, 22),
            "keys": f32(22, 10),
            "query": f32(n, 10),
            "v": f32(10),
            "x": f32(d + 22, 4 * n),
            "h": f32(n, 4 * n),
            "mix": f32(n + 22, 26),
            "head": f32(26, 53),
        },
        (TOKENS, i32(2, 5)),
        {
            "source|target": "embedding",
            "^[xh]$": hidden(Split(1, (n,) * 4, IN_OUT)),
            "head": "output",
            "": hidden(),
        },
    )


@model
def retina_net():
    """A pyramid of features with heads that all levels share."""

    def fn(p, x):
        levels = []
        for w in p["stages"]:
            x = jax.nn.relu(conv2d(x, w, 2))
            levels.append(x)
        top, found = 0, []
        for x, w in zip(levels[::-1], p["lateral"], strict=True):
            y = conv2d(x, w)
            top = y if isinstance(top, int) else y + jnp.repeat(jnp.repeat(top, 2, 1), 2, 2)
            y = conv2d(top, p["smooth"])
            kind = conv2d(jax.nn.relu(conv2d(y, p["kind"][0])), p["kind"][1])
            box = conv2d(jax.nn.relu(conv2d(y, p["box"][0])), p["box"][1])
            found.append((kind.reshape(2, -1, 7), box.reshape(2, -1, 4)))
        return [jnp.concatenate(of, 1) for of in zip(*found, strict=True)]

    return (
        fn,
        {
            "stages": [f32(3, 3, a, b) for a, b in ((3, 10), (10, 14), (14, 18))],
            "lateral": [f32(1, 1, c, 12) for c in (18, 14, 10)],
            "smooth": f32(3, 3, 12, 12),
            "kind": [f32(3, 3, 12, 22), f32(3, 3, 22, 3 * 7)],
            "box": [f32(3, 3, 12, 26), f32(3, 3, 26, 3 * 4)],
        },
        (f32(2, 16, 16, 3),),
        {
            "stages/0": first(CONV),
            "lateral": hidden(Dims(2, 3)),
            "(kind|box)/1": "output",
            "": hidden(CONV),
        },
    )


@model
def nchw_unet_with_transposed_kernels():
    """OIHW kernels; upsampling is the transpose of a strided convolution."""

    def conv(x, w, stride=1):
        dims = ("NCHW", "OIHW", "NCHW")
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=dims)

    def fn(p, x, time):
        t = jax.nn.silu(time @ p["t0"]) @ p["t1"]
        one = jax.nn.silu(conv(x, p["in"]))
        two = jax.nn.silu(conv(one, p["down"], 2) + t[:, :, None, None])
        up = jax.lax.conv_transpose(
            two,
            p["up"],
            (2, 2),
            "SAME",
            dimension_numbers=("NCHW", "HWIO", "NCHW"),
            transpose_kernel=True,
        )
        both = jnp.concatenate([jax.nn.silu(up), one], 1)
        return conv(jax.nn.silu(conv(both, p["mix"])), p["out"])

    return (
        fn,
        {
            "t0": f32(5, 22),
            "t1": f32(22, 14),
            "in": f32(10, 3, 3, 3),
            "down": f32(14, 10, 3, 3),
            "up": f32(4, 4, 11, 14),  # (height, width, out, in)
            "mix": f32(18, 21, 3, 3),
            "out": f32(3, 18, 3, 3),
        },
        (f32(2, 3, 8, 8), f32(2, 5)),
        {
            "t0": first(),
            "t1": hidden(),
            "^in": first(Dims((1, 2, 3), 0)),
            "up": hidden(Dims((0, 1, 3), 2)),
            "out": "output",
            "": hidden(Dims((1, 2, 3), 0)),
        },
    )


@model
def relational_gcn():
    """A matrix for each kind of edge, taken by index, and one for loops."""
    d, nodes = 14, 11

    def fn(p, x, senders, receivers, kinds):
        for b in p["layers"]:
            m = jnp.einsum("ei,eio->eo", x[senders], b["kinds"][kinds])
            x = jax.nn.relu(jax.ops.segment_sum(m, receivers, nodes) + x @ b["own"])
        return x @ p["out"]

    sizes = ((6, d), (d, 18))
    return (
        fn,
        {
            "layers": [{"kinds": f32(5, i, o), "own": f32(i, o)} for i, o in sizes],
            "out": f32(18, 3),
        },
        (f32(nodes, 6), i32(31), i32(31), i32(31)),
        {
            "out": "output",
            "0/kinds": first(Dims(1, 2)),
            "0/own": first(),
            "kinds": hidden(Dims(1, 2)),
            "own": hidden(),
        },
    )


@model
def message_passing_by_edge_networks():
    """Gilmer's MPNN: the last layer of an edge network makes the matrix of each edge."""
    d, nodes = 10, 9

    def fn(p, x, edges, senders, receivers):
        h = jnp.tanh(x @ p["in"])
        matrices = (jax.nn.relu(edges @ p["e0"]) @ p["e1"]).reshape(-1, d, d)

        def step(h, _):
            m = jax.ops.segment_sum(
                jnp.einsum("eij,ej->ei", matrices, h[senders]), receivers, nodes
            )
            z = jax.nn.sigmoid(m @ p["wz"] + h @ p["uz"])
            r = jax.nn.sigmoid(m @ p["wr"] + h @ p["ur"])
            return (1 - z) * h + z * jnp.tanh(m @ p["wh"] + (r * h) @ p["uh"]), None

        h, _ = jax.lax.scan(step, h, None, 3)
        return (jax.nn.sigmoid(jnp.concatenate([h, x], -1) @ p["gate"]) * (h @ p["value"])).sum(0)

    gru = {f"{a}{b}": f32(d, d) for a in "wu" for b in "zrh"}
    return (
        fn,
        gru
        | {
            "in": f32(6, d),
            "e0": f32(5, 22),
            "e1": f32(22, d * d),
            "gate": f32(d + 6, 3),
            "value": f32(d, 3),
        },
        (f32(nodes, 6), f32(31, 5), i32(31), i32(31)),
        {"^in|e0": first(), "e1": "unclear", "gate|value": "output", "": hidden()},
    )


@model
def capsules():
    """A matrix from each capsule to each of the next, routing by agreement, a decoder."""
    i, j, k, n = 9, 5, 4, 6

    def squash(s):
        squared = (s**2).sum(-1, keepdims=True)
        return s * squared / (1 + squared) / jnp.sqrt(squared + 1e-6)

    def fn(p, x, labels):
        u = squash(jax.nn.relu(x @ p["in"]).reshape(-1, i, k))
        u_hat = jnp.einsum("bik,ijkn->bijn", u, p["w"])
        logits = jnp.zeros((x.shape[0], i, j))
        v = squash(jnp.einsum("bij,bijn->bjn", jax.nn.softmax(logits), u_hat))
        for _ in range(2):
            logits = logits + jnp.einsum("bijn,bjn->bij", u_hat, v)
            v = squash(jnp.einsum("bij,bijn->bjn", jax.nn.softmax(logits), u_hat))
        y = (v * jax.nn.one_hot(labels, j)[..., None]).reshape(-1, j * n)
        return (v**2).sum(-1), jax.nn.relu(y @ p["d0"]) @ p["d1"]

    return (
        fn,
        {"in": f32(13, i * k), "w": f32(i, j, k, n), "d0": f32(j * n, 22), "d1": f32(22, 13)},
        (f32(3, 13), i32(3)),
        {"^in": first(), "^w": hidden(Dims(2, (1, 3))), "d0": hidden(), "d1": "output"},
    )


@model
def dueling_dqn_with_noise():
    """Value and advantage streams; weights have a mean and a scale of noise."""

    def dense(p, x, key):
        noise = jax.random.normal(key, p["mean"].shape)
        return x @ (p["mean"] + p["sigma"] * noise) + p["b"]

    def fn(p, x, key):
        h = jax.nn.relu(x @ p["in"])
        k = jax.random.split(key, 4)
        value = dense(p["v1"], jax.nn.relu(dense(p["v0"], h, k[0])), k[1])
        advantage = dense(p["a1"], jax.nn.relu(dense(p["a0"], h, k[2])), k[3])
        return value + advantage - advantage.mean(-1, keepdims=True)

    def noisy(a, b):
        return {"mean": f32(a, b), "sigma": f32(a, b), "b": f32(b)}

    return (
        fn,
        {
            "in": f32(11, 22),
            "v0": noisy(22, 26),
            "v1": noisy(26, 1),
            "a0": noisy(22, 18),
            "a1": noisy(18, 6),
        },
        (f32(9, 11), KEY),
        {"^in": first(), "[va]1": "output", "": hidden()},
    )


@model
def mu_zero():
    """A dynamics function that is unrolled with actions; heads of reward, policy and value."""
    d = 18

    def fn(p, x, actions):
        s, found = jax.nn.relu(x @ p["represent"][0]) @ p["represent"][1], []
        for i in range(3):
            h = jax.nn.relu(s @ p["predict"])
            found.append((h @ p["policy"], h @ p["value"]))
            y = jnp.concatenate([s, jax.nn.one_hot(actions[:, i], 5)], -1)
            y = jax.nn.relu(y @ p["dynamics"][0])
            found.append(y @ p["reward"])
            s = s + y @ p["dynamics"][1]
            s = (s - s.min(-1, keepdims=True)) / (
                s.max(-1, keepdims=True) - s.min(-1, keepdims=True)
            )
        h = jax.nn.relu(s @ p["predict"])
        return found, h @ p["policy"], h @ p["value"]

    return (
        fn,
        {
            "represent": [f32(11, 22), f32(22, d)],
            "predict": f32(d, 26),
            "policy": f32(26, 5),
            "value": f32(26, 1),
            "dynamics": [f32(d + 5, 34), f32(34, d)],
            "reward": f32(34, 1),
        },
        (f32(9, 11), i32(9, 3)),
        {"represent/0": first(), "policy|value|reward": "output", "": hidden()},
    )


@model
def dense_net_of_many():
    """Each layer takes all before it: more sources than a few."""
    k, layers = 3, 34

    def fn(p, x):
        x = conv2d(x, p["stem"])
        for w in p["layers"]:
            x = jnp.concatenate([x, conv2d(jax.nn.relu(x), w)], -1)
        return x.mean((1, 2)) @ p["head"]

    return (
        fn,
        {
            "stem": f32(3, 3, 3, 7),
            "layers": [f32(3, 3, 7 + k * i, k) for i in range(layers)],
            "head": f32(7 + k * layers, 5),
        },
        (f32(2, 4, 4, 3),),
        {"stem": first(CONV), "head": "output", "layers": hidden(CONV)},
    )


@model
def neural_turing_machine():
    """A memory that heads read and write by content, in a scan."""
    n, slots, width = 22, 9, 6

    def address(memory, key, strength):
        scores = jnp.einsum("bmw,bw->bm", norm(memory), norm(key)) * jax.nn.softplus(strength)
        return jax.nn.softmax(scores)

    def fn(p, x):
        def step(s, x):
            h, memory, read = s
            h = jnp.tanh(jnp.concatenate([x, read], -1) @ p["in"] + h @ p["rec"])
            where = address(memory, h @ p["write_key"], h @ p["write_strength"])
            erase, add = jax.nn.sigmoid(h @ p["erase"]), h @ p["add"]
            memory = memory * (1 - where[..., None] * erase[:, None])
            memory = memory + where[..., None] * add[:, None]
            where = address(memory, h @ p["read_key"], h @ p["read_strength"])
            read = jnp.einsum("bm,bmw->bw", where, memory)
            return (h, memory, read), jnp.concatenate([h, read], -1)

        start = jnp.zeros((2, n)), jnp.broadcast_to(p["memory"], (2, slots, width))
        _, y = jax.lax.scan(step, (*start, jnp.zeros((2, width))), x)
        return y @ p["out"]

    return (
        fn,
        {
            "in": f32(5 + width, n),
            "rec": f32(n, n),
            **{k: f32(n, width) for k in ("write_key", "read_key", "erase", "add")},
            "write_strength": f32(n, 1),
            "read_strength": f32(n, 1),
            "memory": f32(slots, width),
            "out": f32(n + width, 5),
        },
        (f32(11, 2, 5),),
        {"strength|memory": None, "out": "output", "": hidden()},
    )
