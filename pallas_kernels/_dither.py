"""Dithered rounding: a number that is added before a product is rounded to 16 bits.

Rounding to nearest takes equal entries to equal errors. Where a matrix has few different entries,
its errors are then as coherent as the matrix, and steep polynomials amplify them. The dither is a
number in (-½, ½) ulp that depends on the place (i, j) alone:

    h(i)·h(j) mod 2³²,  its top bits,

with an odd hash h of one index. So the dither

- is symmetric, and the same on every device, in every stack and in every tile;
- leaves exact results as they are, since its magnitude is less than half an ulp.

The error of a rounding is less than one ulp, in place of half an ulp.
"""

import jax
import jax.numpy as jnp
from jax import lax


def hash_of_index(index: jax.Array) -> jax.Array:
    """Returns an odd uint32 for each index: a mix of multiplications and shifts, by C. Wellons."""
    x = index.astype(jnp.uint32)
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return (x ^ (x >> 16)) | 1


def dithered(
    total: jax.Array, dtype: jnp.dtype, row_hash: jax.Array, col_hash: jax.Array
) -> jax.Array:
    """Returns float32 sums that are rounded to `dtype` next, with the dither added.

    Args:
        total: float32, of any shape.
        dtype: float16 or bfloat16; the dither of others would be no number of whole bits.
        row_hash, col_hash: `hash_of_index` of the row and the column of each sum, of that shape or
            broadcast to it.
    """
    bits = 23 - jnp.finfo(dtype).nmant  # that rounding takes away
    top = ((row_hash * col_hash) >> (32 - bits)) | 1
    offset = top.astype(jnp.int32) - (1 << (bits - 1))
    moved = lax.bitcast_convert_type(total, jnp.int32) + offset
    magnitude = jnp.abs(total)
    is_number = (magnitude > 0) & (magnitude < jnp.inf)
    return jnp.where(is_number, lax.bitcast_convert_type(moved, jnp.float32), total)


def rounded(total: jax.Array, dtype: jnp.dtype, *, dither: bool) -> jax.Array:
    """Returns sums `(..., m, m)` in `dtype`, whose rounding to 16 bits is dithered if `dither`."""
    if dither and jnp.finfo(dtype).bits == 16:
        row_hash, col_hash = (
            hash_of_index(lax.broadcasted_iota(jnp.int32, total.shape, total.ndim - axis))
            for axis in (2, 1)
        )
        total = dithered(total, dtype, row_hash, col_hash)
    return total.astype(dtype)
