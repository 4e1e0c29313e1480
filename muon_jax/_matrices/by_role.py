"""Routing: which parameters are matrices, and how, told by role: by path and shape."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from muon_jax._matrices import roles as _roles
from muon_jax._matrices.roles import Route
from muon_jax._matrices.views import View, ViewTree
from muon_jax._trees import path_name

type Rules = Mapping[str, View | None]


def by_role(params: Any, rules: Rules | None = None) -> ViewTree:
    """Returns the views of all parameters, None for AdamW, by what each is for.

    To be passed on: `muon(…, muon_weight_dimension_numbers=by_role)`, with rules of one's own as
    `functools.partial(by_role, rules={…})`. A leaf is judged by its path and shape, and by those of
    the leaves beside it:

    -   AdamW has vectors, biases and norms (of stacked layers too), embeddings, tables of
        positions, tokens, output heads, routers, smear gates and depthwise filters, with them a
        convolution of one channel, which has their shape.
    -   A convolution `(*window, in, out)` is a matrix (window·in) × out.
    -   Projections of attention may have axes of heads, as in Flax: `(in, heads, dim)` and, beside
        it, `(heads, dim, out)` are one matrix, `(in, 3, heads, dim)` is three.
    -   `qkv` of width 3·in, `kv` and `gate_up` are split into equal parts, one matrix each.
    -   Experts `(experts, in, out)` and stacks of layers, below a name such as `layers` with no
        number after it, where all have as many, are matrices each by itself.

    Args:
        params: parameters of Flax (linen, boxed or not, or nnx) or in any other tree; arrays, or
            shapes of them.
        rules: by regular expression, searched for in paths such as `"layers/0/mlp/up/kernel"`: a
            view, or None for AdamW. The first that matches decides, before all of the above.

    Raises:
        ValueError: nothing above claims a parameter, or not with its shape. A rule matches no path,
            of a tree without `optax.MaskedNode`. Or `params` is a single array, as
            `optax.inject_hyperparams` passes: it takes callables for schedules.
    """
    leaves, treedef = jax.tree.flatten_with_path(params)
    if any(not path for path, _ in leaves):
        raise ValueError(
            f"by_role needs a tree of parameters, got one array of shape {leaves[0][1].shape}: to"
            " optax.inject_hyperparams pass static_args='muon_weight_dimension_numbers'"
        )
    named = [(path_name(path), leaf.shape) for path, leaf in leaves]
    rules = rules or {}
    idle = [rule for rule in rules if not any(re.search(rule, name) for name, _ in named)]
    if idle and named and not _has_masked(params):
        raise ValueError(
            f"the rules {idle} match none of the {len(named)} paths, such as {named[0][0]!r}:"
            " describe(params) prints all"
        )
    found = routes(named, rules)
    unclaimed = [leaf for leaf, route in zip(named, found, strict=True) if route is None]
    if unclaimed:
        listed = ", ".join(f"{name} of shape {shape}" for name, shape in unclaimed)
        raise ValueError(
            f"no rule knows the role of {listed}: pass rules={{r'^{re.escape(unclaimed[0][0])}$':"
            " None} for AdamW, with a view in place of None for Muon, such as"
            " MuonDimensionNumbers(-2, -1), matrices in the last two axes"
        )
    return treedef.unflatten(route.view for route in found if route)


def routes(named: Sequence[tuple[str, tuple[int, ...]]], rules: Rules) -> list[Route | None]:
    """Returns the routes of all parameters `(name, shape)`, None where nothing tells one."""
    by_rule = [
        next((Route("rule", view) for rule, view in rules.items() if re.search(rule, name)), None)
        for name, _ in named
    ]
    stacked, vectors = _stacked(named)  # by all leaves, claimed by rules or not
    told = _with_heads(named, stacked, [*map(_route, _without_root(named), stacked, vectors)])
    return [route or other for route, other in zip(by_rule, told, strict=True)]


def _has_masked(tree):
    """Whether other optimizers' leaves were taken out of the tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    return any(isinstance(leaf, optax.MaskedNode) for leaf in leaves)


def _without_root(named):
    """The parameters without the name of the one module that has all, numbered by Flax."""
    roots = {name.partition("/")[0] for name, _ in named}
    if len(named) > 1 and len(roots) == 1 and re.search(r"_\d+$", *roots):
        return [(name.partition("/")[2], shape) for name, shape in named]
    return named


def _route(leaf, stacked, is_vector):
    """The route of a parameter whose first `stacked` axes are layers, None of that: unknown."""
    name, shape = leaf
    vector = Route("vector", None)
    if len(shape) < 2:
        return vector
    if stacked is None:
        return None
    is_vector |= len(shape) > 2 and math.prod(shape[:-1]) == 1
    return _roles.route(name.lower(), shape[stacked:]) or (vector if is_vector else None)


def _with_heads(named, stacked, found):
    """The routes, without those that see axes of heads where nothing in the module confirms them.

    A projection to heads, (in, heads, dim), looks like a stack of layers of a name unknown. What
    takes its result tells them apart: (heads, dim, out), perhaps of other dim, or (heads·dim, out).
    """
    modules = defaultdict(list)
    for (name, shape), axes, route in zip(named, stacked, found, strict=True):
        if not axes and len(shape) > 1:
            modules[_module(name)].append((shape, route))
    confirmed = {}
    for module, members in modules.items():
        made = {shape[-2:] for shape, route in members if route == _roles.INTO_HEADS}
        taken = {shape[-3] for shape, route in members if route == _roles.OUT_OF_HEADS}
        taken |= {n for n, dim in made for shape, _ in members if shape[-2] == n * dim}
        confirmed[module] = taken & {n for n, _ in made}

    def check(leaf, axes, route):
        name, shape = leaf
        if axes or route not in (_roles.INTO_HEADS, _roles.OUT_OF_HEADS):
            return route
        heads = confirmed[_module(name)]
        return route if heads and (route == _roles.INTO_HEADS or shape[-3] in heads) else None

    return [*map(check, named, stacked, found)]


def _module(name):
    """The path of what a projection is in."""
    return re.sub(rf"(/[^/]+)?/({_roles.LEAF})$|/[^/]+$", "", name.lower())


def _stacked(named):
    """How many axes of each parameter are layers, None where it is not a stack as it should be.

    And whether it is a vector of each layer, in a stack that has matrices of each.

    Below the container of a stack all parameters have as many layers. Where they have not, numbers
    in the names of what it contains say that it is none. What all have in common may also be the
    window of convolutions, or, of matrices with such numbers, the size of a layer.
    """
    containers = [
        [name[: match.end()] for match in _STACK.finditer(name.lower())] for name, _ in named
    ]
    axes: list[int | None] = [0] * len(named)
    vectors = [False] * len(named)
    for depth in range(max(map(len, containers), default=0)):
        members = defaultdict(list)
        for i, names in enumerate(containers):
            if depth < len(names) and axes[i] is not None:
                members[names[depth]].append(i)
        for container, inside in members.items():
            shapes = [named[i][1][axes[i] :] for i in inside]
            numbered = all(re.match(r"/\w+_\d+/", named[i][0][len(container) :]) for i in inside)
            sizes = {shape[:1] for shape in shapes}
            windows = all(len(shape) > 3 and shape[0] == shape[1] for shape in shapes)
            layers = len(sizes) == 1 and () not in sizes and not windows
            if layers and not (numbered and max(map(len, shapes)) < 3):
                change = 1
            else:
                change = 0 if numbered else None
            for i, shape in zip(inside, shapes, strict=True):
                axes[i] = None if change is None else axes[i] + change
                vectors[i] = change == 1 and len(shape) == 2 < max(map(len, shapes))
    return axes, vectors


# A container that is not followed, after others, by the number of a layer: its layers are stacked.
_STACK = re.compile(rf"(?<![^/]){_roles.CONTAINER}(?=/(?!(?:{_roles.CONTAINER}/)*\d+(?:/|$)))")
