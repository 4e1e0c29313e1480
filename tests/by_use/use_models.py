"""Models with what `by_use` should find in them, and the pieces they share."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from muon_jax import Split, Unfold

MODELS: dict[str, Callable[[], "Model"]] = {}
REAL_SIZE: set[str] = set()
IN_OUT, OUT_IN = MuonDimensionNumbers(0, 1), MuonDimensionNumbers(1, 0)
CONV = MuonDimensionNumbers((0, 1, 2), 3)  # (height, width, in, out)
KEY = jax.eval_shape(lambda: jax.random.key(0))


class Model(NamedTuple):
    """A function, its parameters and inputs, and the answer.

    `expected` has for each regular expression of paths a role, and a view where Muon has it; None
    is any role that AdamW has, and "unclear" what `by_use` asks for. Each parameter of two axes or
    more is matched by one, of which the first decides. Without a dictionary `by_use` raises.
    """

    fn: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...]
    expected: dict[str, Any] | None
    per_head: bool = False


def model(make: Callable[[], tuple[Any, ...]]) -> Callable[[], Model]:
    MODELS[make.__name__] = made = lambda: Model(*make())
    return made


def real_size(make: Callable[[], tuple[Any, ...]]) -> Callable[[], Model]:
    REAL_SIZE.add(make.__name__)
    return model(make)


def hidden(view: Any = IN_OUT) -> tuple[str, Any]:
    return "hidden", view


def first(view: Any = IN_OUT) -> tuple[str, Any]:
    return "input", view


def differences(routed: Any, expected: dict[str, Any]) -> list[str]:
    """What of the parameters found differs from what is expected."""
    found, used = [], set()
    for r in routed:
        pattern = next((p for p in expected if re.search(p, r.path)), None)
        if pattern is None:
            if len(r.shape) > 1:
                found.append(f"{r.path} {r.shape}: {r.role} {r.view}, and nothing is expected")
            continue
        used.add(pattern)
        if len(r.shape) < 2:  # a vector, whatever its neighbors are
            found += [f"{r.path}: {r.view}"] * (r.view is not None)
            continue
        wanted = expected[pattern]
        if wanted is None:
            found += [f"{r.path}: {r.role} {r.view}, not AdamW's"] * (r.view is not None)
            continue
        if isinstance(wanted, str):
            default = {2: IN_OUT, 4: CONV}.get(len(r.shape)) if wanted == "input" else None
            wanted = (wanted, default)
        if (r.role, r.view) != wanted:
            found.append(f"{r.path} {r.shape}: {r.role} {r.view} ({r.reason}), not {wanted}")
    return found + [f"no parameter matches {p}" for p in expected if p not in used]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def linen(module: Any, *inputs: Any, finish: Any = lambda x: x, **kwargs: Any) -> tuple[Any, ...]:
    """A Linen module's function, the shapes of its parameters, and its inputs.

    Collections that are no parameters come before the inputs.
    """
    keys = {"params": KEY, "dropout": KEY}
    variables = jax.eval_shape(lambda k, *x: module.init(k, *x, **kwargs), keys, *inputs)
    params = variables.pop("params")
    mutable = [*variables]

    def fn(params: Any, variables: Any, key: Any, *x: Any) -> Any:
        args = ({"params": params, **variables}, *x)
        rngs = {"dropout": key}
        if mutable:
            y, state = module.apply(*args, rngs=rngs, mutable=mutable, **kwargs)
            return finish(y), state
        return finish(module.apply(*args, rngs=rngs, **kwargs))

    return fn, params, (variables, KEY, *inputs)


def nnx_module(make: Callable[..., Any], *inputs: Any, call: Any = None) -> tuple[Any, ...]:
    """The same of an NNX module."""
    from flax import nnx

    graph, params, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)

    def fn(params: Any, rest: Any, *x: Any) -> Any:
        module = nnx.merge(graph, params, rest)
        return call(module, *x) if call else module(*x)

    return fn, params, (rest, *inputs)


def equinox(make: Callable[..., Any], *inputs: Any, call: Any = None) -> tuple[Any, ...]:
    """The same of an Equinox module, whose arrays are all parameters."""
    import equinox as eqx

    module = eqx.filter_eval_shape(make, jax.random.key(0))
    params, static = eqx.partition(module, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def fn(params: Any, *x: Any) -> Any:
        module = eqx.combine(params, static)
        return call(module, *x) if call else jax.vmap(module)(*x)

    return fn, params, inputs


def haiku(function: Callable[..., Any], *inputs: Any) -> tuple[Any, ...]:
    """The same of a function that Haiku transforms, with state."""
    import haiku as hk

    transformed = hk.transform_with_state(function)
    params, state = jax.eval_shape(transformed.init, KEY, *inputs)
    return transformed.apply, params, (state, KEY, *inputs)


def norm(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def heads(x: Any, n: int) -> Any:
    return x.reshape(*x.shape[:-1], n, -1)


def merged(x: Any) -> Any:
    return x.reshape(*x.shape[:-2], -1)


def attention(q: Any, k: Any, v: Any, bias: Any = 0.0) -> Any:
    """Of (batch, position, head, dim)."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1]) + bias
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def rope(x: Any, interleaved: bool = False) -> Any:
    t, d = x.shape[1], x.shape[-1]
    angles = jnp.arange(t)[:, None] / 10 ** (jnp.arange(d // 2) / d)
    c, s = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return jnp.stack([a * c - b * s, b * c + a * s], -1).reshape(x.shape)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def conv(x: Any, w: Any, stride: int = 1, groups: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def halves(axis: int, n: int, view: Any = IN_OUT) -> Split:
    return Split(axis, (n, n), view)


def interleaved(axis: int, n: int, k: int, view: Any) -> Unfold:
    """The view of n groups of k entries that are a part each; `view` has one more axis."""
    return Unfold(axis, (n, k), Split(axis + 1, (1,) * k, view))
