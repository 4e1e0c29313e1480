"""Momenta in 8 bits: one byte for each entry, and scales for the rows and columns of tiles."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from muon_jax._distributed.sharding import (
    Shardings,
    mesh_axes_by_dim,
    sharding_that_fits,
    whole_tree,
)
from muon_jax._iteration.normalization import over
from muon_jax._matrices.views import (
    Views,
    are_dimension_numbers,
    assigned_views,
    matrix_axes,
    with_own_numbers,
)
from muon_jax._transforms.momentum import Rounding, Storage, cast_like
from muon_jax._trees import is_box
from muon_jax.contrib._on_host import to_device
from muon_jax.contrib._trees import in_box_of

LARGEST_CODE = 127
# The code k stands for k·(|k| + OFFSET): steps between small entries of a block are finer.
OFFSET = 300
LARGEST_LEVEL = LARGEST_CODE * (LARGEST_CODE + OFFSET)
# The fewest entries of a block of scales, and of columns; an axis that is shorter is one block.
LEAST_OF_SCALES, LEAST_OF_COLUMNS = 10, 50
LEAST_BESIDE_SHORT_COLUMNS = 16  # of scales, where all columns are shorter than 50
LEAST_PIECE = 32  # shards of this many entries, or of 50 rows, hold whole blocks
# Smaller arrays stay in float32: their bytes do not matter, and norms and biases are among them.
LEAST_ENTRIES = 4096
# The bytes of scales and columns for 100 entries. With the codes they make 28% of float32's.
MOST_BYTES_OF_SCALES = 12
# A column's exponent counts an entry as at least 2⁻¹⁰ of the largest one of its row.
LEAST_EXPONENT = -10
# A box keeps the name of an axis that counts blocks where so many devices divide it.
DEVICES_OF_NAMED_BLOCKS = 128

# A scale is a byte, the bits of a float32 from its third binary digit on, from 2⁻³⁰ to 2.
SCALE_SHIFT, SCALE_OF_ONE = 20, (127 - 30) << 3
INFINITY, SMALLEST_NORMAL = 0x7F800000, 0x00800000  # the bits of float32


class Quantized(NamedTuple):
    """A momentum in 8 bits, which replaces an array of `mu` under `mu_dtype="int8"`.

    Blocks along two axes of the parameter, those of its matrices, cut each matrix into tiles. An
    entry is

        code·(|code| + 300) × scale of its row in the tile × 2^(exponent of its column there),

    in float32, so neither a large row nor a large column takes digits from the others. The exponent
    is that of the geometric mean of the column, after each entry is divided by the largest entry of
    its row. The scale is the largest magnitude of the row, in units of the columns, over 127·427,
    rounded up. The error of an entry is at most half the distance between two codes, or the whole
    distance if it was rounded at random. If a row of a tile has a NaN or an infinity, none of its
    entries is finite.

    A tile has 10 to 19 entries along the axis of scales, and 50 to 99 along that of columns: an
    axis is halved while that leaves at least 32 entries, or 50, and each piece is cut into as many
    equal blocks as it has tens, or fifties. Columns shorter than 50 are one block, and their scales
    cover 16 to 31 entries.

    Attributes:
        codes: int8 from -127 to 127, in the shape of the parameter.
        scales: uint8, in the same shape but for one tile axis, usually the last, which counts the
            blocks. 1 to 254 are the upper bits of a float, 0 stands for 0 and 255 for NaN.
        columns: int8, the exponents, in the same shape but for the other tile axis, which counts
            the blocks. None in a state of version 0.2.0; `cast_momentum` converts it.
    """

    codes: jax.Array
    scales: jax.Array
    columns: jax.Array | None = None


class TileAxes(NamedTuple):
    """The axes that tiles cut, from the front: `rows` of `columns`, and `entries` of `scales`."""

    rows: int
    entries: int
    least_of_scales: int = LEAST_OF_SCALES

    @classmethod
    def of_whole(cls, rows: int, entries: int, shape: tuple[int, ...]) -> Self:
        """Returns the axes in a whole array."""
        is_short = shape[rows] < LEAST_OF_COLUMNS
        return cls(rows, entries, LEAST_BESIDE_SHORT_COLUMNS if is_short else LEAST_OF_SCALES)

    def counts(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the numbers of blocks of columns and of scales in an array, or its shard."""
        return (
            count_blocks(shape[self.rows], LEAST_OF_COLUMNS, LEAST_OF_COLUMNS),
            count_blocks(shape[self.entries], self.least_of_scales, LEAST_PIECE),
        )


@dataclasses.dataclass(frozen=True)
class Int8(Storage):
    """Keeps large momenta as `Quantized`, and the others in float32."""

    rounding: ClassVar[Rounding] = "stochastic"

    @property
    def computed_dtype(self) -> jax.typing.DTypeLike | None:
        """float32."""
        return jnp.float32

    @property
    def of_adam(self) -> Storage:
        """AdamW's first moment is in bfloat16.

        AdamW divides by √ν entry by entry. In 8 bits an entry that is small in its block would
        become 0, or large compared with its own √ν.
        """
        return Storage(jnp.bfloat16, self.memory)

    def init(self, params: Any, views: Views, shardings: Shardings) -> Any:
        """Returns momenta of zeros.

        Raises:
            ValueError: explicit mesh axes cut a block, or `shardings` is missing or does not fit.
        """
        mu = optax.tree.zeros_like(params, dtype=jnp.float32)
        leaves, treedef = jax.tree.flatten_with_path(mu)
        wholes = jax.tree.leaves(whole_tree(mu, shardings))

        def zeros(path: Any, m: jax.Array, of_whole: Any, view: Any) -> Any:
            axes = checked_tile_axes(path, m, of_whole, view)
            if axes is None:
                return m
            return Quantized(
                jnp.zeros_like(m, jnp.int8),
                _zeros_of_blocks(m, axes.entries, axes.counts(m.shape)[1], jnp.uint8),
                _zeros_of_blocks(m, axes.rows, axes.counts(m.shape)[0], jnp.int8),
            )

        triples = zip(leaves, wholes, assigned_views(views, params), strict=True)
        return boxed_momenta(treedef.unflatten(zeros(*leaf, w, view) for leaf, w, view in triples))

    def load(self, m: Any) -> jax.Array:
        """Returns the float32 array that a `Quantized` stands for; leaves arrays unchanged."""
        return dequantize(m)

    def save(self, x: jax.Array, like: Any, key: jax.Array | None) -> Any:
        """Returns `x` in the blocks of `like`, or as an array if `like` is one."""
        if not _is_quantized(like):
            return cast_like(x, like, key)
        axes = _axes_of(like)
        counts = like.columns.shape[axes.rows], like.scales.shape[axes.entries]
        return quantize(x, axes, counts, key, None if key is None else dequantize(like))

    def in_order(self, update: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
        """Returns an update that computes a leaf's result after its codes.

        Otherwise XLA may keep all momenta in float32 to the end of a program, which takes more than
        8 bits save.
        """

        def codes_first(m: Any, g: jax.Array, *others: Any) -> tuple[Any, Any]:
            _, codes = update(m, g, *others)
            codes, m, g = jax.lax.optimization_barrier((codes, m, g))
            result, _ = update(m, g, *others)
            return result, codes

        return codes_first

    def unpack(self, mu: Any) -> Any:
        """Returns momenta with a `Quantized` for each mapping that has its fields.

        `nnx.Optimizer` turns each into an `nnx.State` when it updates, and restored trees may have
        dicts. A `Quantized` of Flax's boxes becomes a box with a `Quantized` in it, to match the
        boxes of the gradients.
        """

        def convert(node: Any) -> Any:
            node = Quantized(**node) if _has_fields(node) else node
            if not _is_quantized(node) or not is_box(node.codes):
                return node
            arrays: Any = node._make(jax.tree.leaves(x)[0] for x in node)
            return in_box_of(node.codes, arrays, range(arrays.codes.ndim))

        return jax.tree.map(convert, mu, is_leaf=_stands_for_momentum)

    def pack(self, mu: Any, given: Any) -> Any:
        """Inverts `unpack`, with mappings in the places where `given` has them."""

        def convert(node: Any, m: Any) -> Any:
            if _has_fields(node):
                return type(node)(m._asdict())
            return boxed_momenta(m) if _is_quantized(node) else m

        return jax.tree.map(convert, given, mu, is_leaf=_stands_for_momentum)

    def check(self, mu: Any, gradients: Any, shardings: Shardings, rounding: Rounding) -> None:
        """Raises ValueError if a large momentum is an array, or in the form of version 0.2.0.

        So it does where shards cut a block, as those of a state may that was made on another mesh.
        """

        def check(path: Any, m: Any, of_whole: Any) -> None:
            is_old = _is_quantized(m) and m.columns is None
            if is_old or not (_is_quantized(m) or tile_axes(of_whole.shape) is None):
                found = "the 8 bits of version 0.2.0" if is_old else m.dtype
                raise ValueError(
                    "mu_dtype='int8' needs a state with momenta in 8 bits, got the momentum of the"
                    f" parameter {jax.tree_util.keystr(path)} in {found}: pass"
                    " contrib.cast_momentum(state, 'int8')"
                )
            if _is_quantized(m):
                rows, entries, _ = _axes_of(m)
                axes = TileAxes.of_whole(rows, entries, of_whole.shape)
                _check_blocks(path, m.codes, of_whole.shape, axes)

        jax.tree.map_with_path(check, mu, whole_tree(gradients, shardings), is_leaf=_is_quantized)

    def is_momentum(self, node: Any) -> bool:
        """Returns whether a node is a `Quantized`."""
        return _is_quantized(node)

    def shape_of(self, m: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape of a momentum, and float32 for a `Quantized`."""
        x, dtype = (m.codes, jnp.float32) if _is_quantized(m) else (m, m.dtype)
        return jax.ShapeDtypeStruct(x.shape, dtype)


QUANTIZED = Int8("int8")


def count_blocks(n: int, least: int, least_piece: int) -> int:
    """Returns the number of blocks of an axis of n entries, of `least` or more each.

    Shards that hold `least_piece` entries or more, a power of two of them, hold whole blocks.
    """
    pieces = 1
    while n >= 2 * least_piece and n % 2 == 0:
        n, pieces = n // 2, 2 * pieces
    return pieces * max(1, n // least)


def tile_axes(shape: tuple[int, ...], view: Any = None) -> TileAxes | None:
    """Returns the axes that tiles of an array cut, None if the array does not fit in 8 bits.

    These are the longest axis of each side of its matrices, if the view names both sides and the
    axes are long enough; otherwise the last two. The scales run along the later axis, unless the
    earlier one is short.
    """
    if len(shape) < 2 or math.prod(shape) < LEAST_ENTRIES:
        return None
    pairs = [(len(shape) - 2, len(shape) - 1)]
    if are_dimension_numbers(view):
        sides = matrix_axes(len(shape), with_own_numbers(view))[1:]
        first, second = sorted(max(side, key=lambda i: (shape[i], i)) for side in sides)
        pairs.insert(0, (first, second))
    for rows, entries in pairs:
        if shape[rows] < min(LEAST_OF_COLUMNS, shape[entries]):
            rows, entries = entries, rows
        axes = TileAxes.of_whole(rows, entries, shape)
        of_columns, of_scales = axes.counts(shape)
        bytes_of_tiles = of_scales * shape[rows] + of_columns * shape[entries]
        if 100 * bytes_of_tiles <= MOST_BYTES_OF_SCALES * shape[rows] * shape[entries]:
            return axes
    return None


def quantize(
    x: jax.Array,
    axes: TileAxes,
    counts: tuple[int, int] | None = None,
    key: jax.Array | None = None,
    before: jax.Array | None = None,
) -> Quantized:
    """Returns `x` in 8 bits.

    All sums and maxima are of integers, which are exact in each order, and keep a NaN: XLA's
    maximum of floats drops it on CPUs.

    Args:
        x: real; computed in float32.
        axes: which tiles cut.
        counts: the numbers of blocks of columns and of scales; None for those of the shape.
        key: of random bits; None to round to nearest.
        before: with `key`, the momentum in the state. An entry that differs from it by less than
            half the distance between two codes is rounded up or down at random, so that the mean is
            `x`; rounded to nearest, it would never change or decay. All others are rounded to
            nearest, which has half the variance.
    """
    x = x.astype(jnp.float32)
    counts = axes.counts(x.shape) if counts is None else counts
    columns = _exponents_of_columns(x, axes, counts)
    units = _of_entries(_power(columns), axes.rows, x.shape)
    scales = _code_of_scales(_reduce_blocks(jnp.max, _bits(x / units), axes.entries, counts[1]))
    scale_of_entries = _of_entries(_scale(scales), axes.entries, x.shape)
    scaled = over(x / units, scale_of_entries)
    size = jnp.minimum(jnp.abs(scaled), LARGEST_LEVEL)
    lower = jnp.floor((jnp.sqrt(4 * size + OFFSET**2) - OFFSET) / 2)
    distance = 2 * lower + 1 + OFFSET
    between = (size - lower * (lower + OFFSET)) / distance
    is_up = between >= 0.5
    if key is not None and before is not None:
        bits = jax.random.bits(key, x.shape, jnp.uint8).astype(jnp.float32)
        change = jnp.abs(scaled - over(before / units, scale_of_entries))
        is_up = jnp.where(change < distance / 2, bits + 0.5 < between * 2**8, is_up)
    codes = jnp.sign(scaled) * jnp.minimum(lower + is_up, LARGEST_CODE)
    return Quantized(codes.astype(jnp.int8), scales, columns.astype(jnp.int8))


def dequantize(m: Any) -> Any:
    """Returns the float32 array that `m` stands for, or `m` if it is an array; on the device."""
    m = to_device(m)
    if not isinstance(m, Quantized):
        return m
    shape, codes = m.codes.shape, m.codes.astype(jnp.float32)
    if m.columns is None:
        return codes * _of_entries(m.scales, len(shape) - 1, shape)
    axes = _axes_of(m)
    x = codes * (jnp.abs(codes) + OFFSET) * _of_entries(_scale(m.scales), axes.entries, shape)
    return x * _of_entries(_power(m.columns.astype(jnp.int32)), axes.rows, shape)


def boxed_momenta(mu: Any) -> Any:
    """Returns momenta with each box around a `Quantized` replaced by a `Quantized` of boxes.

    Each of Flax's boxes names the mesh axes of its own array. An axis that counts blocks keeps its
    name if 128 divides the number of blocks, because only the mesh knows the size behind the name.
    """

    def convert(node: Any) -> Any:
        inner = jax.tree.leaves(node, is_leaf=_is_quantized)
        if not is_box(node) or not inner or not _is_quantized(inner[0]):
            return node
        whole = inner[0].codes.shape

        def box(x: Any) -> Any:
            sizes = enumerate(x.shape)
            kept = [n == whole[i] or n % DEVICES_OF_NAMED_BLOCKS == 0 for i, n in sizes]
            return in_box_of(node, x, [i if keep else None for i, keep in enumerate(kept)])

        return inner[0]._make(map(box, inner[0]))

    return jax.tree.map(convert, mu, is_leaf=lambda node: is_box(node) or _is_quantized(node))


def checked_tile_axes(path: Any, m: jax.Array, of_whole: Any, view: Any = None) -> TileAxes | None:
    """Returns the axes that tiles of `m` cut, a shard of `of_whole`; None if it stays an array.

    Raises:
        ValueError: shards cut a block.
    """
    axes = tile_axes(of_whole.shape, view)
    if axes is not None:
        _check_blocks(path, m, of_whole.shape, axes)
    return axes


def _check_blocks(path: Any, m: jax.Array, whole: tuple[int, ...], axes: TileAxes) -> None:
    """Raises ValueError where the shards of m cut a block: a shard, or of explicit mesh axes."""
    sharding = jax.typeof(m).sharding
    by_dim = mesh_axes_by_dim(sharding.spec, m.ndim, sharding.mesh.shape)
    for axis, count in zip(axes[:2], axes.counts(whole), strict=True):
        shards = math.prod(sharding.mesh.shape[name] for name in by_dim[axis])
        shards *= whole[axis] // m.shape[axis]
        if count % shards:
            raise ValueError(
                f"mu_dtype='int8' needs whole blocks on each device, but axis {axis} of the"
                f" parameter {jax.tree_util.keystr(path)} has {count} blocks on {shards} devices:"
                " shard another axis, or pass mu_dtype='bfloat16'"
            )


def _axes_of(m: Quantized) -> TileAxes:
    """The axes that the tiles of a momentum cut: where its scales, and its columns, are shorter.

    In a shard_map a tile axis may have one entry and one block, as may others: any of them does.
    """
    assert m.columns is not None
    shape, found = m.codes.shape, []
    for x in (m.scales, m.columns):
        shorter = [i for i, n in enumerate(shape) if x.shape[i] != n]
        single = [i for i, n in enumerate(shape) if n == 1 and i not in found]
        found.append((shorter or single)[0])
    return TileAxes(found[1], found[0])


def _has_fields(node: Any) -> bool:
    """Whether a node is a mapping with the fields of a `Quantized`."""
    if not (isinstance(node, Mapping) and {"codes", "scales"} <= {*node} <= {*Quantized._fields}):
        return False
    return getattr(node["codes"], "dtype", None) == jnp.int8


def _stands_for_momentum(node: Any) -> bool:
    return _has_fields(node) or _is_quantized(node)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def _layout(n: int, count: int) -> tuple[int, int, int]:
    """The pieces of an axis, the blocks of each, and the entries of a block; the last is shorter.

    Shards that divide the axis and its blocks have the layout of the whole.
    """
    pieces = math.gcd(n, count)
    return pieces, count // pieces, -(-n // count)


def _reduce_blocks(
    reduce: Callable[[jax.Array, int], jax.Array], x: jax.Array, axis: int, count: int
) -> jax.Array:
    """Reduces each block of an axis, whose last block is filled with zeros."""
    shape, n = x.shape, x.shape[axis]
    pieces, blocks, size = _layout(n, count)
    x = x.reshape(*shape[:axis], pieces, n // pieces, *shape[axis + 1 :])
    if blocks * size != n // pieces:
        padding = [(0, 0)] * x.ndim
        padding[axis + 1] = (0, blocks * size - n // pieces)
        x = jnp.pad(x, padding)
    x = x.reshape(*shape[:axis], pieces, blocks, size, *shape[axis + 1 :])
    return reduce(x, axis + 2).reshape(*shape[:axis], count, *shape[axis + 1 :])


def _of_entries(of_blocks: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """Repeats the value of each block for all of its entries, of which there are `shape[axis]`."""
    n, before, after = shape[axis], of_blocks.shape[:axis], of_blocks.shape[axis + 1 :]
    pieces, blocks, size = _layout(n, of_blocks.shape[axis])
    of_block = of_blocks.reshape(*before, pieces, blocks, 1, *after)
    of_piece = jnp.broadcast_to(of_block, (*before, pieces, blocks, size, *after))
    of_piece = of_piece.reshape(*before, pieces, blocks * size, *after)
    of_piece = jax.lax.slice_in_dim(of_piece, 0, n // pieces, axis=axis + 1)
    return of_piece.reshape(*before, n, *after)


def _exponents_of_columns(x: jax.Array, axes: TileAxes, counts: tuple[int, int]) -> jax.Array:
    """The exponents of the columns of tiles (int32), 0 in tiles of zeros.

    Upper bits of a float are its logarithm in fixed-point numbers, to a few percent. Means are
    rounded so that those of equal columns of normal numbers, -1.8 here, have one exponent.
    """
    of_columns, of_scales = counts
    bits = _bits(x)
    bits = jnp.where((bits >= SMALLEST_NORMAL) & (bits < INFINITY), bits, 0)
    of_rows = _reduce_blocks(jnp.max, bits, axes.entries, of_scales)
    logarithms = (bits >> 15) - (_of_entries(of_rows, axes.entries, x.shape) >> 15)
    logarithms = jnp.where(bits > 0, jnp.maximum(logarithms, LEAST_EXPONENT * 256), 0)
    add = functools.partial(jnp.sum, dtype=jnp.int32)  # whose sums are int64 under x64
    count = _reduce_blocks(add, (bits > 0).astype(jnp.int32), axes.rows, of_columns)
    total = _reduce_blocks(add, logarithms, axes.rows, of_columns)
    exponents = (10 * total + 3 * 256 * count) // jnp.maximum(2560 * count, 1)
    of_tiles = _reduce_blocks(jnp.max, of_rows, axes.rows, of_columns) >> 23
    of_tiles = _of_entries(of_tiles, axes.entries, exponents.shape)
    return jnp.where(of_tiles > 0, jnp.clip(exponents + of_tiles - 127, -126, 126), 0)


def _bits(x: jax.Array) -> jax.Array:
    """The bits of |x| as int32, in the order of |x|; those of NaN are above all others."""
    return jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def _power(exponent: jax.Array) -> jax.Array:
    """2^exponent in float32, for int32 from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _code_of_scales(bits: jax.Array) -> jax.Array:
    """The codes of scales (uint8), at least the floats of these bits over the largest level.

    A code is the upper bits of a float, without its sign and half of its exponents.
    """
    scales = jax.lax.bitcast_convert_type(bits, jnp.float32) / LARGEST_LEVEL
    upper = (_bits(scales) + 2**SCALE_SHIFT - 1) >> SCALE_SHIFT
    codes = jnp.where(scales == 0, 0, jnp.clip(upper - SCALE_OF_ONE, 1, 254))
    return jnp.where(bits < INFINITY, codes, 255).astype(jnp.uint8)


def _scale(codes: jax.Array) -> jax.Array:
    """The float32 scales of these codes: 0 of 0, NaN of 255."""
    bits = (codes.astype(jnp.int32) + SCALE_OF_ONE) << SCALE_SHIFT
    scales = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(codes == 0, 0, jnp.where(codes == 255, jnp.nan, scales))


def _zeros_of_blocks(m: jax.Array, axis: int, count: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Zeros for each block of an axis, sharded as `m` where its shards hold whole blocks."""
    shape = (*m.shape[:axis], count, *m.shape[axis + 1 :])
    sharding = getattr(m, "sharding", None) or jax.typeof(m).sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return jnp.zeros(shape, dtype)
    return jnp.zeros(shape, dtype, device=sharding_that_fits(sharding, m.shape, shape))
