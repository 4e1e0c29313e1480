"""Muon against AdamW: a small vision transformer learns to read handwritten digits.

    python examples/quickstart.py

The images come with scikit-learn. Both optimizers start from the same models and see the same
batches in the same order, under the same shape of schedule, each with its own tuned learning rate.
The three epochs are few on purpose: after a dozen, AdamW has caught up.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tqdm import tqdm

from muon_jax import Routes, by_use, muon
from pallas_kernels import select_implementation

WIDTH, DEPTH = 64, 2
BATCH_SIZE = 50
WEIGHT_DECAY = 0.01

# The best of the grid after 3 epochs, as `--tune` finds them in a few minutes: by the loss on
# validation images, the mean of five runs. Images and seeds are used for nothing else.
LEARNING_RATES = {"AdamW": 0.008, "Muon": 0.016}
LEARNING_RATE_GRID = (0.004, 0.0056, 0.008, 0.011, 0.016, 0.022, 0.032)
TUNING_SEEDS = range(1000, 1005)


class Digits(NamedTuple):
    """Images `(n, 8, 8, 1)` and the digits they show `(n,)`."""

    images: jax.Array
    labels: jax.Array


class Curves(NamedTuple):
    """What several runs measured: `(runs, steps)` and, on held-out digits, `(runs, epochs)`."""

    train_loss: np.ndarray
    loss: np.ndarray
    accuracy: np.ndarray


class Block(nnx.Module):
    """Attention, then a perceptron, each on normalized tokens and added to them."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mlp_in = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps tokens `(n, tokens, width)` to tokens."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(x))))


class VisionTransformer(nnx.Module):
    """A transformer over the sixteen patches of 2 × 2 pixels of an image."""

    def __init__(self, rngs: nnx.Rngs):
        self.patches = nnx.Conv(1, WIDTH, (2, 2), strides=2, rngs=rngs)
        # As large as the patches: from the usual 0.02, both optimizers learn more slowly.
        self.positions = nnx.Param(rngs.params.normal((16, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images `(n, 8, 8, 1)` to logits `(n, 10)`."""
        x = self.patches(images).reshape(len(images), -1, WIDTH) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


def routes_of_model() -> Routes:
    """Which parameters are matrices, read off the model: nothing runs."""
    graph, params = nnx.split(nnx.eval_shape(lambda: VisionTransformer(nnx.Rngs(0))))
    images = jax.ShapeDtypeStruct((BATCH_SIZE, 8, 8, 1), jnp.float32)
    return by_use(lambda params, images: nnx.merge(graph, params)(images), params, images)


def make_optimizer(name: str, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Either of the optimizers in `LEARNING_RATES`."""
    if name == "AdamW":
        return optax.adamw(learning_rate, weight_decay=WEIGHT_DECAY)
    return muon(
        learning_rate,
        weight_decay=WEIGHT_DECAY,
        adam_weight_decay=WEIGHT_DECAY,
        muon_weight_dimension_numbers=routes_of_model(),
        consistent_rms=0.2,  # updates about as large as AdamW's: begin at AdamW's rate
    )


@nnx.jit
def evaluate(model: VisionTransformer, digits: Digits) -> tuple[jax.Array, jax.Array]:
    """Returns the mean cross-entropy and the accuracy."""
    logits = model(digits.images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, digits.labels)
    return losses.mean(), (logits.argmax(axis=-1) == digits.labels).mean()


@nnx.jit
def train_step(model: VisionTransformer, optimizer: nnx.Optimizer, batch: Digits) -> jax.Array:
    """Updates the model in place and returns the loss that it had."""
    (loss, _), gradients = nnx.value_and_grad(evaluate, has_aux=True)(model, batch)
    optimizer.update(model, gradients)
    return loss


def train(
    name: str, learning_rate: float, data: tuple[Digits, Digits], epochs: int, seeds: Sequence[int]
) -> Curves:
    """Trains on the first digits and measures on the second, once for each seed.

    Each seed has a bar. All that a run compiles is compiled before the first one starts.
    """
    digits, held_out = data
    steps = epochs * (len(digits.labels) // BATCH_SIZE)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps)
    transformation = make_optimizer(name, schedule)

    def start(seed: int) -> tuple[VisionTransformer, nnx.Optimizer]:
        model = VisionTransformer(nnx.Rngs(seed))
        return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)

    print(f"{name}: compiling, which takes up to half a minute ...", file=sys.stderr, flush=True)
    model, optimizer = start(0)
    train_step(model, optimizer, Digits(digits.images[:BATCH_SIZE], digits.labels[:BATCH_SIZE]))
    evaluate(model, held_out)
    runs = []
    for seed in seeds:
        model, optimizer = start(seed)
        rng = np.random.default_rng(seed)
        train_losses, evaluations = [], []
        with tqdm(total=steps, desc=f"{name:5} seed {seed}", unit="step") as progress:
            for _ in range(epochs):
                for batch in rng.permutation(len(digits.labels)).reshape(-1, BATCH_SIZE):
                    batch = Digits(digits.images[batch], digits.labels[batch])
                    train_losses.append(float(train_step(model, optimizer, batch)))
                    progress.update()
                evaluations.append([float(value) for value in evaluate(model, held_out)])
                loss, accuracy = evaluations[-1]
                progress.set_postfix_str(f"loss {loss:.3f}, accuracy {accuracy:.1%}")
        runs.append((train_losses, *zip(*evaluations, strict=True)))
    return Curves(*map(np.array, zip(*runs, strict=True)))


def tune(name: str, data: tuple[Digits, Digits], epochs: int) -> float:
    """Returns the learning rate of the grid with the least loss on the second digits."""
    losses = {}
    for learning_rate in LEARNING_RATE_GRID:
        curves = train(name, learning_rate, data, epochs, TUNING_SEEDS)
        losses[learning_rate] = curves.loss[:, -1].mean()
        print(f"{name}, learning rate {learning_rate}: validation loss {losses[learning_rate]:.4f}")
    return min(losses, key=losses.__getitem__)


def plot(curves: dict[str, Curves], path: Path) -> None:
    """Saves the losses as a PNG: means and ranges of the runs."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, (train_loss, loss, _)), color in zip(curves.items(), ("C0", "C3"), strict=True):
        steps = np.arange(train_loss.shape[1])
        axes.plot(steps, train_loss.mean(axis=0), color=color, label=f"{name}, training batches")
        axes.fill_between(steps, train_loss.min(0), train_loss.max(0), color=color, alpha=0.15)
        epochs = np.arange(1, loss.shape[1] + 1) * (len(steps) // loss.shape[1])
        axes.plot(epochs, loss.mean(axis=0), "o", color=color, label=f"{name}, test images")
    axes.set(xlabel="step", ylabel="cross-entropy", yscale="log")
    axes.set_title(f"Handwritten digits, mean and range of {len(curves['Muon'].loss)} runs")
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def main() -> None:
    """Trains with both optimizers and prints what came of it."""
    parser = argparse.ArgumentParser(description="Muon against AdamW on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training images")
    parser.add_argument("--seeds", type=int, default=5, help="number of runs with each optimizer")
    parser.add_argument("--output", type=Path, default="quickstart.png", help="PNG of the losses")
    parser.add_argument("--tune", action="store_true", help="search the learning rates first")
    args = parser.parse_args()
    if min(args.epochs, args.seeds) < 1:
        parser.error(f"--epochs and --seeds must be at least 1, got {args.epochs}, {args.seeds}")
    if args.output.is_dir() or not args.output.parent.is_dir():
        parser.error(f"--output must name a file in an existing folder, got {args.output}")

    images, labels = load_digits(return_X_y=True)
    images = jnp.asarray((images - 4.9) / 6.0, jnp.float32).reshape(-1, 8, 8, 1)  # standardized
    labels = jnp.asarray(labels, jnp.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    digits, validation, test = (
        Digits(images[split], labels[split]) for split in np.split(order, [1000, 1297])
    )
    learning_rates, curves = dict(LEARNING_RATES), {}
    for name in LEARNING_RATES:
        if args.tune:
            learning_rates[name] = tune(name, (digits, validation), args.epochs)
        curves[name] = train(
            name, learning_rates[name], (digits, test), args.epochs, range(args.seeds)
        )
    plot(curves, args.output)

    print("\noptimizer  learning rate  test loss      test accuracy (mean ± std)")
    for name, (_, losses, accuracies) in curves.items():
        loss, accuracy = losses[:, -1], accuracies[:, -1]
        print(
            f"{name:9}  {learning_rates[name]:<13}  {loss.mean():.3f} ± {loss.std():.3f}"
            f"  {accuracy.mean():.1%} ± {accuracy.std():.1%}"
        )
    wins = np.sum(curves["Muon"].loss[:, -1] < curves["AdamW"].loss[:, -1])
    print(f"Muon has the lower test loss in {wins} of {args.seeds} paired runs.")
    choice = select_implementation(jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.bfloat16))
    device = jax.devices()[0].device_kind
    print(f"Its symmetric products ran as {choice.implementation!r} on {device}.")
    print(f"Loss curves: {args.output}")


if __name__ == "__main__":
    main()
