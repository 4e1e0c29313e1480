"""What an exchange sends: the pieces of all chunks of a bucket, as one flat array.

What a chunk sends is an array

    (owner, slot, elements of the piece of a unit),

flat but for the owner, so that chunks of any shapes and layouts go together. The exchange makes it

    (device that held the piece, slot, elements).

Where all sizes are multiples of 64, the elements are in blocks, (owner, blocks, block). TPUs'
compiler takes minutes to reshape (owner, elements) to large matrices, and seconds from blocks.

Pieces in float16 come with exponents. Each piece was multiplied by a power of two that makes its
largest entry 2¹⁵, so no more is lost than where a whole matrix is cast.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from muon_jax._distributed.plan import Bucket, Chunk, Leaf
from muon_jax._iteration.normalization import largest_entries, powers_of_two
from muon_jax._iteration.operand import bounded, split_apart, unknown
from muon_jax._matrices.views import MatrixAxes, to_matrices


def pack(bucket: Bucket, shards: Sequence[jax.Array]) -> jax.Array:
    """Returns the pieces of all chunks, in the dtype on the wire.

    Each parameter is written to its place by the kernel that computes it. XLA takes twice as long
    to concatenate dozens of parameters.
    """
    elements = [bucket.elements(chunk) for chunk in bucket.chunks]
    sizes = [chunk.slots * size for chunk, size in zip(bucket.chunks, elements, strict=True)]
    columns, end = itertools.accumulate(sizes, initial=0), sum(sizes)
    num_slots, block = sum(chunk.slots for chunk in bucket.chunks), _largest_block(bucket)
    is_scaled = bucket.dtype == jnp.float16
    tail = num_slots + -num_slots % 128 if is_scaled else 0  # of exponents; aligns the next row
    shape = (bucket.owners, (end + tail) // block, block)
    whole = _on_mesh_of(shards[bucket.chunks[0].leaf.index])
    packed = jax.lax.empty(shape, bucket.dtype, out_sharding=whole)
    exponent_column = end
    for column, size, chunk in zip(columns, elements, bucket.chunks, strict=False):
        parts = [
            bounded(
                to_matrices(shards[leaf.index], unit_axes(leaf))[start:stop, :, 0], bucket.dtype
            )
            for leaf, start, stop in chunk.parts
        ]
        absent = chunk.slots * bucket.owners - chunk.count
        begins = [*itertools.accumulate(map(len, parts), initial=0)]
        if is_scaled:
            factors = _powers_to_float16(parts, chunk, shards)
            exponents = jnp.pad(jnp.frexp(math.prod(factors))[1] - 1, (0, absent))
            flat = packed.reshape(bucket.owners, -1, 1)
            flat = write_units(flat, chunk, exponent_column, 0, exponents[:, None])
            packed = flat.reshape(packed.shape)
            exponent_column += chunk.slots
            by_part = split_apart([f[:, None] for f in factors], parts)
            parts = [x * f * g for x, f, g in zip(parts, *by_part, strict=True)]
        parts.append(jnp.zeros((absent, size)))
        for begin, units in zip(begins, parts, strict=True):
            packed = write_units(packed, chunk, column, begin, units)
    return packed.reshape(bucket.owners, -1, *_minor(bucket))


def _on_mesh_of(x: jax.Array) -> NamedSharding | None:
    """The sharding of whole arrays in types: explicit axes that `vmap` maps over are on a mesh."""
    mesh = jax.typeof(x).sharding.mesh
    return None if mesh.empty else NamedSharding(mesh, PartitionSpec())


def _largest_block(bucket: Bucket) -> int:
    """The largest block that all sizes are multiples of, up to 128 elements."""
    return math.gcd(128, *map(bucket.elements, bucket.chunks))


def _minor(bucket: Bucket) -> tuple[int, ...]:
    """The last axis on the wire, if there are blocks."""
    block = _largest_block(bucket)
    return (block,) if block % 64 == 0 else ()


def _powers_to_float16(
    parts: Sequence[jax.Array], chunk: Chunk, shards: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Two powers of two for each unit, whose product makes its largest entry 2¹⁵."""
    rows = [
        x.reshape(len(x), -1, math.gcd(x.shape[1], shards[leaf.index].shape[-1]))
        for x, (leaf, _, _) in zip(parts, chunk.parts, strict=True)
    ]
    return powers_of_two(largest_entries(rows), -15)


def write_units(
    packed: jax.Array, chunk: Chunk, column: int, begin: int, units: jax.Array
) -> jax.Array:
    """Returns `packed` with units written to their places `(owner, slot, elements)`.

    All sizes are whole blocks, for XLA to see that it can store many elements at once.

    Args:
        packed: shape `(owners, blocks, block)`.
        chunk: that the units are of.
        column: where the chunk begins in the flat elements of an owner; a block begins there.
        begin: the number of the first unit.
        units: shape `(unit, elements)`.
    """
    (owners, _, block), size, end = packed.shape, units.shape[1], begin + len(units)
    # The end of one slot, whole slots, the beginning of another.
    whole = min(-(-begin // owners) * owners, end)
    for start, stop in itertools.pairwise((begin, whole, max(end // owners * owners, whole), end)):
        if start == stop:
            continue
        slot, owner = divmod(start, owners)
        num_slots = -(-(stop - start) // owners)
        num_owners = (stop - start) // num_slots
        part = units[start - begin : stop - begin].astype(packed.dtype)
        part = part.reshape(num_slots, num_owners, size).swapaxes(0, 1)
        part = part.reshape(num_owners, -1, block)
        owner += chunk.first
        cut = max(0, owners - owner)  # from there on, the first owners' turn is next
        for rows, at in ((part[:cut], owner), (part[cut:], (owner + cut) % owners)):
            if len(rows):
                place = unknown([at, (column + slot * size) // block, 0])
                packed = jax.lax.dynamic_update_slice(packed, rows, place)
    return packed


def pack_results(pieces: Sequence[jax.Array], bucket: Bucket) -> jax.Array:
    """Returns the results of all chunks, `(device, slot, elements)` each, as they are exchanged.

    Entries of polar factors are at most about 1, and need no exponents.
    """
    minor = _minor(bucket)
    return jnp.concatenate([x.astype(bucket.dtype).reshape(len(x), -1, *minor) for x in pieces], 1)


def unpack(bucket: Bucket, flat: jax.Array) -> list[jax.Array]:
    """Returns the pieces of each chunk, `(device, slot, elements)`, of what was exchanged."""
    block = math.prod(flat.shape[2:])
    slots = [chunk.slots for chunk in bucket.chunks]
    sizes = [bucket.elements(chunk) // block for chunk in bucket.chunks]
    *parts, exponents = jnp.split(flat, [*itertools.accumulate(map(operator.mul, slots, sizes))], 1)
    pieces = [part.reshape(len(flat), k, -1) for part, k in zip(parts, slots, strict=True)]
    if not exponents.size:
        return pieces
    exponents = exponents.reshape(len(flat), -1)
    factors = jnp.ldexp(jnp.float32(1), -exponents.astype(jnp.int32))[..., None]
    *split, _ = jnp.split(factors, [*itertools.accumulate(slots)], 1)
    return [x * factor for x, factor in zip(pieces, split, strict=True)]


def units_of_parts(chunk: Chunk, pieces: jax.Array) -> Iterator[tuple[Leaf, jax.Array]]:
    """Yields the units `(unit, elements)` of each part."""
    units = jnp.roll(pieces.swapaxes(0, 1), -chunk.first, 1).reshape(-1, pieces.shape[-1])
    begin = 0
    for leaf, start, stop in chunk.parts:
        yield leaf, units[begin : begin + stop - start]
        begin += stop - start


def unit_axes(leaf: Leaf) -> MatrixAxes:
    """Returns the axes for which `to_matrices` makes `(unit, elements, 1)` of a shard."""
    others = (axis for axis in range(len(leaf.shape)) if axis not in leaf.batch)
    return MatrixAxes(leaf.batch, tuple(others), ())
