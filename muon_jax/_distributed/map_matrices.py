"""All matrices of a tree, orthogonalized as whole matrices, wherever their shards are."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax._distributed.automatic import Planned, run_when_partitioned, with_rules
from muon_jax._distributed.exchange import BlockStep, Exchange
from muon_jax._distributed.plan import Leaf
from muon_jax._distributed.planning import leaves_of, make_plan
from muon_jax._distributed.run import run_either
from muon_jax._distributed.sharding import (
    Parameter,
    Placed,
    Shardings,
    are_whole,
    arrays_of,
    asks_how_to_partition,
    axes_of_spec,
    by_device,
    locate,
    may_be_sharded,
    meshes_of,
    parameters_of,
    platform_of,
    shardings_of_leaves,
    spec_of,
    traced_for,
    whole_everywhere,
)
from muon_jax._distributed.stacked import run_stacked
from muon_jax._iteration.newton_schulz import Iterations, NewtonSchulz, map_by_iteration
from muon_jax._iteration.operand import Accumulated
from muon_jax._matrices.views import View, from_stacks, parts_of, stacked_view, to_stacks
from muon_jax._trees import is_function


def map_matrices(
    iterations: Iterations,
    parameters: Sequence[Parameter],
    tree: Any,
    exchange: Exchange,
    step: BlockStep | None = None,
) -> Any:
    """Returns the tree with its iterations applied to all matrices.

    | mesh axes | who knows the shardings   | where the plan runs, and by which function      |
    | --------- | ------------------------- | ----------------------------------------------- |
    | none      | nothing is sharded        | there is no plan: `_map_unsharded`              |
    | not known | the compiler, where there | as on automatic axes; in a program of one       |
    |           | are several CPUs or GPUs  | device there is no plan                         |
    | manual    | `exchange.shardings`      | here, on shards: `in_callers_shard_map`         |
    | explicit  | the types, or `shardings` | in a shard_map: `in_own_shard_map`              |
    | automatic | the compiler              | in an operation that it partitions:             |
    |           |                           | `on_automatic_axes`                             |
    | automatic | nobody, on TPUs           | there is no plan, XLA partitions stacks:        |
    |           |                           | `run_stacked`                                   |

    Parameters on several meshes have one plan for each mesh.

    Args:
        iterations: of the tree, whose leaves may be traced.
        parameters: the leaves of the tree.
        tree: the arrays.
        exchange: what happens along mesh axes.
        step: None for a step of whole matrices.

    Raises:
        ValueError: the sharding is not known, or does not fit the parameters, or the exchange.
        NotImplementedError: some mesh axes are manual, others are not; or blocks need shards where
            XLA alone knows them.
    """
    leaves, treedef = jax.tree.flatten(tree)
    meshes = meshes_of(leaves)
    if len(meshes) < 2:
        with traced_for(leaves):
            return treedef.unflatten(_map_leaves(iterations, parameters, tree, exchange, step))
    stated = exchange.shardings
    stated = stated(tree) if is_function(stated) else stated
    exchange.check_names({name: size for mesh in meshes for name, size in mesh.shape.items()})
    where = [(meshes_of([x]) or meshes)[0] for x in leaves]
    results: dict[int, jax.Array] = {}
    for mesh in meshes:
        if stated is None and AxisType.Auto in mesh.axis_types and asks_how_to_partition(mesh):
            raise ValueError(
                f"parameters are on {len(meshes)} meshes, of which {dict(mesh.shape)} has automatic"
                " axes, whose shardings JAX tells in programs of one mesh alone: pass shardings=,"
                " the PartitionSpec of each parameter"
            )
        own = [i for i, of_leaf in enumerate(where) if of_leaf == mesh]
        pairs = zip(leaves, where, strict=True)
        part = treedef.unflatten(x if of_leaf == mesh else None for x, of_leaf in pairs)
        within = exchange.on_mesh(mesh.shape).with_(shardings=stated)
        of_part = [parameters[i] for i in own]
        done = map_matrices(iterations.of_some(own), of_part, part, within, step)
        results |= zip(own, jax.tree.leaves(done), strict=True)
    return treedef.unflatten(results[i] for i in range(len(leaves)))


def map_momenta(
    iterations: Iterations,
    parameters: Sequence[Parameter],
    momenta: Any,
    gradients: Any,
    weights: jax.Array,
    update: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    shardings: Shardings,
) -> tuple[Any, Any] | None:
    """Returns the trees of polar factors and of new momenta, of which a kernel makes some at least.

    It returns None where such a kernel has nothing to do, or where matrices may be sharded. Of a
    shape it takes all matrices or none, so that groups are the same as without it.

    Args:
        iterations: of the trees.
        parameters: the leaves of the trees.
        momenta: the arrays.
        gradients: arrays of these shapes.
        weights: w, with which the kernel computes what `update` does, see `Accumulated`.
        update: maps a momentum and its gradient to what is orthogonalized and the new momentum; a
            tree, whose leaves are the arrays that it needs.
        shardings: as for `scale_by_muon`.
    """
    leaves, treedef = jax.tree.flatten(gradients)
    if not leaves or not are_whole(leaves) or locate(gradients, shardings).kind is not None:
        return None
    views = [parameter.view for parameter in parameters]
    before = treedef.flatten_up_to(momenta)
    pending = [
        _accumulated(view, iterations.distinct[number], m, g, weights)
        for number, view, m, g in zip(iterations.of_leaves, views, before, leaves, strict=True)
    ]
    of_others = {
        _shape_and_dtype(part.stack, jnp.promote_types(m.dtype, g.dtype))
        for stack, view, m, g in zip(pending, views, before, leaves, strict=True)
        if stack is None
        for part in parts_of(view, g.shape)
    }
    pending = [
        None if stack is None or _shape_and_dtype(stack.shape, stack.dtype) in of_others else stack
        for stack in pending
    ]
    if not any(pending):
        return None

    def of_whole(trees: Any, beside: Any) -> Any:
        distinct, weights, update = beside
        stacks, news = [], []
        for stack, view, m, g in zip(pending, views, *trees, strict=True):
            if stack is None:
                u, new = update(m, g)
                stacks.append(to_stacks(u, view))
                news.append(new)
            else:
                g, m = (x.reshape(stack.gradients.shape) for x in (g, m))
                stacks.append([Accumulated(g, m, weights, stack.is_swapped)])
                news.append(None)
        done = iter(map_by_iteration(distinct, iterations.of_leaves, stacks))
        results = []
        for new, view, m in zip(news, views, trees[0], strict=True):
            if new is None:
                results.append([x.reshape(m.shape) for x in next(done)])
            else:
                results.append([from_stacks(done, view, m.shape), new])
        orthogonal, new = zip(*results, strict=True)
        return [*new], [*orthogonal]

    beside = iterations.distinct, weights, update
    new, orthogonal = by_device(of_whole, (before, leaves), beside, needs_plain=True)
    return treedef.unflatten(orthogonal), treedef.unflatten(new)


def _shape_and_dtype(stack: tuple[int, ...], dtype: jnp.dtype) -> tuple[Any, ...]:
    """What the matrices of a stack `(batch, rows, cols)` have in common with those of a group."""
    return (*sorted(stack[1:]), dtype)


def _accumulated(
    view: View, iteration: NewtonSchulz, m: jax.Array, g: jax.Array, weights: jax.Array
) -> Accumulated | None:
    """The shapes of m and g as a kernel takes them, or None where none does."""
    part, *others = parts_of(view, g.shape)
    batch, reduction, output = part.axes
    in_order = (*range(len(part.shape)),)
    is_swapped = batch + reduction + output != in_order
    if others or part.cut or (is_swapped and batch + output + reduction != in_order):
        return None
    shape = (part.stack[0], *(part.stack[:0:-1] if is_swapped else part.stack[1:]))
    gradients, momenta = (jax.ShapeDtypeStruct(shape, x.dtype) for x in (g, m))
    stack = Accumulated(gradients, momenta, weights, is_swapped)
    return stack if iteration.accumulates(stack) else None


def _map_leaves(
    iterations: Iterations,
    parameters: Sequence[Parameter],
    tree: Any,
    exchange: Exchange,
    step: BlockStep | None,
) -> list[jax.Array]:
    """The leaves of `map_matrices`."""
    place, leaves = locate(tree, exchange.shardings), jax.tree.leaves(tree)
    if place.kind == AxisType.Auto and not asks_how_to_partition(place.mesh):
        place = _stated_alone(place, exchange)
        if place.kind != AxisType.Explicit:
            _check_needs_no_sharding(place, exchange, step)
    if place.kind == AxisType.Auto:  # before the compiler asks, which buries what is raised there
        exchange.check_names(place.mesh.shape)
    if place.kind is None and may_be_sharded(place.mesh, leaves):
        place = place._replace(kind=AxisType.Auto)
    if place.kind is None:
        return _map_unsharded(iterations, parameters, leaves)
    full = [i for i, x in enumerate(leaves) if x.size]  # others are results already
    if not full:
        return leaves
    place = place._replace(specs=[place.specs[i] for i in full] if place.specs else [])
    arrays, own = [leaves[i] for i in full], [parameters[i] for i in full]
    sharded = _Sharded(iterations.of_some(full), own, arrays, place, exchange, step)
    if place.kind == AxisType.Manual:
        done = sharded.in_callers_shard_map()
    elif place.kind == AxisType.Explicit:
        done = sharded.in_own_shard_map()
    else:
        done = sharded.on_automatic_axes()
    return [*(dict(enumerate(leaves)) | dict(zip(full, done, strict=True))).values()]


def _stated_alone(place: Placed, exchange: Exchange) -> Placed:
    """The place of leaves on automatic axes, where the compiler tells nothing.

    | the mesh is                      | kind                                                     |
    | -------------------------------- | -------------------------------------------------------- |
    | known, and no sharding is stated | Auto: nobody knows the shardings                         |
    | stated, by NamedShardings        | Explicit, the stated specs                               |
    | unknown                          | None: XLA partitions all, or there is one device         |
    """
    if not place.mesh.empty:
        return place
    stated = shardings_of_leaves(exchange.shardings, place.whole)
    meshes = [s.mesh for s in stated if isinstance(s, NamedSharding) and not s.mesh.empty]
    if meshes:
        return place._replace(mesh=meshes[0], kind=AxisType.Explicit, specs=[*map(spec_of, stated)])
    if jax.device_count() > 1:
        _warn(place, "XLA may gather each matrix on every device")
    return place._replace(kind=None)


def _check_needs_no_sharding(place: Placed, exchange: Exchange, step: BlockStep | None) -> None:
    """Raises ValueError where what the caller asks for needs shardings that nobody knows."""
    needs = exchange.needs_shardings or step is not None
    if needs and (place.kind is not None or jax.device_count() > 1):
        raise ValueError(
            f"shardings={exchange} needs to know how parameters are sharded, which on automatic"
            f" mesh axes the compiler for {platform_of(place.mesh)} devices does not tell: pass"
            " Exchange(…, shardings=), the PartitionSpec of each parameter"
        )


def _warn(place: Placed, what: str) -> None:
    warnings.warn(
        "the shardings of the parameters are not known: on automatic mesh axes the compiler for"
        f" {platform_of(place.mesh)} devices does not tell them. {what}. Pass shardings=, the"
        " NamedSharding of each parameter, or call optimizer.init outside jit, on parameters that"
        " are sharded",
        stacklevel=2,
    )


def _map_unsharded(
    iterations: Iterations, parameters: Sequence[Parameter], leaves: Sequence[jax.Array]
) -> list[jax.Array]:
    def of_whole(leaves: list[jax.Array], distinct: tuple[NewtonSchulz, ...]) -> list[jax.Array]:
        pairs = [*zip(leaves, parameters, strict=True)]
        stacks = [to_stacks(x, parameter.view) for x, parameter in pairs]
        done = iter(map_by_iteration(distinct, iterations.of_leaves, stacks))
        return [from_stacks(done, parameter.view, x.shape) for x, parameter in pairs]

    return by_device(of_whole, [*leaves], iterations.distinct)


class _Sharded:
    """Leaves of which none is empty, that mesh axes of one kind may shard."""

    def __init__(
        self,
        iterations: Iterations,
        parameters: Sequence[Parameter],
        leaves: Sequence[jax.Array],
        place: Placed,
        exchange: Exchange,
        step: BlockStep | None,
    ) -> None:
        self.iterations, self.parameters, self.leaves = iterations, parameters, leaves
        self.place, self.exchange, self.step = place, exchange, step
        self.arrays, self.bind = arrays_of((iterations.distinct, step))

    @functools.cached_property
    def units(self) -> list[Leaf]:
        """The leaves as plans have them; none is needed where nothing turns out to be sharded."""
        return leaves_of(self.parameters, [x.dtype for x in self.leaves], self.iterations)

    def _planned(
        self, specs: Sequence[PartitionSpec], mesh: Mapping[str, int], exchange: Exchange
    ) -> Planned:
        plan_of = functools.partial(
            make_plan, self.units, specs, mesh, iterations=self.iterations.distinct
        )
        whole = plan_of(exchange=exchange)
        blocks = plan_of(exchange=exchange.of_blocks()) if self.step else whole

        def run(shards: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
            distinct, step = self.bind(arrays)
            return run_either(step, whole, blocks, shards, distinct)

        return run

    def _splits(self, exchange: Exchange) -> bool:
        specs, mesh = self.place.specs, self.place.mesh.shape
        plan = make_plan(self.units, specs, mesh, exchange, self.iterations.distinct)
        return bool(plan.gathers)

    def _of_stacks(
        self, stacks: Sequence[jax.Array], arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        views = [stacked_view(parameter.view) for parameter in self.parameters]
        distinct, step = self.bind(arrays)
        bound = dataclasses.replace(self.iterations, distinct=distinct)
        exchange = self.exchange.repeated("faster").with_(shardings=None)
        parameters = parameters_of(lambda _: views, [*stacks], None)
        return map_matrices(bound, parameters, [*stacks], exchange, step)

    def in_callers_shard_map(self) -> list[jax.Array]:
        """Returns the results where the leaves are shards, in the caller's `shard_map`."""
        place, exchange = self.place, self.exchange
        self.units = [
            dataclasses.replace(unit, varying=jax.typeof(x).manual_axis_type.varying)
            for unit, x in zip(self.units, self.leaves, strict=True)
        ]
        if _replicas_may_differ(self.units, place):
            exchange = exchange.repeated("faster")
        run = self._planned(place.specs, place.mesh.shape, exchange)
        if self._splits(exchange):
            repeating = self._planned(
                place.specs, place.mesh.shape, exchange.repeated("faster", "split")
            )
            run = with_rules(run, repeating, None)
        return run(self.leaves, self.arrays)

    def in_own_shard_map(self) -> list[jax.Array]:
        """Returns the results of a `shard_map`, for leaves whose specs are known."""
        place, repeated = self.place, self.exchange.repeated("faster", "split")

        def on_shards(exchange: Exchange) -> Planned:
            def run(shards: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
                # From a shard_map, `vmap` takes explicit axes that shard what it maps.
                types = jax.sharding.get_abstract_mesh().axis_types
                own = exchange if {*types} == {AxisType.Manual} else repeated
                return self._planned(place.specs, place.mesh.shape, own)(shards, arrays)

            return jax.shard_map(
                run,
                mesh=place.mesh,
                in_specs=(place.specs, PartitionSpec()),
                out_specs=place.specs,
                check_vma=False,
            )

        run, types = on_shards(self.exchange), {*place.mesh.axis_types}
        is_typed = types == {AxisType.Explicit}
        if is_typed or self._splits(self.exchange):
            is_known = is_typed or (types == {AxisType.Auto} and asks_how_to_partition(place.mesh))
            run = with_rules(run, on_shards(repeated), self._of_stacks if is_known else None)
        return jax.jit(run)(self.leaves, [*map(whole_everywhere, self.arrays)])

    def on_automatic_axes(self) -> list[jax.Array]:
        """Returns the results for leaves whose specs only the compiler knows, or nobody."""
        place, exchange = self.place, self.exchange
        if not asks_how_to_partition(place.mesh):
            _warn(place, "Matrices are stacked, and the stacks spread over all devices")
            run = functools.partial(run_stacked, units=self.units, mesh=place.mesh)
            return jax.jit(run)(self.iterations.distinct, arrays=self.leaves)

        def unsharded(leaves: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
            bound = dataclasses.replace(self.iterations, distinct=self.bind(arrays)[0])
            return _map_unsharded(bound, self.parameters, leaves)

        def by_xla(leaves: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
            cuts = exchange.may_cut_blocks(place.mesh.shape)
            if argument := "block_period" if self.step else "'block'" if cuts else None:
                raise NotImplementedError(
                    f"{argument} has no blocks under derivatives on automatic mesh axes, nor under"
                    " vmap of arrays on no mesh: put them on a mesh and pass Exchange(…,"
                    " shardings=), or leave it out"
                )
            return unsharded(leaves, arrays)

        # All that decides what is compiled, and no function, whose address differs by process.
        said = exchange.axes, exchange.links, exchange._scale_of_blocks
        iterations = self.bind([None] * len(self.arrays)), self.iterations.of_leaves
        functions = {}
        if any(iteration.has_functions for iteration in self.iterations.distinct):
            functions = dict.fromkeys(
                self.iterations.distinct[unit.iteration].programs_of_functions((m, n), unit.dtype)
                for unit in self.units
                for _, m, n in unit.matrices
            )
        settings = repr((iterations, self.parameters, said, [*functions]))
        return run_when_partitioned(
            lambda specs, mesh: self._planned(specs, mesh, exchange),
            unsharded,
            by_xla,
            None if place.mesh.empty else self._of_stacks,
            self.leaves,
            self.arrays,
            settings,
        )


def _replicas_may_differ(units: Sequence[Leaf], place: Placed) -> bool:
    """Whether replicas in the caller's shard_map may have values of their own, such as gradients.

    Under `check_vma=False` JAX does not know it.
    """
    sharded = [name for name, size in place.mesh.shape.items() if size > 1]
    if not jax.typeof(jax.lax.axis_index(sharded[0])).manual_axis_type.varying:
        return True
    pairs = zip(units, place.specs, strict=True)
    return any(unit.varying.intersection(sharded) - {*axes_of_spec(spec)} for unit, spec in pairs)
