"""Checks of trees of views, before anything is orthogonalized."""

from collections.abc import Mapping
from typing import Any

import jax

from muon_jax._matrices.matrix_values import values_per_matrix
from muon_jax._matrices.views import OF_PARTS, View, Views, as_view, is_view, views_of_leaves
from muon_jax._trees import errors_naming, is_function


def check_views(views: Views, argument: str = OF_PARTS) -> None:
    """Raises ValueError where a leaf of a tree of views is no view. A callable makes its later."""
    if not is_function(views):
        for path, node in jax.tree.leaves_with_path(views, is_leaf=is_view):
            as_view(argument, path, node)


def check_views_fit(views: Views, tree: Any) -> None:
    """Raises ValueError where a leaf of `tree` has a view that does not fit, or is no matrix."""
    leaves = jax.tree.leaves(tree)
    for leaf, (name, view) in zip(leaves, views_of_leaves(views, tree), strict=True):
        with errors_naming(name, leaf.shape):
            values_per_matrix(lambda rows, cols: 0.0, view, leaf.shape)


def check_rules(rules: Mapping[str, Any]) -> dict[str, View | None]:
    """Returns the rules, each with a view or None.

    Raises:
        ValueError: a rule has something else.
    """
    return {
        rule: as_view("rules", (jax.tree_util.DictKey(rule),), view) for rule, view in rules.items()
    }


def check_rule_fits(rule: str, view: View | None, path: str, shape: tuple[int, ...]) -> None:
    """Raises ValueError where the view of a rule does not fit the shape of a parameter."""
    if view is None:
        return
    try:
        values_per_matrix(lambda rows, cols: 0.0, view, shape)
    except ValueError as error:
        raise ValueError(
            f"rules[{rule!r}] does not fit {path} of shape {shape}: {error}"
        ) from error
