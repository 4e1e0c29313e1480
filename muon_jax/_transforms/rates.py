"""Products and ratios of rates, each a number or a schedule."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax


def product_of_rates(*factors: Any) -> optax.ScalarOrSchedule:
    """Returns the product, a schedule where a factor is a schedule."""
    if not any(map(callable, factors)):
        return math.prod(factors)
    return lambda count: math.prod(_value_at(factor, count) for factor in factors)


def block_gain(
    learning_rate: optax.ScalarOrSchedule,
    block_learning_rate: optax.ScalarOrSchedule | None,
    block_period: int | None,
) -> optax.ScalarOrSchedule:
    """Returns what gives updates of `learning_rate` the size of `block_learning_rate`, their ratio.

    It is 1 where `learning_rate` is 0, as an update is 0 then whatever the gain.

    Args:
        learning_rate: η, that updates are multiplied by later.
        block_learning_rate: the rate of blocks in block steps; None is η.
        block_period: as for `scale_by_muon`.

    Raises:
        ValueError: there is a rate of block steps, and there are none.
    """
    if block_learning_rate is None:
        return 1.0
    if block_period in (None, 1):
        raise ValueError(
            "block_learning_rate is the rate of steps between those of whole matrices, and"
            f" block_period={block_period} has none: pass block_period=4, for example, or leave"
            " out block_learning_rate"
        )

    def ratio(count: jax.typing.ArrayLike) -> jax.Array:
        rate = jnp.asarray(_value_at(learning_rate, count), float)
        is_zero = rate == 0
        ratio = _value_at(block_learning_rate, count) / jnp.where(is_zero, 1, rate)
        return jnp.where(is_zero, 1, ratio)

    return ratio


def _value_at(rate: Any, count: jax.typing.ArrayLike) -> Any:
    return rate(count) if callable(rate) else rate
