"""What is known of the sharding of parameters while an optimizer is traced.

| mesh axes            | who knows the shardings                                              |
| -------------------- | -------------------------------------------------------------------- |
| explicit             | the types of the arrays                                              |
| automatic            | the compiler alone; that for TPUs does not tell                      |
| manual (`shard_map`) | nobody: arrays are shards, and nothing tells of which whole          |

`shardings=` states them for any mesh.

The functions at the end compute on each device's own shards.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from muon_jax._iteration.normalization import wide
from muon_jax._iteration.steps import is_traced
from muon_jax._matrices.views import (
    View,
    Views,
    parts_of,
    values_per_matrix,
    view_of_each_leaf,
    view_or_matrix,
)
from muon_jax._trees import broadcast_prefix, errors_naming, is_function
from pallas_kernels import device as _device

type Mesh = jax.sharding.Mesh | AbstractMesh
# A prefix of the parameters' tree. Its leaves are PartitionSpec, NamedSharding, or None for a
# parameter that is not sharded.
type ShardingTree = Any
type Shardings = ShardingTree | Callable[[Any], ShardingTree] | None


class Placed(NamedTuple):
    """Where the leaves of a tree are.

    Attributes:
        mesh: concrete or abstract.
        kind: of the mesh axes; Explicit where specs are stated; None where nothing is sharded.
        specs: of the leaves; empty where only the compiler knows them.
        whole: the tree; in a shard_map shapes of the arrays of which the tree has the shards.
    """

    mesh: Mesh
    kind: AxisType | None
    specs: list[PartitionSpec]
    whole: Any


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of an entry of a PartitionSpec: None, a name, or a tuple of names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of_spec(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes of a PartitionSpec."""
    return sum(map(axes_of_entry, spec), ())


def spec_of(sharding: PartitionSpec | NamedSharding) -> PartitionSpec:
    """Returns the PartitionSpec that a sharding is or has."""
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding


def check_axes(argument: str, axes: Iterable[str], mesh: Mapping[str, int]) -> None:
    """Raises ValueError where an axis is none of the mesh's; a mesh without axes has all."""
    unknown = [axis for axis in axes if axis not in mesh]
    if mesh and unknown:
        raise ValueError(
            f"{argument} must name axes of the mesh, got {unknown[0]!r}, which the mesh"
            f" {dict(mesh)} lacks: name some of {[*mesh]}"
        )


def mesh_axes_by_dim(
    spec: PartitionSpec, ndim: int, mesh: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """Returns the mesh axes that each axis of an array of rank `ndim` is sharded over."""
    named = axes_of_spec(spec)
    if len(spec) > ndim or any(axis not in mesh for axis in named):
        raise ValueError(
            f"its sharding {spec} must name axes of the mesh {dict(mesh)} for at most {ndim} axes:"
            " state another with shardings="
        )
    if len({*named}) < len(named):
        raise ValueError(
            f"its sharding {spec} must name each mesh axis once: state another with shardings="
        )
    return _padded(spec, ndim)


def spec_that_fits(
    spec: PartitionSpec, mesh: Mapping[str, int], whole: tuple[int, ...], shape: tuple[int, ...]
) -> PartitionSpec:
    """Returns the spec of a parameter of shape `whole` for an array that belongs to it.

    An axis of another size keeps its mesh axes if they divide that size. An array of another rank
    is on each device whole.
    """
    by_dim = mesh_axes_by_dim(spec, len(whole), mesh)
    if shape == whole:
        return spec
    if len(shape) != len(whole):
        return PartitionSpec()
    entries = (*spec, *[None] * (len(whole) - len(spec)))
    of_dims = zip(entries, by_dim, whole, shape, strict=True)
    return PartitionSpec(
        *(
            entry if n == of_whole or n % math.prod(mesh[name] for name in names) == 0 else None
            for entry, names, of_whole, n in of_dims
        )
    )


def sharding_that_fits(
    sharding: NamedSharding, whole: tuple[int, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """Returns the sharding with `spec_that_fits`."""
    spec = spec_that_fits(sharding.spec, sharding.mesh.shape, whole, shape)
    return sharding.update(spec=spec)


def locate(tree: Any, shardings: Shardings) -> Placed:
    """Returns where the leaves of `tree` are, arrays that are traced or not.

    | mesh axes of size > 1   | `shardings=None`                    | `shardings` stated           |
    | ----------------------- | ----------------------------------- | ---------------------------- |
    | none                    | kind None                           | kind None; Auto without a    |
    |                         |                                     | mesh, where the specs name   |
    |                         |                                     | axes: the compiler knows     |
    | automatic               | Auto                                | Explicit, the stated specs   |
    | explicit                | Explicit, the specs of the types    | Explicit, the stated specs   |
    | automatic and explicit  | ValueError                          | Explicit, the stated specs   |
    | manual                  | ValueError                          | Manual, the stated specs     |
    | manual and others       | NotImplementedError                 | NotImplementedError          |

    Raises:
        ValueError: the sharding cannot be known, or `shardings` does not fit.
        NotImplementedError: some mesh axes are manual, others are not.
    """
    leaves = jax.tree.leaves(tree)
    specs = None if shardings is None else [*map(spec_of, shardings_of_leaves(shardings, tree))]
    mesh = mesh_of(leaves)
    pairs = [*zip(mesh.axis_names, mesh.axis_types, strict=True)]
    types = {name: kind for name, kind in pairs if mesh.shape[name] > 1} if leaves else {}
    kinds = [kind for kind in AxisType if kind in types.values()]
    if specs is not None:
        _check_types(tree, specs)
    if AxisType.Manual in mesh.axis_types and {*kinds} - {AxisType.Manual}:
        raise NotImplementedError(
            f"in a shard_map over some axes of a mesh, {dict(pairs)}: call the optimizer outside"
            " it, or in a shard_map over all axes"
        )
    if specs is None:
        typed = [jax.typeof(x).sharding.spec for x in leaves]
        if kinds == [AxisType.Explicit]:
            return Placed(mesh, AxisType.Explicit, typed, tree)
        if not kinds:
            return Placed(mesh, None, [], tree)
        if kinds == [AxisType.Auto] and not any(map(axes_of_spec, typed)):
            return Placed(mesh, AxisType.Auto, [], tree)
        raise ValueError(
            f"the sharding of the parameters cannot be known on mesh axes {dict(pairs)}: pass"
            " shardings=, the PartitionSpec of each parameter; PartitionSpec() where devices have"
            " them whole, as under jax.pmap"
        )
    if mesh.empty and any(map(axes_of_spec, specs)):  # known by `jit(in_shardings=…)`
        return Placed(mesh, AxisType.Auto, [], tree)
    if kinds == [AxisType.Manual]:
        shapes = [_shape_of_whole(x, s, mesh.shape) for x, s in zip(leaves, specs, strict=True)]
        return Placed(mesh, AxisType.Manual, specs, jax.tree.structure(tree).unflatten(shapes))
    return Placed(mesh, AxisType.Explicit if kinds else None, specs, tree)


def is_in_shard_map() -> bool:
    """Returns whether a shard_map is being traced."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def whole_tree(tree: Any, shardings: Shardings) -> Any:
    """Returns `Placed.whole`; outside a shard_map the sharding need not be known."""
    return locate(tree, shardings).whole if is_in_shard_map() else tree


def shardings_of_leaves(shardings: Shardings, tree: Any) -> list[PartitionSpec | NamedSharding]:
    """Returns the sharding of each leaf of `tree`."""

    return broadcast_prefix("shardings", _as_sharding, shardings, tree, _is_sharding)


def check_shardings(shardings: Shardings) -> None:
    """Raises ValueError where a leaf of a tree of shardings is none. A callable makes its later."""
    if not is_function(shardings):
        for path, node in jax.tree.leaves_with_path(shardings, is_leaf=_is_sharding):
            _as_sharding(path, node)


def mesh_of(leaves: Sequence[jax.Array]) -> Mesh:
    """Returns the mesh of the arrays, or else the mesh in force."""
    meshes = [jax.typeof(x).sharding.mesh for x in leaves] + [jax.sharding.get_abstract_mesh()]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def meshes_of(leaves: Sequence[jax.Array]) -> list[AbstractMesh]:
    """Returns the meshes that the types of the arrays name, each once."""
    meshes = (jax.typeof(x).sharding.mesh.abstract_mesh for x in leaves)
    return [*dict.fromkeys(mesh for mesh in meshes if not mesh.empty)]


def _is_sharding(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec | NamedSharding)


def _as_sharding(path: tuple[Any, ...], node: Any) -> PartitionSpec | NamedSharding:
    """The sharding that a leaf stands for."""
    sharding = PartitionSpec() if node is None else node
    if not _is_sharding(sharding):
        raise ValueError(
            f"shardings{jax.tree_util.keystr(path)} must be a PartitionSpec, a NamedSharding or"
            f" None, got {sharding!r}"
        )
    spec = spec_of(sharding)
    if any(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
        raise ValueError(
            f"shardings{jax.tree_util.keystr(path)} must say how every axis is sharded, got"
            f" {spec}: put None or mesh axes in the place of UNCONSTRAINED"
        )
    return sharding


def _check_types(tree: Any, specs: Sequence[PartitionSpec]) -> None:
    """Raises ValueError where a stated spec is not the spec in the type of an array."""
    for (path, x), spec in zip(jax.tree.leaves_with_path(tree), specs, strict=True):
        typed = jax.typeof(x).sharding
        of_spec, of_type = (_padded(s, x.ndim)[: x.ndim] for s in (spec, typed.spec))
        if {*typed.mesh.axis_types} == {AxisType.Explicit} and of_spec != of_type:
            raise ValueError(
                f"shardings= says {spec} of the parameter {jax.tree_util.keystr(path)}, its type"
                f" {typed.spec}: leave out shardings= on explicit axes, or jax.reshard the array"
            )


def _padded(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes of each entry, none where the array has more axes than entries."""
    return [*map(axes_of_entry, spec)] + [()] * (ndim - len(spec))


def _shape_of_whole(
    shard: jax.Array, spec: PartitionSpec, mesh: Mapping[str, int]
) -> jax.ShapeDtypeStruct:
    """The array of which `shard` is the local part."""
    entries = _padded(spec, len(shard.shape))
    pieces = [math.prod(mesh.get(name, 1) for name in entry) for entry in entries]
    shape = tuple(size * count for size, count in zip(shard.shape, pieces, strict=False))
    return jax.ShapeDtypeStruct(shape, shard.dtype)


# Where JAX wires `custom_partitioning` through. TPUs lack it (jax #38196).
PARTITIONING = frozenset({"cpu", "gpu", "cuda", "rocm"})


def asks_how_to_partition(mesh: Mesh) -> bool:
    """Returns whether the compiler for the devices of a mesh asks how to partition an operation."""
    return platform_of(mesh) in PARTITIONING


def platform_of(mesh: Mesh) -> str:
    """Returns the platform of the devices of a mesh, described ones included."""
    device = mesh.abstract_mesh.abstract_device
    return device.platform if device else _device.current().platform


def traced_for(arrays: Sequence[jax.Array]) -> contextlib.AbstractContextManager:
    """Returns a context in which functions are traced for the TPUs that arrays are on.

    It matters where TPUs are described on a machine whose default device is another. The context is
    that of `jax.set_mesh`, which Pallas kernels for a described GPU need from the caller.
    """
    mesh = mesh_of(arrays).abstract_mesh if arrays else jax.sharding.get_abstract_mesh()
    if platform_of(mesh) != "tpu" or _device.current().platform == "tpu":
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def may_be_sharded(mesh: Mesh, leaves: Sequence[jax.Array]) -> bool:
    """Returns whether the compiler may shard arrays over a mesh that a trace cannot see.

    `jit(in_shardings=…)`, `jit(out_shardings=…)` and a legacy `with mesh:` tell the compiler alone.
    """
    may_know = mesh.empty and is_traced(leaves) and jax.device_count() > 1
    return may_know and asks_how_to_partition(mesh)


def are_whole(arrays: Sequence[jax.Array]) -> bool:
    """Returns whether arrays are traced, and known to be whole on one device, outside `shard_map`.

    Where the mesh has explicit axes, `by_device` takes them off the arrays' types.
    """
    mesh = mesh_of(arrays)
    is_outside = AxisType.Manual not in mesh.axis_types and is_traced(arrays)
    is_one = len(meshes_of(arrays)) < 2 and math.prod(mesh.shape.values()) == 1
    return is_outside and is_one and not may_be_sharded(mesh, arrays)


def are_alike(arrays: Sequence[jax.Array]) -> bool:
    """Returns whether arrays are whole and, if their shapes and dtypes agree, can be stacked."""
    return are_whole(arrays) and AxisType.Explicit not in mesh_of(arrays).axis_types


def are_from_init(mesh: Mesh) -> bool:
    """Returns whether `InitShardings` decides how arrays of the mesh are taken to be sharded."""
    return {*mesh.axis_types} == {AxisType.Auto} and not asks_how_to_partition(mesh)


class _Kept(NamedTuple):
    """A tree of arrays outside `jit`: their meshes, the tree's structure, shapes and specs."""

    meshes: set[AbstractMesh]
    treedef: Any
    shapes: list[tuple[int, ...]]
    specs: list[PartitionSpec]


class InitShardings:
    """The shardings of the parameters of the latest `init` or update outside `jit`.

    There arrays say how they are sharded. Traced ones on automatic axes do not, and the compiler
    for TPUs cannot be asked.

    It is the only memory that an optimizer has beside its state, and has effects on automatic axes
    of TPUs alone, where it saves an exchange by XLA. If arrays in `jit` are sharded otherwise, XLA
    moves them, and results are the same. `shardings=` takes its place.
    """

    def __init__(self) -> None:
        self._latest: _Kept | None = None

    def keep(self, tree: Any) -> None:
        """Keeps the shardings of the arrays, if all of them have one, on any meshes of TPUs.

        An array on a single device, such as one that was never put on a mesh, counts as
        replicated.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if is_traced(leaves):
            return
        shardings = [getattr(x, "sharding", None) for x in leaves]
        meshes = {s.mesh.abstract_mesh for s in shardings if isinstance(s, NamedSharding)}
        on_mesh = (isinstance(s, NamedSharding | None) or len(s.device_set) == 1 for s in shardings)
        if meshes and not any(map(asks_how_to_partition, meshes)) and all(on_mesh):
            specs = [getattr(s, "spec", PartitionSpec()) for s in shardings]
            self._latest = _Kept(meshes, treedef, [x.shape for x in leaves], specs)

    def fill(self, tree: Any, stated: Shardings) -> Shardings:
        """Returns the shardings that are stated, or else what was kept of such a tree."""
        leaves, treedef = jax.tree.flatten(tree)
        if stated is not None or not leaves or self._latest is None:
            return stated
        meshes = {*meshes_of(leaves)} or {mesh_of(leaves).abstract_mesh}
        are_typed = all({*mesh.axis_types} == {AxisType.Explicit} for mesh in meshes)
        are_known = all(len({*mesh.axis_types}) == 1 for mesh in meshes)
        if are_typed or not are_known:
            return None
        if (meshes, treedef, [x.shape for x in leaves]) != self._latest[:3]:
            return None
        types = (jax.typeof(x).sharding for x in leaves)
        specs = [
            own.spec if AxisType.Explicit in own.mesh.axis_types else kept
            for own, kept in zip(types, self._latest.specs, strict=True)
        ]
        return treedef.unflatten(specs)


def warn_of_other_shardings(tree: Any, stated: Shardings) -> None:
    """Warns if an array is sharded over other mesh axes than `shardings=` says.

    It ignores traced arrays and mesh axes of one device.
    """
    leaves = jax.tree.leaves_with_path(tree)
    if stated is None or is_traced([x for _, x in leaves]):
        return
    for (path, x), sharding in zip(leaves, shardings_of_leaves(stated, tree), strict=True):
        own, spec = getattr(x, "sharding", None), spec_of(sharding)
        if not isinstance(own, NamedSharding) or len(own.device_set) == 1:
            continue
        if {*own.mesh.axis_types} == {AxisType.Explicit}:  # `update` raises
            continue
        sizes = dict(own.mesh.shape)
        try:
            by_dim = [mesh_axes_by_dim(each, x.ndim, sizes) for each in (own.spec, spec)]
        except ValueError:  # from `update`, or of another mesh than the array's
            continue
        own_axes, said = ([[a for a in dim if sizes[a] > 1] for dim in dims] for dims in by_dim)
        if own_axes != said:
            warnings.warn(
                f"shardings= says {spec} for the parameter {jax.tree_util.keystr(path)}, but the"
                f" array is sharded as {own.spec}. Each update would move it from one to the other,"
                " and gather it on all devices along mesh axes that shardings= leaves out. Leave"
                f" out shardings=, or pass {own.spec}",
                stacklevel=4,
            )
            return


def by_device(
    function: Callable[[Any, Any], Any], tree: Any, beside: Any, *, needs_plain: bool = False
) -> Any:
    """Returns `function(tree, beside)`, sharded as the tree, of which devices compute their parts.

    Types say how arrays are sharded over explicit mesh axes, even over axes of one device, and not
    every operation takes such arrays.

    Args:
        function: results have the shapes of the tree.
        tree: arrays; no axis that `function` needs whole is sharded.
        beside: a tree of arrays, which each device has whole, and of others.
        needs_plain: whether `function` takes no arrays on explicit axes, even unsharded ones.
    """
    mesh = mesh_of(jax.tree.leaves(tree))
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
    needs_plain = needs_plain and AxisType.Explicit in mesh.axis_types
    if not (needs_plain or any(map(axes_of_spec, jax.tree.leaves(specs)))):
        return function(tree, beside)
    arrays, bind = arrays_of(beside)
    in_force = jax.sharding.get_abstract_mesh()  # `vmap` takes axes from it
    mesh = mesh if in_force.empty else in_force
    run = jax.shard_map(
        lambda tree, arrays: function(tree, bind(arrays)),
        mesh=mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=specs,
        check_vma=False,
    )
    return jax.jit(run)(tree, [*map(whole_everywhere, arrays)])


def whole_everywhere(x: jax.Array) -> jax.Array:
    """An array of the iteration, such as one of `NewtonSchulz(before=)`, that no axis shards."""
    sharding = jax.typeof(x).sharding
    if not any(sharding.spec):
        return x
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def arrays_of(tree: Any) -> tuple[list[jax.Array], Callable[[Sequence[Any]], Any]]:
    """The arrays in a tree, and a function of arrays that gives the tree with them."""
    leaves, treedef = jax.tree.flatten(tree)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def bind(arrays: Sequence[Any]) -> Any:
        values = dict(zip(where, arrays, strict=True))
        return treedef.unflatten(values.get(i, leaf) for i, leaf in enumerate(leaves))

    return [leaves[i] for i in where], bind


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter that a view says the matrices of.

    Attributes:
        name: its path, for messages.
        shape: of the whole array.
        view: where its matrices are.
        spec: in a `shard_map` how the whole array is sharded; None elsewhere.
    """

    name: str
    shape: tuple[int, ...]
    view: View
    spec: PartitionSpec | None = None

    def values(self, function: Callable[[int, int], float]) -> jax.typing.ArrayLike:
        """Returns what broadcasts to `function(rows, cols)` of each element's matrix."""
        values = values_per_matrix(function, self.view, self.shape)
        return values if self.spec is None else local_part(values, self.spec)


def settled_views(views: Views, tree: Any, shardings: Shardings) -> Views:
    """Returns the views of a tree and of its parts, where a callable may look at the whole tree."""
    if not is_function(views):
        return views
    made = views(whole_tree(tree, shardings))
    return lambda _: made  # a callable, because None as a tree would stand for matrices


def parameters_of(
    views: Views, tree: Any, shardings: Shardings, every: Any = None
) -> list[Parameter]:
    """Returns the parameters that are the leaves of `tree`.

    Args:
        views: as for `scale_by_muon`.
        tree: the arrays, in a `shard_map` their shards.
        shardings: as for `scale_by_muon`.
        every: a tree in which no parameter is masked, for a callable of views; None for `tree`.

    Raises:
        ValueError: a view is wrong or does not fit, or as `locate`.
        NotImplementedError: as `locate`.
    """
    settled = settled_views(views, tree if every is None else every, shardings)
    return located(view_of_each_leaf(settled, tree), tree, shardings)


def located(views: Sequence[View | None], tree: Any, shardings: Shardings) -> list[Parameter]:
    """Returns `parameters_of` the tree, of which each leaf has one of the views."""
    specs, whole = [], tree
    if is_in_shard_map():
        _, _, specs, whole = locate(tree, shardings)
    leaves = jax.tree.leaves_with_path(whole)
    own = specs or [None] * len(leaves)
    found = []
    for (path, x), view, spec in zip(leaves, views, own, strict=True):
        name = jax.tree_util.keystr(path)
        view = view_or_matrix(view, name, x.shape)
        with errors_naming(name, x.shape):
            parts_of(view, x.shape)  # raises where the view does not fit
        found.append(Parameter(name, x.shape, view, spec))
    return found


def inner_products(x: Any, y: Any, parameters: Sequence[Parameter]) -> Any:
    """Returns ⟨x, y⟩ at each leaf, in float32 or wider, of whole arrays or of their shards."""
    products, treedef = jax.tree.flatten(
        jax.tree.map(lambda x, y: jnp.sum(wide(x).conj() * y), x, y)
    )
    pairs = zip(products, parameters, strict=True)
    return treedef.unflatten(
        x if own.spec is None else jax.lax.psum(x, axes_of_spec(own.spec)) for x, own in pairs
    )


def local_part(value: Any, spec: PartitionSpec) -> Any:
    """Returns the part on this device of a whole array, or of an array that broadcasts to it."""
    for axis, entry in enumerate(spec):
        names = axes_of_entry(entry)
        if value.shape[axis] > 1 and names:
            pieces = jnp.stack(jnp.split(value, jax.lax.axis_size(names), axis))
            value = pieces[jax.lax.axis_index(names)]
    return value
