"""Newton–Schulz and products in torch on CUDA, by Keller Jordan and by packages."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import torch  # pyright: ignore[reportMissingImports] (optional)

from benchmarks._times.timing import Clock
from muon_jax._iteration.coefficients import NAMED

type TorchFunction = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class TorchProgram:
    """Tensors, and a function that makes the function of them.

    Its clocks:

    - `wall` is the wall clock of calls that are enqueued together.
    - `device` is the time between CUDA events around these calls. It includes the gaps in which the
      GPU waits for launches.
    """

    make: Callable[[], TorchFunction]
    arguments: tuple[torch.Tensor, ...]

    @functools.cached_property
    def function(self) -> TorchFunction:
        """The function, made at its first run: a failure to make it is a failure to run."""
        return self.make()

    def result(self) -> jax.Array:
        """Runs once and returns the result, as an array of JAX."""
        result = self.function(*self.arguments)
        return jnp.from_dlpack(result.clone(memory_format=torch.contiguous_format))

    def clocks(self) -> dict[str, Clock]:
        """Returns `wall` and `device`."""
        return {"wall": self._wall, "device": self._device}

    def _wall(self, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            self.function(*self.arguments)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    def _device(self, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            self.function(*self.arguments)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls


def newton_schulz_in_torch(x: torch.Tensor) -> torch.Tensor:
    """Runs Keller Jordan's five steps on `(..., m, n)` in bfloat16, on the smaller side."""
    ((a, b, c),) = NAMED["standard"]
    transposed = x.size(-2) > x.size(-1)
    x = x.bfloat16()
    x = x.mT if transposed else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x


def _of_gram_newton_schulz(name: str) -> TorchFunction:
    """A class of the package, made a function; it compiles with CUDA graphs."""
    import gram_newton_schulz  # pyright: ignore[reportMissingImports] (optional)

    make = getattr(gram_newton_schulz, name)
    return make(ns_coefficients=[*NAMED["standard"]] * 5)


def _of_dion(name: str) -> TorchFunction:
    from dion import newton_schulz_triton  # pyright: ignore[reportMissingImports] (optional)

    return getattr(newton_schulz_triton, name)


def _compiled(mode: str = "default") -> TorchFunction:
    """The usual code, compiled.

    In the mode `"reduce-overhead"` a call replays a CUDA graph, after it has copied its argument to
    where the graph reads. The clocks include the copy.
    """

    return torch.compile(newton_schulz_in_torch, fullgraph=True, dynamic=False, mode=mode)


def _of_quack() -> TorchFunction:
    """XXᵀ, or XXᵀ + C/2 for a symmetric C, by its kernel that computes one triangle."""
    from quack.gemm_interface import gemm_symmetric  # pyright: ignore[reportMissingImports]

    def product(x: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        return gemm_symmetric(x, x.mT, C=c, beta=0.5)

    return product


_MAKE = {
    "torch.compile": _compiled,
    "torch.compile, CUDA graphs": lambda: _compiled("reduce-overhead"),
    "gram_newton_schulz": lambda: _of_gram_newton_schulz("GramNewtonSchulz"),
    "gram_newton_schulz, standard": lambda: _of_gram_newton_schulz("StandardNewtonSchulz"),
    "dion": lambda: _of_dion("newton_schulz_triton"),
    "dion, aol": lambda: _of_dion("newton_schulz_triton_fast"),
    "quack": _of_quack,
    "quack + C": _of_quack,
}


def torch_programs(arguments: Iterable[jax.Array], names: Iterable[str]) -> dict[str, TorchProgram]:
    """Returns the rivals `names`, each on its own copy of `arguments`, which it may overwrite."""
    torch.compiler.reset()  # torch stops compiling a function after eight shapes
    return {
        name: TorchProgram(_MAKE[name], tuple(torch.from_dlpack(x).clone() for x in arguments))
        for name in names
    }
