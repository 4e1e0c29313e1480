"""The measured times of the symmetric product, by device: `tuned/*.json`.

`python -m muon_jax.benchmarks tune` writes such a table for the GPU that it runs on.
"""

import functools
import json
from pathlib import Path

from pallas_kernels import _device

TABLES = Path(__file__).parent / "tuned"


def table_path(device_kind: str) -> Path:
    """Returns where the table of a device is, or would be."""
    return TABLES / f"{device_kind.lower().replace(' ', '_')}.json"


def lookup(shape: tuple[int, ...], *, addend: bool) -> dict[str, float] | None:
    """Returns the times in µs for 16-bit stacks `(batch, m, n)` on this device, by name.

    Names are those of the implementations, with the config where there are several. None where the
    shape or the device was not measured.
    """
    return _table(_device.kind()).get((*shape, addend))


@functools.cache
def _table(device_kind: str) -> dict[tuple, dict[str, float]]:
    path = table_path(device_kind)
    if not path.exists():
        return {}
    entries = json.loads(path.read_text())["entries"]
    return {(*entry["shape"], entry["addend"]): entry["microseconds"] for entry in entries}
