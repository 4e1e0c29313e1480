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
from collections.abc import Mapping
from typing import NamedTuple

from muon_jax._checks import check_fields

# Names and sizes, in the order of the mesh.
type MeshAxes = tuple[tuple[str, int], ...]


def size_of(axes: MeshAxes) -> int:
    """Returns the number of devices along mesh axes."""
    return math.prod(size for _, size in axes)


def names_of(axes: MeshAxes) -> tuple[str, ...]:
    """Returns the names of mesh axes."""
    return tuple(name for name, _ in axes)


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
        return self.bytes * (1 - 1 / size_of(self.axes))

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
