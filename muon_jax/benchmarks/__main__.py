"""Times `syrk`, `newton_schulz` and `muon` beside others, and fails where a result is wrong.

    python -m muon_jax.benchmarks syrk --json syrk.json
    python -m muon_jax.benchmarks newton_schulz --shapes peers 24x512x2048
    python -m muon_jax.benchmarks muon --models gpt2-small
    python -m muon_jax.benchmarks sharded --mesh fsdp=2 tensor=2 --json sharded.json
    python -m muon_jax.benchmarks accuracy --names standard --json accuracy.json
    python -m muon_jax.benchmarks training --json training.json
    python -m muon_jax.benchmarks coefficients --names balanced
    python -m muon_jax.benchmarks report syrk.json --png syrk.png

On a GPU it prints the time that the kernels spend on the device (for rivals in torch the time
between CUDA events, with the gaps between kernels); the JSON has the wall clock too.
`sharded` runs on all devices of the machine, by the wall clock. `accuracy` times nothing: it
compares results with the polar factor, and counts FLOPs. `training` compares the validation losses
of a small GPT, by coefficients, learning rate and seed. `coefficients` computes anew those that are
ours or best approximations.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from muon_jax._iteration.fitted import SCHEDULES
from muon_jax._iteration.published import NAMED
from muon_jax.benchmarks import (
    _accuracy,
    _designs,
    _fit,
    _headline,
    _measure,
    _minimax,
    _models,
    _plots,
    _report,
    _rivals,
    _shapes,
    _sharded,
    _spectra,
    _text,
    _training,
    _tune,
)
from muon_jax.benchmarks._gpt import GPT
from pallas_kernels import _tuning

MEASURES = {
    "syrk": _measure.measure_syrk,
    "newton_schulz": _measure.measure_newton_schulz,
    "muon": _measure.measure_muon,
    "sharded": _sharded.measure,
}


def environment() -> dict[str, str]:
    """Returns what a measurement needs to be repeated: device, versions, commit."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    packages = ("jax", "jaxlib", "optax")
    return {
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "commit": commit or "unknown",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def measure(arguments: argparse.Namespace) -> None:
    """Measures case by case, prints each, and writes the JSON anew after each."""
    if arguments.command in ("muon", "sharded"):
        cases = arguments.models
    else:
        cases = dict.fromkeys(itertools.chain.from_iterable(arguments.shapes))
    function = MEASURES[arguments.command]
    report: dict[str, Any] = {"benchmark": arguments.command}
    if arguments.command == "newton_schulz":
        options = {"coefficients": arguments.coefficients, "pause": arguments.pause}
        function = functools.partial(function, **options)
        _rivals.leave_memory_to_torch()
        report |= {"absent": _rivals.absent(), **_rivals.torch_versions()}
        report["pause"] = f"{arguments.pause:g} s"
    report |= environment()
    report |= {"dtype": arguments.dtype, "input": "standard normal", "measurements": []}
    print("\n".join([_report.heading(report), *_report.absent(report)]))
    if arguments.command == "sharded":
        mesh_shape = dict(arguments.mesh or [("fsdp", jax.device_count())])
        function = functools.partial(function, mesh_shape=mesh_shape)
    measurements = (function(case, arguments.dtype) for case in cases)
    _collect(report, measurements, arguments.json, indent=1)


def _collect(
    report: dict[str, Any],
    measurements: Iterable[dict[str, Any]],
    path: Path | None,
    indent: int | None = None,
) -> None:
    """Makes the measurements, prints each, and writes the report anew after each."""
    for measurement in measurements:
        print(_report.line(measurement), flush=True)
        report["measurements"].append(measurement)
        if path:
            path.write_text(json.dumps(report, indent=indent) + "\n")


def accuracy(arguments: argparse.Namespace) -> None:
    """Measures each name in each dtype, prints a table, and writes the JSON anew after each."""
    report: dict[str, Any] = {"benchmark": "accuracy", **environment()}
    report |= {"absent": _spectra.absent(), "thresholds": _accuracy.THRESHOLDS, "measurements": []}
    cases = [*_spectra.cases(arguments.sizes, arguments.aspects)]
    report["sizes"] = ", ".join(map(str, arguments.sizes))
    variants = _accuracy.variants(arguments.names, arguments.methods, arguments.dtypes)
    measurements = (_accuracy.measure(*variant, cases) for variant in variants)
    _collect(report, measurements, arguments.json)
    print(f"\n{_report.markdown(report)}")


def training(arguments: argparse.Namespace) -> None:
    """Trains variant by variant, prints each and a table, and writes the JSON anew after each."""
    if arguments.seeds < 2:
        raise ValueError(f"--seeds must be at least 2, to estimate noise, got {arguments.seeds}")
    sizes = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(GPT)}
    model, text = GPT(**sizes), _text.read()
    how = _training.Training(arguments.steps, arguments.batch_size)
    rates, seeds = arguments.learning_rates, [*range(arguments.seeds)]
    report: dict[str, Any] = {"benchmark": "training", **environment()}
    report |= {"text": text.identity(), "model": sizes, "training": dataclasses.asdict(how)}
    report |= {"learning_rates": rates, "seeds": seeds, "control": _training.CONTROL}
    report |= {"variants": arguments.variants, "measurements": []}
    print(_report.heading(report), flush=True)
    measurements = (
        _training.measure(name, model, how, text, rates, seeds) for name in arguments.variants
    )
    _collect(report, measurements, arguments.json)
    print(f"\n{_report.markdown(report)}")


def coefficients(arguments: argparse.Namespace) -> None:
    """Computes each of the sets anew, and prints it and how far what ships is from it."""
    published = _minimax.published()
    for name in [name for name in arguments.names if name in published]:
        difference = np.max(np.abs(published[name] - np.array(NAMED[name])))
        print(f"{name}: within {difference:.1g} of what ships")
        print("".join(f"    {tuple(row.tolist())},\n" for row in published[name]))
    for (name, dtype), design in _designs.DESIGNS.items():
        if name in arguments.names:
            steps, shipped = _fit.fit(design), SCHEDULES[name].steps_in(dtype)
            difference = np.max(
                np.abs(_fit.free_coefficients(steps) / _fit.free_coefficients(shipped) - 1)
            )
            numbers = _fit.properties(steps, design.low).items()
            stated = ", ".join(f"{key} {number:.4g}" for key, number in numbers)
            print(f"{name}, {dtype}: within {difference:.1g} of what ships, relatively; {stated}")
            for step in steps:
                print("".join(f"    {product},\n" for product in step.products), flush=True)


def tune(arguments: argparse.Namespace) -> None:
    """Measures the candidates of each product, and writes the table anew after each."""
    path = arguments.json or _tuning.table_path(jax.devices()[0].device_kind)
    shapes = itertools.chain.from_iterable(arguments.shapes)
    table: dict[str, Any] = {"version": 1, **environment(), "dtype": "bfloat16"}
    table |= {"input": "standard normal", "entries": []}
    for shape, addend in _tune.cases([*shapes]):
        entry = _tune.measure(shape, addend)
        times = ", ".join(f"{name} {time:.1f}" for name, time in entry["microseconds"].items())
        print(f"{'×'.join(map(str, shape))}{' + C' * addend}: {times} µs", flush=True)
        table["entries"].append(entry)
        path.write_text(json.dumps(table, indent=1) + "\n")


def show(arguments: argparse.Namespace) -> None:
    """Prints reports as Markdown, and plots them."""
    reports = [json.loads(file.read_text()) for file in arguments.files]
    print("\n\n".join(map(_report.markdown, reports)))
    if arguments.png:
        plot = _headline.figure if arguments.headline else _plots.figure
        plot(reports).savefig(arguments.png, format="png", dpi=90)


def _mesh_axis(text: str) -> tuple[str, int]:
    """An axis of a mesh, as in fsdp=4."""
    name, _, size = text.partition("=")
    if name not in _sharded.AXES or not size.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} must be AXIS=SIZE, AXIS one of {', '.join(_sharded.AXES)}"
        )
    return name, int(size)


def main(words: Sequence[str] | None = None) -> None:
    """Runs the command line, `words` in place of the process's own arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m muon_jax.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add_benchmark(name: str, dtype: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name)
        command.add_argument("--dtype", default=dtype, choices=["bfloat16", "float16", "float32"])
        command.add_argument("--json", type=Path, help="also write the measurements to this file")
        command.set_defaults(run=measure)
        return command

    def add_shapes(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--shapes",
            nargs="+",
            type=_shapes.shapes,
            default=[_shapes.shapes(name) for name in _shapes.SETS],
            help=f"MxN, BATCHxMxN, or a set: {', '.join(_shapes.SETS)} (default: all sets)",
        )

    add_shapes(add_benchmark("syrk", "bfloat16"))
    iteration = add_benchmark("newton_schulz", "bfloat16")
    add_shapes(iteration)
    iteration.add_argument(
        "--coefficients",
        nargs="*",
        choices=_accuracy.names(),
        default=_measure.COEFFICIENTS,
        help="timed beside the defaults",
    )
    iteration.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="before each turn of ten runs, so that no power limit is reached",
    )
    add_benchmark("muon", "float32").add_argument(
        "--models", nargs="+", choices=_models.MODELS, default=[*_models.MODELS]
    )
    sharded = add_benchmark("sharded", "float32")
    sharded.add_argument("--models", nargs="+", choices=_models.MODELS, default=["24-layers"])
    sharded.add_argument(
        "--mesh",
        nargs="+",
        type=_mesh_axis,
        metavar="AXIS=SIZE",
        help=f"axes of {', '.join(_sharded.AXES)} (default: fsdp, all devices)",
    )
    polar = commands.add_parser("accuracy", help="distance to the polar factor, by coefficients")
    names = _accuracy.names()
    polar.add_argument("--names", nargs="+", choices=names, default=names)
    polar.add_argument(
        "--methods", nargs="+", choices=_accuracy.METHODS, default=[*_accuracy.METHODS]
    )
    polar.add_argument("--dtypes", nargs="+", choices=_accuracy.DTYPES, default=[*_accuracy.DTYPES])
    polar.add_argument("--sizes", nargs="+", type=int, default=[256], help="the smaller side, m")
    polar.add_argument("--aspects", nargs="+", type=int, default=[1, 2, 4, 8], help="n/m")
    polar.add_argument("--json", type=Path, help="also write the measurements to this file")
    polar.set_defaults(run=accuracy)
    learn = commands.add_parser("training", help="losses of a small GPT, by coefficients")
    learn.add_argument(
        "--variants",
        nargs="+",
        choices=_training.VARIANTS,
        default=[name for name in _training.VARIANTS if "optax" not in name],
        help="the first is what the others are compared with",
    )
    learn.add_argument("--learning-rates", nargs="+", type=float, default=[0.01, 0.02, 0.04, 0.08])
    learn.add_argument("--seeds", type=int, default=3, help="how many, at least 2")
    learn.add_argument("--steps", type=int, default=_training.Training.steps)
    learn.add_argument("--batch-size", type=int, default=_training.Training.batch_size)
    for field in dataclasses.fields(GPT):
        learn.add_argument(f"--{field.name}", type=int, default=field.default)
    learn.add_argument("--json", type=Path, help="also write the losses to this file")
    learn.set_defaults(run=training)
    generate = commands.add_parser("coefficients", help="compute ours and minimax ones anew")
    sets = [*_minimax.published(), *SCHEDULES]
    generate.add_argument("--names", nargs="+", choices=sets, default=sets)
    generate.set_defaults(run=coefficients)
    table = commands.add_parser("tune", help="measure the table of the dispatch for this device")
    add_shapes(table)
    table.add_argument(
        "--json",
        type=Path,
        help="where to write the table (default: where the dispatch looks for it)",
    )
    table.set_defaults(run=tune)
    report = commands.add_parser("report")
    report.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    report.add_argument("--png", type=Path, help="also plot them (needs matplotlib)")
    report.add_argument("--headline", action="store_true", help="all of them in one short figure")
    report.set_defaults(run=show)
    arguments = parser.parse_args(words)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
