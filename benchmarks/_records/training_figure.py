"""Plots a training report: differences by width, and losses by step."""

from typing import TYPE_CHECKING

import numpy as np

from benchmarks._records.curves import draw_curves
from benchmarks._records.palette import COLORS, name_lines
from benchmarks._records.reading import Report
from benchmarks._records.training_statistics import NOT_MUON, Study, read_study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

_SHOWN = 1.45  # losses above this many times the least one are cut off


def draw_training(figure: "SubFigure", report: Report) -> None:
    """Draws the differences above, and the losses at the largest width below."""
    differences, losses = figure.subplots(2, 1)
    study = read_study(report)
    _draw_differences(differences, study)
    _draw_losses(losses, study)


def _draw_differences(axes: "Axes", study: Study) -> None:
    """Differences to the first variant with their intervals, by width, side by side.

    AdamW's is left out: it can be many times larger than the others.
    """
    widths, first = study.report["widths"], study.first
    others = [name for name in study.report["variants"] if name not in (first, *NOT_MUON)]
    ends = {first: (0.0, COLORS[first])}
    for i, variant in enumerate(others):
        found = {w: study.difference(variant, w) for w in widths}
        known = [(w, d) for w, d in found.items() if d is not None and np.isfinite(d.mean)]
        at = [widths.index(w) + 0.5 * ((i + 0.5) / len(others) - 0.5) for w, _ in known]
        means = [d.mean for _, d in known]
        half_widths = [0.0 if np.isnan(d.half_width) else d.half_width for _, d in known]
        axes.errorbar(at, means, half_widths, fmt="o", capsize=3, color=COLORS[variant])
        if means:
            ends[variant] = means[-1], COLORS[variant]
    axes.axhline(0, color=COLORS[first], linewidth=1)
    axes.set_xticks(range(len(widths)), map(str, widths))
    axes.set(xlabel="width", xlim=(-0.5, len(widths) - 0.5))
    axes.set_title(f"Final loss less that of {first}, in nats per token:\nmean and 95% interval")
    name_lines(axes, ends)


def _draw_losses(axes: "Axes", study: Study) -> None:
    """Losses at the largest width, each variant at its learning rate, by step."""
    width, steps = max(study.report["widths"]), study.report["training"]["steps"]
    losses = {
        name: np.array([*trained.curves[trained.best_rate].values()])
        for (w, name), trained in study.trained.items()
        if w == width
    }
    least = min((float(np.min(curves)) for curves in losses.values()), default=np.inf)
    draw_curves(axes, steps, losses, COLORS, _SHOWN * least)
    axes.set_title(f"Validation loss at width {width}: mean and range over seeds")
