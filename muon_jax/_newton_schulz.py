"""`newton_schulz`: any stack of matrices orthogonalized, or several stacks as one."""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from muon_jax._checks import check, check_float
from muon_jax._distributed.on_shards import by_device
from muon_jax._distributed.sharding import names
from muon_jax._iteration.form import GROUP, Method, ProductsDType, choose, implementation_of
from muon_jax._iteration.normalization import EpsMode, largest_entries
from muon_jax._iteration.operand import Whole
from muon_jax._iteration.passes import is_tall, iterate, join, scale_down, split, transposed_back
from muon_jax._iteration.recipes import NSCoeffs, resolve_recipe

type Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]


STATIC = (
    "ns_coeffs",
    "ns_steps",
    "eps_mode",
    "dtype",
    "preconditioning",
    "method",
    "implementation",
)


@functools.partial(jax.jit, static_argnames=STATIC)
def newton_schulz(
    x: jax.Array,
    ns_coeffs: NSCoeffs = "standard",
    ns_steps: int = 5,
    eps: float | jax.Array = 0.0,
    *,
    eps_mode: EpsMode = "add",
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

    A composed schedule has one to three steps X <- h(A)·X with h of degree 4 to 512, each h made
    by squaring: fewer products, most of all on wide matrices. On m×m, in products of which `syrk`
    does half the work, five triples cost 20, and

        ns_coeffs      cost  dtype     maps σ from l to   polar error on σ > σ₁/100 (Gaussian m×m)
        "fast"         10    float16   [0.75, 1.17]       0.09
        "balanced"     12    float16   [0.72, 1.14]       0.05
        "accurate"     15    float16   [0.88, 1.16]       0.05
        "standard"     20    bfloat16  [0.68, 1.20]       0.19

    with l = 0.01, 0.0025 and 0.0016 of the Schatten-4 norm, and 0.002 of the Frobenius norm, and
    errors for m = 256. On σ < σ₁/100 `"fast"` is less accurate than `"standard"`, `"balanced"`
    about as accurate or more, `"accurate"` more.

    The result does not depend on the scale of X, as long as its entries are normal numbers: X is
    first multiplied by a power of two, exactly, so that no product overflows. Zero gives zero. A
    matrix with a NaN or an infinity gives NaN throughout.

    Args:
        x: matrices of shape `(..., m, n)` and a float dtype of 16 bits or more. Where m > n the
            iteration runs on Xᵀ, whose XXᵀ is the smaller; shapes alone decide that. Explicit mesh
            axes may divide a stack: then each device has its own matrices.
        ns_coeffs: one triple for every step, a table of one triple for each step, or a name. Of one
            triple: `"standard"` (Keller Jordan's), `"standard_1.02"`. Of a published table:
            `"dion"`, `"polar_express"`, `"polar_express_nanogpt"`, `"polar_express_nvidia"`,
            `"cans"`, `"deepseek_v4"`, `"cubic"`; `"aol"` and `"aol_nvidia"` for that
            preconditioning, of which the latter, as published, makes σ > 0.8837 negative. Of a
            composed schedule: `"fast"`, `"balanced"`, `"accurate"`. Tuples of numbers, not lists,
            nor arrays as `scale_by_muon` takes them.
        ns_steps: number of steps of one triple. A named table runs its last `ns_steps` rows, and
            all of them, be they 4 or 10, where this is 5, the default. A table of the caller's own
            runs its rows whatever this says. A composed schedule runs whole: 5 or its own number.
        eps: added to the norm of X: 0 keeps the result independent of scale, more shrinks the
            result for ‖X‖ of that order. Under `"schatten"` and `"aol"` the least value of the
            squared norms instead, as in optax.
        eps_mode: `"add"`, or `"max"` to divide by the larger of norm and `eps`.
        dtype: dtype of the products, which accumulate in float32. `"auto"` is bfloat16, for a
            composed schedule and for the gram form float16; on TPUs, which multiply no float16,
            bfloat16 in its place; and float32 for `"cans"`, which 16 bits make diverge. None is
            that of `x`. GPUs multiply float32 as TF32, as is JAX's default, but under composed
            schedules and `"cans"`; `jax.default_matmul_precision` decides for all. Composed
            schedules have coefficients of their own for bfloat16. There is no complex number of
            half precision: complex matrices use complex64 at least.
        preconditioning: what X is divided by: `"frobenius"`, its Frobenius norm; `"spectral"`, its
            largest singular value (by an SVD, slow); `"schatten"`, its Schatten-4 norm ‖A‖_F^½;
            `"aol"`, row by row the square roots of the row sums of `|A|`, which changes the polar
            factor slightly. Composed schedules always divide by the Schatten-4 norm, and take the
            default alone.
        method: `"standard"`, where every step multiplies with X; `"gram"`, the same polynomial with
            fewer such products, most of them on XXᵀ alone (`muon_jax._gram`), in float16 unless
            `dtype` says otherwise; or None for the faster one by a model of their times. For n = m,
            2m, 4m, 8m five steps of triples cost 20, 35, 65, 125 units in the standard form and 20,
            26, 38, 62 in the other, 20, 29, 47, 83 where their slopes ask for one more restart.
            Composed schedules have one form under either name; `"fast"` costs 10, 13, 19, 31,
            `"balanced"` 12, 15, 21, 33, `"accurate"` 15, 21, 33, 57.
        implementation: `"xla"`, `"triton"`, `"mosaic_gpu"` or None, as for `pallas_kernels.syrk`
            and `pallas_kernels.gemm`.

    Returns:
        The approximate polar factors, in the shape and dtype of `x`. Those of wide matrices in
        float32 are not rounded to 16 bits.

    Raises:
        ValueError: `x` is no float matrix, or a sharded one, an argument is none of the values
            above, or `dtype` is one of 8 bits, in which nothing here is safe, or of 16 under the
            name `"cans"`. Or the gram form does not exist, or is not safe, for the other arguments.
        NotImplementedError: the named implementation cannot run here.

    References:
        Jordan et al., `Muon: an optimizer for hidden layers in neural networks
        <https://kellerjordan.github.io/posts/muon/>`_, 2024. Boissin et al., `Turbo-Muon
        <https://arxiv.org/abs/2512.04632>`_, 2025 (`"aol"`). Grishina et al., `Accelerating
        Newton-Schulz Iteration for Orthogonalization via Chebyshev-type Polynomials
        <https://arxiv.org/abs/2506.10935>`_, 2025 (`"schatten"`, `"cans"`). Amsel et al., `The
        Polar Express <https://arxiv.org/abs/2505.16932>`_, 2025 (composition, `"polar_express"`).
    """
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.inexact) or jnp.finfo(x.dtype).bits < 16:
        raise ValueError(
            "x must have a float dtype of 16 bits or more and shape (..., m, n), got"
            f" {x.dtype}{list(x.shape)}"
        )
    sharding = jax.typeof(x).sharding
    mesh, spec = sharding.mesh, sharding.spec
    if any(mesh.shape[name] > 1 for entry in spec[-2:] for name in names(entry)):
        raise ValueError(
            f"x must not be divided within its matrices, got {spec} on {dict(mesh.shape)}: reshard"
            f" it (jax.reshard) to {PartitionSpec(*spec[:-2])}, or use scale_by_muon"
        )
    check("preconditioning", preconditioning, Preconditioning)
    check("eps_mode", eps_mode, EpsMode)
    check_float("dtype", dtype)
    recipe = resolve_recipe(ns_coeffs, ns_steps, preconditioning)
    shape = (*x.shape[:-2], *sorted(x.shape[-2:]))
    form = choose(recipe, method, preconditioning, dtype, shape, x.dtype)
    # Tall matrices are transposed back in a pass, which converts them too.
    held = Whole(implementation=implementation, out_dtype=None if is_tall(x) else x.dtype)

    def run(stacks):
        return _run(stacks, recipe, form, eps, eps_mode, preconditioning, held)

    (result,) = by_device(run, [x])
    return result


def orthogonalize(
    stacks: Sequence[jax.Array],
    ns_coeffs: NSCoeffs,
    ns_steps: int | jax.Array,
    eps: float | jax.Array,
    *,
    eps_mode: EpsMode,
    dtype: ProductsDType,
    preconditioning: Preconditioning,
    method: Method | None,
    implementation: str | None,
) -> list[jax.Array]:
    """As `newton_schulz`, for an optimizer's matrices, whatever stacks they happen to be in.

    The form, and the kernels of all products, are those for a stack of 16.

    Args:
        stacks: arrays `(batch, m, n)` or `(batch, n, m)` of one dtype, which become one in that of
            the products.
        ns_coeffs: and all that follow: as for `newton_schulz`.
    """
    recipe = resolve_recipe(ns_coeffs, ns_steps, preconditioning)
    in_dtype, (m, n) = stacks[0].dtype, sorted(stacks[0].shape[-2:])
    form = choose(recipe, method, preconditioning, dtype, (GROUP, m, n), in_dtype)
    held = Whole(implementation=implementation or implementation_of((m, n), form.dtype))
    return _run(stacks, recipe, form, eps, eps_mode, preconditioning, held)


def _run(stacks, recipe, form, eps, eps_mode, preconditioning, held):
    """The iteration in that form, on all stacks as one."""
    n = max(stacks[0].shape[-2:])
    scaled, scale = scale_down(stacks, largest_entries(stacks), n, form.dtype, held)
    x = join(scaled)
    x = iterate(x, recipe, form.method, eps, eps_mode, scale, preconditioning, n, held)
    return [
        (transposed_back(part) if is_tall(given) else part).astype(given.dtype)
        for part, given in zip(split(x, stacks), stacks, strict=True)
    ]
