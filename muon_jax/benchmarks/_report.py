"""Measurements as text, as a Markdown table and as a plot."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from muon_jax.benchmarks import _training_report

# A file, as the command line writes it, and one of the measurements in it.
type Report = Mapping[str, Any]
type Measurement = Mapping[str, Any]


def heading(report: Report) -> str:
    """Returns what was measured, where and with which versions, in one line."""
    facts = {key: value for key, value in report.items() if isinstance(value, str)}
    return ", ".join(f"{key}: {value}" for key, value in facts.items())


def absent(report: Report) -> list[str]:
    """Returns a line for each rival that could not run, with the reason."""
    return [f"absent: {name} ({reason})" for name, reason in report.get("absent", {}).items()]


def line(measurement: Measurement) -> str:
    """Returns one measurement in one line, and one more for each rival that failed."""
    if "losses" in measurement:
        return _training_report.line(measurement)
    if "name" in measurement:
        return ", ".join(f"{key} {cell}" for key, cell in _accuracy_row(measurement).items())
    clock = _clock([measurement])
    (_, label), *cells = _row(measurement, measurement["microseconds"], clock).items()
    text = f"{label}: {'; '.join(f'{column} {cell}' for column, cell in cells)}; µs, {clock}"
    return "\n".join([text, *_failures(measurement)])


def markdown(report: Report) -> str:
    """Returns a report as a Markdown table, with its heading and what could not be measured.

    Times are medians in µs, by the device's clock where all variants have it, else by the wall
    clock. The speedup is ours over the first variant. Errors of the accuracy are medians too. For
    the training see `_training_report`.
    """
    if report["benchmark"] == "accuracy":
        return _accuracy_markdown(report)
    if report["benchmark"] == "training":
        return _training_markdown(report)
    measurements = report["measurements"]
    clock = _clock(measurements)
    variants = _union(m["microseconds"] | m.get("failed", {}) for m in measurements)
    rows = [_row(measurement, variants, clock) for measurement in measurements]
    columns = _union(rows)
    names = [column.replace("None", report["benchmark"]) for column in columns]
    missing = absent(report) + [text for m in measurements for text in _failures(m)]
    blocks = [
        f"{heading(report)}; µs, {clock}, medians",
        _table(names, [[row.get(column, "") for column in columns] for row in rows]),
        "\n".join(f"- {text}" for text in missing),
    ]
    return "\n\n".join(filter(None, blocks))


def plot(reports: Sequence[Report], path: Path) -> None:
    """Saves a chart for each report.

    Bars of how many times faster ours is than the first variant; errors against FLOPs for the
    accuracy; losses against steps and learning rates for the training.
    """
    from matplotlib.figure import Figure

    wide = {"accuracy": _scatter, "training": _training_report.plot}
    heights = [
        6.0 if report["benchmark"] in wide else 0.3 * len(report["measurements"]) + 1.2
        for report in reports
    ]
    width = 12 if any(report["benchmark"] in wide for report in reports) else 7
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(reports), squeeze=False, height_ratios=heights)[:, 0]
    for part, report in zip(parts, reports, strict=True):
        wide.get(report["benchmark"], _bars)(part, report)
    figure.savefig(path, format="png", dpi=150)


def _bars(figure, report: Report) -> None:
    axes = figure.subplots()
    measurements = report["measurements"]
    clock = _clock(measurements)
    speedups = [_speedup(measurement, clock) for measurement in measurements]
    bars = axes.barh([_label(measurement) for measurement in measurements], speedups)
    axes.bar_label(bars, fmt="%.2f×", padding=3)
    axes.axvline(1.0, color="black", linewidth=1)
    baseline = next(iter(measurements[0]["microseconds"]))
    axes.set(
        title=f"{report['benchmark']}, {report['device']}, {report['dtype']}",
        xlabel=f"speedup over {baseline} ({clock})",
        xlim=(0, 1.15 * max(1, *speedups)),
    )
    axes.invert_yaxis()


def _row(measurement: Measurement, variants: Iterable[str], clock: str) -> dict[str, str]:
    """The cells by column: the case, the baseline, ours and the speedup come first."""
    medians = _medians(measurement, clock)
    times = {name: f"{t:.{1 if t < 100 else 0}f}" for name, t in medians.items()}
    times |= {name: "failed" for name in measurement.get("failed", {})}
    baseline, errors = next(iter(medians)), measurement["errors"]
    row = {
        "model" if "model" in measurement else "shape": _label(measurement),
        baseline: times[baseline],
        "None": times["None"],
        "speedup": f"{_speedup(measurement, clock):.2f}×",
    }
    row |= {name: times[name] for name in variants if name in times}
    row |= {f"error of {name}": f"{errors[name]:.2g}" for name in row if name in errors}
    for name, error in measurement.get("polar_errors", {}).items():
        row[f"polar error of {name}"] = f"{error:.2g}"
    for name, seconds in measurement.get("compile_seconds", {}).items():
        row[f"compiling {name}, s"] = f"{seconds:.1f}"
    for name, size in measurement.get("temp_bytes", {}).items():
        row[f"temporaries of {name}, MiB"] = f"{size / 2**20:.0f}"
    if "chosen" in measurement:
        row["chosen"] = measurement["chosen"]
    return row


def _label(measurement: Measurement) -> str:
    return measurement.get("model") or "×".join(map(str, measurement["shape"]))


def _clock(measurements: Sequence[Measurement]) -> str:
    """The device's clock where all variants have it."""
    times = [times for m in measurements for times in m["microseconds"].values()]
    return "device" if all("device" in by_clock for by_clock in times) else "wall"


def _medians(measurement: Measurement, clock: str) -> dict[str, float]:
    return {name: by_clock[clock][1] for name, by_clock in measurement["microseconds"].items()}


def _speedup(measurement: Measurement, clock: str) -> float:
    medians = _medians(measurement, clock)
    return next(iter(medians.values())) / medians["None"]


def _failures(measurement: Measurement) -> list[str]:
    failed = measurement.get("failed", {})
    return [
        f"failed: {name} at {_label(measurement)} ({reason})" for name, reason in failed.items()
    ]


def _union(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of all mappings, in the order of their first appearance."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _accuracy_markdown(report: Report) -> str:
    """The accuracy: a row for each name and dtype, medians over the cases of each spectrum."""
    measured = [m for m in report["measurements"] if "cases" in m]
    rows = [_accuracy_row(measurement) for measurement in measured]
    columns = _union(rows)
    errors = " / ".join(f"σ > {threshold:g}σ₁" for threshold in report["thresholds"])
    missing = absent(report) + [
        f"not offered: {_form(m)}, {m['dtype']} ({m['not_offered']})"
        for m in report["measurements"]
        if "not_offered" in m
    ]
    blocks = [
        f"{heading(report)}; errors to the polar factor on {errors}, medians",
        _table(columns, [[row[column] for column in columns] for row in rows]) if rows else "",
        "\n".join(f"- {text}" for text in missing),
    ]
    return "\n\n".join(filter(None, blocks))


def _training_markdown(report: Report) -> str:
    """The training: a row for each variant, then the verdicts."""
    rows = _training_report.rows(report)
    blocks = [
        f"{heading(report)}; validation loss in nats per byte, mean ± standard deviation",
        _training_report.setup(report),
        _table([*rows[0]], [[*row.values()] for row in rows]),
        "\n".join(f"- {text}" for text in _training_report.verdicts(report)),
    ]
    return "\n\n".join(blocks)


def _form(measurement: Measurement) -> str:
    return measurement["name"] + (", gram" if measurement["method"] == "gram" else "")


def _accuracy_row(measurement: Measurement) -> dict[str, str]:
    row = {"coefficients": _form(measurement), "dtype": measurement["dtype"]}
    if measurement["preconditioning"] != "frobenius":
        row["coefficients"] += f" (preconditioning {measurement['preconditioning']})"
    if "not_offered" in measurement:
        return row | {"not offered": measurement["not_offered"]}
    cases = measurement["cases"]
    row |= {
        f"units at n/m = {' / '.join(measurement['units'])}": " / ".join(
            f"{units:g}" for units in measurement["units"].values()
        )
    }
    for spectrum in dict.fromkeys(case["spectrum"] for case in cases):
        of_spectrum = [case for case in cases if case["spectrum"] == spectrum]
        errors = np.median(_values(of_spectrum, "errors"), axis=0)
        row[spectrum] = " / ".join(f"{error:.3f}" for error in errors)
    return row | {
        "RMS σ": f"{np.median(_values(cases, 'rms')):.3f}",
        "dual": f"{np.median(_values(cases, 'dual')):.3f}",
        "largest σ": f"{np.max(_values(cases, 'largest')):.3f}",
        "blow-ups": f"{sum(case['blow_up'] for case in cases)} of {len(cases)}",
    }


def _scatter(figure, report: Report) -> None:
    """The accuracy: the median error of all cases against FLOPs, for each aspect."""
    import matplotlib
    from matplotlib.lines import Line2D

    measured = [m for m in report["measurements"] if "cases" in m]
    palette = [matplotlib.colormaps["tab20"](i) for i in range(20)]
    colors = dict(zip(_union({m["name"]: 0} for m in measured), itertools.cycle(palette)))
    markers = dict(zip(_union({m["dtype"]: 0} for m in measured), "os^", strict=False))
    aspects = _union(m["units"] for m in measured)
    all_axes = figure.subplots(1, len(aspects), sharey=True, squeeze=False)[0]
    for axes, aspect in zip(all_axes, aspects, strict=True):
        for m in measured:
            cases = [c for c in m["cases"] if f"{c['shape'][1] / c['shape'][0]:g}" == aspect]
            error = np.median(_values(cases, "errors")[:, -1])
            axes.plot(
                m["units"][aspect],
                error,
                color=colors[m["name"]],
                marker=markers[m["dtype"]],
                fillstyle="full" if m["method"] == "gram" else "none",
            )
        axes.set(title=f"n/m = {aspect}", xlabel="FLOPs/m³", yscale="log")
    all_axes[0].set_ylabel(f"median error on σ > {report['thresholds'][-1]:g}σ₁")
    figure.suptitle(f"Distance to the polar factor, {report['device']}")
    handles = [Line2D([], [], color=c, linewidth=4, label=name) for name, c in colors.items()]
    handles += [
        Line2D([], [], color="black", linestyle="", marker=marker, label=dtype)
        for dtype, marker in markers.items()
    ]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8)


def _values(cases: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """One metric of all cases, ∞ where a result was not finite."""
    return np.nan_to_num(np.array([case[key] for case in cases], np.float64), nan=np.inf)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
