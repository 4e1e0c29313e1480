"""Plots the speed of whole steps and of the iteration in one figure; needs matplotlib."""

from typing import TYPE_CHECKING, Any

from benchmarks._records.palette import COLORS, PAPER, WIDTH
from benchmarks._records.reading import Measurement, Report, case_label, median_times
from benchmarks._times.updates import IN_16_BITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MODELS = {
    "gpt2-small": "GPT-2 small",
    "24-layers": "24 layers of width 2048",
    "qwen3-30b-a3b-experts": "128 experts of Qwen3-30B-A3B",
}
_OPTIMIZERS = {
    "optax": ("optax, default", "0.6"),
    "None": ("muon", COLORS["standard"]),
    "balanced": ('muon, "balanced"', COLORS["balanced"]),
}
# Five steps in PyTorch.
_TORCH = (
    "torch.compile",
    "torch.compile, CUDA graphs",
    "dion",
    "gram_newton_schulz",
    "gram_newton_schulz, standard",
)


def headline_figure(updates: Report, iteration: Report) -> "Figure":
    """Returns a matplotlib figure of whole steps above, and of the iteration below.

    Args:
        updates: a report of `muon`, by the device's clock.
        iteration: a report of `newton_schulz`, by the wall clock.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 7.6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[12, 11])
    _draw_steps(above, updates)
    _draw_iterations(below, iteration)
    for axes in (above, below):
        axes.set_xlim(left=0)
        axes.axvline(1, color="black", linewidth=1, zorder=0)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.invert_yaxis()
    return figure


def _draw_steps(axes: "Axes", report: Report) -> None:
    """A bar for each optimizer under the name of each model, the model that gains most first."""
    y, ticks = 0.0, {}
    measured = {m["model"]: median_times(m, "device") for m in report["measurements"]}
    for model in sorted(_MODELS, key=lambda name: -_speed(measured[name], "balanced")):
        axes.text(0, y, _MODELS[model], weight="bold", va="center", bbox=PAPER)
        for name, (label, color) in _OPTIMIZERS.items():
            y += 1
            bar = axes.barh(y, _speed(measured[model], name), color=color)
            axes.bar_label(bar, fmt="%.2f", padding=4, bbox=PAPER)
            ticks[y] = label
        y += 1.3
    axes.set_yticks([*ticks], ticks.values())
    axes.set_ylim(-0.6, y - 0.8)
    axes.margins(x=0.1)
    device = report["device"].removeprefix("NVIDIA ")
    axes.set_title(
        f"Speed of the whole step on one {device}\n"
        f"1 = optax with 16-bit products (device clock, {report['dtype']})"
    )


def _speed(times: dict[str, float], name: str) -> float:
    return times[IN_16_BITS] / times[name]


def _draw_iterations(axes: "Axes", report: Report) -> None:
    """A row with two points for each shape, the shape that gains most first."""
    rows = sorted(map(_iteration_speeds, report["measurements"]), key=lambda row: -row[2])
    shapes, five_steps, balanced = zip(*rows, strict=True)
    places = range(len(rows))
    axes.hlines(places, five_steps, balanced, color="0.8", linewidth=3, zorder=1)
    for speeds, color, align, offset, first in (
        (five_steps, COLORS["standard"], "right", -9, "ours, five steps {:.2f}"),
        (balanced, COLORS["balanced"], "left", 9, '{:.2f} "balanced"'),
    ):
        axes.plot(speeds, places, "o", color=color, markersize=9)
        style: dict[str, Any] = {"color": color, "ha": align, "va": "center", "bbox": PAPER}
        for point in zip(speeds, places, strict=True):
            text = ("{:.2f}" if point[1] else first).format(point[0])
            axes.annotate(text, point, (offset, 0), textcoords="offset points", **style)
    axes.set_yticks(places, shapes)
    axes.margins(x=0.25, y=0.06)
    device = report["device"].split()[1]
    axes.set_title(
        f"Speed of Newton–Schulz on one {device}, by shape\n"
        f"1 = fastest five steps in PyTorch (wall clock, {report['dtype']})"
    )
    axes.set_xlabel("1: the fastest of torch.compile, Dion, gram_newton_schulz")


def _iteration_speeds(measurement: Measurement) -> tuple[str, float, float]:
    """The shape, and how many times as fast five steps and `"balanced"` are."""
    times = median_times(measurement, "wall")
    reference = min(times[name] for name in _TORCH if name in times)
    ours = min(times[name] for name in ("None", "standard, gram") if name in times)
    return case_label(measurement), reference / ours, reference / times["balanced"]
