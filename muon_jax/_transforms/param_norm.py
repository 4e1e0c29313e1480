"""Training on spheres: steps in proportion to a parameter's norm, which they keep."""

import itertools

import jax.numpy as jnp
import optax

from muon_jax._distributed.reductions import matrices_of_tree
from muon_jax._distributed.sharding import Shardings
from muon_jax._matrices.views import Views
from muon_jax._numerics import over, wide


def scale_to_param_norm(
    weight_dimension_numbers: Views = None,
    shardings: Shardings = None,
) -> optax.GradientTransformation:
    """Scales the update u of each matrix p to the matrix's own norm: u <- u·‖p‖/‖u‖ (Frobenius).

    A learning rate is then the length of a step relative to the matrix. With `keep_param_norm`
    after the learning rate this is MuonH, whose matrices move on spheres, and need no weight decay:

        optax.chain(
            scale_by_muon(),
            scale_to_param_norm(),
            optax.scale_by_learning_rate(0.02),
            keep_param_norm(),
        )

    A matrix of zeros, or an update of zeros, gives an update of zeros. Computed in float32.

    Args:
        weight_dimension_numbers: as for `scale_by_muon`.
        shardings: as for `scale_by_muon`; needed in a shard_map alone.

    Raises:
        ValueError: `update` got no `params`, a parameter is no matrix, or `shardings` is missing or
            wrong.
        NotImplementedError: on explicit axes or in a shard_map, a `Split` or an `Unfold` takes an
            axis apart elsewhere than its sharding; or the shard_map is over some axes of a mesh.

    References:
        MuonH in `levanter <https://github.com/marin-community/marin>`_.
    """

    def update(matrices, u, p):
        return matrices.norm(p) * over(u, matrices.norm(u))

    return _of_pairs(update, weight_dimension_numbers, shardings)


def keep_param_norm(
    weight_dimension_numbers: Views = None,
    shardings: Shardings = None,
) -> optax.GradientTransformation:
    """Changes updates so that each matrix keeps its Frobenius norm: p + u <- (p + u)·‖p‖/‖p + u‖.

    The last of a chain, see `scale_to_param_norm`. A matrix of zeros stays one. Where p + u = 0 the
    update is 0.

    Args:
        weight_dimension_numbers: as for `scale_by_muon`.
        shardings: as for `scale_by_muon`; needed in a shard_map alone.

    Raises:
        ValueError: `update` got no `params`, a parameter is no matrix, or `shardings` is missing or
            wrong.
        NotImplementedError: on explicit axes or in a shard_map, a `Split` or an `Unfold` takes an
            axis apart elsewhere than its sharding; or the shard_map is over some axes of a mesh.
    """

    def update(matrices, u, p):
        norm = matrices.norm(p + u)
        return jnp.where(norm == 0, 0, over(matrices.norm(p), norm) * (p + u) - p)

    return _of_pairs(update, weight_dimension_numbers, shardings)


def _of_pairs(function, views, shardings):
    """A transformation that maps updates, and parameters, of the same matrices to new updates."""

    def update_fn(updates, state, params=None):
        if params is None:
            raise ValueError("norms need the parameters: call update(updates, state, params)")
        of_updates, unflatten = matrices_of_tree(views, updates, shardings)
        of_params, _ = matrices_of_tree(views, params, shardings)
        pairs = zip(itertools.chain(*of_updates), itertools.chain(*of_params), strict=True)
        new = (function(u, wide(u.array), wide(p.array)).astype(u.array.dtype) for u, p in pairs)
        return unflatten(new), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)
