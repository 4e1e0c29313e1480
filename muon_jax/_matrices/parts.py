"""The parts of an array that a view stands for: the one place that reads `Split` and `Unfold`."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax._matrices.views import (
    OF_PARTS,
    MatrixAxes,
    Split,
    Unfold,
    View,
    Views,
    as_view,
    axis_of,
    from_matrices,
    is_view,
    matrix_axes,
    to_matrices,
)
from muon_jax._trees import is_function

type ShapeScale = Literal["clipped_ratio", "ratio", "none"]
type ScaleOfBlocks = Literal["clipped_ratio", "ratio", "none", "longer_side"]


def shape_factor(scale: ScaleOfBlocks, fan_in: int, fan_out: int) -> float:
    """Returns the factor of the update of a matrix of `fan_in` rows and `fan_out` columns.

    Args:
        scale: `"clipped_ratio"` is √max(1, fan_out/fan_in), `"ratio"` √(fan_out/fan_in), `"none"`
            1, and `"longer_side"` √max(fan_in, fan_out).
        fan_in: the number of rows.
        fan_out: the number of columns.
    """
    ratio = fan_out / max(fan_in, 1)
    squares = {
        "clipped_ratio": max(1.0, ratio),
        "ratio": ratio,
        "none": 1.0,
        "longer_side": max(fan_in, fan_out),
    }
    return math.sqrt(squares[scale])


NO_AXES = MatrixAxes((), (), ())


class Cut(NamedTuple):
    """Entries [begin, end) of an axis."""

    axis: int
    begin: int
    end: int

    def __call__(self, x: Any) -> Any:
        """Returns these entries of an array."""
        return x[(*[slice(None)] * self.axis, slice(self.begin, self.end))]


class Reshape(NamedTuple):
    """One axis reshaped to several of these sizes."""

    axis: int
    sizes: tuple[int, ...]

    def __call__(self, x: Any) -> Any:
        """Returns an array with the axes."""
        return x.reshape(*x.shape[: self.axis], *self.sizes, *x.shape[self.axis + 1 :])

    def undo(self, x: Any) -> Any:
        """Returns an array of any size with the one axis."""
        end = self.axis + len(self.sizes)
        return x.reshape(*x.shape[: self.axis], math.prod(x.shape[self.axis : end]), *x.shape[end:])


class Part(NamedTuple):
    """An array of equal matrices within a parameter.

    Attributes:
        ops: lead from the parameter to the array.
        shape: of the array.
        axes: the batch, the rows and the columns among its axes.
        origin: the axis of the parameter that each of its axes is of.
        is_whole: whether each of its axes is that axis of the parameter.
        cut: the axes of the parameter of which it has some entries.
    """

    ops: tuple[Cut | Reshape, ...]
    shape: tuple[int, ...]
    axes: MatrixAxes
    origin: tuple[int, ...]
    is_whole: tuple[bool, ...]
    cut: frozenset[int]

    @property
    def stack(self) -> tuple[int, int, int]:
        """The shape (batch, rows, cols) of the stack of its matrices."""
        batch, rows, cols = (math.prod(self.shape[i] for i in group) for group in self.axes)
        return batch, rows, cols

    def take(self, x: Any) -> Any:
        """Returns the array within the parameter."""
        for op in self.ops:
            x = op(x)
        return x


@functools.lru_cache(4096)
def parts_of(view: View, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Returns the parts of an array of this shape.

    Raises:
        ValueError: the view does not fit the array.
    """
    ndim = len(shape)
    whole = Part((), shape, NO_AXES, (*range(ndim),), (True,) * ndim, frozenset())
    return (*_parts(view, whole),)


def _parts(view: View, whole: Part) -> Iterator[Part]:
    """The parts of an array within a parameter."""
    shape = whole.shape
    if not isinstance(view, Split | Unfold):
        yield whole._replace(axes=matrix_axes(len(shape), view))
        return
    i = axis_of(shape, view)

    def within(op: Cut | Reshape, sizes: tuple[int, ...]) -> Part:
        def with_axes(values: tuple[Any, ...], new: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*values[:i], *new, *values[i + 1 :])

        return Part(
            (*whole.ops, op),
            with_axes(shape, sizes),
            NO_AXES,
            with_axes(whole.origin, (whole.origin[i],) * len(sizes)),
            with_axes(whole.is_whole, (False,) * len(sizes)),
            whole.cut | ({whole.origin[i]} if isinstance(op, Cut) else set()),
        )

    if isinstance(view, Unfold):
        sizes = view.shape(shape)[i : i + len(view.sizes)]
        yield from _parts(view.view, within(Reshape(i, sizes), sizes))
        return
    for part, inner in view.parts(shape):
        op = Cut(i, part.start, part.stop)
        yield from _parts(inner, within(op, (part.stop - part.start,)))


def concatenated(arrays: Sequence[jax.Array], axis: int, ops: tuple[Any, ...]) -> jax.Array:
    """Returns the arrays joined along an axis."""
    del ops
    return jnp.concatenate(arrays, axis)


def join(
    parts: Sequence[Part],
    arrays: Sequence[Any],
    concatenate: Callable[[Sequence[Any], int, tuple[Any, ...]], Any] = concatenated,
    depth: int = 0,
) -> Any:
    """Returns the parameter, or what broadcasts to it, of the arrays of its parts.

    Args:
        parts: all of them, in their order.
        arrays: one for each part; of size 1 along axes that are broadcast.
        concatenate: joins arrays along an axis, of what some ops lead to.
        depth: how many of the ops have been undone by the caller.
    """
    if len(parts[0].ops) == depth:
        return arrays[0]
    op = parts[0].ops[depth]
    if isinstance(op, Reshape):
        return op.undo(join(parts, arrays, concatenate, depth + 1))
    pairs = [*zip(parts, arrays, strict=True)]
    joined = []
    for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].ops[depth]):
        of_cut, own = zip(*group, strict=True)
        joined.append(join(of_cut, own, concatenate, depth + 1))
    return concatenate(joined, op.axis, parts[0].ops[:depth])


def to_stacks(x: jax.Array, view: View) -> list[jax.Array]:
    """Returns the matrices of `x` (reduction × output) in stacks `(batch, rows, cols)`.

    Raises:
        ValueError: `x` lacks an axis that the view names, or an axis has another size.
    """
    return [to_matrices(part.take(x), part.axes) for part in parts_of(view, x.shape)]


def from_stacks(stacks: Iterator[jax.Array], view: View, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_stacks` for an array of the given shape.

    It takes from `stacks` as many stacks as `to_stacks` returns.
    """
    parts = parts_of(view, shape)
    return join(parts, [from_matrices(next(stacks), part.axes, part.shape) for part in parts])


def batch_axes(view: View, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes of an array that are batch axes of all its matrices."""
    of_parts = [
        {part.origin[j] for j in part.axes.batch if part.is_whole[j]}
        for part in parts_of(view, shape)
    ]
    return tuple(i for i in range(len(shape)) if all(i in axes for axes in of_parts))


def axes_taken_apart(view: View, shape: tuple[int, ...]) -> set[int]:
    """Returns the axes of an array of which matrices have parts."""
    return {
        axis
        for part in parts_of(view, shape)
        for axis, is_whole in zip(part.origin, part.is_whole, strict=True)
        if not is_whole
    }


def values_per_matrix(
    function: Callable[[int, int], float], view: View, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns `function(rows, cols)` of each element's matrix, in a shape that broadcasts."""
    parts = parts_of(view, shape)
    cut = frozenset[int]().union(*(part.cut for part in parts))
    arrays = [
        np.full(
            [n if axis in cut else 1 for n, axis in zip(part.shape, part.origin, strict=True)],
            function(*part.stack[1:]),
        )
        for part in parts
    ]
    return join(parts, arrays, lambda arrays, axis, _: np.concatenate(arrays, axis))


def check_views(views: Views, argument: str = OF_PARTS) -> None:
    """Raises ValueError where a leaf of a tree of views is no view. A callable makes its later."""
    if not is_function(views):
        for path, node in jax.tree.leaves_with_path(views, is_leaf=is_view):
            as_view(argument, path, node)
