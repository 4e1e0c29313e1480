"""What schedules return is checked as plain numbers are; hyperparameters in 16 bits are refused."""

import functools
import re

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from muon_jax import PRESETS, Exchange, Relative, muon, scale_by_muon
from muon_jax._checks import CheckedSchedule
from muon_jax.contrib import adamuon, nanogpt, scale_by_normuon

PARAMS = helpers.random_tree({"w": (4, 6), "b": (3,)}, 0)
# Where each schedule goes, with what else it needs.
ARGUMENTS = {
    "learning_rate": {},
    "adam_learning_rate": {"learning_rate": 0.1},
    "weight_decay": {"learning_rate": 0.1},
    "adam_weight_decay": {"learning_rate": 0.1},
}
WRONG_KINDS = {
    "None": None,
    "a string": "0.1",
    "a complex number": 0.1j,
    "a complex array": np.complex64(1),
    "a boolean": True,
    "three numbers": np.ones(3, "f"),
    "one number in an array": np.ones(1, "f"),
    "a list": [0.1],
    "a schedule": optax.constant_schedule(0.1),
    "a dict": {"rate": 0.1},
}
WRONG_VALUES = {"negative": -0.1, "NaN": np.nan, "infinite": np.inf, "-2.0": -2.0}


def updated(optimizer, jitted, params=PARAMS):
    update = jax.jit(optimizer.update) if jitted else optimizer.update
    return update(params, optimizer.init(params), params)


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("kind", WRONG_KINDS)
def test_results_of_another_kind(argument, kind):
    value = WRONG_KINDS[kind]
    if value is not None and kind != "a schedule":  # which plain arguments may be
        match = f"{argument} must be one real number|muon takes no parameters, got a (list|dict)"
        with pytest.raises(TypeError, match=match):
            muon(**ARGUMENTS[argument] | {argument: value})
    optimizer = muon(**ARGUMENTS[argument] | {argument: lambda count: value})
    message = f"the schedule {argument} returns must be one real number, got .*: return 0"
    for jitted in (True, False):
        with pytest.raises(TypeError, match=message):
            updated(optimizer, jitted)


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("kind", WRONG_VALUES)
def test_values_out_of_range(argument, kind):
    value = WRONG_VALUES[kind]
    with pytest.raises(ValueError, match=rf"{argument} must be in \[0, inf\), got"):
        muon(**ARGUMENTS[argument] | {argument: value})
    message = rf"the schedule {argument} returns must be in \[0, inf\), got {value}: return 0"
    for made in (value, jnp.float32(value), np.float32(value)):
        optimizer = muon(**ARGUMENTS[argument] | {argument: lambda count, made=made: made})
        with pytest.raises(ValueError, match=message.replace("-0.1", "-0.1[0-9]*")):
            updated(optimizer, jitted=False)
    optimizer = muon(**ARGUMENTS[argument] | {argument: lambda count: value})
    with pytest.raises(ValueError, match=message):  # a number of Python, in jit as well
        updated(optimizer, jitted=True)


def test_a_traced_value_is_not_known():
    optimizer = muon(lambda count: -0.1 * (1 + count))
    updates, _ = updated(optimizer, jitted=True)
    assert np.all(np.isfinite(updates["w"]))
    with pytest.raises(ValueError, match=r"learning_rate returns must be in \[0, inf\), got -0.1"):
        updated(optimizer, jitted=False)


def test_a_rate_that_turns_negative_later():
    optimizer = muon(optax.linear_schedule(0.1, -0.1, 2))
    state = optimizer.init(PARAMS)
    for _ in range(2):
        _, state = optimizer.update(PARAMS, state, PARAMS)
    with pytest.raises(ValueError, match="the number that the schedule learning_rate returns"):
        optimizer.update(PARAMS, state, PARAMS)


@pytest.mark.parametrize("form", ["independent", "palm", "scaled_palm", "l2"])
def test_schedules_in_products_are_named(form):
    optimizer = muon(lambda count: 0.1, weight_decay=lambda count: None, weight_decay_form=form)
    with pytest.raises(TypeError, match="the schedule weight_decay returns"):
        updated(optimizer, jitted=True)


def test_a_gain_of_blocks():
    exchange = Exchange(block_period=2, block_gain=lambda count: jnp.ones(2))
    transform = scale_by_muon(shardings=exchange)
    with pytest.raises(TypeError, match="block_gain returns must be one real number"):
        updated(transform, True, {"w": PARAMS["w"]})


@pytest.mark.parametrize(
    "schedule",
    [
        optax.cosine_decay_schedule(0.1, 10),
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10),
        optax.piecewise_constant_schedule(0.1, {2: 0.5}),
        lambda count: 0.1,
        lambda count: 0,
        lambda count: np.float64(0.1),
        lambda count: jnp.bfloat16(0.1),
        lambda count: jnp.where(count < 3, 0.1, 0.05),
        lambda count: {0: 0.1}.get(count.dtype != jnp.int32),
    ],
)
def test_schedules_are_what_they_were(schedule):
    """Plain optax has the same updates by the same schedule."""
    optimizer = muon(0.1, adam_learning_rate=schedule)
    expected = optax.adamw(schedule, weight_decay=0.0, nesterov=True)
    params = {"b": PARAMS["b"]}
    for jitted in (True, False):
        found, _ = updated(optimizer, jitted, params)
        by_optax, _ = updated(expected, jitted, params)
        np.testing.assert_allclose(found["b"], by_optax["b"], rtol=1e-6)


def test_a_schedule_is_wrapped_once_and_shown_as_itself():
    schedule = optax.constant_schedule(0.1)
    number = functools.partial(CheckedSchedule, "learning_rate", None)
    assert repr(number(schedule)) == repr(schedule)


# ------------------------------------------------------------------ AdamW's rate relative to Muon's


@pytest.mark.parametrize("rate", [0.1, optax.linear_schedule(0.1, 0.02, 4)])
@pytest.mark.parametrize("form", ["decoupled", "palm"])
def test_a_relative_rate_is_a_multiple_of_muon_s(form, rate):
    def trained(rate_of_adam):
        decay = {"weight_decay": 0.1, "adam_weight_decay": 0.1, "weight_decay_form": form}
        optimizer = muon(rate, adam_learning_rate=rate_of_adam, **decay)
        state, params = optimizer.init(PARAMS), PARAMS
        for _ in range(3):
            updates, state = optimizer.update(PARAMS, state, params)
            params = optax.apply_updates(params, updates)
        return params

    expected = trained(0.03 if rate == 0.1 else lambda count: 0.3 * rate(count))
    chex.assert_trees_all_close(trained(Relative(0.3)), expected, rtol=1e-6)
    assert not np.allclose(trained(None)["b"], expected["b"], rtol=1e-2)


def test_a_relative_rate_follows_a_rate_in_the_state():
    optimizer = optax.inject_hyperparams(muon)(0.1, adam_learning_rate=Relative(0.5))
    state = optimizer.init(PARAMS)
    before, _ = jax.jit(optimizer.update)(PARAMS, state, PARAMS)
    state.hyperparams["learning_rate"] = jnp.float32(0.2)
    after, _ = jax.jit(optimizer.update)(PARAMS, state, PARAMS)
    chex.assert_trees_all_close(after, jax.tree.map(lambda u: 2 * u, before), rtol=1e-6)
    expected, _ = updated(muon(0.1, adam_learning_rate=0.05), True)
    chex.assert_trees_all_close(before, expected, rtol=1e-5)


def test_a_relative_rate_is_checked():
    with pytest.raises(TypeError, match="factor must be one real number, got '0.3'"):
        Relative("0.3")
    with pytest.raises(ValueError, match=r"factor must be in \[0, inf\), got -0.3"):
        Relative(-0.3)
    with pytest.raises(TypeError, match="^learning_rate must be one real number, got Relative"):
        muon(Relative(0.3))


# ------------------------------------------------------------------ inject_hyperparams

NEEDS = re.escape("pass hyperparam_dtype=jnp.float32")


MADE = {
    "muon": (muon, (0.1,), PARAMS),
    "moonlight": (functools.partial(muon, **PRESETS["moonlight"]), (0.1,), PARAMS),
    "keller": (functools.partial(muon, **PRESETS["keller"]), (0.1,), PARAMS),
    "nanogpt": (nanogpt, (0.1,), PARAMS),
    "adamuon": (adamuon, (0.1,), PARAMS),
    "scale_by_muon": (scale_by_muon, (), {"w": PARAMS["w"]}),
    "scale_by_normuon": (scale_by_normuon, (), {"w": PARAMS["w"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_injected_decay_rates_in_16_bits_are_refused(name, jitted, dtype):
    """0.999 is 1 in bfloat16, where AdamW's bias correction divides 0 by 0."""
    make, arguments, params = MADE[name]
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    optimizer = optax.inject_hyperparams(make)(*arguments)
    init = jax.jit(optimizer.init) if jitted else optimizer.init
    with pytest.raises(ValueError, match=rf"must have 32 bits, got an array {dtype}.*{NEEDS}"):
        init(params)
    optimizer = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(*arguments)
    updates, state = updated(optimizer, jitted, params)
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(updates))
    rates = [state.hyperparams[n] for n in ("adam_b2", "beta", "b2") if n in state.hyperparams]
    assert rates and all(rate.dtype == jnp.float32 and rate < 1 for rate in rates)


def test_injected_rates_of_a_tree_with_float32_are_exact():
    """optax takes the widest dtype of the tree."""
    params = {"w": PARAMS["w"].astype("bfloat16"), "b": PARAMS["b"]}
    updates, state = updated(optax.inject_hyperparams(muon)(0.1), True, params)
    assert state.hyperparams["adam_b2"] == np.float32(0.999)
    assert np.isfinite(updates["b"]).all()


@pytest.mark.parametrize("name", ["beta", "adam_b1", "adam_b2", "eps", "adam_eps", "normuon_b2"])
def test_numbers_in_16_bits_are_refused_everywhere(name):
    for value in (jnp.bfloat16(0.5), jnp.float16(0.5), np.float16(0.5)):
        with pytest.raises(ValueError, match=f"{name} must have 32 bits, got"):
            helpers.any_muon(0.1, **{name: value})
    helpers.any_muon(0.1, **{name: jnp.float32(0.5)})


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "consistent_rms"])
def test_rates_in_16_bits_are_rounded(name):
    """A rate is off by 1 part in 500 at most there, which does not matter."""
    muon(**{"learning_rate": 0.1, name: jnp.bfloat16(0.1)})
