"""Measurements as text, as a Markdown table and as a plot."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
    clock = _clock([measurement])
    (_, label), *cells = _row(measurement, measurement["microseconds"], clock).items()
    text = f"{label}: {'; '.join(f'{column} {cell}' for column, cell in cells)}; µs, {clock}"
    return "\n".join([text, *_failures(measurement)])


def markdown(report: Report) -> str:
    """Returns a report as a Markdown table, with its heading and what could not be measured.

    Times are medians in µs, by the device's clock where all variants have it, else by the wall
    clock. The speedup is ours over the first variant.
    """
    measurements = report["measurements"]
    clock = _clock(measurements)
    variants = _union(m["microseconds"] | m.get("failed", {}) for m in measurements)
    rows = [_row(measurement, variants, clock) for measurement in measurements]
    columns = _union(rows)
    table = [
        [column.replace("None", report["benchmark"]) for column in columns],
        ["---"] * len(columns),
        *([row.get(column, "") for column in columns] for row in rows),
    ]
    missing = absent(report) + [text for m in measurements for text in _failures(m)]
    blocks = [
        f"{heading(report)}; µs, {clock}, medians",
        "\n".join(f"| {' | '.join(cells)} |" for cells in table),
        "\n".join(f"- {text}" for text in missing),
    ]
    return "\n\n".join(filter(None, blocks))


def plot(reports: Sequence[Report], path: Path) -> None:
    """Saves a bar chart for each report: how many times faster ours is than the first variant."""
    from matplotlib.figure import Figure

    heights = [0.3 * len(report["measurements"]) + 1.2 for report in reports]
    figure = Figure(figsize=(7, sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(reports), squeeze=False, height_ratios=heights)[:, 0]
    for axes, report in zip(all_axes, reports, strict=True):
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
    figure.savefig(path, format="png", dpi=150)


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
