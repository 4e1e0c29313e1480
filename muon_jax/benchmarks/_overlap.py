"""How much of the exchanges between GPUs is hidden behind computation, from a trace of one run."""

import itertools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

type Intervals = list[tuple[float, float]]  # disjoint, in order


def of(program: Any) -> dict[str, float]:
    """Returns microseconds of one run, means over the GPUs; nothing where there is none.

    `"computing"` is the time in which kernels run other than NCCL's, `"exchanging"` that in which
    NCCL's run, waiting for other GPUs included, and `"exposed"` the part of it beside which no
    other kernel runs.
    """
    if jax.default_backend() != "gpu":
        return {}
    jax.block_until_ready(program.result())  # the first run also loads kernels and connects
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program.result())
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        gpus = [kernels(plane) for plane in planes if plane.name.startswith("/device:GPU:")]
    times = [times_of(computing, exchanging) for computing, exchanging in gpus if exchanging]
    return {key: sum(t[key] for t in times) / len(times) for key in times[0]} if times else {}


def kernels(plane: Any) -> tuple[Intervals, Intervals]:
    """Returns when kernels run on a GPU that are not NCCL's, and when NCCL's do, in µs."""
    streams = [line for line in plane.lines if line.name.startswith("Stream")]
    found: tuple[Intervals, Intervals] = ([], [])
    for event in itertools.chain.from_iterable(line.events for line in streams):
        interval = (event.start_ns * 1e-3, (event.start_ns + event.duration_ns) * 1e-3)
        found[event.name.startswith("nccl")].append(interval)
    computing, exchanging = map(union, found)
    return computing, exchanging


def times_of(computing: Intervals, exchanging: Intervals) -> dict[str, float]:
    """Returns the lengths of both and of what is exchanged while nothing is computed."""
    computed, exchanged = length(computing), length(exchanging)
    exposed = length(union([*computing, *exchanging])) - computed
    return {"computing": computed, "exchanging": exchanged, "exposed": exposed}


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Returns disjoint intervals that cover the same."""
    merged: Intervals = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def length(intervals: Intervals) -> float:
    """Returns the sum of the lengths of disjoint intervals."""
    return sum(stop - start for start, stop in intervals)
