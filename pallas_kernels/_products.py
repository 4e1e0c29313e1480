"""The public products: they check operands, choose an implementation, and run it."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from pallas_kernels._reference import ChainLink, Coefficient
from pallas_kernels._selection import (
    IMPLEMENTATIONS,
    fastest_gemm,
    fastest_syrkx,
    gemm_unsupported_reason,
    supported_implementations,
)
from pallas_kernels.arguments import (
    check_array,
    check_flag,
    check_name,
    check_supported,
    is_real,
    shown,
    standard_promotion,
)

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

    Args:
        a_matrix: shape `(..., m, k)`.
        b_matrix: shape `(..., k, n)` and dtype of `a_matrix`.
        out_dtype: float dtype of the product, or None for the operands'. The kernels take bfloat16,
            float16 and float32.
        implementation: `"xla"`, `"triton"`, `"mosaic_gpu"`, or None for the one expected to be the
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
            name: `"xla"`, `"triton"`, `"mosaic_gpu"` or None.
            operands: one of the operands, or anything with its `shape` and `dtype`; or several.
            out_dtype: the widest dtype of a result, or None for the operands'.

        Raises:
            ValueError: there is no such implementation.
            NotImplementedError: the named implementation cannot run here.
        """
        check_name("implementation", name, sorted(IMPLEMENTATIONS), or_none=True)
        if name is None:
            return cls(supported_implementations(operands[0]))
        check_supported(name, gemm_unsupported_reason(name, *operands, out_dtype=out_dtype))
        return cls((name,))

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
        return _module(name).syrkx(
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
        return _module(name).gemm(a_matrix, b_matrix, out_dtype=out_dtype)

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
        return _module(*self.names).syrk_of_stacks(stacks, alpha, residual=residual)

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
        return _module(*self.names).gemm_of_stacks(a_matrix, stacks, out_dtype=out_dtype)


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


@functools.cache
def _module(implementation: str) -> Any:
    """Returns the module of an implementation, whose import takes a third of a second."""
    match implementation:
        case "triton":
            from pallas_kernels import _triton as module
        case "mosaic_gpu":
            from pallas_kernels._mosaic_gpu import products as module
        case _:
            from pallas_kernels import _reference as module
    return module


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
