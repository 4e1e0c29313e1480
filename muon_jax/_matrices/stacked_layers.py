"""Which axes of a parameter count layers, told by the containers in its path."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from muon_jax._matrices.roles import CONTAINER, Layout, NamedShape, Shape, bias_beside, fits_bias

# A container whose layers may be stacked: no number of a layer follows it, not even after others.
# Modules that stack nothing may have names such as `moe_layers`, too.
_POSSIBLE_STACK = re.compile(
    rf"(?<![^/])({CONTAINER}|\w+_(layers|blocks))(?=/(?!(?:{CONTAINER}/)*\d+(?:/|$)))"
)
_SCALE_OF_NORM = re.compile(r"/scale$|norm[^/]*/(weight|w)$")


class Layers(NamedTuple):
    """What the containers in a parameter's path say about its shape.

    Attributes:
        axes: the axes that count layers, each as of the array without those before; () where that
            is not known.
        is_known: whether every container is known to be a stack or to be none.
        is_vector: whether each layer has a vector, beside parameters that are matrices.
    """

    axes: tuple[int, ...] = ()
    is_known: bool = True
    is_vector: bool = False

    def of_one(self, shape: Shape) -> Shape:
        """Returns the shape of one layer, where `shape` is the shape of all."""
        for axis in self.axes:
            shape = _without(shape, axis)
        return shape


def layers_of(named: Sequence[NamedShape], layout: Layout) -> list[Layers]:
    """Returns the layers of each parameter, by what it has in common with those beside it."""
    # The path of each container of a parameter that may be a stack, the outermost first.
    containers = [
        [name[: match.end()] for match in _POSSIBLE_STACK.finditer(name.lower())]
        for name, _ in named
    ]
    found = [Layers()] * len(named)
    for depth in range(max(map(len, containers), default=0)):
        members = defaultdict(list)
        for i, of_parameter in enumerate(containers):
            if depth < len(of_parameter) and found[i].is_known:
                members[of_parameter[depth]].append(i)
        for container, inside in members.items():
            paths = [named[i][0].removeprefix(container) for i in inside]
            shapes = [found[i].of_one(named[i][1]) for i in inside]
            of_one, axes = shapes, ()
            is_innermost = all(len(containers[i]) == depth + 1 for i in inside)
            # An innermost stack may have several axes, as of repeats and stages of a pipeline.
            while not axes or is_innermost and _has_stacked_norms(paths, of_one):
                axis = _axis_of_layers(paths, of_one, layout)
                if axis is None:
                    break
                of_one, axes = [_without(shape, axis) for shape in of_one], (*axes, axis)
            is_stack = _is_stack(container, paths, shapes, axes != ())
            for i, shape in zip(inside, of_one, strict=True):
                if is_stack is None:
                    found[i] = Layers(is_known=False)
                elif is_stack:
                    is_vector = len(shape) < 2 <= max(map(len, of_one))
                    found[i] = Layers((*found[i].axes, *axes), is_vector=is_vector)
                else:
                    found[i] = Layers(found[i].axes)
    return found


def _has_stacked_norms(paths: list[str], shapes: list[Shape]) -> bool:
    """Whether there are norms, whose scales are vectors in one layer, that have several axes."""
    norms = [s for path, s in zip(paths, shapes, strict=True) if _SCALE_OF_NORM.search(path)]
    return min(map(len, norms), default=0) > 1


def _axis_of_layers(paths: list[str], shapes: list[Shape], layout: Layout) -> int | None:
    """The axis along which the parameters of a container may stack layers, None without one.

    All parameters have the same size there. The window that convolutions have in common does not
    count. Axis 1 needs vectors of layers, which a scan along axis 1 makes (width, layers): biases
    that fit their kernels there and not along axis 0, or norms where axis 0 differs.
    """
    first, second = (
        all(len(shape) > axis for shape in shapes) and len({shape[axis] for shape in shapes}) == 1
        for axis in (0, 1)
    )
    has_window = all(len(shape) > 3 and shape[0] == shape[1] for shape in shapes)
    first = first and (not has_window or _has_stacked_norms(paths, shapes))
    biased = _biased(paths, shapes)
    widths = {size for shape in shapes if len(shape) > 2 for size in _without(shape, 1)}
    norms = any(
        len(shape) == 2 and path.endswith("/scale") and shape[0] in widths
        for path, shape in zip(paths, shapes, strict=True)
    )

    def fit(axis: int) -> bool:
        return all(fits_bias(_without(x, axis), _without(bias, axis), layout) for x, bias in biased)

    if second and fit(1) and (not fit(0) if first else biased or norms):
        return 1
    return 0 if first else None


def _biased(paths: list[str], shapes: list[Shape]) -> list[tuple[Shape, Shape]]:
    """The shapes of each kernel and the bias beside it."""
    shape_of = {path.lower(): shape for path, shape in zip(paths, shapes, strict=True)}
    biases = {path: bias_beside(path, shape_of) for path in shape_of}
    return [(shape_of[path], bias) for path, bias in biases.items() if bias]


def _is_stack(container: str, paths: list[str], shapes: list[Shape], has_axis: bool) -> bool | None:
    """Whether the parameters of a container, with paths that begin below it, are a stack.

    None where nothing tells. Without an axis of layers, it has separate modules where each name
    right below it ends in a number, as in `Block_0`. So it has with one, if all parameters are
    matrices: the size that they have in common may be the width of a layer. A container with a
    name such as `moe_layers` has separate modules unless norms show layers.
    """
    if not re.search(rf"(^|/){CONTAINER}$", container) and not _has_stacked_norms(paths, shapes):
        return False
    if all(re.match(r"/\w+_\d+/", path) for path in paths):
        return has_axis and max(map(len, shapes)) > 2
    return True if has_axis else None


def _without(values: Shape, axis: int) -> Shape:
    return (*values[:axis], *values[axis + 1 :])
