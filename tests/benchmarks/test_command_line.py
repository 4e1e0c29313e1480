"""Flags that several commands share, sentences instead of tracebacks, and progress."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks._accuracy import spectra
from benchmarks._command_line.progress import measure_each, with_bar
from benchmarks._records.recording import write_report
from benchmarks._times import commands, rivals
from benchmarks._times.shapes import QUICK_SHAPES

QUICK = [name for name, command in benchmarks.COMMANDS.items() if command.quick is not None]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def parsed(monkeypatch):
    """The arguments with which a command would run."""

    def parse(*words):
        seen = []
        command = benchmarks.COMMANDS[words[0]]._replace(run=seen.append)
        monkeypatch.setitem(benchmarks.COMMANDS, words[0], command)
        benchmarks.main(words)
        return seen[0]

    return parse


@pytest.mark.parametrize("name", QUICK)
def test_quick_changes_defaults_and_no_flag_that_is_given(name, parsed):
    full, quick = vars(parsed(name)), vars(parsed(name, "--quick"))
    changed = {key for key in full if full[key] != quick[key]} - {"run"}
    assert changed == {*(benchmarks.COMMANDS[name].quick or {}), "quick"}
    given = {"training": ["--steps", "20"], "accuracy": ["--sizes", "8"], "tpu": ["--width", "64"]}
    given |= {"adversary": ["--sizes", "8"], "start": ["--repetitions", "2"]}
    given |= {"from_adamw": ["--seeds", "2"]}
    words = given.get(name, ["--dtype", "float16"])
    dest = words[0].removeprefix("--")
    expected = vars(parsed(name, *words))[dest]
    assert vars(parsed(name, *words, "--quick"))[dest] == expected != quick[dest]


def test_commands_that_have_a_quick_form():
    assert QUICK == [
        "syrk",
        "newton_schulz",
        "muon",
        "sharded",
        "start",
        "accuracy",
        "adversary",
        "training",
        "from_adamw",
        "tpu",
    ]


@pytest.mark.slow
def test_a_quick_run_says_so_and_what_a_cpu_cannot_measure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rivals, "_reason_missing", lambda package: "left out")
    file = tmp_path / "syrk.json"
    benchmarks.main(["syrk", "--quick", "--json", str(file)])
    out = capsys.readouterr().out
    heading, *absent, reason = out.splitlines()[:-3]
    lines = out.splitlines()[-3:]
    assert "quick: few cases in few rounds: no record" in heading
    assert absent == ["absent: quack (left out)", "absent: quack + C (left out)"]
    assert reason.startswith("not measured on cpu: the kernels, the device's clock")
    assert [line.split(":")[0].replace("×", "x") for line in lines] == QUICK_SHAPES.split()
    report = json.loads(file.read_text())
    assert report["quick"] == "few cases in few rounds: no record" and report["rounds"] == 3
    for measurement in report["measurements"]:
        for by_clock in measurement["microseconds"].values():
            low, median, high = by_clock["wall"]
            assert 0 < low <= median <= high


def test_cases_sized_for_gpus_point_to_quick(parsed, monkeypatch):
    arguments = parsed("newton_schulz")
    assert "see --quick" in commands._lines_without_gpu(arguments)[-1]
    monkeypatch.setattr(commands, "on_gpu", lambda: True)
    assert commands._lines_without_gpu(arguments) == []


@pytest.mark.nightly
def test_quick_updates(tmp_path, capsys):
    file = tmp_path / "muon.json"
    benchmarks.main(["muon", "--quick", "--json", str(file)])
    (measurement,) = json.loads(file.read_text())["measurements"]
    assert measurement["model"] == "2-layers"
    heading = capsys.readouterr().out.splitlines()[0]
    assert "iteration: ours in half precision; optax's in the dtype of the gradients" in heading


@pytest.mark.nightly
def test_quick_accuracy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(spectra, "absent_spectra", lambda: {"momentum": "left out"})
    file = tmp_path / "accuracy.json"
    words = ["--sizes", "16", "--methods", "standard"]
    benchmarks.main(["accuracy", "--quick", *words, "--json", str(file)])
    report = json.loads(file.read_text())
    assert {m["name"] for m in report["measurements"]} == {"standard", "polar_express", "balanced"}
    assert report["sizes"] == "16"
    assert "no record" in report["quick"]
    assert "quick: few cases in few rounds" in capsys.readouterr().out


@pytest.mark.nightly
def test_quick_training(tmp_path, capsys):
    file = tmp_path / "training.json"
    benchmarks.main(["training", "--quick", "--json", str(file)])
    report = json.loads(file.read_text())
    assert report["training"]["steps"] == 50 and "no record" in report["quick"]
    assert "quick: few cases in few rounds" in capsys.readouterr().out


@pytest.mark.parametrize("command", QUICK)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for file, sentence in (
        (tmp_path / "nowhere" / "a.json", "does not exist: make"),
        (tmp_path, "is a folder: pass a file in it"),
        (tmp_path / "pipe", "is a pipe or a device: pass a file"),
    ):
        with pytest.raises(SystemExit) as stopped:
            benchmarks.main([command, "--json", str(file)])
        assert stopped.value.code == 2 and sentence in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path):
    with pytest.raises(SystemExit, match="no such file|No such file"):
        benchmarks.main(["report", str(tmp_path / "absent.json")])


def test_errors_of_other_files_keep_their_traceback(parsed, monkeypatch):
    def run(arguments):
        open("/nowhere/else")

    command = benchmarks.COMMANDS["coefficients"]._replace(run=run)
    monkeypatch.setitem(benchmarks.COMMANDS, "coefficients", command)
    with pytest.raises(FileNotFoundError):
        benchmarks.main(["coefficients"])


def test_missing_packages_of_the_group_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(SystemExit, match="tqdm is not installed: pip install --group benchmarks"):
        benchmarks.main(["syrk", "--shapes", "8x8"])


def test_other_missing_packages_keep_their_traceback(monkeypatch):
    def run(arguments):
        raise ModuleNotFoundError("no", name="other")

    command = benchmarks.COMMANDS["coefficients"]._replace(run=run)
    monkeypatch.setitem(benchmarks.COMMANDS, "coefficients", command)
    with pytest.raises(ModuleNotFoundError):
        benchmarks.main(["coefficients"])


def test_progress_is_on_a_terminal_and_away_while_results_are_printed(monkeypatch):
    for stderr in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stderr)
        measured = measure_each([2, 3], lambda case: case * case, lambda case: f"case {case}")
        assert next(measured) == 4
        *_, line, rest = ["", *stderr.getvalue().split("\r")]
        assert not line.strip() and not rest
        assert [*measured] == [9]
        assert ("case 3" in stderr.getvalue()) == stderr.isatty()


def test_progress_of_an_unknown_number_comes_back_after_each_result(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())

    def measurements():
        for i in range(2):
            assert sys.stderr.getvalue().split("\r")[-1].strip().startswith(f"{50 * i}%|")
            yield i

    assert [*with_bar(measurements(), 0, 2)] == [0, 1]


def test_a_report_is_whole_when_its_writing_is_cut_short(tmp_path, monkeypatch):
    def cut_short(path, text):
        with path.open("w") as file:
            file.write(text[:5])
        raise KeyboardInterrupt

    file = tmp_path / "a.json"
    for count in (1, 2):
        write_report({"count": count}, file)
    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(KeyboardInterrupt):
        write_report({"count": 3}, file)
    assert json.loads(file.read_text()) == {"count": 2}
