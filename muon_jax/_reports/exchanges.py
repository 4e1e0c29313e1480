"""Who orthogonalizes the matrices of sharded parameters, and what is sent: a plan as a table."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from muon_jax._distributed.cost import Links, Sent
from muon_jax._distributed.kept_sharded import estimate
from muon_jax._distributed.plan import Bucket, Leaf, Plan, Share
from muon_jax._distributed.planning import collectives_of
from muon_jax._distributed.shares import gathered_together
from muon_jax._iteration.form import Form
from muon_jax._table import table

_COLUMNS = "matrices coefficients mode count owners each padding MB dtype µs".split()


@dataclasses.dataclass(frozen=True)
class SharedMatrices:
    """Equal matrices with the same owners.

    Attributes:
        matrices: shapes `(batch, m, n)` of what moves together, mostly one matrix.
        coefficients: their name, or the numbers.
        mode: `"local"`, `"exchange over"` mesh axes, or `"gram over"` mesh axes: sharded. Before
            it, `"split over"` axes whose replicas split the work, and `"blocks over"` axes that cut
            matrices in blocks, which are then the matrices of the group.
        count: how many there are on all devices that share the owners.
        owners: how many devices share the work; 1 where the matrices are local, or where every
            device works on all of them.
        each: how many each owner orthogonalizes, padding included.
        megabytes: what each device sends to others, there and back, padding included.
        dtype: of what is sent.
        microseconds: a model's time of the computation, on an H200.
        repeated_microseconds: the same if every device orthogonalized all `count`.
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
    repeated_microseconds: float

    @property
    def padding(self) -> float:
        """The share of the computation that is on padding."""
        return 1 - self.count / max(self.each * self.owners, 1)


@dataclasses.dataclass(frozen=True)
class Exchanges:
    """What each device does in an update, and what it sends.

    Attributes:
        groups: what is orthogonalized.
        buckets: the number of exchanges in each direction, of whole matrices.
        sums: the number of sums of Gram matrices. The sum for one matrix is an all-reduce. The sums
            for several matrices are a reduce-scatter, and an all-gather in teams of devices that
            share a matrix; one more all-gather brings the results to all devices.
        compute_microseconds: a model's time of the iterations, on an H200.
        exchange_microseconds: a model's time of all that is sent. Most exchanges overlap with the
            iterations; sums do not.
        gathers: the number of all-gathers of updates, of which replicas make a share each.
        links: by mesh axis the bytes that each device sends over it, and the µs of a model.
        is_measured: whether the model has the measured bandwidth and latency of NVLink on all axes.
        block_period: P, of whose steps one is as above, and others exchange nothing.
        are_shardings_from_init: whether, in `jit`, the optimizer takes arrays to be sharded as
            those of the latest `init` outside `jit`: on automatic axes of TPUs.
    """

    groups: tuple[SharedMatrices, ...]
    buckets: int
    sums: int
    compute_microseconds: float
    exchange_microseconds: float
    gathers: int = 0
    links: Mapping[str, Sent] = dataclasses.field(default_factory=dict)
    is_measured: bool = True
    block_period: int = 1
    are_shardings_from_init: bool = False

    @property
    def imbalance(self) -> float:
        """The computation of an owner, padding included, over the mean without padding."""
        mean = sum(group.microseconds * (1 - group.padding) for group in self.groups)
        return self.compute_microseconds / mean if mean else 1.0

    @property
    def repeated_microseconds(self) -> float:
        """A model's time of the computation if every device orthogonalized all matrices."""
        return sum(group.repeated_microseconds for group in self.groups)

    @property
    def mean_megabytes(self) -> float:
        """What each device sends to others in a step, in the mean over a period."""
        return sum(group.megabytes for group in self.groups) / self.block_period

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
        gathers = f" and {self.gathers} all-gather{'s' * (self.gathers > 1)} of updates"
        gathers *= self.gathers > 0
        total = (
            f"{2 * self.buckets} exchanges{sums}{gathers}, {self.exchange_microseconds:.0f} µs,"
            f" beside {self.compute_microseconds:.0f} µs of computation"
            f" (model of H200s {'on NVLink' if self.is_measured else 'on the stated links'})"
        )
        lines = [table(_COLUMNS, rows), total]
        if self.links:
            lines.append(
                f"computation: {self.imbalance:.2f} times the mean of the owners,"
                f" {self.repeated_microseconds:.0f} µs if each of them did all"
            )
        for name, sent in self.links.items():
            lines.append(f"over {name}: {sent.bytes / 1e6:.1f} MB, {sent.microseconds:.0f} µs")
        if self.block_period > 1:
            lines.append(
                f"So is one step of {self.block_period}; the others exchange nothing: in the mean"
                f" {self.mean_megabytes:.1f} MB a step"
            )
        if self.are_shardings_from_init:
            lines.append("in jit, if the latest `init` outside of jit had these shardings")
        return "\n".join(lines)


def exchanges_of(plan: Plan, names: Sequence[str], links: Links) -> Exchanges:
    """Returns what the plan says.

    Args:
        plan: of the parameters.
        names: of the coefficients of each iteration.
        links: between the devices.
    """
    rows: dict[Any, list[tuple[Leaf, int, int, int]]] = {}
    shares = {share.stack.index: share for share in plan.shares}
    for leaf in plan.local:
        dtype = shares[leaf.index].dtype if leaf.index in shares else leaf.dtype
        count, gathered = _of_replicas([(leaf, 0, leaf.units)], shares)
        row = rows.setdefault((leaf.kind, (), dtype), [])
        row.append((leaf, count, leaf.units, gathered))
    for bucket in plan.buckets:
        for chunk in bucket.chunks:
            leaf = chunk.leaf
            count, gathered = _of_replicas(chunk.parts, shares)
            one_way = bucket.bytes_of(chunk) * (bucket.owners - 1) // bucket.owners
            row = rows.setdefault((leaf.kind, bucket.axes, bucket.dtype), [])
            row.append((leaf, count, chunk.slots, 2 * one_way + gathered))
    groups = []
    for (_, axes, dtype), members in rows.items():
        leaf = members[0][0]
        count = sum(count for _, count, _, _ in members)
        each = sum(each for _, _, each, _ in members)
        num_bytes = sum(sent for _, _, _, sent in members)
        groups.append(
            SharedMatrices(
                matrices=leaf.matrices,
                coefficients=names[leaf.iteration],
                mode=_mode(leaf, f"exchange over {_names(axes)}" if axes else "local"),
                count=count,
                owners=math.prod(size for _, size in axes + leaf.split),
                each=each,
                megabytes=num_bytes / 1e6,
                dtype=dtype.name,
                microseconds=leaf.microseconds(each),
                repeated_microseconds=leaf.microseconds(count),
            )
        )
    sums = 0
    for bucket in plan.grams:
        group, num_sums = _group_kept_sharded(bucket, names, shares)
        groups.append(group)
        sums += num_sums
    by_axis: dict[str, Sent] = {}
    for name, (num_bytes, time) in itertools.chain.from_iterable(
        collective.sent(links).items() for collective in collectives_of(plan)
    ):
        before = by_axis.get(name, Sent(0.0, 0.0))
        by_axis[name] = Sent(before.bytes + num_bytes, before.microseconds + time)
    return Exchanges(
        groups=tuple(groups),
        buckets=len(plan.buckets),
        sums=sums,
        compute_microseconds=sum(group.microseconds for group in groups),
        exchange_microseconds=sum(sent.microseconds for sent in by_axis.values()),
        gathers=len(gathered_together(plan.shares)),
        links=by_axis,
        is_measured=not links,
    )


def _of_replicas(
    parts: Sequence[tuple[Leaf, int, int]], shares: Mapping[int, Share]
) -> tuple[int, int]:
    """The units of all replicas that split these, and the bytes of results that a device sends.

    Args:
        parts: as those of a chunk.
        shares: by the index of their stack.
    """
    count, num_bytes = 0, 0
    for leaf, start, stop in parts:
        share = shares.get(leaf.index)
        count += share.count_within(start, stop) if share else stop - start
        num_bytes += share.bytes_of(stop - start) * (share.replicas - 1) if share else 0
    return count, num_bytes


def _group_kept_sharded(
    bucket: Bucket, names: Sequence[str], shares: Mapping[int, Share]
) -> tuple[SharedMatrices, int]:
    """The group of matrices that stay sharded, and how many sums it has."""
    (chunk,) = bucket.chunks
    leaf = chunk.leaf
    form = leaf.sharded_form
    assert isinstance(form, Form)
    cost = estimate(bucket)
    count, gathered = _of_replicas(chunk.parts, shares)
    group = SharedMatrices(
        matrices=leaf.matrices,
        coefficients=names[leaf.iteration],
        mode=_mode(leaf, f"gram over {_names(bucket.axes)}"),
        count=count,
        owners=math.prod(size for _, size in leaf.split),
        each=chunk.count,
        megabytes=(sum(collective.sent_bytes for collective in cost.collectives) + gathered) / 1e6,
        dtype=form.dtype.name,
        microseconds=cost.compute,
        repeated_microseconds=leaf.microseconds(count),
    )
    return group, form.products.grams


def _mode(leaf: Leaf, mode: str) -> str:
    """The mode, with what happens over mesh axes that matrices are not exchanged over."""
    split = [f"split over {_names(leaf.split)}"] * bool(leaf.split)
    blocks = [f"blocks over {', '.join(leaf.blocks)}"] * bool(leaf.blocks)
    return "; ".join([*split, *blocks, mode])


def _names(axes: Sequence[tuple[str, int]]) -> str:
    return ", ".join(name for name, _ in axes)
