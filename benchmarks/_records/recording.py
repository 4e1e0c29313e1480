"""Writes a report while its measurements are made."""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

import muon_jax
from benchmarks._records.tables import measurement_line


def environment() -> dict[str, str]:
    """Returns what somebody needs to repeat a measurement: device, versions, commit, XLA flags."""
    packages = ("jax", "jaxlib", "optax")
    return {
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "muon_jax": muon_jax.__version__,
        **{package: importlib.metadata.version(package) for package in packages},
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks " + shlex.join(sys.argv[1:]),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def _commit() -> str:
    """The commit of the checkout that this file lies in, or that there is none."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return "unknown, without git"
    return found or "unknown"


def record(
    report: dict[str, Any],
    measurements: Iterable[dict[str, Any]],
    path: Path | None,
    indent: int | None = None,
) -> None:
    """Makes the measurements one by one, prints each and appends it to the report.

    Args:
        report: its list `"measurements"` grows.
        measurements: an iterator that measures when it is advanced.
        path: the JSON file that `write_report` writes after each measurement; pass None for no
            file.
        indent: of the JSON.
    """
    for measurement in measurements:
        print(measurement_line(measurement), flush=True)
        report["measurements"].append(measurement)
        if path:
            write_report(report, path, indent)


def write_report(report: dict[str, Any], path: Path, indent: int | None = None) -> None:
    """Writes a report in place of its file. A process that is killed leaves the file as it was."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(report, indent=indent) + "\n")
    part.replace(path)
