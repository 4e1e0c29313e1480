"""Measures whole steps with parameters that are sharded over several devices, beside optax."""

import collections
import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

from benchmarks._times.correctness import largest_error
from benchmarks._times.inputs import standard_normal
from benchmarks._times.models import MODELS, Shapes, dimension_numbers, flops_of_quintic_step
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
# Largest relative difference, for each parameter, from two steps of the same optimizer on one
# device: that of half precision in another order, and of the random bits of 8-bit momenta.
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
        `errors`, the largest difference from two steps on one device;
        `timeline`, on GPUs, what `measure_overlap` returns;
        `tflops`, for quintic steps, 4m²n + 2m³ FLOPs each for a matrix, over the time and the
        number of devices.

    Raises:
        ArithmeticError: a replica of what two steps of ours change differs by more than
            `TOLERANCE` from that on one device.
        SystemExit: a mesh axis divides no parameter.
    """
    model, mesh_shape = case
    _check_divides(mesh_shape, model)
    numbers = dimension_numbers(MODELS[model])
    programs, report = {}, collections.defaultdict(dict)
    for name in optimizers:
        compared = OPTIMIZERS[name]
        optimizer = compared.make(LEARNING_RATE, muon_weight_dimension_numbers=numbers)
        mesh = _mesh(mesh_shape, compared.axis_type)
        draw = functools.partial(_sharded_normal, MODELS[model], dtype, mesh)
        parameters, gradients, others = (
            {key: draw(key, seed) for key in MODELS[model]} for seed in range(3)
        )
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
        # The second gradients are others, so that the state of the first step counts.
        stepped, state = program.compiled(*program.result(), others)
        if name != "optax":
            report["errors"][name] = max(
                _error(
                    f"{model}, {name}",
                    compared.make,
                    numbers[key],
                    key,
                    draw(key, 0),
                    *(x[key] for x in (gradients, others, stepped)),
                )
                for key in gradients
            )
        program.arguments = (stepped, state, gradients)
        del parameters, others, arguments, stepped, state
        if timeline := measure_overlap(program):
            report["timeline"][name] = timeline
        programs[name] = program
    microseconds = time_interleaved(programs, turns)
    flops = flops_of_quintic_step(MODELS[model])
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


def _check_divides(mesh_shape: Mapping[str, int], model: str) -> None:
    """Raises SystemExit where an axis along which parameters are not replicated divides none."""
    mesh = AbstractMesh(tuple(mesh_shape.values()), tuple(mesh_shape))
    arrays = (jax.ShapeDtypeStruct(shape, float) for shape in MODELS[model].values())
    used = {axis for x in arrays for axis in even_sharding(x, mesh).spec}
    if idle := {axis for axis, size in mesh_shape.items() if size > 1} - used - {"data"}:
        raise SystemExit(
            f"the mesh axes {sorted(idle)} divide no parameter of {model}: pass other sizes, or"
            " data, along which parameters are replicated"
        )


def even_sharding(x: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns how `(..., rows, cols)` is sharded: over each of `SHARDED_AXES` that divides it."""
    spec: list[str | None] = [None] * x.ndim
    for name, axis in SHARDED_AXES.items():
        if axis is None or name not in mesh.shape or x.ndim < max(2, -axis):
            continue
        if x.shape[axis] % mesh.shape[name] == 0:
            spec[axis] = name
    return NamedSharding(mesh, PartitionSpec(*spec))


def _sharded_normal(shapes: Shapes, dtype: str, mesh: Mesh, key: str, seed: int) -> jax.Array:
    """A normal array like a parameter; each device draws its shards.

    Seed 0 is for parameters, of the size of weights: bfloat16 adds nothing small to large ones.
    """
    sharding = even_sharding(jax.ShapeDtypeStruct(shapes[key], dtype), mesh)
    place, deviation = [*shapes].index(key), 1.0 if seed else 2.0**-6
    return deviation * _jitted_normal(shapes[key], dtype, sharding)(seed * len(shapes) + place)


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
    """The largest error, over the replicas, of what two steps change in a parameter.

    Arrays are the parameter, both gradients, and the parameter after the steps.
    """
    *given, stepped = arrays
    before, *gradients = (next(_copies(x)) for x in given)
    init, step = _alone(make, numbers)
    parameters = {"": before}
    state = init(parameters)
    for gradient in gradients:
        parameters, state = step(parameters, state, {"": gradient})
    expected = {key: parameters[""] - before}
    changes = ({key: copy - before} for copy in _copies(stepped))
    against = case, "that on one device", TOLERANCE
    return max(largest_error(change, expected, *against) for change in changes)


@functools.cache
def _alone(
    make: Callable[..., optax.GradientTransformation], numbers: MuonDimensionNumbers | None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The `init` and the step of an optimizer of the one parameter `""`."""
    optimizer = make(LEARNING_RATE, muon_weight_dimension_numbers={"": numbers})
    return optimizer.init, jax.jit(step_of(optimizer))


def _copies(x: jax.Array) -> Iterator[jax.Array]:
    """Yields the whole array as each device of this process has it, on the first of them."""
    sharding: Any = x.sharding
    whole = jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))
    first, *others = (shard.data for shard in whole.addressable_shards)
    yield first
    for copy in others:
        yield jax.device_put(copy, first.sharding)
