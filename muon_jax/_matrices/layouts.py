"""The order of a parameter's axes, (in, out) or (out, in), and what betrays the other order."""

from collections.abc import Iterator
from typing import Any, Literal

from optax.contrib import MuonDimensionNumbers

from muon_jax._matrices.views import Split, View

type Shape = tuple[int, ...]
# "in_out": (in, out), convolutions (*window, in, out). "out_in": (out, in), (out, in, *window).
type Layout = Literal["in_out", "out_in"]

# Along an axis no window is larger. Common ones are 1 to 7, and 11 in AlexNet.
_LARGEST_WINDOW = 11


def axes_in_out(layout: Layout, role: str, rank: int) -> tuple[int, ...]:
    """Returns which axis of an array of this role each of its axes is in the order (in, out)."""
    axes = tuple(range(rank))
    if layout == "in_out" or rank < 2 or role.startswith("einsum"):
        return axes  # the axes of an einsum are those of its equation
    if role in ("projection to heads", "fused qkv"):  # (heads, dim, in)
        return axes[-1:] + axes[:-1]
    if role == "projection from heads":  # (out, heads, dim)
        return axes[1:] + axes[:1]
    if role in ("convolution", "embedding"):  # (out, in, *window)
        return (*axes[2:], 1, 0)
    return (*axes[:-2], rank - 1, rank - 2)  # (…, out, in), such as the matrices of experts


def relabelled(view: View, axes: tuple[int, ...]) -> View:
    """Returns the same view of an array that has axis i of the view at `axes[i]`.

    All parts of a `Split` have the same view.

    Args:
        view: of an array with its axes in order.
        axes: counted from the end.
    """
    if isinstance(view, Split):
        (inner, *_) = view.views
        return Split(axes[view.axis], view.sizes, relabelled(inner, axes))
    return MuonDimensionNumbers(*_moved(view, axes))


def _moved(numbers: Any, axes: tuple[int, ...]) -> Iterator[int | tuple[int, ...]]:
    for group in numbers:
        yield axes[group] if isinstance(group, int) else tuple(sorted(axes[i] for i in group))


def fits_bias(shape: Shape, bias: Shape, layout: Layout) -> bool:
    """Whether a kernel of this shape makes what a bias of that shape is added to.

    The bias has the axes of the output, after those of experts where the kernel has some. It may
    have axes of size 1 besides, as those of Equinox's convolutions have.
    """
    if len(bias) > 1 and bias == ((*shape[:-2], shape[-1]) if layout == "in_out" else shape[:-1]):
        return True
    bias = tuple(size for size in bias if size > 1)
    experts, out = bias[:-1], bias[-1:]
    of_experts = shape[: len(experts)] == experts
    if layout == "in_out":
        return not bias or shape[-len(bias) :] == bias or of_experts and shape[-1:] == out
    return shape[: len(bias)] == bias or of_experts and shape[-2:-1] == out


def has_other_window(shape: Shape, layout: Layout, is_sure_of_layout: bool) -> bool:
    """Whether a convolution may have its window at the end where the other layout has it.

    A window is smaller than the channels at the other end, so that is no place for a window where
    the sizes are larger. One axis tells less. Where the name does not make `layout` sure, a small
    window there is enough.
    """
    ends = shape[:-2], shape[2:]
    here, there = map(max, ends if layout == "in_out" else ends[::-1])
    is_small = there <= _LARGEST_WINDOW
    if is_sure_of_layout:
        return there < here and (len(shape) > 3 or is_small and here > _LARGEST_WINDOW)
    return there < here or is_small
