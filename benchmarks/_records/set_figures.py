"""Plots what sets of coefficients make of singular values; needs matplotlib."""

from typing import TYPE_CHECKING

import numpy as np

from benchmarks._accuracy.polar_error import arguments_for_coefficients, orthogonalizer
from benchmarks._accuracy.spectra import Case, momenta
from benchmarks._adversary.limits import map_singular_values
from benchmarks._records.palette import COLORS, WIDTH, name_lines
from benchmarks._records.reading import Report
from muon_jax._iteration.coefficients import resolve_schedule
from muon_jax._iteration.steps import DEFAULT_STEPS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PUBLISHED, _OURS = ("standard", "polar_express", "aol"), ("fast", "balanced", "accurate")
_DTYPE = "float16"  # of a composed schedule's products on a GPU


def singular_values_figure(m: int = 256, n: int = 1024) -> "Figure":
    """Returns a matplotlib figure of a momentum's singular values, before and after each set.

    Singular values after it are those in the singular directions of the momentum, uᵀOv for a
    result O. `momenta` makes the momentum, of shape (m, n), m ≤ n.
    """
    from matplotlib.figure import Figure

    *_, (step, momentum) = momenta(m, n, seed=0)
    case = Case.of("momentum", momentum)
    before = case.sigma / case.sigma[0]
    figure = Figure(figsize=(WIDTH, 7), layout="constrained")
    panels = figure.subplots(3, 2, sharex=True, sharey=True)
    for axes, name in zip(panels.T.flat, _PUBLISHED + _OURS, strict=True):
        out = np.asarray(orthogonalizer(name)(case.x), np.float64)
        after = np.sum(case.u.T @ out * case.vt, axis=1)
        axes.axhline(1, color="0.7", linewidth=1, zorder=0)
        axes.plot(before, before, ".", color="0.6")
        axes.plot(before, after, ".", color=COLORS[name])
        axes.set(xscale="log", xlim=(1e-4, 1.3), ylim=(0, 1.3), xticks=[1e-4, 1e-3, 0.01, 0.1, 1])
        axes.set_title(f'"{name}"', color=COLORS[name])
    for axes in panels[-1]:
        axes.set_xlabel("σ/σ₁ before")
    figure.suptitle(
        f"Singular values σ of a momentum after {step} steps of training,\n"
        "before Newton–Schulz (gray, over the largest σ₁) and after it (color)"
    )
    return figure


def preconditioning_figure(m: int = 256, n: int = 1024) -> "Figure":
    """Returns a matplotlib figure of a momentum's singular values over each norm.

    AOL divides each row by a number of its own, so its values are those of another matrix. The
    momentum is that of `singular_values_figure`.
    """
    from matplotlib.figure import Figure

    *_, (step, x) = momenta(m, n, seed=0)
    x = np.asarray(x, np.float64)
    sigma = np.linalg.svd(x, compute_uv=False)
    rows = np.abs(x @ x.T).sum(axis=1)
    values = {
        "AOL": (np.linalg.svd(x / np.sqrt(rows)[:, None], compute_uv=False), COLORS["aol"]),
        "Schatten-4": (sigma / (sigma**4).sum() ** 0.25, COLORS["balanced"]),
        "Frobenius": (sigma / np.linalg.norm(sigma), COLORS["standard"]),
    }
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(yscale="log", ylim=(1e-4, 1), xlim=(1, m), xlabel="singular value, largest first")
    for y, color in values.values():
        axes.plot(np.arange(1, m + 1), y, color=color)
    name_lines(axes, {name: (max(y[-1], 2e-4), color) for name, (y, color) in values.items()})
    axes.set_title(
        f"Singular values of a momentum after {step} steps of training,\n"
        "divided by what each preconditioning divides by"
    )
    return figure


def polynomials_figure() -> "Figure":
    """Returns a matplotlib figure of the maps of singular values, published sets above ours."""
    from matplotlib.figure import Figure

    sigma = np.geomspace(1e-3, 1, 4000)
    figure = Figure(figsize=(WIDTH, 6.5), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, names in zip(panels, (_PUBLISHED, _OURS), strict=True):
        axes.axhline(1, color="0.7", linewidth=1, zorder=0)
        axes.set(xscale="log", xlim=(1e-3, 1), ylim=(0, 1.3), yticks=[0, 0.5, 1])
        axes.yaxis.tick_right()
        starts = {}
        for name in names:
            preconditioning = arguments_for_coefficients(name)["preconditioning"]
            schedule = resolve_schedule(name, DEFAULT_STEPS, preconditioning)
            y = map_singular_values(schedule, _DTYPE, sigma)
            axes.plot(sigma, y, color=COLORS[name])
            starts[f'"{name}"'] = y[0], COLORS[name]
        name_lines(axes, starts, at_start=True)
    panels[0].set_title("Singular value after each published set")
    panels[1].set_title("Singular value after each of our sets")
    panels[1].set_xlabel("singular value σ before, over the norm that the set divides by")
    return figure


def accuracy_figure(report: Report) -> "Figure":
    """Returns a matplotlib figure of the errors of each set on momenta, the most accurate on top.

    An error is the median over the shapes of the record, for products in the default dtype.
    """
    from matplotlib.figure import Figure

    found = {}
    for m in report["measurements"]:
        default = "bfloat16" if m["name"] in _PUBLISHED else "float16"
        if m["name"] in COLORS and (m["method"], m["dtype"]) == ("standard", default):
            errors = [c["errors"][0] for c in m["cases"] if c["spectrum"] == "momentum, step 50"]
            found[m["name"]] = float(np.median(errors)), m["units"]["4"]
    names = sorted(found, key=lambda name: -found[name][0])
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    errors = [found[name][0] for name in names]
    bars = axes.barh([f'"{name}"' for name in names], errors, color=[COLORS[n] for n in names])
    labels = [f"{error:.2g}, costs {found[n][1]:g}" for n, error in zip(names, errors, strict=True)]
    axes.bar_label(bars, labels, padding=4)
    axes.set(xlim=(0, 1.35 * max(errors)), xlabel="relative error on singular values above 0.01σ₁")
    axes.set_title(
        "Error on momenta after 50 steps of training,\nand cost of m×4m, in m×m products"
    )
    return figure
