"""Plots reports of times and of training; needs matplotlib."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._records.palette import COLORS, PAPER, WIDTH
from benchmarks._records.reading import Report, case_label, common_clock, speedup
from benchmarks._records.training_figure import draw_training

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure


def figure_of_reports(reports: Sequence[Report]) -> "Figure":
    """Returns a matplotlib figure with a chart of each report, one below the other.

    Training has differences by width and losses by step. Others have bars of the speedup of ours
    over the first variant, the largest first.

    Raises:
        SystemExit: a report has neither times nor training.
    """
    from matplotlib.figure import Figure

    for report in reports:
        is_training = report["benchmark"] == "training"
        if not (is_training or all("microseconds" in m for m in report["measurements"])):
            raise SystemExit(f"--png draws times and training: {report['benchmark']} has neither")
    heights = [_height(report) for report in reports]
    result = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    parts = result.subfigures(len(reports), squeeze=False, height_ratios=heights)[:, 0]
    for part, report in zip(parts, reports, strict=True):
        draw = draw_training if report["benchmark"] == "training" else _draw_speedups
        draw(part, report)
    return result


def _height(report: Report) -> float:
    """Of a chart, in inches."""
    return 8 if report["benchmark"] == "training" else 0.3 * len(report["measurements"]) + 1.2


def _draw_speedups(figure: "SubFigure", report: Report) -> None:
    axes = figure.subplots()
    clock = common_clock(report["measurements"])
    measurements = sorted(report["measurements"], key=lambda m: speedup(m, clock))
    speedups = [speedup(measurement, clock) for measurement in measurements]
    bars = axes.barh([*map(case_label, measurements)], speedups, color=COLORS["standard"])
    axes.bar_label(bars, fmt="%.2f", padding=4, bbox=PAPER)  # not struck through by the line
    axes.axvline(1.0, color="black", linewidth=1)
    axes.margins(x=0.15, y=0.01)
    baseline = next(iter(measurements[0]["microseconds"]))
    axes.set_title(
        f"Speed of {report['benchmark']}, {_place(report)}\n1 = {baseline} ({clock} clock)"
    )


def speeds_by_size_figure(report: Report) -> "Figure":
    """Returns a matplotlib figure of the speed of `syrk` over that of jnp, by FLOPs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.5), layout="constrained")
    axes, measurements = figure.subplots(), report["measurements"]
    clock = common_clock(measurements)
    flops = [2 * m["shape"][-2] * math.prod(m["shape"]) for m in measurements]
    speeds = [speedup(m, clock) for m in measurements]
    is_stack = np.array([len(m["shape"]) > 2 for m in measurements])
    for color, shown, name, height in (
        (COLORS["standard"], ~is_stack, "single matrices", 0.92),
        (COLORS["balanced"], is_stack, "stacks of matrices", 0.84),
    ):
        axes.plot(np.compress(shown, flops), np.compress(shown, speeds), "o", color=color)
        axes.text(0.02, height, name, color=color, transform=axes.transAxes)
    for i in np.argmin(speeds), np.argmax(speeds):
        label = case_label(measurements[i])
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "center"}
        axes.annotate(label, (flops[i], speeds[i]), (-8, 0), **style)
    axes.axhline(1, color="black", linewidth=1, zorder=0)
    axes.set(xscale="log", xlabel="FLOPs of x @ x.mT")
    axes.set_title(f"Speed of syrk, {_place(report)}\n1 = x @ x.mT ({clock} clock)")
    return figure


def _place(report: Report) -> str:
    """Where it was measured, and in which dtype."""
    return f"{report['device'].removeprefix('NVIDIA ')}, {report['dtype']}"
