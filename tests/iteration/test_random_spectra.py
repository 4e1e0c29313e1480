"""No singular value exceeds 1.5, whatever the spectrum, under whatever is offered."""

import functools
import itertools

import helpers
import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._accuracy import polar_error
from muon_jax import newton_schulz
from muon_jax._iteration.coefficients import SCHEDULES

M = 48
SPECTRA = {
    "condition to 1e9": lambda rng: 10 ** (-rng.uniform(0, 9) * rng.random(M)),
    "geometric": lambda rng: 10 ** (-rng.uniform(0, 9) * np.linspace(0, 1, M)),
    "low rank": lambda rng: np.where(
        np.arange(M) < rng.integers(1, M), 10 ** (-rng.uniform(0, 3) * rng.random(M)), 0
    ),
    "clusters": lambda rng: (
        np.append(1, 10 ** -rng.uniform(0, 5, 3))[rng.integers(0, 4, M)]
        * (1 + 1e-3 * rng.standard_normal(M))
    ),
    "spike": lambda rng: np.where(
        np.arange(M) == 0, 1, 10 ** -rng.uniform(0.3, 4) * (1 + 0.3 * rng.random(M))
    ),
    "power law": lambda rng: (1.0 + np.arange(M)) ** -rng.uniform(0.2, 3),
}
ROUND_ALIKE = ("two lengths", "signs")  # their Gram matrices have few values
KINDS = (*SPECTRA, "repeated rows", *ROUND_ALIKE)


def random_matrix(kind, n, seed):
    rng = np.random.default_rng(seed)
    if kind not in SPECTRA:
        rank = rng.integers(1, 4 if kind in ROUND_ALIKE else M // 2)
        rows = rng.standard_normal((rank, n)) * 10 ** (-rng.uniform(0, 3) * rng.random((rank, 1)))
        if kind == "repeated rows":
            return rows[rng.integers(0, rank, M)]
        weights = rng.choice([-1.0, 1.0], (M, rank))
        if kind == "two lengths":
            weights *= np.eye(rank)[rng.integers(0, rank, M)]
            weights *= rng.choice([1, rng.random()], (M, 1))
        noise = 10 ** -rng.uniform(2, 5) * rng.integers(0, 2)
        return weights @ rows + noise * rng.standard_normal((M, n))
    v, _ = np.linalg.qr(rng.standard_normal((n, M)))
    u, _ = np.linalg.qr(rng.standard_normal((M, M)))
    if rng.random() < 0.25:  # along the axes
        u = np.eye(M)[rng.permutation(M)]
    return u * SPECTRA[kind](rng) @ v.T


BATCH = 500


@functools.cache  # 9 MB, and all tests draw the same
def random_matrices(seed, kinds=KINDS):
    rng = np.random.default_rng(seed)
    x = np.zeros((BATCH, M, 2 * M), np.float32)
    for i, matrix in enumerate(x):
        n = M * int(rng.integers(1, 3))
        matrix[:, :n] = random_matrix(kinds[i % len(kinds)], n, rng.integers(2**32))
    return jnp.asarray(x * 10 ** rng.uniform(-4, 4, (BATCH, 1, 1)), jnp.float32)


def assert_none_blows_up(name, method, dtype, matrices):
    arguments = polar_error.arguments_for_coefficients(name)
    out = np.asarray(newton_schulz(matrices, dtype=dtype, method=method, **arguments))
    assert np.isfinite(out).all()
    # Raises where a singular value exceeds the bound, and costs less than to find the largest.
    np.linalg.cholesky(polar_error.LARGEST_ALLOWED**2 * np.eye(M, dtype=out.dtype) - out @ out.mT)


@functools.cache
def offered(name, *dtypes):
    """The methods and dtypes in which the coefficients of that name are offered."""
    variants = polar_error.offered_variants([name], polar_error.METHODS, dtypes)
    return [(method, dtype) for _, method, dtype in variants]


def drawn(matrices):
    settings = hypothesis.settings(max_examples=matrices // BATCH, deadline=None, database=None)
    given = hypothesis.given(seed=st.integers(0, 2**32 - 1))
    return lambda test: hypothesis.seed(0)(settings(given(test)))


each_name = pytest.mark.parametrize("name", polar_error.coefficient_names())


@pytest.mark.optimized
@pytest.mark.parametrize(
    "name",
    helpers.mostly_nightly(polar_error.coefficient_names(), ["standard", "balanced"]),
)
@drawn(1000)
def test_no_spectrum_blows_up(name, seed):
    for method, dtype in offered(name, "auto"):
        assert_none_blows_up(name, method, dtype, random_matrices(seed))


@pytest.mark.nightly
@pytest.mark.optimized
@each_name
@drawn(10_000)
def test_no_spectrum_of_ten_thousand_blows_up(name, seed):
    for method, dtype in offered(name, "float16", "bfloat16"):
        assert_none_blows_up(name, method, dtype, random_matrices(seed))


@pytest.mark.nightly
@pytest.mark.optimized
@each_name
@drawn(1000)
def test_none_does_in_float32(name, seed):
    for method, dtype in offered(name, "float32"):
        assert_none_blows_up(name, method, dtype, random_matrices(seed))


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", SCHEDULES)
def test_none_that_rounds_alike_does(name):
    for seed, (method, dtype) in itertools.product(range(6), offered(name, "float16", "bfloat16")):
        assert_none_blows_up(name, method, dtype, random_matrices(seed, ROUND_ALIKE))
