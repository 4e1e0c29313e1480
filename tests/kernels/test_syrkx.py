"""One body of tests for every implementation of `syrkx`, against float64."""

import functools

import chex
import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import IMPLEMENTATIONS, each_implementation, each_implementation_and_dtype
from jax import test_util

from pallas_kernels import syrk, syrkx

SHAPES = [(64, 96), (1, 1), (1, 50), (50, 1), (33, 17), (3, 40, 20), (2, 3, 35, 16)]


@each_implementation_and_dtype
@pytest.mark.parametrize(
    "shape", helpers.mostly_nightly(SHAPES, [(64, 96), (33, 17), (2, 3, 35, 16)]), ids=str
)
def test_integers_are_exact_with_the_whole_epilogue(implementation, dtype, shape):
    rng = np.random.default_rng(0)
    *batch, m, _ = shape
    a = helpers.integers(rng, shape, dtype)
    c = helpers.symmetric(helpers.integers(rng, (*batch, m, m), dtype))
    alpha = rng.integers(1, 4, batch).astype(np.float32)  # one for each matrix
    kwargs = {"alpha": alpha, "beta": -2.0, "diagonal": 3.0}
    expected = helpers.exact_syrkx(a, None, c, **kwargs).astype(dtype)  # exact, then rounded once
    chex.assert_trees_all_equal(IMPLEMENTATIONS[implementation](a, None, c, **kwargs), expected)


@each_implementation_and_dtype
def test_integers_are_exact_without_an_epilogue(implementation, dtype):
    a = helpers.integers(np.random.default_rng(1), (70, 30), dtype)
    expected = helpers.exact_syrkx(a, None).astype(dtype)
    chex.assert_trees_all_equal(IMPLEMENTATIONS[implementation](a, None), expected)


@each_implementation_and_dtype
def test_integers_are_exact_with_two_addends_one_of_them_for_all_matrices(implementation, dtype):
    rng = np.random.default_rng(8)
    a = helpers.integers(rng, (2, 70, 30), dtype)
    shapes = (2, 70, 70), (70, 70)
    cs = tuple(helpers.symmetric(helpers.integers(rng, shape, dtype)) for shape in shapes)
    kwargs = {"alpha": 2.0, "beta": (-2.0, rng.integers(1, 4, 2)), "diagonal": 3.0}
    expected = helpers.exact_syrkx(a, None, cs, **kwargs).astype(dtype)
    chex.assert_trees_all_equal(IMPLEMENTATIONS[implementation](a, None, cs, **kwargs), expected)


@each_implementation
def test_vmap_keeps_an_addend_for_all_matrices(implementation):
    rng = np.random.default_rng(11)
    a = helpers.integers(rng, (3, 2, 40, 20), jnp.bfloat16)
    c = helpers.symmetric(helpers.integers(rng, (40, 40), jnp.bfloat16))
    cs = jnp.stack([c, 2 * c, 3 * c])
    run = functools.partial(IMPLEMENTATIONS[implementation], beta=2.0)
    expected = helpers.exact_syrkx(a, None, jnp.broadcast_to(c, (3, 2, 40, 40)), beta=2.0)
    out = jax.vmap(lambda a: run(a, c_matrix=c))(a)
    chex.assert_trees_all_equal(out, expected.astype(jnp.bfloat16))
    expected = helpers.exact_syrkx(a, None, jnp.broadcast_to(cs[:, None], (3, 2, 40, 40)), beta=2.0)
    out = jax.vmap(lambda a, c: run(a, c_matrix=c))(a, cs)
    chex.assert_trees_all_equal(out, expected.astype(jnp.bfloat16))


def test_an_addend_of_one_matrix_serves_for_the_whole_batch():
    rng = np.random.default_rng(12)
    a = helpers.integers(rng, (2, 2, 2, 3), jnp.bfloat16)
    c = helpers.symmetric(helpers.integers(rng, (2, 2), jnp.bfloat16))
    broadcast = jnp.broadcast_to(c, (2, 2, 2, 2))
    chex.assert_trees_all_equal(syrk(a, c, beta=2.0), syrk(a, broadcast, beta=2.0))
    with pytest.raises(ValueError, match=r"c_matrix must be bfloat16\[2, 2, 2, 2\]"):
        syrk(a, c[None], beta=2.0)


@each_implementation_and_dtype
def test_the_residual_is_what_rounding_left(implementation, dtype):
    a = helpers.integers(np.random.default_rng(9), (2, 70, 40), dtype)
    alpha = 1 + 2.0**-12  # products are too long for 16 bits
    exact = helpers.exact_syrkx(a, None, alpha=alpha)
    high, low = IMPLEMENTATIONS[implementation](a, None, alpha=alpha, residual=True)
    chex.assert_trees_all_equal(high, exact.astype(dtype))
    chex.assert_trees_all_equal(low, (exact - np.asarray(high, np.float64)).astype(dtype))
    assert jnp.any(low != 0) or dtype == jnp.float32


@pytest.mark.parametrize(
    ("tile", "batch", "addend", "tiles"),
    [(16, 2, False, 9), (16, 2, True, 6), (16, 20, False, 6), (32, 20, False, 4)],
)
def test_triton_computes_both_triangles_of_tiny_matrices(tile, batch, addend, tiles):
    tiny = helpers.INTERPRETED._replace(tile_m=tile, tile_n=tile)
    run = functools.partial(helpers.interpreted_triton, config=tiny, alpha=2.0, diagonal=3.0)
    rng = np.random.default_rng(10)
    a = helpers.integers(rng, (batch, 40, 20), jnp.bfloat16)
    c = helpers.symmetric(helpers.integers(rng, (batch, 40, 40), jnp.bfloat16)) if addend else None
    expected = helpers.exact_syrkx(a, None, c, alpha=2.0, beta=1.0, diagonal=3.0)
    chex.assert_trees_all_equal(run(a, None, c, beta=1.0), expected.astype(jnp.bfloat16))
    assert f"grid=({batch * tiles},)" in str(jax.make_jaxpr(lambda a: run(a, None, c, beta=1.0))(a))


@each_implementation_and_dtype
def test_two_operands_whose_product_is_symmetric(implementation, dtype):
    a = helpers.symmetric(helpers.integers(np.random.default_rng(2), (40, 40), dtype))
    b = a @ a + 2 * a  # commutes with a
    assert jnp.abs(b).max() <= 256  # exact in bfloat16
    expected = helpers.exact_syrkx(a, b).astype(dtype)
    chex.assert_trees_all_equal(IMPLEMENTATIONS[implementation](a, b), expected)


@pytest.mark.slow
@each_implementation
@pytest.mark.parametrize("examples", helpers.mostly_nightly([2, 6], [2], ()))  # each takes seconds
def test_error_is_at_most_twice_that_of_xlas_product(implementation, examples):
    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=True)
    @hypothesis.given(
        m=st.integers(1, 80),
        n=st.integers(1, 80),
        batch=st.sampled_from([(), (1,), (3,)]),
        dtype=st.sampled_from(helpers.DTYPES[implementation]),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(m, n, batch, dtype, seed):
        rng = np.random.default_rng(seed)
        a = jnp.asarray(rng.standard_normal((*batch, m, n)), dtype)
        c = helpers.symmetric(jnp.asarray(rng.standard_normal((*batch, m, m)), dtype))
        kwargs = {"alpha": 0.7, "beta": -1.3, "diagonal": 2.5}
        expected = helpers.exact_syrkx(a, None, c, **kwargs)
        with jax.default_matmul_precision("highest"):
            out = IMPLEMENTATIONS[implementation](a, None, c, **kwargs)
            product = jnp.matmul(a, a.mT, preferred_element_type=jnp.float32)
        by_xla = (0.7 * product - 1.3 * c + 2.5 * jnp.eye(m)).astype(dtype)
        limit = 2 * helpers.relative_error(by_xla, expected) + 1e-7
        assert helpers.relative_error(out, expected) <= limit

    check()


@each_implementation_and_dtype
@pytest.mark.parametrize("same", [True, False], ids=["syrk", "syrkx"])
@pytest.mark.parametrize(
    "shape",
    helpers.mostly_nightly([(2, 77, 77), (40, 3000), (90, 31)], [(2, 77, 77)]),
    ids=str,
)
def test_the_result_equals_its_transpose_exactly(implementation, dtype, same, shape):
    rng = np.random.default_rng(3)
    *batch, m, _ = shape

    def values(shape):
        # Its blocks on the diagonal are as symmetric as the products: on a CPU, those of integers.
        if implementation == "mosaic_gpu, interpreted":
            return helpers.integers(rng, shape, dtype)
        return jnp.asarray(rng.standard_normal(shape), dtype)

    a, b, c = values(shape), values(shape), helpers.symmetric(values((*batch, m, m)))
    out = IMPLEMENTATIONS[implementation](a, None if same else b, c, beta=0.5)
    chex.assert_trees_all_equal(out, np.asarray(out).mT)


@each_implementation
@pytest.mark.parametrize(
    "in_axes",
    helpers.mostly_nightly([(0, None, None), (1, 2, 0), (None, None, 0)], (), [(1, 2, 0)]),
    ids=str,
)
def test_vmap_gives_what_each_matrix_alone_gives(implementation, in_axes):
    rng = np.random.default_rng(4)
    shapes = [(2, 30, 20), (2, 30, 30), (2,)]
    dtype = helpers.DTYPES[implementation][-1]
    a, c, alpha = (
        helpers.integers(rng, shape if axis is None else (*shape[:axis], 3, *shape[axis:]), dtype)
        for shape, axis in zip(shapes, in_axes, strict=True)
    )

    def function(a, c, alpha):
        return IMPLEMENTATIONS[implementation](a, None, c, alpha=alpha, beta=2.0)

    out = jax.vmap(function, in_axes)(a, c, alpha)
    chex.assert_shape(out, (3, 2, 30, 30))
    last = (
        operand if axis is None else jnp.take(operand, 2, axis)
        for operand, axis in zip((a, c, alpha), in_axes, strict=True)
    )
    chex.assert_trees_all_equal(out[2], function(*last))


def test_vmap_of_triton_launches_one_kernel():
    jaxpr = jax.make_jaxpr(jax.vmap(jax.vmap(lambda a: helpers.interpreted_triton(a))))
    text = str(jaxpr(jnp.ones((3, 2, 4, 30, 20))))
    assert text.count("pallas_call[") == 1
    assert "grid=(24,)" in text


@each_implementation
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_nan_and_infinity_stay_visible(implementation):
    a = jnp.ones((40, 20), helpers.DTYPES[implementation][-1])
    a = a.at[3, 4].set(jnp.nan).at[35, 0].set(jnp.inf)
    out = np.asarray(IMPLEMENTATIONS[implementation](a, None))
    assert np.isnan(out[3]).all()
    assert np.isnan(out[:, 3]).all()
    assert np.isinf(out[35, 0])
    assert np.isfinite(np.delete(np.delete(out, [3, 35], 0), [3, 35], 1)).all()


def test_coefficients_may_be_traced():
    a = helpers.integers(np.random.default_rng(5), (30, 20), jnp.bfloat16)

    @jax.jit
    def function(a, alpha, diagonal):
        return syrk(a, alpha=alpha, diagonal=diagonal)

    expected = helpers.exact_syrkx(a, None, alpha=2.0, diagonal=-1.0).astype(jnp.bfloat16)
    chex.assert_trees_all_equal(function(a, 2, -1), expected)


def test_xla_is_differentiable():
    rng = np.random.default_rng(6)
    a, c = (jnp.asarray(rng.standard_normal((5, 5)), jnp.float32) for _ in range(2))
    function = functools.partial(syrk, alpha=0.5, beta=2.0, diagonal=3.0, implementation="xla")
    with jax.default_matmul_precision("highest"):
        test_util.check_grads(function, (a, c), order=1, modes=["fwd", "rev"], eps=1e-2)


def test_triton_says_that_it_has_no_derivative():
    with pytest.raises(NotImplementedError, match="'triton' has no derivative.*'xla'"):
        jax.grad(lambda a: helpers.interpreted_triton(a).sum())(jnp.ones((5, 5)))


def test_xla_takes_float64_and_complex():
    rng = np.random.default_rng(7)
    a = rng.standard_normal((6, 4)) + 1j * rng.standard_normal((6, 4))
    with jax.enable_x64(True):
        out = syrk(jnp.asarray(a), diagonal=2.0)
        chex.assert_trees_all_close(out, a @ a.conj().T + 2 * np.eye(6), rtol=1e-12)
        chex.assert_trees_all_equal(out, out.mT.conj())
        real = jnp.asarray(a.real)
        chex.assert_trees_all_close(syrkx(real, real), a.real @ a.real.T, rtol=1e-12)
