"""Runs that are killed go on bit for bit, and a checkpoint that is cut off is refused.

| what                                                 | how often |
| ---------------------------------------------------- | --------- |
| a file of the last checkpoint cut at a random length | 20 times  |
| a process killed at a random time                    | 20 times  |
"""

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import chex
import helpers
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding

import gpt

PROGRAM = """
import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from muon_jax.contrib import normuon

folder, cache, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
optimizer = normuon(0.02, normuon_b2=0.9, mu_dtype="bfloat16", mu_rounding="stochastic")


@jax.jit
def step(params, state, key):
    gradients = jax.tree.map(lambda p: p + jax.random.normal(key, p.shape), params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


params = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8)), "bias": jnp.ones(8)}
saved = params, optimizer.init(params)
options = ocp.CheckpointManagerOptions(max_to_keep=2)
with ocp.CheckpointManager(folder, options=options) as checkpoints:
    start = checkpoints.latest_step() or 0
    if start:
        saved = checkpoints.restore(start, args=ocp.args.StandardRestore(saved))
    for done in range(start + 1, steps + 1):
        saved = step(*saved, jax.random.key(done))
        checkpoints.save(done, args=ocp.args.StandardSave(saved))
        print(done, flush=True)
leaves = [np.asarray(x) for x in jax.tree.leaves(saved)]
print(hashlib.sha256(b"".join(x.tobytes() for x in leaves)).hexdigest())
"""


def run(folder, cache, steps, kill_after=None):
    """What a run prints; with `kill_after` it is killed after so many steps, and a moment."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), str(cache), str(steps)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout
        if kill_after is None:
            return process.communicate()[0].split()
        for _ in range(int(kill_after)):
            process.stdout.readline()
        time.sleep(0.05 * (kill_after % 1))  # into any step, or what it saves
        process.send_signal(signal.SIGKILL)
        process.stdout.read()
        assert process.wait() == -signal.SIGKILL
        return []


@helpers.nightly
def test_killed_at_random_times_it_goes_on_bit_for_bit(tmp_path):
    kills = 20
    chance, steps = random.Random(kills), 9 * kills
    *done, digest = run(tmp_path / "straight", tmp_path / "cache", steps)
    assert [*map(int, done)] == [*range(1, steps + 1)]
    for _ in range(kills):
        run(tmp_path / "killed", tmp_path / "cache", steps, kill_after=chance.uniform(2, 4))
    *done, found = run(tmp_path / "killed", tmp_path / "cache", steps)
    assert 1 < int(done[0]) <= steps  # it did not begin anew, and was not done
    assert found == digest


# Orbax closes the event loop of a failed restoration while reads go on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@helpers.nightly
def test_a_checkpoint_that_is_cut_off_is_refused_or_whole(tmp_path):
    """Where the cut-off file was not needed, what is restored has all bits."""
    config = {"steps": 2}
    params = {
        name: np.float32(i) + helpers.random_tree({name: (16, 8)}, i)[name]
        for i, name in enumerate(("up", "down"))
    }
    optimizer = gpt.muon(0.02)
    state = gpt.State(np.int32(2), params, optimizer.init(params))
    state = jax.tree.map(jax.numpy.asarray, state)
    with ocp.CheckpointManager(tmp_path / "whole") as checkpoints:
        for step in (1, 2):
            items = {"state": ocp.args.StandardSave(state), "config": ocp.args.JsonSave(config)}
            checkpoints.save(step, args=ocp.args.Composite(**items))
    shapes = jax.eval_shape(lambda: state)
    shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), shapes)
    chance, refused = random.Random(0), 0
    for trial in range(20):
        folder = tmp_path / str(trial)
        shutil.copytree(tmp_path / "whole", folder)
        files = sorted(path for path in (folder / "2").rglob("*") if path.is_file())
        path = chance.choice([path for path in files if path.stat().st_size])
        os.truncate(path, chance.randrange(path.stat().st_size))
        with ocp.CheckpointManager(folder) as checkpoints:
            try:
                restored = gpt.restore(checkpoints, shapes, shardings, config)
            except SystemExit as error:
                expected = f"the checkpoint {folder / '2'} cannot be read: "
                assert str(error).startswith(expected), error
                assert str(error).endswith("Delete its folder to go on from the one before it")
                refused += 1
            else:
                chex.assert_trees_all_equal(restored, state)
        gc.collect()  # what Orbax left is warned of here, not in another test
    assert 5 <= refused < 20
