"""Noise that keeps rounding errors of equal entries from adding up.

Where singular vectors are structured, as signs are, the entries of an Sⱼ have few different values.
Equal entries round alike, so the rounding error has a norm of up to √m times that of independent
errors. Noise below the last digit of one Sⱼ makes equal entries differ. Every later Sⱼ is a
polynomial of that one, so its entries differ too (docs/numerics.md, section 3.7).
"""

import jax
import jax.numpy as jnp
import numpy as np

# In units of u/√m: less does not separate equal entries enough, more costs accuracy.
_AMPLITUDE = 0.5


def noise_addend(operand: jax.Array) -> tuple[float, jax.Array]:
    """Returns an addend beta·N of noise, for an Sⱼ whose largest eigenvalue is about 1.

    N is symmetric, and its entries are uniform in [-1, 1). beta is u/(2√m), with the unit roundoff
    u, so the norm of the noise is 0.6u. An entry depends on its two indices alone: it is the same
    on every device, for every matrix and call.

        Nᵢⱼ = wᵢ·wⱼ mod 2³², as a signed integer, over 2³¹,   for random odd words w of 32 bits.

    Args:
        operand: shape `(..., m, m)`.

    Returns:
        beta, and N of shape `(m, m)` and the dtype of `operand`.
    """
    m = operand.shape[-1]
    words = jnp.asarray(np.random.PCG64(0).random_raw(m) >> 32 | 1, jnp.uint32)
    products = jax.lax.bitcast_convert_type(words[:, None] * words[None], jnp.int32)
    noise = products.astype(jnp.float32) * 2.0**-31
    beta = _AMPLITUDE * float(jnp.finfo(operand.dtype).eps) / 2 / max(m, 1) ** 0.5
    return beta, noise.astype(operand.dtype)
