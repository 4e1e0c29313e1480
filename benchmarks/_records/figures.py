"""The figures of the README and of the docs, each drawn from committed records or computed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._records.curves import gpt_figure
from benchmarks._records.from_adamw_losses import from_adamw_figure
from benchmarks._records.headline import headline_figure
from benchmarks._records.pages import RESULTS
from benchmarks._records.palette import STYLE
from benchmarks._records.plots import figure_of_reports, speeds_by_size_figure
from benchmarks._records.reading import Report
from benchmarks._records.set_figures import (
    accuracy_figure,
    polynomials_figure,
    preconditioning_figure,
    singular_values_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _record(name: str) -> Report:
    return json.loads((RESULTS / f"{name}.json").read_text())


FIGURES: dict[str, Callable[[], "Figure"]] = {
    "headline": lambda: headline_figure(_record("muon_h200"), _record("newton_schulz_h100")),
    "accuracy_cpu": lambda: accuracy_figure(_record("accuracy_cpu")),
    "singular_values": singular_values_figure,
    "preconditioning": preconditioning_figure,
    "polynomials": polynomials_figure,
    "from_adamw_cpu": lambda: from_adamw_figure(_record("from_adamw_cpu")["measurements"]),
    "syrk_h100": lambda: speeds_by_size_figure(_record("syrk_h100")),
    "training_widths_h100": lambda: figure_of_reports([_record("training_widths_h100")]),
    "gpt_h100": lambda: gpt_figure(RESULTS / "gpt_h100"),
}


def write_figures(folder: Path) -> None:
    """Writes each of `FIGURES` into `folder`, as a PNG of its name."""
    for name, draw in FIGURES.items():
        save_figure(draw, folder / f"{name}.png")


def save_figure(draw: Callable[[], "Figure"], path: Path) -> None:
    """Draws a figure in large type and writes it as a PNG."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        draw().savefig(path, format="png", dpi=160)
