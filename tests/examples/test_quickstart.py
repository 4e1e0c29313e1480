import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart.py"


def run(*arguments, cwd):
    command = [sys.executable, str(SCRIPT), *arguments]
    env = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiled sooner
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_it_trains_and_reports(tmp_path):
    process = run("--epochs", "2", "--seeds", "2", cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-2000:]
    losses = {
        name: float(loss)
        for name, loss in re.findall(r"^(AdamW|Muon) +\S+ +([\d.]+) ±", process.stdout, re.M)
    }
    assert losses["Muon"] < losses["AdamW"] < 1.5  # ln 10 = 2.3 is a guess
    assert re.search(r"ran as '(xla|triton)' on \S+", process.stdout)
    assert (tmp_path / "quickstart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--epochs", "0"),
        pytest.param(("--output", "no/such/folder/a.png"), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.slow
def test_wrong_arguments_are_refused(arguments, tmp_path):
    process = run(*arguments, cwd=tmp_path)
    assert process.returncode == 2
    assert arguments[0] in process.stderr
