"""`gemm`: the products of a Newton–Schulz iteration that are not symmetric."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import _device
from pallas_kernels._mosaic_gpu import gemm as _mosaic_gpu_gemm
from pallas_kernels._mosaic_gpu import syrkx as _pallas_mosaic_gpu
from pallas_kernels._syrk import check_supported
from pallas_kernels._triton import gemm as _pallas_triton_gemm
from pallas_kernels._triton import syrkx as _pallas_triton

# Each with what says where the kernel of the symmetric products runs: it runs there, too.
_KERNELS = {
    "triton": (_pallas_triton_gemm.gemm, _pallas_triton.unsupported_reason),
    "mosaic_gpu": (_mosaic_gpu_gemm.gemm, _pallas_mosaic_gpu.unsupported_reason),
}
# The largest k, and batch·m·k·n, with which "triton" is the faster one on an H200: it takes 0.62
# times as long as cuBLAS (64²) to 1.05 (384²·384×1536), with four times as many products to 1.5.
_MOST_K, _MOST_PRODUCTS = 512, 2**28
# Of one B, the smallest k, and the part of all multiprocessors' time that must go into products.
# With these "mosaic_gpu" is 1 to 6% faster than cuBLAS on an H200. With smaller k it is 4% faster
# (24×2048²) to 11% slower (12×768²), with less of the time up to 18% (2×2560²), and single small
# matrices cuBLAS has more ways to divide (1536²: 12.6 µs to 14.3, 512²: 3.3 to 5.2).
_LEAST_K, _LEAST_EFFICIENCY = 3072, 0.9
# Where XLA has a pass to make, for a result in other 16 bits than the operands', the tiles of all
# matrices. With these it is 3 to 47% faster, with fewer up to 14% slower.
_LEAST_TILES_IN_ALL = 64


def gemm(
    a_matrix: jax.Array,
    b_matrix: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """General matrix product: A·B.

    Sums accumulate in float32. The kernels round them once, in whatever dtype, where `"xla"`
    converts between formats of 16 bits in a pass of its own. Leading dimensions are a batch,
    computed in one launch, under `jax.vmap` too.

    `"mosaic_gpu"` (Hopper GPUs; bfloat16 and float16) and `"triton"` (NVIDIA GPUs since Ampere)
    have the same result for a matrix whatever stack it is in, bit for bit. XLA's libraries choose
    among kernels by the size of the stack.

    Args:
        a_matrix: shape `(..., m, k)`.
        b_matrix: shape `(..., k, n)` and dtype of `a_matrix`.
        out_dtype: float dtype of the product, None for the operands'; bfloat16, float16 or float32
            by the kernels.
        implementation: `"xla"`, `"triton"`, `"mosaic_gpu"`, or None for the fastest, in 16 bits:
            `"triton"` where it can run, all sizes are multiples of 8, k is at most 512 and
            batch·m·k·n at most 2²⁸; `"mosaic_gpu"` where it can run, all sizes are multiples of 64,
            and k ≥ 3072 with tiles that divide evenly among the multiprocessors, or, where 16 bits
            become other 16 bits, all results together have 64 tiles of 128×128 or more.

    Returns:
        The product, of shape `(..., m, n)` and `out_dtype`.

    Raises:
        ValueError: the operands do not fit together, `out_dtype` is no float dtype, or
            `implementation` no implementation.
        NotImplementedError: the named implementation cannot run here.

    References:
        `GEMM <https://www.netlib.org/lapack/explore-html/>`_ of the BLAS.
    """
    _check_operands(a_matrix, b_matrix)
    out_dtype = jnp.dtype(a_matrix.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(out_dtype, jnp.inexact):
        raise ValueError(f"out_dtype must be a float dtype, got {out_dtype}")
    if implementation is None:
        implementation = _fastest(a_matrix, b_matrix, out_dtype)
    if implementation == "xla":
        is_wide = jnp.finfo(out_dtype).bits > 16
        wide = jnp.promote_types(a_matrix.dtype, jnp.float32) if is_wide else None
        return jnp.matmul(a_matrix, b_matrix, preferred_element_type=wide).astype(out_dtype)
    if implementation not in _KERNELS:
        raise ValueError(
            f"implementation must be one of {sorted([*_KERNELS, 'xla'])} or None,"
            f" got {implementation!r}"
        )
    check_supported(
        implementation, _unsupported_reason(implementation, a_matrix, b_matrix, out_dtype)
    )
    kernel, _ = _KERNELS[implementation]
    return kernel(a_matrix, b_matrix, out_dtype=out_dtype)


def _unsupported_reason(implementation, a_matrix, b_matrix, out_dtype):
    """Returns why the kernel cannot run, or None."""
    if out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"out_dtype={out_dtype} is none of bfloat16, float16 and float32"
    _, unsupported_reason = _KERNELS[implementation]
    of_a, of_b = map(unsupported_reason, (a_matrix, b_matrix))
    return of_a or of_b


def _fastest(a_matrix, b_matrix, out_dtype):
    """Returns the implementation that None stands for."""

    def runs(implementation):
        return not _unsupported_reason(implementation, a_matrix, b_matrix, out_dtype)

    if runs("triton") and _is_small(a_matrix, b_matrix):
        return "triton"
    if runs("mosaic_gpu") and _is_efficient(a_matrix, b_matrix, out_dtype):
        return "mosaic_gpu"
    return "xla"


def _is_small(a_matrix, b_matrix):
    """Returns whether `"triton"` is faster than XLA."""
    (*_, m, k), n = a_matrix.shape, b_matrix.shape[-1]
    is_aligned = a_matrix.dtype.itemsize == 2 and m % 8 == k % 8 == n % 8 == 0
    return is_aligned and k <= _MOST_K and a_matrix.size * n <= _MOST_PRODUCTS


def _is_efficient(a_matrix, b_matrix, out_dtype):
    """Returns whether `"mosaic_gpu"` is as fast as XLA, and what it has to do beside."""
    (*batch, m, k), n = a_matrix.shape, b_matrix.shape[-1]
    if m % 64 or k % 64 or n % 64:
        return False
    stack = math.prod(batch)
    if out_dtype != a_matrix.dtype and out_dtype.itemsize == 2:
        return stack * -(-m // 128) * -(-n // 128) >= _LEAST_TILES_IN_ALL
    # A result of 32 bits takes longer to store, 4 to 7% longer than cuBLAS takes.
    is_half = out_dtype.itemsize == 2
    efficiency = _mosaic_gpu_gemm.efficiency((stack, m, k), n, _device.num_multiprocessors())
    return is_half and k >= _LEAST_K and efficiency >= _LEAST_EFFICIENCY


def _check_operands(a_matrix, b_matrix):
    if a_matrix.ndim < 2 or not jnp.issubdtype(a_matrix.dtype, jnp.inexact):
        raise ValueError(
            "a_matrix must have a float dtype and shape (..., m, k), got"
            f" {a_matrix.dtype}{list(a_matrix.shape)}"
        )
    *batch, _, k = a_matrix.shape
    if (b_matrix.shape[:-1], b_matrix.dtype) != ((*batch, k), a_matrix.dtype):
        raise ValueError(
            f"b_matrix must be {a_matrix.dtype}{[*batch, k]} and n columns to fit a_matrix,"
            f" {a_matrix.dtype}{list(a_matrix.shape)}; got {b_matrix.dtype}{list(b_matrix.shape)}"
        )
