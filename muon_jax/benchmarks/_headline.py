"""What the measurements say in one figure: speed, beside other packages too, and accuracy."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from muon_jax._iteration.fitted import SCHEDULES
from muon_jax.benchmarks import _plots, _reading
from muon_jax.benchmarks._reading import Measurement, Report


class Bar(NamedTuple):
    """A color for the fastest of some variants."""

    color: str
    variants: tuple[str, ...]


_OURS = {
    "five steps": Bar("C0", ("None",)),
    '"balanced"': Bar("C3", ("balanced",)),
}
# Five steps by others, and by ours with what these have; torch.compile has one.
_ITERATION = {
    "jnp": Bar("0.9", ("jnp",)),
    "Dion": Bar("0.7", ("dion",)),
    "gram_newton_schulz": Bar("0.45", ("gram_newton_schulz", "gram_newton_schulz, standard")),
    "five steps": Bar("C0", ("None", "standard, gram")),
    '"balanced"': _OURS['"balanced"'],
}
_ASPECT = 4  # n/m of most perceptrons
_SETS = ("standard", "polar_express", "dion", "aol", "deepseek_v4", "fast", "balanced", "accurate")


def figure(reports: Sequence[Report]):
    """Returns a matplotlib figure of the iteration, whole updates, and accuracy.

    Raises:
        ValueError: one of these is not among the reports.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    def measured(*benchmarks: str) -> list[Measurement]:
        chosen = [report for report in reports if report["benchmark"] in benchmarks]
        if found := [m for report in chosen for m in report["measurements"]]:
            return found
        raise ValueError(f"the headline needs a file of the benchmark {' or '.join(benchmarks)}")

    result = Figure(figsize=(13.5, 10), layout="constrained")
    axes = result.subplot_mosaic([["iteration", "update"], ["iteration", "accuracy"]])
    iteration, update, accuracy = (axes[name] for name in ("iteration", "update", "accuracy"))
    _speedups(iteration, measured("newton_schulz"), _ITERATION, "torch.compile")
    _speedups(update, measured("muon", "sharded"), _OURS, "optax")
    _accuracy(accuracy, measured("accuracy"))
    iteration.set_title("newton_schulz, over five steps by torch.compile", fontsize=10)
    update.set_title("whole update, over optax.contrib.muon", fontsize=10)
    accuracy.set_title(f"distance to the polar factor, n = {_ASPECT}m", fontsize=10)
    handles = [Patch(color=bar.color, label=label) for label, bar in _ITERATION.items()]
    result.legend(handles=handles, loc="outside lower left", ncols=len(handles))
    result.draw_without_rendering()  # the layout, which decides what overlaps
    _plots.arrange_names(accuracy)
    return result


def _speedups(
    axes, measurements: Sequence[Measurement], bars: Mapping[str, Bar], baseline: str
) -> None:
    """How many times faster than the baseline, the fastest of the variants of each bar."""
    labels, height = [], 0.8 / len(bars)
    for i, measurement in enumerate(measurements):
        times = _reading.medians(measurement, _reading.clock([measurement]))
        for j, bar in enumerate(bars.values()):
            if found := [times[name] for name in bar.variants if name in times]:
                place = i + height * (j + 0.5) - 0.4
                drawn = axes.barh(place, times[baseline] / min(found), height, color=bar.color)
                axes.bar_label(drawn, fmt="%.1f×", padding=2, fontsize=7)
        labels.append(_reading.label(measurement).replace(", ", "\n"))
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel("times faster")


def _accuracy(axes, measurements: Sequence[Measurement]) -> None:
    """The median error to the polar factor against FLOPs, in the standard form.

    In the dtype that each runs in unless told otherwise; our coefficients in color.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    for name in _SETS:
        color, dtype = ("C3", "float16") if name in SCHEDULES else ("black", "bfloat16")
        key = (name, "standard", dtype)
        (m,) = (m for m in measurements if (m["name"], m["method"], m["dtype"]) == key)
        cases = [c for c in m["cases"] if c["shape"][1] == _ASPECT * c["shape"][0]]
        error = float(np.median(_reading.values(cases, "errors")[:, 0]))
        units = m["units"][str(_ASPECT)]
        axes.plot(units, error, marker="o", color=color)
        axes.annotate(
            name, (units, error), (0, 0), textcoords="offset points", color=color, fontsize=8
        )
    axes.set(yscale="log", xlabel="FLOPs/m³", ylabel="median error on σ > 0.01σ₁")
    axes.margins(x=0.2, y=0.1)
    axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
