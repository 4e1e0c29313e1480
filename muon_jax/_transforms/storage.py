"""How a state keeps moments: as arrays on the device, or as subclasses say."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from muon_jax._distributed.sharding import Shardings, is_in_shard_map
from muon_jax._matrices.views import Views
from muon_jax._transforms.rounding import Rounding, cast_like, check_rounding

# Values of `mu_dtype` that a module serves, which is imported when one asks for them.
_SERVED = {"int8": ("muon_jax.contrib._quantized", "Int8")}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where a state is: on the device, where updates compute."""

    def is_on_host(self, x: Any) -> bool:
        """Returns whether an array like `x` belongs on the host."""
        return False

    def place(self, state: Any) -> Any:
        """Returns a new state with its arrays where they belong."""
        return state

    def fetch(self, tree: Any) -> Any:
        """Returns the tree on the device."""
        return tree

    def streamed[**P](
        self, update: Callable[P, tuple[Any, Any]], gradients: Sequence[Any], are_read_again: bool
    ) -> Callable[P, tuple[Any, Any]]:
        """Returns `update`, from a leaf and its gradient to a result and a new leaf, for each leaf.

        Args:
            update: computes on the device.
            gradients: all of them.
            are_read_again: whether results are read more than once.
        """
        return update

    def check(self, state: Any) -> None:
        """Raises ValueError where an array of the state is not where it belongs."""
        if is_in_shard_map():  # where sizes are those of shards
            return
        for path, x in jax.tree.leaves_with_path(state):
            is_on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
            if is_on_host != self.is_on_host(x):
                raise ValueError(
                    "mu_dtype says that the large arrays of the state are"
                    f" {'on the device' if is_on_host else 'on the host'}, got"
                    f" {jax.tree_util.keystr(path)} of type {jax.typeof(x)}: pass"
                    " jax.tree.map(lambda x, like: jax.device_put(x, jax.typeof(like)"
                    ".memory_space), state, optimizer.init(params)), and the shardings of this"
                    " state to jit(out_shardings=...)"
                )


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a state keeps the momenta `mu`. Here each is an array.

    Attributes:
        dtype: as `mu_dtype` says it.
        memory: where they are.
        rounding: what `mu_rounding=None` stands for.
    """

    dtype: jax.typing.DTypeLike | None = None
    memory: Memory = Memory()
    rounding: ClassVar[Rounding] = "nearest"

    @property
    def computed_dtype(self) -> jax.typing.DTypeLike | None:
        """The dtype in which updates compute; None for that of the parameters."""
        return self.dtype

    @property
    def of_adam(self) -> "Storage":
        """How AdamW's moments are kept."""
        return self

    def init(self, params: Any, views: Views, shardings: Shardings) -> Any:
        """Returns momenta of zeros."""
        return optax.tree.zeros_like(params, dtype=self.dtype)

    def load(self, m: Any) -> jax.Array:
        """Returns the array that a momentum stands for."""
        return self.memory.fetch(m)

    def save(self, x: jax.Array, like: Any, key: jax.Array | None) -> Any:
        """Returns a new momentum `x` as `like` is kept, rounded at random where there is a key."""
        return cast_like(x, like, key)

    def unpack(self, mu: Any) -> Any:
        """Returns momenta as `init` made them, whatever wrapped or restored them since."""
        return mu

    def pack(self, mu: Any, given: Any) -> Any:
        """Returns momenta in the form that `given` had before `unpack`."""
        return mu

    def check(self, mu: Any, gradients: Any, shardings: Shardings, rounding: Rounding) -> None:
        """Raises ValueError where momenta are not as `init` makes them, or cannot be rounded so."""
        if rounding == "stochastic":
            check_rounding(gradients, mu)

    def is_momentum(self, node: Any) -> bool:
        """Returns whether a node is a momentum that is no array."""
        return False

    def shape_of(self, m: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape and the dtype of the array that a momentum stands for."""
        return jax.ShapeDtypeStruct(m.shape, m.dtype)

    def map(self, function: Callable[[Any], Any], mu: Any) -> Any:
        """Returns the tree of what `function` makes of each momentum."""
        return jax.tree.map(function, mu, is_leaf=self.is_momentum)

    def update_leaves(
        self,
        update: Callable[..., tuple[Any, Any]],
        stored: Any,
        gradients: Any,
        *others: Any,
        are_read_again: bool,
    ) -> tuple[Any, Any]:
        """Returns the trees of results and of new leaves that `update` makes, leaf by leaf.

        Args:
            update: maps a leaf, its gradient and `others` of it to its result and the new leaf.
            stored: a tree of leaves, which are arrays or trees of arrays.
            gradients: a tree with one array in the place of each leaf.
            others: for each gradient, in their order.
            are_read_again: see `Memory.streamed`.
        """
        flat, treedef = jax.tree.flatten(gradients)
        update = self.memory.streamed(update, flat, are_read_again)
        leaves = zip(treedef.flatten_up_to(stored), flat, *others, strict=True)
        pairs = [update(*leaf) for leaf in leaves]
        results, new = zip(*pairs, strict=True) if pairs else ((), ())
        return treedef.unflatten(results), treedef.unflatten(new)


def storage_of(mu_dtype: Any) -> Storage:
    """Returns what `mu_dtype` stands for: a dtype, or a `Storage` itself."""
    if isinstance(mu_dtype, Storage):
        return mu_dtype
    name = None if mu_dtype is None else jnp.dtype(mu_dtype).name
    if name in _SERVED:
        module, served = _SERVED[name]
        return getattr(importlib.import_module(module), served)(mu_dtype)
    return Storage(mu_dtype)
