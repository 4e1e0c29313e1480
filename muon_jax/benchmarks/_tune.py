"""Times every implementation and config of the symmetric product, for the dispatch's table."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax.benchmarks import _measure, _timing
from muon_jax.benchmarks._timing import JaxProgram
from pallas_kernels import syrk, unsupported_reason
from pallas_kernels._mosaic_gpu.config import CONFIGS, predict
from pallas_kernels._mosaic_gpu.syrkx import syrkx

# Configs are measured that the model expects within this factor of the best.
_SLACK = 1.12
_ROUNDS, _CALLS = 5, 10


def cases(shapes: list[tuple[int, ...]]) -> list[tuple[tuple[int, int, int], bool]]:
    """Returns the products of a Newton–Schulz step: (batch, m, n), and whether there is an addend.

    Those are XXᵀ, and A² + C for its result. Sizes are rounded up to multiples of 64, as
    `newton_schulz` pads them.
    """
    products = []
    for shape in shapes:
        batch, *sizes = shape if len(shape) == 3 else (1, *shape)
        m, n = sorted(size + -size % 64 for size in sizes)
        products += [((batch, m, n), False), ((batch, m, m), True)]
    return [*dict.fromkeys(products)]


def measure(shape: tuple[int, int, int], addend: bool) -> dict[str, Any]:
    """Times the candidates for one product, in bfloat16 on standard normal matrices.

    Raises:
        ArithmeticError: a result has more than twice the error of XLA's, or is not symmetric.
    """
    batch, m, _ = shape
    a = _measure.standard_normal(0, shape, "bfloat16")
    c = _measure.symmetric(_measure.standard_normal(1, (batch, m, m), "bfloat16"))
    arguments = (a, c) if addend else (a,)
    functions = _candidates(a, addend)
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(
            lambda function: JaxProgram.compile(function, *arguments), functions.values()
        )
        programs = dict(zip(functions, compiled, strict=True))
    exact = _measure.in_float64(_product, arguments)
    limit = _timing.relative_error(programs["xla"].result(), exact)
    for name, program in programs.items():
        out = program.result()
        wrong = _measure.reason_if_wrong(_timing.relative_error(out, exact), "xla", limit)
        if name != "xla, not symmetrized" and not bool((out == out.mT).all()):
            wrong = wrong or "the result is not symmetric"
        if wrong:
            raise ArithmeticError(f"{name} at {shape}: {wrong}")
    clocks = {name: [*program.clocks().values()][-1] for name, program in programs.items()}
    samples = [{name: clock(_CALLS) for name, clock in clocks.items()} for _ in range(_ROUNDS)]
    medians = {name: float(np.median([sample[name] for sample in samples])) for name in clocks}
    fastest_first = sorted(medians.items(), key=lambda item: item[1])
    microseconds = {name: round(1e6 * seconds, 2) for name, seconds in fastest_first}
    return {"shape": shape, "addend": addend, "microseconds": microseconds}


def _candidates(a: jax.Array, addend: bool) -> dict[str, Callable[..., jax.Array]]:
    """Returns what can compute the product here, by its name in the table."""
    xla = functools.partial(_product, implementation="xla")
    candidates = {
        "xla": xla,
        "xla, not symmetrized": functools.partial(xla, symmetrize_output=False),
    }
    if unsupported_reason("triton", a) is None:
        candidates["triton"] = functools.partial(_product, implementation="triton")
    if unsupported_reason("mosaic_gpu", a) is None:
        configs = CONFIGS
        times = [predict(a.shape, config, addend=addend) for config in configs]
        for time, config in zip(times, configs, strict=True):
            if time <= _SLACK * min(times):
                candidates[config.name] = functools.partial(_with_config, config)
    return candidates


def _product(a, c=None, **kwargs):
    return syrk(a, c, beta=0 if c is None else 0.5, **kwargs)


def _with_config(config, a, c=None):
    one, zero, beta = jnp.float32(1), jnp.float32(0), jnp.float32(0.5)
    cs, coefficients = ((), (one, zero)) if c is None else ((c,), (one, zero, beta))
    (out,) = syrkx(a, None, cs, coefficients, symmetrize_output=True, residual=False, config=config)
    return out
