"""The role of a parameter, told by its path and the shape of one layer: a table."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from optax.contrib import MuonDimensionNumbers

from muon_jax._matrices.layouts import Layout, Shape, axes_in_out
from muon_jax._matrices.views import MATRICES, Split, View

type NamedShape = tuple[str, Shape]  # the path of a parameter and its shape


@dataclasses.dataclass(frozen=True)
class Unknown:
    """The answer, in place of a view, where nothing tells the view: why, if there is a reason.

    It may be that the other layout fits.
    """

    reason: str = ""
    is_of_layout: bool = False


UNKNOWN = Unknown()

# The view by the shape of one layer, in the order (in, out).
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
    view: View | None | Unknown
    shape: Shape
    axes: tuple[int, ...]
    is_stacked: bool = False

    @property
    def own_shape(self) -> Shape:
        """The shape of one layer, with its axes as the parameter has them."""
        return tuple(size for _, size in sorted(zip(self.axes, self.shape, strict=True)))

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
    rows = ((role, view) for role, p, view in _ROLES if _whole_names(p).search(own))
    role, view_of = next(rows, ("unnamed", nothing_known))
    order = axes_in_out(layout, role, len(shape))
    in_order = tuple(shape[axis] for axis in order)
    return Found(name, role, view_of(in_order), in_order, tuple(axes[axis] for axis in order))


def plain(name: str) -> str:
    """Returns a path without the numbers that Flax appends and the tildes that Haiku inserts."""
    return re.sub(r"_\d+(?=/|$)", "", name).replace("~/", "")


@functools.cache
def _whole_names(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(^|/)({pattern})(/|$)")


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
_ROLES: tuple[tuple[str, str, ViewOfShape], ...] = (
    ("adapter", r"(\w+_)?lora_?[ab]|(\w+_)?lora(?=(/[^/]+){1,2}$)|(\w+_)?adapters?", adamw),
    (
        "bias",
        rf"(bias(es)?|\w*_bias){_END}|((?!w?(q|kv?|v)_b)\w+_b|b_(in|out|up|down|gate)){_LAST}",
        adamw,
    ),
    ("bias", rf"b[io]?\d*{_LAST}", adamw_below(3, nothing_known)),  # (heads, dim) at most
    (
        "norm",
        rf"(\w*norm\w*|ln(_?\w)?|bn\d*)(?=(/(?!(kernel|w_\w+)$)[^/]+)?$)|(scale|gamma|beta){_LAST}",
        adamw,
    ),
    ("token", rf"(cls|class|mask|register|dist\w*)_?tokens?|(cls|registers?){_END}", adamw),
    (
        "position",
        rf"(wpe|(abs_|rel(ative)?_)?pos(ition(?!_?wise)\w*)?(_?(emb\w*|enc\w*|table))?){_NEAR}"
        rf"|rope{_NEAR}|(cos|sin)(_cached?)?{_LAST}|(rope_)?freqs_cis{_LAST}",
        adamw,
    ),
    (
        "embedding",
        rf"({_EMBEDDING})({_NEAR}|(?=/(?!({_LAYER})/)[^/]+/({LEAF})$))",
        adamw_below(4, convolution),  # four axes: an embedding of patches
    ),
    ("unnamed", rf"({_HEAD})(?!(/({LEAF}))?$)", nothing_known),  # of several layers, perhaps
    ("head", rf"({_HEAD}|scores?|qa_outputs?|regressor){_END}", adamw),
    ("router", rf"\w*router\w*|(gating|switch|dispatch){_END}", adamw),
    (
        "router",
        rf"\w*moe\w*/(wg|gate(_({LEAF}))?){_END}",
        adamw_below(3, by_rank(rank_3=MATRICES)),
    ),
    ("gate", r"smear\w*", adamw),
    # What LoRA's factors are added to, or a factor; either order; alternating heads.
    ("unnamed", r"lora\w*|gating_einsum|\w*query_key_value\w*", nothing_known),
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
    ("unnamed", rf"^(?!.*/\d+/)(.*/)?final\w*|heads(/[^/]+)?{_END}", nothing_known),
    (
        "unnamed",
        rf"(prefix|prompts?|mem(ory)?|pkm)/\w+{_END}|(query|key|value){_LAST}",
        nothing_known,
    ),
    ("unnamed", rf"(?!\w*att)\w*(mlp|ffn|feed|channel_mix)\w*/(key|value){_END}", nothing_known),
    # The equations of Gemma's einsums: BTD,NDH->BTNH, and BTNH,NHD->BTD.
    (
        "einsum to heads",
        r"(q|k|v|kv|qkv)_einsum",
        by_rank(rank_3=_HEADS_FIRST, rank_4=_HEADS_FIRST),
    ),
    ("einsum from heads", r"(attn_vec|o)_einsum", by_rank(rank_3=VIEW_FROM_HEADS)),
    (FUSED_QKV, _NAMES_OF_QKV, fused_qkv),
    ("fused kv", _NAMES_OF_KV, halves),
    ("unnamed", rf"in_proj|({_NAMES_OF_FUSED}){_END}", nothing_known),
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


def width_of_embedding(of_one: Found) -> int:
    """Returns the width that an embedding gives: a table is (rows, width) in both layouts."""
    return of_one.shape[of_one.axes.index(-1) if len(of_one.shape) == 2 else -1]


def bias_beside(name: str, shapes: Mapping[str, Shape]) -> Shape | None:
    """Returns the shape of the bias beside a kernel, by its path; None where there is none."""
    module = module_of(name)
    if module == name:
        return shapes.get(f"{name}_bias")
    return shapes.get(f"{module}/bias") or shapes.get(f"{module}/b")
