"""Measures whole updates of parameters that are sharded over all devices, beside optax."""

import collections
import dataclasses
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
import optax.contrib
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks._times.correctness import largest_error
from benchmarks._times.models import MODELS, dimension_numbers
from benchmarks._times.overlap import measure_overlap
from benchmarks._times.timing import (
    DEFAULT_TURNS,
    Clock,
    JaxProgram,
    Turns,
    time_interleaved,
)
from benchmarks._times.updates import LEARNING_RATE, random_gradients
from muon_jax import muon

# Optimizers, their arguments, and the type of the mesh axes.
OPTIMIZERS = {
    "optax": (optax.contrib.muon, {}, AxisType.Auto),
    "None": (muon, {}, AxisType.Explicit),
    "balanced": (muon, {"ns_coeffs": "balanced"}, AxisType.Explicit),
    "automatic axes": (muon, {}, AxisType.Auto),
}
# The axis of an array that each mesh axis shards: experts or layers, rows, columns.
SHARDED_AXES = {"expert": -3, "fsdp": -2, "tensor": -1}
# Largest relative difference, for each parameter, from the same optimizer's update on one device:
# that of half precision in another order.
TOLERANCE = 0.02


class WallClockProgram(JaxProgram):
    """A program on several devices; the profiler can time one device only."""

    def clocks(self) -> dict[str, Clock]:
        """Returns `wall`."""
        return {"wall": self._wall}


def collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns how many collectives of each kind a compiled program has."""
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-[a-z]+"
    text = compiled.as_text() or ""
    return dict(collections.Counter(re.findall(rf" ({names})(?:-start)?\(", text)))


def measure_sharded(
    model: str, dtype: str, mesh_shape: Mapping[str, int], turns: Turns = DEFAULT_TURNS
) -> dict[str, Any]:
    """Times one update of all parameters of a model, sharded over a mesh of these axes.

    Args:
        model: a name of `MODELS`.
        dtype: of gradients, state and parameters. optax iterates in it, too.
        mesh_shape: sizes of axes that are in `SHARDED_AXES`.
        turns: as for `time_interleaved`.

    Raises:
        ArithmeticError: an update of ours differs by more than `TOLERANCE` from that on one device.
    """
    devices = jax.devices()[: math.prod(mesh_shape.values())]
    numbers = dimension_numbers(MODELS[model])
    whole = random_gradients(model, dtype)
    programs, expected, report = {}, {}, collections.defaultdict(dict)
    for name, (make, kwargs, axis_type) in OPTIMIZERS.items():
        optimizer = make(LEARNING_RATE, muon_weight_dimension_numbers=numbers, **kwargs)
        mesh = jax.make_mesh(
            tuple(mesh_shape.values()),
            tuple(mesh_shape),
            axis_types=(axis_type,) * len(mesh_shape),
            devices=devices,
        )
        gradients = {key: jax.device_put(x, even_sharding(x, mesh)) for key, x in whole.items()}
        arguments = (gradients, optimizer.init(gradients), gradients)
        start = time.perf_counter()
        first = WallClockProgram.compile(optimizer.update, *arguments)
        report["compile_seconds"][name] = round(time.perf_counter() - start, 2)
        updates, state = first.result()
        # A later step is timed, because its state lies where a step leaves it.
        program = dataclasses.replace(first, arguments=(gradients, state, gradients))
        programs[name] = program
        report["collectives"][name] = collectives(program.compiled)
        memory: Any = program.compiled.memory_analysis()
        report["temp_bytes"][name] = memory.temp_size_in_bytes
        if timeline := measure_overlap(program):
            report["timeline"][name] = timeline
        if make is muon:
            alone = str(kwargs)
            if alone not in expected:
                update = jax.jit(optimizer.update)
                expected[alone] = update(whole, optimizer.init(whole), whole)[0]
            here = {key: jax.device_put(updates[key], x.sharding) for key, x in whole.items()}
            report["errors"][name] = largest_error(
                here, expected[alone], f"{model}, {name}", "that on one device", TOLERANCE
            )
    return {
        "model": model,
        "mesh": dict(mesh_shape),
        "parameters": sum(x.size for x in whole.values()),
        **report,
        "microseconds": time_interleaved(programs, turns),
    }


def even_sharding(x: jax.Array, mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns how `(..., rows, cols)` is sharded: over each of `SHARDED_AXES` that divides it."""
    spec: list[str | None] = [None] * x.ndim
    for name, axis in SHARDED_AXES.items():
        if name in mesh.shape and x.ndim >= max(2, -axis) and x.shape[axis] % mesh.shape[name] == 0:
            spec[axis] = name
    return NamedSharding(mesh, PartitionSpec(*spec))
