"""The gram form of the quintic iteration: most products are m × m, few touch the (m, n) matrix.

In exact arithmetic X₅ = q₅(R)…q₁(R)·X, where R = XXᵀ and every factor is a polynomial of R. So steps
can be made on R and on Q, the product of the factors so far, all symmetric and commuting:

    Z = bR + cR²,   Q <- QZ + aQ,   T = RZ + aR,   R <- TZ + aT,

four symmetric products a step, and X <- QX in the end. In half precision Q, whose entries grow with
the amplification of the smallest singular values, is rounded relative to its largest entry, and R
gets negative eigenvalues that the polynomials amplify. A restart, X <- QX and R = XXᵀ anew, repairs
both: in float16 one after the second step is enough, in bfloat16 it takes another after the fourth.

Reference: Gram Newton–Schulz, `Dao-AILab <https://github.com/Dao-AILab/gram-newton-schulz>`_, 2026.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

# Steps after which X is computed anew, by the bits of the significand.
_RESTARTS = {"bfloat16": (2, 4), "float16": (2,)}


def restarts(dtype: jax.typing.DTypeLike, num_steps: int) -> tuple[int, ...]:
    """Returns the steps after which the form restarts in `dtype`; none in 32 bits or more."""
    return tuple(s for s in _RESTARTS.get(jnp.dtype(dtype).name, ()) if s < num_steps)


def units(num_steps: int, dtype: jax.typing.DTypeLike, aspect: float) -> dict[str, float]:
    """Returns the cost of each form for n = aspect·m, in symmetric products of m × m matrices.

    A Gram matrix costs `aspect`, the product of an m × m matrix with X twice that.
    """
    segments = 1 + len(restarts(dtype, num_steps))
    # The first step of a segment has no QZ, the last needs no new R.
    products = num_steps + (num_steps - segments) + 2 * (num_steps - segments)
    return {
        "standard": num_steps * (3 * aspect + 1),
        "gram": segments * 3 * aspect + products,
    }


def apply(
    syrkx: Callable[..., jax.Array],
    x: jax.Array,
    gram: jax.Array,
    triples: Sequence[tuple[jax.Array | float, ...]],
    s: jax.Array | float,
) -> jax.Array:
    """Returns q(s²·gram)·s·X for the composition q of the steps `triples`.

    Args:
        syrkx: `pallas_kernels.syrkx`, or a function of its arguments.
        x: shape `(..., m, n)`; its dtype decides the restarts.
        gram: XXᵀ, shape `(..., m, m)`.
        triples: (a, b, c) of each step, traced or not.
        s: what X is multiplied by, of shape `(...)` or `()`.
    """
    ends = (*restarts(x.dtype, len(triples)), len(triples))
    for begin, end in itertools.pairwise((0, *ends)):
        if begin:
            gram, s = syrkx(x, x), 1.0
        x = _segment(syrkx, gram, triples[begin:end], s) @ x
    return x


def _segment(syrkx, gram, triples, s):
    """Returns s times the product of the factors of some steps from R = s²·gram on."""
    (a, b, c), *others = triples
    z = syrkx(gram, gram, gram, alpha=c * s**4, beta=b * s**2)
    q = _sum(s, z, a * s)
    r = gram
    for i, (a_next, b, c) in enumerate(others):
        scale = s**2 if i == 0 else 1.0
        t = syrkx(r, z, r, alpha=scale, beta=a * scale)
        r = syrkx(t, z, t, beta=a)
        a, z = a_next, syrkx(r, r, r, alpha=c, beta=b)
        q = syrkx(q, z, q, beta=a)
    return q


def _sum(alpha, z, diagonal):
    """alpha·Z + diagonal·I."""
    accumulator = jnp.promote_types(z.dtype, jnp.float32)
    alpha, diagonal = (jnp.asarray(x, accumulator)[..., None, None] for x in (alpha, diagonal))
    return (alpha * z + diagonal * jnp.eye(z.shape[-1])).astype(z.dtype)
