import json
import re

import numpy as np
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks._records.figures import FIGURES
from benchmarks._records.pages import RESULTS
from benchmarks._records.palette import COLORS
from benchmarks._records.set_figures import singular_values_figure
from benchmarks._times.updates import IN_16_BITS
from benchmarks._training.optimizers import VARIANTS


def test_one_command_draws_all_figures_of_the_documents(tmp_path, monkeypatch):
    assert {path.stem for path in RESULTS.glob("*.png")} == {*FIGURES}
    monkeypatch.delitem(FIGURES, "singular_values")  # trains, and has a test of its own
    benchmarks.main(["report", "--figures", str(tmp_path)])
    assert {path.stem for path in tmp_path.iterdir()} == {*FIGURES}
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def medians(record, case, clock):
    """The median times of the first measurement that has this model or shape."""
    measurements = json.loads((RESULTS / f"{record}.json").read_text())["measurements"]
    (found,) = (m for m in measurements if case in (m.get("model"), m.get("shape")))
    return {name: by_clock[clock][1] for name, by_clock in found["microseconds"].items()}


def test_the_headline_shows_the_results():
    steps, iterations = FIGURES["headline"]().axes
    widths = [bar.get_width() for bar in steps.patches]
    assert len(widths) == 9 and widths[2::3] == sorted(widths[2::3], reverse=True)
    times = medians("muon_h200", "gpt2-small", "device")
    expected = [times[IN_16_BITS] / times[name] for name in ("optax", "None", "balanced")]
    assert widths[:3] == pytest.approx(expected)

    shapes = [label.get_text() for label in iterations.get_yticklabels()]
    five_steps, balanced = (np.ravel(line.get_xdata()) for line in iterations.lines[:2])
    assert len(shapes) == 10 and [*balanced] == sorted(balanced, reverse=True)
    for shape, rival, ours in (
        ([4096, 4096], "dion", "None"),
        ([4096, 16384], "gram_newton_schulz", "standard, gram"),
        ([512, 512], "torch.compile, CUDA graphs", "None"),
    ):
        times, row = (
            medians("newton_schulz_h100", shape, "wall"),
            shapes.index("×".join(map(str, shape))),
        )
        assert five_steps[row] == pytest.approx(times[rival] / times[ours])
        assert balanced[row] == pytest.approx(times[rival] / times["balanced"])


def test_the_figure_of_adamw_shows_the_results():
    (axes,) = FIGURES["from_adamw_cpu"]().axes
    tasks = [label.get_text() for label in axes.get_yticklabels()]
    measured = json.loads((RESULTS / "from_adamw_cpu.json").read_text())["measurements"]
    assert sorted(tasks) == sorted({m["task"] for m in measured})
    for line in axes.lines[1:]:
        for task, shown in zip(tasks, np.ravel(line.get_xdata()), strict=True):
            of_task = [m for m in measured if m["task"] == task]
            best = min(np.mean(m["held_out_losses"]) for m in of_task if m["optimizer"] == "AdamW")
            (loss,) = (
                np.mean(m["held_out_losses"])
                for m in of_task
                if m["optimizer"] == "Muon" and f"{m['consistent_rms']:g}" == line.get_label()
            )
            change = 100 * (loss / best - 1) * np.sign(best)
            assert shown == pytest.approx(np.clip(change, -70, 70))


def test_the_errors_of_sets_are_those_of_the_results():
    (axes,) = FIGURES["accuracy_cpu"]().axes
    shown = {
        label.get_text().strip('"'): bar.get_width()
        for label, bar in zip(axes.get_yticklabels(), axes.patches, strict=True)
    }
    assert [*shown.values()] == sorted(shown.values(), reverse=True)
    measured = json.loads((RESULTS / "accuracy_cpu.json").read_text())["measurements"]
    for name, dtype in (("standard", "bfloat16"), ("balanced", "float16")):
        (cases,) = (
            m["cases"]
            for m in measured
            if (m["name"], m["method"], m["dtype"]) == (name, "standard", dtype)
        )
        errors = [c["errors"][0] for c in cases if c["spectrum"] == "momentum, step 50"]
        assert shown[name] == pytest.approx(np.median(errors))


def test_singular_values_before_and_after():
    pytest.importorskip("sklearn")
    panels = singular_values_figure(16, 32).axes
    assert len(panels) == 6
    for axes in panels:
        _, (sigma, before), (x, after) = (np.array(line.get_data()) for line in axes.lines)
        np.testing.assert_array_equal(before, sigma)
        np.testing.assert_array_equal(x, sigma)
        assert sigma[0] == 1 and (np.diff(sigma) <= 0).all()
        large = after[sigma > 0.05]
        assert (large > 0.6).all() and (large < 1.3).all()


def test_names_stand_at_the_starts_of_lines():
    for axes in FIGURES["polynomials"]().axes:
        heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
        starts = {line.get_color(): np.ravel(line.get_ydata())[0] for line in axes.lines[1:]}
        for name, height in heights.items():
            assert height * axes.get_ylim()[1] == pytest.approx(starts[COLORS[name[1:-1]]], abs=0.1)


def test_the_page_says_what_the_polynomials_show():
    text = (RESULTS.parents[1] / "docs" / "coefficients.md").read_text()
    panels = FIGURES["polynomials"]().axes
    lines = {line.get_color(): np.ravel(line.get_ydata()) for axes in panels for line in axes.lines}
    said = re.findall(r'`"(\w+)"`(?: swings)?\s+between (\d\.\d\d) and (\d\.\d\d)', text)
    assert [name for name, *_ in said] == ["standard", "balanced", "accurate"]
    for name, low, high in said:
        y = lines[COLORS[name]]
        y = y[np.argmax(y >= 1) :]
        assert (f"{y.min():.2f}", f"{y.max():.2f}") == (low, high), name


def test_every_variant_has_a_color():
    assert {*VARIANTS} <= {*COLORS}
