"""Views: where a parameter's matrices are. A view is pure data, and can be inverted.

-   `MuonDimensionNumbers` names the axes of rows and the axes of columns.
-   `Split` reaches matrices that lie side by side on one axis, such as fused projections.
-   `Unfold` reaches matrices that share one merged axis, such as heads.

Views nest:

    # Query, key and value side by side, 16 heads of queries, 4 of keys and of values: 3 matrices.
    Split(-1, (16 * 128, 4 * 128, 4 * 128))
    # The same parameter with one matrix for each head.
    Split(-1, (16 * 128, 4 * 128, 4 * 128), Unfold(-1, (-1, 128), MuonDimensionNumbers(-3, -1)))

A view of an array of one shape is compiled once, to `Part`s, which say where its matrices are.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from optax.contrib import MuonDimensionNumbers

from muon_jax._checks import check_fields
from muon_jax._trees import broadcast_prefix, is_function
from pallas_kernels.arguments import is_integer


class MatrixAxes(NamedTuple):
    """All axes of an array, in three groups; a group keeps the order that it was given."""

    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]


def are_dimension_numbers(node: Any) -> bool:
    """Returns whether `node` has the fields of `MuonDimensionNumbers`, as MaxText's class does."""
    return hasattr(node, "reduction_axis") and hasattr(node, "output_axis")


def with_own_numbers(view: Any) -> Any:
    """Returns a view, or views, that hashes, with our class of dimension numbers."""
    if are_dimension_numbers(view):
        axes = (view.reduction_axis, view.output_axis)
        return MuonDimensionNumbers(*(tuple(x) if isinstance(x, list) else x for x in axes))
    return tuple(map(with_own_numbers, view)) if isinstance(view, list | tuple) else view


def matrix_axes(ndim: int, dimension_numbers: MuonDimensionNumbers) -> MatrixAxes:
    """Returns the axes of an array of rank `ndim`, counted from the front.

    Raises:
        ValueError: `dimension_numbers` are of another type, lack a reduction or an output axis,
            name an axis twice, or name one that is out of range.
    """
    if not isinstance(dimension_numbers, MuonDimensionNumbers):
        raise ValueError(
            f"a view must be MuonDimensionNumbers, Split or Unfold, got {dimension_numbers!r}:"
            " AdamW takes whole parameters only, so every part of a parameter needs a view"
        )

    def counted_from_front(axes: int | Sequence[int]) -> tuple[int, ...]:
        axes = tuple(axes) if isinstance(axes, Sequence) else (axes,)
        if not all(map(is_integer, axes)):
            raise ValueError(
                f"{dimension_numbers} must name axes by integers: pass MuonDimensionNumbers(-2, -1)"
                " for matrices in the last two axes, for example"
            )
        if not axes:
            raise ValueError(
                f"{dimension_numbers} must name at least one reduction axis and one output axis"
            )
        for axis in axes:
            if not -ndim <= axis < ndim:
                raise ValueError(
                    f"{dimension_numbers} names axis {axis}, which is out of range for an array of"
                    f" rank {ndim}: name axes in [-{ndim}, {ndim})"
                )
        return tuple(axis % ndim for axis in axes)

    reduction = counted_from_front(dimension_numbers.reduction_axis)
    output = counted_from_front(dimension_numbers.output_axis)
    if len({*reduction, *output}) != len(reduction) + len(output):
        raise ValueError(
            f"{dimension_numbers} names an axis twice in an array of rank {ndim}: reduction"
            f" {reduction}, output {output}. Name each axis once"
        )
    batch = tuple(axis for axis in range(ndim) if axis not in {*reduction, *output})
    return MatrixAxes(batch, reduction, output)


def to_matrices(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    """Returns `x` as a stack `(batch, rows, cols)` of matrices (reduction × output)."""
    shape = [math.prod(x.shape[axis] for axis in group) for group in axes]
    return x.transpose(sum(axes, ())).reshape(shape)


def from_matrices(matrices: jax.Array, axes: MatrixAxes, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_matrices` for an array of the given shape."""
    order = sum(axes, ())
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return matrices.reshape([shape[axis] for axis in order]).transpose(inverse)


MATRICES = MuonDimensionNumbers(-2, -1)  # the last two axes
type View = MuonDimensionNumbers | Split | Unfold


@dataclasses.dataclass(frozen=True)
class Split:
    """One axis in parts, side by side, each with matrices of its own.

    Attributes:
        axis: the axis to split; counted from the end where it is negative.
        sizes: the sizes of the parts, which add up to the size of the axis.
        view: the view of every part, or a list or tuple with one view for each part.
    """

    axis: int
    sizes: tuple[int, ...]
    view: View | list[View] | tuple[View, ...] = MATRICES

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "sizes", tuple(self.sizes))
        object.__setattr__(self, "view", with_own_numbers(self.view))

    @property
    def views(self) -> list[View]:
        """The view of each part."""
        if isinstance(self.view, list | tuple) and not isinstance(self.view, MuonDimensionNumbers):
            return [*self.view]
        return [self.view] * len(self.sizes)

    def parts(self, shape: tuple[int, ...]) -> list[tuple[slice, View]]:
        """Returns the slice of each part on the split axis of an array of `shape`, and its view.

        Raises:
            ValueError: the array has no such axis, `sizes` do not add up to its size, or there are
                not as many views as sizes.
        """
        whole, views = shape[axis_of(shape, self)], self.views
        if min(self.sizes, default=0) < 0 or sum(self.sizes) != whole:
            raise ValueError(
                f"{self} has sizes that add up to {sum(self.sizes)}: give it sizes of at least 0"
                f" that add up to {whole}, the size of axis {self.axis} of shape {shape}"
            )
        if len(views) != len(self.sizes):
            raise ValueError(
                f"{self} needs one view for all sizes, or as many views as sizes: got {len(views)}"
                f" for {len(self.sizes)}"
            )
        ends = itertools.accumulate(self.sizes)
        slices = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        return [*zip(slices, views, strict=True)]


@dataclasses.dataclass(frozen=True)
class Unfold:
    """One axis reshaped to several, of which the last runs fastest.

    Attributes:
        axis: the axis to unfold; counted from the end where it is negative.
        sizes: the sizes of the axes in its place. One of them may be -1, as in a reshape.
        view: the view of the unfolded array.
    """

    axis: int
    sizes: tuple[int, ...]
    view: View = MATRICES

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "sizes", tuple(self.sizes))
        object.__setattr__(self, "view", with_own_numbers(self.view))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that an array of the given shape has once it is unfolded.

        Raises:
            ValueError: the array has no such axis, or `sizes` do not multiply to its size.
        """
        axis = axis_of(shape, self)
        whole = shape[axis]
        stated = math.prod(self.sizes)  # negative where one size is -1
        sizes = [whole // -stated if size == -1 and stated < 0 else size for size in self.sizes]
        if math.prod(sizes) != whole or min(sizes, default=1) < 0:
            raise ValueError(
                f"{self} cannot unfold axis {self.axis} of shape {shape}: give it sizes that"
                f" multiply to {whole}, of which one may be -1"
            )
        return (*shape[:axis], *sizes, *shape[axis + 1 :])


# A prefix of the parameters' tree whose leaves are views or None.
type ViewTree = Any
# The argument of optimizers: a tree of views, a callable that makes one from the parameters, None.
type Views = ViewTree | Callable[[Any], ViewTree] | None


# What `muon` calls the argument, and what its parts call it.
OF_MUON, OF_PARTS = "muon_weight_dimension_numbers", "weight_dimension_numbers"


def is_view(node: Any) -> bool:
    """Returns whether `node` is a leaf of a tree of views, which is a view or None."""
    return node is None or isinstance(node, Split | Unfold) or are_dimension_numbers(node)


def assigned_views(views: Views, params: Any) -> list[View | None]:
    """Returns the view of each parameter, None for AdamW.

    Args:
        views: a prefix of `params`, or a callable that makes one from `params`. Where `views` as a
            whole is None, each parameter of rank 2 is a matrix and AdamW has the others.
        params: the parameters, or shapes of them.
    """
    if views is None:
        ranks = map(np.ndim, jax.tree.leaves(params))
        return [MuonDimensionNumbers() if rank == 2 else None for rank in ranks]
    return view_of_each_leaf(views, params, OF_MUON)


def view_or_matrix(view: View | None, name: str, shape: tuple[int, ...]) -> View:
    """Returns the view of a parameter, where None stands for a matrix with rows on axis 0.

    Raises:
        ValueError: there is no view, and the parameter is no matrix.
    """
    if view is None and len(shape) != 2:
        raise ValueError(
            f"the parameter {name} of shape {shape} is no matrix: give it"
            " MuonDimensionNumbers, Split or Unfold, or leave it to another optimizer"
        )
    return MuonDimensionNumbers() if view is None else view


def stacked_view(view: View) -> View:
    """Returns the view of several arrays, each with this view, stacked along a new first axis."""
    if isinstance(view, MuonDimensionNumbers):
        return jax.tree.map(lambda axis: axis + (axis >= 0), view)
    inner = [*map(stacked_view, view.views)] if isinstance(view, Split) else stacked_view(view.view)
    return dataclasses.replace(view, axis=view.axis + (view.axis >= 0), view=inner)


def view_of_each_leaf(views: Views, tree: Any, argument: str = OF_PARTS) -> list[View | None]:
    """Returns the view, or None, that the argument's tree of views has for each leaf of `tree`."""
    return broadcast_prefix(argument, functools.partial(as_view, argument), views, tree, is_view)


def as_view(argument: str, path: tuple[Any, ...], node: Any) -> View | None:
    """Returns the view or None that `node` is.

    Args:
        argument: the name of the tree that `node` is in, for errors.
        path: of `node` in that tree.
        node: a leaf of that tree.

    Raises:
        ValueError: `node` is neither.
    """
    if is_view(node):
        return with_own_numbers(node)
    raise ValueError(
        f"{argument}{jax.tree_util.keystr(path)} must be MuonDimensionNumbers, Split,"
        f" Unfold or None, got {node!r}: pass MuonDimensionNumbers(-2, -1) for matrices in the last"
        " two axes, None for AdamW"
    )


def axis_of(shape: tuple[int, ...], view: Split | Unfold) -> int:
    """Returns the axis of `view` in an array of the given shape, counted from the front.

    Raises:
        ValueError: the array has no such axis.
    """
    if not -len(shape) <= view.axis < len(shape):
        raise ValueError(
            f"{view} names axis {view.axis}, which is out of range for shape {shape}: name an axis"
            f" in [-{len(shape)}, {len(shape)})"
        )
    return view.axis % len(shape)


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
    """An array of matrices of one shape within a parameter.

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
