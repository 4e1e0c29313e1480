"""The command `training`."""

import argparse
import dataclasses
from typing import Any

from muon_jax.benchmarks._command_line.arguments import add_json, quick_facts
from muon_jax.benchmarks._command_line.progress import measure_each
from muon_jax.benchmarks._records.recording import environment, record
from muon_jax.benchmarks._records.tables import heading, markdown
from muon_jax.benchmarks._training.gpt import GPT
from muon_jax.benchmarks._training.runs import CONTROL, VARIANTS, Training, measure_training
from muon_jax.benchmarks._training.stdlib_text import read_text

# What `--quick` changes, where no flag says otherwise.
QUICK_TRAINING = {
    "variants": ["standard", "balanced", CONTROL],
    "learning_rates": [0.02],
    "seeds": 2,
    "steps": 50,
    "batch_size": 8,
    "layers": 1,
    "width": 64,
    "heads": 2,
    "context": 64,
}


def add_training_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `training`."""
    command.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=[name for name in VARIANTS if "optax" not in name],
        help="the others are compared with the first one",
    )
    command.add_argument(
        "--learning-rates", nargs="+", type=float, default=[0.01, 0.02, 0.04, 0.08]
    )
    command.add_argument("--seeds", type=int, default=3, help="the number of seeds, at least 2")
    command.add_argument("--steps", type=int, default=Training.steps)
    command.add_argument("--batch-size", type=int, default=Training.batch_size)
    for field in dataclasses.fields(GPT):
        command.add_argument(f"--{field.name}", type=int, default=field.default)
    add_json(command, "also write the losses to this file")


def run_training(arguments: argparse.Namespace) -> None:
    """Trains each variant, and prints a table and verdicts.

    Raises:
        ValueError: there is one seed only.
    """
    if arguments.seeds < 2:
        raise ValueError(f"--seeds must be at least 2, to estimate noise, got {arguments.seeds}")
    sizes = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(GPT)}
    model, text = GPT(**sizes), read_text()
    training = Training(arguments.steps, arguments.batch_size)
    rates, seeds = arguments.learning_rates, [*range(arguments.seeds)]
    report: dict[str, Any] = {"benchmark": "training", **quick_facts(arguments), **environment()}
    report |= {"text": text.identity(), "model": sizes, "training": dataclasses.asdict(training)}
    report |= {"learning_rates": rates, "seeds": seeds, "control": CONTROL}
    report |= {"variants": arguments.variants, "measurements": []}
    print(heading(report), flush=True)
    measurements = measure_each(
        arguments.variants,
        lambda name: measure_training(name, model, training, text, rates, seeds),
    )
    record(report, measurements, arguments.json)
    print(f"\n{markdown(report)}")
