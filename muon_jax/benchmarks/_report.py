"""Measurements as text and as a Markdown table."""

from collections.abc import Iterable, Sequence

import numpy as np

from muon_jax.benchmarks import _reading, _training_report
from muon_jax.benchmarks._reading import Measurement, Report


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
    clock = _reading.clock([measurement])
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
    clock = _reading.clock(measurements)
    variants = _reading.union(m["microseconds"] | m.get("failed", {}) for m in measurements)
    rows = [_row(measurement, variants, clock) for measurement in measurements]
    columns = _reading.union(rows)
    names = [column.replace("None", report["benchmark"]) for column in columns]
    missing = absent(report) + [text for m in measurements for text in _failures(m)]
    blocks = [
        f"{heading(report)}; µs, {clock}, medians",
        _table(names, [[row.get(column, "") for column in columns] for row in rows]),
        "\n".join(f"- {text}" for text in missing),
    ]
    return "\n\n".join(filter(None, blocks))


def _row(measurement: Measurement, variants: Iterable[str], clock: str) -> dict[str, str]:
    """The cells by column: the case, the baseline, ours and the speedup come first."""
    medians = _reading.medians(measurement, clock)
    times = {name: f"{t:.{1 if t < 100 else 0}f}" for name, t in medians.items()}
    times |= {name: "failed" for name in measurement.get("failed", {})}
    baseline, errors = next(iter(medians)), measurement["errors"]
    row = {
        "model" if "model" in measurement else "shape": _reading.label(measurement),
        baseline: times[baseline],
        "None": times["None"],
        "speedup": f"{_reading.speedup(measurement, clock):.2f}×",
    }
    row |= {name: times[name] for name in variants if name in times}
    row |= {f"error of {name}": f"{errors[name]:.2g}" for name in row if name in errors}
    for name, error in measurement.get("polar_errors", {}).items():
        row[f"polar error of {name}"] = f"{error:.2g}"
    for name, seconds in measurement.get("compile_seconds", {}).items():
        row[f"compiling {name}, s"] = f"{seconds:.1f}"
    for name, size in measurement.get("temp_bytes", {}).items():
        row[f"temporaries of {name}, MiB"] = f"{size / 2**20:.0f}"
    for counted in ("loops", "launches"):
        for name, count in measurement.get(counted, {}).items():
            row[f"{counted} of {name}"] = "" if count is None else str(count)
    for name, counts in measurement.get("collectives", {}).items():
        row[f"collectives of {name}"] = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    for name, times in measurement.get("timeline", {}).items():
        row |= {f"{what} of {name}": f"{time:.0f}" for what, time in times.items()}
    if "chosen" in measurement:
        row["chosen"] = measurement["chosen"]
    return row


def _failures(measurement: Measurement) -> list[str]:
    case, failed = _reading.label(measurement), measurement.get("failed", {})
    return [f"failed: {name} at {case} ({reason})" for name, reason in failed.items()]


def _accuracy_markdown(report: Report) -> str:
    """The accuracy: a row for each name and dtype, medians over the cases of each spectrum."""
    rows = [_accuracy_row(measurement) for measurement in report["measurements"]]
    columns = _reading.union(rows)
    errors = " / ".join(f"σ > {threshold:g}σ₁" for threshold in report["thresholds"])
    blocks = [
        f"{heading(report)}; errors to the polar factor on {errors}, medians",
        _table(columns, [[row[column] for column in columns] for row in rows]),
        "\n".join(f"- {text}" for text in absent(report)),
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
    cases = measurement["cases"]
    row |= {
        f"units at n/m = {' / '.join(measurement['units'])}": " / ".join(
            f"{units:g}" for units in measurement["units"].values()
        )
    }
    for spectrum in dict.fromkeys(case["spectrum"] for case in cases):
        of_spectrum = [case for case in cases if case["spectrum"] == spectrum]
        errors = np.median(_reading.values(of_spectrum, "errors"), axis=0)
        row[spectrum] = " / ".join(f"{error:.3f}" for error in errors)
    return row | {
        "RMS σ": f"{np.median(_reading.values(cases, 'rms')):.3f}",
        "dual": f"{np.median(_reading.values(cases, 'dual')):.3f}",
        "largest σ": f"{np.max(_reading.values(cases, 'largest')):.3f}",
        "blow-ups": f"{sum(case['blow_up'] for case in cases)} of {len(cases)}",
    }


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
