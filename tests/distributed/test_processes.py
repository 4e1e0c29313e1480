"""Several processes are one program: on four CPU devices, and over NCCL on two GPUs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import helpers
import jax
import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "process.py"
on_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]
PLATFORMS = ["cpu", pytest.param("cuda", marks=on_gpus)]


def started(platform, folder, count, *arguments, killed_after=None):
    """The processes of a run, each with a GPU of its own where there are GPUs."""
    folder.mkdir(exist_ok=True)
    address = helpers.free_address()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": platform,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(platform == "cpu"),
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # Else each process times candidates, and may choose another.
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
    }
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    runs = []
    for index in range(count):
        command = [sys.executable, str(SCRIPT), str(folder), "--coordinator", address]
        command += ["--process", str(index), "--processes", str(count), *arguments]
        if killed_after and index == count - 1:
            command += ["--killed-after", str(killed_after)]
        visible = gpus if count == 1 else gpus[index : index + 1]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        runs.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    return runs


def finished(runs):
    """What each process printed."""
    printed = []
    for run in runs:
        output, errors = run.communicate(timeout=200)
        assert run.returncode == 0, errors[-3000:]
        printed.append(output)
    return printed


def results(folder):
    return {file.name: np.load(file) for file in folder.glob("*.npy")}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("axes", helpers.mostly_nightly(["Explicit", "Auto"], (), ["Auto"]))
def test_two_processes_are_one(tmp_path, axes, platform):
    both = [started(platform, tmp_path / str(n), n, "--axes", axes) for n in (1, 2)]
    finished(sum(both, []))
    one, two = results(tmp_path / "1"), results(tmp_path / "2")
    assert len(one) == 6 * (4 if platform == "cpu" else 2)
    assert one.keys() == two.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(two[name], x, err_msg=name)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("axes", helpers.mostly_nightly(["Explicit", "Auto"], ()))
def test_killed_they_go_on_bit_for_bit(tmp_path, axes, platform):
    """NorMuon with metrics; the process that is left waits for the other, as a launcher sees."""

    def run(name, **kwargs):
        folder = tmp_path / name
        checkpoints = str(folder / "checkpoints")
        arguments = ("--axes", axes, "--checkpoints", checkpoints)
        return folder, started(platform, folder, 2, *arguments, **kwargs)

    straight, runs = run("straight")
    finished(runs)
    killed, (first, second) = run("killed", killed_after=1)
    try:
        second.communicate(timeout=200)
        assert second.returncode == -signal.SIGKILL
    finally:
        first.kill()
        first.communicate()
    assert not results(killed)
    _, runs = run("killed")
    assert all("goes on from step 1" in printed for printed in finished(runs))
    expected, found = results(straight), results(killed)
    assert "16x24 update_rms.npy" in found
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
