"""The command `coefficients`."""

import argparse

import numpy as np

from benchmarks._coefficients.designs import DESIGNS
from benchmarks._coefficients.fit import fit, properties
from benchmarks._coefficients.free import free_coefficients
from benchmarks._coefficients.minimax import published_minimax_sets
from benchmarks._command_line.progress import measure_each
from muon_jax._iteration.coefficients import NAMED, SCHEDULES


def add_coefficients_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `coefficients`."""
    sets = [*published_minimax_sets(), *SCHEDULES]
    command.add_argument("--names", nargs="+", choices=sets, default=sets)


def run_coefficients(arguments: argparse.Namespace) -> None:
    """Recomputes each set, prints it, and prints how far what ships is from it."""
    published = published_minimax_sets()
    for name in [name for name in arguments.names if name in published]:
        difference = np.max(np.abs(published[name] - np.array(NAMED[name])))
        print(f"{name}: within {difference:.1g} of what ships")
        print("".join(f"    {tuple(row.tolist())},\n" for row in published[name]))
    asked = {key: design for key, design in DESIGNS.items() if key[0] in arguments.names}
    fitted = measure_each(asked.values(), fit, lambda design: f"l = {design.low:g}")
    for ((name, dtype), design), steps in zip(asked.items(), fitted, strict=True):
        shipped = SCHEDULES[name].steps_in(dtype)
        difference = np.max(
            np.abs(free_coefficients(design, steps) / free_coefficients(design, shipped) - 1)
        )
        numbers = properties(steps, design.low).items()
        stated = ", ".join(f"{key} {number:.4g}" for key, number in numbers)
        print(f"{name}, {dtype}: within {difference:.1g} of what ships, relatively; {stated}")
        for step in steps:
            print("".join(f"    {product},\n" for product in step.products), flush=True)
