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


def figure(microseconds: float) -> str:
    return f"{microseconds:.{1 if microseconds < 100 else 0}f}"


def test_times_of_the_iteration_are_those_of_the_results():
    report = json.loads((RESULTS / "newton_schulz_h200.json").read_text())
    assert report["device"] == "NVIDIA H200"
    for measurement in report["measurements"]:
        times = {k: v["device"][1] for k, v in measurement["microseconds"].items()}
        errors = measurement["errors"]
        cells = [
            "×".join(map(str, measurement["shape"])),
            figure(times["jnp"]),
            figure(times["None"]),
            f"{times['jnp'] / times['None']:.2f}×",
            figure(times["optax f32"]),
            *(f"{errors[name]:.3f}" for name in ("jnp", "None")),
        ]
        assert f"| {' | '.join(cells)} |" in README


def test_times_of_the_products_are_those_of_the_results():
    report = json.loads((RESULTS / "tune_h200.json").read_text())
    assert report["device"] == "NVIDIA H200"
    for entry in report["entries"]:
        times = entry["microseconds"]
        mosaic = min(time for name, time in times.items() if name.startswith("mosaic_gpu"))
        xla = times["xla, not symmetrized"]
        batch, *sizes = entry["shape"]
        shape = "×".join(map(str, sizes if batch == 1 else entry["shape"]))
        cells = [
            shape + " + C" * entry["addend"],
            *map(figure, (xla, times["triton"], mosaic)),
            f"{xla / mosaic:.2f}×",
        ]
        assert f"| {' | '.join(cells)} |" in README


def test_the_commands_are_found_by_ci():
    commands = re.findall(r"^python3\.12 .*", README, re.M)
    assert len(commands) == 2
    assert commands[0].endswith("examples/quickstart.py")
    assert ".venv/bin/pytest" in commands[1]
