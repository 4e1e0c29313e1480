"""One process of a run over four CPU devices or two GPUs: training, metrics and checkpoints.

    python process.py FOLDER --process 1 --processes 2 --coordinator localhost:1234 --axes Auto

Writes the shards of the parameters that its devices have into FOLDER, a file each. With
--checkpoints the optimizer is NorMuon with metrics, and the run goes on from its last checkpoint.
"""

import argparse
import functools
import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import muon
from muon_jax.contrib import metrics, normuon, with_metrics

STEPS = 3
SHAPES = {**{f"matrix {i}": (16, 24) for i in range(5)}, "bias": (16,)}


def drawn(step: int, sharding: NamedSharding) -> dict[str, jax.Array]:
    """Normal arrays, of which each process makes the shards that it has."""
    rng = np.random.default_rng(step)
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {
        name: jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
        for name, x in values.items()
    }


def train(options: argparse.Namespace) -> tuple[dict[str, jax.Array], Any]:
    """Returns parameters and state after all steps."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), (AxisType[options.axes],))
    sharding, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
    make = functools.partial(normuon, normuon_b2=0.9) if options.checkpoints else muon
    optimizer = make(0.1, ns_steps=2)
    if options.checkpoints:
        optimizer = with_metrics(optimizer)
    params = drawn(0, sharding)
    of_state = jax.tree.map(
        lambda x: sharding if x.shape in SHAPES.values() else everywhere,
        jax.eval_shape(optimizer.init, params),
    )
    state = jax.jit(optimizer.init, out_shardings=of_state)(params)

    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    now = params, state
    jitted = jax.jit(step, out_shardings=(sharding, of_state))
    if not options.checkpoints:
        for number in range(1, STEPS + 1):
            now = jitted(*now, drawn(number, sharding))
        return now

    import orbax.checkpoint as ocp  # takes longer than all that is above

    with ocp.CheckpointManager(options.checkpoints) as checkpoints:
        start = checkpoints.latest_step() or 0
        if start:
            now = checkpoints.restore(start, args=ocp.args.StandardRestore(now))
            print(f"goes on from step {start}", flush=True)
        for number in range(start + 1, STEPS + 1):
            now = jitted(*now, drawn(number, sharding))
            checkpoints.save(number, args=ocp.args.StandardSave(now))
            checkpoints.wait_until_finished()
            if number == options.killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
    return now


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--process", type=int)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--coordinator")
    parser.add_argument("--axes")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--killed-after", type=int)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4 // options.processes)
    if options.processes > 1:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    params, state = train(options)
    results = {
        f"{name} {shard.index[0].start or 0}": shard.data
        for name, x in params.items()
        for shard in x.addressable_shards
    }
    if options.checkpoints and options.process == 0:
        results |= {name.replace("/", " "): x for name, x in metrics(state).items()}
    for name, x in results.items():
        np.save(options.folder / f"{name}.npy", x)


if __name__ == "__main__":
    main()
