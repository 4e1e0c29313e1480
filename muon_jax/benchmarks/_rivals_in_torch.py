"""Newton–Schulz in torch on CUDA: Keller Jordan's, and that of gram_newton_schulz and of dion."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import torch  # pyright: ignore[reportMissingImports] (optional)

from muon_jax._iteration.published import NAMED
from muon_jax.benchmarks._timing import Clock


@dataclasses.dataclass(frozen=True)
class TorchProgram:
    """What makes a function of one tensor, and the tensor.

    Its clocks are `wall`, the wall clock of calls that are enqueued together, and `device`, the
    time between CUDA events around them: it includes the gaps where the GPU waits for launches.
    """

    make: Callable[[], Callable]
    argument: torch.Tensor

    @functools.cached_property
    def function(self) -> Callable:
        """Made when it is first run, for what fails then to be the program's failure."""
        return self.make()

    def result(self) -> jax.Array:
        """Runs once and returns the result, as an array of JAX."""
        result = self.function(self.argument)
        return jnp.from_dlpack(result.clone(memory_format=torch.contiguous_format))

    def clocks(self) -> dict[str, Clock]:
        """Returns `wall` and `device`."""
        return {"wall": self._wall, "device": self._device}

    def _wall(self, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            self.function(self.argument)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    def _device(self, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            self.function(self.argument)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls


def zeropower_via_newtonschulz5(x: torch.Tensor) -> torch.Tensor:
    """Keller Jordan's five steps in bfloat16, on the smaller side."""
    ((a, b, c),) = NAMED["standard"]
    transposed = x.size(-2) > x.size(-1)
    x = x.bfloat16()
    x = x.mT if transposed else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x


def _gram_newton_schulz(name: str) -> Callable:
    """Either class of the package, which compiles with CUDA graphs."""
    import gram_newton_schulz  # pyright: ignore[reportMissingImports] (optional)

    make = getattr(gram_newton_schulz, name)
    return make(ns_coefficients=[*NAMED["standard"]] * 5)


def _dion(name: str) -> Callable:
    from dion import newton_schulz_triton  # pyright: ignore[reportMissingImports] (optional)

    return getattr(newton_schulz_triton, name)


_MAKE = {
    "torch.compile": lambda: torch.compile(
        zeropower_via_newtonschulz5, fullgraph=True, dynamic=False
    ),
    "gram_newton_schulz": lambda: _gram_newton_schulz("GramNewtonSchulz"),
    "gram_newton_schulz, standard": lambda: _gram_newton_schulz("StandardNewtonSchulz"),
    "dion": lambda: _dion("newton_schulz_triton"),
    "dion, aol": lambda: _dion("newton_schulz_triton_fast"),
}


def programs(x: jax.Array, names: Iterable[str]) -> dict[str, TorchProgram]:
    """Returns the rivals of these names, each on a copy of `x`, which it may overwrite."""
    torch.compiler.reset()  # torch stops compiling a function after eight shapes
    return {name: TorchProgram(_MAKE[name], torch.from_dlpack(x).clone()) for name in names}
