import json

import jax.numpy as jnp
import pytest

from muon_jax.benchmarks import __main__ as benchmarks
from muon_jax.benchmarks import _timing


@pytest.fixture(autouse=True)
def two_rounds(monkeypatch):
    monkeypatch.setattr(_timing, "ROUNDS", 2)


@pytest.mark.parametrize("benchmark", benchmarks.SHAPES)
def test_it_times_checks_and_reports(benchmark, monkeypatch, capsys, tmp_path):
    files = ["--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png")]
    monkeypatch.setattr("sys.argv", ["", benchmark, "--shapes", "16x16", "2x8x24", *files])
    assert benchmarks.main() == 0
    assert "16x16: xla, jnp" in capsys.readouterr().out
    report = json.loads((tmp_path / "a.json").read_text())
    assert {"device", "python", "jax", "commit", "dtype", "input"} <= set(report)
    assert [m["shape"] for m in report["measurements"]] == [[16, 16], [2, 8, 24]]
    for measurement in report["measurements"]:
        low, median, high = measurement["microseconds"]["None"]["wall"]
        assert 0 < low <= median <= high
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [1.1, jnp.nan])
def test_a_wrong_result_fails(wrong, monkeypatch):
    right = benchmarks.newton_schulz
    monkeypatch.setattr(benchmarks, "newton_schulz", lambda x: wrong * right(x))
    with pytest.raises(ArithmeticError, match="more than twice that of jnp"):
        benchmarks.measure("newton_schulz", (16, 16), "bfloat16")
