"""Diagnostics of Muon's matrices, computed with the updates and kept in the optimizer's state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon_jax import _views
from muon_jax._matrix_axes import is_tall
from muon_jax._momentum import MuonState, fill_missing
from muon_jax._normalization import frobenius_norm, norm_of_any_size, over, wide

POWER_ITERATIONS = 16


class MetricsState(NamedTuple):
    """State of `with_metrics`: that of the transformation, and scalars (float32) by name."""

    inner: optax.OptState
    metrics: dict[str, jax.Array]


def with_metrics(
    transform: optax.GradientTransformation, weight_dimension_numbers: _views.Views = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps `scale_by_muon`, or a chain with it, so that the state holds metrics of each update.

    For the matrices (fan_in × fan_out) of each shape, from all parameters, there are

    *   `16x40/gradient_norm`: the Frobenius norm of their gradients together;
    *   `16x40/update_rms`: the root mean square of the entries of their updates;
    *   `16x40/orthogonality_residual`: ‖OOᵀ - I‖_F/√m for the update O on its smaller side m, the
        mean over matrices. 0 for an orthogonal O; a meaning only where no scale is in the chain;
    *   `16x40/stable_rank`: ‖M‖_F²/‖M‖₂² of the momentum M, the mean over matrices: between 1 and
        m, 0 for zeros. ‖M‖₂ is what 16 power iterations find, which is never above it, so that the
        rank may come out too large where the largest singular values are close.

    The residual costs a product OOᵀ in float32; nothing waits for the host. `metrics` finds the
    values in a state.

    Args:
        transform: has one `MuonState` in its state.
        weight_dimension_numbers: as for `scale_by_muon`.

    Raises:
        ValueError: the state has no `MuonState`, or several, or a parameter is no matrix.
    """
    wrapped = optax.with_extra_args_support(transform)

    def measure(gradients, updates, state):
        mu = _only(state, MuonState).mu
        gradients, updates, momenta = (
            _views.flatten(weight_dimension_numbers, _where_not_masked(mu, tree))[0]
            for tree in (gradients, updates, mu)
        )
        groups: dict[str, list[int]] = {}
        for i, stack in enumerate(gradients):
            groups.setdefault("{}x{}".format(*stack.shape[1:]), []).append(i)
        values = {}
        for shape, members in groups.items():
            g, o, m = (
                _wide(jnp.concatenate([stacks[i] for i in members]))
                for stacks in (gradients, updates, momenta)
            )
            values[f"{shape}/gradient_norm"] = norm_of_any_size(g, axis=None).squeeze()
            values[f"{shape}/update_rms"] = jnp.linalg.norm(o) / max(o.size, 1) ** 0.5
            values[f"{shape}/orthogonality_residual"] = jnp.mean(_orthogonality_residual(o))
            values[f"{shape}/stable_rank"] = jnp.mean(_stable_rank(m))
        return {name: value.astype(jnp.float32) for name, value in values.items()}

    def init_fn(params):
        state = wrapped.init(params)
        shapes = jax.eval_shape(measure, params, params, state)
        return MetricsState(state, {name: jnp.zeros([], jnp.float32) for name in shapes})

    def update_fn(updates, state, params=None, **extra_args):
        new_updates, inner = wrapped.update(updates, state.inner, params, **extra_args)
        return new_updates, MetricsState(inner, measure(updates, new_updates, inner))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def metrics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Returns the metrics that `with_metrics` left in an optimizer's state, however nested.

    Raises:
        ValueError: there are none, or those of several wrapped transformations: ask their states.
    """
    return _only(opt_state, MetricsState).metrics


def _only(state: Any, kind: type) -> Any:
    """Returns the one node of that kind in a state."""
    found = [
        node
        for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
        if isinstance(node, kind)
    ]
    if len(found) != 1:
        raise ValueError(f"the optimizer's state must hold one {kind.__name__}, got {len(found)}")
    return found[0]


def _where_not_masked(mu, tree):
    """`tree` with zeros for None, and a masked node at each of `mu`'s, of other optimizers."""

    def is_masked(node):
        return isinstance(node, optax.MaskedNode)

    tree = fill_missing(tree, mu)
    return jax.tree.map(lambda m, x: m if is_masked(m) else x, mu, tree, is_leaf=is_masked)


def _wide(x):
    """The matrices in float32 or wider, with m ≤ n."""
    return wide(x.mT if is_tall(x) else x)


def _orthogonality_residual(x):
    """‖XXᵀ - I‖_F/√m of each matrix (m, n) of a stack."""
    gram = jnp.matmul(x, x.mT.conj(), precision="highest")
    return frobenius_norm(gram - jnp.eye(x.shape[-2])[None]) / max(x.shape[-2], 1) ** 0.5


def _stable_rank(x):
    """‖X‖_F²/‖X‖₂² of each matrix (m, n) of a stack, 0 for zeros."""
    x = over(x, jnp.max(jnp.abs(x), (-2, -1), keepdims=True, initial=0))  # with finite squares

    def iterate(_, vector):
        image = jnp.matmul(x.mT.conj(), vector, precision="highest")
        vector = jnp.matmul(x, image, precision="highest")
        return over(vector, frobenius_norm(vector))

    start = jax.random.normal(jax.random.key(0), (x.shape[-2], 1), x.dtype)
    start = jnp.broadcast_to(start / frobenius_norm(start), (*x.shape[:-1], 1))
    vector = jax.lax.fori_loop(0, POWER_ITERATIONS, iterate, start)
    largest = frobenius_norm(jnp.matmul(x.mT.conj(), vector, precision="highest"))
    return over(frobenius_norm(x), largest) ** 2
