"""The public API under random arguments and trees: right, or refused with a sentence that says why.

`MUON_JAX_FUZZ_CASES` is the number of cases. A case counts as

-   right: results have the shapes and dtypes that they must have, are finite, and where an oracle
    is at hand, near it;
-   refused: a TypeError, ValueError or NotImplementedError raised here, in `pallas_kernels` or in
    optax, that names what was wrong.

A mistake that passes, a refusal of what is right, and every other error fail the test.
"""

import collections
import functools
import inspect
import os
import traceback
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import muon_jax
import muon_jax.contrib
import pallas_kernels
from muon_jax import Exchange, Link, MuonDimensionNumbers, NewtonSchulz, Relative, Split, Unfold
from muon_jax._iteration.coefficients import NAMED
from muon_jax.contrib import KeyHeads, QueryHeads

CASES = int(os.environ.get("MUON_JAX_FUZZ_CASES", 5000))
OURS = tuple(str(Path(p.__file__).parent) for p in (muon_jax, pallas_kernels, optax))
OUTCOMES = collections.Counter()

# ------------------------------------------------------------------------------ arguments by name

NOT_REAL = ["x", 1j, True, np.ones(1), jnp.ones((1,)), jnp.array(True), [], {}, object()]
NOT_POSITIVE = [*NOT_REAL, float("nan"), -1.0, float("inf"), jnp.array(-0.5), np.float32(-1)]
NOT_IN_UNIT = [*NOT_POSITIVE, 1.0, 1.5, jnp.array(1.5), np.array(2.0)]
NO_FLAG = ["False", "", 0, 1, 1.0, "yes", [], jnp.array(True)]
NO_NAME = ["", "x", "Standard", 0, 1.5, True, ["gram"], b"xla"]
NO_DTYPE = ["int8", "float33", int, bool, 3, [], "", 0.5, "x,y", jnp.array(1.0)]
NO_INTEGER = ["x", 0.5, -1, float("nan"), True, 1j, [], jnp.ones(2)]
NO_COEFFICIENTS = [
    (0.0, 0.0, 0.0),
    (float("nan"), 1.0, 1.0),
    (True, 1.0, 1.0),
    (-1.0, 1.0, 1.0),
    (1j, 1.0, 1.0),
    (1.0, 2.0),
    ((1.0, 2.0, 3.0), (1.0,)),
    ("a", "b", "c"),
    (),
    3,
    {},
    None,
    "",
    "balancedd",
    ((2.0, -1.5, 0.5),) * 101,
]
SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)
BETAS = [0.0, 0.9, 0, np.float32(0.5), jnp.array(0.95), np.array(0.25)]
EPSILONS = [0.0, 1e-8, 0, 1.0, np.float64(1e-6), jnp.array(1e-7)]
RATES = [0.02, 0, 1, np.float32(0.1), jnp.array(0.1), SCHEDULE]
FLAGS = [True, False, np.bool_(True)]
NO_VIEWS = [3, "x", {"a": 0.5}, {"a": [jnp.ones(2)]}, True]
# Values that are right and values that are wrong. SCHEDULE is wrong where it is not right.
RATE = (RATES, [*NOT_POSITIVE, None])
DECAY = ([*RATES, None], NOT_POSITIVE)
BETA, EPS = (BETAS, [*NOT_IN_UNIT, None, SCHEDULE]), (EPSILONS, [*NOT_POSITIVE, None, SCHEDULE])
FLAG, NAME = (FLAGS, [*NO_FLAG, None]), (lambda *names: ([*names], [*NO_NAME, SCHEDULE]))
VIEWS = ([None, lambda tree: None], NO_VIEWS)
COEFFICIENTS = [*NAMED, "balanced", "fast", (2, -1.5, 0.5), [[2.0, -1.5, 0.5]]]
ARGUMENTS = {
    "learning_rate": RATE,
    "adam_learning_rate": ([*RATES, Relative(0.3), None], NOT_POSITIVE),
    "weight_decay": DECAY,
    "adam_weight_decay": DECAY,
    "beta": BETA,
    "b2": BETA,
    "adam_b1": BETA,
    "adam_b2": BETA,
    "normuon_b2": (BETAS, [*NOT_IN_UNIT, None]),
    "eps": EPS,
    "adam_eps": ([*EPSILONS, None], NOT_POSITIVE),
    "adam_eps_root": EPS,
    "consistent_rms": ([0.2, 1, None], NOT_POSITIVE),
    "ns_coeffs": (
        [*COEFFICIENTS, NewtonSchulz("balanced"), NewtonSchulz(dtype="float32", method="gram")],
        [*NO_COEFFICIENTS, {"(": "standard"}, {3: "standard"}, {".*": "balancedd"}],
    ),
    "coeffs": (COEFFICIENTS, [*NO_COEFFICIENTS, {".*": "standard"}, NewtonSchulz(), SCHEDULE]),
    "steps": ([5, 5.0, np.int64(5), jnp.array(5), None], [*NO_INTEGER, 0, 10**6]),
    "ns_steps": ([5, 5.0, np.int64(5), jnp.array(5)], [*NO_INTEGER, 0, 10**6, None]),
    "nesterov": FLAG,
    "adaptive": FLAG,
    "cautious_weight_decay": FLAG,
    "adam_nesterov": ([*FLAGS, None], NO_FLAG),
    "axes": (
        [
            "repeat",
            ("split", "gram"),
            (),
            {"x": "split"},
            {"y": ("block", "repeat"), ...: "raise"},
        ],
        [None, 3, "blocks", ("split", "repeat"), ("split", 3), {3: "split"}, {"x": {"y": "split"}}],
    ),
    "links": ([{}, {"x": Link()}], [3, "x", [Link()], {3: Link()}, {"x": 1e9}, None]),
    "bandwidth": ([50e9, 1, np.float64(2)], ["fast", 0, float("inf"), None, jnp.array(1e9)]),
    "latency": ([2e-5, 0], ["x", -1e-6, None, jnp.array(1e-5)]),
    "block_period": ([1, 2, np.int64(4), 3.0, None], [*NO_INTEGER, 0, jnp.array(2)]),
    "block_gain": ([1.0, 0.5, jnp.array(0.5), SCHEDULE], [*NOT_POSITIVE, None]),
    "preconditioning": NAME("frobenius"),
    "momentum": NAME("bias_corrected", "ema", "heavy_ball"),
    "eps_mode": NAME("add", "max"),
    "shape_scale": NAME("clipped_ratio"),
    "weight_decay_form": NAME("decoupled", "independent", "palm", "scaled_palm"),
    "normuon_averaged": NAME("fan_in", "shorter"),
    "averaged": NAME("fan_in", "shorter"),
    "mu_rounding": NAME("nearest", None),
    "method": NAME("standard", None),
    "implementation": NAME("xla", None),
    "max_group_bytes": ([0, 2**20, None], [*NO_INTEGER, jnp.array(1), float("inf")]),
    "preset": NAME("keller", "moonlight", None),
    "mu_dtype": (
        ["float32", jnp.float32, "int8", None, muon_jax.contrib.on_host("int8")],
        [*NO_DTYPE[1:], "int16", "auto", "float8_e4m3fn"],
    ),
    "dtype": (["float32", "auto", None, jnp.dtype("float32")], NO_DTYPE),
    "muon_weight_dimension_numbers": VIEWS,
    "weight_dimension_numbers": VIEWS,
    "shardings": ([None, PartitionSpec()], ["x", 3, {"a": "x"}, [True]]),
    "weight_decay_mask": ([None, True, {"a": False}], ["x", {"a": "False"}, 1, {"a": 0.0}]),
    "threshold": ([1.0, 100, jnp.array(3.0)], [*NOT_POSITIVE, 0.0, None, SCHEDULE]),
    "heads": (
        [{"k": KeyHeads(((2, 0.5),))}, {"q": QueryHeads(((2, 1),))}],
        [None, "x", {3: KeyHeads(((2, 0.5),))}, {"(": KeyHeads(((2, 0.5),))}, {"k": 3}, [1]],
    ),
    "parts": (
        [((2, 0.5),), ((1, 0), (3, 1.0))],
        [(), 3, "x", ((0, 1),), ((2,),), ((2, "x"),), ((1.5, 1),), ((2, float("nan")),), None],
    ),
    "key_heads": ([1, 4, None], [*NO_INTEGER, 0]),
    "axis": ([-1, 0, np.int64(1)], ["x", 0.5, True, None, [], ("x", 0)]),
    "layer_axis": ([-1, 0], ["x", 0.5, True, None, [], (0,)]),
    "sizes": ([(1, 2), (3,), [4]], ["x", 3, (0.5,), (True,), None, {}]),
    "source": NAME("ema"),
    "target": NAME("heavy_ball"),
    "transform": ([muon_jax.scale_by_muon()], [None, "x", muon_jax.muon, 3]),
    "rules": ([None, {}], ["x", 3, {3: None}, {"(": None}, ["x"]]),
    "alpha": ([1.0, 2, jnp.array(0.5), np.float32(1)], ["x", None, 1j, True, jnp.ones(7)]),
    "diagonal": ([1.0, 2, jnp.array(0.5)], ["x", None, 1j, True, jnp.ones(7)]),
    "symmetrize_output": FLAG,
    "addend": FLAG,
    "out_dtype": (["float32", None], [*NO_DTYPE[:-1], "auto"]),
}
STATE = muon_jax.scale_by_muon().init(jnp.ones((2, 3)))
MATRIX = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6)), jnp.float32)
ABSTRACT = jax.ShapeDtypeStruct((4, 6), jnp.float32)
MLP = {"up": ABSTRACT, "down": jax.ShapeDtypeStruct((6, 4), jnp.float32)}
PARAMS = {"h_0": {"mlp": MLP}}
of_muon, of_normuon, of_scale = (
    {*inspect.signature(f).parameters}
    for f in (muon_jax.muon, muon_jax.contrib.normuon, muon_jax.scale_by_muon)
)
of_iteration = "ns_coeffs ns_steps eps eps_mode dtype preconditioning method implementation"
of_object = "coeffs steps dtype method implementation max_group_bytes"
of_product = "alpha diagonal symmetrize_output implementation"


def traced(function, *operands):
    return lambda **given: jax.eval_shape(functools.partial(function, **given), *operands)


# A call, the names that it always gets, and the names that it may get.
CALLS = {
    "muon": (muon_jax.muon, ["learning_rate"], [n for n in ARGUMENTS if n in of_muon][1:]),
    "normuon": (
        muon_jax.contrib.normuon,
        ["learning_rate"],
        [n for n in ARGUMENTS if n in of_normuon][1:],
    ),
    "scale_by_muon": (
        muon_jax.scale_by_muon,
        [],
        [n for n in ARGUMENTS if n in of_scale],
    ),
    "scale_by_normuon": (
        muon_jax.contrib.scale_by_normuon,
        [],
        "b2 eps averaged weight_dimension_numbers shardings".split(),
    ),
    "scale_by_adamuon": (
        muon_jax.contrib.scale_by_adamuon,
        [],
        "b2 eps weight_dimension_numbers shardings".split(),
    ),
    "keep_param_norm": (
        muon_jax.contrib.keep_param_norm,
        [],
        ["weight_dimension_numbers", "shardings"],
    ),
    "scale_to_param_norm": (
        muon_jax.contrib.scale_to_param_norm,
        [],
        ["weight_dimension_numbers", "shardings"],
    ),
    "with_metrics": (muon_jax.contrib.with_metrics, ["transform"], ["weight_dimension_numbers"]),
    "qk_clip": (muon_jax.contrib.qk_clip, ["threshold", "heads"], []),
    "KeyHeads": (KeyHeads, ["parts"], ["axis", "layer_axis"]),
    "QueryHeads": (QueryHeads, ["parts"], ["axis", "layer_axis", "key_heads"]),
    "Split": (Split, ["axis", "sizes"], []),
    "Unfold": (Unfold, ["axis", "sizes"], []),
    "convert_momentum": (
        functools.partial(muon_jax.contrib.convert_momentum, STATE),
        ["source", "target", "beta"],
        [],
    ),
    "by_role": (functools.partial(muon_jax.by_role, PARAMS), [], ["rules"]),
    "NewtonSchulz": (NewtonSchulz, [], of_object.split()),
    "Exchange": (Exchange, [], "axes links shardings block_period block_gain".split()),
    "Link": (Link, [], ["bandwidth", "latency"]),
    "muon of blocks": (
        functools.partial(muon_jax.muon, shardings=Exchange("block", block_period=2)),
        ["learning_rate"],
        [n for n in ARGUMENTS if n in of_muon - {"learning_rate", "shardings"}],
    ),
    "newton_schulz": (traced(muon_jax.newton_schulz, ABSTRACT), [], of_iteration.split()),
    "syrk": (traced(pallas_kernels.syrk, ABSTRACT), [], of_product.split()),
    "syrkx": (traced(pallas_kernels.syrkx, ABSTRACT, ABSTRACT), [], of_product.split()),
    "gemm": (
        traced(pallas_kernels.gemm, ABSTRACT, jax.ShapeDtypeStruct((6, 2), jnp.float32)),
        [],
        ["out_dtype", "implementation"],
    ),
    "select_implementation": (
        functools.partial(pallas_kernels.select_implementation, ABSTRACT),
        [],
        ["addend", "symmetrize_output"],
    ),
}
# Traced calls take milliseconds: fewer of them.
WEIGHTED = [*CALLS, *["muon", "scale_by_muon"] * 12, *["scale_by_normuon", "qk_clip", "Split"] * 3]


# Three of four are right.
POOLS = {
    name: st.sampled_from(
        [(value, True) for value in right] * (3 * len(mistaken) // len(right) + 1)
        + [(value, False) for value in mistaken]
    )
    for name, (right, mistaken) in ARGUMENTS.items()
}


@pytest.mark.parametrize(
    "optimizer", [muon_jax.muon, muon_jax.scale_by_muon, muon_jax.contrib.normuon]
)
def test_every_argument_is_tried(optimizer):
    assert inspect.signature(optimizer).parameters.keys() <= ARGUMENTS.keys()


@st.composite
def calls(draw):
    """A call, its arguments, and the names of those that are wrong."""
    name = draw(st.sampled_from(WEIGHTED))
    _, always, sometimes = CALLS[name]
    chosen = draw(st.lists(st.sampled_from(sometimes), max_size=4)) if sometimes else []
    given, wrong = {}, set()
    for argument in dict.fromkeys([*always, *chosen]):
        given[argument], is_right = draw(POOLS[argument])
        wrong |= set() if is_right else {argument}
    if not draw(st.integers(0, 40)):
        given["beeta"] = 0.5
        wrong.add("beeta")
    return name, given, wrong


# What two right arguments may say of each other.
CONTRADICTIONS = (
    "ns_coeffs=",
    "two scales",
    "is not offered here",
    "must have 32 bits",
    "sums over all mesh axes",
)


def check_refusal(error: Exception, names) -> None:
    """An error of ours names one of `names`."""
    *_, last = traceback.extract_tb(error.__traceback__)
    assert isinstance(error, TypeError | ValueError | NotImplementedError), repr(error)
    is_ours = last.filename.startswith(OURS)
    assert is_ours or "unexpected keyword argument" in str(error), repr(error)  # Python's own
    named = any(name.removeprefix("muon_") in str(error) for name in names)
    assert named, (names, str(error))


def check_call(case) -> str:
    name, given, wrong = case
    try:
        CALLS[name][0](**given)
    except Exception as error:
        # A contradiction of steps is found before views are read.
        check_refusal(error, {*wrong, "sums over all mesh axes"} if wrong else CONTRADICTIONS)
        return "an argument refused" if wrong else "a contradiction refused"
    assert not wrong, "a mistake passed"
    return "a call right"


# ------------------------------------------------------------------------------------------ trees

SHAPES = [(), (0,), (3,), (4, 6), (6, 4), (1, 1), (0, 4), (2, 3, 4), (1, 0, 3), (2, 2, 2, 2)]
DTYPES = ["float32", "float32", "float32", "bfloat16", "float16", "complex64", "int32", "bool"]
WRONG_VIEWS = [
    3,
    "x",
    0.5,
    MuonDimensionNumbers(0, 9),
    MuonDimensionNumbers(0, 0),
    MuonDimensionNumbers("x", 1),
    MuonDimensionNumbers(0.5, 1),
    MuonDimensionNumbers((), 1),
    Split(0, (99, 1)),
    Split(7, (1,)),
    Unfold(0, (99, 2)),
    Split(0, (1, 1), 3),
]


class OtherNumbers:
    """Dimension numbers of another package."""

    reduction_axis, output_axis = -2, -1


def views_of(shape):
    """Right views of an array."""
    if len(shape) < 2:
        return [None]
    last = shape[-1]
    views = [None, MuonDimensionNumbers(0, 1), MuonDimensionNumbers(-2, -1), OtherNumbers()]
    views += [MuonDimensionNumbers(tuple(range(len(shape) - 1)), -1), Split(-1, (last,))]
    if last % 2 == 0:
        views += [Split(-1, (last // 2,) * 2), Unfold(-1, (2, last // 2), MuonDimensionNumbers())]
    return views


def spoiled_gradient(draw, gradients):
    """A tree of gradients with one mistake."""
    name = draw(st.sampled_from(sorted(gradients)))
    g = gradients[name]
    match draw(st.integers(0, 4)):
        case 0:
            return {k: v for k, v in gradients.items() if k != name}
        case 1:
            return {**gradients, name + "_": g}
        case 2:
            return {**gradients, name: jax.ShapeDtypeStruct((*g.shape, 1), g.dtype)}
        case 3:
            return {**gradients, name: jax.ShapeDtypeStruct(g.shape, jnp.int32)}
        case _:
            return {**gradients, name: {"inner": g}}


@st.composite
def updates(draw):
    """Parameters, views, gradients, whether there are parameters in `update`, and what is wrong."""
    params, views, wrong, is_int = {}, {}, [], set()
    for i in range(draw(st.integers(1, 3))):
        shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
        name = "abc"[i]
        params[name] = jax.ShapeDtypeStruct(shape, dtype)
        if draw(st.integers(0, 9)) == 0:
            views[name] = draw(st.sampled_from(WRONG_VIEWS))
            wrong.append("view")
        else:
            views[name] = draw(st.sampled_from(views_of(shape)))
        if not jnp.issubdtype(dtype, jnp.inexact):
            is_int.add(name)
            if views[name] is not None:
                wrong.append("dtype")
    gradients = {k: None if k in is_int else p for k, p in params.items()}
    known = {k: g for k, g in gradients.items() if g is not None}
    if known and draw(st.integers(0, 4)) == 0:
        gradients |= {k: None for k in gradients if k not in known}
        spoiled = spoiled_gradient(draw, known)
        gradients = {k: g for k, g in gradients.items() if k not in known} | spoiled
        wrong.append("gradient")
    return params, views, gradients, draw(st.booleans()), wrong


NAMES_OF_TREES = ("parameter", "gradient", "weight_dimension_numbers", "mu_dtype")


def check_update(case) -> str:
    params, views, gradients, is_with_params, wrong = case
    try:
        optimizer = muon_jax.muon(0.1, ns_steps=1, muon_weight_dimension_numbers=views)
        state = jax.eval_shape(optimizer.init, params)
        is_with_params = is_with_params or None in gradients.values()
        given = params if is_with_params else None
        out, new = jax.eval_shape(optimizer.update, gradients, state, given)
    except Exception as error:
        check_refusal(error, NAMES_OF_TREES)
        assert wrong, f"refused what is right: {error}"
        return "a tree refused"
    assert not wrong, "a mistake passed"
    for name, gradient in gradients.items():
        if gradient is not None:
            assert (out[name].shape, out[name].dtype) == (gradient.shape, gradient.dtype)
    of_muon = [jax.tree.leaves(s.inner_states["muon"]) for s in (state, new)]
    assert [(x.shape, x.dtype) for x in of_muon[0]] == [(x.shape, x.dtype) for x in of_muon[1]]
    return "an update right"


# ----------------------------------------------------------------------------------------- values


@functools.cache
def jitted(name):
    if name == "muon":
        optimizer = muon_jax.muon(
            0.1, eps=0.0, adam_eps=1e-8, ns_coeffs=NewtonSchulz(dtype="float32")
        )
        state = optimizer.init({"w": MATRIX, "b": MATRIX[0]})
        return jax.jit(lambda g: optimizer.update(g, state, {"w": MATRIX, "b": MATRIX[0]})[0])
    return jax.jit(functools.partial(muon_jax.newton_schulz, ns_coeffs=name, dtype="float32"))


values = st.tuples(
    st.sampled_from(["muon", "standard", "dion", "polar_express", "balanced"]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 1e-20, 1e20, 0.0]),
)


def check_values(case) -> str:
    """Singular values from 1 down to 0.3 come out near 1, whatever the scale."""
    name, seed, scale = case
    u, _, v = np.linalg.svd(
        np.random.default_rng(seed).standard_normal((4, 6)), full_matrices=False
    )
    x = np.float32(scale) * np.asarray(u * np.linspace(0.3, 1, 4) @ v, np.float32)
    if name == "muon":
        out = jitted(name)({"w": x, "b": x[0]})
        assert all(np.isfinite(update).all() for update in out.values())
        result = -np.asarray(out["w"]) / (0.1 * np.sqrt(1.5))
    else:
        result = np.asarray(jitted(name)(x))
    singular = np.linalg.svd(result, compute_uv=False)
    assert np.allclose(singular, 1, atol=0.35) if scale else not result.any(), singular
    return "values right"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_call_is_right_or_refused(capsys):
    one_of = [*["call"] * 36, "update", *["values"] * 3]
    kinds = {
        "call": (calls(), check_call),
        "update": (updates(), check_update),
        "values": (values, check_values),
    }
    every = st.sampled_from(one_of).flatmap(lambda kind: st.tuples(st.just(kind), kinds[kind][0]))

    @hypothesis.settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        derandomize=CASES <= 5000,
        suppress_health_check=[*hypothesis.HealthCheck],
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(every)
    def run(case):
        kind, values = case
        OUTCOMES[kinds[kind][1](values)] += 1

    run()
    with capsys.disabled():
        print(f"\n{OUTCOMES.total()} cases: {dict(OUTCOMES.most_common())}")
    assert OUTCOMES.total() >= CASES * 0.9
