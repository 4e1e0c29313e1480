"""What collectives between devices cost, by the links along each mesh axis.

A collective over mesh axes of sizes s₁, s₂, … has B bytes on each device: the parts for all, or of
all, and its own. It sends over each axis, in the order of the table,

    B(1 - 1/s₁), (B/s₁)(1 - 1/s₂), (B/(s₁s₂))(1 - 1/s₃), …,   together B(1 - 1/(s₁s₂…)).

| collective                 | order         | the reason                                      |
| -------------------------- | ------------- | ----------------------------------------------- |
| all-to-all                 | slowest first | a part goes to one device, over the slowest     |
|                            |               | link between the two                            |
| reduce-scatter, all-gather | fastest first | devices of a fast axis share what they exchange |
|                            |               | over a slow one                                 |

Of axes of one bandwidth, the first of the mesh is the slowest. The time is the largest latency of
the axes, and the bytes over the bandwidth of each axis, one after the other.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from muon_jax._checks import check_fields
from muon_jax._iteration.form import Products

# Names and sizes, in the order of the mesh.
type MeshAxes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Link:
    """The link of each device along a mesh axis.

    The defaults were measured on four H200s with NVLink, from the time of one update in which each
    device exchanged 302 MB.

    Attributes:
        bandwidth: bytes per second that each device sends.
        latency: seconds that a collective takes besides.

    Raises:
        TypeError: an attribute is no number.
        ValueError: an attribute is out of range.
    """

    bandwidth: float = 250e9
    latency: float = 20e-6

    def __post_init__(self) -> None:
        check_fields(self)


type Links = Mapping[str, Link]


class Collective(NamedTuple):
    """What devices send to each other at once.

    Attributes:
        bytes: B of the module's docstring; twice that for an all-reduce.
        axes: that it is over.
        shares: whether devices have one result or one sum: all but an all-to-all.
    """

    bytes: float
    axes: MeshAxes
    shares: bool = False

    @property
    def sent_bytes(self) -> float:
        """What each device sends over all axes together."""
        return self.bytes * (1 - 1 / math.prod(size for _, size in self.axes))

    def sent(self, links: Links) -> "dict[str, Sent]":
        """Returns what it sends over each of its mesh axes; axes without a link have NVLink's."""
        link = {name: links.get(name, Link()) for name, _ in self.axes}
        axes = sorted(self.axes, key=lambda axis: link[axis[0]].bandwidth)
        slowest = max(axes, key=lambda axis: link[axis[0]].latency)
        rest, found = self.bytes, {}
        for name, size in reversed(axes) if self.shares else axes:
            own = rest / size
            seconds = (rest - own) / link[name].bandwidth
            seconds += link[name].latency * ((name, size) == slowest)
            found[name] = Sent(rest - own, 1e6 * seconds)
            rest = own
        return found

    def microseconds(self, links: Links) -> float:
        """Returns a model's time."""
        return sum(sent.microseconds for sent in self.sent(links).values())


class Sent(NamedTuple):
    """What each device sends over a mesh axis: the bytes, and the µs of a model."""

    bytes: float
    microseconds: float


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


def count_of_teams(count: int, owners: int) -> int:
    """Returns the least number of equal teams of `owners` devices, one for each of the matrices."""
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
