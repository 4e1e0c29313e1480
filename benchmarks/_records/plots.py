"""Plots reports, each in charts of its own; needs matplotlib."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks._records.palette import PALETTE
from benchmarks._records.reading import (
    Measurement,
    Report,
    case_label,
    common_clock,
    keys_in_order,
    median_times,
    metric_values,
    speedup,
)
from benchmarks._records.training_figure import draw_training

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D

# The panels of `_draw_pareto_panels`: how many stand side by side, and the places of a name beside
# its point, the preferred one first.
_COLUMNS = 3
_SIDES: tuple[dict[str, Any], ...] = (
    {"position": (6, 0), "ha": "left", "va": "center"},
    {"position": (0, 4), "ha": "center", "va": "bottom"},
    {"position": (0, -4), "ha": "center", "va": "top"},
    {"position": (-6, 0), "ha": "right", "va": "center"},
    {"position": (-2, -4), "ha": "right", "va": "top"},
    {"position": (-2, 4), "ha": "right", "va": "bottom"},
)


class Chart(NamedTuple):
    """A function that draws a report on a figure, and the size of the figure in inches."""

    draw: Callable[["SubFigure", Report], None]
    width: float
    height: float


def figure_of_reports(reports: Sequence[Report]) -> "Figure":
    """Returns a matplotlib figure with the charts of all reports, one below the other.

    | benchmark    | charts                                                              |
    | ------------ | ------------------------------------------------------------------- |
    | `accuracy`   | errors against FLOPs                                                |
    | `training`   | losses against learning rates for each width; differences to the    |
    |              | first variant by width; losses against time at the largest width    |
    | all others   | bars of the speedup of ours over the first variant; errors to the   |
    |              | polar factor against times, where they were measured                |
    """
    from matplotlib.figure import Figure

    charts = [(chart, report) for report in reports for chart in _charts(report)]
    heights = [chart.height for chart, _ in charts]
    width = max(chart.width for chart, _ in charts)
    result = Figure(figsize=(width, sum(heights)), layout="constrained")
    parts = result.subfigures(len(charts), squeeze=False, height_ratios=heights)[:, 0]
    for part, (chart, report) in zip(parts, charts, strict=True):
        chart.draw(part, report)
    return result


def _charts(report: Report) -> list[Chart]:
    measurements = report["measurements"]
    if report["benchmark"] == "accuracy":
        return [Chart(_draw_accuracy_panels, 10, 8)]
    if report["benchmark"] == "training":
        return [Chart(draw_training, 10, 8)]
    charts = [Chart(_draw_speedups, 7, 0.25 * len(measurements) + 1.2)]
    if panels := _panels(measurements):
        height = 3.3 * math.ceil(len(panels) / _COLUMNS) + 0.6
        charts.append(Chart(_draw_pareto_panels, 10, height))
    return charts


def _draw_speedups(figure: "SubFigure", report: Report) -> None:
    axes = figure.subplots()
    measurements = report["measurements"]
    clock = common_clock(measurements)
    speedups = [speedup(measurement, clock) for measurement in measurements]
    bars = axes.barh([case_label(measurement) for measurement in measurements], speedups)
    paper: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    axes.bar_label(bars, fmt="%.2f×", padding=3, bbox=paper)  # not struck through by the line
    axes.axvline(1.0, color="black", linewidth=1)
    axes.margins(y=0.01)
    baseline = next(iter(measurements[0]["microseconds"]))
    axes.set(
        title=_title(report),
        xlabel=f"speedup over {baseline} ({clock})",
        xlim=(0, 1.15 * max(1, *speedups)),
    )
    axes.invert_yaxis()


def _title(report: Report) -> str:
    """What was measured, and where."""
    return f"{report['benchmark']}, {report['device']}, {report['dtype']}"


def _panels(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The largest shape of each kind that has polar errors.

    A kind is matrices, or stacks, of one ⌊n/m⌋.
    """
    kinds: dict[tuple[int, int], Measurement] = {}
    measured = [measurement for measurement in measurements if "polar_errors" in measurement]
    for measurement in sorted(measured, key=lambda m: math.prod(m["shape"])):
        *_, m, n = shape = measurement["shape"]
        kinds[len(shape), n // m] = measurement
    return [kinds[kind] for kind in sorted(kinds)]


def _draw_pareto_panels(figure: "SubFigure", report: Report) -> None:
    """Errors to the polar factor against times: a panel with its Pareto front for each kind.

    Variants with the coefficients of the first variant are black, and told apart by their markers.
    """
    from matplotlib.lines import Line2D

    panels = _panels(report["measurements"])
    clock = common_clock(report["measurements"])
    styles = _styles(panels)
    axes = None
    for i, measurement in enumerate(panels, 1):
        axes = figure.add_subplot(math.ceil(len(panels) / _COLUMNS), _COLUMNS, i, sharey=axes)
        _draw_points(axes, measurement, clock, styles)
        axes.set(title=case_label(measurement), xlabel=f"µs ({clock})")
        axes.tick_params(labelleft=i % _COLUMNS == 1)
    figure.supylabel("error to the polar factor")
    figure.suptitle(_title(report))
    handles = [
        Line2D([], [], label=name.replace("None", "newton_schulz"), linestyle="", **style)
        for name, style in styles.items()
    ]
    handles += [*_form_handles(), Line2D([], [], label="Pareto front", color="lightgray")]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)


def _styles(panels: Sequence[Measurement]) -> dict[str, dict[str, Any]]:
    """The color and the marker of each variant in its standard form."""
    names = keys_in_order({_without_form(name): m} for m in panels for name in m["polar_errors"])
    ours = [name for name in names if all(_coefficients(name, m) for m in panels)]
    colors = dict(zip(ours, itertools.cycle(PALETTE[1:]), strict=False))
    markers = itertools.cycle("os^vD*PXp")
    return {
        name: {"color": colors[name], "marker": "o"}
        if name in colors
        else {"color": "black", "marker": next(markers)}
        for name in names
    }


def _form_handles() -> "list[Line2D]":
    """Entries of a legend that tell the forms apart."""
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {"color": "gray", "linestyle": "", "marker": "o"}
    return [
        Line2D([], [], label="standard form", fillstyle="none", **style),
        Line2D([], [], label="gram form", fillstyle="full", **style),
    ]


def _draw_points(
    axes: "Axes", measurement: Measurement, clock: str, styles: Mapping[str, dict[str, Any]]
) -> None:
    """A point for each variant, and a line through the front."""
    from matplotlib.ticker import LogLocator, NullLocator

    times, errors = median_times(measurement, clock), measurement["polar_errors"]
    points = sorted((times[name], errors[name]) for name in errors)
    front = [p for i, p in enumerate(points) if all(p[1] < q[1] for q in points[:i])]
    axes.plot(*zip(*front, strict=True), color="lightgray")
    for name in errors:
        fill = "full" if name.endswith(", gram") else "none"
        style: dict[str, Any] = {**styles[_without_form(name)], "fillstyle": fill}
        axes.plot(times[name], errors[name], markersize=6, **style)
    axes.set(xscale="log", yscale="log")
    axes.margins(x=0.15, y=0.1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
        axis.set_major_formatter("{x:g}")


def arrange_names(axes: "Axes") -> None:
    """Moves each name to the first side of its point where it covers neither points nor names."""
    taken = [line.get_window_extent() for line in axes.lines if line.get_marker() == "o"]
    for text in axes.texts:
        for side in _SIDES:
            text.set(**side)
            box = text.get_window_extent()
            inside = axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1
            if inside and not any(map(box.overlaps, taken)):
                break
        taken.append(text.get_window_extent())


def _coefficients(name: str, measurement: Measurement) -> str:
    """The name of a variant's coefficients; empty for those of the first variant."""
    name = _without_form(name)
    return "" if name in measurement["errors"] else name


def _without_form(name: str) -> str:
    """The name of a variant in its standard form; for `"standard"` that is the default, `None`."""
    return "None" if name == "standard, gram" else name.removesuffix(", gram")


def _draw_accuracy_panels(figure: "SubFigure", report: Report) -> None:
    """The median error of all cases against FLOPs: a row for each dtype, a column for each n/m."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullFormatter

    measured = [m for m in report["measurements"] if "cases" in m]
    looks: list[dict[str, Any]] = [
        {"marker": marker, "color": color} for marker, color in itertools.product("os^", PALETTE)
    ]
    names = keys_in_order({m["name"]: 0} for m in measured)
    styles = dict(zip(names, itertools.cycle(looks), strict=False))
    dtypes = keys_in_order({m["dtype"]: 0} for m in measured)
    aspects = keys_in_order(m["units"] for m in measured)
    panels = figure.subplots(len(dtypes), len(aspects), sharex="col", sharey="row", squeeze=False)
    for row, dtype in zip(panels, dtypes, strict=True):
        for axes, aspect in zip(row, aspects, strict=True):
            for m in (m for m in measured if m["dtype"] == dtype):
                cases = [c for c in m["cases"] if f"{c['shape'][1] / c['shape'][0]:g}" == aspect]
                error = np.median(metric_values(cases, "errors")[:, -1])
                fill: Any = "full" if m["method"] == "gram" else "none"
                axes.plot(m["units"][aspect], error, fillstyle=fill, **styles[m["name"]])
            axes.set(yscale="log")
            axes.yaxis.set_minor_formatter(NullFormatter())
        row[0].set_ylabel(dtype)
    for axes, aspect in zip(panels[0], aspects, strict=True):
        axes.set_title(f"n/m = {aspect}")
    for axes in panels[-1]:
        axes.set_xlabel("FLOPs/m³")
    figure.supylabel(f"median error on σ > {report['thresholds'][-1]:g}σ₁")
    figure.suptitle(f"distance to the polar factor, {report['device']}")
    handles = [Line2D([], [], linestyle="", label=name, **look) for name, look in styles.items()]
    figure.legend(handles=handles + _form_handles(), loc="outside right upper", fontsize=9)
