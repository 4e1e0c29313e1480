"""`newton_schulz`, for direct calls; optimizers run `NewtonSchulz.map`, group by group."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from muon_jax._checks import checks_arguments
from muon_jax._distributed.sharding import axes_of_entry, by_device, traced_for
from muon_jax._iteration.coefficients import NSCoeffs, canonicalize
from muon_jax._iteration.form import Method, ProductsDType
from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._iteration.normalization import EpsMode, Preconditioning
from muon_jax._iteration.operand import WholeMatrices, is_tall
from pallas_kernels.device import standard_promotion


@checks_arguments
@standard_promotion()
def newton_schulz(
    x: jax.Array,
    ns_coeffs: NSCoeffs | NewtonSchulz = "standard",
    ns_steps: int | jax.Array = 5,
    eps: float | jax.Array = 0.0,
    *,
    eps_mode: EpsMode = "add",
    dtype: ProductsDType = "auto",
    preconditioning: Preconditioning = "frobenius",
    method: Method | None = "standard",
    implementation: str | None = None,
) -> jax.Array:
    """Approximates the polar factor UVᵀ of each matrix X = UΣVᵀ.

    X is divided by its norm. Then each step computes, with coefficients (a, b, c) of its own,

        A = XXᵀ,   B = aI + bA + cA²,   X <- BX,

    which maps every singular value by σ <- aσ + bσ³ + cσ⁵ towards 1. That is three products a step:
    `syrk`, `syrk` with everything else in its epilogue, and one matrix product. The norm is read
    off the first A, ‖X‖² = trace(XXᵀ), and divided out through the first step's coefficients.

    A composed schedule has one to three steps X <- h(A)·X with h of degree 4 to 512. Each h is made
    by squaring, which takes fewer products, most of all on wide matrices. On m×m, in products of
    which `syrk` does half the work, five triples cost 20:

        ns_coeffs      cost  dtype     maps σ from l to   polar error on σ > σ₁/100 (Gaussian m×m)
        "fast"         10    float16   [0.72, 1.18]       0.09
        "balanced"     12    float16   [0.70, 1.14]       0.05
        "accurate"     15    float16   [0.89, 1.16]       0.05
        "standard"     20    bfloat16  [0.68, 1.20]       0.19

    The composed schedules have l = 0.01, 0.0025 and 0.0016 of the Schatten-4 norm, `"standard"` has
    l = 0.002 of the Frobenius norm. Errors are for m = 256. On σ < σ₁/100, compared with
    `"standard"`, `"fast"` is less accurate, `"balanced"` about as accurate or more, and
    `"accurate"` more accurate.

    The result does not depend on the scale of X, as long as its entries are normal numbers: X is
    first multiplied by a power of two, exactly, so that no product overflows. Zero gives zero. A
    matrix with a NaN or an infinity gives NaN throughout.

    Args:
        x: matrices of shape `(..., m, n)` and a float dtype of 16 bits or more. Where m > n the
            iteration runs on Xᵀ, whose XXᵀ is the smaller. The shape alone decides that. Explicit
            mesh axes may shard the stack: then each device computes its own matrices.
        ns_coeffs: one triple (a, b, c) with a > 0 for every step, a table with one triple for each
            step, or a name; or a `NewtonSchulz`, in the place of all arguments that it has.

            - Names of one triple: `"standard"` (Keller Jordan's), `"standard_1.02"`.
            - Names of a published table: `"dion"`, `"polar_express"`, `"polar_express_nanogpt"`,
              `"polar_express_nvidia"`, `"cans"`, `"deepseek_v4"`, `"cubic"`.
            - Names of a table for `preconditioning="aol"`: `"aol"` and `"aol_nvidia"`. The latter,
              as published, makes σ > 0.8837 negative.
            - Names of a composed schedule: `"fast"`, `"balanced"`, `"accurate"`.
        ns_steps: number of steps of one triple, at most 100. By default a named table runs in full,
            whether it has 4 rows or 10; another `ns_steps` keeps only its last rows. Your own table
            always runs in full. A composed schedule runs whole: pass 5 or its own number.
        eps: added to the norm of X. With 0 the result does not depend on scale; a larger `eps`
            shrinks the result for ‖X‖ of that order. In float16 such a result has an absolute error
            of up to 1e-5: an X of 1e-18 gives 0 for an `eps` of 1e-8. In bfloat16 and float32 the
            error is relative. Under `"schatten"` and `"aol"` it is the least
            value of the squared norms instead, as in optax.
        eps_mode: `"add"`, or `"max"` to divide by the larger of norm and `eps`.
        dtype: dtype of the products, which accumulate in float32.

            - `"auto"` is bfloat16 for triples in the standard form, float16 for a composed schedule
              and for the gram form. On TPUs, which multiply no float16, it is bfloat16 for all. For
              `"cans"`, which 16 bits make diverge, it is float32, and for `"polar_express_nvidia"`,
              which bfloat16 makes diverge, float16, on TPUs float32.
            - None is the dtype of `x`.
            - GPUs multiply float32 as TF32, as is JAX's default, except under composed schedules
              and `"cans"`. `jax.default_matmul_precision` decides for all.
            - Composed schedules have coefficients of their own for bfloat16.
            - Complex matrices use complex64 at least: no complex number has half precision.
        preconditioning: what X is divided by. Composed schedules always divide by the Schatten-4
            norm, and take the default alone.

            - `"frobenius"`: its Frobenius norm.
            - `"spectral"`: its largest singular value (by an SVD, slow).
            - `"schatten"`: its Schatten-4 norm ‖A‖_F^½.
            - `"aol"`: row by row the square roots of the row sums of `|A|`, which changes the polar
              factor slightly.
        method: `"standard"`, where every step multiplies with X; `"gram"`, the same polynomial with
            most products on XXᵀ alone, in float16 unless `dtype` says otherwise; or None for the
            faster form by a model of their times. Composed schedules have one form under either
            name. In units of a symmetric m×m product they cost:

                n =                                m    2m   4m   8m
                five triples, standard form        20   35   65   125
                five triples, gram form            20   26   38   62
                the same with one more restart     20   29   47   83
                "fast"                             10   13   19   31
                "balanced"                         12   15   21   33
                "accurate"                         15   21   33   57
        implementation: one of `pallas_kernels.IMPLEMENTATIONS` or None, as for
            `pallas_kernels.syrk` and `pallas_kernels.gemm`.

    Returns:
        The approximate polar factors, in the shape and dtype of `x`. Those of wide matrices in
        float32 are not rounded to 16 bits.

    Raises:
        TypeError: `x` is no array, or `eps` or `ns_steps` no number.
        ValueError: `x` is no float matrix, or is sharded within its matrices; an argument is none
            of the values above; `dtype` has 8 bits, in which nothing here is safe, or 16 bits under
            the name `"cans"`, or is bfloat16 under `"polar_express_nvidia"`; or the gram form does
            not exist, or is not safe, for the other arguments.
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
    if any(mesh.shape[name] > 1 for entry in spec[-2:] for name in axes_of_entry(entry)):
        raise ValueError(
            f"x must not be sharded within its matrices, got {spec} on {dict(mesh.shape)}: reshard"
            f" it (jax.reshard) to {PartitionSpec(*spec[:-2])}, or use scale_by_muon"
        )
    if isinstance(ns_coeffs, NewtonSchulz):
        others = {"dtype": (dtype, "auto"), "method": (method, "standard")}
        others |= {"implementation": (implementation, None)}
        given = {name: value for name, (value, default) in others.items() if value != default}
        if given:
            raise ValueError(
                f"ns_coeffs={ns_coeffs} has its own dtype, method and implementation, got"
                f" {', '.join(f'{name}={x!r}' for name, x in given.items())} beside it: pass them"
                " to NewtonSchulz"
            )
        iteration = ns_coeffs.filled(
            steps=ns_steps, eps=eps, eps_mode=eps_mode, preconditioning=preconditioning
        )
    else:
        coeffs = canonicalize("ns_coeffs", ns_coeffs)
        iteration = NewtonSchulz(
            coeffs, ns_steps, eps, eps_mode, preconditioning, dtype, method, implementation
        )
    with traced_for([x]):
        return polar_factors(iteration, x)


@jax.jit
def polar_factors(iteration: NewtonSchulz, x: jax.Array) -> jax.Array:
    """`newton_schulz` with that iteration."""
    form = iteration.form_of_stack((*x.shape[:-2], *sorted(x.shape[-2:])), x.dtype)
    # Tall matrices are transposed back in a pass, which also converts them.
    out_dtype = None if is_tall(x) else x.dtype
    operand = WholeMatrices(implementation=form.chosen(x.shape, out_dtype), out_dtype=out_dtype)
    (result,) = by_device(lambda stacks, own: own.run(stacks, form, operand), [x], iteration)
    return result
