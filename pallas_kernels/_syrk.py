"""`syrk` and `syrkx`: they check operands and choose an implementation before tracing it."""

import jax
import jax.numpy as jnp

from pallas_kernels._checks import check_array, check_flag, check_name, is_real, shown
from pallas_kernels._promotion import standard_promotion
from pallas_kernels._selection import (
    IMPLEMENTATIONS,
    check_supported,
    select_implementation,
    unsupported_reason,
)

type Coefficient = float | jax.Array
type Addends = jax.Array | tuple[jax.Array, ...]
type Coefficients = Coefficient | tuple[Coefficient, ...]


def syrk(
    a_matrix: jax.Array,
    c_matrix: Addends | None = None,
    *,
    alpha: Coefficient = 1,
    beta: Coefficients = 0,
    diagonal: Coefficient = 0,
    symmetrize_output: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """Symmetric rank-n update: alpha·A·Aᵀ + beta·C + diagonal·I.

    This is `syrkx` with B = A. See `syrkx` for arguments and errors.
    """
    (out,) = _symmetric_product(
        a_matrix, None, c_matrix, alpha, beta, diagonal, symmetrize_output, implementation
    )
    return out


def syrk_with_residual(
    a_matrix: jax.Array,
    c_matrix: Addends | None = None,
    *,
    alpha: Coefficient = 1,
    beta: Coefficients = 0,
    diagonal: Coefficient = 0,
    symmetrize_output: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """P = alpha·A·Aᵀ + beta·C + diagonal·I, rounded, and the residual P - rounded, also rounded.

    Together both results hold P with twice the digits. See `syrkx` for arguments and errors.

    Returns:
        Two symmetric matrices of shape `(..., m, m)` and the operand's dtype.
    """
    high, low = _symmetric_product(
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
    c_matrix: Addends | None = None,
    *,
    alpha: Coefficient = 1,
    beta: Coefficients = 0,
    diagonal: Coefficient = 0,
    symmetrize_output: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """A product known to be symmetric: alpha·A·Bᵀ + beta·C + diagonal·I.

    The caller knows that A·Bᵀ is symmetric, so half of it is computed. The result is full, and
    exactly equal to its transpose. Products accumulate in float32. The sum is rounded once, to the
    operands' dtype. Leading dimensions are a batch, which takes one launch, also under `jax.vmap`.

    `"xla"` also takes float64 and complex operands, and can be differentiated. Those operands
    accumulate in their own precision. For complex operands the product is A·Bᴴ, which is Hermitian.
    Two implementations are kernels without derivatives: `"triton"` (NVIDIA GPUs since Ampere) and
    `"mosaic_gpu"` (Hopper GPUs; bfloat16 and float16).

    Args:
        a_matrix: shape `(..., m, n)`, m, n ≥ 1; bfloat16, float16 or float32.
        b_matrix: shape and dtype of `a_matrix`.
        c_matrix: symmetric, shape `(..., m, m)`, or `(m, m)` for all matrices of the batch, and
            dtype of `a_matrix`. Pass None for no such term, or a short tuple of matrices to add
            beta₁·C₁ + beta₂·C₂ + ….
        alpha, beta, diagonal: real coefficients, which may be traced. Each is a scalar, or has
            shape `(...)` with one value for each matrix. Where `c_matrix` is a tuple, `beta` is a
            tuple of the same length.
        symmetrize_output: pass False to let the two halves differ in rounding, which saves `"xla"`
            a pass.
        implementation: `"xla"`, `"triton"`, `"mosaic_gpu"`, or None for the choice of
            `select_implementation`.

    Returns:
        The product, of shape `(..., m, m)` and the operands' dtype.

    Raises:
        TypeError: an operand is no array, a coefficient no real number, or `symmetrize_output` no
            boolean.
        ValueError: the operands do not fit together, or `implementation` is no implementation.
        NotImplementedError: the named implementation cannot run here; `unsupported_reason` says
            why.

    References:
        `SYRK <https://www.netlib.org/lapack/explore-html/>`_ of the BLAS, and SYRKX of cuBLAS.
    """
    (out,) = _symmetric_product(
        a_matrix, b_matrix, c_matrix, alpha, beta, diagonal, symmetrize_output, implementation
    )
    return out


@standard_promotion()
def _symmetric_product(
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrix: Addends | None,
    alpha: Coefficient,
    beta: Coefficients,
    diagonal: Coefficient,
    symmetrize_output: bool,
    implementation: str | None,
    *,
    residual: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes what `syrkx` documents, with B = A where `b_matrix` is None.

    Returns:
        The product, followed by its residual if `residual`.
    """
    check_name("implementation", implementation, sorted(IMPLEMENTATIONS), or_none=True)
    check_flag("symmetrize_output", symmetrize_output)
    c_matrices, betas = _addends_and_betas(c_matrix, beta)
    _check_syrkx_operands(a_matrix, b_matrix, c_matrices)
    c_matrices = tuple(jnp.expand_dims(c, range(a_matrix.ndim - c.ndim)) for c in c_matrices)
    coefficients = _checked_coefficients(a_matrix, alpha, diagonal, betas)
    if implementation is None:
        implementation, _ = select_implementation(
            a_matrix, addend=bool(c_matrices), symmetrize_output=symmetrize_output
        )
    else:
        check_supported(implementation, unsupported_reason(implementation, a_matrix))
    return IMPLEMENTATIONS[implementation].syrkx(
        a_matrix,
        b_matrix,
        c_matrices,
        coefficients,
        symmetrize_output=symmetrize_output,
        residual=residual,
    )


def _addends_and_betas(
    c_matrix: Addends | None, beta: Coefficients
) -> tuple[tuple[jax.Array, ...], tuple[Coefficient, ...]]:
    """Returns the tuples of all C and all β."""
    if c_matrix is None:
        if not (isinstance(beta, int | float) and beta == 0):
            raise ValueError(
                f"beta={beta} multiplies c_matrix, which is None: pass both or neither"
            )
        return (), ()
    if not isinstance(c_matrix, tuple):
        return (c_matrix,), (beta,)  # pyright: ignore[reportReturnType] (a tuple is taken as an array)
    if not isinstance(beta, tuple) or len(beta) != len(c_matrix):
        raise ValueError(
            f"c_matrix is a tuple of {len(c_matrix)} matrices: beta must be one of as many"
            f" coefficients, got {beta}"
        )
    return c_matrix, beta


def _check_syrkx_operands(
    a_matrix: jax.Array, b_matrix: jax.Array | None, c_matrices: tuple[jax.Array, ...]
) -> None:
    """Raises TypeError or ValueError where shapes or dtypes do not fit together."""
    check_array("a_matrix", a_matrix)
    if a_matrix.ndim < 2 or not jnp.issubdtype(a_matrix.dtype, jnp.inexact):
        raise ValueError(
            "a_matrix must have a float dtype and shape (..., m, n), got"
            f" {a_matrix.dtype}{list(a_matrix.shape)}"
        )
    *batch, m, _ = a_matrix.shape
    expected = [("b_matrix", b_matrix, [a_matrix.shape])] if b_matrix is not None else []
    expected += [("c_matrix", c_matrix, [(*batch, m, m), (m, m)]) for c_matrix in c_matrices]
    for name, operand, shapes in expected:
        check_array(name, operand)
        if operand.shape not in shapes or operand.dtype != a_matrix.dtype:
            raise ValueError(
                f"{name} must be {a_matrix.dtype}{list(shapes[0])} to fit a_matrix,"
                f" {a_matrix.dtype}{list(a_matrix.shape)}; got"
                f" {operand.dtype}{list(operand.shape)}"
            )


def _checked_coefficients(
    a_matrix: jax.Array, alpha: Coefficient, diagonal: Coefficient, betas: tuple[Coefficient, ...]
) -> tuple[jax.Array, ...]:
    """Returns (alpha, diagonal, *betas) in the dtype in which products of A accumulate.

    Raises:
        ValueError: a coefficient is neither a scalar nor of the batch's shape.
    """
    batch = a_matrix.shape[:-2]
    accumulator = jnp.finfo(jnp.promote_types(a_matrix.dtype, jnp.float32)).dtype
    given = (alpha, diagonal, *betas)
    names = ("alpha", "diagonal", *("beta" for _ in betas))
    for name, value in zip(names, given, strict=True):
        if not is_real(value):
            raise TypeError(
                f"{name} must be a real number, or an array of one for each matrix, got"
                f" {shown(value)}: pass {name}=1.0, for example"
            )
    coefficients = tuple(jnp.asarray(x, accumulator) for x in given)
    for name, value in zip(names, coefficients, strict=True):
        if value.shape not in ((), batch):
            raise ValueError(
                f"{name} must be a scalar or have the batch shape {batch} of a_matrix, got shape"
                f" {value.shape}"
            )
    return coefficients
