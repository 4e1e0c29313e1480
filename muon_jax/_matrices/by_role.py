"""Which parameters are matrices, and of which axes, told by role: by path and shape."""

import functools
import inspect
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from optax.contrib import MuonDimensionNumbers

from muon_jax._checks import checks_arguments
from muon_jax._matrices.checks import Checks
from muon_jax._matrices.roles import (
    OTHER,
    UNKNOWN,
    Found,
    Layout,
    NamedShape,
    Shape,
    is_block,
    look_up,
)
from muon_jax._matrices.rules import (
    Groups,
    Route,
    Rules,
    Unknown,
    check_is_tree,
    checked_rules,
    code_of_rules,
    groups_of,
    listed,
)
from muon_jax._matrices.stacked_layers import Layers, layers_of
from muon_jax._matrices.views import Split, View, ViewTree
from muon_jax._trees import check_each_decides, check_params, first_match, has_masked, path_name


class _WithArguments(functools.partial):
    """`by_role` with its arguments but the parameters, which prints as the call that made it."""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.keywords.items())
        return f"by_role({given})"


_LATER: Any = inspect.Parameter.empty  # the optimizer passes the parameters


@checks_arguments
def by_role(
    params: Any = _LATER, rules: Rules | None = None, layout: Layout = "in_out"
) -> ViewTree:
    """Returns the view of each parameter by its name and shape; None leaves it to AdamW.

    This is a table of names that say what a parameter is for. It raises where a name does not:
    `by_use` reads roles off the model instead, whatever the names are. Pass the function itself to
    the optimizer, `muon(…, muon_weight_dimension_numbers=by_role)`, or with arguments but no
    `params`: `by_role(rules={…}, layout="out_in")` is a function of the parameters.

    -   AdamW has vectors, biases and norms, also those of stacked layers. A kernel with one input
        or output is a vector, and so is a convolution `(*window, in, 1)`.
    -   AdamW has embeddings, tables of positions, tokens, output heads, routers, smear gates,
        depthwise filters (and convolutions of one channel, which have their shape), adapters, and
        the factors of LoRA as Flax, Qwix and Haliax name them.
    -   A convolution `(*window, in, out)` is a matrix (window·in) × out.
    -   Projections of attention may have axes of heads, as in Flax: `(in, heads, dim)` is one
        matrix, and so is `(heads, dim, out)` beside it. `(in, 3, heads, dim)` is three matrices.
        Gemma's einsums of attention are matrices by their equations.
    -   `qkv` of width 3·in, `kv` and `gate_up` are split into equal parts, one matrix each.
    -   Experts `(experts, in, out)` are one matrix each.
    -   Other layers, such as `Dense_1` or `mlp/fc2`, are matrices in a numbered block, a stack, an
        attention, a feed-forward module or experts. Elsewhere they may be the output head: they
        raise. So does the first layer of an MLP if it is wider than what the second one takes.
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

    Raises:
        TypeError: `rules` is no dict of regular expressions.
        ValueError: the table does not know a parameter. The message has the rules to paste.
        ValueError: a parameter is in the order of the other layout. Biases, windows, the width of
            the embedding, and the widths of an MLP's `weight` show this.
        ValueError: a rule matches no path, or rules before it take all paths that it matches, in a
            tree without `optax.MaskedNode`.
        ValueError: `params` is a single array. `optax.inject_hyperparams` passes one, because it
            takes callables for schedules.
        ValueError: there is no such layout.
        TypeError: `params` has leaves that are no arrays, as modules of Equinox have.
    """
    rules = checked_rules(rules or {})  # a dict that the caller cannot change later
    if params is _LATER:
        given: dict[str, Any] = {"rules": rules} if rules else {}
        given |= {} if layout == "in_out" else {"layout": layout}
        return _WithArguments(by_role, **given)
    named, treedef = named_shapes(params), jax.tree.structure(params)
    check_is_tree("by_role", params)
    if named and not has_masked(params):
        check_each_decides("rules", rules, [name for name, _ in named])
    found = routes(named, rules, layout)
    if any(isinstance(route.view, Unknown) for route in found):
        raise ValueError(_message(found, rules, layout))
    return treedef.unflatten(route.view for route in found)


def _message(found: Sequence[Route], rules: Rules, layout: Layout) -> str:
    """The message of the error for parameters without a view: which, why, and what to pass."""
    unknown = [(route, route.view) for route in found if isinstance(route.view, Unknown)]
    is_layout = any(view.is_of_layout for _, view in unknown)
    known = [r.path for r in found if r.role != "unknown" and not first_match(rules, r.path)]
    groups = groups_of([r for r, view in unknown if view.is_of_layout == is_layout], known)

    def call(groups: Groups, layout: Layout) -> str:
        given = [f"layout={layout!r}"] * (layout != "in_out")
        given += [f"rules={code_of_rules(rules, groups)}"] * bool(rules or groups)
        return f"by_role({', '.join(given)})"

    if is_layout:
        order, what = OTHER[layout], f"layout={layout!r} does not fit"
        remedy = f"{call({}, order)} if all parameters have the other order"
    else:
        order, what = layout, "by_role does not know"
        remedy = "muon_weight_dimension_numbers=by_use(fn, params, *inputs), which reads the model"
    matrix = "MuonDimensionNumbers(-2, -1)" if order == "in_out" else "MuonDimensionNumbers(-1, -2)"
    return (
        f"{what} {listed(groups)}: pass {remedy}, or {call(groups, layout)}, with None for AdamW or"
        f" a view for Muon, such as {matrix} for matrices in the last two axes"
    )


def named_shapes(params: Any) -> list[NamedShape]:
    """Returns the path and the shape of each parameter.

    Raises:
        TypeError: a leaf is no array, no shape of one and no number.
    """
    check_params(params)
    leaves = jax.tree.leaves_with_path(params)
    return [(path_name(path), np.shape(leaf)) for path, leaf in leaves]


def routes(
    named: Sequence[NamedShape], rules: Rules | None, layout: Layout = "in_out"
) -> list[Route]:
    """Returns the route of each parameter, with an `Unknown` view where the table has none."""
    # PyTorch joins names by dots: `model.layers.0.mlp.up_proj.weight`.
    slashed = [(name.replace(".", "/").replace("-", "_"), shape) for name, shape in named]
    layers = layers_of(slashed, layout)  # parameters that rules claim count as well
    found = [
        _found(name.lower(), shape, own, layout)
        for (name, shape), own in zip(_without_root(slashed), layers, strict=True)
    ]
    checks = Checks(found, layout)

    def route(path: str, shape: Shape, one: Found) -> Route:
        rule = first_match(rules or {}, path)
        if rules and rule is not None:
            return Route(path, shape, f"rule {rule!r}", rules[rule])
        view = checks.checked(one)
        if isinstance(view, Unknown):
            return Route(path, shape, "unknown", view, view.reason)
        return Route(path, shape, one.role, view and _relabelled(view, one.axes))

    return [route(*leaf, one) for leaf, one in zip(named, found, strict=True)]


def _relabelled(view: View, axes: tuple[int, ...]) -> View:
    """The same view of an array that has axis i of the view at `axes[i]`, counted from the end.

    All parts of a `Split` have the same view.
    """
    if isinstance(view, Split):
        return Split(axes[view.axis], view.sizes, _relabelled(view.views[0], axes))
    assert isinstance(view, MuonDimensionNumbers)
    return MuonDimensionNumbers(
        *(axes[g] if isinstance(g, int) else tuple(sorted(axes[i] for i in g)) for g in view)
    )


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


def _found(name: str, shape: Shape, layers: Layers, layout: Layout) -> Found:
    """What the table of roles tells of a parameter, or its shape if it can only be a vector."""
    of_one, axes = layers.of_one(shape), layers.of_one(tuple(range(-len(shape), 0)))
    if len(shape) < 2:
        return Found(name, "vector", None, of_one, axes)
    if not layers.is_known:
        return Found(name, "unknown", UNKNOWN, shape, axes)
    found = look_up(name, of_one, axes, layout)._replace(is_stacked=layers.axes != ())
    is_vector, size = False, math.prod(found.shape)
    if isinstance(found.view, MuonDimensionNumbers):
        is_vector = 1 in [math.prod(np.take(found.shape, group, 0).flat) for group in found.view]
    elif isinstance(found.view, Unknown):  # each layer has a vector, or a kernel has one output
        has_one_output = len(found.shape) > 1 and found.shape[-1] == 1 and size == max(found.shape)
        is_one = len(shape) > 2 and math.prod(shape) == max(shape)
        is_vector = layers.is_vector or is_one or has_one_output
    return found._replace(role="vector", view=None) if is_vector else found
