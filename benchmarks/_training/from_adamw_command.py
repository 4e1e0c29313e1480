"""The command `from_adamw`."""

import argparse
from typing import Any

from benchmarks._command_line.arguments import add_json, quick_facts
from benchmarks._records.recording import environment, record
from benchmarks._records.tables import markdown
from benchmarks._training.from_adamw import measure_task
from benchmarks._training.tasks import TASKS

# What `--quick` changes, where no flag says otherwise.
QUICK_FROM_ADAMW = {"tasks": ["digits CNN"], "seeds": 1}


def add_from_adamw_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `from_adamw`."""
    command.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    command.add_argument("--seeds", type=int, default=3, help="the number of seeds, at least 1")
    add_json(command, "also write the losses to this file")


def run_from_adamw(arguments: argparse.Namespace) -> None:
    """Trains each task with each optimizer and rate, and prints a table.

    Raises:
        ValueError: there is no seed.
    """
    if arguments.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {arguments.seeds}")
    report: dict[str, Any] = {"benchmark": "from_adamw", **quick_facts(arguments), **environment()}
    report |= {"seeds": [*range(arguments.seeds)], "measurements": []}
    for task in arguments.tasks:
        record(report, measure_task(task, arguments.seeds), arguments.json, indent=1)
    print(f"\n{markdown(report)}")
