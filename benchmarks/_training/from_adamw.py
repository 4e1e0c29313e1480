"""From a tuned AdamW to Muon: held-out losses of two small tasks, on a CPU in minutes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._training.gpt import GPT
from benchmarks._training.runs import Training, validation_windows
from benchmarks._training.stdlib_text import read_text
from muon_jax import by_use, muon

STEPS = 60
ADAMW = "AdamW"
# Muon's learning rate in these is a multiple of AdamW's best one; the rest keeps AdamW's.
ROUTED = "Muon, by_use"
UNROUTED = "Muon, no routing"
MULTIPLES = (1 / 3, 1.0, 3.0)
# AdamW begins with the second to the fourth.
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
# No multiple of AdamW's rate: the line for somebody who has tuned nothing.
UNTUNED = "Muon at 0.02, by_use"

type Loss = Callable[[Any, Any], jax.Array]


class Task(NamedTuple):
    """What is trained.

    Attributes:
        init: makes the parameters from a key.
        loss: of parameters and a batch, in nats.
        data: arrays to train on; a step takes some of their rows.
        held_out: the same arrays of other rows.
        batch_size: the rows of a step.
    """

    init: Callable[[jax.Array], Any]
    loss: Loss
    data: Any
    held_out: Any
    batch_size: int


def byte_gpt() -> Task:
    """A GPT on the bytes of Python's standard library, its layers apart and named as in Flax."""
    text, model = read_text(), GPT(width=128, layers=2, head_size=32, context=64)
    heads, (layers, width) = model.width // model.head_size, (model.layers, model.width)
    names = ("query", "key", "value", "out")

    def init(key: jax.Array) -> Any:
        stacked = model.init(key)
        layers_of = stacked.pop("layers")
        for i in range(layers):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], layers_of)
            *inputs, output = layer.pop("attention")
            kernels = [x.reshape(width, heads, -1) for x in inputs]
            kernels.append(output.reshape(heads, -1, width))
            stacked[f"layer_{i}"] = layer | {"attention": dict(zip(names, kernels, strict=True))}
        return stacked

    def loss(params: Any, windows: jax.Array) -> jax.Array:
        rest = {name: p for name, p in params.items() if not name.startswith("layer_")}
        apart = [
            layer
            | {"attention": jnp.stack([layer["attention"][n].reshape(width, -1) for n in names])}
            for layer in (params[f"layer_{i}"] for i in range(layers))
        ]
        return model.loss(rest | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *apart)}, windows)

    starts = np.random.default_rng(0).integers(text.train.size - model.context, size=4096)
    windows = text.train[starts[:, None] + np.arange(model.context + 1)]
    held_out = validation_windows(text, model, Training(batch_size=16)).reshape(-1, 65)
    return Task(init, loss, windows, held_out, 32)


def digits_cnn() -> Task:
    """Two convolutions and a linear head on the handwritten digits of scikit-learn."""
    from sklearn.datasets import load_digits

    shapes = {"conv_1": (3, 3, 1, 32), "conv_2": (3, 3, 32, 64), "head": (64, 10)}

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(shapes))
        draw = jax.nn.initializers.lecun_normal()
        return {
            name: {"kernel": draw(k, shape), "bias": jnp.zeros(shape[-1])}
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        x, labels = batch
        for name in ("conv_1", "conv_2"):
            dimensions = ("NHWC", "HWIO", "NHWC")
            kernel, bias = params[name]["kernel"], params[name]["bias"]
            x = jax.lax.conv_general_dilated(
                x, kernel, (2, 2), "SAME", dimension_numbers=dimensions
            )
            x = jax.nn.relu(x + bias)
        logits = x.mean((1, 2)) @ params["head"]["kernel"] + params["head"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = ((images - 4.9) / 6.0).astype(np.float32).reshape(-1, 8, 8, 1)[order]
    labels = labels.astype(np.int32)[order]
    held_out = images[1000:], labels[1000:]
    return Task(init, loss, (images[:1000], labels[:1000]), held_out, 50)


TASKS = {"byte GPT": byte_gpt, "digits CNN": digits_cnn}


def optimizer_of(line: str, rate: Any, adam_rate: Any, routes: Any) -> optax.GradientTransformation:
    """Returns the optimizer of a line; rates rise over a tenth of the steps and fall to 0."""
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, STEPS // 10, STEPS)

    def schedule(count: Any) -> Any:
        return rate * shape(count)

    if line == ADAMW:
        return optax.adamw(schedule)
    given: dict[str, Any] = {"adam_learning_rate": lambda count: adam_rate * shape(count)}
    given["adam_nesterov"] = False  # the AdamW that was tuned
    given |= {} if line == UNTUNED else {"consistent_rms": 0.2}
    given |= {} if line == UNROUTED else {"muon_weight_dimension_numbers": routes}
    return muon(schedule, weight_decay=1e-4, adam_weight_decay=1e-4, **given)


def held_out_loss_of(task: Task, line: str) -> Callable[[float, float, int], float]:
    """Returns a function of both rates and the seed that trains and returns the held-out loss."""
    size = len(jax.tree.leaves(task.data)[0])

    @jax.jit
    def train(rate: Any, adam_rate: Any, seed: Any, data: Any, held_out: Any) -> jax.Array:
        params = task.init(jax.random.key(seed))
        batch = jax.tree.map(lambda x: x[: task.batch_size], data)
        routes = by_use(task.loss, params, batch)
        optimizer = optimizer_of(line, rate, adam_rate, routes)
        rows = jax.random.randint(jax.random.key(1000 + seed), (STEPS, task.batch_size), 0, size)

        def step(carry: Any, rows: jax.Array) -> tuple[Any, None]:
            params, state = carry
            gradients = jax.grad(task.loss)(params, jax.tree.map(lambda x: x[rows], data))
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), rows)
        return task.loss(params, held_out)

    return lambda rate, adam_rate, seed: float(
        train(rate, adam_rate, seed, task.data, task.held_out)
    )


def measure_task(name: str, seeds: int) -> Iterator[dict[str, Any]]:
    """Yields the held-out losses of each line at each of its rates, one for each seed.

    AdamW comes first. The other lines start from the best of its rates, by the mean loss.
    """
    task = TASKS[name]()

    def measured(line: str, rates: Iterable[tuple[float, float]]) -> Iterator[dict[str, Any]]:
        loss_of = held_out_loss_of(task, line)
        for rate, adam_rate in rates:
            losses = [round(loss_of(rate, adam_rate, seed), 4) for seed in range(seeds)]
            rates_of = {"learning_rate": rate, "adam_learning_rate": adam_rate}
            yield {"task": name, "optimizer": line, **rates_of, "held_out_losses": losses}

    of_adamw: dict[float, float] = {}
    rates = ((rate, rate) for rate in rates_to_try(of_adamw))
    for measurement in measured(ADAMW, rates):
        of_adamw[measurement["learning_rate"]] = float(np.mean(measurement["held_out_losses"]))
        yield measurement
    best = min(of_adamw, key=of_adamw.__getitem__)
    for line in (ROUTED, UNROUTED):
        yield from measured(line, [(round(k * best, 6), best) for k in MULTIPLES])
    yield from measured(UNTUNED, [(0.02, 3e-4)])


def rates_to_try(losses: Mapping[float, float]) -> Iterator[float]:
    """Yields three learning rates, then more while the best of them is the largest or smallest.

    Args:
        losses: by rate; the caller adds the loss of a rate before it takes the next one.
    """
    low, high = 1, 3
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
