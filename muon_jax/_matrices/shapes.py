"""The view of a parameter by the shape of one layer, for each role.

A function takes the shape, in the order (in, out), and returns a view, None (AdamW) or `Unknown`.
"""

import dataclasses
from collections.abc import Callable

from optax.contrib import MuonDimensionNumbers

from muon_jax._matrices.layouts import Shape
from muon_jax._matrices.views import MATRICES, Split, View


@dataclasses.dataclass(frozen=True)
class Unknown:
    """The answer, in place of a view, where nothing tells the view.

    Attributes:
        reason: what speaks against a view that the parameter might have, if anything does.
        is_of_layout: whether the reason is that the other layout fits.
    """

    reason: str = ""
    is_of_layout: bool = False


UNKNOWN = Unknown()

type ViewOfShape = Callable[[Shape], View | None | Unknown]

VIEW_TO_HEADS = MuonDimensionNumbers(-3, (-2, -1))
VIEW_FROM_HEADS = MuonDimensionNumbers((-3, -2), -1)


def adamw(shape: Shape) -> None:
    del shape


def nothing_known(shape: Shape) -> Unknown:
    del shape
    return UNKNOWN


def by_rank(otherwise: ViewOfShape = nothing_known, **views: View) -> ViewOfShape:
    """Returns a function that gives `rank_2=…` to shapes of two axes, if none is 1, and so on."""

    def view_of(shape: Shape) -> View | None | Unknown:
        view = None if len(shape) == 2 and 1 in shape else views.get(f"rank_{len(shape)}")
        return view or otherwise(shape)

    return view_of


def adamw_below(rank: int, view_of: ViewOfShape) -> ViewOfShape:
    """Returns a function that leaves shapes of fewer axes to AdamW, and others to `view_of`."""
    return lambda shape: None if len(shape) < rank else view_of(shape)


def halves(shape: Shape) -> View | Unknown:
    """(in, 2·out)."""
    return Split(-1, (shape[-1] // 2,) * 2) if len(shape) == 2 and shape[1] % 2 == 0 else UNKNOWN


def fused_qkv(shape: Shape) -> View | Unknown:
    """(in, 3·in) or (in, 3, heads, dim)."""
    if len(shape) == 4 and shape[1] == 3:
        return MuonDimensionNumbers(-4, (-2, -1))
    is_wide = len(shape) == 2 and shape[1] == 3 * shape[0]
    return Split(-1, (shape[0],) * 3) if is_wide else UNKNOWN


def fused_gate(shape: Shape) -> View | Unknown:
    """(in, 2·out), or (experts, in, 2·out) for experts."""
    return halves(shape[-2:]) if len(shape) == 2 or len(shape) == 3 and shape[1] > 2 else UNKNOWN


def gate(shape: Shape) -> View | Unknown:
    """The gate of an MLP is at least as wide as its input. A narrower one may be a router."""
    return MATRICES if len(shape) == 2 and shape[0] <= shape[1] else UNKNOWN


def convolution(shape: Shape) -> View | None | Unknown:
    """(*window, in, out)."""
    rank = len(shape)
    if rank < 3:
        return UNKNOWN
    if 1 in shape[-2:]:
        return None  # a vector: of one output, or one for each output of a depthwise convolution
    return MuonDimensionNumbers(tuple(range(-rank, -1)), -1)
