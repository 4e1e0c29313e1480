"""The optimizers whose updates of a model are compared, and the arguments of one update."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
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


# optax's products in 16 bits, which a user of optax gets by one line.
IN_16_BITS = "optax, 16 bits"


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
    optimizer = _optimizer(make, parameters)
    return optimizer.update, (gradients, optimizer.init(parameters), parameters)


def step_and_arguments(
    make: Callable[..., optax.GradientTransformation],
    gradients: dict[str, jax.Array],
    parameters: dict[str, jax.Array],
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what a train step does once it has gradients, and the arguments of its first call.

    It maps parameters, state and gradients to new parameters and state.
    """
    optimizer = _optimizer(make, parameters)
    return step_of(optimizer), (parameters, optimizer.init(parameters), gradients)


def step_of(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns the function of parameters, state and gradients to new parameters and state."""

    def step(parameters: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    return step


def _optimizer(
    make: Callable[..., optax.GradientTransformation], parameters: dict[str, jax.Array]
) -> optax.GradientTransformation:
    numbers = dimension_numbers({name: p.shape for name, p in parameters.items()})
    return make(learning_rate=LEARNING_RATE, muon_weight_dimension_numbers=numbers)
