"""What the parameters beside a parameter tell of it: which of them takes its result."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

from optax.contrib import MuonDimensionNumbers

from muon_jax._matrices.layouts import Shape, relabelled
from muon_jax._matrices.roles import (
    ALONE_IN_BLOCK,
    FROM_HEADS,
    FUSED_GATE,
    FUSED_KV,
    FUSED_QKV,
    GATING_EINSUM,
    LAYER_NAME,
    TO_HEADS,
    Found,
    bias_beside,
    head_above,
    is_block,
    is_inside,
    module_of,
    parent_of,
    parents_of,
    plain,
    stem_and_number,
    width_of_embedding,
)
from muon_jax._matrices.shapes import UNKNOWN, VIEW_TO_HEADS, Unknown
from muon_jax._matrices.stacked_layers import Layers
from muon_jax._matrices.views import MATRICES, Split, Unfold

# Names of the second layer of an MLP, by those of the first.
_SECOND = {
    r"(?<=_)in(?=_|\d|$)": "out",
    r"^fc_?1$": "fc2",
    r"^(w_)?up(?=_|$)": r"\1down",
    r"^c_fc$": "c_proj",
    r"^wi(_\d)?$": "wo",
    r"^w1$": "w2",
    r"_h_to_4h$": "_4h_to_h",
}
# Names of the layer that takes the input of a recurrent cell, by those of the one for its state.
_OF_INPUT = {r"(?<![^/])(dense_|w_)h$": r"\1i", r"(?<![^/])h(?=(2?h)$)": "i"}
_OF_INPUT_AND_STATE = re.compile(r"(^|/)lstm(_\d+)?/linear$")
# Projections of attention under names that output heads do not have.
_OF_ATTENTION = re.compile(r"w_?(q|kv?|v)|(w?_?(q|kv?|v)_)(b_?)?(proj)?|query|key|k|attn_out")
_QUERY_OR_KEY = re.compile(r"w_?[qk]|[qk]_proj|query|key|k")
_OF_OUTPUT = re.compile(r"out|final|last|rgb|recon|pred|logit|head|post|transpose|deconv")
_GATES = ("gate", "gate_proj", "w_gate", "wg", "w3")


def told_by_neighbours(names: Sequence[str], found: Sequence[Found]) -> list[Found]:
    """Returns what is found, where the parameters beside each have told what they can.

    -   `(n, in, hidden)` and `(n, hidden, in)` of one MLP are n experts, or n layers.
    -   The first layer of an MLP may be twice or three times as wide as what the second takes. Then
        it is of several matrices, and only a rule can say how they lie. `(in, 2, hidden)` says so.
    -   A convolution whose bias has several axes is a stack, or has weights for each place.
    -   An array `query`, `key` or `value` may be learned vectors where no other such array is
        beside it.
    -   gpt-oss has gate and up of experts in one array, by turns, and the bias in another.
    -   Gemma's `gating_einsum` is (2, in, out), or (2, out, in), as `linear` beside it says.
    -   A gate (in, n) beside n experts is their router.
    -   q may make twice what the output projection takes, though k and v are alike. Then it makes a
        gate as well.
    -   A head of several layers has hidden ones, and only rules can say which.
    """
    beside = _Beside(names, found)

    def told(name: str, of_one: Found) -> Found:
        module, rank = module_of(name), len(of_one.shape)
        if of_one.role == GATING_EINSUM:
            return of_one._replace(view=beside.view_of_gates(module, of_one.shape))
        is_unknown = of_one.view == UNKNOWN
        if module in beside.experts and (is_unknown or of_one.role == FROM_HEADS):
            return of_one._replace(role="experts", view=MATRICES)
        if module in beside.gates_on_axis and is_unknown:
            return of_one._replace(role=GATING_EINSUM, view=MuonDimensionNumbers(-3, -1))
        if of_one.role == FUSED_GATE and beside.has_bias_array(module):
            return of_one._replace(view=_by_turns(of_one))
        if of_one.role == "head" and rank > 1 and beside.is_in_deep_head(module, of_one):
            return of_one._replace(view=Unknown("which is in an output head of several layers"))
        if is_unknown and beside.is_router(module, of_one):
            return of_one._replace(role="router", view=None)
        if of_one.role in ("convolution", "embedding") and rank > 2 and beside.has_wide_bias(name):
            return of_one._replace(view=Unknown("whose bias has several axes"))
        if of_one.role == TO_HEADS and rank == 2 and beside.may_be_vectors(name):
            return of_one._replace(view=Unknown("which may be learned vectors"))
        if of_one.role == TO_HEADS and beside.makes_gate(module, of_one.shape):
            return of_one._replace(view=_query_and_gate(of_one))
        if of_one.role == "matrix" and rank == 2 and (parts := beside.parts.get(module)):
            return of_one._replace(view=_fused(of_one, *parts))
        return of_one

    return [told(name, of_one) for name, of_one in zip(names, found, strict=True)]


def without_possible_heads(
    names: Sequence[str], layers: Sequence[Layers], found: Sequence[Found]
) -> list[Found]:
    """Returns what is found, with no view for parameters that may be output heads.

    A layer may be the output head, whatever its name, unless it is in a stack, a numbered block, an
    attention, or experts. It is hidden where another layer takes its result:

    -   the next number, as of `Dense_0`, the second layer of its MLP, or the output head beside it
        has as many rows as it has columns;
    -   `w_in` and `w_out` are beside an embedding or an output head of the width that `w_in` takes
        and `w_out` gives;
    -   of a convolution, convolutions in blocks take the channels, or a layer that is flattened to.
    """
    beside = _Beside(names, found)
    return [
        of_one
        if isinstance(of_one.view, Unknown | None)
        or of_parameter.axes
        or beside.is_hidden(name, of_one)
        else of_one._replace(view=UNKNOWN)
        for name, of_parameter, of_one in zip(names, layers, found, strict=True)
    ]


class _Beside:
    """The parameters but vectors, found by the paths of their modules.

    Attributes:
        experts: the modules of all MLPs of n experts, or of n layers.
        parts: how many matrices lie side by side in a layer that has several, and why.
        gates_on_axis: the first layers of MLPs that have an axis of gate and up, (in, 2, hidden).
    """

    def __init__(self, names: Sequence[str], found: Sequence[Found]) -> None:
        modules = [*map(module_of, names)]
        shapes = {module: of_one.shape for module, of_one in zip(modules, found, strict=True)}
        self._vectors = {module: shape for module, shape in shapes.items() if len(shape) < 2}
        self._shapes = {module: shape for module, shape in shapes.items() if len(shape) > 1}
        self._root = _network_of(self._shapes)
        self._sequences = defaultdict(list)
        self._count_below = Counter(
            above.removesuffix("/") for module in self._shapes for above in parents_of(module)
        )
        for module, shape in self._shapes.items():
            stem, number = stem_and_number(self._place_of(module))
            self._sequences[stem].append((number, shape, module))
        self._ends = defaultdict(set)  # the widths behind embeddings and before heads, by modules
        self._heads = defaultdict(set)  # the latter, by modules right above
        self._arrays_to_heads = defaultdict(set)  # arrays that make heads, by modules right above
        self._layers_of_heads = Counter()  # the matrices of output heads, by their paths
        self._attentions = set()  # modules right above queries, keys, or fused q, k and v
        self._taken = defaultdict(set)  # what projections from heads take, by modules right above
        self.experts, self.parts, self.gates_on_axis, self._residual = set(), {}, set(), set()
        for name, module, of_one in zip(names, modules, found, strict=True):
            self._read_role(module, of_one)
            last = plain(module.removeprefix(parent_of(module)))
            is_named = of_one.role == TO_HEADS and _QUERY_OR_KEY.fullmatch(last)
            if is_named or of_one.role in (FUSED_QKV, FUSED_KV):
                self._attentions.add(parent_of(module))
            if of_one.role in (TO_HEADS, FUSED_KV) and name == module:
                self._arrays_to_heads[parent_of(name)].add(name)
        for module, shape in self._shapes.items():
            for second in self._seconds(module):
                self._read_mlp(module, shape, second)
            self._read_recurrent(module, shape)
        for (_, shape, module), *later in map(sorted, self._sequences.values()):
            if later:
                self._read_fused(module, shape, taker=later[0][1])
        self._counts = _counts_of_experts(modules)  # by modules above
        for module, of_one in zip(modules, found, strict=True):
            is_of_experts = of_one.role == "experts" or module in self.experts
            if is_of_experts and len(of_one.shape) == 3:
                for parent in parents_of(module)[-2:]:
                    self._counts[parent].add(of_one.shape[0])

    def is_hidden(self, name: str, layer: Found) -> bool:
        """Whether a parameter is no output head, whose name may be that of any layer."""
        module = module_of(name)
        parent = parent_of(module)
        last = plain(module.removeprefix(parent))
        rank = len(layer.shape)
        if layer.role in (TO_HEADS, FROM_HEADS):
            says_so = rank > 2 or _OF_ATTENTION.fullmatch(last) or parent in self._attentions
        elif layer.role == FUSED_GATE and re.fullmatch(r"w\d+", last):  # the twelfth, perhaps
            return is_inside(module)
        else:
            roles = ("matrix", "experts") if rank == 2 else ("convolution",)
            says_so = layer.role not in roles or module in self._residual
        if says_so or is_inside(self._place_of(module).removeprefix(self._root)):
            return True
        out = layer.shape[-1]
        # Which of up and down is the first, their names do not say.
        seconds = () if "up" in last else map(self._shapes.__getitem__, self._seconds(module))
        if any(taker[-2:-1] == (out,) for taker in (*self._next_by_number(module), *seconds)):
            return True
        if _OF_OUTPUT.search(last):
            return False
        before_head = out in self._heads[parent] and LAYER_NAME.fullmatch(last)
        return bool(before_head) or rank > 2 and self._takes_channels(parent, out)

    def _takes_channels(self, parent: str, out: int) -> bool:
        """Whether a convolution in a block takes so many channels, or a layer that is flattened to.

        Images and latents have few channels, which the first and the last layers have in common.
        """
        below = [(name, shape) for name, shape in self._shapes.items() if name.startswith(parent)]
        if any(len(s) > 2 and s[-2] == out and is_inside(name) for name, s in below):
            return True
        is_decoder = re.search(r"decod|generat", parent)
        return (
            not is_decoder
            and out > 4
            and any(len(shape) == 2 and shape[0] % out == 0 for _, shape in below)
        )

    def _place_of(self, module: str) -> str:
        """The path of a module, or of the numbered block that it is alone in."""
        block = ALONE_IN_BLOCK.match(module)
        return block[1] if block and self._count_below[block[1]] == 1 else module

    def has_bias_array(self, module: str) -> bool:
        """Whether the bias of an array is an array of its own, such as `gate_up_proj_bias`."""
        return f"{module}_bias" in self._shapes

    def has_wide_bias(self, name: str) -> bool:
        """Whether the bias of a convolution has more axes than that of the output."""
        return sum(size > 1 for size in bias_beside(name, self._shapes) or ()) > 1

    def may_be_vectors(self, name: str) -> bool:
        """Whether an array of attention is alone, without modules, as learned queries may be."""
        parent = parent_of(name)
        is_named = name.removeprefix(parent) in ("query", "key", "value")
        return is_named and len(self._arrays_to_heads[parent]) == 1

    def is_in_deep_head(self, module: str, layer: Found) -> bool:
        """Whether a module is one of several layers of an output head.

        The last layer may have its weights elsewhere. Then the head has a bias that fits no other.
        """
        head = head_above(module)
        bias = self._vectors.get(f"{head}/bias", layer.shape[-1:])
        is_tied = bias != layer.shape[-1:] and head not in self._shapes
        return head != "" and 1 not in layer.shape and self._layers_of_heads[head] + is_tied > 1

    def is_router(self, module: str, layer: Found) -> bool:
        """Whether a gate has as many outputs as there are experts beside it."""
        parent = parent_of(module)
        is_gate = len(layer.shape) == 2 and module.removeprefix(parent) in ("gate", "wg")
        return is_gate and layer.shape[1] in self._counts[parent]

    def makes_gate(self, module: str, shape: Shape) -> bool:
        """Whether q makes twice what the output projection takes, where k and v are alike."""
        parent = parent_of(module)
        last = module.removeprefix(parent)
        if not re.fullmatch(r"w?_?q(_proj)?|query", last):
            return False
        names = ("key", "value") if last == "query" else (last.replace("q", x) for x in "kv")
        k, v = (self._shapes.get(f"{parent}{name}", ()) for name in names)
        are_alike = k and v and math.prod(k[1:]) == math.prod(v[1:])
        return bool(are_alike) and self._taken[parent] == {math.prod(shape[1:]) / 2}

    def view_of_gates(self, module: str, shape: Shape) -> MuonDimensionNumbers | Unknown:
        """The view of (…, 2, in, out) or (…, 2, out, in), beside `linear` of (…, out, in)."""
        *experts, two, rows, cols = shape
        linear = self._shapes.get(f"{parent_of(module)}linear", ())
        if two != 2 or rows == cols or linear[:-2] != (*experts,):
            return UNKNOWN
        transposed = MuonDimensionNumbers(-1, -2) if linear[-2:] == (rows, cols) else UNKNOWN
        return MATRICES if linear[-2:] == (cols, rows) else transposed

    def _read_role(self, module: str, of_one: Found) -> None:
        """Takes down what embeddings, output heads and projections from heads give and take."""
        role, _, shape, _ = of_one
        if role == FROM_HEADS:
            self._taken[parent_of(module)].add(math.prod(shape[:-1]))
        if role not in ("embedding", "head") or not shape:
            return
        width = shape[0] if role == "head" else width_of_embedding(of_one)
        for parent in parents_of(module):
            self._ends[parent].add(width)
        if role == "head":
            self._heads[parent_of(module)].add(width)
            self._layers_of_heads[head_above(module)] += len(shape) > 1 and 1 not in shape

    def _read_mlp(self, module: str, shape: Shape, second: str) -> None:
        """Takes down what the first and the second layer of an MLP say of each other."""
        parent, taker = parent_of(module), self._shapes[second]
        if len(shape) == 3 and taker == (shape[0], shape[2], shape[1]):
            gates = (f"{parent}{name}" for name in _GATES)
            self.experts |= {module, second}
            self.experts |= {gate for gate in gates if self._shapes.get(gate) == shape}
        if len(shape) == 3 and shape[1:] == (2, *taker[:1]) and taker[1:] == shape[:1]:
            self.gates_on_axis.add(module)
        is_closed = len(shape) == 2 and taker == shape[::-1]
        if is_closed and any(shape[0] in self._ends[above] for above in parents_of(module)):
            self._residual |= {module, second}
        self._read_fused(module, shape, taker)

    def _read_fused(self, module: str, shape: Shape, taker: Shape) -> None:
        """Takes down how many matrices lie side by side in the first layer of an MLP."""
        if (
            len(shape) == len(taker) == 2
            and shape[0] == taker[1]
            and shape[1] in (2 * taker[0], 3 * taker[0])
        ):
            parts = shape[1] // taker[0]
            why = f"which is {parts} times as wide as the layer after it takes"
            self.parts[module] = parts, why

    def _read_recurrent(self, module: str, shape: Shape) -> None:
        """Takes down how many gates lie side by side in the layers of a recurrent cell.

        Cells of nnx and of Haiku have a layer for the input, and one for the state, which has as
        many rows as a gate has columns. Haiku's LSTM has one layer for both, of more rows.
        """
        layers = {re.sub(*names, module) for names in _OF_INPUT.items()} | {module}
        gates = next((n for n in (3, 4) if shape[1:] == (n * shape[0],)), 0) * (len(layers) > 1)
        if _OF_INPUT_AND_STATE.search(module) and len(shape) == 2:
            gates = 4 * (shape[1] % 4 == 0 and shape[1] < 4 * shape[0])
        if gates:
            why = f"which is of {gates} gates of a recurrent cell"
            self.parts |= dict.fromkeys(layers, (gates, why))

    def _seconds(self, module: str) -> Iterator[str]:
        """The modules that may be the second layer of an MLP with this one as the first."""
        parent = parent_of(module)
        last = module.removeprefix(parent)
        names = {re.sub(first, second, last) for first, second in _SECOND.items()} - {last}
        if re.search(r"(?<!\d)0$", last):
            names.add(f"{last[:-1]}1")
        paths = {f"{parent}{name}" for name in names}
        paths.add(re.sub(r"(?<=/)net_0/proj$", "net_2", module))  # of diffusers
        yield from (paths - {module}) & self._shapes.keys()

    def _next_by_number(self, module: str) -> list[Shape]:
        """The shape with the next number after that of a module, if there is one."""
        stem, number = stem_and_number(self._place_of(module))
        sequence = sorted(self._sequences[stem])
        later = [shape for of_other, shape, _ in sequence if of_other > number]
        is_first = later and later[0][:-1] == sequence[0][1][:-1]  # of another network, perhaps
        return [] if is_first else later[:1]


def _network_of(modules: Collection[str]) -> str:
    """The path that a whole network is below; "" without one.

    Its name, such as `embedder` or `ffn`, says nothing about a place in the network. A numbered
    block and an attention are parts of one.
    """
    roots = {module.partition("/")[0] for module in modules}
    (root, *others) = roots or {""}
    is_part = is_block(root) or re.search("att|mha", root)
    is_network = not others and len(modules) > 1 and not is_part
    return f"{root}/" if is_network and is_inside(f"{root}/layer") else ""


def _counts_of_experts(modules: Sequence[str]) -> dict[str, set[int]]:
    """How many experts have modules of their own, numbered, by the path above `experts`."""
    numbers = defaultdict(set)
    for module in modules:
        if match := re.match(r"(.*?)\w*experts?/(\d+)/", module):
            numbers[match[1]].add(match[2])
    return defaultdict(set, {path: {len(of_path)} for path, of_path in numbers.items()})


def _by_turns(layer: Found) -> Unknown:
    """The answer for columns that are gates and ups by turns, as gpt-oss has them."""
    view = relabelled(Unfold(-1, (-1, 2), MuonDimensionNumbers(-3, -2)), layer.axes)
    return Unknown("whose gate and up alternate by columns in gpt-oss", str(view))


def _query_and_gate(layer: Found) -> Unknown:
    """The answer for a projection that makes q and a gate of each head."""
    view = Split(-1, (layer.shape[-1] // 2,) * 2, VIEW_TO_HEADS)
    proposal = str(relabelled(view, layer.axes)) if len(layer.shape) == 3 else "None"
    return Unknown("which makes twice what the output projection takes", proposal)


def _fused(layer: Found, parts: int, why: str) -> Unknown:
    view = relabelled(Split(-1, (layer.shape[1] // parts,) * parts), layer.axes)
    return Unknown(why, str(view))
