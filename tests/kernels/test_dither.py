"""Dithered rounding: the definition in NumPy, and every implementation against it, bit for bit."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import symmetric_product
from tests import helpers
from tests.helpers import IMPLEMENTATIONS


def hashes(count: int) -> np.ndarray:
    """The odd hash of each index, in Python's integers."""
    mask, out = 2**32 - 1, []
    for x in range(count):
        x = (x ^ (x >> 16)) * 0x7FEB352D & mask
        x = (x ^ (x >> 15)) * 0x846CA68B & mask
        out.append((x ^ (x >> 16)) | 1)
    return np.array(out, np.uint64)


def dithered_rounding(exact: np.ndarray, dtype) -> np.ndarray:
    """Sums that float32 holds exactly, with the dither added and rounded."""
    bits = 23 - jnp.finfo(dtype).nmant
    product = np.outer(*[hashes(exact.shape[-1])] * 2) & np.uint64(2**32 - 1)
    ulps = ((product >> np.uint64(32 - bits)) | np.uint64(1)).astype(np.int64) - 2 ** (bits - 1)
    assert np.abs(ulps).max() < 2 ** (bits - 1)
    moved = (exact.astype(np.float32).view(np.int32) + ulps).astype(np.int32).view(np.float32)
    return np.asarray(np.where(exact == 0, 0, moved), dtype)


@helpers.each_implementation_and_dtype
def test_every_implementation_has_the_dither_of_the_place(implementation, dtype):
    rng = np.random.default_rng(0)
    a, b = (helpers.integers(rng, (2, 96, 64), dtype) for _ in "ab")
    c = helpers.symmetric(helpers.integers(rng, (2, 96, 96), dtype))
    kwargs = {"alpha": 33.0, "diagonal": 3.0}
    for operands, others in (((a, None), {}), ((a, a), {}), ((a, None, c), {"beta": -2.0})):
        exact = np.asarray(helpers.exact_syrkx(*operands, **kwargs, **others), np.float64)
        out = IMPLEMENTATIONS[implementation](*operands, dither=True, **kwargs, **others)
        expected = exact if dtype == jnp.float32 else dithered_rounding(exact, dtype)
        chex.assert_trees_all_equal(np.asarray(out), expected.astype(dtype))
        chex.assert_trees_all_equal(out, out.mT)
        to_nearest = exact.astype(dtype)
        assert np.any(expected != to_nearest) == (dtype != jnp.float32)


def test_results_that_the_dtype_holds_stay_and_others_move_by_less_than_an_ulp():
    rng = np.random.default_rng(1)
    for dtype in (jnp.float16, jnp.bfloat16):
        a = helpers.integers(rng, (64, 16), dtype)
        (exact,) = symmetric_product(a, dither=True)
        chex.assert_trees_all_equal(exact, a @ a.mT)
        x = jnp.asarray(rng.standard_normal((64, 32)), dtype)
        (out,) = symmetric_product(x, dither=True)
        wide = x.astype(jnp.float32) @ x.astype(jnp.float32).mT
        ulp = np.exp2(np.floor(np.log2(np.abs(wide)))) * float(jnp.finfo(dtype).eps)
        assert np.all(np.abs(np.asarray(out, np.float32) - wide) < 1.001 * ulp)


def test_a_residual_is_what_the_dithered_rounding_left():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((64, 64)), jnp.float16)
    high, low = symmetric_product(x, residual=True, dither=True)
    assert np.any(high != symmetric_product(x)[0])
    exact = np.asarray(x, np.float64) @ np.asarray(x, np.float64).T
    error = np.asarray(high, np.float64) + np.asarray(low, np.float64) - exact
    assert np.abs(error).max() < 2e-5 * np.abs(exact).max()


def test_zeros_infinities_and_float32_are_not_dithered():
    x = jnp.zeros((8, 8), jnp.float16).at[0, 0].set(jnp.inf).at[1, 1].set(60000.0)
    chex.assert_trees_all_equal(symmetric_product(x, dither=True), symmetric_product(x))
    wide = jax.random.normal(jax.random.key(0), (16, 16))
    chex.assert_trees_all_equal(symmetric_product(wide, dither=True), symmetric_product(wide))


def test_the_errors_are_not_coherent():
    """Equal entries make the errors of rounding to nearest a matrix of rank one."""
    m, value = 512, 1.0 + 0.3 * 2.0**-10
    total = float(np.float32(value**0.5)) ** 2
    norms = {}
    for dither in (False, True):
        (out,) = symmetric_product(
            jnp.ones((m, 1), jnp.float16), alpha=total, dither=dither, implementation="xla"
        )
        norms[dither] = np.linalg.norm(np.asarray(out, np.float64) - total, 2)
    assert norms[False] > 0.9 * m * abs(float(np.float16(total)) - total)
    assert norms[True] < 3 * np.sqrt(m) * 2.0**-10
