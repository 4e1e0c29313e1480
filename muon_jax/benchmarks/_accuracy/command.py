"""The command `accuracy`."""

import argparse
from pathlib import Path
from typing import Any

from muon_jax.benchmarks._accuracy import polar_error, spectra
from muon_jax.benchmarks._records.recording import environment, record
from muon_jax.benchmarks._records.tables import markdown


def add_accuracy_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `accuracy`."""
    names, methods, dtypes = (
        polar_error.coefficient_names(),
        polar_error.METHODS,
        polar_error.DTYPES,
    )
    command.add_argument("--names", nargs="+", choices=names, default=names)
    command.add_argument("--methods", nargs="+", choices=methods, default=[*methods])
    command.add_argument("--dtypes", nargs="+", choices=dtypes, default=[*dtypes])
    command.add_argument("--sizes", nargs="+", type=int, default=[256], help="the smaller side, m")
    command.add_argument("--aspects", nargs="+", type=int, default=[1, 2, 4, 8], help="n/m")
    command.add_argument("--json", type=Path, help="also write the measurements to this file")


def run_accuracy(arguments: argparse.Namespace) -> None:
    """Measures each name in each form and dtype, and prints a table."""
    report: dict[str, Any] = {"benchmark": "accuracy", **environment()}
    report |= {"absent": spectra.absent_spectra(), "thresholds": polar_error.THRESHOLDS}
    report |= {"measurements": [], "sizes": ", ".join(map(str, arguments.sizes))}
    cases = [*spectra.hard_cases(arguments.sizes, arguments.aspects)]
    variants = polar_error.offered_variants(arguments.names, arguments.methods, arguments.dtypes)
    measurements = (polar_error.measure_accuracy(*variant, cases) for variant in variants)
    record(report, measurements, arguments.json)
    print(f"\n{markdown(report)}")
