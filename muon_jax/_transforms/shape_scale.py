"""Scales of updates that depend on the shape of a matrix alone."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from muon_jax._checks import checks_arguments
from muon_jax._distributed.sharding import Parameter, Shardings, parameters_of
from muon_jax._matrices.parts import ShapeScale, shape_factor
from muon_jax._matrices.views import Views
from pallas_kernels.arguments import standard_promotion


@checks_arguments
def scale_by_shape(
    weight_dimension_numbers: Views = None,
    consistent_rms: float | jax.Array | None = None,
    shape_scale: ShapeScale = "clipped_ratio",
    shardings: Shardings = None,
) -> optax.GradientTransformation:
    """Scales the update of each matrix by its fan-in, the rows, and its fan-out, the columns.

    Args:
        weight_dimension_numbers: as for `scale_by_muon`.
        consistent_rms: a number r, to multiply by r·√max(fan_in, fan_out) (`Moonlight
            <https://arxiv.org/abs/2502.16982>`_). An orthogonal update of any shape then has the
            root mean square r. Pass None for `shape_scale`.
        shape_scale: what to multiply by without `consistent_rms`:

            *   `"clipped_ratio"`: √max(1, fan_out/fan_in) (Jordan).
            *   `"ratio"`: √(fan_out/fan_in) (`Dion <https://github.com/microsoft/dion>`_).
            *   `"none"`: 1.
        shardings: as for `scale_by_muon`.

    Raises:
        TypeError: `consistent_rms` is a schedule.
        ValueError: `shape_scale` is unknown or beside `consistent_rms`, `consistent_rms` is
            negative, or `shardings` is missing or does not fit.
        NotImplementedError: a shard_map is over only some axes of a mesh.
    """
    if consistent_rms is not None and shape_scale != "clipped_ratio":
        raise ValueError(
            f"shape_scale={shape_scale!r} and consistent_rms={consistent_rms} are two scales for"
            " one update: pass shape_scale='clipped_ratio' to have consistent_rms alone, or"
            " consistent_rms=None to have shape_scale alone"
        )

    scale = shape_scale if consistent_rms is None else "longer_side"
    factor_of = functools.partial(shape_factor, scale)

    @standard_promotion()
    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        of_muon: Sequence[Parameter] | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, extra_args
        leaves, treedef = jax.tree.flatten(updates)
        if of_muon is None:
            of_muon = parameters_of(weight_dimension_numbers, updates, shardings)
        factors = [parameter.values(factor_of) for parameter in of_muon]
        if consistent_rms is not None:
            factors = [consistent_rms * value for value in factors]
        rms = 1.0 if consistent_rms is None else consistent_rms
        dtypes = [jnp.result_type(x.dtype, rms) for x in leaves]  # as in optax
        factors = [jnp.asarray(f, dtype) for f, dtype in zip(factors, dtypes, strict=True)]
        # Without a barrier some programs multiply by the product of this factor and a constant
        # learning rate, which rounds once, and others by one after the other, which rounds twice.
        factors = jax.lax.optimization_barrier(factors)
        return treedef.unflatten([*map(jnp.multiply, factors, leaves)]), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)
