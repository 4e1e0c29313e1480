"""A matrix for each head: the views of projections to heads, cut where the heads are.

| the projection                         | its heads are told by                    |
| -------------------------------------- | ---------------------------------------- |
| has an axis of heads, (in, heads, dim) | that axis                                |
| of latent attention                    | the projections beside it, as below      |
| (in, heads·dim), beside a norm of q    | the norm, where it has a head's width    |
| (in, heads·dim)                        | `head_dim`                               |

Heads lie side by side, of dim columns each, also in fused projections: whether all q come before
all k and v, or alternate with them by heads or by groups of heads.

Latent attention has down-projections to latents, which have no heads, and up-projections:

    kv_a (in, latent + rope)    q_b (latent of q, heads·(nope + rope)), or q (in, …)
    o (heads·v, out)            kv_b (latent, heads·(nope + v))

So all widths follow from the shapes, with heads·rope = Q - KV + V for the widths Q of q_b, KV of
kv_b and V of o. A head of q is one matrix. Those of k and v, which kv_b has in turn, are two.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from optax.contrib import MuonDimensionNumbers

from muon_jax._matrices.heads import attention_of
from muon_jax._matrices.layouts import Shape, relabelled
from muon_jax._matrices.roles import (
    EINSUM_FROM_HEADS,
    EINSUM_TO_HEADS,
    FROM_HEADS,
    FUSED_KV,
    FUSED_QKV,
    TO_HEADS,
    Found,
    module_of,
    plain,
)
from muon_jax._matrices.shapes import Unknown
from muon_jax._matrices.views import MATRICES, Split, Unfold, View

NO_WIDTH = "whose heads have a width that nothing tells"
_OTHER_WIDTH = "whose heads may have another width than those of q"
_FUSED = (FUSED_QKV, FUSED_KV)
# The paths of modules that have projections: of attention itself, or of a module right below it.
_MLP = r"(?!\w*att)\w*(mlp|ffn|feed|moe|channel_mix)\w*"
_IN_ATTENTION = re.compile(rf"(^|/)(?P<attention>\w*att\w*|mha)(/(?!{_MLP}$)[^/]+)?$")
_NOT_ATTENTION = re.compile(rf"(^|/)({_MLP}|\w*indexer)$")  # an indexer selects tokens
# The names of projections.
_PROJECTION = re.compile(
    r"((w|to|c|in|linear)_?)?(?P<makes>q|k|v|kv|qkv|query|key|value)"
    r"(_(b|up|proj|projection|lin|linear))*|w_?u[qkv]"
)
_LIKE_PROJECTION = re.compile(r"(^|_)w?(q|k|v|kv|query|key|value|queries|keys|values)(_|$)")
_OUTPUT = re.compile(r"w?o|(\w+_)?(o|out|output)(_\w+)?")
_LINEAR = re.compile(r"(c_)?proj|projection|dense")  # the output, where others are q, k and v
_TAKES_HEADS = re.compile(rf"(to_)?out|{_LINEAR.pattern}")
_Q = re.compile(r"(w|linear_)?q_(b|up)(_proj)?|w?q(_proj)?|query|linear_q_proj")
_KV_UP = re.compile(r"(w|linear_)?kv_(b|up)(_proj)?")
_UP = re.compile(r"(w|linear_)?(q|k|v|kv)_(b|up)(_proj)?|w_?u[qkv]")
_KV_DOWN = re.compile(r"(w|linear_)?kv_(a|down)(_\w+)?")
_DOWN = re.compile(r"\w*[qkv]_(a|down)(_\w+)?")
_NORM_OF_Q = re.compile(r"^(?P<attention>(.*/)?)_?(q|query)_?(layer_?)?norm(/[^/]+)?$")


class _LatentHead(NamedTuple):
    """The widths of a head of latent attention."""

    qk: int
    nope: int
    v: int


class _Attention(NamedTuple):
    """What the parameters of a module tell of its heads.

    Attributes:
        has_q_or_k: whether it has a projection to q or k, fused or not.
        is_latent: whether it has the up-projections of latent attention.
        latent: the widths of its heads; None where the shapes do not tell.
        head_dim: the width of a head; None where nothing tells.
        v_differs: whether o takes another width than q makes: heads of v may have another width.
        contradiction: what tells another width than the argument `head_dim`, if anything does.
    """

    has_q_or_k: bool
    is_latent: bool = False
    latent: _LatentHead | None = None
    head_dim: int | None = None
    v_differs: bool = False
    contradiction: str = ""


def with_matrix_per_head(
    names: Sequence[str], found: Sequence[Found], head_dim: int | None
) -> list[Found]:
    """Returns what is found, with a matrix for each head in projections to heads.

    Output projections, down-projections of latent attention and indexers stay whole. A matrix has
    no view that may be a projection to heads: by its name, or because it is in an attention under a
    name that is not known.

    Args:
        names: the paths, in lower case.
        found: of each.
        head_dim: the width of a head where shapes do not tell; None if it is not known.
    """
    members: dict[str, dict[str, Found]] = defaultdict(dict)
    norms: dict[str, int] = {}
    for name, of_one in zip(names, found, strict=True):
        if len(of_one.shape) > 1:
            members[attention_of(name)][_last(name)] = of_one
        elif match := _NORM_OF_Q.match(name):
            norms[match["attention"].rstrip("/")] = math.prod(of_one.shape)
    attentions = {
        module: _attention_with(inside, norms.get(module, 0), head_dim)
        for module, inside in members.items()
    }

    def seen(name: str, of_one: Found) -> Found:
        is_known = not isinstance(of_one.view, Unknown) or of_one.role in _FUSED
        if of_one.view is None or not is_known or len(of_one.shape) < 2:
            return of_one
        if _is_whole(name, of_one, attentions):
            return of_one
        return of_one._replace(view=_view(name, of_one, attentions[attention_of(name)]))

    return [seen(name, of_one) for name, of_one in zip(names, found, strict=True)]


def _last(name: str) -> str:
    """The last name of the path of a parameter's module."""
    return plain(module_of(name)).rpartition("/")[2]


def _makes(last: str) -> str:
    """What a projection of this name makes, such as "kv"; "" where the name does not tell."""
    match = _PROJECTION.fullmatch(last)
    makes = (match and match["makes"]) or ""
    return {"query": "q", "key": "k", "value": "v"}.get(makes, makes)


def _projects(last: str, of_one: Found) -> bool:
    """Whether a parameter of this last name is a projection to heads."""
    is_named = _PROJECTION.fullmatch(last) is not None
    return is_named or of_one.role in (TO_HEADS, EINSUM_TO_HEADS, *_FUSED)


def _is_v_alone(last: str, of_one: Found, attention: _Attention) -> bool:
    """Whether a parameter has the name of v, with no axis of heads, and no q or k beside it."""
    return _makes(last) == "v" and len(of_one.shape) == 2 and not attention.has_q_or_k


def _is_whole(name: str, of_one: Found, attentions: Mapping[str, _Attention]) -> bool:
    """Whether a parameter stays as it is: it is known to be no projection to heads.

    Args:
        name: its path.
        of_one: what is found of it.
        attentions: by the paths of modules.
    """
    last, module = _last(name), attention_of(name)
    if _NOT_ATTENTION.search(module) or _DOWN.fullmatch(last):
        return True
    match = _IN_ATTENTION.search(module)
    if _projects(last, of_one):
        is_v_alone = _is_v_alone(last, of_one, attentions[module])
        return is_v_alone and not match and last in ("v", "value")  # of a state, not of tokens
    if of_one.role in (FROM_HEADS, EINSUM_FROM_HEADS) or _OUTPUT.fullmatch(last):
        return True
    if match and _LINEAR.fullmatch(last):
        path = module[: match.end("attention")] + "/"
        return any(f"{m}/".startswith(path) for m, other in attentions.items() if other.has_q_or_k)
    return not (match or _LIKE_PROJECTION.search(last))


def _attention_with(
    members: Mapping[str, Found], norm_of_q: int, head_dim: int | None
) -> _Attention:
    """What these parameters, by the last names of their modules, tell of their heads.

    Args:
        members: all that are no vectors.
        norm_of_q: the size of the norm of q; 0 without one. It is the width of a head where it is
            less than that of all heads of q.
        head_dim: the width of a head where nothing tells.
    """
    outputs = [of_one.shape for of_one in members.values() if of_one.role == FROM_HEADS] or [
        of_one.shape for name, of_one in members.items() if _TAKES_HEADS.fullmatch(name)
    ]
    of_all = min((math.prod(shape[:-1]) for shape in outputs), default=0)
    projecting = [name for name, of_one in members.items() if _projects(name, of_one)]
    has_q_or_k = any(_makes(name) != "v" for name in projecting)
    if any(_UP.fullmatch(name) for name in members):
        return _Attention(has_q_or_k, is_latent=True, latent=_latent_head(members, of_all))
    made = [math.prod(one.shape[1:]) for name, one in members.items() if _makes(name) == "q"]
    of_q = min(made, default=of_all)  # fused projections have no q by itself
    v_differs = 0 < of_all != of_q
    if not 0 < norm_of_q < of_q:
        return _Attention(has_q_or_k, head_dim=head_dim, v_differs=v_differs)
    agree = head_dim in (None, norm_of_q)
    said = "" if agree else f"whose norm of q tells heads of {norm_of_q} columns"
    return _Attention(has_q_or_k, head_dim=norm_of_q, v_differs=v_differs, contradiction=said)


def _latent_head(members: Mapping[str, Found], v_width: int) -> _LatentHead | None:
    """The widths of the heads of latent attention, None where the shapes do not tell them.

    Args:
        members: as for `_attention_with`.
        v_width: of the values of all heads.
    """

    def shape(pattern: re.Pattern[str]) -> Shape | None:
        shapes = (of_one.shape for name, of_one in members.items() if pattern.fullmatch(name))
        return next(shapes, None)

    down, kv, q = shape(_KV_DOWN), shape(_KV_UP), shape(_Q)
    if not (down and kv and q and v_width):
        return None
    q_width, kv_width = math.prod(q[1:]), math.prod(kv[1:])
    rope = down[-1] - kv[0]
    heads = (q_width - kv_width + v_width) // rope if rope > 0 else 0
    if heads < 1 or q_width % heads or kv_width % heads or v_width % heads:
        return None
    head = _LatentHead(q_width // heads, (kv_width - v_width) // heads, v_width // heads)
    return head if head.nope > 0 and head.nope + rope == head.qk else None


def _view(name: str, of_one: Found, attention: _Attention) -> View | Unknown:
    """The view of what may be a projection to heads, with its axes in the order (in, out)."""
    last, view = _last(name), of_one.view
    has_axis, is_kv = len(of_one.shape) > 2, _KV_UP.fullmatch(last) is not None
    is_fused = of_one.role in _FUSED and not re.search("qkv[a-z]", last)

    def unknown(reason: str) -> Unknown:
        whole = MATRICES if isinstance(view, Unknown | None) else view
        return Unknown(reason, str(relabelled(whole, of_one.axes)), is_of_heads=True)

    if isinstance(view, Unknown) and (view.is_of_layout or has_axis or not is_fused):
        return view
    is_projection = is_fused or of_one.role == EINSUM_TO_HEADS or _PROJECTION.fullmatch(last)
    if not is_projection or _is_v_alone(last, of_one, attention):
        return unknown("which may be a projection to heads")
    latent, width = attention.latent, attention.head_dim
    if attention.is_latent and not (latent and (is_kv or _Q.fullmatch(last))):
        return unknown("whose heads the projections beside it do not tell")
    rows = view.reduction_axis if isinstance(view, MuonDimensionNumbers) and has_axis else -3
    of_head: View = MuonDimensionNumbers(rows, -1)
    if latent:
        width = latent.nope + latent.v if is_kv else latent.qk
        of_head = Split(-1, (latent.nope, latent.v), of_head) if is_kv else of_head
    if has_axis:
        return of_head
    if attention.contradiction:
        return unknown(attention.contradiction)
    if width is None:
        return unknown(NO_WIDTH)
    if attention.v_differs and (of_one.role == FUSED_KV or _makes(last) in ("v", "kv")):
        return unknown(_OTHER_WIDTH)
    if of_one.shape[-1] % width:
        return unknown(f"whose {of_one.shape[-1]} columns are no multiple of a head's {width}")
    return Unfold(-1, (-1, width), of_head)
