"""Computations on shards: each device works on its own part."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from muon_jax._distributed.sharding import Shardings, _mesh, axes_of, locate, names
from muon_jax._matrices import views as _views
from muon_jax._numerics import wide


def by_device(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns `function(tree)`, sharded as the tree is, of which each device computes its part.

    Types say how arrays are divided along explicit mesh axes, even along those of one device, and
    not every operation takes such arrays.

    Args:
        function: results are of the shapes of its arguments.
        tree: arrays, of which those axes divide nothing that `function` needs whole.
    """
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
    if not any(map(axes_of, jax.tree.leaves(specs))):
        return function(tree)
    in_force = jax.sharding.get_abstract_mesh()  # `vmap` takes axes from it
    mesh = _mesh(jax.tree.leaves(tree)) if in_force.empty else in_force
    run = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    return jax.jit(run)(tree)


def by_element(
    function: Callable[[int, int], float], views: _views.Views, tree: Any, shardings: Shardings
) -> list[jax.typing.ArrayLike]:
    """Returns `function(rows, cols)` of each element's matrix: for each leaf what broadcasts to it.

    Raises:
        ValueError: the sharding is not known, or does not fit the parameters.
        NotImplementedError: some mesh axes are manual, others are not.
    """
    _, kind, specs, whole = locate(tree, shardings)
    viewed = zip(jax.tree.leaves(whole), _views.views_of_leaves(views, whole), strict=True)
    values = [_views.by_matrix(function, view, x.shape) for x, (_, view) in viewed]
    if kind != AxisType.Manual:
        return [*values]
    return [_local(value, spec) for value, spec in zip(values, specs, strict=True)]


def inner_products(x: Any, y: Any, shardings: Shardings) -> Any:
    """Returns ⟨x, y⟩, in float32 or wider, of the whole arrays at each leaf or of their shards.

    Raises:
        ValueError: the sharding is not known, or does not fit the parameters.
        NotImplementedError: some mesh axes are manual, others are not.
    """
    _, kind, specs, _ = locate(x, shardings)
    products, treedef = jax.tree.flatten(
        jax.tree.map(lambda x, y: jnp.sum(wide(x).conj() * y), x, y)
    )
    if kind == AxisType.Manual:
        axes = map(axes_of, specs)
        products = [jax.lax.psum(*pair) for pair in zip(products, axes, strict=True)]
    return treedef.unflatten(products)


def distinct_keys(keys: list[jax.Array], tree: Any, shardings: Shardings) -> list[jax.Array]:
    """Returns keys, one for each leaf of `tree`, that in a shard_map differ from shard to shard.

    Raises:
        ValueError: the sharding is not known, or does not fit the parameters.
        NotImplementedError: some mesh axes are manual, others are not.
    """
    _, kind, specs, _ = locate(tree, shardings)
    if kind != AxisType.Manual:
        return keys
    return [
        jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key
        for key, axes in zip(keys, map(axes_of, specs), strict=True)
    ]


def _local(value, spec):
    """The part on this device of a whole array, or of one that broadcasts to it."""
    for axis, entry in enumerate(spec):
        if value.shape[axis] > 1 and names(entry):
            pieces = jnp.stack(jnp.split(value, jax.lax.axis_size(names(entry)), axis))
            value = pieces[jax.lax.axis_index(names(entry))]
    return value
