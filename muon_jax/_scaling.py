"""Update scales that depend on a parameter's shape alone."""

import math

import jax
import jax.numpy as jnp
import optax

from muon_jax import _matrix_axes


def scale_by_shape(
    weight_dimension_numbers: _matrix_axes.DimensionNumbersTree
    | _matrix_axes.DimensionNumbersFn
    | None = None,
    consistent_rms: float | jax.Array | None = None,
) -> optax.GradientTransformation:
    """Scales the update of each parameter by its fan-in and fan-out.

    Args:
        weight_dimension_numbers: as for `scale_by_muon`.
        consistent_rms: None multiplies by √max(1, fan_out/fan_in) (Jordan). A number r multiplies
            by r·√max(fan_in, fan_out) (`Moonlight <https://arxiv.org/abs/2502.16982>`_), which
            gives an orthogonal update the root mean square r whatever its shape.
    """

    def scale(axes, update):
        fan_in = math.prod(update.shape[axis] for axis in axes.reduction)
        fan_out = math.prod(update.shape[axis] for axis in axes.output)
        if consistent_rms is None:
            factor = math.sqrt(max(1.0, fan_out / fan_in))
        else:
            factor = math.sqrt(max(fan_in, fan_out)) * consistent_rms
        return jnp.asarray(factor, update.dtype) * update

    def update_fn(updates, state, params=None):
        del params
        scaled = _matrix_axes.tree_map_matrices(scale, weight_dimension_numbers, updates)
        return scaled, state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)
