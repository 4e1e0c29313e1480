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
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from muon_jax._distributed.plan import Bucket, Chunk
from muon_jax._distributed.units import take_units
from muon_jax._iteration.normalization import (
    binary_exponent,
    largest_entries,
    power_of_two,
    powers_of_two,
)
from muon_jax._iteration.operand import bounded, split_apart, unknown


def pack(bucket: Bucket, shards: Mapping[int, jax.Array]) -> jax.Array:
    """Returns the pieces of all chunks, in the dtype on the wire.

    Each parameter is written to its place by the kernel that computes it. XLA takes twice as long
    to concatenate dozens of parameters.
    """
    dtype, owners, block = bucket[0].dtype, bucket[0].owners, _largest_block(bucket)
    slots = [chunk.slots for chunk in bucket]
    sizes = [chunk.slots * chunk.elements for chunk in bucket]
    *columns, end = itertools.accumulate(sizes, initial=0)
    is_scaled = dtype == jnp.float16
    # After the pieces there are exponents, which are padded to align the next row.
    num_exponents = sum(slots) + -sum(slots) % 128 if is_scaled else 0
    # Explicit axes that `vmap` maps over are on a mesh, where arrays are whole.
    mesh = jax.typeof(shards[bucket[0].leaf.index]).sharding.mesh
    whole = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    shape = (owners, (end + num_exponents) // block, block)
    packed = jax.lax.empty(shape, dtype, out_sharding=whole)
    exponent_columns = itertools.accumulate(slots, initial=end)
    for column, exponent_column, chunk in zip(columns, exponent_columns, bucket, strict=False):
        parts = [bounded(x[:, :, 0], dtype) for x in take_units(chunk.parts, shards)]
        absent = chunk.slots * owners - chunk.count
        begins = [*itertools.accumulate(map(len, parts), initial=0)]
        if is_scaled:
            factors = _powers_to_float16(parts, chunk, shards)
            exponents = jnp.pad(binary_exponent(factors[0] * factors[1]) - 1, (0, absent))
            flat = packed.reshape(owners, -1, 1)
            flat = write_units(flat, chunk.first, exponent_column, 0, exponents[:, None])
            packed = flat.reshape(shape)
            by_part = split_apart([f[:, None] for f in factors], parts)
            parts = [x * f * g for x, f, g in zip(parts, *by_part, strict=True)]
        parts.append(jnp.zeros((absent, chunk.elements)))
        for begin, units in zip(begins, parts, strict=True):
            packed = write_units(packed, chunk.first, column, begin, units)
    return packed.reshape(owners, -1, *_minor(bucket))


def _largest_block(bucket: Bucket) -> int:
    """The largest block that all sizes are multiples of, up to 128 elements."""
    return math.gcd(128, *(chunk.elements for chunk in bucket))


def _minor(bucket: Bucket) -> tuple[int, ...]:
    """The last axis on the wire, if there are blocks."""
    block = _largest_block(bucket)
    return (block,) if block % 64 == 0 else ()


def _powers_to_float16(
    parts: Sequence[jax.Array], chunk: Chunk, shards: Mapping[int, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Two powers of two for each unit, whose product makes its largest entry 2¹⁵."""
    rows = [
        x.reshape(len(x), -1, math.gcd(x.shape[1], shards[leaf.index].shape[-1]))
        for x, leaf in zip(parts, chunk.leaves, strict=True)
    ]
    return powers_of_two(largest_entries(rows), -15)


def write_units(
    packed: jax.Array, first: int, column: int, begin: int, units: jax.Array
) -> jax.Array:
    """Returns `packed` with units written to their places `(owner, slot, elements)`.

    All sizes are whole blocks, for XLA to see that it can store many elements at once.

    Args:
        packed: shape `(owners, blocks, block)`.
        first: the owner of the first unit of the chunk.
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
        owner += first
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
    return jnp.concatenate(
        [x.astype(bucket[0].dtype).reshape(len(x), -1, *minor) for x in pieces], 1
    )


def unpack(bucket: Bucket, flat: jax.Array) -> list[jax.Array]:
    """Returns the pieces of each chunk, `(device, slot, elements)`, of what was exchanged."""
    block = math.prod(flat.shape[2:])
    slots = [chunk.slots for chunk in bucket]
    sizes = [chunk.elements // block for chunk in bucket]
    *parts, exponents = jnp.split(flat, [*itertools.accumulate(map(operator.mul, slots, sizes))], 1)
    pieces = [part.reshape(len(flat), k, -1) for part, k in zip(parts, slots, strict=True)]
    if not exponents.size:
        return pieces
    exponents = exponents.reshape(len(flat), -1)
    factors = power_of_two(-exponents.astype(jnp.int32), jnp.float32)[..., None]
    *split, _ = jnp.split(factors, [*itertools.accumulate(slots)], 1)
    return [x * factor for x, factor in zip(pieces, split, strict=True)]
