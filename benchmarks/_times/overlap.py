"""How much of the exchanges between GPUs is hidden behind computation, from a trace of one run."""

import itertools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from benchmarks._times.timing import Timeable, on_gpu

type Intervals = list[tuple[float, float]]  # disjoint, in order


def measure_overlap(program: Timeable) -> dict[str, float]:
    """Returns microseconds of one run, means over the GPUs; an empty dict without a GPU.

    Returns:
        `"computing"`: the time in which kernels other than NCCL's run;
        `"exchanging"`: the time in which NCCL's kernels run, or wait for other GPUs;
        `"exposed"`: the part of `"exchanging"` in which no other kernel runs.
    """
    if not on_gpu():
        return {}
    jax.block_until_ready(program.result())  # the first run also loads kernels and connects
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program.result())
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        gpus = [
            kernel_intervals(plane) for plane in planes if plane.name.startswith("/device:GPU:")
        ]
    times = [overlap_times(computing, exchanging) for computing, exchanging in gpus if exchanging]
    return {key: sum(t[key] for t in times) / len(times) for key in times[0]} if times else {}


def kernel_intervals(plane: Any) -> tuple[Intervals, Intervals]:
    """Returns when kernels other than NCCL's run on a GPU, and when NCCL's run, in µs."""
    streams = [line for line in plane.lines if line.name.startswith("Stream")]
    found: tuple[Intervals, Intervals] = ([], [])
    for event in itertools.chain.from_iterable(line.events for line in streams):
        interval = (event.start_ns * 1e-3, (event.start_ns + event.duration_ns) * 1e-3)
        found[event.name.startswith("nccl")].append(interval)
    computing, exchanging = map(merge_intervals, found)
    return computing, exchanging


def overlap_times(computing: Intervals, exchanging: Intervals) -> dict[str, float]:
    """Returns the lengths of both, and of the exchanges during which nothing is computed."""
    computed, exchanged = total_length(computing), total_length(exchanging)
    exposed = total_length(merge_intervals([*computing, *exchanging])) - computed
    return {"computing": computed, "exchanging": exchanged, "exposed": exposed}


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Returns disjoint intervals that cover the same times."""
    merged: Intervals = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def total_length(intervals: Intervals) -> float:
    """Returns the sum of the lengths of disjoint intervals."""
    return sum(stop - start for start, stop in intervals)
