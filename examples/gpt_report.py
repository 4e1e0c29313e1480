"""What a training measures: a CSV, TensorBoard, tables, and curves of one run or of several.

    python examples/gpt_report.py runs/adamw/metrics.csv runs/muon/metrics.csv --output curves.png

Runs have the names of their folders. The others are compared with the first. Seconds are those of
training steps alone: without compilation, evaluation and checkpoints.
"""

import argparse
import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

COLUMNS = ("step", "tokens", "seconds", "train_loss", "held_out_loss")


class Metrics:
    """The rows of `metrics.csv`, each written at once.

    Rows after `step`, where a run goes on from a checkpoint, are dropped: they will come again.
    """

    def __init__(self, folder: Path, step: int, tokens_per_step: int, tensorboard: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._tokens_per_step = folder / "metrics.csv", tokens_per_step
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
        tokens = step * self._tokens_per_step
        row = {"step": step, "tokens": tokens, "seconds": self._seconds, **losses}
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


def held_out(rows: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Returns the rows that have a held-out loss."""
    return [row for row in rows if not math.isnan(row["held_out_loss"])]


def plot(paths: Sequence[Path], output: Path, title: str) -> None:
    """Saves the curves of runs as a PNG: against tokens and against seconds of training.

    Steps stand for tokens where a file has none. Seconds are those of a device and a dtype, which
    the title names.
    """
    runs = [(path.parent.name, read(path)) for path in paths]
    tokens = "tokens" if all("tokens" in rows[0] for _, rows in runs) else "step"
    labels = {tokens: tokens, "seconds": "seconds of training, without compilation and evaluation"}
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title)
    for axes, column in zip(figure.subplots(1, 2, sharey=True), labels, strict=True):
        for i, (run, rows) in enumerate(runs):
            for name, points, style in (
                ("train_loss", rows, {"alpha": 0.3, "linewidth": 1}),
                ("held_out_loss", held_out(rows), {"marker": ".", "label": run}),
            ):
                x, y = ([point[key] for point in points] for key in (column, name))
                axes.plot(x, y, color=f"C{i}", **style)
        axes.set(xlabel=labels[column], yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(alpha=0.3, which="both")
    figure.axes[0].set_ylabel("nats per token, held out (faint: training batches)")
    figure.axes[0].legend()
    figure.savefig(output, format="png", dpi=150)


def compare(paths: Sequence[Path]) -> str:
    """Returns a Markdown table: final held-out losses, and seconds and tokens to the first run's.

    Between two evaluations the loss is taken to be linear.
    """
    runs = [(path.parent.name, held_out(read(path))) for path in paths]
    (baseline, rows), *_ = runs
    target = rows[-1]["held_out_loss"]
    lines = [
        f"| run | held-out loss | seconds | million tokens | seconds to {baseline}'s loss"
        f" | million tokens to {baseline}'s loss |",
        "|---|---|---|---|---|---|",
    ]
    for run, rows in runs:
        losses = np.array([row["held_out_loss"] for row in rows])
        costs = [[row["seconds"], row.get("tokens", math.nan) / 1e6] for row in rows]
        costs, reached = np.array(costs).T, losses <= target
        to_target = ["never", "never"]
        if reached.any():
            i = int(reached.argmax())
            ends = [i, max(i - 1, 0)]  # losses rise, as `interp` needs them
            to_target = [f"{np.interp(target, losses[ends], x[ends]):.1f}" for x in costs]
        last = [f"{losses[-1]:.4f}", *(f"{x[-1]:.1f}" for x in costs)]
        lines.append(f"| {' | '.join([run, *last, *to_target])} |")
    return "\n".join(lines)


def table(
    rows: Sequence[dict[str, float]],
    seconds_per_step: Sequence[float],
    tokens_per_step: int,
    optimizer_seconds: float,
    peak_bytes: int | None,
    tokens_per_byte: float,
) -> str:
    """Returns what came of a run: losses of its last row, times of the steps of this process."""
    last = rows[-1]
    low, median, high = 1e3 * np.quantile(seconds_per_step, (0.25, 0.5, 0.75))
    share = optimizer_seconds * 1e3 / median
    bits = last["held_out_loss"] * tokens_per_byte / math.log(2)
    lines = {
        "steps": f"{last['step']:.0f}",
        "training loss": f"{last['train_loss']:.4f} nats/token",
        "held-out loss": f"{last['held_out_loss']:.4f} nats/token, {bits:.4f} bits/byte",
        "step": f"{median:.1f} ms (quartiles {low:.1f} and {high:.1f})",
        "throughput": f"{tokens_per_step * 1e3 / median:,.0f} tokens/s",
        "optimizer": f"{optimizer_seconds * 1e3:.2f} ms, {share:.1%} of a step",
        "peak memory": f"{peak_bytes / 2**30:.1f} GiB" if peak_bytes else "unknown here",
    }
    return "\n".join(f"{name:14}{value}" for name, value in lines.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws and compares the runs that the command line names."""
    parser = argparse.ArgumentParser(description="Draws and compares several runs.")
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics.csv of each run")
    parser.add_argument("--output", type=Path, default="curves.png", help="a PNG")
    parser.add_argument("--title", default="", help="of the PNG, such as the device and the dtype")
    args = parser.parse_args(arguments)
    if missing := [str(path) for path in args.metrics if not held_out(read(path))]:
        parser.error(
            f"no held-out loss in {', '.join(missing)}: name the metrics.csv of runs of gpt.py that"
            " have evaluated"
        )
    plot(args.metrics, args.output, args.title)
    print(compare(args.metrics))


if __name__ == "__main__":
    main()
