"""Update scales that depend on a parameter's shape alone."""

import math

import jax
import jax.numpy as jnp
import optax

from muon_jax import _views


def scale_by_shape(
    weight_dimension_numbers: _views.Views = None,
    consistent_rms: float | jax.Array | None = None,
) -> optax.GradientTransformation:
    """Scales the update of each matrix by its fan-in, the rows, and its fan-out, the columns.

    Args:
        weight_dimension_numbers: as for `scale_by_muon`.
        consistent_rms: None multiplies by √max(1, fan_out/fan_in) (Jordan). A number r multiplies
            by r·√max(fan_in, fan_out) (`Moonlight <https://arxiv.org/abs/2502.16982>`_), which
            gives an orthogonal update the root mean square r whatever its shape.
    """

    def factor(fan_in, fan_out):
        if consistent_rms is None:
            return math.sqrt(max(1.0, fan_out / fan_in))
        return math.sqrt(max(fan_in, fan_out)) * consistent_rms

    def update_fn(updates, state, params=None):
        del params
        stacks, unflatten = _views.flatten(weight_dimension_numbers, updates)
        scaled = (jnp.asarray(factor(*x.shape[1:]), x.dtype) * x for x in stacks)
        return unflatten(scaled), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)
