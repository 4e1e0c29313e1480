"""Coefficients (a, b, c) of the steps X <- aX + bAX + cA²X with A = XXᵀ, by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

type Triple = tuple[float | jax.Array, float | jax.Array, float | jax.Array]
type NSCoeffs = str | Triple | tuple[Triple, ...]

# Each maps singular values in (0, 1] close to 1, so X must enter with spectral norm at most 1.
NAMED: dict[str, tuple[tuple[float, float, float], ...]] = {
    # Keller Jordan, https://kellerjordan.github.io/posts/muon/: one triple for every step. The
    # steepest slope at 0 whose limit stays within about [0.7, 1.2].
    "standard": ((3.4445, -4.7750, 2.0315),),
    # Five fitted triples, https://github.com/microsoft/dion: to be run in this order.
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def is_traced(value) -> bool:
    """Returns whether any leaf of `value` is known only when the traced function runs."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))


def canonicalize(ns_coeffs) -> Any:
    """Returns the coefficients as a name or nested tuples of floats, which hash, or traced."""
    if isinstance(ns_coeffs, str):
        return ns_coeffs
    if is_traced(ns_coeffs):
        return jnp.asarray(ns_coeffs)
    values = np.asarray(ns_coeffs, np.float64).tolist()
    return tuple(map(tuple, values)) if np.ndim(ns_coeffs) == 2 else tuple(values)


def resolve(ns_coeffs: Any, ns_steps: int | jax.Array):
    """Returns (rows, first, last): step i in [first, last) uses `rows[i]`, or the only row.

    A triple, or a name of one, is repeated `ns_steps` times. A name of several rows runs its last
    `ns_steps` of them. A table states its own number of steps, whatever `ns_steps` says.

    Raises:
        ValueError: an unknown name, a wrong shape, or a number of steps that is not to be had.
    """
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in NAMED:
            raise ValueError(f"ns_coeffs must be one of {sorted(NAMED)}, got {ns_coeffs!r}")
        rows = NAMED[ns_coeffs]
    else:
        shape = np.shape(ns_coeffs)
        if len(shape) not in (1, 2) or shape[-1] != 3 or shape[0] == 0:
            raise ValueError(f"ns_coeffs must have shape (3,) or (steps, 3), got {shape}")
        if len(shape) == 2:
            return ns_coeffs, 0, shape[0]
        rows = (ns_coeffs,)
    if not is_traced(ns_steps):
        ns_steps = int(ns_steps)
        if ns_steps < 1:
            raise ValueError(f"ns_steps must be at least 1, got {ns_steps}")
        if ns_steps > len(rows) > 1:
            raise ValueError(
                f"ns_coeffs={ns_coeffs!r} has {len(rows)} steps, got ns_steps={ns_steps}: pass"
                " fewer steps, or a table with a row for each"
            )
    return (rows, 0, ns_steps) if len(rows) == 1 else (rows, len(rows) - ns_steps, len(rows))
