"""What `muon` does with sharded parameters, before it does it: a table."""

import dataclasses
import math
import operator
from typing import Any

import jax
import optax
from jax.sharding import AxisType, NamedSharding

from muon_jax._distributed import in_pieces as _distributed_gram
from muon_jax._distributed.cost import exchange_microseconds
from muon_jax._distributed.planning import forms_of, make, units_of
from muon_jax._distributed.sharding import Shardings, axes_of, shardings_of_leaves, spec_of
from muon_jax._iteration.form import of
from muon_jax._iteration.recipes import is_traced
from muon_jax._matrices.views import assign
from muon_jax._reports.describe import all_arguments, iteration
from muon_jax._reports.table import table

_COLUMNS = ["matrices", "mode", "count", "owners", "each", "padding", "MB", "dtype", "µs"]


@dataclasses.dataclass(frozen=True)
class Group:
    """Equal matrices with the same owners.

    Attributes:
        matrices: shapes `(batch, m, n)` of what moves together, mostly one matrix.
        mode: `"local"`, or `"exchange over"` these mesh axes, or `"gram over"` them: in pieces.
        count: how many, in all that share the owners.
        owners: the number of devices among which they are divided; 1 where all are local, or where
            all devices work on all.
        each: how many each owner orthogonalizes, padding included.
        megabytes: what each device sends to others, there and back, padding included.
        dtype: of what is sent.
        microseconds: a model's time of the computation, on an H200.
    """

    matrices: tuple[tuple[int, int, int], ...]
    mode: str
    count: int
    owners: int
    each: int
    megabytes: float
    dtype: str
    microseconds: float

    @property
    def padding(self) -> float:
        """The part of the computation that is on padding."""
        return 1 - self.count / max(self.each * self.owners, 1)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What each device does in an update.

    Attributes:
        groups: what is orthogonalized.
        buckets: the number of exchanges in each direction, of whole matrices.
        sums: the number of sums of Gram matrices. Of one matrix each is an all-reduce; of several
            a reduce-scatter and an all-to-all, and what is made of it comes back by an all-to-all
            and an all-gather.
        compute_microseconds: a model's time of the iterations, on an H200.
        exchange_microseconds: of all that is sent, on NVLink; most exchanges overlap with the
            iterations, sums do not.
    """

    groups: tuple[Group, ...]
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
                [" + ".join(shapes), group.mode, *map(str, numbers), f"{group.padding:.0%}"]
                + [f"{group.megabytes:.1f}", group.dtype, f"{group.microseconds:.0f}"]
            )
        sums = f" and {self.sums} sums of Gram matrices" * (self.sums > 0)
        total = (
            f"{2 * self.buckets} exchanges{sums}, {self.exchange_microseconds:.0f} µs, beside"
            f" {self.compute_microseconds:.0f} µs of computation (model of H200s on NVLink)"
        )
        return f"{table(_COLUMNS, rows)}\n{total}"


def explain(
    params: Any,
    shardings: Shardings = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    **arguments: Any,
) -> Explanation:
    """Prints and returns how `muon` with these arguments divides the matrices among devices.

    Args:
        params: arrays, or shapes (`jax.ShapeDtypeStruct`), of the dtype of the momentum.
        shardings: as for `muon`; None for those that the arrays have.
        mesh: None for that of the shardings, or of `jax.set_mesh`.
        **arguments: those of `muon`, without the learning rate; what does not concern the matrices
            is ignored.

    Raises:
        TypeError: `muon` has no such argument.
        ValueError: an argument is wrong, or a sharding or the mesh is missing, or in a shard_map.
    """
    given = all_arguments(arguments)
    keywords = iteration(given)
    leaves, treedef = jax.tree.flatten(params)
    assigned = assign(given["muon_weight_dimension_numbers"], params)
    views = treedef.unflatten(assigned)
    matrices = treedef.unflatten(  # as `scale_by_muon` gets them
        optax.MaskedNode() if view is None or 0 in p.shape else p
        for p, view in zip(leaves, assigned, strict=True)
    )
    placed = _stated(matrices) if shardings is None else shardings_of_leaves(shardings, matrices)
    meshes = [s.mesh for s in placed if isinstance(s, NamedSharding)]
    meshes.append(jax.sharding.get_abstract_mesh())
    specs = [*map(spec_of, placed)]
    mesh = mesh or meshes[0]
    if AxisType.Manual in mesh.axis_types:
        raise ValueError("explain needs whole parameters, got shards: call it outside of shard_map")
    if mesh.empty and any(map(axes_of, specs)):
        raise ValueError(f"explain got {specs[0]} and no mesh: pass mesh=, or use jax.set_mesh")
    # Not as it stands: a tree of parameters may be callable, and so is that of their views.
    units = units_of(lambda _: views, matrices)
    forms = [forms_of(leaf, keywords) for leaf in units]
    plan = make(
        units, specs, mesh.shape, forms, given["max_group_bytes"], given["distributed_gram"]
    )

    found: dict[Any, list[int]] = {}  # [count, each, bytes]
    for leaf in plan.local:
        total = found.setdefault((leaf.matrices, leaf.dtype, (), leaf.dtype), [0, 0, 0])
        total[:2] = [number + leaf.units for number in total[:2]]
    exchange = 0.0
    for bucket in plan.buckets:
        sent = [bucket.bytes_of(c) * (bucket.owners - 1) // bucket.owners for c in bucket.chunks]
        exchange += 2 * exchange_microseconds(sum(sent))
        for chunk, num_bytes in zip(bucket.chunks, sent, strict=True):
            leaf = chunk.parts[0][0]
            key = (leaf.matrices, leaf.dtype, bucket.axes, bucket.dtype)
            total = found.setdefault(key, [0, 0, 0])
            total[:] = map(operator.add, total, (chunk.count, chunk.slots, 2 * num_bytes))
    groups, sums = [], 0
    for (shapes, dtype, axes, wire), (count, each, num_bytes) in found.items():
        stacks = [(each * batch, m, n) for batch, m, n in shapes]
        times = [of(x, dtype, **keywords).products.microseconds(x) for x in stacks]
        owners = math.prod(size for _, size in axes)
        mode = f"exchange over {_names(axes)}" if axes else "local"
        groups.append(
            Group(shapes, mode, count, owners, each, num_bytes / 1e6, wire.name, sum(times))
        )
    for bucket in plan.grams:
        group, estimate, rounds = _in_pieces(bucket, forms)
        groups.append(group)
        exchange += sum(map(exchange_microseconds, estimate.sent))
        sums += rounds
    time = sum(group.microseconds for group in groups)
    explanation = Explanation(tuple(groups), len(plan.buckets), sums, time, exchange)
    print(explanation)
    return explanation


def _in_pieces(bucket, forms):
    """The group of matrices that stay in pieces, what it costs, how many sums it needs."""
    (chunk,) = bucket.chunks
    leaf, _, _ = chunk.parts[0]
    form, count = forms[leaf.index].in_pieces, chunk.count
    estimate = _distributed_gram.estimate(bucket, form)
    mode, megabytes = f"gram over {_names(bucket.axes)}", sum(estimate.sent) / 1e6
    time, dtype = estimate.compute, form.dtype.name
    group = Group(leaf.matrices, mode, count, 1, count, megabytes, dtype, time)
    return group, estimate, form.products.grams


def _names(axes):
    return ", ".join(name for name, _ in axes)


def _stated(params):
    """The shardings of arrays: one device is none."""
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
    return [s if isinstance(s, NamedSharding) else jax.sharding.PartitionSpec() for s in stated]
