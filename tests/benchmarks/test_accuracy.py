import functools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks._accuracy import polar_error, spectra
from benchmarks._accuracy.spectra import Case
from benchmarks._records.tables import measurement_line
from muon_jax import newton_schulz
from muon_jax._iteration.coefficients import SCHEDULES

ABSENT = {"momentum, step 5": "scikit-learn is not installed"}


@pytest.fixture(autouse=True)
def without_training(monkeypatch):
    monkeypatch.setattr(spectra, "absent_spectra", lambda: ABSENT)


def case_of(sigma, n=24):
    rng = np.random.default_rng(0)
    return Case.of("some", spectra.with_singular_values(np.asarray(sigma), n, rng))


@pytest.mark.parametrize("spectrum", spectra.SPECTRA)
@pytest.mark.parametrize("n", [16, 40])
def test_matrices_have_the_singular_values_they_claim(spectrum, n):
    rng = np.random.default_rng(1)
    sigma = spectra.SPECTRA[spectrum](16, rng)
    assert sigma.shape == (16,) and (sigma >= 0).all()
    case = Case.of(spectrum, spectra.with_singular_values(sigma, n, rng))
    assert case.x.shape == (16, n) and case.x.dtype == np.float32
    sigma = np.sort(sigma)[::-1]
    np.testing.assert_allclose(case.sigma, sigma, rtol=0, atol=1e-6 * sigma[0])
    np.testing.assert_allclose((case.u * case.sigma) @ case.vt, case.x, rtol=0, atol=1e-12)


def test_cases_are_all_spectra_at_all_aspects():
    names = [*spectra.SPECTRA, "Gaussian", "repeated rows"]
    expected = [(name, (16, n)) for n in (16, 48) for name in names]
    cases = [*spectra.hard_cases([16], [1, 3])]
    assert [(case.spectrum, case.x.shape) for case in cases] == expected
    (repeated, _) = (case for case in cases if case.spectrum == "repeated rows")
    assert 1 < np.linalg.matrix_rank(repeated.x) <= 4


def test_momenta_of_training():
    pytest.importorskip("sklearn")
    steps, momenta = zip(*spectra.momenta(16, 32, seed=0), strict=True)
    assert steps == spectra.MOMENTUM_STEPS
    for momentum in momenta:
        sigma = Case.of("momentum", momentum).sigma
        assert momentum.shape == (16, 32) and 0 < sigma[-1] < sigma[0] / 3


def test_tall_matrices_are_transposed():
    x = np.random.default_rng(0).standard_normal((24, 8))
    np.testing.assert_array_equal(Case.of("some", x).x, x.T.astype(np.float32))


@pytest.mark.parametrize("sigma", [np.linspace(1, 0.1, 8), np.r_[1, 1, 0.5, np.zeros(5)]])
def test_the_polar_factor_has_no_error(sigma):
    case = case_of(sigma)
    rank = np.count_nonzero(sigma)
    metrics = polar_error.polar_metrics(case, case.u[:, :rank] @ case.vt[:rank])
    assert metrics["errors"] == pytest.approx([0, 0], abs=1e-12)
    assert [metrics[key] for key in ("rms", "largest", "dual")] == pytest.approx([1, 1, 1])
    assert not metrics["blow_up"]


def test_a_polar_factor_too_large_has_that_error():
    case = case_of(np.linspace(1, 0.1, 8))
    metrics = polar_error.polar_metrics(case, 1.2 * case.u @ case.vt)
    assert metrics["errors"] == pytest.approx([0.2, 0.2])
    values = [metrics[key] for key in ("rms", "largest", "dual")]
    assert values == pytest.approx([1.2, 1.2, 1.2])


def test_each_threshold_has_its_directions():
    case = case_of([1, 0.5, 0.005, 0.002, 0.0001])
    scales = np.array([1.1, 0.9, 0.5, 0.5, 7])
    metrics = polar_error.polar_metrics(case, (case.u * scales) @ case.vt)
    assert metrics["errors"] == pytest.approx([0.1, np.sqrt((0.02 + 0.5) / 4)], rel=1e-3)
    assert metrics["largest"] == pytest.approx(7) and metrics["blow_up"]


def test_an_error_outside_of_the_row_space_counts():
    case = case_of(np.ones(8))
    _, _, complement = np.linalg.svd(case.vt)
    metrics = polar_error.polar_metrics(case, case.u @ (case.vt + 0.3 * complement[8:16]))
    assert metrics["errors"] == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_composed_schedules_are_as_accurate_as_is_said(dtype):
    path = Path(benchmarks.__file__).parent / "results" / "accuracy_cpu.json"
    measured = {
        (m["name"], m["dtype"]): m["cases"]
        for m in json.loads(path.read_text())["measurements"]
        if m["method"] == "standard"
    }

    def errors(name, dtype):
        """Medians on both thresholds, by spectrum."""
        cases = measured[name, dtype]
        return {
            spectrum: np.median([c["errors"] for c in cases if c["spectrum"] == spectrum], axis=0)
            for spectrum in {c["spectrum"] for c in cases}
        }

    standard, polar_express = errors("standard", "bfloat16"), errors("polar_express", "bfloat16")
    fast, balanced, accurate = (errors(name, dtype) for name in ("fast", "balanced", "accurate"))
    assert len(standard) == 11
    slack = {"float16": 1.02, "bfloat16": 1.04}[dtype]  # of momenta, step 5
    for spectrum in standard.keys() - {"one direction"}:
        assert fast[spectrum][0] <= slack * standard[spectrum][0]
        assert (balanced[spectrum] <= slack * standard[spectrum]).all()
        assert balanced[spectrum][0] <= polar_express[spectrum][0]
        behind = 1.11 if (dtype, spectrum) == ("bfloat16", "spike") else 1.0
        assert (accurate[spectrum] < behind * polar_express[spectrum]).all()


@pytest.mark.parametrize("scale", [1.6, np.nan, np.inf])
def test_blow_ups(scale):
    case = case_of(np.ones(8))
    metrics = polar_error.polar_metrics(case, case.u @ case.vt * scale)
    assert metrics["blow_up"]
    assert metrics["largest"] == (1.6 if scale == 1.6 else None)
    json.dumps(metrics, allow_nan=False)


@pytest.mark.parametrize(
    ("name", "grams", "squares"),
    [("standard", 5, 5), ("fast", 1, 7), ("balanced", 1, 9), ("accurate", 2, 9)],
)
@pytest.mark.parametrize("aspect", [1, 4])
def test_flops(name, grams, squares, aspect):
    orthogonalize = functools.partial(newton_schulz, ns_coeffs=name, implementation="xla")
    units = polar_error.symmetric_units(orthogonalize, (16, 16 * aspect))
    assert units == grams * 3 * aspect + squares


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_flops_of_composed_steps_are_those_of_the_model(name, dtype):
    orthogonalize = functools.partial(
        newton_schulz, ns_coeffs=name, dtype=dtype, implementation="xla"
    )
    expected = SCHEDULES[name].products(dtype)
    for aspect in (1, 4):
        units = polar_error.symmetric_units(orthogonalize, (16, 16 * aspect))
        assert units == expected.units(aspect)


@pytest.mark.slow
def test_it_measures_and_reports(capsys, tmp_path):
    file = tmp_path / "accuracy.json"
    words = "accuracy --names fast --methods standard --dtypes float32 float16"
    words += " --sizes 16 --aspects 1 2"
    benchmarks.main([*words.split(), "--json", str(file)])
    printed = capsys.readouterr().out
    table = printed[printed.index("| coefficients") :]
    report = json.loads(file.read_text())
    assert {"device", "commit", "python", "jax"} <= set(report)
    assert report["thresholds"] == [0.01, 0.001]
    assert len(report["measurements"]) == 2
    for measurement in report["measurements"]:
        assert measurement["units"] == {"1": 10, "2": 13}
        assert all(case["errors"][0] < 0.4 for case in measurement["cases"])
        assert not any(case["blow_up"] for case in measurement["cases"])
    lines = table.splitlines()
    start = "| coefficients | dtype | units at n/m = 1 / 2 | linear | log-spaced | low rank |"
    assert lines[0].startswith(start)
    assert lines[2].startswith("| fast | float32 | 10 / 13 | 0.")
    assert lines[3].startswith("| fast | float16 | 10 / 13 | 0.")
    assert lines[5] == "- absent: momentum, step 5 (scikit-learn is not installed)"
    with pytest.raises(SystemExit, match="accuracy has neither"):
        benchmarks.main(["report", str(file), "--png", str(tmp_path / "a.png")])
    assert table.strip() in capsys.readouterr().out


def test_a_schedule_is_measured_once_under_whatever_methods(tmp_path):
    file = tmp_path / "accuracy.json"
    words = "accuracy --names standard fast --dtypes float32 --sizes 16 --aspects 1 --json"
    for methods in ["gram"], ["standard", "gram"]:
        benchmarks.main([*words.split(), str(file), "--methods", *methods])
        measurements = json.loads(file.read_text())["measurements"]
        measured = [(m["name"], m["method"]) for m in measurements]
        assert measured == [*(("standard", each) for each in methods), ("fast", methods[0])]


def test_momenta_need_scikit_learn(monkeypatch):
    monkeypatch.undo()  # the fixture's
    monkeypatch.setattr(spectra.importlib.util, "find_spec", lambda name: None)
    assert spectra.absent_spectra()["momentum, step 5"] == "scikit-learn is not installed"


def test_a_result_that_is_not_finite_is_infinitely_wrong():
    fine = {"spectrum": "linear", "errors": [0.1, 0.2], "rms": 1.0, "dual": 1.0, "largest": 1.1}
    broken = {"spectrum": "linear", "errors": [None, None]}
    broken |= dict.fromkeys(("rms", "dual", "largest"))
    cases = [{**fine, "blow_up": False}, *[{**broken, "blow_up": True}] * 2]
    measurement = {"name": "aol", "method": "gram", "dtype": "float16", "preconditioning": "aol"}
    line = measurement_line({**measurement, "units": {"1": 16}, "cases": cases})
    assert line.startswith("coefficients aol, gram (preconditioning aol), dtype float16, units")
    assert "linear inf / inf" in line and "blow-ups 2 of 3" in line


def test_names_are_those_that_newton_schulz_takes(capsys):
    assert {"standard", "dion", "fast", "accurate"} <= set(polar_error.coefficient_names())
    with pytest.raises(SystemExit):
        benchmarks.main(["accuracy", "--names", "nonesuch"])
    assert "'standard'" in capsys.readouterr().err
