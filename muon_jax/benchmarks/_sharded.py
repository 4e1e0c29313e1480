"""Whole updates of parameters that all devices share, FSDP, beside optax."""

import collections
import re
import time
from typing import Any

import jax
import optax.contrib
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import muon
from muon_jax.benchmarks import _measure, _models, _timing
from muon_jax.benchmarks._timing import JaxProgram

# Optimizers, and whether JAX's mesh has explicit axes.
VARIANTS = {
    "optax": (optax.contrib.muon, {}, AxisType.Auto),
    "None": (muon, {}, AxisType.Auto),
    "explicit": (muon, {}, AxisType.Explicit),
    "balanced": (muon, {"ns_coeffs": "balanced"}, AxisType.Explicit),
}
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


def measure(model: str, dtype: str) -> dict[str, Any]:
    """Times one update of all parameters of a model, their rows sharded over all devices.

    Raises:
        ArithmeticError: an update of ours is further than `TOLERANCE` from that on one device.
    """
    shapes = _models.MODELS[model]
    numbers = _models.dimension_numbers(shapes)
    whole = {
        name: _measure.standard_normal(seed, shape, dtype)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    programs, report = {}, collections.defaultdict(dict)
    for name, (make, kwargs, axis_type) in VARIANTS.items():
        optimizer = make(0.02, muon_weight_dimension_numbers=numbers, **kwargs)
        mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(axis_type,))
        gradients = {key: jax.device_put(x, _rows(x, mesh)) for key, x in whole.items()}
        arguments = (gradients, optimizer.init(gradients), gradients)
        start = time.perf_counter()
        program = WallClockProgram.compile(optimizer.update, *arguments)
        report["compile_seconds"][name] = round(time.perf_counter() - start, 2)
        programs[name] = program
        report["collectives"][name] = collectives(program.compiled)
        memory: Any = program.compiled.memory_analysis()
        report["temp_bytes"][name] = memory.temp_size_in_bytes
        if make is muon:
            expected = jax.jit(optimizer.update)(whole, optimizer.init(whole), whole)[0]
            updates = program.result()[0]
            here = {key: jax.device_put(updates[key], x.sharding) for key, x in expected.items()}
            report["errors"][name] = _measure.largest_error(
                here, expected, f"{model}, {name}", "that on one device", TOLERANCE
            )
    return {
        "model": model,
        "devices": jax.device_count(),
        "parameters": sum(x.size for x in whole.values()),
        **report,
        "microseconds": _timing.time_interleaved(programs),
    }


def _rows(x, mesh):
    """The sharding of the rows of matrices, where it is even."""
    is_even = x.ndim > 1 and x.shape[-2] % mesh.size == 0
    spec = PartitionSpec(*[None] * (x.ndim - 2), "fsdp") if is_even else PartitionSpec()
    return NamedSharding(mesh, spec)
