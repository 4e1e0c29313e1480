"""Optimizers for views that a callable makes of the whole tree of parameters."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from muon_jax._distributed.sharding import Shardings, whole_tree
from muon_jax._matrices.views import Views
from muon_jax._trees import is_function


def optimizer_by_tree(
    with_views: Callable[[Views], optax.GradientTransformation],
    views: Views,
    shardings: Shardings,
) -> Callable[[Any], optax.GradientTransformation]:
    """Returns a function from a tree to the optimizer for it.

    Views that are a callable are made from the whole tree. A new optimizer is made only where the
    views differ from the latest.
    """
    optimizer = with_views(views)
    if not is_function(views):
        return lambda tree: optimizer
    latest: tuple[Any, optax.GradientTransformation] = None, optimizer

    def of_tree(tree: Any) -> optax.GradientTransformation:
        nonlocal latest
        made = views(whole_tree(tree, shardings))
        key = jax.tree.flatten(made)
        known, found = latest
        if key != known:
            # A callable, because None as a tree would stand for matrices.
            found = with_views(lambda _: made)
            latest = key, found
        return found

    return of_tree
