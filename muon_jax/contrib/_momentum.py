"""Converts states of Muon to another form of momentum, or to another `mu_dtype`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from muon_jax._checks import checks_arguments
from muon_jax._distributed.sharding import Shardings, whole_tree
from muon_jax._transforms.momentum import Momentum, MuonState, Storage, storage_of
from muon_jax._trees import check_mu_dtype
from muon_jax.contrib._on_host import map_where_it_is
from muon_jax.contrib._quantized import (
    QUANTIZED,
    boxed_momenta,
    checked_tile_axes,
    dequantize,
    quantize,
)


@checks_arguments
def convert_momentum(
    state: Any, *, source: Momentum, target: Momentum, beta: float | Callable[[Any], Any]
) -> Any:
    """Converts an optimizer's state to another form of `momentum`, to continue a run with it.

    The momenta of equal gradients are proportional: `"ema"` and `"bias_corrected"` hold 1 - β times
    the momentum of `"heavy_ball"`. A run goes on as it would have, with two exceptions:

    *   `eps` has another weight: a momentum of `"heavy_ball"` is 1/(1 - β) times as large.
    *   Only `"bias_corrected"` corrects the bias.

    Args:
        state: any tree with a `MuonState` in it, such as the state of `muon` or of a chain.
        source: the form of the momentum in `state`.
        target: the form to convert to.
        beta: β, the same in all steps so far.

    Raises:
        TypeError: `beta` is not a number.
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
    factor = (1 - beta) ** exponent

    def scale(m: Any) -> Any:
        return QUANTIZED.save(QUANTIZED.load(m) * factor, m, None)

    def convert(node: MuonState) -> MuonState:
        scale_there = functools.partial(map_where_it_is, scale)
        mu = QUANTIZED.map(scale_there, QUANTIZED.unpack(node.mu))
        return node._replace(mu=boxed_momenta(mu))

    return _with_nodes(convert, state, (MuonState,), "a MuonState")


@checks_arguments
def cast_momentum(
    state: Any, mu_dtype: jax.typing.DTypeLike | Storage, shardings: Shardings = None
) -> Any:
    """Casts the momenta of an optimizer's state, to continue a run with another `mu_dtype`.

    Args:
        state: any tree with a `MuonState` or a `ScaleByAdamState` in it, such as that of `muon`.
        mu_dtype: a float dtype, `"int8"`, or the result of `on_host`. Rounding is to nearest. For
            int8, AdamW's momenta become bfloat16. A dtype does not move the state.
        shardings: as for `scale_by_muon`; needed only in a shard_map.

    Raises:
        ValueError: `mu_dtype` is not such a dtype, or is real for a complex momentum or complex for
            a real one; the state has no momenta; or `shardings` is missing or does not fit.
    """
    storage = storage_of(mu_dtype)
    if storage.dtype is None:
        raise ValueError("mu_dtype must be a dtype, got None: pass mu_dtype='float32', for example")

    def cast(node: Any) -> Any:
        mu = QUANTIZED.unpack(node.mu)
        shapes = QUANTIZED.map(QUANTIZED.shape_of, mu)
        check_mu_dtype(shapes, storage.dtype)
        own = storage if isinstance(node, MuonState) else storage.of_adam

        def cast_leaf(path: Any, m: Any, of_whole: Any) -> Any:
            m = dequantize(m)
            if jnp.dtype(own.dtype) != jnp.int8:
                return m.astype(own.dtype)
            axes = checked_tile_axes(path, m, of_whole)
            return m.astype(jnp.float32) if axes is None else quantize(m, axes)

        mu = jax.tree.map_with_path(
            lambda path, m, of_whole: map_where_it_is(lambda m: cast_leaf(path, m, of_whole), m),
            mu,
            whole_tree(shapes, shardings),
            is_leaf=QUANTIZED.is_momentum,
        )
        return own.memory.place(node._replace(mu=boxed_momenta(mu)))

    return _with_nodes(cast, state, (MuonState, optax.ScaleByAdamState), "momenta")


def _with_nodes(
    convert: Callable[[Any], Any], state: Any, types: tuple[type, ...], what: str
) -> Any:
    """Converts the nodes of these types in a state, which must have at least one."""
    found = []

    def convert_node(node: Any) -> Any:
        if not isinstance(node, types):
            return node
        found.append(node)
        return convert(node)

    state = jax.tree.map(convert_node, state, is_leaf=lambda node: isinstance(node, types))
    if not found:
        raise ValueError(
            f"state must have {what} in it, got {type(state).__name__} with none: pass the state"
            " of muon or scale_by_muon"
        )
    return state
