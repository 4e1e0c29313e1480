import json

import numpy as np
import pytest

from muon_jax.benchmarks import __main__ as benchmarks
from muon_jax.benchmarks import _accuracy, _report, _spectra
from muon_jax.benchmarks._spectra import Case


def case_of(sigma, n=24):
    rng = np.random.default_rng(0)
    return Case.of("some", _spectra.with_singular_values(np.asarray(sigma), n, rng))


@pytest.mark.parametrize("spectrum", _spectra.SPECTRA)
@pytest.mark.parametrize("n", [16, 40])
def test_matrices_have_the_singular_values_they_claim(spectrum, n):
    rng = np.random.default_rng(1)
    sigma = _spectra.SPECTRA[spectrum](16, rng)
    assert sigma.shape == (16,) and (sigma >= 0).all()
    case = Case.of(spectrum, _spectra.with_singular_values(sigma, n, rng))
    assert case.x.shape == (16, n) and case.x.dtype == np.float32
    sigma = np.sort(sigma)[::-1]
    np.testing.assert_allclose(case.sigma, sigma, rtol=0, atol=1e-6 * sigma[0])
    np.testing.assert_allclose((case.u * case.sigma) @ case.vt, case.x, rtol=0, atol=1e-12)


def test_cases_are_all_spectra_at_all_aspects():
    cases = [*_spectra.cases([16], [1, 3])]
    others = ["Gaussian", "repeated rows"]
    if not _spectra.absent():
        others += [f"momentum, step {step}" for step in _spectra.MOMENTUM_STEPS]
    for n, of_aspect in ((16, cases[: len(cases) // 2]), (48, cases[len(cases) // 2 :])):
        assert {case.x.shape for case in of_aspect} == {(16, n)}
    assert {case.spectrum for case in cases} == {*_spectra.SPECTRA, *others}
    (repeated, _) = (case for case in cases if case.spectrum == "repeated rows")
    assert 1 < np.linalg.matrix_rank(repeated.x) <= 4


def test_tall_matrices_are_transposed():
    x = np.random.default_rng(0).standard_normal((24, 8))
    np.testing.assert_array_equal(Case.of("some", x).x, x.T.astype(np.float32))


@pytest.mark.parametrize("sigma", [np.linspace(1, 0.1, 8), np.r_[1, 1, 0.5, np.zeros(5)]])
def test_the_polar_factor_has_no_error(sigma):
    case = case_of(sigma)
    rank = np.count_nonzero(sigma)
    metrics = _accuracy.metrics(case, case.u[:, :rank] @ case.vt[:rank])
    assert metrics["errors"] == pytest.approx([0, 0], abs=1e-12)
    assert [metrics[key] for key in ("rms", "largest", "dual")] == pytest.approx([1, 1, 1])
    assert not metrics["blow_up"]


def test_a_polar_factor_too_large_has_that_error():
    case = case_of(np.linspace(1, 0.1, 8))
    metrics = _accuracy.metrics(case, 1.2 * case.u @ case.vt)
    assert metrics["errors"] == pytest.approx([0.2, 0.2])
    values = [metrics[key] for key in ("rms", "largest", "dual")]
    assert values == pytest.approx([1.2, 1.2, 1.2])


def test_each_threshold_has_its_directions():
    case = case_of([1, 0.5, 0.005, 0.002, 0.0001])
    scales = np.array([1.1, 0.9, 0.5, 0.5, 7])
    metrics = _accuracy.metrics(case, (case.u * scales) @ case.vt)
    assert metrics["errors"] == pytest.approx([0.1, np.sqrt((0.02 + 0.5) / 4)], rel=1e-3)
    assert metrics["largest"] == pytest.approx(7) and metrics["blow_up"]


def test_an_error_outside_of_the_row_space_counts():
    case = case_of(np.ones(8))
    _, _, complement = np.linalg.svd(case.vt)
    metrics = _accuracy.metrics(case, case.u @ (case.vt + 0.3 * complement[8:16]))
    assert metrics["errors"] == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize("scale", [1.6, np.nan, np.inf])
def test_blow_ups(scale):
    case = case_of(np.ones(8))
    metrics = _accuracy.metrics(case, scale * case.u @ case.vt)
    assert metrics["blow_up"]
    assert metrics["largest"] == (1.6 if scale == 1.6 else None)
    json.dumps(metrics, allow_nan=False)


@pytest.mark.parametrize("aspect", [1, 4])
def test_flops_of_five_quintic_steps(aspect):
    case = case_of(np.ones(16), n=16 * aspect)
    measurement = _accuracy.measure("standard", "bfloat16", [case])
    assert measurement["units"] == {str(aspect): 5 * (3 * aspect + 1)}


def test_it_measures_and_reports(capsys, tmp_path):
    file = tmp_path / "accuracy.json"
    words = "accuracy --names standard dion --dtypes float32 bfloat16 --sizes 16 --aspects 1 2"
    benchmarks.main([*words.split(), "--json", str(file)])
    table = capsys.readouterr().out.partition("\n\n")[2]
    report = json.loads(file.read_text())
    assert {"device", "commit", "python", "jax"} <= set(report)
    assert report["thresholds"] == [0.01, 0.001]
    assert len(report["measurements"]) == 4
    for measurement in report["measurements"]:
        assert measurement["units"] == {"1": 20, "2": 35}
        assert all(case["errors"][0] < 0.4 for case in measurement["cases"])
        assert not any(case["blow_up"] for case in measurement["cases"])
    lines = table.splitlines()
    start = "| coefficients | dtype | units at n/m = 1 / 2 | linear | log-spaced | low rank |"
    assert lines[0].startswith(start)
    assert [line.split(" | ")[:3] for line in lines[2:6]] == [
        [f"| {name}", dtype, "20 / 35"]
        for name in ("standard", "dion")
        for dtype in ("float32", "bfloat16")
    ]
    benchmarks.main(["report", str(file), "--png", str(tmp_path / "a.png")])
    assert table.strip() in capsys.readouterr().out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_offered_is_reported(monkeypatch, capsys, tmp_path):
    right = _accuracy.newton_schulz

    def refusing(x, *, dtype, **kwargs):
        if dtype == "float16":
            raise ValueError("not in float16\nmore")
        return right(x, dtype=dtype, **kwargs)

    monkeypatch.setattr(_accuracy, "newton_schulz", refusing)
    file = tmp_path / "accuracy.json"
    words = "accuracy --names standard --dtypes float16 float32 --sizes 16 --aspects 1 --json"
    benchmarks.main([*words.split(), str(file)])
    assert "- not offered: standard, float16 (not in float16)" in capsys.readouterr().out
    refused, measured = json.loads(file.read_text())["measurements"]
    assert refused == {"name": "standard", "dtype": "float16", "not_offered": "not in float16"}
    assert measured["cases"]


def test_momenta_need_scikit_learn(monkeypatch, capsys):
    monkeypatch.setattr(_spectra.importlib.util, "find_spec", lambda name: None)
    benchmarks.main("accuracy --names standard --dtypes float32 --sizes 16 --aspects 1".split())
    out = capsys.readouterr().out
    assert "- absent: momentum, step 5 (scikit-learn is not installed)" in out
    assert "| momentum" not in out


def test_a_result_that_is_not_finite_is_infinitely_wrong():
    fine = {"spectrum": "linear", "errors": [0.1, 0.2], "rms": 1.0, "dual": 1.0, "largest": 1.1}
    broken = {"spectrum": "linear", "errors": [None, None]}
    broken |= dict.fromkeys(("rms", "dual", "largest"))
    cases = [{**fine, "blow_up": False}, *[{**broken, "blow_up": True}] * 2]
    measurement = {"name": "standard", "dtype": "float16", "units": {"1": 20}, "cases": cases}
    line = _report.line(measurement)
    assert "linear inf / inf" in line and "blow-ups 2 of 3" in line


def test_names_are_those_that_newton_schulz_takes(capsys):
    assert {"standard", "dion"} <= set(_accuracy.names())
    with pytest.raises(SystemExit):
        benchmarks.main(["accuracy", "--names", "nonesuch"])
    assert "'standard'" in capsys.readouterr().err
