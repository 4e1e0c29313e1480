"""All runs of a study: which are there, and those that are missing."""

import json
import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._training.gpt import GPT
from benchmarks._training.optimizers import VARIANTS
from benchmarks._training.runs import EVALUATIONS, Training, TrainingProgram
from benchmarks._training.search import learning_rate, next_run, power_of
from benchmarks._training.spectra import Spectra
from benchmarks._training.text import Text

# What must be the same for runs to be compared.
_SETUP = ("text", "model", "training")
# What tells rows of a file apart: a run that was made twice has two losses, and one of them counts.
_IDENTITIES = {
    "programs": ("width", "variant"),
    "measurements": ("width", "variant", "learning_rate", "seed"),
    "spectra": ("width", "variant", "learning_rate", "step", "matrix", "layer"),
}


def add_runs(report: dict[str, Any], file: Path) -> None:
    """Adds the runs of a file to a report, those that it lacks, with their widths and variants.

    Raises:
        ValueError: the file is no report of this command, or text, model or training are others.
    """
    try:
        other = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} must be a file of --json, got {error}: delete it") from error
    if not isinstance(other, dict) or other.get("benchmark") != "training":
        raise ValueError(f"{file} must be a file of `training --json`: pass another one")
    for key in _SETUP:
        if other.get(key) != report[key]:
            raise ValueError(
                f"{file} must have runs with the {key} {report[key]}, got {other.get(key)}: pass"
                " the flags that it was made with, or another file"
            )
    for key in ("widths", "variants"):
        report[key] = [*dict.fromkeys(report[key] + other[key])]
    for key, names in _IDENTITIES.items():
        identity = operator.itemgetter(*names)
        known = {identity(row) for row in report[key]}
        report[key] = report[key] + [row for row in other[key] if identity(row) not in known]


def missing_runs(
    report: dict[str, Any], name: str, model: GPT, training: Training, text: Text, spectra: bool
) -> Iterator[dict[str, Any]]:
    """Makes the runs of a variant and a width that the report lacks, and yields each.

    The caller adds a run to `report["measurements"]` before it takes the next one. The program's
    facts and the spectra are added here.

    Args:
        report: whose runs tell which one comes next.
        name: of the variant.
        model: the sizes of the model.
        training: how it trains.
        text: what it is trained on.
        spectra: whether the singular values of momenta are kept, in runs of the last seed.
    """
    start, program = VARIANTS[name].learning_rate, None
    narrower = [w for w in _widths(report, name) if w < model.width]
    losses = _losses(report, name, max(narrower, default=0), start)
    origin = min(losses, key=lambda run: losses[run], default=(0, 0))[0]
    while run := next_run(_losses(report, name, model.width, start), report["seeds"], origin):
        power, seed = run
        place = {"width": model.width, "variant": name}
        facts = place | {key: report[key] for key in ("device", "jax", "commit")}
        if program is None:
            program = TrainingProgram(name, model, training, text)
        steps = {training.steps // EVALUATIONS * i for i in (1, EVALUATIONS // 2, EVALUATIONS)}
        kept = Spectra(steps) if spectra and seed == report["seeds"][-1] else None
        rate = learning_rate(start, power)
        ended = program.train(rate, seed, kept)
        if not _rows(report["programs"], name, model.width):
            report["programs"].append(facts | program.facts)
        if kept:
            report["spectra"] += [place | {"learning_rate": rate} | row for row in kept.rows()]
        yield facts | {"learning_rate": rate, "seed": seed} | ended


def _rows(rows: list[dict[str, Any]], name: str, width: int) -> list[dict[str, Any]]:
    return [row for row in rows if (row["variant"], row["width"]) == (name, width)]


def _widths(report: dict[str, Any], name: str) -> set[int]:
    return {m["width"] for m in report["measurements"] if m["variant"] == name}


def _losses(
    report: dict[str, Any], name: str, width: int, start: float
) -> dict[tuple[int, int], float]:
    """The final losses by power of the learning rate and seed, ∞ where a run diverged."""
    return {
        (power_of(start, m["learning_rate"]), m["seed"]): math.inf
        if m["losses"][-1] is None
        else m["losses"][-1]
        for m in _rows(report["measurements"], name, width)
    }
