import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muon_jax import newton_schulz
from muon_jax._coefficients import NAMED


@pytest.mark.parametrize("name", NAMED)
def test_every_name_is_its_polynomial(name):
    rows = NAMED[name]
    rows = rows * 5 if len(rows) == 1 else rows
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((12, 20)))
        out = newton_schulz(x, name, dtype=None)
        assert helpers.relative_error(out, helpers.exact_newton_schulz(x, rows)) < 1e-12


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
    rows = NAMED[name]
    rows = rows * steps if len(rows) == 1 else rows[:steps]
    for sigma, expected in zip(gaussian_spectra, (square, wide), strict=True):
        for a, b, c in rows:
            sigma = a * sigma + b * sigma**3 + c * sigma**5
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
    sigma, rows = np.linspace(0, 1, 20_001), NAMED[name]
    for a, b, c in rows * 5 if len(rows) == 1 else rows:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    assert abs(sigma.max() - maximum) < 5e-3
