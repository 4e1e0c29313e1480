"""Trees of parameters: prefixes, paths, and None in the place of a leaf."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax


def broadcast(
    convert: Callable[[Any, Any], Any], prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]
) -> list[Any]:
    """Returns for each leaf of `tree` what stands at or above it in `prefix`.

    Args:
        convert: of what stands in `prefix`, from its path and itself.
        prefix: a prefix of `tree`, or a callable that makes one from it.
        tree: a tree in which None is no leaf.
        is_leaf: of the leaves of `prefix`.
    """
    found = []

    def find(path, value, subtree):
        found.extend([convert(path, value)] * len(jax.tree.leaves(subtree)))

    prefix = prefix(tree) if callable(prefix) else prefix
    jax.tree.map_with_path(find, prefix, tree, is_leaf=is_leaf)
    return found


@contextlib.contextmanager
def naming(name: str, shape: tuple[int, ...]) -> Iterator[None]:
    """A context in which errors come to name the parameter that they are about."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"the parameter {name} of shape {shape}: {error}") from error


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the names of a path joined by slashes, without the boxes of Flax."""
    name = jax.tree_util.keystr(unboxed(path), simple=True, separator="/")
    return name.removeprefix("params/")


def unboxed(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the path without the box that Flax may have around an array."""
    return path[:-1] if path and path[-1] == jax.tree_util.GetAttrKey("value") else path


def fill_missing(updates: optax.Updates, like: Any) -> optax.Updates:
    """Returns `updates` with zeros, as in the tree `like`, in the places of None."""
    return jax.tree.map(
        lambda g, p: optax.tree.zeros_like(p) if g is None else g,
        updates,
        like,
        is_leaf=lambda g: g is None,
    )


def any_missing(updates: optax.Updates) -> bool:
    """Returns whether there is None in the place of a gradient."""
    return any(g is None for g in jax.tree.leaves(updates, is_leaf=lambda g: g is None))
