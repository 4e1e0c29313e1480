"""The forms of momentum: what is orthogonalized, made of the gradients so far."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

type Momentum = Literal["bias_corrected", "ema", "heavy_ball"]


class MuonState(NamedTuple):
    """State of `scale_by_muon`.

    Attributes:
        count: the number of updates so far (int32).
        mu: the momentum of each parameter: an array, or what `mu_dtype` puts in its place.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] (optax's name)
    mu: optax.Updates


def accumulation(
    momentum: Momentum, beta: float | jax.Array, count: jax.Array, nesterov: bool
) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns the function from g and m, in one dtype, to u and the new m.

    What depends on the step alone is computed once, for all parameters.

    Args:
        momentum: the form, see `scale_by_muon`.
        beta: β.
        count: the number t = 1, 2, … of this step.
        nesterov: whether u, which is to be orthogonalized, looks one step ahead.
    """
    weight = 1.0 if momentum == "heavy_ball" else 1 - beta
    correction = 1 - beta**count
    weight_of_mu = beta / (1 - beta ** jnp.asarray(optax.safe_increment(count)))
    weight_of_gradient = (1 - beta) / correction  # at most 1: it cannot overflow

    def accumulate(g: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = beta * m + weight * g
        if momentum != "bias_corrected":
            return (beta * m + weight * g if nesterov else m), m
        if not nesterov:
            return m / correction.astype(m.dtype), m
        return weight_of_mu.astype(m.dtype) * m + weight_of_gradient.astype(g.dtype) * g, m

    return accumulate
