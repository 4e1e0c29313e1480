"""The shardings of an optimizer's state, derived from those of the parameters."""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from muon_jax._distributed.sharding import (
    ShardingTree,
    axes_of_spec,
    shardings_of_leaves,
    spec_of,
    spec_that_fits,
)
from muon_jax._trees import check_params, errors_naming, unboxed


def state_shardings(
    optimizer: optax.GradientTransformation, params: Any, shardings: ShardingTree
) -> Any:
    """Returns the shardings of the state that `optimizer.init(params)` returns.

    They are what `jax.jit(optimizer.init, out_shardings=...)` and restored checkpoints take:

        shardings_of_state = muon_jax.state_shardings(optimizer, params, shardings)
        state = jax.jit(optimizer.init, out_shardings=shardings_of_state)(params)

    `optimizer` may be any of optax. An array of the state belongs to the parameter whose path its
    own path ends with, but for what momenta in 8 bits or NorMuon add, and is sharded like the
    parameter. An axis of another size, such as the blocks of momenta in 8 bits, keeps its mesh axes
    where they divide that size. What belongs to no parameter, or has another rank than its
    parameter, each device has whole.

    Args:
        optimizer: the optimizer.
        params: arrays or shapes of them (`jax.ShapeDtypeStruct`).
        shardings: a tree of `NamedSharding`, `PartitionSpec` or None like that of `params`, or a
            prefix of it. The state's shardings are `NamedSharding` if one of these is, and else
            `PartitionSpec` for the mesh in force, which `jax.set_mesh` sets.

    Raises:
        TypeError: `optimizer` has no `init`, or `params` are no arrays.
        ValueError: `shardings` is no prefix of `params`, does not fit a parameter or the mesh, is
            on several meshes, or there is no mesh.
    """
    if not callable(getattr(optimizer, "init", None)):
        raise TypeError(
            "optimizer must be an optax.GradientTransformation, got"
            f" {type(optimizer).__name__}: call state_shardings(optimizer, params, shardings)"
        )
    check_params(params)
    of_each = shardings_of_leaves(shardings, params)
    meshes = [*dict.fromkeys(s.mesh for s in of_each if isinstance(s, NamedSharding))]
    if len(meshes) > 1:
        raise ValueError(
            f"shardings must be on one mesh, got {meshes}: pass NamedSharding of one mesh"
        )
    mesh = meshes[0] if meshes else jax.sharding.get_abstract_mesh()
    if mesh.empty and any(axes_of_spec(spec_of(s)) for s in of_each):
        raise ValueError(
            "shardings of PartitionSpec need a mesh, which says how many devices an axis has: pass"
            " NamedSharding(mesh, spec), or call state_shardings in jax.set_mesh(mesh)"
        )
    leaves = jax.tree.leaves_with_path(params)
    parameters = {
        unboxed(path): (x, spec_of(sharding))
        for (path, x), sharding in zip(leaves, of_each, strict=True)
    }
    jaxpr, state = jax.make_jaxpr(optimizer.init, return_shape=True)(params)
    paths, treedef = jax.tree.flatten_with_path(state)

    def sharding_of(path: tuple[Any, ...], aval: Any) -> NamedSharding | PartitionSpec:
        spec = PartitionSpec()
        found = _parameter_of(unboxed(path), parameters)
        if found is not None:
            x, of_parameter = parameters[found]
            with errors_naming(jax.tree_util.keystr(found), x.shape):
                spec = spec_that_fits(of_parameter, mesh.shape, x.shape, aval.shape)
        if not meshes:
            return spec
        is_on_host = aval.memory_space == jax.memory.Space.Host
        kind = "pinned_host" if is_on_host else None
        return NamedSharding(meshes[0], spec, memory_kind=kind)

    avals = jaxpr.out_avals
    pairs = zip(paths, avals, strict=True)
    return treedef.unflatten(sharding_of(path, aval) for (path, _), aval in pairs)


def _parameter_of(path: tuple[Any, ...], parameters: Any) -> tuple[Any, ...] | None:
    """The longest path of a parameter that the path of an array of a state ends with.

    After it there may be the fields or the list of an object that stands for one array.
    """
    while True:
        for start in range(len(path)):
            if path[start:] in parameters:
                return path[start:]
        if () in parameters:
            return ()
        own = jax.tree_util.GetAttrKey, jax.tree_util.SequenceKey
        if not path or not isinstance(path[-1], own):
            return None
        path = unboxed(path[:-1])
