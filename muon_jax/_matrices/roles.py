"""The role of a parameter, told by its path and the shape of one layer: a table."""

import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from optax.contrib import MuonDimensionNumbers

from muon_jax._matrices.rules import Unknown
from muon_jax._matrices.views import MATRICES, Split, View

type Shape = tuple[int, ...]
# "in_out": (in, out), convolutions (*window, in, out). "out_in": (out, in), (out, in, *window).
type Layout = Literal["in_out", "out_in"]
OTHER: dict[Layout, Layout] = {"in_out": "out_in", "out_in": "in_out"}
type NamedShape = tuple[str, Shape]  # the path of a parameter and its shape


UNKNOWN = Unknown()

type Answer = View | None | Unknown
# The view by the shape of one layer, in the order (in, out).
type ViewOfShape = Callable[[Shape], Answer]

VIEW_TO_HEADS = MuonDimensionNumbers(-3, (-2, -1))
VIEW_FROM_HEADS = MuonDimensionNumbers((-3, -2), -1)


def by_rank(
    otherwise: ViewOfShape | None = None, adamw_below: int = 0, **views: View
) -> ViewOfShape:
    """Returns a function that gives `rank_2=…` to shapes of two axes, if none is 1, and so on.

    AdamW has shapes with fewer axes than `adamw_below`.
    """

    def view_of(shape: Shape) -> Answer:
        rank = len(shape)
        if rank < adamw_below:
            return None
        if f"rank_{rank}" in views and not (rank == 2 and 1 in shape):
            return views[f"rank_{rank}"]
        return otherwise(shape) if otherwise else UNKNOWN

    return view_of


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


def convolution(shape: Shape) -> Answer:
    """(*window, in, out)."""
    rank = len(shape)
    if rank < 3:
        return UNKNOWN
    if 1 in shape[-2:]:
        return None  # a vector: of one output, or one for each output of a depthwise convolution
    return MuonDimensionNumbers(tuple(range(-rank, -1)), -1)


class Found(NamedTuple):
    """What a path and a shape tell of a parameter.

    Attributes:
        name: its path, in lower case.
        role: what it is for.
        view: the view of one layer, with its axes in the order (in, out); None leaves it to AdamW.
        shape: the shape of one layer in that order.
        axes: which axis of the parameter each axis of `shape` is, counted from the end.
        is_stacked: whether the parameter has several layers.
    """

    name: str
    role: str
    view: Answer
    shape: Shape
    axes: tuple[int, ...]
    is_stacked: bool = False

    @property
    def own_shape(self) -> Shape:
        """The shape of one layer, with its axes as the parameter has them."""
        return tuple(size for _, size in sorted(zip(self.axes, self.shape, strict=True)))

    def in_order(self, layout: Layout) -> Shape:
        """Returns the shape of one layer in the order (in, out), if the parameter has `layout`."""
        own = self.own_shape
        return tuple(own[axis] for axis in axes_in_out(layout, self.role, len(own)))

    @property
    def module(self) -> str:
        """The path without the name of an array such as `kernel`."""
        return module_of(self.name)


def look_up(name: str, shape: Shape, axes: tuple[int, ...], layout: Layout) -> Found:
    """Returns what the table tells of a parameter of this path.

    Args:
        name: the path, in lower case.
        shape: the shape of one layer.
        axes: which axis of the parameter each axis of `shape` is.
        layout: the order of these axes.
    """
    own = plain(name)
    rows = ((role, v) for role, p, v in _ROLES if re.search(f"(^|/)({p})(/|$)", own))
    role, view_of = next(rows, ("unnamed", UNKNOWN))
    order = axes_in_out(layout, role, len(shape))
    shape = tuple(shape[axis] for axis in order)
    view = view_of(shape) if callable(view_of) else view_of
    return Found(name, role, view, shape, tuple(axes[axis] for axis in order))


def axes_in_out(layout: Layout, role: str, rank: int) -> tuple[int, ...]:
    """Returns which axis of an array of this role each of its axes is in the order (in, out)."""
    axes = tuple(range(rank))
    if layout == "in_out" or rank < 2 or role.startswith("einsum"):
        return axes  # the axes of an einsum are those of its equation
    if role in (TO_HEADS, FUSED_QKV):  # (heads, dim, in)
        return axes[-1:] + axes[:-1]
    if role == FROM_HEADS:  # (out, heads, dim)
        return axes[1:] + axes[:1]
    if role in ("convolution", "embedding"):  # (out, in, *window)
        return (*axes[2:], 1, 0)
    return (*axes[:-2], rank - 1, rank - 2)  # (…, out, in), such as the matrices of experts


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


def plain(name: str) -> str:
    """Returns a path without the numbers that Flax appends and the tildes that Haiku inserts."""
    return re.sub(r"_\d+(?=/|$)", "", name).replace("~/", "")


CONTAINER = r"(?:layers|blocks|stages|stack|h|\w*scan\w*)"
LEAF = "kernel|weights?|w"
# Layers of MLPs.
_OF_MLP = r"(w_)?(up|down)(_proj)?|c_(fc|proj)|mlp\w*|fc_in|hidden\w*|w[io]?\d*"
# Layers, hidden or not.
_LAYER = r"dense|linear|fc\w*|(\w+_)?proj\w*|mlp\w*|\w*conv\w*"
# Others that are matrices where they have a kernel, as an array alone may be anything.
_WITH_KERNEL = (
    rf"{_LAYER}|dense\w*|\w*lin(ear)?\d*|linear\w*|layers?|l|\d+|to_([qkv]|out)|w?(q|kv)_a\w*"
)
_HEAD = (
    r"(?!multi_?head)(\w+_)?head|classifier|\w*logits?\w*|(?!\w*transform)\w*vocab\w*|unembed\w*"
    r"|seq_relationship|predictions?(?!/transform)|output_layer|readout"
)
_EMBEDDING = (
    r"wte|embedding|(?!patch)\w*embed(der|ding|dings|s)?(_(layer|table))?|(\w*_)?embs?"
    r"|embed_(?!patch)\w+|(\w+_)?(lookup|codebooks?|table)|ve|\w*ngram"
)
# Projections that lie side by side in one parameter.
_NAMES_OF_GATE_AND_UP = (
    r"\w*(gate_?((and|n)_?)?up|up_?((and|n)_?)?gate)(_\w+)?|w1_?w?[23]|w3_?w?1|(fused_)?wi_fused"
)
_NAMES_OF_QKV = (
    r"c_attn|\w*qkv\w*|kqv|w_?pack|w?q_(and_)?w?k_(and_)?w?v(_\w+)?"
    r"|\w*(attn|attention|mha)/in_proj"
)
_NAMES_OF_KV = r"(to_|fused_)?w?k_?(and_)?w?v|k_?v_(proj|fused)|\w*key_(and_)?value"
# Several projections, or gates of a cell; how they lie, the name does not tell.
_NAMES_OF_FUSED = (
    r"(\w+_)?(fused|packed|pack|merged|and)(_\w+)?|in_proj_(?!dt)[a-z]{2}|net/(\d+/)?proj"
    r"|[hi]2?h|(dense|w)_[hi]|(\w*_)?lstm/linear"
)

TO_HEADS = "projection to heads"
FROM_HEADS = "projection from heads"
FUSED_QKV, FUSED_GATE = "fused qkv", "fused gate and up"
_HEADS_FIRST = MuonDimensionNumbers(-2, (-3, -1))  # (…, heads, in, dim)
_LAST = "(?=$)"  # at the end of a path
_END = rf"(?=(/({LEAF}))?$)"  # at the end of a path, or before the name of an array there
_NEAR = "(?=(/[^/]+)?$)"  # at the end of a path, or before any one name there
# Not before attention, convolutions or norms, which a layer may have beside its experts.
_ALONE = r"(?!.*/(\w*att\w*|mha|query|key|value|[qkvo](_proj)?|\w*(conv|norm)\w*)(/|$))"

# A role, a regular expression for whole names in the path, and the view by the shape of one layer.
# The first row that matches decides.
_ROLES: tuple[tuple[str, str, Answer | ViewOfShape], ...] = (
    ("adapter", r"(\w+_)?lora_?[ab]|(\w+_)?lora(?=(/[^/]+){1,2}$)|(\w+_)?adapters?", None),
    (
        "bias",
        rf"(bias(es)?|\w*_bias){_END}|((?!w?(q|kv?|v)_b)\w+_b|b_(in|out|up|down|gate)){_LAST}",
        None,
    ),
    ("bias", rf"b[io]?\d*{_LAST}", by_rank(adamw_below=3)),  # (heads, dim) at most
    (
        "norm",
        rf"(\w*norm\w*|ln(_?\w)?|bn\d*)(?=(/(?!(kernel|w_\w+)$)[^/]+)?$)|(scale|gamma|beta){_LAST}",
        None,
    ),
    ("token", rf"(cls|class|mask|register|dist\w*)_?tokens?|(cls|registers?){_END}", None),
    (
        "position",
        rf"(wpe|(abs_|rel(ative)?_)?pos(ition(?!_?wise)\w*)?(_?(emb\w*|enc\w*|table))?){_NEAR}"
        rf"|rope{_NEAR}|(cos|sin)(_cached?)?{_LAST}|(rope_)?freqs_cis{_LAST}",
        None,
    ),
    (
        "embedding",
        rf"({_EMBEDDING})({_NEAR}|(?=/(?!({_LAYER})/)[^/]+/({LEAF})$))",
        by_rank(convolution, adamw_below=4),  # four axes: an embedding of patches
    ),
    ("unnamed", rf"({_HEAD})(?!(/({LEAF}))?$)", UNKNOWN),  # of several layers, perhaps
    ("head", rf"({_HEAD}|scores?|qa_outputs?|regressor){_END}", None),
    ("router", rf"\w*router\w*|(gating|switch|dispatch){_END}", None),
    (
        "router",
        rf"\w*moe\w*/(wg|gate(_({LEAF}))?){_END}",
        by_rank(rank_3=MATRICES, adamw_below=3),
    ),
    ("gate", r"smear\w*", None),
    # What LoRA's factors are added to, or a factor; either order; alternating heads.
    ("unnamed", r"lora\w*|gating_einsum|\w*query_key_value\w*", UNKNOWN),
    (FUSED_GATE, _NAMES_OF_GATE_AND_UP, fused_gate),
    # (in, out) may be a router, or the gate of one expert.
    ("experts", rf"\w*experts?/(gate|wg){_END}", by_rank(gate, rank_3=MATRICES)),
    # (experts, n) may be a vector for each expert, or the matrix of one.
    (
        "experts",
        rf"\w*experts?{_ALONE}/(?!({LEAF}|{_OF_MLP})$)[^/]+{_LAST}",
        by_rank(rank_3=MATRICES),
    ),
    (
        "experts",
        rf"(\w*experts?|(?!\w+_(layers|blocks)/)\w*moe\w*(?=(/[^/]+){{1,2}}$)){_ALONE}",
        by_rank(rank_2=MATRICES, rank_3=MATRICES),
    ),
    ("convolution", rf"(\w*(pointwise|pw)_?conv\w*){_END}", by_rank(convolution, rank_2=MATRICES)),
    ("convolution", rf"\w*conv\w*{_END}|\w*embed\w*(/proj\w*)?/({LEAF})", convolution),
    # A hidden layer or the output head, learned vectors, or RWKV's MLP in either order.
    ("unnamed", rf"^(?!.*/\d+/)(.*/)?final\w*|heads(/[^/]+)?{_END}", UNKNOWN),
    (
        "unnamed",
        rf"(prefix|prompts?|mem(ory)?|pkm)/\w+{_END}|(query|key|value){_LAST}",
        UNKNOWN,
    ),
    ("unnamed", rf"(?!\w*att)\w*(mlp|ffn|feed|channel_mix)\w*/(key|value){_END}", UNKNOWN),
    # The equations of Gemma's einsums: BTD,NDH->BTNH, and BTNH,NHD->BTD.
    (
        "einsum to heads",
        r"(q|k|v|kv|qkv)_einsum",
        by_rank(rank_3=_HEADS_FIRST, rank_4=_HEADS_FIRST),
    ),
    ("einsum from heads", r"(attn_vec|o)_einsum", by_rank(rank_3=VIEW_FROM_HEADS)),
    (FUSED_QKV, _NAMES_OF_QKV, fused_qkv),
    ("fused kv", _NAMES_OF_KV, halves),
    ("unnamed", rf"in_proj|({_NAMES_OF_FUSED}){_END}", UNKNOWN),
    (
        TO_HEADS,
        rf"w?[qkv]|(q|k|v)_proj|query|key|value(?=(/({LEAF}))?$)|w?(q|kv?|v)_b(_proj)?",
        by_rank(
            rank_2=MATRICES, rank_3=VIEW_TO_HEADS, rank_4=MuonDimensionNumbers(-4, (-3, -2, -1))
        ),
    ),
    (
        FROM_HEADS,
        "out|wo|o|(o|out)_proj|attn_out",
        by_rank(
            rank_2=MATRICES, rank_3=VIEW_FROM_HEADS, rank_4=MuonDimensionNumbers((-4, -3, -2), -1)
        ),
    ),
    (FROM_HEADS, rf"\w*att\w*/c_proj{_END}", by_rank(rank_2=MATRICES, rank_3=VIEW_FROM_HEADS)),
    ("gate", r"\w*gate|wg", gate),
    (
        "matrix",
        rf"({_OF_MLP}|\w*proj|fc\w*|w_\w+|linear){_END}|({_WITH_KERNEL})/({LEAF}){_LAST}",
        by_rank(rank_2=MATRICES),
    ),
)

# Places where no output head can be: numbered blocks, and modules that a network has inside.
_BLOCK = (
    rf"(?!(?:final|last|out(?:put)?|head|top)_)(?:{CONTAINER}|\w*(?:layer|block|stage)s?)"
    r"(?:_?\d+|/(?:\w+_)?\d+)"
)
_INSIDE = re.compile(
    rf"(?:^|/)(?:{_BLOCK}|(?:\w*att(?:n|ention)?|mha|\w*experts?|(?:\w+_)?moe(?:_?(?:block|layer|mlp))?"
    r"|(?:\w+_)?(?:ff|ffn|ffw)|\w*feed_?forward|\w*embed(?:der|dings?)?|transform)(?:_\d+)?)(?:/|$)"
)
# The first layer of a network.
_FIRST_OF_ALL = re.compile(r"(?:^|_)(?:init|stem|root|patch\w*)(?:_|$)|conv_in$|\w*embed\w*$")


def is_block(module: str) -> bool:
    """Whether a name, in lower case, is that of a numbered block."""
    return re.fullmatch(_BLOCK, module) is not None


def is_inside(name: str) -> bool:
    """Whether a parameter of this path, in lower case, is where no output head can be."""
    module = module_of(name)
    above = re.sub(rf"(?:^|/)(?:{CONTAINER}/)*\d+$", "", module)
    above = parent_of(module) if above == module else f"{above}/"
    last = module.removeprefix(parent_of(module))
    says_so = _INSIDE.search(above) or _FIRST_OF_ALL.search(last)
    return says_so is not None


# A layer that is alone in a numbered block, so that the last block may be the output head.
ALONE_IN_BLOCK = re.compile(
    rf"((?:.*/)?{_BLOCK})/(?:dense|linear|lin|fc|layer|proj|w|out(?:put)?|\w*conv\w*)(?:_?\d+)?$"
)


def module_of(name: str) -> str:
    """Returns the path of a parameter, without the name of an array such as `kernel`."""
    return re.sub(rf"/({LEAF})$", "", name)


def parent_of(module: str) -> str:
    """Returns the path of the module that has this module, with a slash."""
    return module[: module.rfind("/") + 1]


def bias_beside(name: str, shapes: Mapping[str, Shape]) -> Shape | None:
    """Returns the shape of the bias beside a kernel, by its path; None where there is none."""
    module = module_of(name)
    if module == name:
        return shapes.get(f"{name}_bias")
    return shapes.get(f"{module}/bias") or shapes.get(f"{module}/b")
