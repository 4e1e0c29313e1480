"""Which parameters are matrices, and of which axes, told by role: by path and shape."""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from optax.contrib import MuonDimensionNumbers

from muon_jax._checks import checks_arguments
from muon_jax._matrices.evidence import without_contradictions
from muon_jax._matrices.heads import without_unconfirmed_heads
from muon_jax._matrices.layouts import Layout, Shape, relabelled
from muon_jax._matrices.neighbours import told_by_neighbours, without_possible_heads
from muon_jax._matrices.per_head import NO_WIDTH, with_matrix_per_head
from muon_jax._matrices.roles import Found, NamedShape, is_block, look_up
from muon_jax._matrices.shapes import ALTERNATING, UNKNOWN, Unknown
from muon_jax._matrices.stacked_layers import Layers, layers_of
from muon_jax._matrices.unknown_roles import (
    VIEWS_OF_LAYOUT,
    UnknownParameter,
    call_of_by_role,
    groups_of_unknown,
    listed,
)
from muon_jax._matrices.view_checks import check_rules
from muon_jax._matrices.views import Split, Unfold, View, ViewTree
from muon_jax._tree_checks import check_params
from muon_jax._trees import check_patterns_decide, has_masked, path_name

type Rules = Mapping[str, View | None]


class Route(NamedTuple):
    """The role of a parameter and its view; the view None leaves it to AdamW."""

    role: str
    view: View | None | Unknown


# The view of `query_key_value` where its heads alternate, by the axes that are (in, out).
_ALTERNATING: dict[tuple[int, ...], str] = {
    (-2, -1): "Unfold(-1, (heads, 3, -1), MuonDimensionNumbers(-4, (-3, -1)))",
    (-1, -2): "Unfold(-2, (heads, 3, -1), MuonDimensionNumbers(-1, (-4, -2)))",
}


class _WithArguments(functools.partial):
    """`by_role` with its arguments but the parameters, which prints as the call that made it."""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.keywords.items())
        return f"by_role({given})"


_LATER: Any = inspect.Parameter.empty  # the optimizer passes the parameters
_DEFAULTS = (None, "in_out", False)


@checks_arguments
def by_role(
    params: Any = _LATER,
    rules: Rules | None = None,
    layout: Layout = "in_out",
    per_head: bool = False,
    head_dim: int | None = None,
) -> ViewTree:
    """Returns the view of each parameter by what it is for; None leaves it to AdamW.

    Pass the function itself to the optimizer: `muon(…, muon_weight_dimension_numbers=by_role)`.
    With arguments but no `params` it returns a function of the parameters, which has these
    arguments: `muon(…, muon_weight_dimension_numbers=by_role(rules={…}, layout="out_in"))`. The
    path and the shape of a parameter, and those of the parameters beside it, tell what it is for:

    -   AdamW has vectors, biases and norms, also those of stacked layers. A kernel with one output
        is a vector, and so is a convolution `(*window, in, 1)`.
    -   AdamW has embeddings, tables of positions, tokens, output heads of one layer, routers, smear
        gates and depthwise filters. It also has a convolution of one channel, which has the shape
        of a depthwise filter.
    -   AdamW has adapters and the factors of LoRA, as Flax, Qwix and Haliax name them.
    -   A convolution `(*window, in, out)` is a matrix (window·in) × out.
    -   Projections of attention may have axes of heads, as in Flax. `(in, heads, dim)` is one
        matrix, and so is `(heads, dim, out)` beside it. `(in, 3, heads, dim)` is three matrices.
        Gemma's einsums are matrices by their equations.
    -   `qkv` of width 3·in, `kv` and `gate_up` are split into equal parts, one matrix each.
    -   Experts `(experts, in, out)` are one matrix each.
    -   A layer in a numbered block, a stack, an attention, a feed-forward module or experts is
        hidden. Elsewhere the output head may have any name: `Dense_2`, `hidden_2`, `w3`, `conv_out`
        and `mlp/w2` may be the last layer. Such a layer is a matrix where the next one, or an
        output head, takes its result. Otherwise it raises.
    -   Stacked layers are one matrix each. A stack is below a name such as `layers` that no number
        follows, and all its parameters have as many layers along their first axis. Layers may be
        along axis 1, where biases or norms of shape (width, layers) show this. Norms also show
        layers below names such as `moe_layers`, and several axes of layers.

    Args:
        params: parameters of Flax (linen, boxed or not, or nnx) or in any other tree; arrays, or
            shapes of them. Without them, the result is a function that takes them.
        rules: a view, or None for AdamW, for each regular expression. Expressions are searched for
            in paths such as `"layers/0/mlp/up/kernel"`. The first that matches decides, before all
            of the above.
        layout: the order of axes.

            -   `"in_out"`: Flax has this order, and so have the shapes above.
            -   `"out_in"`: Equinox, Haliax, PyTorch and `FlaxConv1D` have it. The shapes are
                `(out, in)`, `(out, in, *window)`, `(experts, out, in)`, `(heads, dim, in)` and
                `(out, heads, dim)`.
        per_head: whether each head of a projection to heads is a matrix, (in, dim), with a scale of
            its own. These are q, k and v, fused or not, and the up-projections of latent attention.
            Output projections stay whole.
        head_dim: with `per_head`, the width of a head where nothing in `params` tells. An axis of
            heads tells, a norm of q of that width, and in latent attention the shapes together. A
            norm of q must agree with `head_dim`.

    Raises:
        TypeError: `rules` is no dict of regular expressions.
        ValueError: nothing above knows a parameter of that path and shape.
        ValueError: a parameter is in the order of the other layout. Biases, windows, the width of
            the embedding, and the widths of an MLP's `weight` show this.
        ValueError: a rule matches no path, or rules before it take all paths that it matches, in a
            tree without `optax.MaskedNode`.
        ValueError: `per_head` finds no projection to heads, in such a tree, or nothing tells the
            heads of one.
        ValueError: `head_dim` is given without `per_head`; a norm of q tells another width; or no
            parameter uses `head_dim`, in such a tree.
        ValueError: `params` is a single array. `optax.inject_hyperparams` passes one, because it
            takes callables for schedules.
        ValueError: there is no such layout.
        TypeError: `params` has leaves that are no arrays, as modules of Equinox have.
    """
    if head_dim is not None and not per_head:
        raise ValueError(f"head_dim={head_dim} needs per_head=True: pass both, or neither")
    rules = rules and check_rules(rules)  # a dict that the caller cannot change later
    if params is _LATER:
        given = {"rules": rules, "layout": layout, "per_head": per_head, "head_dim": head_dim}
        given = {name: value for name, value in given.items() if value not in _DEFAULTS}
        return _WithArguments(by_role, **given)
    named, treedef = named_shapes(params), jax.tree.structure(params)
    if named and jax.tree_util.treedef_is_leaf(treedef):
        raise ValueError(
            f"by_role needs a tree of parameters, got one array of shape {named[0][1]}: pass"
            " static_args='muon_weight_dimension_numbers' to optax.inject_hyperparams"
        )
    head_dim = None if head_dim is None else int(head_dim)  # 128.0 is an integer, too
    rules = rules or {}
    idle = [rule for rule in rules if not any(re.search(rule, name) for name, _ in named)]
    if named and not has_masked(params):
        if idle:
            raise ValueError(
                f"the rules {idle} match none of the {len(named)} paths, such as {named[0][0]!r}:"
                " describe(params) prints all paths"
            )
        check_patterns_decide("rules", rules, [name for name, _ in named])
    found = routes(named, rules, layout, per_head, head_dim)
    unknown = [
        UnknownParameter(name, shape, route.view)
        for (name, shape), route in zip(named, found, strict=True)
        if isinstance(route.view, Unknown)
    ]
    known = [
        name
        for (name, _), route in zip(named, found, strict=True)
        if not isinstance(route.view, Unknown) and not any(re.search(rule, name) for rule in rules)
    ]

    def views_by_path(**arguments: Any) -> dict[str, View | None | Unknown]:
        others = routes(named, rules, **arguments)
        return {name: route.view for (name, _), route in zip(named, others, strict=True)}

    call = functools.partial(call_of_by_role, rules)
    heads: dict[str, Any] = {"per_head": per_head, "head_dim": head_dim}
    if contradicting := [leaf for leaf in unknown if leaf.unknown.is_of_layout]:
        other: Layout = "out_in" if layout == "in_out" else "in_out"
        views = views_by_path(layout=other)
        contradicting = [leaf.with_view(views[leaf.name]) for leaf in contradicting]
        groups = groups_of_unknown(contradicting, known)
        raise ValueError(
            f"layout={layout!r} does not fit {listed(groups)}: pass"
            f" {call([], layout=other, **heads)} if all parameters have that order, or"
            f" {call(groups, layout=layout, **heads)} if these alone have"
        )
    if of_heads := [leaf for leaf in unknown if leaf.unknown.is_of_heads]:
        views = views_by_path(layout=layout, per_head=True)
        told = [leaf for leaf in of_heads if not isinstance(views[leaf.name], Unknown)]
        if groups := groups_of_unknown([leaf.with_view(views[leaf.name]) for leaf in told], known):
            raise ValueError(
                f"head_dim={head_dim} does not fit {listed(groups)}: pass"
                f" {call([], layout=layout, per_head=True)} if norms tell all heads, or"
                f" {call(groups, layout=layout, **heads)} if others have {head_dim} columns a head"
            )
        groups = groups_of_unknown(of_heads, known)
        stated = call([], layout=layout, per_head=True, head_dim=128)
        needs_width = all(leaf.unknown.reason == NO_WIDTH for leaf in of_heads)
        raise ValueError(
            f"per_head=True needs the heads of {listed(groups)}: pass"
            f" {f'{stated} for heads of 128 columns, or ' * needs_width}"
            f"{call(groups, layout=layout, **heads)} to leave these whole"
        )
    if unknown:
        groups = groups_of_unknown(unknown, known)
        raise ValueError(
            f"no rule knows the role of {listed(groups)}: pass"
            f" {call(groups, layout=layout, **heads)}, with None for AdamW or a view for Muon."
            f" {VIEWS_OF_LAYOUT[layout]}"
        )
    if per_head and found == routes(named, rules, layout) and named and not has_masked(params):
        raise ValueError(
            f"per_head=True finds no projection to heads among the {len(named)} parameters, such as"
            f" {named[0][0]!r}: leave per_head out, or give rules for these projections"
        )
    is_used = head_dim is None or found != routes(named, rules, layout, per_head, head_dim + 1)
    if not is_used and named and not has_masked(params):
        raise ValueError(
            f"head_dim={head_dim} is used by none of the {len(named)} parameters, such as"
            f" {named[0][0]!r}: pass {call([], layout=layout, per_head=True)}, because"
            " shapes or rules tell all heads"
        )
    return treedef.unflatten(route.view for route in found)


def named_shapes(params: Any) -> list[NamedShape]:
    """Returns the path and the shape of each parameter.

    Raises:
        TypeError: a leaf is no array, no shape of one and no number.
    """
    check_params(params)
    leaves = jax.tree.leaves_with_path(params)
    return [(path_name(path), np.shape(leaf)) for path, leaf in leaves]


def routes(
    named: Sequence[NamedShape],
    rules: Rules | None,
    layout: Layout = "in_out",
    per_head: bool = False,
    head_dim: int | None = None,
) -> list[Route]:
    """Returns the route of each parameter, with an `Unknown` view where nothing tells it."""
    # PyTorch joins names by dots: `model.layers.0.mlp.up_proj.weight`.
    slashed = [(name.replace(".", "/").replace("-", "_"), shape) for name, shape in named]
    layers = layers_of(slashed, layout)  # parameters that rules claim count as well
    below_root = _without_root(slashed)
    names = [name.lower() for name, _ in below_root]
    found = [
        _found(name, shape, of_parameter, layout)
        for name, (_, shape), of_parameter in zip(names, named, layers, strict=True)
    ]
    found = without_unconfirmed_heads(names, layers, found)
    found = told_by_neighbours(names, found)
    found = without_contradictions(below_root, layers, found, layout)
    found = without_possible_heads(names, layers, found)
    if per_head:
        found = with_matrix_per_head(names, found, head_dim)
    by_rule = [_route_by_rule(name, rules or {}) for name, _ in named]
    return [claimed or _route(of_one) for claimed, of_one in zip(by_rule, found, strict=True)]


def _without_root(named: Sequence[NamedShape]) -> Sequence[NamedShape]:
    """The parameters without the first name of their paths, if one module has them all.

    Flax numbers that module, as in `ResNet_0`. Its name says nothing about a place in the network.
    """
    roots = {name.partition("/")[0] for name, _ in named}
    (root, *others) = roots or {""}
    is_module = re.search(r"_\d+$", root) and not is_block(root)  # a class has a capital
    if len(named) > 1 and not others and is_module:
        return [(name.partition("/")[2], shape) for name, shape in named]
    return named


def _route_by_rule(name: str, rules: Rules) -> Route | None:
    """The route that the first matching rule gives to a parameter."""
    return next(
        (Route(f"rule {rule!r}", view) for rule, view in rules.items() if re.search(rule, name)),
        None,
    )


def _found(name: str, shape: Shape, layers: Layers, layout: Layout) -> Found:
    """What the table of roles tells of a parameter, or its shape if it can only be a vector."""
    axes = tuple(range(-len(shape), 0))
    if len(shape) < 2:
        return Found("vector", None, shape, axes)
    if not layers.is_known:
        return Found("unknown", UNKNOWN, shape, axes)
    of_one = look_up(name, layers.of_one(shape), layers.of_one(axes), layout)
    if isinstance(of_one.view, MuonDimensionNumbers):
        is_vector = 1 in (_size(of_one.shape, group) for group in of_one.view)
        return Found("vector", None, of_one.shape, of_one.axes) if is_vector else of_one
    if not isinstance(of_one.view, Unknown):
        return of_one
    # Each layer has a vector, or a kernel has one output.
    rank, size = len(of_one.shape), math.prod(of_one.shape)
    is_vector = layers.is_vector or len(shape) > 2 and math.prod(shape[:-1]) == 1
    if is_vector or rank > 1 and of_one.shape[-1] == 1 and size == max(of_one.shape):
        return Found("vector", None, of_one.shape, of_one.axes)
    return of_one


def _size(shape: Shape, axes: int | Sequence[int]) -> int:
    """The number of rows, or of columns, that these axes have."""
    return math.prod(shape[axis] for axis in ([axes] if isinstance(axes, int) else axes))


def _route(of_one: Found) -> Route:
    """The route of a parameter, with its view of all layers and in the parameter's own order."""
    role, view, _, axes = of_one
    if isinstance(view, MuonDimensionNumbers | Split | Unfold):
        return Route(role, relabelled(view, axes))
    if view == ALTERNATING:
        view = dataclasses.replace(ALTERNATING, proposal=_ALTERNATING.get(axes, "None"))
    return Route("unknown" if isinstance(view, Unknown) else role, view)
