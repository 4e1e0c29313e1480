"""Layouts of parameters over the chips of a pod."""

from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import PartitionSpec

from benchmarks._times.models import Shapes


class LayoutOnPod(NamedTuple):
    """Parameters and how they are sharded.

    Attributes:
        mesh: sizes of the mesh axes; -1 for all chips that are left.
        shapes: of the parameters, matrices in their last two axes.
        specs: of the parameters.
    """

    mesh: Mapping[str, int]
    shapes: Shapes
    specs: Mapping[str, PartitionSpec]


def layouts_on_pod(width: int) -> dict[str, LayoutOnPod]:
    """Returns the layouts by name, of models of that width, on meshes of 4 to 64 chips."""
    layer = {
        "q": (width, width),
        "o": (width, width),
        "up": (width, 2 * width),
        "down": (2 * width, width),
    }
    layers = {f"layer_{i}/{name}": shape for i in range(2) for name, shape in layer.items()}
    stacks = {name: (64, *layer[name]) for name in ("up", "down")}
    experts = {"up": (64, width // 2, width), "down": (64, width, width // 2)}

    def sharded(mesh: Mapping[str, int], shapes: Shapes, **specs: PartitionSpec) -> LayoutOnPod:
        of_each = {name: specs[name.rpartition("/")[2]] for name in shapes}
        return LayoutOnPod(mesh, shapes, of_each)

    whole, rows = PartitionSpec(), PartitionSpec("fsdp")
    into, out_of = PartitionSpec("fsdp", "tp"), PartitionSpec("tp", "fsdp")
    both = {"fsdp": -1, "tp": 2}
    first = PartitionSpec("ep")
    return {
        "replicated": sharded({"data": -1}, layers, q=whole, o=whole, up=whole, down=whole),
        "FSDP": sharded({"fsdp": -1}, layers, q=rows, o=rows, up=rows, down=rows),
        "TP + FSDP": sharded(both, layers, q=into, o=out_of, up=into, down=out_of),
        "EP": sharded({"ep": -1}, experts, up=first, down=first),
        "stacked layers": sharded(
            both, stacks, up=PartitionSpec(None, *into), down=PartitionSpec(None, *out_of)
        ),
    }
