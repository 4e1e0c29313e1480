"""From parameters to a plan: the forms that matrices can have, and which of them stay in pieces."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from muon_jax._distributed import in_pieces as _distributed_gram
from muon_jax._distributed import plan as _placement
from muon_jax._distributed.buckets import deal
from muon_jax._distributed.cost import by_owners
from muon_jax._distributed.sharding import axes_of
from muon_jax._iteration.form import Form, of
from muon_jax._matrices.views import Views, views_of_leaves

# The most that a device sends at once, in bytes: large enough for matrices that fill a GPU, small
# enough that exchange and computation of different buckets overlap.
MAX_BUCKET_BYTES = 2**28


def units_of(views: Views, tree: Any) -> list[_placement.Leaf]:
    """Returns the leaves of `tree`, whole arrays or shapes of them, for plans.

    Raises:
        ValueError: a leaf has no view, or one that does not fit.
    """
    pairs = zip(views_of_leaves(views, tree), jax.tree.leaves(tree), strict=True)
    return [_placement.leaf(i, name, x, view) for i, ((name, view), x) in enumerate(pairs)]


class Forms(NamedTuple):
    """In which forms the matrices of a leaf can be orthogonalized.

    Attributes:
        wire: the dtype in which they are exchanged whole: that of 16 bits in which the iteration
            multiplies float32 matrices; for all others their own.
        whole: of each matrix of a unit.
        in_pieces: or why they cannot stay in pieces.
    """

    wire: jnp.dtype
    whole: list[Form]
    in_pieces: Form | str


def forms_of(leaf: _placement.Leaf, keywords: Mapping[str, Any]) -> Forms:
    """Returns the forms of `newton_schulz`, with these keywords, for a leaf's matrices."""
    others = ("eps", "eps_mode", "implementation")
    keywords = {k: v for k, v in keywords.items() if k not in others}
    whole = [of(shape[1:], leaf.dtype, **keywords) for shape in leaf.matrices]
    dtypes = {form.dtype for form in whole}
    is_half = len(dtypes) == 1 and jnp.finfo(*dtypes).bits == 16
    wire = dtypes.pop() if is_half and leaf.dtype == jnp.float32 else leaf.dtype
    return Forms(wire, whole, _distributed_gram.form(leaf, keywords))


def make(
    units: Sequence[_placement.Leaf],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[str, int],
    forms: Sequence[Forms],
    max_group_bytes: int | None,
    distributed_gram: bool | None,
) -> _placement.Plan:
    """Returns the plan for parameters with these specs and forms.

    Raises:
        ValueError: no sharded matrix can be left in pieces, as `distributed_gram` says.
    """

    def leaves_of(*buckets):
        chunks = itertools.chain.from_iterable(bucket.chunks for bucket in buckets)
        return [leaf for chunk in chunks for leaf, _, _ in chunk.parts]

    def reasons(*buckets):
        """Which parameters in the buckets cannot stay in pieces, and why."""
        found = ((leaf.name, forms[leaf.index].in_pieces) for leaf in leaves_of(*buckets))
        return [(name, reason) for name, reason in found if isinstance(reason, str)]

    def stays(bucket):
        if distributed_gram is False or reasons(bucket):
            return False
        return bool(distributed_gram) or (
            not any(_is_replicated(specs[leaf.index], mesh) for leaf in leaves_of(bucket))
            and _is_faster_in_pieces(bucket, forms)
        )

    placed = [_placement.placed(leaf, spec, mesh) for leaf, spec in zip(units, specs, strict=True)]
    limit = MAX_BUCKET_BYTES if max_group_bytes is None else min(max_group_bytes, MAX_BUCKET_BYTES)
    wires = [form.wire for form in forms]
    plan = deal(placed, mesh, wires, limit, stays)
    if distributed_gram and plan.buckets and not plan.grams:
        name, reason = reasons(*plan.buckets)[0]
        raise ValueError(
            f"distributed_gram=True, but no sharded matrix can stay in pieces; the parameter"
            f" {name}: {reason}. Pass distributed_gram=None"
        )
    return plan


def _is_replicated(spec: PartitionSpec, mesh: Mapping[str, int]) -> bool:
    """Returns whether devices have the same shard: then each makes its own of equal updates.

    Sums over a network may differ between them by rounding, and the replicas drift apart.
    """
    divided = {*axes_of(spec)}
    return any(size > 1 and name not in divided for name, size in mesh.items())


def _is_faster_in_pieces(bucket, forms):
    """Whether matrices, fewer than the devices, are orthogonalized faster in pieces than whole."""
    (chunk,) = bucket.chunks
    if chunk.count >= bucket.owners:
        return False
    leaf = chunk.parts[0][0]
    ((_, m, n),), (_, (form,), in_pieces) = leaf.matrices, forms[leaf.index]
    whole = by_owners(form.products, (m, n), bucket.owners, bucket.dtype.itemsize)
    return _distributed_gram.estimate(bucket, in_pieces).microseconds < whole.microseconds
