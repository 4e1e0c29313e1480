"""Programs compiled for TPUs that are not there: their FLOPs, exchanges and memory."""

import math
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_COLLECTIVE = re.compile(
    r" = \(*(\w+)\[([\d,]*)\].*? "
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "u32": "uint32"}
_CHANNEL = re.compile(r"channel_id=(\d+)")


def described_mesh(topology: str, sizes: Mapping[str, int], axis_type: AxisType) -> Mesh:
    """Returns a mesh of described chips, such as those of `"v5e:2x2"`.

    It needs the package libtpu, and neither a chip nor a network.

    Args:
        topology: as `jax.experimental.topologies` names it.
        sizes: of the mesh axes; one may be -1 for all chips that are left.
        axis_type: of all axes.
    """
    # Nobody is asked for metadata of the machine. Several processes may load the compiler.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc(topology, "tpu").devices
    grid = np.array(devices).reshape([*sizes.values()])
    return Mesh(grid, (*sizes,), axis_types=(axis_type,) * len(sizes))


def described_tree(
    shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, PartitionSpec], mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns arrays of float32 that are not there, sharded over the mesh."""
    return {
        name: jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, specs.get(name, PartitionSpec()))
        )
        for name, shape in shapes.items()
    }


def compiled_for(function: Callable[..., Any], *arguments: Any) -> jax.stages.Compiled:
    """Returns the function compiled for the chips that its arguments are described to be on."""
    return jax.jit(function).lower(*arguments).compile()


def compiled_update(
    optimizer: optax.GradientTransformation, params: Mapping[str, jax.ShapeDtypeStruct]
) -> jax.stages.Compiled:
    """Returns one update of parameters that are not there, whose state is sharded as they are."""
    sharding = next(iter(params.values())).sharding
    assert isinstance(sharding, NamedSharding)
    replicated = NamedSharding(sharding.mesh, PartitionSpec())

    def placed(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        of = params.get(getattr(path[-1], "key", ""))
        sharding = of.sharding if of is not None and of.shape == x.shape else replicated
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state = jax.tree.map_with_path(placed, jax.eval_shape(optimizer.init, params))
    return compiled_for(optimizer.update, params, state, params)


def exchanges(compiled: jax.stages.Compiled) -> dict[str, tuple[int, int]]:
    """Returns how many collectives of each kind a program has, and the bytes of the results.

    The compiler may fuse one collective with a sequence of products. Then it stands in each of
    these fusions, under one channel.
    """
    found, is_fused = {}, False
    for i, line in enumerate((compiled.as_text() or "").splitlines()):
        if not line.startswith(" "):  # the head of a computation
            is_fused = "fus" in line.partition("(")[0]
        if match := _COLLECTIVE.search(line):
            dtype, sizes, kind = match.groups()
            channel = _CHANNEL.search(line)
            itemsize = jnp.dtype(_DTYPES[dtype]).itemsize
            num_bytes = itemsize * math.prod(map(int, filter(None, sizes.split(","))))
            found[kind, channel[0] if is_fused and channel else i] = num_bytes
    kinds = sorted({kind for kind, _ in found})
    of_kind = {k: [size for (kind, _), size in found.items() if kind == k] for k in kinds}
    return {kind: (len(sizes), sum(sizes)) for kind, sizes in of_kind.items()}


def flops(compiled: jax.stages.Compiled) -> float:
    """Returns the FLOPs of one device, of which XLA counts all of a symmetric product."""
    cost = compiled.cost_analysis()
    assert cost
    return cost["flops"]


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of temporaries on one device."""
    memory = compiled.memory_analysis()
    assert memory
    return memory.temp_size_in_bytes


def has_float16(compiled: jax.stages.Compiled) -> bool:
    """Returns whether a program computes anything in float16, which TPUs do not multiply."""
    return bool(re.search(r"\bf16\[", compiled.as_text() or ""))


def measured(compile_program: Callable[[], jax.stages.Compiled]) -> dict[str, Any]:
    """Returns what a compiled program says of itself, and the processor seconds that it took."""
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = compile_program()
    seconds = time.process_time() - start
    found = exchanges(compiled)
    return {
        "gflops": round(flops(compiled) / 1e9, 3),
        "temp_bytes": temp_bytes(compiled),
        "collectives": {kind: count for kind, (count, _) in found.items()},
        "exchanged_bytes": sum(size for _, size in found.values()),
        "float16": has_float16(compiled),
        "warned": len(caught),
        "seconds": round(seconds, 1),
    }
