"""`by_use`: which parameters are matrices, read off the model."""

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax._by_use.follow import Follower, Value
from muon_jax._by_use.pieces import whole
from muon_jax._by_use.roles import MUON, Roles
from muon_jax._checks import checks_arguments
from muon_jax._matrices.rules import (
    Route,
    Rules,
    check_is_tree,
    checked_rules,
    code_of_rules,
    code_of_view,
    groups_of,
    listed,
)
from muon_jax._matrices.views import MATRICES, ViewTree, parts_of
from muon_jax._table import table
from muon_jax._trees import (
    OF_MODULES_IN_FN,
    any_missing,
    check_each_decides,
    check_params,
    dtype_of,
    first_match,
    is_array,
    path_name,
)
from pallas_kernels.arguments import shown


@dataclasses.dataclass(frozen=True)
class Routes:
    """The view of each parameter, and why: what `by_use` returns.

    It is data alone, and can be pickled. Pass it as `muon_weight_dimension_numbers`. Printed, it is
    a table with the reasons, with one row for parameters that are alike, and a call of `by_role` to
    paste that gives the same views without the model. Iterating gives the paths.

    Attributes:
        parameters: what is known of each: path, shape, role, view and reason.
    """

    parameters: tuple[Route, ...]

    def __call__(self, params: Any) -> ViewTree:
        """Returns the views in a tree like `params`; None leaves a parameter to AdamW.

        Raises:
            ValueError: `by_use` saw no parameter of that path, or saw it with another rank.
        """
        if [*self] != [""]:
            check_is_tree("Routes", params)
        by_path = {route.path: route for route in self.parameters}

        def view_of(path: tuple[Any, ...], leaf: Any) -> Any:
            route = by_path.get(path_name(path))
            if route is None or np.ndim(leaf) != len(route.shape):
                raise ValueError(
                    f"by_use saw no parameter {path_name(path)!r} of shape {np.shape(leaf)}:"
                    " call by_use again with these parameters"
                )
            return route.view

        return jax.tree.map_with_path(view_of, params)

    def __iter__(self) -> Iterator[str]:
        """The paths of the parameters, as of a dict."""
        return (route.path for route in self.parameters)

    def __getitem__(self, path: str) -> Route:
        """Returns what is known of the parameter with this path."""
        for route in self.parameters:
            if route.path == path:
                return route
        raise KeyError(path)

    def __str__(self) -> str:
        """The table, with one row for parameters that are alike, and the code."""
        heading = ("path", "shape", "role", "view", "reason")
        alike = defaultdict(list)
        for r in self.parameters:
            words = re.sub(r"\d+", "0", r.path)
            key = words.rpartition("/")[2] if len(r.shape) < 2 else words
            row = ("×".join(map(str, r.shape)), r.role, code_of_view(r.view), r.reason)
            alike[key, row].append(r.path)
        rows = [(_in_one(paths), *row) for (_, row), paths in alike.items()]
        of_muon = [r._replace(reason="") for r in self.parameters if r.view is not None]
        others = [r.path for r in self.parameters if r.view is None]
        groups = groups_of(of_muon, others)
        if others:
            groups[".*"] = [Route(".*", (), "", None)]
        return f"{table(heading, rows)}\n\nby_role(rules={code_of_rules({}, groups)})"


@checks_arguments
def by_use(
    fn: Callable[..., Any],
    params: Any,
    *inputs: Any,
    rules: Rules | None = None,
    per_head: bool = False,
) -> Routes:
    """Returns the view of each parameter by what the model does with it.

    `fn(params, *inputs)` is traced once, as by `jax.make_jaxpr`: nothing runs, and shapes
    (`jax.ShapeDtypeStruct`) do. Each parameter is followed through reshapes, transposes, casts,
    loops, branches, `vmap`, `shard_map` and derivatives to the products that take it. They say
    which axes are contracted and which are kept, whatever the parameter is called:

        routes = by_use(loss, params, batch)
        optimizer = muon(0.02, muon_weight_dimension_numbers=routes)

    | role      | what the model does                                               | who has it |
    | --------- | ----------------------------------------------------------------- | ---------- |
    | hidden    | contracts some axes and keeps others                              | Muon       |
    | input     | the same, with the inputs of the model                            | Muon       |
    | output    | no product with a parameter follows on the way to the outputs     | AdamW      |
    | embedding | looks rows up, by index or by a one-hot encoding; tied or not     | AdamW      |
    | router    | its outputs choose experts or a category; a softmax counts if it  | AdamW      |
    |           | weighs experts                                                    |            |
    | factor    | multiplies it with another parameter, or has only linear          | AdamW      |
    |           | operations to a product that raises the rank again, as in LoRA    |            |
    | depthwise | convolves with filters of one input each                          | AdamW      |
    | latents   | uses it in place of an activation, like learned queries           | AdamW      |
    | vector    | uses it entry by entry, or it has one input or one output         | AdamW      |
    | unused    | it has no effect on the outputs, or holds integers                | AdamW      |

    Axes that a product batches, such as experts, stacked layers or ensembles, hold a matrix for
    each index. Where later products take parts of the outputs, as of fused q, k and v, of gate and
    up or of the gates of an LSTM, each part is a matrix of its own.

    Args:
        fn: a loss or a forward pass. It may return several arrays. Where one network feeds another
            in a loss, as an actor its critic, pass a function that runs both forward passes on
            inputs of their own: the critic gets an action as an input.
        params: all parameters, also those that you freeze, a tree of arrays or of their shapes.
        *inputs: the other arguments of `fn`, arrays or shapes; bind others by `functools.partial`.
        rules: a view, or None for AdamW, for each regular expression. Expressions are searched for
            in paths such as `"layers/0/mlp/up/kernel"`. The first that matches decides.
        per_head: whether each head of a projection to heads is a matrix of its own. Products of two
            activations show the heads.

    Raises:
        TypeError: `fn` is no function, `params`, inputs or what `fn` returns have leaves that are
            no arrays, `fn` needs the value of an input, or `rules` is no dict of regular
            expressions.
        ValueError: it is not clear what a parameter is: products use it in different ways, a kernel
            takes it whose inside cannot be seen (`pallas_call`, a custom call), `lax.map` runs over
            its columns, data multiply it entry by entry before a product, its product with data is
            itself used as weights (a hypernetwork, a mixture of kernels), a constant multiplies it
            before data do, its outputs feed another network or a constant matrix, such as a frozen
            parameter that `params` lacks, or `fn` uses only derivatives of outputs, as in training
            on forces alone. The message says what was seen, and has the rule to paste.
        ValueError: a rule decides for no parameter, or has no view, or one that does not fit.
        ValueError: `fn` returns nothing, two parameters have one path, or `per_head` finds no
            heads.
    """
    if not callable(fn):
        raise TypeError(
            f"fn must be a loss or a forward pass, got {_short(fn)}: call by_use(fn, params,"
            " *inputs)"
        )
    check_params(params, "by_use(fn, params, *inputs)", OF_MODULES_IN_FN)
    rules = checked_rules(rules or {})
    flat = jax.tree.leaves_with_path(params)
    paths, shapes = [path_name(path) for path, _ in flat], [np.shape(x) for _, x in flat]
    if twice := [path for path, n in Counter(paths).items() if n > 1]:
        raise ValueError(
            f"two parameters have the path {twice[0]!r}, by which rules and routes tell them apart:"
            " rename one of them"
        )
    closed = _traced(fn, params, inputs)
    follower = Follower(captures_are_data=not inputs)
    args = [Value(frozenset([whole(i, shape)]), is_weight=True) for i, shape in enumerate(shapes)]
    args += [Value(is_data=True)] * (len(closed.jaxpr.invars) - len(paths))
    roles = Roles(follower, follower.run(closed, args), paths, shapes)
    check_each_decides("rules", rules, paths)
    found = []
    for i, (_, x) in enumerate(flat):
        route = roles.route(i, per_head)
        if not jnp.issubdtype(dtype_of(x), jnp.inexact):
            route = route._replace(role="unused", view=None)
        found.append(_ruled(route, rules))
    unclear = [route for route in found if route.role == "unclear"]
    if unclear:
        known = [r.path for r in found if r.role not in ("unclear", "rule")]
        groups = groups_of(unclear, known)
        raise ValueError(
            f"by_use cannot decide on {listed(groups)}: pass"
            f" rules={code_of_rules(rules, groups)}, with None for AdamW or a view for Muon,"
            f" such as {code_of_view(MATRICES)} for matrices in the last two axes"
        )
    if per_head and not any("heads" in r.reason for r in found if r.role in MUON):
        raise ValueError(
            f"per_head=True finds no projection to heads among the {len(paths)} parameters: leave"
            " per_head out, or give rules for these projections"
        )
    return Routes(tuple(found))


def _traced(fn: Callable[..., Any], params: Any, inputs: Sequence[Any]) -> Any:
    """Returns the closed jaxpr of `fn(params, *inputs)`.

    Raises:
        TypeError: an input, or what `fn` returns, is no array; or `fn` needs the value of an input.
        ValueError: `fn` returns nothing.
    """
    named = [
        (f"inputs{jax.tree_util.keystr(path)}", leaf)
        for path, leaf in jax.tree.leaves_with_path(inputs)
    ]
    for name, leaf in named:
        if not _is_traceable(leaf):
            raise TypeError(
                f"{name} must be an array or the shape of one, got {_short(leaf)}: bind it to fn,"
                " as in by_use(functools.partial(fn, mode='train'), params, x)"
            )

    def with_checked_outputs(params: Any, *inputs: Any) -> Any:
        outputs = fn(params, *inputs)
        for path, leaf in jax.tree.leaves_with_path(outputs):
            if not _is_traceable(leaf):
                raise TypeError(
                    f"fn must return arrays alone, got {_short(leaf)} at"
                    f" {jax.tree_util.keystr(path) or 'the root'}: return the loss or the outputs"
                )
        if not jax.tree.leaves(outputs):
            raise ValueError(
                f"fn must return what it computes of params, got {outputs!r}: return the loss or"
                " the outputs"
            )
        return outputs

    try:
        return jax.make_jaxpr(with_checked_outputs)(params, *inputs)
    except Exception as error:
        # JAX names the arguments whose values a program asks for.
        is_asked = isinstance(error, TypeError) and "concrete" in str(error).lower()
        for name, leaf in named:
            if is_asked and name in str(error) and np.ndim(leaf) == 0:
                raise TypeError(
                    f"fn needs the value of {name}, got {_short(leaf)}, and a trace has shapes"
                    " alone: bind it to fn, as in by_use(functools.partial(fn, train=True), params,"
                    " x)"
                ) from error
        if type(error).__name__ == "TraceContextError":
            error.add_note(f"by_use: state that fn changes must be an input: {OF_MODULES_IN_FN[1]}")
        elif "'NoneType' object is not callable" in str(error) and any_missing(params):
            error.add_note(
                "by_use: params has None where a module of Equinox has functions:"
                f" {OF_MODULES_IN_FN[0]}"
            )
        raise


def _is_traceable(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, bool | np.bool_)


def _short(value: Any) -> str:
    """A value as errors show it, a tree by its type."""
    is_tree = not jax.tree_util.all_leaves([value])
    return f"a {type(value).__name__}" if is_tree and value is not None else shown(value)


def _ruled(route: Route, rules: Rules) -> Route:
    """The route, decided by the first rule that matches its path, if one does."""
    rule = first_match(rules, route.path)
    if rule is None:
        return route
    view = rules[rule]
    try:
        if view is not None:
            parts_of(view, route.shape)
    except ValueError as error:
        raise ValueError(
            f"rules[{rule!r}] does not fit {route.path} of shape {route.shape}: {error}"
        ) from error
    reason = f"the rule {rule!r} matches; without it: {route.role}"
    return route._replace(role="rule", view=view, reason=reason)


def _in_one(paths: Sequence[str]) -> str:
    """Paths as one: `layers/{0..11}/up`, or `*/bias (5)` where more than numbers differ."""
    if len({re.sub(r"\d+", "0", path) for path in paths}) > 1:
        first, *others = {path.rpartition("/")[2] for path in paths}
        return f"*/{re.sub(r'\d+', '*', first) if others else first} ({len(paths)})"
    words = (re.split(r"(\d+)", path) for path in paths)
    columns = [[*dict.fromkeys(column)] for column in zip(*words, strict=True)]
    if math.prod(map(len, columns)) != len(paths):
        return f"{''.join(c[0] if len(c) == 1 else '*' for c in columns)} ({len(paths)})"
    return "".join(c[0] if len(c) == 1 else f"{{{_range(c)}}}" for c in columns)


def _range(numbers: Sequence[str]) -> str:
    """The numbers, by the first and the last where all between are there."""
    first, *_, last = ordered = sorted(numbers, key=int)
    is_run = [*map(int, ordered)] == [*range(int(first), int(last) + 1)]
    return f"{first}..{last}" if is_run else ",".join(ordered)
