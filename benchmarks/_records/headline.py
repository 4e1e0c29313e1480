"""Plots speed, beside other packages, and accuracy in one figure; needs matplotlib."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks._records.plots import arrange_names
from benchmarks._records.reading import (
    Measurement,
    Report,
    case_label,
    median_times,
    metric_values,
)
from benchmarks._times.updates import IN_16_BITS
from muon_jax._iteration.coefficients import SCHEDULES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Bar(NamedTuple):
    """A color, and the variants of which the bar shows the fastest.

    A numbered bar has its number beside it, and is twice as high as others.
    """

    color: str
    variants: tuple[str, ...]
    numbered: bool = False

    @property
    def share(self) -> int:
        """The height, where that of a bar without a number is 1."""
        return 2 if self.numbered else 1


_OURS = "#d55e00"  # the color of our coefficients
_TORCH = ("torch.compile", "torch.compile, CUDA graphs")
_OPTAX = ("optax", IN_16_BITS)
_UPDATE_BARS = {
    "muon-jax, five steps": Bar("#0072b2", ("None",), True),
    'muon-jax, "balanced"': Bar(_OURS, ("balanced",), True),
}
# Five steps by others, and by ours. All run their fastest form.
_ITERATION_BARS = {
    "plain jnp": Bar("0.85", ("jnp",)),
    "Dion": Bar("0.65", ("dion",)),
    "gram_newton_schulz": Bar("0.4", ("gram_newton_schulz", "gram_newton_schulz, standard")),
    "muon-jax, five steps": Bar("#0072b2", ("None", "standard, gram"), True),
    'muon-jax, "balanced"': _UPDATE_BARS['muon-jax, "balanced"'],
}
_ASPECT = 4  # n/m of most MLPs
_SETS = ("standard", "polar_express", "dion", "aol", "deepseek_v4", "fast", "balanced", "accurate")


def headline_figure(reports: Sequence[Report]) -> "Figure":
    """Returns a matplotlib figure of the iteration, whole updates, and accuracy.

    All times of a panel are by one clock: the wall clock beside packages for torch, else the
    device's. The titles name device and dtype.

    Raises:
        ValueError: no report is of `newton_schulz`, none of `muon`, or none of `accuracy`.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    def measured(benchmark: str) -> Report:
        for report in reports:
            if report["benchmark"] == benchmark:
                return report
        given = ", ".join(report["benchmark"] for report in reports)
        raise ValueError(
            f"--headline needs a file of the benchmark {benchmark}, got {given}: pass one that"
            f" `python -m benchmarks {benchmark} --json FILE.json` wrote"
        )

    result = Figure(figsize=(10, 8), layout="constrained")
    axes = result.subplot_mosaic([["iteration", "update"], ["iteration", "accuracy"]])
    iteration, update, accuracy = (axes[name] for name in ("iteration", "update", "accuracy"))
    steps, updates, errors = map(measured, ("newton_schulz", "muon", "accuracy"))
    _draw_fastest(iteration, steps["measurements"], _ITERATION_BARS, _TORCH, "wall")
    _draw_fastest(update, updates["measurements"], _UPDATE_BARS, _OPTAX, "device")
    _draw_accuracy_of_sets(accuracy, errors["measurements"])
    titles = {
        iteration: f"newton_schulz over torch.compile\n{_device(steps)}, wall clock",
        update: "whole step over optax.contrib.muon with 16-bit products\n"
        f"{_device(updates)}, device clock",
        accuracy: f"distance to the polar factor, n = {_ASPECT}m\n{errors['device']}, in each set's"
        " default dtype",
    }
    for panel, title in titles.items():
        panel.set_title(title, fontsize=9)
    handles = [Patch(color=bar.color, label=label) for label, bar in _ITERATION_BARS.items()]
    result.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)
    result.draw_without_rendering()  # lays the figure out, which decides what overlaps
    arrange_names(accuracy)
    return result


def _device(report: Report) -> str:
    """The device and the dtype of a report."""
    return f"{report['device'].removeprefix('NVIDIA ')}, jax {report['jax']}, {report['dtype']}"


def _draw_fastest(
    axes: "Axes",
    measurements: Sequence[Measurement],
    bars: Mapping[str, Bar],
    baseline: tuple[str, ...],
    clock: str,
) -> None:
    """How many times faster than the fastest baseline the fastest variant of each bar is."""
    labels, unit = [], 0.84 / sum(bar.share for bar in bars.values())
    for i, measurement in enumerate(measurements):
        times = median_times(measurement, clock)
        reference = min(times[name] for name in baseline if name in times)
        top = i - 0.42
        for bar in bars.values():
            height = unit * bar.share
            if found := [times[name] for name in bar.variants if name in times]:
                place, width = top + height / 2, reference / min(found)
                drawn = axes.barh(place, width, height, color=bar.color)
                if bar.numbered:
                    axes.bar_label(drawn, fmt="%.1f×", padding=2, fontsize=8)
            top += height
        labels.append(case_label(measurement).replace(", ", "\n"))
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.margins(x=0.12, y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("times faster")


def _draw_accuracy_of_sets(axes: "Axes", measurements: Sequence[Measurement]) -> None:
    """The median error to the polar factor against FLOPs, in the standard form.

    Each set has the dtype that it runs in by default. Our coefficients are in color.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    for name in _SETS:
        color, dtype = (_OURS, "float16") if name in SCHEDULES else ("black", "bfloat16")
        key = (name, "standard", dtype)
        (m,) = (m for m in measurements if (m["name"], m["method"], m["dtype"]) == key)
        cases = [c for c in m["cases"] if c["shape"][1] == _ASPECT * c["shape"][0]]
        error = float(np.median(metric_values(cases, "errors")[:, 0]))
        units = m["units"][str(_ASPECT)]
        axes.plot(units, error, marker="o", color=color)
        axes.annotate(
            name, (units, error), (0, 0), textcoords="offset points", color=color, fontsize=9
        )
    axes.set(yscale="log", xlabel="FLOPs/m³", ylabel="median error on σ > 0.01σ₁")
    axes.margins(x=0.2, y=0.1)
    axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
