"""Who orthogonalizes the matrices of sharded parameters, and what is sent: a plan as a table."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from muon_jax._distributed.cost import Collective, Links, Sent, names_of, size_of
from muon_jax._distributed.kept_sharded import estimate, sharded_form_of
from muon_jax._distributed.plan import Chunk, Plan
from muon_jax._distributed.planning import collectives_of
from muon_jax._table import table

_COLUMNS = "matrices coefficients mode count owners each padding MB dtype µs".split()


@dataclasses.dataclass(frozen=True)
class SharedMatrices:
    """Matrices of one shape with the same owners.

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
    gathers: int = 0
    links: Mapping[str, Sent] = dataclasses.field(default_factory=dict)
    is_measured: bool = True
    block_period: int = 1
    are_shardings_from_init: bool = False

    @property
    def compute_microseconds(self) -> float:
        """A model's time of the iterations, on an H200."""
        return sum(group.microseconds for group in self.groups)

    @property
    def exchange_microseconds(self) -> float:
        """A model's time of all that is sent. Most exchanges overlap with iterations, sums not."""
        return sum(sent.microseconds for sent in self.links.values())

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
            numbers = map(str, (group.count, group.owners, group.each))
            row = [" + ".join(shapes), group.coefficients, group.mode, *numbers]
            row += [f"{group.padding:.0%}", f"{group.megabytes:.1f}", group.dtype]
            rows.append([*row, f"{group.microseconds:.0f}"])
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
    alike: dict[Any, list[Chunk]] = {}
    for chunk in plan.whole:
        alike.setdefault((chunk.leaf.kind, chunk.axes, chunk.dtype), []).append(chunk)
    groups = [
        *(_group(chunks, False, names, plan) for chunks in alike.values()),
        *(_group([chunk], True, names, plan) for chunk in plan.grams),
    ]
    by_axis: dict[str, Sent] = {}
    for collective in collectives_of(plan):
        for name, (num_bytes, time) in collective.sent(links).items():
            before = by_axis.get(name, Sent(0.0, 0.0))
            by_axis[name] = Sent(before.bytes + num_bytes, before.microseconds + time)
    return Exchanges(
        groups=tuple(groups),
        buckets=len(plan.buckets),
        sums=sum(sharded_form_of(chunk.leaf).products.grams for chunk in plan.grams),
        gathers=len(plan.gathers),
        links=by_axis,
        is_measured=not links,
    )


def _group(
    chunks: Sequence[Chunk], is_kept_sharded: bool, names: Sequence[str], plan: Plan
) -> SharedMatrices:
    """What is said of chunks of one kind, exchanged over the same mesh axes."""
    leaf, axes = chunks[0].leaf, chunks[0].axes
    over = ", ".join(names_of(axes))
    if is_kept_sharded:
        (chunk,) = chunks
        owners, each, dtype = 1, chunk.count, sharded_form_of(leaf).dtype
        microseconds, collectives = estimate(chunk)
        mode = f"gram over {over}"
    else:
        owners, each, dtype = size_of(axes), sum(c.slots for c in chunks), chunks[0].dtype
        microseconds = leaf.microseconds(each)
        collectives = [Collective(chunk.bytes, axes) for chunk in chunks for _ in range(2)]
        mode = f"exchange over {over}" if axes else "local"
    count, sent = 0, sum(collective.sent_bytes for collective in collectives)
    shares = plan.shares
    for own, start, stop in itertools.chain.from_iterable(chunk.parts for chunk in chunks):
        share = shares.get(own.index)  # whose results replicas gather
        count += share.count_within(start, stop) if share else stop - start
        sent += share.bytes_of(stop - start) * (share.replicas - 1) if share else 0
    split = [f"split over {', '.join(names_of(leaf.split))}"] * bool(leaf.split)
    blocks = [f"blocks over {', '.join(leaf.blocks)}"] * bool(leaf.blocks)
    return SharedMatrices(
        matrices=leaf.matrices,
        coefficients=names[leaf.iteration],
        mode="; ".join([*split, *blocks, mode]),
        count=count,
        owners=owners * size_of(leaf.split),
        each=each,
        megabytes=sent / 1e6,
        dtype=dtype.name,
        microseconds=microseconds,
        repeated_microseconds=leaf.microseconds(count),
    )
