"""Interleaved timing of programs: by the wall clock, and by the time that they take on the GPU."""

import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self

import jax
import numpy as np
from jax.experimental.mosaic.gpu import profiler


class Turns(NamedTuple):
    """How programs run in turns.

    Attributes:
        rounds: how many turns each program has, after a warm-up.
        seconds: how long a turn is, approximately; it is 3 to 50 runs.
        pause: seconds before each turn, in which a GPU gets away from its power limit. With a pause
            a turn is 10 runs.
    """

    rounds: int = 7
    seconds: float = 0.02
    pause: float = 0.0


DEFAULT_TURNS = Turns()

# Runs a program as many times in a row as the argument says, and returns the seconds per run.
type Clock = Callable[[int], float]


def on_gpu() -> bool:
    """Returns whether programs run on a GPU, which has a clock of its own."""
    return jax.default_backend() == "gpu"


class Timeable(Protocol):
    """A program that runs for its result, or on a clock."""

    def result(self) -> Any:
        """Runs once and returns the result, in JAX's arrays."""
        ...

    def clocks(self) -> dict[str, Clock]:
        """Returns the program's clocks: always `"wall"`, on a GPU `"device"` too."""
        ...


@dataclasses.dataclass(frozen=True)
class JaxProgram:
    """A compiled function with its arguments.

    Its clocks:

    - `wall` is the wall clock of calls that are enqueued together. Launch overhead shows only where
      it exceeds the work.
    - `device` is the sum of the kernels' own durations, by CUPTI.
    """

    compiled: jax.stages.Compiled
    arguments: tuple[Any, ...]

    @classmethod
    def compile(cls, function: Callable[..., Any], *arguments: Any) -> Self:
        """Compiles `function` for `arguments`."""
        return cls(jax.jit(function).lower(*arguments).compile(), arguments)

    def result(self) -> Any:
        """Runs once and returns the result."""
        return self.compiled(*self.arguments)

    def clocks(self) -> dict[str, Clock]:
        """Returns `wall`, and `device` on a GPU."""
        return {"wall": self._wall} | ({"device": self._device} if on_gpu() else {})

    def _wall(self, calls: int) -> float:
        start, result = time.perf_counter(), None
        for _ in range(calls):
            result = self.result()  # frees the last result, while the next one is computed
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    def launches(self) -> int | None:
        """Returns how many kernels a run launches, None without a GPU."""
        if not on_gpu():
            return None
        measured = profiler.Cupti(finalize=False).measure(self.compiled, aggregate=False)
        _, kernels = measured(*self.arguments)
        assert isinstance(kernels, list)
        return len(kernels)

    def _device(self, calls: int) -> float:
        # CUPTI stays attached to the process after the first use, because detaching takes long.
        cupti = profiler.Cupti(finalize=False)
        _, milliseconds = cupti.measure(self.compiled, iterations=calls)(*self.arguments)
        if milliseconds is None:
            raise RuntimeError(
                "CUPTI recorded no kernel, and the device clock needs its records: detach any other"
                " profiler, such as Nsight Systems, and run the benchmark again"
            )
        return float(np.mean(milliseconds)) * 1e-3


def time_interleaved(
    programs: Mapping[str, Timeable], turns: Turns = DEFAULT_TURNS
) -> dict[str, dict[str, list[float]]]:
    """Times the programs in turns, in another order each time.

    The order changes because what a program takes at a GPU's power limit depends on what ran before
    it.

    Args:
        programs: by name.
        turns: how many, and how long.

    Returns:
        For each program and each of its clocks the quartiles (25%, median, 75%), in µs per run.
    """
    clocks = {name: program.clocks() for name, program in programs.items()}
    calls = {}
    for name, by_clock in clocks.items():
        wall = by_clock["wall"]
        wall(1)
        calls[name] = 10 if turns.pause else int(np.clip(turns.seconds / wall(3), 3, 50))
    samples = {name: {clock: [] for clock in by_clock} for name, by_clock in clocks.items()}
    shuffled = random.Random(0)
    for clock in ("wall", "device"):  # in this order, because CUPTI slows launches down
        for _ in range(turns.rounds):
            for name in shuffled.sample([*clocks], len(clocks)):
                if clock in clocks[name]:
                    time.sleep(turns.pause)
                    samples[name][clock].append(clocks[name][clock](calls[name]) * 1e6)
    return {
        name: {
            clock: np.quantile(values, (0.25, 0.5, 0.75)).round(2).tolist()
            for clock, values in by_clock.items()
        }
        for name, by_clock in samples.items()
    }
