"""Interleaved timing of variants: wall clock, and the time their kernels spend on the GPU."""

import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

ROUNDS = 7


def time_interleaved(
    programs: Mapping[str, Callable[[jax.Array], jax.Array]], x: jax.Array
) -> dict[str, dict[str, list[float]]]:
    """Times each compiled program on `x`, in turns, `ROUNDS` times after a warm-up.

    Returns:
        For each variant the quartiles (25%, median, 75%), in µs per application, of

        - `wall`: the wall clock of consecutive calls that are enqueued together, so that launch
          overhead shows only where it exceeds the work;
        - `device`: the sum over the kernels' own durations, by CUPTI; on GPUs only.
    """
    calls = {}
    for name, program in programs.items():
        _wall(program, x, calls=1)
        calls[name] = int(np.clip(0.02 / _wall(program, x, calls=3), 3, 50))
    clocks = {"wall": _wall}
    if jax.default_backend() == "gpu":
        clocks["device"] = _device
    samples = {name: {clock: [] for clock in clocks} for name in programs}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            for clock, measure in clocks.items():
                samples[name][clock].append(measure(program, x, calls[name]) * 1e6)
    return {
        name: {
            clock: np.quantile(values, (0.25, 0.5, 0.75)).round(2).tolist()
            for clock, values in by_clock.items()
        }
        for name, by_clock in samples.items()
    }


def _wall(program, x: jax.Array, calls: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready([program(x) for _ in range(calls)])
    return (time.perf_counter() - start) / calls


def _device(program, x: jax.Array, calls: int) -> float:
    _, milliseconds = profiler.measure(program, iterations=calls)(x)
    return float(np.mean(milliseconds)) * 1e-3


def relative_error(result: jax.Array, reference: jax.Array) -> float:
    """‖result - reference‖ / ‖reference‖ (Frobenius), NaN where either has one."""
    result, reference = result.astype(jnp.float32), reference.astype(jnp.float32)
    return float(jnp.linalg.norm(result - reference) / jnp.linalg.norm(reference))
