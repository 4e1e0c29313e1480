"""What of an iteration touches X: the Gram matrix XXᵀ, and the application QX."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import gemm, gemm_of_stacks, syrk, syrk_of_stacks, syrk_with_residual


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeMatrices:
    """Matrices that this device has whole.

    Attributes:
        implementation: of all products, as for `syrk` and `gemm`.
        out_dtype: of the result; None for the products' dtype.
    """

    implementation: str | None
    out_dtype: jnp.dtype | None = None

    @property
    def is_stored(self) -> bool:
        """Whether X is read from memory as it is, and the result stored as it is."""
        return self.out_dtype is not None

    def gram(
        self,
        x: Any,
        alpha: float | jax.Array = 1.0,
        *,
        residual: bool = False,
        symmetrize_output: bool = True,
    ) -> tuple[jax.Array, ...]:
        """Returns alpha·XXᵀ, rounded, and with `residual` also what the rounding left.

        Args:
            x: shape `(..., m, n)`.
            alpha: a coefficient, or one for each matrix.
            residual: whether to return the residual.
            symmetrize_output: as for `syrk`.
        """
        product = syrk_with_residual if residual else syrk
        out = product(
            x,
            alpha=alpha,
            symmetrize_output=symmetrize_output,
            implementation=self.implementation,
        )
        return out if isinstance(out, tuple) else (out,)

    def apply(self, q: jax.Array, x: Any, *, last: bool) -> Any:
        """Returns QX, the last one in the dtype of the result.

        Args:
            q: shape `(..., m, m)`, for the matrices whose Gram matrices this device iterates on.
            x: shape `(..., m, n)`.
            last: whether this is the last application of the iteration.
        """
        return gemm(
            self.spread(q),
            x,
            out_dtype=self.out_dtype if last else None,
            implementation=self.implementation,
        )

    def spread(self, q: jax.Array) -> jax.Array:
        """Returns Q for all matrices of X, of Q for those that this device iterates on."""
        return q


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeStacks(WholeMatrices):
    """Whole matrices of one m and several n, one stack for each n; by `"mosaic_gpu"`.

    Their Gram matrices are one stack, in the order of the matrices.
    """

    def gram(
        self,
        x: Sequence[jax.Array],
        alpha: float | jax.Array = 1.0,
        *,
        residual: bool = False,
        symmetrize_output: bool = True,
    ) -> tuple[jax.Array, ...]:
        """Returns `WholeMatrices.gram` of all matrices, in one launch."""
        del symmetrize_output  # the result is symmetric in any case
        return syrk_of_stacks(x, alpha=alpha, residual=residual)

    def apply(self, q: jax.Array, x: Sequence[jax.Array], *, last: bool) -> list[jax.Array]:
        """Returns `WholeMatrices.apply` of all matrices, in one launch."""
        return [*gemm_of_stacks(q, x, out_dtype=self.out_dtype if last else None)]
