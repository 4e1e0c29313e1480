import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from benchmarks import __main__ as benchmarks
from benchmarks._records.plots import figure_of_reports
from benchmarks._records.tables import markdown, measurement_line
from benchmarks._records.training_losses import (
    gap_lines,
    loss_rows,
    rate_rows,
    training_sections,
    verdicts,
)
from benchmarks._records.training_spectra import (
    orthogonalized,
    schedules_of_variants,
    singular_values,
    spread,
    update_spreads,
)
from benchmarks._records.training_statistics import (
    detectable_difference,
    fit_vertex,
    interval_half_width,
    pooled_noise,
    read_study,
    seconds_to_equal_loss,
    steps_to_loss,
)
from muon_jax.contrib._spectra import unreached_share

WIDTHS, EVALUATIONS, STEPS = [256, 384, 512, 768], 10, 200
# Of each variant: what it adds to the loss, its deviation over seeds, log₂ of its best learning
# rate over 0.02, and the times of a step and of the optimizer.
TRUTH = {
    "standard": (0.0, 0.0, 0.0, 100.0, 20.0),
    "balanced": (0.0, 0.01, -0.1, 90.0, 9.0),
    "accurate": (-0.03, 0.02, 0.5, 110.0, 22.0),
    "polar_express": (0.015, 0.02, -0.5, 100.0, 20.0),
    "adamw": (0.3, 0.05, 0.0, 80.0, 1.0),
    "standard_3_steps": (0.1, 0.03, 0.0, 95.0, 15.0),
}
CURVATURE = 0.2
SEED_EFFECTS = (0.01, 0.05, -0.02)
# The root mean square deviation of the three variants that are pooled; 2·3·4 degrees of freedom.
NOISE, DF = 0.01 * 3**0.5, 24
LEAST_OF_LAYERS = (0.001, 0.3, 0.0)
SHARES = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1]


def run(width, variant, step, seed):
    """A run `step` half octaves from 0.02, whose loss falls by 1 along a line."""
    offset, deviation, best, *_ = TRUTH[variant]
    distance = step / 2 - best
    loss = 3 - width / 1000 + offset + CURVATURE * distance**2 + SEED_EFFECTS[seed]
    loss += deviation * (seed - 1)
    curve = loss + 1 - np.arange(1, EVALUATIONS + 1) / EVALUATIONS
    return {
        "width": width,
        "variant": variant,
        "learning_rate": 0.02 * 2 ** (step / 2),
        "seed": seed,
        "losses": curve.tolist(),
        "seconds": 2.5,
    }


def spectrum(width, step, layer, sigma):
    return {
        "width": width,
        "variant": "standard",
        "learning_rate": 0.02,
        "step": step,
        "matrix": "query",
        "layer": layer,
        "quantiles": np.quantile(sigma / np.linalg.norm(sigma), SHARES).tolist(),
    }


@pytest.fixture
def report():
    places = [(width, variant) for width in WIDTHS for variant in TRUTH]
    measurements = [
        run(width, variant, round(2 * TRUTH[variant][2]) + step, seed)
        for width, variant in places
        for step in range(-2, 3)
        for seed in (range(3) if step in (-1, 0) else [0])
    ]
    return {
        "benchmark": "training",
        "device": "H200",
        "text": {"name": "synthetic", "train_tokens": 1000, "sha256": "abc"},
        "model": {"layers": 8, "head_size": 64, "context": 512},
        "training": {"steps": STEPS, "batch_size": 32},
        "widths": WIDTHS,
        "variants": [*TRUTH],
        "seeds": [0, 1, 2],
        "control": "standard_3_steps",
        "programs": [
            {
                "width": width,
                "variant": variant,
                "step_ms": TRUTH[variant][3],
                "optimizer_ms": TRUTH[variant][4],
            }
            for width, variant in places
        ],
        "measurements": measurements[::-1],
        "spectra_shares": SHARES,
        "spectra": [
            spectrum(256, step, layer, np.linspace(least, 1, 256))
            for step in (20, 200)
            for layer, least in enumerate(LEAST_OF_LAYERS)
        ],
    }


def test_differences_are_those_by_hand(report):
    study = read_study(report)
    assert study.noise.df == DF
    assert study.noise.std == pytest.approx(NOISE)
    of_adamw = (0.05, 2 * 4)  # a deviation of its own
    for variant, expected, (std, df) in (
        ("balanced", 0.2 * 0.1**2, (NOISE, DF)),
        ("adamw", 0.3, of_adamw),
        ("accurate", -0.03, (NOISE, DF)),
    ):
        for width, pairs in ((384, 3), (None, 12)):
            found = study.difference(variant, width)
            assert found is not None
            ends = expected + np.array([-1, 1]) * stats.t.ppf(0.975, df) * std / pairs**0.5
            np.testing.assert_allclose([found.mean, found.low, found.high], [expected, *ends])
    assert study.difference("standard", 384) is None


def test_the_pooled_deviation_weighs_by_degrees_of_freedom():
    samples = [np.array([1.0, 3.0]), np.array([0.0, 0.0, 3.0]), np.ones(1), np.array([1, np.inf])]
    assert pooled_noise(samples) == (pytest.approx(((2 + 6) / 3) ** 0.5), 3)
    assert np.isnan(pooled_noise([np.ones(1)]).std)


def test_an_interval_is_that_of_student():
    sample = np.array([0.3, -0.1, 0.25, 0.4])
    low, high = stats.t.interval(0.95, 3, sample.mean(), stats.sem(sample))
    found = interval_half_width(sample.std(ddof=1), 4, 3)
    assert found == pytest.approx((high - low) / 2)
    assert np.isnan(interval_half_width(np.nan, 1, 0))


@pytest.mark.parametrize("df", [1, 2, 24, 1000])
def test_a_detectable_difference_is_found_four_times_in_five(df):
    noncentrality = detectable_difference(0.3, 9, df) / 0.1
    assert stats.nct.sf(stats.t.ppf(0.975, df), df, noncentrality) == pytest.approx(0.8)
    if df == 1000:  # the normal approximation
        assert noncentrality == pytest.approx(1.960 + 0.8416, abs=0.01)


def test_rows_of_losses(report):
    rows = loss_rows(read_study(report))
    assert len(rows) == 4 * 6 + 5
    assert [*rows[1].values()] == [
        "256",
        "balanced",
        "0.02",
        "2.7593 ± 0.0321",
        "+0.0020 [-0.0186, +0.0226]",
    ]
    assert [*rows[-2].values()] == ["all", "adamw", "", "", "+0.3000 [+0.2667, +0.3333]"]


def test_verdicts(report):
    lines = verdicts(read_study(report))
    assert len(lines) == 5 * 5
    assert {
        "width 256, balanced: no difference seen: +0.0020 [-0.0186, +0.0226]",
        "width 256, accurate: better by -0.0300 [-0.0506, -0.0094]",
        "width 768, polar_express: no difference seen: +0.0150 [-0.0056, +0.0356]",
        "all widths, polar_express: worse by +0.0150 [+0.0047, +0.0253]",
        "width 512, standard_3_steps: control seen to lose: +0.1000 [+0.0794, +0.1206]",
    } <= {*lines}


@pytest.mark.parametrize("change", [-0.1, -0.2])
def test_a_control_that_is_as_good_is_not_seen(change, report):
    for m in report["measurements"]:
        if m["variant"] == "standard_3_steps":
            m["losses"] = [loss + change for loss in m["losses"]]
    lines = [line for line in verdicts(read_study(report)) if "CONTROL NOT SEEN" in line]
    assert len(lines) == 5


@pytest.mark.parametrize("diverged", ["standard", "balanced", "standard_3_steps"])
def test_divergence_is_no_agreement(diverged, report):
    for m in report["measurements"]:
        if m["variant"] == diverged:
            m["losses"] = [*m["losses"][:4], *[None] * 6]
    study = read_study(report)
    assert np.isfinite(study.noise.std) == (diverged != "standard")
    words = {
        "standard": "all widths, balanced: not compared: -inf",
        "balanced": "all widths, balanced: worse by +inf",
        "standard_3_steps": "all widths, standard_3_steps: control seen to lose: +inf",
    }
    assert sum(line.startswith(words[diverged]) for line in verdicts(study)) == 1


def test_what_both_diverged_in_is_not_compared(report):
    for m in report["measurements"]:
        if m["variant"] in ("standard", "accurate"):
            m["losses"] = [None] * EVALUATIONS
    assert "width 256, accurate: not compared: both diverged" in verdicts(read_study(report))


def test_what_is_missing_is_named(report):
    def kept(m):
        return (
            (m["width"], m["variant"]) != (256, "balanced")
            and (m["variant"] != "accurate" or m["seed"] != 1)
            and (m["variant"] != "adamw" or m["learning_rate"] < 0.021)
        )

    assert gap_lines(read_study(report)) == []
    report["measurements"] = [m for m in report["measurements"] if kept(m)]
    report["control"] = "absent"
    lines = gap_lines(read_study(report))
    assert lines[0] == "not measured: width 256, balanced"
    assert lines[1] == (
        "few seeds: width 256, accurate, of which no learning rate has all; the best one lacks"
        " seeds 1"
    )
    assert lines[2] == (
        "not bracketed: width 256, adamw, whose best learning rate, 0.02, is at the end of those"
        " tried"
    )
    assert lines[-1] == "not measured: absent, the control"
    assert len(lines) == 1 + 4 + 4 + 1
    assert read_study(report).difference("balanced", 256) is None


def test_runs_of_several_commits_are_named(report):
    for measurement, commit in zip(report["measurements"], ("b", "a"), strict=False):
        measurement["commit"] = commit
    assert gap_lines(read_study(report)) == ["runs of several commits: a, b"]


def test_a_width_without_the_first_variant_compares_nothing(report):
    report["measurements"] = [
        m for m in report["measurements"] if (m["width"], m["variant"]) != (256, "standard")
    ]
    study = read_study(report)
    assert not [line for line in verdicts(study) if line.startswith("width 256")]
    assert [*rate_rows(study)[1].values()][1:3] == ["0.02; 0.0187", "0.02; 0.0187; 0.93×"]
    assert (256, "balanced") not in seconds_to_equal_loss(study)


def test_one_seed_has_no_interval(report):
    report["measurements"] = [m for m in report["measurements"] if m["seed"] == 0]
    report["seeds"] = [0]
    study = read_study(report)
    assert "width 256, balanced: not compared: -0.0080 without interval" in verdicts(study)
    assert "no intervals: they need two seeds" in markdown(report)


def test_the_best_rate_has_all_seeds(report):
    best = run(256, "balanced", 2, 0)
    best["losses"] = [0.5] * EVALUATIONS
    report["measurements"] = [
        best if (m["width"], m["variant"], m["learning_rate"]) == (256, "balanced", 0.04) else m
        for m in report["measurements"]
    ]
    assert read_study(report).trained[256, "balanced"].best_rate == 0.02


def test_the_vertex_of_an_exact_parabola(report):
    study = read_study(report)
    for (_, variant), trained in study.trained.items():
        found = fit_vertex(trained)
        assert found == pytest.approx(0.02 * 2 ** TRUTH[variant][2])
    assert rate_rows(study)[2] == {"variant": "accurate"} | {
        f"width {width}": "0.0283; 0.0283; 1.41×" for width in WIDTHS
    }


def test_a_parabola_without_a_vertex(report):
    trained = read_study(report).trained[256, "standard"]
    curves = {rate: {0: -seeds[0]} for rate, seeds in trained.curves.items()}
    assert fit_vertex(trained._replace(curves=curves)) is None
    falling = {rate: {0: np.array([-np.log2(rate)])} for rate in trained.curves}
    assert fit_vertex(trained._replace(curves=falling)) is None
    two = {rate: trained.curves[rate] for rate in [*trained.curves][:2]}
    assert fit_vertex(trained._replace(curves=two, best_rate=min(two))) is None


@pytest.mark.parametrize(
    ("loss", "steps"), [(3.0, 100.0), (2.5, 150.0), (1.0, 300.0), (5.0, 100.0)]
)
def test_steps_to_a_loss(loss, steps):
    assert steps_to_loss(np.array([3.0, 2.0, 1.0]), loss, 300) == steps


def test_times(report):
    seconds = seconds_to_equal_loss(read_study(report))
    assert seconds[512, "standard"] == pytest.approx((20, 20))
    assert seconds[512, "accurate"] == pytest.approx((0.97 * 22, 20))
    assert seconds[512, "polar_express"] == pytest.approx((20, 0.985 * 20))
    (section,) = (s for s in training_sections(report) if s.title == "Time")
    assert "a step of 16,384 tokens" in section.note
    assert [*section.rows[2].values()] == [
        "256",
        "accurate",
        "110.00",
        "22.00",
        "20.0%",
        "21.3",
        "20.0",
        "1.07×",
    ]


def test_a_variant_that_diverged_reaches_no_loss(report):
    for m in report["measurements"]:
        if m["variant"] == "accurate":
            m["losses"] = [None] * EVALUATIONS
    assert (512, "accurate") not in seconds_to_equal_loss(read_study(report))
    assert "| 512 | accurate | 110.00 | 22.00 | 20.0% |  |  |  |" in markdown(report)


def test_missing_times_are_named(report):
    del report["programs"][1]["step_ms"]
    assert "- not measured: step times at width 256, balanced" in markdown(report)
    report["programs"] = [{"width": 256, "variant": "standard", "seconds": 1.0}]
    assert "- no step times in this record" in markdown(report)


@pytest.mark.parametrize("least", [0.0, 0.3])
def test_singular_values_on_a_line_come_back(least):
    sigma = np.linspace(least, 1, 256) / np.linalg.norm(np.linspace(least, 1, 256))
    found = singular_values(np.quantile(sigma, SHARES), SHARES, 256)
    np.testing.assert_allclose(found, sigma, rtol=1e-8, atol=1e-12)


def test_few_large_singular_values_keep_the_norm():
    sigma = np.sort(np.append(np.full(250, 0.02), np.linspace(0.1, 2.0, 6)))
    sigma /= np.linalg.norm(sigma)
    found = singular_values(np.quantile(sigma, SHARES), SHARES, 256)
    assert found[-1] == sigma[-1]
    assert np.sum(found**2) == pytest.approx(1)
    # The Schatten-4 norm, which lines between the quantiles would make 1.5 times as large.
    assert np.sum(found**4) == pytest.approx(np.sum(sigma**4), rel=0.1)


def test_unreached_values_are_those_of_with_metrics(report):
    sigma = np.geomspace(1e-4, 1, 16)
    updates = [
        orthogonalized(schedule, sigma) for schedule in schedules_of_variants(report).values()
    ]
    found = [spread(update).unreached_share for update in updates]
    expected = jax.jit(unreached_share)(
        jnp.stack([jnp.diag(jnp.asarray(x, "f") ** 2) for x in updates])
    )
    assert len(found) == 5 and 0 < min(found) and max(found) < 1
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_variants_that_are_coefficients(report):
    report["variants"] = [*TRUTH, "optax", "aol", "fast"]
    schedules = schedules_of_variants(report)
    assert [*schedules] == [
        "standard",
        "balanced",
        "accurate",
        "polar_express",
        "standard_3_steps",
        "fast",
    ]
    x = np.array([0.6, 0.8])
    for _ in range(3):
        x = 3.4445 * x - 4.775 * x**3 + 2.0315 * x**5
    np.testing.assert_allclose(orthogonalized(schedules["standard_3_steps"], np.array([3, 4])), x)


def test_spectra_are_medians_over_layers(report):
    (group, by_step), *others = update_spreads(report).items()
    assert group == (256, "standard", "query") and not others and [*by_step] == [20, 200]
    layers = [np.linspace(least, 1, 256) for least in LEAST_OF_LAYERS]
    for name, schedule in schedules_of_variants(report).items():
        each = [spread(orthogonalized(schedule, sigma)) for sigma in layers]
        np.testing.assert_allclose(by_step[20][name], np.median(each, axis=0), rtol=1e-6)
    shares, sizes = training_sections(report)[3:]
    assert shares.rows[0]["standard_3_steps"].count("%") == 2
    ratio = by_step[20]["balanced"].rms / by_step[20]["standard"].rms
    assert sizes.rows[0]["balanced"] == f"{ratio:.3f}" and sizes.rows[0]["standard"] == "1.000"


def test_missing_spectra_are_named(report):
    (*_, section) = training_sections(report | {"variants": ["adamw", "optax"]})
    (line,) = section.lines
    assert line == "no sets of coefficients whose spectra are known in this record"
    del report["spectra"], report["spectra_shares"]
    assert "- no spectra in this record" in markdown(report)


def test_a_run_is_a_line():
    m = run(256, "balanced", 0, 1)
    expected = "width 256, balanced, learning rate 0.02, seed 1: loss 2.7960"
    assert measurement_line(m) == f"{expected}, 2.5 s"
    del m["seconds"]
    assert measurement_line(m) == expected
    assert measurement_line(m | {"losses": [1.0, None]}).endswith(": loss not finite")


def test_the_report_has_every_section(report, tmp_path, capsys):
    file = tmp_path / "training.json"
    file.write_text(json.dumps(report))
    benchmarks.main(["report", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == (
        "layers: 8; head size: 64; context: 512; steps: 200; batch size: 32; name: synthetic;"
        " train tokens: 1000; sha256: abc; widths: 256, 384, 512, 768; seeds: 0, 1, 2"
    )
    assert [line for line in lines if line.startswith("#")] == [
        "## Losses",
        "## Learning rate by width",
        "## Time",
        "## Spectra of momenta",
        "## Sizes of updates",
    ]
    assert (
        "- resolution of 12 pairs: intervals of ±0.0103; a difference of 0.0146 is seen with 80%"
        " power" in lines
    )


def test_the_figure(report):
    (part,) = figure_of_reports([report]).subfigs
    differences, losses = part.axes
    bars = [bar.lines[2][0].get_segments() for bar in differences.containers]
    assert [len(segments) for segments in bars] == [4, 4, 4, 4]  # without adamw
    low, high = bars[0][1][:, 1]
    assert (low, high) == pytest.approx((0.002 - 0.0206390, 0.002 + 0.0206390), abs=1e-6)
    steps, means = np.array(losses.lines[1].get_data())
    np.testing.assert_allclose(steps, STEPS * np.arange(1, EVALUATIONS + 1) / EVALUATIONS)
    runs = [m for m in report["measurements"] if (m["width"], m["variant"]) == (768, "balanced")]
    curves = np.array([run["losses"] for run in runs if run["learning_rate"] == 0.02])
    assert len(curves) == 3
    np.testing.assert_allclose(means, curves.mean(axis=0))
    shade = losses.collections[1].get_paths()[0].vertices[:, 1]
    assert (shade.min(), shade.max()) == pytest.approx((curves.min(), curves.max()))
    names = {text.get_text() for text in losses.texts}
    assert f"balanced {means[-1]:.3f}" in names


def test_runs_that_diverged_have_no_name_in_the_figure(report):
    for m in report["measurements"]:
        if m["variant"] == "balanced":
            m["losses"] = [None] * EVALUATIONS
    (part,) = figure_of_reports([report]).subfigs
    names = [text.get_text().split()[0] for text in part.axes[1].texts]
    assert sorted(names) == sorted({*TRUTH} - {"balanced"})
