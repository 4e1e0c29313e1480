"""The command `start`: fresh processes that each compile one update."""

import argparse
import functools
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from benchmarks._command_line.arguments import add_json, quick_facts
from benchmarks._command_line.progress import measure_each
from benchmarks._records.recording import environment, record
from benchmarks._records.tables import heading
from benchmarks._start import first_update
from benchmarks._times.models import MODELS, QUICK_MODEL
from benchmarks._times.updates import COMPARED

# What `--quick` changes, where no flag says otherwise.
QUICK_START = {"models": [QUICK_MODEL], "repetitions": 1}
# What the counted programs have of a compilation cache.
_COUNTED = ("none", "warm")


class Start(NamedTuple):
    """A program that starts: the model, the optimizer, and what it has of a compilation cache.

    `cache` is `"none"`, `"filling"` or `"warm"`. What fills the cache is not counted.
    """

    model: str
    optimizer: str
    cache: str


def add_start_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `start`."""
    command.add_argument("--models", nargs="+", choices=MODELS, default=["gpt2-small"])
    command.add_argument(
        "--repetitions",
        type=_positive,
        default=3,
        help="how many processes of each optimizer are counted, without a cache and with it",
    )
    add_json(command, "also write the measurements to this file")


def run_start(arguments: argparse.Namespace) -> None:
    """Measures how long a program takes until its first update is compiled, model by model.

    The processes have the GPU for themselves: JAX takes it here after all of them have ended.

    Raises:
        SystemExit: a process failed, as it does where an update is wrong.
    """
    starts = [s for model in arguments.models for s in schedule(model, arguments.repetitions)]
    with tempfile.TemporaryDirectory() as folder:
        run = functools.partial(run_in_fresh_process, folder=folder)
        results = [*measure_each(starts, run, ", ".join)]
    report: dict[str, Any] = {"benchmark": "start", **quick_facts(arguments), **environment()}
    report |= {"dtype": "float32", "input": "standard normal"}
    report |= {"repetitions": arguments.repetitions, "measurements": []}
    print(heading(report), flush=True)
    found = [*zip(starts, results, strict=True)]
    cases = itertools.product(arguments.models, _COUNTED)
    measurements = (summary(model, cache, found) for model, cache in cases)
    record(report, measurements, arguments.json, indent=1)


def schedule(model: str, repetitions: int) -> list[Start]:
    """Returns what starts, in this order: without a cache, then to fill it, then with it.

    The optimizers start in turns, in another order each time.
    """
    shuffled = random.Random(0)
    return [
        Start(model, optimizer, cache)
        for cache, turns in (("none", repetitions), ("filling", 1), ("warm", repetitions))
        for _ in range(turns)
        for optimizer in shuffled.sample([*COMPARED], len(COMPARED))
    ]


def run_in_fresh_process(start: Start, folder: str) -> dict[str, Any]:
    """Returns what `measure_first_update` finds in a process of its own.

    The process has this one's environment, but for the compilation cache.

    Args:
        start: what the process runs.
        folder: of the compilation cache, which holds every program.

    Raises:
        SystemExit: the process failed; it says how.
    """
    cache = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    if start.cache != "none":
        cache = {
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    command = [sys.executable, "-m", first_update.__name__, start.model, start.optimizer]
    process = subprocess.run(
        command, env=os.environ | cache, capture_output=True, text=True, check=False
    )
    if process.returncode:
        sys.exit(f"start {', '.join(start)}: the process failed.\n{process.stderr}")
    return json.loads(process.stdout)


def summary(
    model: str, cache: str, results: Iterable[tuple[Start, dict[str, Any]]]
) -> dict[str, Any]:
    """Returns the measurement of a model and a cache, from all starts and what they returned.

    Returns:
        `model`, its number of `parameters`, and `cache`; by optimizer
        `start_seconds`, the lowest, the median and the highest of `trace`, `lower` and `compile`,
        and of `all`, their sum;
        `kernels`, how many of ours the program has;
        `cached`, in how many processes the program came from the cache;
        `errors`, the largest.
    """
    measurement: dict[str, Any] = {
        "model": model,
        "parameters": sum(map(math.prod, MODELS[model].values())),
        "cache": cache,
        **{key: {} for key in ("start_seconds", "kernels", "cached", "errors")},
    }
    for name in COMPARED:
        found = [result for start, result in results if start == (model, name, cache)]
        phases = [{**r["seconds"], "all": sum(r["seconds"].values())} for r in found]
        measurement["start_seconds"][name] = {
            phase: np.quantile([p[phase] for p in phases], (0, 0.5, 1)).round(3).tolist()
            for phase in phases[0]
        }
        measurement["kernels"][name] = found[0]["kernels"]
        measurement["cached"][name] = sum(result["cached"] for result in found)
        measurement["errors"][name] = max(result["error"] for result in found)
    return measurement


def _positive(text: str) -> int:
    """A number of processes."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)
