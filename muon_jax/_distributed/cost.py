"""What exchanges between devices cost."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from muon_jax._distributed.links import Collective, Links, MeshAxes
from muon_jax._iteration.cost import Products


class Estimate(NamedTuple):
    """What the orthogonalization of sharded matrices costs each device.

    Attributes:
        compute: µs of products.
        collectives: one after the other.
    """

    compute: float
    collectives: tuple[Collective, ...]

    def microseconds(self, links: Links) -> float:
        """Returns the time of products and collectives, one after the other."""
        return self.compute + sum(each.microseconds(links) for each in self.collectives)


def by_owners(
    products: Products, shape: tuple[int, int], axes: MeshAxes, itemsize: int
) -> Estimate:
    """Returns the cost of at most one (m, n) matrix for each owner, exchanged whole.

    Args:
        products: of the form that the matrices are orthogonalized in.
        shape: `(m, n)`.
        axes: names and sizes of the mesh axes that the owners are along.
        itemsize: of the dtype on the wire.
    """
    exchange = Collective(math.prod(shape) * itemsize, axes)
    return Estimate(products.microseconds(shape), (exchange, exchange))


def count_of_teams(count: int, owners: int) -> int:
    """Returns the least number of equal teams of `owners` devices, one for each of the matrices.

    Args:
        count: of matrices, at most `owners`.
        owners: how many devices.
    """
    return next(teams for teams in range(count, owners + 1) if owners % teams == 0)


def cost_kept_sharded(
    products: Products,
    shape: tuple[int, int, int],
    axes: MeshAxes,
    itemsize: int,
    cuts: Sequence[tuple[int, MeshAxes]],
) -> Estimate:
    """Returns the cost of the gram form on pieces of matrices, `shape` being (count, m, n).

    - Each device makes the products with X on n/owners columns, and the products on XXᵀ for one
      matrix.
    - A single Gram matrix is summed for all devices.
    - Several Gram matrices are summed for their teams, a part for each device. A team gathers its
      parts, and all devices gather the Q of all teams.

    Args:
        products: of the gram form.
        shape: `(count, m, n)`, count ≤ owners.
        axes: names and sizes of the mesh axes that the owners are along.
        itemsize: of the products' dtype.
        cuts: pairs `(k, axes)`: mesh axes shard the short axis of k of the matrices.
    """
    count, m, n = shape
    owners = math.prod(size for _, size in axes)
    with_x = products._replace(squares=0, mixed=0)
    others = products._replace(grams=0, applications=0)
    cut = -(-n // owners)
    total, q = m * m * max(itemsize, 4), m * m * itemsize
    sums = (Collective(2 * total, axes, shares=True),)
    if count > 1:
        teams = count_of_teams(count, owners)
        summed, gathered = (Collective(teams * size, axes, shares=True) for size in (total, q))
        in_team = Collective(total, _neighbours(axes, owners // teams), shares=True)
        sums = (summed, in_team, gathered) if teams < owners else (summed, gathered)
    moves = tuple(Collective(k * m * cut * itemsize, short) for k, short in cuts if short)
    largest_entries = Collective(0.0, axes, shares=True)
    return Estimate(
        with_x.microseconds((count, m, cut)) + others.microseconds((1, m, m)),
        (largest_entries, *products.grams * sums, *moves, *moves),
    )


def _neighbours(axes: MeshAxes, count: int) -> MeshAxes:
    """The axes, with how many of `count` neighbours in the order of the mesh are along each."""
    found: list[tuple[str, int]] = []
    for name, size in reversed(axes):
        along = min(size, count)
        count = -(-count // along)
        found.append((name, along))
    return tuple(reversed(found))
