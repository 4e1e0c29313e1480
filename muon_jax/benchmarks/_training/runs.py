"""Trains a small GPT under Muon, by coefficients, and measures its validation loss."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from muon_jax import muon
from muon_jax.benchmarks._training.gpt import GPT, Parameters
from muon_jax.benchmarks._training.stdlib_text import Text

# The arguments of `muon`, by variant.
VARIANTS: dict[str, dict[str, Any]] = {
    "standard": {"ns_coeffs": "standard"},
    "fast": {"ns_coeffs": "fast"},
    "balanced": {"ns_coeffs": "balanced"},
    "accurate": {"ns_coeffs": "accurate"},
    "polar_express": {"ns_coeffs": "polar_express"},
    "aol": {"ns_coeffs": "aol", "preconditioning": "aol"},
    "standard_3_steps": {"ns_coeffs": "standard", "ns_steps": 3},
    "preset_optax": {"preset": "optax"},
    "optax": {},  # the defaults of `optax.contrib.muon`
}
# Has too few steps. A comparison that cannot tell it from the others tells nothing.
CONTROL = "standard_3_steps"

type State = tuple[Parameters, optax.OptState]

# How often a run measures its validation loss; the last time is at its end.
EVALUATIONS = 10


@dataclasses.dataclass(frozen=True)
class Training:
    """How a run trains.

    Attributes:
        steps: a multiple of `EVALUATIONS`. Over the first tenth both learning rates rise from 0,
            then a cosine takes them back to 0.
        batch_size: windows of `context + 1` bytes for each step.
        adam_learning_rate: the peak of AdamW's, for all parameters but the layers' matrices.
        validation_batches: of `batch_size` windows, the same for all runs and evaluations.

    Raises:
        ValueError: `steps` is no positive multiple of `EVALUATIONS`.
    """

    steps: int = 600
    batch_size: int = 32
    adam_learning_rate: float = 0.003
    validation_batches: int = 16

    def __post_init__(self) -> None:
        if self.steps < 1 or self.steps % EVALUATIONS:
            raise ValueError(
                f"steps must be a positive multiple of {EVALUATIONS}, the number of evaluations,"
                f" got {self.steps}"
            )


def measure_training(
    name: str,
    model: GPT,
    training: Training,
    text: Text,
    learning_rates: Sequence[float],
    seeds: Sequence[int],
) -> dict[str, Any]:
    """Trains a variant with every learning rate and seed, all runs in one program.

    A seed decides the initial parameters and the batches, for all variants and learning rates
    alike, so runs of one seed are pairs.

    Returns:
        `name`, `arguments` of `muon`, `compile_seconds` and `seconds`;
        `losses`, the final validation losses in nats per byte, by learning rate and seed;
        `curves`, the validation losses of each evaluation, by learning rate and seed.
        None stands for a loss that is not finite.
    """
    runs = [*itertools.product(learning_rates, seeds)]
    rates, run_seeds = (jnp.asarray(column) for column in zip(*runs, strict=True))
    start = time.perf_counter()
    function = jax.vmap(functools.partial(train, name, model, training), (None, None, 0, 0))
    train_bytes, windows = jnp.asarray(text.train), validation_windows(text, model, training)
    arguments = (train_bytes, windows, rates, run_seeds)
    program = jax.jit(function).lower(*arguments).compile()
    compiled = time.perf_counter()
    curves = np.asarray(program(*arguments)).reshape(len(learning_rates), len(seeds), EVALUATIONS)
    end = time.perf_counter()
    rounded = np.vectorize(lambda x: round(float(x), 5) if np.isfinite(x) else None, [object])
    return {
        "name": name,
        "arguments": VARIANTS[name],
        "compile_seconds": round(compiled - start, 1),
        "seconds": round(end - compiled, 1),
        "losses": rounded(curves[..., -1]).tolist(),
        "curves": rounded(curves).tolist(),
    }


def train(
    name: str,
    model: GPT,
    training: Training,
    train_bytes: jax.Array,
    windows: jax.Array,
    learning_rate: jax.Array,
    seed: jax.Array,
) -> jax.Array:
    """Returns the validation losses of one run.

    Args:
        name: of the variant.
        model: the sizes of the model.
        training: how it trains.
        train_bytes: uint8 of shape `(bytes,)`.
        windows: uint8 of shape `(validation_batches, batch_size, context + 1)`.
        learning_rate: the peak of Muon's.
        seed: of the initial parameters and the batches.

    Returns:
        float32 of shape `(EVALUATIONS,)`, in nats per byte.
    """
    optimizer = make_optimizer(name, model, training, learning_rate)
    key_of_parameters, key_of_batches = jax.random.split(jax.random.key(seed))

    def step(state: State, starts: jax.Array) -> tuple[State, None]:
        parameters, optimizer_state = state
        batch = train_bytes[starts[:, None] + jnp.arange(model.context + 1)]
        gradients = jax.grad(model.loss)(parameters, batch)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), optimizer_state), None

    def steps_and_evaluation(state: State, starts: jax.Array) -> tuple[State, jax.Array]:
        state, _ = jax.lax.scan(step, state, starts)
        losses = jax.lax.map(functools.partial(model.loss, state[0]), windows)
        return state, losses.mean()

    parameters = model.init(key_of_parameters)
    state = (parameters, optimizer.init(parameters))
    shape = (EVALUATIONS, training.steps // EVALUATIONS, training.batch_size)
    starts = jax.random.randint(key_of_batches, shape, 0, train_bytes.size - model.context)
    _, losses = jax.lax.scan(steps_and_evaluation, state, starts)
    return losses


def make_optimizer(
    name: str, model: GPT, training: Training, learning_rate: float | jax.Array
) -> optax.GradientTransformation:
    """Returns Muon, ours or optax's, for the layers' matrices, and AdamW for the rest.

    Both follow one schedule. Muon's has the peak `learning_rate`, which may be traced.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, training.steps // 10, training.steps)
    return (optax.contrib.muon if name == "optax" else muon)(
        lambda count: learning_rate * schedule(count),
        adam_learning_rate=lambda count: training.adam_learning_rate * schedule(count),
        muon_weight_dimension_numbers=model.dimension_numbers(),
        **VARIANTS[name],
    )


def validation_windows(text: Text, model: GPT, training: Training) -> jax.Array:
    """Returns windows of the validation text at even distances.

    Returns:
        uint8 of shape `(validation_batches, batch_size, context + 1)`.

    Raises:
        ValueError: a part of the text is shorter than a window.
    """
    size = model.context + 1
    if min(text.train.size, text.validation.size) < size:
        raise ValueError(
            f"a window of context + 1 = {size} bytes needs as many to train on and to validate on,"
            f" got {text.train.size} and {text.validation.size}: pass a smaller context"
        )
    shape = (training.validation_batches, training.batch_size, 1)
    starts = np.linspace(0, text.validation.size - size, shape[0] * shape[1]).astype(int)
    return jnp.asarray(text.validation[starts.reshape(shape) + np.arange(size)])
