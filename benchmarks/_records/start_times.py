"""Prints how long programs take until their first update is compiled."""

from collections.abc import Iterable

from benchmarks._records.reading import Measurement, case_label

# What stands below the heading of a report.
START_UNIT = (
    "Seconds in fresh processes: median (lowest–highest). Ratios are of the medians of all."
)


def start_rows(measurement: Measurement) -> list[dict[str, str]]:
    """Returns the cells by column, a row for each optimizer, optax first."""
    seconds = measurement["start_seconds"]
    baseline = _median(seconds["optax"]["all"])
    return [
        {
            "model": case_label(measurement),
            "cache": measurement["cache"],
            "optimizer": name.replace("None", "muon"),
            **{phase: _median_and_range(values) for phase, values in phases.items()},
            "all / optax's": f"{_median(phases['all']) / baseline:.2f}×",
            "from the cache": str(measurement["cached"][name]),
            "kernels": str(measurement["kernels"][name]),
            "error": f"{measurement['errors'][name]:.2g}",
        }
        for name, phases in seconds.items()
    ]


def _median(values: Iterable[float]) -> float:
    _, median, _ = values
    return median


def _median_and_range(values: Iterable[float]) -> str:
    low, median, high = (f"{value:.2f}" for value in values)
    return f"{median} ({low}–{high})"
