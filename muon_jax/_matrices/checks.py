"""What speaks against a view that the table of roles gives: tests of shapes, and of places."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from muon_jax._matrices.layouts import Layout, Shape, axes_in_out, fits_bias, has_other_window
from muon_jax._matrices.roles import (
    ALONE_IN_BLOCK,
    FROM_HEADS,
    FUSED_GATE,
    FUSED_QKV,
    TO_HEADS,
    Found,
    bias_beside,
    is_block,
    is_inside,
    module_of,
    parent_of,
    plain,
    width_of_embedding,
)
from muon_jax._matrices.shapes import UNKNOWN, Unknown
from muon_jax._matrices.stacked_layers import Layers

# The first layers of an MLP, which are wider than their inputs, and the second.
_FIRST = re.compile(r"fc_?1|c_fc|fc_in|((w|mlp)_)?(up|gate)(_proj)?|w[13i]|linear_?1")
_SECOND = re.compile(r"fc_?2|fc_out|((w|mlp)_)?down(_proj)?|w[2o]|linear_?2")
_OF_MLP = ("matrix", "gate", "experts")  # roles
_Q = re.compile(r"w?_?q(_proj)?|query")
# Projections of attention under names that output heads do not have.
_OF_ATTENTION = re.compile(r"w_?(q|kv?|v)|(w?_?(q|kv?|v)_)(b_?)?(proj)?|query|key|k|attn_out")


class Checks:
    """The parameters of a tree, and what they say of each other.

    Args:
        names: their paths, in lower case.
        shapes: of one layer of each.
        layers: what is known of the layers of each.
        found: what the table of roles tells of each.
        layout: the order of axes that is assumed.
    """

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[Shape],
        layers: Sequence[Layers],
        found: Sequence[Found],
        layout: Layout,
    ) -> None:
        self._shapes = dict(zip(names, shapes, strict=True))
        self._layout = layout
        self._members = [
            (name, of_parameter, one)
            for name, of_parameter, one in zip(names, layers, found, strict=True)
            if len(one.shape) > 1
        ]
        modules = {module_of(name) for name, _, _ in self._members}
        self._root = _network_of(modules)
        self._count_below = Counter(above for m in modules for above in _modules_above(m))
        self._beside = defaultdict(list)  # by the modules right above
        for name, _, one in self._members:
            module = module_of(name)
            for parent in {parent_of(module), parent_of(self._place_of(module))}:
                self._beside[parent].append((module, one))
        embeddings = [one for _, _, one in self._members if one.role == "embedding"]
        self._widths = {*map(width_of_embedding, embeddings)}
        self._vectors = {shape[0] for shape in shapes if len(shape) == 1}

    def checked(self, name: str, of_parameter: Layers, one: Found) -> Found:
        """Returns what is found, without its view where something speaks against it."""
        if self._is_router(name, one):
            return one._replace(role="router", view=None)
        if self._has_wide_bias(name, one):
            one = one._replace(view=Unknown("whose bias has several axes"))
        # A window at the end may be of one element, and look like one output.
        is_left = one.view is None and (one.role != "convolution" or one.shape[-1] > 1)
        if is_left or len(one.shape) < 2 or not of_parameter.is_known:
            return one
        if reason := self._reason_of_layout(name, one):
            return one._replace(view=Unknown(reason, is_of_layout=True))
        if isinstance(one.view, Unknown | None):
            return one
        if reason := self._reason_of_shapes(name, of_parameter, one):
            return one._replace(view=Unknown(reason))
        return (
            one if of_parameter.axes or self._is_hidden(name, one) else one._replace(view=UNKNOWN)
        )

    def _reason_of_layout(self, name: str, one: Found) -> str:
        """What speaks against the layout; an empty string if nothing does.

        -   A bias has the size of its kernel's output. Where that is not the size of the input, it
            decides.
        -   q and the first layer of an MLP take the width that an embedding gives, and the output
            of attention and the second layer of an MLP give that width. Where the size is that of
            a vector in the tree, such as a norm of another width, it may be right.
        -   The window of a convolution is small.
        -   An MLP widens, and then narrows. This counts against (in, out) alone, for `weight`, as
            Equinox, Haliax and PyTorch call (out, in). Experts may be narrower: they do not count.
        """
        layout, shape, module = self._layout, self._shapes[name], module_of(name)
        other: Layout = "out_in" if layout == "in_out" else "in_out"
        if one.role.startswith("einsum"):
            return ""
        if bias := bias_beside(name, self._shapes):
            fits, fits_other = (fits_bias(shape, bias, order) for order in (layout, other))
            if fits != fits_other:
                return "whose bias has the size of its input" if fits_other else ""
        end = _end_of_stream(plain(module), one)
        if end is not None and not isinstance(one.view, Unknown):
            here, there = (
                shape[axes_in_out(order, one.role, len(shape))[end]] for order in (layout, other)
            )
            if (here in self._widths) != (there in self._widths):
                is_wrong = there in self._widths and here not in self._vectors
                return f"where {there} is the width of the embedding" if is_wrong else ""
        is_weight = layout == "in_out" and re.search("/weights?$", name) is not None
        is_window = one.role == "convolution" or one.role == "embedding" and len(shape) > 3
        if is_window and len(shape) > 2 and has_other_window(shape, layout, not is_weight):
            return "which may have its window at the other end"
        *_, rows, cols = one.shape
        if one.role == FUSED_QKV and rows == 3 * cols:
            return "which has the width of q, k and v first"
        is_of_experts = len(one.shape) > 2 or re.search("expert|moe", module) is not None
        if is_weight and not is_of_experts and one.role in (*_OF_MLP, FUSED_GATE):
            ends = {end, _end_of_stream(module, one)}
            if -2 in ends and rows > cols or -1 in ends and rows < cols:
                return "where an MLP widens and then narrows"
        return ""

    def _reason_of_shapes(self, name: str, of_parameter: Layers, one: Found) -> str:
        """What the shapes beside a parameter say against its view; an empty string if nothing.

        -   An MLP's first layer may be two or three times as wide as what the second takes, and a
            projection to heads twice as wide as what the output projection takes. Such a layer has
            several matrices.
        -   `(in, heads, dim)` looks like a stack of layers below an unknown name. The output
            projection, (heads, dim, out), tells one from the other.
        """
        module, rank = module_of(name), len(one.shape)
        beside = self._beside[parent_of(module)]
        if one.role == "matrix":
            rows, cols = one.shape
            for other, shape in self._seconds(self._place_of(module)):
                if other != module and shape[1] == rows and cols in (2 * shape[0], 3 * shape[0]):
                    return f"which is {cols // shape[0]} times as wide as {other} takes"
        if one.role == TO_HEADS and _Q.fullmatch(plain(module).rpartition("/")[2]):
            taken = [math.prod(o.shape[:-1]) for _, o in beside if o.role == FROM_HEADS]
            if math.prod(one.shape[1:]) in [2 * width for width in taken]:
                return "which makes twice what the output projection takes"
        is_to_heads_of_stack = one.role == TO_HEADS and of_parameter.axes and rank == 3
        if one.role in (TO_HEADS, FROM_HEADS) and rank > 2 and not is_to_heads_of_stack:
            is_confirmed = parent_of(module) and _has_heads([o for _, o in beside])
            return "" if is_confirmed else "whose heads no output projection shows"
        return ""

    def _has_wide_bias(self, name: str, one: Found) -> bool:
        """Whether a bias has several axes.

        It shows a stack of convolutions, a filter for each place, or gate and up by turns.
        """
        module, is_fused = module_of(name), one.role == FUSED_GATE
        if not (is_fused or one.role in ("convolution", "embedding") and len(one.shape) > 2):
            return False
        of_bias = (self._shapes.get(f"{module}{end}", ()) for end in ("_bias", "/bias", "/b"))
        return any(len(bias) > 1 and (is_fused or sum(n > 1 for n in bias) > 1) for bias in of_bias)

    def _seconds(self, place: str) -> Iterator[tuple[str, Shape]]:
        """The layers beside one that may take its result, with their shapes."""
        for module, one in self._beside[parent_of(place)]:
            last = plain(module.removeprefix(parent_of(module)))
            is_output = one.role == FROM_HEADS and last in ("o", "out", "o_proj", "out_proj")
            if len(one.shape) == 2 and one.role != TO_HEADS and not is_output:
                yield module, one.shape

    def _is_hidden(self, name: str, one: Found) -> bool:
        """Whether a parameter is no output head, whose name may be that of any layer."""
        module, rank = module_of(name), len(one.shape)
        last = plain(module.removeprefix(parent_of(module)))
        if one.role in (TO_HEADS, FROM_HEADS):
            says_so = rank > 2 or _OF_ATTENTION.fullmatch(last)
        elif one.role == FUSED_GATE:
            says_so = not re.fullmatch(r"w\d+", last)  # the twelfth, perhaps
        else:
            says_so = one.role not in (("matrix", "experts") if rank == 2 else ("convolution",))
        return bool(says_so) or is_inside(self._place_of(module).removeprefix(self._root))

    def _is_router(self, name: str, one: Found) -> bool:
        """Whether a narrow gate, (in, n), is beside n experts."""
        module = module_of(name)
        parent = parent_of(module)
        is_narrow = len(one.shape) == 2 and one.view == UNKNOWN
        if not is_narrow or module.removeprefix(parent) not in ("gate", "wg"):
            return False
        numbers, counts = set(), set()
        for other, _, of_other in self._members:
            below = other.removeprefix(parent)
            if other.startswith(parent) and (match := re.match(r"\w*experts?/(\d+)/", below)):
                numbers.add(match[1])
            elif other.startswith(parent) and re.match(r"\w*experts?/[^/]+$", below):
                counts |= {of_other.shape[0]} if len(of_other.shape) == 3 else set()
        return one.shape[1] in {len(numbers), *counts}

    def _place_of(self, module: str) -> str:
        """The path of a module, or of the numbered block that it is alone in."""
        block = ALONE_IN_BLOCK.match(module)
        return block[1] if block and self._count_below[block[1]] == 1 else module


def _end_of_stream(module: str, one: Found) -> int | None:
    """Which axis of (in, out) takes or gives the stream of embeddings; None if no name tells."""
    last = module.rpartition("/")[2]
    if one.role == TO_HEADS:
        return 0 if _Q.fullmatch(last) else None
    if one.role == FUSED_GATE or one.role in _OF_MLP and _FIRST.fullmatch(last):
        return -2
    return -1 if one.role == FROM_HEADS or _SECOND.fullmatch(last) else None


def _has_heads(members: Sequence[Found]) -> bool:
    """Whether all arrays of a module with axes of heads are projections to and from as many heads.

    `(in, heads, dim)` and `(in, 3, heads, dim)` make heads. One `(heads, dim, out)` takes them.
    """
    members = [one for one in members if len(one.shape) > 2]
    made = {math.prod(one.shape[1:-1]) for one in members if one.role == TO_HEADS}
    made |= {one.shape[-2] for one in members if one.role == FUSED_QKV}
    taken = [math.prod(one.shape[:-2]) for one in members if one.role == FROM_HEADS]
    roles = {one.role for one in members}
    return roles <= {TO_HEADS, FROM_HEADS, FUSED_QKV} and len(taken) == 1 and taken[0] in made


def _network_of(modules: set[str]) -> str:
    """The path that a whole network is below; "" without one.

    Its name, such as `embedder` or `ffn`, says nothing about a place in the network. A numbered
    block and an attention are parts of one.
    """
    roots = {module.partition("/")[0] for module in modules}
    (root, *others) = roots or {""}
    is_part = is_block(root) or re.search("att|mha", root)
    is_network = not others and len(modules) > 1 and not is_part
    return f"{root}/" if is_network and is_inside(f"{root}/layer") else ""


def _modules_above(module: str) -> list[str]:
    return [module[: slash.start()] for slash in re.finditer("/", module)]
