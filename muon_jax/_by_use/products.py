"""Products of which an operand may be a weight."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from muon_jax._by_use.pieces import (
    Axis,
    Piece,
    Shape,
    all_atoms,
    atoms_at,
    kept_where_equal,
    known,
    no_axis,
    picked,
    size_of,
    without_lost,
)
from muon_jax._by_use.record import Record
from muon_jax._by_use.relayouts import grouped
from muon_jax._by_use.values import Dims, Value, activation, as_activation, is_matrix


class ProductRecord(Record):
    """Records products of weights with activations, and returns their values."""

    def mixed(self, xs: Sequence[Value], use: str | None = None) -> Value:
        """An activation of operands among which are weights: vectors, tables or latents."""
        for x in xs:
            has_data = any(other.is_data for other in xs if other is not x)
            self.note(x, use or ("with data" if has_data else "vector"))
        return activation([as_activation(x) for x in xs])

    def learned(self, x: Value, is_data: bool) -> Value:
        """A parameter in the place of an activation."""
        self.note(x, "with data" if is_data else "vector")
        lookups = {-1 - source for source in x.sources}
        return dataclasses.replace(as_activation(x), frontier=x.frontier | lookups)

    def dot(
        self,
        xs: list[Value],
        shapes: list[Shape],
        contract: tuple[Dims, Dims],
        batch: tuple[Dims, Dims],
    ) -> Value:
        pairs = [*zip(*batch, strict=False)]
        free = [
            [k for k in range(len(shapes[i])) if k not in contract[i] and k not in batch[i]]
            for i in (0, 1)
        ]
        slots = [*((0, of_left) for of_left, _ in pairs)]
        slots += [*((0, k) for k in free[0]), *((1, k) for k in free[1])]
        right_of = dict(pairs)

        def in_output(i: int, piece: Piece) -> Piece:
            """Where operand i has its batch and free axes in the output."""
            at, axes = [], []
            for n, (j, k) in enumerate(slots):
                axis = k if j == i else right_of[k] if i == 1 and n < len(pairs) else None
                at.append(0 if axis is None else piece.at[axis])
                axes.append(no_axis(shapes[j][k]) if axis is None else piece.axes[axis])
            return Piece(piece.source, tuple(at), tuple(axes))

        for i in (0, 1):
            x, other = xs[i], xs[1 - i]
            is_one_hot = other.is_one_hot and not other.is_weight
            if x.is_weight and is_one_hot and len(contract[i]) == 1 and not batch[i]:
                self.note(x, "lookup")
                rows = Value(is_weight=True, is_data=True, is_looked_up=True)
                return rows.with_pieces(in_output(i, piece) for piece in x.pieces)
        operands = self._weights_of_product(xs, contract, free)
        if operands is None:
            return Value()
        xs = operands
        found: set[Piece] = set()
        for i in (0, 1):
            if not xs[i].is_weight:
                continue
            other = as_activation(xs[1 - i])
            if xs[i].is_looked_up:
                self.note(xs[i], "matrices chosen by data")
            for piece in xs[i].pieces:
                entries = math.prod(shapes[1 - i])
                j = self.product_with(piece, contract[i], free[i], batch[i], other, entries)
                found.add(in_output(i, piece)._replace(source=j))
            if not self.passes_to_come:
                for piece in other.pieces:
                    for pair in pairs:
                        self.note_batched(piece, piece.axes[pair[1 - i]])
            meets = [(piece, k) for piece in xs[i].pieces for k in contract[i]]
            self.note_taken(other, contract[1 - i], batch[1 - i], meets)
        if any(x.is_weight for x in xs):
            products = frozenset(piece.source for piece in found)
            is_data = xs[0].is_data or xs[1].is_data
            return Value(frozenset(found), False, products, is_data, linear=products)
        return self._dot_of_activations(xs, contract, batch, free, in_output)

    def _weights_of_product(
        self, xs: list[Value], contract: tuple[Dims, Dims], free: list[list[int]]
    ) -> list[Value] | None:
        """The operands, of which those that are no matrices here are activations.

        None where both are made of one parameter, as in a regularizer that multiplies W and Wᵀ.
        """
        xs = [
            self.learned(x, xs[1 - i].is_data)
            if x.is_weight and not is_matrix(x, contract[i], free[i])
            else x
            for i, x in enumerate(xs)
        ]
        if not all(x.is_weight for x in xs):
            return xs
        if xs[0].is_looked_up != xs[1].is_looked_up:
            k = xs.index(next(x for x in xs if x.is_looked_up))
            return [self.learned(x, True) if i == k else x for i, x in enumerate(xs)]
        if xs[0].sources == xs[1].sources:
            return None
        # Latents that were broadcast over a batch have axes that are of no parameter.
        is_wide = [
            any(size_of(all_atoms(p)) > size_of(known(all_atoms(p))) for p in x.pieces) for x in xs
        ]
        if is_wide[0] != is_wide[1]:
            k = is_wide.index(True)
            return [self.learned(x, True) if i == k else x for i, x in enumerate(xs)]
        if not self.passes_to_come:
            self.factors |= {frozenset((a, b)) for a in xs[0].sources for b in xs[1].sources}
        return xs

    def _dot_of_activations(
        self,
        xs: list[Value],
        contract: tuple[Dims, Dims],
        batch: tuple[Dims, Dims],
        free: list[list[int]],
        in_output: Callable[[int, Piece], Piece],
    ) -> Value:
        """Attention, for example: shows which axes are heads."""
        self.note_modulated(xs[0].modulated | xs[1].modulated)
        is_norm = xs[0].frontier == xs[1].frontier and not free[0] and not free[1]
        pieces = []
        for i in (0, 1):
            self.note_taken(xs[i], contract[i], batch[i])
            for piece in xs[i].pieces:
                kept = {atom.axis for atom in self.products[piece.source].kept}

                def own(axes: Dims, piece: Piece = piece, kept: set[Any] = kept) -> Axis:
                    found = known(atoms_at(piece.axes, axes))
                    return tuple(atom for atom in found if atom.axis in kept)

                contracted, batched, left = own(contract[i]), own(batch[i]), own(free[i])
                if contracted and xs[1 - i].frontier and not is_norm:
                    self.contracted.add(piece.source)
                if xs[1 - i].frontier and (batched or contracted and left):
                    self.note_heads(piece, batched + (left if contracted else ()))
                lost = [*atoms_at(piece.axes, contract[i]), *picked(piece)]  # both are taken now
                pieces.append(without_lost(in_output(i, piece), lost))
        return activation(xs).with_pieces(p for p in pieces if known(all_atoms(p)))

    def convolution(
        self, xs: list[Value], shapes: list[Shape], params: dict[str, Any], out: Shape
    ) -> Value:
        numbers, groups = params["dimension_numbers"], params["feature_group_count"]
        of_out, of_in, *window = numbers.rhs_spec
        in_lhs, in_out = numbers.lhs_spec[1], numbers.out_spec[1]
        x, kernel = xs
        if x.is_weight:
            x = self.learned(x, True)
        if not kernel.is_weight:
            self.note_modulated(x.modulated | kernel.modulated)
            return activation([x, kernel], frozenset())
        if groups > 1 and shapes[1][of_in] == 1:
            self.note(kernel, "depthwise")
            keeps_width = out[in_out] == shapes[0][in_lhs]
            kept = [kept_where_equal(p, shapes[0], out) for p in x.pieces] if keeps_width else []
            return activation([x.with_pieces(kept)])
        found = set()
        for piece in kernel.pieces:
            with_groups = piece
            if groups > 1:
                with_groups = grouped(piece, of_out, groups)
                if with_groups is None:
                    self.note(kernel, "opaque conv_general_dilated")
                    continue
            batch = (len(piece.axes),) if groups > 1 else ()
            contract, entries = (of_in, *window), math.prod(shapes[0])
            j = self.product_with(with_groups, contract, (of_out,), batch, x, entries)
            at = tuple(piece.at[of_out] if k == in_out else 0 for k in range(len(out)))
            axes = tuple(
                piece.axes[of_out] if k == in_out else no_axis(n) for k, n in enumerate(out)
            )
            found.add(Piece(j, at, axes))
        if groups > 1 and not self.passes_to_come:
            for piece in x.pieces:
                if with_groups := grouped(piece, in_lhs, groups):
                    self.note_batched(piece, with_groups.axes[-1])
        self.note_taken(x, (in_lhs,), ())
        products = frozenset(p.source for p in found)
        return Value(frozenset(found), False, products, x.is_data, linear=products)
