"""The gram form against the standard one."""

import functools
import warnings

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._accuracy import polar_error
from benchmarks._accuracy.spectra import hard_cases
from muon_jax import NewtonSchulz, muon, newton_schulz
from muon_jax._iteration.coefficients import DIVERGING, NAMED, resolve_schedule
from muon_jax._iteration.form import products_of_gram_form, segments


@functools.cache
def cases():
    return [case for seed in (0, 1) for case in hard_cases([128], [1, 4], seed)]


@pytest.mark.parametrize(
    "name",
    helpers.mostly_nightly(
        [name for name in NAMED if name not in DIVERGING], ["standard", "polar_express", "aol"]
    ),
)
def test_in_float64_it_equals_the_standard_form(name):
    x = np.random.default_rng(0).standard_normal((2, 12, 30))
    with jax.enable_x64(True):
        standard, gram = (
            newton_schulz(
                jnp.asarray(x), dtype=None, method=m, **polar_error.arguments_for_coefficients(name)
            )
            for m in ("standard", "gram")
        )
    np.testing.assert_allclose(gram, standard, rtol=0, atol=1e-10)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMED)
def test_in_half_precision_it_is_as_accurate_and_does_not_blow_up(name):
    for _, _, dtype in polar_error.offered_variants([name], ["gram"], ["float16", "bfloat16"]):
        by_gram, by_standard = (
            polar_error.measure_accuracy(name, method, dtype, cases())["cases"]
            for method in ("gram", "standard")
        )
        assert not any(metrics["blow_up"] for metrics in by_gram), dtype
        for spectrum in {case.spectrum for case in cases()}:
            error, standard_error = (
                np.median([m["errors"][0] for m in metrics if m["spectrum"] == spectrum])
                for metrics in (by_gram, by_standard)
            )
            assert error <= 1.1 * standard_error, (spectrum, dtype)


@pytest.mark.parametrize("n", helpers.mostly_nightly([64, 256], [64]))
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("name", ["aol", "aol_nvidia"])
def test_aol_bounds_rows_too_small_for_float16(name, method, n):
    rows = np.linalg.qr(np.random.default_rng(0).standard_normal((n, 64)))[0].T
    x = np.arange(1, 65)[:, None] ** -3.0 * rows
    out = newton_schulz(
        jnp.asarray(x, jnp.float32),
        dtype="float16",
        method=method,
        **polar_error.arguments_for_coefficients(name),
    )
    norms = np.linalg.norm(out, axis=1)
    np.testing.assert_allclose(norms[:5], 1, atol=0.1)
    assert np.linalg.norm(out, ord=2) < 1.2


@pytest.mark.parametrize("name", ["standard", "aol"])
def test_scale_zero_and_nan(name):
    function = functools.partial(
        newton_schulz, method="gram", **polar_error.arguments_for_coefficients(name)
    )
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 16, 40)), jnp.float32)
    x = x.at[1].set(0).at[2, 0, 0].set(jnp.nan)
    out = function(x)
    for scale in (1e-30, 1e30):
        scaled = function(scale * x)
        np.testing.assert_allclose(scaled[0], out[0], atol=2e-2)
    assert not np.any(out[1])
    assert np.isnan(out[2]).all()


def products(shape, *args, **kwargs):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    text = str(jax.make_jaxpr(lambda x: newton_schulz(x, *args, **kwargs))(x))
    return text.count("dot_general")


def test_it_makes_fewer_products_with_x():
    # Three Gram matrices, three products with X, and m × m ones: 5 Z, 2 Q, 2 T, 2 R.
    assert products((8, 64), method="gram") == 6 + 11
    assert products((64, 64), method=None) == products((64, 64), method="standard") == 15


# Measured on an H200. All but the last have fewer FLOPs in the gram form.
@pytest.mark.parametrize(
    ("shape", "name", "faster"),
    [
        ((1024, 4096), "standard", "gram"),
        ((24, 1024, 4096), "polar_express", "gram"),
        ((4096, 6144), "standard", "gram"),
        ((16, 1024, 2048), "standard", "gram"),
        ((16, 1024, 1536), "standard", "standard"),
        ((2048, 2560), "standard", "standard"),
        ((1024, 2048), "standard", "standard"),
        ((4096, 4096), "polar_express", "standard"),
    ],
    ids=str,
)
def test_none_chooses_the_faster_form(shape, name, faster):
    assert products(shape, name, method=None) == products(shape, name, method=faster)
    assert products(shape, name, method="gram") != products(shape, name, method="standard")


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("standard", "float16", [2, 1, 2]),
        ("standard", "bfloat16", [1] * 5),
        ("standard", "float32", [5]),
        ("standard", "float64", [5]),
        ("polar_express", "float16", [1, 2, 2]),
        ("polar_express", "bfloat16", [1] * 5),
        ("aol", "float16", [1, 1, 2]),  # after two steps there is room for 1.6% only
        ("polar_express_nvidia", "float32", [3, 5]),
        ("polar_express_nvidia", "float64", [8]),
    ],
)
def test_steep_steps_do_not_share_a_segment(name, dtype, expected):
    schedule = resolve_schedule(name, 5)
    with jax.default_matmul_precision("highest"):
        parts = segments(schedule, dtype)
    assert [len(part) for part in parts] == expected


def test_segments_are_safe_in_what_gpus_take_float32_as():
    def counts():
        parts = segments(resolve_schedule("polar_express", 5), "float32")
        return [len(part) for part in parts]

    with helpers.described_gpu("H200"):
        assert counts() == [1, 1, 1, 2]
        with jax.default_matmul_precision("highest"):
            assert counts() == [5]


def test_steps_that_diverge_have_segments_too():
    with warnings.catch_warnings(action="error"):
        parts = segments(resolve_schedule((3.0, 3.0, 3.0), 400), "float16")
        assert sum(map(len, parts)) == 400


@pytest.mark.parametrize("dtype", helpers.mostly_nightly(["float16", "bfloat16"], ["float16"]))
@pytest.mark.parametrize("name", ["polar_express", "polar_express_nanogpt"])
def test_errors_of_one_segment_do_not_make_the_next_diverge(name, dtype):
    """Of low rank, with rows that repeat, whose rounding adds up."""
    rng = np.random.default_rng(0)
    ranks = [12, 16, 20, 24]
    rows = [rng.standard_normal((rank, 64)) * 10 ** -rng.uniform(0, 3, (rank, 1)) for rank in ranks]
    x = np.stack([r[rng.integers(0, len(r), 48)] for r in rows * 40])
    out = newton_schulz(jnp.asarray(x, jnp.float32), name, dtype=dtype, method="gram")
    assert np.linalg.norm(out, ord=2, axis=(-2, -1)).max() < 1.25


def test_units_count_the_products():
    products = products_of_gram_form(resolve_schedule("polar_express", 5), "float16")
    assert [products.units(aspect) for aspect in (1, 2, 4, 8)] == [20, 29, 47, 83]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"ns_coeffs": "cans"}, "rounding XXᵀ makes these coefficients diverge"),
        ({"ns_coeffs": "deepseek_v4"}, "close to 1 that rounding XXᵀ to float16 would show"),
        ({"preconditioning": "spectral"}, "'spectral' needs more than the Gram matrix"),
        ({"method": "dual"}, r"one of \('standard', 'gram'\) or None, got 'dual'"),
    ],
)
def test_what_is_not_offered_says_why(kwargs, message):
    with pytest.raises(ValueError, match=message):
        newton_schulz(jnp.ones((8, 16)), **({"method": "gram"} | kwargs))


def test_error_against_float64():
    x = np.random.default_rng(3).standard_normal((48, 200))
    expected = helpers.exact_newton_schulz(x, NAMED["dion"])
    out = newton_schulz(jnp.asarray(x, jnp.float32), "dion", method="gram")
    assert helpers.relative_error(out, expected) < 2e-3  # float16


def test_the_optimizer_takes_it():
    parameters = {"w": jnp.asarray(np.random.default_rng(4).standard_normal((16, 64)), jnp.float32)}
    updates = []
    for method in ("standard", "gram"):
        optimizer = muon(0.02, ns_coeffs=NewtonSchulz(method=method))
        updates.append(optimizer.update(parameters, optimizer.init(parameters), parameters)[0]["w"])
    assert 0 < helpers.relative_error(updates[1], np.asarray(updates[0])) < 0.05
