"""Models that are easy to route wrong: kernels and constants, tables, parts that hide, choices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from literature_models import attend, conv2d, feed_forward
from optax.contrib import MuonDimensionNumbers as Dims
from use_models import (
    CONV,
    KEY,
    MODELS,
    Model,
    attention,
    cross_entropy,
    f32,
    first,
    halves,
    heads,
    hidden,
    i32,
    merged,
    model,
    norm,
)

from muon_jax import Split, Unfold

TOKENS = i32(2, 7)
V, D, F = 61, 16, 22
MLP = {"a": f32(10, D), "b": f32(D, F), "c": f32(F, 7)}
OF_MLP = {"a": first(), "b": hidden(), "c": "output"}
X = f32(4, 10)


def cases(**changes):
    """One model for each keyword: the maker takes its value."""

    def of(make):
        for name, change in changes.items():
            MODELS[f"{make.__name__}_{name}"] = lambda change=change: Model(*make(change))
        return make

    return of


@cases(
    eye=lambda t: jnp.eye(V)[t],
    masked=lambda t: jax.nn.one_hot(t, V) * (t > 0)[..., None],
    where=lambda t: jnp.where(t[..., None] == jnp.arange(V), 1.0, 0.0),
    scattered=lambda t: jax.vmap(lambda t: jnp.zeros((7, V)).at[jnp.arange(7), t].set(1.0))(t),
    shifted=lambda t: jnp.pad(jax.nn.one_hot(t, V), ((0, 0), (1, 0), (0, 0)))[:, :-1],
    dropped=lambda t: jnp.where(
        jax.random.bernoulli(jax.random.key(0), 0.9, t.shape)[..., None], jax.nn.one_hot(t, V), 0
    ),
)
def one_hot_rows(one_hot):
    """Each is a one-hot encoding, at most with rows of zeros: `e` is an embedding, not a matrix."""
    return (
        lambda p, t: jnp.tanh(jnp.tanh(one_hot(t) @ p["e"]) @ p["w"]) @ p["h"],
        {"e": f32(V, D), "w": f32(D, F), "h": f32(F, V)},
        (TOKENS,),
        {"e": "embedding", "w": hidden(), "h": "output"},
    )


@model
def physics_informed_network():
    """Unit vectors of forward derivatives are no one-hot encoding: `a` is the first layer."""

    def net(p, x):
        return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]

    def fn(p, x, boundary):
        laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(lambda x: net(p, x)[0])(x)))(x)
        return (laplacian**2).mean() + (net(p, boundary) ** 2).mean()

    return fn, {"a": f32(3, D), "b": f32(D, F), "c": f32(F, 1)}, (f32(9, 3), f32(5, 3)), OF_MLP


@model
def selective_kernels():
    """SK-Net: a softmax over branches for each channel is no router, and channels no experts.

    `k` gets Dims(1, ()): the columns of its matrices are lost.
    """

    def fn(p, x):
        x = x @ p["in"]
        one, two = jnp.tanh(x @ p["k"][0]), jnp.tanh(x @ p["k"][1])
        s = jax.nn.relu((one + two).mean(1) @ p["squeeze"]) @ p["select"]
        a = jax.nn.softmax(s.reshape(4, 2, D), 1)
        return (one * a[:, 0, None] + two * a[:, 1, None]) @ p["head"]

    return (
        fn,
        {
            "in": f32(10, D),
            "k": f32(2, D, D),
            "squeeze": f32(D, 5),
            "select": f32(5, 2 * D),
            "head": f32(D, 7),
        },
        (f32(4, 9, 10),),
        {
            "in": first(),
            "k": hidden(Dims(1, 2)),
            "head": "output",
            "squeeze": hidden(),
            "select": hidden(halves(1, D)),
        },
    )


@model
def monarch():
    """Block diagonals, permuted between them: `m1` gets Dims(1, ()), as its outputs are batched."""

    def fn(p, x):
        y = jnp.einsum("bij,ijk->bik", jnp.tanh(x @ p["a"]).reshape(4, 5, 3), p["m1"])
        y = jnp.einsum("bki,kio->bko", y.swapaxes(1, 2), p["m2"])
        return jnp.tanh(y.reshape(4, -1)) @ p["c"]

    return (
        fn,
        {"a": f32(10, 15), "m1": f32(5, 3, 4), "m2": f32(4, 5, 6), "c": f32(24, 7)},
        (X,),
        {"a": first(), "m": hidden(Dims(1, 2)), "c": "output"},
    )


@model
def external_attention():
    """Two linear layers with a softmax over the memory between: no experts are chosen."""
    return (
        lambda p, x: jnp.tanh(jax.nn.softmax((x @ p["in"]) @ p["k"]) @ p["v"]) @ p["head"],
        {"in": f32(10, D), "k": f32(D, F), "v": f32(F, D), "head": f32(D, 7)},
        (f32(4, 9, 10),),
        {"in": first(), "k|v": hidden(), "head": "output"},
    )


@model
def efficient_attention():
    """A softmax over the features of queries, of one head."""

    def fn(p, x):
        x = x @ p["in"]
        q, k, v = jax.nn.softmax(x @ p["q"], -1), jax.nn.softmax(x @ p["k"], -2), x @ p["v"]
        context = jnp.einsum("bsd,bse->bde", k, v)
        return (x + jnp.einsum("btd,bde->bte", q, context) @ p["o"]) @ p["head"]

    return (
        fn,
        {"in": f32(10, D), **{c: f32(D, D) for c in "qkvo"}, "head": f32(D, 7)},
        (f32(4, 9, 10),),
        {"in": first(), "^[qkvo]$": hidden(), "head": "output"},
    )


@model
def dense_synthesizer():
    """A layer gives the weights of attention over the positions."""

    def fn(p, x):
        x = x @ p["in"]
        weights = jax.nn.softmax(jax.nn.relu(x @ p["w1"]) @ p["w2"])
        return (x + (weights @ (x @ p["v"])) @ p["o"]) @ p["head"]

    params = {"in": f32(10, D), "w1": f32(D, F), "w2": f32(F, 9), "v": f32(D, D), "o": f32(D, D)}
    return (
        fn,
        {**params, "head": f32(D, 7)},
        (f32(4, 9, 10),),
        {"in": first(), "w|v|o": hidden(), "head": "output"},
    )


@cases(
    group_sort=lambda y: jnp.sort(y.reshape(*y.shape[:-1], -1, 2)).reshape(y.shape),
    top_k=lambda y: jax.vmap(
        lambda y: (lambda best: jnp.zeros_like(y).at[best[1]].set(best[0]))(jax.lax.top_k(y, 3))
    )(y),
    winners_take_all=lambda y: jnp.where(y >= jax.lax.top_k(y, 3)[0][..., -1:], y, 0),
)
def activation_that_sorts(act):
    """Lipschitz networks, sparse autoencoders: values are kept, no experts are chosen."""
    return (
        lambda p, x: act(act(x @ p["a"]) @ p["b"]) @ p["c"],
        MLP,
        (X,),
        OF_MLP,
    )


@model
def modulation_before_many_layers():
    """Scale and shift of the last norm, made first: of more than 24 sources parts get lost."""

    def fn(p, x, c):
        x = x @ p["in"]
        shift, scale = jnp.split(jax.nn.silu(c @ p["c"]) @ p["modulate"], 2, -1)
        for b in p["layers"]:
            x = x + feed_forward(b, norm(x))
        return (norm(x) * (1 + scale[:, None]) + shift[:, None]) @ p["head"]

    return (
        fn,
        {
            "in": f32(10, D),
            "c": f32(5, D),
            "modulate": f32(D, 2 * D),
            "layers": [{"up": f32(D, F), "down": f32(F, D)}] * 26,
            "head": f32(D, 7),
        },
        (f32(4, 9, 10), f32(4, 5)),
        {
            "^in|^c": first(),
            "modulate": hidden(halves(1, D)),
            "layers": hidden(),
            "head": "output",
        },
    )


@model
def gate_and_up_in_one_array_before_a_map():
    """`lax.map`, or a scan, over the first axis of an activation forgets which half `y[0]` is."""

    def fn(p, x):
        y = jnp.einsum("bti,kif->kbtf", jnp.tanh(x @ p["a"]), p["gate_up"])
        return jax.lax.map(lambda one: one @ p["b"], jax.nn.silu(y[0]) * y[1]) @ p["c"]

    return (
        fn,
        {"a": f32(10, D), "gate_up": f32(2, D, F), "b": f32(F, 14), "c": f32(14, 7)},
        (f32(2, 9, 10),),
        {
            "^a": first(),
            "gate_up": hidden(Split(0, (1, 1), Dims(1, (0, 2)))),
            "b": hidden(),
            "c": "output",
        },
    )


@model
def lstm_of_stacked_gates():
    """The same with gates that are computed for all steps, and scanned."""

    def fn(p, x):
        gates = jnp.einsum("bti,kif->ktbf", jnp.tanh(x @ p["a"]), p["wx"])

        def step(s, now):
            h, c = s
            i, f, g, o = (z + h @ p["wh"][k] for k, z in enumerate(now))
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((2, F))
        return jax.lax.scan(step, (zero, zero), tuple(gates))[1] @ p["c"]

    return (
        fn,
        {"a": f32(10, D), "wx": f32(4, D, F), "wh": f32(4, F, F), "c": f32(F, 7)},
        (f32(2, 9, 10),),
        {
            "a": first(),
            "wx": hidden(Split(0, (1,) * 4, Dims(1, (0, 2)))),
            "wh": hidden(Dims(1, 2)),
            "c": "output",
        },
    )


@cases(
    cond=lambda p, x, i: jax.lax.cond(i > 0, lambda: x @ p["b"], lambda: x @ p["b2"]),
    switch=lambda p, x, i: jax.lax.switch(i, [lambda x: x @ p["b"], lambda x: x @ p["b2"]], x),
)
def branches_in_vmap(branch):
    """`vmap` makes a select of each operand, weights as well: they come out as vectors."""

    def one(p, x, i):
        return jnp.tanh(branch(p, jnp.tanh(x @ p["a"]), i)) @ p["c"]

    return (
        lambda p, x, i: jax.vmap(one, (None, 0, 0))(p, x, i),
        {**MLP, "b2": f32(D, F)},
        (X, i32(4)),
        OF_MLP,
    )


@cases(
    scaled=lambda w, t: t * w,
    clipped=lambda w, t: jnp.clip(w, -t, t),
    divided=lambda w, t: w / t,
)
def weights_and_a_number(change):
    """A number that is an input, as of a schedule or a range, changes `b`: still a matrix."""
    return (
        lambda p, x, t: jnp.tanh(jnp.tanh(x @ p["a"]) @ change(p["b"], t)) @ p["c"],
        MLP,
        (X, f32()),
        OF_MLP,
    )


@model
def resized_positions():
    """Bilinear weights are constants: `pos` is added, and is no matrix (ViT, BEiT, Swin)."""

    def fn(p, x):
        x = x @ p["a"] + jax.image.resize(p["pos"], (1, 4, 5, D), "bilinear")
        return jnp.tanh(norm(x) @ p["b"]).mean((1, 2)) @ p["c"]

    return fn, {**MLP, "pos": f32(1, 3, 3, D)}, (f32(2, 4, 5, 10),), {"pos": None, **OF_MLP}


@model
def resized_kernel():
    """FlexiViT's kernel of patches: rows are its window and its inputs as ever."""

    def fn(p, x):
        x = conv2d(x, jax.image.resize(p["patch"], (4, 4, 3, D), "bilinear"), 4)
        return jnp.tanh(norm(x) @ p["b"]).mean((1, 2)) @ p["c"]

    params = {"patch": f32(6, 6, 3, D), "b": f32(D, F), "c": f32(F, 7)}
    return (
        fn,
        params,
        (f32(2, 16, 20, 3),),
        {"patch": first(CONV), "b": hidden(), "c": "output"},
    )


@cases(
    permuted=lambda w: w[:, np.arange(F)[::-1]],
    taken=lambda w: jnp.take(w, jnp.arange(D), 0),
    rolled=lambda w: jnp.roll(w, jnp.arange(4).sum(), 0),
    stacked_rows=lambda w: jnp.stack([w[i] for i in range(D)]),
    mapped=lambda w: jax.lax.map(lambda row: row / jnp.linalg.norm(row), w),
)
def kernel_and_constants(change):
    """What constants do to a kernel is no use: (in, out) as ever, and no lookup."""
    return (
        lambda p, x: jnp.tanh(jnp.tanh(x @ p["a"]) @ change(p["b"])) @ p["c"],
        MLP,
        (X,),
        OF_MLP,
    )


@cases(
    plain=lambda x, w: jax.lax.map(lambda col: x @ col, w.T).T,
    in_vmap=lambda x, w: jax.vmap(lambda one: jax.lax.map(lambda col: one @ col, w.T))(x),
    summed=lambda x, w: jax.lax.map(lambda col: (x * col).sum(-1), w.T).T,
)
def columns_one_by_one(product):
    """A loop makes the outputs that a product with all columns would make: no vectors."""
    return (
        lambda p, x: jnp.tanh(product(jnp.tanh(x @ p["a"]), p["b"])) @ p["c"],
        MLP,
        (X,),
        OF_MLP | {"b": "unclear"},
    )


@model
def attention_vectors_in_a_scan():
    """Each layer has one vector for its scores, as of a GAT: stacked, they are no matrix."""

    def layer(x, p):
        y = jnp.tanh(x @ p["w"])
        return jax.nn.softmax(y @ p["v"])[:, None] * y, None

    params = {"a": f32(10, D), "s": {"w": f32(3, D, D), "v": f32(3, D)}, "c": f32(D, 7)}
    return (
        lambda p, x: jax.lax.scan(layer, jnp.tanh(x @ p["a"]), p["s"])[0] @ p["c"],
        params,
        (X,),
        {"^a": first(), "w": hidden(Dims(1, 2)), "v": "vector", "c": "output"},
    )


@cases(
    repeated_before=lambda q, n: (jnp.broadcast_to(q, (n, 6, D)), lambda y: y),
    repeated_after=lambda q, n: (q, lambda y: jnp.broadcast_to(y, (n, 6, D))),
    never_repeated=lambda q, n: (q, lambda y: y),
)
def learned_queries(repeat):
    """`b` is a layer whose inputs are learned, wherever they are repeated for the batch."""

    def fn(p, x):
        x = jnp.tanh(x @ p["a"])
        queries, repeated = repeat(p["queries"], len(x))
        q = heads(repeated(norm(queries) @ p["b"] + p["bias"]), 2)
        k, v = heads(x @ p["k"], 2), heads(x @ p["v"], 2)
        scores = jax.nn.softmax(jnp.einsum("...nhd,bthd->bhnt", q, k))
        y = merged(jnp.einsum("bhnt,bthd->bnhd", scores, v))
        return jnp.tanh(y @ p["o"]) @ p["c"]

    params = dict.fromkeys("bkvo", f32(D, D)) | {"bias": f32(D), "queries": f32(6, D)}
    return (
        fn,
        {"a": f32(10, D), "c": f32(D, 7), **params},
        (f32(2, 9, 10),),
        {"a": first(), "queries": "latents", "c": "output", "^[bkvo]$": hidden()},
    )


@model
def kernel_times_a_constant():
    """(in, out), or the (out, in) of a table of constants that is projected, and compared."""
    return (
        lambda p, x: jnp.tanh(jnp.tanh(x @ p["a"]) @ (p["b"] @ np.eye(F))) @ p["c"],
        MLP,
        (X,),
        OF_MLP | {"b": "unclear"},
    )


@model
def frozen_layer_after():
    """`h` is of the closure: whether `b` is a head is not in its parameters."""
    h = np.ones((F, 7), np.float32)
    return (
        lambda p, x: jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ h,
        {"a": f32(10, D), "b": f32(D, F)},
        (X,),
        {"a": first(), "b": "unclear"},
    )


def blurred(x):
    kernel = jnp.ones((3, 1, x.shape[-1])) / 3
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[-1],
    )


@cases(
    blurred=blurred,
    mapped_by_channel=lambda x: jnp.moveaxis(jax.lax.map(jnp.tanh, jnp.moveaxis(x, -1, 0)), 0, -1),
    repeated=lambda x: jnp.repeat(x, 2, -1)[..., ::2],
    partly_activated=lambda x: jnp.concatenate([x[..., :3], jnp.tanh(x[..., 3:])], -1),
    turned_by_halves=lambda x: x + jnp.concatenate([-x[..., F // 2 :], x[..., : F // 2]], -1),
)
def gate_and_up_through(f):
    """Halves that a constant filter, a loop over channels or a concatenation hides."""

    def fn(p, x):
        gate, up = jnp.split(jnp.tanh(x @ p["a"]) @ p["gate_up"], 2, -1)
        return jnp.tanh((jax.nn.silu(f(gate)) * f(up)) @ p["b"]) @ p["c"]

    return (
        fn,
        {"a": f32(10, D), "gate_up": f32(D, 2 * F), "b": f32(F, 14), "c": f32(14, 7)},
        (f32(2, 9, 10),),
        {"^a": first(), "gate_up": hidden(halves(1, F)), "b": hidden(), "c": "output"},
    )


@model
def penalty_on_two_kernels():
    """A term of weights alone in the loss is no use, whichever kernels are in it."""

    def fn(p, x):
        h = jnp.tanh(x @ p["a"])
        y = (jnp.tanh(h @ p["b"]) + jnp.tanh(h @ p["b2"])) @ p["c"]
        return (y**2).mean() + ((p["b"].T @ p["b2"]) ** 2).sum()

    return fn, {**MLP, "b2": f32(D, F)}, (X,), OF_MLP


@model
def gram_matrix():
    """A kernel that is W Wᵀ: `b` is a factor, not without effect."""
    return (
        lambda p, x: jnp.tanh(jnp.tanh(x @ p["a"]) @ (p["b"] @ p["b"].T)) @ p["c"],
        {"a": f32(10, D), "b": f32(D, 5), "c": f32(D, 7)},
        (X,),
        {"a": first(), "b": "factor", "c": "output"},
    )


@model
def one_column_of_a_kernel():
    """Only one output is taken: `b` gets Dims(0, ()), whose matrices have no columns."""
    return (
        lambda p, x: jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"][:, :1]) @ p["c"],
        {"a": f32(10, D), "b": f32(D, F), "c": f32(1, 7)},
        (X,),
        {"a": first(), "b": hidden(), "c": None},
    )


@model
def kernel_of_joined_parts():
    """Parts of one parameter, joined along its rows: the rows of one matrix, not two of them."""

    def fn(p, x):
        return jnp.tanh(jnp.tanh(x @ p["a"]) @ jnp.concatenate([*p["b"]])) @ p["c"]

    return (
        fn,
        {"a": f32(10, D), "b": f32(2, D // 2, F), "c": f32(F, 7)},
        (X,),
        {"a": first(), "b": hidden(Dims((0, 1), 2)), "c": "output"},
    )


@model
def kronecker_product():
    """A kernel that is a Kronecker product: two factors; the larger is routed as a matrix."""
    return (
        lambda p, x: jnp.tanh(jnp.tanh(x @ p["a"]) @ jnp.kron(p["k1"], p["k2"])) @ p["c"],
        {"a": f32(10, 16), "k1": f32(4, 4), "k2": f32(4, 6), "c": f32(24, 7)},
        (X,),
        {"a": first(), "k1|k2": "factor", "c": "output"},
    )


@model
def head_that_is_thrown_away():
    """What has no effect on the outputs is unused, with or without products of its own."""

    def fn(p, x):
        h = jnp.tanh(x @ p["a"])
        _ = jnp.tanh(h @ p["aux"]) @ p["aux_out"]
        return jnp.tanh(h @ p["b"]) @ p["c"]

    params = {**MLP, "aux": f32(D, 5), "aux_out": f32(5, 3)}
    return fn, params, (X,), {"aux": "unused", **OF_MLP}


@model
def paths_that_are_equal():
    """`a/b` is a key, and a path: the head gets the first layer's view."""
    return (
        lambda p, x: jnp.tanh(x @ p["a/b"]) @ p["a"]["b"],
        {"a/b": f32(10, D), "a": {"b": f32(D, 7)}},
        (X,),
        None,  # must raise
    )


@model
def no_output():
    """`fn` returns nothing: all parameters are "unused", and go to AdamW without a word."""
    return lambda p, x: None, MLP, (X,), None  # must raise


@model
def gate_and_up_in_a_kernel():
    """A fused SwiGLU kernel hides that it takes halves: `gate_up` must raise, or be cut."""
    from jax.experimental import pallas as pl

    def fused(y):
        def kernel(y, o):
            o[...] = jax.nn.silu(y[:, :F]) * y[:, F:]

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, F), y.dtype))(y)

    return (
        lambda p, x: fused(jnp.tanh(x @ p["a"]) @ p["gate_up"]) @ p["c"],
        {"a": f32(10, D), "gate_up": f32(D, 2 * F), "c": f32(F, 7)},
        (X,),
        None,  # must raise
    )


H, K = 6, 4  # heads, and their width


def of_heads(project, params, expected):
    """Attention whose heads are matrices each."""

    def fn(p, x):
        q, k, v = project(p, jnp.tanh(x @ p["a"]))
        return jnp.tanh(merged(attention(q, k, v)) @ p["o"]) @ p["c"]

    params = {"a": f32(10, D), "o": f32(H * K, F), "c": f32(F, 7), **params}
    expected = {"a": first(), "o": hidden(), "c": "output", **expected}
    return fn, params, (f32(2, 9, 10),), expected, True


@model
def heads_of_units_of_three():
    """Units of q, k and v beside each other, "(h d qkv)": each unit gets a matrix of its own."""
    view = Unfold(1, (H, K, 3), Split(3, (1, 1, 1), Dims(0, (2, 3))))
    return of_heads(
        lambda p, x: [*jnp.moveaxis((x @ p["w"]).reshape(2, 9, H, K, 3), 4, 0)],
        {"w": f32(D, 3 * H * K)},
        {"w": hidden(view)},
    )


@model
def heads_that_alternate():
    """Columns of a head are H apart: all of them get Dims(0, ()), without columns."""
    return of_heads(
        lambda p, x: [(x @ p[c]).reshape(2, 9, K, H).swapaxes(-1, -2) for c in "qkv"],
        {c: f32(D, H * K) for c in "qkv"},
        {"[qkv]": hidden(Unfold(1, (-1, H), Dims(0, 1)))},
    )


@model
def gates_of_what_top_k_chose():
    """A crash, `zip() argument 2 is shorter`: the indices have pieces of the router."""

    def fn(p, x):
        scores = jax.nn.sigmoid(x @ p["router"])
        gates = jnp.take_along_axis(scores, jax.lax.top_k(scores, 2)[1], -1)
        return (gates.sum(-1, keepdims=True) * jnp.tanh(x @ p["w"])) @ p["head"]

    return (
        fn,
        {"router": f32(10, 3), "w": f32(10, F), "head": f32(F, 7)},
        (X,),
        {"router": "router", "w": first(), "head": "output"},
    )


def in_callback(x):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@cases(
    set=lambda x: x.at[:, 0].set(0.0),
    add=lambda x: x.at[:, 1:].add(x[:, :-1]),
    segment_sum=lambda x: jax.vmap(lambda x: jax.ops.segment_sum(x, jnp.arange(7) // 2, 7))(x),
    cumsum=lambda x: jnp.cumsum(x, 1),
    fft=lambda x: jnp.fft.fft2(x).real,
    update=lambda x: jax.lax.dynamic_update_slice(x, jnp.zeros((2, 1, D)), (0, 3, 0)),
    pooled=lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 1), (1, 1, 1), "SAME"),
    sorted=lambda x: jnp.sort(x, 1),
    callback=in_callback,
)
def rows_that_were_looked_up(f):
    """Rows of an embedding are activations, whatever happens to them: LLaVA, FNet, GIN."""
    return (
        lambda p, t: jnp.tanh(norm(f(p["e"][t])) @ p["w"]) @ p["h"],
        {"e": f32(V, D), "w": f32(D, F), "h": f32(F, V)},
        (TOKENS,),
        {"e": "embedding", "w": hidden(), "h": "output"},
    )


@model
def row_for_a_number():
    """A product of two inputs is taken apart, as EGNN's; one of them is a single number."""

    def fn(p, x, r):
        return jnp.tanh(jnp.tanh(x @ p["a"][:10] + r @ p["a"][10:]) @ p["b"]) @ p["c"]

    return fn, {**MLP, "a": f32(11, D)}, (X, f32(4, 1)), OF_MLP


@model
def gate_and_up_on_a_last_axis():
    """`y[..., 0]` and `y[..., 1]` of two outputs for each unit."""

    def fn(p, x):
        y = jnp.einsum("bi,ifk->bfk", jnp.tanh(x @ p["a"]), p["b"])
        return (jax.nn.silu(y[..., 0]) * y[..., 1]) @ p["c"]

    return (
        fn,
        {"a": f32(10, D), "b": f32(D, F, 2), "c": f32(F, 7)},
        (X,),
        {"a": first(), "b": hidden(Split(2, (1, 1), Dims(0, (1, 2)))), "c": "output"},
    )


@cases(rows=0, columns=1)
def rolled_kernel(axis):
    def fn(p, x):
        return jnp.tanh(jnp.tanh(x @ p["a"]) @ jnp.roll(p["b"], 1, axis)) @ p["c"]

    return fn, MLP, (X,), OF_MLP


@model
def conditional_vae():
    """The decoder takes the label, which is an input, beside the latent."""

    def fn(p, x, y):
        h = jax.nn.relu(jnp.concatenate([x, y], -1) @ p["encoder"]["l0"])
        mean, log_var = jnp.split(h @ p["encoder"]["l1"], 2, -1)
        z = mean + jnp.exp(log_var / 2) * jax.random.normal(jax.random.key(0), mean.shape)
        h = jax.nn.relu(jnp.concatenate([z, y], -1) @ p["decoder"]["l0"])
        kl = mean**2 + jnp.exp(log_var) - log_var
        return ((h @ p["decoder"]["l1"] - x) ** 2).mean() + kl.mean()

    return (
        fn,
        {
            "encoder": {"l0": f32(15, D), "l1": f32(D, 6)},
            "decoder": {"l0": f32(8, F), "l1": f32(F, 10)},
        },
        (X, f32(4, 5)),
        {
            "encoder/l0": first(),
            "encoder/l1": "unclear",
            "decoder/l0": hidden(),
            "decoder/l1": "output",
        },
    )


@model
def music_transformer():
    """Relative positions are contracted with queries, and the scores skewed."""
    n, t = 2, 9

    def fn(p, x):
        x = x @ p["in"]
        q, k, v = (heads(x @ p[c], n) for c in "qkv")
        skewed = jnp.pad(jnp.einsum("bthd,hsd->bhts", q, p["relative"]), ((0, 0),) * 3 + ((1, 0),))
        skewed = skewed.reshape(-1, n, t + 1, t)[:, :, 1:]
        return jnp.tanh(merged(attention(q, k, v, skewed)) @ p["o"]) @ p["head"]

    params = {"in": f32(10, D), **{c: f32(D, D) for c in "qkvo"}, "head": f32(D, 7)}
    return (
        fn,
        {**params, "relative": f32(n, t, D // n)},
        (f32(2, t, 10),),
        {
            "in": first(),
            "relative": hidden(Dims(2, 1)),  # a matrix for each head
            "head": "output",
            "": hidden(),
        },
    )


@model
def an_entry_that_is_printed():
    """What is printed has no effect on the outputs."""

    def fn(p, x):
        jax.debug.print("{}", p["b"][0, 0])
        return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]

    return fn, MLP, (X,), OF_MLP


@model
def mask_of_a_closure():
    """Without inputs constants count as data; but a triangle is made of no data."""

    def fn(p):
        w = p["b"] * np.tril(np.ones((D, F), np.float32))
        return jnp.tanh(jnp.tanh(jnp.ones((4, 10)) @ p["a"]) @ w) @ p["c"]

    return fn, MLP, (), {"a": hidden(), "b": "unclear", "c": "output"}


@model
def sparse_features():
    """A sparse matrix of features times the first layer."""
    from jax.experimental import sparse

    def fn(p, data, indices):
        x = sparse.BCOO((data, indices), shape=(4, 10))
        return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]

    return fn, MLP, (f32(9), i32(9, 2)), OF_MLP | {"a": "unclear"}


@model
def fixed_point():
    """A deep equilibrium model by `jax.lax.custom_root`."""

    def fn(p, x):
        def residual(z):
            return jnp.tanh(z @ p["w"] + x @ p["in"]) - z

        def solve(f, z):
            return jax.lax.fori_loop(0, 9, lambda _, z: z + f(z), z)

        start = jnp.zeros((4, D))
        return jax.lax.custom_root(residual, start, solve, lambda g, y: y) @ p["head"]

    return (
        fn,
        {"in": f32(10, D), "w": f32(D, D), "head": f32(D, 7)},
        (X,),
        {"^in$": "unclear", "^w$": "unclear", "head": "output"},
    )


@model
def deepseek_v3_mtp():
    """Sigmoid routing with a bias in groups, a shared expert, and a further token's module."""
    d, count, f = 20, 6, 14

    def block(b, x):
        y = norm(x)
        x = x + attend(b, y, y, 2)
        y = norm(x).reshape(-1, d)
        scores = jax.nn.sigmoid(y @ b["gate"])
        biased = scores + b["bias"]
        of_groups = jax.lax.top_k(heads(biased, 2), 2)[0].sum(-1)
        _, best = jax.lax.top_k(of_groups, 1)
        mask = jnp.repeat(jax.nn.one_hot(best[:, 0], 2), count // 2, -1)
        _, chosen = jax.lax.top_k(jnp.where(mask > 0, biased, -jnp.inf), 2)
        weights = jnp.take_along_axis(scores, chosen, -1)
        weights = weights / weights.sum(-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=count)
        ragged = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
        rows = jnp.repeat(y, 2, 0)[order]
        h = jax.nn.silu(ragged(rows, b["w1"])) * ragged(rows, b["w3"])
        z = ragged(h, b["w2"])[jnp.argsort(order)]
        z = (z.reshape(-1, 2, d) * weights[..., None]).sum(1)
        gate, up = jnp.split(y @ b["shared_gate_up"], 2, -1)
        return x + (z + (jax.nn.silu(gate) * up) @ b["shared_down"]).reshape(x.shape)

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            x = block(b, x)
        loss = cross_entropy(norm(x) @ p["head"], t)
        y = jnp.concatenate([norm(x[:, :-1]), norm(p["embed"][t[:, 1:]])], -1) @ p["mtp"]["proj"]
        return loss + cross_entropy(norm(block(p["mtp"]["block"], y)) @ p["head"], t[:, 1:])

    own = {k: f32(d, d) for k in "qkvo"} | {"gate": f32(d, count), "bias": f32(count)}
    own |= {k: f32(count, d, f) for k in ("w1", "w3")} | {"w2": f32(count, f, d)}
    own |= {"shared_gate_up": f32(d, 2 * f), "shared_down": f32(f, d)}
    return (
        fn,
        {
            "embed": f32(61, d),
            "layers": [own] * 2,
            "mtp": {"proj": f32(2 * d, d), "block": own},
            "head": f32(d, 61),
        },
        (TOKENS,),
        {
            "embed": "embedding",
            "head": "output",
            "gate$": "router",
            "/w[123]$": hidden(Dims(1, 2)),
            "shared_gate_up": hidden(halves(1, f)),
            "layers|mtp": hidden(),
        },
    )


@model
def linformer():
    """Keys and values are projected along the sequence."""
    d, n, length, low = 24, 3, 14, 5

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            y = norm(x)
            k = jnp.einsum("btd,tl->bld", y @ b["k"], b["E"])
            v = jnp.einsum("btd,tl->bld", y @ b["v"], b["F"])
            x = x + merged(attention(heads(y @ b["q"], n), heads(k, n), heads(v, n))) @ b["o"]
            x = x + feed_forward(b, norm(x))
        return norm(x).mean(1) @ p["head"]

    block = {k: f32(d, d) for k in "qkvo"} | {"up": f32(d, 34), "down": f32(34, d)}
    block |= {"E": f32(length, low), "F": f32(length, low)}
    return (
        fn,
        {"embed": f32(61, d), "layers": [block] * 2, "head": f32(d, 3)},
        (i32(2, length),),
        {"embed": "embedding", "head": "output", "layers": hidden()},
    )


@model
def mixture_of_depths():
    """A router of one output picks the tokens that a block works on."""
    d = 20

    def fn(p, t):
        x = p["embed"][t]
        for b in p["layers"]:
            scores = (x @ b["router"])[..., 0]
            best, at = jax.lax.top_k(scores, 3)
            y = jnp.take_along_axis(x, at[..., None], 1)
            z = attend(b, norm(y), norm(y), 2)
            z = z + feed_forward(b, norm(y + z))
            x = x.at[jnp.arange(2)[:, None], at].add(jax.nn.sigmoid(best)[..., None] * z)
        return cross_entropy(norm(x) @ p["head"], t)

    block = {k: f32(d, d) for k in "qkvo"} | {"up": f32(d, 34), "down": f32(34, d)}
    return (
        fn,
        {"embed": f32(61, d), "layers": [block | {"router": f32(d, 1)}] * 2, "head": f32(d, 61)},
        (TOKENS,),
        {"embed": "embedding", "router": None, "head": "output", "layers": hidden()},
    )


@model
def reformer_shared_queries():
    """Queries are keys; buckets come from random rotations, and positions are sorted by them."""
    d, n = 24, 3

    def fn(p, t, key):
        x = p["embed"][t]
        for b in p["layers"]:
            y = norm(x)
            qk, v = heads(y @ b["qk"], n), heads(y @ b["v"], n)
            turned = qk @ jax.random.normal(key, (d // n, 2))
            bucket = jnp.argmax(jnp.concatenate([turned, -turned], -1), -1)
            order = jnp.argsort(bucket, 1)[..., None]
            qs, vs = jnp.take_along_axis(qk, order, 1), jnp.take_along_axis(v, order, 1)
            o = jnp.take_along_axis(attention(qs, norm(qs), vs), jnp.argsort(order, 1), 1)
            x = x + merged(o) @ b["o"]
            x = x + feed_forward(b, norm(x))
        return cross_entropy(norm(x) @ p["head"], t)

    block = {k: f32(d, d) for k in ("qk", "v", "o")} | {"up": f32(d, 34), "down": f32(34, d)}
    return (
        fn,
        {"embed": f32(61, d), "layers": [block] * 2, "head": f32(d, 61)},
        (TOKENS, KEY),
        {"embed": "embedding", "head": "output", "layers": hidden()},
    )


@model
def ft_transformer():
    """Each number times a vector of its column, each category a row; a token of its own."""
    d, n = 24, 3

    def fn(p, numbers, kinds):
        x = numbers[..., None] * p["columns"] + p["biases"]
        rows = p["categories"][kinds + jnp.array([0, 11, 24])]
        cls = jnp.broadcast_to(p["cls"], (4, 1, d))
        x = jnp.concatenate([cls, x, rows], 1)
        for b in p["layers"]:
            y = norm(x)
            x = x + attend(b, y, y, n)
            gate, y = jnp.split(norm(x) @ b["up"], 2, -1)
            x = x + (jax.nn.relu(gate) * y) @ b["down"]
        return jax.nn.relu(norm(x[:, 0])) @ p["head"]

    block = {k: f32(d, d) for k in "qkvo"} | {"up": f32(d, 2 * 34), "down": f32(34, d)}
    return (
        fn,
        {
            "columns": f32(7, d),
            "biases": f32(7, d),
            "cls": f32(1, d),
            "categories": f32(41, d),
            "layers": [block] * 2,
            "head": f32(d, 2),
        },
        (f32(4, 7), i32(4, 3)),
        {
            "columns": "unclear",
            "biases|cls": None,
            "categories": "embedding",
            "head": "output",
            "up": hidden(halves(1, 34)),
            "layers": hidden(),
        },
    )


@model
def glow():
    """Invertible 1×1 convolutions, with the logarithm of their determinants in the loss."""
    c = 6

    def fn(p, x):
        log_det = 0
        for b in p:
            x = x * jnp.exp(b["scale"]) + b["bias"]
            x = x @ b["w"]
            log_det = log_det + jnp.linalg.slogdet(b["w"])[1]
            one, two = jnp.split(x, 2, -1)
            h = conv2d(jax.nn.relu(conv2d(one, b["c0"])), b["c1"])
            shift, scale = jnp.split(h, 2, -1)
            x = jnp.concatenate([one, two * jnp.exp(jnp.tanh(scale)) + shift], -1)
        return (x**2).mean() - log_det

    block = {"scale": f32(c), "bias": f32(c), "w": f32(c, c)}
    block |= {"c0": f32(3, 3, c // 2, 14), "c1": f32(3, 3, 14, c)}
    return (
        fn,
        [block] * 3,
        (f32(2, 8, 8, c),),
        {
            "0/w": first(),
            "2/c1": "output",
            "w": hidden(),
            "c0": hidden(CONV),
            "c1": hidden(halves(3, c // 2, CONV)),
        },
    )
