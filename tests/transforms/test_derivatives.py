"""Derivatives through an update where matrices or neurons are zeros, beside finite differences."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from muon_jax import NewtonSchulz, scale_by_muon
from muon_jax.contrib import (
    keep_param_norm,
    normuon,
    scale_by_adamuon,
    scale_by_normuon,
    scale_to_param_norm,
    with_metrics,
)
from muon_jax.contrib._reductions import norm_of_any_size

ORTHOGONAL = functools.partial(scale_by_muon, ns_steps=2, ns_coeffs=NewtonSchulz(dtype=None))
OPTIMIZERS = {
    "normuon": lambda rate: optax.chain(scale_by_normuon(0.9), optax.sgd(rate)),
    "adamuon": lambda rate: optax.chain(scale_by_adamuon(0.9), optax.sgd(rate)),
    "to norm": lambda rate: optax.chain(scale_to_param_norm(), optax.sgd(rate)),
    "keep norm": lambda rate: optax.chain(optax.sgd(rate), keep_param_norm()),
    "muon": lambda rate: normuon(
        rate, ns_steps=2, ns_coeffs=NewtonSchulz(dtype=None), normuon_b2=0.9
    ),
    "metrics": lambda rate: optax.chain(with_metrics(ORTHOGONAL()), optax.sgd(rate)),
}


def drawn(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape)


def loss_after_steps(name, rate, factor):
    """Of parameters with a matrix without a gradient, zero, and a neuron without one."""
    inputs, weights = drawn(6, 4, 1)[..., 0], drawn(4, 5)

    def loss(params):
        outputs = jnp.tanh(inputs @ params["weights"])
        return factor * jnp.sum(outputs[:, 1:] ** 2 * jnp.arange(4.0)) + 0 * params["zero"].sum()

    params = {"weights": jnp.asarray(weights), "zero": jnp.zeros((3, 4))}
    optimizer = OPTIMIZERS[name](rate)
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    return loss(params)


@pytest.mark.optimized  # without optimizations XLA makes NaN of some of its float64 programs
@pytest.mark.parametrize("name", helpers.mostly_nightly(OPTIMIZERS, (), ["normuon"]))
def test_derivatives_are_finite_differences(name):
    """With respect to the learning rate, and to a factor of all gradients."""
    with jax.enable_x64(True):
        run = jax.jit(functools.partial(loss_after_steps, name))
        at, step = (0.01, 1.0), 1e-6
        forward = jax.jit(jax.jacfwd(functools.partial(loss_after_steps, name), (0, 1)))(*at)
        backward = jax.jit(jax.grad(functools.partial(loss_after_steps, name), (0, 1)))(*at)
        expected = [
            (run(*np.add(at, move)) - run(*np.subtract(at, move))) / (2 * step)
            for move in np.eye(2) * step
        ]
        assert abs(expected[0]) > 1  # the learning rate matters
        np.testing.assert_allclose(forward, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(backward, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "transform",
    [scale_by_normuon(0.9), scale_by_adamuon(0.9), scale_to_param_norm(), keep_param_norm()],
)
def test_derivatives_with_respect_to_gradients_are_finite(transform):
    params = {"zero": jnp.zeros((3, 4)), "neuron": jnp.eye(4, 5)}

    def total(gradients):
        updates, _ = transform.update(gradients, transform.init(params), params)
        return sum(jax.tree.leaves(jax.tree.map(jnp.sum, updates)))

    for gradients in (params, {**params, "zero": jnp.ones((3, 4))}):
        for derivative in jax.tree.leaves(jax.jit(jax.grad(total))(gradients)):
            assert jnp.isfinite(derivative).all()


def test_the_derivative_of_a_norm_of_any_size():
    def norm(x):
        return norm_of_any_size(x, lambda x: jnp.max(jnp.abs(x)), jnp.sum)

    for size in (1e-30, 1.0, 1e30):
        x = jnp.asarray([3.0, 0.0, -4.0]) * size
        np.testing.assert_allclose(jax.grad(norm)(x), [0.6, 0.0, -0.8], rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(norm)(jnp.zeros(3)), jnp.zeros(3))
