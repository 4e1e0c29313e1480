"""Reads a training report aloud: sections of cells and lines, for tables and pages."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks._records.reading import Measurement, Report
from benchmarks._records.training_spectra import schedules_of_variants, update_spreads
from benchmarks._records.training_statistics import (
    Difference,
    Study,
    detectable_difference,
    interval_half_width,
    read_study,
    seconds_to_equal_loss,
)
from muon_jax.contrib._spectra import LEAST_REACHED


class Section(NamedTuple):
    """A part of a report: a title, what its cells are, a table by column, and lines below it."""

    title: str
    note: str
    rows: Sequence[Mapping[str, str]]
    lines: Sequence[str] = ()


def losses_line(measurement: Measurement) -> str:
    """Returns the final loss of a run, and its seconds where they were measured, in one line."""
    loss, seconds = measurement["losses"][-1], measurement.get("seconds")
    return (
        f"width {measurement['width']}, {measurement['variant']},"
        f" learning rate {measurement['learning_rate']:.3g}, seed {measurement['seed']}:"
        f" loss {'not finite' if loss is None else f'{loss:.4f}'}"
        + ("" if seconds is None else f", {seconds:.1f} s")
    )


def training_setup(report: Report) -> str:
    """Returns the sizes of model, training and text, the widths and seeds, in one line."""
    facts = {**report["model"], **report["training"], **report["text"]}
    facts |= {key: ", ".join(map(str, report[key])) for key in ("widths", "seeds")}
    return "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in facts.items())


def training_sections(report: Report) -> list[Section]:
    """Returns losses with verdicts, learning rates, times and spectra."""
    study = read_study(report)
    losses = Section(
        "Losses",
        "Validation losses are in nats per token, mean ± standard deviation over seeds, at the best"
        " of the learning rates that have the most seeds. Differences to"
        f" {study.first} are means over pairs of one seed, each variant at its own learning rate,"
        " with 95% confidence intervals. Intervals assume one deviation for all pairs but"
        " AdamW's. Those over all widths are of these widths alone, and assume independent pairs.",
        loss_rows(study),
        [*verdicts(study), *resolution_lines(study), *gap_lines(study)],
    )
    rates = Section(
        "Learning rate by width",
        "Each cell has three numbers. The first is the learning rate of the losses above. The"
        " second is the vertex of a parabola through the losses around it, by the logarithm of the"
        f" learning rate. The third is that vertex over {study.first}'s.",
        rate_rows(study),
    )
    return [losses, rates, time_section(study), *spectrum_sections(study)]


def loss_rows(study: Study) -> list[dict[str, str]]:
    """Returns the cells by column of each width and variant, then of all widths together."""
    rows = [_loss_row(study, width, variant) for width, variant in study.trained]
    if len(study.report["widths"]) > 1:
        rows += [_loss_row(study, None, variant) for variant in study.report["variants"][1:]]
    return rows


def _loss_row(study: Study, width: int | None, variant: str) -> dict[str, str]:
    row = {"width": "all", "variant": variant, "learning rate": "", "validation loss": ""}
    if width is not None:
        trained = study.trained[width, variant]
        row["width"] = str(width)
        row["learning rate"] = f"{trained.best_rate:.3g}"
        row["validation loss"] = _mean_and_std([*trained.final_losses.values()])
    return row | {f"difference to {study.first}": _interval(study.difference(variant, width))}


def _mean_and_std(losses: Sequence[float]) -> str:
    if len(losses) == 1:
        return f"{losses[0]:.4f}"
    with np.errstate(invalid="ignore"):  # NaN where a run diverged
        return f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}"


def _interval(difference: Difference | None) -> str:
    """The difference and its interval; empty for the first variant itself."""
    if difference is None:
        return ""
    if np.isnan(difference.mean):
        return "both diverged"
    ends = f"[{difference.low:+.4f}, {difference.high:+.4f}]"
    return f"{difference.mean:+.4f} {'without interval' if np.isnan(difference.low) else ends}"


def verdicts(study: Study) -> list[str]:
    """Returns a line for each variant but the first: at every width, and over all of them.

    A difference is seen where its 95% interval leaves out 0. The control has to be seen to lose:
    a comparison that cannot tell it from the first variant tells nothing.
    """
    return [
        f"{place}, {variant}: {_verdict(difference, control=variant == study.report['control'])}"
        for variant in study.report["variants"][1:]
        for place, width in _places(study)
        if (difference := study.difference(variant, width))
    ]


def _places(study: Study) -> list[tuple[str, int | None]]:
    """Each width, and None for all where there are several."""
    widths = study.report["widths"]
    every: list[tuple[str, int | None]] = [("all widths", None)]
    return [(f"width {width}", width) for width in widths] + every * (len(widths) > 1)


def _verdict(difference: Difference, *, control: bool) -> str:
    worse, better = difference.low > 0, difference.high < 0
    if control:
        words = "control seen to lose:" if worse else "CONTROL NOT SEEN:"
    elif np.isnan(difference.low):
        words = "not compared:"
    elif worse or better:
        words = "worse by" if worse else "better by"
    else:
        words = "no difference seen:"
    return f"{words} {_interval(difference)}"


def resolution_lines(study: Study) -> list[str]:
    """Returns which differences as many pairs as seeds can show, at a width and over all."""
    (std, df), seeds, widths = study.noise, len(study.report["seeds"]), len(study.report["widths"])
    if not df:
        return ["no intervals: they need two seeds of the first variant and another one"]
    return [
        f"the differences of pairs have a standard deviation of {std:.4f}, pooled over all but the"
        f" control and AdamW, {df} degrees of freedom"
    ] + [
        f"resolution of {count} pairs: intervals of ±{interval_half_width(std, count, df):.4f}; a"
        f" difference of {detectable_difference(std, count, df):.4f} is seen with 80% power"
        for count in sorted({seeds, seeds * widths})
    ]


def gap_lines(study: Study) -> list[str]:
    """Returns a line for each variant and width that was not measured, or not as it should be.

    Further lines say that runs are of several devices, versions of JAX or commits.
    """
    report, lines = study.report, []
    for width, variant in itertools.product(report["widths"], report["variants"]):
        place = f"width {width}, {variant}"
        if (trained := study.trained.get((width, variant))) is None:
            lines.append(f"not measured: {place}")
            continue
        if trained.at_the_end:
            lines.append(
                f"not bracketed: {place}, whose best learning rate, {trained.best_rate:.3g}, is"
                " at the end of those tried"
            )
        if missing := [s for s in report["seeds"] if s not in trained.final_losses]:
            lines.append(
                f"few seeds: {place}, of which no learning rate has all; the best one lacks seeds"
                f" {', '.join(map(str, missing))}"
            )
    for key in ("device", "jax", "commit"):
        if len(found := {m[key] for m in report["measurements"] if key in m}) > 1:
            lines.append(f"runs of several {key}s: {', '.join(sorted(found))}")
    if report["control"] not in report["variants"]:
        lines.append(f"not measured: {report['control']}, the control")
    return lines


def rate_rows(study: Study) -> list[dict[str, str]]:
    """Returns the cells of each variant: by width best rate, vertex, and ratio of vertices."""
    return [
        {"variant": variant}
        | {f"width {width}": _rate_cell(study, width, variant) for width in study.report["widths"]}
        for variant in study.report["variants"]
    ]


def _rate_cell(study: Study, width: int, variant: str) -> str:
    if (width, variant) not in study.trained:
        return ""
    found, of_first = (study.vertices.get((width, name)) for name in (variant, study.first))
    best = study.trained[width, variant].best_rate
    cells = [f"{best:.3g}", f"{found:.3g}" if found else "none"]
    if found and of_first:
        cells.append(f"{found / of_first:.2f}×")
    return "; ".join(cells)


def time_section(study: Study) -> Section:
    """Returns the times of a step, and until a variant and the first one have the same loss."""
    programs = {(p["width"], p["variant"]): p for p in study.report["programs"] if "step_ms" in p}
    if not programs:
        return Section("Time", "", [], ["no step times in this record"])
    training, seconds = study.report["training"], seconds_to_equal_loss(study)
    columns, rows = ("seconds to equal loss", f"{study.first}'s", "ratio"), []
    for p in (programs[key] for key in study.trained if key in programs):
        row = {
            "width": str(p["width"]),
            "variant": p["variant"],
            "step, ms": f"{p['step_ms']:.2f}",
            "optimizer, ms": f"{p['optimizer_ms']:.2f}",
            "optimizer's share": f"{p['optimizer_ms'] / p['step_ms']:.1%}",
        }
        cells = ["", "", ""]
        if both := seconds.get((p["width"], p["variant"])):
            cells = [*(f"{time:.1f}" for time in both), f"{both[0] / both[1]:.2f}×"]
        rows.append(row | dict(zip(columns, cells, strict=True)))
    tokens = training["batch_size"] * study.report["model"]["context"]
    note = (
        f"The first milliseconds are the median of a step of {tokens:,} tokens. The second are the"
        " median of the optimizer's update alone. The last three columns compare the variant with"
        f" {study.first}. Both have the same loss after these seconds. That loss is the larger one"
        " of their mean final losses. Losses between evaluations are interpolated. The learning"
        " rates fall over the whole run. A shorter run can reach a loss sooner."
    )
    missing = [
        f"not measured: step times at width {width}, {variant}"
        for width, variant in study.trained
        if (width, variant) not in programs
    ]
    return Section("Time", note, rows, missing)


def spectrum_sections(study: Study) -> list[Section]:
    """Returns the share of the momenta that schedules do not reach, and the size of updates."""
    spreads = update_spreads(study.report)
    names = [*schedules_of_variants(study.report)]
    if not (spreads and names):
        missing = "spectra" if names else "sets of coefficients whose spectra are known"
        return [Section("Spectra of momenta", "", [], [f"no {missing} in this record"])]
    shares, sizes = [], []
    for (width, variant, matrix), by_step in spreads.items():
        row = {"width": str(width), "trained by": variant, "matrix": matrix}
        shares.append(row | {"steps": " / ".join(map(str, by_step))})
        sizes.append(dict(row))
        for name in names:
            of_name = [by_name[name] for by_name in by_step.values()]
            ratios = [by_name[name].rms / by_name[names[0]].rms for by_name in by_step.values()]
            shares[-1][name] = " / ".join(f"{spread.unreached_share:.1%}" for spread in of_name)
            sizes[-1][name] = f"{np.median(ratios):.3f}"
    return [
        Section(
            "Spectra of momenta",
            "The share of a momentum's singular values that the steps of each column leave below"
            f" {LEAST_REACHED:g}, by step of the training: medians over layers.",
            shares,
        ),
        Section(
            "Sizes of updates",
            "The root mean square of the singular values that the steps of each column make of"
            f" those momenta, over that of {names[0]}: medians over layers and steps.",
            sizes,
        ),
    ]
