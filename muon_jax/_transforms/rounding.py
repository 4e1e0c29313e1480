"""Rounding of the momentum to the dtype of the state."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from muon_jax._distributed.on_shards import distinct_keys
from muon_jax._distributed.sharding import Shardings

type Rounding = Literal["nearest", "stochastic"]


def check_rounding(gradients: Any, mu: Any) -> None:
    """Raises ValueError where a number is complex, or a momentum is not in bfloat16.

    Args:
        gradients: arrays.
        mu: the momenta, or their shapes, to be rounded at random.
    """
    for name, tree in (("gradient", gradients), ("momentum", mu)):
        for path, x in jax.tree.leaves_with_path(tree):
            if jnp.issubdtype(x.dtype, jnp.complexfloating):
                raise ValueError(
                    f"mu_rounding='stochastic' rounds real numbers, but the {name} of the parameter"
                    f" {jax.tree_util.keystr(path)} is {x.dtype}: set mu_rounding='nearest'"
                )
    for path, m in jax.tree.leaves_with_path(mu):
        if m.dtype != jnp.bfloat16:
            raise ValueError(
                "mu_rounding='stochastic' rounds to bfloat16 or int8, but the momentum of the"
                f" parameter {jax.tree_util.keystr(path)} is {m.dtype}: set mu_dtype='bfloat16'"
            )


def widen(gradient: jax.Array, m: jax.Array, rounding: Rounding) -> tuple[jax.Array, jax.Array]:
    """Returns both in the dtype that the momentum is computed in.

    The dtype is the wider of both, or float32 before stochastic rounding.
    """
    wide = jnp.promote_types(gradient.dtype, m.dtype) if rounding == "nearest" else jnp.float32
    return gradient.astype(wide), m.astype(wide)


def cast_like(x: jax.Array, like: jax.Array, key: jax.Array | None) -> jax.Array:
    """Returns `x`, rounded to the dtype of `like`.

    Args:
        x: float32 where it is rounded at random.
        like: an array.
        key: of random bits, to round to bfloat16 up or down at random; None to round to nearest.
    """
    if key is not None and like.dtype == jnp.bfloat16:
        return stochastic_round(x, key)
    return x.astype(like.dtype)


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
