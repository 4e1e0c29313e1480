"""What betrays that a parameter is in the order of the other layout than is assumed."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from muon_jax._matrices.layouts import Layout, Shape, axes_in_out, fits_bias, has_other_window
from muon_jax._matrices.roles import (
    FROM_HEADS,
    FUSED_GATE,
    FUSED_QKV,
    TO_HEADS,
    Found,
    NamedShape,
    bias_beside,
    module_of,
    plain,
    width_of_embedding,
)
from muon_jax._matrices.shapes import Unknown
from muon_jax._matrices.stacked_layers import Layers

# The first layers of an MLP, which are wider than their inputs, and the second.
_FIRST = re.compile(r"fc_?1|c_fc|fc_in|((w|mlp)_)?(up|gate)(_proj)?|w[13i]|linear_?1")
_SECOND = re.compile(r"fc_?2|fc_out|((w|mlp)_)?down(_proj)?|w[2o]|linear_?2")
_OF_MLP = ("matrix", "gate", "experts")  # roles
_Q = re.compile(r"w?q(_proj)?|query")
# RWKV calls the first and the second layer of an MLP so.
_KEY_OF_MLP, _VALUE_OF_MLP = (
    re.compile(rf"(^|/)(?!\w*att)\w*(mlp|ffn|feed|channel_mix)\w*/{name}$")
    for name in ("key", "value")
)


class _Widths(NamedTuple):
    """Sizes of vectors: those of one layer, and those that embeddings give."""

    embeddings: set[int]
    vectors: set[int]


def without_contradictions(
    named: Sequence[NamedShape], layers: Sequence[Layers], found: Sequence[Found], layout: Layout
) -> list[Found]:
    """Returns what is found, with no view for parameters that the layout does not fit.

    -   A bias beside a kernel has the size of its output. Where that is not the size of the input,
        the bias decides.
    -   The window of a convolution is small.
    -   An MLP widens, and then narrows. This counts against (in, out) alone, for the name `weight`,
        which Equinox, Haliax and PyTorch give to (out, in). Some experts are narrower: they do not
        count.
    -   q and the first layer of an MLP take the width that an embedding gives, and the output of
        attention and the second layer of an MLP give that width. Where the size is that of a vector
        in the tree, such as a norm of another width, it may be right.
    """
    shapes = {
        name.lower(): of_parameter.of_one(shape)
        for (name, shape), of_parameter in zip(named, layers, strict=True)
    }

    embeddings = [one for one in found if one.role == "embedding" and len(one.shape) > 1]
    vectors = {shape[0] for shape in shapes.values() if len(shape) == 1}
    widths = _Widths({*map(width_of_embedding, embeddings)}, vectors)

    def checked(name: str, of_parameter: Layers, of_one: Found) -> Found:
        is_einsum = of_one.role.startswith("einsum")
        # A window at the end may be of one element, and look like one output.
        is_left = of_one.view is None and (of_one.role != "convolution" or of_one.shape[-1] > 1)
        if is_left or len(of_one.shape) < 2 or is_einsum or not of_parameter.is_known:
            return of_one
        reason = _reason(name, of_one, shapes, layout, widths)
        return of_one._replace(view=Unknown(reason, is_of_layout=True)) if reason else of_one

    return [
        checked(name.lower(), of_parameter, of_one)
        for (name, _), of_parameter, of_one in zip(named, layers, found, strict=True)
    ]


def _sizes_of_stream(
    name: str, of_one: Found, shape: Shape, layout: Layout
) -> tuple[int, int] | tuple[None, None]:
    """The size that takes or gives the stream of embeddings, in this layout and in the other one.

    Both are None where the name does not tell.
    """
    module = plain(module_of(name))
    last = module.rpartition("/")[2]
    if of_one.role == TO_HEADS and (_Q.fullmatch(last) or _KEY_OF_MLP.search(module)):
        end = 0
    elif _VALUE_OF_MLP.search(module):
        end = -1
    elif of_one.role == FUSED_GATE or of_one.role in _OF_MLP and _FIRST.fullmatch(last):
        end = -2
    elif of_one.role == FROM_HEADS or of_one.role != TO_HEADS and _SECOND.fullmatch(last):
        end = -1
    else:
        return None, None
    orders = (axes_in_out(order, of_one.role, len(shape)) for order in ("in_out", "out_in"))
    in_out, out_in = (shape[order[end]] for order in orders)
    return (in_out, out_in) if layout == "in_out" else (out_in, in_out)


def _reason(
    name: str, of_one: Found, shapes: dict[str, Shape], layout: Layout, widths: _Widths
) -> str:
    """What speaks against the layout; an empty string if nothing does."""
    shape, module = shapes[name], module_of(name)
    *_, rows, cols = of_one.shape
    other: Layout = "out_in" if layout == "in_out" else "in_out"
    if bias := bias_beside(name, shapes):
        fits, fits_other = (fits_bias(shape, bias, order) for order in (layout, other))
        if fits != fits_other:  # else the bias tells nothing, and names and widths may
            return "whose bias has the size of its input" if fits_other else ""
    here, there = _sizes_of_stream(name, of_one, shape, layout)
    is_viewed = not isinstance(of_one.view, Unknown)
    if is_viewed and (here in widths.embeddings) != (there in widths.embeddings):
        is_wrong = there in widths.embeddings and here not in widths.vectors
        return f"where {there} is the width of the embedding" if is_wrong else ""
    is_weight = layout == "in_out" and re.search("/weights?$", name) is not None
    is_window = of_one.role == "convolution" or of_one.role == "embedding" and len(shape) > 3
    if is_window and len(shape) > 2 and has_other_window(shape, layout, not is_weight):
        return "which may have its window at the other end"
    last = module.rpartition("/")[2]
    is_of_experts = len(of_one.shape) > 2 or re.search("expert|moe", module) is not None
    if of_one.role == FUSED_QKV and rows == 3 * cols:
        return "which has the width of q, k and v first"
    if not is_weight or is_of_experts or of_one.role not in (*_OF_MLP, FUSED_GATE):
        return ""
    is_first = of_one.role == FUSED_GATE or _FIRST.fullmatch(last)
    if is_first and rows > cols or _SECOND.fullmatch(last) and rows < cols:
        return "where an MLP widens and then narrows"
    return ""
