"""Update scales that depend on a parameter's shape alone."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from muon_jax._checks import check, check_number
from muon_jax._distributed.on_shards import by_element
from muon_jax._distributed.sharding import Shardings
from muon_jax._matrices.views import Views

type ShapeScale = Literal["clipped_ratio", "ratio", "none"]


def scale_by_shape(
    weight_dimension_numbers: Views = None,
    consistent_rms: float | jax.Array | None = None,
    shape_scale: ShapeScale = "clipped_ratio",
    shardings: Shardings = None,
) -> optax.GradientTransformation:
    """Scales the update of each matrix by its fan-in, the rows, and its fan-out, the columns.

    Args:
        weight_dimension_numbers: as for `scale_by_muon`.
        consistent_rms: a number r multiplies by r·√max(fan_in, fan_out) (`Moonlight
            <https://arxiv.org/abs/2502.16982>`_), which gives an orthogonal update the root mean
            square r whatever its shape. None leaves that to `shape_scale`.
        shape_scale: `"clipped_ratio"` multiplies by √max(1, fan_out/fan_in) (Jordan), `"ratio"` by
            √(fan_out/fan_in) (`Dion <https://github.com/microsoft/dion>`_), `"none"` by 1.
        shardings: as for `scale_by_muon`.

    Raises:
        ValueError: an unknown `shape_scale`, one beside `consistent_rms`, or that is negative.
    """
    check("shape_scale", shape_scale, ShapeScale)
    if consistent_rms is not None:
        check_number("consistent_rms", consistent_rms)
        if shape_scale != "clipped_ratio":
            raise ValueError(
                f"shape_scale={shape_scale!r} and consistent_rms={consistent_rms} are two scales"
                " for one update: leave one of them at its default"
            )

    def factor(fan_in, fan_out):
        if consistent_rms is not None:
            return math.sqrt(max(fan_in, fan_out))
        ratio = fan_out / max(fan_in, 1)
        return {"clipped_ratio": max(1.0, ratio), "ratio": ratio, "none": 1.0}[shape_scale] ** 0.5

    def update_fn(updates, state, params=None):
        del params
        leaves, treedef = jax.tree.flatten(updates)
        factors = by_element(factor, weight_dimension_numbers, updates, shardings)
        if consistent_rms is not None:
            factors = [consistent_rms * value for value in factors]
        factors = [jnp.asarray(f, x.dtype) for f, x in zip(factors, leaves, strict=True)]
        # A barrier, or XLA multiplies by this times a constant learning rate in some programs, and
        # rounds once, in others by one after the other.
        factors = jax.lax.optimization_barrier(factors)
        return treedef.unflatten([*map(jnp.multiply, factors, leaves)]), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)
