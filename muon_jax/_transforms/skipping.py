"""Gradients of None: an update skips their parameters, as in torch.

The parameters, and what a state holds of them, are masked as by `optax.masked`. So the update of
others is that of a tree without the skipped ones.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from muon_jax._transforms.momentum import Storage
from muon_jax._trees import (
    any_missing,
    check_gradients,
    check_state,
    check_update,
    fill_missing,
    is_box,
    is_missing,
)

# The fields of a state that are trees like the parameters.
_ARRAYS = Storage()
_OF_PARAMETERS = ("mu", "nu")


class Present:
    """Which parameters have a gradient.

    Attributes:
        tree: a boolean for each parameter.
    """

    def __init__(self, gradients: Any, like: Any) -> None:
        """Compares gradients, where None stands for all that is below it, with parameters."""

        def fill(gradient: Any, subtree: Any) -> Any:
            return jax.tree.map(lambda _: gradient is not None, subtree)

        self.tree = jax.tree.map(fill, gradients, like, is_leaf=is_missing)

    def select(self, present: Any, absent: Any) -> Any:
        """Returns the tree `present`, with that of `absent` in the places of skipped parameters."""
        return jax.tree.map(
            lambda keep, p, a: p if _all(keep) else a, self.tree, present, absent, is_leaf=is_box
        )

    def mask(self, tree: Any) -> Any:
        """Returns a tree like the parameters in which skipped ones are masked."""
        return self.select(tree, jax.tree.map(lambda _: optax.MaskedNode(), self.tree))


def skip_missing(
    update: Callable[..., tuple[Any, Any]],
    field: str | None = None,
    storage: Storage = _ARRAYS,
    has_momenta: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Returns the update of a transformation that skips parameters whose gradient is None.

    Their updates are zeros in the dtype that a gradient of the parameter's own dtype gives, and
    what the state has of them stays as it is. Counts of steps advance.

    Args:
        update: as of a transformation, with another argument `whole`: a tree like the parameters,
            with arrays in the places of skipped ones, too.
        field: that the state must have; None for any state.
        storage: of the momenta in the state.
        has_momenta: whether the state has a momentum `mu` for each parameter, which tells its shape
            where a call has no parameters.

    Raises:
        TypeError: a gradient is no array, or the state is not what `init` returned.
        ValueError: a gradient is None and there are no shapes; or gradients are wrong.
    """

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if field is not None:
            check_state(updates, state, params, field)
        check_update(updates, params)
        if not any_missing(updates):
            return update(updates, state, params, whole=updates, **extra_args)
        of_state = None
        if has_momenta:
            of_state = storage.map(storage.load, storage.unpack(state.mu))
            check_gradients(updates, of_state, "the state")
        like = of_state if params is None else params
        if like is None:
            raise ValueError(
                "None in the place of a gradient, which Equinox leaves for all that is no array,"
                " needs the parameters, for its shape: call update(updates, state, params)"
            )
        present = Present(updates, like)
        zeros = _zeros(present, like, state, storage)
        whole = fill_missing(updates, zeros)
        new_updates, new_state = update(
            present.mask(whole),
            _map_nodes(present.mask, state),
            None if params is None else present.mask(params),
            whole=whole,
            **extra_args,
        )
        new_state = _map_nodes(lambda old, new: present.select(new, old), state, new_state)
        return present.select(new_updates, zeros), new_state

    return update_fn


def _all(keep: Any) -> bool:
    """Whether a boolean, or the one in a box, is true; none is in a box that is masked."""
    return all(jax.tree.leaves(keep))


def _map_nodes(function: Callable[..., Any], state: Any, *rest: Any) -> Any:
    """Maps the fields of states that are like the parameters; all else is that of the last one."""

    def map_node(*nodes: Any) -> Any:
        if not _is_node(nodes[0]):
            return nodes[-1]
        fields = [name for name in _OF_PARAMETERS if name in nodes[0]._fields]
        new = {name: function(*(getattr(node, name) for node in nodes)) for name in fields}
        return nodes[-1]._replace(**new)

    return jax.tree.map(map_node, state, *rest, is_leaf=_is_node)


def _is_node(node: Any) -> bool:
    fields = getattr(node, "_fields", ()) if isinstance(node, tuple) else ()
    return any(name in fields for name in _OF_PARAMETERS)


def _zeros(present: Present, like: Any, state: Any, storage: Storage) -> Any:
    """Zeros like the parameters, in the dtypes that these and their momenta promote to."""
    nodes = jax.tree.leaves(state, is_leaf=_is_node)
    of_nodes = (node.mu for node in nodes if _is_node(node) and hasattr(node, "mu"))
    momenta = [storage.map(storage.shape_of, storage.unpack(mu)) for mu in of_nodes]

    def zeros(keep: Any, *subtrees: Any) -> Any:
        if _all(keep):
            return subtrees[0]
        dtypes = [x.dtype for x in jax.tree.leaves(subtrees)]
        dtype = functools.reduce(jnp.promote_types, dtypes)
        return jax.tree.map(lambda x: jnp.zeros_like(x, dtype), subtrees[0])

    return jax.tree.map(zeros, present.tree, like, *momenta, is_leaf=is_box)
