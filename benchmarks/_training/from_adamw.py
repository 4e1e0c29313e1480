"""From a tuned AdamW to Muon: held-out losses of eight small tasks, on a CPU in an hour."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from benchmarks._training.tasks import TASKS, Task
from muon_jax import by_use, muon

ADAMW = "AdamW"
WEIGHT_DECAY = 0.01  # of AdamW, as in torch
# What the documents advise: AdamW's best rate and its decay for all, and one new number.
ADVISED = "Muon"
SIZES = (0.2, 0.6, 2.0)  # values of `consistent_rms`
# In these `consistent_rms` is 0.2, and Muon's learning rate is a multiple of AdamW's best one, k.
# What is not said is as in the first of them: the rest is the AdamW that was tuned.
ROUTED = "Muon, by_use"
UNROUTED = "Muon, no routing"
SCALED_REST = "Muon, the rest at k times the rate"
MORE_DECAY = "Muon, ten times the decay"
LESS_MOMENTUM = "Muon, momentum 0.9"
NESTEROV_REST = "Muon, the rest with Nesterov"
MULTIPLES = (1 / 3, 1.0, 3.0)
OTHER_LINES = (SCALED_REST, MORE_DECAY, LESS_MOMENTUM, NESTEROV_REST, UNROUTED)
# AdamW begins with the second to the sixth.
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
# No multiple of AdamW's rate: the line for somebody who has tuned nothing.
UNTUNED = "Muon at 0.02, by_use"


def optimizer_of(
    line: str, rate: Any, adam_rate: Any, size: Any, routes: Any, steps: int
) -> optax.GradientTransformation:
    """Returns the optimizer of a line; rates rise over a tenth of the steps and fall to 0."""
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)

    def schedule(count: Any) -> Any:
        return rate * shape(count)

    if line == ADAMW:
        return optax.adamw(schedule, weight_decay=WEIGHT_DECAY)
    given: dict[str, Any] = {"adam_learning_rate": lambda count: adam_rate * shape(count)}
    given["adam_nesterov"] = line in (ADVISED, NESTEROV_REST)
    given["weight_decay"] = WEIGHT_DECAY * (10 if line == MORE_DECAY else 1)
    given["beta"] = 0.9 if line == LESS_MOMENTUM else 0.95
    given |= {} if line == UNTUNED else {"consistent_rms": size}
    given |= {} if line == UNROUTED else {"muon_weight_dimension_numbers": routes}
    return muon(schedule, adam_weight_decay=WEIGHT_DECAY, **given)


def held_out_loss_of(task: Task, line: str) -> Callable[[float, float, float, int], float]:
    """Returns a function that trains and returns the held-out loss.

    It takes both rates, `consistent_rms` and the seed.
    """
    num_rows = len(jax.tree.leaves(task.data)[0])
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: x[: task.batch_size], task.data)
    routes = by_use(task.forward or task.loss, shapes, batch)

    def optimizer(numbers: Any) -> optax.GradientTransformation:
        rate, adam_rate, size = numbers
        return optimizer_of(line, rate, adam_rate, size, routes, task.steps)

    @jax.jit
    def start(numbers: Any, key: jax.Array) -> Any:
        params = task.init(key)
        return params, optimizer(numbers).init(params)

    # One step at a time: XLA's convolutions on CPUs are ten times slower in a loop of its own.
    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry: Any, numbers: Any, batch: Any) -> Any:
        params, state = carry
        gradients = jax.grad(task.loss)(params, batch)
        updates, state = optimizer(numbers).update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    evaluate = jax.jit(task.evaluate or task.loss)

    def run(rate: float, adam_rate: float, size: float, seed: int) -> float:
        numbers = rate, adam_rate, size
        carry = start(numbers, jax.random.key(seed))
        rng = np.random.default_rng(1000 + seed)
        for _ in range(task.steps):
            rows = rng.integers(0, num_rows, task.batch_size)
            batch = jax.tree.map(lambda x, rows=rows: x[rows], task.data)
            carry = step(carry, numbers, batch)
        return float(evaluate(carry[0], task.held_out))

    return run


def measure_task(name: str, seeds: int) -> Iterator[dict[str, Any]]:
    """Yields the held-out losses of each line at each of its rates, one for each seed.

    AdamW comes first. The other lines start from the best of its rates, by the mean loss.
    """
    task = TASKS[name]()

    def measured(line: str, numbers: Iterable[tuple[float, ...]]) -> Iterator[dict[str, Any]]:
        loss_of = held_out_loss_of(task, line)
        for rate, adam_rate, size in numbers:
            losses = [round(loss_of(rate, adam_rate, size, seed), 4) for seed in range(seeds)]
            facts = {"task": name, "steps": task.steps, "unit": task.unit, "optimizer": line}
            facts |= {"learning_rate": rate, "adam_learning_rate": adam_rate}
            yield facts | {"consistent_rms": size, "held_out_losses": losses}

    of_adamw: dict[float, float] = {}
    for measurement in measured(ADAMW, ((rate, rate, 0.0) for rate in rates_to_try(of_adamw))):
        of_adamw[measurement["learning_rate"]] = float(np.mean(measurement["held_out_losses"]))
        yield measurement
    best = min(of_adamw, key=of_adamw.__getitem__)
    yield from measured(ADVISED, [(best, best, size) for size in SIZES])
    multiples = [round(k * best, 6) for k in MULTIPLES]
    for line in (ROUTED, *OTHER_LINES):
        of_rest = multiples if line == SCALED_REST else [best] * len(multiples)
        pairs = zip(multiples, of_rest, strict=True)
        yield from measured(line, [(rate, rest, 0.2) for rate, rest in pairs])
    yield from measured(UNTUNED, [(0.02, 3e-4, 0.0)])


def rates_to_try(losses: Mapping[float, float]) -> Iterator[float]:
    """Yields five learning rates, then more while the best of them is the largest or smallest.

    Args:
        losses: by rate; the caller adds the loss of a rate before it takes the next one.
    """
    low, high = 1, 5
    yield from RATES[low : high + 1]
    while True:
        best = min(range(low, high + 1), key=lambda i: losses[RATES[i]])
        if best == low > 0:
            low -= 1
            yield RATES[low]
        elif best == high < len(RATES) - 1:
            high += 1
            yield RATES[high]
        else:
            return
