"""An evolutionary search for the matrix whose result has the largest singular value."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from benchmarks._accuracy.polar_error import arguments_for_coefficients
from benchmarks._adversary.inputs import (
    Genome,
    crossed,
    known_inputs,
    mutated,
    random_genome,
)
from muon_jax import newton_schulz

# A population that has not improved for so many generations makes room for a new one.
PATIENCE = 12
_IMPROVEMENT = 1.001
_EXACT_UP_TO = 64


class Finding(NamedTuple):
    """What a search has found.

    Attributes:
        evaluations: how many matrices were orthogonalized.
        largest: the largest singular value of a result; infinite where a result is not finite.
        matrix: whose result has it, in float32.
    """

    evaluations: int
    largest: float
    matrix: np.ndarray

    @property
    def is_finite(self) -> bool:
        """Whether all results were finite."""
        return bool(np.isfinite(self.largest))


def search(name: str, method: str, dtype: str, m: int, seed: int) -> Iterator[Finding]:
    """Yields what was found after each generation, without end.

    The known inputs come first. A generation has as many children as there are
    parents, of two parents each and mutated. The best of all become the next parents.

    Args:
        name: of the coefficients.
        method, dtype: as for `newton_schulz`.
        m: the size of the matrices.
        seed: of all that is random. What is found after a number of evaluations depends on it.
    """
    rng = np.random.default_rng([seed, m])
    orthogonalize = functools.partial(
        newton_schulz, method=method, dtype=dtype, **arguments_for_coefficients(name)
    )
    gaussian = rng.standard_normal((m, m))
    count = population_size(m)
    known = known_inputs(m)
    evaluations, worst, worst_matrix = 0, 0.0, np.zeros((m, m), np.float32)
    parents: list[Genome] = []
    sizes, stale = np.zeros(0), 0
    while True:
        if stale > PATIENCE:
            parents, sizes, stale = [], np.zeros(0), 0
        children, known = known[:count], known[count:]
        while len(children) < count:
            children.append(_child(parents, rng) if parents else random_genome(m, rng))
        matrices = np.stack([child.matrix(gaussian) for child in children])
        found = largest_singular_values(orthogonalize(matrices))
        evaluations += count
        if found.max() > worst:
            best = int(found.argmax())
            worst, worst_matrix = float(found[best]), matrices[best]
        improved = not parents or found.max() > _IMPROVEMENT * sizes[0]
        stale = 0 if improved else stale + 1
        everyone, sizes = parents + children, np.concatenate([sizes, found])
        order = np.argsort(-sizes)[:count]
        parents, sizes = [everyone[i] for i in order], sizes[order]
        yield Finding(evaluations, worst, worst_matrix)


def population_size(m: int) -> int:
    """Returns how many matrices a generation has: about what takes a second on a CPU."""
    return int(np.clip(2**18 // m**2, 4, 256))


def largest_singular_values(results: jax.Array | np.ndarray) -> np.ndarray:
    """Returns the largest singular value of each result, and ∞ where a result is not finite.

    Small matrices have their eigenvalues computed. Others have some steps of a block power
    iteration: what they give is at most the singular value, and close to it where it stands out.

    Args:
        results: shape `(batch, m, m)`.
    """
    results = np.asarray(results, np.float64)
    finite = np.isfinite(results).all((-2, -1))
    results = np.where(finite[:, None, None], results, 0)
    if results.shape[-1] <= _EXACT_UP_TO:
        squares = np.linalg.eigvalsh(results @ results.mT)[:, -1]
    else:
        squares = _by_power_iteration(results)
    return np.where(finite, np.sqrt(np.maximum(squares, 0)), np.inf)


def _child(parents: list[Genome], rng: np.random.Generator) -> Genome:
    """Parents are sorted, the best first: better ones have more children."""
    one, other = (parents[int(len(parents) * rng.random() ** 2)] for _ in range(2))
    return mutated(crossed(one, other, rng) if rng.random() < 0.3 else one, rng)


def _by_power_iteration(results: np.ndarray) -> np.ndarray:
    """Rayleigh quotients of OOᵀ, the largest of a few vectors."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((*results.shape[:-1], 4))
    squares = np.zeros(len(results))
    for _ in range(20):
        norms = np.linalg.norm(vectors, axis=-2, keepdims=True)
        vectors /= np.where(norms == 0, 1, norms)
        images = results.mT @ vectors
        squares = np.sum(images**2, axis=-2).max(axis=-1)
        vectors = results @ images
    return squares
