"""Each number of each preset matters where it is compared with its oracle; PRESETS is read-only."""

import copy
import dataclasses
import functools
import inspect
import math
import pickle

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from muon_jax import PRESETS, MuonDimensionNumbers, contrib, muon

SHAPES = {"wide": (8, 12), "tall": (12, 8), "bias": (7,)}
NUMBERS = {"wide": MuonDimensionNumbers(), "tall": MuonDimensionNumbers(), "bias": None}
SIZES = (1.0, 4.0, 0.3, 0.3, 6.0, 0.1, 1.0, 2.0, 0.05, 1.0)  # by step, so that betas matter
EPS_BEFORE_BIAS_CORRECTION = (oracles.adamw_of_moonlight, oracles.adam_of_nanogpt)
SYSTEMS = {**PRESETS, **helpers.arguments_of_functions()}
AGREES, DIFFERS = 2e-5, 1e-4
LEAST = 1e-15  # the square of a smaller gradient may be none in float32: eps below it is like 0
DEFAULTS = {
    name: p.default
    for name, p in inspect.signature(muon).parameters.items()
    if p.default is not inspect.Parameter.empty
}
TRACED = (
    "beta",
    "eps",
    "weight_decay",
    "consistent_rms",
    "normuon_b2",
    "adam_b1",
    "adam_b2",
    "adam_eps",
    "adam_weight_decay",
)


def rate(count):
    return 0.4 - 0.01 * count


def draw(seed, name):
    shape = SHAPES[name]
    return np.random.default_rng([seed, *map(ord, name)]).standard_normal(shape).astype(np.float32)


def gradients(preset, small, name):
    """A gradient a step. Small ones are so small that eps matters."""
    given = SYSTEMS[preset]
    eps = given.get("eps", 1e-8)
    if name == "bias":
        scale = given.get("adam_eps", eps)
    else:
        scale = math.sqrt(eps) / 10 if "preconditioning" in given else eps
    scale = max(scale, LEAST)
    sizes = enumerate(SIZES, 1)
    return np.stack(
        [np.float32((scale if small else 1) * size) * draw(t, name) for t, size in sizes]
    )


@functools.partial(jax.jit, static_argnames=("preset", "static"))
def trained(preset, numbers, stacks, static):
    params = {name: jnp.asarray(draw(0, name)) for name in SHAPES}
    make = getattr(contrib, preset, muon)
    optimizer = make(rate, muon_weight_dimension_numbers=NUMBERS, **dict(static), **numbers)

    def step(carry, g):
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        return (jax.tree.map(jnp.add, params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), stacks)[0][0]


@functools.cache
def expected(preset, small):
    on_matrices, on_the_rest = oracles.SYSTEMS[preset]
    if small and on_the_rest in EPS_BEFORE_BIAS_CORRECTION:
        on_the_rest = functools.partial(on_the_rest, late=True)
    result = {}
    for name in SHAPES:
        step = on_the_rest if name == "bias" else on_matrices
        w, state = np.float64(draw(0, name)).T, {}
        for t, g in enumerate(np.float64(gradients(preset, small, name)), 1):
            w = step(w, g.T, state, t, rate(t - 1))
        result[name] = w.T
    return result


def arguments(preset):
    """The arguments of a preset with those that it leaves out, numbers and others apart."""
    given = {"ns_steps": 5} | DEFAULTS | SYSTEMS[preset]
    given["adam_eps"] = given["eps"] if given["adam_eps"] is None else given["adam_eps"]
    adam_nesterov = given["adam_nesterov"]
    given["adam_nesterov"] = given["nesterov"] if adam_nesterov is None else adam_nesterov
    numbers = {name: given[name] for name in TRACED if given.get(name) is not None}
    static = {
        name: given[name]
        for name in (
            "ns_steps",
            "nesterov",
            "preconditioning",
            "momentum",
            "eps_mode",
            "shape_scale",
            "weight_decay_form",
            "cautious_weight_decay",
            "normuon_averaged",
            "adam_nesterov",
        )
        if name in given
    }
    iteration = dataclasses.replace(SYSTEMS[preset]["ns_coeffs"], dtype="float32")
    static |= {"adamh": None} if "adamh" in given else {}
    return numbers, static | {"ns_coeffs": iteration}


def error(preset, numbers, static):
    """The largest error of all parameters, of ordinary and small gradients, of their change."""
    errors = []
    for small in (False, True):
        stacks = {name: gradients(preset, small, name) for name in SHAPES}
        ours = trained(preset, numbers, stacks, tuple(static.items()))
        for name, theirs in expected(preset, small).items():
            start = np.float64(draw(0, name))
            moved = np.float64(ours[name]) - start
            errors.append(helpers.relative_error(moved, theirs - start))
    return max(errors)


def changed(name, value):
    if name == "beta" or name.endswith(("b1", "b2")):
        return 1 - 3 * (1 - value)
    return 1.1 * value if value >= LEAST else 0.01


def has_signs(static):
    """Whether eps is added to the norm of signs, which no gradient makes small."""
    return static["ns_coeffs"].before is not None


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@helpers.nightly
@pytest.mark.parametrize("preset", SYSTEMS)
def test_the_oracle_sees_every_number(preset):
    """Also those that the preset leaves to a default: betas, eps and decay of both sides."""
    numbers, static = arguments(preset)
    numbers = {name: jnp.float32(value) for name, value in numbers.items()}
    assert error(preset, numbers, static) < AGREES
    for name, value in numbers.items():
        if name == "eps" and has_signs(static):
            continue
        off = numbers | {name: jnp.float32(changed(name, value))}
        assert error(preset, off, static) > DIFFERS, name


OTHERS = {
    "ns_coeffs": lambda given: "dion" if given["ns_coeffs"] != "dion" else "standard",
    "ns_steps": lambda given: 3,
    "nesterov": lambda given: not given["nesterov"],
    "preconditioning": lambda given: {"aol": "frobenius"}.get(given["preconditioning"], "aol"),
    "momentum": lambda given: "ema" if given["momentum"] == "heavy_ball" else "heavy_ball",
    "eps_mode": lambda given: {"add": "max", "max": "add"}[given["eps_mode"]],
    "adam_nesterov": lambda given: not given["adam_nesterov"],
}


@helpers.nightly
@pytest.mark.parametrize("preset", SYSTEMS)
def test_the_oracle_sees_every_choice(preset):
    numbers, static = arguments(preset)
    choices = dict(OTHERS)
    if "consistent_rms" not in numbers and preset != "muonh":
        choices["shape_scale"] = lambda given: "none"
    if numbers["weight_decay"]:
        choices["weight_decay_form"] = lambda given: "independent"
        choices["cautious_weight_decay"] = lambda given: not given["cautious_weight_decay"]
    if "normuon_b2" in numbers:
        choices["normuon_averaged"] = lambda given: "fan_in"
    numbers = {name: jnp.float32(value) for name, value in numbers.items()}
    for name, other in choices.items():
        if name == "preconditioning" and static["eps_mode"] == "max":
            continue
        if name == "eps_mode" and static["preconditioning"] == "aol":
            continue  # eps is a least row sum in both modes
        if name in ("momentum", "eps_mode") and (has_signs(static) or not numbers["eps"]):
            continue  # the size of the momentum is divided out
        off = error(preset, numbers, static | {name: other(static)})
        assert not off < DIFFERS, name


def test_a_bias_under_moe_fp16_forgets_large_gradients_as_its_source_does():
    """b2 = 0.95; of 0.999 the bias would still be 0.99599 after 25 small gradients."""
    stack = jnp.asarray([1.0] * 5 + [0.01] * 25)
    optimizer = muon(3e-4, preset="moe_fp16")

    def step(carry, g):
        params, state = carry
        updates, state = optimizer.update({"b": g[None]}, state, params)
        return (jax.tree.map(jnp.add, params, updates), state), None

    start = {"b": jnp.ones(1)}
    (params, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), stack)
    np.testing.assert_allclose(params["b"], 0.9956676960, rtol=1e-6)


def moonlight():
    return PRESETS["moonlight"]


CHANGES = {
    "item of a preset": lambda: moonlight().__setitem__("weight_decay", 5.0),
    "new item of a preset": lambda: moonlight().__setitem__("nesterov", False),
    "deleted item": lambda: moonlight().__delitem__("weight_decay"),
    "update": lambda: moonlight().update(weight_decay=5.0),
    "update by pairs": lambda: moonlight().update([("weight_decay", 5.0)]),
    "setdefault": lambda: moonlight().setdefault("nesterov", False),
    "pop": lambda: moonlight().pop("weight_decay"),
    "popitem": lambda: moonlight().popitem(),
    "clear": lambda: moonlight().clear(),
    "or in place": lambda: moonlight().__ior__({"weight_decay": 5.0}),
    "preset": lambda: PRESETS.__setitem__("moonlight", {}),
    "deleted preset": lambda: PRESETS.__delitem__("moonlight"),
    "update of presets": lambda: PRESETS.update(moonlight={}),
    "setdefault of presets": lambda: PRESETS.setdefault("mine", {}),
    "pop of a preset": lambda: PRESETS.pop("moonlight"),
    "clear of presets": lambda: PRESETS.clear(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_presets_refuse_changes(change):
    before = repr(PRESETS)
    with pytest.raises(TypeError, match=r"PRESETS is read-only.*muon\(0.02, preset='moonlight', w"):
        change()
    assert repr(PRESETS) == before


def test_nothing_reaches_what_a_preset_does():
    """Not even the methods of dict: muon reads a table of its own."""
    params = {"w": jnp.ones((4, 6))}

    def update():
        optimizer = muon(0.02, preset="moonlight")
        return optimizer.update(params, optimizer.init(params), params)[0]["w"]

    before, decay = update(), moonlight()["weight_decay"]
    try:
        dict.__setitem__(moonlight(), "weight_decay", 5.0)
        np.testing.assert_array_equal(update(), before)
    finally:
        dict.__setitem__(moonlight(), "weight_decay", decay)
    for name in PRESETS:
        for argument, value in PRESETS[name].items():
            hash(value)  # neither lists nor dicts, which could be changed
            assert not hasattr(value, "__setitem__"), (name, argument)
    assert PRESETS["fused_muon"] is not moonlight()


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "dict": dict,
    "method": lambda x: x.copy(),
    "or": lambda x: x | {},
    "ror": lambda x: {} | x,
    "unpacked": lambda x: {**x},
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_of_presets_are_dicts_of_ones_own(copied):
    for mapping in (PRESETS, moonlight()):
        result = copied(mapping)
        assert type(result) is dict
        assert result == mapping
        assert repr(result) == repr(mapping) == str(mapping)
        assert list(mapping) == list(result)
    mine = copied(moonlight())
    mine["weight_decay"] = 5.0
    assert moonlight()["weight_decay"] == 0.1
    assert moonlight() | {"weight_decay": 5.0} == mine


def test_presets_are_cloudpickled():
    cloudpickle = pytest.importorskip("cloudpickle")
    assert pickle.loads(cloudpickle.dumps(PRESETS)) == PRESETS
    partial = functools.partial(max, **moonlight())
    assert pickle.loads(cloudpickle.dumps(partial)).keywords == moonlight()
