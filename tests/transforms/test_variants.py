"""Transforms that chain with `scale_by_muon`, against their formulas in NumPy and float64."""

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from muon_jax import MuonDimensionNumbers, muon, scale_by_muon
from muon_jax._matrices.views import Split, Unfold
from muon_jax._transforms import momentum as _momentum
from muon_jax.contrib import (
    keep_param_norm,
    scale_by_adamuon,
    scale_by_normuon,
    scale_to_param_norm,
)

VIEWS = {
    "wide": MuonDimensionNumbers(),
    "tall": None,
    "stack": MuonDimensionNumbers(1, 2),
    # A matrix of 12 columns, two heads of 2, a matrix of 4.
    "fused": Split(
        -1,
        (12, 4, 4),
        [
            MuonDimensionNumbers(),
            Unfold(-1, (2, 2), MuonDimensionNumbers(-3, -1)),
            MuonDimensionNumbers(),
        ],
    ),
}
SHAPES = {"wide": (10, 25), "tall": (24, 8), "stack": (3, 6, 9), "fused": (7, 20)}


def tree(seed, dtype=jnp.float32):
    return helpers.random_tree(SHAPES, seed, dtype)


def matrices(arrays):
    """Views into float64 arrays of the shapes above: their matrices (fan_in, fan_out)."""
    return [
        arrays["wide"],
        arrays["tall"],
        *arrays["stack"],
        arrays["fused"][:, :12],
        *arrays["fused"][:, 12:16].reshape(7, 2, 2).transpose(1, 0, 2),
        arrays["fused"][:, 16:],
    ]


def as_float64(arrays):
    return jax.tree.map(lambda x: np.array(x, np.float64), arrays)


def trajectory(transform, steps, dtype=jnp.float32):
    """The updates of each step on gradients drawn at random, and the parameters before it."""
    params = tree(100, dtype)
    state = transform.init(params)

    @jax.jit
    def step(params, state, gradient):
        updates, state = transform.update(gradient, state, params)
        return updates, state, optax.apply_updates(params, updates)

    for seed in range(steps):
        updates, new_state, new_params = step(params, state, tree(seed, dtype))
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        yield updates, params
        params, state = new_params, new_state
    assert helpers.count_of_programs(step) == 1  # nothing is compiled a second time


@pytest.mark.parametrize(
    "dtype", helpers.mostly_nightly([jnp.float32, jnp.bfloat16], [jnp.float32])
)
def test_normuon_is_its_formula(dtype):
    moments = [0.0] * len(matrices(as_float64(tree(0))))
    steps = trajectory(scale_by_normuon(0.9, weight_dimension_numbers=VIEWS), 4, dtype)
    for seed, (updates, _) in enumerate(steps):
        expected = as_float64(tree(seed, dtype))
        for i, o in enumerate(matrices(expected)):
            moments[i] = 0.9 * moments[i] + 0.1 * np.mean(o**2, axis=0)
            normalized = o / (np.sqrt(moments[i]) + 1e-8)
            o[:] = normalized * np.linalg.norm(o) / np.linalg.norm(normalized)
        tolerance = 1e-6 if dtype == jnp.float32 else 2**-8
        chex.assert_trees_all_close(as_float64(updates), expected, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize(
    "dtype", helpers.mostly_nightly([jnp.float32, jnp.bfloat16], [jnp.float32])
)
def test_adamuon_is_its_formula(dtype):
    moments = [0.0] * len(matrices(as_float64(tree(0))))
    steps = trajectory(scale_by_adamuon(0.9, weight_dimension_numbers=VIEWS), 4, dtype)
    for seed, (updates, _) in enumerate(steps):
        expected = as_float64(tree(seed, dtype))
        for i, o in enumerate(matrices(expected)):
            moments[i] = 0.9 * moments[i] + 0.1 * o**2
            normalized = o / (np.sqrt(moments[i]) + 1e-8)
            o[:] = normalized * np.sqrt(min(o.shape)) / np.linalg.norm(normalized)
        tolerance = 1e-6 if dtype == jnp.float32 else 2**-8
        chex.assert_trees_all_close(as_float64(updates), expected, rtol=tolerance, atol=1e-7)


def test_adamuon_keeps_zeros_and_moments_are_float32_like_the_parameters():
    transform = scale_by_adamuon()
    params = {"zero": jnp.zeros((3, 5), "bfloat16"), "part": jnp.eye(4, 6, dtype="bfloat16")}
    updates, state = transform.update(params, transform.init(params))
    chex.assert_trees_all_equal(updates, params)  # one entry in each row: orthogonal
    assert {v.dtype for v in jax.tree.leaves(state.nu)} == {jnp.dtype("float32")}
    chex.assert_trees_all_equal_shapes(state.nu, params)


def test_normuon_keeps_zeros_and_norms():
    transform = scale_by_normuon()
    params = {"zero": jnp.zeros((3, 5)), "part": jnp.eye(4, 6)}
    updates, _ = transform.update(params, transform.init(params))
    chex.assert_trees_all_equal(updates["zero"], params["zero"])
    np.testing.assert_allclose(jnp.linalg.norm(updates["part"]), 2.0, rtol=1e-6)
    assert (updates["part"][:, 4:] == 0).all()  # neurons without an update


@helpers.slow
def test_normuon_evens_out_the_neurons_of_muon():
    transform = optax.chain(scale_by_muon("dion"), scale_by_normuon())
    gradient = {"w": jnp.geomspace(1, 100, 12) * jax.random.normal(jax.random.key(0), (6, 12))}
    muon, _ = scale_by_muon("dion").update(gradient, scale_by_muon().init(gradient))
    normuon, _ = transform.update(gradient, transform.init(gradient))
    np.testing.assert_allclose(jnp.linalg.norm(normuon["w"]), jnp.linalg.norm(muon["w"]), rtol=1e-5)
    ratios = [
        jnp.max(norms) / jnp.min(norms)
        for norms in (jnp.linalg.norm(u["w"], axis=0) for u in (muon, normuon))
    ]
    assert ratios[0] > 10
    np.testing.assert_allclose(ratios[1], 1.0, rtol=1e-5)


def test_adamuon_of_one_entry_without_eps():
    transform = scale_by_adamuon(eps=0.0)
    o = jnp.zeros((4, 4)).at[0, 0].set(2.0)
    update, _ = transform.update(o, transform.init(o))
    np.testing.assert_allclose(update, jnp.zeros((4, 4)).at[0, 0].set(2.0), rtol=1e-6)  # √4


def test_adamuon_of_complex_matrices():
    o = helpers.random_tree({"w": (8, 24)}, 0, jnp.complex64)["w"]
    transform = scale_by_adamuon(0.9, 0.0)
    update, state = transform.update(o, transform.init(o))
    phases = np.asarray(o) / np.abs(o)
    np.testing.assert_allclose(update, phases * np.sqrt(8 / phases.size), rtol=1e-5)
    assert state.nu.dtype == jnp.float32


@pytest.mark.parametrize("make", [scale_by_normuon, scale_by_adamuon])
def test_a_parameter_without_a_view_is_named(make):
    with pytest.raises(ValueError, match=r"\['stack'\] of shape \(3, 6, 9\) is no matrix"):
        make().init(tree(0))


def on_spheres(learning_rate):
    return optax.chain(
        scale_to_param_norm(VIEWS),
        optax.scale_by_learning_rate(learning_rate),
        keep_param_norm(VIEWS),
    )


@pytest.mark.optimized  # without optimizations one entry is off by 1.3e-6
@pytest.mark.parametrize(
    "dtype", helpers.mostly_nightly([jnp.float32, jnp.bfloat16], [jnp.float32])
)
def test_fixed_norm_updates_are_their_formula(dtype):
    for seed, (updates, params) in enumerate(trajectory(on_spheres(0.1), 4, dtype)):
        expected, weights = as_float64(tree(seed, dtype)), as_float64(params)
        for u, p in zip(matrices(expected), matrices(weights), strict=True):
            stepped = p - 0.1 * u * np.linalg.norm(p) / np.linalg.norm(u)
            u[:] = stepped * np.linalg.norm(p) / np.linalg.norm(stepped) - p
        tolerance = 1e-6 if dtype == jnp.float32 else 2**-8
        chex.assert_trees_all_close(as_float64(updates), expected, rtol=tolerance, atol=tolerance)


def test_fixed_norm_updates_keep_the_norm_of_each_matrix():
    norms = [
        [np.linalg.norm(matrix) for matrix in matrices(as_float64(params))]
        for _, params in trajectory(on_spheres(0.5), 20)
    ]
    np.testing.assert_allclose(norms, norms[:1] * 20, rtol=5e-6)


def test_a_step_to_zeros_is_not_made():
    params = {"w": jnp.eye(3, 4)}
    updates, _ = keep_param_norm().update({"w": -params["w"]}, optax.EmptyState(), params)
    chex.assert_trees_all_equal(updates["w"], jnp.zeros((3, 4)))


@pytest.mark.parametrize("learning_rate", [0.1, 0.0])
def test_cautious_decay_compares_with_the_direction_whatever_the_learning_rate(learning_rate):
    kwargs = {"adam_weight_decay": 0.5, "weight_decay_form": "independent"}
    params = {"w": jnp.array([1 + 1j, -1j, 1.0, -2.0])}
    gradients = {"w": params["w"] * jnp.array([1, -1, 1j - 0.1, -1])}  # shrinks the first alone

    def update(**more):
        optimizer = muon(learning_rate, **kwargs, **more)
        return optimizer.update(gradients, optimizer.init(params), params)[0]["w"]

    decay = np.where([True, False, False, False], -0.5 * params["w"], 0)
    plain = update() + 0.5 * params["w"]
    np.testing.assert_allclose(update(cautious_weight_decay=True), plain + decay, atol=1e-6)


def test_fixed_norm_updates_of_zeros():
    params = {"zero": jnp.zeros((3, 4)), "still": jnp.eye(3, 4), "moving": jnp.eye(3, 4)}
    gradient = {"zero": jnp.ones((3, 4)), "still": jnp.zeros((3, 4)), "moving": jnp.ones((3, 4))}
    transform = optax.chain(scale_to_param_norm(), optax.scale(-0.1), keep_param_norm())
    updates, _ = transform.update(gradient, transform.init(params), params)
    chex.assert_trees_all_equal(updates["zero"], params["zero"])
    chex.assert_trees_all_equal(updates["still"], gradient["still"])
    np.testing.assert_allclose(jnp.linalg.norm(params["moving"] + updates["moving"]), 3**0.5, 1e-6)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_fixed_norm_updates_of_any_size(size):
    """Squares are beyond float32."""
    params = {"w": size * jnp.eye(3, 4)}
    transform = optax.chain(scale_to_param_norm(), optax.scale(-0.1), keep_param_norm())
    updates, _ = transform.update({"w": jnp.ones((3, 4)) / size}, transform.init(params), params)
    stepped = np.eye(3, 4) - 0.05
    expected = size * (stepped * 3**0.5 / np.linalg.norm(stepped) - np.eye(3, 4))
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-5)


@pytest.mark.parametrize("transform", [scale_to_param_norm(), keep_param_norm()])
def test_fixed_norm_updates_need_parameters(transform):
    with pytest.raises(
        ValueError, match=r"need the parameters, got params=None: call update\(updates, state, par"
    ):
        transform.update({}, optax.EmptyState())


def test_stochastic_rounding_is_right_on_average_and_to_a_neighbour():
    values = jnp.array([1 + 2**-9, -3.3, 1e-3, 7e20, -1e-39, 255.1], jnp.float32)
    draws = 20_000
    rounded = _momentum.stochastic_round(
        jnp.broadcast_to(values, (draws, values.size)), jax.random.key(0)
    )
    chex.assert_type(rounded, jnp.bfloat16)
    rounded = np.asarray(rounded, np.float64)
    exact = np.asarray(values, np.float64)
    below, above = rounded.min(0), rounded.max(0)
    assert (below < exact).all() and (exact < above).all()
    assert all(len(np.unique(column)) == 2 for column in rounded.T)
    # Five standard deviations of the mean of so many.
    deviation = np.sqrt((exact - below) * (above - exact) / draws)
    assert (np.abs(rounded.mean(0) - exact) <= 5 * deviation).all()


def test_stochastic_rounding_keeps_values_of_bfloat16_infinities_and_nan():
    every = jnp.arange(2**16, dtype=jnp.uint32).astype(jnp.uint16)
    values = jax.lax.bitcast_convert_type(every, jnp.bfloat16)
    rounded = _momentum.stochastic_round(values.astype(jnp.float32), jax.random.key(1))
    nan = np.isnan(np.asarray(values, np.float32))
    np.testing.assert_array_equal(np.isnan(np.asarray(rounded, np.float32)), nan)
    bits = np.asarray(jax.lax.bitcast_convert_type(rounded, jnp.uint16))
    np.testing.assert_array_equal(bits[~nan], np.asarray(every)[~nan])
    payload = jax.lax.bitcast_convert_type(jnp.uint32([0x7F800001, 0xFFFFFFFF]), jnp.float32)
    assert jnp.isnan(_momentum.stochastic_round(payload, jax.random.key(2))).all()


def test_small_increments_are_lost_to_nearest_rounding_and_not_to_stochastic():
    def sum_of(key_of_step):
        step = jax.jit(
            lambda x, i: _momentum.cast_like(x.astype(jnp.float32) + 2**-10, x, key_of_step(i))
        )
        total = jnp.ones((16, 24), jnp.bfloat16)  # whose neighbour is 1 + 2**-7
        for i in range(200):
            total = step(total, i)
        return np.asarray(total, np.float64)

    assert (sum_of(lambda i: None) == 1).all()
    # Five standard deviations of the mean of its entries.
    np.testing.assert_allclose(sum_of(jax.random.key).mean(), 1 + 200 * 2**-10, atol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_stochastically_rounded_momentum_is_right_on_average(dtype):
    transform = scale_by_muon(beta=0.998, mu_dtype=jnp.bfloat16, mu_rounding="stochastic")
    gradient = {"w": jnp.full((16, 24), 0.5, dtype)}
    state = transform.init(gradient)
    state = state._replace(mu=jax.tree.map(jnp.ones_like, state.mu))
    update = jax.jit(transform.update)
    for _ in range(200):
        updates, new_state = update(gradient, state)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, gradient)
        state = new_state
    assert helpers.count_of_programs(update) == 1  # nothing is compiled a second time
    momentum = np.asarray(state.mu["w"], np.float64)
    # Five standard deviations of the mean of its entries.
    np.testing.assert_allclose(momentum.mean(), 0.5 + 0.5 * 0.998**200, atol=6e-3)
    assert np.unique(momentum).size > 2  # each entry has random bits of its own


def test_random_bits_differ_between_leaves_and_steps_and_not_between_runs():
    gradient = {"a": jnp.full((8, 8), 1 / 3), "b": jnp.full((8, 8), 1 / 3)}
    transform = scale_by_muon(mu_dtype=jnp.bfloat16, mu_rounding="stochastic")
    state = transform.init(gradient)
    later = state._replace(count=jnp.int32(7))
    update = jax.jit(transform.update)
    first, again, seventh = (update(gradient, s)[1].mu for s in (state, state, later))
    chex.assert_trees_all_equal(first, again)
    assert (first["a"] != first["b"]).any()
    assert (first["a"] != seventh["a"]).any()


def test_stochastic_rounding_is_for_bfloat16():
    params = {"w": jnp.ones((2, 3))}
    transform = muon(0.1, mu_rounding="stochastic")
    with pytest.raises(ValueError, match=r"\['w'\] is float32: set mu_dtype='bfloat16'"):
        transform.update(params, transform.init(params), params)
    transform = muon(0.1, mu_rounding="stochastic", mu_dtype=jnp.bfloat16)
    transform.update(params, transform.init(params), params)
    transform = muon(0.1, mu_rounding="stochastic")
    numbers = {"w": jnp.ones((2, 3), jnp.complex64)}
    with pytest.raises(
        ValueError, match=r"real numbers, but the gradient of the parameter \['w'\] is complex64"
    ):
        transform.update(numbers, transform.init(numbers), numbers)
    with pytest.raises(ValueError, match=r"one of \('nearest', 'stochastic'\) or None, got 'up'"):
        scale_by_muon(mu_rounding="up")


@helpers.slow
def test_a_momentum_that_overflows_float16_makes_nan():
    """An infinity in the state does not pass silently: the matrix has no finite update again."""
    for momentum, mu_dtype, is_finite in (
        ("heavy_ball", "float16", False),
        ("ema", "float16", True),
    ):
        transform = scale_by_muon(ns_steps=1, momentum=momentum, mu_dtype=mu_dtype)
        gradients = {"large": jnp.full((3, 4), 3300.0), "small": jnp.full((4, 5), 3200.0)}
        update, state = jax.jit(transform.update), transform.init(gradients)
        updates = gradients
        for _ in range(150):
            updates, state = update(gradients, state)
        assert jnp.isfinite(updates["small"]).all()
        assert jnp.isfinite(updates["large"]).all() == is_finite
        assert is_finite or jnp.isnan(updates["large"]).all()
