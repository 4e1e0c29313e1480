"""From parameters to a plan: the forms of their matrices, and what the plan costs."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from muon_jax._coefficients import Iterations
from muon_jax._distributed.buckets import deal
from muon_jax._distributed.cost import Collective, Estimate, Links
from muon_jax._distributed.exchange import Exchange
from muon_jax._distributed.kept_sharded import estimate, why_not_kept_sharded
from muon_jax._distributed.placement import leaf_of, placed_within
from muon_jax._distributed.plan import Bucket, Leaf, Plan, Share
from muon_jax._distributed.sharding import Parameter
from muon_jax._distributed.shares import gathered_together, shares_of
from muon_jax._iteration.form import Form
from muon_jax._iteration.newton_schulz import NewtonSchulz

# The largest number of bytes that a device sends at once. Matrices of this size fill a GPU, and the
# exchange of one bucket overlaps with the computation of another.
MAX_BUCKET_BYTES = 2**28


def max_bucket_bytes(iterations: Sequence[NewtonSchulz]) -> int:
    """Returns the most bytes that a device sends at once."""
    stated = [x.max_group_bytes for x in iterations if x.max_group_bytes is not None]
    return min([*stated, MAX_BUCKET_BYTES])


def units_of(
    parameters: Sequence[Parameter], dtypes: Sequence[np.dtype], iterations: Iterations
) -> list[Leaf]:
    """Returns the parameters for plans, as arrays of these dtypes, with their matrices' forms."""
    leaves = [
        leaf_of(i, own.name, jax.ShapeDtypeStruct(own.shape, dtype), own.view)
        for i, (own, dtype) in enumerate(zip(parameters, dtypes, strict=True))
    ]
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
        sharded_form=why_not_kept_sharded(leaf) or iteration.sharded_form(leaf.dtype),
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
    exchange: Exchange,
    iterations: Sequence[NewtonSchulz],
) -> Plan:
    """Returns the plan for parameters with these specs.

    Where replicas do what is faster, that is the faster of two plans, in which all of them repeat
    the work or split it. Both keep the same matrices sharded.

    Raises:
        ValueError: no sharded matrix can stay sharded, as `"gram_or_exchange"` asks; the
            mesh lacks an axis that `exchange` names; or as `placed_within`.
    """
    exchange.check_names(mesh)
    is_modeled = any(size > 1 and exchange.replicas(k) == "faster" for k, size in mesh.items())
    words = ("repeat", "split") if is_modeled else ("repeat",)
    plans = [_plan(units, specs, mesh, exchange, word, iterations) for word in words]
    if not is_modeled:
        return plans[0]
    return min(plans, key=lambda plan: microseconds_of(plan, exchange.links))


def _plan(
    units: Sequence[Leaf],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[str, int],
    exchange: Exchange,
    faster: str,
    iterations: Sequence[NewtonSchulz],
) -> Plan:
    """The plan where `faster` is the word for replicas in place of `"faster"`."""

    def stays_sharded(bucket: Bucket) -> bool:
        (leaf, _, _), *_ = bucket.chunks[0].parts
        if leaf.gram_side:
            return True
        words = {exchange.sharded(axis) for axis, _ in bucket.axes}
        if "exchange" in words or _hindrances(bucket):
            return False
        return "gram_or_exchange" in words or (
            not any(leaf.is_replicated for leaf in _leaves_of(bucket))
            and _is_faster_sharded(bucket, exchange.links)
        )

    pairs = zip(units, specs, strict=True)
    leaves = [placed_within(leaf, spec, mesh, exchange, faster) for leaf, spec in pairs]
    leaves = [_with_forms(x, iterations[x.iteration]) if x.blocks else x for x in leaves]
    for leaf in leaves:
        if leaf.gram_side and isinstance(leaf.sharded_form, str):
            raise ValueError(
                f"the parameter {leaf.name} of shape {leaf.parameter_shape}: its matrices cannot"
                f" stay sharded: {leaf.sharded_form}. Pass Exchange with 'block' or 'exchange' in"
                " place of 'gram'"
            )
    shares = shares_of(leaves)
    stacks = [share.stack for share in shares]
    unsplit = [leaf for leaf in leaves if not leaf.split]
    plan = deal(unsplit + stacks, mesh, max_bucket_bytes(iterations), stays_sharded)
    asked = [b for b in plan.buckets if "gram_or_exchange" in map(exchange.sharded, dict(b.axes))]
    found = [*itertools.chain.from_iterable(map(_hindrances, asked))]
    if found and not plan.grams:
        name, reason = found[0]
        raise ValueError(
            f"Exchange says 'gram_or_exchange', but no sharded matrix can stay sharded; the"
            f" parameter {name}: {reason}. Leave the word out"
        )
    return dataclasses.replace(plan, shares=tuple(_with_dtype(share, plan) for share in shares))


def _with_dtype(share: Share, plan: Plan) -> Share:
    """The share with the dtype of its results in that plan, which its all-gather is in."""
    kept_sharded = {leaf.index for bucket in plan.grams for leaf in _leaves_of(bucket)}
    forms = share.stack.forms
    if share.stack.index in kept_sharded:
        assert isinstance(share.stack.sharded_form, Form)
        forms = (share.stack.sharded_form,)
    return dataclasses.replace(share, dtype=_wire_dtype(share.stack, forms))


def _leaves_of(bucket: Bucket) -> list[Leaf]:
    return [leaf for chunk in bucket.chunks for leaf, _, _ in chunk.parts]


def _hindrances(bucket: Bucket) -> list[tuple[str, str]]:
    """The parameters of the bucket that cannot stay sharded, by name, and why."""
    found = ((leaf.name, leaf.sharded_form) for leaf in _leaves_of(bucket))
    return [(name, reason) for name, reason in found if isinstance(reason, str)]


def _is_faster_sharded(bucket: Bucket, links: Links) -> bool:
    """Whether matrices, fewer than the devices, are orthogonalized faster sharded than whole."""
    (chunk,) = bucket.chunks
    if chunk.count >= bucket.owners:
        return False
    leaf = chunk.parts[0][0]
    ((_, m, n),), (form,) = leaf.matrices, leaf.forms
    moved = Collective(m * n * bucket.dtype.itemsize, bucket.axes)
    whole = Estimate(form.products.microseconds((m, n)), (moved, moved))
    return estimate(bucket).microseconds(links) < whole.microseconds(links)


def collectives_of(plan: Plan) -> list[Collective]:
    """Returns all collectives of an update: exchanges, what pieces need, and gathers of updates."""
    found = [Collective(bucket.bytes, bucket.axes) for bucket in plan.buckets for _ in range(2)]
    for bucket in plan.grams:
        found += estimate(bucket).collectives
    for together in gathered_together(plan.shares):
        num_bytes = sum(share.bytes_of(share.stack.units) * share.replicas for share in together)
        found.append(Collective(num_bytes, together[0].axes, shares=True))
    return found


def microseconds_of(plan: Plan, links: Links) -> float:
    """Returns a model's time of all products and collectives, one after the other."""
    each: dict[Any, tuple[Leaf, int]] = {}
    works = [(leaf, (), leaf.units) for leaf in plan.local]
    works += [(c.parts[0][0], b.axes, c.slots) for b in plan.buckets for c in b.chunks]
    for leaf, axes, count in works:
        _, before = each.get((leaf.kind, axes), (leaf, 0))
        each[leaf.kind, axes] = (leaf, before + count)
    compute = sum(leaf.microseconds(count) for leaf, count in each.values())
    compute += sum(estimate(bucket).compute for bucket in plan.grams)
    return compute + sum(each.microseconds(links) for each in collectives_of(plan))
