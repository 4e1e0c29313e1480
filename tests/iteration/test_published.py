import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from benchmarks._accuracy import polar_error
from muon_jax import newton_schulz
from muon_jax._iteration.coefficients import NAMED

# Relative errors. Those of the gram form are larger: between restarts errors of R are amplified
# ("dion" has 0.011 in float16, "polar_express_nanogpt" 1.3e-4 in float32).
TOLERANCE = {
    "standard": {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2},
    "gram": {"float32": 3e-4, "float16": 2e-2, "bfloat16": 5e-2},
}


def rows_of(name):
    rows = NAMED[name]
    return rows * 5 if len(rows) == 1 else rows


def mapped(rows, sigma):
    for a, b, c in rows:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


@pytest.mark.parametrize("name", NAMED)
def test_every_name_is_its_polynomial(name):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((12, 20)))
        out = newton_schulz(x, name, dtype=None)
        assert helpers.relative_error(out, helpers.exact_newton_schulz(x, rows_of(name))) < 1e-12


@pytest.mark.parametrize(
    "name", helpers.mostly_nightly(NAMED, ["standard", "polar_express", "aol"])
)
@pytest.mark.parametrize("dtype", helpers.mostly_nightly(polar_error.DTYPES, ["float16"]))
def test_every_form_in_every_dtype_is_close_to_it(name, dtype):
    x = np.random.default_rng(0).standard_normal((64, 64))
    with jax.default_matmul_precision("highest"):
        arguments = polar_error.arguments_for_coefficients(name)
        out = {
            method: newton_schulz(
                jnp.asarray(x, jnp.float32), dtype=dtype, method=method, **arguments
            )
            for _, method, _ in polar_error.offered_variants([name], [*TOLERANCE], [dtype])
        }
    is_aol = arguments["preconditioning"] == "aol"
    norm = np.abs(x @ x.T).sum(1, keepdims=True) ** 0.5 if is_aol else np.linalg.norm(x)
    expected = oracles.newton_schulz(x / norm, rows_of(name))
    for method, result in out.items():
        assert helpers.relative_error(result, expected) < TOLERANCE[method][dtype], method


@pytest.fixture(scope="module")
def gaussian_spectra():
    rng = np.random.default_rng(0)
    sigmas = [np.linalg.svd(rng.standard_normal((512, n)), compute_uv=False) for n in (512, 2048)]
    return [sigma / np.linalg.norm(sigma) for sigma in sigmas]


@pytest.mark.parametrize(
    ("name", "steps", "square", "wide"),
    [
        ("standard", 5, 0.939, 0.955),
        ("standard_1.02", 5, 0.954, 1.002),
        ("dion", 5, 0.995, 1.001),
        ("polar_express", 5, 0.999, 1.004),
        ("polar_express_nanogpt", 5, 1.004, 1.010),
        ("polar_express_nvidia", 5, 0.997, 1.014),
        ("cans", 5, 0.997, 1.000),
        ("deepseek_v4", 10, 1.000, 1.000),
        ("cubic", 5, 1.036, 0.993),
    ],
)
def test_published_sets_give_the_update_sizes_of_their_sources(
    gaussian_spectra, name, steps, square, wide
):
    for sigma, expected in zip(gaussian_spectra, (square, wide), strict=True):
        sigma = mapped(rows_of(name)[:steps], sigma)
        assert abs(np.sqrt(np.mean(sigma**2)) - expected) < 1.5e-3


@pytest.mark.parametrize(
    ("name", "steps", "sizes"), [("dion", 4, (0.997, 1.002)), ("standard", 5, (0.919, 0.969))]
)
def test_aol_gives_the_update_sizes_of_its_sources(name, steps, sizes):
    for n, expected in zip((512, 2048), sizes, strict=True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((512, n)), jnp.float32)
        out = newton_schulz(x, name, steps, dtype="float32", preconditioning="aol")
        assert abs(np.linalg.norm(out) / 512**0.5 - expected) < 3e-3


@pytest.mark.parametrize(("name", "maximum"), [("standard", 1.20), ("cubic", 1.30)])
def test_maxima_of_maps_are_those_of_their_sources(name, maximum):
    assert abs(mapped(rows_of(name), np.linspace(0, 1, 20_001)).max() - maximum) < 5e-3


@pytest.mark.parametrize(
    ("name", "maximum", "values"),
    [
        ("polar_express", 1.1236, (0.8787, 0.8849, 1.0190)),
        ("polar_express_nanogpt", 1.1411, (1.0165, 1.0864, 0.9035)),
        ("aol", 1.0500, (1.0310, 1.0270, 0.9438)),
        ("aol_nvidia", 1.0844, (1.0039, 1.0075, -0.9935)),
    ],
)
def test_maps_have_their_maximum_and_their_values_at_a_tenth_a_half_and_one(name, maximum, values):
    assert abs(mapped(rows_of(name), np.linspace(0, 1, 20_001)).max() - maximum) < 1e-4
    np.testing.assert_allclose(mapped(rows_of(name), np.array([0.1, 0.5, 1])), values, atol=1e-4)


@pytest.mark.parametrize("dtype", polar_error.DTYPES)
@pytest.mark.parametrize(("name", "at_one"), [("aol", 0.9438), ("aol_nvidia", -0.9935)])
def test_of_rank_one_aol_nvidia_is_minus_the_polar_factor(name, at_one, dtype):
    out = newton_schulz(
        jnp.ones((16, 64)), dtype=dtype, **polar_error.arguments_for_coefficients(name)
    )
    np.testing.assert_allclose(out, np.full((16, 64), at_one / 32), rtol=4e-2)
