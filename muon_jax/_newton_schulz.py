"""The Newton–Schulz iteration, written once over `syrk` and a plain matrix product."""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from muon_jax import _coefficients
from pallas_kernels import select_implementation, syrk

type Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]


def check_preconditioning(preconditioning: str) -> None:
    """Raises ValueError unless `preconditioning` is one of `Preconditioning`."""
    names = get_args(Preconditioning.__value__)
    if preconditioning not in names:
        raise ValueError(f"preconditioning must be one of {names}, got {preconditioning!r}")


@functools.partial(
    jax.jit,
    static_argnames=("ns_coeffs", "ns_steps", "dtype", "preconditioning", "implementation"),
)
def newton_schulz(
    x: jax.Array,
    ns_coeffs: _coefficients.NSCoeffs = "standard",
    ns_steps: int | jax.Array = 5,
    eps: float | jax.Array = 0.0,
    *,
    dtype: jax.typing.DTypeLike | None = jnp.bfloat16,
    preconditioning: Preconditioning = "frobenius",
    implementation: str | None = None,
) -> jax.Array:
    """Approximates the polar factor UVᵀ of each matrix X = UΣVᵀ.

    X is divided by its norm, then each step computes, with coefficients (a, b, c) of its own,

        A = XXᵀ,   B = aI + bA + cA²,   X <- BX,

    which maps every singular value by σ <- aσ + bσ³ + cσ⁵ towards 1. That is three products a step:
    `syrk`, `syrk` with everything else in its epilogue, and one matrix product. The norm is read
    off the first A, ‖X‖² = trace(XXᵀ), and divided out through the first step's coefficients.

    The result does not depend on the scale of X, as long as its entries are normal numbers: X is
    first multiplied by a power of two, exactly, so that no product overflows. Zero gives zero. A
    matrix with a NaN or an infinity gives NaN throughout.

    Args:
        x: matrices of shape `(..., m, n)` and any float dtype. Where m > n the iteration runs on
            Xᵀ, whose XXᵀ is the smaller; shapes alone decide that.
        ns_coeffs: one triple for every step, a table of one triple for each step, or a name:
            `"standard"` (Keller Jordan's triple) or `"dion"` (a table of five). Tuples, not lists.
        ns_steps: number of steps. A table runs its rows whatever this says; fewer steps than a
            named table has run its last ones.
        eps: added to the norm of X: 0 keeps the result independent of scale, more shrinks the
            result for ‖X‖ of that order. Under `"schatten"` and `"aol"` the least value of the
            squared norms instead, as in optax.
        dtype: dtype of the products; None for that of `x`. Products accumulate in float32. There is
            no complex number of half precision: complex matrices use complex64 at least.
        preconditioning: what X is divided by: `"frobenius"`, its Frobenius norm; `"spectral"`, its
            largest singular value (by an SVD, slow); `"schatten"`, its Schatten-4 norm ‖A‖_F^½;
            `"aol"`, row by row the square roots of the row sums of |A|, which changes the polar
            factor slightly.
        implementation: `"xla"`, `"triton"`, `"mosaic_gpu"` or None, as for `pallas_kernels.syrk`.

    Returns:
        The approximate polar factors, in the shape and dtype of `x`.

    Raises:
        ValueError: `x` is no float matrix, or an argument is none of the values above.
        NotImplementedError: the named implementation cannot run here.

    References:
        Jordan et al., `Muon: an optimizer for hidden layers in neural networks
        <https://kellerjordan.github.io/posts/muon/>`_, 2024. Boissin et al., `Turbo-Muon
        <https://arxiv.org/abs/2512.04632>`_, 2025 (`"aol"`). Grishina et al., `Accelerating
        Newton-Schulz Iteration for Orthogonalization via Chebyshev-type Polynomials
        <https://arxiv.org/abs/2506.10935>`_, 2025 (`"schatten"`).
    """
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.inexact):
        raise ValueError(
            f"x must have a float dtype and shape (..., m, n), got {x.dtype}{list(x.shape)}"
        )
    check_preconditioning(preconditioning)
    rows, first, last = _coefficients.resolve(ns_coeffs, ns_steps)

    def triple(step):
        if len(rows) == 1:
            return rows[0]
        return (jnp.asarray(rows) if _coefficients.is_traced(step) else rows)[step]

    in_dtype, (*batch, m, n) = x.dtype, x.shape
    transposed = m > n
    dtype = jnp.dtype(in_dtype if dtype is None else dtype)
    if jnp.iscomplexobj(x):
        dtype = jnp.promote_types(dtype, jnp.complex64)

    product = functools.partial(syrk, symmetrize_output=False, implementation=implementation)
    x, scale = _scaled_by_power_of_two(x.mT if transposed else x, dtype)
    x = _padded(x, implementation)
    gram = product(x)
    if preconditioning == "aol":
        x, gram = _balance_rows(x, gram, (eps * scale) * scale)
        inverse_norm = jnp.ones(batch)
    else:
        inverse_norm = _inverse_norm(x, gram, eps, scale, preconditioning)
    x = _apply(product, x, gram, triple(first), inverse_norm)

    def body(step, x):
        return _apply(product, x, product(x), triple(step), 1.0)

    if _coefficients.is_traced((first, last)):
        x = jax.lax.fori_loop(first + 1, last, body, x)
    else:
        for step in range(int(first) + 1, int(last)):
            x = body(step, x)
    return (x.mT if transposed else x)[..., :m, :n].astype(in_dtype)


def _apply(product, x, gram, triple, s):
    """(a·s·I + b·s³·A + c·s⁵·A²)·X: one step on s·X, without forming it."""
    a, b, c = triple
    return product(gram, gram, alpha=c * s**5, beta=b * s**3, diagonal=a * s) @ x


def _scaled_by_power_of_two(x, dtype):
    """Returns x·s in `dtype` and s = 2ᵏ, of the batch's shape, such that |XXᵀ| ≤ 1 elementwise.

    The entries of `(m, n)` matrices come out below 1/√n, so that no sum of n products of two
    exceeds 1. Not finite where x is not.
    """
    largest = jnp.max(jnp.abs(x), axis=(-2, -1)).astype(_accumulator(x))
    _, exponent = jnp.frexp(largest)
    exponent += ((x.shape[-1] - 1).bit_length() + 1) // 2
    scale = jnp.ldexp(jnp.ones_like(largest), -jnp.clip(exponent, -126, 126))
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    return (x * scale[..., None, None]).astype(dtype), scale


def _padded(x, implementation):
    """Adds rows and columns of zeros, which no step changes, in the pass that scales x.

    Sizes become multiples of 64 for the kernel that needs those, of 8 for others: matrix units load
    16 bytes at a time.
    """

    def sizes(multiple):
        return tuple(size + -size % multiple for size in x.shape[-2:])

    operand = jax.ShapeDtypeStruct((*x.shape[:-2], *sizes(64)), x.dtype)
    chosen = implementation or select_implementation(operand).implementation
    m, n = sizes(64 if chosen == "mosaic_gpu" else 8)
    rows, cols = (0, m - x.shape[-2]), (0, n - x.shape[-1])
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [rows, cols])


def _accumulator(x):
    """The dtype of sums of absolute values of `x`: real, float32 or wider."""
    return jnp.finfo(jnp.promote_types(x.dtype, jnp.float32)).dtype


def _inverse_norm(x, gram, eps, scale, preconditioning):
    """1/(norm of X, with eps in it), and 0 for the zero matrix."""
    accumulator = _accumulator(gram)
    if preconditioning == "frobenius":
        *batch, m, _ = gram.shape
        diagonal = gram.reshape(*batch, m * m)[..., :: m + 1]  # jnp.diagonal is a kernel of its own
        norm = jnp.sqrt(jnp.sum(diagonal.real.astype(accumulator), axis=-1))
        regularized = norm + eps * scale
    elif preconditioning == "schatten":
        norm = jnp.sqrt(jnp.sum(jnp.abs(gram).astype(accumulator) ** 2, axis=(-2, -1)))
        regularized = jnp.sqrt(jnp.maximum(norm, (eps * scale) * scale))
    else:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        norm = jnp.linalg.norm(wide, ord=2, axis=(-2, -1))
        regularized = norm + eps * scale
    return jnp.where(norm == 0, 0, 1 / regularized)


def _balance_rows(x, gram, least):
    """DX and DAD for the diagonal D with D⁻² = max(Σⱼ|Aᵢⱼ|, least): the AOL preconditioner."""
    sums = jnp.sum(jnp.abs(gram).astype(_accumulator(gram)), axis=-1, keepdims=True)
    d = jnp.where(sums == 0, 0, jax.lax.rsqrt(jnp.maximum(sums, least[..., None, None])))
    return (x * d).astype(x.dtype), (gram * d * d.mT).astype(gram.dtype)
