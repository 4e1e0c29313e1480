"""Updates have the dtypes that optax gives: the gradient's, promoted with its momentum's."""

import itertools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from muon_jax import Exchange, muon, scale_by_muon
from muon_jax._transforms.chain import scale_by_shape
from muon_jax.contrib import scale_by_adamuon, scale_by_normuon, scale_to_param_norm

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
# Of parameters, gradients and momenta: any two of the three in all combinations.
EACH = [
    (FLOATS[i], FLOATS[(i + k) % 3], mu_dtype)
    for k, mu_dtype in enumerate((None, *FLOATS))
    for i in range(3)
]
SHAPES = {"w": (4, 6), "v": (6, 4), "b": (3,)}


def tree(dtype, names=tuple(SHAPES)):
    return {name: jnp.ones(SHAPES[name], dtype) for name in names}


def dtypes_of(optimizer, params, gradients, steps=1):
    """The dtypes of the updates of each step."""

    def run(params, gradients):
        state, found = optimizer.init(params), []
        for _ in range(steps):
            updates, state = optimizer.update(gradients, state, params)
            found.append(updates)
        return found

    return jax.tree.map(lambda x: x.dtype.name, jax.eval_shape(run, params, gradients))


def float32(x):
    return jnp.asarray(x, jnp.float32)


RATES = {
    "numbers": {"learning_rate": 0.1},
    "schedule": {"learning_rate": optax.linear_schedule(0.1, 0.0, 9)},
    "array": {"learning_rate": float32(0.1)},
    "array of 16 bits": {"learning_rate": jnp.bfloat16(0.1)},
    "of numpy": {"learning_rate": np.float32(0.1)},
    "AdamW's array": {"learning_rate": 0.1, "adam_learning_rate": float32(0.1)},
    "decay": {"learning_rate": 0.1, "weight_decay": 0.1, "adam_weight_decay": 0.1},
    "decay of some": {
        "learning_rate": 0.1,
        "weight_decay": 0.1,
        "weight_decay_mask": {"w": True, "v": False, "b": True},
    },
    "decay, array": {"learning_rate": 0.1, "weight_decay": float32(0.1)},
    "decay, schedule": {"learning_rate": 0.1, "weight_decay": optax.constant_schedule(0.1)},
    "rms": {"learning_rate": 0.1, "consistent_rms": 0.2},
    "rms, array": {"learning_rate": 0.1, "consistent_rms": float32(0.2)},
    "adaptive": {"learning_rate": 0.1, "adaptive": True},
    "no nesterov": {"learning_rate": 0.1, "nesterov": False},
    "beta, array": {"learning_rate": 0.1, "beta": float32(0.9)},
    "eps, array": {"learning_rate": 0.1, "eps": float32(1e-8)},
    "moments, arrays": {"learning_rate": 0.1, "adam_b1": float32(0.9), "adam_b2": float32(0.99)},
}


QUICK = (
    "numbers",
    "schedule",
    "array of 16 bits",
    "decay of some",
    "rms, array",
    "moments, arrays",
)


@pytest.mark.parametrize("rates", helpers.mostly_slow(RATES, QUICK))
def test_updates_have_the_dtypes_of_optax(rates):
    arguments = {"ns_steps": 1, **RATES[rates]}
    for of_params, of_gradients, mu_dtype in EACH:
        params, gradients = tree(of_params), tree(of_gradients)
        theirs = optax.contrib.muon(mu_dtype=mu_dtype, **arguments)
        ours = muon(mu_dtype=mu_dtype, **arguments)
        assert dtypes_of(ours, params, gradients) == dtypes_of(theirs, params, gradients), (
            of_params,
            of_gradients,
            mu_dtype,
        )


@pytest.mark.parametrize("injected", [{}, {"weight_decay": 0.1, "consistent_rms": 0.2}])
def test_injected_hyperparameters_promote_as_in_optax(injected):
    for of_params, of_gradients, mu_dtype in EACH:
        params, gradients = tree(of_params), tree(of_gradients)
        found = []
        for make in (muon, optax.contrib.muon):
            inject = optax.inject_hyperparams(
                make, static_args=("ns_steps",), hyperparam_dtype=jnp.float32
            )
            of_mu = None if mu_dtype is None else jnp.dtype(mu_dtype).name
            optimizer = inject(0.1, ns_steps=1, mu_dtype=of_mu, **injected)
            found.append(dtypes_of(optimizer, params, gradients))
        assert found[0] == found[1], (of_params, of_gradients, mu_dtype)


@pytest.mark.parametrize("nesterov", [True, False])
def test_directions_have_the_dtypes_of_optax(nesterov):
    names = ("w", "v")
    for of_params, of_gradients, mu_dtype in EACH:
        params, gradients = tree(of_params, names), tree(of_gradients, names)
        arguments = {"mu_dtype": mu_dtype, "nesterov": nesterov, "ns_steps": 1}
        views = {name: optax.contrib.MuonDimensionNumbers() for name in names}
        theirs = optax.contrib.scale_by_muon(weight_dimension_numbers=views, **arguments)
        expected = dtypes_of(theirs, params, gradients)
        ours = scale_by_muon(**arguments)
        assert dtypes_of(ours, params, gradients) == expected
        with jax.numpy_dtype_promotion("strict"):
            assert dtypes_of(ours, params, gradients) == expected
        for make in (scale_by_normuon, scale_by_adamuon, scale_to_param_norm, scale_by_shape):
            assert dtypes_of(optax.chain(ours, make()), params, gradients) == expected


def test_directions_in_64_bits():
    with jax.enable_x64(True):
        for each in itertools.product(*[("float64", "float32", "bfloat16")] * 3):
            of_params, of_gradients, mu_dtype = each
            params, gradients = tree(of_params), tree(of_gradients)
            found = [
                dtypes_of(make(0.1, mu_dtype=mu_dtype, ns_steps=1), params, gradients)
                for make in (muon, optax.contrib.muon)
            ]
            assert found[0] == found[1], each


@pytest.mark.parametrize(
    "arguments",
    [
        {"normuon_b2": 0.9},
        {"preset": "adamuon", "weight_decay": 0.1},
        {"shardings": Exchange(block_period=2, block_gain=0.5)},
        {"momentum": "heavy_ball"},
        {"momentum": "ema"},
        {"eps_mode": "max"},
        {"weight_decay": 0.1, "weight_decay_form": "independent"},
        {"weight_decay": 0.1, "weight_decay_form": "palm"},
        {"weight_decay": 0.1, "cautious_weight_decay": True},
        {"adamh": None},
    ],
)
def test_other_muons_have_the_same_dtypes(arguments):
    """Decay promotes to the dtype of the parameter, as in optax; nothing else promotes."""
    decays = "weight_decay" in arguments
    for of_params, of_gradients, mu_dtype in EACH:
        params, gradients = tree(of_params), tree(of_gradients)
        theirs = optax.contrib.muon(0.1, mu_dtype=mu_dtype, weight_decay=0.1 if decays else 0.0)
        found = dtypes_of(helpers.any_muon(0.1, mu_dtype=mu_dtype, **arguments), params, gradients)
        expected = dtypes_of(theirs, params, gradients)
        assert [found[0][name] for name in ("w", "v")] == [expected[0][name] for name in ("w", "v")]


@pytest.mark.parametrize("of_gradients", ["complex64", "float32", "bfloat16"])
def test_complex_parameters_have_complex_updates(of_gradients):
    """The gradient of a complex parameter may be real."""
    params, gradients = tree("complex64"), tree(of_gradients)
    found = [dtypes_of(make(0.1), params, gradients) for make in (muon, optax.contrib.muon)]
    assert found[0] == found[1] == [dict.fromkeys(SHAPES, "complex64")]


def test_momenta_in_8_bits_count_as_float32():
    for of_params, of_gradients in itertools.product(FLOATS, FLOATS):
        params = {"w": jnp.ones((64, 64), of_params), "v": jnp.ones((4, 6), of_params)}
        gradients = jax.tree.map(lambda x: x.astype(of_gradients), params)  # noqa: B023
        found = dtypes_of(scale_by_muon(mu_dtype="int8"), params, gradients)
        assert found == [{"w": "float32", "v": "float32"}]


def test_dtypes_stay_the_same_from_step_to_step():
    """optax's momentum drifts to a wider dtype where `mu_dtype` is None."""
    for of_params, of_gradients, mu_dtype in EACH:
        optimizer = muon(0.1, mu_dtype=mu_dtype)
        first, *others = dtypes_of(optimizer, tree(of_params), tree(of_gradients), steps=3)
        assert all(other == first for other in others)


def test_float32_parameters_do_not_lose_digits_to_gradients_of_16_bits():
    params, gradients = tree("float32"), tree("bfloat16")
    optimizer = muon(0.1)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    assert {x.dtype.name for x in jax.tree.leaves(updates)} == {"float32"}
    w = updates["w"]
    assert np.any(w != w.astype(jnp.bfloat16).astype(jnp.float32))
