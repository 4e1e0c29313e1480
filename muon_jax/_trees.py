"""Trees of parameters: their paths, prefixes of them, and leaves that are missing."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import jax
import optax

from muon_jax._tree_checks import check_prefix

# The last key of a path to an array in a box: Flax' `value`, and the only child of Haliax'.
_BOXES = (jax.tree_util.GetAttrKey("value"), jax.tree_util.FlattenedIndexKey(0))


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the names of a path joined by slashes, without the boxes of Flax and Haliax."""
    name = jax.tree_util.keystr(unboxed(path), simple=True, separator="/")
    return name.removeprefix("params/")


def unboxed(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the path without the box that Flax, or Haliax, may have around an array."""
    return path[:-1] if path and path[-1] in _BOXES else path


def is_box(node: Any) -> bool:
    """Returns whether `node` is a box of Flax around an array.

    Boxes are linen's, such as `Partitioned`, and the variables of nnx. They may hold the names of
    the mesh axes that each axis of the array is sharded over.
    """
    return hasattr(node, "replace") and (hasattr(node, "names") or hasattr(node, "get_metadata"))


@contextlib.contextmanager
def errors_naming(name: str, shape: tuple[int, ...]) -> Iterator[None]:
    """A context whose errors begin with the name and the shape of a parameter."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"the parameter {name} of shape {shape}: {error}") from error


def is_function(node: Any) -> TypeGuard[Callable[[Any], Any]]:
    """Returns whether `node` is a callable that makes a tree, and no tree that can be called.

    A tree in the shape of an Equinox module is a module, which may have `__call__`.
    """
    return callable(node) and jax.tree_util.all_leaves([node])


def broadcast_prefix[Node, Found](
    argument: str,
    convert: Callable[[tuple[Any, ...], Node], Found],
    prefix: Any,
    tree: Any,
    is_leaf: Callable[[Any], bool],
) -> list[Found]:
    """Returns `convert(path, node)` for each leaf of `tree`.

    `node` is the leaf of `prefix` that is at the leaf's place in `tree` or above it, and `path` is
    the path of `node`.

    Args:
        argument: the name of `prefix`, for errors.
        convert: called once for each leaf of `prefix`.
        prefix: a prefix of `tree`, or a callable that makes one from `tree`.
        tree: a tree in which None is no leaf. A tree without leaves has any prefix, because
            `optax.tree.map_params` passes a node of its own in the place of the parameters.
        is_leaf: whether a node is a leaf of `prefix`.

    Raises:
        ValueError: `prefix` is no prefix of `tree`.
    """
    if not jax.tree.leaves(tree):
        return []
    found = []

    def find(path: tuple[Any, ...], node: Node, subtree: Any) -> None:
        found.extend([convert(path, node)] * len(jax.tree.leaves(subtree)))

    prefix = prefix(tree) if is_function(prefix) else prefix
    check_prefix(argument, prefix, tree, is_leaf)
    jax.tree.map_with_path(find, prefix, tree, is_leaf=is_leaf)
    return found


def is_missing(node: Any) -> bool:
    """Returns whether a node of a tree of gradients is None, for a parameter without gradient."""
    return node is None


def any_missing(updates: optax.Updates) -> bool:
    """Returns whether there is None in the place of a gradient."""
    return any(map(is_missing, jax.tree.leaves(updates, is_leaf=is_missing)))


def fill_missing(updates: optax.Updates, values: Any) -> optax.Updates:
    """Returns `updates` with what `values` has in the places of None."""
    return jax.tree.map(lambda g, v: v if g is None else g, updates, values, is_leaf=is_missing)


def has_masked(tree: Any) -> bool:
    """Returns whether leaves of other optimizers were taken out of the tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    return any(isinstance(leaf, optax.MaskedNode) for leaf in leaves)
