"""`explain`: what `muon` will do with sharded parameters, as data and as a table."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax._distributed.cost import exchange_microseconds
from muon_jax._distributed.in_pieces import estimate
from muon_jax._distributed.plan import Bucket, Chunk, Leaf, Plan
from muon_jax._distributed.planning import Limits, make_plan, units_of
from muon_jax._distributed.sharding import (
    Mesh,
    Shardings,
    axes_of_spec,
    shardings_of_leaves,
    spec_of,
)
from muon_jax._iteration.form import Form
from muon_jax._iteration.recipes import is_traced
from muon_jax._reports.arguments import (
    all_arguments,
    iterations_of_muon,
    matrices_of_muon,
    views_of_muon,
)
from muon_jax._reports.table import table
from muon_jax._tree_checks import check_params
from pallas_kernels._promotion import standard_promotion

_COLUMNS = [
    "matrices",
    "coefficients",
    "mode",
    "count",
    "owners",
    "each",
    "padding",
    "MB",
    "dtype",
    "µs",
]


@dataclasses.dataclass(frozen=True)
class ExplainedGroup:
    """Equal matrices with the same owners.

    Attributes:
        matrices: shapes `(batch, m, n)` of what moves together, mostly one matrix.
        coefficients: their name, or the numbers.
        mode: `"local"`, `"exchange over"` mesh axes, or `"gram over"` mesh axes: in pieces.
        count: how many there are on all devices that share the owners.
        owners: how many devices share the work; 1 where the matrices are local, or where every
            device works on all of them.
        each: how many each owner orthogonalizes, padding included.
        megabytes: what each device sends to others, there and back, padding included.
        dtype: of what is sent.
        microseconds: a model's time of the computation, on an H200.
    """

    matrices: tuple[tuple[int, int, int], ...]
    coefficients: str
    mode: str
    count: int
    owners: int
    each: int
    megabytes: float
    dtype: str
    microseconds: float

    @property
    def padding(self) -> float:
        """The share of the computation that is on padding."""
        return 1 - self.count / max(self.each * self.owners, 1)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What each device does in an update.

    Attributes:
        groups: what is orthogonalized.
        buckets: the number of exchanges in each direction, of whole matrices.
        sums: the number of sums of Gram matrices. The sum for one matrix is an all-reduce. The sums
            for several matrices are a reduce-scatter and an all-to-all, and the result comes back
            by an all-to-all and an all-gather.
        compute_microseconds: a model's time of the iterations, on an H200.
        exchange_microseconds: a model's time of all that is sent, on NVLink. Most exchanges overlap
            with the iterations; sums do not.
    """

    groups: tuple[ExplainedGroup, ...]
    buckets: int
    sums: int
    compute_microseconds: float
    exchange_microseconds: float

    def __str__(self) -> str:
        rows = []
        for group in self.groups:
            shapes = ("×".join(map(str, shape[shape[0] == 1 :])) for shape in group.matrices)
            numbers = (group.count, group.owners, group.each)
            rows.append(
                [
                    " + ".join(shapes),
                    group.coefficients,
                    group.mode,
                    *map(str, numbers),
                    f"{group.padding:.0%}",
                ]
                + [f"{group.megabytes:.1f}", group.dtype, f"{group.microseconds:.0f}"]
            )
        sums = f" and {self.sums} sums of Gram matrices" * (self.sums > 0)
        total = (
            f"{2 * self.buckets} exchanges{sums}, {self.exchange_microseconds:.0f} µs, beside"
            f" {self.compute_microseconds:.0f} µs of computation (model of H200s on NVLink)"
        )
        return f"{table(_COLUMNS, rows)}\n{total}"


@standard_promotion()
def explain(
    params: Any, shardings: Shardings = None, mesh: Mesh | None = None, **arguments: Any
) -> Explanation:
    """Prints and returns how `muon` with these arguments shares the matrices among devices.

    Args:
        params: arrays, or shapes (`jax.ShapeDtypeStruct`), of the dtype of the momentum.
        shardings: as for `muon`; None for the shardings that the arrays have.
        mesh: None for the mesh of the shardings, or of `jax.set_mesh`.
        **arguments: those of `muon`, without the learning rate. Arguments that do not concern the
            matrices are ignored.

    Raises:
        TypeError: `muon` has no such argument, or `params` is None.
        ValueError: an argument is wrong; a sharding or the mesh is missing; or the call is in a
            shard_map.
    """
    check_params(params)
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh | None):
        raise TypeError(f"mesh must be a Mesh or None, got {mesh!r}: pass that of the shardings")
    given = all_arguments(arguments)
    views, matrices = _matrices_of(params, given)
    placed = _stated_shardings(matrices) if shardings is None else None
    placed = placed or shardings_of_leaves(shardings, matrices)
    specs = [*map(spec_of, placed)]
    mesh = _mesh_for(placed, mesh)
    # A callable, because a tree of views may itself be callable.
    iterations = iterations_of_muon(given, matrices)
    units = units_of(lambda _: views, matrices, iterations)
    limits = Limits(given["max_group_bytes"], given["distributed_gram"])
    explanation = _explained(make_plan(units, specs, mesh.shape, limits), iterations.names)
    print(explanation)
    return explanation


def _matrices_of(params: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """The views and the parameters that are exchanged: others, and empty ones, are masked."""
    leaves, treedef = jax.tree.flatten(params)
    views = views_of_muon(given, params)
    full = [None if 0 in p.shape else view for p, view in zip(leaves, views, strict=True)]
    return treedef.unflatten(views), matrices_of_muon(params, full)


def _mesh_for(placed: Sequence[PartitionSpec | NamedSharding], mesh: Mesh | None) -> Mesh:
    """The mesh: as given, else of the shardings, else in force.

    Raises:
        ValueError: there is none, but specs name its axes; or a shard_map is being traced.
    """
    meshes: list[Mesh] = [s.mesh for s in placed if isinstance(s, NamedSharding)]
    meshes.append(jax.sharding.get_abstract_mesh())
    mesh, specs = mesh or meshes[0], [*map(spec_of, placed)]
    if AxisType.Manual in mesh.axis_types:
        raise ValueError("explain needs whole parameters, got shards: call it outside of shard_map")
    if mesh.empty and any(map(axes_of_spec, specs)):
        raise ValueError(f"explain got {specs[0]} and no mesh: pass mesh=, or use jax.set_mesh")
    return mesh


class _Row(NamedTuple):
    """What the matrices of one row of the table have in common.

    Attributes:
        leaf: one of their parameters.
        axes: names and sizes of the mesh axes that the owners are along; none where local.
        dtype: of what is sent.
        coefficients: of the matrices.
    """

    leaf: Leaf
    axes: tuple[tuple[str, int], ...]
    dtype: Any
    coefficients: str

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for parameters of one row."""
        return self.leaf.kind, self.axes, self.dtype

    def group(self, count: int, each: int, num_bytes: int) -> ExplainedGroup:
        """The row for so many matrices, of which each owner has `each`, and bytes sent."""
        stacks = [(each * batch, m, n) for batch, m, n in self.leaf.matrices]
        forms = zip(self.leaf.forms, stacks, strict=True)
        return ExplainedGroup(
            matrices=self.leaf.matrices,
            coefficients=self.coefficients,
            mode=f"exchange over {_names(self.axes)}" if self.axes else "local",
            count=count,
            owners=math.prod(size for _, size in self.axes),
            each=each,
            megabytes=num_bytes / 1e6,
            dtype=self.dtype.name,
            microseconds=sum(form.products.microseconds(stack) for form, stack in forms),
        )


def _explained(plan: Plan, names: Sequence[str]) -> Explanation:
    rows: dict[Any, tuple[_Row, int, int, int]] = {}

    def add(row: _Row, count: int, each: int, num_bytes: int) -> None:
        _, counts, eaches, sent = rows.get(row.key, (row, 0, 0, 0))
        rows[row.key] = (row, counts + count, eaches + each, sent + num_bytes)

    for leaf in plan.local:
        row = _Row(leaf, (), leaf.dtype, names[leaf.iteration])
        add(row, leaf.units, leaf.units, 0)
    exchange = 0.0
    for bucket in plan.buckets:
        sent = [_sent(bucket, chunk) for chunk in bucket.chunks]
        exchange += 2 * exchange_microseconds(sum(sent))
        for chunk, num_bytes in zip(bucket.chunks, sent, strict=True):
            leaf = chunk.parts[0][0]
            row = _Row(leaf, bucket.axes, bucket.dtype, names[leaf.iteration])
            add(row, chunk.count, chunk.slots, 2 * num_bytes)
    groups = [row.group(*numbers) for row, *numbers in rows.values()]
    sums = 0
    for bucket in plan.grams:
        group, of_sums, num_sums = _group_in_pieces(bucket, names)
        groups.append(group)
        exchange += of_sums
        sums += num_sums
    time = sum(group.microseconds for group in groups)
    return Explanation(tuple(groups), len(plan.buckets), sums, time, exchange)


def _sent(bucket: Bucket, chunk: Chunk) -> int:
    """The bytes of a chunk that each device sends to others, one way."""
    return bucket.bytes_of(chunk) * (bucket.owners - 1) // bucket.owners


def _group_in_pieces(bucket: Bucket, names: Sequence[str]) -> tuple[ExplainedGroup, float, int]:
    """The group of matrices that stay in pieces, the µs of its exchanges, and its sums."""
    (chunk,) = bucket.chunks
    leaf = chunk.parts[0][0]
    form, count = leaf.form_in_pieces, chunk.count
    assert isinstance(form, Form)
    cost = estimate(bucket, form)
    group = ExplainedGroup(
        matrices=leaf.matrices,
        coefficients=names[leaf.iteration],
        mode=f"gram over {_names(bucket.axes)}",
        count=count,
        owners=1,
        each=count,
        megabytes=sum(cost.sent) / 1e6,
        dtype=form.dtype.name,
        microseconds=cost.compute,
    )
    return group, sum(map(exchange_microseconds, cost.sent)), form.products.grams


def _names(axes: Sequence[tuple[str, int]]) -> str:
    return ", ".join(name for name, _ in axes)


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
