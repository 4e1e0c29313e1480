"""Which first axes of a parameter count layers, told by the containers in its path."""

import dataclasses
import enum
import re
from collections import defaultdict
from collections.abc import Sequence

from muon_jax._matrices.roles import CONTAINER, NamedShape, Shape

# A container whose layers may be stacked: no number of a layer follows it, not even after others.
_POSSIBLE_STACK = re.compile(rf"(?<![^/]){CONTAINER}(?=/(?!(?:{CONTAINER}/)*\d+(?:/|$)))")


@dataclasses.dataclass(frozen=True)
class Layers:
    """What the containers in a parameter's path say about its shape.

    Attributes:
        axes: how many of the first axes count layers; 0 where that is not known.
        is_known: whether every container is known to be a stack or to be none.
        is_vector: whether each layer has a vector, beside parameters that are matrices.
    """

    axes: int = 0
    is_known: bool = True
    is_vector: bool = False

    def shape_of_one(self, shape: Shape) -> Shape:
        """Returns the shape of one layer, where `shape` is the shape of all."""
        return shape[self.axes :]


class _ContainerKind(enum.Enum):
    """How a container has the arrays of its layers."""

    STACK = enum.auto()  # layers that share their arrays, along a first axis
    SEPARATE = enum.auto()  # modules with arrays of their own
    UNKNOWN = enum.auto()


def layers_of(named: Sequence[NamedShape]) -> list[Layers]:
    """Returns the layers of each parameter, by what it has in common with those beside it."""
    containers = [_containers(name) for name, _ in named]
    found = [Layers()] * len(named)
    for depth in range(max(map(len, containers), default=0)):  # the outermost first
        members = defaultdict(list)
        for i, of_parameter in enumerate(containers):
            if depth < len(of_parameter) and found[i].is_known:
                members[of_parameter[depth]].append(i)
        for container, inside in members.items():
            paths = [named[i][0].removeprefix(container) for i in inside]
            shapes = [found[i].shape_of_one(named[i][1]) for i in inside]
            kind = _kind_of_container(paths, shapes)
            for i, shape in zip(inside, shapes, strict=True):
                is_vector = len(shape) == 2 < max(map(len, shapes))
                found[i] = _inside(kind, found[i].axes, is_vector)
    return found


def _containers(name: str) -> list[str]:
    """The path of each container of a parameter that may be a stack, the outermost first."""
    return [name[: match.end()] for match in _POSSIBLE_STACK.finditer(name.lower())]


def _kind_of_container(paths: list[str], shapes: list[Shape]) -> _ContainerKind:
    """Whether the parameters of a container, with paths that begin below it, are a stack.

    | layers lead | numbers below | more than matrices | the container is |
    |-------------|---------------|--------------------|------------------|
    | yes         | no            | any                | a stack          |
    | yes         | yes           | yes                | a stack          |
    | yes         | yes           | no                 | separate modules |
    | no          | yes           | any                | separate modules |
    | no          | no            | any                | unknown          |

    -   Layers lead: all parameters have a first axis, of one size. The window that convolutions
        have in common does not count.
    -   Numbers below: every name right below the container ends in a number, as in `Block_0`.
    -   More than matrices: some parameter has three axes or more. If none has, the size that
        matrices have in common may be the width of a layer.
    """
    are_windows = all(len(shape) > 3 and shape[0] == shape[1] for shape in shapes)
    have_first_axis = () not in shapes and len({shape[:1] for shape in shapes}) == 1
    layers_lead = have_first_axis and not are_windows
    numbers_below = all(re.match(r"/\w+_\d+/", path) for path in paths)
    more_than_matrices = max(map(len, shapes)) > 2
    match layers_lead, numbers_below, more_than_matrices:
        case True, False, _:
            return _ContainerKind.STACK
        case True, True, True:
            return _ContainerKind.STACK
        case True, True, False:
            return _ContainerKind.SEPARATE
        case False, True, _:
            return _ContainerKind.SEPARATE
        case _:
            return _ContainerKind.UNKNOWN


def _inside(kind: _ContainerKind, outer_axes: int, is_vector: bool) -> Layers:
    """The layers of a parameter in a container, below others that have `outer_axes` layer axes."""
    match kind:
        case _ContainerKind.STACK:
            return Layers(outer_axes + 1, is_vector=is_vector)
        case _ContainerKind.SEPARATE:
            return Layers(outer_axes)
        case _ContainerKind.UNKNOWN:
            return Layers(is_known=False)
