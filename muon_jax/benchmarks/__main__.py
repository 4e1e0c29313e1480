"""Times `syrk` and `newton_schulz` beside plain jnp, and fails where a result is wrong.

    python -m muon_jax.benchmarks syrk --json syrk.json --png syrk.png
    python -m muon_jax.benchmarks newton_schulz --shapes 4096x4096 24x1024x4096

On a GPU it prints the time that the kernels spend on the device; the JSON has the wall clock too.
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
from pallas_kernels import select_implementation, syrk

# (m, n) or (batch, m, n): layers of transformers and stacks of them, and small squares.
SHAPES = {
    "syrk": (
        "64x64 128x128 256x256 512x512 896x896 1024x1024 1536x1536 2048x2048 3072x3072 3584x3584"
        " 4096x4096 8192x8192 1024x4096 2048x8192 2560x4096 4096x16384 8x2048x2048 48x768x768"
        " 24x1024x4096 200x512x1280"
    ),
    "newton_schulz": (
        "128x128 256x256 512x512 896x896 896x1152 1024x1024 2048x2048 2048x2560 2560x4096 3584x3584"
        " 3584x4608 4096x4096 1001x1500 2048x8192 4096x16384 16x2048x5464 200x512x1280"
        " 24x1024x4096 48x768x768"
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


def measure(benchmark: str, shape: tuple[int, ...], dtype: str) -> dict:
    """Times the variants at one shape and checks them. Raises ArithmeticError on a wrong result."""
    x = jax.random.normal(jax.random.key(0), shape, jnp.dtype(dtype))
    if benchmark == "syrk":
        variants = {"jnp": lambda x: x @ x.mT, "None": syrk}
    else:
        variants = {"jnp": newton_schulz_in_jnp, "None": newton_schulz}
    programs = {name: jax.jit(function).lower(x).compile() for name, function in variants.items()}
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(variants["jnp"])(x.astype(jnp.float32))
    errors = {name: _timing.relative_error(run(x), exact) for name, run in programs.items()}
    if not errors["None"] <= 2 * errors["jnp"]:
        raise ArithmeticError(
            f"{benchmark} {shape}: the relative error is {errors['None']:.2e}, more than twice that"
            f" of jnp, {errors['jnp']:.2e}"
        )
    if benchmark == "syrk" and shape[-1] == shape[-2]:
        with_c = {
            "jnp + C": lambda x: 0.5 * x + x @ x.mT,
            "None + C": lambda x: syrk(x, x, beta=0.5, diagonal=2.0),
        }
        programs |= {name: jax.jit(run).lower(x).compile() for name, run in with_c.items()}
    return {
        "shape": shape,
        "chosen": select_implementation(x),
        "errors": errors,
        "microseconds": _timing.time_interleaved(programs, x),
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


def plot(speedups: dict[str, float], title: str, path: Path) -> None:
    """Saves a bar for each shape: how many times faster than plain jnp."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.3 * len(speedups) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(speedups), list(speedups.values()))
    axes.bar_label(bars, fmt="%.2f×", padding=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set(title=title, xlabel="speedup over plain jnp", xlim=(0, 1.15 * max(speedups.values())))
    axes.invert_yaxis()
    figure.savefig(path, format="png", dpi=150)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m muon_jax.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=SHAPES)
    parser.add_argument("--shapes", nargs="+", metavar="[BATCHx]MxN")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument("--png", type=Path, help="also plot the speedups (needs matplotlib)")
    arguments = parser.parse_args()

    report = {"benchmark": arguments.benchmark, **environment(arguments.dtype), "measurements": []}
    print(", ".join(f"{key}: {value}" for key, value in report.items() if key != "measurements"))
    speedups = {}
    for text in arguments.shapes or SHAPES[arguments.benchmark].split():
        measurement = measure(
            arguments.benchmark, tuple(int(size) for size in text.split("x")), arguments.dtype
        )
        times = measurement["microseconds"]
        clock = "device" if "device" in times["jnp"] else "wall"
        medians = {name: by_clock[clock][1] for name, by_clock in times.items()}
        cells = ", ".join(f"{name} {median:.1f}" for name, median in medians.items())
        speedups[text] = medians["jnp"] / medians["None"]
        print(
            f"{text}: {measurement['chosen']}, {cells} µs {clock}, {speedups[text]:.2f}×",
            flush=True,
        )
        report["measurements"].append(measurement)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.png:
        title = f"{arguments.benchmark}, {report['device']}, {arguments.dtype}"
        plot(speedups, title, arguments.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
