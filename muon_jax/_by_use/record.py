"""What a program does with its parameters, as far as their roles and views depend on it."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from muon_jax._by_use.pieces import (
    Axis,
    Piece,
    Shape,
    all_atoms,
    atoms_at,
    fused,
    known,
    picked,
    size_of,
)
from muon_jax._by_use.values import Dims, Value


class WeightProduct(NamedTuple):
    """A product with a parameter: the atoms of its axes that are contracted, kept and batched.

    `is_own` says whether the other operand comes from products with the same parameter alone, as in
    the power iteration of a spectral norm.
    """

    leaf: int
    contracted: Axis
    kept: Axis
    batch: Axis
    is_own: bool


class Head(NamedTuple):
    """Entries of an axis of a parameter that attention takes head by head."""

    axis: int
    begin: int
    stride: int
    size: int


class Record:
    """What a program does with its parameters.

    Attributes:
        products: all products, in the order in which they were found.
        seen: for each product, whether its other operand comes from inputs alone, and the largest
            number of entries of that operand.
        uses: for each parameter what else is done with it: "lookup", "matrices chosen by data",
            "vector", "with data", "depthwise", "modulated", or "opaque …".
        followed: for products the parameters whose products take their outputs.
        followed_by_linear: those of them with linear operations alone between.
        contracted: products whose outputs are contracted with another activation.
        chosen: pairs of a product, and of how its output chooses: "sort" or "softmax".
        taken: for each axis of a parameter, the sets of indices that later products take.
        heads: for each parameter, what attention takes as heads.
        batched: axes of parameters that meet the batch axis of a product with another parameter.
        mates: sets of axes that are contracted with each other.
        factors: pairs of parameters that are multiplied with each other.
        beside_inputs: products whose outputs, concatenated with the inputs, another one takes.
        hidden: axes of parameters of which products take entries that pieces do not show.
        gated: axes of parameters of which parts are multiplied with each other.
    """

    def __init__(self) -> None:
        self.passes_to_come = 0
        self._maxima: set[int] = set()
        self.products: list[WeightProduct] = []
        self.seen: dict[int, tuple[bool, int]] = {}
        self.uses: defaultdict[int, set[str]] = defaultdict(set)
        self.followed: defaultdict[int, set[int]] = defaultdict(set)
        self.followed_by_linear: defaultdict[int, set[int]] = defaultdict(set)
        self.contracted: set[int] = set()
        self.chosen: set[tuple[int, str]] = set()
        self.taken: defaultdict[tuple[int, int], set[frozenset[Any]]] = defaultdict(set)
        self.heads: defaultdict[int, set[Head]] = defaultdict(set)
        self.batched: set[tuple[int, Any, int]] = set()
        self.mates: set[frozenset[tuple[int, int, int]]] = set()
        self.factors: set[frozenset[int]] = set()
        self.beside_inputs: set[int] = set()
        self.hidden: set[tuple[int, Any]] = set()
        self.gated: set[tuple[int, Any]] = set()
        self._index_of: dict[WeightProduct, int] = {}

    def note(self, x: Value, use: str) -> None:
        if not self.passes_to_come and x.is_weight:
            for source in x.sources:
                self.uses[source].add(use)

    def note_modulated(self, leaves: Iterable[int]) -> None:
        if not self.passes_to_come:
            for leaf in leaves:
                self.uses[max(leaf, -1 - leaf)].add("modulated")

    def note_choice(
        self, name: str, params: dict[str, Any], xs: list[Value], shapes: list[Shape]
    ) -> set[int]:
        """Records and returns products whose outputs choose among entries of an axis they keep."""
        if not xs or xs[0].is_weight:
            return set()
        if name == "exp":
            self.chosen |= {(j, "softmax") for j in xs[0].sources & self._maxima}
        is_maximum = name == "reduce_max"
        if not is_maximum and not name.startswith(("top_k", "sort", "arg", "approx_top")):
            return set()
        found = set()
        axes = params.get("axes", ())
        axis = params.get("dimension", params.get("axis", axes[0] if axes else None))
        axis = len(shapes[0]) - 1 if axis is None else axis
        for piece in xs[0].pieces:
            kept = {atom.axis for atom in self.products[piece.source].kept}
            along = {atom.axis for atom in known(piece.axes[axis])}
            if kept & along or size_of(self.products[piece.source].kept) == 1:
                if is_maximum:
                    self._maxima.add(piece.source)
                else:
                    found.add(piece.source)
        self.chosen |= {(j, "sort") for j in found}
        return found

    def chooser_of(self, x: Value) -> tuple[int, Any, int] | None:
        """A product whose outputs chose the indices in `x`, the axis they are of, and its size."""
        for j in x.choosers:
            if len(kept := self.products[j].kept) == 1:
                return j, kept[0].axis, kept[0].size
        return None

    def note_batched(self, piece: Piece, axis: Axis) -> None:
        """Records that an axis of an operand, of one atom, meets the batch axis of a weight."""
        atoms = [atom for atom in axis if atom.size > 1]
        if len(atoms) == 1 and atoms[0].axis is not None:
            leaf = self.products[piece.source].leaf
            self.batched.add((leaf, atoms[0].axis, atoms[0].size))

    def note_gates(self, left: frozenset[Piece], right: frozenset[Piece]) -> None:
        for p, q in itertools.product(left, right):
            if p.source == q.source and p.at == q.at and p.axes != q.axes:
                product = self.products[p.source]
                for axis in {atom.axis for atom in product.kept}:
                    one, other = ([a for a in all_atoms(x) if a.axis == axis] for x in (p, q))
                    if one != other and [a.size for a in one] == [a.size for a in other]:
                        self.gated.add((product.leaf, axis))

    def note_heads(self, piece: Piece, atoms: Axis) -> None:
        if self.passes_to_come:
            return
        leaf = self.products[piece.source].leaf
        for atom in atoms:
            if atom.axis is not None and atom.size > 1:
                of_axis = (a.start for a in all_atoms(piece) if a.axis == atom.axis)
                self.heads[leaf].add(Head(atom.axis, sum(of_axis), atom.stride, atom.size))

    def product_with(
        self, piece: Piece, contract: Dims, free: Dims, batch: Dims, other: Value, entries: int
    ) -> int:
        """Records a product of a weight with an activation and returns its index."""
        atoms = (fused(known(atoms_at(piece.axes, axes))) for axes in (contract, free, batch))
        of = {self.products[before].leaf if before >= 0 else None for before in other.frontier}
        product = WeightProduct(piece.source, *atoms, is_own=of == {piece.source})
        j = self._index_of.setdefault(product, len(self.products))
        if j == len(self.products):
            self.products.append(product)
        for before in other.frontier:
            if before >= 0:
                self.followed[before].add(product.leaf)
        for before in other.linear:
            self.followed_by_linear[before].add(product.leaf)
        self.beside_inputs |= other.beside_inputs
        if not self.passes_to_come:
            is_first, most = self.seen.get(j, (True, 0))
            is_first = is_first and other.is_data and not other.frontier
            self.seen[j] = (is_first, max(most, entries))
        return j

    def note_taken(
        self,
        x: Value,
        contract: Dims,
        batch: Dims,
        weights: Sequence[tuple[Piece, int]] = (),
    ) -> None:
        """Records which indices of the axes of weights an operand of a product has.

        Args:
            x: the operand.
            contract: its axes that are contracted.
            batch: its axes that are batched.
            weights: the pieces of the other operand where it is a weight, with each of its
                contracted axes.
        """
        if self.passes_to_come or x.is_weight:
            return
        self.hidden |= {(self.products[j].leaf, axis) for j, axis in x.hidden}
        entries = defaultdict(set)
        for piece in x.pieces:
            product = self.products[piece.source]
            consumed = [*known(atoms_at(piece.axes, (*contract, *batch)))]
            # One index of an axis is taken, whichever axis of the operand its atom has come to.
            consumed += picked(piece)
            for axis in {a.axis for a in product.kept} & {a.axis for a in consumed}:
                own = [
                    k for k, atoms in enumerate(piece.axes) if any(a.axis == axis for a in atoms)
                ]
                atoms = tuple(a for k in own for a in piece.axes[k] if a.axis == axis)
                box = tuple((k, piece.at[k], size_of(piece.axes[k])) for k in own)
                of_axis = (a for k in own for a in piece.axes[k] if a.axis in (axis, None))
                entries[product.leaf, axis].add((atoms, box, size_of(of_axis)))
        for key, found in entries.items():
            self.taken[key].add(frozenset(found))
        for n, k in enumerate(contract):
            mates = set()
            for piece in x.pieces:
                if len(one := known(piece.axes[k])) == 1 and one[0].axis is not None:
                    mates.add((self.products[piece.source].leaf, one[0].axis, one[0].size))
            for piece, axis in weights:
                if (
                    axis == weights[n][1]
                    and len(one := known(piece.axes[axis])) == 1
                    and one[0].axis is not None
                ):
                    mates.add((piece.source, one[0].axis, one[0].size))
            if len(mates) > 1:
                self.mates.add(frozenset(mates))
