import functools
import itertools

import chex
import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from muon_jax import newton_schulz
from muon_jax._iteration import operand
from muon_jax._iteration.coefficients import NAMED

unjitted = helpers.unjitted_newton_schulz
STANDARD = NAMED["standard"][0]
DION = NAMED["dion"]
# Relative errors of five steps in each dtype, on the spectra below; float32 at highest precision.
TOLERANCE = {"float32": 3e-5, "float16": 1e-2, "bfloat16": 5e-2}

# Without "mosaic_gpu, interpreted", which takes minutes here, and its own tests.
each_implementation = pytest.mark.parametrize(
    "implementation",
    [
        "xla",
        "triton, interpreted",
        pytest.param("triton", marks=helpers.MARKS["triton"]),
        pytest.param("mosaic_gpu", marks=helpers.MARKS["mosaic_gpu"]),
    ],
)


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def run(monkeypatch):
    """`newton_schulz` over a named implementation, the interpreter among them."""

    def run(x, *args, implementation="xla", **kwargs):
        if implementation == "triton, interpreted":
            interpreted = helpers.IMPLEMENTATIONS[implementation]

            def product(self, a, b=None, c_matrices=(), *, betas=(), **coefficients):
                for option in ("symmetrize_output", "residual"):
                    coefficients.pop(option, None)
                c, beta = (c_matrices, tuple(betas)) if c_matrices else (None, 0)
                return (interpreted(a, b, c, beta=beta, **coefficients),)

            monkeypatch.setattr(pallas_kernels.Implementation, "syrkx", product)
            return unjitted(x, *args, **kwargs)
        return newton_schulz(x, *args, implementation=implementation, **kwargs)

    return run


def normal(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (64, 64), (2, 3, 21, 34)], ids=str)
def test_it_computes_its_polynomial(dtype, shape):
    x = normal(shape)
    out = newton_schulz(x, dtype=dtype)
    chex.assert_type(out, jnp.float32)
    expected = helpers.exact_newton_schulz(x, [STANDARD] * 5)
    assert helpers.relative_error(out, expected) < TOLERANCE[dtype]


@each_implementation
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("bfloat16", (48, 80)),
        pytest.param("float16", (80, 48), marks=helpers.nightly),
        pytest.param("float32", (2, 3, 21, 34), marks=helpers.nightly),
    ],
)
def test_it_does_so_over_every_implementation(run, implementation, dtype, shape):
    if implementation == "mosaic_gpu" and dtype == "float32":
        pytest.skip("the kernel takes bfloat16 and float16")
    x = normal(shape)
    out = run(x, ns_steps=2, dtype=dtype, implementation=implementation)
    expected = helpers.exact_newton_schulz(x, [STANDARD] * 2)
    assert helpers.relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("examples", helpers.mostly_nightly([6, 20], (), [6]))
def test_any_shape(examples):
    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=True)
    @hypothesis.given(m=st.integers(1, 40), n=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
    def check(m, n, seed):
        x = normal((m, n), seed=seed)
        expected = helpers.exact_newton_schulz(x, [STANDARD] * 5)
        assert helpers.relative_error(newton_schulz(x, dtype="float32"), expected) < 1e-4

    check()


@pytest.mark.parametrize(
    ("ns_coeffs", "ns_steps", "triples"),
    [
        ("standard", 3, [STANDARD] * 3),
        ((2.0, -1.5, 0.5), 12, [(2.0, -1.5, 0.5)] * 12),
        ("dion", 5, DION),
        ("dion", 2, DION[-2:]),
        pytest.param("aol", 5, NAMED["aol"], marks=helpers.nightly),
        pytest.param("deepseek_v4", 5, NAMED["deepseek_v4"], marks=helpers.nightly),
        ("deepseek_v4", 7, NAMED["deepseek_v4"][-7:]),
        (DION[:4], 5, DION[:4]),
        ((*DION, *DION), 5, [*DION, *DION]),
    ],
)
def test_coefficients_and_steps(ns_coeffs, ns_steps, triples):
    x = normal((30, 50))
    out = newton_schulz(x, ns_coeffs, ns_steps, dtype="float32")
    assert helpers.relative_error(out, helpers.exact_newton_schulz(x, triples)) < 1e-4


def test_a_convergent_triple_gives_the_polar_factor():
    x = normal((40, 60))
    u, _, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    out = newton_schulz(x, (2.0, -1.5, 0.5), 20, dtype="float32")
    chex.assert_trees_all_close(np.asarray(out, np.float64), u @ vt, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("magnitude", [1e-34, 1e-30, 1e30, 3e38])
def test_the_result_does_not_depend_on_scale(dtype, magnitude):
    x = normal((24, 40))
    x /= jnp.max(jnp.abs(x))
    expected = helpers.exact_newton_schulz(x, [STANDARD] * 5)
    out = newton_schulz(magnitude * x, dtype=dtype)
    assert helpers.relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["standard", "balanced"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("in_dtype", helpers.mostly_nightly(TOLERANCE, ["float32"]))
def test_the_largest_numbers_are_not_rounded_to_infinities(in_dtype, dtype, name):
    x = normal((24, 40))
    x /= jnp.max(jnp.abs(x))
    x = jnp.stack([jnp.sign(x), jnp.where(jnp.abs(x) > 0.5, jnp.sign(x), x)]).astype(in_dtype)
    x *= jnp.finfo(in_dtype).max
    for matrix in x:
        expected = np.asarray(newton_schulz(matrix / 4, name, dtype=dtype), np.float64)
        out = newton_schulz(matrix, name, dtype=dtype)
        assert helpers.relative_error(out, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("magnitude", [1e-200, 1e-60, 1e200])
@pytest.mark.parametrize("dtype", ["float16", None])
def test_in_float64_it_does_not_either(dtype, magnitude):
    with jax.enable_x64(True):
        x = magnitude * np.random.default_rng(0).standard_normal((24, 40))
        expected = helpers.exact_newton_schulz(x / magnitude, [STANDARD] * 5)
        out = newton_schulz(jnp.asarray(x), dtype=dtype)
        assert helpers.relative_error(out, expected) < 0.01


@pytest.mark.parametrize("eps_mode", ["add", "max"])
def test_eps_of_zero_is_zero_beside_the_smallest_numbers(eps_mode):
    x = 1.2e-38 * jnp.sign(normal((16, 128)))
    for method in ("standard", "gram"):
        kwargs = {"eps_mode": eps_mode, "method": method, "dtype": "float16"}
        assert jnp.max(jnp.abs(newton_schulz(x, eps=jnp.float32(0), **kwargs))) > 0.1


@functools.cache
def with_one_large_entry():
    x = np.ones((512, 2048), np.float32)
    x[0, 0] = 2400
    return x, *np.linalg.svd(x, full_matrices=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", "polar_express", "balanced"])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_one_large_entry_does_not_hide_the_others_in_float16(name, method):
    """Entries of XXᵀ that are rounded to 0 would add up to σ₂²; of rank 2, with σ₁ = 2400."""
    x, u, sigma, vt = with_one_large_entry()
    out = np.asarray(newton_schulz(jnp.asarray(x), name, dtype="float16", method=method))
    along = u[:, :2].T @ out @ vt[:2].T
    largest = np.sqrt(np.linalg.eigvalsh(np.float64(out) @ np.float64(out).T)[-1])
    assert sigma[2] < 1e-3 * sigma[1] and largest < 1.25
    np.testing.assert_allclose(along, np.eye(2), atol=0.35)


@pytest.mark.parametrize("preconditioning", ["frobenius", "spectral", "aol", "schatten"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_preconditionings_do_not_depend_on_scale(preconditioning, scale):
    x = normal((24, 40))
    expected = newton_schulz(x, dtype="float32", preconditioning=preconditioning)
    out = newton_schulz(scale * x, dtype="float32", preconditioning=preconditioning)
    assert helpers.relative_error(out, np.asarray(expected, np.float64)) < 1e-4


@pytest.mark.parametrize(
    ("preconditioning", "method"),
    [
        ("spectral", "standard"),
        *itertools.product(["frobenius", "aol", "schatten"], ["standard", "gram"]),
    ],
)
@pytest.mark.parametrize("dtype", helpers.mostly_nightly(TOLERANCE, ["float16"]))
def test_a_matrix_of_rank_one(preconditioning, method, dtype):
    u, v = (y / jnp.linalg.norm(y) for y in (normal((24,)), normal((40,), seed=1)))
    x = 3 * jnp.outer(u, v)
    out = newton_schulz(x, dtype=dtype, preconditioning=preconditioning, method=method)
    # Rows are scaled by "aol", so that u is another one.
    assert 0.68 < jnp.linalg.norm(out @ v) and jnp.linalg.norm(out, 2) < 1.21


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (2, 24, 24)], ids=str)
def test_preconditionings_divide_by_their_norms(shape):
    x = normal(shape)
    wide = np.asarray(x.mT if x.shape[-2] > x.shape[-1] else x, np.float64)
    gram = wide @ wide.mT
    divided = {
        "spectral": wide / np.linalg.norm(wide, 2, (-2, -1), keepdims=True),
        "schatten": wide / np.sqrt(np.linalg.norm(gram, axis=(-2, -1), keepdims=True)),
        "aol": wide / np.sqrt(np.abs(gram).sum(-1, keepdims=True)),
    }
    a, b, c = STANDARD
    for preconditioning, y in divided.items():
        gram = y @ y.mT
        expected = a * y + (b * gram + c * gram @ gram) @ y
        out = newton_schulz(x, ns_steps=1, dtype=None, preconditioning=preconditioning)
        out = np.asarray(out.mT if x.shape[-2] > x.shape[-1] else out, np.float64)
        assert helpers.relative_error(out, expected) < 1e-5, preconditioning


def test_eps_is_added_to_the_norm():
    x = normal((24, 40))
    norm = float(jnp.linalg.norm(x))
    out = newton_schulz(x, (1.0, 0.0, 0.0), 1, eps=norm, dtype="float32")
    chex.assert_trees_all_close(out, x / (2 * norm), rtol=1e-5)


@pytest.mark.parametrize(
    "ns_coeffs", helpers.mostly_nightly(["standard", "polar_express", "balanced"], ["standard"])
)
@pytest.mark.parametrize("method", helpers.mostly_nightly(["standard", "gram"], ["standard"]))
def test_far_below_eps_float16_has_an_absolute_error(ns_coeffs, method):
    """Other dtypes have a relative error there."""
    x = np.random.default_rng(0).standard_normal((16, 32))
    for size in (1e-12, 1e-14, 1e-18):
        small = jnp.asarray(x / np.linalg.norm(x) * size, jnp.float32)
        run = functools.partial(newton_schulz, small, ns_coeffs, eps=1e-8, method=method)
        exact = np.asarray(run(dtype="float32"))
        assert 0 < np.max(np.abs(exact)) < 0.1
        assert helpers.relative_error(run(dtype="bfloat16"), exact) < 0.1
        assert np.max(np.abs(run(dtype="float16") - exact)) < 1e-5
    assert not run(dtype="float16").any()


@pytest.mark.parametrize("dtype", helpers.mostly_nightly(TOLERANCE, ["float16"]))
@pytest.mark.parametrize("preconditioning", ["frobenius", "spectral", "aol", "schatten"])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1.0])
def test_zero_gives_zero(dtype, preconditioning, eps):
    x = jnp.zeros((2, 9, 5), dtype)
    out = newton_schulz(x, eps=eps, dtype=dtype, preconditioning=preconditioning)
    chex.assert_trees_all_equal(out, x)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1.0])
def test_zero_gives_zero_under_a_composed_schedule(dtype, eps):
    x = jnp.zeros((2, 9, 5), dtype)
    chex.assert_trees_all_equal(newton_schulz(x, "balanced", eps=eps, dtype=dtype), x)


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (2, 0, 3), (0, 3, 2)])
@pytest.mark.parametrize("ns_coeffs", ["standard", "balanced"])
def test_nothing_gives_nothing(ns_coeffs, shape):
    assert newton_schulz(jnp.zeros(shape), ns_coeffs).shape == shape


@helpers.slow
def test_nan_is_not_computed_on_the_way():
    with jax.debug_nans(True), jax.disable_jit():
        assert newton_schulz(normal((8, 12))).shape == (8, 12)


def test_tall_and_wide_matrices_are_exported():
    for shape in ((12, 8), (8, 12)):
        exported = jax.export.export(jax.jit(newton_schulz))(jnp.zeros(shape))
        chex.assert_trees_all_equal(exported.call(normal(shape)), newton_schulz(normal(shape)))


def test_one_row_and_one_column_are_normalized():
    x = normal((1, 50))
    slope = float(helpers.exact_newton_schulz(np.ones((1, 1)), [STANDARD] * 5)[0, 0])
    expected = slope * x / jnp.linalg.norm(x)
    chex.assert_trees_all_close(newton_schulz(x, dtype="float32"), expected, atol=1e-5)
    chex.assert_trees_all_close(newton_schulz(x.T, dtype="float32"), expected.T, atol=1e-5)


@pytest.mark.slow
@each_implementation
@pytest.mark.parametrize("shape", helpers.mostly_nightly([(24, 40), (40, 23)], [(40, 23)]), ids=str)
def test_a_bad_element_makes_its_whole_matrix_nan_and_no_other(run, implementation, shape):
    bad = (np.nan, np.inf, -np.inf)
    x = normal((2 * len(bad), *shape)).at[1::2, 3, 4].set(jnp.array(bad))
    out = np.asarray(run(x, ns_steps=1, implementation=implementation))
    assert np.isfinite(out[::2]).all()
    for element, matrix in zip(bad, out[1::2], strict=True):
        assert np.isnan(matrix).all(), element


def test_tall_is_the_transpose_of_wide():
    x = normal((48, 30))
    wide = newton_schulz(x.T, dtype="float32")
    chex.assert_trees_all_close(newton_schulz(x, dtype="float32"), wide.T, atol=1e-6)


@each_implementation
@helpers.nightly
def test_a_stack_and_vmap_are_each_matrix_alone(run, implementation):
    dtype, atol = ("bfloat16", 2e-3) if implementation == "mosaic_gpu" else ("float32", 1e-6)

    def function(x):
        return run(x, ns_steps=1, dtype=dtype, implementation=implementation)

    x = normal((3, 2, 40, 24))
    stacked = function(x)
    chex.assert_trees_all_close(jax.vmap(function, 1, 1)(x), stacked, atol=atol)
    chex.assert_trees_all_close(stacked[1, 1], function(x[1, 1]), atol=atol)


@pytest.mark.parametrize("in_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", None])
def test_the_dtype_of_the_input_is_returned(in_dtype, dtype):
    out = jax.eval_shape(functools.partial(newton_schulz, dtype=dtype), normal((8, 8), in_dtype))
    assert out.dtype == in_dtype


def test_the_last_product_is_not_rounded_to_16_bits_for_32():
    result = newton_schulz(normal((2, 8, 16)), dtype="bfloat16")
    assert (result != result.astype("bfloat16")).any()


def test_float64_and_complex():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 20)) + 1j * rng.standard_normal((12, 20))
    single = newton_schulz(jnp.asarray(x, jnp.complex64))
    expected = helpers.exact_newton_schulz(x, [STANDARD] * 5)
    chex.assert_type(single, jnp.complex64)
    assert helpers.relative_error(single, expected) < 1e-5
    with jax.enable_x64(True):
        for value in (x, x.real):
            expected = helpers.exact_newton_schulz(value, [STANDARD] * 5)
            out = newton_schulz(jnp.asarray(value), dtype=None)
            assert helpers.relative_error(out, expected) < 1e-12


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize(
    "preconditioning", helpers.mostly_nightly(["frobenius", "schatten", "aol"], ["frobenius"])
)
def test_the_derivative_at_zeros_is_finite(preconditioning, method):
    def loss(x):
        return newton_schulz(x, preconditioning=preconditioning, method=method).sum()

    x = jnp.zeros((2, 3, 5)).at[1, 0, 0].set(1.0)  # beside another matrix
    gradient = jax.jit(jax.grad(loss))(x)
    assert jnp.isfinite(gradient).all() and not gradient[0].any() and gradient[1].any()


@pytest.mark.parametrize(("shape", "plain"), [((4096, 4096), 0), ((2048, 2048), 5)], ids=str)
def test_each_step_is_three_products(shape, plain):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with helpers.described_gpu("H200"):
        jaxpr = jax.make_jaxpr(unjitted)(x)
    kernels = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "custom_jvp_call"]
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert (len(kernels), len(products)) == (15 - plain, plain)


def test_the_implementation_is_obeyed_or_refused():
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(NotImplementedError, match="'triton' cannot run: the default device"):
        newton_schulz(jnp.ones((8, 8)), implementation="triton")
    assert pallas_kernels.select_implementation(jnp.ones((8, 8))).implementation == "xla"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: newton_schulz(x[0]), r"shape \(\.\.\., m, n\), got float32\[8\]"),
        (lambda x: newton_schulz(x.astype(int)), r"float dtype"),
        (lambda x: newton_schulz(x, dtype=int), "dtype must be a float dtype, got int"),
        (lambda x: newton_schulz(x.astype("float8_e4m3fn")), r"16 bits or more.*got float8_e4m3fn"),
        (
            lambda x: newton_schulz(x, dtype="float8_e5m2"),
            r"16 bits or more, got float8_e5m2: pass",
        ),
        (lambda x: newton_schulz(x, "muon"), r"one of \[.*'dion'.*\], got 'muon'"),
        (lambda x: newton_schulz(x, (1.0, 2.0)), r"shape \(3,\) or \(steps, 3\).*, got \(2,\)"),
        (lambda x: newton_schulz(x, "dion", 6), r"'dion' has 5 steps, got ns_steps=6"),
        (lambda x: newton_schulz(x, None), r"a name or numbers .*, got None as the second"),
        (
            lambda x: newton_schulz(x, ns_steps=0),
            r"ns_steps must be an integer.*got 0",
        ),
        (lambda x: newton_schulz(x, ns_steps=2.5), r"ns_steps must be an integer.*got 2\.5"),
        (lambda x: newton_schulz(x, preconditioning="svd"), r"preconditioning must be.*got 'svd'"),
        (lambda x: newton_schulz(x, implementation="cuda"), r"implementation must be.*got 'cuda'"),
    ],
)
def test_wrong_calls_say_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((8, 8)))


@pytest.mark.parametrize("shape", [(8, 8), (16, 8)])
def test_a_transpose_and_the_iteration_compile_together(shape):
    """XLA for CPUs would make them one product of bfloat16, which it cannot run."""
    x = jax.random.normal(jax.random.key(0), shape)
    np.testing.assert_array_equal(jax.jit(lambda x: newton_schulz(x.T))(x), newton_schulz(x.T))


def test_only_kernels_take_packed_numbers(monkeypatch):
    """They have no derivative."""
    elementwise, used = operand.elementwise_packed, []
    monkeypatch.setattr(
        operand, "elementwise_packed", lambda *args: used.append(1) or elementwise(*args)
    )
    x = jnp.ones((512, 1024), jnp.bfloat16)
    with helpers.described_gpu("H200"):
        for implementation in ("mosaic_gpu", "triton", None):
            jax.eval_shape(lambda x, i=implementation: unjitted(x, implementation=i), x)
        assert len(used) == 3
        jax.eval_shape(lambda x: unjitted(x, implementation="xla"), x)
        jax.eval_shape(lambda x: unjitted(x, dtype="float32"), x)
    assert len(used) == 3
