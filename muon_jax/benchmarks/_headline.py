"""What the measurements say in one figure: speed of the iteration, of updates, and accuracy."""

from collections.abc import Sequence

import numpy as np

from muon_jax._schedules import SCHEDULES
from muon_jax.benchmarks import _plots, _reading
from muon_jax.benchmarks._reading import Measurement, Report

_OURS = {"None": "default", "balanced": '"balanced"'}
_COLORS = {"None": "C0", "balanced": "C3"}
_ASPECT = 4  # n/m of most perceptrons
_SETS = ("standard", "polar_express", "dion", "aol", "deepseek_v4", "fast", "balanced", "accurate")


def figure(reports: Sequence[Report]):
    """Returns a matplotlib figure of the iteration, whole updates, and accuracy, side by side.

    Raises:
        ValueError: one of these is not among the reports.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    def measured(*benchmarks: str) -> list[Measurement]:
        found = [m for r in reports if r["benchmark"] in benchmarks for m in r["measurements"]]
        if not found:
            raise ValueError(
                f"the headline needs a file of the benchmark {' or '.join(benchmarks)}"
            )
        return found

    result = Figure(figsize=(13.5, 4.5), layout="constrained")
    iteration, update, accuracy = result.subplots(1, 3)
    _speedups(iteration, measured("newton_schulz"))
    _speedups(update, measured("muon", "sharded"))
    _accuracy(accuracy, measured("accuracy"))
    iteration.set_title("newton_schulz, over five steps in jnp", fontsize=10)
    update.set_title("whole update, over optax.contrib.muon", fontsize=10)
    accuracy.set_title(f"distance to the polar factor, n = {_ASPECT}m", fontsize=10)
    handles = [Patch(color=_COLORS[name], label=label) for name, label in _OURS.items()]
    result.legend(handles=handles, loc="outside lower left", ncols=len(handles))
    result.draw_without_rendering()  # the layout, which decides what overlaps
    _plots.arrange_names(accuracy)
    return result


def _speedups(axes, measurements: Sequence[Measurement]) -> None:
    """How many times faster ours are than the first variant, each in its faster form."""
    labels = []
    for i, measurement in enumerate(measurements):
        times = _reading.medians(measurement, _reading.clock([measurement]))
        baseline = next(iter(times.values()))
        for j, name in enumerate(_OURS):
            time = min(times[name], times.get(f"{name}, gram", np.inf))
            bar = axes.barh(i + 0.4 * j - 0.2, baseline / time, 0.4, color=_COLORS[name])
            axes.bar_label(bar, fmt="%.1f×", padding=2, fontsize=7)
        labels.append(_reading.label(measurement).replace(", ", "\n"))
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel("times faster")


def _accuracy(axes, measurements: Sequence[Measurement]) -> None:
    """The median error to the polar factor against FLOPs, in the standard form.

    Of float16 and bfloat16 the better; our coefficients in color.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    for name in _SETS:
        found = []
        for m in measurements:
            if (m["name"], m["method"]) == (name, "standard") and m["dtype"] != "float32":
                cases = [c for c in m["cases"] if c["shape"][1] == _ASPECT * c["shape"][0]]
                error = float(np.median(_reading.values(cases, "errors")[:, 0]))
                found.append((error, m["units"][str(_ASPECT)]))
        error, units = min(found)
        color = "C3" if name in SCHEDULES else "black"
        axes.plot(units, error, marker="o", color=color)
        axes.annotate(
            name, (units, error), (0, 0), textcoords="offset points", color=color, fontsize=8
        )
    axes.set(yscale="log", xlabel="FLOPs/m³", ylabel="median error on σ > 0.01σ₁")
    axes.margins(x=0.2, y=0.1)
    axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
