"""AdamW's direction: that of `optax.scale_by_adam`, leaf by leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from muon_jax._transforms.momentum import Storage
from muon_jax._trees import check_gradients, check_state


def scale_by_adam(
    b1: float | jax.Array,
    b2: float | jax.Array,
    eps: float | jax.Array,
    eps_root: float | jax.Array,
    nesterov: bool,
    storage: Storage,
) -> optax.GradientTransformation:
    """Returns `optax.scale_by_adam`, whose state is kept as `storage` says.

    With gradient g at step t = 1, 2, …,

        m <- (1 - b1)g + b1·m,  v <- (1 - b2)g² + b2·v,
        u = b1·m/(1 - b1ᵗ⁺¹) + (1 - b1)·g/(1 - b1ᵗ) with Nesterov momentum, else m/(1 - b1ᵗ),

    and the update is u/(√(v/(1 - b2ᵗ) + eps_root) + eps).

    Args:
        b1, b2: decay rates of the moments.
        eps: added to the denominator.
        eps_root: added under its square root.
        nesterov: whether u looks one step ahead.
        storage: of arrays. Its dtype is that of m; None is what optax promotes the parameters' and
            the gradients' to.

    Raises:
        TypeError: the state is not what `init` returned.
        ValueError: gradients do not fit the state, or the state is in another memory.
        NotImplementedError: the device has no such memory.
    """
    init = optax.scale_by_adam(mu_dtype=storage.dtype).init

    def init_fn(params: optax.Params) -> optax.OptState:
        return storage.memory.place(init(params))

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        check_state(updates, state, params, "mu")
        check_gradients(updates, state.mu, "the state")
        storage.memory.check(state)
        count = jnp.asarray(optax.safe_increment(state.count))
        # Computed once, as in optax: XLA may divide in another way by what only one leaf needs.
        mu_weight, nu_weight = 1 - b1**count, 1 - b2**count
        next_mu_weight = 1 - b1 ** jnp.asarray(optax.safe_increment(count))

        def update_leaf(moments: Any, g: jax.Array) -> tuple[Any, Any]:
            mu: Any = optax.tree.update_moment(g, moments[0], b1, 1)
            nu: Any = optax.tree.update_moment_per_elem_norm(g, moments[1], b2, 2)
            if nesterov:
                u = b1 * _divide(mu, next_mu_weight) + (1 - b1) * _divide(g, mu_weight)
            else:
                u = _divide(mu, mu_weight)
            u = u / (jnp.sqrt(_divide(nu, nu_weight) + eps_root) + eps)
            return u, (optax.tree.cast(mu, storage.dtype), nu.astype(moments[1].dtype))

        moments = jax.tree.map(lambda *both: both, state.mu, state.nu)
        updates, moments = storage.update_leaves(
            update_leaf, moments, updates, are_read_again=False
        )
        treedef = jax.tree.structure(updates)
        both = zip(*treedef.flatten_up_to(moments), strict=True)
        mu, nu = map(treedef.unflatten, both) if treedef.num_leaves else (state.mu, state.nu)
        return updates, state._replace(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(init_fn, update_fn)


def _divide(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x/weight in the dtype of x."""
    return x / weight.astype(jnp.result_type(x))
