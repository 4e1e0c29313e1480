"""Times every implementation and config of the symmetric product, for the dispatch's table."""

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax.benchmarks._times.correctness import in_float64, reason_if_wrong, relative_error
from muon_jax.benchmarks._times.inputs import standard_normal, symmetric
from muon_jax.benchmarks._times.timing import JaxProgram
from pallas_kernels import syrk, unsupported_reason
from pallas_kernels._mosaic_gpu.config import (
    MOSAIC_SYRKX_CONFIGS,
    MosaicSyrkxConfig,
    predict_syrkx_microseconds,
)
from pallas_kernels._mosaic_gpu.syrkx import syrkx

# A config is measured if the model's time for it is within this factor of the best.
_SLACK = 1.12
_ROUNDS, _CALLS = 5, 10


def products_of_steps(
    shapes: Iterable[tuple[int, ...]],
) -> list[tuple[tuple[int, int, int], bool]]:
    """Returns the products of a Newton–Schulz step on `shapes`: XXᵀ, and A² + C for its result.

    Sizes are rounded up to multiples of 64, as `newton_schulz` pads them.

    Returns:
        Pairs of (batch, m, n), and whether the product has an addend.
    """
    products = []
    for shape in shapes:
        batch, *sizes = shape if len(shape) == 3 else (1, *shape)
        m, n = sorted(size + -size % 64 for size in sizes)
        products += [((batch, m, n), False), ((batch, m, m), True)]
    return [*dict.fromkeys(products)]


def measure_product(shape: tuple[int, int, int], addend: bool) -> dict[str, Any]:
    """Times the candidates for one product, in bfloat16 on standard normal matrices.

    Raises:
        ArithmeticError: a result has more than twice the error of XLA's, or is not symmetric.
    """
    batch, m, _ = shape
    a = standard_normal(0, shape, "bfloat16")
    c = symmetric(standard_normal(1, (batch, m, m), "bfloat16"))
    arguments = (a, c) if addend else (a,)
    functions = _candidates(a, addend)
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(
            lambda function: JaxProgram.compile(function, *arguments), functions.values()
        )
        programs = dict(zip(functions, compiled, strict=True))
    exact = in_float64(_plus_half_addend, arguments)
    limit = relative_error(programs["xla"].result(), exact)
    for name, program in programs.items():
        out = program.result()
        wrong = reason_if_wrong(relative_error(out, exact), "xla", limit)
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
    """The functions that can compute the product here, by their name in the table."""
    xla = functools.partial(_plus_half_addend, implementation="xla")
    candidates = {
        "xla": xla,
        "xla, not symmetrized": functools.partial(xla, symmetrize_output=False),
    }
    if unsupported_reason("triton", a) is None:
        candidates["triton"] = functools.partial(_plus_half_addend, implementation="triton")
    if unsupported_reason("mosaic_gpu", a) is None:
        configs = MOSAIC_SYRKX_CONFIGS
        times = [predict_syrkx_microseconds(a.shape, config, addend=addend) for config in configs]
        for time, config in zip(times, configs, strict=True):
            if time <= _SLACK * min(times):
                candidates[config.name] = functools.partial(_with_config, config)
    return candidates


def _plus_half_addend(a: jax.Array, c: jax.Array | None = None, **options: Any) -> jax.Array:
    """AAᵀ + C/2, or AAᵀ."""
    return syrk(a, c, beta=0 if c is None else 0.5, **options)


def _with_config(config: MosaicSyrkxConfig, a: jax.Array, c: jax.Array | None = None) -> jax.Array:
    """The same by the Mosaic GPU kernel with this config."""
    one, zero, beta = jnp.float32(1), jnp.float32(0), jnp.float32(0.5)
    cs, coefficients = ((), (one, zero)) if c is None else ((c,), (one, zero, beta))
    (out,) = syrkx(a, None, cs, coefficients, symmetrize_output=True, residual=False, config=config)
    return out
