"""`gemm`: the products of a Newton–Schulz iteration that are not symmetric."""

import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp

from pallas_kernels import _device
from pallas_kernels._checks import check_array, check_name, shown
from pallas_kernels._mosaic_gpu.gemm import gemm as mosaic_gpu_gemm
from pallas_kernels._mosaic_gpu.gemm import predict_gemm_efficiency
from pallas_kernels._promotion import standard_promotion
from pallas_kernels._selection import (
    Operand,
    as_one_stack,
    check_supported,
    described,
    unsupported_reason,
)
from pallas_kernels._triton.gemm import gemm as triton_gemm

# Each runs where the kernel of the symmetric products runs.
_KERNELS = {"triton": triton_gemm, "mosaic_gpu": mosaic_gpu_gemm}
# "triton" is chosen up to this k and this batch·m·k·n. Its time over that of cuBLAS on an H200:
# 0.62 for 64², 1.05 for 384²·384×1536, up to 1.5 with four times as many products.
_MOST_K, _MOST_PRODUCTS = 512, 2**28
# "mosaic_gpu" is chosen from this k on, if at least this part of all multiprocessors' time goes
# into products. Its time compared with that of cuBLAS on an H200:
#
#     within both limits                       1 to 6% less
#     smaller k                                4% less (24×2048²) to 11% more (12×768²)
#     less of the time goes into products      up to 18% more (2×2560²)
#     single small matrices, which cuBLAS      14.3 µs and 12.6 (1536²),
#     has more ways to divide                  5.2 µs and 3.3 (512²)
_LEAST_K, _LEAST_EFFICIENCY = 3072, 0.9
# XLA rounds to other 16 bits than the operands' in a pass of its own. There "mosaic_gpu" is chosen
# if the results of all matrices have this many tiles: 3 to 47% faster, and with fewer tiles up to
# 14% slower.
_LEAST_TILES_IN_ALL = 64


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

    Two implementations are kernels: `"mosaic_gpu"` (Hopper GPUs; bfloat16 and float16) and
    `"triton"` (NVIDIA GPUs since Ampere). A kernel's result for a matrix is the same in any stack,
    bit for bit. XLA's libraries choose among kernels by the size of the stack.

    Pass None as `implementation` for the one expected to be the fastest:

    - `"triton"` for 16-bit operands where it can run, all sizes are multiples of 8, k is at most
      512 and batch·m·k·n at most 2²⁸;
    - else `"mosaic_gpu"` where it can run, the result has 16 bits, all sizes are multiples of 64,
      and one of two holds. With `out_dtype` as the operands': k ≥ 3072, and the tiles divide evenly
      among the multiprocessors. With another: all results together have at least 64 tiles of
      128×128;
    - else `"xla"`.

    Args:
        a_matrix: shape `(..., m, k)`.
        b_matrix: shape `(..., k, n)` and dtype of `a_matrix`.
        out_dtype: float dtype of the product, or None for the operands'. The kernels take bfloat16,
            float16 and float32.
        implementation: `"xla"`, `"triton"`, `"mosaic_gpu"` or None.

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
    check_name("implementation", implementation, sorted([*_KERNELS, "xla"]), or_none=True)
    _check_gemm_operands(a_matrix, b_matrix)
    out_dtype = _checked_out_dtype(a_matrix.dtype if out_dtype is None else out_dtype)
    if implementation is None:
        device = _device.cache_key()
        implementation = _fastest_gemm(described(a_matrix), described(b_matrix), out_dtype, device)
    if implementation == "xla":
        return _xla_gemm(a_matrix, b_matrix, out_dtype)
    reason = _gemm_unsupported_reason(implementation, a_matrix, b_matrix, out_dtype)
    check_supported(implementation, reason)
    return _KERNELS[implementation](a_matrix, b_matrix, out_dtype=out_dtype)


def _check_gemm_operands(a_matrix: jax.Array, b_matrix: jax.Array) -> None:
    """Raises TypeError or ValueError where A and B have no product."""
    check_array("a_matrix", a_matrix)
    check_array("b_matrix", b_matrix)
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


def _xla_gemm(a_matrix: jax.Array, b_matrix: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """Computes the product in plain jnp."""
    is_wide = jnp.finfo(out_dtype).bits > 16
    wide = jnp.promote_types(a_matrix.dtype, jnp.float32) if is_wide else None
    return jnp.matmul(a_matrix, b_matrix, preferred_element_type=wide).astype(out_dtype)


@functools.lru_cache(1024)
def _fastest_gemm(
    a_matrix: jax.ShapeDtypeStruct,
    b_matrix: jax.ShapeDtypeStruct,
    out_dtype: jnp.dtype,
    device: Hashable,
) -> str:
    """Returns the implementation that None stands for."""
    del device  # a part of the key

    def runs(implementation: str) -> bool:
        return not _gemm_unsupported_reason(implementation, a_matrix, b_matrix, out_dtype)

    if runs("triton") and _triton_gemm_beats_xla(a_matrix, b_matrix):
        return "triton"
    if runs("mosaic_gpu") and _mosaic_gemm_beats_xla(a_matrix, b_matrix, out_dtype):
        return "mosaic_gpu"
    return "xla"


def _gemm_unsupported_reason(
    implementation: str, a_matrix: Operand, b_matrix: Operand, out_dtype: jnp.dtype
) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"out_dtype={out_dtype} is none of bfloat16, float16 and float32"
    of_a, of_b = (unsupported_reason(implementation, x) for x in (a_matrix, b_matrix))
    return of_a or of_b


def _triton_gemm_beats_xla(a_matrix: jax.ShapeDtypeStruct, b_matrix: jax.ShapeDtypeStruct) -> bool:
    """Returns whether `"triton"` is expected to be faster than XLA: the product is small."""
    (*_, m, k), n = a_matrix.shape, b_matrix.shape[-1]
    is_aligned = a_matrix.dtype.itemsize == 2 and m % 8 == k % 8 == n % 8 == 0
    return is_aligned and k <= _MOST_K and a_matrix.size * n <= _MOST_PRODUCTS


def _mosaic_gemm_beats_xla(
    a_matrix: jax.ShapeDtypeStruct, b_matrix: jax.ShapeDtypeStruct, out_dtype: jnp.dtype
) -> bool:
    """Returns whether `"mosaic_gpu"` is expected to beat XLA's product and its conversion."""
    (stack, m, k), n = as_one_stack(a_matrix.shape), b_matrix.shape[-1]
    if m % 64 or k % 64 or n % 64:
        return False
    if out_dtype != a_matrix.dtype and out_dtype.itemsize == 2:
        return stack * -(-m // 128) * -(-n // 128) >= _LEAST_TILES_IN_ALL
    # A result of 32 bits takes longer to store: the whole takes 4 to 7% longer than cuBLAS.
    is_half = out_dtype.itemsize == 2
    efficiency = predict_gemm_efficiency((stack, m, k), n, _device.num_multiprocessors())
    return is_half and k >= _LEAST_K and efficiency >= _LEAST_EFFICIENCY
