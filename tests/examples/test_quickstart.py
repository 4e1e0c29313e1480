import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

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
    for name in ("AdamW", "Muon"):
        before, after = process.stderr.split(f"{name}: compiling")
        assert name not in before and after.index("\n") < after.index(f"{name:5} seed 0")


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("epochs", "seeds"), [(1, [0]), (2, [3, 5]), (3, [0, 1, 2])])
def test_each_seed_has_a_bar_and_nothing_compiles_behind_it(
    epochs, seeds, quickstart, monkeypatch, capsys
):
    calls = []  # and what was shown before each

    def called(name, result):
        def function(*arguments):
            calls.append((name, capsys.readouterr().err))
            return result

        return function

    monkeypatch.setattr(quickstart, "VisionTransformer", lambda rngs: nnx.Linear(1, 2, rngs=rngs))
    monkeypatch.setattr(quickstart, "train_step", called("train_step", 0.5))
    monkeypatch.setattr(quickstart, "evaluate", called("evaluate", (0.5, 0.75)))
    digits = quickstart.Digits(jnp.zeros((100, 8, 8, 1)), jnp.zeros(100, jnp.int32))
    curves = quickstart.train("Muon", 0.1, (digits, digits), epochs, seeds)
    assert curves.loss.shape == (len(seeds), epochs)
    # Both functions run once, and so compile, before any bar; then 2 steps and one measurement.
    (first, said), (second, nothing) = calls[:2]
    assert {first, second} == {"train_step", "evaluate"}
    assert "Muon: compiling" in said and "seed" not in said and not nothing
    assert len(calls) == 2 + len(seeds) * epochs * 3
    shown = "".join(text for _, text in calls) + capsys.readouterr().err
    bars = re.findall(r"Muon  seed (\d+): +(\d+)%", shown)
    assert [*dict.fromkeys(int(seed) for seed, _ in bars)] == seeds
    for seed in seeds:
        percents = [int(percent) for shown, percent in bars if int(shown) == seed]
        assert percents == sorted(percents) and percents[-1] == 100


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
