"""Training on spheres: steps in proportion to a parameter's norm, which they keep."""

import jax.numpy as jnp
import optax

from muon_jax import _views


def scale_to_param_norm(
    weight_dimension_numbers: _views.Views = None,
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

    Raises:
        ValueError: `update` got no `params`, or a parameter is no matrix.

    References:
        MuonH in `levanter <https://github.com/marin-community/marin>`_.
    """
    return _of_pairs(lambda u, p: _ratio(_norm(p), _norm(u)) * u, weight_dimension_numbers)


def keep_param_norm(
    weight_dimension_numbers: _views.Views = None,
) -> optax.GradientTransformation:
    """Changes updates so that each matrix keeps its Frobenius norm: p + u <- (p + u)·‖p‖/‖p + u‖.

    The last of a chain, see `scale_to_param_norm`. A matrix of zeros stays one.

    Args:
        weight_dimension_numbers: as for `scale_by_muon`.

    Raises:
        ValueError: `update` got no `params`, or a parameter is no matrix.
    """

    def update(u, p):
        return _ratio(_norm(p), _norm(p + u)) * (p + u) - p

    return _of_pairs(update, weight_dimension_numbers)


def _of_pairs(function, views):
    """A transformation that maps each stack of updates and that of parameters to new updates."""

    def update_fn(updates, state, params=None):
        if params is None:
            raise ValueError("norms need the parameters: call update(updates, state, params)")
        stacks, unflatten = _views.flatten(views, updates)
        weights, _ = _views.flatten(views, params)

        def new(u, p):
            dtype = jnp.promote_types(u.dtype, jnp.float32)
            return function(u.astype(dtype), p.astype(dtype)).astype(u.dtype)

        return unflatten(map(new, stacks, weights)), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)


def _norm(x):
    return jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)


def _ratio(a, b):
    """a/b, and 0 where b is 0."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))
