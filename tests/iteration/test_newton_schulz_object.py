"""`NewtonSchulz`: its checks, what it equals, and where it is taken."""

import dataclasses
import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from muon_jax import PRESETS, NewtonSchulz, describe, muon, newton_schulz, scale_by_muon

X = jax.random.normal(jax.random.key(0), (8, 24))
TRIPLE = (3.0, -3.0, 1.0)
OBJECTS = [
    NewtonSchulz(),
    NewtonSchulz("balanced", dtype="bfloat16"),
    NewtonSchulz(TRIPLE, 3, eps=1e-7, eps_mode="max", preconditioning="aol"),
    NewtonSchulz((TRIPLE, TRIPLE), dtype=None, method="gram", implementation="xla"),
    NewtonSchulz(dtype=None, max_group_bytes=0),
]


def update(tree=X, *args, **kwargs):
    transform = scale_by_muon(*args, **kwargs)
    return jax.jit(transform.update)(tree, transform.init(tree))[0]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"coeffs": "balancd"}, ValueError, "got 'balancd': did you mean 'balanced'"),
        ({"coeffs": (0, 1, 1)}, ValueError, r"with a > 0, got \(0, 1, 1\)"),
        ({"coeffs": {".*": "standard"}}, TypeError, "of one matrix .*: pass coefficients by path"),
        ({"steps": 0}, ValueError, r"steps must be an integer in \[1, 100\], got 0"),
        ({"coeffs": "fast", "steps": 3}, ValueError, "'fast' is a whole of 1 step"),
        ({"coeffs": "dion", "steps": 9}, ValueError, "'dion' has 5 steps"),
        ({"coeffs": "fast", "preconditioning": "aol"}, ValueError, "'fast'.*ing='aol'"),
        ({"coeffs": "fast", "dtype": "float8_e4m3fn"}, ValueError, "'fast' is unsafe in float8"),
        ({"eps": -1}, ValueError, r"eps must be in \[0, inf\), got -1"),
        ({"eps_mode": "sum"}, ValueError, "eps_mode must be one of .*, got 'sum'"),
        ({"dtype": "int8"}, ValueError, "dtype must be a float dtype, got int8"),
        ({"method": "gra"}, ValueError, "method must be one of .*: did you mean 'gram'"),
        ({"implementation": "tritn"}, ValueError, "did you mean 'triton'"),
        ({"max_group_bytes": 1.5}, ValueError, "max_group_bytes must be an integer .* got 1.5"),
        ({"max_group_bytes": jnp.array(1)}, ValueError, "max_group_bytes must be no array"),
    ],
)
def test_attributes_are_checked(fields, error, message):
    with pytest.raises(error, match=message):
        NewtonSchulz(**fields)


@pytest.mark.parametrize("iteration", OBJECTS)
def test_it_is_a_value(iteration):
    rebuilt = eval(repr(iteration), {"NewtonSchulz": NewtonSchulz})
    for same in (rebuilt, pickle.loads(pickle.dumps(iteration)), dataclasses.replace(iteration)):
        assert same == iteration and hash(same) == hash(iteration)
    assert jax.tree.unflatten(*jax.tree.flatten(iteration)[::-1]) == iteration
    assert [other for other in OBJECTS if other == iteration] == [iteration]
    with pytest.raises(dataclasses.FrozenInstanceError):
        iteration.dtype = "float32"


def test_lists_and_numpy_s_numbers_are_the_same_values():
    given = NewtonSchulz([np.array(TRIPLE), list(TRIPLE)], np.int64(2))
    assert given == NewtonSchulz((TRIPLE, TRIPLE), 2) and hash(given)
    assert type(given.steps) is int


def test_eps_alone_is_a_leaf():
    assert jax.tree.leaves(NewtonSchulz(TRIPLE, 3, eps=0.5, max_group_bytes=8)) == [0.5]
    assert jax.tree.leaves(NewtonSchulz("balanced")) == []
    doubled = jax.tree.map(lambda x: 2 * x, NewtonSchulz("dion", eps=0.5, dtype="float32"))
    assert doubled == NewtonSchulz("dion", eps=1.0, dtype="float32")


def test_what_a_trace_does_not_know_is_an_operand():
    given = NewtonSchulz(TRIPLE, 3, eps=0.1, dtype="float32")
    expected = newton_schulz(X, given)

    @jax.jit
    def inside(coeffs, steps, eps):
        iteration = NewtonSchulz(coeffs, steps, eps=eps, dtype="float32")
        assert len(jax.tree.leaves(iteration)) == 3
        return newton_schulz(X, iteration)

    chex.assert_trees_all_close(inside(jnp.array(TRIPLE), 3, 0.1), expected, atol=1e-6)
    chex.assert_trees_all_close(jax.jit(newton_schulz)(X, given), expected, atol=1e-6)


def test_newton_schulz_takes_it():
    for iteration, kwargs in (
        (NewtonSchulz("dion", 3, eps=0.1), {"ns_coeffs": "dion", "ns_steps": 3, "eps": 0.1}),
        (NewtonSchulz(dtype="float32", method="gram"), {"dtype": "float32", "method": "gram"}),
    ):
        expected = newton_schulz(X, **({"method": None} | kwargs))
        chex.assert_trees_all_equal(newton_schulz(X, iteration), expected)
    for kwargs in ({"dtype": "float32"}, {"method": "gram"}, {"implementation": "xla"}):
        (name,) = kwargs
        with pytest.raises(ValueError, match=rf"got {name}='.*' beside it: pass .*NewtonSchulz"):
            newton_schulz(X, NewtonSchulz(), **kwargs)


def test_attributes_that_are_none_are_the_arguments():
    plain = update(X, "aol", 3, eps=0.1, eps_mode="max", preconditioning="aol")
    whole = NewtonSchulz("aol", 3, eps=0.1, eps_mode="max", preconditioning="aol")
    chex.assert_trees_all_equal(update(X, whole), plain)
    filled = update(X, NewtonSchulz("aol"), 3, eps=0.1, eps_mode="max", preconditioning="aol")
    chex.assert_trees_all_equal(filled, plain)


@pytest.mark.parametrize(
    ("own", "argument"),
    [
        ({"steps": 3}, {"ns_steps": 4}),
        ({"preconditioning": "aol"}, {"preconditioning": "schatten"}),
        ({"eps_mode": "add"}, {"eps_mode": "max"}),
    ],
)
def test_an_argument_that_contradicts_raises(own, argument):
    ((name, value),) = argument.items()
    for call in (muon, scale_by_muon):
        rate = {"learning_rate": 0.1} if call is muon else {}
        with pytest.raises(ValueError, match=rf"got {name}={value!r} beside it: pass one of them"):
            call(**rate, ns_coeffs=NewtonSchulz(**own), **argument)
    with pytest.raises(ValueError, match=rf"got {name}={value!r} beside it"):
        newton_schulz(X, NewtonSchulz(**own), **argument)
    scale_by_muon(NewtonSchulz(**dict.fromkeys(own, value)), **argument)  # says the same


def test_by_path():
    tree = {"up": X, "down": X}
    by_path = {"up": NewtonSchulz("dion", dtype="float32", method="standard"), ".*": "balanced"}
    expected = {"up": update(X, by_path["up"]), "down": update(X, "balanced")}
    chex.assert_trees_all_equal(update(tree, by_path), expected)
    chex.assert_trees_all_equal(
        update(tree, lambda path, shape: by_path.get(path, "balanced")), expected
    )
    groups = describe(tree, ns_coeffs=by_path).groups
    assert {(g.coefficients, g.dtype) for g in groups} == {
        ("dion", "float32"),
        ("balanced", "float16"),
    }


def test_it_is_injected_as_it_is():
    iteration = NewtonSchulz("dion", eps=0.1, dtype="float32")
    injected = optax.inject_hyperparams(muon)(0.1, iteration, beta=0.9)
    state = injected.init({"w": X})
    assert "ns_coeffs" not in state.hyperparams
    updates, _ = jax.jit(injected.update)({"w": X}, state, {"w": X})
    plain = muon(0.1, iteration, beta=0.9)
    expected, _ = plain.update({"w": X}, plain.init({"w": X}), {"w": X})
    chex.assert_trees_all_close(updates, expected, atol=1e-6)


def test_coefficients_beside_a_preset_keep_its_dtype_and_method():
    def groups(**kwargs):
        return {(g.coefficients, g.dtype, g.method) for g in describe({"w": X}, **kwargs).groups}

    for ns_coeffs in ("dion", {".*": "dion"}, lambda path, shape: "dion"):
        assert groups(preset="gram", ns_coeffs=ns_coeffs) == {("dion", "float16", "gram")}
        assert groups(preset="optax", ns_coeffs=ns_coeffs) == {("dion", "float32", "standard")}
    whole = {".*": NewtonSchulz("dion", dtype="float32", method="standard")}
    assert groups(preset="gram", ns_coeffs=whole) == {("dion", "float32", "standard")}
    changed = dataclasses.replace(PRESETS["gram"]["ns_coeffs"], dtype="float32")
    assert groups(preset="gram", ns_coeffs=changed) == {("polar_express", "float32", "gram")}


@pytest.mark.parametrize("wrong", [(1.0, 2.0), (-1.0, 2.0, 3.0), "optimal"])
def test_errors_name_the_attribute_or_the_argument(wrong):
    calls = [NewtonSchulz, functools.partial(newton_schulz, X), functools.partial(muon, 0.1)]
    for name, call in zip(["coeffs", "ns_coeffs", "ns_coeffs"], calls, strict=True):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            call(wrong)
