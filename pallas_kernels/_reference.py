"""The definitions in plain jnp: the specification, and the implementation `"xla"`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

type Coefficient = float | jax.Array


def syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrices: tuple[jax.Array, ...],
    coefficients: tuple[jax.Array, ...],
    *,
    symmetrize_output: bool,
    residual: bool,
) -> tuple[jax.Array, ...]:
    """alpha·A·Bᴴ + Σᵢ betaᵢ·Cᵢ + diagonal·I, its lower triangle mirrored.

    Products accumulate in float32, those of float64 operands in float64. The sum is rounded once.
    Mirroring is a pass of its own. Complex operands give the Hermitian product.

    On CPUs a matrix has the same result in any stack, bit for bit:

    - Nothing is transposed. XLA transposes single matrices only.
    - At most one operand of an addition is a product. Otherwise compilers choose which of two
      products to add without rounding it.
    - The result is computed once, and not again wherever it is added to something.

    Args:
        a_matrix: shape `(..., m, n)`.
        b_matrix: shape `(..., m, n)`, or None for B = A.
        c_matrices: each of shape `(..., m, m)`, or `(1, ..., m, m)` for all matrices.
        coefficients: (alpha, diagonal, *betas), each of shape `(...)` or `()`.
        symmetrize_output: whether to mirror the lower triangle.
        residual: whether to return the residual, too.

    Returns:
        The product, of shape `(..., m, m)`, and with `residual` what its rounding left, rounded.
    """
    alpha, diagonal, *betas = (x[..., None, None] if x.ndim else x for x in coefficients)
    accumulator = jnp.promote_types(a_matrix.dtype, jnp.float32)
    right = (a_matrix if b_matrix is None else b_matrix).conj()
    product = jnp.einsum("...mk,...nk->...mn", a_matrix, right, preferred_element_type=accumulator)
    axes = product.ndim - 2, product.ndim - 1
    row, col = (jax.lax.broadcasted_iota(jnp.int32, product.shape, axis) for axis in axes)
    total = jnp.where(row == col, diagonal, 0)
    for beta, c_matrix in zip(betas, c_matrices, strict=True):
        total += beta * c_matrix
    total += alpha * product
    results = (total.astype(a_matrix.dtype),)
    if residual:
        rounded = jax.lax.optimization_barrier(results[0])  # XLA would subtract the unrounded total
        results = (rounded, (total - rounded).astype(a_matrix.dtype))
    if symmetrize_output:
        results = tuple(jnp.where(row >= col, out, out.conj().mT) for out in results)
    return jax.lax.optimization_barrier(results)


def gemm(a_matrix: jax.Array, b_matrix: jax.Array, *, out_dtype: jnp.dtype) -> jax.Array:
    """A·B in `out_dtype`. Results of more than 16 bits are not rounded before."""
    is_wide = jnp.finfo(out_dtype).bits > 16
    wide = jnp.promote_types(a_matrix.dtype, jnp.float32) if is_wide else None
    return jnp.matmul(a_matrix, b_matrix, preferred_element_type=wide).astype(out_dtype)


class ChainLink(NamedTuple):
    """One product of a chain, Sⱼ = alpha·Sⱼ₋₁² + Σ beta·C + diagonal·I.

    Attributes:
        alpha, diagonal: real coefficients, each a scalar, or one for each matrix.
        addends: pairs of beta and the number of C. Numbers count the inputs, then the results and
            residuals in the order in which they are made.
        residual: whether a later product reads the residual, what the rounding of Sⱼ left.
    """

    alpha: Coefficient
    addends: tuple[tuple[Coefficient, int], ...]
    diagonal: Coefficient
    residual: bool = False
