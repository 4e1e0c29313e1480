"""The commands `syrk`, `newton_schulz`, `muon` and `sharded`."""

import argparse
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from benchmarks._accuracy.polar_error import coefficient_names
from benchmarks._command_line.arguments import add_json, quick_facts
from benchmarks._command_line.progress import measure_each
from benchmarks._records.reading import case_label
from benchmarks._records.recording import environment, record
from benchmarks._records.tables import absence_lines, heading
from benchmarks._times import rivals
from benchmarks._times.models import MODELS, ON_ONE_DEVICE, QUICK_MODEL
from benchmarks._times.one_device import (
    DEFAULT_COEFFICIENTS,
    measure_muon,
    measure_newton_schulz,
    measure_syrk,
)
from benchmarks._times.shapes import QUICK_SHAPES, SETS, shapes
from benchmarks._times.sharded import (
    DEFAULT_OPTIMIZERS,
    OPTIMIZERS,
    SHARDED_AXES,
    measure_sharded,
)
from benchmarks._times.timing import Turns, on_gpu
from pallas_kernels import IMPLEMENTATIONS

type Shape = tuple[int, ...]

# What `--quick` changes, where no flag says otherwise.
_QUICK_TURNS = Turns(rounds=3)
QUICK_PRODUCTS = {
    "shapes": [shapes(word) for word in QUICK_SHAPES.split()],
    "turns": _QUICK_TURNS,
}
QUICK_ITERATIONS = QUICK_PRODUCTS | {"coefficients": ["balanced"]}
QUICK_UPDATES = {"models": [QUICK_MODEL], "turns": _QUICK_TURNS}

# optax has no other choice; see `measure_muon`.
_DTYPES_OF_ITERATION = {
    "iteration": "ours in half precision; optax's in the dtype of the gradients"
}


def add_syrk_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `syrk`."""
    _add_dtype_and_json(command, "bfloat16")
    _add_shapes(command)
    command.add_argument(
        "--implementations",
        nargs="*",
        choices=IMPLEMENTATIONS,
        default=("xla",),
        help="timed beside the default",
    )


def run_syrk(arguments: argparse.Namespace) -> None:
    """Times XXᵀ and XXᵀ + C/2 beside their rivals, shape by shape."""
    facts = _facts_of_rivals("syrk", "syrk + C")
    measure = functools.partial(
        measure_syrk,
        dtype=arguments.dtype,
        implementations=arguments.implementations,
        turns=arguments.turns,
    )
    _measure_cases(arguments, _distinct_shapes(arguments), measure, _shape_label, facts)


def add_newton_schulz_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `newton_schulz`."""
    _add_dtype_and_json(command, "bfloat16")
    _add_shapes(command)
    command.add_argument(
        "--coefficients",
        nargs="*",
        choices=coefficient_names(),
        default=DEFAULT_COEFFICIENTS,
        help="timed beside the defaults",
    )
    command.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="before each turn of ten runs, so that the GPU does not reach its power limit",
    )


def run_newton_schulz(arguments: argparse.Namespace) -> None:
    """Times the iteration beside its rivals and other coefficients, shape by shape."""
    facts = _facts_of_rivals("newton_schulz")
    if arguments.pause:
        facts["pause"] = f"{arguments.pause:g} s"
    measure = functools.partial(
        measure_newton_schulz,
        dtype=arguments.dtype,
        coefficients=arguments.coefficients,
        turns=arguments.turns._replace(pause=arguments.pause),
    )
    _measure_cases(arguments, _distinct_shapes(arguments), measure, _shape_label, facts)


def add_muon_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `muon`."""
    _add_dtype_and_json(command, "float32")
    command.add_argument("--models", nargs="+", choices=MODELS, default=ON_ONE_DEVICE)


def run_muon(arguments: argparse.Namespace) -> None:
    """Times whole updates on one device, model by model."""
    # The largest model needs more than the three quarters of 80 GB that JAX takes by default.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    measure = functools.partial(measure_muon, dtype=arguments.dtype, turns=arguments.turns)
    _measure_cases(arguments, arguments.models, measure, facts=_DTYPES_OF_ITERATION)


def add_sharded_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `sharded`."""
    _add_dtype_and_json(command, "float32")
    command.set_defaults(turns=Turns(seconds=0.2))
    command.add_argument("--models", nargs="+", choices=MODELS, default=["24-layers"])
    command.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=DEFAULT_OPTIMIZERS)
    command.add_argument(
        "--mesh",
        nargs="+",
        type=_mesh,
        dest="meshes",
        metavar="AXIS=SIZE,…",
        help=f"meshes: sizes of axes {', '.join(SHARDED_AXES)}; the first devices serve a mesh of"
        " fewer than there are (default: fsdp, all devices)",
    )
    command.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, for several")
    command.add_argument("--processes", type=int, help="how many, started with the same flags")
    command.add_argument("--process", type=int, help="which of them this is, from 0")


def run_sharded(arguments: argparse.Namespace) -> None:
    """Times whole steps on several devices, model by model and mesh by mesh."""
    given = (arguments.coordinator, arguments.processes, arguments.process)
    if given != (None,) * 3:
        if None in given or not 0 <= arguments.process < arguments.processes:
            raise SystemExit(
                "--coordinator, --processes and --process go together, with a process from 0 on:"
                f" got {given}"
            )
        jax.distributed.initialize(*given)
    if jax.process_index():
        arguments.json = None  # process 0 writes
    meshes = arguments.meshes or [{"fsdp": jax.device_count()}]
    for mesh in meshes:
        size = math.prod(mesh.values())
        if size > jax.device_count() or jax.process_count() > 1 and size < jax.device_count():
            raise SystemExit(
                f"--mesh {_mesh_label(mesh)} has {size} devices, and there are"
                f" {jax.device_count()} of {jax.process_count()} processes: pass one of at most as"
                " many, and with several processes of as many"
            )
    measure = functools.partial(
        measure_sharded,
        dtype=arguments.dtype,
        optimizers=arguments.optimizers,
        turns=arguments.turns,
    )
    facts = _DTYPES_OF_ITERATION | {"processes": str(jax.process_count())}
    cases = itertools.product(arguments.models, meshes)
    _measure_cases(arguments, cases, measure, _model_label, facts)


def _measure_cases(
    arguments: argparse.Namespace,
    cases: Iterable[Any],
    measure: Callable[[Any], dict[str, Any]],
    label: Callable[[Any], str] = str,
    facts: dict[str, Any] | None = None,
) -> None:
    """Prints the heading of a report and what it lacks, then measures case by case.

    Args:
        arguments: of the command line.
        cases: shapes or models.
        measure: returns the measurement of one case.
        label: returns the name of a case.
        facts: further entries of the report.
    """
    report: dict[str, Any] = {"benchmark": arguments.command, **quick_facts(arguments)}
    report |= {**(facts or {}), **environment(), "dtype": arguments.dtype}
    report |= {"input": "standard normal", "rounds": arguments.turns.rounds, "measurements": []}
    lines = [heading(report), *absence_lines(report), *_lines_without_gpu(arguments)]
    print("\n".join(lines), flush=True)
    record(report, measure_each(cases, measure, label), arguments.json, indent=1)


def _facts_of_rivals(*measured: str) -> dict[str, Any]:
    """The rivals that are absent, and the versions of the others. Call this before JAX runs."""
    rivals.leave_memory_to_torch()
    return {"absent": rivals.absent_rivals(*measured), **rivals.torch_versions(*measured)}


def _lines_without_gpu(arguments: argparse.Namespace) -> list[str]:
    """What the commands cannot measure on this device; nothing on a GPU."""
    if on_gpu():
        return []
    lines = [
        f"not measured on {jax.default_backend()}: the kernels, the device's clock, and how much of"
        " an exchange is hidden. All products are XLA's, all times those of the wall clock."
    ]
    if not arguments.quick:
        lines.append("The cases are sized for GPUs and can take minutes each here: see --quick.")
    return lines


def _shape_label(shape: Shape) -> str:
    return "×".join(map(str, shape))


def _distinct_shapes(arguments: argparse.Namespace) -> Iterable[Shape]:
    return dict.fromkeys(itertools.chain.from_iterable(arguments.shapes))


def _add_dtype_and_json(command: argparse.ArgumentParser, dtype: str) -> None:
    command.add_argument("--dtype", default=dtype, choices=["bfloat16", "float16", "float32"])
    command.set_defaults(turns=Turns())
    add_json(command, "also write the measurements to this file")


def _add_shapes(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--shapes",
        nargs="+",
        type=shapes,
        default=[shapes(name) for name in SETS],
        help=f"MxN, BATCHxMxN, or a set: {', '.join(SETS)} (default: all sets)",
    )


def _mesh(text: str) -> dict[str, int]:
    """The sizes of a mesh's axes, as in data=2,fsdp=2."""
    given = dict(re.findall(r"(\w+)=([1-9]\d*)(?:,|$)", text))
    if _mesh_label(given) != text or given.keys() - SHARDED_AXES:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be AXIS=SIZE,…, each AXIS another one of {', '.join(SHARDED_AXES)}"
        )
    return {name: int(size) for name, size in given.items()}


def _model_label(case: tuple[str, Mapping[str, int]]) -> str:
    model, mesh = case
    return case_label({"model": model, "mesh": mesh})


def _mesh_label(mesh: Mapping[str, int | str]) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items())
