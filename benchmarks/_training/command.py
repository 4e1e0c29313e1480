"""The command `training`."""

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import Any

from benchmarks._command_line.arguments import add_json, quick_facts
from benchmarks._command_line.progress import with_bar
from benchmarks._records.recording import environment, record, write_report
from benchmarks._records.tables import heading, markdown
from benchmarks._training.corpus import read_corpus
from benchmarks._training.gpt import GPT
from benchmarks._training.optimizers import CONTROL, VARIANTS
from benchmarks._training.runs import Training
from benchmarks._training.search import least_runs
from benchmarks._training.spectra import SHARES
from benchmarks._training.stdlib_text import read_text
from benchmarks._training.study import add_runs, missing_runs

# What `--quick` changes, where no flag says otherwise.
QUICK_TRAINING = {
    "variants": ["standard", "balanced", CONTROL],
    "widths": [64],
    "seeds": 2,
    "steps": 50,
    "batch_size": 8,
    "layers": 1,
    "head_size": 32,
    "context": 64,
}


def add_training_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `training`."""
    add = command.add_argument
    add(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=["standard", "balanced", "polar_express", "adamw_quarter", CONTROL, "accurate"],
        help="the others are compared with the first one",
    )
    add("--widths", nargs="+", type=int, default=[256, 384, 512, 768], help="of the models")
    add("--seeds", type=int, default=3, help="the number of seeds, at least 2")
    add("--steps", type=int, default=Training.steps)
    add("--batch-size", type=int, default=Training.batch_size)
    for name in ("layers", "head_size", "context"):
        add(f"--{name.replace('_', '-')}", type=int, default=getattr(GPT, name))
    add("--text", type=Path, help="of the command `corpus` (default: Python's standard library)")
    add(
        "--spectra",
        nargs="*",
        choices=[name for name in VARIANTS if not name.startswith(("adamw", "optax"))],
        default=[],
        help="variants whose momenta's singular values are kept, in runs of the last seed that are"
        " made now",
    )
    add(
        "--continue-from",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="files of --json, of other machines, whose runs are not made again",
    )
    add_json(command, "keep all runs in this file, as each ends; one that exists is gone on with")


def run_training(arguments: argparse.Namespace) -> None:
    """Makes the runs that are missing, and prints a table and verdicts.

    Raises:
        ValueError: there is one seed only, or a file is of another setup.
    """
    if arguments.seeds < 2:
        raise ValueError(f"--seeds must be at least 2, to estimate noise, got {arguments.seeds}")
    text = read_corpus(arguments.text) if arguments.text else read_text()
    training = Training(arguments.steps, arguments.batch_size)
    sizes = {name: getattr(arguments, name) for name in ("layers", "head_size", "context")}
    sizes["vocabulary"] = text.vocabulary
    report: dict[str, Any] = {"benchmark": "training", **quick_facts(arguments), **environment()}
    report |= {"text": text.identity(), "model": sizes, "training": dataclasses.asdict(training)}
    widths, variants = map(list, map(dict.fromkeys, (arguments.widths, arguments.variants)))
    report |= {"widths": widths, "variants": variants}
    report |= {"seeds": [*range(arguments.seeds)], "control": CONTROL, "spectra_shares": SHARES}
    report |= {"programs": [], "measurements": [], "spectra": []}
    models = [GPT(width, **sizes) for width in widths]
    is_continued = arguments.json and arguments.json.exists()
    for file in (*([arguments.json] if is_continued else ()), *arguments.continue_from):
        add_runs(report, file)
    if arguments.json:
        write_report(report, arguments.json)
    print(heading(report), flush=True)
    studies = [*itertools.product(models, variants)]
    runs = itertools.chain.from_iterable(
        missing_runs(report, name, model, training, text, name in arguments.spectra)
        for model, name in studies
    )
    least = len(studies) * least_runs(arguments.seeds)
    record(report, with_bar(runs, len(report["measurements"]), least), arguments.json)
    print(f"\n{markdown(report)}")
