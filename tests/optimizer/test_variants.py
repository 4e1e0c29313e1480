"""Transforms that chain with `scale_by_muon`, against their formulas in NumPy and float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from muon_jax import MuonDimensionNumbers, scale_by_muon, scale_by_normuon
from muon_jax._views import Split, Unfold

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
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {
        name: jax.random.normal(key, shape, dtype)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


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
    assert step._cache_size() == 1  # nothing is compiled a second time


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
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


def test_normuon_keeps_zeros_and_norms():
    transform = scale_by_normuon()
    params = {"zero": jnp.zeros((3, 5)), "part": jnp.eye(4, 6)}
    updates, _ = transform.update(params, transform.init(params))
    chex.assert_trees_all_equal(updates["zero"], params["zero"])
    np.testing.assert_allclose(jnp.linalg.norm(updates["part"]), 2.0, rtol=1e-6)
    assert (updates["part"][:, 4:] == 0).all()  # neurons without an update


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


def test_normuon_names_the_parameter_without_a_view():
    with pytest.raises(ValueError, match=r"\['stack'\] of shape \(3, 6, 9\) is no matrix"):
        scale_by_normuon().init(tree(0))
