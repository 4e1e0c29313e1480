"""Reads the losses of a training report: text, cells of a table, verdicts and a plot."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from muon_jax.benchmarks._records.palette import PALETTE
from muon_jax.benchmarks._records.reading import Measurement, Report

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure


class Outcome(NamedTuple):
    """A variant at its best learning rate, the one with the least mean loss.

    Attributes:
        name: of the variant.
        learning_rate: the best one.
        at_the_end: whether it is the smallest or the largest of those tried.
        losses: final losses, shape `(seeds,)`, ∞ where a run diverged.
        curves: losses of all evaluations, shape `(seeds, evaluations)`.
    """

    name: str
    learning_rate: float
    at_the_end: bool
    losses: np.ndarray
    curves: np.ndarray


def losses_line(measurement: Measurement) -> str:
    """Returns the mean final loss at each learning rate, and the time, in one line."""
    means = _loss_array(measurement["losses"]).mean(axis=1)
    return (
        f"{measurement['name']}: mean losses {', '.join(f'{loss:.4f}' for loss in means)};"
        f" {measurement['seconds']} s after {measurement['compile_seconds']} s of compilation"
    )


def training_setup(report: Report) -> str:
    """Returns the sizes of model, training and text, the learning rates and seeds, in one line."""
    facts = {**report["model"], **report["training"], **report["text"]}
    facts |= {key: ", ".join(map(str, report[key])) for key in ("learning_rates", "seeds")}
    return "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in facts.items())


def loss_rows(report: Report) -> list[dict[str, str]]:
    """Returns the cells by column of each variant at its best learning rate.

    Means and standard deviations are over seeds. The difference to the first variant is the mean
    over pairs, which are runs of the same seed, each variant at its own best learning rate. Its
    standard error follows it.
    """
    outcomes = _outcomes(report)
    return [
        {
            "variant": outcome.name,
            "best learning rate": f"{outcome.learning_rate:g}",
            "validation loss": f"{outcome.losses.mean():.4f} ± {_sample_std(outcome.losses):.4f}",
            f"difference to {outcomes[0].name}": _difference(outcome, outcomes[0]),
        }
        for outcome in outcomes
    ]


def verdicts(report: Report) -> list[str]:
    """Returns a line for each expectation: it holds, or it fails.

    - A variant is expected within seed noise of the first one.
    - The control is expected to be worse than the first one, beyond seed noise.

    Seed noise is twice the standard deviation over seeds. That deviation is the root mean square
    over all variants but the control, where no run diverged. Differences are those of `loss_rows`.
    Further lines name best learning rates that are the smallest or the largest one tried, and
    variants that were not measured.
    """
    first, *others = outcomes = _outcomes(report)
    stds = np.array([_sample_std(o.losses) for o in outcomes if o.name != report["control"]])
    stds = stds[np.isfinite(stds)]
    noise = 2 * float(np.sqrt(np.mean(stds**2))) if stds.size else np.nan
    lines = [f"seed noise: {noise:.4f}, 2 standard deviations over seeds"]
    for outcome in others:
        mean = _mean_difference(outcome, first)
        if outcome.name == report["control"]:
            expected, holds = "worse than {} beyond seed noise", mean > noise
        else:
            expected, holds = "within seed noise of {}", abs(mean) <= noise
        difference = _difference(outcome, first)
        verdict = "holds" if holds else "FAILS"
        lines.append(f"{verdict}: {outcome.name} {expected.format(first.name)}, {difference}")
    lines += [
        f"not bracketed: the best learning rate of {outcome.name}, {outcome.learning_rate:g}, is at"
        " the end of the grid; extend `--learning-rates`"
        for outcome in outcomes
        if outcome.at_the_end
    ]
    measured = {outcome.name for outcome in outcomes}
    return lines + [f"not measured: {name}" for name in report["variants"] if name not in measured]


def draw_losses(figure: "SubFigure", report: Report) -> None:
    """Draws losses against steps at the best learning rates, and against learning rates.

    Beside one another, not on top, stand the variants of one learning rate.
    """
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    by_step, by_rate = figure.subplots(1, 2)
    evaluations = len(report["measurements"][0]["curves"][0][0])
    steps = report["training"]["steps"] * np.arange(1, evaluations + 1) / evaluations
    count = len(report["measurements"])
    for i, (outcome, m) in enumerate(zip(_outcomes(report), report["measurements"], strict=True)):
        color = PALETTE[i % len(PALETTE)]
        style = {"color": color, "linestyle": "--" if m["name"] == report["control"] else "-"}
        by_step.plot(steps, outcome.curves.mean(axis=0), label=m["name"], **style)
        losses = _loss_array(m["losses"])
        rates = np.array(report["learning_rates"]) * 1.03 ** (i - (count - 1) / 2)
        by_rate.plot(rates, losses.mean(axis=1), marker="o", linewidth=1, **style)
        by_rate.scatter(np.repeat(rates, losses.shape[1]), losses, s=6, color=color)
    by_step.set(xlabel="step", ylabel="validation loss, nats per byte", yscale="log")
    by_step.set_title("at the best learning rate, mean over seeds", fontsize=10)
    by_step.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 5)))
    by_rate.set(xlabel="learning rate", ylabel="final validation loss", xscale="log")
    by_rate.set_title("each seed and the mean", fontsize=10)
    by_rate.xaxis.set_major_locator(FixedLocator(report["learning_rates"]))
    for axis in (by_step.yaxis, by_rate.xaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    by_step.legend(fontsize=9)
    figure.suptitle(f"GPT over bytes, {report['device']}, bfloat16 products")


def _outcomes(report: Report) -> list[Outcome]:
    """Every measured variant at its best learning rate."""
    outcomes = []
    for measurement in report["measurements"]:
        losses, curves = (_loss_array(measurement[key]) for key in ("losses", "curves"))
        best = int(np.argmin(losses.mean(axis=1)))
        rate = report["learning_rates"][best]
        ends = min(report["learning_rates"]), max(report["learning_rates"])
        outcomes.append(
            Outcome(measurement["name"], rate, rate in ends, losses[best], curves[best])
        )
    return outcomes


def _difference(outcome: Outcome, first: Outcome) -> str:
    """The mean difference of pairs and its standard error; empty for the first variant itself."""
    if outcome is first:
        return ""
    with np.errstate(invalid="ignore"):
        error = _sample_std(outcome.losses - first.losses) / len(first.losses) ** 0.5
    return f"{_mean_difference(outcome, first):+.4f} ± {error:.4f}"


def _mean_difference(outcome: Outcome, first: Outcome) -> float:
    """The mean difference of pairs; NaN, for which no comparison holds, where both diverged."""
    with np.errstate(invalid="ignore"):
        return float(np.mean(outcome.losses - first.losses))


def _sample_std(losses: np.ndarray) -> float:
    """The standard deviation of the sample; NaN where a run diverged."""
    with np.errstate(invalid="ignore"):
        return float(np.std(losses, ddof=1))


def _loss_array(losses: Any) -> np.ndarray:
    """Losses as numbers, ∞ where a run diverged."""
    return np.nan_to_num(np.array(losses, np.float64), nan=np.inf)
