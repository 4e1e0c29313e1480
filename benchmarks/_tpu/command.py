"""The command `tpu`: programs that are compiled for TPUs, and never run."""

import argparse
import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import optax.contrib
from jax.sharding import AxisType

from benchmarks._command_line.arguments import add_json, quick_facts
from benchmarks._command_line.progress import measure_each
from benchmarks._records.recording import environment, record
from benchmarks._records.tables import heading
from benchmarks._times.rivals import newton_schulz_in_optax
from benchmarks._times.shapes import shapes
from benchmarks._tpu.described import (
    compiled_for,
    compiled_update,
    described_mesh,
    described_tree,
    measured,
)
from benchmarks._tpu.layouts import layouts_on_pod
from muon_jax import MuonDimensionNumbers, muon, newton_schulz

_TOPOLOGIES = [
    f"{generation}:{size}"
    for generation, sizes in {
        "v5e": ("2x2", "4x4", "8x8"),
        "v5p": ("2x2x1", "2x2x4", "4x4x4"),
        "v6e": ("2x2", "4x4", "8x8"),
    }.items()
    for size in sizes
]
QUICK_TPU = {"topologies": ["v5e:2x2"], "shapes": [shapes("256x512")], "width": 128}
_ITERATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "optax": newton_schulz_in_optax,
    "standard": newton_schulz,
    "standard, gram form": functools.partial(newton_schulz, method="gram"),
    "fast": functools.partial(newton_schulz, ns_coeffs="fast"),
    "balanced": functools.partial(newton_schulz, ns_coeffs="balanced"),
    "accurate": functools.partial(newton_schulz, ns_coeffs="accurate"),
}
# Who makes the optimizer, whether shardings are stated, and the kind of the mesh axes.
_UPDATES = {
    "optax": (optax.contrib.muon, False, AxisType.Auto),
    "shardings=": (muon, True, AxisType.Auto),
    "explicit axes": (muon, False, AxisType.Explicit),
    "nobody knows": (muon, False, AxisType.Auto),
}


class Program(NamedTuple):
    """A program: where and of what, the variant, and what compiles it."""

    program: str
    variant: str
    compile_program: Callable[[], jax.stages.Compiled]


def add_tpu_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `tpu`."""
    add_json(command, "also write what was compiled to this file")
    command.add_argument("--topologies", nargs="+", default=_TOPOLOGIES, help="such as v5e:4x4")
    command.add_argument(
        "--shapes",
        nargs="+",
        type=shapes,
        default=[shapes("4x1024x1024"), shapes("4x1024x4096")],
        help="of the iteration: MxN or BATCHxMxN",
    )
    command.add_argument("--width", type=int, default=512, help="of the models that are updated")


def run_tpu(arguments: argparse.Namespace) -> None:
    """Compiles iterations for one chip and whole updates for pods, and says what they are.

    Raises:
        SystemExit: libtpu is not installed.
    """
    if not importlib.util.find_spec("libtpu"):
        sys.exit("tpu needs the compiler for TPUs: pip install --group tpu, in a clone")
    report: dict[str, Any] = {"benchmark": "tpu", **quick_facts(arguments), **environment()}
    report |= {"device": "TPUs described, none present", "dtype": "float32"}
    report |= {"libtpu": importlib.metadata.version("libtpu"), "measurements": []}
    print(heading(report), flush=True)
    cases = [*_iterations(arguments), *_updates(arguments)]

    def measure(case: Program) -> dict[str, Any]:
        found = measured(case.compile_program)
        return {"program": case.program, "variant": case.variant, **found}

    record(report, measure_each(cases, measure, lambda case: case.program), arguments.json, 1)


def _iterations(arguments: argparse.Namespace) -> Iterator[Program]:
    for shape in sum(arguments.shapes, []):
        for name, iteration in _ITERATIONS.items():
            yield Program(
                f"v5e, {'×'.join(map(str, shape))}",
                name,
                functools.partial(_iteration_compiled, iteration, shape),
            )


def _iteration_compiled(
    iteration: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]
) -> jax.stages.Compiled:
    mesh = described_mesh("v5e:1x1", {"chip": 1}, AxisType.Auto)
    return compiled_for(iteration, described_tree({"x": shape}, {}, mesh)["x"])


def _updates(arguments: argparse.Namespace) -> Iterator[Program]:
    for topology in arguments.topologies:
        for layout in layouts_on_pod(arguments.width):
            for name in _UPDATES:
                compile_program = functools.partial(
                    _update_compiled_for, topology, layout, name, arguments.width
                )
                yield Program(f"{topology}, {layout}", name, compile_program)


def _update_compiled_for(topology: str, layout: str, name: str, width: int) -> jax.stages.Compiled:
    make, is_stated, axis_type = _UPDATES[name]
    sizes, shapes, specs = layouts_on_pod(width)[layout]
    params = described_tree(shapes, specs, described_mesh(topology, sizes, axis_type))
    optimizer = make(
        0.02,
        muon_weight_dimension_numbers=MuonDimensionNumbers(-2, -1),
        **({"shardings": specs} if is_stated else {}),
    )
    return compiled_update(optimizer, params)
