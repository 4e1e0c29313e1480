"""What the parameters beside a parameter tell of it: which of them takes its result."""

import re
from collections import defaultdict
from collections.abc import Sequence

from optax.contrib import MuonDimensionNumbers

from muon_jax._matrices.layouts import Shape, relabelled
from muon_jax._matrices.roles import GATING_EINSUM, LEAF, NUMBERED, Found
from muon_jax._matrices.shapes import UNKNOWN, Unknown
from muon_jax._matrices.views import MATRICES, Split

# Names of the second layer of an MLP, by those of the first.
_SECOND = {
    r"(^|_)in(?=_|\d|$)": r"\1out",
    r"^fc_?1$": "fc2",
    r"^(w_)?up(?=_|$)": r"\1down",
    r"^c_fc$": "c_proj",
    r"^wi$": "wo",
    r"^w1$": "w2",
}


def module_of(name: str) -> str:
    """Returns the path of a parameter, without the name of an array such as `kernel`."""
    return re.sub(rf"/({LEAF})$", "", name)


def told_by_neighbours(names: Sequence[str], found: Sequence[Found]) -> list[Found]:
    """Returns what is found, where the parameters beside each have told what they can.

    -   A numbered layer, such as `Dense_0`, is hidden if what comes after it takes its result: the
        next number, or the output head.
    -   `w_in` and `w_out`, which may be first and last layers, are hidden if one is as the
        transpose of the other.
    -   The first layer of an MLP may be twice or three times as wide as what the second takes. Then
        it is of several matrices, and only a rule can say how they lie.
    -   Gemma's `gating_einsum` is (2, in, out), or (2, out, in), as `linear` beside it says.
    """
    beside = _Beside(names, found)

    def told(name: str, of_one: Found) -> Found:
        module = module_of(name)
        if of_one.role == GATING_EINSUM:
            return of_one._replace(view=_view_of_gates(of_one, beside.named(module, "linear")))
        if of_one.role not in (NUMBERED, "matrix") or len(of_one.shape) != 2:
            return of_one
        if parts := _parts(of_one.shape, beside.seconds(module)):
            return of_one._replace(view=_fused(of_one, parts))
        if of_one.role == NUMBERED and _is_hidden(module, of_one.shape, beside):
            return of_one._replace(role="matrix", view=MATRICES)
        return of_one

    return [told(name, of_one) for name, of_one in zip(names, found, strict=True)]


class _Beside:
    """The parameters of two axes, found by the paths of their modules."""

    def __init__(self, names: Sequence[str], found: Sequence[Found]) -> None:
        self._shapes: dict[str, Shape] = {}
        self._heads = defaultdict(list)
        self._sequences = defaultdict(list)
        for name, of_one in zip(names, found, strict=True):
            module = module_of(name)
            if len(of_one.shape) != 2:
                continue
            self._shapes[module] = of_one.shape
            if module != name or of_one.role == NUMBERED:
                stem, number = _numbered(module)
                self._sequences[stem].append((number, of_one.shape))
            if of_one.role == "head":
                self._heads[_parent(module)].append(of_one.shape)

    def named(self, module: str, name: str) -> Shape | None:
        """The shape beside a module that has this name."""
        return self._shapes.get(f"{_parent(module)}{name}")

    def next_by_number(self, module: str) -> list[Shape]:
        """The shape with the next number after that of a module, if there is one."""
        stem, number = _numbered(module)
        later = [member for member in self._sequences[stem] if member[0] > number]
        return [min(later)[1]] if later else []

    def takers(self, module: str) -> list[Shape]:
        """The shapes that may take the result of a layer."""
        return [*self.next_by_number(module), *self._heads[_parent(module)]]

    def seconds(self, module: str) -> list[Shape]:
        """The shapes that take the result of the first layer of an MLP."""
        last = module.removeprefix(_parent(module))
        names = [re.sub(first, name, last) for first, name in _SECOND.items()]
        shapes = [self.named(module, name) for name in names if name != last]
        number = self.next_by_number(module) if re.search(r"\D0$", module) else []
        return [shape for shape in (*shapes, *number) if shape]


def _is_hidden(module: str, shape: Shape, beside: _Beside) -> bool:
    """Whether another layer takes the result of this one, or makes what this one takes."""
    last = module.removeprefix(_parent(module))
    for one, other in (("in", "out"), ("out", "in")):
        partner = re.sub(rf"(^|_){one}(?=_|$)", rf"\1{other}", last)
        if partner != last and beside.named(module, partner) == shape[::-1]:
            return True
    return 1 not in shape and any(taker[0] == shape[1] for taker in beside.takers(module))


def _parent(module: str) -> str:
    """The path of the module that has this module, with a slash."""
    return module[: module.rfind("/") + 1]


def _numbered(module: str) -> tuple[str, int]:
    """A path without the number at its end, and that number; 0 for the first of Haiku's names."""
    stem = re.sub(r"_?\d+$", "", module)
    return stem, int(module.removeprefix(stem).strip("_") or 0)


def _parts(shape: Shape, seconds: Sequence[Shape]) -> int | None:
    """How many matrices lie side by side in the first layer of an MLP, None if it is but one."""
    for rows, cols in seconds:
        for parts in (2, 3):
            if shape == (cols, parts * rows):
                return parts
    return None


def _fused(layer: Found, parts: int) -> Unknown:
    out = layer.shape[1]
    view = relabelled(Split(-1, (out // parts,) * parts), layer.axes)
    return Unknown(f"which is {parts} times as wide as the layer after it takes", str(view))


def _view_of_gates(gates: Found, linear: Shape | None) -> MuonDimensionNumbers | Unknown:
    """The view of (2, in, out) or (2, out, in), beside `linear` of shape (out, in)."""
    if linear is None or gates.shape[0] != 2 or linear[0] == linear[1]:
        return UNKNOWN
    views = {linear[::-1]: MATRICES, linear: MuonDimensionNumbers(-1, -2)}
    return views.get(gates.shape[1:], UNKNOWN)
