"""Singular values of momenta while a run trains."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from muon_jax import MuonState

# The shares of the singular values below each quantile that is kept.
SHARES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Spectra:
    """Collects quantiles of the singular values of Muon's momenta, computed beside the training.

    Args:
        steps: the numbers of steps after which momenta are taken.
    """

    def __init__(self, steps: set[int]) -> None:
        self._steps = steps
        self._pool = ThreadPoolExecutor()
        self._rows: list[tuple[dict[str, Any], Future[list[float]]]] = []

    def add(self, step: int, state: Any) -> None:
        """Takes the momenta of an optimizer's state, if it is the step for it."""
        if step not in self._steps:
            return
        leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MuonState))
        momenta: list[Any] = [leaf.mu for leaf in leaves if isinstance(leaf, MuonState)]
        layers = jax.device_get(momenta[0]["layers"])
        kinds = {"up": layers["up"], "down": layers["down"]}
        for i, kind in enumerate(("query", "key", "value", "output")):
            kinds[kind] = layers["attention"][:, i]
        for kind, stack in kinds.items():
            for layer, matrix in enumerate(stack):
                facts = {"step": step, "matrix": kind, "layer": layer}
                self._rows.append((facts, self._pool.submit(quantiles, matrix)))

    def rows(self) -> list[dict[str, Any]]:
        """Waits, and returns a row for each matrix and step."""
        return [facts | {"quantiles": future.result()} for facts, future in self._rows]


def quantiles(matrix: np.ndarray) -> list[float]:
    """Returns quantiles, at `SHARES`, of the singular values over the Frobenius norm."""
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    values /= np.linalg.norm(values)
    return [float(f"{q:.4g}") for q in np.quantile(values, SHARES)]
