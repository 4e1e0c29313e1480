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
from muon_jax._by_use.roles import MUON, Roles, Routed
from muon_jax._by_use.trace import check_fn, traced
from muon_jax._checks import checks_arguments
from muon_jax._matrices.rules import (
    Group,
    Rules,
    Undecided,
    check_rule_fits,
    check_rules,
    checked_rules,
    code_of_rules,
    code_of_view,
    deciding_rule,
    groups_of,
    listed,
)
from muon_jax._matrices.views import MATRICES, ViewTree
from muon_jax._table import table
from muon_jax._trees import OF_MODULES_IN_FN, check_params, dtype_of, path_name


@dataclasses.dataclass(frozen=True)
class Routes:
    """The view of each parameter, and why: what `by_use` returns.

    It is data alone, and can be pickled. Pass it as `muon_weight_dimension_numbers`. Printed, it is
    a table with the reasons, with one row for parameters that are alike, and a call of `by_role` to
    paste that gives the same views without the model. Iterating gives the paths.

    Attributes:
        parameters: what is known of each: path, shape, role, view and reason.
    """

    parameters: tuple[Routed, ...]

    def __call__(self, params: Any) -> ViewTree:
        """Returns the views in a tree like `params`; None leaves a parameter to AdamW.

        Raises:
            ValueError: `by_use` saw no parameter of that path, or saw it with another rank.
        """
        if jax.tree_util.all_leaves([params]) and [*self] != [""]:
            raise ValueError(
                f"routes need a tree of parameters, got one array of shape {np.shape(params)}: pass"
                " static_args='muon_weight_dimension_numbers' to optax.inject_hyperparams"
            )
        by_path = {routed.path: routed for routed in self.parameters}

        def view_of(path: tuple[Any, ...], leaf: Any) -> Any:
            routed = by_path.get(path_name(path))
            if routed is None or np.ndim(leaf) != len(routed.shape):
                raise ValueError(
                    f"by_use saw no parameter {path_name(path)!r} of shape {np.shape(leaf)}:"
                    " call by_use again with these parameters"
                )
            return routed.view

        return jax.tree.map_with_path(view_of, params)

    def __iter__(self) -> Iterator[str]:
        """The paths of the parameters, as of a dict."""
        return (routed.path for routed in self.parameters)

    def __getitem__(self, path: str) -> Routed:
        """Returns what is known of the parameter with this path."""
        for routed in self.parameters:
            if routed.path == path:
                return routed
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
        of_muon = [
            Undecided(r.path, r.shape, proposal=code_of_view(r.view))
            for r in self.parameters
            if r.view is not None
        ]
        others = [r.path for r in self.parameters if r.view is None]
        groups = groups_of(of_muon, others)
        groups += [Group(".*", [Undecided(".*", ())])] * bool(others)
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
            in a loss, as an actor its critic, the actor's output head looks like a hidden layer:
            call `by_use` with each network's own forward pass.
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
            before data do, or its outputs feed another network or a constant matrix, such as a
            frozen parameter that `params` lacks. The message says what was seen, and has the rule
            to paste.
        ValueError: a rule decides for no parameter, or has no view, or one that does not fit.
        ValueError: `fn` returns nothing, two parameters have one path, or `per_head` finds no
            heads.
    """
    check_fn(fn)
    check_params(params, "by_use(fn, params, *inputs)", OF_MODULES_IN_FN)
    rules = checked_rules(rules or {})
    flat = jax.tree.leaves_with_path(params)
    named = [(path_name(path), np.shape(x)) for path, x in flat]
    paths, shapes = [path for path, _ in named], [shape for _, shape in named]
    if twice := [path for path, n in Counter(paths).items() if n > 1]:
        raise ValueError(
            f"two parameters have the path {twice[0]!r}, by which rules and routes tell them apart:"
            " rename one of them"
        )
    closed = traced(fn, params, inputs)
    follower = Follower(captures_are_data=not inputs)
    args = [Value(frozenset([whole(i, shape)]), is_weight=True) for i, shape in enumerate(shapes)]
    args += [Value(is_data=True)] * (len(closed.jaxpr.invars) - len(named))
    outputs = follower.run(closed, args)
    roles = Roles(follower, outputs, paths, shapes)
    found = [roles.route(i, per_head) for i in range(len(named))]
    found = [
        routed
        if jnp.issubdtype(dtype_of(x), jnp.inexact)
        else routed._replace(role="unused", view=None)
        for routed, (_, x) in zip(found, flat, strict=True)
    ]
    found = _ruled(found, rules)
    unclear = [Undecided(r.path, r.shape, r.reason) for r in found if r.role == "unclear"]
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
            f"per_head=True finds no projection to heads among the {len(named)} parameters: leave"
            " per_head out, or give rules for these projections"
        )
    return Routes(tuple(found))


def _ruled(found: Sequence[Routed], rules: Rules) -> list[Routed]:
    """The routes, of which those that a rule matches are decided by the first such rule."""
    check_rules(rules, [routed.path for routed in found])

    def ruled(routed: Routed) -> Routed:
        rule = deciding_rule(rules, routed.path)
        if rule is None:
            return routed
        check_rule_fits(rule, rules[rule], routed.path, routed.shape)
        reason = f"the rule {rule!r} matches; without it: {routed.role}"
        return routed._replace(role="rule", view=rules[rule], reason=reason)

    return [*map(ruled, found)]


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
