"""What is orthogonalized, made of the gradients so far: the forms of momentum."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_jax._checks import check

type Momentum = Literal["bias_corrected", "ema", "heavy_ball"]


class MuonState(NamedTuple):
    """State of `scale_by_muon`: the number of updates (int32) and the momentum."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] (optax's name)
    mu: optax.Updates


def accumulate(
    momentum: Momentum,
    gradients: optax.Updates,
    mu: optax.Updates,
    beta: float | jax.Array,
    count: jax.Array,
    nesterov: bool,
) -> tuple[optax.Updates, optax.Updates]:
    """Returns u, which is orthogonalized, and the new momentum, both in the wider dtype.

    Args:
        momentum: the form, see `scale_by_muon`.
        gradients: g.
        mu: the momentum m before this step.
        beta: β.
        count: of this step, t = 1, 2, ….
        nesterov: whether u looks one step ahead.
    """
    weight = 1.0 if momentum == "heavy_ball" else 1 - beta

    def mix(m, g):
        return beta * m + weight * g

    mu = jax.tree.map(mix, mu, gradients)
    if momentum != "bias_corrected":
        return jax.tree.map(mix, mu, gradients) if nesterov else mu, mu
    if not nesterov:
        return optax.tree.bias_correction(mu, beta, count), mu
    of_mu = beta / (1 - beta ** jnp.asarray(optax.safe_increment(count)))
    of_gradient = (1 - beta) / (1 - beta**count)  # at most 1: it cannot overflow
    return jax.tree.map(
        lambda m, g: of_mu.astype(m.dtype) * m + of_gradient.astype(g.dtype) * g, mu, gradients
    ), mu


def convert_momentum(
    state: Any, *, source: Momentum, target: Momentum, beta: float | Callable[[Any], Any]
) -> Any:
    """Returns an optimizer's state for another form of `momentum`, to continue a run with it.

    The momenta of equal gradients are proportional: `"ema"` and `"bias_corrected"` hold 1 - β times
    that of `"heavy_ball"`. A run goes on as it would have, up to `eps`, beside which a momentum of
    `"heavy_ball"` is 1/(1 - β) times as large, and apart from the bias correction.

    Args:
        state: any tree with a `MuonState` in it, such as the state of `muon` or of a chain.
        source: the form of the momentum that `state` comes from.
        target: the form to convert to.
        beta: β, the same in all steps so far.

    Raises:
        ValueError: an unknown form, no `MuonState` in the state, or a β that is no number in
            [0, 1). Under a schedule of β gradients have other weights in each form, so that the
            momenta are not proportional.
    """
    check("source", source, Momentum)
    check("target", target, Momentum)
    if callable(beta):
        raise ValueError(
            "beta must be one number, got a schedule: the forms weight gradients by (1 - β)·β^k or"
            " β^k, which is one factor only where β is constant. Start the momentum anew"
        )
    if not (np.ndim(beta) == 0 and 0 <= beta < 1):
        raise ValueError(f"beta must be a number in [0, 1), got {beta}")
    exponent = (target != "heavy_ball") - (source != "heavy_ball")
    found = []

    def convert(node):
        if not isinstance(node, MuonState):
            return node
        found.append(node)
        factor = (1 - beta) ** exponent
        return node._replace(mu=jax.tree.map(lambda m: (m * factor).astype(m.dtype), node.mu))

    state = jax.tree.map(convert, state, is_leaf=lambda node: isinstance(node, MuonState))
    if not found:
        raise ValueError("state has no MuonState in it: pass the state of muon or scale_by_muon")
    return state
