"""Reads a report: labels of cases, clocks, medians and speedups."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# A file as the command line writes it, and one of the measurements in it.
type Report = Mapping[str, Any]
type Measurement = Mapping[str, Any]


def case_label(measurement: Measurement) -> str:
    """Returns the model, with the mesh if there is one, or the shape."""
    if "mesh" in measurement:
        return f"{measurement['model']}, {mesh_label(measurement)}"
    return measurement.get("model") or "×".join(map(str, measurement["shape"]))


def mesh_label(measurement: Measurement) -> str:
    """Returns the sizes of the mesh's axes."""
    return ", ".join(f"{name}={size}" for name, size in measurement["mesh"].items())


def common_clock(measurements: Sequence[Measurement]) -> str:
    """Returns `"device"` where all variants have the device's clock, else `"wall"`."""
    times = [times for m in measurements for times in m["microseconds"].values()]
    return "device" if all("device" in by_clock for by_clock in times) else "wall"


def median_times(measurement: Measurement, clock: str) -> dict[str, float]:
    """Returns the median time of each variant, in µs."""
    return {name: by_clock[clock][1] for name, by_clock in measurement["microseconds"].items()}


def speedup(measurement: Measurement, clock: str) -> float:
    """Returns how many times faster ours is than the first variant."""
    times = median_times(measurement, clock)
    return next(iter(times.values())) / times["None"]


def keys_in_order(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the keys of all mappings, in the order of their first appearance."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def metric_values(cases: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Returns one metric of accuracy cases, shape `(cases,)` or `(cases, thresholds)`.

    It is ∞ where a result was not finite.
    """
    return np.nan_to_num(np.array([case[key] for case in cases], np.float64), nan=np.inf)
