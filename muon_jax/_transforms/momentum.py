"""The forms of momentum: what is orthogonalized, made of the gradients so far."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon_jax._checks import checks_arguments
from muon_jax._distributed.sharding import Shardings, whole_tree
from muon_jax._transforms.on_host import map_where_it_is
from muon_jax._transforms.quantized import (
    Quantized,
    boxed_momenta,
    cast_mu,
    dequantize,
    dtype_of_adam,
    map_momenta,
    shapes_of_momenta,
    store,
    with_quantized,
)
from muon_jax._tree_checks import check_mu_dtype

type Momentum = Literal["bias_corrected", "ema", "heavy_ball"]


class MuonState(NamedTuple):
    """State of `scale_by_muon`.

    Attributes:
        count: the number of updates so far (int32).
        mu: the momentum of each parameter, an array or a `Quantized`.
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


@checks_arguments
def convert_momentum(
    state: Any, *, source: Momentum, target: Momentum, beta: float | Callable[[Any], Any]
) -> Any:
    """Converts an optimizer's state to another form of `momentum`, to continue a run with it.

    The momenta of equal gradients are proportional: `"ema"` and `"bias_corrected"` hold 1 - β times
    the momentum of `"heavy_ball"`. A run goes on as it would have, with two exceptions:

    *   `eps` weighs differently: a momentum of `"heavy_ball"` is 1/(1 - β) times as large.
    *   Only `"bias_corrected"` corrects the bias.

    Args:
        state: any tree with a `MuonState` in it, such as the state of `muon` or of a chain.
        source: the form of the momentum in `state`.
        target: the form to convert to.
        beta: β, the same in all steps so far.

    Raises:
        TypeError: `beta` is no number.
        ValueError: a form is unknown, the state has no `MuonState`, or `beta` is not in [0, 1) or
            is a schedule. Under a schedule of β each form weights the gradients differently, and
            the momenta are not proportional.
    """
    if callable(beta):
        raise ValueError(
            f"beta must be one number, got the schedule {beta}: the forms weight gradients by"
            " (1 - β)·β^k or β^k, which differ by one factor only where β is constant. Pass a"
            " constant beta, or start from a new state, optimizer.init(params)"
        )
    exponent = (target != "heavy_ball") - (source != "heavy_ball")
    found = []

    def convert_node(node: Any) -> Any:
        if not isinstance(node, MuonState):
            return node
        found.append(node)
        mu = with_quantized(node.mu)
        factor = (1 - beta) ** exponent

        def scale(m: Any) -> Any:
            if isinstance(m, Quantized):
                return store(dequantize(m) * factor, m, None)
            return (m * factor).astype(m.dtype)

        mu = map_momenta(functools.partial(map_where_it_is, scale), mu)
        return node._replace(mu=boxed_momenta(mu))

    state = jax.tree.map(convert_node, state, is_leaf=lambda node: isinstance(node, MuonState))
    if not found:
        raise ValueError(
            f"state must have a MuonState in it, got {type(state).__name__} with none: pass the"
            " state of muon or scale_by_muon"
        )
    return state


@checks_arguments
def cast_momentum(state: Any, mu_dtype: jax.typing.DTypeLike, shardings: Shardings = None) -> Any:
    """Casts the momenta of an optimizer's state, to continue a run with another `mu_dtype`.

    Args:
        state: any tree with a `MuonState` or a `ScaleByAdamState` in it, such as that of `muon`.
        mu_dtype: `"int8"` for `Quantized` in the places of large momenta, see `scale_by_muon`; or a
            float dtype. Rounding is to nearest. AdamW's momenta become bfloat16 for int8.
        shardings: as for `scale_by_muon`; needed only in a shard_map.

    Raises:
        ValueError: `mu_dtype` is no such dtype, is real where a momentum is complex, or conversely;
            the state has no momenta; or `shardings` is missing or does not fit.
    """
    if mu_dtype is None:
        raise ValueError("mu_dtype must be a dtype, got None: pass mu_dtype='float32', for example")
    nodes = MuonState, optax.ScaleByAdamState
    found = []

    def cast_node(node: Any) -> Any:
        if not isinstance(node, nodes):
            return node
        found.append(node)
        mu = with_quantized(node.mu)
        shapes = shapes_of_momenta(mu)
        check_mu_dtype(shapes, mu_dtype)
        of_adam = dtype_of_adam(mu_dtype) or mu_dtype
        dtype = mu_dtype if isinstance(node, MuonState) else of_adam
        mu = cast_mu(mu, dtype, whole_tree(shapes, shardings))
        return node._replace(mu=boxed_momenta(mu))

    state = jax.tree.map(cast_node, state, is_leaf=lambda node: isinstance(node, nodes))
    if not found:
        raise ValueError(
            f"state must have momenta in it, got {type(state).__name__} with none: pass the state"
            " of muon or scale_by_muon"
        )
    return state
