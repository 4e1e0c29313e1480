"""Follows parameters through a jaxpr, equation by equation, and notes what is done with them."""

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from muon_jax._by_use.pieces import (
    ELEMENTWISE,
    MOVES,
    REDUCTIONS,
    RELAYOUTS,
    Atom,
    Atoms,
    Axis,
    Operation,
    Piece,
    Shape,
    fused,
    joined,
    moved,
    of_no_source,
    size_of,
)

type Dims = Sequence[int]
type Marks = frozenset[tuple[str, Any]]

_MOST_PIECES = 24  # of an activation
_OPAQUE = frozenset(
    "cudnn_dot_product_attention_fwd custom_partitioning ffi_call io_callback pallas_call"
    " pure_callback run_state triton_kernel_call xla_ffi_call".split()
)
_ARITHMETIC = ("mul", "div", "add", "sub", "select_n")


class Value(NamedTuple):
    """What is known of an array of the program.

    Attributes:
        pieces: boxes of it. Their sources are parameters in a weight, products in an activation.
        is_weight: whether it is a relayout or a reparametrization of parameters.
        frontier: the products that it comes from with no product between; -1 - i for rows that were
            looked up in parameter i.
        is_data: whether it depends on the inputs.
        is_scalar: whether it is one number, or made of single numbers alone.
        is_one_hot: whether it is a one-hot encoding, scaled and with rows of zeros at most.
        is_captured: whether it is an array of the function's closure.
        is_looked_up: whether it is a weight of which indices chose rows or matrices.
        repeats: the axes that a broadcast has just made.
        marks: what happened on the way from a product, or from a parameter, to here:
            ("linear", product): linear operations alone;
            ("chosen", product): its outputs were sorted, or compared for the largest;
            ("beside inputs", product): its outputs were concatenated with the inputs;
            ("hidden", (product, axis)): a relayout took entries of this axis of its weight that
            pieces cannot show;
            ("modulated", parameter): data changed it entry by entry, and vary along some of its
            axes alone, so that the result may be a matrix;
            ("masked", parameter): inputs of its own shape changed it;
            ("pending", fact): a fact of parameters alone, to note if they meet data in an array.
    """

    pieces: frozenset[Piece] = frozenset()
    is_weight: bool = False
    frontier: frozenset[int] = frozenset()
    is_data: bool = False
    is_scalar: bool = False
    is_one_hot: bool = False
    is_captured: bool = False
    is_looked_up: bool = False
    repeats: frozenset[int] = frozenset()
    marks: Marks = frozenset()

    def with_pieces(self, pieces: Iterable[Piece | None]) -> "Value":
        """Returns the same value with these pieces."""
        return self._replace(pieces=frozenset(p for p in pieces if p))

    def marked(self, mark: str) -> set[Any]:
        """Returns what has this mark."""
        return {source for own, source in self.marks if own == mark}

    @property
    def sources(self) -> set[int]:
        """The sources of its pieces."""
        return {piece.source for piece in self.pieces}

    def as_activation(self, is_latents: bool = False) -> "Value":
        """Returns the value as an operand that is no weight; latents are in its frontier."""
        if not self.is_weight:
            return self
        own = self.sources if is_latents or self.is_looked_up else ()
        frontier = self.frontier | {-1 - i for i in own}
        return Value(frontier=frontier, is_data=self.is_data, marks=_pending_marks([self]))


class Operand(NamedTuple):
    """An operand of a product, with its contracting, batch and free axes.

    `places` has pairs of its axes and those of the output.
    """

    x: Value
    shape: Shape
    contract: Dims
    batch: Dims
    free: Dims
    places: Sequence[tuple[int, int]]
    out: Shape

    def in_output(self, piece: Piece) -> Piece:
        """Returns what the output has of a piece."""
        return piece.placed(self.shape, self.out, self.places)


class Product(NamedTuple):
    """A product with a parameter: the atoms of its axes that are contracted, kept and batched.

    `is_own` says whether the other operand comes from products with the same parameter alone, as in
    the power iteration of a spectral norm.
    """

    leaf: int
    contracted: Atoms
    kept: Atoms
    batch: Atoms
    is_own: bool


class Follower:
    """Runs a jaxpr on `Value`s, and notes what products and other operations do with weights.

    Attributes:
        products: all products, in the order in which they were found.
        facts: tuples of each kind:
            "product": its index, whether its other operand comes from inputs alone, None for one of
            constants, and the number of entries of that operand;
            "use": a parameter, and what else is done with it: "lookup", "lookup by constants",
            "matrices chosen by data", "vector", "latents", "with data", "depthwise", "modulated",
            "opaque …", "times a constant", or "makes weights" where outputs of its products are
            used as weights;
            "output": a product, and what is done with its outputs: "contracted" with another
            activation, "frozen" where a matrix of the closure takes them, "beside inputs" of a
            product, or a choice: "argmax", "maximum", "softmax", "sort", and "experts" if what was
            sorted, or one by one, meets axes or outputs of experts;
            "constant": a product whose other operand is a constant;
            "followed": a product, a parameter whose product takes its outputs, and whether linear
            operations alone are between;
            "taken": an axis of a parameter, and the sets of indices that a later product takes;
            "hidden": an axis of a parameter of which a product takes entries that pieces hide;
            "gated": an axis of a parameter, and two sets of indices that are multiplied with each
            other;
            "head": a parameter, an axis, where it begins that attention takes it head by head, the
            stride of a head, and how many there are;
            "contracted", "batched": axes of parameters, and their sizes, that a product contracts
            with each other, or batches where one of them is of a weight;
            "factors": parameters that are multiplied with each other;
            "backward": a parameter that an operation of a backward pass inside takes;
            "differentiated": a product whose outputs such an operation takes.
    """

    def __init__(self, captures_are_data: bool) -> None:
        self.products: list[Product] = []
        self.facts: defaultdict[str, set[Any]] = defaultdict(set)
        self._captured = Value(is_data=captures_are_data)
        self._depth = 0
        self._maps: set[int] = set()  # depths of loops without carries
        self._resizes = False
        self._seen: set[tuple[int, frozenset[Atom]]] = set()  # what products have taken
        self._index_of: dict[Product, int] = {}

    def run(self, jaxpr: Any, args: Sequence[Value]) -> list[Value]:
        """Returns the values of a jaxpr's outputs."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        values = {v: self._capture(v) for v in jaxpr.constvars}
        values |= dict(zip(jaxpr.invars, args, strict=True))

        def read(variable: Any) -> Value:
            is_number = math.prod(_shape(variable)) == 1
            if isinstance(variable, core.Literal):
                return Value(is_scalar=True) if is_number else self._capture(variable)
            value = values.get(variable, Value())
            return value._replace(is_scalar=True) if is_number else value

        same: dict[Any, Any] = {}  # the variables that a variable is but for its derivative
        for equation in _with_effect(jaxpr):
            name, invars = equation.primitive.name, equation.invars
            outputs = self._equation(equation, [*map(read, invars)])
            if name == "stop_gradient":
                same[equation.outvars[0]] = invars[0]
            elif (
                name == "select_n" and len({same.get(v, v) for v in map(_hashed, invars[1:])}) == 1
            ):
                outputs = [read(invars[-1])]  # `vmap` of a branch guards its operands so
            values |= zip(equation.outvars, outputs, strict=True)
        return [*map(read, jaxpr.outvars)]

    def _capture(self, variable: Any) -> Value:
        is_float = jnp.issubdtype(variable.aval.dtype, jnp.inexact)
        return self._captured._replace(is_captured=is_float and not self._captured.is_data)

    def _note(self, kind: str, *fact: Any) -> None:
        self.facts[kind].add(fact)

    def _note_use(self, x: Value, use: str) -> None:
        for leaf in x.sources if x.is_weight else ():
            self._note("use", leaf, use)

    # Equations.

    def _equation(self, equation: Any, xs: list[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        shapes, outs = [*map(_shape, equation.invars)], [*map(_shape, equation.outvars)]
        op = Operation(name, params, shapes, outs[0] if outs else (), 0)
        if _is_backward(equation):
            for leaf in frozenset().union(*(x.sources for x in xs if x.is_weight)):
                self._note("backward", leaf)
            backward = activation([x.as_activation() for x in xs], frozenset())
            for j in backward.frontier:
                self._note("differentiated", j)
            return [backward._replace(is_data=False)] * len(outs)
        match name:
            case "scan":
                return self._scan(equation, xs)
            case "while":
                of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
                return self._loop(params["body_jaxpr"], xs[of_cond:], of_body, len(outs))
            case "cond":
                branches = [self.run(branch, xs[1:]) for branch in params["branches"]]
                return [self._joined(of_one) for of_one in zip(*branches, strict=True)]
            case "dot_general":
                return [self._dot(op, xs, *params["dimension_numbers"])]
            case "ragged_dot_general" | "ragged_dot":
                numbers = params["ragged_dot_dimension_numbers"]
                contract, (of_left, of_right) = numbers.dot_dimension_numbers
                groups = (*of_right, *numbers.rhs_group_dimensions)
                return [self._dot(op, xs, contract, (of_left, groups))]
            case "conv_general_dilated":
                return [self._convolution(op, xs)]
        if name not in _OPAQUE:
            for inner in core.jaxprs_in_params(params):
                inner = getattr(inner, "jaxpr", inner)
                ranks = [len(_shape(v)) for v in inner.invars]
                if ranks == [*map(len, shapes)] and len(inner.outvars) == len(outs):
                    args = [*map(_fitting, xs, map(_shape, inner.invars))]
                    before, self._resizes = self._resizes, params.get("name") == "_resize"
                    outputs = self.run(inner, args)
                    self._resizes = before
                    return [*map(_fitting, outputs, outs)]
        if name in _OPAQUE or _takes_reference(equation):
            return self._opaque(op, xs, outs)
        if name.startswith(("random_", "threefry")):
            return [Value()] * len(outs)
        each = enumerate(outs)
        return [self._entrywise(op._replace(out=out, output=i), xs) for i, out in each]

    def _scan(self, equation: Any, xs: list[Value]) -> list[Value]:
        """Follows the body. Outside of it, what is scanned has one axis more."""
        body = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])

        def of_body(outer: Any, inner: Any) -> int:
            """How many variables the loop passes to its body, or back, as they are."""
            return sum(len(_shape(v)) == len(_shape(w)) for v, w in zip(outer, inner, strict=True))

        n, carried = of_body(equation.invars, body.invars), of_body(equation.outvars, body.outvars)
        self._depth = depth = self._depth + 1
        (self._maps.discard if carried else self._maps.add)(depth)

        def step_of(piece: Piece) -> Piece:
            return piece._replace(axes=piece.axes[1:], steps=(*piece.steps, (depth, piece.axes[0])))

        def all_of(piece: Piece) -> Piece:
            own = dict(piece.steps).get(depth)
            kept = tuple(step for step in piece.steps if step[0] != depth)
            axis = own or of_no_source(equation.params["length"])
            return piece._replace(steps=kept).with_axis(0, axis)

        one = (x.with_pieces(map(step_of, x.pieces)) for x in xs[n:])
        outputs = self._loop(body, [*xs[:n], *one], n - carried, carried, depth)
        self._depth -= 1
        return outputs[:carried] + [y.with_pieces(map(all_of, y.pieces)) for y in outputs[carried:]]

    def _loop(
        self, body: Any, args: list[Value], first: int, n: int, depth: int = 0
    ) -> list[Value]:
        """The outputs of a loop with n carries, of which args[first] is the first.

        Facts count from the last pass alone, where the carries do not change any more.
        """
        facts, self.facts = self.facts, defaultdict(set)
        for _ in range(6):
            before = args[first : first + n]
            after = (_without_steps(y, depth) for y in self.run(body, args)[:n])
            carries = [*map(self._joined, zip(before, after, strict=True))]
            args = [*args[:first], *carries, *args[first + n :]]
            if carries == before:
                break
        self.facts = facts
        outputs = self.run(body, args)
        return [_without_steps(y, depth) for y in outputs[:n]] + outputs[n:]

    def _joined(self, xs: Sequence[Value]) -> Value:
        """The value that is one of several."""
        if all(x.is_weight for x in xs):
            return xs[0]._replace(pieces=_union(x.pieces for x in xs))
        return self._mixed(xs)

    # Operations that are no products.

    def _mixed(self, xs: Sequence[Value], use: str | None = None) -> Value:
        """An activation of operands: weights among them are vectors, tables or latents."""
        self._note_pending(xs)
        for x in xs:
            has_data = any(other.is_data for other in xs if other is not x)
            self._note_use(x, use or ("with data" if has_data else "vector"))
        return activation([x.as_activation(is_latents=bool(use)) for x in xs])

    def _opaque(self, op: Operation, xs: Sequence[Value], outs: Sequence[Shape]) -> list[Value]:
        """The outputs of an operation that does not show what it takes.

        Those of the shape of an operand are taken for its entries, such as those of attention; from
        an operand of another width, as of gate and up, it may take parts.
        """
        found, use = [], f"opaque {op.name}"
        xs = [x.as_activation() if x.is_looked_up else x for x in xs]
        if _meet_data(xs):
            y = self._mixed(xs, use)
        else:  # what is done with parameters counts once data meet them
            uses = {("pending", ("use", i, use)) for x in xs if x.is_weight for i in x.sources}
            y = Value(marks=_marks(xs) | uses)
        for out in outs:
            marks, pieces = y.marks, [y.pieces]
            for x, shape in zip(xs, op.shapes, strict=True):
                if shape != out and not x.is_weight:
                    pieces.append(pieces[-1] - x.pieces)
                    if len(shape) != len(out) or shape[-1:] != out[-1:]:
                        marks |= {("hidden", a) for a in _hidden("", [x], [frozenset()])}
            found.append(y._replace(pieces=pieces[-1], marks=marks))
        return found

    def _note_pending(self, xs: Sequence[Value]) -> None:
        """Notes what parameters do with each other, once data meet it."""
        for x in xs if any(x.is_data for x in xs) else ():
            for fact in x.marked("pending") if not x.is_scalar else ():
                self._note(*fact)

    def _entrywise(self, op: Operation, xs: list[Value]) -> Value:
        name, params, shapes, out, *_ = op
        self._note_pending(xs)
        is_indexing = name in ("gather", "dynamic_slice")
        is_chosen = _meet_data(xs[1:])
        if is_indexing and xs[0].is_weight and (is_chosen or not all(x.is_scalar for x in xs[1:])):
            self._note_use(xs[0], "lookup" if is_chosen else "lookup by constants")
            marks = _marks(xs) if is_chosen else xs[0].marks
            is_data = xs[0].is_data or is_chosen
            xs = [xs[0]._replace(is_looked_up=True, is_data=is_data, marks=marks), *xs[1:]]
        op = op._replace(is_fixed=is_indexing and not is_chosen)
        flags: dict[str, Any] = {
            "is_scalar": math.prod(out) == 1 or bool(xs) and all(x.is_scalar for x in xs),
            "is_one_hot": _is_one_hot(name, xs),
            "is_captured": name in RELAYOUTS and xs[0].is_captured,
            "repeats": xs[0].repeats if shapes == [out] and name not in MOVES else frozenset(),
        }
        if name in ("broadcast_in_dim", "tile"):
            dims = params.get("broadcast_dimensions", range(len(out)))
            of = dict(zip(dims, shapes[0], strict=True))
            repeated = (k for k, n in enumerate(out) if k not in of or of[k] == 1 < n)
            flags["repeats"] = frozenset(repeated)
        pieces = moved(op, [x.pieces for x in xs])
        weights = [k for k, x in enumerate(xs) if x.is_weight]
        if not weights:
            return self._of_activations(op, xs, pieces)._replace(**flags)
        is_sum = name == "reduce_sum" and any(len(_axes(p.atoms())) > 1 for p in pieces[0])
        if name.startswith(REDUCTIONS) and "axes" in params and not is_sum:  # a norm, say
            return xs[0].as_activation()._replace(**flags)
        for k in weights:
            is_lost = not is_sum and not is_indexing and _hidden(name, [xs[k]], [pieces[k]])
            if name not in ELEMENTWISE and not is_sum or is_lost:
                return self._opaque(op, xs, [out])[0]._replace(**flags)
        if len(xs) == 1 or is_indexing:
            return xs[0]._replace(pieces=pieces[0], **flags)
        # A weight made of weights, and of what does not depend on data, or is one number for all
        # entries of a weight: the largest counts.
        main = _union(pieces[k] for k in weights)
        dims = _dims_of(main, len(out))

        def is_number(x: Value, shape: Shape) -> bool:
            is_matrix = sum(out[k] > 1 for k in dims) > 1 and name not in ("add", "sub")
            return is_matrix and all(shape[k] == 1 or k in x.repeats for k in dims)

        is_learned = all(
            x.is_weight or x.is_scalar or not x.is_data or is_number(x, shape)
            for x, shape in zip(xs, shapes, strict=True)
        )
        is_learned &= _dims_of(_union(pieces), len(out)) == dims  # no layer and its bias
        if is_learned and not any(x.is_looked_up and x.is_data for x in xs):
            marks = _pending_marks(xs)
            if name in ("concatenate", "stack"):
                main = joined(main, params["dimension" if name == "concatenate" else "axis"])
                return Value(main, is_weight=True, marks=marks, **flags)
            most = max((size_of(piece.atoms()) for piece in main), default=0)
            main = frozenset(p for p in main if size_of(p.atoms()) == most)
            if name == "mul" and dims - _dims_of(main, len(out)):  # as in a Kronecker product
                return self._factors(xs)
            for k in weights:
                if pieces[k].isdisjoint(main):
                    self._note_use(xs[k], "vector")
            return Value(main, is_weight=True, marks=marks, **flags)
        each = zip(xs, pieces, strict=True)
        found = self._mixed([x if x.is_weight else x._replace(pieces=own) for x, own in each])
        marks = self._modulated(op, xs, pieces) if name in _ARITHMETIC else frozenset()
        return found._replace(marks=found.marks | marks, **flags)

    def _factors(self, xs: Sequence[Value]) -> Value:
        """What is made of several parameters, and is no layer of one of them."""
        own = sorted({i for x in xs if x.is_weight for i in x.sources})
        pairs = {("pending", ("factors", i, j)) for i in own for j in own if i < j or len(own) == 1}
        return Value(marks=_marks(xs) | pairs, is_data=any(x.is_data for x in xs))

    def _of_activations(
        self, op: Operation, xs: list[Value], pieces: list[frozenset[Piece]]
    ) -> Value:
        left = frozenset(p for p in _union(pieces) if p.atoms())
        lost: set[tuple[int, int | None]] = set()
        if len(left) > _MOST_PIECES:  # those that no product has taken are kept, and the latest
            ordered = sorted(left, key=lambda p: (self._is_seen(p), -p.source))
            left, others = frozenset(ordered[:_MOST_PIECES]), ordered[_MOST_PIECES:]
            lost = {(p.source, a.axis) for p in others if not self._is_seen(p) for a in p.atoms()}
        name, found = op.name, activation(xs, left)
        if math.prod(op.out) == 1:  # a term of a loss, or a norm
            found = found._replace(marks=found.marks - _pending_marks(xs))
        chosen = self._chosen(op, xs)
        marks = found.marks | chosen | {("hidden", axis) for axis in lost}
        if name == "concatenate" and any(x.is_data and not x.frontier for x in xs):
            marks |= {("beside inputs", j) for j in found.frontier}
        if not chosen and not name.startswith(REDUCTIONS):  # they look at all entries
            marks |= {("hidden", axis) for axis in _hidden(name, xs, pieces)}
        of_products = [x for x in xs if x.frontier]
        is_scaling = name in ("mul", "div", "neg", "select_n") and len(of_products) == 1
        if is_scaling and not any(x.is_data for x in xs if not x.frontier) or name in RELAYOUTS:
            marks |= {("linear", j) for x in of_products for j in x.marked("linear")}
        if name not in RELAYOUTS and name not in _ARITHMETIC:
            marks = frozenset(mark for mark in marks if mark[0] not in ("modulated", "masked"))
        if name == "reduce_sum":
            self._note_modulated(xs, "modulated")
        if name == "eq":
            found = found._replace(pieces=found.pieces | self._one_hot(op, xs))
        if name == "mul":
            self._note_gated(*pieces)
        if name in ("mul", "select_n"):
            each = zip(xs, op.shapes, strict=True)
            spread = [x for x, shape in each if x.repeats or shape != op.out]
            for x in spread:
                self._note_experts(x, [y for y in xs if y is not x])
            for k in range(len(op.out)) if spread else ():
                self._note("contracted", *self._met_at(zip(xs, [k] * len(xs), strict=True)))
        return found._replace(marks=marks)

    def _is_mapped(self, piece: Piece) -> bool:
        """Whether a loop without carries runs over one of its axes."""
        steps = (axis for depth, axis in piece.steps if depth in self._maps)
        return any(atom.axis is not None for axis in steps for atom in axis.atoms)

    def _is_seen(self, piece: Piece) -> bool:
        return (piece.source, frozenset(piece.atoms())) in self._seen

    def _chosen(self, op: Operation, xs: list[Value]) -> Marks:
        """Marks of products whose outputs choose among entries of an axis that they keep."""
        if op.name == "exp":
            for j in xs[0].sources:
                if (j, "maximum") in self.facts["output"]:
                    self._note("output", j, "softmax")
        how = "sort" if op.name.startswith(("top_k", "sort", "approx_top")) else None
        how = {"reduce_max": "maximum", "argmax": "argmax", "argmin": "argmax"}.get(op.name, how)
        if how is None:
            return frozenset()
        axes = op.params.get("axes") or (-1,)
        axis = op.params.get("dimension", op.params.get("axis", axes[0]))
        found = set()
        for piece in xs[0].pieces:
            kept = self.products[piece.source].kept
            if size_of(kept) == 1 or _axes(kept) & _axes(piece.atoms((axis,))):
                self._note("output", piece.source, how)
                found.add(("chosen", piece.source))
        return frozenset(found if how != "maximum" else ())

    def _one_hot(self, op: Operation, xs: list[Value]) -> frozenset[Piece]:
        """Pieces of a one-hot encoding of what products chose: along an axis, their outputs."""
        found, axes = set(), tuple(map(of_no_source, op.out))
        for x, shape in zip(xs, op.shapes, strict=True):
            for j in x.marked("chosen"):
                kept = self.products[j].kept
                for k, n in enumerate(op.out if len(kept) == 1 else ()):
                    if n == kept[0].size and (k in x.repeats or shape[k] == 1):
                        own = Axis(0, (Atom(kept[0].axis, 0, 1, n),))
                        found.add(Piece(j, axes).with_axis(k, own, 1))
        return frozenset(found)

    def _modulated(self, op: Operation, xs: list[Value], pieces: list[frozenset[Piece]]) -> Marks:
        """Marks of weights that data change entry by entry, where the result may be a matrix."""
        n = len(op.out)
        data = [
            (x, shape)
            for x, shape in zip(xs, op.shapes, strict=True)
            if x.is_data and not x.is_weight and len(shape) == n
        ]
        varies = [any(s[k] != 1 and k not in x.repeats for x, s in data) for k in range(n)]
        found = set()
        for piece in _union(own for x, own in zip(xs, pieces, strict=True) if x.is_weight):
            own = [varies[k] for k in range(n) if piece.atoms((k,))]
            own += [False] * self._is_mapped(piece)
            if op.name not in ("add", "sub") and any(own) and not all(own):
                found.add(("modulated", piece.source))
            elif size_of(piece.atoms(range(n))) == math.prod(op.out) and len(own) > 1:
                found |= {("masked", piece.source) for x, _ in data if not x.frontier}
        return frozenset(found)

    def _note_modulated(self, xs: Iterable[Value], *marks: str) -> None:
        for mark, leaf in _marks(xs):
            if mark in marks:
                self._note("use", leaf, "modulated")

    def _note_gated(self, left: frozenset[Piece], right: frozenset[Piece]) -> None:
        """Notes parts of an axis that are multiplied with each other."""
        found = set()
        for p, q in itertools.product(left, right):
            is_same_place = [axis.at for axis in p.axes] == [axis.at for axis in q.axes]
            if p.source == q.source and p != q and is_same_place:
                for axis in _axes(self.products[p.source].kept):
                    one, other = ([a for a in x.atoms() if a.axis == axis] for x in (p, q))
                    if one != other and [a.size for a in one] == [a.size for a in other]:
                        found.add((p.source, axis))
        for source, axis in found:
            sides = (
                frozenset(_entries(p, axis, range(len(p.axes))) for p in side if p.source == source)
                for side in (left, right)
            )
            self._note("gated", (self.products[source].leaf, axis), tuple(sides))

    def _note_experts(self, x: Value, others: Sequence[Value]) -> None:
        """Notes products whose choices in `x` meet outputs of other products."""
        met = {j for other in others for j in other.frontier if j >= 0}
        for j in x.marked("chosen") | {
            p.source for p in x.pieces if p.picks and not p.atoms(range(len(p.axes)))
        }:
            if met - {j} and not x.is_weight:
                self._note("output", j, "experts")

    # Products.

    def _dot(self, op: Operation, xs: list[Value], contract: Any, batch: Any) -> Value:
        pairs, operands = [*zip(*batch, strict=False)], []
        begin = len(pairs)
        for i in (0, 1):
            taken = {*contract[i], *batch[i]}
            free = [k for k in range(len(op.shapes[i])) if k not in taken]
            places = [(pair[i], n) for n, pair in enumerate(pairs)]
            places += [(k, begin + n) for n, k in enumerate(free)]
            begin += len(free)
            own = Operand(xs[i], op.shapes[i], contract[i], batch[i], free, places, op.out)
            operands.append(own)
            other = xs[1 - i]
            is_one_hot = other.is_one_hot and other.is_data and not other.is_weight
            if own.x.is_weight and is_one_hot and len(own.contract) == 1 and not own.batch:
                self._note_use(own.x, "lookup")
                rows = own.x._replace(is_data=True, is_looked_up=True, marks=other.marks)
                return rows.with_pieces(own.in_output(piece) for piece in own.x.pieces)
        return self._multiplied(*operands)

    def _convolution(self, op: Operation, xs: list[Value]) -> Value:
        """A product with the channels of both operands, and of the output, cut into groups."""
        _, params, shapes, out, *_ = op
        numbers, groups = params["dimension_numbers"], params["feature_group_count"]
        of_out, of_in, *window = numbers.rhs_spec
        in_lhs, in_out = numbers.lhs_spec[1], numbers.out_spec[1]
        x, kernel = self._latents(xs[0], True) if xs[0].is_weight else xs[0], xs[1]
        if kernel.is_weight and groups > 1 and shapes[1][of_in] == 1:
            self._note_use(kernel, "depthwise")
            keeps_width = out[in_out] == shapes[0][in_lhs]
            kept = moved(op._replace(name=""), [x.pieces, frozenset()])[0]
            return activation([x], kept if keeps_width else frozenset())

        def cut(shape: Shape, axis: int) -> Shape:
            return (*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])

        def grouped(x: Value, shape: Shape, axis: int) -> Value:
            if groups > 1:
                return x.with_pieces(p.reshaped(shape, cut(shape, axis)) for p in x.pieces)
            return x.with_pieces(p.with_axis(axis, Axis(0, ())) for p in x.pieces)

        lhs, rhs = grouped(x, shapes[0], in_lhs), grouped(kernel, shapes[1], of_out)
        if kernel.sources != rhs.sources:
            self._note_use(kernel, "opaque conv_general_dilated")
        free = [k for k in range(len(out) + 1) if k not in (in_lhs, in_lhs + 1)]
        contract = [k + (k > of_out) for k in (of_in, *window)]
        places, cuts = [(of_out, in_out), (of_out + 1, in_out + 1)], cut(out, in_out)
        y = self._multiplied(
            Operand(lhs, cut(shapes[0], in_lhs), [in_lhs + 1], [in_lhs], free, [], cuts),
            Operand(rhs, cut(shapes[1], of_out), contract, [of_out], [of_out + 1], places, cuts),
        )
        return y.with_pieces(p.reshaped(cuts, out) for p in y.pieces)

    def _multiplied(self, *operands: Operand) -> Value:
        left, right = self._weights_among(operands)
        is_data = left.x.is_data or right.x.is_data
        is_product = left.x.is_weight or right.x.is_weight
        self._note_pending([left.x, right.x])
        pending = left.x.marked("pending") | right.x.marked("pending")
        are_weights = left.x.is_weight and right.x.is_weight
        if are_weights and left.x.sources == right.x.sources:
            return self._factors([left.x, right.x])
        if (are_weights or pending and is_product) and not is_data:  # it counts once data meet it
            facts, self.facts = self.facts, defaultdict(set)
            y = self._product_of_weights(left, right)
            kinds, self.facts = self.facts, facts
            found = {("pending", (kind, *fact)) for kind in kinds for fact in kinds[kind]}
            marks = _marks([left.x, right.x, self._factors([left.x, right.x]), y])
            return y._replace(marks=frozenset(found) | marks)
        if self._resizes and is_product and not is_data:  # jax.image.resize
            own, other = (left, right) if left.x.is_weight else (right, left)
            resized = [(own.contract[0], n) for k, n in other.places if k in other.free]
            rest = (own.shape, own.out, own.places, resized)
            return own.x.with_pieces(piece.placed(*rest) for piece in own.x.pieces)
        for kind, i, *_ in pending if is_data else ():
            for j in left.x.frontier | right.x.frontier if kind == "factors" else ():
                self._note("followed", j, i, False)
        self._note_met("contracted", left, right)
        if not is_product:
            self._note_modulated([left.x, right.x], "modulated", "masked")
            for own, other in ((left, right), (right, left)):
                is_wide = math.prod(other.shape[k] for k in other.free) > 1
                is_matrix = other.x.is_captured and other.contract and is_wide
                for j in own.x.frontier if is_matrix else ():
                    self._note("output", j, "frozen")
            found = self._beside_activation(left, right) | self._beside_activation(right, left)
            return activation([left.x, right.x], frozenset(p for p in found if p.atoms()))
        return self._product_of_weights(left, right)

    def _product_of_weights(self, left: Operand, right: Operand) -> Value:
        """Notes the products of a weight, or of two."""
        self._note_met("batched", left, right)
        found: set[Piece] = set()
        for own, other in ((left, right), (right, left)):
            if own.x.is_weight:
                is_scalar = other.x.is_scalar or other.x.is_weight  # and no constant
                other = other._replace(x=other.x.as_activation()._replace(is_scalar=is_scalar))
                self._note_taken(other)
                for piece in own.x.pieces:
                    j = self._product(piece, own, other)
                    found.add(own.in_output(piece)._replace(source=j))
        products = frozenset(piece.source for piece in found)
        marks = frozenset(("linear", j) for j in products)
        is_data = left.x.is_data or right.x.is_data
        return Value(frozenset(found), frontier=products, is_data=is_data, marks=marks)

    def _weights_among(self, operands: Sequence[Operand]) -> Sequence[Operand]:
        """The operands, of which parameters that are no matrices here are activations."""
        for own in operands:
            each = filter(self._is_mapped, own.x.pieces)
            if any(p.atoms(own.contract) and not p.atoms(own.free) for p in each):
                self._note_use(own.x, "opaque lax.map")
        for test in (_is_no_matrix, lambda own: own.x.is_looked_up, _is_wide):
            found, are_weights = [*map(test, operands)], all(own.x.is_weight for own in operands)
            if test is _is_no_matrix or are_weights and found[0] != found[1]:
                each = zip(operands, found, operands[::-1], strict=True)
                operands = [
                    own._replace(x=self._latents(own.x, other.x.is_data)) if is_latent else own
                    for own, is_latent, other in each
                ]
        return operands

    def _latents(self, x: Value, is_data: bool) -> Value:
        """A parameter in the place of an activation."""
        self._note_use(x, "with data" if is_data else "latents")
        return x.as_activation(is_latents=True)

    def _product(self, piece: Piece, own: Operand, other: Operand) -> int:
        """Notes a product of a weight with an activation and returns its index."""
        atoms = [fused(piece.atoms(dims)) for dims in (own.contract, own.free, own.batch)]
        before, linear = other.x.frontier, other.x.marked("linear")
        of = {self.products[j].leaf if j >= 0 else None for j in before}
        product = Product(piece.source, *atoms, is_own=of == {piece.source})
        j = self._index_of.setdefault(product, len(self.products))
        if j == len(self.products):
            self.products.append(product)
        for k in before:
            if k >= 0:
                self._note("followed", k, product.leaf, k in linear)
        for k in other.x.marked("beside inputs"):
            self._note("output", k, "beside inputs")
        for k in other.x.marked("chosen") | own.x.marked("chosen"):
            batch = {a.size for a in product.batch} - {a.size for a in self.products[k].batch}
            kept = size_of(self.products[k].kept)
            if own.x.is_looked_up or any(n > 1 and kept % n == 0 for n in batch):
                self._note("output", k, "experts")
        if own.x.is_looked_up and own.x.is_data:
            self._note("use", piece.source, "matrices chosen by data")
        is_constant = not before and not other.x.is_data
        if is_constant and not other.x.is_scalar:
            self._note("constant", j)
        is_first = None if is_constant else not before
        self._note("product", j, is_first, math.prod(other.shape))
        return j

    def _beside_activation(self, own: Operand, other: Operand) -> set[Piece]:
        """Attention, for example: notes heads, and returns what the output has of an operand."""
        self._note_experts(own.x, [other.x])
        self._note_taken(own)
        is_norm = own.x.frontier == other.x.frontier and not own.free and not other.free
        found = set()
        for piece in own.x.pieces:
            leaf, kept = self.products[piece.source].leaf, _axes(self.products[piece.source].kept)
            contracted, batched, left = (
                [atom for atom in piece.atoms(dims) if atom.axis in kept]
                for dims in (own.contract, own.batch, own.free)
            )
            if contracted and other.x.frontier and not is_norm:
                self._note("output", piece.source, "contracted")
            if other.x.frontier:
                for atom in batched + (left if contracted else []):
                    begin = sum(a.start for a in piece.atoms() if a.axis == atom.axis)
                    if atom.size > 1:
                        self._note("head", leaf, atom.axis, begin, atom.stride, atom.size)
                # Heads are of a layer, whose input is the other of two parameters.
                pairs = own.x.marked("pending") if batched and other.x.is_data else ()
                for kind, *pair in pairs:
                    for i in {*pair} - {leaf} if kind == "factors" and leaf in pair else ():
                        self._note("use", i, "with data")
            if contracted and not batched and (piece.source,) in self.facts["constant"]:
                self._note("use", leaf, "times a constant")
            # Axes of positions or a batch would be free, or a batch of heads, in attention.
            is_all = all(kept & _axes(piece.atoms((k,))) for k in own.free)
            is_used = contracted and left and (other.x.is_data or other.x.frontier)
            if is_used and is_all and not batched and piece.source not in other.x.frontier:
                self._note("use", leaf, "makes weights")
            lost = piece.atoms(own.contract) + piece.picks  # both are taken now
            found.add(own.in_output(piece).without(lost))
        return found

    def _note_met(self, kind: str, left: Operand, right: Operand) -> None:
        """Notes axes of parameters that a product contracts, or batches, with each other."""
        dims = [own.contract if kind == "contracted" else own.batch for own in (left, right)]
        for pair in zip(*dims, strict=False):
            self._note(kind, *self._met_at(zip((left.x, right.x), pair, strict=True)))

    def _met_at(self, each: Iterable[tuple[Value, int]]) -> set[tuple[int, int | None, int]]:
        """The axes of parameters, and their sizes, that are these axes of values."""
        met = set()
        for x, k in each:
            leaf_of = {j: j if x.is_weight else self.products[j].leaf for j in x.sources}
            met |= {
                (leaf_of[p.source], a.axis, a.size)
                for p in x.pieces
                if k < len(p.axes) and (a := p.only(k))
            }
        return met

    def _note_taken(self, own: Operand) -> None:
        """Notes which indices of the axes of weights an operand of a product has."""
        for j, axis in own.x.marked("hidden"):
            self._note("hidden", self.products[j].leaf, axis)
        entries = defaultdict(set)
        for piece in own.x.pieces:
            product = self.products[piece.source]
            # An index that no axis of the operand has is taken with the entries of all of them.
            consumed = piece.atoms((*own.contract, *own.batch)) + piece.elsewhere()
            for axis in _axes(product.kept) & _axes(consumed):
                entry = _entries(piece, axis, own.contract)
                entries[product.leaf, axis].add(entry)
                self._seen.add((piece.source, frozenset(piece.atoms())))
        for axis, found in entries.items():
            self._note("taken", axis, frozenset(found))


def _entries(piece: Piece, axis: int | None, otherwise: Dims) -> tuple[Atoms, Any, int]:
    """The indices of an axis that a piece has, the box where they are, and its room for them."""
    dims = [k for k in range(len(piece.axes)) if axis in _axes(piece.atoms((k,)))]
    box = tuple((k, piece.axes[k].at, size_of(piece.axes[k].atoms)) for k in dims or otherwise)
    room = (a for k in dims for a in piece.axes[k].atoms if a.axis in (axis, None))
    return tuple(a for a in piece.atoms() if a.axis == axis), box, size_of(room)


def _is_no_matrix(own: Operand) -> bool:
    """Whether a piece of a weight lacks an axis that is contracted, or one that is free."""
    pieces, dims = own.x.pieces, (own.contract, own.free)
    return own.x.is_weight and not (pieces and all(p.atoms(k) for p in pieces for k in dims))


def _is_wide(own: Operand) -> bool:
    """Whether axes are of no parameter, as of latents that were broadcast over a batch."""
    atoms = (atom for piece in own.x.pieces for axis in piece.axes for atom in axis.atoms)
    return any(atom.axis is None and atom.size > 1 for atom in atoms)


def activation(xs: Sequence[Value], pieces: frozenset[Piece] | None = None) -> Value:
    """Returns an activation that comes from these, not by linear operations alone."""
    if pieces is None:
        pieces = _union(x.pieces for x in xs)
    return Value(
        pieces,
        frontier=_union(x.frontier for x in xs),
        is_data=any(x.is_data for x in xs),
        marks=frozenset(mark for mark in _marks(xs) if mark[0] != "linear"),
    )


def _meet_data(xs: Iterable[Value]) -> bool:
    return any(x.is_data or x.frontier for x in xs)


def _is_one_hot(name: str, xs: Sequence[Value]) -> bool:
    """Whether an output has one entry at most in each row that is not zero."""
    match name:
        case "eq":  # of indices and an enumeration, that is no number
            return not any(x.is_scalar for x in xs)
        case "select_n":  # or nothing, where it chooses zeros
            chosen = xs if xs[0].is_one_hot else xs[1:]
            return any(x.is_one_hot for x in chosen) and all(
                x.is_one_hot or x.is_scalar for x in chosen
            )
        case "mul":
            (one, other) = xs if xs[0].is_one_hot else xs[::-1]
            return one.is_one_hot and one.is_data and bool(other.is_scalar or other.repeats)
        case "scatter":
            return xs[0].is_scalar and xs[1].is_data and xs[2].is_scalar
        case _:
            is_relayout = name in RELAYOUTS or name in ("gather", "dynamic_slice", "pad")
            return is_relayout and xs[0].is_one_hot


def _hashed(variable: Any) -> Any:
    """The variable, or for a literal something else each time."""
    return object() if isinstance(variable, core.Literal) else variable


def _takes_reference(equation: Any) -> bool:
    """Whether an operand is a reference, which the equation may write to."""
    return any(hasattr(v.aval, "inner_aval") for v in equation.invars)


def _is_backward(equation: Any) -> bool:
    """Whether an equation is of a backward pass, which transposes; users' names may say so, too."""
    stack = equation.source_info.name_stack.stack
    return any(type(entry).__name__ == "Transform" and entry.name == "transpose" for entry in stack)


def _with_effect(jaxpr: Any) -> list[Any]:
    """The equations that outputs depend on, or that write to a reference."""
    found, needed = [], {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    for equation in reversed(jaxpr.eqns):
        if _takes_reference(equation) or not needed.isdisjoint(equation.outvars):
            needed |= {v for v in equation.invars if not isinstance(v, core.Literal)}
            found.append(equation)
    return found[::-1]


def _without_steps(x: Value, depth: int) -> Value:
    """A carry of a loop, which comes from any step."""
    after = [piece.without_steps(depth) for piece in x.pieces]
    lost = _hidden("", [x], [frozenset(after)])
    marks = frozenset() if x.is_weight else frozenset(("hidden", axis) for axis in lost)
    return x.with_pieces(after)._replace(marks=x.marks | marks)


def _fitting(x: Value, shape: Shape) -> Value:
    """The value in an array of this shape: a shard's first part stands for the shard."""
    pieces = [p for p in x.pieces if len(p.axes) == len(shape)]
    return x.with_pieces(piece.sliced((0,) * len(shape), shape) for piece in pieces)


def _hidden(
    name: str, xs: Sequence[Value], pieces: Sequence[frozenset[Piece]]
) -> set[tuple[int, int | None]]:
    """Sources and their axes of which an operation takes entries that pieces do not show."""
    before = [x.pieces for x in xs]
    if name in ("slice", "split", "unstack") or all(map(operator.is_, before, pieces)):
        return set()

    shown = {(p.source, a.axis) for own in pieces for p in own for a in p.atoms()}
    axes = {
        (p.source, a.axis)
        for own in before
        for p in own
        for a in p.atoms(range(len(p.axes)))
        if a.size > 1 or a.stride
    }
    return axes - shown


def _dims_of(pieces: Iterable[Piece], n: int) -> set[int]:
    """The axes, of n, that pieces have entries of."""
    return {k for piece in pieces for k in range(n) if piece.atoms((k,))}


def _axes(atoms: Iterable[Atom]) -> set[int | None]:
    return {atom.axis for atom in atoms}


def _marks(xs: Iterable[Value]) -> Marks:
    return _union(x.marks for x in xs)


def _pending_marks(xs: Iterable[Value]) -> Marks:
    return frozenset(mark for mark in _marks(xs) if mark[0] == "pending")


def _union[T](sets: Iterable[frozenset[T]]) -> frozenset[T]:
    return frozenset[T]().union(*sets)


def _shape(variable: Any) -> Shape:
    return tuple(getattr(variable.aval, "shape", ()))
