"""The role of a parameter, told by its path and the shape of one layer: a table."""

import enum
import re
from collections.abc import Callable
from typing import NamedTuple

from optax.contrib import MuonDimensionNumbers

from muon_jax._matrices.views import MATRICES, Split, View

type Shape = tuple[int, ...]
type NamedShape = tuple[str, Shape]  # the path of a parameter and its shape


class Route(NamedTuple):
    """The role of a parameter and its view; the view None leaves it to AdamW."""

    role: str
    view: View | None


class _Unknown(enum.Enum):
    """The answer, in place of a view, for a shape that a role does not have."""

    SHAPE = enum.auto()


type _ViewOfShape = Callable[[Shape], View | None | _Unknown]


def look_up_route(name: str, shape: Shape) -> Route | None:
    """Returns the route of a parameter of this path, in lower case, None where nothing tells it."""
    name = re.sub(r"_\d+(?=/|$)", "", name)  # Flax appends numbers
    name = name.replace("~/", "")  # Haiku inserts tildes
    for role, pattern, view_of in _ROLES:
        if re.search(rf"(^|/)({pattern})(/|$)", name):
            view = view_of(shape)
            return None if isinstance(view, _Unknown) else Route(role, view)
    return None


def _adamw(shape: Shape) -> None:
    del shape


def _last_two_axes(shape: Shape) -> View:
    del shape
    return MATRICES


def _unknown_shape(shape: Shape) -> _Unknown:
    del shape
    return _Unknown.SHAPE


def _by_rank(**views: View) -> _ViewOfShape:
    """Returns a function that gives `rank_2=…` to shapes of two axes, if none is 1, and so on."""

    def view_of(shape: Shape) -> View | _Unknown:
        if len(shape) == 2 and 1 in shape:
            return _Unknown.SHAPE
        return views.get(f"rank_{len(shape)}", _Unknown.SHAPE)

    return view_of


def _adamw_below(rank: int, view_of: _ViewOfShape) -> _ViewOfShape:
    """Returns a function that leaves shapes of fewer axes to AdamW, and others to `view_of`."""
    return lambda shape: None if len(shape) < rank else view_of(shape)


def _equal_parts(parts: int, width_per_row: int | None = None) -> _ViewOfShape:
    """Returns a function that splits the columns of a matrix into equal parts.

    It knows matrices whose columns are `width_per_row` times as many as their rows, if given.
    """

    def view_of(shape: Shape) -> View | _Unknown:
        if len(shape) != 2 or shape[1] % parts:
            return _Unknown.SHAPE
        if width_per_row and shape[1] != width_per_row * shape[0]:
            return _Unknown.SHAPE
        return Split(-1, (shape[1] // parts,) * parts)

    return view_of


def _fused_qkv(shape: Shape) -> View | None | _Unknown:
    """(in, 3·in) or (in, 3, heads, dim)."""
    if len(shape) == 4 and shape[1] == 3:
        return MuonDimensionNumbers(-4, (-2, -1))
    return _equal_parts(3, width_per_row=3)(shape)


def _fused_gate(shape: Shape) -> View | None | _Unknown:
    """(in, 2·out), or (experts, in, 2·out) for experts."""
    is_split = len(shape) == 2 or len(shape) == 3 and shape[1] > 2
    return _equal_parts(2)(shape[-2:]) if is_split else _Unknown.SHAPE


def _gate(shape: Shape) -> View | _Unknown:
    """The gate of an MLP is at least as wide as its input. A narrower one may be a router."""
    return MATRICES if len(shape) == 2 and shape[0] <= shape[1] else _Unknown.SHAPE


def _gate_of_experts(shape: Shape) -> View | _Unknown:
    """(in, out) for one expert, or (experts, in, out) for all."""
    return MATRICES if len(shape) == 3 else _gate(shape)


def _convolution(shape: Shape) -> View | None | _Unknown:
    """(*window, in, out)."""
    rank = len(shape)
    if rank < 3:
        return _Unknown.SHAPE
    if shape[-2] == 1 and shape[-1] > 1:
        return None  # a vector for each output: the convolution is depthwise, or of one channel
    return MuonDimensionNumbers(tuple(range(-rank, -1)), -1)


def _pointwise(shape: Shape) -> View | None | _Unknown:
    """(1, …, 1, in, out), or (in, out) without the window."""
    return MATRICES if len(shape) == 2 else _convolution(shape)


def _input_projection(shape: Shape) -> View | _Unknown:
    """(in, out) in a state space model. If out is 3·in, it may be attention's fused qkv."""
    return MATRICES if len(shape) == 2 and shape[1] != 3 * shape[0] else _Unknown.SHAPE


CONTAINER = r"(?:layers|blocks|stages|stack|h|\w*scan\w*)"
LEAF = "kernel|weights?|w"
# Networks. A layer right below one of these names may be the last layer.
_MODEL = (
    r"(\w*(model|module|net|network|cnn)|mlp|backbone|actor|critic|policy|generator|discriminator"
    "|decoder|transformer)"
)
# Layers that are hidden wherever they are.
_HIDDEN = r"(w_)?(up|down)(_proj)?|c_(fc|proj)|mlp\w*|fc_in|hidden\w*|w[io123]"
# Layers, hidden or not.
_LAYER = r"dense|linear|fc\w*|proj\w*|mlp\w*|\w*conv\w*"
_EMBEDDING = (
    r"wte|embedding|(?!patch)\w*embed(der|ding|dings|s)?(_(layer|table))?|(\w*_)?embs?"
    r"|embed_(?!patch)\w+|(\w+_)?(lookup|codebooks?|table)|ve|\w*ngram"
)
_TO_HEADS = MuonDimensionNumbers(-3, (-2, -1))
_FROM_HEADS = MuonDimensionNumbers((-3, -2), -1)
TO_HEADS = Route("projection to heads", _TO_HEADS)
FROM_HEADS = Route("projection from heads", _FROM_HEADS)

_LAST = "(?=$)"  # at the end of a path
_END = rf"(?=(/({LEAF}))?$)"  # at the end of a path, or before the name of an array there
_NEAR = "(?=(/[^/]+)?$)"  # at the end of a path, or before any one name there
# Not before attention, convolutions or norms, which a layer may have beside its experts.
_ALONE = r"(?!.*/(\w*att\w*|mha|query|key|value|[qkvo](_proj)?|\w*(conv|norm)\w*)(/|$))"

# A role, a regular expression for whole names in the path, and the view by the shape of one layer.
# The first row that matches decides.
_ROLES: tuple[tuple[str, str, _ViewOfShape], ...] = (
    (
        "bias",
        rf"(bias(es)?|\w*_bias){_END}|((?!\w*lora|w?(q|kv?|v)_b)\w+_b|b_(in|out|up|down|gate)){_LAST}",
        _adamw,
    ),
    ("bias", rf"b[io]?\d*{_LAST}", _adamw_below(3, _unknown_shape)),  # (heads, dim) at most
    (
        "norm",
        rf"(\w*norm\w*|ln(_?\w)?|bn\d*)(?=(/(?!kernel$)[^/]+)?$)|(scale|gamma|beta){_LAST}",
        _adamw,
    ),
    (
        "token",
        rf"(cls|class|mask|register|dist\w*)_?tokens?|(cls|registers?){_END}",
        _adamw,
    ),
    (
        "position",
        rf"(wpe|(abs_|rel(ative)?_)?pos(ition(?!_?wise)\w*)?(_?(emb\w*|enc\w*|table))?){_NEAR}",
        _adamw,
    ),
    (
        "embedding",
        rf"({_EMBEDDING})({_NEAR}|(?=/(?!({_LAYER})/)[^/]+/({LEAF})$))",
        _adamw_below(4, _convolution),  # four axes: an embedding of patches
    ),
    (
        "head",
        r"(?!multi_?head)(\w+_)?head|classifier|\w*logits?\w*|\w*vocab\w*|unembed\w*|seq_relationship"
        rf"|predictions?(?!/transform)|output_layer|readout|(scores?|qa_outputs?|regressor){_END}",
        _adamw,
    ),
    ("router", rf"\w*router\w*|(gating|switch|dispatch){_END}", _adamw),
    ("router", rf"\w*moe\w*/(wg|gate(_({LEAF}))?){_END}", _adamw_below(3, _last_two_axes)),
    ("gate", r"smear\w*", _adamw),
    ("adapter", r"lora\w*", _unknown_shape),
    ("fused gate and up", r"\w*(gate_up|up_gate)(_\w+)?|w13", _fused_gate),
    # (in, out) may be a router, or the gate of one expert.
    ("experts", rf"\w*experts?/(gate|wg){_END}", _gate_of_experts),
    # (experts, n) may be a vector for each expert, or the matrix of one.
    (
        "experts",
        rf"\w*experts?{_ALONE}/(?!({LEAF}|{_HIDDEN})$)[^/]+{_LAST}",
        _by_rank(rank_3=MATRICES),
    ),
    (
        "experts",
        rf"(\w*experts?|\w*moe\w*(?=(/[^/]+){{1,2}}$)){_ALONE}",
        _by_rank(rank_2=MATRICES, rank_3=MATRICES),
    ),
    ("convolution", rf"(\w*(pointwise|pw)_?conv\w*){_END}", _pointwise),
    ("convolution", rf"\w*conv\w*{_END}|\w*embed\w*(/proj\w*)?/({LEAF})", _convolution),
    # A hidden layer or the output head. Only its place in the network could tell.
    ("unnamed", rf"^(?!.*/\d+/)(.*/)?final\w*|heads(/[^/]+)?{_END}", _unknown_shape),
    ("unnamed", rf"(prefix|prompts?|mem(ory)?|pkm)/\w+{_END}", _unknown_shape),
    (
        "unnamed",
        rf"^({_MODEL}/)*((dense|linear|fc|layer|out|output)"
        rf"(_out|_proj|_projection)?\d*|({CONTAINER}/)*\d+)/({LEAF})",
        _unknown_shape,
    ),
    (
        "fused qkv",
        r"c_attn|\w*qkv\w*|kqv|query_key_value|\w*(attn|attention|mha)/in_proj",
        _fused_qkv,
    ),
    ("input projection", "in_proj", _input_projection),
    ("fused kv", r"(to_)?w?kv|kv_proj|\w*key_value", _equal_parts(2)),
    (
        TO_HEADS.role,
        r"w?[qkv]|(q|k|v)_proj|query|key|value|w?(q|kv?|v)_b",
        _by_rank(rank_2=MATRICES, rank_3=_TO_HEADS),
    ),
    (
        FROM_HEADS.role,
        r"out|wo|o|(o|out)_proj|attn_out",
        _by_rank(rank_2=MATRICES, rank_3=_FROM_HEADS),
    ),
    ("gate", r"\w*gate|wg", _gate),
    ("matrix", rf"({_HIDDEN}){_END}", _by_rank(rank_2=MATRICES)),
    ("unnamed", rf"^({_MODEL}/)*[^/]+{_END}", _unknown_shape),
    ("matrix", rf".*/({LEAF})|\w*proj|fc\w*|w_\w+", _by_rank(rank_2=MATRICES)),
)
