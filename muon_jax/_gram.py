"""The gram form of quintic steps: most products are m × m, few touch the (m, n) matrix.

In exact arithmetic the steps give q₅(R)…q₁(R)·X, where R = XXᵀ and all factors are polynomials of
R. So they can be made on R and on Q, the product of the factors so far, symmetric and commuting:

    Z = bR + cR²,   Q <- QZ + aQ,   T = RZ + aR,   R <- TZ + aT,

four symmetric products a step, and X <- QX in the end. In half precision Q, whose entries grow with
the amplification of the smallest singular values, is rounded relative to its largest entry, and R
gets negative eigenvalues that the polynomials amplify. A restart, X <- QX and R = XXᵀ anew, repairs
both.

Reference: `Gram Newton–Schulz <https://github.com/Dao-AILab/gram-newton-schulz>`_, 2026.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from muon_jax._coefficients import Quintics
from muon_jax._cost import Products
from muon_jax._normalization import (
    EpsMode,
    gram_gain,
    inverse_norm,
    inverse_row_norms,
    times_square,
)
from muon_jax._pieces import Whole
from pallas_kernels import syrk, syrkx

type _Triple = tuple[float | jax.Array, ...]


def restarts(dtype: jax.typing.DTypeLike, num_steps: int) -> range:
    """Returns the steps after which X is computed anew.

    After every second one in bfloat16; after the second and then every third in float16; after
    every fifth in float32, never in float64.
    """
    first, every = {"bfloat16": (2, 2), "float16": (2, 3), "float32": (5, 5)}.get(
        jnp.dtype(dtype).name, (num_steps, 1)
    )
    return range(first, num_steps, every)


def products(dtype: jax.typing.DTypeLike, num_steps: int) -> Products:
    """Returns the products of that many steps."""
    segments = 1 + len(restarts(dtype, num_steps))
    return Products(
        grams=segments,
        # The first step of a segment needs no QZ, the last no T and no new R.
        squares=num_steps + 3 * (num_steps - segments),
        applications=segments,
        passes=segments,
    )


def run(
    x: jax.Array,
    quintics: Quintics,
    eps: float | jax.Array,
    eps_mode: EpsMode,
    scale: jax.Array,
    preconditioning: str,
    log2_n: int,
    held: Whole,
) -> jax.Array:
    """Returns the result of the steps on X over its norm; arguments as for `_composed.run`."""
    rows, first, last = quintics
    triples = rows * last if len(rows) == 1 else rows[first:last]
    gain = gram_gain(log2_n)
    (gram,) = held.gram(x, gain**2)
    if preconditioning == "aol":
        d = inverse_row_norms(gram, times_square(eps, gain * scale))
        x, gram = (
            (gain * x * held.spread(d)).astype(x.dtype),
            (gram * (2**7 * d) * (2**7 * d.mT)).astype(x.dtype),
        )
        s, factor = 2.0**-7, 1.0
    else:
        s = inverse_norm(x, gram, eps, eps_mode, gain * scale, preconditioning)
        factor = gain * s
    return _apply(x, gram, triples, s, factor, held)


def _apply(x, gram, triples: Sequence[_Triple], s, factor, held):
    """factor·q(s²·gram)·X, where q(R)·X is the result of the steps on X with R = XXᵀ."""
    square, product = (
        functools.partial(f, implementation=held.implementation) for f in (syrk, syrkx)
    )
    ends = (*restarts(x.dtype, len(triples)), len(triples))
    for begin, end in itertools.pairwise((0, *ends)):
        if begin:
            (gram,), s, factor = held.gram(x), 1.0, 1.0
        x = held.spread(_segment(square, product, gram, triples[begin:end], s, factor)) @ x
    return x


def _segment(syrk, syrkx, gram, triples, s, factor):
    """factor times the product of the factors of some steps, from R = s²·gram on."""
    (a, b, c), *others = triples
    r, scale = gram, s**2
    z = syrk(r, r, alpha=c * scale**2, beta=b * scale)
    q = _sum(factor, z, a * factor)
    for a_next, b_next, c_next in others:
        t = syrkx(r, z, r, alpha=scale, beta=a * scale)
        r, scale = syrkx(t, z, t, beta=a), 1.0
        a, z = a_next, syrk(r, r, alpha=c_next, beta=b_next)
        q = syrkx(q, z, q, beta=a)
    return q


def _sum(alpha, z, diagonal):
    """alpha·Z + diagonal·I."""
    accumulator = jnp.promote_types(z.dtype, jnp.float32)
    alpha, diagonal = (jnp.asarray(x, accumulator)[..., None, None] for x in (alpha, diagonal))
    return (alpha * z + diagonal * jnp.eye(z.shape[-1])).astype(z.dtype)
