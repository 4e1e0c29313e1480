import dataclasses
import hashlib
import json
import platform
import re

import jax
import numpy as np
import pytest

from muon_jax.benchmarks import __main__ as benchmarks
from muon_jax.benchmarks._records.tables import measurement_line
from muon_jax.benchmarks._training import runs
from muon_jax.benchmarks._training.gpt import GPT
from muon_jax.benchmarks._training.stdlib_text import read_text
from muon_jax.benchmarks._training.text import Text

MODEL = GPT(layers=1, width=32, heads=2, context=32)
TRAINING = runs.Training(steps=80, batch_size=8)
SIZES = "--steps 80 --batch-size 8 --layers 1 --width 32 --heads 2 --context 32"


@pytest.fixture(scope="module")
def text():
    return read_text()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("training") / "training.json"
    words = f"training --variants standard fast --learning-rates 0 0.05 --seeds 2 {SIZES} --json"
    benchmarks.main([*words.split(), str(path)])
    return path


@pytest.fixture
def measured(file):
    return {m["name"]: m for m in json.loads(file.read_text())["measurements"]}


def test_text_is_split_by_file_and_leaves_tests_out(tmp_path):
    for i in reversed(range(12)):
        (tmp_path / f"m{i:02}.py").write_text(f"{i};")
    for folder in ("test", "pkg/tests", "site-packages"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("left out")
    (tmp_path / "pkg" / "m99.py").write_text("99;")
    (tmp_path / "notes.txt").write_text("left out")
    text = read_text(tmp_path)
    train, validation = b"1;2;3;4;5;6;7;8;9;11;99;", b"0;10;"
    assert text.train.tobytes() == train and text.validation.tobytes() == validation
    assert text.identity() == {
        "name": f"Python {platform.python_version()}, folder {tmp_path.name}",
        "files": 13,
        "train_tokens": len(train),
        "validation_tokens": len(validation),
        "validation_bytes": len(validation),
        "vocabulary": 256,
        "sha256": hashlib.sha256(train + validation).hexdigest(),
    }


def test_text_needs_two_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="has 0 Python files"):
        read_text(tmp_path)


@pytest.mark.nightly
def test_the_loss_falls_below_that_of_byte_frequencies(text, measured):
    counts = np.bincount(text.train, minlength=256) + 1
    unigram = -np.log(counts / counts.sum())[text.validation].mean()
    for measurement in measured.values():
        curves = np.array(measurement["curves"])
        assert curves.shape == (2, 2, runs.EVALUATIONS)
        assert (curves[..., 0] < np.log(256)).all()
        assert (curves[1, :, -1] < unigram).all()
        assert measurement["losses"] == curves[..., -1].tolist()


@pytest.mark.nightly
def test_a_run_alone_is_the_run_among_others(text, measured):
    alone = runs.measure_training("standard", MODEL, TRAINING, text, [0.05], [1])
    among_others = measured["standard"]["curves"][1][1]
    np.testing.assert_allclose(alone["curves"][0][0], among_others, rtol=0.005)


@pytest.mark.nightly
def test_runs_of_a_seed_share_all_but_the_matrices(measured):
    # At learning rate 0 what is left of a variant is its seed.
    standard, fast = (np.array(measured[name]["curves"]) for name in ("standard", "fast"))
    np.testing.assert_allclose(fast[0], standard[0], rtol=0.002)
    assert np.abs(standard[0, 0] - standard[0, 1]).max() > 0.02


@pytest.mark.nightly
def test_learning_rates_and_coefficients_differ(measured):
    standard, fast = (np.array(measured[name]["losses"]) for name in ("standard", "fast"))
    assert (standard[1] < standard[0] - 0.05).all()
    assert (fast[1] != standard[1]).all()


def test_the_model_sees_no_future_byte():
    parameters = MODEL.init(jax.random.key(0))
    parameters["head"] = jax.random.normal(jax.random.key(1), parameters["head"].shape)
    text = np.arange(MODEL.context, dtype=np.uint8)[None]
    other = text.copy()
    other[0, 20] = 255
    logits = jax.jit(MODEL.logits)
    change = logits(parameters, text) - logits(parameters, other)
    assert not np.any(change[0, :20]) and np.all(np.any(change[0, 20:], axis=-1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPT(width=30, heads=4), "width a multiple of heads, got .*'width': 30"),
        (lambda: GPT(layers=0), "sizes must be at least 1"),
        (lambda: runs.Training(steps=25), "a positive multiple of 10.* got 25"),
    ],
)
def test_sizes_that_are_none(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_windows_need_text():
    text = Text(np.zeros(100, np.uint8), np.zeros(32, np.uint8), 2, 256, "zeros", 32)
    with pytest.raises(ValueError, match="context . 1 = 33 bytes .* got 100 and 32"):
        runs.validation_windows(text, MODEL, TRAINING)


def test_seeds_estimate_noise():
    with pytest.raises(ValueError, match="--seeds must be at least 2, to estimate noise, got 1"):
        benchmarks.main(["training", "--seeds", "1"])


@pytest.mark.nightly
def test_it_measures_and_reports(file, text, capsys, tmp_path):
    report = json.loads(file.read_text())
    assert {"device", "commit", "python", "jax"} <= set(report)
    assert report["text"] == text.identity()
    assert report["model"] == dataclasses.asdict(MODEL)
    assert report["training"] == dataclasses.asdict(TRAINING)
    assert [m["arguments"] for m in report["measurements"]] == [
        {"ns_coeffs": "standard"},
        {"ns_coeffs": "fast"},
    ]
    line = measurement_line(report["measurements"][1])
    assert re.fullmatch(r"fast: mean losses \d\.\d{4}, \d\.\d{4}; .* s of compilation", line)
    benchmarks.main(["report", str(file), "--png", str(tmp_path / "a.png")])
    assert re.search(r"\| standard \| 0\.05 \| \d\.\d{4} ± 0", capsys.readouterr().out)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
