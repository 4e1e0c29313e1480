"""Measures of the singular values of each matrix in an array."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from muon_jax._iteration.normalization import over, root, wide
from muon_jax.contrib._reductions import Matrices

POWER_ITERATIONS = 16
LANCZOS_STEPS = 16
# Named coefficients map what they reach to this value or above. "aol_nvidia" alone does not.
LEAST_REACHED = 0.5

type _Carry = tuple[jax.Array, jax.Array, jax.Array]


def grams_of(o: Matrices) -> jax.Array:
    """Returns OOᵀ `(*batch, m, m)` of each O (m, n) with m ≤ n, or of Oᵀ where O is tall."""
    x, (short, _), batch = wide(o.array), o.sides, o.axes.batch
    first = [*range(x.ndim)]
    second = [axis + x.ndim if axis in short else axis for axis in first]
    gram_axes = [*batch, *short, *(second[axis] for axis in short)]
    gram = jnp.einsum(x, first, x.conj(), second, gram_axes, precision="highest")
    m = o.size(short)
    return gram.reshape(*gram.shape[: len(batch)], m, m)


def orthogonality_residual(gram: jax.Array) -> jax.Array:
    """‖OOᵀ - I‖_F/√m of each matrix."""
    m = gram.shape[-1]
    return root(jnp.sum(jnp.abs(gram - jnp.eye(m)) ** 2, (-2, -1)) / max(m, 1))


def unreached_share(gram: jax.Array) -> jax.Array:
    """Estimates the share of singular values of O below `LEAST_REACHED`, for each matrix.

    F projects on the eigenvectors of G = OOᵀ whose eigenvalues are below the square of that. For a
    vector v of random signs, tr(F)/m is the expectation of vᵀFv/m. Lanczos steps from v give a
    tridiagonal T, with eigenvalues θ whose eigenvectors have the first entries w. Then vᵀFv/m is
    about the sum of w² over small θ (`stochastic Lanczos quadrature
    <https://doi.org/10.1137/16M1104974>`_, Ubaru, Chen and Saad 2017).
    """
    m = gram.shape[-1]
    if not m:
        return jnp.zeros(gram.shape[:-2])

    def lanczos_step(carry: _Carry, _: None) -> tuple[_Carry, tuple[jax.Array, jax.Array]]:
        before, vector, beta = carry
        image = jnp.matmul(gram, vector[..., None], precision="highest")[..., 0]
        alpha = jnp.sum((vector.conj() * image).real, -1, keepdims=True)
        image = image - alpha * vector - beta * before
        beta = root(jnp.sum(jnp.abs(image) ** 2, -1, keepdims=True))
        return (vector, over(image, beta), beta), (alpha, beta)

    signs = jax.random.rademacher(jax.random.key(0), gram.shape[:-1], gram.real.dtype)
    start = signs / m**0.5 + jnp.zeros_like(gram[..., 0])
    carry = jnp.zeros_like(start), start, jnp.zeros_like(start[..., :1].real)
    count = min(LANCZOS_STEPS, m)
    _, numbers = jax.lax.scan(lanczos_step, carry, length=count)
    alphas, betas = (jnp.moveaxis(x, 0, -1) for x in numbers)  # (*batch, 1, count)
    lower = jnp.eye(count) * alphas + jnp.eye(count, k=-1) * betas
    theta, vectors = jnp.linalg.eigh(lower, symmetrize_input=False)
    share = jnp.sum((theta < LEAST_REACHED**2) * vectors[..., 0, :] ** 2, -1)
    return jnp.where(jnp.isfinite(alphas).all((-2, -1)), share, jnp.nan)


def stable_rank(m: Matrices) -> jax.Array:
    """‖M‖_F²/‖M‖₂² of each matrix, 0 for zeros."""
    x, (short, long) = wide(m.array), m.sides
    x = over(x, m.largest(x))  # squares are finite

    def image(vector: jax.Array) -> jax.Array:
        return m.sum(x.conj() * vector, short)

    def length_along(vector: jax.Array, axes: Sequence[int]) -> jax.Array:
        return root(m.sum(jnp.abs(vector) ** 2, axes))

    def power_step(_: int, vector: jax.Array) -> jax.Array:
        vector = m.sum(x * image(vector), long)
        return over(vector, length_along(vector, short))

    sizes = [size if axis in short else 1 for axis, size in enumerate(x.shape)]
    start = jax.random.normal(jax.random.key(0), sizes, x.dtype)
    start = start / length_along(start, short) + jnp.zeros_like(m.sum(x, long))
    vector = jax.lax.fori_loop(0, POWER_ITERATIONS, power_step, start)
    return over(length_along(x, short + long), length_along(image(vector), long)) ** 2
