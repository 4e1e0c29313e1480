"""Prints the held-out losses of the command `from_adamw`."""

from collections.abc import Sequence

import numpy as np

from benchmarks._records.reading import Measurement

# What stands below the heading of a report.
FROM_ADAMW_UNIT = """Held-out losses after the last step, in nats (a token of the GPT is a byte).
AdamW tries three learning rates and goes on while its best one is the largest or smallest of them;
`rate` is the best one. The other lines are, for k = ⅓, 1 and 3 and
`routes = by_use(loss, params, batch)`:

- Muon, by_use: `muon(k * rate, adam_learning_rate=rate, adam_nesterov=False, consistent_rms=0.2,
  muon_weight_dimension_numbers=routes)`
- Muon, no routing: the same without `muon_weight_dimension_numbers`
- Muon at 0.02, by_use: `muon(0.02, adam_learning_rate=3e-4, adam_nesterov=False,
  muon_weight_dimension_numbers=routes)`

The last column compares with AdamW at `rate`, seed by seed: the mean difference, and in how many
seeds the loss is lower. The best rates are chosen by the losses that are shown, AdamW's too."""


def from_adamw_row(measurement: Measurement) -> dict[str, str]:
    """Returns the cells by column of one task, optimizer and pair of learning rates."""
    losses = measurement["held_out_losses"]
    return {
        "task": measurement["task"],
        "optimizer": measurement["optimizer"],
        "learning rate": f"{measurement['learning_rate']:.3g}",
        "of the rest": f"{measurement['adam_learning_rate']:.3g}",
        "loss": f"{np.mean(losses):.3f}",
        "by seed": " / ".join(f"{loss:.3f}" for loss in losses),
    }


def from_adamw_rows(measurements: Sequence[Measurement]) -> list[dict[str, str]]:
    """Returns the rows of all measurements, with differences from AdamW at its best rate."""
    best = {}
    for m in measurements:
        if m["optimizer"] == "AdamW":
            losses = np.array(m["held_out_losses"])
            best[m["task"]] = min(best.get(m["task"], losses), losses, key=np.mean)
    rows = []
    for m in measurements:
        differences = np.array(m["held_out_losses"]) - best[m["task"]]
        lower = f"{differences.mean():+.3f}, {np.sum(differences < 0)} of {len(differences)}"
        shown = lower if differences.any() else "the best rate"
        rows.append(from_adamw_row(m) | {"less AdamW's": shown})
    return rows
