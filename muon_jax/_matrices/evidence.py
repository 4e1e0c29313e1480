"""What betrays that a parameter is in the order of the other layout than is assumed."""

import re
from collections.abc import Sequence

from muon_jax._matrices.layouts import Layout, Shape, fits_bias, has_other_window
from muon_jax._matrices.roles import FUSED_QKV, Found, NamedShape, bias_beside, module_of
from muon_jax._matrices.shapes import Unknown
from muon_jax._matrices.stacked_layers import Layers

# The first layers of an MLP, which are wider than their inputs, and the second.
_FIRST = re.compile(r"fc_?1|c_fc|fc_in|(w_)?(up|gate)(_proj)?|w[13i]|linear_?1")
_SECOND = re.compile(r"fc_?2|fc_out|(w_)?down(_proj)?|w2|linear_?2")


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
    """
    shapes = {
        name.lower(): of_parameter.of_one(shape)
        for (name, shape), of_parameter in zip(named, layers, strict=True)
    }

    def checked(name: str, of_parameter: Layers, of_one: Found) -> Found:
        is_einsum = of_one.role.startswith("einsum")
        if of_one.view is None or len(of_one.shape) < 2 or is_einsum or not of_parameter.is_known:
            return of_one
        reason = _reason(name, of_one, shapes, layout)
        return of_one._replace(view=Unknown(reason, is_of_layout=True)) if reason else of_one

    return [
        checked(name.lower(), of_parameter, of_one)
        for (name, _), of_parameter, of_one in zip(named, layers, found, strict=True)
    ]


def _reason(name: str, of_one: Found, shapes: dict[str, Shape], layout: Layout) -> str:
    """What speaks against the layout; an empty string if nothing does."""
    shape, module = shapes[name], module_of(name)
    *_, rows, cols = of_one.shape
    other: Layout = "out_in" if layout == "in_out" else "in_out"
    if bias := bias_beside(name, shapes):
        fits, fits_other = (fits_bias(shape, bias, order) for order in (layout, other))
        if fits != fits_other:  # else the bias tells nothing, and names and widths may
            return "whose bias has the size of its input" if fits_other else ""
    is_weight = layout == "in_out" and re.search("/weights?$", name) is not None
    is_window = of_one.role == "convolution" or of_one.role == "embedding" and len(shape) > 3
    if is_window and len(shape) > 2 and has_other_window(shape, layout, not is_weight):
        return "which may have its window at the other end"
    last = module.rpartition("/")[2]
    is_of_experts = len(of_one.shape) > 2 or re.search("expert|moe", module) is not None
    if of_one.role == FUSED_QKV and rows == 3 * cols:
        return "which has the width of q, k and v first"
    if not is_weight or is_of_experts or of_one.role not in ("matrix", "gate", "fused gate and up"):
        return ""
    is_first = of_one.role == "fused gate and up" or _FIRST.fullmatch(last)
    if is_first and rows > cols or _SECOND.fullmatch(last) and rows < cols:
        return "where an MLP widens and then narrows"
    return ""
