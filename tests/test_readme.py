"""What the README says is so: its code runs, its figures are the committed measurements."""

import json
import re
from pathlib import Path

import pytest

import muon_jax.benchmarks

README = (Path(__file__).parents[1] / "README.md").read_text()
RESULTS = Path(muon_jax.benchmarks.__file__).parent / "results"


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.S))
def test_code_runs(code):
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("benchmark", ["syrk", "newton_schulz"])
def test_figures_are_those_of_the_results(benchmark):
    report = json.loads((RESULTS / f"{benchmark}_h200.json").read_text())
    assert report["device"] == "NVIDIA H200"
    for measurement in report["measurements"]:
        times = {k: v["device"][1] for k, v in measurement["microseconds"].items()}
        jnp, ours = (f"{t:.{1 if t < 100 else 0}f}" for t in (times["jnp"], times["None"]))
        shape = "×".join(map(str, measurement["shape"]))
        ratio = times["jnp"] / times["None"]
        assert f"| {shape} | {jnp} | {ours} | {ratio:.2f}× |" in README


def test_the_commands_are_found_by_ci():
    commands = re.findall(r"^python3\.12 .*", README, re.M)
    assert len(commands) == 2
    assert commands[0].endswith("examples/quickstart.py")
    assert ".venv/bin/pytest" in commands[1]
