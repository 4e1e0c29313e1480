"""`newton_schulz` alone, in an optimizer written by hand: a training loop in plain JAX.

    python examples/standalone.py

A perceptron learns to read handwritten digits, which come with scikit-learn. Every parameter is a
matrix and gets momentum, Nesterov's step ahead, orthogonalization, a scale by shape, and the
update: all of Muon but AdamW for the other parameters, and no optax.
"""

import argparse
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from muon_jax import newton_schulz

SIZES = (65, 256, 256, 10)  # 8 × 8 pixels and a one in the place of a bias
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.01, 0.95, 0.01
BATCH_SIZE = 50

type Matrices = list[jax.Array]  # each (in, out)


def init(seed: int) -> Matrices:
    """Matrices that keep the variance of what they multiply; the last is zero."""
    keys = jax.random.split(jax.random.key(seed), len(SIZES) - 2)
    shapes = zip(SIZES[:-2], SIZES[1:-1], strict=True)
    hidden = [
        jax.random.normal(key, shape) * (2 / shape[0]) ** 0.5
        for key, shape in zip(keys, shapes, strict=True)
    ]
    return [*hidden, jnp.zeros(SIZES[-2:])]


def logits_of(params: Matrices, images: jax.Array) -> jax.Array:
    """Maps images `(n, 65)` to logits `(n, 10)`."""
    *hidden, head = params
    for matrix in hidden:
        images = jax.nn.relu(images @ matrix)
    return images @ head


def loss(params: Matrices, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy."""
    log_probabilities = jax.nn.log_softmax(logits_of(params, images))
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()


def muon_step(
    weight: jax.Array, momentum: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the weight `(in, out)` and its momentum after a step of Muon.

    M <- βM + (1-β)G,   O = orthogonalized βM + (1-β)G,   W <- W - η(√max(1, out/in)·O + λW).
    """
    momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
    ahead = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
    fan_in, fan_out = weight.shape
    update = max(1, fan_out / fan_in) ** 0.5 * newton_schulz(ahead)
    return weight - LEARNING_RATE * (update + WEIGHT_DECAY * weight), momentum


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(
    params: Matrices, momenta: Matrices, images: jax.Array, labels: jax.Array
) -> tuple[Matrices, Matrices]:
    """Returns the parameters and their momenta after a step on a batch."""
    gradients = jax.grad(loss)(params, images, labels)
    stepped = [muon_step(*each) for each in zip(params, momenta, gradients, strict=True)]
    return [weight for weight, _ in stepped], [momentum for _, momentum in stepped]


def digits() -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Standardized images, a one after the pixels of each, and labels: to train on, to test on."""
    images, labels = load_digits(return_X_y=True)
    images = np.pad((images - 4.9) / 6.0, ((0, 0), (0, 1)), constant_values=1.0)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = (
        (jnp.asarray(images[part], jnp.float32), jnp.asarray(labels[part], jnp.int32))
        for part in np.split(order, [1300])
    )
    return train, test


def main(words: Sequence[str] | None = None) -> None:
    """Trains, and prints the loss and the accuracy on images that were not trained on."""
    parser = argparse.ArgumentParser(description="newton_schulz in an optimizer of one's own.")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training images")
    epochs = parser.parse_args(words).epochs
    if epochs < 1:
        parser.error(f"--epochs must be at least 1, got {epochs}")

    (images, labels), test = digits()
    params, rng = init(0), np.random.default_rng(0)
    momenta = jax.tree.map(jnp.zeros_like, params)
    for epoch in range(epochs):
        for batch in rng.permutation(len(labels)).reshape(-1, BATCH_SIZE):
            params, momenta = train_step(params, momenta, images[batch], labels[batch])
        accuracy = (logits_of(params, test[0]).argmax(axis=-1) == test[1]).mean()
        print(f"epoch {epoch + 1}: loss {loss(params, *test):.3f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
