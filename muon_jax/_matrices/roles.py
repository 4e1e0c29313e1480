"""The role of a parameter, told by its name and the shape of one layer: a table."""

import re
from collections.abc import Callable
from typing import NamedTuple

from optax.contrib import MuonDimensionNumbers

from muon_jax._matrices.views import MATRICES, Split, View


class Route(NamedTuple):
    """The role of a parameter, and what its matrices are; None leaves it to AdamW."""

    role: str
    view: View | None


def route(name: str, shape: tuple[int, ...]) -> Route | None:
    """Returns the route of a parameter of this path, in lower case, None where nothing tells it."""
    name = re.sub(r"_\d+(?=/|$)", "", name)  # numbers that Flax appends
    name = name.replace("~/", "")  # of Haiku
    for role, pattern, view_of in _ROLES:
        if re.search(rf"(^|/)({pattern})(/|$)", name):
            view = view_of(shape)
            return None if view is _UNKNOWN else Route(role, view)
    return None


_UNKNOWN = Split(0, ())  # stands for a shape that the role does not have

CONTAINER = r"(?:layers|blocks|stages|stack|h|\w*scan\w*)"


def _adamw(shape):
    del shape
    return None


def _matrices(shape):
    del shape
    return MATRICES


def _unknown(shape):
    del shape
    return _UNKNOWN


def _of_rank(**views: View) -> Callable[[tuple[int, ...]], View]:
    """Returns a function from shapes to views: `rank_2=…` for those of two axes, none of size 1."""
    return lambda shape: (
        _UNKNOWN if len(shape) == 2 and 1 in shape else views.get(f"rank_{len(shape)}", _UNKNOWN)
    )


def _split(parts: int, width_per_row: float | None = None):
    """Returns a function that splits the last axis of matrices, of that width, in equal parts."""

    def view(shape):
        if len(shape) != 2 or shape[1] % parts:
            return _UNKNOWN
        if width_per_row and shape[1] != width_per_row * shape[0]:
            return _UNKNOWN
        return Split(-1, (shape[1] // parts,) * parts)

    return view


def _fused_qkv(shape):
    """(in, 3·in) or (in, 3, heads, dim)."""
    if len(shape) == 4 and shape[1] == 3:
        return MuonDimensionNumbers(-4, (-2, -1))
    return _split(3, width_per_row=3)(shape)


def _fused_gate(shape):
    """(in, 2·out) or, of experts, (experts, in, 2·out)."""
    is_split = len(shape) == 2 or len(shape) == 3 and shape[1] > 2
    return _split(2)(shape[-2:]) if is_split else _UNKNOWN


def _gate(shape):
    """That of a perceptron is no narrower than its input; a router is."""
    return MATRICES if len(shape) == 2 and shape[0] <= shape[1] else _UNKNOWN


def _convolution(shape):
    rank = len(shape)
    if rank < 3:
        return _UNKNOWN
    if shape[-2] == 1 and shape[-1] > 1:
        return None  # a vector for each channel: depthwise, or of one channel
    return MuonDimensionNumbers(tuple(range(-rank, -1)), -1)


def _pointwise(shape):
    """One whose window is one, or a matrix."""
    return MATRICES if len(shape) == 2 else _convolution(shape)


def _adamw_below(rank: int, view_of: Callable[[tuple[int, ...]], View | None]):
    """Returns a function from shapes to AdamW, or to another's views for those of more axes."""
    return lambda shape: None if len(shape) < rank else view_of(shape)


def _gate_of_experts(shape):
    """That of one perceptron, or of those of all experts."""
    return MATRICES if len(shape) == 3 else _gate(shape)


def _in_proj(shape):
    """Of a state space model; three times as wide as its input it may be that of attention."""
    return MATRICES if len(shape) == 2 and shape[1] != 3 * shape[0] else _UNKNOWN


LEAF = "kernel|weights?|w"
# Of networks, in which a layer may be the last.
_MODEL = (
    r"(\w*(model|module|net|network|cnn)|mlp|backbone|actor|critic|policy|generator|discriminator"
    "|decoder|transformer)"
)
# Of hidden layers, wherever they are, and of any.
_HIDDEN = r"(w_)?(up|down)(_proj)?|c_(fc|proj)|mlp\w*|fc_in|hidden\w*|w[io123]"
_LAYER = r"dense|linear|fc\w*|proj\w*|mlp\w*|\w*conv\w*"
_EMBEDDING = (
    r"wte|embedding|(?!patch)\w*embed(der|ding|dings|s)?(_(layer|table))?|(\w*_)?embs?"
    r"|embed_(?!patch)\w+|(\w+_)?(lookup|codebooks?|table)|ve|\w*ngram"
)
_INTO_HEADS = MuonDimensionNumbers(-3, (-2, -1))
_OUT_OF_HEADS = MuonDimensionNumbers((-3, -2), -1)
INTO_HEADS = Route("projection to heads", _INTO_HEADS)
OUT_OF_HEADS = Route("projection from heads", _OUT_OF_HEADS)

# At the end of a path, there or before the name of an array, there or before any name.
_LAST, _END, _NEAR = "(?=$)", rf"(?=(/({LEAF}))?$)", "(?=(/[^/]+)?$)"
# Before what is no part of experts, though experts, or layers of them, contain it.
_ALONE = r"(?!.*/(\w*att\w*|mha|query|key|value|[qkvo](_proj)?|\w*(conv|norm)\w*)(/|$))"

# Role, regular expression of whole names in the path, and the view by the shape of one layer. The
# first that matches decides.
_ROLES: tuple[tuple[str, str, Callable[[tuple[int, ...]], View | None]], ...] = (
    (
        "bias",
        rf"(bias(es)?|\w*_bias){_END}|((?!\w*lora|w?(q|kv?|v)_b)\w+_b|b_(in|out|up|down|gate)){_LAST}",
        _adamw,
    ),
    ("bias", rf"b[io]?\d*{_LAST}", _adamw_below(3, _unknown)),  # with axes of heads, at most
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
        _adamw_below(4, _convolution),  # of patches
    ),
    (
        "head",
        r"(?!multi_?head)(\w+_)?head|classifier|\w*logits?\w*|\w*vocab\w*|unembed\w*|seq_relationship"
        rf"|predictions?(?!/transform)|output_layer|readout|(scores?|qa_outputs?|regressor){_END}",
        _adamw,
    ),
    ("router", rf"\w*router\w*|(gating|switch|dispatch){_END}", _adamw),
    ("router", rf"\w*moe\w*/(wg|gate(_({LEAF}))?){_END}", _adamw_below(3, _matrices)),
    ("gate", r"smear\w*", _adamw),
    ("adapter", r"lora\w*", _unknown),
    ("fused gate and up", r"\w*(gate_up|up_gate)(_\w+)?|w13", _fused_gate),
    # Of a router, or of one expert; one vector for each expert, or one matrix.
    ("experts", rf"\w*experts?/(gate|wg){_END}", _gate_of_experts),
    (
        "experts",
        rf"\w*experts?{_ALONE}/(?!({LEAF}|{_HIDDEN})$)[^/]+{_LAST}",
        _of_rank(rank_3=MATRICES),
    ),
    (
        "experts",
        rf"(\w*experts?|\w*moe\w*(?=(/[^/]+){{1,2}}$)){_ALONE}",
        _of_rank(rank_2=MATRICES, rank_3=MATRICES),
    ),
    ("convolution", rf"(\w*(pointwise|pw)_?conv\w*){_END}", _pointwise),
    ("convolution", rf"\w*conv\w*{_END}|\w*embed\w*(/proj\w*)?/({LEAF})", _convolution),
    # A hidden layer or the output head: only the place says that.
    ("unnamed", rf"^(?!.*/\d+/)(.*/)?final\w*|heads(/[^/]+)?{_END}", _unknown),
    ("unnamed", rf"(prefix|prompts?|mem(ory)?|pkm)/\w+{_END}", _unknown),
    (
        "unnamed",
        rf"^({_MODEL}/)*((dense|linear|fc|layer|out|output)"
        rf"(_out|_proj|_projection)?\d*|({CONTAINER}/)*\d+)/({LEAF})",
        _unknown,
    ),
    (
        "fused qkv",
        r"c_attn|\w*qkv\w*|kqv|query_key_value|\w*(attn|attention|mha)/in_proj",
        _fused_qkv,
    ),
    ("input projection", "in_proj", _in_proj),
    ("fused kv", r"(to_)?w?kv|kv_proj|\w*key_value", _split(2)),
    (
        INTO_HEADS.role,
        r"w?[qkv]|(q|k|v)_proj|query|key|value|w?(q|kv?|v)_b",
        _of_rank(rank_2=MATRICES, rank_3=_INTO_HEADS),
    ),
    (
        OUT_OF_HEADS.role,
        r"out|wo|o|(o|out)_proj|attn_out",
        _of_rank(rank_2=MATRICES, rank_3=_OUT_OF_HEADS),
    ),
    ("gate", r"\w*gate|wg", _gate),
    ("matrix", rf"({_HIDDEN}){_END}", _of_rank(rank_2=MATRICES)),
    ("unnamed", rf"^({_MODEL}/)*[^/]+{_END}", _unknown),
    ("matrix", rf".*/({LEAF})|\w*proj|fc\w*|w_\w+", _of_rank(rank_2=MATRICES)),
)
