"""Times `syrk` and `newton_schulz` beside XLA, and fails where a result is wrong.

python -m muon_jax.benchmarks syrk --json syrk.json
python -m muon_jax.benchmarks newton_schulz --shapes 4096x4096 24x1024x4096
"""

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from muon_jax import _coefficients, newton_schulz
from muon_jax.benchmarks import _timing
from pallas_kernels import select_implementation, syrk, unsupported_reason

# (m, n) or (batch, m, n): layers of transformers and stacks of them, and small squares.
SHAPES = {
    "syrk": (
        "64x64 128x128 256x256 512x512 896x896 1024x1024 2048x2048 3584x3584 4096x4096 8192x8192"
        " 1024x4096 2048x8192 2560x4096 4096x16384 8x2048x2048 48x768x768 24x1024x4096"
        " 200x512x1280"
    ),
    "newton_schulz": (
        "128x128 256x256 512x512 896x896 896x1152 2048x2048 2048x2560 2560x4096 3584x3584 3584x4608"
        " 4096x4096 2048x8192 4096x16384 16x2048x5464 200x512x1280 24x1024x4096 48x768x768"
    ),
}


def newton_schulz_in_jnp(x: jax.Array) -> jax.Array:
    """Keller Jordan's five steps as everybody writes them, in the dtype of `x`."""
    ((a, b, c),) = _coefficients.NAMED["standard"]
    x /= jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def variants(benchmark: str, x: jax.Array):
    """Returns (what is timed, by name; what gives the reference in float32)."""
    implementations = [name for name in ("xla", "triton") if not unsupported_reason(name, x)]
    if benchmark == "syrk":
        timed = {"jnp": lambda x: x @ x.mT, "None": syrk}
        for name in implementations:
            timed[name] = lambda x, name=name: syrk(x, implementation=name)
            if x.shape[-2] == x.shape[-1]:
                timed[f"{name}+C"] = lambda x, name=name: syrk(
                    x, x, beta=0.5, diagonal=2.0, implementation=name
                )
        return timed, lambda x: syrk(x, implementation="xla")
    timed = {"jnp": newton_schulz_in_jnp, "None": newton_schulz}
    for name in implementations:
        timed[name] = lambda x, name=name: newton_schulz(x, implementation=name)
    return timed, lambda x: newton_schulz(x, dtype=None, implementation="xla")


def measure(benchmark: str, shape: tuple[int, ...], dtype: str) -> dict:
    """Times the variants at one shape and checks them. Raises ArithmeticError on a wrong result."""
    x = jax.random.normal(jax.random.key(0), shape, jnp.dtype(dtype))
    timed, reference = variants(benchmark, x)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(reference)(x.astype(jnp.float32))
    checked = [name for name in timed if not name.endswith("+C")]
    errors = {name: _timing.relative_error(jax.jit(timed[name])(x), exact) for name in checked}
    for name, error in errors.items():
        if not error <= 2 * errors["jnp"]:
            raise ArithmeticError(
                f"{benchmark} {shape}: the relative error of {name} is {error:.2e}, more than twice"
                f" that of jnp, {errors['jnp']:.2e}"
            )
    return {
        "shape": shape,
        "chosen": select_implementation(x),
        "errors": errors,
        "microseconds": _timing.time_interleaved(timed, x),
    }


def environment(dtype: str) -> dict:
    """Returns what a measurement needs to be repeated."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "commit": commit or None,
        "dtype": dtype,
        "input": "standard normal",
    }


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m muon_jax.benchmarks", description=__doc__)
    parser.add_argument("benchmark", choices=SHAPES)
    parser.add_argument("--shapes", nargs="+", metavar="[BATCHx]MxN")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    arguments = parser.parse_args()

    report = {"benchmark": arguments.benchmark, **environment(arguments.dtype), "measurements": []}
    print(", ".join(f"{key}: {value}" for key, value in report.items() if key != "measurements"))
    for text in arguments.shapes or SHAPES[arguments.benchmark].split():
        shape = tuple(int(size) for size in text.split("x"))
        measurement = measure(arguments.benchmark, shape, arguments.dtype)
        times = measurement["microseconds"]
        clock = "device" if "device" in times["jnp"] else "wall"
        medians = {name: by_clock[clock][1] for name, by_clock in times.items()}
        cells = ", ".join(f"{name} {median:.1f}" for name, median in medians.items())
        print(f"{text}: {cells} µs {clock}; jnp / None {medians['jnp'] / medians['None']:.2f}")
        report["measurements"].append(measurement)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
