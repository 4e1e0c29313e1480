"""Interleaved timing of programs: by the wall clock, and by the time that they take on the GPU."""

import dataclasses
import functools
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
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


@dataclasses.dataclass
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
        _, kernels = profiler.Cupti(finalize=False).measure(_Wrapped(self), aggregate=False)()
        assert isinstance(kernels, list)
        return len(kernels)

    def _device(self, calls: int) -> float:
        # CUPTI stays attached to the process after the first use, because detaching takes long.
        cupti = profiler.Cupti(finalize=False)
        _, milliseconds = cupti.measure(_Wrapped(self), iterations=calls)()
        if milliseconds is None:
            raise RuntimeError(
                "CUPTI recorded no kernel, and the device clock needs its records: detach any other"
                " profiler, such as Nsight Systems, and run the benchmark again"
            )
        return float(np.mean(milliseconds)) * 1e-3


@dataclasses.dataclass
class StepProgram(JaxProgram):
    """What a train step does once it has gradients; each run goes on where the last one ended.

    The arguments are parameters and state, which are donated, and gradients.
    """

    def result(self) -> Any:
        """Runs once and returns the new parameters and state, valid until the next run."""
        *_, gradients = self.arguments
        carried = self.compiled(*self.arguments)
        self.arguments = (*carried, gradients)
        return carried


@dataclasses.dataclass(frozen=True)
class _Wrapped:
    """Runs a program to its end. It looks like `jax.stages.Wrapped`, or CUPTI's wrapper jits it."""

    program: JaxProgram

    def __call__(self) -> None:
        jax.block_until_ready(self.program.result())

    def trace(self) -> NoReturn:
        raise NotImplementedError

    lower = trace


@functools.cache
def rates() -> tuple[float, float]:
    """Returns the FLOP/s of an 8192³ product `x @ y` in bfloat16, and the bytes/s of a copy.

    Both by the device clock, a program alone.
    """
    x = jnp.ones((8192, 8192), jnp.bfloat16)
    words = jnp.zeros(2**28, jnp.float32)
    flops, moved = 2 * 8192**3, 2 * words.nbytes
    programs = {
        "product": (flops, JaxProgram.compile(jnp.matmul, x, x)),
        "copy": (moved, JaxProgram.compile(lambda x: x + 1, words)),
    }
    times = time_interleaved({name: program for name, (_, program) in programs.items()})
    per_second = [work / times[name]["device"][1] * 1e6 for name, (work, _) in programs.items()]
    return per_second[0], per_second[1]


def _agreed(calls: float) -> int:
    """The number of calls, of which process 0 decides."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(calls)))


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
        calls[name] = 10 if turns.pause else _agreed(np.clip(turns.seconds / wall(3), 3, 50))
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
