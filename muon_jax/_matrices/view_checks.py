"""Checks of trees of views, before anything is orthogonalized."""

from typing import Any

import jax

from muon_jax._matrices.parts import values_per_matrix
from muon_jax._matrices.views import OF_PARTS, Views, as_view, is_view, views_of_leaves
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
