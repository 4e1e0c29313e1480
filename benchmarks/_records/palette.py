"""Colors and type of figures, and names at the ends of their lines."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colors of the sets of coefficients and of optimizers. You can tell those of the sets apart without
# seeing red and green (Okabe and Ito, two of them darker, because names are written in them).
COLORS = {
    "standard": "#0072b2",
    "polar_express": "black",
    "aol": "#b5588f",
    "fast": "#c78a00",
    "balanced": "#d55e00",
    "accurate": "#009e73",
    "standard_3_steps": "#b5588f",
    "optax": "black",
    "adamw": "0.45",
    "adamw_quarter": "0.45",
}
_GAP = 0.08  # the least distance between names of lines, where the height of axes is 1
PAPER: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # under text
# Inches, and parameters of matplotlib: type of that size is legible at the width of a phone.
WIDTH = 7
STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.titlesize": 12,
    "figure.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def name_lines(axes: "Axes", ends: Mapping[str, tuple[float, str]], at_start: bool = False) -> None:
    """Writes names beside the axes, at the heights where lines end, in their colors.

    Args:
        axes: with its final limits.
        ends: the height and the color by the name.
        at_start: whether the names stand left of the axes instead.
    """
    to_axes, start = axes.transScale + axes.transLimits, axes.get_xlim()[0]
    names = sorted(ends, key=lambda name: ends[name][0])
    heights = np.array([to_axes.transform((start, ends[name][0]))[1] for name in names])
    steps = _GAP * np.arange(len(names))
    pushed_up = np.maximum.accumulate(heights - steps) + steps
    pushed_down = np.minimum.accumulate((heights - steps)[::-1])[::-1] + steps
    for name, height in zip(names, (pushed_up + pushed_down) / 2, strict=True):
        x, align = (-0.015, "right") if at_start else (1.015, "left")
        style: dict[str, Any] = {"color": ends[name][1], "ha": align, "va": "center"}
        axes.text(x, height, name, transform=axes.transAxes, **style)
