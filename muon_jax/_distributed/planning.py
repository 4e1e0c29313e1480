"""From parameters to a plan: the forms of their matrices, and which of them stay in pieces."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from muon_jax._coefficients import Iterations
from muon_jax._distributed.buckets import deal
from muon_jax._distributed.cost import by_owners
from muon_jax._distributed.exchange_axes import ExchangeAxes
from muon_jax._distributed.in_pieces import estimate, why_not_in_pieces
from muon_jax._distributed.links import Links
from muon_jax._distributed.outside import placed_within
from muon_jax._distributed.placement import leaf_of
from muon_jax._distributed.plan import Bucket, Leaf, Plan, Share
from muon_jax._distributed.plan_cost import microseconds_of
from muon_jax._distributed.shares import shares_of
from muon_jax._iteration.form import Form
from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._matrices.shape_factors import ScaleOfBlocks
from muon_jax._matrices.views import Views, views_of_leaves

# The largest number of bytes that a device sends at once. Matrices of this size fill a GPU, and the
# exchange of one bucket overlaps with the computation of another.
MAX_BUCKET_BYTES = 2**28


class Limits(NamedTuple):
    """What the caller says of groups and exchanges, as for `scale_by_muon`.

    Attributes:
        distributed_gram: whether sharded matrices stay in pieces; None for a cost model's choice.
        exchange_axes: which matrices are exchanged over, and what happens over others.
        scale_of_blocks: the scale of updates that blocks have in place of their matrices.
        links: between the devices, for the cost model.
    """

    distributed_gram: bool | None = None
    exchange_axes: ExchangeAxes = ExchangeAxes()
    scale_of_blocks: ScaleOfBlocks = "none"
    links: Links = Links()

    def check_names(self, mesh: Mapping[str, int]) -> None:
        """Raises ValueError where an axis is none of the mesh's."""
        self.exchange_axes.check_names(mesh)
        self.links.check_names(mesh)

    def on_mesh(self, mesh: Mapping[str, int]) -> "Limits":
        """Returns the same without the names of axes of other meshes."""
        return self._replace(
            exchange_axes=self.exchange_axes.on_mesh(mesh), links=self.links.on_mesh(mesh)
        )


def max_bucket_bytes(iterations: Sequence[NewtonSchulz]) -> int:
    """Returns the most bytes that a device sends at once."""
    stated = [x.max_group_bytes for x in iterations if x.max_group_bytes is not None]
    return min([*stated, MAX_BUCKET_BYTES])


def units_of(views: Views, tree: Any, iterations: Iterations) -> list[Leaf]:
    """Returns the leaves of `tree` for plans, with the forms of their matrices.

    Args:
        views: as for `views_of_leaves`.
        tree: whole arrays, or shapes of them.
        iterations: that will run on the matrices.

    Raises:
        ValueError: a leaf has no view, or one that does not fit.
    """
    pairs = zip(views_of_leaves(views, tree), jax.tree.leaves(tree), strict=True)
    leaves = [leaf_of(i, name, x, view) for i, ((name, view), x) in enumerate(pairs)]
    return [
        _with_forms(dataclasses.replace(leaf, iteration=i), iterations.distinct[i])
        for leaf, i in zip(leaves, iterations.of_leaves, strict=True)
    ]


def _with_forms(leaf: Leaf, iteration: NewtonSchulz) -> Leaf:
    """The leaf with its forms.

    Float32 matrices that the iteration multiplies in 16 bits are exchanged in those 16 bits. All
    others are exchanged in their own dtype.
    """
    forms = tuple(iteration.form((m, n), leaf.dtype) for _, m, n in leaf.matrices)
    return dataclasses.replace(
        leaf,
        wire=_wire_dtype(leaf, forms),
        forms=forms,
        form_in_pieces=why_not_in_pieces(leaf) or iteration.form_in_pieces(leaf.dtype),
    )


def _wire_dtype(leaf: Leaf, forms: Sequence[Form]) -> np.dtype:
    """The dtype in which matrices of these forms, or their results, are exchanged."""
    dtypes = {form.dtype for form in forms}
    is_half = len(dtypes) == 1 and jnp.finfo(*dtypes).bits == 16
    return jnp.dtype(dtypes.pop() if is_half and leaf.dtype == jnp.float32 else leaf.dtype)


def make_plan(
    units: Sequence[Leaf],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[str, int],
    limits: Limits,
    iterations: Sequence[NewtonSchulz],
) -> Plan:
    """Returns the plan for parameters with these specs.

    | `distributed_gram` | a kind of matrices that could be exchanged stays in pieces where |
    | ------------------ | ---------------------------------------------------------------- |
    | False              | never                                                            |
    | True               | it can                                                           |
    | None               | it can, no device has a replica, and a model finds it faster     |

    Where replicas do what is faster, this makes two plans, in which all of them repeat the work or
    split it, and returns the faster. Both keep the same matrices in pieces.

    Args:
        units: the parameters.
        specs: of each parameter.
        mesh: sizes of the mesh's axes, in its order.
        limits: as the caller says.
        iterations: with which the units were made.

    Raises:
        ValueError: no sharded matrix can stay in pieces, as `distributed_gram=True` asks; the mesh
            lacks an axis that `limits` name; or as `placed_within`.
    """

    def stays(bucket: Bucket) -> bool:
        (leaf, _, _), *_ = bucket.chunks[0].parts
        if leaf.summed:
            return True
        if limits.distributed_gram is False or _hindrances(bucket):
            return False
        return bool(limits.distributed_gram) or (
            not any(leaf.is_replicated for leaf in _leaves_of(bucket))
            and _is_faster_in_pieces(bucket, limits.links)
        )

    if not limits.exchange_axes.is_decided:
        words = map(limits.exchange_axes.decided, ("repeat", "split"))
        stated = (limits._replace(exchange_axes=exchange_axes) for exchange_axes in words)
        plans = [make_plan(units, specs, mesh, each, iterations) for each in stated]
        return min(plans, key=lambda plan: microseconds_of(plan, limits.links))
    limits.check_names(mesh)
    leaves = [
        placed_within(leaf, spec, mesh, limits.exchange_axes, limits.scale_of_blocks)
        for leaf, spec in zip(units, specs, strict=True)
    ]
    leaves = [_with_forms(x, iterations[x.iteration]) if x.blocks else x for x in leaves]
    _check_pieces(leaves)
    shares = shares_of(leaves)
    repeated = [leaf for leaf in leaves if not leaf.split]
    stacks = [share.stack for share in shares]
    plan = deal(repeated + stacks, mesh, max_bucket_bytes(iterations), stays)
    if limits.distributed_gram and plan.buckets and not plan.grams:
        name, reason = next(itertools.chain.from_iterable(map(_hindrances, plan.buckets)))
        raise ValueError(
            f"distributed_gram=True, but no sharded matrix can stay in pieces; the parameter"
            f" {name}: {reason}. Pass distributed_gram=None"
        )
    return dataclasses.replace(plan, shares=tuple(_with_dtype(share, plan) for share in shares))


def _check_pieces(leaves: Sequence[Leaf]) -> None:
    """Raises ValueError where matrices have to stay in pieces, and cannot."""
    for leaf in leaves:
        if leaf.summed and isinstance(leaf.form_in_pieces, str):
            raise ValueError(
                f"the parameter {leaf.name} of shape {leaf.parameter_shape}: outside='gram', but"
                f" its matrices cannot stay in pieces: {leaf.form_in_pieces}. Pass outside='block',"
                " or name in exchange_axes the mesh axes that shard it"
            )


def _with_dtype(share: Share, plan: Plan) -> Share:
    """The share with the dtype of its results in that plan, which its all-gather is in."""
    in_pieces = {leaf.index for bucket in plan.grams for leaf in _leaves_of(bucket)}
    forms = share.stack.forms
    if share.stack.index in in_pieces:
        assert isinstance(share.stack.form_in_pieces, Form)
        forms = (share.stack.form_in_pieces,)
    return dataclasses.replace(share, dtype=_wire_dtype(share.stack, forms))


def _leaves_of(bucket: Bucket) -> list[Leaf]:
    return [leaf for chunk in bucket.chunks for leaf, _, _ in chunk.parts]


def _hindrances(bucket: Bucket) -> list[tuple[str, str]]:
    """The parameters of the bucket that cannot stay in pieces, by name, and why."""
    found = ((leaf.name, leaf.form_in_pieces) for leaf in _leaves_of(bucket))
    return [(name, reason) for name, reason in found if isinstance(reason, str)]


def _is_faster_in_pieces(bucket: Bucket, links: Links) -> bool:
    """Whether matrices, fewer than the devices, are orthogonalized faster in pieces than whole."""
    (chunk,) = bucket.chunks
    if chunk.count >= bucket.owners:
        return False
    leaf = chunk.parts[0][0]
    ((_, m, n),), (form,) = leaf.matrices, leaf.forms
    whole = by_owners(form.products, (m, n), bucket.axes, bucket.dtype.itemsize)
    return estimate(bucket).microseconds(links) < whole.microseconds(links)
