"""What `start` runs, in which processes, and what it says of them."""

import itertools
import json
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from helpers import random_tree

from benchmarks import __main__ as benchmarks
from benchmarks._records.pages import page
from benchmarks._start import command, first_update
from benchmarks._start.command import Start
from benchmarks._times import models
from benchmarks._times.updates import COMPARED, update_and_arguments

STACKED = {"embedding": (4, 2), "bias": (24,), "experts": (3, 8, 24)}


def test_optimizers_start_in_turns_in_another_order_each_time():
    starts = command.schedule("2-layers", 3)
    turns = [*itertools.batched(starts, len(COMPARED))]
    assert [turn[0].cache for turn in turns] == ["none"] * 3 + ["filling"] + ["warm"] * 3
    for turn in turns:
        assert {*turn} == {Start("2-layers", name, turn[0].cache) for name in COMPARED}
    assert len({tuple(start.optimizer for start in turn) for turn in turns}) > 2


@pytest.fixture
def canned(monkeypatch):
    """Starts that take seconds of our choice, in place of processes; all that was called."""
    called = []
    seconds = {"optax": itertools.count(1), "None": itertools.count(2), "balanced": iter([3] * 9)}

    def run(start, folder):
        called.append(start)
        compile_seconds = float(next(seconds[start.optimizer]))
        return {
            "seconds": {"trace": 0.5, "lower": 0.25, "compile": compile_seconds},
            "cached": start.cache == "warm",
            "kernels": 0 if start.optimizer == "optax" else 7,
            "error": 0.01 * compile_seconds,
        }

    true = command.environment
    monkeypatch.setattr(command, "run_in_fresh_process", run)
    monkeypatch.setattr(command, "environment", lambda: called.append("environment") or true())
    return called


def test_it_prints_and_reports(canned, tmp_path, capsys):
    file = tmp_path / "start_cpu.json"
    benchmarks.main(["start", "--json", str(file)])
    *starts, last = canned
    assert starts == command.schedule("gpt2-small", 3)
    assert last == "environment"  # the GPU is the processes' until then
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("benchmark: start, device: ") and len(lines) == 6
    assert lines[1] == (
        "model gpt2-small, cache none, optimizer muon, trace 0.50 (0.50–0.50),"
        " lower 0.25 (0.25–0.25), compile 3.00 (2.00–4.00), all 3.75 (2.75–4.75),"
        " all / optax's 1.36×, from the cache 0, kernels 7, error 0.04"
    )
    report = json.loads(file.read_text())
    cold, warm = report["measurements"]
    assert cold["parameters"] == warm["parameters"] == 124_439_808
    assert cold["start_seconds"]["optax"]["all"] == [1.75, 2.75, 3.75]
    assert warm["start_seconds"]["optax"]["compile"] == [5, 6, 7]  # the fourth filled the cache
    assert warm["cached"] == dict.fromkeys(COMPARED, 3)
    row = "| gpt2-small | warm | balanced | 0.50 (0.50–0.50) | 0.25 (0.25–0.25) | 3.00 (3.00–3.00)"
    benchmarks.main(["report", str(file)])
    assert row in capsys.readouterr().out
    text = page(report, file.name)
    assert text.startswith("# Compiling the first update: ") and row in text
    assert "\n\nSeconds in fresh processes: median (lowest–highest)." in text


def test_a_process_has_this_environment_but_for_the_cache(monkeypatch):
    ran = []

    def run(words, *, env, **kwargs):
        ran.append((words[1:], env))
        return SimpleNamespace(returncode=0, stdout='{"cached": true}\n')

    monkeypatch.setenv("XLA_FLAGS", "--xla_some")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/of/the/user")
    monkeypatch.setattr(command.subprocess, "run", run)
    for cache in ("none", "warm"):
        found = command.run_in_fresh_process(Start("2-layers", "None", cache), "/new")
        assert found == {"cached": True}
    (words, none), (_, warm) = ran
    assert words == ["-m", "benchmarks._start.first_update", "2-layers", "None"]
    assert none == {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    assert warm["XLA_FLAGS"] == "--xla_some"
    assert warm["JAX_COMPILATION_CACHE_DIR"] == "/new"
    assert warm["JAX_ENABLE_COMPILATION_CACHE"] == "true"


def test_a_process_that_fails_fails_the_command(monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="Traceback\nArithmeticError: wrong")
    monkeypatch.setattr(command.subprocess, "run", lambda *args, **kwargs: failed)
    said = "start 2-layers, .*, none: the process failed.\nTraceback\nArithmeticError: wrong"
    with pytest.raises(SystemExit, match=said):
        benchmarks.main(["start", "--quick"])


@pytest.mark.parametrize("count", ["0", "-1", "1.5"])
def test_repetitions_are_counted(count, capsys):
    with pytest.raises(SystemExit):
        benchmarks.main(["start", "--repetitions", count])
    assert f"'{count}' must be a whole number, 1 or more" in capsys.readouterr().err


def test_a_wrong_first_update_fails(monkeypatch):
    monkeypatch.setitem(models.MODELS, "stacked", STACKED)
    gradients = random_tree(STACKED, 0)
    parameters = jax.tree.map(jnp.zeros_like, gradients)
    update, arguments = update_and_arguments(COMPARED["optax"], gradients, parameters)
    right, _ = jax.jit(update)(*arguments)

    def error(**changed):
        updates = {**right, **changed}
        return first_update.error_of_smallest_matrix(updates, gradients, "stacked", "optax")

    assert error() < 1e-5
    for name, factor, reason in (
        ("experts", 1.2, "the update of experts differs from that in float64 by 2.00e-01"),
        ("experts", -1.0, "the update of experts differs from that in float64 by 2.00e"),
        ("bias", jnp.nan, "the update of bias is not finite"),
        ("embedding", jnp.inf, "the update of embedding is not finite"),
    ):
        with pytest.raises(ArithmeticError, match=f"start stacked, optax: {reason}"):
            error(**{name: factor * right[name]})


@pytest.mark.nightly
def test_a_second_process_takes_the_update_from_the_cache(tmp_path):
    for cache, is_hit in (("filling", False), ("warm", True)):
        found = command.run_in_fresh_process(Start("2-layers", "optax", cache), str(tmp_path))
        assert found["cached"] is is_hit
        assert found["kernels"] == 0 and 0 < found["error"] < 0.1
        assert min(found["seconds"].values()) > 0


@pytest.mark.nightly
def test_quick_start(tmp_path, capsys):
    file = tmp_path / "start.json"
    benchmarks.main(["start", "--quick", "--json", str(file)])
    report = json.loads(file.read_text())
    assert report["repetitions"] == 1 and "no record" in report["quick"]
    cold, warm = report["measurements"]
    assert {*cold["cached"].values()} == {0} and {*warm["cached"].values()} == {1}
    assert "quick: few cases in few rounds" in capsys.readouterr().out
