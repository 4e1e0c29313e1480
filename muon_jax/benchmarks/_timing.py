"""Interleaved timing of variants, each repeated inside one compiled program."""

import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np


def time_interleaved(
    variants: Mapping[str, Callable[[jax.Array], jax.Array]],
    x: jax.Array,
    *,
    rounds: int = 15,
    seconds_per_call: float = 0.01,
) -> dict[str, dict[str, float]]:
    """Times each variant on `x`, in turns, `rounds` times.

    Returns:
        For each variant, in µs per application, the `median`, and the quartiles `q1` and `q3`.
    """
    programs = {}
    for name, function in variants.items():
        once = repeated(function, 1)
        repeats = int(np.clip(seconds_per_call / min(_seconds(once, x) for _ in range(4)), 2, 50))
        programs[name] = (repeated(function, repeats), repeats)
        _seconds(programs[name][0], x)
    samples = {name: [] for name in programs}
    for _ in range(rounds):
        for name, (program, repeats) in programs.items():
            samples[name].append(_seconds(program, x) / repeats * 1e6)
    return {
        name: dict(zip(("q1", "median", "q3"), np.quantile(values, (0.25, 0.5, 0.75)), strict=True))
        for name, values in samples.items()
    }


def repeated(function: Callable[[jax.Array], jax.Array], repeats: int):
    """Compiles `repeats` applications of `function`, each of which waits for the one before.

    One element of the argument is moved by a multiple of one element of the result too small to
    count: a dependency that costs one tiny kernel and that no compiler can remove.
    """

    @jax.jit
    def program(x):
        first = (0,) * x.ndim
        for _ in range(repeats):
            result = function(x)
            x = x.at[first].add((1e-30 * result[(0,) * result.ndim]).astype(x.dtype))
        return x[first]

    return program


def _seconds(program, x) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(x))
    return time.perf_counter() - start


def relative_error(result: jax.Array, reference: jax.Array) -> float:
    """‖result - reference‖ / ‖reference‖ (Frobenius), NaN where either has one."""
    result, reference = result.astype(jnp.float32), reference.astype(jnp.float32)
    return float(jnp.linalg.norm(result - reference) / jnp.linalg.norm(reference))
