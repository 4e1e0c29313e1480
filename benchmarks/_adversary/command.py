"""The command `adversary`."""

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks._accuracy import polar_error
from benchmarks._adversary.limits import limit_of, maximum_of_map
from benchmarks._adversary.search import search
from benchmarks._command_line.arguments import add_json, quick_facts
from benchmarks._command_line.progress import measure_each
from benchmarks._records.recording import environment, record

# What `--quick` changes, where no flag says otherwise.
QUICK_ADVERSARY = {
    "names": ["standard", "balanced"],
    "dtypes": ["bfloat16", "float16"],
    "sizes": [16],
    "seconds": 1.0,
}


def add_adversary_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `adversary`."""
    polar_error.add_variants(command)
    command.add_argument("--sizes", nargs="+", type=int, default=[16, 64, 256, 1024])
    command.add_argument(
        "--seconds", type=float, default=20.0, help="for each variant and size, compiling included"
    )
    command.add_argument("--seed", type=int, default=0)
    add_json(command, "also write what was found to this file")


def run_adversary(arguments: argparse.Namespace) -> None:
    """Searches each variant at each size, and prints a line for each.

    Raises:
        SystemExit: the largest singular value of a result exceeds its limit.
    """
    report: dict[str, Any] = {"benchmark": "adversary", **quick_facts(arguments), **environment()}
    report |= {"seed": arguments.seed, "seconds": arguments.seconds, "measurements": []}
    variants = [*polar_error.offered_variants(arguments.names, arguments.methods, arguments.dtypes)]
    cases = [(*variant, m) for m in arguments.sizes for variant in variants]
    measurements = measure_each(
        cases,
        lambda case: measure_worst(*case, seed=arguments.seed, seconds=arguments.seconds),
        lambda case: ", ".join(map(str, case)),
    )
    record(report, measurements, arguments.json)
    exceeding = [m for m in report["measurements"] if exceeds(m)]
    if exceeding:
        found = "; ".join("{name}, {method}, {dtype} at m = {size}".format(**m) for m in exceeding)
        sys.exit(f"singular values exceed their limits: {found}")


def measure_worst(
    name: str, method: str, dtype: str, m: int, *, seed: int, seconds: float
) -> dict[str, Any]:
    """Searches for that many seconds, or until a result is not finite.

    Returns:
        `name`, `method`, `dtype` and `size`; `evaluations`; `worst`, the largest singular value
        found, None where a result is not finite; its `limit`; `maximum`, that of the map.
    """
    start = time.monotonic()
    maximum = maximum_of_map(name, dtype)
    findings = search(name, method, dtype, m, seed)
    found = next(findings)
    while found.is_finite and time.monotonic() - start < seconds:
        found = next(findings)
    return {
        "name": name,
        "method": method,
        "dtype": dtype,
        "size": m,
        "evaluations": found.evaluations,
        "worst": round(found.largest, 4) if found.is_finite else None,
        "limit": round(limit_of(maximum), 4),
        "maximum": round(maximum, 4),
    }


def exceeds(measurement: Mapping[str, Any]) -> bool:
    """Returns whether the worst of a measurement is above its limit, or not finite."""
    return measurement["worst"] is None or measurement["worst"] > measurement["limit"]
