"""The command `accuracy`."""

import argparse
from typing import Any

from benchmarks._accuracy import polar_error, spectra
from benchmarks._command_line.arguments import add_json, quick_facts
from benchmarks._command_line.progress import measure_each
from benchmarks._records.recording import environment, record
from benchmarks._records.tables import markdown

# What `--quick` changes, where no flag says otherwise.
QUICK_ACCURACY = {
    "names": ["standard", "polar_express", "balanced"],
    "dtypes": ["bfloat16", "float16"],
    "sizes": [64],
    "aspects": [1, 4],
}


def add_accuracy_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `accuracy`."""
    polar_error.add_variants(command, polar_error.COMBINED)
    command.add_argument("--sizes", nargs="+", type=int, default=[256], help="the smaller side, m")
    command.add_argument("--aspects", nargs="+", type=int, default=[1, 2, 4, 8], help="n/m")
    add_json(command, "also write the measurements to this file")


def run_accuracy(arguments: argparse.Namespace) -> None:
    """Measures each name in each form and dtype, and prints a table."""
    report: dict[str, Any] = {"benchmark": "accuracy", **quick_facts(arguments), **environment()}
    report |= {"absent": spectra.absent_spectra(), "thresholds": polar_error.THRESHOLDS}
    report |= {"measurements": [], "sizes": ", ".join(map(str, arguments.sizes))}
    cases = [*spectra.hard_cases(arguments.sizes, arguments.aspects)]
    variants = polar_error.offered_variants(arguments.names, arguments.methods, arguments.dtypes)
    measurements = measure_each(
        variants, lambda variant: polar_error.measure_accuracy(*variant, cases), ", ".join
    )
    record(report, measurements, arguments.json)
    print(f"\n{markdown(report)}")
