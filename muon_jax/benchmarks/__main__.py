"""Times `syrk`, `newton_schulz` and `muon` beside others, and fails where a result is wrong.

    python -m muon_jax.benchmarks syrk --json syrk.json
    python -m muon_jax.benchmarks newton_schulz --shapes peers 24x512x2048
    python -m muon_jax.benchmarks muon --models gpt2-small
    python -m muon_jax.benchmarks sharded --mesh fsdp=2 tensor=2 --json sharded.json
    python -m muon_jax.benchmarks accuracy --names standard --json accuracy.json
    python -m muon_jax.benchmarks training --json training.json
    python -m muon_jax.benchmarks coefficients --names balanced
    python -m muon_jax.benchmarks report syrk.json --png syrk.png

Times on a GPU are those that the kernels spend on the device. For rivals in torch they are those
between CUDA events, with the gaps between kernels. The JSON has the wall clock too. `sharded` runs
on all devices of the machine, by the wall clock.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from muon_jax.benchmarks._accuracy.command import add_accuracy_arguments, run_accuracy
from muon_jax.benchmarks._coefficients.command import add_coefficients_arguments, run_coefficients
from muon_jax.benchmarks._records.command import add_report_arguments, run_report
from muon_jax.benchmarks._times import commands as times
from muon_jax.benchmarks._training.command import add_training_arguments, run_training


class Command(NamedTuple):
    """What a command is for, the flags that it adds to a parser, and the function that runs it."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


COMMANDS = {
    "syrk": Command(
        "times of the symmetric product",
        times.add_syrk_arguments,
        times.run_syrk,
    ),
    "newton_schulz": Command(
        "times of the iteration",
        times.add_newton_schulz_arguments,
        times.run_newton_schulz,
    ),
    "muon": Command(
        "times of whole updates on one device",
        times.add_muon_arguments,
        times.run_muon,
    ),
    "sharded": Command(
        "times of whole updates on all devices",
        times.add_sharded_arguments,
        times.run_sharded,
    ),
    "accuracy": Command(
        "distance to the polar factor and FLOPs, by coefficients",
        add_accuracy_arguments,
        run_accuracy,
    ),
    "training": Command(
        "validation losses of a small GPT, by coefficients, learning rate and seed",
        add_training_arguments,
        run_training,
    ),
    "coefficients": Command(
        "compute our coefficients and the minimax ones anew",
        add_coefficients_arguments,
        run_coefficients,
    ),
    "tune": Command(
        "measure the table from which the dispatch chooses on this device",
        times.add_tune_arguments,
        times.run_tune,
    ),
    "report": Command(
        "print and plot files of measurements",
        add_report_arguments,
        run_report,
    ),
}


def main(words: Sequence[str] | None = None) -> None:
    """Runs the command line: `words`, or the process's own arguments for None."""
    parser = argparse.ArgumentParser(
        prog="python -m muon_jax.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command_parser = parsers.add_parser(name, help=command.help)
        command.add_arguments(command_parser)
        command_parser.set_defaults(run=command.run)
    arguments = parser.parse_args(words)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
