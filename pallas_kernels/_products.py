"""The public products: they check operands, choose an implementation, and run it."""

import jax
import jax.numpy as jnp

from pallas_kernels._implementation import Implementation
from pallas_kernels._reference import Coefficient
from pallas_kernels.arguments import check_array, check_flag, is_real, shown
from pallas_kernels.device import standard_promotion

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
        a_matrix, None, c_matrix, alpha, beta, diagonal, symmetrize_output, implementation, True
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
    The other implementations are kernels without derivatives, for NVIDIA GPUs since Ampere:
    `"triton"`, and in bfloat16 and float16 `"mosaic_gpu"`, which is another kernel on each
    architecture.

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
        implementation: one of `IMPLEMENTATIONS`, or None for the choice of
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
def gemm(
    a_matrix: jax.Array,
    b_matrix: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """General matrix product: A·B.

    Sums accumulate in float32. The kernels round the sums once, to `out_dtype`. `"xla"` converts
    between formats of 16 bits in a pass of its own. Leading dimensions are a batch, which takes one
    launch, also under `jax.vmap`.

    All implementations but `"xla"` are kernels, as those of `syrkx`. A kernel's result for a matrix
    is the same in any stack, bit for bit. XLA's libraries choose among kernels by the size of the
    stack.

    Args:
        a_matrix: shape `(..., m, k)`.
        b_matrix: shape `(..., k, n)` and dtype of `a_matrix`.
        out_dtype: float dtype of the product, or None for the operands'. The kernels take bfloat16,
            float16 and float32.
        implementation: one of `IMPLEMENTATIONS`, or None for the one expected to be the
            fastest. That is `"triton"` for small products of 16 bits, and `"mosaic_gpu"` for large
            k or where it spares a conversion, in sizes that the measurements cover.

    Returns:
        The product, of shape `(..., m, n)` and dtype `out_dtype`.

    Raises:
        TypeError: an operand is no array.
        ValueError: the operands do not fit together, `out_dtype` is no float dtype, or
            `implementation` is no implementation.
        NotImplementedError: the named implementation cannot run here.

    References:
        `GEMM <https://www.netlib.org/lapack/explore-html/>`_ of the BLAS.
    """
    *batch, _, k = _checked_shape(a_matrix, "(..., m, k)")
    check_array("b_matrix", b_matrix)
    if (b_matrix.shape[:-1], b_matrix.dtype) != ((*batch, k), a_matrix.dtype):
        raise ValueError(
            f"b_matrix must be {a_matrix.dtype}{[*batch, k]} and n columns to fit a_matrix,"
            f" {_type_of(a_matrix)}; got {_type_of(b_matrix)}"
        )
    dtype = _checked_out_dtype(a_matrix.dtype if out_dtype is None else out_dtype)
    chosen = Implementation.chosen(implementation, a_matrix, b_matrix, out_dtype=dtype)
    return chosen.gemm(a_matrix, b_matrix, out_dtype=dtype)


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
    residual: bool = False,
) -> tuple[jax.Array, ...]:
    """The product that `syrkx` documents, with B = A for None, and its residual if wanted."""
    c_matrices, betas = _addends_and_betas(c_matrix, beta)
    check_flag("symmetrize_output", symmetrize_output)
    *batch, m, _ = _checked_shape(a_matrix, "(..., m, n)")
    operands = [("b_matrix", b_matrix, [a_matrix.shape])] if b_matrix is not None else []
    operands += [("c_matrix", c, [(*batch, m, m), (m, m)]) for c in c_matrices]
    for name, operand, shapes in operands:
        check_array(name, operand)
        if operand.shape not in shapes or operand.dtype != a_matrix.dtype:
            raise ValueError(
                f"{name} must be {a_matrix.dtype}{list(shapes[0])} to fit a_matrix,"
                f" {_type_of(a_matrix)}; got {_type_of(operand)}"
            )
    coefficients = [("alpha", alpha), ("diagonal", diagonal), *(("beta", beta) for beta in betas)]
    for name, value in coefficients:
        if not is_real(value):
            raise TypeError(
                f"{name} must be a real number, or an array of one for each matrix, got"
                f" {shown(value)}: pass {name}=1.0, for example"
            )
        if jnp.shape(value) not in ((), tuple(batch)):
            raise ValueError(
                f"{name} must be a scalar or have the batch shape {tuple(batch)} of a_matrix, got"
                f" shape {jnp.shape(value)}"
            )
    return Implementation.chosen(implementation, a_matrix).syrkx(
        a_matrix,
        b_matrix,
        c_matrices,
        alpha=alpha,
        betas=betas,
        diagonal=diagonal,
        symmetrize_output=bool(symmetrize_output),
        residual=residual,
    )


def _type_of(x: jax.Array) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _checked_shape(a_matrix: jax.Array, wanted: str) -> tuple[int, ...]:
    check_array("a_matrix", a_matrix)
    if a_matrix.ndim < 2 or not jnp.issubdtype(a_matrix.dtype, jnp.inexact):
        raise ValueError(
            f"a_matrix must have a float dtype and shape {wanted}, got {_type_of(a_matrix)}"
        )
    return a_matrix.shape


def _checked_out_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or not jnp.issubdtype(known, jnp.inexact):
        raise ValueError(
            f"out_dtype must be a float dtype, got {known or shown(dtype)}: pass None for that of"
            " the operands"
        )
    return known


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
