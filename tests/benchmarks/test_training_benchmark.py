import hashlib
import json
import platform

import jax
import numpy as np
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks._training import runs, study
from benchmarks._training.gpt import GPT
from benchmarks._training.optimizers import make_optimizer
from benchmarks._training.search import learning_rate, least_runs, next_run, power_of
from benchmarks._training.spectra import SHARES, Spectra
from benchmarks._training.stdlib_text import read_text
from benchmarks._training.text import Text

MODEL = GPT(32, layers=1, head_size=16, context=32)
TRAINING = runs.Training(steps=80, batch_size=8, validation_batches=4)


@pytest.fixture(scope="module")
def text():
    return read_text()


@pytest.fixture(scope="module")
def programs(text):
    return {
        name: runs.TrainingProgram(name, MODEL, TRAINING, text) for name in ("standard", "fast")
    }


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
def test_the_loss_falls_below_that_of_byte_frequencies(text, programs):
    counts = np.bincount(text.train, minlength=256) + 1
    unigram = -np.log(counts / counts.sum())[text.validation].mean()
    losses = programs["standard"].train(0.02, 0)["losses"]
    assert len(losses) == runs.EVALUATIONS and losses[0] < np.log(256) and losses[-1] < unigram
    assert programs["standard"].train(0.02, 0)["losses"] == losses
    assert programs["standard"].train(1e9, 0)["losses"][-1] is None


@pytest.mark.nightly
def test_runs_of_a_seed_share_all_but_the_update(programs):
    (starts, of_fast), others = (
        [program._starts(seed) for program in programs.values()] for seed in (1, 2)
    )
    assert (starts == of_fast).all() and (starts != others[0]).any()
    standard, fast = (program.train(0.02, 1)["losses"] for program in programs.values())
    assert standard != fast


@pytest.mark.nightly
def test_facts_of_a_program(programs):
    programs["fast"].train(0.02, 0)
    facts = programs["fast"].facts
    assert facts["matrix_parameters"] == 12 * 32**2
    assert facts["parameters"] == 12 * 32**2 + 2 * 256 * 32 + 32 * 32 + 3 * 32
    assert 0 < facts["optimizer_ms"] < 10 * facts["step_ms"] and facts["compile_seconds"] > 0


def test_momenta_of_a_state():
    params = MODEL.init(jax.random.key(0))
    optimizer = make_optimizer("standard", MODEL, 10, 0.1, 0.01)
    _, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    spectra = Spectra({2})
    for step in (1, 2):
        spectra.add(step, state)
    rows = {row["matrix"]: row for row in spectra.rows()}
    assert [*rows] == ["up", "down", "query", "key", "value", "output"]
    matrix = np.asarray(params["layers"]["attention"][0, 1], np.float64)
    values = np.linalg.svd(matrix, compute_uv=False) / np.linalg.norm(matrix)
    found = rows["key"]["quantiles"]
    np.testing.assert_allclose(found, np.quantile(values, SHARES), rtol=1e-3)
    assert rows["key"]["step"] == 2 and rows["key"]["layer"] == 0


@pytest.mark.parametrize(("name", "of_matrices"), [("adamw", 1.0), ("adamw_quarter", 0.25)])
def test_a_quarter_of_the_rate_is_for_matrices_alone(name, of_matrices):
    params = MODEL.init(jax.random.key(0))
    optimizer = make_optimizer(name, MODEL, 10, 0.0, 0.01)
    state = optimizer.init(params)
    _, state = jax.jit(optimizer.update)(params, state, params)  # at a rate of 0
    updates, _ = jax.jit(optimizer.update)(params, state, params)
    assert np.abs(updates["embedding"]).max() == pytest.approx(0.01, rel=0.01)
    assert np.abs(updates["layers"]["up"]).max() == pytest.approx(0.01 * of_matrices, rel=0.01)


def searched(loss, seeds, origin=0, losses=()):
    """All runs that a search makes, in order."""
    losses = dict(losses)
    while (run := next_run(losses, seeds, origin)) is not None:
        losses[run] = loss(*run)
    return losses


def test_the_search_brackets_the_best_rate_and_refines_it():
    losses = searched(lambda power, seed: (power - 6.9) ** 2 + seed, range(5))
    of_first = [power for power, seed in losses if seed == 0]
    assert of_first == [0, -4, 4, 8, 12, 16, 7]  # around 8, then the vertex
    assert [run for run in losses if run[1] in (1, 2)] == [
        (8, 1),
        (8, 2),
        (4, 1),
        (4, 2),
        (7, 1),
        (7, 2),
    ]
    assert [run for run in losses if run[1] > 2] == [(7, 3), (7, 4)]
    assert len(losses) >= least_runs(5) == 11


def test_a_search_goes_on_where_it_was_and_begins_where_told():
    def loss(power, seed):
        return np.inf if power > 8 else (power + 4) ** 2 + seed

    whole = searched(loss, range(3))
    for count in range(len(whole)):
        assert searched(loss, range(3), losses=[*whole.items()][:count]) == whole
    assert [*searched(loss, range(3), origin=-4)][0] == (-4, 0)
    # The best rate of a narrower model may lie between those √2 apart.
    assert searched(loss, range(3), origin=7) == searched(loss, range(3), origin=8)
    assert searched(loss, range(3), losses=searched(loss, range(2))).keys() == whole.keys()


def test_a_search_goes_down_from_rates_that_diverge():
    losses = searched(lambda power, seed: np.inf if power > -7 else -power, range(2))
    assert {power for power, seed in losses if seed == 0} == {*range(-16, 1, 4)}


def test_a_search_ends_where_all_rates_diverge():
    losses = searched(lambda power, seed: np.inf, range(2))
    assert {*losses} == {(power, 0) for power in range(-64, 1, 4)}


def test_rates_and_powers():
    assert [learning_rate(0.008, power) for power in (-8, 0, 4)] == [0.004, 0.008, 0.011314]
    for power in range(-40, 40):
        assert power_of(0.008, learning_rate(0.008, power)) == power


def empty_report():
    setup = {"text": {"name": "a"}, "model": {"layers": 1}, "training": {"steps": 100}}
    rows = {"programs": [], "measurements": [], "spectra": []}
    setup |= {"benchmark": "training", "widths": [64], "variants": ["standard"], "seeds": [0, 1]}
    return setup | rows | {"device": "cpu", "jax": "0.12", "commit": "abc"}


@pytest.fixture
def fake_program(monkeypatch):
    """Runs whose losses are a parabola, best at twice the start."""

    class Fake:
        facts = {"step_ms": 1.0}

        def __init__(self, *_):
            pass

        def train(self, rate, seed, spectra):
            assert spectra is None
            return {"losses": [9.0, (np.log2(rate / 0.016)) ** 2 + seed], "seconds": 1.0}

    monkeypatch.setattr(study, "TrainingProgram", Fake)


def test_a_study_goes_on_with_the_runs_of_a_file(fake_program, tmp_path):
    def whole(report, width):
        runs = study.missing_runs(report, "standard", GPT(width), TRAINING, None, False)
        for run in runs:
            report["measurements"].append(run)
        return report

    report = whole(empty_report(), 64)
    assert len(report["measurements"]) == 8 and len(report["programs"]) == 1
    assert report["measurements"][0]["learning_rate"] == 0.008
    file = tmp_path / "part.json"
    part = {**report, "measurements": report["measurements"][:4], "widths": [64, 32]}
    file.write_text(json.dumps(part))
    again = empty_report()
    study.add_runs(again, file)
    # The same runs, made again on another machine, do not count twice.
    others = {"programs": [{**part["programs"][0], "step_ms": 2.0}]}
    others["measurements"] = [{**m, "losses": [9.0, 8.0]} for m in part["measurements"]]
    (tmp_path / "again.json").write_text(json.dumps({**part, **others}))
    study.add_runs(again, tmp_path / "again.json")
    assert len(again["measurements"]) == 4 and len(again["programs"]) == 1
    assert again["widths"] == [64, 32]
    assert whole(again, 64) == {**report, "widths": [64, 32]}
    # A wider model begins at the best rate of the narrower one.
    assert whole(again, 128)["measurements"][8]["learning_rate"] == 0.016
    with pytest.raises(ValueError, match="must have runs with the training .*'steps': 200"):
        study.add_runs({**empty_report(), "training": {"steps": 200}}, file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"benchmark": "tra', "must be a file of --json, got .*: delete it"),
        ("[]", "must be a file of `training --json`"),
        ('{"benchmark": "syrk"}', "must be a file of `training --json`"),
    ],
)
def test_files_without_runs(content, message, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        study.add_runs(empty_report(), file)


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
        (lambda: GPT(30, head_size=4), "width a multiple of head_size, got .*'width': 30"),
        (lambda: GPT(layers=0), "sizes must be at least 1"),
        (lambda: runs.Training(steps=25), "a positive multiple of 10.* got 25"),
        (lambda: runs.Training(batch_size=0), "batch_size must be at least 1, got 0"),
    ],
)
def test_sizes_that_are_none(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_windows_need_text():
    text = Text(np.zeros(100, np.uint8), np.zeros(32, np.uint8), 2, 256, "zeros", 32)
    with pytest.raises(ValueError, match="context . 1 = 33 tokens .* got 100 and 32"):
        runs.validation_windows(text, MODEL, TRAINING)


def test_seeds_estimate_noise():
    with pytest.raises(ValueError, match="--seeds must be at least 2, to estimate noise, got 1"):
        benchmarks.main(["training", "--seeds", "1"])
