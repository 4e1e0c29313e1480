"""CIFAR-10: four optimizers at their best learning rates, and the recipe of airbench94_muon.

    python examples/cifar10.py --json cifar10.json --png cifar10.png

It trains the network of airbench94_muon.py in https://github.com/KellerJordan/cifar10-airbench (at
f1c599c) with AdamW, `optax.contrib.muon`, `muon`, and `muon` with `"balanced"` coefficients; then
with that script's own optimizers, Muon for filters and SGD for the rest. It compares `muon` with
optax's at one rate, and times the updates alone. `--tune` searches the learning rates first.
`--show cifar10.json` prints and draws what an earlier run measured.

The images are downloaded (170 MB) and verified, or read from what `CIFAR10_DIR` names.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

from cifar10_data import BATCHES, Cifar10, load
from muon_jax import Routes, by_use, muon, scale_by_muon

# The best rates of the search, which `--tune` repeats. Beside a Muon, AdamW has AdamW's rate.
LEARNING_RATES = {"AdamW": 0.04, "optax's Muon": 0.15, "muon": 0.3, "muon, balanced": 0.15}
WEIGHT_DECAY = 0.01
WARM_UP = 0.2  # of the steps; then the learning rate falls to zero, linearly
TUNING_SEEDS = (1000, 1001)  # used for nothing else
# At one rate, in float32: the first two compute the same, the third iterates in 16 bits.
EQUIVALENT = ("optax's Muon", 'muon, preset="optax"', "muon")
TIMED = ("AdamW", "optax's Muon", "optax's Muon, 16 bits", "muon", "muon, balanced")
AIRBENCH_ACCURACY = 94.0  # in percent, what airbench's recipes are made for
COLORS = {"AdamW": "0.45", "optax's Muon": "black", "muon": "#0072b2", "muon, balanced": "#d55e00"}

LABEL_SMOOTHING = 0.2
MEAN, STD = np.array([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]], np.float32)


class Split(NamedTuple):
    """Images `(n, 32, 32, 3)` and labels `(n,)`, uint8."""

    images: jax.Array
    labels: jax.Array


class State(NamedTuple):
    """What training changes."""

    params: Any
    batch_stats: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much is trained; the defaults are those of the record.

    Attributes:
        epochs: of each run.
        seeds: number of runs with each of the four optimizers.
        airbench_seeds: number of runs of airbench's recipe.
        batch_size: of all runs.
        width: of the network; 1 is airbench's, whose rates fit no other.
        tune: whether to search the learning rates first.
    """

    epochs: int = 8
    seeds: int = 5
    airbench_seeds: int = 20
    batch_size: int = 2000
    width: float = 1.0
    tune: bool = False


# -- Images ----------------------------------------------------------------------------------------


def normalize(images):
    """Returns bytes as numbers of mean zero and variance one in each color."""
    return (images / 255.0 - MEAN) / STD


def augment(key, images, mirrored):
    """Returns images, mirrored where it says so, and shifted by up to two pixels."""
    images = jnp.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
    padded = jnp.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), "reflect")
    corners = jax.random.randint(key, (len(images), 2), 0, 5)

    def crop(image, corner):
        return jax.lax.dynamic_slice(image, (*corner, 0), (32, 32, 3))

    return jax.vmap(crop)(padded, corners)


def over_views(logits_of, images):
    """Returns the mean of the logits of six views of each image.

    The views are the image, which counts twice, and the image shifted by one pixel up and left, and
    down and right; each also mirrored.
    """
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), "reflect")
    weighted = ((0.25, images), (0.125, padded[:, :32, :32]), (0.125, padded[:, 2:, 2:]))
    return sum(w * (logits_of(view) + logits_of(view[:, :, ::-1])) for w, view in weighted)


# -- The network -----------------------------------------------------------------------------------


def whitening_filters(images):
    """Returns filters `(2, 2, 3, 24)` that give patches uncorrelated outputs of variance one.

    They are the principal axes of the patches, each divided by its standard deviation, and their
    negatives.
    """
    images = np.asarray(normalize(np.asarray(images)), np.float32)
    patches = np.lib.stride_tricks.sliding_window_view(images, (2, 2), axis=(1, 2))
    patches = patches.reshape(-1, 12)  # color, row, column
    variances, axes = np.linalg.eigh(patches.T @ patches / len(patches))
    filters = (axes / np.sqrt(variances + 5e-4)).reshape(3, 2, 2, 12).transpose(1, 2, 0, 3)
    return jnp.asarray(np.concatenate([filters, -filters], axis=-1))


def identity_first(key, shape, dtype):
    """Returns filters `(3, 3, in, out)`: the first copy their input, the rest are random."""
    filters = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")(key, shape, dtype)
    copied = jnp.arange(min(shape[2:]))
    return filters.at[..., copied].set(0.0).at[1, 1, copied, copied].set(1.0)


def uniform_between(limit):
    """Returns an initializer, uniform between -limit and limit."""
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(
        key, shape, dtype, -limit, limit
    )


class ConvGroup(nn.Module):
    """Halves the height and width of images and gives them another number of channels."""

    channels: int
    dtype: Any

    @nn.compact
    def __call__(self, x, train):
        """Maps `(n, height, width, any)` to `(n, height // 2, width // 2, channels)`."""
        of_all = {"use_bias": False, "dtype": self.dtype}
        for pools in (True, False):
            x = nn.Conv(self.channels, (3, 3), kernel_init=identity_first, **of_all)(x)
            if pools:
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
            x = nn.BatchNorm(
                not train, momentum=0.6, epsilon=1e-12, use_scale=False, dtype=self.dtype
            )(x)
            x = nn.gelu(x, approximate=False)
        return x


class CifarNet(nn.Module):
    """airbench's convolutional network, of 2 million parameters at width 1."""

    width: float
    dtype: Any

    @nn.compact
    def __call__(self, images, filters, train):
        """Maps normalized images `(n, 32, 32, 3)` to logits `(n, 10)`, in float32.

        The filters `(2, 2, 3, 24)` that whiten images are not trained.
        """
        bias = self.param("whitening_bias", uniform_between(12**-0.5), filters.shape[-1:])
        x = jax.lax.conv_general_dilated(
            images.astype(self.dtype),
            filters.astype(self.dtype),
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        # In float32, because the bias' gradient sums millions of numbers.
        x = nn.gelu(x.astype(jnp.float32) + bias, approximate=False).astype(self.dtype)
        for channels in (64, 256, 256):
            x = ConvGroup(round(channels * self.width), self.dtype)(x, train)
        x = x.max(axis=(1, 2)).astype(jnp.float32)
        head = nn.Dense(10, use_bias=False, kernel_init=uniform_between(3**0.5), name="head")
        return head(x) / x.shape[-1]


def losses_of(logits, labels):
    """Returns the cross-entropy of each image, with smoothed labels."""
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), LABEL_SMOOTHING)
    return optax.softmax_cross_entropy(logits, targets)


# -- Optimizers ------------------------------------------------------------------------------------


def make_optimizer(name, rates, steps, routes):
    """Returns an optimizer for that many steps.

    Args:
        name: a key of `LEARNING_RATES`, one of `EQUIVALENT`, or `"airbench"`.
        rates: the largest learning rate, and that of AdamW beside a Muon; airbench has its own.
        steps: each rate rises from zero to its largest value and falls to zero again, linearly.
        routes: which parameters are matrices.
    """
    if name == "airbench":
        return airbench(steps, routes)
    points = jnp.array([0.0, WARM_UP, 1.0]) * steps
    learning_rate, adam_learning_rate = (
        lambda step, peak=peak: peak * jnp.interp(step, points, jnp.array([0.0, 1.0, 0.0]))
        for peak in rates
    )
    if name == "AdamW":
        return optax.adamw(learning_rate, weight_decay=WEIGHT_DECAY)
    make = {
        "optax's Muon": optax.contrib.muon,
        'muon, preset="optax"': functools.partial(muon, preset="optax"),
        "muon": muon,
        "muon, balanced": functools.partial(muon, ns_coeffs="balanced"),
    }[name]
    return make(
        learning_rate,
        weight_decay=WEIGHT_DECAY,
        adam_weight_decay=WEIGHT_DECAY,
        adam_learning_rate=adam_learning_rate,
        muon_weight_dimension_numbers=routes,
    )


def airbench(steps, routes):
    """Returns the optimizers of airbench94_muon.py, for gradients of the sum over 2000 images.

    Filters have Muon, the rest SGD with Nesterov momentum, all with rates that fall linearly. The
    bias of the whitening is trained for the first 3 of 8 epochs.
    """

    def sgd(rate, until=steps):
        return optax.chain(
            optax.add_decayed_weights(4e-3 / rate),
            optax.sgd(optax.linear_schedule(rate, 0.0, until), momentum=0.85, nesterov=True),
        )

    def from_fixed_norm(updates, params):
        """Scales filters to the norm √out first; the step is from there."""
        return jax.tree.map(
            lambda u, p: u + (p.shape[-1] ** 0.5 / jnp.linalg.norm(p.ravel()) - 1) * p,
            updates,
            params,
        )

    def label(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if routes[name].view is not None:
            return "filters"
        return {"whitening_bias": "whitening", "head/kernel": "head"}.get(name, "biases")

    filters = optax.chain(
        scale_by_muon(
            ns_steps=3, beta=0.6, eps=1e-7, momentum="heavy_ball", weight_dimension_numbers=routes
        ),
        optax.scale_by_learning_rate(optax.linear_schedule(0.24, 0.0, steps)),
        optax.stateless(from_fixed_norm),
    )
    optimizers: dict[Any, Any] = {
        "filters": filters,
        "whitening": sgd(0.053, until=math.ceil(steps * 3 / 8)),
        "biases": sgd(0.053),
        "head": sgd(0.67),
    }
    return optax.multi_transform(optimizers, functools.partial(jax.tree.map_with_path, label))


# -- Training --------------------------------------------------------------------------------------


class Study:
    """Trains one network on one data set. Each optimizer is compiled once."""

    def __init__(self, train: Split, test: Split, settings: Settings, dtype: Any):
        self.data, self.test, self.settings = train, test, settings
        self.network = CifarNet(settings.width, dtype)
        self.filters = whitening_filters(train.images[:5000])
        self.steps = len(train.labels) // settings.batch_size  # in an epoch
        if not self.steps:
            raise ValueError(
                f"a batch of {settings.batch_size} needs as many training images, got"
                f" {len(train.labels)}: pass a smaller batch_size"
            )
        # On a CPU each batch is a call, because a long program is no faster and shows no progress.
        self.parts = 1 if jax.default_backend() == "gpu" else self.steps
        images = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
        variables = jax.eval_shape(self.variables, jax.random.key(0))
        self.routes: Routes = by_use(
            lambda params, batch_stats, images: self.logits(params, batch_stats, images),
            variables["params"],
            variables["batch_stats"],
            images,
        )

    @functools.partial(jax.jit, static_argnames="self")
    def variables(self, key):
        """Returns new parameters and statistics. The head has a standard deviation of one."""
        variables: Any = self.network.init(key, jnp.zeros((1, 32, 32, 3)), self.filters, False)
        head = variables["params"]["head"]
        head["kernel"] /= head["kernel"].std(ddof=1)
        return variables

    def logits(self, params, batch_stats, images) -> Any:
        """Maps normalized images to logits `(n, 10)`, as after training."""
        variables = {"params": params, "batch_stats": batch_stats}
        return self.network.apply(variables, images, self.filters, False)

    def optimizer(self, name, rates):
        """Returns an optimizer for all steps of a run."""
        return make_optimizer(name, rates, self.settings.epochs * self.steps, self.routes)

    def start(self, name, seed):
        """Returns the state before the first step, the same parameters for every optimizer."""
        variables = self.variables(jax.random.key(seed))
        opt_state = self.optimizer(name, (0.0, 0.0)).init(variables["params"])
        return State(variables["params"], variables["batch_stats"], opt_state)

    @functools.partial(jax.jit, static_argnames=("self", "name"), donate_argnames="state")
    def train_part(self, name, state, data, rates, key, epoch, part):
        """Returns the state after a part of an epoch, and the mean loss in it.

        Each image is mirrored in every other epoch. Gradients are those of the sum over a batch.
        """
        optimizer = self.optimizer(name, rates)
        batch_size = self.settings.batch_size
        mirrored = jax.random.bernoulli(key, shape=data.labels.shape) ^ (epoch % 2 == 1)
        order_key, crop_key = jax.random.split(jax.random.fold_in(key, epoch))
        order = jax.random.permutation(order_key, len(data.labels))

        def loss_of(params, batch_stats, images, labels):
            variables = {"params": params, "batch_stats": batch_stats}
            logits, updated = self.network.apply(
                variables, images, self.filters, True, mutable=["batch_stats"]
            )
            return losses_of(logits, labels).sum(), updated["batch_stats"]

        def step(state, batch):
            key, indices = batch
            images = normalize(augment(key, data.images[indices], mirrored[indices]))
            (loss, batch_stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(
                state.params, state.batch_stats, images, data.labels[indices]
            )
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            return State(optax.apply_updates(state.params, updates), batch_stats, opt_state), loss

        batches = order[: self.steps * batch_size].reshape(self.parts, -1, batch_size)
        inputs = jax.random.split(crop_key, self.steps).reshape(self.parts, -1)[part], batches[part]
        if self.parts == 1:
            state, losses = jax.lax.scan(step, state, inputs)
        else:  # XLA makes convolutions fast on a CPU, but not in a loop
            state, losses = step(state, jax.tree.map(lambda x: x[0], inputs))
        return state, losses.mean() / batch_size

    @functools.partial(jax.jit, static_argnames=("self", "views"))
    def evaluate(self, state, data, views=False):
        """Returns the mean loss and the accuracy, of images or of six views of each."""
        logits_of = functools.partial(self.logits, state.params, state.batch_stats)

        def measure(batch):
            images = normalize(batch.images)
            logits: Any = over_views(logits_of, images) if views else logits_of(images)
            accuracy = (logits.argmax(axis=-1) == batch.labels).mean()
            return jnp.array([losses_of(logits, batch.labels).mean(), accuracy])

        size = math.gcd(len(data.labels), 2000)
        batches = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), data)
        return jax.lax.map(measure, batches).mean(axis=0)

    def train(self, name, rates, seed, data=None, held_out=None, epochs=None):
        """Trains from a seed, by default on all images for all epochs.

        Returns:
            Rows `(epochs, 4)`: seconds of training, its loss, and held-out loss and accuracy; and
            the state after the last step.
        """
        data, held_out = data or self.data, held_out or self.test
        epochs = epochs or self.settings.epochs
        state, rates = self.start(name, seed), np.float32(rates)
        rows, seconds, key = [], 0.0, jax.random.key(seed)
        for epoch in range(epochs):
            began, losses = time.perf_counter(), []
            bar = f"{name}, epoch {epoch + 1} of {epochs}"
            for part in tqdm(range(self.parts), bar, leave=False, disable=self.parts == 1):
                state, loss = jax.block_until_ready(
                    self.train_part(name, state, data, rates, key, epoch, part)
                )
                losses.append(loss)
            seconds += time.perf_counter() - began
            rows.append((seconds, np.mean(losses), *self.evaluate(state, held_out)))
        return np.array(rows, np.float64), state

    def tune(self, rates):
        """Searches learning rates, and puts those of least validation loss into `rates`.

        Each search goes up and down by factors of √2, for as long as the loss falls. The last tenth
        of the training images is held out; the first ones are there twice in its place, so that the
        steps are as many.

        Returns:
            The name, the rate and the mean validation loss of each that was tried.
        """
        held_out = len(self.data.labels) // 10
        validation = Split(*(x[-held_out:] for x in self.data))
        data = Split(*(x.at[-held_out:].set(x[:held_out]) for x in self.data))
        tried = []
        for name, first in rates.items():

            def rate(power, first=first):
                return float(f"{first * 2 ** (power / 2):.2g}")

            @functools.cache
            def loss(power, name=name, rate=rate):
                pair = rate(power), rates["AdamW"]
                runs = [self.train(name, pair, s, data, validation)[0] for s in TUNING_SEEDS]
                mean = float(np.mean([run[-1, 2] for run in runs]))
                print(f"{name}, learning rate {rate(power)}: validation loss {mean:.4f}")
                tried.append([name, rate(power), mean])
                return mean

            best = 0
            for step in (1, -1):
                while abs(best + step) <= 4 and loss(best + step) < loss(best):
                    best += step
            rates[name] = rate(best)
        return tried

    def optimizer_times(self, rates):
        """Returns the milliseconds of each epoch's updates alone, by name.

        All updates of an epoch, and `optax.apply_updates`, are one program, which takes the same
        random gradients each time. The programs run in turns; the times are medians.
        """
        programs = {}
        for name in TIMED:
            base = name.removesuffix(", 16 bits")
            optimizer = self.optimizer(base, (rates[base], rates["AdamW"]))

            def epoch(params, opt_state, gradients, optimizer=optimizer):
                def step(_, carried):
                    params, opt_state = carried
                    updates, opt_state = optimizer.update(gradients, opt_state, params)
                    return optax.apply_updates(params, updates), opt_state

                return jax.lax.fori_loop(0, self.steps, step, (params, opt_state))

            params = self.variables(jax.random.key(0))["params"]
            gradients = optax.tree.random_like(jax.random.key(1), params)
            arguments = params, optimizer.init(params), gradients
            with jax.default_matmul_precision("BF16_BF16_F32" if base != name else None):
                compiled = jax.jit(epoch, donate_argnums=(0, 1)).lower(*arguments).compile()
            programs[name] = compiled, arguments
        times = {name: [] for name in programs}
        for turn in range(11):
            for name, (compiled, (*carried, gradients)) in programs.items():
                began = time.perf_counter()
                carried = jax.block_until_ready(compiled(*carried, gradients))
                if turn:  # the first one warms up
                    times[name].append(1e3 * (time.perf_counter() - began))
                programs[name] = compiled, (*carried, gradients)
        return {name: float(np.median(of_turns)) for name, of_turns in times.items()}


def measure(settings: Settings, images: Cifar10 | None = None) -> dict[str, Any]:
    """Trains and times all that the tables and the figure show.

    Returns:
        A report for JSON, which has for each of its runs the rows of `Study.train`.
    """
    images = images or load()
    train = Split(jnp.asarray(images.images), jnp.asarray(images.labels))
    test = Split(jnp.asarray(images.test_images), jnp.asarray(images.test_labels))
    dtype = jnp.float16 if jax.default_backend() == "gpu" else jnp.float32
    study, rates = Study(train, test, settings, dtype), dict(LEARNING_RATES)
    report: dict[str, Any] = {
        **environment(),
        "dtype": jnp.dtype(dtype).name,
        "settings": dataclasses.asdict(settings),
        "images": [len(train.labels), len(test.labels)],
        "verified": images.digests == BATCHES,
    }
    print(f"{len(train.labels)} training and {len(test.labels)} test images, on {report['device']}")
    if not report["verified"]:
        print("These are not the images of CIFAR-10: SHA-256 sums differ.")
    names = [*rates, "airbench"]
    compiling = [study.train(name, (0.0, 0.0), 0, epochs=1)[0] for name in names]
    report["first_epoch"] = {n: run[0, 0] for n, run in zip(names, compiling, strict=True)}
    report["search"] = study.tune(rates) if settings.tune else []
    report["rates"] = rates
    report["runs"], report["views"] = {}, []
    for name in names:
        pair = rates.get(name, 0.0), rates["AdamW"]
        count = settings.airbench_seeds if name == "airbench" else settings.seeds
        runs = []
        for seed in range(count):
            rows, state = study.train(name, pair, seed)
            runs.append(rows.tolist())
            if name == "airbench":
                report["views"].append(float(study.evaluate(state, test, views=True)[1]))
        report["runs"][name] = runs
        print(f"{name}: {count} runs, test accuracy {_percent(_last(report, name, 3))}")
    report["optimizer_ms"] = study.optimizer_times(rates)
    with jax.default_matmul_precision("highest"):
        exact = Study(train, test, settings, jnp.float32)
        pair = rates["optax's Muon"], rates["AdamW"]
        report["equivalent"] = {n: exact.train(n, pair, 0)[0].tolist() for n in EQUIVALENT}
    return report


def environment() -> dict[str, str]:
    """Returns what somebody needs to repeat a measurement."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        commit = ""
    return {
        "device": jax.devices()[0].device_kind,
        **{name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
        "command": f"python examples/cifar10.py {shlex.join(sys.argv[1:])}",
    }


# -- What came of it -------------------------------------------------------------------------------


def _last(report, name, column):
    """The values of a column after the last epoch, one a run."""
    return np.array(report["runs"][name])[:, -1, column]


def _percent(accuracies) -> str:
    accuracies = 100 * np.asarray(accuracies)
    return f"{accuracies.mean():.2f} ± {accuracies.std():.2f}%"


def tables(report) -> str:
    """Returns the tables of accuracies and of the search, in Markdown."""
    lines = [
        "| optimizer | learning rate | test accuracy | test loss | training | updates alone |",
        "|---|---|---|---|---|---|",
    ]
    for name in report["rates"]:
        loss = _last(report, name, 2)
        lines.append(
            f"| {name} | {report['rates'][name]} | {_percent(_last(report, name, 3))}"
            f" | {loss.mean():.4f} ± {loss.std():.4f} | {_last(report, name, 0).mean():.2f} s"
            f" | {report['settings']['epochs'] * report['optimizer_ms'][name]:.1f} ms |"
        )
    lines += [
        "",
        "| airbench's recipe | test accuracy |",
        "|---|---|",
        f"| each image once | {_percent(_last(report, 'airbench', 3))} |",
        f"| six views of each | {_percent(report['views'])} |",
    ]
    if report["search"]:
        lines += ["", "| optimizer | learning rate | validation loss |", "|---|---|---|"]
        lines += [f"| {n} | {rate} | {loss:.4f} |" for n, rate, loss in sorted(report["search"])]
    return "\n".join(lines)


def differences(report) -> dict[str, float]:
    """Returns the largest difference of each one's test losses from optax's, at any epoch.

    `"seeds"` is that between runs of optax's Muon, in the network's own dtype.
    """
    runs = {name: np.array(run)[:, 2] for name, run in report["equivalent"].items()}
    first, *others = EQUIVALENT
    found = {name: float(np.abs(runs[name] - runs[first]).max()) for name in others}
    of_seeds = np.array(report["runs"][first])[..., 2]
    return found | {"seeds": float(np.ptp(of_seeds, axis=0).max())}


def conclusion(report) -> str:
    """Returns what the numbers say, in sentences."""
    accuracy = {name: 100 * _last(report, name, 3) for name in report["runs"]}
    epochs, runs = report["settings"]["epochs"], report["settings"]["seeds"]
    best = max(report["rates"], key=lambda name: accuracy[name].mean())
    ours, others = accuracy["muon"], accuracy["optax's Muon"]
    apart = abs(ours.mean() - others.mean())
    spread = max(ours.std(), others.std())
    views = 100 * np.array(report["views"])
    error = views.std(ddof=1) / math.sqrt(len(views)) if len(views) > 1 else math.nan
    far, ms = differences(report), report["optimizer_ms"]
    exact, in_16_bits = (far[name] for name in EQUIVALENT[1:])
    quicker = ms["optax's Muon, 16 bits"] / ms["muon"]
    epoch_ms = 1e3 * _last(report, "muon", 0).mean() / epochs
    return "\n".join(
        [
            f"After {epochs} epochs {best} has the highest mean test accuracy of the four,"
            f" {accuracy[best].mean():.2f}% over {runs} runs. `muon` and optax's Muon are"
            f" {apart:.2f} points apart, and the larger standard deviation of the two is"
            f" {spread:.2f}.",
            f"airbench's recipe, which is made for {AIRBENCH_ACCURACY:g}%, has"
            f" {views.mean():.2f}% with six views of each image, the mean of {len(views)} runs with"
            f" a standard error of {error:.2f}, and {accuracy['airbench'].mean():.2f}% with each"
            " image once.",
            'In float32, at one rate and seed, the test losses of `muon(preset="optax")` and'
            f" optax's Muon differ by {exact:.1e} at most, those of `muon` in 16 bits by"
            f" {in_16_bits:.1e}. Seeds of optax's Muon differ by up to {far['seeds']:.1e}.",
            f"The updates of an epoch take `muon` {ms['muon']:.2f} ms, `balanced`"
            f" {ms['muon, balanced']:.2f} ms, optax's Muon {ms["optax's Muon"]:.2f} ms"
            f" ({ms["optax's Muon, 16 bits"]:.2f} ms in 16 bits, {quicker:.2f} times `muon`'s) and"
            f" AdamW {ms['AdamW']:.2f} ms. An epoch of `muon` takes {epoch_ms:.0f} ms in all.",
        ]
    )


def figure_of(report) -> Figure:
    """Returns six panels: the curves, the times of the updates, the equivalence, and airbench.

    Lines are means, shades the ranges of the runs.
    """
    figure = Figure(figsize=(7, 8.4), layout="constrained")
    (losses, accuracies), (by_time, bars), (same, recipe) = figure.subplots(3, 2)
    epochs = np.arange(1, report["settings"]["epochs"] + 1)
    for name, color in COLORS.items():
        seconds, train_loss, _, accuracy = np.moveaxis(np.array(report["runs"][name]), -1, 0)
        for panel, x, values in (
            (losses, epochs, train_loss),
            (accuracies, epochs, 100 * accuracy),
            (by_time, seconds.mean(axis=0), train_loss),
        ):
            panel.plot(x, values.mean(axis=0), color=color, label=name)
            panel.fill_between(x, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2)
    losses.set(xlabel="epoch", ylabel="training loss")
    losses.legend(fontsize=8)
    accuracies.set(xlabel="epoch", ylabel="test accuracy, %")
    by_time.set(xlabel="seconds of training", ylabel="training loss")

    times = report["optimizer_ms"]
    colors = [COLORS[name.removesuffix(", 16 bits")] for name in times]
    drawn = bars.barh([*times], [*times.values()], color=colors)
    drawn[TIMED.index("optax's Muon, 16 bits")].set(alpha=0.6)
    bars.bar_label(drawn, fmt="%.1f", padding=2, fontsize=8)
    bars.margins(x=0.15)
    bars.invert_yaxis()
    bars.tick_params(axis="y", labelsize=8)
    bars.set(xlabel="updates of an epoch alone, ms")

    far = differences(report)
    styles = (("black", "-"), ("#009e73", "--"), ("#0072b2", ":"))
    for (name, run), (color, style) in zip(report["equivalent"].items(), styles, strict=True):
        label = f"{name}: {far[name]:.0e}" if name in far else name
        same.plot(epochs, np.array(run)[:, 2], style, color=color, label=label, linewidth=2)
    same.set(xlabel="epoch", ylabel="test loss", title="at one rate, in float32")
    same.legend(title="largest difference", fontsize=7, title_fontsize=7)

    for run in report["runs"]["airbench"]:
        recipe.plot(epochs, 100 * np.array(run)[:, 3], color="0.6", linewidth=0.8)
    views = 100 * np.array(report["views"])
    recipe.plot(np.full(len(views), epochs[-1]), views, "_", color="#009e73", label="six views")
    recipe.axhline(AIRBENCH_ACCURACY, color="black", linestyle=":", linewidth=1)
    recipe.set(xlabel="epoch", ylabel="test accuracy, %", title="airbench's recipe")
    recipe.set_ylim(bottom=max(0, min(100 * _last(report, "airbench", 3)) - 6))
    recipe.legend(fontsize=8, loc="lower right")
    for panel in (losses, accuracies, by_time, same, recipe):
        panel.grid(alpha=0.3)
        if panel is not by_time:
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(f"CIFAR-10, {report['device']}, network in {report['dtype']}", fontsize=11)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, or reads an earlier report; prints, and writes what was asked for."""
    parser = argparse.ArgumentParser(description="AdamW and Muons on CIFAR-10.")
    defaults = Settings()
    for name, text in (
        ("epochs", "of each run"),
        ("seeds", "runs with each of the four optimizers"),
        ("airbench_seeds", "runs of airbench's recipe"),
        ("batch_size", "of all runs"),
        ("width", "of the network; 1 is airbench's"),
    ):
        default = getattr(defaults, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=text)
    parser.add_argument("--tune", action="store_true", help="search the learning rates first")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--png", type=Path, help="where to draw it")
    parser.add_argument("--show", type=Path, help="an earlier report, in the place of training")
    args = vars(parser.parse_args(argv))
    json_path, png_path, show = (args.pop(name) for name in ("json", "png", "show"))
    if small := [name for name, value in args.items() if name != "tune" and value <= 0]:
        parser.error(f"{', '.join(small)} must be positive")
    report = json.loads(show.read_text()) if show else measure(Settings(**args))
    print(f"\n{tables(report)}\n\n{conclusion(report)}")
    if json_path:
        json_path.write_text(json.dumps(report) + "\n")
    if png_path:
        figure_of(report).savefig(png_path, dpi=150)


if __name__ == "__main__":
    main()
