import dataclasses
import functools
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from benchmarks._accuracy.polar_error import polar_metrics
from benchmarks._accuracy.spectra import SPECTRA, Case, with_singular_values
from muon_jax import newton_schulz
from muon_jax._iteration.coefficients import SCHEDULES

unjitted = helpers.unjitted_newton_schulz
OFFERED = [(name, dtype) for name in SCHEDULES for dtype in ("float16", "bfloat16")]
# Bounds of the polar error on σ > σ₁/100, about a tenth above what was measured.
POLAR_ERROR = {"fast": 0.17, "balanced": 0.075, "accurate": 0.085}

each_schedule = pytest.mark.parametrize("name", SCHEDULES)
each_offered = pytest.mark.parametrize(("name", "dtype"), OFFERED)


def normal(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def mapped(name, sigma, dtype="float64"):
    """What the schedule for `dtype` makes of singular values, over their 4-norm, in float64."""
    sigma = sigma / np.sum(sigma**4) ** 0.25
    for step in SCHEDULES[name].steps_in(dtype):
        terms = [sigma**2]
        for p in step.products:
            added = sum(beta * terms[i] for beta, i in p.addends)
            terms.append(p.alpha * terms[-1] ** 2 + added + p.diagonal)
        sigma = terms[-1] * sigma
    return sigma


def exact(name, x, dtype="float64"):
    u, sigma, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return u * mapped(name, sigma, dtype) @ vt


@each_schedule
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize(
    "shape", helpers.mostly_nightly([(48, 80), (80, 48), (33, 33)], [(80, 48)]), ids=str
)
def test_it_computes_its_polynomial(name, method, shape):
    with jax.enable_x64(True):
        x = normal(shape, "float64")
        out = newton_schulz(x, name, dtype="float64", method=method)
        np.testing.assert_allclose(out, exact(name, x), rtol=0, atol=1e-10)


@each_schedule
def test_its_polynomial_for_bfloat16_too(name, monkeypatch):
    schedule = SCHEDULES[name]
    wide = dataclasses.replace(schedule, steps=schedule.bfloat16_steps)
    with jax.enable_x64(True):
        x = normal((31, 48), "float64")
        expected = exact(name, x, "bfloat16")
        monkeypatch.setitem(SCHEDULES, name, wide)
        out = unjitted(x, name, dtype="float64")
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-10)


@each_schedule
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), ("float16", 2e-2), ("bfloat16", 5e-2)]
)
@pytest.mark.parametrize(
    "shape", helpers.mostly_nightly([(64, 64), (48, 160)], [(48, 160)]), ids=str
)
def test_in_every_dtype_it_is_close_to_it(name, dtype, tolerance, shape):
    x = normal(shape)
    out = newton_schulz(x, name, dtype=dtype)
    assert helpers.relative_error(out, exact(name, x, dtype)) < tolerance


@pytest.mark.parametrize(
    ("name", "dtype", "low", "least", "most"),
    [
        ("fast", "float16", 0.01, 0.723, 1.184),
        ("fast", "bfloat16", 0.004, 0.523, 1.236),
        ("balanced", "float16", 0.006, 0.830, 1.144),
        ("balanced", "bfloat16", 0.003, 0.776, 1.086),
        ("accurate", "float16", 0.0018, 0.894, 1.165),
        ("accurate", "bfloat16", 0.0008, 0.664, 1.187),
    ],
)
def test_its_map_stays_within_what_is_stated(name, dtype, low, least, most):
    smallest, largest = range_of_map(name, dtype, low)
    assert least <= smallest <= largest <= most


def test_the_docstring_has_the_ranges_of_the_maps():
    text = " ".join(str(newton_schulz.__doc__).split())
    lows = re.search(r"have l = ([\d.]+), ([\d.]+) and ([\d.]+) of the Schatten-4 norm", text)
    assert lows
    for name, low in zip(("fast", "balanced", "accurate"), lows.groups(), strict=True):
        smallest, largest = range_of_map(name, "float16", float(low))
        assert re.search(rf'"{name}" \d+ float16 \[{smallest:.2f}, {largest:.2f}\]', text)


def range_of_map(name, dtype, low):
    """The least and the largest image of [low, 1]."""
    # The second of each pair makes their 4-norm 1.
    pairs = [np.array([sigma, (1 - sigma**4) ** 0.25]) for sigma in np.geomspace(low, 1.0, 2000)]
    values = np.array([mapped(name, pair, dtype)[0] for pair in pairs])
    return values.min(), values.max()


def spectra(m):
    """Gaussian, power-law and spiked matrices."""
    rng = np.random.default_rng(0)
    gaussian = rng.standard_normal((m, m))
    (u, _), (v, _) = (np.linalg.qr(rng.standard_normal((m, m))) for _ in range(2))
    yield gaussian
    yield u * (1.0 + np.arange(m)) ** -1.0 @ v
    yield 30 * u[:, :4] * np.logspace(0, -1, 4) @ v[:4] + gaussian / (2 * np.sqrt(m))


def polar_errors(case, name, dtype):
    """Polar error on σ > σ₁/100 and on σ > σ₁/1000, root mean square over directions."""
    return polar_metrics(case, np.asarray(newton_schulz(case.x, name, dtype=dtype)))["errors"]


@pytest.mark.nightly
def test_the_polar_error_is_as_stated_and_below_that_of_standard():
    for x in spectra(384):
        case = Case.of("", x)
        bulk, tail = polar_errors(case, "standard", "bfloat16")
        for name, dtype in OFFERED:
            error, tail_error = polar_errors(case, name, dtype)
            assert error <= min(bulk, POLAR_ERROR[name]), (name, dtype)
            if name != "fast":
                assert tail_error <= tail, (name, dtype)


@each_offered
@pytest.mark.parametrize("magnitude", [1e-34, 1e-30, 1e30, 3e38])
def test_the_result_does_not_depend_on_scale(name, dtype, magnitude):
    x = normal((24, 40))
    x /= jnp.max(jnp.abs(x))
    out = newton_schulz(magnitude * x, name, dtype=dtype)
    expected = exact(name, x, dtype)
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error < {"float16": 1e-2, "bfloat16": 5e-2}[dtype]


@each_offered
def test_zero_gives_zero_and_a_bad_element_nan_in_its_matrix_alone(name, dtype):
    x = normal((4, 24, 40)).at[1].set(0).at[2, 3, 4].set(jnp.nan).at[3, 0, 0].set(-jnp.inf)
    out = newton_schulz(x, name, dtype=dtype)
    assert bool(jnp.isfinite(out[0]).all())
    assert bool((out[1] == 0).all())
    assert bool(jnp.isnan(out[2:]).all())


@each_offered
@pytest.mark.parametrize("shape", helpers.mostly_nightly([(1, 50), (50, 1)], [(50, 1)]), ids=str)
def test_one_row_is_normalized(name, dtype, shape):
    x = normal(shape)
    out = newton_schulz(x, name, dtype=dtype)
    expected = mapped(name, np.ones(1), dtype) * x / jnp.linalg.norm(x)
    atol = {"float16": 2e-2, "bfloat16": 4e-2}[dtype]  # y is steep at 1
    np.testing.assert_allclose(out, expected, atol=atol)


@each_offered
def test_one_heavy_element_overflows_nothing(name, dtype):
    # The Schatten-4 norm is one element's, so h/norm is as large as it gets.
    x = (1e-6 * normal((5, 40_000))).at[1, 7].set(1.0)
    out = newton_schulz(x, name, dtype=dtype)
    assert 0.8 < float(jnp.linalg.norm(out.astype(jnp.float32), 2)) < 1.3


def test_a_stack_and_vmap_are_each_matrix_alone():
    def function(x):
        return newton_schulz(x, "accurate", dtype="float32")

    x = normal((3, 2, 40, 24)) * jnp.array([1e-3, 1, 1e3])[:, None, None, None]
    stacked = function(x)
    np.testing.assert_allclose(jax.vmap(function, 1, 1)(x), stacked, atol=1e-4)
    np.testing.assert_allclose(stacked[2, 1], function(x[2, 1]), atol=1e-4)


def test_eps_is_added_to_the_norm():
    x = normal((24, 40))
    norm = np.sqrt(np.linalg.norm(np.asarray(x @ x.T, np.float64)))
    out = newton_schulz(x, "fast", eps=1e4 * norm, dtype="float32")
    slope = mapped("fast", np.array([1e-9, 1.0]))[0] / 1e-9
    np.testing.assert_allclose(out, slope * x / (1e4 * norm), rtol=0.01, atol=1e-4)


@pytest.mark.parametrize(("name", "most"), [("fast", 0.70), ("balanced", 0.80)])
def test_it_takes_fewer_operations_than_five_quintics(name, most):
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)

    def flops(ns_coeffs):
        run = functools.partial(newton_schulz, ns_coeffs=ns_coeffs, implementation="xla")
        lowered = jax.jit(run).lower(x)
        analysis = lowered.compile().cost_analysis()
        assert analysis is not None
        return analysis["flops"]

    assert flops(name) <= most * flops("standard")


def products_of(name, x_dtype="float32", **kwargs):
    """Dtype and precision of the products of `newton_schulz`, one each."""
    x = jax.ShapeDtypeStruct((64, 128), x_dtype)
    jaxpr = jax.make_jaxpr(lambda x: unjitted(x, name, **kwargs))(x)
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    return {(str(eqn.invars[0].aval.dtype), eqn.params["precision"]) for eqn in products}


def test_auto_is_what_the_coefficients_need():
    auto = {"fast": "float16", "balanced": "float16", "accurate": "float16"}
    for name, dtype in {**auto, "standard": "bfloat16", "cans": "float32"}.items():
        for x_dtype in ("float32", "float16", "bfloat16"):
            assert {product[0] for product in products_of(name, x_dtype)} == {dtype}
    assert products_of("balanced", dtype=None) == {("float32", None)}
    assert products_of("balanced", "complex64") == {("complex64", None)}


def test_a_tpu_which_multiplies_no_float16_gets_bfloat16_and_float32_at_its_precision():
    high = (jax.lax.Precision.HIGH,) * 2
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        for name in ("fast", "balanced", "accurate", "standard"):
            assert products_of(name) == {("bfloat16", None)}
            assert products_of(name, dtype="float32") == {("float32", high)}
        assert products_of("standard", method="gram") == {("bfloat16", None)}


def test_gpus_multiply_float32_as_such_under_composed_schedules():
    highest = (jax.lax.Precision.HIGHEST,) * 2
    with helpers.described_gpu("H200"):
        for name in ("fast", "balanced", "accurate", "cans"):
            assert products_of(name, dtype="float32") == {("float32", highest)}
        assert products_of("standard", dtype="float32") == {("float32", None)}
        with jax.default_matmul_precision("tensorfloat32"):
            assert {dtype for dtype, _ in products_of("fast", dtype="float32")} == {"float32"}
            assert products_of("fast", dtype="float32") != {("float32", highest)}


def error_of_one_direction(name, dtype):
    """The median of ‖u₁ᵀO - v₁‖ for a singular value 1 among small ones."""
    errors = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        sigma = SPECTRA["one direction"](64, rng)
        case = Case.of("one direction", with_singular_values(sigma, 64, rng))
        result = np.asarray(newton_schulz(case.x, name, dtype=dtype))
        errors.append(polar_metrics(case, result)["errors"][0])
    return np.median(errors)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_direction_among_small_ones(dtype):
    reference = error_of_one_direction("polar_express", dtype)
    balanced, accurate = {"float16": (2, 2), "bfloat16": (2.1, 2.5)}[dtype]
    for name, times in (("balanced", balanced), ("accurate", accurate)):
        assert error_of_one_direction(name, dtype) < times * reference, name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: newton_schulz(x, "fast", 3), r"'fast' is a whole of 1 step.*got ns_steps=3"),
        (
            lambda x: newton_schulz(x, "accurate", 3),
            r"'accurate' is a whole of 2 step.*got ns_steps=3",
        ),
        (
            lambda x: newton_schulz(x, "fast", preconditioning="aol"),
            r"'fast'.*Schatten-4 norm, got preconditioning='aol'",
        ),
        (
            lambda x: newton_schulz(x, "accurate", dtype=jnp.float8_e4m3fn),
            r"'accurate' is unsafe in float8_e4m3fn.*needs float16 or bfloat16",
        ),
    ],
)
def test_wrong_calls_say_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((8, 8)))


@each_schedule
def test_it_may_be_asked_for_with_its_own_number_of_steps(name):
    x = normal((8, 12))
    own = newton_schulz(x, name, len(SCHEDULES[name].steps), dtype=jnp.float32)
    np.testing.assert_array_equal(own, newton_schulz(x, name, dtype=jnp.float32))
