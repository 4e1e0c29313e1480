"""`syrk` and `syrkx`: checks their operands and chooses an implementation before tracing it."""

import jax
import jax.numpy as jnp

from pallas_kernels._selection import (
    IMPLEMENTATIONS,
    check_supported,
    select_implementation,
    unsupported_reason,
)

type Coefficient = float | jax.Array


def syrk(
    a_matrix: jax.Array,
    c_matrix: jax.Array | tuple[jax.Array, ...] | None = None,
    *,
    alpha: Coefficient = 1,
    beta: Coefficient | tuple[Coefficient, ...] = 0,
    diagonal: Coefficient = 0,
    symmetrize_output: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """Symmetric rank-n update: alpha·A·Aᵀ + beta·C + diagonal·I.

    `syrkx` with B = A: see there for everything but the operand that is missing.
    """
    (out,) = _syrkx(
        a_matrix, None, c_matrix, alpha, beta, diagonal, symmetrize_output, implementation
    )
    return out


def syrk_with_residual(
    a_matrix: jax.Array,
    c_matrix: jax.Array | tuple[jax.Array, ...] | None = None,
    *,
    alpha: Coefficient = 1,
    beta: Coefficient | tuple[Coefficient, ...] = 0,
    diagonal: Coefficient = 0,
    symmetrize_output: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """P = alpha·A·Aᵀ + beta·C + diagonal·I, rounded, and the residual P - rounded, rounded as well.

    Together they hold P with twice the digits. See `syrkx` for arguments and errors.

    Returns:
        Two symmetric matrices of shape `(..., m, m)` in the operand's dtype.
    """
    high, low = _syrkx(
        a_matrix,
        None,
        c_matrix,
        alpha,
        beta,
        diagonal,
        symmetrize_output,
        implementation,
        residual=True,
    )
    return high, low


def syrkx(
    a_matrix: jax.Array,
    b_matrix: jax.Array,
    c_matrix: jax.Array | tuple[jax.Array, ...] | None = None,
    *,
    alpha: Coefficient = 1,
    beta: Coefficient | tuple[Coefficient, ...] = 0,
    diagonal: Coefficient = 0,
    symmetrize_output: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """A product known to be symmetric: alpha·A·Bᵀ + beta·C + diagonal·I.

    The caller knows that A·Bᵀ is symmetric; half of it is computed. The result is full, and exactly
    equal to its transpose. Products accumulate in float32 and the sum is rounded once, to the
    operands' dtype. Leading dimensions are a batch, computed in one launch, under `jax.vmap` too.

    `"xla"` also takes float64 and complex operands (which accumulate in their own precision; A·Bᴴ,
    Hermitian, for complex ones) and can be differentiated. The kernels, `"triton"` (NVIDIA GPUs
    since Ampere) and `"mosaic_gpu"` (Hopper GPUs; bfloat16 and float16), cannot.

    Args:
        a_matrix: shape `(..., m, n)`, m, n ≥ 1; bfloat16, float16 or float32.
        b_matrix: shape and dtype of `a_matrix`.
        c_matrix: symmetric, shape `(..., m, m)` and dtype of `a_matrix`; None for no such term, or
            a short tuple of such matrices, of which the sum beta₁·C₁ + beta₂·C₂ + … is added.
        alpha, beta, diagonal: real coefficients, which may be traced: scalars, or one for each
            matrix, of shape `(...)`. For a tuple of matrices C beta is a tuple as long.
        symmetrize_output: False lets the two halves differ in rounding, which saves `"xla"` a pass.
        implementation: `"xla"`, `"triton"`, `"mosaic_gpu"`, or None for the choice of
            `select_implementation`.

    Returns:
        The product, of shape `(..., m, m)` and the operands' dtype.

    Raises:
        ValueError: the operands do not fit together, or `implementation` is no implementation.
        NotImplementedError: the named implementation cannot run here; `unsupported_reason` says
            why.

    References:
        `SYRK <https://www.netlib.org/lapack/explore-html/>`_ of the BLAS, and SYRKX of cuBLAS.
    """
    (out,) = _syrkx(
        a_matrix, b_matrix, c_matrix, alpha, beta, diagonal, symmetrize_output, implementation
    )
    return out


def _syrkx(
    a_matrix,
    b_matrix,
    c_matrix,
    alpha,
    beta,
    diagonal,
    symmetrize_output,
    implementation,
    *,
    residual=False,
):
    c_matrices, betas = _addends(c_matrix, beta)
    _check_operands(a_matrix, b_matrix, c_matrices)
    batch = a_matrix.shape[:-2]
    accumulator = jnp.finfo(jnp.promote_types(a_matrix.dtype, jnp.float32)).dtype
    coefficients = tuple(jnp.asarray(x, accumulator) for x in (alpha, diagonal, *betas))
    names = ("alpha", "diagonal", *("beta" for _ in betas))
    for name, value in zip(names, coefficients, strict=True):
        if value.shape not in ((), batch):
            raise ValueError(
                f"{name} must be a scalar or have the batch shape {batch} of a_matrix, got shape"
                f" {value.shape}"
            )
    if implementation is None:
        implementation, _ = select_implementation(
            a_matrix, addend=bool(c_matrices), symmetrize_output=symmetrize_output
        )
    check_supported(implementation, unsupported_reason(implementation, a_matrix))
    return IMPLEMENTATIONS[implementation].syrkx(
        a_matrix,
        b_matrix,
        c_matrices,
        coefficients,
        symmetrize_output=symmetrize_output,
        residual=residual,
    )


def _addends(c_matrix, beta):
    """Returns the tuples of all C and all β."""
    if c_matrix is None:
        if not (isinstance(beta, int | float) and beta == 0):
            raise ValueError(
                f"beta={beta} multiplies c_matrix, which is None: pass both or neither"
            )
        return (), ()
    if not isinstance(c_matrix, tuple):
        return (c_matrix,), (beta,)
    if not isinstance(beta, tuple) or len(beta) != len(c_matrix):
        raise ValueError(
            f"c_matrix is a tuple of {len(c_matrix)} matrices: beta must be one of as many"
            f" coefficients, got {beta}"
        )
    return c_matrix, beta


def _check_operands(a_matrix, b_matrix, c_matrices):
    if a_matrix.ndim < 2 or not jnp.issubdtype(a_matrix.dtype, jnp.inexact):
        raise ValueError(
            "a_matrix must have a float dtype and shape (..., m, n), got"
            f" {a_matrix.dtype}{list(a_matrix.shape)}"
        )
    *batch, m, _ = a_matrix.shape
    expected = [("b_matrix", b_matrix, a_matrix.shape)] if b_matrix is not None else []
    expected += [("c_matrix", c_matrix, (*batch, m, m)) for c_matrix in c_matrices]
    for name, operand, shape in expected:
        if (operand.shape, operand.dtype) != (shape, a_matrix.dtype):
            raise ValueError(
                f"{name} must be {a_matrix.dtype}{list(shape)} to fit a_matrix,"
                f" {a_matrix.dtype}{list(a_matrix.shape)}; got"
                f" {operand.dtype}{list(operand.shape)}"
            )
