"""The map of singular values that coefficients stand for, and how far results may exceed it."""

import numpy as np

from benchmarks._accuracy.polar_error import LARGEST_ALLOWED, arguments_for_coefficients
from muon_jax._iteration.coefficients import resolve_schedule
from muon_jax._iteration.steps import DEFAULT_STEPS, Schedule


def maximum_of_map(name: str, dtype: str) -> float:
    """Returns the largest |singular value| of the result for σ in [0, 1], without rounding.

    Args:
        name: of the coefficients.
        dtype: of the products, which composed schedules have coefficients for.
    """
    arguments = arguments_for_coefficients(name)
    schedule = resolve_schedule(name, DEFAULT_STEPS, arguments["preconditioning"])
    sigma = np.union1d(np.linspace(0, 1, 20_001), np.geomspace(1e-5, 1, 20_001))
    return float(np.abs(map_singular_values(schedule, dtype, sigma)).max())


def limit_of(maximum: float) -> float:
    """Returns the largest singular value that rounding may make of a map with that maximum."""
    return min(LARGEST_ALLOWED, max(1.35, 1.3 * maximum))


def map_singular_values(schedule: Schedule, dtype: str, sigma: np.ndarray) -> np.ndarray:
    """Returns the singular values of the result, negative where the map is, in float64.

    Args:
        schedule: the steps.
        dtype: as for `maximum_of_map`.
        sigma: singular values over the norm that the steps need, any shape.
    """
    for step in schedule.steps_in(dtype):
        sigma = step.terms(sigma**2)[-1] * sigma
    return sigma
