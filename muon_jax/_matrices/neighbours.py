"""What the parameters beside a parameter tell of it: which of them takes its result."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from optax.contrib import MuonDimensionNumbers

from muon_jax._matrices.layouts import Shape, relabelled
from muon_jax._matrices.roles import GATING_EINSUM, NUMBERED, UNNAMED, Found, module_of
from muon_jax._matrices.shapes import UNKNOWN, Unknown
from muon_jax._matrices.views import MATRICES, Split

# Names of the second layer of an MLP, by those of the first.
_SECOND = {
    r"(?<=_)in(?=_|\d|$)": "out",
    r"^fc_?1$": "fc2",
    r"^(w_)?up(?=_|$)": r"\1down",
    r"^c_fc$": "c_proj",
    r"^wi$": "wo",
    r"^w1$": "w2",
}
_GATES = ("gate", "gate_proj", "w_gate", "wg", "w3")


def told_by_neighbours(names: Sequence[str], found: Sequence[Found]) -> list[Found]:
    """Returns what is found, where the parameters beside each have told what they can.

    -   A numbered layer, such as `Dense_0`, is hidden if the next number, or the output head beside
        it, takes its result.
    -   `w_in` and `w_out` may be the first and the last layer. They are hidden beside an embedding
        or an output head of the width that `w_in` takes and `w_out` gives.
    -   `(n, in, hidden)` and `(n, hidden, in)` of one MLP are n experts, or n layers.
    -   The first layer of an MLP may be twice or three times as wide as what the second takes. Then
        it is of several matrices, and only a rule can say how they lie.
    -   Gemma's `gating_einsum` is (2, in, out), or (2, out, in), as `linear` beside it says.
    """
    beside = _Beside(names, found)

    def told(name: str, of_one: Found) -> Found:
        module, rank = module_of(name), len(of_one.shape)
        if of_one.role == GATING_EINSUM:
            return of_one._replace(view=beside.view_of_gates(module, of_one.shape))
        if rank == 3 and of_one.view == UNKNOWN and module in beside.experts:
            return of_one._replace(role="experts", view=MATRICES)
        if of_one.role not in (NUMBERED, UNNAMED, "matrix") or rank != 2:
            return of_one
        if parts := beside.parts.get(module):
            return of_one._replace(view=_fused(of_one, parts))
        if of_one.view == UNKNOWN and beside.take_result(module, of_one):
            return of_one._replace(role="matrix", view=MATRICES)
        return of_one

    return [told(name, of_one) for name, of_one in zip(names, found, strict=True)]


class _Beside:
    """The parameters but vectors, found by the paths of their modules.

    Attributes:
        experts: the modules of all MLPs of n experts, or of n layers.
        parts: how many matrices lie side by side in the first layers of MLPs that have several.
    """

    def __init__(self, names: Sequence[str], found: Sequence[Found]) -> None:
        modules = [*map(module_of, names)]
        self._shapes = {
            module: of_one.shape
            for module, of_one in zip(modules, found, strict=True)
            if len(of_one.shape) > 1
        }
        self._sequences = defaultdict(list)
        for module, shape in self._shapes.items():
            stem, number = _numbered(module)
            self._sequences[stem].append((number, shape))
        self._ends = defaultdict(set)  # the widths behind embeddings and before heads, by modules
        self._heads = defaultdict(set)  # the latter, by modules right above
        for module, (role, _, shape, _) in zip(modules, found, strict=True):
            width = {"embedding": shape[-1:], "head": shape[:1]}.get(role, ())
            for parent in _parents(module):
                self._ends[parent].update(width)
            if role == "head":
                self._heads[_parent(module)].update(width)
        self.experts, self.parts, self._residual = set(), {}, set()
        for module, shape in self._shapes.items():
            for second in self._seconds(module):
                self._read_mlp(module, shape, second)

    def take_result(self, module: str, layer: Found) -> bool:
        """Whether another layer takes the result of this one, as only hidden layers have it."""
        out = layer.shape[1]
        takers = self._next_by_number(module)
        is_hidden = any(taker[0] == out for taker in takers) or module in self._residual
        before_head = layer.role == NUMBERED and out in self._heads[_parent(module)]
        return 1 not in layer.shape and (is_hidden or before_head)

    def view_of_gates(self, module: str, shape: Shape) -> MuonDimensionNumbers | Unknown:
        """The view of (2, in, out) or (2, out, in), beside `linear` of shape (out, in)."""
        linear = self._shapes.get(f"{_parent(module)}linear", ())
        if len(linear) != 2 or linear[0] == linear[1] or shape[0] != 2:
            return UNKNOWN
        views = {linear[::-1]: MATRICES, linear: MuonDimensionNumbers(-1, -2)}
        return views.get(shape[1:], UNKNOWN)

    def _read_mlp(self, module: str, shape: Shape, second: str) -> None:
        """Takes down what the first and the second layer of an MLP say of each other."""
        parent, taker = _parent(module), self._shapes[second]
        if len(shape) == 3 and taker == (shape[0], shape[2], shape[1]):
            gates = (f"{parent}{name}" for name in _GATES)
            self.experts |= {module, second}
            self.experts |= {gate for gate in gates if self._shapes.get(gate) == shape}
        if len(shape) != 2 or len(taker) != 2 or shape[0] != taker[1]:
            return
        if shape[1] == taker[0] and shape[0] in self._ends[parent]:
            self._residual |= {module, second}
        if shape[1] in (2 * taker[0], 3 * taker[0]):
            self.parts[module] = shape[1] // taker[0]

    def _seconds(self, module: str) -> Iterator[str]:
        """The modules that may be the second layer of an MLP with this one as the first."""
        parent = _parent(module)
        last = module.removeprefix(parent)
        names = {re.sub(first, second, last) for first, second in _SECOND.items()} - {last}
        if re.search(r"(?<!\d)0$", last):
            names.add(f"{last[:-1]}1")
        yield from (f"{parent}{name}" for name in names if f"{parent}{name}" in self._shapes)

    def _next_by_number(self, module: str) -> list[Shape]:
        """The shape with the next number after that of a module, if there is one."""
        stem, number = _numbered(module)
        later = [member for member in self._sequences[stem] if member[0] > number]
        return [min(later)[1]] if later else []


def _parent(module: str) -> str:
    """The path of the module that has this module, with a slash."""
    return module[: module.rfind("/") + 1]


def _parents(module: str) -> list[str]:
    """The paths of all modules that have this module, with slashes."""
    return ["", *(module[: slash.end()] for slash in re.finditer("/", module))]


def _numbered(module: str) -> tuple[str, int]:
    """A path without the number at its end, and that number; 0 for the first of Haiku's names."""
    stem = re.sub(r"_?\d+$", "", module)
    return stem, int(module.removeprefix(stem).strip("_") or 0)


def _fused(layer: Found, parts: int) -> Unknown:
    out = layer.shape[1]
    view = relabelled(Split(-1, (out // parts,) * parts), layer.axes)
    return Unknown(f"which is {parts} times as wide as the layer after it takes", str(view))
