"""Which parameters are matrices, and of which axes, told by role: by path and shape."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from muon_jax._checks import checks_arguments
from muon_jax._matrices.roles import (
    FROM_HEADS,
    LEAF,
    TO_HEADS,
    NamedShape,
    Route,
    Shape,
    look_up_route,
)
from muon_jax._matrices.stacked_layers import Layers, layers_of
from muon_jax._matrices.views import View, ViewTree
from muon_jax._trees import path_name

type Rules = Mapping[str, View | None]

_VECTOR = Route("vector", None)


@checks_arguments
def by_role(params: Any, rules: Rules | None = None) -> ViewTree:
    """Returns the view of each parameter by what it is for; None leaves it to AdamW.

    Pass the function itself to the optimizer: `muon(…, muon_weight_dimension_numbers=by_role)`. To
    add rules of your own, pass `functools.partial(by_role, rules={…})`. The path and the shape of a
    parameter, and those of the parameters beside it, tell what it is for:

    -   AdamW has vectors, biases and norms, also those of stacked layers.
    -   AdamW has embeddings, tables of positions, tokens, output heads, routers, smear gates and
        depthwise filters. It also has a convolution of one channel, which has the shape of a
        depthwise filter.
    -   A convolution `(*window, in, out)` is a matrix (window·in) × out.
    -   Projections of attention may have axes of heads, as in Flax. `(in, heads, dim)` is one
        matrix, and so is `(heads, dim, out)` beside it. `(in, 3, heads, dim)` is three matrices.
    -   `qkv` of width 3·in, `kv` and `gate_up` are split into equal parts, one matrix each.
    -   Experts `(experts, in, out)` are one matrix each.
    -   Stacked layers are one matrix each. A stack is below a name such as `layers` that no number
        follows, and all its parameters have as many layers along their first axis.

    Args:
        params: parameters of Flax (linen, boxed or not, or nnx) or in any other tree; arrays, or
            shapes of them.
        rules: a view, or None for AdamW, for each regular expression. Expressions are searched for
            in paths such as `"layers/0/mlp/up/kernel"`. The first that matches decides, before all
            of the above.

    Raises:
        TypeError: `rules` is no dict of regular expressions.
        ValueError: nothing above knows a parameter of that path and shape.
        ValueError: a rule matches no path, in a tree without `optax.MaskedNode`.
        ValueError: `params` is a single array. `optax.inject_hyperparams` passes one, because it
            takes callables for schedules.
    """
    leaves, treedef = jax.tree.flatten_with_path(params)
    if any(not path for path, _ in leaves):
        raise ValueError(
            f"by_role needs a tree of parameters, got one array of shape {leaves[0][1].shape}: pass"
            " static_args='muon_weight_dimension_numbers' to optax.inject_hyperparams"
        )
    named = [(path_name(path), leaf.shape) for path, leaf in leaves]
    rules = rules or {}
    idle = [rule for rule in rules if not any(re.search(rule, name) for name, _ in named)]
    if idle and named and not _has_masked(params):
        raise ValueError(
            f"the rules {idle} match none of the {len(named)} paths, such as {named[0][0]!r}:"
            " describe(params) prints all paths"
        )
    found = routes(named, rules)
    unknown = [leaf for leaf, route in zip(named, found, strict=True) if route is None]
    if unknown:
        listed = ", ".join(f"{name} of shape {shape}" for name, shape in unknown)
        raise ValueError(
            f"no rule knows the role of {listed}: pass functools.partial(by_role,"
            f" rules={{r'^{re.escape(unknown[0][0])}$': None}}) for AdamW, or a view in place of"
            " None for Muon. MuonDimensionNumbers(-2, -1) views matrices in the last two axes,"
            " MuonDimensionNumbers((0, 1, 2), 3) a convolution (height, width, in, out)"
        )
    return treedef.unflatten(route.view for route in found if route)


def routes(named: Sequence[NamedShape], rules: Rules) -> list[Route | None]:
    """Returns the route of each parameter, None where nothing tells it."""
    layers = layers_of(named)  # parameters that rules claim count as well
    by_table = [*map(_route_by_table, _without_root(named), layers)]
    confirmed = _without_unconfirmed_heads(named, layers, by_table)
    by_rule = [_route_by_rule(name, rules) for name, _ in named]
    return [claimed or found for claimed, found in zip(by_rule, confirmed, strict=True)]


def _has_masked(tree: Any) -> bool:
    """Whether the leaves of other optimizers were taken out of the tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    return any(isinstance(leaf, optax.MaskedNode) for leaf in leaves)


def _without_root(named: Sequence[NamedShape]) -> Sequence[NamedShape]:
    """The parameters without the first name of their paths, if one module has them all.

    Flax numbers that module, as in `ResNet_0`. Its name says nothing about a place in the network.
    """
    roots = {name.partition("/")[0] for name, _ in named}
    if len(named) > 1 and len(roots) == 1 and re.search(r"_\d+$", next(iter(roots))):
        return [(name.partition("/")[2], shape) for name, shape in named]
    return named


def _route_by_rule(name: str, rules: Rules) -> Route | None:
    """The route that the first matching rule gives to a parameter."""
    return next(
        (Route("rule", view) for rule, view in rules.items() if re.search(rule, name)), None
    )


def _route_by_table(leaf: NamedShape, layers: Layers) -> Route | None:
    """The route of a parameter by the table of roles, or by shape if it can only be a vector."""
    name, shape = leaf
    if len(shape) < 2:
        return _VECTOR
    if not layers.is_known:
        return None
    is_vector = layers.is_vector or len(shape) > 2 and math.prod(shape[:-1]) == 1
    route = look_up_route(name.lower(), layers.shape_of_one(shape))
    return route or (_VECTOR if is_vector else None)


def _without_unconfirmed_heads(
    named: Sequence[NamedShape], layers: Sequence[Layers], found: Sequence[Route | None]
) -> list[Route | None]:
    """The routes, with None for those that see axes of heads where nothing confirms the axes.

    A projection to heads, `(in, heads, dim)`, looks like a stack of layers below an unknown name.
    What takes its result tells one from the other: see `_confirmed_heads`.
    """
    modules = defaultdict(list)
    for (name, shape), of_leaf, route in zip(named, layers, found, strict=True):
        if of_leaf.axes == 0 and len(shape) > 1:
            modules[_module(name)].append((shape, route))
    confirmed = {module: _confirmed_heads(members) for module, members in modules.items()}

    def is_confirmed(leaf: NamedShape, of_leaf: Layers, route: Route | None) -> bool:
        name, shape = leaf
        if of_leaf.axes > 0 or route not in (TO_HEADS, FROM_HEADS):
            return True
        heads = confirmed[_module(name)]
        return bool(heads) if route == TO_HEADS else shape[-3] in heads

    return [
        route if is_confirmed(leaf, of_leaf, route) else None
        for leaf, of_leaf, route in zip(named, layers, found, strict=True)
    ]


def _confirmed_heads(members: Sequence[tuple[Shape, Route | None]]) -> set[int]:
    """The numbers of heads that one parameter of a module makes and another one takes.

    `(in, heads, dim)` makes heads. `(heads, dim, out)`, perhaps with another dim, takes them; so
    does `(heads·dim, out)`.
    """
    made = {shape[-2:] for shape, route in members if route == TO_HEADS}
    taken = {shape[-3] for shape, route in members if route == FROM_HEADS}
    merged = {heads for heads, dim in made for shape, _ in members if shape[-2] == heads * dim}
    return {heads for heads, _ in made} & (taken | merged)


def _module(name: str) -> str:
    """The path of the module that a projection is in."""
    return re.sub(rf"(/[^/]+)?/({LEAF})$|/[^/]+$", "", name.lower())
