"""What is known of an array of the program: which weights and products it is made of."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from muon_jax._by_use.pieces import (
    Piece,
    Shape,
    atoms_at,
    known,
    size_of,
    sliced,
    source_axes,
)

type Dims = Sequence[int]

_MOST_PIECES = 24  # of an activation: those of the latest products are kept


@dataclasses.dataclass(frozen=True)
class Value:
    """What an array of the program is made of.

    Attributes:
        pieces: boxes of it. Their sources are parameters in a weight, products in an activation.
        is_weight: whether it is a relayout or a reparametrization of parameters.
        frontier: the products that it comes from with no product between; -1 - i for rows that were
            looked up in parameter i.
        is_data: whether it depends on the inputs.
        is_scalar: whether it is one number, or made of single numbers alone.
        is_one_hot: whether it is a comparison, as of a one-hot encoding.
        is_looked_up: whether it is a weight of which the data chose rows or matrices.
        modulated: parameters that data changed entry by entry, where the result may be a matrix:
            the data vary along some of its axes alone, or (as -1 - i) are inputs of its own shape,
            such as a mask.
        beside_inputs: products that were concatenated with the inputs to make it.
        repeats: the axes that a broadcast has just made.
        hidden: products, and axes of their weights, of which a relayout took entries that pieces
            cannot show.
        linear: the products that it comes from by linear operations alone.
        choosers: products whose outputs were sorted, or compared for the largest, to make it.
    """

    pieces: frozenset[Piece] = frozenset()
    is_weight: bool = False
    frontier: frozenset[int] = frozenset()
    is_data: bool = False
    is_scalar: bool = False
    is_one_hot: bool = False
    is_looked_up: bool = False
    modulated: frozenset[int] = frozenset()
    beside_inputs: frozenset[int] = frozenset()
    repeats: frozenset[int] = frozenset()
    hidden: frozenset[tuple[int, Any]] = frozenset()
    linear: frozenset[int] = frozenset()
    choosers: frozenset[int] = frozenset()

    def with_pieces(self, pieces: Iterable[Piece | None]) -> "Value":
        """Returns the same value with these pieces."""
        pieces = frozenset(p for p in pieces if p)
        return self if pieces == self.pieces else dataclasses.replace(self, pieces=pieces)

    @property
    def sources(self) -> set[int]:
        """The sources of its pieces."""
        return {piece.source for piece in self.pieces}


def hidden_axes(
    name: str, xs: Sequence[Value], pieces: Sequence[frozenset[Piece]]
) -> set[tuple[int, Any]]:
    """The axes of sources of which an operation takes entries that pieces do not show."""
    if name in ("slice", "split", "unstack") or all(
        own is x.pieces for x, own in zip(xs, pieces, strict=True)
    ):
        return set()
    before = {(p.source, axis) for x in xs for p in x.pieces for axis in source_axes(p)}
    after = {(p.source, axis) for own in pieces for p in own for axis in source_axes(p)}
    return before - after


def is_matrix(x: Value, contract: Dims, free: Dims) -> bool:
    """Whether each piece of a weight has an axis that is contracted and one that is kept."""
    return bool(x.pieces) and all(
        known(atoms_at(p.axes, contract)) and known(atoms_at(p.axes, free)) for p in x.pieces
    )


def as_activation(x: Value) -> Value:
    """The value as an operand that is no weight."""
    if not x.is_weight:
        return x
    lookups = {-1 - source for source in x.sources if x.is_looked_up}
    return Value(frontier=x.frontier | lookups, is_data=x.is_data)


def activation(
    xs: Sequence[Value], pieces: frozenset[Piece] | None = None, is_data: bool | None = None
) -> Value:
    """An activation that comes from these."""
    if pieces is None:
        pieces = frozenset().union(*(x.pieces for x in xs))
    if len(pieces) > _MOST_PIECES:
        latest = sorted(pieces, key=lambda piece: piece.source)
        pieces = frozenset(latest[-_MOST_PIECES:])
    return Value(
        pieces,
        frontier=frozenset().union(*(x.frontier for x in xs)),
        is_data=any(x.is_data for x in xs) if is_data is None else is_data,
        modulated=frozenset().union(*(x.modulated for x in xs)),
        beside_inputs=frozenset().union(*(x.beside_inputs for x in xs)),
        hidden=frozenset().union(*(x.hidden for x in xs)),
        choosers=frozenset().union(*(x.choosers for x in xs)),
    )


def fitting(x: Value, shape: Shape) -> Value:
    """The value in an array of this shape: a shard's first part stands for the shard."""
    pieces = []
    for piece in x.pieces:
        if len(piece.axes) != len(shape):
            continue
        ends = (at + size_of(axis) for at, axis in zip(piece.at, piece.axes, strict=True))
        if any(end > n for end, n in zip(ends, shape, strict=True)):
            piece = sliced(piece, (0,) * len(shape), shape, (1,) * len(shape))
        pieces.append(piece)
    return x.with_pieces(pieces)
