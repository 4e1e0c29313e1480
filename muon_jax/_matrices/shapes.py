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
        proposal: the view to give the parameter by a rule, as code.
        is_of_layout: whether the reason is that the other layout fits.
        is_of_heads: whether the reason is that a matrix for each head is asked for.
    """

    reason: str = ""
    proposal: str = "None"
    is_of_layout: bool = False
    is_of_heads: bool = False


UNKNOWN = Unknown()
NEXT_ROW = Unknown("the table of roles goes on")
ALTERNATING = Unknown(
    "whose q, k and v alternate by heads in BLOOM and GPT-NeoX (set heads to their number)"
)
GROUPED = Unknown("whose q, k and v alternate by groups of heads in Falcon")

type ViewOfShape = Callable[[Shape], View | None | Unknown]

VIEW_TO_HEADS = MuonDimensionNumbers(-3, (-2, -1))
VIEW_FROM_HEADS = MuonDimensionNumbers((-3, -2), -1)


def adamw(shape: Shape) -> None:
    del shape


def last_two_axes(shape: Shape) -> View:
    del shape
    return MATRICES


def nothing_known(shape: Shape) -> Unknown:
    del shape
    return UNKNOWN


def by_rank(otherwise: Unknown = UNKNOWN, **views: View) -> ViewOfShape:
    """Returns a function that gives `rank_2=…` to shapes of two axes, if none is 1, and so on."""

    def view_of(shape: Shape) -> View | Unknown:
        if len(shape) == 2 and 1 in shape:
            return otherwise
        return views.get(f"rank_{len(shape)}", otherwise)

    return view_of


def adamw_below(rank: int, view_of: ViewOfShape) -> ViewOfShape:
    """Returns a function that leaves shapes of fewer axes to AdamW, and others to `view_of`."""
    return lambda shape: None if len(shape) < rank else view_of(shape)


def equal_parts(parts: int, width_per_row: int | None = None) -> ViewOfShape:
    """Returns a function that splits the columns of a matrix into equal parts.

    It knows matrices whose columns are `width_per_row` times as many as their rows, if given.
    """

    def view_of(shape: Shape) -> View | Unknown:
        if len(shape) != 2 or shape[1] % parts:
            return UNKNOWN
        if width_per_row and shape[1] != width_per_row * shape[0]:
            return UNKNOWN
        return Split(-1, (shape[1] // parts,) * parts)

    return view_of


def fused_qkv(shape: Shape) -> View | None | Unknown:
    """(in, 3·in) or (in, 3, heads, dim)."""
    if len(shape) == 4 and shape[1] == 3:
        return MuonDimensionNumbers(-4, (-2, -1))
    return equal_parts(3, width_per_row=3)(shape)


def alternating_qkv(shape: Shape) -> View | None | Unknown:
    """(in, 3, heads, dim), (in, heads·3·dim), or (in, groups·(n + 2)·dim) for n heads a group."""
    if len(shape) == 4 and shape[2] != 3:
        return fused_qkv(shape)
    return ALTERNATING if len(shape) == 2 and shape[1] == 3 * shape[0] else GROUPED


def fused_gate(shape: Shape) -> View | None | Unknown:
    """(in, 2·out), or (experts, in, 2·out) for experts."""
    is_split = len(shape) == 2 or len(shape) == 3 and shape[1] > 2
    return equal_parts(2)(shape[-2:]) if is_split else UNKNOWN


def gate(shape: Shape) -> View | Unknown:
    """The gate of an MLP is at least as wide as its input. A narrower one may be a router."""
    return MATRICES if len(shape) == 2 and shape[0] <= shape[1] else UNKNOWN


def gate_of_experts(shape: Shape) -> View | Unknown:
    """(in, out) for one expert, or (experts, in, out) for all."""
    return MATRICES if len(shape) == 3 else gate(shape)


def convolution(shape: Shape) -> View | None | Unknown:
    """(*window, in, out)."""
    rank = len(shape)
    if rank < 3:
        return UNKNOWN
    if 1 in shape[-2:]:
        return None  # a vector: of one output, or one for each output of a depthwise convolution
    return MuonDimensionNumbers(tuple(range(-rank, -1)), -1)


def pointwise(shape: Shape) -> View | None | Unknown:
    """(1, …, 1, in, out), or (in, out) without the window."""
    return by_rank(rank_2=MATRICES)(shape) if len(shape) == 2 else convolution(shape)


def input_projection(shape: Shape) -> View | Unknown:
    """(in, out) in a state space model. If out is 3·in, it may be attention's fused qkv."""
    return MATRICES if len(shape) == 2 and shape[1] != 3 * shape[0] else UNKNOWN
