"""Plots losses against steps, with the range of seeds; needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks._records.palette import COLORS, WIDTH, name_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GPT_RUNS = {"muon": "standard", "optax": "optax", "adamw": "adamw"}  # and their colors


def draw_curves(
    axes: "Axes",
    steps: float,
    losses: Mapping[str, np.ndarray],
    colors: Mapping[str, str],
    high: float = np.inf,
) -> None:
    """Draws means over seeds as lines and their ranges as shades, with the last means by name.

    Args:
        axes: to draw on.
        steps: of a run, with a loss after each of equal parts.
        losses: of each optimizer, shape `(seeds, points)`.
        colors: of the optimizers.
        high: what is above is cut off, and has no name.
    """
    ends = {}
    for name, of_seeds in losses.items():
        mean, points = of_seeds.mean(axis=0), of_seeds.shape[1]
        x = steps * np.arange(1, points + 1) / points
        axes.plot(x, mean, color=colors[name])
        low_and_high = of_seeds.min(axis=0), of_seeds.max(axis=0)
        axes.fill_between(x, *low_and_high, color=colors[name], alpha=0.25, linewidth=0)
        if mean[-1] < high:
            ends[f"{name} {mean[-1]:.3f}"] = mean[-1], colors[name]
    axes.set(xlabel="step", ylim=(None, min(high, axes.get_ylim()[1])))
    axes.margins(x=0)
    name_lines(axes, ends)


def gpt_figure(folder: Path) -> "Figure":
    """Returns a matplotlib figure of the held-out losses of runs of examples/gpt.py.

    Args:
        folder: holds a folder with `metrics.csv` for each run.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    losses, steps = {}, 0.0
    for run in _GPT_RUNS:
        table = np.genfromtxt(folder / run / "metrics.csv", delimiter=",", names=True)
        measured = table[~np.isnan(table["held_out_loss"])]
        steps, losses[run] = measured["step"][-1], measured["held_out_loss"][None]
    figure = Figure(figsize=(WIDTH, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(yscale="log", title="Held-out loss of a GPT in nats per byte, one run each")
    axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5, 7)), minor_locator=NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(y=0.1)
    draw_curves(axes, steps, losses, {run: COLORS[name] for run, name in _GPT_RUNS.items()})
    return figure
