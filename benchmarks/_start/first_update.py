"""The program that `start` runs: it compiles the first update of a model, and checks the result.

    python -m benchmarks._start.first_update MODEL OPTIMIZER

It prints what `measure_first_update` returns, as JSON.
"""

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._times.correctness import in_float64, largest_error
from benchmarks._times.models import MODELS, dimension_numbers
from benchmarks._times.one_device import COEFFICIENTS_TOLERANCE
from benchmarks._times.updates import (
    COMPARED,
    LEARNING_RATE,
    random_gradients,
    update_and_arguments,
)
from muon_jax import newton_schulz

# What the lowered text has once for each kernel of ours: Mosaic GPU's, Triton's.
_KERNELS = ("@mosaic_gpu_v2", "__gpu$xla.gpu.triton")
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def measure_first_update(model: str, name: str) -> dict[str, Any]:
    """Compiles one update of all parameters of a model, and runs it once.

    JAX keeps what it has traced and compiled: call this once in a process.

    Args:
        model: a name of `MODELS`. Gradients, state and parameters are in float32.
        name: of the optimizer, in `COMPARED`.

    Returns:
        `seconds` of `trace`, `lower` and `compile`; `cached`, whether the program came from the
        persistent compilation cache; `kernels`, how many of ours it has; `error`, the
        `error_of_smallest_matrix`.

    Raises:
        ArithmeticError: an update is wrong.
    """
    gradients = random_gradients(model, "float32")
    parameters = jax.tree.map(jnp.zeros_like, gradients)
    update, arguments = update_and_arguments(COMPARED[name], gradients, parameters)
    jax.block_until_ready(arguments)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    times = [time.perf_counter()]
    traced = jax.jit(update).trace(*arguments)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    cached = _CACHE_HIT in events
    updates, _ = compiled(*arguments)
    text = lowered.as_text()
    return {
        "seconds": dict(zip(("trace", "lower", "compile"), np.diff(times).tolist(), strict=True)),
        "cached": cached,
        "kernels": sum(map(text.count, _KERNELS)),
        "error": error_of_smallest_matrix(updates, gradients, model, name),
    }


def error_of_smallest_matrix(
    updates: dict[str, jax.Array], gradients: dict[str, jax.Array], model: str, name: str
) -> float:
    """Returns the relative error of the first update of one matrix, G.

    The exact update is -`LEARNING_RATE` √max(1, n/m) O. O is the result of `newton_schulz` for the
    (m, n) matrix G, in float64, with the coefficients of the optimizer.

    Args:
        updates: by parameter; those of matrices have shape `(..., m, n)`.
        gradients: likewise, in the first step.
        model: a name of `MODELS`, those parameters'.
        name: of the optimizer, in `COMPARED`.

    Raises:
        ArithmeticError: an update is not finite, or the error is more than
            `COEFFICIENTS_TOLERANCE`.
    """
    case = f"start {model}, {name}"
    for parameter, update in updates.items():
        if not jnp.isfinite(update).all():
            raise ArithmeticError(f"{case}: the update of {parameter} is not finite")
    numbers = dimension_numbers(MODELS[model])
    matrices = {key: x for key, x in gradients.items() if numbers[key] is not None}
    smallest = min(matrices, key=lambda key: np.prod(matrices[key].shape[-2:]))
    first = (0,) * (matrices[smallest].ndim - 2)  # of a stack
    gradient = matrices[smallest][first]
    m, n = gradient.shape
    coefficients = "balanced" if name == "balanced" else "standard"
    scale = -LEARNING_RATE * max(1.0, n / m) ** 0.5
    exact = in_float64(
        lambda x: scale * newton_schulz(x, ns_coeffs=coefficients, dtype=None), (gradient,)
    )
    return largest_error(
        {smallest: updates[smallest][first]},
        {smallest: exact},
        case,
        "that in float64",
        COEFFICIENTS_TOLERANCE,
    )


if __name__ == "__main__":
    print(json.dumps(measure_first_update(*sys.argv[1:])))
