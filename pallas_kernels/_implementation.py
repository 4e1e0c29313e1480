"""Which implementation runs: why one cannot, which one `None` stands for, and its products.

Answers are memoized, because a traced update asks dozens of times about the same few shapes.
Nothing here imports a back end of Pallas unless the device may need it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from pallas_kernels import _tuning, device
from pallas_kernels._mosaic_gpu.config import mosaic_syrkx_beats_xla, predict_gemm_efficiency
from pallas_kernels._reference import ChainLink, Coefficient
from pallas_kernels.arguments import check_flag, check_name, check_operand, check_supported
from pallas_kernels.device import memoized

type Operand = jax.Array | jax.ShapeDtypeStruct

IMPLEMENTATIONS: tuple[str, ...] = (
    "xla",
    "triton",
    "mosaic_gpu",
    "mosaic_gpu_mma",
    "mosaic_gpu_tcgen05",
)
_TRITON_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def unsupported_reason(implementation: str, a_matrix: Operand) -> str | None:
    """Returns why `syrkx(a_matrix, …, implementation=implementation)` would raise, or None.

    Args:
        implementation: one of `IMPLEMENTATIONS`.
        a_matrix: the operand, or anything with its `shape` and `dtype`.

    Raises:
        TypeError: `a_matrix` has no shape of a matrix.
        ValueError: `implementation` is none of them.
    """
    check_name("implementation", implementation, sorted(IMPLEMENTATIONS))
    check_operand("a_matrix", a_matrix)
    return reasons_against(a_matrix)[implementation]


class Selection(NamedTuple):
    """An implementation and the basis of its choice.

    Attributes:
        implementation: one of `IMPLEMENTATIONS`.
        basis: `"measured …"`, `"modelled …"` or `"only …"`.
    """

    implementation: str
    basis: str


def select_implementation(
    a_matrix: Operand, *, addend: bool = False, symmetrize_output: bool = True
) -> Selection:
    """Returns the implementation that `implementation=None` stands for, and why.

    The choice depends on shape, dtype and the default device, or on the abstract mesh's device
    where one is set. Nothing is tried out. Where the device has a table of measured times with this
    shape, the fastest implementation of the table is chosen. Elsewhere a model or a rule chooses,
    both fitted to measured times.

    Args:
        a_matrix: the operand, or anything with its `shape` and `dtype`.
        addend: whether there is a `c_matrix`.
        symmetrize_output: as for `syrkx`.

    Raises:
        TypeError: `a_matrix` has no shape of a matrix, or a flag is no boolean.
    """
    check_operand("a_matrix", a_matrix)
    check_flag("addend", addend)
    check_flag("symmetrize_output", symmetrize_output)
    return fastest_syrkx(a_matrix, addend, symmetrize_output)


@memoized
def fastest_syrkx(a_matrix: Operand, addend: bool, symmetrize_output: bool) -> Selection:
    """`select_implementation` without its checks."""
    supported = supported_implementations(a_matrix)
    if len(supported) == 1:
        return Selection(supported[0], "only this implementation runs here")
    is_half = jnp.dtype(a_matrix.dtype).itemsize == 2
    times = _tuning.lookup(_as_one_stack(a_matrix), addend=addend) if is_half else None
    if times:
        skipped = "xla, not symmetrized" if symmetrize_output else "xla"
        candidates = [
            name for name in times if name != skipped and _implementation_of(name) in supported
        ]
        fastest = min(candidates, key=lambda name: times[name] + _host_time(name))
        return Selection(_implementation_of(fastest), f"measured on an {device.current().kind}")
    modelled = _modelled_fastest(a_matrix, addend, supported)
    return Selection(modelled, "modelled after times on an NVIDIA H200")


def _implementation_of(name: str) -> str:
    """Returns the implementation of a name in the tables, without its config or option."""
    return name.replace(",", " ").split()[0]


def _host_time(name: str) -> float:
    """Returns µs that a launch takes the host longer than one of Triton, as far as they decide.

    Five steps on 512×512 take 60 µs on an H200 with `"mosaic_gpu"` and 66 with `"triton"`, but by
    the wall clock 95 and 84 (plain jnp: 70 and 88).
    """
    return 0.5 if _implementation_of(name) == "mosaic_gpu" else 0.0


def _as_one_stack(a_matrix: Operand) -> tuple[int, int, int]:
    """Returns the shape `(batch, m, n)` of `(..., m, n)` operands with one batch axis."""
    *batch, m, n = a_matrix.shape
    return math.prod(batch), m, n


# Why each implementation cannot take `(..., m, n)` operands here.


def _triton_reason(a_matrix: Operand) -> str | None:
    if a_matrix.dtype not in _TRITON_DTYPES:
        supported = ", ".join(jnp.dtype(dtype).name for dtype in _TRITON_DTYPES)
        return f"the dtype {a_matrix.dtype} is not one of {supported}"
    if not a_matrix.size:
        return f"the shape {a_matrix.shape} has no elements"
    if device.current().platform not in ("gpu", "cuda", "rocm"):
        return "the default device is not a GPU"
    try:
        from jax.experimental.pallas import triton as plt

        info = plt.get_gpu_info()
    except (ImportError, ValueError) as error:
        return str(error)
    if info.compute_capability < 80:
        return f"{info.arch_name} is not an NVIDIA GPU of compute capability 8.0 or higher"
    return None


def _mosaic_reason(least: tuple[int, int], below: tuple[int, int], a_matrix: Operand) -> str | None:
    if a_matrix.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the dtype {a_matrix.dtype} is neither bfloat16 nor float16"
    if not a_matrix.size:
        return f"the shape {a_matrix.shape} has no elements"
    here = device.current()
    if here.capability and least <= here.capability < below:
        return None
    needed = f"an NVIDIA GPU of compute capability {least[0]}.0"
    needed += " or higher" * (below[0] > least[0] + 1)
    if here.platform in ("gpu", "cuda") and not here.capability:
        return (
            f"{here.kind} is not known to be {needed}, which a described GPU states only as"
            " jax_default_device"
        )
    return f"the default device, {here.kind}, is not {needed}"


_REASONS: dict[str, Callable[[Operand], str | None]] = {
    "xla": lambda _: None,
    "triton": _triton_reason,
    "mosaic_gpu": functools.partial(_mosaic_reason, (8, 0), (13, 0)),
    "mosaic_gpu_mma": functools.partial(_mosaic_reason, (8, 0), (13, 0)),
    "mosaic_gpu_tcgen05": functools.partial(_mosaic_reason, (10, 0), (11, 0)),
}


def kernel_of(implementation: str) -> str:
    """Returns the implementation, or the kernel that `"mosaic_gpu"` stands for on this device."""
    if implementation != "mosaic_gpu" or not (capability := device.current().capability):
        return implementation
    kernels = {9: "mosaic_gpu", 10: "mosaic_gpu_tcgen05"}
    return kernels.get(capability[0], "mosaic_gpu_mma")


@memoized
def reasons_against(operand: Operand) -> dict[str, str | None]:
    """Returns `unsupported_reason` for each implementation, without its checks."""
    return {name: reason(operand) for name, reason in _REASONS.items()}


def supported_implementations(operand: Operand) -> tuple[str, ...]:
    """Returns the implementations that run here and that None may stand for.

    On Ampere and Blackwell that is the kernel of `"mosaic_gpu"` where the device has a table. By
    mma it also takes the place of `"triton"`, where JAX has that no more, or not for this device.
    """
    reasons = reasons_against(operand)
    found = [name for name in ("xla", "triton") if reasons[name] is None]
    if reasons["mosaic_gpu"] is None:
        kernel = kernel_of("mosaic_gpu")
        replaces = kernel == "mosaic_gpu_mma" and "triton" not in found
        if device.current().is_hopper or replaces or _tuning.is_measured():
            found.append(kernel)
    return tuple(found)


# Which is the fastest. Limits were measured on an H200 by `python -m benchmarks syrk` and `gemm`;
# they are untuned elsewhere.


def _modelled_fastest(operand: Operand, addend: bool, supported: tuple[str, ...]) -> str:
    """Returns the implementation of `syrkx` that models and rules expect to be the fastest."""
    batch, m, n = stack = _as_one_stack(operand)
    # Near the limit, either kernel is slower by 12% at most (m from 64 to 384, stacks of 1 to 64).
    is_small = batch * m * n * m < 2**26
    # Padding costs less than Triton's loads where the result is not padded, or where rows do not
    # start on 16 bytes (1001×1500: 15.3 µs against 19.0; 4000×4000: 137 against 117).
    pads_little = m % 64 == 0 or m % 8 != 0 or n % 8 != 0
    if "mosaic_gpu" in supported and not is_small and pads_little:
        return "mosaic_gpu" if mosaic_syrkx_beats_xla(stack, addend=addend) else "xla"
    # XLA is faster in float32, on rows that do not start on 16 bytes, and on wide operands that are
    # not small and have too few tiles to fill the GPU: it splits their sums (1024×4096: 17.7 µs
    # against 19.6).
    is_aligned = operand.dtype.itemsize == 2 and m % 8 == n % 8 == 0
    rows = -(-m // 64)
    fills = n < 4 * m or batch * rows * (rows + 1) // 2 > 264
    kernel = next((name for name in ("triton", "mosaic_gpu_mma") if name in supported), "xla")
    return kernel if is_aligned and (fills or is_small) else "xla"


def gemm_unsupported_reason(
    implementation: str, *operands: Operand, out_dtype: jnp.dtype | None = None
) -> str | None:
    """Returns why an implementation cannot multiply these, to a result of that dtype, or None."""
    if implementation != "xla" and out_dtype is not None and out_dtype not in _TRITON_DTYPES:
        return f"out_dtype={out_dtype} is none of bfloat16, float16 and float32"
    return next(filter(None, (reasons_against(x)[implementation] for x in operands)), None)


@memoized
def fastest_gemm(a: Operand, b: Operand, out_dtype: jnp.dtype) -> str:
    """Returns the implementation that None stands for; see `gemm`."""
    (batch, m, k), n, is_half = _as_one_stack(a), b.shape[-1], a.dtype.itemsize == 2

    def runs(implementation: str) -> bool:
        reason = gemm_unsupported_reason(implementation, a, b, out_dtype=out_dtype)
        return implementation in supported_implementations(a) and not reason

    # Its time over that of cuBLAS: 0.62 for 64², 1.05 for 384²·384×1536, up to 1.5 with four times
    # as many products.
    is_small = k <= 512 and a.size * n <= 2**28
    if is_half and m % 8 == k % 8 == n % 8 == 0 and is_small and runs("triton"):
        return "triton"
    if out_dtype.itemsize != 2 or m % 64 or k % 64 or n % 64 or not runs("mosaic_gpu"):
        return "xla"  # of 32 bits, a kernel's result takes 4 to 7% longer than cuBLAS's
    if out_dtype != a.dtype:
        # XLA rounds to other 16 bits in a pass of its own. With 64 tiles the kernel is 3 to 47%
        # faster, and with fewer up to 14% slower.
        return "mosaic_gpu" if batch * -(-m // 128) * -(-n // 128) >= 64 else "xla"
    # Its time compared with that of cuBLAS:
    #
    #     within both limits                       1 to 6% less
    #     smaller k                                4% less (24×2048²) to 11% more (12×768²)
    #     less of the time goes into products      up to 18% more (2×2560²)
    #     single small matrices, which cuBLAS      14.3 µs and 12.6 (1536²),
    #     has more ways to divide                  5.2 µs and 3.3 (512²)
    efficiency = predict_gemm_efficiency((batch, m, k), n, device.current().num_multiprocessors)
    return "mosaic_gpu" if k >= 3072 and efficiency >= 0.9 else "xla"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """The products of matrices of one dtype, by an implementation that is chosen once.

    The methods check nothing: they are for a caller that makes its operands itself, such as an
    iteration. `syrkx` and `gemm` compute what the functions of these names document.

    Attributes:
        names: the implementation that was named, or all that run here. Of several, each product has
            the one that is expected to be the fastest.
    """

    names: tuple[str, ...]

    @classmethod
    def chosen(
        cls,
        name: str | None,
        *operands: jax.Array | jax.ShapeDtypeStruct,
        out_dtype: jnp.dtype | None = None,
    ) -> Self:
        """Returns the implementation of that name, or the choice among all that run here.

        Args:
            name: one of `IMPLEMENTATIONS`, or None.
            *operands: one of the operands, or anything with its `shape` and `dtype`; or several.
            out_dtype: the widest dtype of a result, or None for the operands'.

        Raises:
            ValueError: there is no such implementation.
            NotImplementedError: the named implementation cannot run here.
        """
        if name is None:
            return cls(supported_implementations(operands[0]))
        check_name("implementation", name, sorted(IMPLEMENTATIONS), or_none=True)
        check_supported(name, gemm_unsupported_reason(name, *operands, out_dtype=out_dtype))
        return cls((kernel_of(name),))

    def name_for(
        self,
        a_matrix: jax.Array | jax.ShapeDtypeStruct,
        addend: bool = False,
        symmetrize_output: bool = True,
    ) -> str:
        """Returns the name of the implementation of A·Aᵀ, or of A·Aᵀ + C."""
        only, *others = self.names
        if not others:
            return only
        return fastest_syrkx(a_matrix, addend, symmetrize_output).implementation

    def syrkx(
        self,
        a_matrix: jax.Array,
        b_matrix: jax.Array | None = None,
        c_matrices: tuple[jax.Array, ...] = (),
        *,
        alpha: Coefficient = 1,
        betas: Sequence[Coefficient] = (),
        diagonal: Coefficient = 0,
        symmetrize_output: bool = True,
        residual: bool = False,
    ) -> tuple[jax.Array, ...]:
        """Returns the product of A and B, or of A and A, and with `residual` also its residual."""
        name = self.name_for(a_matrix, bool(c_matrices), symmetrize_output)
        accumulator = jnp.finfo(jnp.promote_types(a_matrix.dtype, jnp.float32)).dtype
        return module_of(name).syrkx(
            a_matrix,
            b_matrix,
            tuple(jnp.expand_dims(c, range(a_matrix.ndim - c.ndim)) for c in c_matrices),
            tuple(jnp.asarray(value, accumulator) for value in (alpha, diagonal, *betas)),
            symmetrize_output=symmetrize_output,
            residual=residual,
        )

    def syrk_chain(
        self,
        inputs: Sequence[jax.Array],
        links: Sequence[ChainLink],
        *,
        symmetrize_output: bool = True,
    ) -> jax.Array:
        """Returns the last of a chain of symmetric products.

        `"mosaic_gpu"` runs the chain in one launch where that is faster. Its result is the same as
        that of a launch for each product, bit for bit.

        Args:
            inputs: S₀, symmetric, of shape `(..., m, m)`; then other addends, of shape
                `(..., m, m)` or `(m, m)`, and the dtype of S₀.
            links: the products.
            symmetrize_output: as for `syrk`.

        Returns:
            The last product, of the shape and dtype of S₀.
        """
        if "mosaic_gpu" in self.names:
            from pallas_kernels._mosaic_gpu import chain

            name = self.name_for(inputs[0], True, symmetrize_output)
            if chain.is_faster(inputs, links, by_kernels=name == "mosaic_gpu"):
                return chain.syrk_chain(inputs, links)
        terms, result = [*inputs], inputs[0]
        for link in links:
            result, *_ = made = self.syrkx(
                result,
                c_matrices=tuple(terms[c] for _, c in link.addends),
                alpha=link.alpha,
                betas=[beta for beta, _ in link.addends],
                diagonal=link.diagonal,
                symmetrize_output=symmetrize_output,
                residual=link.residual,
            )
            terms += made
        return result

    def gemm(
        self, a_matrix: jax.Array, b_matrix: jax.Array, *, out_dtype: jnp.dtype | None = None
    ) -> jax.Array:
        """Returns A·B."""
        out_dtype = out_dtype or a_matrix.dtype
        name, *others = self.names
        name = fastest_gemm(a_matrix, b_matrix, out_dtype) if others else name
        return module_of(name).gemm(a_matrix, b_matrix, out_dtype=out_dtype)

    def syrk_of_stacks(
        self, stacks: Sequence[jax.Array], *, alpha: Coefficient = 1.0, residual: bool = False
    ) -> tuple[jax.Array, ...]:
        """Returns alpha·A·Aᵀ of the matrices of several stacks, of one m and several n.

        `"mosaic_gpu"`, which must be the only name, runs all in one launch, but under `vmap` a
        launch for each stack. Each result is that of `syrkx` for its stack alone, bit for bit.

        Args:
            stacks: shapes `(batchᵢ, m, nᵢ)`, of sizes that are multiples of 64, the largest n
                first; all bfloat16 or all float16.
            alpha: a coefficient, or one for each matrix.
            residual: whether to return the residual, too, as `syrk_with_residual`.

        Returns:
            The products `(Σ batchᵢ, m, m)`, followed by their residuals if wanted.
        """
        return module_of(*self.names).syrk_of_stacks(stacks, alpha, residual=residual)

    def gemm_of_stacks(
        self,
        a_matrix: jax.Array,
        stacks: Sequence[jax.Array],
        *,
        out_dtype: jnp.dtype | None = None,
    ) -> tuple[jax.Array, ...]:
        """Returns A·B of a stack of A with the matrices B of several stacks, of several n.

        `"mosaic_gpu"` runs it as `syrk_of_stacks`.

        Args:
            a_matrix: shape `(Σ batchᵢ, m, k)`, of sizes that are multiples of 64; bfloat16 or
                float16.
            stacks: shapes `(batchᵢ, k, nᵢ)`, of sizes that are multiples of 64, and dtype of
                `a_matrix`.
            out_dtype: dtype of the results, or None for the operands'.

        Returns:
            The products `(batchᵢ, m, nᵢ)`.
        """
        return module_of(*self.names).gemm_of_stacks(a_matrix, stacks, out_dtype=out_dtype)

    def accumulates(self, gradient: Operand, momentum: Operand, dtype: jnp.dtype) -> bool:
        """Returns whether `accumulate` runs, to X of that dtype.

        Where it computes X once more it has the rounded new momentum. So that of bfloat16 is for a
        gradient or X of bfloat16 alone, and float16, where it may vanish, for none.
        """
        dtypes = gradient.dtype, momentum.dtype, dtype
        is_kept = momentum.dtype == jnp.float32 or (
            momentum.dtype == jnp.bfloat16 and dtypes.count(jnp.bfloat16) > 1
        )
        is_kernel = {*self.names} != {"xla"} and dtype.itemsize == 2 and is_kept
        return is_kernel and all(reasons_against(x)["triton"] is None for x in (gradient, momentum))

    def accumulate(
        self,
        gradients: Sequence[jax.Array],
        momenta: Sequence[jax.Array],
        weights: jax.Array,
        transposed: Sequence[bool],
        shape: tuple[int, int],
        dtype: jnp.dtype,
        exponent: int,
    ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """Returns the new momenta, the stack of X and its scales, in one pass over memory.

        With weights w, M <- w₀M + w₁G and X = 2ᵏ(w₂M + w₃G).

        Args:
            gradients: G, shapes `(batch, rows, cols)`.
            momenta: M, of these shapes.
            weights: w, shape `(4,)`.
            transposed: for each array whether X has its matrices transposed.
            shape: `(m, n)` of X, at least that of the matrices. The rest is zero.
            dtype: of X.
            exponent: the largest entry of each X is in [2⁻ᵉ / 4, 2⁻ᵉ].

        Returns:
            The new M; X, of shape `(Σ batch, m, n)`; and 2ᵏ of each matrix.
        """
        layout = module_of("momentum").Layout(tuple(transposed), shape, dtype, exponent)
        return module_of("momentum").accumulate(gradients, momenta, weights, layout)


@functools.cache
def module_of(name: str) -> Any:
    """Returns the module of kernels, whose import takes a third of a second."""
    match name:
        case "triton":
            from pallas_kernels import _triton as module
        case "mosaic_gpu":
            from pallas_kernels._mosaic_gpu import products as module
        case "mosaic_gpu_mma":
            from pallas_kernels._mosaic_gpu import mma as module
        case "mosaic_gpu_tcgen05":
            from pallas_kernels._mosaic_gpu import tcgen05 as module
        case "momentum":
            from pallas_kernels import _momentum as module
        case _:
            from pallas_kernels import _reference as module
    return module
