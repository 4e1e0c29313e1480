"""The definition in plain jnp: the specification, and the implementation `"xla"`."""

import jax
import jax.numpy as jnp


def syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrix: jax.Array | None,
    alpha: jax.Array,
    beta: jax.Array,
    diagonal: jax.Array,
) -> jax.Array:
    """The lower triangle of alpha·A·Bᴴ + beta·C + diagonal·I, mirrored; B is A where None.

    Operands are `(..., m, n)`, C is `(..., m, m)`, coefficients are `(...)` or `()`. Products
    accumulate in float32 (float64 operands in float64) and the sum is rounded once. Complex
    operands give the Hermitian product.
    """
    accumulator = jnp.promote_types(a_matrix.dtype, jnp.float32)
    b_matrix = a_matrix if b_matrix is None else b_matrix
    product = jnp.matmul(a_matrix, b_matrix.conj().mT, preferred_element_type=accumulator)
    total = _expand(alpha) * product
    if c_matrix is not None:
        total += _expand(beta) * c_matrix
    row = jax.lax.broadcasted_iota(jnp.int32, total.shape[-2:], 0)
    col = jax.lax.broadcasted_iota(jnp.int32, total.shape[-2:], 1)
    total += jnp.where(row == col, _expand(diagonal), 0)
    lower = total.astype(a_matrix.dtype)
    return jnp.where(row >= col, lower, lower.conj().mT)


def _expand(coefficient: jax.Array) -> jax.Array:
    return coefficient[..., None, None]
