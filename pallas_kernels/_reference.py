"""The definition in plain jnp: the specification, and the implementation `"xla"`."""

import jax
import jax.numpy as jnp


def unsupported_reason(a_matrix: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Returns None: it takes all operands that `syrkx` does, everywhere."""


def syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrix: jax.Array | None,
    alpha: jax.Array,
    beta: jax.Array,
    diagonal: jax.Array,
    symmetrize_output: bool,
) -> jax.Array:
    """alpha·A·Bᴴ + beta·C + diagonal·I, its lower triangle mirrored; B is A where None.

    Operands are `(..., m, n)`, C is `(..., m, m)`, coefficients are `(...)` or `()`. Products
    accumulate in float32 (float64 operands in float64) and the sum is rounded once. Complex
    operands give the Hermitian product. Mirroring is a pass of its own.
    """
    accumulator = jnp.promote_types(a_matrix.dtype, jnp.float32)
    right = (a_matrix if b_matrix is None else b_matrix).conj().mT
    total = _expand(alpha) * jnp.matmul(a_matrix, right, preferred_element_type=accumulator)
    if c_matrix is not None:
        total += _expand(beta) * c_matrix
    row, col = (jax.lax.broadcasted_iota(jnp.int32, total.shape[-2:], axis) for axis in (0, 1))
    total += jnp.where(row == col, _expand(diagonal), 0)
    out = total.astype(a_matrix.dtype)
    return jnp.where(row >= col, out, out.conj().mT) if symmetrize_output else out


def _expand(coefficient: jax.Array) -> jax.Array:
    return coefficient[..., None, None]
