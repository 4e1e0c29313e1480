"""Random models whose matrices are known by construction.

`random_model(seed)` composes layers, layouts of weights, casts, scans and fusions at random. It
returns the function, its parameters and inputs, and for each parameter the matrices that it has: a
view, or None for AdamW. Sizes are small and mostly distinct, so a mistaken axis cannot hide.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from muon_jax import MuonDimensionNumbers as Numbers
from muon_jax import Split, Unfold
from muon_jax._matrices.views import to_stacks

BATCH, TIME = 2, 6


@dataclasses.dataclass
class Builder:
    """A model under construction: parameters and what they should be."""

    rng: np.random.Generator
    width: int
    params: dict[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    expected: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: list[str] = dataclasses.field(default_factory=list)
    forms: set[str] = dataclasses.field(default_factory=set)
    is_vmapped: bool = False

    def inside(self, is_vmapped: bool = False) -> "Builder":
        """A builder of a layer whose parameters are not yet those of the model."""
        return Builder(self.rng, self.width, forms=self.forms, is_vmapped=is_vmapped)

    def pick(self, *choices: Any) -> Any:
        """One of the choices."""
        return choices[self.rng.integers(len(choices))]

    def size(self) -> int:
        """A size that no axis of the model has yet."""
        return int(self.pick(10, 14, 18, 22, 26))

    def add(self, kind: str, shape: tuple[int, ...], view: Any) -> str:
        """Adds a parameter and returns its name."""
        name = f"{kind}_{len(self.params)}"
        self.params[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
        self.expected[name] = view
        return name

    def dense(self, rows: int, cols: int, view: Any = "matrix") -> Callable[[Any, Any], Any]:
        """x @ W, with W stored in a random layout and made ready in a random way.

        `view` is that of a matrix (rows, cols), or None.
        """
        layout = self.pick("in_out", "in_out", "out_in", "factored_in", "factored_out", "joined")
        if layout == "joined" and view == "matrix":
            return self.joined(rows, cols)
        half = 2
        cut = {"factored_in": rows, "factored_out": cols}.get(layout, half)
        if view != "matrix" and layout.startswith("factored") or cut % half or layout == "joined":
            layout = "in_out"
        if layout == "in_out":
            shape, numbers = (rows, cols), Numbers(0, 1)
        elif layout == "out_in":
            shape, numbers = (cols, rows), Numbers(1, 0)
        elif layout == "factored_in":
            shape, numbers = (half, rows // half, cols), Numbers((0, 1), 2)
        else:
            shape, numbers = (rows, half, cols // half), Numbers(0, (1, 2))
        if view != "matrix":
            numbers = view if layout == "in_out" or view is None else transposed(view)
        name = self.add("w", shape, numbers)
        of_rows = {"out_in": len(shape) - 1}.get(layout, 0)
        prepare = self.preparation(name, shape, of_rows)
        bias = self.add("b", (cols,), None) if self.pick(True, False) else None
        # A number for each member of an ensemble is unclear, as a gate of each expert would be.
        further = [form for form in PRODUCTS if form != "number" or not self.is_vmapped]
        form = self.pick("dot", "einsum", "jit", "remat", "vmap", *further)
        self.forms.add(form)

        def apply(p: Any, x: Any) -> Any:
            w = prepare(p)
            if layout == "out_in":
                w = w.T if form != "einsum" else jnp.swapaxes(w, 0, 1)
            elif layout.startswith("factored") and form != "einsum":
                w = w.reshape(rows, cols)
            if form == "einsum":
                if layout == "factored_in":
                    parts = x.reshape(*x.shape[:-1], half, rows // half)
                    y = jnp.einsum("...ab,abc->...c", parts, w)
                elif layout == "factored_out":
                    y = jnp.einsum("...a,abc->...bc", x, w)
                    y = y.reshape(*y.shape[:-2], cols)
                else:
                    y = jnp.einsum("...a,ab->...b", x, w)
            elif form == "jit":
                y = jax.jit(jnp.matmul)(x, w)
            elif form == "remat":
                y = jax.checkpoint(jnp.matmul)(x, w)
            elif form == "vmap":
                y = jax.vmap(lambda one: one @ w)(x)
            elif form in PRODUCTS:
                y = PRODUCTS[form](x, w.astype(x.dtype))
            else:
                y = x @ w
            return y if bias is None else y + p[bias]

        return apply

    def joined(self, rows: int, cols: int) -> Callable[[Any, Any], Any]:
        """x @ W, with W made of two parameters, one above the other."""
        shapes = [(n, cols) for n in (4, rows - 4)]
        names = [self.add("w", shape, Numbers(0, 1)) for shape in shapes]
        prepare = [self.preparation(*both, 0) for both in zip(names, shapes, strict=True)]
        return lambda p, x: x @ jnp.concatenate([make(p).astype(x.dtype) for make in prepare])

    def preparation(self, name: str, shape: tuple[int, ...], of_rows: int) -> Callable[[Any], Any]:
        """What a model does to a weight before its product, which contracts axis `of_rows`."""
        kind = self.pick(
            *("plain", "plain", "plain", "cast", "scaled", "normed", "fake_quantized"),
            *("constrained", "sharded", "dropped", "centered", "turned", "rolled", "permuted"),
            *("gained", "stacked_rows"),
        )
        self.forms.add(kind)
        gains = {"normed": shape[-1:], "gained": ()}
        gain = self.add("g", gains[kind], None) if kind in gains else None
        order = self.rng.permutation(shape[of_rows])

        def prepared(p: Any) -> Any:
            w = p[name]
            if kind == "cast":
                return w.astype(jnp.bfloat16)
            if kind == "scaled":
                return w * 0.3
            if kind == "normed":
                return p[gain] * w / jnp.sqrt(jnp.sum(w * w, axis=0, keepdims=True) + 1e-6)
            if kind == "fake_quantized":
                return w + jax.lax.stop_gradient(jnp.round(w * 8) / 8 - w)
            if kind == "constrained":
                return jax.lax.optimization_barrier(w)
            if kind == "sharded":
                return jax.lax.with_sharding_constraint(w, on_one_device())
            if kind == "dropped":
                return w * jax.random.bernoulli(jax.random.key(0), 0.9, shape)
            if kind == "centered":
                return w - w.mean(0, keepdims=True)
            if kind == "turned":
                return jnp.flip(w.swapaxes(0, -1), 0).swapaxes(0, -1)[..., ::-1]
            if kind == "rolled":
                return jnp.roll(w, 3, of_rows)
            if kind == "permuted":
                return jnp.take(w, order, of_rows)
            if kind == "gained":
                return w * p[gain]
            if kind == "stacked_rows":
                return jnp.stack([w[i] for i in range(len(w))])
            return w

        return prepared

    def norm(self) -> Callable[[Any, Any], Any]:
        """A norm with a scale."""
        scale = self.add("s", (self.width,), None)

        def apply(p: Any, x: Any) -> Any:
            x = x.astype(jnp.float32)
            return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + p[scale])

        return apply


def on_one_device(*axes: str | None) -> NamedSharding:
    """A sharding over a mesh of one device."""
    return NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",)), P(*axes))


@jax.custom_vjp
def own_product(x: Any, w: Any) -> Any:
    """x @ w with a derivative that is written by hand."""
    return x @ w


own_product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (g @ kept[1].T, jnp.tensordot(kept[0], g, [[*range(g.ndim - 1)]] * 2)),
)


def repeated_product(x: Any, w: Any) -> Any:
    """x @ w in a while loop that carries the weight."""
    start = 0, jnp.zeros((*x.shape[:-1], w.shape[1]), x.dtype), w
    return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, x @ c[2], c[2]), start)[1]


def weight_first(x: Any, w: Any) -> Any:
    """The product with the weight on the left."""
    y = jax.lax.dot_general(w, x, (((0,), (x.ndim - 1,)), ((), ())))
    return jnp.moveaxis(y, 0, -1)


PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "own": own_product,
    "while": repeated_product,
    "first": weight_first,
    "cond": lambda x, w: jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: (2 * x) @ w),
    "map": lambda x, w: jnp.moveaxis(
        jax.lax.map(lambda one: one @ w, jnp.moveaxis(x, -2, 0)), 0, -2
    ),
    "map_0": lambda x, w: jax.lax.map(lambda one: one @ w, x),
    "number": lambda x, w: x @ (w * jax.nn.sigmoid(x.mean()) / (1 + x[..., 0].max())),
    "shard_map": lambda x, w: jax.shard_map(
        jnp.matmul, mesh=on_one_device().mesh, in_specs=(P("d"), P(None, None)), out_specs=P("d")
    )(x, w),
    "columns": lambda x, w: jax.vmap(lambda col: x @ col, 1, -1)(w),
}


def transposed(view: Any) -> Any:
    """The view of a matrix that is stored (cols, rows)."""
    if isinstance(view, Split):
        inner = view.view
        return Split(0, view.sizes, Numbers(1, 0) if isinstance(inner, Numbers) else inner)
    if isinstance(view, Unfold):
        raise NotImplementedError
    return Numbers(1, 0)


def activation(b: Builder) -> Callable[[Any], Any]:
    return b.pick(jax.nn.relu, jax.nn.silu, jax.nn.gelu, jnp.tanh)


def mlp(b: Builder) -> Callable[[Any, Any], Any]:
    hidden = b.size()
    norm, up, down, act = (
        b.norm(),
        b.dense(b.width, hidden),
        b.dense(hidden, b.width),
        activation(b),
    )
    return lambda p, x: x + down(p, act(up(p, norm(p, x))))


def gated_mlp(b: Builder) -> Callable[[Any, Any], Any]:
    n = b.size()
    norm, act = b.norm(), activation(b)
    form = b.pick("two", "halves", "interleaved", "stacked", "joined", "joined_stack")
    if form == "two":
        gate, up = b.dense(b.width, n), b.dense(b.width, n)
        both = lambda p, x: (gate(p, x), up(p, x))  # noqa: E731
    elif form == "halves":
        fused = b.dense(b.width, 2 * n, Split(1, (n, n), Numbers(0, 1)))
        both = lambda p, x: jnp.split(fused(p, x), 2, -1)  # noqa: E731
    elif form == "interleaved":
        name = b.add("w", (b.width, 2 * n), Unfold(1, (n, 2), Split(2, (1, 1), Numbers(0, (1, 2)))))

        def both(p: Any, x: Any) -> Any:
            y = x @ p[name]
            return y[..., ::2], y[..., 1::2]
    elif form.startswith("joined"):
        names = [b.add("w", (b.width, n), Numbers(0, 1)) for _ in range(2)]

        def both(p: Any, x: Any) -> Any:
            own = [p[name] for name in names]
            if form == "joined":
                return jnp.split(x @ jnp.concatenate(own, 1), 2, -1)
            return [*jnp.einsum("bta,kac->kbtc", x, jnp.stack(own))]
    else:
        name = b.add("w", (2, b.width, n), Numbers(1, 2))

        def both(p: Any, x: Any) -> Any:
            y = jnp.einsum("bta,kac->kbtc", x, p[name])
            return y[0], y[1]

    down = b.dense(n, b.width)

    def apply(p: Any, x: Any) -> Any:
        gate, up = both(p, norm(p, x))
        return x + down(p, act(gate) * up)

    return apply


def rotary(x: Any) -> Any:
    dim = x.shape[-1]
    angle = jnp.arange(x.shape[1])[:, None] / 10 ** (jnp.arange(dim // 2) / dim)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def attention(b: Builder) -> Callable[[Any, Any], Any]:
    heads, dim = b.pick((2, 6), (4, 4), (6, 4))
    full = heads * dim
    norm = b.norm()
    form = b.pick("three", "to_heads", "split", "neox", "grouped", "axis")
    groups = heads
    if form == "three":
        q, k, v = (b.dense(b.width, full) for _ in "qkv")

        def qkv(p: Any, x: Any) -> Any:
            return [f(p, x).reshape(*x.shape[:2], heads, dim) for f in (q, k, v)]
    elif form == "to_heads":
        names = [b.add("w", (b.width, heads, dim), Numbers(0, (1, 2))) for _ in "qkv"]

        def qkv(p: Any, x: Any) -> Any:
            return [jnp.einsum("btd,dhk->bthk", x, p[name]) for name in names]
    elif form == "split":
        fused = b.dense(b.width, 3 * full, Split(1, (full,) * 3, Numbers(0, 1)))

        def qkv(p: Any, x: Any) -> Any:
            return [y.reshape(*x.shape[:2], heads, dim) for y in jnp.split(fused(p, x), 3, -1)]
    elif form == "neox":
        view = Unfold(1, (heads, 3 * dim), Split(2, (dim,) * 3, Numbers(0, (1, 2))))
        name = b.add("w", (b.width, 3 * full), view)

        def qkv(p: Any, x: Any) -> Any:
            return jnp.split((x @ p[name]).reshape(*x.shape[:2], heads, 3 * dim), 3, -1)
    elif form == "grouped":
        groups = b.pick(1, 2)
        q = b.dense(b.width, full)
        k, v = (b.dense(b.width, groups * dim) for _ in "kv")

        def qkv(p: Any, x: Any) -> Any:
            made = [(q, heads), (k, groups), (v, groups)]
            found = [f(p, x).reshape(*x.shape[:2], n, dim) for f, n in made]
            return [found[0], *(jnp.repeat(y, heads // groups, 2) for y in found[1:])]
    else:
        name = b.add("w", (b.width, 3, heads, dim), Split(1, (1, 1, 1), Numbers(0, (1, 2, 3))))

        def qkv(p: Any, x: Any) -> Any:
            return [*jnp.einsum("btd,dchk->cbthk", x, p[name])]

    turn = b.pick(rotary, rotary, lambda x: x)
    out_form = b.pick("dense", "heads")
    name_out = ""
    if out_form == "dense":
        out = b.dense(full, b.width)
    else:
        name_out = b.add("w", (heads, dim, b.width), Numbers((0, 1), 2))
        out = None
    library = b.pick(True, False)

    def apply(p: Any, x: Any) -> Any:
        q, k, v = qkv(p, norm(p, x))
        q, k = turn(q), turn(k)
        if library:
            y = jax.nn.dot_product_attention(q, k, v)
        else:
            scores = jnp.einsum("bthd,bshd->bhts", q, k) / dim**0.5
            y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        if out is None:
            return x + jnp.einsum("bthd,hdc->btc", y, p[name_out])
        return x + out(p, y.reshape(*x.shape[:2], full))

    return apply


def experts(b: Builder) -> Callable[[Any, Any], Any]:
    count, n = b.pick(3, 5), b.size()
    norm, act = b.norm(), activation(b)
    router = b.add("r", (b.width, count), None)
    up = b.add("w", (count, b.width, n), Numbers(1, 2))
    down = b.add("w", (count, n, b.width), Numbers(1, 2))
    form = b.pick("dense", "ragged", "gathered")
    b.forms.add(form)

    def apply(p: Any, x: Any) -> Any:
        y = norm(p, x)
        flat = y.reshape(-1, b.width)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(flat @ p[router]), 1 + (form != "gathered"))
        if form == "dense":
            gates = (jax.nn.one_hot(chosen, count) * weights[..., None]).sum(1)
            h = act(jnp.einsum("td,edf->tef", flat, p[up]))
            z = jnp.einsum("tef,efd,te->td", h, p[down], gates)
        elif form == "ragged":
            order = jnp.argsort(chosen.reshape(-1))
            sizes = jnp.bincount(chosen.reshape(-1), length=count)
            h = act(jax.lax.ragged_dot(jnp.repeat(flat, 2, 0)[order], p[up], sizes))
            z = jax.lax.ragged_dot(h, p[down], sizes)[jnp.argsort(order)]
            z = (z.reshape(-1, 2, b.width) * weights[..., None]).sum(1)
        else:
            h = act(jnp.einsum("td,tdf->tf", flat, p[up][chosen[:, 0]]))
            z = jnp.einsum("tf,tfd->td", h, p[down][chosen[:, 0]]) * weights
        return x + z.reshape(x.shape)

    return apply


def recurrent(b: Builder) -> Callable[[Any, Any], Any]:
    n = b.pick(7, 9, 11)
    form = b.pick("lstm", "simple")
    gates = 4 if form == "lstm" else 1
    view = Split(1, (n,) * 4, Numbers(0, 1)) if form == "lstm" else Numbers(0, 1)
    wx, wh = b.add("w", (b.width, gates * n), view), b.add("w", (n, gates * n), view)
    bias, out = b.add("b", (gates * n,), None), b.dense(n, b.width)

    def apply(p: Any, x: Any) -> Any:
        def step(carry: Any, now: Any) -> Any:
            h, c = carry
            z = now @ p[wx] + h @ p[wh] + p[bias]
            if form == "simple":
                return (jnp.tanh(z), c), jnp.tanh(z)
            i, f, g, o = jnp.split(z, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((x.shape[0], n))
        _, hs = jax.lax.scan(step, (zero, zero), x.astype(jnp.float32).swapaxes(0, 1))
        return x + out(p, hs.swapaxes(0, 1))

    return apply


def convolution(b: Builder) -> Callable[[Any, Any], Any]:
    layout = b.pick("WIO", "OIW", "IOW")
    form = b.pick("full", "depthwise", "grouped")
    groups = {"full": 1, "depthwise": b.width, "grouped": 4}[form]
    sizes = {"W": 3, "I": b.width // groups, "O": b.width}
    shape = tuple(sizes[axis] for axis in layout)
    w, i, o = (layout.index(axis) for axis in "WIO")
    if form == "depthwise":
        view = None
    elif form == "full":
        view = Numbers((w, i), o)
    else:
        after = [axis + (axis > o) for axis in (w, i)]
        view = Unfold(o, (4, b.width // 4), Numbers(tuple(after), o + 1))
    name, act = b.add("c", shape, view), activation(b)

    def apply(p: Any, x: Any) -> Any:
        x = x.astype(jnp.float32)
        numbers = ("NWC", layout, "NWC")
        y = jax.lax.conv_general_dilated(
            x, p[name], (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )
        return x + act(y)

    return apply


def adapted(b: Builder) -> Callable[[Any, Any], Any]:
    """A dense layer with a LoRA that is merged into its weight."""
    name = b.add("w", (b.width, b.width), Numbers(0, 1))
    left, right = b.add("l", (b.width, 2), None), b.add("l", (2, b.width), None)
    return lambda p, x: x + jnp.tanh(x @ (p[name] + 0.5 * p[left] @ p[right]))


def modulated(b: Builder) -> Callable[[Any, Any], Any]:
    """Scale and shift from the mean over time, as adaptive norms have."""
    n = b.width
    layer = b.dense(n, 2 * n, Split(1, (n, n), Numbers(0, 1)))
    out = b.dense(n, n)

    def apply(p: Any, x: Any) -> Any:
        scale, shift = jnp.split(layer(p, jax.nn.silu(x.mean(1))), 2, -1)
        return x + out(p, x * (1 + scale[:, None]) + shift[:, None])

    return apply


def latent_attention(b: Builder) -> Callable[[Any, Any], Any]:
    """MLA: queries, keys and values from latents; one rotary key for all heads."""
    heads, dim, turned, low = 4, 6, 4, 7
    norm = b.norm()
    q_a, q_b = b.add("w", (b.width, 9), Numbers(0, 1)), b.dense(9, heads * (dim + turned))
    kv_a = b.add("w", (b.width, low + turned), Split(1, (low, turned), Numbers(0, 1)))
    view = Unfold(1, (heads, 2 * dim), Split(2, (dim, dim), Numbers(0, (1, 2))))
    kv_b, out = b.add("w", (low, heads * 2 * dim), view), b.dense(heads * dim, b.width)

    def apply(p: Any, x: Any) -> Any:
        y = norm(p, x)
        q = q_b(p, jnp.tanh(y @ p[q_a])).reshape(*x.shape[:2], heads, dim + turned)
        q = jnp.concatenate([q[..., :dim], rotary(q[..., dim:])], -1)
        latent, k_turned = jnp.split(y @ p[kv_a], [low], -1)
        k, v = jnp.split((jnp.tanh(latent) @ p[kv_b]).reshape(*x.shape[:2], heads, -1), 2, -1)
        k_turned = jnp.broadcast_to(rotary(k_turned[:, :, None]), (*k.shape[:-1], turned))
        scores = jnp.einsum("bthd,bshd->bhts", q, jnp.concatenate([k, k_turned], -1))
        y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        return x + out(p, y.reshape(*x.shape[:2], -1))

    return apply


def grouped_gates(b: Builder) -> Callable[[Any, Any], Any]:
    """A GRU, scanned in either direction."""
    n, reverse = b.pick(7, 9, 11), b.pick(True, False)
    view = Split(1, (n,) * 3, Numbers(0, 1))
    wx, wh = b.add("w", (b.width, 3 * n), view), b.add("w", (n, 3 * n), view)
    out = b.dense(n, b.width)

    def apply(p: Any, x: Any) -> Any:
        def step(h: Any, now: Any) -> Any:
            (r, z, c), own = jnp.split(now, 3, -1), jnp.split(h @ p[wh], 3, -1)
            r, z = jax.nn.sigmoid(r + own[0]), jax.nn.sigmoid(z + own[1])
            h = (1 - z) * jnp.tanh(c + r * own[2]) + z * h
            return h, h

        inputs = (x.astype(jnp.float32) @ p[wx]).swapaxes(0, 1)
        _, hs = jax.lax.scan(step, jnp.zeros((x.shape[0], n)), inputs, reverse=reverse)
        return x + out(p, hs.swapaxes(0, 1))

    return apply


def capacity_experts(b: Builder) -> Callable[[Any, Any], Any]:
    """Tokens go to slots of their expert, as long as there are some."""
    count, capacity, n = b.pick(3, 5), 4, b.size()
    norm, act, router = b.norm(), activation(b), b.add("r", (b.width, count), None)
    up = b.add("w", (count, b.width, n), Numbers(1, 2))
    down = b.add("w", (count, n, b.width), Numbers(1, 2))

    def apply(p: Any, x: Any) -> Any:
        flat = norm(p, x).reshape(-1, b.width)
        weights = jax.nn.softmax(flat @ p[router])
        chosen = jax.nn.one_hot(jnp.argmax(weights, -1), count)
        place = (jnp.cumsum(chosen, 0) * chosen - 1).astype(int)
        dispatch = chosen[..., None] * jax.nn.one_hot(place, capacity)
        h = jnp.einsum("tec,td->ecd", dispatch, flat)
        h = act(jnp.einsum("ecd,edf->ecf", h, p[up]))
        z = jnp.einsum("ecf,efd->ecd", h, p[down])
        z = jnp.einsum("tec,ecd->td", dispatch * weights[..., None], z)
        return x + z.reshape(x.shape)

    return apply


def adapted_beside(b: Builder) -> Callable[[Any, Any], Any]:
    """A dense layer with a LoRA beside it."""
    layer = b.dense(b.width, b.width)
    left, right = b.add("l", (b.width, 2), None), b.add("l", (2, b.width), None)
    return lambda p, x: x + jnp.tanh(layer(p, x) + 0.5 * ((x @ p[left]) @ p[right]))


def transposed_convolution(b: Builder) -> Callable[[Any, Any], Any]:
    """Two times as many positions, of which every second stays."""
    swaps, act = b.pick(True, False), activation(b)
    view = Numbers((0, 2), 1) if swaps else Numbers((0, 1), 2)
    name = b.add("c", (3, b.width, b.width), view)

    def apply(p: Any, x: Any) -> Any:
        y = jax.lax.conv_transpose(
            x.astype(jnp.float32),
            p[name],
            (2,),
            "SAME",
            transpose_kernel=swaps,
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
        return x + act(y)[:, ::2]

    return apply


def in_kernel(b: Builder) -> Callable[[Any, Any], Any]:
    """An activation by a Pallas kernel between two dense layers."""
    n = b.size()
    up, down = b.dense(b.width, n), b.dense(n, b.width)
    b.forms.add("kernel")

    def kernel(x: Any, y: Any) -> None:
        y[...] = jnp.tanh(x[...])

    def apply(p: Any, x: Any) -> Any:
        y = up(p, x)
        return x + down(p, pl.pallas_call(kernel, jax.ShapeDtypeStruct(y.shape, y.dtype))(y))

    return apply


def ensemble(b: Builder) -> Callable[[Any, Any], Any]:
    """The mean of three equal layers, whose parameters are stacked along an axis."""
    inner = b.inside(is_vmapped=True)
    layer = b.pick(mlp, gated_mlp, attention, grouped_gates)(inner)
    axis_of = lambda x: b.pick(0, min(1, len(x.shape)))  # noqa: E731
    axes = {name: axis_of(x) for name, x in inner.params.items()}
    names = {}
    for name, x in inner.params.items():
        axis, view = axes[name], inner.expected[name]
        shape = (*x.shape[:axis], 3, *x.shape[axis:])
        names[name] = b.add("ensemble", shape, view and moved(view, axis))

    def apply(p: Any, x: Any) -> Any:
        own = {name: p[full] for name, full in names.items()}
        one = lambda w, x: layer(w, x).astype(jnp.float32)  # noqa: E731
        return jax.vmap(one, (axes, None))(own, x).mean(0)

    return apply


def branches(b: Builder) -> Callable[[Any, Any], Any]:
    """One of two layers, by a condition on the data."""
    b.forms.add("cond")
    one, other = (b.pick(mlp, gated_mlp, attention, recurrent)(b) for _ in range(2))

    def apply(p: Any, x: Any) -> Any:
        taken = [lambda layer=layer: layer(p, x).astype(jnp.float32) for layer in (one, other)]
        return jax.lax.cond(x.mean() > 0, *taken)

    return apply


def reordered(b: Builder) -> Callable[[Any, Any], Any]:
    """A layer on positions in another order."""
    layer, order = b.pick(mlp, attention, recurrent)(b), b.rng.permutation(TIME)
    by_data = b.pick(True, False)

    def apply(p: Any, x: Any) -> Any:
        if by_data:
            sorted_by = jnp.argsort(x.sum(-1), 1)[..., None]
            y = layer(p, jnp.take_along_axis(x, sorted_by, 1))
            return jnp.take_along_axis(y, jnp.argsort(sorted_by, 1), 1)
        y = layer(p, x[:, order])
        return jnp.take_along_axis(y, jnp.argsort(order)[None, :, None], 1)

    return apply


def scanned(b: Builder) -> Callable[[Any, Any], Any]:
    """Four equal layers, stacked along an axis and scanned, or taken by index in a loop."""
    inner = b.inside()
    kind = b.pick(mlp, gated_mlp, attention, experts, convolution)
    layer = kind(inner)
    form = b.pick("scan", "scan_axis_1", "loop", "remat", "nested", "while", "first")
    b.forms.add(form)
    names = {}
    for name, x in inner.params.items():
        axis = 1 if form == "scan_axis_1" and len(x.shape) > 1 else 0
        shape = (*x.shape[:axis], 4, *x.shape[axis:])
        view = inner.expected[name]
        names[name] = (b.add("stack", shape, view and moved(view, axis)), axis)

    def apply(p: Any, x: Any) -> Any:
        own = {name: jnp.moveaxis(p[full], axis, 0) for name, (full, axis) in names.items()}
        x = x.astype(jnp.float32)
        if form == "loop":

            def body(i: Any, x: Any) -> Any:
                return layer({name: w[i] for name, w in own.items()}, x).astype(jnp.float32)

            return jax.lax.fori_loop(0, 4, body, x)
        one = lambda x, w: (layer(w, x).astype(jnp.float32), None)  # noqa: E731
        if form == "while":

            def next_layer(state: Any) -> Any:
                i, x, own = state
                of_one = {k: jax.lax.dynamic_index_in_dim(w, i, 0, False) for k, w in own.items()}
                return i + 1, one(x, of_one)[0], own

            return jax.lax.while_loop(lambda s: s[0] < 4, next_layer, (0, x, own))[1]
        if form == "nested":
            pairs = {name: w.reshape(2, 2, *w.shape[1:]) for name, w in own.items()}
            inner_scan = jax.checkpoint(lambda x, w: jax.lax.scan(one, x, w))
            return jax.lax.scan(inner_scan, x, pairs)[0]
        if form == "first":
            x, _ = one(x, {name: w[0] for name, w in own.items()})
            own = {name: w[1:] for name, w in own.items()}
        return jax.lax.scan(jax.checkpoint(one) if form == "remat" else one, x, own)[0]

    b.layers.append(f"  of {inner.layers or kind.__name__}, {form}")
    return apply


def moved(view: Any, axis: int) -> Any:
    """The view of an array with one more axis before `axis`."""
    shift = lambda k: k + (k >= axis)  # noqa: E731
    if isinstance(view, Split):
        return Split(shift(view.axis), view.sizes, moved(view.view, axis))
    if isinstance(view, Unfold):
        inner = axis + (len(view.sizes) - 1) * (axis > view.axis)  # where it is once unfolded
        return Unfold(shift(view.axis), view.sizes, moved(view.view, inner))
    return jax.tree.map(shift, view)


LAYERS = (
    *(mlp, gated_mlp, attention, latent_attention, experts, capacity_experts),
    *(recurrent, grouped_gates, convolution, transposed_convolution, adapted, adapted_beside),
    *(modulated, in_kernel, ensemble, branches, reordered, scanned, scanned),
)


def random_model(
    seed: int,
) -> tuple[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any], list[str]]:
    """The function, the shapes of its parameters, its inputs, what is expected, and the layers."""
    rng = np.random.default_rng(seed)
    b = Builder(rng, int(rng.choice([12, 16, 20])))
    rows = 37
    kind = b.pick("embedding", "one_hot", "inputs")
    if kind == "inputs":
        name = b.add("w", (5, b.width), Numbers(0, 1))
        inputs: Any = jax.ShapeDtypeStruct((BATCH, TIME, 5), jnp.float32)
        start = lambda p, x: x @ p[name]  # noqa: E731
    else:
        name = b.add("e", (rows, b.width), None)
        inputs = jax.ShapeDtypeStruct((BATCH, TIME), jnp.int32)
        if kind == "embedding":
            start = lambda p, t: p[name][t]  # noqa: E731
        else:
            start = lambda p, t: jax.nn.one_hot(t, rows) @ p[name]  # noqa: E731
    b.layers.append(kind)
    position = b.add("p", (TIME, b.width), None) if b.pick(True, False) else None
    layers = []
    for _ in range(int(rng.integers(1, 5))):
        make = b.pick(*LAYERS)
        b.layers.append(make.__name__)
        layers.append(make(b))
    final = b.norm()
    is_tied = kind != "inputs" and b.pick(True, False)
    b.layers.append("tied" if is_tied else "head")
    head = None if is_tied else b.dense(b.width, rows, None)
    returns = b.pick("logits", "loss", "both")
    wraps = {
        "grad": {"while", "kernel"},
        "vmap": {"ragged"},
        "shard_map": {"shard_map", "sharded"},
    }
    wraps = [wrap for wrap, forms in wraps.items() if not forms & b.forms]
    wrap = b.pick("plain", "plain", "jit", *wraps)
    b.layers.append(wrap)

    def fn(p: Any, x: Any) -> Any:
        y = start(p, x)
        if position is not None:
            y = y + p[position]
        for layer in layers:
            y = layer(p, y)
        y = final(p, y)
        logits = y @ p[name].T if head is None else head(p, y)
        loss = (jax.nn.log_softmax(logits.astype(jnp.float32)) ** 2).mean()
        return {"logits": logits, "loss": loss, "both": (loss, logits)}[returns]

    if wrap == "jit":
        fn = jax.jit(fn)
    if wrap == "vmap":
        batched = fn
        fn = lambda p, x: jax.vmap(lambda one: batched(p, one[None]))(x)  # noqa: E731
    if wrap == "shard_map":
        rows_of = {"logits": P("d"), "loss": P(), "both": (P(), P("d"))}[returns]
        specs = {"in_specs": (P(), P("d")), "out_specs": rows_of}
        fn = jax.shard_map(fn, mesh=on_one_device().mesh, check_vma=False, **specs)
    if wrap == "grad" and returns == "loss":
        fn = jax.value_and_grad(fn)
    return fn, b.params, (inputs,), b.expected, b.layers


def matrices(shape: tuple[int, ...], view: Any) -> Any:
    """The matrices of a view as sets of rows and of columns, whatever their order."""
    if view is None:
        return None
    index = np.arange(int(np.prod(shape))).reshape(shape)
    found = []
    for stack in to_stacks(jnp.asarray(index), view):
        for matrix in np.asarray(stack):
            rows = frozenset(frozenset(row.tolist()) for row in matrix)
            cols = frozenset(frozenset(col.tolist()) for col in matrix.T)
            found.append(frozenset((rows, cols)))
    return frozenset(found)
