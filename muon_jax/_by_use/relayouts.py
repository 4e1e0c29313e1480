"""How relayouts, slices and elementwise functions move a piece."""

from typing import Any

from muon_jax._by_use.pieces import (
    Piece,
    Shape,
    atoms_at,
    atoms_in,
    fused,
    kept_where_equal,
    no_axis,
    permuted,
    regrouped,
    reshaped,
    size_of,
    sliced,
    sliced_along,
    without_lost,
)

# They move entries and change none, but for their dtype.
RELAYOUTS = frozenset(
    "all_gather broadcast_in_dim convert_element_type copy device_put expand_dims name"
    " optimization_barrier pcast pvary reduce_precision reshape reshard rev sharding_constraint"
    " slice split squeeze stack stop_gradient transpose unstack".split()
)
# Entry by entry. A weight may go through these and is a weight after them.
ELEMENTWISE = RELAYOUTS | frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex concatenate"
    " conj cos cosh div dynamic_slice eq erf erf_inv erfc exp exp2 expm1 floor gather ge gt imag"
    " integer_pow is_finite le log log1p log2 logistic lt max min mul ne neg nextafter not or pad"
    " pow real rem round rsqrt select_n sign sin sinh sqrt square sub tan tanh xor".split()
)
# They move entries even where the shape stays.
MOVES = RELAYOUTS | frozenset("concatenate dynamic_slice gather pad".split()) - frozenset(
    "convert_element_type copy device_put name optimization_barrier pcast pvary reduce_precision"
    " reshard sharding_constraint stop_gradient".split()
)
REDUCTIONS = ("reduce_", "arg", "cum")


def moved(
    name: str, params: dict[str, Any], piece: Piece, shape: Shape, out: Shape, output: int
) -> Piece | None:
    """Returns what an output of an operation has of a piece of an operand, None for nothing.

    Args:
        name: of the operation.
        params: of the operation.
        piece: of the operand.
        shape: of the operand.
        out: the shape of the output.
        output: which of the outputs it is.
    """
    match name:
        case "reshape":
            if params["dimensions"] is not None:
                piece = permuted(piece, params["dimensions"])
                shape = tuple(shape[axis] for axis in params["dimensions"])
            return reshaped(piece, shape, out)
        case "squeeze" | "expand_dims":
            return reshaped(piece, shape, out)
        case "transpose":
            return permuted(piece, params["permutation"])
        case "stack":
            axis = params["axis"]
            at, axes = [*piece.at], [*piece.axes]
            at.insert(axis, 0)
            axes.insert(axis, ())
            return Piece(piece.source, tuple(at), tuple(axes))
        case "unstack":
            axis = params["axis"]
            part = sliced_along(piece, shape, axis, output, output + 1)
            return part and reshaped(part, (*shape[:axis], 1, *shape[axis + 1 :]), out)
        case "all_gather":
            return _gathered(piece, params, shape)
        case "pad" if all(min(ends) >= 0 and not ends[2] for ends in params["padding_config"]):
            each = zip(piece.at, params["padding_config"], strict=True)
            return piece._replace(at=tuple(begin + low for begin, (low, *_) in each))
        case "broadcast_in_dim":
            return _placed(piece, shape, out, enumerate(params["broadcast_dimensions"]))
        case "slice":
            steps = params["strides"] or (1,) * len(shape)
            return sliced(piece, params["start_indices"], params["limit_indices"], steps)
        case "split":
            begin = int(sum(params["sizes"][:output]))
            end = begin + int(params["sizes"][output])
            return sliced_along(piece, shape, params["axis"], begin, end)
        case "gather":
            numbers = params["dimension_numbers"]
            gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
            kept = [axis for axis in range(len(shape)) if axis not in gone]
            return _placed(piece, shape, out, zip(kept, numbers.offset_dims, strict=True))
    if name.startswith(REDUCTIONS) and "axes" in params:
        kept = [axis for axis in range(len(shape)) if axis not in params["axes"]]
        return without_lost(permuted(piece, kept), atoms_at(piece.axes, params["axes"]))
    if len(shape) != len(out):
        return None
    if name == "concatenate":
        return piece
    return kept_where_equal(piece, shape, out)


def _placed(piece: Piece, shape: Shape, out: Shape, pairs: Any) -> Piece:
    """The piece with each axis of a pair in the place of the other, if both have one size."""
    at, axes, lost = [0] * len(out), [no_axis(n) for n in out], [*piece.axes]
    for axis, target in pairs:
        axes[target] = atoms_in(piece.axes[axis], shape[axis], out[target])
        if shape[axis] in (1, out[target]):
            at[target], lost[axis] = piece.at[axis], ()
    gone = atoms_at(lost, range(len(lost)))
    return without_lost(Piece(piece.source, tuple(at), tuple(axes)), gone)


def _gathered(piece: Piece, params: dict[str, Any], shape: Shape) -> Piece | None:
    """The piece of all shards, of which this is the first."""
    axis, shards = params["all_gather_dimension"], params["axis_size"]
    n, at, axes = shape[axis] if params["tiled"] else 1, [*piece.at], [*piece.axes]
    if not params["tiled"]:
        at.insert(axis, 0)
        axes.insert(axis, no_axis(shards))
    elif n == 1 or len(atoms := fused(axes[axis])) != 1 or size_of(atoms) != n:
        return None
    else:
        axes[axis] = (atoms[0]._replace(size=n * shards),)
    return Piece(piece.source, tuple(at), tuple(axes))


def grouped(piece: Piece, axis: int, groups: int) -> Piece | None:
    """Returns the piece with one more axis at its end: the groups that `axis` is cut into."""
    atoms = piece.axes[axis]
    size = 1
    for atom in atoms:
        size *= atom.size
    found = regrouped(atoms, (groups, size // groups)) if size % groups == 0 else None
    if found is None:
        return None
    axes = [*piece.axes, found[0]]
    axes[axis] = found[1]
    return Piece(piece.source, (*piece.at, 0), tuple(axes))
