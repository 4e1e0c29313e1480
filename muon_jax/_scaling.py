"""Update scales that depend on a parameter's shape alone."""

import math

import jax
import jax.numpy as jnp
import optax

from muon_jax import _sharding, _views


def scale_by_shape(
    weight_dimension_numbers: _views.Views = None,
    consistent_rms: float | jax.Array | None = None,
    shardings: _sharding.Shardings = None,
) -> optax.GradientTransformation:
    """Scales the update of each matrix by its fan-in, the rows, and its fan-out, the columns.

    Args:
        weight_dimension_numbers: as for `scale_by_muon`.
        consistent_rms: None multiplies by √max(1, fan_out/fan_in) (Jordan). A number r multiplies
            by r·√max(fan_in, fan_out) (`Moonlight <https://arxiv.org/abs/2502.16982>`_), which
            gives an orthogonal update the root mean square r whatever its shape.
        shardings: as for `scale_by_muon`.
    """

    def factor(fan_in, fan_out):
        if consistent_rms is None:
            return math.sqrt(max(1.0, fan_out / fan_in))
        return math.sqrt(max(fan_in, fan_out))

    def update_fn(updates, state, params=None):
        del params
        leaves, treedef = jax.tree.flatten(updates)
        factors = _sharding.by_element(factor, weight_dimension_numbers, updates, shardings)
        if consistent_rms is not None:
            factors = [consistent_rms * value for value in factors]
        scaled = [jnp.asarray(f, x.dtype) * x for f, x in zip(factors, leaves, strict=True)]
        return treedef.unflatten(scaled), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)
