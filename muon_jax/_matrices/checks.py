"""What speaks against a view that the table of roles gives: tests of shapes, and of places."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from muon_jax._matrices.roles import (
    ALONE_IN_BLOCK,
    FROM_HEADS,
    FUSED_GATE,
    FUSED_QKV,
    OTHER,
    TO_HEADS,
    Answer,
    Found,
    Layout,
    Unknown,
    bias_beside,
    fits_bias,
    is_block,
    is_inside,
    parent_of,
    plain,
)

# Along an axis no window is larger. Common ones are 1 to 7, and 11 in AlexNet.
_LARGEST_WINDOW = 11
# The first layers of an MLP, which are wider than their inputs, and the second.
_FIRST = re.compile(r"fc_?1|c_fc|fc_in|((w|mlp)_)?(up|gate)(_proj)?|w[13i]|linear_?1")
_SECOND = re.compile(r"fc_?2|fc_out|((w|mlp)_)?down(_proj)?|w[2o]|linear_?2")
_OF_MLP = ("matrix", "gate", "experts")  # roles
_Q = re.compile(r"w?_?q(_proj)?|query")
# Projections of attention under names that output heads do not have.
_OF_ATTENTION = re.compile(r"w_?(q|kv?|v)|(w?_?(q|kv?|v)_)(b_?)?(proj)?|query|key|k|attn_out")


class Checks:
    """The parameters of a tree, as the table of roles has them, and what they say of each other."""

    def __init__(self, found: Sequence[Found], layout: Layout) -> None:
        self._layout: Layout = layout
        self._shapes = {one.name: one.own_shape for one in found}
        matrices = [one for one in found if len(one.shape) > 1]
        modules = {one.module for one in matrices}
        self._count_below = Counter(
            module[: slash.start()] for module in modules for slash in re.finditer("/", module)
        )
        self._beside = defaultdict(list)  # by the modules right above
        for one in matrices:
            for parent in {parent_of(one.module), parent_of(self._place_of(one.module))}:
                self._beside[parent].append(one)
        # A table is (rows, width) in both layouts.
        self._widths = {
            one.shape[one.axes.index(-1) if len(one.shape) == 2 else -1]
            for one in matrices
            if one.role == "embedding"
        }
        self._vectors = {shape[0] for shape in self._shapes.values() if len(shape) == 1}
        # A module that has the whole network is no part of one, whatever its name says.
        (root, *others) = {module.partition("/")[0] for module in modules} or {""}
        is_part = others or len(modules) < 2 or is_block(root) or re.search("att|mha", root)
        self._root = "" if is_part or not is_inside(f"{root}/layer") else f"{root}/"

    def checked(self, one: Found) -> Answer:
        """Returns the view that is found, `Unknown` where something speaks against it."""
        if self._has_wide_bias(one):
            one = one._replace(view=Unknown("whose bias has several axes"))
        # A window at the end may be of one element, and look like one output.
        is_left = one.view is None and (one.role != "convolution" or one.shape[-1] > 1)
        if is_left or len(one.shape) < 2 or one.role == "unknown":
            return one.view
        if reason := self._reason_of_layout(one):
            return Unknown(reason, is_of_layout=True)
        if isinstance(one.view, Unknown | None):
            return one.view
        reason = self._reason_of_shapes(one)
        is_known = not reason and (one.is_stacked or self._is_hidden(one))
        return one.view if is_known else Unknown(reason)

    def _reason_of_layout(self, one: Found) -> str:
        """What speaks against the layout; an empty string if nothing does.

        -   A bias has the size of its kernel's output. Where that is not the size of the input, it
            decides.
        -   q and the first layer of an MLP take the width that an embedding gives, and the output
            of attention and the second layer of an MLP give that width. Where the size is that of
            a vector in the tree, such as a norm of another width, it may be right.
        -   The window of a convolution is small.
        -   `weight` is (out, in) in Equinox, Haliax and PyTorch: in MLPs the above must confirm it.
        """
        other, shape, rank = OTHER[self._layout], one.in_order(OTHER[self._layout]), len(one.shape)
        if bias := bias_beside(one.name, self._shapes):
            fits, fits_other = (
                fits_bias(one.own_shape, bias, order) for order in (self._layout, other)
            )
            if fits != fits_other:
                return "whose bias has the size of its input" if fits_other else ""
        end = _end_of_stream(one)
        if end is not None and not isinstance(one.view, Unknown):
            here, there = one.shape[end], shape[end]
            if (here in self._widths) != (there in self._widths):
                is_wrong = there in self._widths and here not in self._vectors
                return f"where {there} is the width of the embedding" if is_wrong else ""
        is_weight = self._layout == "in_out" and re.search("/weights?$", one.name) is not None
        if rank > 2 and (one.role == "convolution" or one.role == "embedding" and rank > 3):
            # A window is smaller than the channels at the other end. A single axis is weaker
            # evidence. Where the name does not make the layout sure, a small window is enough.
            here, there = max(one.shape[:-2]), max(shape[:-2])
            is_small = there <= _LARGEST_WINDOW
            is_sure = rank > 3 or is_small and here > _LARGEST_WINDOW
            if there < here and (is_weight or is_sure) or is_weight and is_small:
                return "which may have its window at the other end"
        if one.role == FUSED_QKV and one.shape[-2] == 3 * one.shape[-1]:
            return "which has the width of q, k and v first"
        is_of_experts = rank > 2 or re.search("expert|moe", one.module)
        is_of_mlp = one.role in (*_OF_MLP, FUSED_GATE) and not is_of_experts
        is_either = is_weight and is_of_mlp and len({*one.shape}) > 1
        return "which PyTorch would have as (out, in)" if is_either else ""

    def _reason_of_shapes(self, one: Found) -> str:
        """What the shapes beside a parameter say against its view; an empty string if nothing.

        -   An MLP's first layer may be two or three times as wide as what the second takes, and q
            twice as wide as what the output projection takes. Such a layer has several matrices.
        -   `(in, heads, dim)` looks like a stack of layers below an unknown name. An output
            projection (heads, dim, out) beside it shows that its axes are heads.
        """
        if one.role == "matrix":
            rows, cols = one.shape
            place = self._place_of(one.module)
            for other in filter(_may_be_second, self._beside[parent_of(place)]):
                if other.shape[1] == rows and cols in (2 * other.shape[0], 3 * other.shape[0]):
                    last = other.module.rpartition("/")[2]
                    return f"which is {cols // other.shape[0]} times as wide as {last} takes"
        parent, rank = parent_of(one.module), len(one.shape)
        if one.role == TO_HEADS and _Q.fullmatch(_last_of(one.module)):
            outputs = [o.shape[:-1] for o in self._beside[parent] if o.role == FROM_HEADS]
            if math.prod(one.shape[1:]) in [2 * math.prod(shape) for shape in outputs]:
                return "which makes twice what the output projection takes"
        if one.role not in (TO_HEADS, FROM_HEADS) or rank < 3:
            return ""
        is_stack_to_heads = one.role == TO_HEADS and one.is_stacked and rank == 3
        is_confirmed = is_stack_to_heads or parent and _has_heads(self._beside[parent])
        return "" if is_confirmed else "whose heads no output projection shows"

    def _has_wide_bias(self, one: Found) -> bool:
        """Whether a bias has several axes.

        It shows a stack of convolutions, a filter for each place, or gate and up by turns.
        """
        bias = bias_beside(one.name, self._shapes) or ()
        if one.role == FUSED_GATE:
            return len(bias) > 1
        is_window = one.role in ("convolution", "embedding") and len(one.shape) > 2
        return is_window and sum(n > 1 for n in bias) > 1

    def _is_hidden(self, one: Found) -> bool:
        """Whether a parameter is no output head, whose name may be that of any layer."""
        rank, last = len(one.shape), _last_of(one.module)
        if one.role in (TO_HEADS, FROM_HEADS):
            says_so = rank > 2 or _OF_ATTENTION.fullmatch(last)
        elif one.role == FUSED_GATE:
            says_so = not re.fullmatch(r"w\d+", last)  # the twelfth, perhaps
        else:
            says_so = one.role not in (("matrix", "experts") if rank == 2 else ("convolution",))
        return bool(says_so) or is_inside(self._place_of(one.module).removeprefix(self._root))

    def _place_of(self, module: str) -> str:
        """The path of a module, or of the numbered block that it is alone in."""
        block = ALONE_IN_BLOCK.match(module)
        return block[1] if block and self._count_below[block[1]] == 1 else module


def _last_of(module: str) -> str:
    """The last name of the path of a module, without a number that Flax appended."""
    return plain(module).rpartition("/")[2]


def _may_be_second(one: Found) -> bool:
    """Whether a layer may take the result of one beside it, as the second layer of an MLP."""
    is_output = one.role == FROM_HEADS and re.fullmatch("(o|out)(_proj)?", _last_of(one.module))
    return len(one.shape) == 2 and one.role in ("matrix", "vector", FROM_HEADS) and not is_output


def _end_of_stream(one: Found) -> int | None:
    """Which axis of (in, out) takes or gives the stream of embeddings; None if no name tells."""
    last = _last_of(one.module)
    if one.role == TO_HEADS:
        return 0 if _Q.fullmatch(last) else None
    if one.role == FUSED_GATE or one.role in _OF_MLP and _FIRST.fullmatch(last):
        return -2
    return -1 if one.role == FROM_HEADS or _SECOND.fullmatch(last) else None


def _has_heads(members: Sequence[Found]) -> bool:
    """Whether the arrays of a module that may have axes of heads make and take as many heads.

    `(in, heads, dim)` and `(in, 3, heads, dim)` make heads. One `(heads, dim, out)` takes them.
    """
    members = [one for one in members if len(one.shape) > 2]
    made = {math.prod(one.shape[1:-1]) for one in members if one.role == TO_HEADS}
    made |= {one.shape[-2] for one in members if one.role == FUSED_QKV and len(one.shape) == 4}
    taken = [math.prod(one.shape[:-2]) for one in members if one.role == FROM_HEADS]
    roles = {one.role for one in members}
    return (
        roles <= {TO_HEADS, FROM_HEADS, FUSED_QKV, "convolution"}
        and len(taken) == 1
        and taken[0] in made
    )
