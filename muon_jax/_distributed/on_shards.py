"""Computations of which each device does the part on its own shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from muon_jax._distributed.sharding import (
    Shardings,
    axes_of_entry,
    axes_of_spec,
    is_in_shard_map,
    locate,
    mesh_of,
)
from muon_jax._matrices.parts import values_per_matrix
from muon_jax._matrices.views import Views, views_of_leaves
from muon_jax._numerics import wide


def by_device(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns `function(tree)`, sharded as the tree is, of which each device computes its part.

    Types say how arrays are sharded over explicit mesh axes, even over axes of one device, and not
    every operation takes such arrays.

    Args:
        function: results have the shapes of its arguments.
        tree: arrays; no axis that `function` needs whole is sharded.
    """
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
    if not any(map(axes_of_spec, jax.tree.leaves(specs))):
        return function(tree)
    in_force = jax.sharding.get_abstract_mesh()  # `vmap` takes axes from it
    mesh = mesh_of(jax.tree.leaves(tree)) if in_force.empty else in_force
    run = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    return jax.jit(run)(tree)


def by_element(
    function: Callable[[int, int], float], views: Views, tree: Any, shardings: Shardings
) -> list[jax.typing.ArrayLike]:
    """Returns for each leaf what broadcasts to `function(rows, cols)` of each element's matrix."""
    kind, specs, whole = None, [], tree
    if is_in_shard_map():
        _, kind, specs, whole = locate(tree, shardings)
    viewed = zip(jax.tree.leaves(whole), views_of_leaves(views, whole), strict=True)
    values = [values_per_matrix(function, view, x.shape) for x, (_, view) in viewed]
    if kind != AxisType.Manual:
        return [*values]
    return [local_part(value, spec) for value, spec in zip(values, specs, strict=True)]


def inner_products(x: Any, y: Any, shardings: Shardings) -> Any:
    """Returns ⟨x, y⟩ at each leaf, in float32 or wider, of whole arrays or of their shards."""
    products, treedef = jax.tree.flatten(
        jax.tree.map(lambda x, y: jnp.sum(wide(x).conj() * y), x, y)
    )
    axes = _manual_axes(x, shardings)
    if axes is not None:
        products = [jax.lax.psum(*pair) for pair in zip(products, axes, strict=True)]
    return treedef.unflatten(products)


def distinct_keys(keys: list[jax.Array], tree: Any, shardings: Shardings) -> list[jax.Array]:
    """Returns keys, one for each leaf of `tree`, that in a shard_map differ from shard to shard."""
    axes = _manual_axes(tree, shardings)
    if axes is None:
        return keys
    return [
        jax.random.fold_in(key, jax.lax.axis_index(names)) if names else key
        for key, names in zip(keys, axes, strict=True)
    ]


def _manual_axes(tree: Any, shardings: Shardings) -> list[tuple[str, ...]] | None:
    """The mesh axes that each leaf is sharded over in a shard_map; None outside of one."""
    if not is_in_shard_map():
        return None
    _, kind, specs, _ = locate(tree, shardings)
    return [*map(axes_of_spec, specs)] if kind == AxisType.Manual else None


def local_part(value: Any, spec: PartitionSpec) -> Any:
    """Returns the part on this device of a whole array, or of an array that broadcasts to it."""
    for axis, entry in enumerate(spec):
        names = axes_of_entry(entry)
        if value.shape[axis] > 1 and names:
            pieces = jnp.stack(jnp.split(value, jax.lax.axis_size(names), axis))
            value = pieces[jax.lax.axis_index(names)]
    return value
