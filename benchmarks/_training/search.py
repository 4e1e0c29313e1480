"""Which run comes next: a search for the best learning rate, then further seeds."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks._records.training_statistics import Trained, fit_vertex

# Learning rates are a start times powers of this, an eighth of an octave.
RATIO = 2 ** (1 / 8)
# The search takes every fourth of them, √2 apart.
_STRIDE = 4
# From the best rate so far, in this order.
_AROUND = (0, -_STRIDE, _STRIDE, -2 * _STRIDE, 2 * _STRIDE)
# How many of the best rates have how many seeds, before the parabola is fitted.
_BEST, _SEEDS_OF_BEST = 2, 3
# The search ends where as many rates have diverged: 2^8 lies between them.
_MOST_DIVERGED = 17

type Losses = Mapping[tuple[int, int], float]


def learning_rate(start: float, power: int) -> float:
    """Returns start × 2^(power/8), to five digits."""
    return float(f"{start * RATIO**power:.5g}")


def power_of(start: float, rate: float) -> int:
    """Returns the power with which `learning_rate` gives this rate."""
    return round(math.log(rate / start, RATIO))


def least_runs(seeds: int) -> int:
    """Returns how many runs a search makes at least."""
    return len(_AROUND) + _BEST * (min(seeds, _SEEDS_OF_BEST) - 1) + max(0, seeds - _SEEDS_OF_BEST)


def next_run(losses: Losses, seeds: Sequence[int], origin: int = 0) -> tuple[int, int] | None:
    """Returns the power and the seed of the next run, None where none is left.

    1.  The first seed has rates √2 apart, until two on each side of the best one have been tried.
    2.  The two best rates get the second and the third seed.
    3.  The rate at the vertex of the parabola through these runs gets all seeds.

    The search ends early where the first 17 rates have diverged.

    Args:
        losses: the final losses of the runs that have ended, by power and seed; ∞ for one that
            diverged.
        seeds: all seeds.
        origin: the power next to the one that is tried first, a multiple of `_STRIDE`.
    """
    origin = _STRIDE * round(origin / _STRIDE)
    of_search = {run: loss for run, loss in losses.items() if not run[0] % _STRIDE}
    tried = {power: loss for (power, seed), loss in of_search.items() if seed == seeds[0]}
    best, *others = sorted(tried, key=lambda power: (tried[power], power)) or [origin]
    if len(tried) >= _MOST_DIVERGED and math.isinf(tried[best]):
        return None
    wanted = [(best + distance, seeds[0]) for distance in _AROUND]
    wanted += [
        (power, seed) for power in (best, *others)[:_BEST] for seed in seeds[1:_SEEDS_OF_BEST]
    ]
    if missing := [run for run in wanted if run not in losses]:
        return missing[0]
    vertex = _power_at_vertex(of_search, best)
    return next(((vertex, seed) for seed in seeds if (vertex, seed) not in losses), None)


def _power_at_vertex(losses: Losses, best: int) -> int:
    """The power next to the vertex of the parabola, the best one where it has none."""
    curves: dict[float, dict[int, np.ndarray]] = {}
    for (power, seed), loss in losses.items():
        curves.setdefault(learning_rate(1.0, power), {})[seed] = np.array([loss])
    vertex = fit_vertex(Trained(curves, learning_rate(1.0, best)))
    return power_of(1.0, vertex) if vertex else best
