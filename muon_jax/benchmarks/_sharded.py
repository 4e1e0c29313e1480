"""Whole updates of parameters that all devices share, beside optax."""

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

from muon_jax import muon
from muon_jax.benchmarks import _measure, _models, _overlap, _timing
from muon_jax.benchmarks._timing import JaxProgram

# Optimizers, and whether JAX's mesh has explicit axes.
VARIANTS = {
    "optax": (optax.contrib.muon, {}, AxisType.Auto),
    "None": (muon, {}, AxisType.Explicit),
    "balanced": (muon, {"ns_coeffs": "balanced"}, AxisType.Explicit),
    "automatic axes": (muon, {}, AxisType.Auto),
}
# What mesh axes shard: experts or layers, rows, columns.
AXES = {"expert": -3, "fsdp": -2, "tensor": -1}
# Largest relative difference, for each parameter, from the same optimizer's update on one device:
# that of half precision in another order.
TOLERANCE = 0.02


class WallClockProgram(JaxProgram):
    """A program on several devices, which the profiler of one does not time."""

    def clocks(self) -> dict[str, _timing.Clock]:
        """Returns `wall`."""
        return {"wall": self._wall}


def collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns how many collectives of each kind a compiled program has."""
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-[a-z]+"
    text = compiled.as_text() or ""
    return dict(collections.Counter(re.findall(rf" ({names})(?:-start)?\(", text)))


def measure(model: str, dtype: str, mesh_shape: Mapping[str, int]) -> dict[str, Any]:
    """Times one update of all parameters of a model, sharded over a mesh of these axes.

    Args:
        model: a name of `MODELS`.
        dtype: of gradients, state and parameters.
        mesh_shape: sizes of axes that are in `AXES`.

    Raises:
        ArithmeticError: an update of ours is further than `TOLERANCE` from that on one device.
    """
    devices = jax.devices()[: math.prod(mesh_shape.values())]
    shapes = _models.MODELS[model]
    numbers = _models.dimension_numbers(shapes)
    whole = {
        name: _measure.standard_normal(seed, shape, dtype)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    programs, expected, report = {}, {}, collections.defaultdict(dict)
    for name, (make, kwargs, axis_type) in VARIANTS.items():
        optimizer = make(0.02, muon_weight_dimension_numbers=numbers, **kwargs)
        mesh = jax.make_mesh(
            tuple(mesh_shape.values()),
            tuple(mesh_shape),
            axis_types=(axis_type,) * len(mesh_shape),
            devices=devices,
        )
        gradients = {key: jax.device_put(x, sharding(x, mesh)) for key, x in whole.items()}
        arguments = (gradients, optimizer.init(gradients), gradients)
        start = time.perf_counter()
        first = WallClockProgram.compile(optimizer.update, *arguments)
        report["compile_seconds"][name] = round(time.perf_counter() - start, 2)
        updates, state = first.result()
        # What is timed is a later step, whose state is where a step leaves it.
        program = dataclasses.replace(first, arguments=(gradients, state, gradients))
        programs[name] = program
        report["collectives"][name] = collectives(program.compiled)
        memory: Any = program.compiled.memory_analysis()
        report["temp_bytes"][name] = memory.temp_size_in_bytes
        if timeline := _overlap.of(program):
            report["timeline"][name] = timeline
        if make is muon:
            alone = str(kwargs)
            if alone not in expected:
                update = jax.jit(optimizer.update)
                expected[alone] = update(whole, optimizer.init(whole), whole)[0]
            here = {key: jax.device_put(updates[key], x.sharding) for key, x in whole.items()}
            report["errors"][name] = _measure.largest_error(
                here, expected[alone], f"{model}, {name}", "that on one device", TOLERANCE
            )
    return {
        "model": model,
        "mesh": dict(mesh_shape),
        "parameters": sum(x.size for x in whole.values()),
        **report,
        "microseconds": _timing.time_interleaved(programs, seconds=0.2),
    }


def sharding(x: jax.Array, mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns how `(..., rows, cols)` is sharded: its axes over those of `AXES`, where even."""
    spec: list[str | None] = [None] * x.ndim
    for name, axis in AXES.items():
        if name in mesh.shape and x.ndim >= max(2, -axis) and x.shape[axis] % mesh.shape[name] == 0:
            spec[axis] = name
    return NamedSharding(mesh, PartitionSpec(*spec))
