"""Matrices that are hard to orthogonalize, with their singular value decompositions."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_jax import newton_schulz

# The m singular values σ, up to a factor: each matrix is orthogonalized at any scale alike.
SPECTRA: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "linear": lambda m, rng: np.linspace(1, 0, m),
    "log-spaced": lambda m, rng: np.logspace(0, -9, m),
    "low rank": lambda m, rng: np.r_[np.logspace(0, -2, m - m // 2), np.zeros(m // 2)],
    "clustered": lambda m, rng: (
        np.resize([1, 0.2, 0.03, 0.003], m) * (1 + 1e-3 * rng.standard_normal(m))
    ),
    "spike": lambda m, rng: np.r_[1, 0.03 * (1 + 0.3 * rng.random(m - 1))],
    "gamma": lambda m, rng: rng.gamma(3, 2, m),
    "one direction": lambda m, rng: np.r_[1, 0.003 * rng.random(m - 1)],
}

MOMENTUM_STEPS = (5, 50)
_MOMENTA = {step: f"momentum, step {step}" for step in MOMENTUM_STEPS}
_BATCH_SIZE, _LEARNING_RATE, _MU = 64, 0.02, 0.95


class Case(NamedTuple):
    """A float32 matrix X = UΣVᵀ of shape (m, n), m ≤ n, and its decomposition in float64.

    Attributes:
        spectrum: the name of the kind of matrix.
        x: X.
        u: U, shape (m, m).
        sigma: the diagonal of Σ, shape (m,), descending.
        vt: Vᵀ, shape (m, n).
    """

    spectrum: str
    x: np.ndarray
    u: np.ndarray
    sigma: np.ndarray
    vt: np.ndarray

    @classmethod
    def of(cls, spectrum: str, x: np.ndarray) -> "Case":
        """Transposes `x` if it is tall, rounds it to float32, and decomposes the rounded matrix."""
        x = (x if x.shape[0] <= x.shape[1] else x.T).astype(np.float32)
        return cls(spectrum, x, *np.linalg.svd(x.astype(np.float64), full_matrices=False))


def hard_cases(sizes: Iterable[int], aspects: Iterable[int], seed: int = 0) -> Iterator[Case]:
    """Yields the cases of shape (m, aspect·m): `SPECTRA`, Gaussian, repeated rows, momenta.

    Cases that `absent_spectra` names are left out.
    """
    aspects = [*aspects]
    for m, aspect in ((m, aspect) for m in sizes for aspect in aspects):
        n, rng = aspect * m, np.random.default_rng(seed)
        for spectrum, sigma in SPECTRA.items():
            yield Case.of(spectrum, with_singular_values(sigma(m, rng), n, rng))
        yield Case.of("Gaussian", rng.standard_normal((m, n)))
        yield Case.of("repeated rows", _repeated_rows(m, n, rng))
        if not absent_spectra():
            for step, momentum in momenta(m, n, seed):
                yield Case.of(_MOMENTA[step], momentum)


def absent_spectra() -> dict[str, str]:
    """Returns the spectra that cannot be made here, with the reason."""
    if importlib.util.find_spec("sklearn"):
        return {}
    return dict.fromkeys(_MOMENTA.values(), "scikit-learn is not installed")


def with_singular_values(sigma: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Returns U diag(σ) Vᵀ of shape (len(σ), n), in float64, with random orthogonal U and V."""
    m = len(sigma)
    u, _ = np.linalg.qr(rng.standard_normal((m, m)))
    v, _ = np.linalg.qr(rng.standard_normal((n, m)))
    return (u * sigma) @ v.T


def _repeated_rows(m: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Shape (m, n): each row is one of about m/4 Gaussian rows, of lengths over three decades."""
    distinct = -(-m // 4)
    rows = rng.standard_normal((distinct, n)) * 10 ** (-3 * rng.random((distinct, 1)))
    return rows[rng.integers(0, distinct, m)]


def momenta(m: int, n: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (step, momentum) of the hidden matrix, (m, n), of an MLP that Muon trains.

    The layers map the 64 pixels of scikit-learn's digits to m, to n and to 10 features. The
    momentum is Nesterov's, which is what Muon orthogonalizes.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = jnp.asarray(images / 16 - 0.3, jnp.float32), jnp.asarray(labels)
    rng = np.random.default_rng(seed)
    parameters = [
        jnp.asarray(rng.standard_normal(shape) / shape[0] ** 0.5, jnp.float32)
        for shape in ((64, m), (m, n), (n, 10))
    ]
    accumulated = [jnp.zeros_like(p) for p in parameters]

    @jax.jit
    def train_step(
        parameters: list[jax.Array],
        accumulated: list[jax.Array],
        images: jax.Array,
        labels: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        gradients = jax.grad(_mlp_loss)(parameters, images, labels)
        accumulated = [_MU * a + g for a, g in zip(accumulated, gradients, strict=True)]
        momentum = [_MU * a + g for a, g in zip(accumulated, gradients, strict=True)]
        parameters = [
            p - _LEARNING_RATE * max(1, p.shape[1] / p.shape[0]) ** 0.5 * newton_schulz(m)
            for p, m in zip(parameters, momentum, strict=True)
        ]
        return parameters, accumulated, momentum[1]

    for step in range(1, max(MOMENTUM_STEPS) + 1):
        batch = rng.integers(0, len(labels), _BATCH_SIZE)
        parameters, accumulated, momentum = train_step(
            parameters, accumulated, images[batch], labels[batch]
        )
        if step in MOMENTUM_STEPS:
            yield step, np.asarray(momentum)


def _mlp_loss(parameters: list[jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    """The cross-entropy of an MLP without biases."""
    first, hidden, last = parameters
    logits = jax.nn.relu(jax.nn.relu(images @ first) @ hidden) @ last
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
