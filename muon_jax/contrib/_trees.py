"""Leaves of parameter trees that are not plain arrays: boxes, shapes and placeholders."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muon_jax._trees import is_box


def in_box_of(node: Any, x: jax.Array, axes: Sequence[int | None]) -> Any:
    """Returns `x` in a box like `node`, or `x` itself if `node` is not a box.

    The mesh axes that a parameter's box names do not fit an array of another shape.

    Args:
        node: a box around a parameter, or a parameter.
        x: the array for the new box.
        axes: for each axis of `x`, the axis of the parameter whose name it takes; None for no name.
    """
    if not is_box(node):
        return x

    def names_of_x(names: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(None if i is None or i >= len(names) else names[i] for i in axes)

    if hasattr(node, "get_metadata"):
        metadata = node.get_metadata()
        keys = (key for key in ("out_sharding", "optimizer_sharding") if metadata.get(key))
        return node.replace(x, **{key: names_of_x(metadata[key]) for key in keys})
    return node.replace(value=x, names=names_of_x(node.names))


def with_arrays(params: Any) -> Any:
    """Returns `params` with zeros for shapes (`jax.ShapeDtypeStruct`)."""

    def zeros(p: Any) -> Any:
        return jnp.zeros_like(p) if isinstance(p, jax.ShapeDtypeStruct) else p

    return jax.tree.map(zeros, params)


def is_placeholder(params: Any) -> bool:
    """Returns whether `params` is the placeholder that `optax.tree.map_params` passes.

    The placeholder is a node of one of optax's classes, without children.
    """
    is_container = params is None or isinstance(params, dict | list | tuple)
    return not is_container and not jax.tree.leaves(params)
