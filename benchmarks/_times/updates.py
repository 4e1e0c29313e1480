"""The optimizers whose updates of a model are compared, and the arguments of one update."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax.contrib

from benchmarks._times.inputs import standard_normal
from benchmarks._times.models import MODELS, dimension_numbers
from muon_jax import muon

LEARNING_RATE = 0.02
# What makes each optimizer; all take optax's arguments.
COMPARED: dict[str, Callable[..., optax.GradientTransformation]] = {
    "optax": optax.contrib.muon,
    "None": muon,
    "balanced": functools.partial(muon, ns_coeffs="balanced"),
}


def random_gradients(model: str, dtype: str) -> dict[str, jax.Array]:
    """Returns standard normal gradients of all parameters of a model, a name of `MODELS`."""
    return {
        name: standard_normal(seed, shape, dtype)
        for seed, (name, shape) in enumerate(MODELS[model].items())
    }


def update_and_arguments(
    make: Callable[..., optax.GradientTransformation],
    gradients: dict[str, jax.Array],
    parameters: dict[str, jax.Array],
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the update of an optimizer that takes optax's arguments, and those of its first call.

    The arguments are the gradients, the state that `init` returns, and the parameters.
    """
    numbers = dimension_numbers({name: p.shape for name, p in parameters.items()})
    optimizer = make(learning_rate=LEARNING_RATE, muon_weight_dimension_numbers=numbers)
    return optimizer.update, (gradients, optimizer.init(parameters), parameters)
