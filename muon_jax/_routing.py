"""Routing: which parameters are matrices, and how, told by role: by path and shape."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from optax.contrib import MuonDimensionNumbers

from muon_jax._views import MATRICES, Split, View, ViewTree

type Rules = Mapping[str, View | None]


class Route(NamedTuple):
    """The role of a parameter, and what its matrices are; None leaves it to AdamW."""

    role: str
    view: View | None


def by_role(params: Any, rules: Rules | None = None) -> ViewTree:
    """Returns the views of all parameters, None for AdamW, by what each is for.

    To be passed on: `muon(…, muon_weight_dimension_numbers=by_role)`, with rules of one's own as
    `functools.partial(by_role, rules={…})`. A leaf is judged by its path and shape alone:

    -   AdamW has vectors, biases and norms (of stacked layers too), embeddings, tables of
        positions, tokens, output heads, routers, smear gates and depthwise filters, with them a
        convolution of one channel, which has their shape.
    -   A convolution `(*window, in, out)` is a matrix (window·in) × out.
    -   Projections of attention may have axes of heads, as in Flax: `(in, heads, dim)` and
        `(heads, dim, out)` are one matrix, `(in, 3, heads, dim)` is three.
    -   `qkv` of width 3·in, `kv` and `gate_up` are split into equal parts, one matrix each.
    -   Experts `(experts, in, out)` and stacks of layers, below a name such as `layers` with no
        number after it, where all have as many, are matrices each by itself.

    Args:
        params: parameters of Flax (linen, boxed or not, or nnx) or in any other tree; arrays, or
            shapes of them.
        rules: by regular expression, searched for in paths such as `"layers/0/mlp/up/kernel"`: a
            view, or None for AdamW. The first that matches decides, before all of the above.

    Raises:
        ValueError: nothing above claims a parameter, or not with its shape. Or `params` is a single
            array, as `optax.inject_hyperparams` passes: it takes callables for schedules.
    """
    leaves, treedef = jax.tree.flatten_with_path(params)
    if any(not path for path, _ in leaves):
        raise ValueError(
            f"by_role needs a tree of parameters, got one array of shape {leaves[0][1].shape}: to"
            " optax.inject_hyperparams pass static_args='muon_weight_dimension_numbers'"
        )
    named = [(path_name(path), leaf.shape) for path, leaf in leaves]
    found = routes(named, rules or {})
    unclaimed = [leaf for leaf, route in zip(named, found, strict=True) if route is None]
    if unclaimed:
        listed = ", ".join(f"{name} of shape {shape}" for name, shape in unclaimed)
        raise ValueError(
            f"no rule knows the role of {listed}: pass rules={{r'^{unclaimed[0][0]}$': None}} for"
            " AdamW, with a view in place of None for Muon, such as MuonDimensionNumbers(-2, -1),"
            " matrices in the last two axes"
        )
    return treedef.unflatten(route.view for route in found if route)


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the names of a path joined by slashes, without the boxes of Flax."""
    name = jax.tree_util.keystr(unboxed(path), simple=True, separator="/")
    return name.removeprefix("params/")


def unboxed(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the path without the box that Flax may have around an array."""
    return path[:-1] if path and path[-1] == jax.tree_util.GetAttrKey("value") else path


def routes(named: Sequence[tuple[str, tuple[int, ...]]], rules: Rules) -> list[Route | None]:
    """Returns the routes of all parameters `(name, shape)`, None where nothing tells one."""
    by_rule = [
        next((Route("rule", view) for rule, view in rules.items() if re.search(rule, name)), None)
        for name, _ in named
    ]
    others = [leaf for leaf, route in zip(named, by_rule, strict=True) if route is None]
    told = iter([_route(*leaf, axes) for leaf, axes in zip(others, _stacked(others), strict=True)])
    return [route or next(told) for route in by_rule]


def _route(name, shape, stacked):
    """The route of a parameter whose first `stacked` axes are layers, None of that: unknown."""
    if len(shape) < 2:
        return Route("vector", None)
    if stacked is None:
        return None
    name = re.sub(r"_\d+(?=/|$)", "", name.lower())  # numbers that Flax appends
    for role, pattern, view_of in _ROLES:
        if re.search(rf"(^|/)({pattern})(/|$)", name):
            view = view_of(shape[stacked:])
            return None if view is _UNKNOWN else Route(role, view)
    return None


def _stacked(named):
    """How many axes of each parameter are layers, None where it is not a stack as it should be.

    Below the container of a stack all parameters have as many layers. Where they have not, numbers
    in the names of what it contains say that it is none.
    """
    containers = [
        [name[: match.end()] for match in _STACK.finditer(name.lower())] for name, _ in named
    ]
    axes: list[int | None] = [0] * len(named)
    for depth in range(max(map(len, containers), default=0)):
        members = defaultdict(list)
        for i, names in enumerate(containers):
            if depth < len(names) and axes[i] is not None:
                members[names[depth]].append(i)
        for container, inside in members.items():
            sizes = {named[i][1][axes[i] :][:1] for i in inside}
            if len(sizes) == 1 and () not in sizes:
                change = 1
            elif all(re.match(r"/\w+_\d+/", named[i][0][len(container) :]) for i in inside):
                change = 0
            else:
                change = None
            for i in inside:
                axes[i] = None if change is None else axes[i] + change
    return axes


_UNKNOWN = Split(0, ())  # stands for a shape that the role does not have

_CONTAINER = r"(?:layers|blocks|stages|stack|h|\w*scan\w*)"
# A container that is not followed, after others, by the number of a layer: its layers are stacked.
_STACK = re.compile(rf"(?<![^/]){_CONTAINER}(?=/(?!(?:{_CONTAINER}/)*\d+(?:/|$)))")


def _adamw(shape):
    del shape
    return None


def _unknown(shape):
    del shape
    return _UNKNOWN


def _of_rank(**views: View) -> Callable[[tuple[int, ...]], View]:
    """Returns a function from shapes to views: `rank_2=…` for those of two axes, none of size 1."""
    return lambda shape: (
        _UNKNOWN if len(shape) == 2 and 1 in shape else views.get(f"rank_{len(shape)}", _UNKNOWN)
    )


def _split(parts: int, width_per_row: float | None = None):
    """Returns a function that splits the last axis of matrices, of that width, in equal parts."""

    def view(shape):
        if len(shape) != 2 or shape[1] % parts:
            return _UNKNOWN
        if width_per_row and shape[1] != width_per_row * shape[0]:
            return _UNKNOWN
        return Split(-1, (shape[1] // parts,) * parts)

    return view


def _fused_qkv(shape):
    """(in, 3·in) or (in, 3, heads, dim)."""
    if len(shape) == 4 and shape[1] == 3:
        return MuonDimensionNumbers(-4, (-2, -1))
    return _split(3, width_per_row=3)(shape)


def _fused_gate(shape):
    """(in, 2·out) or, of experts, (experts, in, 2·out)."""
    is_split = len(shape) == 2 or len(shape) == 3 and shape[1] > 2
    return _split(2)(shape[-2:]) if is_split else _UNKNOWN


def _gate(shape):
    """That of a perceptron is no narrower than its input; a router is."""
    return MATRICES if len(shape) == 2 and shape[0] <= shape[1] else _UNKNOWN


def _convolution(shape):
    rank = len(shape)
    if rank < 3:
        return _UNKNOWN
    if shape[-2] == 1 and shape[-1] > 1:
        return None  # a vector for each channel: depthwise, or of one channel
    return MuonDimensionNumbers(tuple(range(-rank, -1)), -1)


_LEAF = "kernel|weights?|w"
_INTO_HEADS = MuonDimensionNumbers(-3, (-2, -1))
_OUT_OF_HEADS = MuonDimensionNumbers((-3, -2), -1)

# At the end of a path, and there or one name before.
_LAST, _NEAR = "(?=$)", "(?=(/[^/]+)?$)"

# Role, regular expression of whole names in the path, and the view by the shape of one layer. The
# first that matches decides.
_ROLES: tuple[tuple[str, str, Callable[[tuple[int, ...]], View | None]], ...] = (
    (
        "bias",
        rf"(bias(es)?|\w*_bias){_NEAR}|(b[io]?\d*|b_(in|out|up|down|gate)|(?!\w*lora)\w+_b){_LAST}",
        _adamw,
    ),
    ("norm", rf"(\w*norm\w*|ln(_?\w)?|bn\d*|scale|gamma|beta){_NEAR}", _adamw),
    ("token", r"(cls|class|mask|register|dist\w*)_?tokens?|cls|registers?", _adamw),
    (
        "position",
        rf"(wpe|(abs_|rel(ative)?_)?pos(ition(?!_?wise)\w*)?(_?(emb\w*|enc\w*|table))?){_NEAR}",
        _adamw,
    ),
    (
        "embedding",
        r"wte|embedding|(?!patch)\w*embed(der|ding|dings|s)?(_(layer|table))?|(\w*_)?embs?"
        r"|embed_(?!patch)\w+",
        _adamw,
    ),
    (
        "head",
        r"(?!multi_?head)(\w+_)?head|classifier|\w*logits?\w*|\w*vocab\w*|predictions?|unembed\w*"
        r"|output_layer|readout",
        _adamw,
    ),
    ("router", rf"\w*router\w*|gating|\w*moe\w*/gate(/({_LEAF}))?", _adamw),
    ("gate", r"smear\w*", _adamw),
    ("adapter", r"lora\w*", _unknown),
    ("fused gate and up", r"\w*(gate_up|up_gate)(_\w+)?|w13", _fused_gate),
    ("experts", r"\w*experts?", _of_rank(rank_2=MATRICES, rank_3=MATRICES)),
    ("experts", r"\w*moe\w*", _of_rank(rank_3=MATRICES)),
    ("convolution", r"\w*conv\w*|patch\w*embed\w*/kernel", _convolution),
    # A hidden layer or the output head: only the place says that.
    (
        "unnamed",
        rf"^((model|decoder|transformer|net|network)/)?((dense|linear|fc|layer|out|output)"
        rf"(_out|_proj|_projection)?\d*|({_CONTAINER}/)*\d+)/({_LEAF})",
        _unknown,
    ),
    ("fused qkv", r"c_attn|\w*qkv\w*|kqv|query_key_value|in_proj", _fused_qkv),
    ("fused kv", r"(to_)?w?kv|kv_proj|\w*key_value", _split(2)),
    (
        "projection to heads",
        r"w?[qkv]|(q|k|v)_proj|query|key|value",
        _of_rank(rank_2=MATRICES, rank_3=_INTO_HEADS),
    ),
    (
        "projection from heads",
        r"out|wo|o|(o|out)_proj|attn_out",
        _of_rank(rank_2=MATRICES, rank_3=_OUT_OF_HEADS),
    ),
    ("gate", r"\w*gate|wg", _gate),
    (
        "matrix",
        rf".*/({_LEAF})|\w*proj|c_(fc|proj)|up|down|fc\w*|mlp\w*|w[io123]|w_\w+",
        _of_rank(rank_2=MATRICES),
    ),
)
