"""Plots a training report: learning rates by width, differences by width, and losses by time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._records.palette import PALETTE
from benchmarks._records.reading import Report
from benchmarks._records.training_statistics import NOT_MUON, Study, read_study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import SubFigure

_SHOWN = 1.4  # losses above this many times the least one are cut off


def draw_training(figure: "SubFigure", report: Report) -> None:
    """Draws a panel for each width above, and the differences and the losses by time below."""
    from matplotlib.lines import Line2D

    study = read_study(report)
    above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
    panels = above.subplots(1, len(report["widths"]), squeeze=False)[0]
    for axes, width in zip(panels, report["widths"], strict=True):
        _draw_rates(axes, study, width)
    panels[0].set_ylabel("final loss; lines: seeds that all rates have", fontsize=9)
    differences, times = below.subplots(1, 2)
    _draw_differences(differences, study)
    _draw_times(times, study)
    names = report["variants"]
    handles = [Line2D([], [], label=name, **_style(study, name)) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
    without = "; AdamW in the lower right panel alone" * bool({*NOT_MUON} & {*names})
    figure.suptitle(f"training, {report['device']}, nats per token{without}")


def _style(study: Study, variant: str) -> dict[str, Any]:
    """The color of a variant, and dashes for the control."""
    color = PALETTE[study.report["variants"].index(variant) % len(PALETTE)]
    return {"color": color, "linestyle": "--" if variant == study.report["control"] else "-"}


def _without_adamw(study: Study) -> list[str]:
    return [name for name in study.report["variants"] if name not in NOT_MUON]


def _draw_rates(axes: "Axes", study: Study, width: int) -> None:
    """Final losses of each seed, and lines of the means over the seeds that all rates have.

    AdamW's are left out: they can be far above, at other learning rates.
    """
    least = np.inf
    for variant in _without_adamw(study):
        if trained := study.trained.get((width, variant)):
            style, rates = _style(study, variant), trained.curves
            common = set.intersection(*map(set, rates.values()))
            if common:
                lines = [[curves[seed][-1] for seed in common] for curves in rates.values()]
                axes.plot([*rates], np.mean(lines, axis=1), linewidth=1, **style)
            points = [(rate, c[-1]) for rate, curves in rates.items() for c in curves.values()]
            axes.scatter(*zip(*points, strict=True), s=4, color=style["color"])
            least = min(least, *(loss for _, loss in points))
    axes.set(title=f"width {width}", xlabel="learning rate", xscale="log")
    _label_plainly(axes.xaxis, (1, 2, 5))
    _cut_off(axes, least)


def _draw_differences(axes: "Axes", study: Study) -> None:
    """Differences to the first variant with their intervals, by width, side by side.

    AdamW's is left out: it can be many times larger than the others.
    """
    widths, first = study.report["widths"], study.first
    others = [name for name in _without_adamw(study) if name != first]
    for i, variant in enumerate(others):
        found = {w: study.difference(variant, w) for w in widths}
        known = [(w, d) for w, d in found.items() if d is not None and np.isfinite(d.mean)]
        at = [widths.index(w) + 0.6 * ((i + 0.5) / len(others) - 0.5) for w, _ in known]
        axes.errorbar(
            at,
            [d.mean for _, d in known],
            [0.0 if np.isnan(d.half_width) else d.half_width for _, d in known],
            fmt="o",
            markersize=4,
            capsize=2,
            color=_style(study, variant)["color"],
        )
    axes.axhline(0, color=PALETTE[0], linewidth=1)
    axes.set(xlabel="width", ylabel=f"loss - {first}'s", xlim=(-0.5, len(widths) - 0.5))
    axes.set_xticks(range(len(widths)), map(str, widths))
    axes.set_title("difference and 95% interval", fontsize=10)


def _draw_times(axes: "Axes", study: Study) -> None:
    """Mean losses at the largest width, each variant at its learning rate, by seconds or step."""
    width, steps = max(study.report["widths"]), study.report["training"]["steps"]
    programs = study.report["programs"]
    step_ms = {p["variant"]: p.get("step_ms") for p in programs if p["width"] == width}
    curves = {name: t.mean_curve for (w, name), t in study.trained.items() if w == width}
    timed = all(step_ms.get(name) for name in curves)
    for name, curve in curves.items():
        x = steps * np.arange(1, len(curve) + 1) / len(curve)
        axes.plot(x * step_ms[name] / 1000 if timed else x, curve, **_style(study, name))
    axes.set(xlabel="seconds" if timed else "step", ylabel="validation loss")
    axes.set_title(f"width {width}, means over seeds", fontsize=10)
    _cut_off(axes, min((float(np.min(curve)) for curve in curves.values()), default=np.inf))


def _cut_off(axes: "Axes", least: float) -> None:
    """Leaves out what is far above the least loss, which is not finite where all runs diverged."""
    if np.isfinite(least):
        high = min(axes.get_ylim()[1], _SHOWN * least)
        axes.set_ylim(least - 0.05 * (high - least), high)


def _label_plainly(axis: "Axis", subs: Sequence[float]) -> None:
    """Labels a logarithmic axis at these multiples of powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")
