"""Measured times of the symmetric product, one table a device: `tuned/*.json`.

`python -m pallas_kernels.tune` writes the table of the GPU that it runs on.
"""

import functools
import json
from pathlib import Path

from pallas_kernels import device

TABLES = Path(__file__).parent / "tuned"


def table_path(device_kind: str) -> Path:
    """Returns where the table of a device is, or would be."""
    return TABLES / f"{device_kind.lower().replace(' ', '_')}.json"


def is_measured() -> bool:
    """Returns whether this device has a table."""
    return bool(_table(device.current().kind))


def lookup(shape: tuple[int, ...], *, addend: bool) -> dict[str, float] | None:
    """Returns the µs measured on this device for 16-bit stacks `(batch, m, n)`, or None.

    Each name is an implementation's, followed by the config or the option that was measured.
    """
    return _table(device.current().kind).get((*shape, addend))


@functools.cache
def _table(device_kind: str) -> dict[tuple[int | bool, ...], dict[str, float]]:
    path = table_path(device_kind)
    if not path.exists():
        return {}
    entries = json.loads(path.read_text())["entries"]
    return {(*entry["shape"], entry["addend"]): entry["microseconds"] for entry in entries}
