"""Writes a record as a page: what was measured, where, by which command, and with which spread."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks._records.reading import (
    Measurement,
    Report,
    case_label,
    keys_in_order,
    mesh_label,
)
from benchmarks._records.references import ERRORS_OF, POLAR_ERRORS
from benchmarks._records.tables import (
    absence_lines,
    failure_lines,
    markdown,
    markdown_table,
)

RESULTS = Path(__file__).parents[1] / "results"
WHERE = "A clone has results in benchmarks/results; the wheel leaves them out"
_COMMAND = "python -m benchmarks"
_TITLES = {
    "syrk": "Symmetric products",
    "newton_schulz": "The iteration",
    "muon": "The whole step on one device",
    "sharded": "Sharded parameters",
    "start": "Compiling the first update",
    "accuracy": "Accuracy",
    "adversary": "Searched inputs",
    "training": "Training a small GPT",
    "from_adamw": "From AdamW to Muon",
    "tpu": "Programs for TPUs",
}
_CLOCKS = {
    "wall": ("Wall clock", "Median (quartiles) in µs. All variants have this clock."),
    "device": (
        "Device clock",
        "Median (quartiles) in µs of the sum of the durations of all kernels on the device.",
    ),
}
# What a measurement holds for each variant beside its times: title, unit, format. The unit of
# errors depends on the benchmark.
_FIGURES = {
    "errors": ("Errors", "", "{:.2g}"),
    "polar_errors": (
        "Polar errors",
        POLAR_ERRORS.format("0.01σ₁"),
        "{:.2g}",
    ),
    "compile_seconds": ("Compilation", "Seconds.", "{:.1f}"),
    "temp_bytes": ("Temporaries", "Bytes.", "{:,}"),
    "over_floor": (
        "Over the floor",
        "Time on the device, over that of the least FLOPs at the rate of an 8192³ product `x @ y`"
        " and the least bytes at the rate of a copy.",
        "{:.2f}",
    ),
    "launches": ("Kernels", "Launched in a step.", "{}"),
    "loops": ("Loops", "In the compiled program.", "{}"),
    "collectives": ("Collectives", "In the compiled program.", "{}"),
    "timeline": (
        "Exchange",
        "µs of one step, means over the GPUs: how long other kernels than NCCL's compute, how long"
        " NCCL's exchange or wait, and how much of that is exposed, when nothing computes.",
        "{}",
    ),
    "tflops": (
        "TFLOP/s",
        "Of each device by the wall clock, counting 4m²n + 2m³ FLOPs for each quintic step of a"
        " matrix, whatever our kernels and forms save.",
        "{}",
    ),
}
_PRODUCTS = (
    "Median in µs, by the device's clock where there is one, then the TFLOP/s of the least work,"
    " which is half of the FLOPs where the result is symmetric, and in parentheses the share of the"
    " rate of an 8192³ product `x @ y`. QuACK's polynomial is A² + A/2."
)
_WRITTEN = f"<!-- Written by `{_COMMAND} report --pages`; do not edit. -->"
_INDEXED = ("device", "jax", "commit", "date")
_INDEX = f"""# Records

{_WRITTEN}

Every page is one file of measurements: device, versions, commit, the command that repeats it, and
quartiles. Each page says what its errors are relative to. The commands check results before they
time them and fail on wrong ones. No GPU has run JAX 0.12 here.

"""


def page(report: Report, file: str) -> str:
    """Returns the page of a report in Markdown.

    Args:
        report: the report.
        file: the name of its JSON file in `results`.
    """
    measurements = report["measurements"]
    facts = {key: value for key, value in report.items() if isinstance(value, str) and value}
    benchmark = facts.pop("benchmark")
    if "command" not in facts:
        raise SystemExit(f"{file} has no command that repeats it: measure again with --json")
    command = facts.pop("command")
    if flags := facts.get("XLA_FLAGS"):
        command = f"XLA_FLAGS={flags} {command}"
        facts["XLA_FLAGS"] = f"`{flags}`"
    facts |= {"file": f"[`results/{file}`](../../benchmarks/results/{file})"}
    blocks = [
        f"# {_TITLES[benchmark]}: {report['device'].removeprefix('NVIDIA ')}"
        + (", with pauses" if "pause" in report else "")
        + (", by width" if len(report.get("widths", ())) > 1 else "")
        + (_of_meshes(report) if benchmark == "sharded" else "")
        + (f", beside QuACK {report['quack-kernels']}" if "quack-kernels" in report else ""),
        _WRITTEN,
        f"```bash\n{command}\n```",
        markdown_table(["", ""], [[*fact] for fact in facts.items()]),
    ]
    if benchmark in ("start", "accuracy", "adversary", "training", "from_adamw", "tpu"):
        blocks.append(markdown(report).split("\n\n", 1)[1])
    else:
        blocks += _time_blocks(measurements, ERRORS_OF[benchmark])
        missing = absence_lines(report) + [t for m in measurements for t in failure_lines(m)]
        blocks.append("\n".join(f"- {text}" for text in missing))
    figure = Path(file).with_suffix(".png").name
    if (RESULTS / figure).exists():
        blocks.append(f"![The table above as a figure](../../benchmarks/results/{figure})")
    return "\n\n".join(filter(None, blocks)) + "\n"


def _of_meshes(report: Report) -> str:
    """How many devices and processes there were, the models and the meshes."""
    cases = report["measurements"]
    count = max(math.prod(m["mesh"].values()) for m in cases)
    names = dict.fromkeys([*(m["model"] for m in cases), *map(mesh_label, cases)])
    processes = int(report.get("processes", 1))
    return f" × {count}, {'; '.join(names)}" + f"; {processes} processes" * (processes > 1)


def write_pages(folder: Path) -> None:
    """Writes a page for each file of results, and their index, into `folder`.

    Raises:
        SystemExit: no results lie beside the benchmarks.
    """
    for name, text in all_pages().items():
        (folder / name).write_text(text)


def all_pages() -> dict[str, str]:
    """Returns the text of each page by its name, the index among them."""
    pages, rows = {}, []
    for file in sorted(RESULTS.glob("*.json")):
        report, name = json.loads(file.read_text()), f"{file.stem}.md"
        pages[name] = page(report, file.name)
        title = pages[name].partition("\n")[0].removeprefix("# ")
        rows.append([f"[{title}]({name})", *(report.get(key, "") for key in _INDEXED)])
    if not pages:
        raise SystemExit(f"report found no results in {RESULTS}. {WHERE}")
    return pages | {"index.md": _INDEX + markdown_table(["", *_INDEXED], rows) + "\n"}


def _time_blocks(measurements: Sequence[Measurement], of_errors: str) -> list[str]:
    """Tables of times for each clock, then of each other figure; `of_errors` explains errors."""
    blocks = []
    for clock, (title, unit) in _CLOCKS.items():
        times = {
            case_label(m): {
                name: _spread(by_clock[clock])
                for name, by_clock in m["microseconds"].items()
                if clock in by_clock
            }
            for m in measurements
        }
        blocks += _block(title, unit, times)
    for key, (title, unit, text) in _FIGURES.items():
        values = {
            case_label(m): {
                name: "" if value is None else text.format(_as_text(value))
                for name, value in m.get(key, {}).items()
            }
            for m in measurements
        }
        blocks += _block(title, of_errors if key == "errors" else unit, values)
    return blocks + _block("Products of a step by themselves", _PRODUCTS, _products(measurements))


def _products(measurements: Sequence[Measurement]) -> dict[str, dict[str, str]]:
    """The cells of the table of products: a row for each product of each case."""
    rows = {}
    for m in measurements:
        for product, measured in m.get("products", {}).items():
            row = rows[f"{case_label(m)}, {product}"] = {}
            for name, by_clock in measured["microseconds"].items():
                time = by_clock.get("device", by_clock["wall"])[1]
                row[name] = f"{time:.1f}, {measured['flops'] / time * 1e-6:.0f}"
                if "rate" in m:
                    row[name] += f" ({measured['flops'] / time * 1e6 / m['rate']:.0%})"
    return rows


def _block(title: str, unit: str, cells: dict[str, dict[str, str]]) -> list[str]:
    """A heading and a table with a row for each case, or nothing where there are no cells."""
    columns = keys_in_order(cells.values())
    if not columns:
        return []
    rows = [[case, *(row.get(column, "") for column in columns)] for case, row in cells.items()]
    names = [column.replace("None", "ours, default") for column in columns]
    return [f"## {title}", unit, markdown_table(["", *names], rows)]


def _spread(quartiles: Iterable[float]) -> str:
    """The median and both quartiles of times in µs."""
    low, median, high = (f"{t:.{1 if t < 100 else 0}f}" for t in quartiles)
    return f"{median} ({low}–{high})"


def _as_text(value: object) -> object:
    """Counts of collectives, or times, in one line; anything else as it is."""
    if isinstance(value, dict):
        return ", ".join(f"{count:.0f} {kind}" for kind, count in value.items()) or "none"
    return value
