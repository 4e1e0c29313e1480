"""The links between devices along each mesh axis, and what collectives send over them.

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

from muon_jax._distributed.sharding import check_axes

# Bytes per s that a device sends, and the s of a launch. Measured on four H200s with NVLink, from
# the time of one update in which each device exchanged 302 MB.
_BANDWIDTH, _LATENCY = 250e9, 20e-6

# Names and sizes, in the order of the mesh.
type MeshAxes = tuple[tuple[str, int], ...]


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


class Sent(NamedTuple):
    """What each device sends over a mesh axis: the bytes, and the µs of a model."""

    bytes: float
    microseconds: float


@dataclasses.dataclass(frozen=True)
class Links:
    """Bandwidths and latencies by mesh axis; axes that are left out have what was measured.

    Attributes:
        bandwidth: pairs of an axis and the bytes per s that each device sends over it.
        latency: pairs of an axis and the s that a collective over it takes besides.
    """

    bandwidth: tuple[tuple[str, float], ...] = ()
    latency: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of_arguments(
        cls, bandwidth: Mapping[str, float] | None, latency: Mapping[str, float] | None
    ) -> "Links":
        """Returns what the arguments of `scale_by_muon` say."""
        return cls(tuple((bandwidth or {}).items()), tuple((latency or {}).items()))

    def check_names(self, mesh: Mapping[str, int]) -> None:
        """Raises ValueError where an axis is none of the mesh's."""
        check_axes("bandwidth", dict(self.bandwidth), mesh)
        check_axes("latency", dict(self.latency), mesh)

    def on_mesh(self, mesh: Mapping[str, int]) -> "Links":
        """Returns the same without the axes of other meshes."""
        bandwidth, latency = (
            tuple((name, value) for name, value in pairs if name in mesh)
            for pairs in (self.bandwidth, self.latency)
        )
        return Links(bandwidth, latency)

    def sent(self, collective: Collective) -> dict[str, Sent]:
        """Returns what a collective sends over each of its mesh axes."""
        bandwidth = {name: _BANDWIDTH for name, _ in collective.axes} | dict(self.bandwidth)
        latency = {name: _LATENCY for name, _ in collective.axes} | dict(self.latency)
        axes = sorted(collective.axes, key=lambda axis: bandwidth[axis[0]])
        slowest = max(axes, key=lambda axis: latency[axis[0]])
        rest, found = collective.bytes, {}
        for name, size in reversed(axes) if collective.shares else axes:
            own = rest / size
            seconds = (rest - own) / bandwidth[name] + latency[name] * ((name, size) == slowest)
            found[name] = Sent(rest - own, 1e6 * seconds)
            rest = own
        return found

    def microseconds(self, collective: Collective) -> float:
        """Returns a model's time of a collective."""
        return sum(sent.microseconds for sent in self.sent(collective).values())
