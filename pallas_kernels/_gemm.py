"""`gemm`: the products of a Newton–Schulz iteration that are not symmetric."""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic_gpu_gemm, _pallas_mosaic_gpu

# Of one B, the smallest k, and how many tiles of 128×128 a matrix must have. With these the kernel
# is as fast as cuBLAS on an H200, up to 6% faster or 4% slower; with smaller k stacks are 4% faster
# to 11% slower (12×768²), and single small matrices cuBLAS has more ways to divide (1536²: 11.7 µs
# to 14.4, 512²: 3.2 to 5.1).
_LEAST_K, _LEAST_TILES = 2048, 256
# Of several, the tiles of all matrices. With these it is 2 to 55% faster, with fewer up to 14%
# slower.
_LEAST_TILES_OF_SUM = 64


def gemm(
    a_matrix: jax.Array,
    b_matrix: jax.Array | tuple[jax.Array, ...],
    *,
    implementation: str | None = None,
) -> jax.Array:
    """General matrix product: A·B, or A·(B₁ + B₂ + …).

    Sums accumulate in float32; of several B too they are rounded once by `"mosaic_gpu"`, where
    `"xla"` adds the products of 16-bit operands as it adds matrices of those. Leading dimensions
    are a batch, computed in one launch, under `jax.vmap` too.

    `"mosaic_gpu"` (Hopper GPUs; bfloat16 and float16) has the same result for a matrix whatever
    stack it is in, bit for bit. XLA's libraries choose among kernels by the size of the stack.

    Args:
        a_matrix: shape `(..., m, k)`.
        b_matrix: shape `(..., k, n)` and dtype of `a_matrix`, or a tuple of such matrices.
        implementation: `"xla"`, `"mosaic_gpu"`, or None: the latter where it can run, all sizes are
            multiples of 64, and matrices are large enough for it to be as fast: k ≥ 2048 and 256
            tiles of 128×128 or more in each, or of several B 64 tiles in all.

    Returns:
        The product, of shape `(..., m, n)` and the operands' dtype.

    Raises:
        ValueError: the operands do not fit together, or `implementation` is no implementation.
        NotImplementedError: `"mosaic_gpu"` cannot run here.

    References:
        `GEMM <https://www.netlib.org/lapack/explore-html/>`_ of the BLAS.
    """
    b_matrices = b_matrix if isinstance(b_matrix, tuple) else (b_matrix,)
    _check_operands(a_matrix, b_matrices)
    reason = _unsupported_reason(a_matrix, b_matrices[0])
    if implementation is None:
        (*batch, m, k), n = a_matrix.shape, b_matrices[0].shape[-1]
        is_aligned = m % 64 == k % 64 == n % 64 == 0
        tiles = -(-m // 128) * -(-n // 128)
        if len(b_matrices) == 1:
            is_large = k >= _LEAST_K and tiles >= _LEAST_TILES
        else:
            is_large = math.prod(batch) * tiles >= _LEAST_TILES_OF_SUM
        implementation = "mosaic_gpu" if is_aligned and is_large and not reason else "xla"
    if implementation == "xla":
        # The largest of several first: XLA has cuBLAS add the other to it, before it is rounded.
        return functools.reduce(jnp.add, [a_matrix @ b for b in b_matrices])
    if implementation != "mosaic_gpu":
        raise ValueError(
            f"implementation must be 'mosaic_gpu', 'xla' or None, got {implementation!r}"
        )
    if reason:
        raise NotImplementedError(
            f"implementation='mosaic_gpu' cannot run: {reason}. Pass implementation=None to have"
            " one chosen that can."
        )
    return _mosaic_gpu_gemm.gemm(a_matrix, b_matrices)


def _unsupported_reason(a_matrix, b_matrix):
    """Returns why `"mosaic_gpu"` cannot run, or None."""
    of_a, of_b = map(_pallas_mosaic_gpu.unsupported_reason, (a_matrix, b_matrix))
    return of_a or of_b


def _check_operands(a_matrix, b_matrices):
    if a_matrix.ndim < 2 or not jnp.issubdtype(a_matrix.dtype, jnp.inexact):
        raise ValueError(
            "a_matrix must have a float dtype and shape (..., m, k), got"
            f" {a_matrix.dtype}{list(a_matrix.shape)}"
        )
    *batch, _, k = a_matrix.shape
    for b in b_matrices:
        n = b_matrices[0].shape[-1] if b_matrices[0].ndim else 0
        if (b.shape, b.dtype) != ((*batch, k, n), a_matrix.dtype):
            raise ValueError(
                f"b_matrix must be {a_matrix.dtype}{[*batch, k]} and n columns to fit a_matrix,"
                f" {a_matrix.dtype}{list(a_matrix.shape)}; got {b.dtype}{list(b.shape)}"
            )
