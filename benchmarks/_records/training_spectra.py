"""What schedules make of the singular values of momenta that a training report holds."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks._accuracy.polar_error import arguments_for_coefficients
from benchmarks._adversary.limits import map_singular_values
from benchmarks._records.reading import Report
from muon_jax._iteration.coefficients import NAMED, SCHEDULES, resolve_schedule
from muon_jax._iteration.steps import DEFAULT_STEPS, Schedule
from muon_jax.contrib._spectra import LEAST_REACHED

# What a spectrum is grouped by.
type Group = tuple[int, str, str]
_DTYPE = "float16"  # of a composed schedule's products on a GPU


def schedules_of_variants(report: Report) -> dict[str, Schedule]:
    """Returns the steps of each variant that is a set of coefficients.

    A variant is the name of a set, or that and a number of steps, `"standard_3_steps"`. AdamW and
    other packages have none. AOL has none, because its preconditioning depends on more than the
    singular values.
    """
    schedules = {}
    for variant in report["variants"]:
        name, steps = re.findall(r"^(.+?)(?:_(\d+)_steps)?$", variant)[0]
        if name in {*NAMED, *SCHEDULES}:
            preconditioning = arguments_for_coefficients(name)["preconditioning"]
            if preconditioning == "frobenius":
                schedules[variant] = resolve_schedule(name, int(steps or DEFAULT_STEPS))
    return schedules


class Spread(NamedTuple):
    """Of the singular values of an update.

    Attributes:
        unreached_share: the share below `LEAST_REACHED`. They are those of the momentum below what
            the schedule reaches, as in `with_metrics`.
        rms: √(mean σ²), which is the Frobenius norm of the update over √m.
    """

    unreached_share: float
    rms: float


def update_spreads(report: Report) -> dict[Group, dict[int, dict[str, Spread]]]:
    """Returns what each schedule makes of the momenta, medians over layers.

    A layer of a momentum counts once for each learning rate that has a spectrum of it.

    Returns:
        Spreads by width, variant that trained, and matrix; then by step; then by the variant whose
        schedule it is.
    """
    schedules, shares = schedules_of_variants(report), report.get("spectra_shares", [])
    layers: dict[Group, dict[int, dict[str, list[Spread]]]] = {}
    for spectrum in report.get("spectra", []):
        group = spectrum["width"], spectrum["variant"], spectrum["matrix"]
        of_step = layers.setdefault(group, {}).setdefault(spectrum["step"], {})
        sigma = singular_values(spectrum["quantiles"], shares, spectrum["width"])
        for name, schedule in schedules.items():
            of_step.setdefault(name, []).append(spread(orthogonalized(schedule, sigma)))
    return {
        group: {
            step: {name: Spread(*np.median(each, axis=0)) for name, each in by_name.items()}
            for step, by_name in sorted(by_step.items())
        }
        for group, by_step in layers.items()
    }


def spread(sigma: np.ndarray) -> Spread:
    """Returns the measures of an update's singular values."""
    return Spread(float(np.mean(sigma < LEAST_REACHED)), float(np.sqrt(np.mean(sigma**2))))


def orthogonalized(schedule: Schedule, sigma: np.ndarray) -> np.ndarray:
    """Returns what the steps make of singular values, in float64 and without rounding.

    They are divided by their norm first: Frobenius before quintic steps, Schatten-4 before a
    composed schedule.
    """
    power = 4 if schedule.is_composed else 2
    norm = np.sum(sigma**power) ** (1 / power)
    return map_singular_values(schedule, _DTYPE, sigma / norm)


def singular_values(quantiles: Sequence[float], shares: Sequence[float], count: int) -> np.ndarray:
    """Returns singular values with these quantiles, the smallest first.

    Between quantiles they lie on lines. Above the last quantile but one they lie on
    a + (b - a)·tᵞ, with t from 0 to 1. γ makes the sum of squares 1, which it is for a matrix over
    its Frobenius norm: few values can be much larger than the others.

    Args:
        quantiles: those of singular values over the Frobenius norm, by `numpy.quantile`. The last
            is the largest singular value.
        shares: where, from 0 to 1.
        count: the number of singular values.
    """
    from scipy import optimize

    at = np.linspace(0, 1, count)
    sigma = np.interp(at, shares, quantiles)
    a, b = quantiles[-2:]
    t = np.clip((at - shares[-2]) / (shares[-1] - shares[-2]), 0, 1)

    def bent(log_gamma: float) -> np.ndarray:
        return np.where(t > 0, a + (b - a) * t ** np.exp(log_gamma), sigma)

    def excess(log_gamma: float) -> float:
        return float(np.sum(bent(log_gamma) ** 2)) - 1

    low, high = -5.0, 5.0
    if excess(low) <= 0 or excess(high) >= 0:  # no γ gives 1, up to the rounding of a record
        return bent(low if excess(low) <= 0 else high)
    found: Any = optimize.brentq(excess, low, high)
    return bent(found)
