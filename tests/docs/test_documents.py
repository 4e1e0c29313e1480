"""What the documents say is so: their code runs, their figures are the committed measurements."""

import ast
import csv
import json
import re
import sys
from pathlib import Path

import pytest

import muon_jax.benchmarks
import pallas_kernels
from muon_jax import PRESETS
from muon_jax.benchmarks._records.tables import markdown
from muon_jax.benchmarks._records.training_losses import verdicts

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = Path(muon_jax.benchmarks.__file__).parent / "results"
LADDER = (RESULTS.parent / "README.md").read_text()
BENCHMARKS = (RESULTS.parent / "__main__.py").read_text()
DOCS = ROOT / "muon_jax" / "docs"
DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "muon_jax" / "NUMERICS.md", *sorted(DOCS.glob("*.md")))
}


@pytest.mark.parametrize(
    ("name", "code", "printed"),
    [
        pytest.param(
            name,
            *match.groups(),
            id=f"{name}-{index}",
            marks=pytest.mark.slow if name.endswith("NUMERICS.md") else [],
        )
        for name, text in DOCUMENTS.items()
        for index, match in enumerate(
            re.finditer(
                r"^```python\n(.*?)^```$(?:\n\nprints[^\n]*\n\n```text\n(.*?)^```$)?",
                text,
                re.S | re.M,
            )
        )
    ],
)
def test_code_runs(name, code, printed, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which code may add
    exec(compile(code, name, "exec"), {})
    if printed:
        assert capsys.readouterr().out.strip() == printed.strip()


def test_commands_name_what_there_is():
    commands = "\n".join(
        re.findall(r"^```bash\n(.*?)^```$", "\n".join(DOCUMENTS.values()), re.S | re.M)
    )
    for name in re.findall(r"examples/\w+\.py", commands):
        assert (ROOT / name).is_file()
    benchmarks = {*re.findall(r"python -m muon_jax.benchmarks (\w+)", commands)}
    assert benchmarks and all(f'"{name}"' in BENCHMARKS for name in benchmarks)


WRAPPED = r":\ .+"  # the end of a message that names what another one is about


def errors_raised() -> list[str]:
    """Regular expressions for the messages of all errors that the packages raise."""

    def pattern(node: ast.AST) -> str:
        if isinstance(node, ast.Constant):
            return re.escape(str(node.value))
        return "".join(map(pattern, node.values)) if isinstance(node, ast.JoinedStr) else ".+"

    return [
        pattern(node.exc.args[0])
        for package in (muon_jax, pallas_kernels)
        for path in Path(package.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]


def test_errors_of_the_questions_are_raised():
    errors = re.findall(r"^```text\n(.*?)\n```$", (DOCS / "faq.md").read_text(), re.S | re.M)
    patterns = errors_raised()
    assert len(errors) > 20
    said = [pattern for pattern in patterns if not pattern.endswith(WRAPPED)]
    wrapping = [pattern for pattern in patterns if pattern.endswith(WRAPPED)]
    said += [f"{pattern.removesuffix('.+')}(?:{'|'.join(said)})" for pattern in wrapping]
    for error in errors:
        assert any(re.fullmatch(pattern, error) for pattern in said), error


def test_presets_are_those_of_the_table():
    stated = re.findall(
        r'^\| `"\w+"` \|.* \| [\d.]+ \|$', (DOCS / "parameters.md").read_text(), re.M
    )
    expected = []
    for name, given in PRESETS.items():
        rms, shape_scale = given.get("consistent_rms"), given.get("shape_scale", "clipped_ratio")
        dtype = given["ns_dtype"]
        cells = [
            f'`"{name}"`',
            f'`"{given.get("ns_coeffs", "standard")}"`',
            f'`"{dtype}"`' if dtype else "`None`",
            f'`"{given.get("momentum", "bias_corrected")}"`',
            "yes" if given.get("nesterov", True) else "no",
            f"`consistent_rms={rms}`" if rms else f'`"{shape_scale}"`',
            str(given.get("weight_decay", 0.0)),
        ]
        expected.append(f"| {' | '.join(cells)} |")
    assert stated == expected


def figure(microseconds: float) -> str:
    return f"{microseconds:.{1 if microseconds < 100 else 0}f}"


def measurements(benchmark: str) -> list[tuple[dict, dict]]:
    """Each measurement of the results, and its medians on the device."""
    report = json.loads((RESULTS / f"{benchmark}_h200.json").read_text())
    assert report["device"] == "NVIDIA H200"
    return [
        (m, {name: clocks["device"][1] for name, clocks in m["microseconds"].items()})
        for m in report["measurements"]
    ]


def row(measurement: dict, *cells: str) -> str:
    return f"| {' | '.join(['×'.join(map(str, measurement['shape'])), *cells])} |"


def test_times_of_the_iteration_are_those_of_the_results():
    for measurement, times in measurements("newton_schulz"):
        composed = (times[name] for name in ("fast", "balanced", "accurate"))
        cells = [
            *map(figure, (times["optax f32"], times["jnp"], times["None"])),
            f"{times['jnp'] / times['None']:.2f}×",
            *map(figure, composed),
        ]
        assert row(measurement, *cells) in README


def test_times_of_packages_for_torch_are_those_of_the_results():
    for measurement, times in measurements("newton_schulz"):
        gram = min(times["gram_newton_schulz"], times["gram_newton_schulz, standard"])
        peers = [times["torch.compile"], gram, times["dion"], times["dion, aol"]]
        ours = min(times["None"], times.get("standard, gram", float("inf")))
        balanced = times["balanced"]
        cells = [*map(figure, [*peers, ours]), f"{min(peers[:3]) / ours:.2f}×"]
        cells += [
            figure(balanced),
            f"{min(peers[:3]) / balanced:.2f}×",
            f"{peers[3] / balanced:.2f}×",
        ]
        assert row(measurement, *cells) in README


def test_times_of_the_products_are_those_of_the_results():
    expected = set()
    for measurement, times in measurements("syrk"):
        cells = []
        for addend in ("", " + C"):
            jnp, ours = times[f"jnp{addend}"], times[f"None{addend}"]
            cells += [figure(jnp), figure(ours), f"{jnp / ours:.2f}×"]
        expected.add(row(measurement, *cells, measurement["chosen"]))
    stated = set(re.findall(r"^\| [\d×]+ \|.* \| (?:xla|triton|mosaic_gpu) \|$", README, re.M))
    assert stated and stated <= expected
    assert expected <= set(LADDER.splitlines())


def test_whole_updates_are_those_of_the_results():
    for measurement, times in measurements("muon"):
        optax, *ours = (times[name] / 1000 for name in ("optax", "None", "balanced"))
        cells = [f"{optax:.3g}"]
        for time in ours:
            cells += [f"{time:.3g}", f"{optax / time:.2f}×"]
        for name, unit, digits in [
            ("launches", 1, 0),
            ("temp_bytes", 2**20, 0),
            ("compile_seconds", 1, 1),
        ]:
            values = measurement[name].values()
            cells.append(" / ".join(f"{value / unit:.{digits}f}" for value in values))
        assert f"| {' | '.join([measurement['model'], *cells])} |" in README


def test_sharded_updates_are_those_of_the_results():
    for m in json.loads((RESULTS / "sharded_h200.json").read_text())["measurements"]:
        times = {name: clocks["wall"][1] / 1000 for name, clocks in m["microseconds"].items()}
        exchange = m.get("timeline", {}).get("None")
        shown = ("optax", "None", "balanced")
        cells = [
            m["model"],
            ", ".join(f"{name}={size}" for name, size in m["mesh"].items()),
            *(f"{times[name]:.3g}" for name in ("optax", "None")),
            f"{times['optax'] / times['None']:.2f}×",
            f"{times['balanced']:.3g}",
            " / ".join(str(sum(m["collectives"][name].values())) for name in shown),
            " / ".join(f"{m['temp_bytes'][name] / 2**20:.0f}" for name in shown),
            "{exchanging:.1f}, {exposed:.1f}".format(**{k: t / 1000 for k, t in exchange.items()})
            if exchange
            else "none",
        ]
        assert f"| {' | '.join(cells)} |" in README


def test_losses_of_the_gpt_are_those_of_the_results():
    losses = []
    for run in ("muon", "optax", "adamw", "muon-balanced"):
        rows = (RESULTS / "gpt_h200" / run / "metrics.csv").read_text().splitlines()
        *_, last = csv.DictReader(rows)
        assert last["step"] == "400"
        losses.append(f"{float(last['held_out_loss']):.3f}")
    assert "Held-out losses are {}, {} and {}, and {} with\n".format(*losses) in README


def test_accuracies_are_those_of_the_notebook():
    notebook = json.loads((ROOT / "examples" / "cifar10.ipynb").read_text())
    (table,) = notebook["cells"][-1]["outputs"]
    rows = re.findall(r"([\d.]+) ± ([\d.]+) % .* ([\d.]+) +[\d.]+ s\n", "".join(table["text"]))
    assert len(rows) == 4
    for accuracy, deviation, seconds in rows:
        assert f"{float(accuracy):.1f} ± {float(deviation):.1f}" in README
        assert f"{8 * float(seconds):.2f}" in README


def test_losses_are_those_of_the_results():
    report = json.loads((RESULTS / "training_h100.json").read_text())
    rows = [line for line in markdown(report).splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(report["variants"])
    assert {*rows} <= {*LADDER.splitlines()}
    assert all(verdict.startswith("holds: ") for verdict in verdicts(report)[1:])


def test_the_commands_are_found_by_ci():
    commands = re.findall(r"^python3\.12 .*", README, re.M)
    assert len(commands) == 2
    assert commands[0].endswith("examples/quickstart.py")
    assert ".venv/bin/pytest" in commands[1]
