"""Training on spheres: steps are proportional to a matrix's norm, and keep that norm."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from muon_jax._checks import checks_arguments
from muon_jax._distributed.sharding import (
    Parameter,
    Shardings,
    check_shardings,
    parameters_of,
)
from muon_jax._iteration.normalization import over, wide
from muon_jax._matrices.views import ShapeScale, Views, check_views
from muon_jax._transforms.chain import skip_missing
from muon_jax.contrib._reductions import Matrices, matrices_of_tree
from pallas_kernels.device import standard_promotion


@checks_arguments
def scale_to_param_norm(
    weight_dimension_numbers: Views = None,
    shardings: Shardings = None,
) -> optax.GradientTransformation:
    """Scales the update u of each matrix p to the matrix's own norm: u <- u·‖p‖/‖u‖ (Frobenius).

    A learning rate is then the length of a step relative to the matrix. Add `keep_param_norm` after
    the learning rate for MuonH, whose matrices move on spheres and need no weight decay:

        optax.chain(
            scale_by_muon(),
            scale_to_param_norm(),
            optax.scale_by_learning_rate(0.02),
            keep_param_norm(),
        )

    A matrix of zeros gives an update of zeros, and an update of zeros stays one. The dtype is
    float32.

    Args:
        weight_dimension_numbers: as for `scale_by_muon`.
        shardings: as for `scale_by_muon`; needed only in a shard_map.

    Raises:
        ValueError: `update` got no `params`, a parameter is no matrix, or `shardings` is missing or
            does not fit.
        NotImplementedError: on explicit axes or in a shard_map, a view takes an axis apart where
            its sharding does not; or a shard_map is over only some axes of a mesh.

    References:
        MuonH in `levanter <https://github.com/marin-community/marin>`_.
    """

    def scale_to_norm(matrices: Matrices, u: jax.Array, p: jax.Array) -> jax.Array:
        return matrices.norm(p) * over(u, matrices.norm(u))

    return _map_with_params(scale_to_norm, weight_dimension_numbers, shardings)


@checks_arguments
def keep_param_norm(
    weight_dimension_numbers: Views = None,
    shardings: Shardings = None,
) -> optax.GradientTransformation:
    """Changes updates so that each matrix keeps its Frobenius norm: p + u <- (p + u)·‖p‖/‖p + u‖.

    It is the last transformation of a chain, see `scale_to_param_norm`. A matrix of zeros stays
    one. Where p + u = 0 the update is 0.

    Args:
        weight_dimension_numbers: as for `scale_by_muon`.
        shardings: as for `scale_by_muon`; needed only in a shard_map.

    Raises:
        ValueError: `update` got no `params`, a parameter is no matrix, or `shardings` is missing or
            does not fit.
        NotImplementedError: on explicit axes or in a shard_map, a view takes an axis apart where
            its sharding does not; or a shard_map is over only some axes of a mesh.
    """

    def back_to_norm(matrices: Matrices, u: jax.Array, p: jax.Array) -> jax.Array:
        norm = matrices.norm(p + u)
        return jnp.where(norm == 0, 0, over(matrices.norm(p), norm) * (p + u) - p)

    return _map_with_params(back_to_norm, weight_dimension_numbers, shardings)


def check_no_scale(consistent_rms: float | jax.Array | None, shape_scale: ShapeScale) -> None:
    """Raises ValueError where `muon` has a scale by shapes, which `muonh` gives no effect."""
    scales = [f"consistent_rms={consistent_rms}"] if consistent_rms is not None else []
    scales += [f"shape_scale={shape_scale!r}"] if shape_scale == "ratio" else []
    if scales:
        raise ValueError(
            "contrib.muonh makes steps relative to the norms of matrices, whatever their scale:"
            f" leave out {' and '.join(scales)}"
        )


def _map_with_params(
    function: Callable[[Matrices, jax.Array, jax.Array], jax.Array],
    views: Views,
    shardings: Shardings,
) -> optax.GradientTransformation:
    """A transformation that applies `function(matrices, u, p)` to the matrices of each parameter.

    Args:
        function: makes the new update of the update u and the parameter p, both in float32 or
            wider and laid out like `matrices`.
        views: as for `scale_by_muon`.
        shardings: as for `scale_by_muon`.
    """

    check_views(views)
    check_shardings(shardings)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        whole: optax.Updates,
        of_muon: Sequence[Parameter] | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del extra_args
        if params is None:
            raise ValueError(
                "norms need the parameters, got params=None: call update(updates, state, params)"
            )
        if of_muon is None:
            of_muon = parameters_of(views, updates, shardings, whole)
        of_updates, unflatten = matrices_of_tree(of_muon, updates)
        of_params, _ = matrices_of_tree(of_muon, params)
        pairs = zip(itertools.chain(*of_updates), itertools.chain(*of_params), strict=True)
        new = (function(u, wide(u.array), wide(p.array)).astype(u.array.dtype) for u, p in pairs)
        return unflatten(new), state

    update = standard_promotion()(skip_missing(update_fn))
    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
