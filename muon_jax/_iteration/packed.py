"""Passes over 16-bit arrays, two neighbouring elements packed in a 32-bit word.

XLA's loops on GPUs load and store four elements at once. In 16 bits that is half of what a thread
could load: a copy of 16-bit elements runs at 3.3 TB/s on an H200, a copy of words at 4.3 TB/s.

- Only whole passes gain, from memory to memory: XLA computes nothing in one loop with a view of it
  in another dtype.
- Words have no derivative. So packed passes are for operands and results of kernels, which have
  none either.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def elementwise(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns `function(x)`.

    Args:
        function: of each element; shapes that broadcast along the last axis stay as they are.
        x: shape `(..., n)`.
    """
    if not _fits(x) or jax.eval_shape(function, x).dtype.itemsize != 2:
        return function(x)
    words, result = _words(x), []
    for shift in (0, 16):
        half = jax.lax.bitcast_convert_type((words >> shift).astype(jnp.uint16), x.dtype)
        result.append(function(half))
    low, high = (jax.lax.bitcast_convert_type(y, jnp.uint16).astype(jnp.uint32) for y in result)
    return _elements(low | high << 16, result[0].dtype)


def pad(x: jax.Array, rows: int, cols: int) -> jax.Array:
    """Returns matrices `(..., m, n)` with `rows` more rows of zeros, and an even `cols` columns."""
    if not _fits(x):
        return _pad(x, rows, cols)
    return _elements(_pad(_words(x), rows, cols // 2), x.dtype)


def cut(x: jax.Array, rows: int, cols: int) -> jax.Array:
    """Returns the first rows and columns of matrices `(..., m, n)`."""
    if not _fits(x) or cols % 2:
        return x[..., :rows, :cols]
    return _elements(_words(x)[..., :rows, : cols // 2], x.dtype)


def _fits(x: jax.Array) -> bool:
    """Whether the rows of `x` are whole words."""
    return x.dtype.itemsize == 2 and x.shape[-1] % 2 == 0


def _pad(x: jax.Array, rows: int, cols: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, cols)])


def _words(x: jax.Array) -> jax.Array:
    """Returns the words `(..., n/2)` of 16-bit elements `(..., n)`."""
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), jnp.uint32)


def _elements(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the 16-bit elements `(..., n)` of words `(..., n/2)`."""
    pairs = jax.lax.bitcast_convert_type(words, dtype)
    return pairs.reshape(*words.shape[:-1], 2 * words.shape[-1])
