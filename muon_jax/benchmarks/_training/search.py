"""Which run comes next: a search for the best learning rate, then further seeds."""

import math
from collections.abc import Mapping, Sequence

# Learning rates are a start times powers of this.
RATIO = math.sqrt(2)
# From the best rate so far, in this order.
_AROUND = (0, -1, 1, -2, 2)
# How many of the best rates have all seeds.
_BEST = 2


def learning_rate(start: float, power: int) -> float:
    """Returns start × √2^power, to five digits."""
    return float(f"{start * RATIO**power:.5g}")


def power_of(start: float, rate: float) -> int:
    """Returns the power of √2 with which `learning_rate` gives this rate."""
    return round(math.log(rate / start, RATIO))


def next_run(
    losses: Mapping[tuple[int, int], float], seeds: Sequence[int], origin: int = 0
) -> tuple[int, int] | None:
    """Returns the power of √2 and the seed of the next run, None where none is left.

    The first seed has rates until two on each side of the best one have been tried. Then the two
    best rates get the other seeds.

    Args:
        losses: the final losses of the runs that have ended, by power and seed; ∞ for one that
            diverged.
        seeds: all seeds.
        origin: the power that is tried first.
    """
    first, *others = seeds
    tried = {power: loss for (power, seed), loss in losses.items() if seed == first}
    best = min(tried, key=lambda power: (tried[power], power), default=origin)
    for distance in _AROUND:
        if best + distance not in tried:
            return best + distance, first
    for power in sorted(tried, key=lambda power: (tried[power], power))[:_BEST]:
        for seed in others:
            if (power, seed) not in losses:
                return power, seed
    return None
