"""What a training measures: a CSV, TensorBoard, a table, and curves of one run or of several.

    python examples/gpt_report.py runs/*/metrics.csv --output curves.png

Runs have the names of their folders.
"""

import argparse
import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

COLUMNS = ("step", "seconds", "train_loss", "held_out_loss")


class Metrics:
    """The rows of `metrics.csv`, each written at once; `seconds` are those of training alone.

    Rows after `step`, where a run goes on from a checkpoint, are dropped: they will come again.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.csv"
        kept = [row for row in read(self.path) if row["step"] <= step] if step else []
        self._seconds = kept[-1]["seconds"] if kept else 0.0
        partial = self.path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            csv.writer(file).writerow(COLUMNS)
            csv.writer(file).writerows(map(_formatted, kept))
        os.replace(partial, self.path)
        self._file = self.path.open("a", newline="")
        self._board = None
        if tensorboard:
            from tensorboardX import SummaryWriter  # not everyone has it

            self._board = SummaryWriter(str(folder), purge_step=step + 1)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        if self._board:
            self._board.close()

    def write(self, step: int, seconds: float, losses: dict[str, float]) -> None:
        """Appends a row: what was measured after `step`, `seconds` after the row before."""
        self._seconds += seconds
        row = {"step": step, "seconds": self._seconds, **losses}
        csv.writer(self._file).writerow(_formatted(row))
        self._file.flush()
        if self._board:
            for name, loss in losses.items():
                self._board.add_scalar(name, loss, step)


def _formatted(row: dict[str, float]) -> list[str]:
    """Nine digits tell float32 apart; empty where nothing was measured."""
    values = (row.get(column, math.nan) for column in COLUMNS)
    return ["" if math.isnan(value) else f"{value:.9g}" for value in values]


def read(path: Path) -> list[dict[str, float]]:
    """Returns the rows of a `metrics.csv`, NaN where nothing was measured; none without a file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{k: float(v or math.nan) for k, v in row.items()} for row in csv.DictReader(file)]


def plot(paths: Sequence[Path], output: Path, title: str) -> None:
    """Saves the curves of runs as a PNG: against steps and against seconds of training.

    Seconds are those of a device and a dtype, which the title names.
    """
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title)
    for axes, column in zip(figure.subplots(1, 2, sharey=True), ("step", "seconds"), strict=True):
        for i, path in enumerate(paths):
            rows = read(path)
            held_out = [row for row in rows if not math.isnan(row["held_out_loss"])]
            for name, points, style in (
                ("train_loss", rows, {"alpha": 0.3, "linewidth": 1}),
                ("held_out_loss", held_out, {"marker": ".", "label": path.parent.name}),
            ):
                x, y = ([point[key] for point in points] for key in (column, name))
                axes.plot(x, y, color=f"C{i}", **style)
        axes.set(xlabel=column, yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(alpha=0.3, which="both")
    figure.axes[0].set_ylabel("nats per byte, held out (faint: training batches)")
    figure.axes[0].legend()
    figure.savefig(output, format="png", dpi=150)


def table(
    rows: Sequence[dict[str, float]],
    seconds_per_step: Sequence[float],
    tokens_per_step: int,
    optimizer_seconds: float,
    peak_bytes: int | None,
) -> str:
    """Returns what came of a run: losses of its last row, times of the steps of this process."""
    last = rows[-1]
    low, median, high = 1e3 * np.quantile(seconds_per_step, (0.25, 0.5, 0.75))
    share = optimizer_seconds * 1e3 / median
    lines = {
        "steps": f"{last['step']:.0f}",
        **{
            f"{split} loss": f"{last[name]:.4f} nats/byte, {last[name] / math.log(2):.4f} bits/byte"
            for split, name in (("training", "train_loss"), ("held-out", "held_out_loss"))
        },
        "step": f"{median:.1f} ms (quartiles {low:.1f} and {high:.1f})",
        "throughput": f"{tokens_per_step * 1e3 / median:,.0f} tokens/s",
        "optimizer": f"{optimizer_seconds * 1e3:.2f} ms, {share:.1%} of a step",
        "peak memory": f"{peak_bytes / 2**30:.1f} GiB" if peak_bytes else "unknown here",
    }
    return "\n".join(f"{name:14}{value}" for name, value in lines.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the runs that the command line names."""
    parser = argparse.ArgumentParser(description="Draws the curves of several runs together.")
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics.csv of each run")
    parser.add_argument("--output", type=Path, default="curves.png", help="a PNG")
    parser.add_argument("--title", default="", help="of the PNG, such as the device and the dtype")
    args = parser.parse_args(arguments)
    if missing := [str(path) for path in args.metrics if not read(path)]:
        parser.error(f"no metrics in {', '.join(missing)}: name the metrics.csv of runs of gpt.py")
    plot(args.metrics, args.output, args.title)


if __name__ == "__main__":
    main()
