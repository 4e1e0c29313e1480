"""What of an iteration touches X: on whole matrices, or on such that devices hold in pieces.

Where the columns of X are divided among devices, XXᵀ is the sum of the Gram matrices of the pieces,
and QX is made piece by piece: all between is work on m × m matrices.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import gemm, syrk, syrk_with_residual


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """Matrices that this device has whole.

    Attributes:
        implementation: of all products, as for `syrk` and `gemm`.
        out_dtype: of the result, None for that of the products.
    """

    implementation: str | None
    out_dtype: jnp.dtype | None = None

    @property
    def is_alone(self) -> bool:
        """Whether X is read from memory as it is, and the result stored as it is."""
        return self.out_dtype is not None

    def gram(
        self,
        x: jax.Array,
        alpha: float | jax.Array = 1.0,
        *,
        residual: bool = False,
        symmetrize_output: bool = True,
    ) -> tuple[jax.Array, ...]:
        """Returns alpha·XXᵀ, rounded, with `residual` also what that rounding left."""
        product = syrk_with_residual if residual else syrk
        out = product(
            x,
            alpha=alpha,
            symmetrize_output=symmetrize_output,
            implementation=self.implementation,
        )
        return out if isinstance(out, tuple) else (out,)

    def apply(self, q: jax.Array, x: jax.Array, *, last: bool) -> jax.Array:
        """Returns QX, the last one in the dtype of the result."""
        return gemm(
            self.spread(q),
            x,
            out_dtype=self.out_dtype if last else None,
            implementation=self.implementation,
        )

    def spread(self, q: jax.Array) -> jax.Array:
        """Returns for all matrices what this device and others have made of their Gram matrices."""
        return q
