"""`explain`: what `muon` will do with sharded parameters, as data and as a table."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax._checks import checks_arguments
from muon_jax._distributed.exchange import Exchange, exchange_of
from muon_jax._distributed.planning import make_plan, units_of
from muon_jax._distributed.sharding import (
    Mesh,
    Shardings,
    are_from_init,
    axes_of_spec,
    parameters_of,
    shardings_of_leaves,
    spec_of,
)
from muon_jax._iteration.schedules import is_traced
from muon_jax._muon import muon
from muon_jax._reports.arguments import (
    all_arguments,
    iterations_of_muon,
    matrices_of_muon,
    views_of_muon,
)
from muon_jax._reports.explanation import Explanation, explained
from pallas_kernels.arguments import standard_promotion


@checks_arguments
@standard_promotion()
def explain(
    params: Any,
    shardings: Shardings | Exchange = None,
    mesh: Mesh | None = None,
    *,
    optimizer: Callable[..., Any] = muon,
    **arguments: Any,
) -> Explanation:
    """Prints and returns how `muon` with these arguments shares the matrices among devices.

    Args:
        params: arrays, or shapes (`jax.ShapeDtypeStruct`), of the dtype of the momentum.
        shardings: as for `muon`, also an `Exchange`; None for the shardings that the arrays have.
        mesh: None for the mesh of the shardings, or of `jax.set_mesh`.
        optimizer: `muon`, or a function of `muon_jax.contrib` that takes its arguments.
        **arguments: those of the optimizer, by name. You can pass all arguments of your optimizer:
            `explain` ignores those that do not concern the matrices, such as `learning_rate`,
            which you can also leave out.

    Raises:
        TypeError: `muon` has no such argument, or its `init` refuses the parameters.
        ValueError: an argument is wrong; `init` refuses the parameters; a sharding or the mesh is
            missing; parameters are on several meshes; or the call is in a shard_map.
    """
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh | None):
        raise TypeError(f"mesh must be a Mesh or None, got {mesh!r}: pass that of the shardings")
    exchange = exchange_of(shardings)
    with_exchange = arguments | {"shardings": shardings}
    given, _ = all_arguments("explain", optimizer, with_exchange, params)
    views, matrices = _matrices_of(params, given)
    placed = (
        _stated_shardings(matrices)
        if exchange.shardings is None
        else shardings_of_leaves(exchange.shardings, matrices)
    )
    specs = [*map(spec_of, placed)]
    mesh = _mesh_for(placed, mesh)
    # A callable, because a tree of views may itself be callable.
    iterations = iterations_of_muon(given, matrices)
    parameters = parameters_of(lambda _: views, matrices, None)
    dtypes = [x.dtype for x in jax.tree.leaves(matrices)]
    units = units_of(parameters, dtypes, iterations)
    plan = make_plan(units, specs, mesh.shape, exchange, iterations.distinct)
    explanation = explained(plan, iterations.names, exchange.links)
    period = int(exchange.block_period or 1)
    if period > 1:
        make_plan(units, specs, mesh.shape, exchange.of_blocks(), iterations.distinct)  # raises
    explanation = dataclasses.replace(
        explanation,
        block_period=period,
        are_shardings_from_init=exchange.shardings is None and are_from_init(mesh),
    )
    print(explanation)
    return explanation


def _matrices_of(params: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """The views and the parameters that are exchanged: others, and empty ones, are masked."""
    leaves, treedef = jax.tree.flatten(params)
    views = views_of_muon(given, params)
    full = [None if 0 in np.shape(p) else view for p, view in zip(leaves, views, strict=True)]
    return treedef.unflatten(views), matrices_of_muon(params, full)


def _mesh_for(placed: Sequence[PartitionSpec | NamedSharding], mesh: Mesh | None) -> Mesh:
    """The mesh: as given, else of the shardings, else in force.

    Raises:
        ValueError: there is none, but specs name its axes; shardings are on several; or a shard_map
            is being traced.
    """
    meshes: list[Mesh] = [s.mesh for s in placed if isinstance(s, NamedSharding)]
    if mesh is None and any(other.shape != meshes[0].shape for other in meshes):
        shapes = dict.fromkeys(str(dict(other.shape)) for other in meshes)
        raise ValueError(
            f"explain needs parameters on one mesh, got parameters on {' and '.join(shapes)}: call"
            " it for those of each mesh"
        )
    meshes.append(jax.sharding.get_abstract_mesh())
    mesh, specs = mesh or meshes[0], [*map(spec_of, placed)]
    if AxisType.Manual in mesh.axis_types:
        raise ValueError("explain needs whole parameters, got shards: call it outside of shard_map")
    if mesh.empty and any(map(axes_of_spec, specs)):
        raise ValueError(f"explain got {specs[0]} and no mesh: pass mesh=, or use jax.set_mesh")
    return mesh


def _stated_shardings(params: Any) -> list[PartitionSpec | NamedSharding]:
    """The shardings of arrays; an array on one device is not sharded."""
    leaves = jax.tree.leaves_with_path(params)
    if is_traced([x for _, x in leaves]):
        raise ValueError("explain cannot see the shardings of traced arrays: pass shardings=")
    for path, x in leaves:
        if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None:
            raise ValueError(
                f"explain needs the sharding of the parameter {jax.tree_util.keystr(path)} of"
                f" shape {x.shape}, which has none: pass shardings="
            )
    stated = [getattr(x, "sharding", None) for _, x in leaves]
    return [s if isinstance(s, NamedSharding) else PartitionSpec() for s in stated]
