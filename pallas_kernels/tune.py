"""Measures the table from which `select_implementation` chooses on this GPU.

    python -m pallas_kernels.tune
    python -m pallas_kernels.tune --shapes 4096x14336 24x768x3072 --json table.json

For each shape of matrices, (m, n) or (batch, m, n), it times the two symmetric products of a
Newton–Schulz step, XXᵀ and A² + C, by each implementation and each config that may be the fastest.
Each result is checked against float64 before it is timed. Times are those of the kernels, by CUPTI.
"""

import argparse
import datetime
import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels import _implementation, _tuning, syrk, unsupported_reason
from pallas_kernels._mosaic_gpu.config import (
    MMA_SYRKX_CONFIGS,
    MOSAIC_SYRKX_CONFIGS,
    MosaicSyrkxConfig,
    Tcgen05SyrkxConfig,
    predict_syrkx_microseconds,
)

type Shape = tuple[int, ...]
type Product = tuple[tuple[int, int, int], bool]  # (batch, m, n), and whether there is an addend

# Squares; gpt2-small, Llama 3 8B and Qwen3 0.6B, 8B and 30B-A3B; what other Muons publish.
SHAPES = (
    "64x64 128x128 256x256 512x512 1024x1024 1536x1536 2048x2048 3072x3072 4096x4096 8192x8192"
    " 1001x1500 768x768 768x2304 768x3072 12x768x768 24x768x3072 1024x4096 4096x14336 1024x2048"
    " 1024x3072 4096x12288 512x2048 2048x4096 128x768x2048 896x896 896x1152 2048x2560 2560x4096"
    " 3584x3584 3584x4608 2048x8192 4096x16384 8x2048x2048 16x2048x5464 200x512x1280 24x1024x4096"
    " 48x768x768"
)
# A config is measured if the model's time for it is within this factor of the best.
_SLACK = 1.12
_ROUNDS, _CALLS = 5, 10


def main(words: Sequence[str] | None = None) -> None:
    """Runs the command line `words`, and rewrites the table after each product.

    Raises:
        SystemExit: there is no GPU, or words do not do.
        ArithmeticError: as `measure_product`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shapes", nargs="+", type=_shape, default=[*map(_shape, SHAPES.split())], metavar="SHAPE"
    )
    parser.add_argument(
        "--json", type=Path, help="the file to write (default: the one that the choice reads)"
    )
    arguments = parser.parse_args(words)
    if jax.default_backend() != "gpu":
        sys.exit(
            "tune times GPU kernels, and JAX runs on"
            f" {jax.default_backend()} here: run it on a machine with an NVIDIA GPU"
        )
    kind = jax.devices()[0].device_kind
    path = arguments.json or _tuning.table_path(kind)
    table: dict[str, Any] = {
        "version": 1,
        "device": kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "dtype": "bfloat16",
        "input": "standard normal",
        "entries": [],
    }
    for shape, addend in products_of_steps(arguments.shapes):
        entry = measure_product(shape, addend)
        times = ", ".join(f"{name} {time:.1f}" for name, time in entry["microseconds"].items())
        print(f"{'×'.join(map(str, shape))}{' + C' * addend}: {times} µs", flush=True)
        table["entries"].append(entry)
        path.write_text(json.dumps(table, indent=1) + "\n")
    print(f"wrote {path}")


def _shape(text: str) -> Shape:
    """The shape that is written as `"24x1024x4096"`, with the smaller side of a matrix first."""
    sizes = tuple(int(size) for size in text.split("x") if size.isdecimal())
    if len(sizes) not in (2, 3) or "x".join(map(str, sizes)) != text or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be MxN or BATCHxMxN")
    return sizes


def products_of_steps(shapes: Iterable[Shape]) -> list[Product]:
    """Returns the products of a Newton–Schulz step on `shapes`: XXᵀ, and A² + C for its result.

    Sizes are rounded up to multiples of 64, as `newton_schulz` pads them.
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
    a = jax.random.normal(jax.random.key(0), shape, "bfloat16")
    lower = jnp.tril(jax.random.normal(jax.random.key(1), (batch, m, m), "bfloat16"))
    arguments = (a, lower + jnp.tril(lower, -1).mT) if addend else (a,)
    functions = _candidates(a, addend)
    with ThreadPoolExecutor() as pool:
        lowered = pool.map(
            lambda function: jax.jit(function).lower(*arguments).compile(), functions.values()
        )
        programs = dict(zip(functions, lowered, strict=True))
    errors = {}
    with jax.enable_x64(True):
        exact = jax.jit(_plus_half_addend)(*(x.astype(jnp.float64) for x in arguments))
        for name, program in programs.items():
            out = program(*arguments)
            difference = jnp.linalg.norm(out.astype(jnp.float64) - exact)
            errors[name] = float(difference / jnp.linalg.norm(exact))
            if not errors[name] <= 2 * errors["xla"]:
                raise ArithmeticError(
                    f"{name} at {shape}: the relative error is {errors[name]:.2e}, more than twice"
                    f" that of xla, {errors['xla']:.2e}"
                )
            if name != "xla, not symmetrized" and not bool((out == out.mT).all()):
                raise ArithmeticError(f"{name} at {shape}: the result is not symmetric")
    samples = [
        {name: _microseconds(program, arguments) for name, program in programs.items()}
        for _ in range(_ROUNDS)
    ]
    medians = {name: float(np.median([each[name] for each in samples])) for name in programs}
    fastest_first = sorted(medians.items(), key=lambda item: item[1])
    microseconds = {name: round(time, 2) for name, time in fastest_first}
    return {"shape": shape, "addend": addend, "microseconds": microseconds}


def _microseconds(program: jax.stages.Compiled, arguments: tuple[jax.Array, ...]) -> float:
    """The time of a run's kernels."""
    # CUPTI stays attached to the process after the first use, because detaching takes long.
    measured = profiler.Cupti(finalize=False).measure(program, iterations=_CALLS)
    _, milliseconds = measured(*arguments)
    if milliseconds is None:
        raise RuntimeError(
            "CUPTI recorded no kernel, and the times are those of its records: detach any other"
            " profiler, such as Nsight Systems, and run this again"
        )
    return 1e3 * float(np.mean(milliseconds))


def _candidates(a: jax.Array, addend: bool) -> dict[str, Callable[..., jax.Array]]:
    """The functions that can compute the product here, by their name in the table."""
    xla = functools.partial(_plus_half_addend, implementation="xla")
    candidates = {
        "xla": xla,
        "xla, not symmetrized": functools.partial(xla, symmetrize_output=False),
    }
    if unsupported_reason("triton", a) is None:
        candidates["triton"] = functools.partial(_plus_half_addend, implementation="triton")
    if unsupported_reason("mosaic_gpu", a):
        return candidates
    predict = functools.partial(predict_syrkx_microseconds, a.shape, addend=addend)
    slowest = _SLACK * min(map(predict, MOSAIC_SYRKX_CONFIGS))
    name = _implementation.kernel_of("mosaic_gpu")
    configs = {
        "mosaic_gpu": [x for x in MOSAIC_SYRKX_CONFIGS if predict(x) <= slowest],
        "mosaic_gpu_mma": MMA_SYRKX_CONFIGS,
        "mosaic_gpu_tcgen05": [Tcgen05SyrkxConfig()],
    }[name]
    kernel = _implementation.module_of(name).syrkx
    return candidates | {
        config.name: functools.partial(_with_config, kernel, config) for config in configs
    }


def _plus_half_addend(a: jax.Array, c: jax.Array | None = None, **options: Any) -> jax.Array:
    """AAᵀ + C/2, or AAᵀ."""
    return syrk(a, c, beta=0 if c is None else 0.5, **options)


def _with_config(
    syrkx: Callable[..., Any], config: MosaicSyrkxConfig, a: jax.Array, *cs: jax.Array
) -> jax.Array:
    """The same by a Mosaic GPU kernel with this config."""
    coefficients = tuple(map(jnp.float32, (1, 0, *[0.5] * len(cs))))
    (out,) = syrkx(a, None, cs, coefficients, symmetrize_output=True, residual=False, config=config)
    return out


if __name__ == "__main__":
    main()
