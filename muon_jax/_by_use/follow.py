"""Follows parameters through a jaxpr, equation by equation, and records what is done with them."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from muon_jax._by_use.pieces import (
    Atom,
    Piece,
    Shape,
    all_atoms,
    known,
    no_axis,
    size_of,
    source_axes,
)
from muon_jax._by_use.products import ProductRecord
from muon_jax._by_use.relayouts import ELEMENTWISE, MOVES, REDUCTIONS, RELAYOUTS, moved
from muon_jax._by_use.values import (
    Value,
    activation,
    as_activation,
    fitting,
    hidden_axes,
)

_OPAQUE = frozenset(
    "cudnn_dot_product_attention_fwd custom_partitioning ffi_call io_callback pallas_call"
    " pure_callback run_state triton_kernel_call xla_ffi_call".split()
)


class Follower(ProductRecord):
    """Runs a jaxpr on `Value`s, and records what products and other operations do with weights."""

    def __init__(self, captures_are_data: bool) -> None:
        super().__init__()
        self._captures_are_data = captures_are_data

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
                values[variable] = fitting(value, _shape(variable))
        return [*map(read, jaxpr.outvars)]

    # Equations.

    def _equation(self, equation: Any, xs: list[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        shapes, outs = [*map(_shape, equation.invars)], [*map(_shape, equation.outvars)]
        if "transpose(" in str(equation.source_info.name_stack):  # a backward pass inside
            backward = activation([as_activation(x) for x in xs], frozenset(), is_data=False)
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
                return [self.dot(xs, shapes, contract, batch)]
            case "ragged_dot_general" | "ragged_dot":
                numbers = params["ragged_dot_dimension_numbers"]
                contract, (of_left, of_right) = numbers.dot_dimension_numbers
                groups = (*of_right, *numbers.rhs_group_dimensions)
                return [self.dot(xs[:2], shapes, contract, (of_left, groups))]
            case "conv_general_dilated":
                return [self.convolution(xs, shapes, params, outs[0])]
        if name not in _OPAQUE:
            for inner in core.jaxprs_in_params(params):
                inner = getattr(inner, "jaxpr", inner)
                ranks = [len(_shape(v)) for v in inner.invars]
                if ranks == [*map(len, shapes)] and len(inner.outvars) == len(outs):
                    pairs = zip(xs, inner.invars, strict=True)
                    return self.run(inner, [fitting(x, _shape(v)) for x, v in pairs])
        if name in _OPAQUE or any(hasattr(v.aval, "inner_aval") for v in equation.invars):
            return [self.mixed(xs, f"opaque {name}")] * len(outs)
        if name.startswith(("random_", "threefry")):
            return [Value()] * len(outs)
        chosen = self.note_choice(name, params, xs, shapes)
        each = enumerate(outs)
        found = [self._entrywise(name, params, xs, shapes, out, i) for i, out in each]
        return (
            [dataclasses.replace(y, choosers=y.choosers | chosen) for y in found]
            if chosen
            else found
        )

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
        steps = no_axis(equation.params["length"])

        def stacked(y: Value) -> Value:
            return y.with_pieces(Piece(p.source, (0, *p.at), (steps, *p.axes)) for p in y.pieces)

        return [*outputs[:carried], *map(stacked, outputs[carried:])]

    def _loop(
        self, body: Callable[[list[Value]], list[Value]], args: list[Value], first: int, n: int
    ) -> list[Value]:
        """The outputs of a loop with n carries, of which args[first] is the first.

        Uses count in the last pass alone, where the carries do not change any more.
        """
        self.passes_to_come += 1
        for _ in range(6):
            before = args[first : first + n]
            carries = [*map(self._joined, zip(before, body(args)[:n], strict=True))]
            args = [*args[:first], *carries, *args[first + n :]]
            if carries == before:
                break
        self.passes_to_come -= 1
        return body(args)

    def _joined(self, xs: Sequence[Value]) -> Value:
        """The value that is one of several."""
        if all(x.is_weight for x in xs):
            return xs[0].with_pieces(frozenset().union(*(x.pieces for x in xs)))
        return self.mixed(xs) if any(x.is_weight for x in xs) else activation(xs)

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
            self.note(xs[0], "lookup")
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
            found = activation([x.with_pieces(p) for x, p in zip(xs, pieces, strict=True)])
            keeps = name in RELAYOUTS or name in ("mul", "div", "add", "sub", "select_n")
            modulated = found.modulated if keeps else frozenset()
            beside = found.beside_inputs
            if name == "concatenate" and any(x.is_data and not x.frontier for x in xs):
                beside |= found.frontier
            if name == "mul":
                self.note_gates(*pieces)
            if name == "eq" and (one_hot := self._one_hot(xs, shapes, out)):
                found = found.with_pieces({one_hot})
            if name == "reduce_sum":
                self.note_modulated(leaf for x in xs for leaf in x.modulated if leaf >= 0)
            if not name.startswith(REDUCTIONS):
                found = dataclasses.replace(
                    found, hidden=found.hidden | hidden_axes(name, xs, pieces)
                )
            found = dataclasses.replace(found, modulated=modulated, beside_inputs=beside)
            of_products = [x for x in xs if x.frontier]
            is_scaled = name in ("mul", "div", "neg", "select_n") and len(of_products) == 1
            if is_scaled and not any(x.is_data for x in xs if not x.frontier) or name in RELAYOUTS:
                found = dataclasses.replace(
                    found, linear=frozenset().union(*(x.linear for x in of_products))
                )
            return dataclasses.replace(found, **flags)
        is_reduction = name.startswith(REDUCTIONS) and "axes" in params
        is_sum = name == "reduce_sum" and any(len(source_axes(p)) > 1 for p in pieces[0])
        if is_reduction and not is_sum:  # a norm of a weight, say
            frontier = as_activation(xs[0]).frontier
            return Value(is_data=xs[0].is_data, frontier=frontier, **flags)
        for k in weights:
            may_lose = is_sum or name in ("gather", "dynamic_slice")
            is_lost = not may_lose and hidden_axes(name, [xs[k]], [pieces[k]])
            if name not in ELEMENTWISE and not is_sum or is_lost:
                self.note(xs[k], f"opaque {name}")
        if len(xs) == 1:
            return dataclasses.replace(xs[0].with_pieces(pieces[0]), **flags)
        others = [x for x in xs if not x.is_weight]
        if not any(x.is_looked_up for x in xs) and all(
            not x.is_data or x.is_scalar for x in others
        ):
            return self._reparametrized(name, xs, pieces, weights, flags)
        operands = zip(xs, pieces, strict=True)
        found = self.mixed([x if x.is_weight else x.with_pieces(p) for x, p in operands])
        modulated = found.modulated
        if name in ("mul", "div", "add", "sub", "select_n"):
            modulated |= self._modulated(name, xs, pieces, shapes, out)
        return dataclasses.replace(found, modulated=modulated, **flags)

    def _one_hot(self, xs: list[Value], shapes: list[Shape], out: Shape) -> Piece | None:
        """The piece of a one-hot encoding of what a product chose: its outputs along an axis."""
        for x, shape in zip(xs, shapes, strict=True):
            chooser = self.chooser_of(x)
            if chooser is None or len(shape) != len(out):
                continue
            j, axis, size = chooser
            repeated = [
                k for k, n in enumerate(out) if n == size and (shape[k] == 1 or k in x.repeats)
            ]
            if repeated:
                atoms = [no_axis(n) for n in out]
                atoms[repeated[-1]] = (Atom(axis, 0, 1, size),)
                return Piece(j, (0,) * len(out), tuple(atoms))
        return None

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
                self.note(xs[k], "vector")
        return Value(main, is_weight=True, **flags)


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


def _shape(variable: Any) -> Shape:
    return tuple(getattr(variable.aval, "shape", ()))
