"""Trains a GPT under one optimizer, and measures losses, times and momenta."""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._training.gpt import GPT
from benchmarks._training.optimizers import make_optimizer
from benchmarks._training.spectra import Spectra
from benchmarks._training.text import Text

# How often a run measures its validation loss; the last time is at its end.
EVALUATIONS = 10


@dataclasses.dataclass(frozen=True)
class Training:
    """How a run trains.

    Attributes:
        steps: a multiple of `EVALUATIONS`.
        batch_size: windows of `context + 1` tokens for each step.
        weight_decay: of the layers' matrices.
        validation_batches: of `batch_size` windows, the same for all runs and evaluations.

    Raises:
        ValueError: `steps` is no positive multiple of `EVALUATIONS`, or `batch_size` is below 1.
    """

    steps: int = 1000
    batch_size: int = 32
    weight_decay: float = 0.1
    validation_batches: int = 16

    def __post_init__(self) -> None:
        if self.steps < 1 or self.steps % EVALUATIONS:
            raise ValueError(
                f"steps must be a positive multiple of {EVALUATIONS}, the number of evaluations,"
                f" got {self.steps}"
            )
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")


class TrainingProgram:
    """The compiled steps of one variant of the optimizer and one model.

    Gradients and update are two programs, so that each can be timed. The learning rate and the seed
    are data. A seed decides the initial parameters, and the tokens of each step whatever the
    variant and the width are. So runs of one seed are pairs.

    Attributes:
        facts: sizes, and milliseconds: `compile_seconds` of all programs, `step_ms` of a whole
            training step and `optimizer_ms` of clipping and update, once a run has ended.
    """

    def __init__(self, name: str, model: GPT, training: Training, text: Text) -> None:
        windows = validation_windows(text, model, training)
        self._text, self._windows = jax.device_put((text.train, windows))
        self._model, self._training = model, training

        def update(
            learning_rate: jax.Array, gradients: Any, step: jax.Array, params: Any, state: Any
        ) -> tuple[jax.Array, Any, Any]:
            optimizer = make_optimizer(
                name, model, training.steps, training.weight_decay, learning_rate
            )
            updates, state = optimizer.update(gradients, state, params)
            return step + 1, jax.tree.map(jnp.add, params, updates), state

        optimizer = make_optimizer(name, model, training.steps, training.weight_decay, 0.0)
        self._init = jax.jit(optimizer.init)
        self._gradients = functools.partial(gradients, model, self._text)
        self._update = jax.jit(update, donate_argnums=(2, 3, 4))
        self._evaluate = functools.partial(evaluate, model, self._windows)
        began = time.perf_counter()
        step, params, state = self._start(0)
        sizes = [(p.size, p.ndim > 2) for p in jax.tree.leaves(params)]
        grads = self._gradients(self._starts(0), step, params)
        _, params, _ = self._update(jnp.float32(0.0), grads, step, params, state)
        jax.block_until_ready(self._evaluate(params))
        self.facts: dict[str, Any] = {
            "parameters": sum(size for size, _ in sizes),
            "matrix_parameters": sum(size for size, is_matrix in sizes if is_matrix),
            "compile_seconds": round(time.perf_counter() - began, 1),
        }

    def train(
        self, learning_rate: float, seed: int, spectra: Spectra | None = None
    ) -> dict[str, Any]:
        """Trains from the start.

        Args:
            learning_rate: its peak.
            seed: of the initial parameters and the batches.
            spectra: is given the optimizer's state after each evaluation.

        Returns:
            `losses`, of each evaluation, nats per token, None where one is not finite;
            `seconds`, of all steps, without evaluations and compilation.
        """
        training, starts = self._training, self._starts(seed)
        interval = training.steps // EVALUATIONS
        rate, (step, params, state) = jnp.float32(learning_rate), self._start(seed)
        losses, seconds = [], []
        for count in range(interval, training.steps + 1, interval):
            jax.block_until_ready(state)
            began = time.perf_counter()
            for _ in range(interval):
                grads = self._gradients(starts, step, params)
                step, params, state = self._update(rate, grads, step, params, state)
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - began)
            losses.append(float(self._evaluate(params)))
            if spectra:
                spectra.add(count, state)
        if "step_ms" not in self.facts:
            self.facts["step_ms"] = round(float(np.median(seconds)) / interval * 1e3, 3)
            optimizer_seconds = self._seconds_of_update(rate, step, params, state)
            self.facts["optimizer_ms"] = round(optimizer_seconds * 1e3, 3)
        return {
            "losses": [round(loss, 5) if np.isfinite(loss) else None for loss in losses],
            "seconds": round(sum(seconds), 2),
        }

    def _start(self, seed: int) -> tuple[jax.Array, Any, Any]:
        """The number of steps, the parameters and the optimizer's state before the first one."""
        params = init(self._model, seed)
        return jnp.zeros((), jnp.int32), params, self._init(params)

    def _starts(self, seed: int) -> jax.Array:
        """Where the windows of each step begin, `(steps, batch_size)`."""
        shape = (self._training.steps, self._training.batch_size)
        last = self._text.size - self._model.context
        return jax.random.randint(jax.random.key(1_000 + seed), shape, 0, last)

    def _seconds_of_update(
        self, rate: jax.Array, step: jax.Array, params: Any, state: Any
    ) -> float:
        """The median of five rounds of ten updates, one after another without waiting."""
        rounds = []
        for _ in range(5):
            copies = [jax.tree.map(jnp.copy, params) for _ in range(10)]
            jax.block_until_ready(copies)
            began = time.perf_counter()
            for grads in copies:
                step, params, state = self._update(rate, grads, step, params, state)
            jax.block_until_ready(state)
            rounds.append((time.perf_counter() - began) / len(copies))
        return float(np.median(rounds))


@functools.partial(jax.jit, static_argnums=0)
def init(model: GPT, seed: jax.typing.ArrayLike) -> Any:
    """Returns the initial parameters of a seed."""
    return model.init(jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=0)
def gradients(model: GPT, text: jax.Array, starts: jax.Array, step: jax.Array, params: Any) -> Any:
    """Returns the gradients of a step, float32 like the parameters.

    Args:
        model: the sizes of the model.
        text: tokens of shape `(train_tokens,)`.
        starts: where the windows of each step begin, `(steps, batch_size)`.
        step: the number of steps before this one.
        params: as `GPT.init` makes them.
    """
    windows = text[starts[step][:, None] + jnp.arange(model.context + 1)]
    return jax.grad(model.loss)(params, windows)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(model: GPT, windows: jax.Array, params: Any) -> jax.Array:
    """Returns the mean loss of windows `(validation_batches, batch_size, context + 1)`."""
    return jax.lax.map(functools.partial(model.loss, params), windows).mean()


def validation_windows(text: Text, model: GPT, training: Training) -> np.ndarray:
    """Returns windows of the validation text at even distances.

    Returns:
        tokens of shape `(validation_batches, batch_size, context + 1)`.

    Raises:
        ValueError: a part of the text is shorter than a window.
    """
    size = model.context + 1
    if min(text.train.size, text.validation.size) < size:
        raise ValueError(
            f"a window of context + 1 = {size} tokens needs as many to train on and to validate on,"
            f" got {text.train.size} and {text.validation.size}: pass a smaller context"
        )
    shape = (training.validation_batches, training.batch_size, 1)
    starts = np.linspace(0, text.validation.size - size, shape[0] * shape[1]).astype(int)
    return text.validation[starts.reshape(shape) + np.arange(size)]
