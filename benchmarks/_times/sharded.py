"""Measures whole steps with parameters that are sharded over several devices, beside optax."""

import collections
import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

from benchmarks._times.correctness import largest_error
from benchmarks._times.inputs import standard_normal
from benchmarks._times.models import MODELS, dimension_numbers, stacks_of_matrices
from benchmarks._times.overlap import measure_overlap
from benchmarks._times.timing import (
    DEFAULT_TURNS,
    Clock,
    StepProgram,
    Turns,
    time_interleaved,
)
from benchmarks._times.updates import LEARNING_RATE, step_of
from muon_jax import contrib, muon, state_shardings


class Compared(NamedTuple):
    """What makes an optimizer from optax's arguments, and the type of its mesh axes."""

    make: Callable[..., optax.GradientTransformation]
    axis_type: AxisType = AxisType.Explicit
    quintic_steps: int | None = 5  # None for a composed schedule


_MUONH = functools.partial(contrib.muonh, adamh=None)
OPTIMIZERS = {
    "optax": Compared(optax.contrib.muon, AxisType.Auto),
    "None": Compared(muon),
    "balanced": Compared(functools.partial(muon, ns_coeffs="balanced"), quintic_steps=None),
    "automatic axes": Compared(muon, AxisType.Auto),
    "int8": Compared(functools.partial(muon, mu_dtype="int8")),
    "normuon": Compared(contrib.normuon),
    "muonh": Compared(_MUONH),
    "muonh, 3 steps": Compared(functools.partial(_MUONH, ns_steps=3), quintic_steps=3),
}
DEFAULT_OPTIMIZERS = ("optax", "None", "balanced", "automatic axes")
# The axis of an array that each mesh axis shards: experts or layers, rows, columns. Along "data"
# arrays are replicated.
SHARDED_AXES = {"data": None, "expert": -3, "fsdp": -2, "tensor": -1}
# Largest relative difference, for each parameter, from the same optimizer's update on one device:
# that of half precision in another order.
TOLERANCE = 0.02


class WallClockProgram(StepProgram):
    """A step on several devices; the profiler can time one device only."""

    def clocks(self) -> dict[str, Clock]:
        """Returns `wall`."""
        return {"wall": self._wall}


def collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns how many collectives of each kind a compiled program has."""
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-[a-z]+"
    text = compiled.as_text() or ""
    return dict(collections.Counter(re.findall(rf" ({names})(?:-start)?\(", text)))


def measure_sharded(
    case: tuple[str, Mapping[str, int]],
    dtype: str,
    optimizers: Sequence[str] = DEFAULT_OPTIMIZERS,
    turns: Turns = DEFAULT_TURNS,
) -> dict[str, Any]:
    """Times what a train step does once it has sharded gradients of all parameters of a model.

    The update and `optax.apply_updates` are one program. Parameters and state are donated.

    Args:
        case: a name of `MODELS`, and a mesh: sizes of axes that are in `SHARDED_AXES`. A mesh of
            fewer devices than there are has the first ones.
        dtype: of gradients, state and parameters. optax iterates in it, too.
        optimizers: names in `OPTIMIZERS`.
        turns: as for `time_interleaved`.

    Returns:
        The times by the wall clock, and by optimizer
        `collectives`, `temp_bytes` and `compile_seconds`, of the program;
        `errors`, the largest difference from the update on one device;
        `timeline`, on GPUs, what `measure_overlap` returns;
        `tflops`, for quintic steps, 4m²n + 2m³ FLOPs each for a matrix, over the time and the
        number of devices.

    Raises:
        ArithmeticError: an update of ours differs by more than `TOLERANCE` from that on one device.
    """
    model, mesh_shape = case
    numbers = dimension_numbers(MODELS[model])
    programs, report = {}, collections.defaultdict(dict)
    for name in optimizers:
        make, axis_type, _ = OPTIMIZERS[name]
        optimizer = make(LEARNING_RATE, muon_weight_dimension_numbers=numbers)
        mesh = _mesh(mesh_shape, axis_type)
        gradients, parameters = (_sharded_normal(model, dtype, mesh, seed) for seed in (0, 1))
        shardings = jax.tree.map(lambda x: x.sharding, gradients)
        of_state = state_shardings(optimizer, parameters, shardings)
        state = jax.jit(optimizer.init, out_shardings=of_state)(parameters)
        start = time.perf_counter()
        step = jax.jit(
            step_of(optimizer), donate_argnums=(0, 1), out_shardings=(shardings, of_state)
        )
        arguments = (parameters, state, gradients)
        program = WallClockProgram(step.lower(*arguments).compile(), arguments)
        report["compile_seconds"][name] = round(time.perf_counter() - start, 2)
        report["collectives"][name] = collectives(program.compiled)
        memory: Any = program.compiled.memory_analysis()
        report["temp_bytes"][name] = memory.temp_size_in_bytes
        stepped, _ = program.result()
        if name != "optax":
            parameters = _sharded_normal(model, dtype, mesh, 1)
            report["errors"][name] = max(
                _error(
                    f"{model}, {name}", make, numbers[key], key, parameters[key], g, stepped[key]
                )
                for key, g in gradients.items()
            )
        del parameters, state, arguments, stepped
        if timeline := measure_overlap(program):
            report["timeline"][name] = timeline
        programs[name] = program
    microseconds = time_interleaved(programs, turns)
    flops = sum(b * (4 * m**2 * n + 2 * m**3) for b, m, n in stacks_of_matrices(MODELS[model]))
    for name, by_clock in microseconds.items():
        if steps := OPTIMIZERS[name].quintic_steps:
            per_device = steps * flops / math.prod(mesh_shape.values())
            report["tflops"][name] = float(f"{1e-6 * per_device / by_clock['wall'][1]:.3g}")
    return {
        "model": model,
        "mesh": dict(mesh_shape),
        "parameters": sum(map(math.prod, MODELS[model].values())),
        **report,
        "microseconds": microseconds,
    }


def _mesh(shape: Mapping[str, int], axis_type: AxisType) -> Mesh:
    sizes = tuple(shape.values())
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, tuple(shape), (axis_type,) * len(sizes), devices=devices)


def even_sharding(x: jax.ShapeDtypeStruct, mesh: Mesh) -> NamedSharding:
    """Returns how `(..., rows, cols)` is sharded: over each of `SHARDED_AXES` that divides it."""
    spec: list[str | None] = [None] * x.ndim
    for name, axis in SHARDED_AXES.items():
        if axis is None or name not in mesh.shape or x.ndim < max(2, -axis):
            continue
        if x.shape[axis] % mesh.shape[name] == 0:
            spec[axis] = name
    return NamedSharding(mesh, PartitionSpec(*spec))


def _sharded_normal(model: str, dtype: str, mesh: Mesh, seed: int) -> dict[str, jax.Array]:
    """Standard normal arrays like a model's parameters; each device draws its shards."""

    def normal(index: int, shape: tuple[int, ...]) -> jax.Array:
        sharding = even_sharding(jax.ShapeDtypeStruct(shape, dtype), mesh)
        return _jitted_normal(shape, dtype, sharding)(1000 * seed + index)

    return {key: normal(i, shape) for i, (key, shape) in enumerate(MODELS[model].items())}


@functools.cache
def _jitted_normal(
    shape: tuple[int, ...], dtype: str, sharding: NamedSharding
) -> Callable[[int], jax.Array]:
    draw = functools.partial(standard_normal, shape=shape, dtype=dtype)
    return jax.jit(draw, out_shardings=sharding)


def _error(
    case: str,
    make: Callable[..., optax.GradientTransformation],
    numbers: MuonDimensionNumbers | None,
    key: str,
    *arrays: jax.Array,
) -> float:
    """The error of a parameter's update: of the parameter, its gradient, and it after the step."""
    parameter, gradient, stepped = map(_on_one_device, arrays)
    expected = _step_alone(make, numbers, parameter, gradient)
    updates = {key: stepped - parameter}, {key: expected - parameter}
    return largest_error(*updates, case, "that on one device", TOLERANCE)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step_alone(
    make: Callable[..., optax.GradientTransformation],
    numbers: MuonDimensionNumbers | None,
    parameter: jax.Array,
    gradient: jax.Array,
) -> jax.Array:
    optimizer = make(LEARNING_RATE, muon_weight_dimension_numbers={"": numbers})
    parameters = {"": parameter}
    stepped, _ = step_of(optimizer)(parameters, optimizer.init(parameters), {"": gradient})
    return stepped[""]


def _on_one_device(x: jax.Array) -> jax.Array:
    """The whole array, on the first of its devices that this process has."""
    sharding: Any = x.sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.device_put(x, everywhere).addressable_data(0)
