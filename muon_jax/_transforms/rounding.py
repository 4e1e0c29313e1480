"""Rounding of the momentum to the dtype of the state."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from muon_jax._distributed.on_shards import distinct_keys
from muon_jax._distributed.sharding import Shardings

type Rounding = Literal["nearest", "stochastic"]


def widen(gradients: Any, mu: Any, rounding: Rounding) -> tuple[Any, Any]:
    """Returns both trees in the dtype that the momentum is computed in.

    The dtype is the wider of both, leaf by leaf, or float32 before stochastic rounding.

    Raises:
        ValueError: stochastic rounding of complex numbers.
    """
    if rounding == "nearest":

        def promote(x: jax.Array, other: jax.Array) -> jax.Array:
            return x.astype(jnp.promote_types(x.dtype, other.dtype))

        return jax.tree.map(promote, gradients, mu), jax.tree.map(promote, mu, gradients)
    for name, tree in (("gradient", gradients), ("momentum", mu)):
        for path, x in jax.tree.leaves_with_path(tree):
            if jnp.iscomplexobj(x):
                raise ValueError(
                    f"mu_rounding='stochastic' rounds real numbers, but the {name} of the parameter"
                    f" {jax.tree_util.keystr(path)} is {x.dtype}: set mu_rounding='nearest'"
                )
    return optax.tree.cast(gradients, jnp.float32), optax.tree.cast(mu, jnp.float32)


def cast_like(
    tree: Any, like: Any, rounding: Rounding, count: jax.Array, shardings: Shardings
) -> Any:
    """Returns `tree`, rounded to the dtypes of `like`.

    Args:
        tree: arrays, float32 where `rounding` is `"stochastic"`.
        like: arrays in the same structure.
        rounding: `"nearest"`, or `"stochastic"`: up or down at random.
        count: the number of the step. Random bits depend on it, on the position of the leaf, and in
            a shard_map on the shard.
        shardings: as for `scale_by_muon`.

    Raises:
        ValueError: stochastic rounding to another dtype than bfloat16, or one of `distinct_keys`.
        NotImplementedError: see `distinct_keys`.
    """
    if rounding == "nearest":
        return jax.tree.map(lambda x, old: x.astype(old.dtype), tree, like)
    for path, old in jax.tree.leaves_with_path(like):
        if old.dtype != jnp.bfloat16:
            raise ValueError(
                "mu_rounding='stochastic' rounds to bfloat16 or int8, but the momentum of the"
                f" parameter {jax.tree_util.keystr(path)} is {old.dtype}: set mu_dtype='bfloat16'"
            )
    leaves, treedef = jax.tree.flatten(tree)
    keys = random_keys(tree, count, shardings)
    return treedef.unflatten(map(stochastic_round, leaves, keys))


def random_keys(tree: Any, count: jax.Array, shardings: Shardings) -> list[jax.Array]:
    """Returns a key for each leaf of `tree`, by the step, the leaf, and in a shard_map the shard.

    Args:
        tree: arrays.
        count: the number of the step.
        shardings: as for `scale_by_muon`.

    Raises:
        ValueError: see `distinct_keys`.
        NotImplementedError: see `distinct_keys`.
    """
    key = jax.random.fold_in(jax.random.key(0), count)
    keys = [jax.random.fold_in(key, i) for i in range(len(jax.tree.leaves(tree)))]
    return distinct_keys(keys, tree, shardings)


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns float32 `x` in bfloat16, rounded up or down at random so that the mean is `x`.

    A bfloat16 is the upper half of a float32. Random bits are added to the lower half, and the sum
    is cut to its upper half. The probability of a carry into the upper half is the distance from
    the neighbour below. Values of bfloat16, infinities and NaN stay what they are.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits += jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    upper = (bits >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
