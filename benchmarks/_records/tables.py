"""Prints a report: a line for each measurement, and Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from benchmarks._records.from_adamw_losses import (
    FROM_ADAMW_UNIT,
    from_adamw_row,
    from_adamw_rows,
)
from benchmarks._records.reading import (
    Measurement,
    Report,
    case_label,
    common_clock,
    keys_in_order,
    median_times,
    metric_values,
    speedup,
)
from benchmarks._records.references import ERRORS_OF, POLAR_ERRORS
from benchmarks._records.start_times import START_UNIT, start_rows
from benchmarks._records.training_losses import (
    Section,
    losses_line,
    training_sections,
    training_setup,
)


def heading(report: Report) -> str:
    """Returns the benchmark, the device and the versions, in one line."""
    facts = {key: value for key, value in report.items() if isinstance(value, str)}
    return ", ".join(f"{key}: {value}" for key, value in facts.items())


def absence_lines(report: Report) -> list[str]:
    """Returns a line for each rival or spectrum that could not be measured, with the reason."""
    return [f"absent: {name} ({reason})" for name, reason in report.get("absent", {}).items()]


def measurement_line(measurement: Measurement) -> str:
    """Returns a measurement in one line, and one more line for each rival that failed."""
    if "losses" in measurement:
        return losses_line(measurement)
    if "held_out_losses" in measurement:
        return _cells_line(from_adamw_row(measurement))
    if "start_seconds" in measurement:
        return "\n".join(map(_cells_line, start_rows(measurement)))
    if "worst" in measurement:
        return _cells_line(_adversary_row(measurement))
    if "program" in measurement:
        return _cells_line(_compiled_row(measurement))
    if "name" in measurement:
        return _cells_line(_accuracy_row(measurement))
    clock = common_clock([measurement])
    (_, label), *cells = _time_row(measurement, measurement["microseconds"], clock).items()
    text = f"{label}: {'; '.join(f'{column} {cell}' for column, cell in cells)}; µs, {clock}"
    return "\n".join([text, *failure_lines(measurement)])


def markdown(report: Report) -> str:
    """Returns a report as Markdown: its heading, a table, and what could not be measured.

    - Times are medians in µs. The clock is the device's where all variants have it, else the wall
      clock. The speedup is ours over the first variant.
    - Errors of `accuracy` are medians over the cases of a spectrum.
    - Programs of `tpu` were compiled and never run.
    - Seconds of `start` are explained in `START_UNIT`, losses of `from_adamw` in
      `FROM_ADAMW_UNIT`.
    - Each table of `training` is explained above it.
    """
    if report["benchmark"] == "accuracy":
        return _accuracy_markdown(report)
    if report["benchmark"] == "adversary":
        rows = [_adversary_row(measurement) for measurement in report["measurements"]]
        table = markdown_table([*rows[0]], [[*row.values()] for row in rows])
        unit = "`worst σ` is the largest singular value of all results that the search found."
        return "\n\n".join([heading(report), unit, table])
    if report["benchmark"] == "start":
        return _start_markdown(report)
    if report["benchmark"] == "from_adamw":
        rows = from_adamw_rows(report["measurements"])
        table = markdown_table([*rows[0]], [[*row.values()] for row in rows])
        return "\n\n".join([heading(report), FROM_ADAMW_UNIT, table])
    if report["benchmark"] == "training":
        return _training_markdown(report)
    if report["benchmark"] == "tpu":
        return _compiled_markdown(report)
    measurements = report["measurements"]
    clock = common_clock(measurements)
    variants = keys_in_order(m["microseconds"] | m.get("failed", {}) for m in measurements)
    rows = [_time_row(measurement, variants, clock) for measurement in measurements]
    columns = keys_in_order(rows)
    names = [column.replace("None", report["benchmark"]) for column in columns]
    missing = absence_lines(report) + [text for m in measurements for text in failure_lines(m)]
    blocks = [
        f"{heading(report)}; µs, {clock}, medians",
        f"Errors: {ERRORS_OF[report['benchmark']]}",
        markdown_table(names, [[row.get(column, "") for column in columns] for row in rows]),
        "\n".join(f"- {text}" for text in missing),
    ]
    return "\n\n".join(filter(None, blocks))


def _time_row(measurement: Measurement, variants: Iterable[str], clock: str) -> dict[str, str]:
    """The cells by column: first the case, the baseline, and ours with the speedup."""
    medians = median_times(measurement, clock)
    times = {name: f"{t:.{1 if t < 100 else 0}f}" for name, t in medians.items()}
    times |= {name: "failed" for name in measurement.get("failed", {})}
    baseline, errors = next(iter(medians)), measurement["errors"]
    row = {
        "model" if "model" in measurement else "shape": case_label(measurement),
        baseline: times[baseline],
    }
    if "None" in medians and baseline != "None":
        row |= {"None": times["None"], "speedup": f"{speedup(measurement, clock):.2f}×"}
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
    for name, rate in measurement.get("tflops", {}).items():
        row[f"TFLOP/s of {name}"] = f"{rate:.3g}"
    for name, times in measurement.get("timeline", {}).items():
        row |= {f"{what} of {name}": f"{time:.0f}" for what, time in times.items()}
    if "chosen" in measurement:
        row["chosen"] = measurement["chosen"]
    return row


def failure_lines(measurement: Measurement) -> list[str]:
    """Returns a line for each rival that failed, with the reason."""
    case, products = case_label(measurement), measurement.get("products", {})
    failed = {case: measurement.get("failed", {})}
    failed |= {f"{case}, {name}": product["failed"] for name, product in products.items()}
    return [
        f"failed: {name} at {where} ({reason})"
        for where, reasons in failed.items()
        for name, reason in reasons.items()
    ]


def _cells_line(row: Mapping[str, str]) -> str:
    """A row in one line, the name of each column before its cell."""
    return ", ".join(f"{key} {cell}" for key, cell in row.items())


def _accuracy_markdown(report: Report) -> str:
    """A row for each name, method and dtype: medians over the cases of each spectrum."""
    rows = [_accuracy_row(measurement) for measurement in report["measurements"]]
    columns = keys_in_order(rows)
    thresholds = " / ".join(f"{threshold:g}σ₁" for threshold in report["thresholds"])
    blocks = [
        heading(report),
        f"Errors by spectrum: {POLAR_ERRORS.format(thresholds)} Medians over the matrices.",
        markdown_table(columns, [[row[column] for column in columns] for row in rows]),
        "\n".join(f"- {text}" for text in absence_lines(report)),
    ]
    return "\n\n".join(filter(None, blocks))


def _compiled_markdown(report: Report) -> str:
    """A row for each program and variant."""
    rows = [_compiled_row(measurement) for measurement in report["measurements"]]
    table = markdown_table([*rows[0]], [[*row.values()] for row in rows])
    return f"{heading(report)}; of each device, compiled and never run\n\n{table}"


def _compiled_row(measurement: Measurement) -> dict[str, str]:
    """The cells by column of one compiled program."""
    collectives = (f"{count} {kind}" for kind, count in measurement["collectives"].items())
    return {
        "program": measurement["program"],
        "variant": measurement["variant"],
        "GFLOP": f"{measurement['gflops']:.4g}",
        "collectives": ", ".join(collectives) or "none",
        "their results, MB": f"{measurement['exchanged_bytes'] / 1e6:.2f}",
        "temporaries, MB": f"{measurement['temp_bytes'] / 1e6:.2f}",
        "float16": "yes" if measurement["float16"] else "no",
        "processor seconds to compile": f"{measurement['seconds']:.1f}",
    }


def _start_markdown(report: Report) -> str:
    """A row for each model, cache and optimizer."""
    rows = [row for measurement in report["measurements"] for row in start_rows(measurement)]
    table = markdown_table([*rows[0]], [[*row.values()] for row in rows])
    return "\n\n".join([heading(report), START_UNIT, ERRORS_OF["start"], table])


def _training_markdown(report: Report) -> str:
    """A table and its lines for each section."""
    sections = map(_section_markdown, training_sections(report))
    return "\n\n".join([heading(report), training_setup(report), *sections])


def _section_markdown(section: Section) -> str:
    table = [[*row.values()] for row in section.rows]
    blocks = [
        f"## {section.title}",
        section.note,
        markdown_table([*section.rows[0]], table) if table else "",
        "\n".join(f"- {text}" for text in section.lines),
    ]
    return "\n\n".join(filter(None, blocks))


def _accuracy_row(measurement: Measurement) -> dict[str, str]:
    """The cells by column of one name, method and dtype."""
    form = ", gram" if measurement["method"] == "gram" else ""
    row = {"coefficients": measurement["name"] + form, "dtype": measurement["dtype"]}
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
        errors = np.median(metric_values(of_spectrum, "errors"), axis=0)
        row[spectrum] = " / ".join(f"{error:.3f}" for error in errors)
    return row | {
        "RMS σ": f"{np.median(metric_values(cases, 'rms')):.3f}",
        "dual": f"{np.median(metric_values(cases, 'dual')):.3f}",
        "largest σ": f"{np.max(metric_values(cases, 'largest')):.3f}",
        "blow-ups": f"{sum(case['blow_up'] for case in cases)} of {len(cases)}",
    }


def _adversary_row(measurement: Measurement) -> dict[str, str]:
    """The cells by column of one name, method, dtype and size."""
    form = ", gram" if measurement["method"] == "gram" else ""
    worst = measurement["worst"]
    return {
        "coefficients": measurement["name"] + form,
        "dtype": measurement["dtype"],
        "size": str(measurement["size"]),
        "evaluations": str(measurement["evaluations"]),
        "worst σ": "not finite" if worst is None else f"{worst:.4g}",
        "limit": f"{measurement['limit']:.3f}",
        "maximum of the map": f"{measurement['maximum']:.3f}",
    }


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
