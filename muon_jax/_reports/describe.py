"""`describe`: what `muon` will do with the parameters, as data and as tables."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax._by_use.by_use import Routes
from muon_jax._checks import checks_arguments
from muon_jax._distributed.exchange import Exchange, exchange_of
from muon_jax._distributed.planning import leaves_of, make_plan
from muon_jax._distributed.sharding import (
    Mesh,
    Shardings,
    are_from_init,
    axes_of_spec,
    located,
    shardings_of_leaves,
    spec_of,
)
from muon_jax._foreign import check_names
from muon_jax._iteration.grouping import groups
from muon_jax._iteration.newton_schulz import Iterations, NewtonSchulz
from muon_jax._iteration.steps import is_traced
from muon_jax._matrices.by_role import by_role, named_shapes, routes
from muon_jax._matrices.roles import NamedShape
from muon_jax._matrices.views import View, assigned_views, parts_of
from muon_jax._muon import muon
from muon_jax._presets import all_given
from muon_jax._reports.exchanges import Exchanges, exchanges_of
from muon_jax._scale_by_muon import iterations_by_path
from muon_jax._table import table
from muon_jax._transforms.momentum import Memory, Storage, storage_of
from muon_jax._trees import check_params, errors_naming
from pallas_kernels import select_implementation, unsupported_reason
from pallas_kernels.arguments import check_supported
from pallas_kernels.device import standard_promotion


@dataclasses.dataclass(frozen=True)
class DescribedParameter:
    """A parameter and what becomes of it.

    Attributes:
        path: its names, joined by slashes.
        shape: its own.
        role: what `by_use` saw it used for, and why; or what `by_role` takes it for, "unknown" if
            its name does not say, or the rule that decides.
        optimizer: "muon" or "adamw", or what else has it, such as "adamh".
        matrices: the shapes `(batch, rows, cols)` of its stacks of matrices.
        groups: for each of these, which group it is orthogonalized in.
    """

    path: str
    shape: tuple[int, ...]
    role: str
    optimizer: str
    matrices: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DescribedGroup:
    """Matrices that are orthogonalized together.

    Attributes:
        shape: `(batch, m, n)` with m ≤ n.
        coefficients: their name, or the numbers.
        method: `"standard"` or `"gram"`.
        dtype: of the products.
        implementation: of the symmetric products.
        flops: of all products of an update; a symmetric product counts half.
    """

    shape: tuple[int, ...]
    coefficients: str
    method: str
    dtype: str
    implementation: str
    flops: float


@dataclasses.dataclass(frozen=True)
class Description:
    """What becomes of the parameters; its string is the tables.

    Attributes:
        parameters: all of them.
        groups: the matrices that are orthogonalized together, where no mesh shards them.
        exchanges: who orthogonalizes the matrices of sharded parameters, and what is sent; None
            where nothing says how the parameters are sharded.
    """

    parameters: tuple[DescribedParameter, ...]
    groups: tuple[DescribedGroup, ...]
    exchanges: Exchanges | None = None

    def __str__(self) -> str:
        parameters, groups = [], []
        for p in self.parameters:
            matrices, numbers = map(_joined, p.matrices), map(str, p.groups)
            row = (p.path, _joined(p.shape), p.role, p.optimizer)
            parameters.append((*row, ", ".join(matrices), ", ".join(numbers)))
        for i, g in enumerate(self.groups):
            row = (str(i), _joined(g.shape), g.coefficients, g.method, g.dtype, g.implementation)
            groups.append((*row, f"{g.flops / 1e9:.3g}"))
        of_groups = ("group", "shape", "coefficients", "method", "dtype", "products", "GFLOP")
        tables = [
            table(("path", "shape", "role", "optimizer", "matrices", "group"), parameters),
            table(of_groups, groups),
        ]
        return "\n\n".join([*tables, *([str(self.exchanges)] if self.exchanges else [])])


@checks_arguments
@standard_promotion()
def describe(
    params: Any,
    shardings: Shardings | Exchange = None,
    mesh: Mesh | None = None,
    *,
    optimizer: Callable[..., Any] = muon,
    **arguments: Any,
) -> Description:
    """Prints and returns which parameters `muon` takes for matrices, and what it does with them.

    Where the parameters are sharded, it also says which devices orthogonalize which matrices, and
    what they send. Shapes are enough: nothing is computed, and no device is needed.

    Args:
        params: the parameters, or shapes of them (`jax.ShapeDtypeStruct`).
        shardings: as for `muon`, also an `Exchange`; None for the shardings that the arrays have.
        mesh: None for the mesh of the shardings, or of `jax.set_mesh`.
        optimizer: `muon`, or a function of `muon_jax.contrib` that takes its arguments.
        **arguments: those of the optimizer, by name. You can pass all arguments of your optimizer:
            `describe` ignores those that do not concern the matrices, such as `learning_rate`,
            which you can also leave out.

    Raises:
        TypeError: `muon` has no such argument, or its `init` refuses the parameters.
        ValueError: as `muon` and its `init`, and `by_role` where it is used; a sharding or the mesh
            is missing; parameters are on several meshes; or the call is in a shard_map.
        NotImplementedError: the named implementation cannot run here.
    """
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh | None):
        raise TypeError(f"mesh must be a Mesh or None, got {mesh!r}: pass that of the shardings")
    given, state = _all_arguments(optimizer, arguments | {"shardings": shardings}, params)
    named = named_shapes(params)
    views = assigned_views(given["muon_weight_dimension_numbers"], params)
    momenta = [_momentum_of(x, given) for x in jax.tree.leaves(params)]
    iterations = iterations_by_path(
        given["ns_coeffs"],
        steps=given["ns_steps"],
        eps=given["eps"],
        eps_mode=given["eps_mode"],
        preconditioning=given["preconditioning"],
    )(_masked(params, momenta, [view is not None for view in views]))
    numbers = iter(iterations.of_leaves)
    stacks: list[jax.ShapeDtypeStruct] = []
    of_iterations: list[list[int]] = [[] for _ in iterations.distinct]
    of_parameters: list[range] = []
    for (name, shape), m, view in zip(named, momenta, views, strict=True):
        begin = len(stacks)
        if view is not None:
            with errors_naming(name, shape):
                parts = parts_of(view, shape)
            stacks += [jax.ShapeDtypeStruct(part.stack, m.dtype) for part in parts]
            of_iterations[next(numbers)] += range(begin, len(stacks))
        of_parameters.append(range(begin, len(stacks)))
    described: list[DescribedGroup] = []
    group_of: dict[int, int] = {}
    for iteration, coefficients, own in zip(
        iterations.distinct, iterations.names, of_iterations, strict=True
    ):
        for group in groups([stacks[i] for i in own], iteration.max_group_bytes):
            members = [own[j] for j in group]
            group_of |= dict.fromkeys(members, len(described))
            described.append(
                _described_group([stacks[i] for i in members], iteration, coefficients)
            )
    labels = _optimizers(state, params, storage_of(given["mu_dtype"]))
    parameters = tuple(
        DescribedParameter(
            path=name,
            shape=shape,
            role=role,
            optimizer=label,
            matrices=tuple(stacks[i].shape for i in own),
            groups=tuple(group_of[i] for i in own),
        )
        for (name, shape), role, label, own in zip(
            named, _roles(named, given), labels, of_parameters, strict=True
        )
    )
    exchanges = _exchanges(params, momenta, views, iterations, exchange_of(shardings), mesh)
    description = Description(parameters, tuple(described), exchanges)
    print(description)
    return description


def _masked(params: Any, momenta: Sequence[Any], kept: Sequence[bool]) -> Any:
    """The tree of these momenta, of which some are masked."""
    leaves = (
        m if is_kept else optax.MaskedNode() for m, is_kept in zip(momenta, kept, strict=True)
    )
    return jax.tree.structure(params).unflatten(leaves)


def _all_arguments(
    optimizer: Callable[..., Any], given: Mapping[str, Any], params: Any
) -> tuple[dict[str, Any], Any]:
    """All arguments, those of the preset and defaults too, and the shapes of the state."""
    signature = inspect.signature(optimizer)
    check_names("describe", given, [*signature.parameters])
    given = {"learning_rate": 0.0, **given}
    optimizer(**given)
    check_params(params, "describe(params)")
    # A report is about any devices, so its arrays need not be in the memory of these.
    storage = dataclasses.replace(storage_of(given.get("mu_dtype")), memory=Memory())
    made = optimizer(**given | {"mu_dtype": storage, "shardings": None})
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), params)
    state = jax.eval_shape(made.init, shapes)
    call = signature.bind(**all_given(optimizer, given))
    call.apply_defaults()
    return call.arguments, state


def _exchanges(
    params: Any,
    momenta: Sequence[jax.ShapeDtypeStruct],
    views: Sequence[View | None],
    iterations: Iterations,
    exchange: Exchange,
    mesh: Mesh | None,
) -> Exchanges | None:
    """Who orthogonalizes which of the matrices; None where nothing says how they are sharded.

    `momenta` and `views` are of all parameters, `iterations` of Muon's.
    """
    of_muon = [i for i, view in enumerate(views) if view is not None]
    full = [i for i in of_muon if 0 not in momenta[i].shape]
    placed = _shardings_of(params, full, exchange, is_asked=mesh is not None)
    if placed is None:
        return None
    mesh = _mesh_for(placed, mesh)
    kept = {*full}
    tree = _masked(params, momenta, [i in kept for i in range(len(momenta))])
    iterations = iterations.of_some([j for j, i in enumerate(of_muon) if i in kept])
    parameters = located([views[i] for i in full], tree, None)
    units = leaves_of(parameters, [momenta[i].dtype for i in full], iterations)
    specs = [*map(spec_of, placed)]
    plan = make_plan(units, specs, mesh.shape, exchange, iterations.distinct)
    period = int(exchange.block_period or 1)
    if period > 1:
        make_plan(units, specs, mesh.shape, exchange.of_blocks(), iterations.distinct)  # raises
    return dataclasses.replace(
        exchanges_of(plan, iterations.names, exchange.links),
        block_period=period,
        are_shardings_from_init=exchange.shardings is None and are_from_init(mesh),
    )


def _shardings_of(
    params: Any, which: Sequence[int], exchange: Exchange, is_asked: bool
) -> list[PartitionSpec | NamedSharding] | None:
    """The shardings of these parameters, as stated or as arrays have them; None if none has one."""
    if exchange.shardings is not None:
        stated = shardings_of_leaves(exchange.shardings, params)
        return [stated[i] for i in which]
    every = jax.tree.leaves_with_path(params)
    leaves = [every[i] for i in which]
    if is_traced([x for _, x in leaves]):
        if is_asked:
            raise ValueError("describe cannot see the shardings of traced arrays: pass shardings=")
        return None
    found = [getattr(x, "sharding", None) for _, x in leaves]
    if not is_asked and not any(isinstance(s, NamedSharding) for s in found):
        return None
    for (path, x), sharding in zip(leaves, found, strict=True):
        if isinstance(x, jax.ShapeDtypeStruct) and sharding is None:
            raise ValueError(
                f"describe needs the sharding of the parameter {jax.tree_util.keystr(path)} of"
                f" shape {x.shape}, which has none: pass shardings="
            )
    return [s if isinstance(s, NamedSharding) else PartitionSpec() for s in found]


def _mesh_for(placed: Sequence[PartitionSpec | NamedSharding], mesh: Mesh | None) -> Mesh:
    """The mesh: as given, else of the shardings, else in force."""
    meshes: list[Mesh] = [s.mesh for s in placed if isinstance(s, NamedSharding)]
    if mesh is None and any(other.shape != meshes[0].shape for other in meshes):
        shapes = dict.fromkeys(str(dict(other.shape)) for other in meshes)
        raise ValueError(
            f"describe needs parameters on one mesh, got parameters on {' and '.join(shapes)}: call"
            " it for those of each mesh"
        )
    meshes.append(jax.sharding.get_abstract_mesh())
    mesh, specs = mesh or meshes[0], [*map(spec_of, placed)]
    if AxisType.Manual in mesh.axis_types:
        raise ValueError(
            "describe needs whole parameters, got shards: call it outside of shard_map"
        )
    if mesh.empty and any(map(axes_of_spec, specs)):
        raise ValueError(f"describe got {specs[0]} and no mesh: pass mesh=, or use jax.set_mesh")
    return mesh


def _optimizers(state: Any, params: Any, storage: Storage) -> list[str]:
    """The optimizer of each parameter: the one whose state has a momentum for it."""

    def has_momenta(node: Any) -> bool:
        return hasattr(node, "mu")

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    treedef = jax.tree.structure(params)
    found = [""] * treedef.num_leaves
    for label, inner in state.inner_states.items():
        (mu,) = (x.mu for x in jax.tree.leaves(inner, is_leaf=has_momenta) if has_momenta(x))
        for i, m in enumerate(treedef.flatten_up_to(storage.unpack(mu))):
            if not any(map(is_masked, jax.tree.leaves(m, is_leaf=is_masked))):
                found[i] = "adamw" if label == "adam" else label
    return found


def _roles(named: Sequence[NamedShape], given: dict[str, Any]) -> list[str]:
    """What each parameter is for: as `by_use` saw it, or else as `by_role` says."""
    views = given["muon_weight_dimension_numbers"]
    if isinstance(views, Routes):
        return [f"{views[name].role}: {views[name].reason}" for name, _ in named]
    is_by_role = isinstance(views, functools.partial) and views.func is by_role
    arguments = {"rules": None, **(views.keywords if is_by_role else {})}
    return [route.role for route in routes(named, **arguments)]


def _momentum_of(x: Any, given: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """What is orthogonalized for a parameter whose gradients have its dtype."""
    of_parameter = jnp.result_type(x)
    computed = storage_of(given["mu_dtype"]).computed_dtype or of_parameter
    dtype = "float32" if given["mu_rounding"] == "stochastic" else computed
    return jax.ShapeDtypeStruct(np.shape(x), jnp.promote_types(of_parameter, dtype))


def _described_group(
    stacks: Sequence[jax.ShapeDtypeStruct], iteration: NewtonSchulz, coefficients: str
) -> DescribedGroup:
    batch = sum(stack.shape[0] for stack in stacks)
    m, n = sorted(stacks[0].shape[1:])
    form = iteration.form((m, n), stacks[0].dtype)
    operand = jax.ShapeDtypeStruct((batch, m, n), form.dtype)
    named = iteration.implementation
    if named:
        check_supported(named, unsupported_reason(named, operand))
    return DescribedGroup(
        shape=operand.shape,
        coefficients=coefficients,
        method=form.method,
        dtype=str(form.dtype),
        implementation=form.implementation or select_implementation(operand).implementation,
        flops=batch * m**3 * form.products.units(n / max(m, 1)),
    )


def _joined(shape: Sequence[int]) -> str:
    """The sizes joined by ×."""
    return "×".join(map(str, shape))
