"""Products of rates, each a number or a schedule."""

import math
from typing import Any

import jax
import optax


def product_of_rates(*factors: Any) -> optax.ScalarOrSchedule:
    """Returns the product, a schedule where a factor is a schedule."""
    if not any(map(callable, factors)):
        return math.prod(factors)
    return lambda count: math.prod(_value_at(factor, count) for factor in factors)


def _value_at(rate: Any, count: jax.typing.ArrayLike) -> Any:
    return rate(count) if callable(rate) else rate
