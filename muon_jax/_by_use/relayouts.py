"""How equations that are no products move pieces."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from muon_jax._by_use.pieces import (
    Axis,
    Piece,
    Shape,
    fused,
    of_no_source,
    placed,
    reshaped,
    size_of,
    sliced,
)

# They move entries and change none, but for their dtype: those that keep each in its place, and
# those that may not.
_CASTS = frozenset(
    "convert_element_type copy device_put name optimization_barrier pcast pvary reduce_precision"
    " reshard sharding_constraint stop_gradient".split()
)
RELAYOUTS = _CASTS | frozenset(
    "all_gather broadcast_in_dim expand_dims reshape rev slice split squeeze stack transpose"
    " unstack".split()
)
_MOVES = RELAYOUTS - _CASTS | frozenset("concatenate dynamic_slice gather pad".split())
# Entry by entry. A weight may go through these and is a weight after them.
ELEMENTWISE = RELAYOUTS | frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex concatenate"
    " conj cos cosh div dynamic_slice eq erf erf_inv erfc exp exp2 expm1 floor gather ge gt imag"
    " integer_pow is_finite le log log1p log2 logistic lt max min mul ne neg nextafter not or pad"
    " pow real rem round rsqrt select_n sign sin sinh sqrt square sub tan tanh xor".split()
)
REDUCTIONS = ("reduce_", "arg", "cum")


class Operation(NamedTuple):
    """An equation that is no product, and which of its outputs is asked for."""

    name: str
    params: dict[str, Any]
    shapes: Sequence[Shape]
    out: Shape
    output: int


def moved(op: Operation, pieces: Iterable[frozenset[Piece]]) -> list[frozenset[Piece]]:
    """Returns for each operand the pieces that the output has of it."""
    found, joined = [], op.name in ("concatenate", "stack")
    begin = 0 if joined else op.output
    for own, shape in zip(pieces, op.shapes, strict=False):
        if own and (shape != op.out or op.name in _MOVES):
            own = frozenset(p for piece in own if (p := _moved(op, piece, shape, begin)))
        found.append(own)
        if joined:
            begin += shape[op.params["dimension"]] if op.name == "concatenate" else 1
    return found


def _moved(op: Operation, piece: Piece, shape: Shape, begin: int) -> Piece | None:
    """What the output has of a piece, None for nothing, or where it is no box.

    `begin` is where a concatenation has the operand, and the number of the output otherwise.
    """
    name, params, _, out, _ = op
    match name:
        case "squeeze" | "expand_dims":
            return reshaped(piece, shape, out)
        case "reshape":
            if (order := params["dimensions"]) is not None:
                piece, shape = _permuted(piece, order), tuple(shape[axis] for axis in order)
            return reshaped(piece, shape, out)
        case "transpose":
            return _permuted(piece, params["permutation"])
        case "concatenate":
            return _shifted(piece, {params["dimension"]: begin})
        case "stack":
            axes = [*piece.axes]
            axes.insert(params["axis"], Axis(begin, ()))
            return Piece(piece.source, tuple(axes))
        case "split" | "unstack":
            axis, sizes = params["axis"], params.get("sizes", (1,) * shape[params["axis"]])
            starts, stops = [0] * len(shape), [*shape]
            starts[axis] = int(sum(sizes[:begin]))
            stops[axis] = starts[axis] + int(sizes[begin])
            part = sliced(piece, starts, stops, (1,) * len(shape))
            if part is None or name == "split":
                return part
            return reshaped(part, (*shape[:axis], 1, *shape[axis + 1 :]), out)
        case "slice":
            steps = params["strides"] or (1,) * len(shape)
            return sliced(piece, params["start_indices"], params["limit_indices"], steps)
        case "pad" if all(min(ends) >= 0 and not ends[2] for ends in params["padding_config"]):
            return _shifted(piece, {k: low for k, (low, *_) in enumerate(params["padding_config"])})
        case "broadcast_in_dim":
            return placed(piece, shape, out, enumerate(params["broadcast_dimensions"]))
        case "gather":
            numbers = params["dimension_numbers"]
            gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
            return placed(
                piece, shape, out, zip(_others(shape, gone), numbers.offset_dims, strict=True)
            )
        case "all_gather":
            return _gathered(piece, params, shape)
    if name.startswith(REDUCTIONS) and "axes" in params:
        return placed(
            piece, shape, out, zip(_others(shape, params["axes"]), range(len(out)), strict=True)
        )
    if len(shape) != len(out):
        return None
    return placed(piece, shape, out, ((k, k) for k in range(len(out))))


def _others(shape: Shape, gone: Any) -> list[int]:
    return [axis for axis in range(len(shape)) if axis not in gone]


def _permuted(piece: Piece, order: Sequence[int]) -> Piece:
    return Piece(piece.source, tuple(piece.axes[axis] for axis in order))


def _shifted(piece: Piece, by: dict[int, int]) -> Piece:
    axes = (Axis(at + by.get(k, 0), atoms) for k, (at, atoms) in enumerate(piece.axes))
    return Piece(piece.source, tuple(axes))


def _gathered(piece: Piece, params: dict[str, Any], shape: Shape) -> Piece | None:
    """The piece of all shards, of which this is the first."""
    axis, shards, axes = params["all_gather_dimension"], params["axis_size"], [*piece.axes]
    if not params["tiled"]:
        axes.insert(axis, of_no_source(shards))
    else:
        at, atoms = axes[axis].at, fused(axes[axis].atoms)
        if len(atoms) != 1 or size_of(atoms) != shape[axis]:
            return None
        axes[axis] = Axis(at, (atoms[0]._replace(size=shape[axis] * shards),))
    return Piece(piece.source, tuple(axes))
