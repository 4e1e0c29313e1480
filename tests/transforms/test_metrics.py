"""Metrics of updates against NumPy in float64."""

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from muon_jax import MuonDimensionNumbers, muon, scale_by_muon
from muon_jax._iteration.coefficients import NAMED, SCHEDULES
from muon_jax._iteration.steps import DEFAULT_STEPS
from muon_jax._matrices.views import Split
from muon_jax.contrib import metrics, scale_by_normuon, with_metrics
from muon_jax.contrib._spectra import LEAST_REACHED, unreached_share

VIEWS = {
    "a": MuonDimensionNumbers(),
    "b": Split(-1, (10, 10)),
    "tall": MuonDimensionNumbers(),
    "stack": MuonDimensionNumbers(1, 2),
}
SHAPES = {"a": (6, 10), "b": (6, 20), "tall": (10, 6), "stack": (3, 4, 4)}
NAMES = ("gradient_norm", "update_rms", "orthogonality_residual", "unreached_share", "stable_rank")


def tree(seed, dtype=jnp.float32):
    return helpers.random_tree(SHAPES, seed, dtype)


def by_shape(arrays):
    arrays = jax.tree.map(lambda x: np.array(x, np.float64), arrays)
    return {
        "6x10": np.stack([arrays["a"], arrays["b"][:, :10], arrays["b"][:, 10:]]),
        "10x6": arrays["tall"][None],
        "4x4": arrays["stack"],
    }


def expected_metrics(gradients, updates, momenta):
    result = {}
    for shape, o in by_shape(updates).items():
        o = o if o.shape[1] <= o.shape[2] else o.mT
        gram = o @ o.mT - np.eye(o.shape[1])
        share = np.mean(np.linalg.svd(o, compute_uv=False) < 0.5)
        momentum = by_shape(momenta)[shape]
        largest = np.linalg.norm(momentum, 2, axis=(-2, -1))
        result |= {
            f"{shape}/gradient_norm": np.linalg.norm(by_shape(gradients)[shape]),
            f"{shape}/update_rms": np.sqrt(np.mean(o**2)),
            f"{shape}/orthogonality_residual": np.mean(
                np.linalg.norm(gram, axis=(-2, -1)) / np.sqrt(o.shape[1])
            ),
            f"{shape}/unreached_share": share,
            f"{shape}/stable_rank": np.mean(np.sum(momentum**2, (-2, -1)) / largest**2),
        }
    return result


@pytest.mark.parametrize(
    ("dtype", "then"),
    [
        (jnp.bfloat16, scale_by_normuon(0.9, 1e-8, VIEWS)),
        pytest.param(jnp.float32, optax.identity(), marks=helpers.nightly),
    ],
)
@helpers.slow
def test_metrics_are_their_formulas(dtype, then):
    plain = optax.chain(scale_by_muon("dion", weight_dimension_numbers=VIEWS), then)
    transform = with_metrics(plain, VIEWS)
    state, plain_state = transform.init(tree(0, dtype)), plain.init(tree(0, dtype))
    assert all(value == 0 for value in metrics(state).values())
    update, plain_update = jax.jit(transform.update), jax.jit(plain.update)
    for seed in range(3):
        gradients = tree(seed, dtype)
        updates, new_state = update(gradients, state)
        expected_updates, plain_state = plain_update(gradients, plain_state)
        chex.assert_trees_all_equal(updates, expected_updates)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        state = new_state
        expected = expected_metrics(gradients, updates, plain_state[0].mu)
        assert metrics(state).keys() == expected.keys()
        for name, value in metrics(state).items():
            chex.assert_type(value, jnp.float32)
            # Power iterations approach the largest singular value from below.
            rtol = 3e-2 if "rank" in name else 1e-5
            if "share" not in name or expected[name] in (0, 1):
                np.testing.assert_allclose(value, expected[name], rtol, err_msg=name)
            assert "rank" not in name or value >= expected[name] * (1 - 1e-5)
    assert helpers.count_of_programs(update) == 1  # nothing is compiled a second time


@helpers.slow
def test_a_gradient_that_is_none_has_no_metrics():
    params = {"a": jnp.eye(16, 24), "b": jnp.eye(24, 16)}
    transform = with_metrics(scale_by_muon())
    _, state = transform.update(params, transform.init(params))
    _, skipped = jax.jit(transform.update)({"a": None, "b": params["b"]}, state)
    assert {*metrics(skipped)} == {*metrics(state)}
    for name, value in metrics(skipped).items():
        assert value != 0 or name.startswith("16x24") or "residual" in name or "unreached" in name
        assert value == 0 or name.startswith("24x16")


def test_ranks_need_not_be_promoted():
    params = {"w": jnp.eye(8, 16)}
    transform = with_metrics(scale_by_muon())
    with jax.numpy_rank_promotion("raise"):
        _, state = transform.update(params, transform.init(params))
    assert metrics(state)


@helpers.slow
def test_matrices_without_rows_have_zeros():
    params = {"a": jnp.zeros((0, 4))}
    transform = with_metrics(scale_by_muon())
    _, state = transform.update(params, transform.init(params))
    assert [*map(float, metrics(state).values())] == [0.0] * 5


@helpers.slow
def test_stable_ranks_that_are_known():
    gradient = {
        "one": jnp.outer(jnp.arange(1.0, 5), jnp.ones(7)),
        "five": jnp.eye(5, 9),
        "zero": jnp.zeros((3, 6)),
        "far": jnp.diag(jnp.array([4e30, 2e30, 1e30])),
    }
    transform = with_metrics(scale_by_muon("dion"))
    _, state = jax.jit(transform.update)(gradient, transform.init(gradient))
    found = metrics(state)
    for shape, rank in {"4x7": 1, "5x9": 5, "3x6": 0, "3x3": 21 / 16}.items():
        np.testing.assert_allclose(found[f"{shape}/stable_rank"], rank, rtol=1e-5, err_msg=shape)
    for shape in ("4x7", "3x3"):
        nan = jax.tree.map(lambda x: jnp.where(x == x.max(), jnp.nan, x), gradient)
        _, state = jax.jit(transform.update)(nan, transform.init(gradient))
        assert all(jnp.isnan(value) for name, value in metrics(state).items() if shape in name)
    np.testing.assert_allclose(found["3x6/orthogonality_residual"], 1, rtol=1e-6)
    assert found["5x9/orthogonality_residual"] < 0.1


def wrapped_muon(views):
    return with_metrics(muon(1e-2, muon_weight_dimension_numbers=views), views)


def inside_multi_transform(views):
    inner = optax.chain(with_metrics(scale_by_muon(), views), optax.scale(-0.1))
    labels = {"w": "muon", "embedding": "adam", "bias": "adam"}
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.multi_transform({"muon": inner, "adam": optax.adam(1e-3)}, labels),
    )


@pytest.mark.parametrize(
    "optimizer", helpers.mostly_nightly([wrapped_muon, inside_multi_transform], [wrapped_muon])
)
def test_metrics_are_found_in_nested_states_for_muons_parameters_alone(optimizer):
    optimizer = optimizer({"w": MuonDimensionNumbers(), "embedding": None, "bias": None})
    params = {"w": jnp.eye(4, 8), "embedding": jnp.ones((7, 3)), "bias": jnp.ones(5)}
    state = optimizer.init(params)
    _, state = jax.jit(optimizer.update)(params, state, params)
    assert set(metrics(state)) == {f"4x8/{name}" for name in NAMES}
    np.testing.assert_allclose(metrics(state)["4x8/stable_rank"], 4, rtol=1e-5)


def test_metrics_pass_on_parameters_and_extra_arguments():
    def update(updates, state, params=None, *, factor):
        return jax.tree.map(lambda u, p: factor * u + p, updates, params), state

    extra = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    transform = with_metrics(optax.chain(scale_by_muon(), extra))
    params = {"w": jnp.ones((2, 3))}
    _, state = transform.update(params, transform.init(params), params, factor=0.0)
    np.testing.assert_allclose(metrics(state)["2x3/update_rms"], 1)


def test_errors_say_how_many_states_there_are():
    params = {"w": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match="with_metrics must wrap one MuonState, got 0"):
        with_metrics(optax.sgd(0.1)).init(params)
    with pytest.raises(ValueError, match="opt_state must hold one MetricsState, got 0"):
        metrics(muon(0.1).init(params))
    state = with_metrics(scale_by_muon()).init(params)
    with pytest.raises(ValueError, match="opt_state must hold one MetricsState, got 2"):
        metrics((state, state))


def gram_with(values, seed):
    """A matrix whose eigenvalues are the squares of these singular values."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(values),) * 2))
    return (q * values**2) @ q.T


def test_the_share_of_one_vector_is_exact_up_to_16_rows():
    values = np.linspace(0.1, 1.1, 16)
    gram = gram_with(values, 0)
    eigenvalues, vectors = np.linalg.eigh(gram)
    v = np.asarray(jax.random.rademacher(jax.random.key(0), (16,)), np.float64)
    expected = np.sum((vectors.T @ v)[eigenvalues < 0.25] ** 2) / 16
    found = jax.jit(unreached_share)(jnp.asarray(gram, "f"))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("share", [0.0, 0.125, 0.5, 1.0])
def test_shares_are_within_the_error_that_is_stated(share):
    m, count = 64, 48
    values = np.where(np.arange(m) < share * m, np.linspace(0, 0.4, m), np.linspace(0.6, 1.2, m))
    grams = jnp.asarray(np.stack([gram_with(values, seed) for seed in range(count)]), "f")
    found = jax.jit(unreached_share)(grams)
    assert abs(np.mean(found) - share) <= 3 * np.sqrt(2 * share / (m * count)) + 1e-5
    assert np.all(np.abs(found - share) <= 4 * np.sqrt(2 * share / m) + 1e-5)


def test_named_coefficients_keep_what_they_reach_above_the_least():
    sigma = np.concatenate([np.logspace(-6, -2, 2000), np.linspace(0.01, 1, 20000)])
    found = {}
    for name, rows in NAMED.items():
        found[name] = sigma
        for a, b, c in rows * (DEFAULT_STEPS if len(rows) == 1 else 1):
            x = found[name]
            found[name] = a * x + b * x**3 + c * x**5
    for name, schedule in SCHEDULES.items():
        for dtype in ("float16", "bfloat16"):
            x = sigma
            for step in schedule.steps_in(dtype):
                x = x * step.terms(x**2)[-1]
            found[name, dtype] = x
    falls = {name for name, x in found.items() if np.min(x[np.argmax(x >= 0.5) :]) < LEAST_REACHED}
    assert falls == {"aol_nvidia"}


def test_equal_matrices_share_a_loop():
    def loops(count):
        params = {str(i): jnp.ones((8, 16)) for i in range(count)}
        transform = with_metrics(scale_by_muon())
        return str(jax.make_jaxpr(transform.update)(params, transform.init(params))).count("scan[")

    assert loops(4) == loops(1) == 2  # power iterations and Lanczos steps
