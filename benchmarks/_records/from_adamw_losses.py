"""Prints the held-out losses of the command `from_adamw`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks._records.palette import WIDTH
from benchmarks._records.reading import Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FARTHEST = 70  # per cent that the figure shows; losses that are farther off stand at its end

# What stands below the heading of a report.
FROM_ADAMW_UNIT = """Held-out losses after the last step, in the unit that the task says. AdamW
tries five learning rates and goes on while its best one is the largest or smallest of them; `rate`
is the best one. All decay by 0.01. With `routes = by_use(loss, params, batch)` the other lines are:

- Muon: `muon(rate, consistent_rms=c, muon_weight_dimension_numbers=routes)` for c = 0.2, 0.6 and 2
- Muon, by_use: `muon(k * rate, adam_learning_rate=rate, adam_nesterov=False, consistent_rms=0.2,
  muon_weight_dimension_numbers=routes)` for k = ⅓, 1 and 3
- the following lines: the same, but for what their names say
- Muon at 0.02, by_use: `muon(0.02, adam_learning_rate=3e-4, adam_nesterov=False,
  muon_weight_dimension_numbers=routes)`

The last column compares with AdamW at `rate`, seed by seed: the mean difference, and in how many
seeds the loss is lower. The best rates are chosen by the losses that are shown, AdamW's too."""


def from_adamw_row(measurement: Measurement) -> dict[str, str]:
    """Returns the cells by column of one task, optimizer and pair of learning rates."""
    losses = measurement["held_out_losses"]
    return {
        "task": f"{measurement['task']}, {measurement['steps']} steps, {measurement['unit']}",
        "optimizer": measurement["optimizer"],
        "learning rate": f"{measurement['learning_rate']:.3g}",
        "of the rest": f"{measurement['adam_learning_rate']:.3g}",
        "consistent_rms": f"{measurement['consistent_rms'] or ''}",
        "loss": f"{np.mean(losses):.4g}",
        "by seed": " / ".join(f"{loss:.4g}" for loss in losses),
    }


def from_adamw_rows(measurements: Sequence[Measurement]) -> list[dict[str, str]]:
    """Returns the rows of all measurements, with differences from AdamW at its best rate."""
    best, rows = _best_of_adamw(measurements), []
    for m in measurements:
        differences = np.array(m["held_out_losses"]) - best[m["task"]]
        lower = f"{differences.mean():+.3f}, {np.sum(differences < 0)} of {len(differences)}"
        shown = lower if differences.any() else "the best rate"
        rows.append(from_adamw_row(m) | {"less AdamW's": shown})
    return rows


def changes_from_adamw(measurements: Sequence[Measurement]) -> dict[str, dict[float, float]]:
    """Returns by task and `consistent_rms` how many per cent Muon's loss is above AdamW's best."""
    best = {task: np.mean(losses) for task, losses in _best_of_adamw(measurements).items()}
    changes: dict[str, dict[float, float]] = {task: {} for task in best}
    for m in measurements:
        if m["optimizer"] == "Muon":
            loss, of_adamw = np.mean(m["held_out_losses"]), best[m["task"]]
            change = 100 * (loss - of_adamw) / abs(of_adamw)
            changes[m["task"]][m["consistent_rms"]] = float(change)
    return changes


def _best_of_adamw(measurements: Sequence[Measurement]) -> dict[str, np.ndarray]:
    """Returns by task the losses of AdamW at its best rate, by seed."""
    best = {}
    for m in measurements:
        if m["optimizer"] == "AdamW":
            losses = np.array(m["held_out_losses"])
            best[m["task"]] = min(best.get(m["task"], losses), losses, key=np.mean)
    return best


def from_adamw_figure(measurements: Sequence[Measurement]) -> "Figure":
    """Returns a matplotlib figure of the changes, the tasks that gain most on top."""
    from matplotlib.figure import Figure

    changes = changes_from_adamw(measurements)
    tasks = sorted(changes, key=lambda task: changes[task][0.6], reverse=True)
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="0.4", linewidth=1)
    for size, color, marker in (
        (2.0, "#c78a00", "^"),
        (0.2, "#0072b2", "s"),
        (0.6, "#d55e00", "o"),
    ):
        shown = [np.clip(changes[task][size], -_FARTHEST, _FARTHEST) for task in tasks]
        axes.plot(shown, range(len(tasks)), marker, color=color, markersize=9, label=f"{size:g}")
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set(xlim=(-_FARTHEST - 4, _FARTHEST + 4), xticks=range(-60, 61, 20))
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.set_xlabel("held-out loss compared with AdamW at its best rate, %")
    axes.set_title("Muon at AdamW's rate; further left is better")
    figure.legend(title="consistent_rms", loc="outside lower center", ncols=3, frameon=False)
    return figure
