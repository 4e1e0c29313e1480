"""Follows parameters through a jaxpr, equation by equation, and records what is done with them."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from muon_jax._by_use.pieces import (
    Axis,
    Piece,
    Shape,
    all_atoms,
    atoms_at,
    fused,
    kept_where_equal,
    known,
    size_of,
    sliced,
    source_axes,
    unknown,
    without_lost,
)
from muon_jax._by_use.relayouts import ELEMENTWISE, MOVES, REDUCTIONS, RELAYOUTS, grouped, moved

type Dims = Sequence[int]
type Slots = Sequence[tuple[int, int]]  # the axes of an output: an operand and an axis of it

_OPAQUE = frozenset(
    "cudnn_dot_product_attention_fwd custom_partitioning ffi_call io_callback pallas_call"
    " pure_callback run_state triton_kernel_call xla_ffi_call".split()
)
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
        hidden: products of whose outputs a relayout took entries that pieces cannot show.
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
    hidden: frozenset[int] = frozenset()

    def with_pieces(self, pieces: Iterable[Piece | None]) -> "Value":
        """Returns the same value with these pieces."""
        pieces = frozenset(p for p in pieces if p)
        return self if pieces == self.pieces else dataclasses.replace(self, pieces=pieces)

    @property
    def sources(self) -> set[int]:
        """The sources of its pieces."""
        return {piece.source for piece in self.pieces}


class Product(NamedTuple):
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


class Follower:
    """Runs a jaxpr on `Value`s.

    Attributes:
        products: all products, in the order in which they were found.
        seen: for each product, whether its other operand comes from inputs alone, and the largest
            number of entries of that operand.
        uses: for each parameter what else is done with it: "lookup", "matrices chosen by data",
            "vector", "with data", "depthwise", "modulated", or "opaque …".
        followed: products whose outputs another product with a parameter takes.
        contracted: products whose outputs are contracted with another activation.
        chosen: pairs of a product, and of how its output chooses: "sort" or "softmax".
        taken: for each axis of a parameter, the sets of indices that later products take.
        heads: for each parameter, what attention takes as heads.
        batched: axes of parameters that meet the batch axis of a product with another parameter.
        mates: sets of axes that are contracted with each other.
        factors: pairs of parameters that are multiplied with each other.
        beside_inputs: products whose outputs, concatenated with the inputs, another one takes.
        hidden: parameters that a product takes entries of which pieces do not show.
        gated: axes of parameters of which parts are multiplied with each other.
    """

    def __init__(self, captures_are_data: bool) -> None:
        self._captures_are_data = captures_are_data
        self._passes_to_come = 0
        self._maxima: set[int] = set()
        self.products: list[Product] = []
        self.seen: dict[int, tuple[bool, int]] = {}
        self.uses: defaultdict[int, set[str]] = defaultdict(set)
        self.followed: defaultdict[int, set[int]] = defaultdict(set)
        self.contracted: set[int] = set()
        self.chosen: set[tuple[int, str]] = set()
        self.taken: defaultdict[tuple[int, int], set[frozenset[Any]]] = defaultdict(set)
        self.heads: defaultdict[int, set[Head]] = defaultdict(set)
        self.batched: set[tuple[int, Any, int]] = set()
        self.mates: set[frozenset[tuple[int, int, int]]] = set()
        self.factors: set[frozenset[int]] = set()
        self.beside_inputs: set[int] = set()
        self.hidden: set[int] = set()
        self.gated: set[tuple[int, Any]] = set()
        self._index_of: dict[Product, int] = {}

    def run(self, jaxpr: Any, args: Sequence[Value]) -> list[Value]:
        """Returns the values of a jaxpr's outputs."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        captured = itertools.repeat(Value(is_data=self._captures_are_data))
        values = dict(zip(jaxpr.constvars, captured, strict=False))
        values |= dict(zip(jaxpr.invars, args, strict=True))

        def read(variable: Any) -> Value:
            is_literal = isinstance(variable, core.Literal)
            return Value(is_scalar=True) if is_literal else values.get(variable, Value())

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [*map(read, equation.invars)])
            for variable, value in zip(equation.outvars, outputs, strict=True):
                values[variable] = _fitting(value, _shape(variable))
        return [*map(read, jaxpr.outvars)]

    # Equations.

    def _equation(self, equation: Any, xs: list[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        shapes, outs = [*map(_shape, equation.invars)], [*map(_shape, equation.outvars)]
        if "transpose(" in str(equation.source_info.name_stack):  # a backward pass inside
            backward = _activation([as_activation(x) for x in xs], frozenset(), is_data=False)
            return [backward] * len(outs)
        match name:
            case "scan":
                return self._scan(equation, xs)
            case "while":
                of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
                xs = xs[of_cond:]
                body = params["body_jaxpr"]
                return self._loop(lambda a: self.run(body, a), xs, of_body, len(xs) - of_body)
            case "cond":
                branches = [self.run(branch, xs[1:]) for branch in params["branches"]]
                return [self._joined(of_one) for of_one in zip(*branches, strict=True)]
            case "dot_general":
                contract, batch = params["dimension_numbers"]
                return [self._dot(xs, shapes, contract, batch)]
            case "ragged_dot_general" | "ragged_dot":
                numbers = params["ragged_dot_dimension_numbers"]
                contract, (of_left, of_right) = numbers.dot_dimension_numbers
                groups = (*of_right, *numbers.rhs_group_dimensions)
                return [self._dot(xs[:2], shapes, contract, (of_left, groups))]
            case "conv_general_dilated":
                return [self._convolution(xs, shapes, params, outs[0])]
        if name not in _OPAQUE:
            for inner in core.jaxprs_in_params(params):
                inner = getattr(inner, "jaxpr", inner)
                ranks = [len(_shape(v)) for v in inner.invars]
                if ranks == [*map(len, shapes)] and len(inner.outvars) == len(outs):
                    pairs = zip(xs, inner.invars, strict=True)
                    return self.run(inner, [_fitting(x, _shape(v)) for x, v in pairs])
        if name in _OPAQUE or any(hasattr(v.aval, "inner_aval") for v in equation.invars):
            return [self._mixed(xs, f"opaque {name}")] * len(outs)
        if name.startswith(("random_", "threefry")):
            return [Value()] * len(outs)
        self._note_choice(name, params, xs, shapes)
        each = enumerate(outs)
        return [self._entrywise(name, params, xs, shapes, out, i) for i, out in each]

    def _scan(self, equation: Any, xs: list[Value]) -> list[Value]:
        """Scanned operands and results have one more axis outside, which tells them apart."""
        body = equation.params["jaxpr"]
        inner = getattr(body, "jaxpr", body)
        operands = zip(equation.invars, inner.invars, strict=True)
        scanned = sum(len(_shape(v)) != len(_shape(w)) for v, w in operands)
        results = zip(equation.outvars, inner.outvars, strict=True)
        carried = sum(len(_shape(v)) == len(_shape(w)) for v, w in results)
        first = len(xs) - scanned - carried
        args = xs[: first + carried]
        for x in xs[first + carried :]:
            args.append(x.with_pieces(p._replace(at=p.at[1:], axes=p.axes[1:]) for p in x.pieces))
        outputs = self._loop(lambda a: self.run(body, a), args, first, carried)
        steps = unknown(equation.params["length"])

        def stacked(y: Value) -> Value:
            return y.with_pieces(Piece(p.source, (0, *p.at), (steps, *p.axes)) for p in y.pieces)

        return [*outputs[:carried], *map(stacked, outputs[carried:])]

    def _loop(
        self, body: Callable[[list[Value]], list[Value]], args: list[Value], first: int, n: int
    ) -> list[Value]:
        """The outputs of a loop with n carries, of which args[first] is the first.

        Uses count in the last pass alone, where the carries do not change any more.
        """
        self._passes_to_come += 1
        for _ in range(6):
            before = args[first : first + n]
            carries = [*map(self._joined, zip(before, body(args)[:n], strict=True))]
            args = [*args[:first], *carries, *args[first + n :]]
            if carries == before:
                break
        self._passes_to_come -= 1
        return body(args)

    def _joined(self, xs: Sequence[Value]) -> Value:
        """The value that is one of several."""
        if all(x.is_weight for x in xs):
            return xs[0].with_pieces(frozenset().union(*(x.pieces for x in xs)))
        return self._mixed(xs) if any(x.is_weight for x in xs) else _activation(xs)

    def _note(self, x: Value, use: str) -> None:
        if not self._passes_to_come and x.is_weight:
            for source in x.sources:
                self.uses[source].add(use)

    def _note_modulated(self, leaves: Iterable[int]) -> None:
        if not self._passes_to_come:
            for leaf in leaves:
                self.uses[max(leaf, -1 - leaf)].add("modulated")

    def _mixed(self, xs: Sequence[Value], use: str | None = None) -> Value:
        """An activation of operands among which are weights: vectors, tables or latents."""
        for x in xs:
            has_data = any(other.is_data for other in xs if other is not x)
            self._note(x, use or ("with data" if has_data else "vector"))
        return _activation([as_activation(x) for x in xs])

    def _learned(self, x: Value, is_data: bool) -> Value:
        """A parameter in the place of an activation."""
        self._note(x, "with data" if is_data else "vector")
        lookups = {-1 - source for source in x.sources}
        return dataclasses.replace(as_activation(x), frontier=x.frontier | lookups)

    # Operations that are no products.

    def _entrywise(
        self,
        name: str,
        params: dict[str, Any],
        xs: list[Value],
        shapes: list[Shape],
        out: Shape,
        output: int,
    ) -> Value:
        is_choice = name in ("gather", "dynamic_slice") and xs[0].is_weight
        if is_choice and any(x.is_data or x.frontier or not x.is_scalar for x in xs[1:]):
            self._note(xs[0], "lookup")
            xs = [dataclasses.replace(xs[0], is_looked_up=True, is_data=True)]
        pieces = _moved_pieces(name, params, xs, shapes, out, output)
        flags: dict[str, Any] = {
            "is_scalar": bool(xs) and all(x.is_scalar for x in xs) or math.prod(out) == 1,
            "is_one_hot": name == "eq" or name in RELAYOUTS and xs[0].is_one_hot,
        }
        if name == "broadcast_in_dim":
            of = {n: k for k, n in enumerate(params["broadcast_dimensions"])}
            repeated = (n for n in range(len(out)) if n not in of or shapes[0][of[n]] != out[n])
            flags["repeats"] = frozenset(repeated)
        weights = [k for k, x in enumerate(xs) if x.is_weight]
        if not weights:
            found = _activation([x.with_pieces(p) for x, p in zip(xs, pieces, strict=True)])
            keeps = name in RELAYOUTS or name in ("mul", "div", "add", "sub", "select_n")
            modulated = found.modulated if keeps else frozenset()
            beside = found.beside_inputs
            if name == "concatenate" and any(x.is_data and not x.frontier for x in xs):
                beside |= found.frontier
            if name == "mul":
                self._note_gates(*pieces)
            if name == "reduce_sum":
                self._note_modulated(leaf for x in xs for leaf in x.modulated if leaf >= 0)
            if not name.startswith(REDUCTIONS):
                found = dataclasses.replace(found, hidden=found.hidden | _hidden(name, xs, pieces))
            found = dataclasses.replace(found, modulated=modulated, beside_inputs=beside)
            return dataclasses.replace(found, **flags)
        is_reduction = name.startswith(REDUCTIONS) and "axes" in params
        is_sum = name == "reduce_sum" and any(len(source_axes(p)) > 1 for p in pieces[0])
        if is_reduction and not is_sum:  # a norm of a weight, say
            frontier = as_activation(xs[0]).frontier
            return Value(is_data=xs[0].is_data, frontier=frontier, **flags)
        for k in weights:
            may_lose = is_sum or name in ("gather", "dynamic_slice")
            is_lost = not may_lose and _hidden(name, [xs[k]], [pieces[k]])
            if name not in ELEMENTWISE and not is_sum or is_lost:
                self._note(xs[k], f"opaque {name}")
        if len(xs) == 1:
            return dataclasses.replace(xs[0].with_pieces(pieces[0]), **flags)
        others = [x for x in xs if not x.is_weight]
        if not any(x.is_looked_up for x in xs) and all(
            not x.is_data or x.is_scalar for x in others
        ):
            return self._reparametrized(name, xs, pieces, weights, flags)
        operands = zip(xs, pieces, strict=True)
        found = self._mixed([x if x.is_weight else x.with_pieces(p) for x, p in operands])
        modulated = found.modulated
        if name in ("mul", "div", "add", "sub", "select_n"):
            modulated |= self._modulated(name, xs, pieces, shapes, out)
        return dataclasses.replace(found, modulated=modulated, **flags)

    def _modulated(
        self,
        name: str,
        xs: list[Value],
        pieces: list[frozenset[Piece]],
        shapes: list[Shape],
        out: Shape,
    ) -> set[int]:
        """The weights that data change, entry by entry, as far as they may be matrices after it."""
        data = [
            (x, shape)
            for x, shape in zip(xs, shapes, strict=True)
            if x.is_data and not x.is_weight and len(shape) == len(out)
        ]
        varies = [any(s[n] != 1 and n not in x.repeats for x, s in data) for n in range(len(out))]
        found = set()
        for piece in (p for x, own in zip(xs, pieces, strict=True) if x.is_weight for p in own):
            own = [varies[n] for n, atoms in enumerate(piece.axes) if known(atoms)]
            if name not in ("add", "sub") and any(own) and not all(own):
                found.add(piece.source)
            elif size_of(known(all_atoms(piece))) == math.prod(out) and len(own) > 1:
                found |= {-1 - piece.source for x, _ in data if not x.frontier}
        return found

    def _reparametrized(
        self,
        name: str,
        xs: list[Value],
        pieces: list[frozenset[Piece]],
        weights: list[int],
        flags: dict[str, Any],
    ) -> Value:
        """A weight made of weights, and of what does not depend on data: the largest counts."""

        def entries(piece: Piece) -> int:
            return size_of(known(all_atoms(piece)))

        most = max((entries(p) for k in weights for p in pieces[k]), default=0)
        keeps_all = name in ("concatenate", "stack")
        main = frozenset(p for k in weights for p in pieces[k] if keeps_all or entries(p) == most)
        for k in weights:
            if not pieces[k] & main:
                self._note(xs[k], "vector")
        return Value(main, is_weight=True, **flags)

    def _note_choice(
        self, name: str, params: dict[str, Any], xs: list[Value], shapes: list[Shape]
    ) -> None:
        """Records products whose outputs choose among the entries of an axis that they keep."""
        if not xs or xs[0].is_weight:
            return
        if name == "exp":
            self.chosen |= {(j, "softmax") for j in xs[0].sources & self._maxima}
        is_maximum = name == "reduce_max"
        if not is_maximum and not name.startswith(("top_k", "sort", "arg", "approx_top")):
            return
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
                    self.chosen.add((piece.source, "sort"))

    def _note_gates(self, left: frozenset[Piece], right: frozenset[Piece]) -> None:
        for p, q in itertools.product(left, right):
            if p.source == q.source and p.at == q.at and p.axes != q.axes:
                product = self.products[p.source]
                for axis in {atom.axis for atom in product.kept}:
                    one, other = ([a for a in all_atoms(x) if a.axis == axis] for x in (p, q))
                    if one != other and [a.size for a in one] == [a.size for a in other]:
                        self.gated.add((product.leaf, axis))

    # Products.

    def _dot(
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
                axes.append(unknown(shapes[j][k]) if axis is None else piece.axes[axis])
            return Piece(piece.source, tuple(at), tuple(axes))

        for i in (0, 1):
            x, other = xs[i], xs[1 - i]
            is_one_hot = other.is_one_hot and not other.is_weight
            if x.is_weight and is_one_hot and len(contract[i]) == 1 and not batch[i]:
                self._note(x, "lookup")
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
                self._note(xs[i], "matrices chosen by data")
            for piece in xs[i].pieces:
                entries = math.prod(shapes[1 - i])
                j = self._product(piece, contract[i], free[i], batch[i], other, entries)
                found.add(in_output(i, piece)._replace(source=j))
            if not self._passes_to_come:
                self.batched |= {
                    (self.products[piece.source].leaf, atom.axis, atom.size)
                    for pair in pairs
                    for piece in other.pieces
                    for atom in known(piece.axes[pair[1 - i]])
                }
            meets = [(piece, k) for piece in xs[i].pieces for k in contract[i]]
            self._consume(other, contract[1 - i], batch[1 - i], meets)
        if any(x.is_weight for x in xs):
            products = frozenset(piece.source for piece in found)
            return Value(frozenset(found), False, products, xs[0].is_data or xs[1].is_data)
        return self._dot_of_activations(xs, contract, batch, free, in_output)

    def _weights_of_product(
        self, xs: list[Value], contract: tuple[Dims, Dims], free: list[list[int]]
    ) -> list[Value] | None:
        """The operands, of which those that are no matrices here are activations.

        None where both are made of one parameter, as in a regularizer that multiplies W and Wᵀ.
        """
        xs = [
            self._learned(x, xs[1 - i].is_data)
            if x.is_weight and not _is_matrix(x, contract[i], free[i])
            else x
            for i, x in enumerate(xs)
        ]
        if not all(x.is_weight for x in xs):
            return xs
        if xs[0].is_looked_up != xs[1].is_looked_up:
            k = xs.index(next(x for x in xs if x.is_looked_up))
            return [self._learned(x, True) if i == k else x for i, x in enumerate(xs)]
        if xs[0].sources == xs[1].sources:
            return None
        # Latents that were broadcast over a batch have axes that are of no parameter.
        is_wide = [
            any(size_of(all_atoms(p)) > size_of(known(all_atoms(p))) for p in x.pieces) for x in xs
        ]
        if is_wide[0] != is_wide[1]:
            k = is_wide.index(True)
            return [self._learned(x, True) if i == k else x for i, x in enumerate(xs)]
        if not self._passes_to_come:
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
        self._note_modulated(xs[0].modulated | xs[1].modulated)
        is_norm = xs[0].frontier == xs[1].frontier and not free[0] and not free[1]
        pieces = []
        for i in (0, 1):
            self._consume(xs[i], contract[i], batch[i])
            for piece in xs[i].pieces:
                kept = {atom.axis for atom in self.products[piece.source].kept}

                def own(axes: Dims, piece: Piece = piece, kept: set[Any] = kept) -> Axis:
                    found = known(atoms_at(piece.axes, axes))
                    return tuple(atom for atom in found if atom.axis in kept)

                contracted, batched, left = own(contract[i]), own(batch[i]), own(free[i])
                if contracted and xs[1 - i].frontier and not is_norm:
                    self.contracted.add(piece.source)
                if xs[1 - i].frontier and (batched or contracted and left):
                    self._note_heads(piece, batched + (left if contracted else ()))
                lost = atoms_at(piece.axes, contract[i])
                pieces.append(without_lost(in_output(i, piece), lost))
        return _activation(xs).with_pieces(p for p in pieces if known(all_atoms(p)))

    def _note_heads(self, piece: Piece, atoms: Axis) -> None:
        if self._passes_to_come:
            return
        leaf = self.products[piece.source].leaf
        for atom in atoms:
            if atom.axis is not None and atom.size > 1:
                of_axis = (a.start for a in all_atoms(piece) if a.axis == atom.axis)
                self.heads[leaf].add(Head(atom.axis, sum(of_axis), atom.stride, atom.size))

    def _convolution(
        self, xs: list[Value], shapes: list[Shape], params: dict[str, Any], out: Shape
    ) -> Value:
        numbers, groups = params["dimension_numbers"], params["feature_group_count"]
        of_out, of_in, *window = numbers.rhs_spec
        in_lhs, in_out = numbers.lhs_spec[1], numbers.out_spec[1]
        x, kernel = xs
        if x.is_weight:
            x = self._learned(x, True)
        if not kernel.is_weight:
            self._note_modulated(x.modulated | kernel.modulated)
            return _activation([x, kernel], frozenset())
        if groups > 1 and shapes[1][of_in] == 1:
            self._note(kernel, "depthwise")
            keeps_width = out[in_out] == shapes[0][in_lhs]
            kept = [kept_where_equal(p, shapes[0], out) for p in x.pieces] if keeps_width else []
            return _activation([x.with_pieces(kept)])
        found = set()
        for piece in kernel.pieces:
            with_groups = piece
            if groups > 1:
                with_groups = grouped(piece, of_out, groups)
                if with_groups is None:
                    self._note(kernel, "opaque conv_general_dilated")
                    continue
            batch = (len(piece.axes),) if groups > 1 else ()
            contract, entries = (of_in, *window), math.prod(shapes[0])
            j = self._product(with_groups, contract, (of_out,), batch, x, entries)
            at = tuple(piece.at[of_out] if k == in_out else 0 for k in range(len(out)))
            axes = tuple(
                piece.axes[of_out] if k == in_out else unknown(n) for k, n in enumerate(out)
            )
            found.add(Piece(j, at, axes))
        if groups > 1 and not self._passes_to_come:
            cut = [grouped(piece, in_lhs, groups) for piece in x.pieces]
            self.batched |= {
                (self.products[p.source].leaf, atom.axis, atom.size)
                for p in cut
                if p
                for atom in known(p.axes[-1])
            }
        self._consume(x, (in_lhs,), ())
        return Value(frozenset(found), False, frozenset(p.source for p in found), x.is_data)

    def _product(
        self, piece: Piece, contract: Dims, free: Dims, batch: Dims, other: Value, entries: int
    ) -> int:
        """Records a product of a weight with an activation and returns its index."""
        atoms = (fused(known(atoms_at(piece.axes, axes))) for axes in (contract, free, batch))
        of = {self.products[before].leaf if before >= 0 else None for before in other.frontier}
        product = Product(piece.source, *atoms, is_own=of == {piece.source})
        j = self._index_of.setdefault(product, len(self.products))
        if j == len(self.products):
            self.products.append(product)
        for before in other.frontier:
            if before >= 0:
                self.followed[before].add(product.leaf)
        self.beside_inputs |= other.beside_inputs
        if not self._passes_to_come:
            is_first, most = self.seen.get(j, (True, 0))
            is_first = is_first and other.is_data and not other.frontier
            self.seen[j] = (is_first, max(most, entries))
        return j

    def _consume(
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
        if self._passes_to_come or x.is_weight:
            return
        self.hidden |= {self.products[j].leaf for j in x.hidden}
        entries = defaultdict(set)
        for piece in x.pieces:
            product = self.products[piece.source]
            consumed = known(atoms_at(piece.axes, (*contract, *batch)))
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


def _shape(variable: Any) -> Shape:
    return tuple(getattr(variable.aval, "shape", ()))


def _moved_pieces(
    name: str,
    params: dict[str, Any],
    xs: Sequence[Value],
    shapes: Sequence[Shape],
    out: Shape,
    output: int,
) -> list[frozenset[Piece]]:
    """For each operand the pieces that the output has of it."""
    found, offset = [], 0
    axis = params.get("dimension" if name == "concatenate" else "axis", 0)
    for k, (x, shape) in enumerate(zip(xs, shapes, strict=False)):
        if shape == out and name not in MOVES:
            found.append(x.pieces)
            continue
        pieces = [moved(name, params, piece, shape, out, output) for piece in x.pieces]
        if name in ("concatenate", "stack"):
            place = offset if name == "concatenate" else k
            pieces = [p and _shifted(p, axis, place) for p in pieces]
            offset += shape[axis] if name == "concatenate" else 0
        found.append(frozenset(p for p in pieces if p))
    return found


def _shifted(piece: Piece, axis: int, by: int) -> Piece:
    at = tuple(begin + by * (k == axis) for k, begin in enumerate(piece.at))
    return piece._replace(at=at)


def _hidden(name: str, xs: Sequence[Value], pieces: Sequence[frozenset[Piece]]) -> set[int]:
    """The sources of which an operation takes entries that pieces do not show."""
    if name in ("slice", "split", "unstack") or all(
        own is x.pieces for x, own in zip(xs, pieces, strict=True)
    ):
        return set()
    before = {(p.source, axis) for x in xs for p in x.pieces for axis in source_axes(p)}
    after = {(p.source, axis) for own in pieces for p in own for axis in source_axes(p)}
    return {source for source, _ in before - after}


def _is_matrix(x: Value, contract: Dims, free: Dims) -> bool:
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


def _activation(
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
    )


def _fitting(x: Value, shape: Shape) -> Value:
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
