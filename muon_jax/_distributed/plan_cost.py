"""What a plan costs each device, by a model of the times."""

from typing import Any

from muon_jax._distributed.in_pieces import estimate
from muon_jax._distributed.links import Collective, Links
from muon_jax._distributed.plan import Leaf, Plan
from muon_jax._distributed.shares import gathered_together


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
    return compute + sum(map(links.microseconds, collectives_of(plan)))
