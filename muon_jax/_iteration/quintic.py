"""The standard form of quintic steps: every step multiplies with X.

A = XXᵀ,   Q = aI + bA + cA²,   X <- QX.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from muon_jax._iteration.noise import quintic_addends
from muon_jax._iteration.normalization import Normalization
from muon_jax._iteration.operand import WholeMatrices
from muon_jax._iteration.recipes import Quintics, is_traced
from pallas_kernels import syrk


def run_quintics(
    x: jax.Array, quintics: Quintics, normalization: Normalization, operand: WholeMatrices
) -> jax.Array:
    """Returns the result of the steps on X over its norm.

    The first Gram matrix has the `gram_gain`, for the norm to be read off it. A traced number of
    steps becomes a loop.

    Args:
        x: shape `(..., m, n)`.
        quintics: the steps.
        normalization: of X.
        operand: the matrices, whole.
    """
    rows, first, last = quintics.rows, quintics.first, quintics.last
    is_loop = is_traced((first, last))
    product = functools.partial(
        syrk, symmetrize_output=False, implementation=operand.implementation
    )

    def triple(step: int | jax.Array) -> Any:
        if len(rows) == 1:
            return rows[0]
        if not is_traced(step):
            return rows[step]
        # Stacked from scalars: custom_partitioning takes no program with constant arrays.
        return jnp.stack([jnp.stack(row) for row in rows])[step]

    def apply(
        step: int | jax.Array,
        x: jax.Array,
        gram: jax.Array,
        s: float | jax.Array,
        factor: float | jax.Array,
        *,
        noisy: bool = False,
    ) -> jax.Array:
        """factor·(a·I + b·R + c·R²)·X, one step on factor·X, with R = s²·gram."""
        a, b, c = (factor * coefficient for coefficient in triple(step))
        c_matrix, beta = quintic_addends(gram, b * s**2, a, noisy=noisy)
        q = product(gram, c_matrix, alpha=c * s**4, beta=beta, diagonal=a)
        return operand.apply(q, x, last=not is_loop and bool(step == last - 1))

    def body(step: int | jax.Array, x: jax.Array) -> jax.Array:
        return apply(step, x, product(x), 1.0, 1.0)

    gram = product(x, alpha=normalization.gain**2)
    x, gram, s, factor = normalization(x, gram, operand.spread)
    x = apply(first, x, gram, s, factor, noisy=quintics.has_noise(x.dtype))
    if is_loop:
        return jax.lax.fori_loop(first + 1, last, body, x)
    for step in range(int(first) + 1, int(last)):
        x = body(step, x)
    return x
