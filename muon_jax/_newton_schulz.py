"""The Newton–Schulz iteration, written once over `syrk` and a plain matrix product."""

import contextlib
import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from muon_jax import _coefficients, _composed, _gram
from muon_jax._cost import Products
from muon_jax._normalization import (
    gram_gain,
    inverse_norm,
    inverse_row_norms,
    scaled_by_power_of_two,
)
from muon_jax._schedules import Schedule
from pallas_kernels import _device, select_implementation, syrk, syrkx

type Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]
type Method = Literal["standard", "gram"]
type ProductsDType = jax.typing.DTypeLike | Literal["auto"] | None


def check_preconditioning(preconditioning: str) -> None:
    """Raises ValueError unless `preconditioning` is one of `Preconditioning`."""
    names = get_args(Preconditioning.__value__)
    if preconditioning not in names:
        raise ValueError(f"preconditioning must be one of {names}, got {preconditioning!r}")


@functools.partial(
    jax.jit,
    static_argnames=(
        "ns_coeffs",
        "ns_steps",
        "dtype",
        "preconditioning",
        "method",
        "implementation",
    ),
)
def newton_schulz(
    x: jax.Array,
    ns_coeffs: _coefficients.NSCoeffs = "standard",
    ns_steps: int | jax.Array = 5,
    eps: float | jax.Array = 0.0,
    *,
    dtype: ProductsDType = "auto",
    preconditioning: Preconditioning = "frobenius",
    method: Method | None = "standard",
    implementation: str | None = None,
) -> jax.Array:
    """Approximates the polar factor UVᵀ of each matrix X = UΣVᵀ.

    X is divided by its norm, then each step computes, with coefficients (a, b, c) of its own,

        A = XXᵀ,   B = aI + bA + cA²,   X <- BX,

    which maps every singular value by σ <- aσ + bσ³ + cσ⁵ towards 1. That is three products a step:
    `syrk`, `syrk` with everything else in its epilogue, and one matrix product. The norm is read
    off the first A, ‖X‖² = trace(XXᵀ), and divided out through the first step's coefficients.

    A composed schedule has two or three steps X <- h(A)·X with h of degree 4, 8 or 16, each h made
    by squaring: fewer products, most of all on wide matrices. On m×m, in products of which `syrk`
    does half the work, five triples cost 20, and

        ns_coeffs      cost  dtype     maps σ from l to   polar error on σ > σ₁/100 (Gaussian m×m)
        "fast"         12    float16   [0.60, 1.22]       0.11
        "balanced"     14    float16   [0.83, 1.21]       0.08
        "accurate"     17    bfloat16  [0.78, 1.16]       0.05
        "standard"     20    bfloat16  [0.68, 1.20]       0.18

    with l = 0.004, 0.002 and 0.001 of the Schatten-4 norm, and 0.002 of the Frobenius norm. On
    σ < σ₁/100 `"fast"` is less accurate than `"standard"`, `"balanced"` about as accurate or more,
    `"accurate"` more.

    The result does not depend on the scale of X, as long as its entries are normal numbers: X is
    first multiplied by a power of two, exactly, so that no product overflows. Zero gives zero. A
    matrix with a NaN or an infinity gives NaN throughout.

    Args:
        x: matrices of shape `(..., m, n)` and any float dtype. Where m > n the iteration runs on
            Xᵀ, whose XXᵀ is the smaller; shapes alone decide that.
        ns_coeffs: one triple for every step, a table of one triple for each step, or a name. Of one
            triple: `"standard"` (Keller Jordan's), `"standard_1.02"`. Of a published table:
            `"dion"`, `"polar_express"`, `"polar_express_nanogpt"`, `"polar_express_nvidia"`,
            `"cans"`, `"deepseek_v4"`, `"cubic"`; `"aol"` and `"aol_nvidia"` for that
            preconditioning. Of a composed schedule: `"fast"`, `"balanced"`, `"accurate"`. Tuples,
            not lists.
        ns_steps: number of steps of one triple. A named table runs its last `ns_steps` rows, and
            all of them, be they 4 or 10, where this is 5, the default. A table of the caller's own
            runs its rows whatever this says. A composed schedule runs whole: 5 or its own number.
        eps: added to the norm of X: 0 keeps the result independent of scale, more shrinks the
            result for ‖X‖ of that order. Under `"schatten"` and `"aol"` the least value of the
            squared norms instead, as in optax.
        dtype: dtype of the products, which accumulate in float32. `"auto"` is bfloat16, for a
            composed schedule that of the table above, for the gram form float16; on TPUs, which
            multiply no float16, bfloat16 in its place. None is that of `x`. Composed schedules
            have coefficients of their own for bfloat16. There is no complex number of half
            precision: complex matrices use complex64 at least.
        preconditioning: what X is divided by: `"frobenius"`, its Frobenius norm; `"spectral"`, its
            largest singular value (by an SVD, slow); `"schatten"`, its Schatten-4 norm ‖A‖_F^½;
            `"aol"`, row by row the square roots of the row sums of |A|, which changes the polar
            factor slightly. Composed schedules always divide by the Schatten-4 norm, and take the
            default alone.
        method: `"standard"`, where every step multiplies with X; `"gram"`, the same polynomial with
            fewer such products, most of them on XXᵀ alone (`muon_jax._gram` for triples,
            `muon_jax._composed` for composed schedules), in float16 unless `dtype` says otherwise;
            or None for the faster one by a model of their times. For n = m, 2m, 4m, 8m five steps
            of triples cost 20, 35, 65, 125 units in the standard form and 20, 26, 38, 62 in the
            other, `"balanced"` 14, 20, 32, 56 and 18, 21, 27, 39.
        implementation: `"xla"`, `"triton"`, `"mosaic_gpu"` or None, as for `pallas_kernels.syrk`.

    Returns:
        The approximate polar factors, in the shape and dtype of `x`.

    Raises:
        ValueError: `x` is no float matrix, an argument is none of the values above, or `dtype` is
            one of 8 bits, in which composed schedules are unsafe. Or the gram form does not exist
            for the other arguments, or is unsafe: in bfloat16 composed schedules and `"aol"`.
        NotImplementedError: the named implementation cannot run here.

    References:
        Jordan et al., `Muon: an optimizer for hidden layers in neural networks
        <https://kellerjordan.github.io/posts/muon/>`_, 2024. Boissin et al., `Turbo-Muon
        <https://arxiv.org/abs/2512.04632>`_, 2025 (`"aol"`). Grishina et al., `Accelerating
        Newton-Schulz Iteration for Orthogonalization via Chebyshev-type Polynomials
        <https://arxiv.org/abs/2506.10935>`_, 2025 (`"schatten"`, `"cans"`). Amsel et al., `The
        Polar Express <https://arxiv.org/abs/2505.16932>`_, 2025 (composition, `"polar_express"`).
    """
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.inexact):
        raise ValueError(
            f"x must have a float dtype and shape (..., m, n), got {x.dtype}{list(x.shape)}"
        )
    check_preconditioning(preconditioning)
    recipe = _coefficients.resolve(ns_coeffs, ns_steps, preconditioning)
    in_dtype, (*_, m, n) = x.dtype, x.shape
    transposed = m > n
    x = x.mT if transposed else x
    form, products_dtype = _resolve(method, recipe, preconditioning, dtype, in_dtype, x.shape)
    log2_n = (x.shape[-1] - 1).bit_length()
    root = 4 if isinstance(recipe, Schedule) or form == "gram" else 2
    x, scale = scaled_by_power_of_two(x, products_dtype, -(-log2_n // root))
    x = _padded(x, implementation)
    with _precision_of(products_dtype):
        if isinstance(recipe, Schedule):
            segments = _composed.segments(recipe, form, products_dtype)
            x = _composed.run(x, segments, eps, scale, log2_n, implementation)
        elif form == "gram":
            x = _run_gram(implementation, x, recipe, eps, scale, preconditioning, log2_n)
        else:
            x = _run_quintics(implementation, x, recipe, eps, scale, preconditioning)
    return (x.mT if transposed else x)[..., :m, :n].astype(in_dtype)


def products_of(
    shape, in_dtype, *, ns_coeffs, ns_steps, dtype, preconditioning, method
) -> tuple[jax.typing.DTypeLike, Products]:
    """Returns the dtype and the products of `newton_schulz` on x of shape `(…, m, n)`, m ≤ n."""
    recipe = _coefficients.resolve(ns_coeffs, ns_steps, preconditioning)
    form, found = _resolve(method, recipe, preconditioning, dtype, in_dtype, shape)
    return found, _products(recipe, form, found)


def _run_quintics(implementation, x, quintics, eps, scale, preconditioning):
    """Steps of a triple each; entries of X are at most 1/√n, so that those of XXᵀ are at most 1."""
    rows, first, last = quintics
    product = functools.partial(syrk, symmetrize_output=False, implementation=implementation)

    def triple(step):
        if len(rows) == 1:
            return rows[0]
        return (jnp.asarray(rows) if _coefficients.is_traced(step) else rows)[step]

    def apply(step, x, gram, s):
        """(a·s·I + b·s³·A + c·s⁵·A²)·X: one step on s·X, without forming it."""
        a, b, c = triple(step)
        return product(gram, gram, alpha=c * s**5, beta=b * s**3, diagonal=a * s) @ x

    def body(step, x):
        return apply(step, x, product(x), 1.0)

    gram = product(x)
    if preconditioning == "aol":
        d = inverse_row_norms(gram, (eps * scale) * scale)
        x, gram = (x * d).astype(x.dtype), (gram * d * d.mT).astype(gram.dtype)
        s = jnp.ones(x.shape[:-2])
    else:
        s = inverse_norm(x, gram, eps, scale, preconditioning)
    x = apply(first, x, gram, s)
    if _coefficients.is_traced((first, last)):
        return jax.lax.fori_loop(first + 1, last, body, x)
    for step in range(int(first) + 1, int(last)):
        x = body(step, x)
    return x


def _run_gram(implementation, x, quintics, eps, scale, preconditioning, log2_n):
    """Steps of a triple each, in the gram form; X and R are scaled as in `_composed.run`."""
    rows, first, last = quintics
    triples = rows * last if len(rows) == 1 else rows[first:last]
    square, product = (functools.partial(f, implementation=implementation) for f in (syrk, syrkx))
    gain = gram_gain(log2_n)
    gram = square(x, alpha=gain**2)
    if preconditioning == "aol":
        d = inverse_row_norms(gram, (eps * gain * scale) * (gain * scale))
        x, gram = (
            (gain * x * d).astype(x.dtype),
            (gram * (2**7 * d) * (2**7 * d.mT)).astype(x.dtype),
        )
        s, factor = 2.0**-7, 1.0
    else:
        s = inverse_norm(x, gram, eps, gain * scale, preconditioning)
        factor = gain * s
    return _gram.apply(square, product, x, gram, triples, s, factor)


def _resolve(method, recipe, preconditioning, dtype, in_dtype, wide_shape):
    """Returns the method and the dtype of the products; raises ValueError where one is unsafe."""
    names = get_args(Method.__value__)
    if method not in (None, *names):
        raise ValueError(f"method must be 'standard', 'gram' or None, got {method!r}")
    offered = {}
    for name in [method] if method else names:
        products_dtype = _products_dtype(recipe, name, dtype, in_dtype)
        reason = name == "gram" and _no_gram_form(recipe, preconditioning, products_dtype)
        if reason and method:
            raise ValueError(f"method='gram' is not offered here: {reason}. Pass method='standard'")
        if not reason:
            offered[name] = products_dtype
    if len(offered) > 1:
        return min(
            offered.items(), key=lambda item: _products(recipe, *item).microseconds(wide_shape)
        )
    return offered.popitem()


def _no_gram_form(recipe, preconditioning, dtype):
    """Returns why there is no gram form of the iteration, or None."""
    if isinstance(recipe, Schedule):
        segments = _composed.segments(recipe, "gram", dtype)
        if len(segments) == len(recipe.steps):
            return f"no two steps of ns_coeffs={recipe.name!r} can be joined in {dtype}"
    elif _coefficients.is_traced(recipe):
        return "traced coefficients or steps have the standard form only"
    elif preconditioning == "spectral":
        return "preconditioning='spectral' needs more than the Gram matrix"
    elif preconditioning == "aol" and dtype == jnp.bfloat16:
        return "preconditioning='aol' is unsafe in bfloat16, singular values can exceed 1.5"
    return None


def _products(recipe, method, dtype) -> Products:
    if isinstance(recipe, Schedule):
        return _composed.products(recipe, method, dtype)
    num_steps = recipe.last - recipe.first
    if method == "gram":
        return _gram.products(dtype, num_steps)
    return Products(grams=num_steps, squares=num_steps, applications=num_steps)


def _products_dtype(recipe, method, dtype, in_dtype):
    """The dtype that `dtype` stands for."""
    if isinstance(dtype, str) and dtype == "auto":
        dtype = recipe.dtype if isinstance(recipe, Schedule) else "bfloat16"
        if method == "gram":
            dtype = "float16"
        if _device.platform() == "tpu":  # whose matrix units lack float16
            dtype = "bfloat16"
    dtype = jnp.dtype(in_dtype if dtype is None else dtype)
    if jnp.issubdtype(in_dtype, jnp.complexfloating):
        dtype = jnp.promote_types(dtype, jnp.complex64)
    return dtype


def _precision_of(dtype):
    """A context in which a TPU multiplies float32 as such: by default it rounds to bfloat16."""
    by_default = jax.config.jax_default_matmul_precision is None
    if by_default and dtype == jnp.float32 and _device.platform() == "tpu":
        return jax.default_matmul_precision("high")
    return contextlib.nullcontext()


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
