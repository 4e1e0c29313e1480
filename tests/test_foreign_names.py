"""A call in the words of another optimizer raises an error with the call that mends it."""

import ast
import dataclasses
import functools
import inspect
import re
import types
from pathlib import Path

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import muon_jax
from muon_jax import (
    PRESETS,
    Exchange,
    NewtonSchulz,
    by_role,
    contrib,
    describe,
    muon,
    newton_schulz,
    scale_by_muon,
)
from muon_jax._foreign import FOREIGN
from muon_jax.contrib import hyperp_learning_rate, qk_clip, scale_by_normuon

PARAMS = helpers.random_tree({"w": (4, 6), "b": (3,)}, 0)
MATRIX = PARAMS["w"]
OPTIMIZER = muon(0.1)
MESH = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
SCHEDULE = optax.constant_schedule(0.1)
VIEWS = "muon_weight_dimension_numbers"
MIGRATION = Path(muon_jax.__file__).parents[1] / "docs" / "migration.md"

# What a user of another optimizer writes, and what the message says to write: each is stated by
# the documents of that optimizer.
TO_MUON = [
    ("lr", 0.02, "pass learning_rate=0.02"),
    ("lr", SCHEDULE, "pass learning_rate=..."),
    ("muon_lr", 0.02, "pass learning_rate=0.02"),
    ("LR", 0.02, "pass learning_rate=0.02"),
    ("learningRate", 0.02, "pass learning_rate=0.02"),
    ("wd", 0.1, "pass weight_decay=0.1"),
    ("muon_wd", 0.1, "pass weight_decay=0.1"),
    ("mu", 0.95, "pass beta=0.95"),
    ("momentum_beta", 0.95, "pass beta=0.95"),
    ("muon_momentum", 0.9, "pass beta=0.9"),
    ("hidden_momentum", 0.9, "pass beta=0.9"),
    ("b1", 0.9, "pass adam_b1=0.9"),
    ("b2", 0.95, "pass adam_b2=0.95"),
    ("beta1", 0.9, "pass adam_b1=0.9"),
    ("beta_2", 0.99, "pass adam_b2=0.99"),
    ("adam_beta1", np.float32(0.5), "pass adam_b1=0.5"),
    ("adamw_beta2", 0.98, "pass adam_b2=0.98"),
    ("muon_beta2", 0.95, "use muon_jax.contrib.normuon(..., normuon_b2=0.95)"),
    ("normuon_b2", 0.9, "use muon_jax.contrib.normuon(..., normuon_b2=0.9)"),
    ("normuon_averaged", "shorter", "muon_jax.contrib.normuon(..., normuon_averaged='shorter')"),
    ("fixed_norms", True, "use muon_jax.contrib.muonh(...)"),
    ("adamh", "head", "use muon_jax.contrib.muonh(..., adamh='head')"),
    ("state_memory_kind", "pinned_host", "pass mu_dtype=muon_jax.contrib.on_host()"),
    ("betas", (0.9, 0.95), "pass adam_b1=0.9, adam_b2=0.95"),
    ("betas", [0.8, 0.99], "pass adam_b1=0.8, adam_b2=0.99"),
    ("adamw_betas", (0.9, 0.95), "pass adam_b1=0.9, adam_b2=0.95"),
    ("betas_adam", (0.9, 0.95), "pass adam_b1=0.9, adam_b2=0.95"),
    ("adam_lr", 3e-4, "pass adam_learning_rate=0.0003"),
    ("adamw_lr", 3e-4, "pass adam_learning_rate=0.0003"),
    ("lr_adam", 3e-4, "pass adam_learning_rate=0.0003"),
    ("adamw_learning_rate", 3e-4, "pass adam_learning_rate=0.0003"),
    ("muon_to_adam_lr", 0.18, "pass adam_learning_rate=Relative(0.18)"),
    ("adam_lr_scale", 0.3, "pass adam_learning_rate=Relative(0.3)"),
    ("adam_wd", 0.1, "pass adam_weight_decay=0.1"),
    ("adamw_wd", 0.1, "pass adam_weight_decay=0.1"),
    ("weight_decay_adam", 0.1, "pass adam_weight_decay=0.1"),
    ("adamw_eps", 1e-10, "pass adam_eps=1e-10"),
    ("epsilon", 1e-8, "pass eps=1e-08"),
    ("eps_root", 1e-8, "pass adam_eps_root=1e-08"),
    ("mask", None, "pass weight_decay_mask=None"),
    ("adamw_nesterov", True, "pass adam_nesterov=True"),
    ("use_nesterov", True, "pass nesterov=True"),
    ("exp_avg_dtype", jnp.bfloat16, "pass mu_dtype=jnp.bfloat16"),
    ("steps", 5, "pass ns_steps=5"),
    ("backend_steps", 6, "pass ns_steps=6"),
    ("num_ns_steps", 5, "pass ns_steps=5"),
    ("muon_num_ns_steps", 5, "pass ns_steps=5"),
    ("ns_coefficients", (3.0, -4.0, 2.0), "pass ns_coeffs=(3.0, -4.0, 2.0)"),
    ("coefficient_type", "quintic", "pass ns_coeffs='dion'"),
    ("muon_coefficient_type", "simple", "pass ns_coeffs='standard'"),
    ("adjust_lr_fn", "match_rms_adamw", "pass consistent_rms=0.2"),
    ("adjust_lr_fn", "original", "pass shape_scale='clipped_ratio'"),
    ("adjust_lr", "spectral_norm", "pass shape_scale='ratio'"),
    ("adjust_lr", None, "pass shape_scale='none'"),
    ("adjust_lr", "???", "in its place consistent_rms=0.2 for 'rms_norm'"),
    ("scale_mode", "spectral", "pass consistent_rms=1.0"),
    ("muon_scale_mode", "unit_rms_norm", "pass shape_scale='ratio'"),
    ("extra_scale_factor", 0.2, "pass consistent_rms=0.2"),
    ("use_kimi_scaling", True, "pass consistent_rms=0.2"),
    ("cautious_wd", True, "pass cautious_weight_decay=True"),
    ("weight_decay_method", "l2", "pass weight_decay_form='l2'"),
    ("decoupled_weight_decay", False, "pass weight_decay_form='l2'"),
    ("fp32_matmul_prec", "medium", "pass ns_coeffs=NewtonSchulz(dtype='bfloat16')"),
    ("use_gram_newton_schulz", True, "pass ns_coeffs=NewtonSchulz(method='gram')"),
    ("ns_algorithm", "standard_newton_schulz", "pass ns_coeffs=NewtonSchulz(method='standard')"),
    ("dtype", "float32", "pass ns_coeffs=NewtonSchulz(dtype='float32')"),
    ("distributed_gram", True, "pass shardings=Exchange(axes='gram_or_exchange')"),
    ("distributed_gram", False, "pass shardings=Exchange(axes='exchange')"),
    ("distributed_gram", None, "in its place shardings=Exchange(axes='gram_or_exchange') for True"),
    ("outside", "split", "pass shardings=Exchange(axes='split')"),
    ("outside", ("split", "gram"), "pass shardings=Exchange(axes=('split', 'gram'))"),
    ("outside", "block", "pass shardings=Exchange(axes={'tensor': 'block'})"),
    ("exchange_axes", "fsdp", "leave out exchange_axes: shardings=Exchange({'fsdp': 'exchange'"),
    ("latency", {"data": 1e-5}, "leave out latency: shardings=Exchange(links={'data': Link("),
    ("block_period", 4, "pass shardings=Exchange(block_period=4)"),
    ("block_learning_rate", 0.1, "pass shardings=Exchange(block_gain=0.1 / learning_rate)"),
    ("use_triton", False, "pass ns_coeffs=NewtonSchulz(implementation='xla')"),
    ("use_syrk", True, "leave out use_syrk: the fastest kernels"),
    ("use_muon", True, f"pass {VIEWS}=by_role"),
    ("weight_dimension_numbers", by_role, f"pass {VIEWS}=by_role"),
    ("per_head", True, f"pass {VIEWS}=by_use(fn, params, *inputs, per_head=True)"),
    ("layout", "out_in", f"pass {VIEWS}=by_role(layout='out_in')"),
    ("nu_dtype", "float32", "leave out nu_dtype: AdamW's second moment has the dtype of the p"),
    ("ns_iters", 6, "pass ns_steps=6"),
    ("rank", 0, "leave out rank: the optimizer reads the shardings"),
    ("world_size", 8, "leave out world_size: the optimizer reads the shardings"),
    ("fused", True, "leave out fused: jax.jit"),
    ("foreach", False, "leave out foreach: jax.jit"),
    ("capturable", True, "leave out capturable: jax.jit"),
    ("maximize", True, "negate the gradients by optax.chain(optax.scale(-1.0), muon(...))"),
    ("amsgrad", True, "optax.amsgrad"),
    ("max_grad_norm", 1.0, "optax.clip_by_global_norm"),
    ("qk_clip_threshold", 100.0, "use muon_jax.contrib.qk_clip(..., threshold=100.0)"),
]


def message_of(error, call):
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize(("name", "value", "way"), TO_MUON)
def test_a_foreign_name_leads_to_ours(name, value, way):
    call = functools.partial(muon, **{"learning_rate": 0.1} | {name: value})
    message = message_of(TypeError, call)
    assert message.startswith(f"muon has no argument {name!r}: ")
    assert way in message
    if name in ("lr", "muon_lr", "LR", "learningRate"):
        assert way in message_of(TypeError, functools.partial(muon, **{name: value}))


TAKEN = [
    (name, value, way.removeprefix("pass "))
    for name, value, way in TO_MUON
    if way.startswith("pass ") and "..." not in way and "by_use" not in way
]


@pytest.mark.parametrize(("name", "value", "way"), TAKEN)
def test_what_the_message_says_is_taken(name, value, way):
    names = {"functools": functools, "by_role": by_role, "jnp": jnp, "learning_rate": 0.1}
    names |= {"NewtonSchulz": NewtonSchulz, "Exchange": Exchange, "Relative": muon_jax.Relative}
    names |= {"muon_jax": muon_jax}
    arguments = eval(f"dict({way})", names)  # of the table above
    muon(**{"learning_rate": 0.1} | arguments)


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        # Several at once.
        (
            lambda: muon(lr=0.02, wd=0.1, betas=(0.9, 0.95), fused=True),
            TypeError,
            "muon has no argument 'lr', 'wd', 'betas' or 'fused': pass learning_rate=0.02,"
            " weight_decay=0.1, adam_b1=0.9, adam_b2=0.95; ",
        ),
        # Values of another form.
        (lambda: muon(0.02, momentum=0.95), ValueError, "'heavy_ball'), got 0.95: pass beta=0.95"),
        (lambda: scale_by_muon(momentum=0.9), ValueError, "got 0.9: pass beta=0.9"),
        (lambda: muon(0.02, momentum=SCHEDULE), ValueError, "pass beta=... to optax.inject_hyper"),
        (lambda: muon(0.02, nesterov=0.95), TypeError, "got 0.95: pass beta=0.95"),
        (
            lambda: muon(0.02, beta=(0.9, 0.95)),
            TypeError,
            "beta must be one real number, got (0.9, 0.95): pass adam_b1=0.9, adam_b2=0.95",
        ),
        (
            lambda: muon(0.02, shape_scale="match_rms_adamw"),
            ValueError,
            "got 'match_rms_adamw': pass consistent_rms=0.2",
        ),
        (
            lambda: muon(0.02, consistent_rms="spectral"),
            TypeError,
            "got 'spectral': pass consistent_rms=1.0",
        ),
        (lambda: muon(0.02, consistent_rms=True), TypeError, "True: pass consistent_rms=0.2"),
        (lambda: muon(0.02, ns_coeffs="quintic"), ValueError, "pass ns_coeffs='dion'"),
        (
            lambda: muon(0.02, ns_coeffs=NewtonSchulz(method="gram_newton_schulz")),
            ValueError,
            "got 'gram_newton_schulz': pass method='gram'",
        ),
        # Another order.
        (
            lambda: newton_schulz(MATRIX, 5),
            ValueError,
            "got 5 as the second argument of newton_schulz: pass ns_steps=5",
        ),
        (lambda: newton_schulz(MATRIX, 10, 1e-7), ValueError, "pass ns_steps=10, eps=1e-07"),
        (
            lambda: newton_schulz(MATRIX, "standard", 5, "frobenius"),
            TypeError,
            "got 'frobenius': pass preconditioning='frobenius'",
        ),
        (
            lambda: muon(0.02, 0.95),
            ValueError,
            "got 0.95 as the second argument of muon: pass beta=0.95",
        ),
        (lambda: muon(1e-3, 0.9, 0.95), ValueError, "of muon: pass adam_b1=0.9, adam_b2=0.95"),
        (
            lambda: muon(1e-3, 0.9, 0.999, 1e-8),
            ValueError,
            "pass adam_b1=0.9, adam_b2=0.999, adam_eps=1e-08",
        ),
        (lambda: muon(0.02, 0.1, 0.95), ValueError, "pass weight_decay=0.1, beta=0.95"),
        (lambda: muon(0.02, 0.95, True, 6), ValueError, "beta=0.95, nesterov=True, ns_steps=6"),
        (
            lambda: muon(0.02, None),
            ValueError,
            "(a, b, c), got None as the second argument of muon",
        ),
        (
            lambda: muon(0.02, True),
            ValueError,
            "got True as the second argument of muon: pass nest",
        ),
        (lambda: describe(PARAMS, ns_coeffs=5), ValueError, "(a, b, c), got 5: pass"),
        (lambda: describe(PARAMS, momentum=0.9), ValueError, "got 0.9: pass beta=0.9"),
        (lambda: muon(0.02, momentum=0), ValueError, "got 0: pass beta=0"),
        (lambda: muon(0.02, ns_coeffs=5), ValueError, "got 5: pass ns_steps=5"),
        (lambda: scale_by_muon(0.95), ValueError, "as the first argument of scale_by_muon: pass b"),
        (
            lambda: scale_by_muon(0.02),
            ValueError,
            "pass optax.scale_by_learning_rate(0.02) to optax.chain",
        ),
        (
            lambda: muon(PARAMS, 0.02),
            TypeError,
            "muon takes no parameters, got a dict as learning_rate: call optimizer ="
            " muon(learning_rate=0.02), and then optimizer.init(params)",
        ),
        (
            lambda: muon((p for p in [MATRIX]), lr=0.02, momentum=0.95),
            TypeError,
            "got a generator as learning_rate: call optimizer = muon(learning_rate=0.02,"
            " beta=0.95), and",
        ),
        (lambda: muon(PARAMS, learning_rate=0.3), TypeError, "muon(learning_rate=0.3), and"),
        (
            lambda: muon(PARAMS, 0.02, 0.1, 0.9),
            TypeError,
            "muon(learning_rate=0.02, weight_decay=0.1, beta=0.9), and then",
        ),
        (lambda: muon(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), TypeError, "got a Linear as learning"),
        (lambda: muon(linen.Dense(3)), TypeError, "got a Dense as learning_rate"),
        (lambda: muon(0.1, learning_rate=0.1), TypeError, "learning_rate by position and by name"),
        (lambda: muon(*range(10)), ValueError, "as the second argument of muon"),
        (
            lambda: muon(0.1, *["standard", 5, 0.9, 0.0, 0.0, None, None, True]),
            TypeError,
            "mu_dtype by position, got 9 arguments: pass the others by name",
        ),
        # `by_role` in another place.
        (lambda: muon(by_role), TypeError, f"learning_rate must not be by_role: pass {VIEWS}="),
        (lambda: muon(0.02, by_role), TypeError, f"ns_coeffs must not be by_role: pass {VIEWS}=by"),
        (
            lambda: muon(0.1, weight_decay_mask=by_role(layout="out_in")),
            TypeError,
            f"pass {VIEWS}=by_role(layout='out_in') by name",
        ),
        (lambda: scale_by_muon(by_role), TypeError, "pass weight_dimension_numbers=by_role"),
        (
            lambda: describe(PARAMS, by_role),
            TypeError,
            f"shardings must not be by_role: pass {VIEWS}",
        ),
        (
            lambda: describe(PARAMS, OPTIMIZER),
            TypeError,
            "shardings must not be an optimizer: pass",
        ),
        (lambda: muon(OPTIMIZER), TypeError, "learning_rate must not be an optimizer"),
        (
            lambda: describe(PARAMS, MESH),
            TypeError,
            "shardings must not be a mesh: pass it as mesh",
        ),
        (lambda: muon(0.1, shardings=MESH), TypeError, "must not be a mesh: pass PartitionSpecs"),
        # Other functions.
        (
            lambda: newton_schulz(MATRIX, steps=5),
            TypeError,
            "newton_schulz has .*: pass ns_st",
        ),
        (
            lambda: newton_schulz(G=MATRIX, steps=5),
            TypeError,
            "'G' or 'steps': pass x=..., ns",
        ),
        (lambda: newton_schulz(MATRIX, ns_dtype="float32"), TypeError, "pass dtype='float32'"),
        (lambda: newton_schulz(MATRIX, ns_method="gram"), TypeError, "pass method='gram'"),
        *(
            (
                lambda args=args, kwargs=kwargs: muon(0.02, *args, **kwargs, ns_dtype="float32"),
                TypeError,
                f"pass ns_coeffs={way}dtype='float32')",
            )
            for args, kwargs, way in [
                ((), {}, "NewtonSchulz("),
                (("fast",), {}, "NewtonSchulz('fast', "),
                ((), {"ns_coeffs": "fast", "preset": "keller"}, "NewtonSchulz('fast', "),
                (
                    (),
                    {"preset": "keller"},
                    "dataclasses.replace(PRESETS['keller']['ns_coeffs'], ",
                ),
            ]
        ),
        (
            lambda: newton_schulz(MATRIX, use_gram_newton_schulz=True),
            TypeError,
            ": pass method='gram'",
        ),
        (lambda: newton_schulz(MATRIX, lr=0.1), TypeError, "muon takes learning_rate=0.1"),
        (
            lambda: scale_by_muon(lr=0.1),
            TypeError,
            "chain scale_by_muon with optax.scale_by_learning_rate(0.1)",
        ),
        (
            lambda: scale_by_muon(learning_rate=0.1),
            TypeError,
            "chain scale_by_muon with optax.scale_by_learning_rate(0.1)",
        ),
        (lambda: scale_by_muon(wd=0.1), TypeError, "with optax.add_decayed_weights(0.1)"),
        (lambda: scale_by_muon(betas=(0.9, 0.95)), TypeError, "muon takes adam_b1=0.9, adam_b2"),
        (lambda: scale_by_muon(consistent_rms=0.2), TypeError, "muon takes consistent_rms=0.2"),
        (lambda: scale_by_muon(**{VIEWS: None}), TypeError, "pass weight_dimension_numbers=None"),
        (lambda: scale_by_normuon(beta2=0.9), TypeError, "pass b2=0.9"),
        (lambda: scale_by_normuon(normuon_b2=0.9), TypeError, "pass b2=0.9"),
        (lambda: qk_clip(tau=30.0, heads={}), TypeError, "pass threshold=30.0"),
        (lambda: by_role(PARAMS, lr=0.1), TypeError, "muon takes learning_rate=0.1"),
        (
            lambda: hyperp_learning_rate(lr=0.1, depth=1, base_depth=1, tokens=1, base_tokens=1),
            TypeError,
            "hyperp_learning_rate has no argument 'lr': pass learning_rate=0.1",
        ),
        (lambda: describe(PARAMS, lr=0.1), TypeError, "describe has .*: pass learning_rate=0.1"),
        (lambda: describe(PARAMS, steps=3), TypeError, "describe has .* 'steps': pass ns_steps=3"),
        (lambda: describe(PARAMS, 0.02), ValueError, "shardings must be .* got 0.02"),
    ],
)
def test_a_call_of_another_optimizer_is_translated(call, error, expected):
    message = message_of(error, call)
    assert all(part in message for part in expected.split(".*"))


@pytest.mark.parametrize(
    ("name", "other_side"),
    [
        ("adam_momentun", "'momentum'"),
        ("adam_foo", "adam_b"),
        ("adam_b3", "adam_b1"),
        ("beta3", "'beta'"),
        ("b3", "beta"),
        ("nesterov_adamm", "'nesterov'"),
        ("decay_muon", "adam"),
        ("mv_dtype", "did you mean"),
        ("weight_decay_embed", "did you mean"),
        ("max_group_steps", "did you mean"),
        ("foo", "did you mean"),
    ],
)
def test_nothing_else_is_suggested(name, other_side):
    assert other_side not in message_of(TypeError, lambda: muon(0.1, **{name: 0.9}))


@pytest.mark.parametrize("name", ["weight_deccay", "adam_learning_rat", "ns_stepss", "presett"])
def test_a_typing_error_is_found(name):
    near = {"w": "weight_decay", "a": "adam_learning_rate", "n": "ns_steps", "p": "preset"}[name[0]]
    assert f"did you mean {near!r}?" in message_of(TypeError, lambda: muon(0.1, **{name: 1}))


def test_the_table_of_the_documents_is_what_messages_say():
    text = MIGRATION.read_text()
    _, _, section = text.partition("\n## Names of other optimizers\n")
    section = section.partition("\n## ")[0]
    assert "muon_jax/_foreign.py" in section  # which has all names
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", section, re.M)
    assert len(rows) >= 10
    for theirs, ours in rows:
        arguments = re.findall(r"`(.+?)`", ours)
        assert arguments or ours == "leave it out"
        for name, value in re.findall(r"`(\w+)(?:=([^`]+))?`", theirs):
            given = {"learning_rate": 0.1, name: ast.literal_eval(value or "0.5")}
            message = message_of((TypeError, ValueError), functools.partial(muon, **given))
            for argument in arguments:
                way = argument.replace('"', "'") if "=" in argument else f"{argument}="
                assert re.search(rf"pass (.*\W)?{re.escape(way)}", message), name
            assert arguments or f"leave out {name}: " in message


def test_ways_of_the_table_name_arguments():
    functions = [getattr(each, n) for each in (muon_jax, contrib) for n in each.__all__]
    ours = {
        name
        for function in functions
        if isinstance(function, types.FunctionType)
        for name in inspect.signature(function).parameters
    } | {field.name for made in (NewtonSchulz, Exchange) for field in dataclasses.fields(made)}
    for row in FOREIGN.values():
        for way in (*row.ways, *row.by_value.values()):
            assert {*re.findall(r"(\w+)=", way)} <= ours, way
        assert row.ways or row.by_value or row.note or row.taker != "muon"


# Values that no argument of muon takes, by their kinds.
WRONG = [object(), "???", -1.0, float("nan"), 1j, jnp.ones(2), {"(": 1}, [None], True, 10**9]
INNER = {
    name
    for function in (scale_by_muon, newton_schulz, scale_by_normuon)
    for name in inspect.signature(function).parameters
} - {*inspect.signature(muon).parameters}
OF_CONTRIB = {"adamh", "normuon_b2", "normuon_averaged"}
# Pairs that contradict each other, or one that contradicts what a preset sets.
PAIRS = [
    {"consistent_rms": 0.2},
    {"consistent_rms": 0.2, "shape_scale": "ratio"},
    {"adamh": None, "consistent_rms": 0.2},
    {"adamh": None, "shape_scale": "ratio"},
    {"cautious_weight_decay": True, "weight_decay_form": "l2"},
    {"weight_decay_form": "l2"},
    {"ns_steps": 12},
    {"ns_steps": 12, "ns_coeffs": "dion"},
    {"ns_coeffs": "balanced", "ns_steps": 3},
    {"ns_coeffs": "balanced", "preconditioning": "aol"},
    {"ns_coeffs": "balanced"},
    {"ns_coeffs": "cans"},
    {"ns_coeffs": NewtonSchulz("cans", dtype="bfloat16")},
    {"ns_coeffs": "polar_express_nvidia"},
    {"ns_coeffs": NewtonSchulz(method="gram"), "preconditioning": "spectral"},
    {"preconditioning": "spectral"},
    {"ns_coeffs": NewtonSchulz("cans", method="gram")},
    {"ns_coeffs": NewtonSchulz(method="gram")},
    {"ns_coeffs": NewtonSchulz(dtype="float32", method="gram")},
    {"ns_coeffs": NewtonSchulz(dtype="float8_e4m3fn")},
    {"adamh": "no such path"},
    {"mu_rounding": "stochastic"},
    {"mu_dtype": "complex64"},
    {"ns_coeffs": {"no such path": "fast"}},
    {"weight_decay_mask": {"no such path": True}, "weight_decay": 0.1},
]


SYSTEMS = {**PRESETS, **helpers.arguments_of_functions()}


def first_error(arguments):
    """The error of building an optimizer, of its init or of a first update, None for none."""
    try:
        optimizer = helpers.any_muon(**arguments)
        state = jax.eval_shape(optimizer.init, PARAMS)
        jax.eval_shape(optimizer.update, PARAMS, state, PARAMS)
    except (TypeError, ValueError) as error:
        return error
    return None


def attributes_in(arguments):
    """Those of the `NewtonSchulz` that arguments have, which are not at their defaults."""
    iteration = arguments.get("ns_coeffs")
    if not isinstance(iteration, NewtonSchulz):
        return set()
    fields = dataclasses.fields(iteration)
    return {x.name for x in fields if getattr(iteration, x.name) != x.default}


def origin_of(preset):
    """What errors call a preset, or the function of contrib of that name."""
    return f"preset={preset!r}" if preset in PRESETS else preset


def foreign_to_the_call(message, passed, preset):
    """Arguments that a message blames, and that neither the call nor the preset has."""
    blamed = re.split(r": (?:pass|leave|set|name|give|use)\b|\bPass\b", message)[0]
    names = {*inspect.signature(muon).parameters} | INNER | OF_CONTRIB
    named = {n for n in names if re.search(rf"(?<![\w.]){n}(?==| must\b| compares| sums)", blamed)}
    by_preset = {*SYSTEMS[preset]} if f"{origin_of(preset)} sets" in message else set()
    fields = attributes_in(SYSTEMS.get(preset, {})) | attributes_in(passed)
    known = {"ns_steps"} | fields
    return named - {*passed} - by_preset - known | (named & INNER - {*passed} - fields)


@pytest.mark.parametrize("preset", [None, *SYSTEMS])
def test_an_error_blames_what_the_call_has(preset):
    given = {"learning_rate": 0.1} | ({"preset": preset} if preset else {})
    calls = [pair for pair in PAIRS if "adamh" not in pair or preset not in PRESETS]
    if preset in (None, "dion"):  # the check of one value does not depend on a preset
        calls += [{n: v} for n in inspect.signature(muon).parameters for v in WRONG]
    n_errors = 0
    for arguments in calls:
        error = first_error(given | arguments)
        if error is None:
            continue
        n_errors += 1
        message = str(error)
        # Paths, shardings and views have tests of their own.
        is_exchange = isinstance(arguments.get("shardings"), Exchange)
        if VIEWS in arguments or "shardings" in arguments and not is_exchange:
            continue
        assert foreign_to_the_call(message, given | arguments, preset) == set(), message
        own = {*arguments} | attributes_in(arguments)
        named = [n for n in own if re.search(rf"\b{n}\b", message)]
        assert named or f"{origin_of(preset)} sets" in message, (arguments, message)
    assert n_errors > 8


@pytest.mark.parametrize(
    ("preset", "arguments", "sets"),
    [
        ("dion", {"consistent_rms": 0.2}, "shape_scale='ratio'"),
        ("megatron", {"shape_scale": "ratio"}, "consistent_rms=1.0"),
        ("moonlight", {"shape_scale": "none"}, "consistent_rms=0.2"),
        ("turbo", {"ns_steps": 7}, "ns_coeffs=NewtonSchulz('aol', dtype='bfloat16'"),
        ("turbo", {"ns_coeffs": "balanced"}, "preconditioning='aol'"),
        ("nanogpt", {"weight_decay_form": "l2"}, "cautious_weight_decay=True"),
        ("muonh", {"adaptive": False}, "adamh='lm_head|output_proj'"),
        ("gram", {"preconditioning": "spectral"}, "ns_coeffs=NewtonSchulz('polar_express'"),
    ],
)
def test_a_preset_is_named_as_the_origin(preset, arguments, sets):
    message = str(first_error({"learning_rate": 0.1, "preset": preset} | arguments))
    assert sets in message[message.index(f"{origin_of(preset)} sets") :]
    own = sets.partition("=")[0]
    default = None if own == "adamh" else inspect.signature(muon).parameters[own].default
    assert f"pass {own}={default!r}" in message or f", {own}={default!r}" in message


def test_the_dtype_of_a_preset_is_named_beside_coefficients_of_the_call():
    message = str(first_error({"learning_rate": 0.1, "preset": "keller", "ns_coeffs": "cans"}))
    assert "preset='keller' sets ns_coeffs=NewtonSchulz('standard', dtype='bfloat16'" in message
    assert "to undo that, pass ns_coeffs=NewtonSchulz('cans')" in message


def test_a_preset_is_not_named_for_what_the_call_has():
    for name in ("adam_eps_root", "beta", "mu_dtype"):  # torch sets adam_eps, momentum and eps
        with pytest.raises((TypeError, ValueError), match=name) as raised:
            muon(0.1, preset="torch", **{name: "???"})
        assert "preset=" not in str(raised.value)


def test_reports_name_the_preset():
    assert "preset='dion' sets shape_scale='ratio'" in message_of(
        ValueError, lambda: describe(PARAMS, preset="dion", consistent_rms=0.2)
    )


@pytest.mark.parametrize(
    "dtype",
    [
        *("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float8", "fp8", "8bit", "int4"),
        *("uint8", "int16", jnp.float8_e4m3b11fnuz, jnp.uint4, bool),
    ],
)
def test_int8_is_the_momentum_in_8_bits(dtype):
    for build in (functools.partial(muon, 0.1), scale_by_muon):
        message = message_of(ValueError, functools.partial(build, mu_dtype=dtype))
        assert "pass mu_dtype='int8' for momenta in 8 bits" in message


class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4)(x)


STATE = OPTIMIZER.init(PARAMS)
TRAIN_STATE = TrainState.create(apply_fn=None, params=PARAMS, tx=OPTIMIZER)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (OPTIMIZER, "the parameters, not an optimizer"),
        (optax.adam(0.1), "the parameters, not an optimizer"),
        (STATE, "the parameters, not the state"),
        (TRAIN_STATE, "train_state.params"),
        (Model(), "model.init(key, x)['params']"),
        ((x for x in [MATRIX]), "a tree of arrays"),
        (nnx.BatchNorm(3, rngs=nnx.Rngs(0)), "params = nnx.state(model, nnx.Param)"),
        (nnx.Dropout(0.1, rngs=nnx.Rngs(0)), "params = nnx.state(model, nnx.Param)"),
        (muon, "a tree of arrays"),
        ("params", "a tree of arrays"),
        (nnx.Linear, "a tree of arrays"),
        (None, "got None"),
    ],
)
def test_what_is_no_parameters(wrong, what):
    calls = {
        "optimizer.init(params)": OPTIMIZER.init,
        "describe(params)": describe,
    }
    for call, function in calls.items():
        message = message_of(TypeError, functools.partial(function, wrong))
        assert what in message and f"call {call}" in message


def test_models_that_are_trees_are_parameters():
    layer = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    norm = nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Param)
    for model in (
        layer,
        norm,
        nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
        {"update": MATRIX, "init": MATRIX},
    ):
        describe(model)
        muon(0.1).init(model)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ((STATE, PARAMS), "and the state as the first argument"),
        ((STATE, PARAMS, PARAMS), "and the state as the first argument"),
        ((PARAMS, PARAMS, STATE), "and the state as the third argument"),
        ((PARAMS, PARAMS), "got a dict: call"),
    ],
)
def test_arguments_of_update_in_another_order(arguments, where):
    message = message_of(TypeError, lambda: OPTIMIZER.update(*arguments))
    assert where in message and "call update(updates, state, params)" in message


@pytest.mark.parametrize(
    ("params", "arguments"),
    [
        ({"w": jnp.ones((4, 6), int)}, {}),
        ({"w": jnp.ones((4, 6), bool)}, {}),
        ({"w": jnp.ones((4, 6), jnp.float8_e4m3fn)}, {}),
        ({"w": jnp.ones((4, 6), jnp.uint8), "b": jnp.ones(3)}, {"preset": "keller"}),
        (PARAMS, {"mu_dtype": "complex64"}),
        (PARAMS, {"optimizer": contrib.muonh}),
        (PARAMS, {"optimizer": contrib.muonh, "adamh": "no such path"}),
        (PARAMS, {"ns_coeffs": {"no such path": "fast"}}),
        (PARAMS, {VIEWS: {"w": muon_jax.MuonDimensionNumbers(0, 5), "b": None}}),
        (PARAMS, {VIEWS: lambda _: muon_jax.MuonDimensionNumbers()}),
        ({"w": jnp.ones((2, 4, 6))}, {VIEWS: {"w": muon_jax.Split(-1, (4, 4))}}),
        (PARAMS, {"weight_decay": 0.1, "weight_decay_mask": {"x": True}}),
    ],
)
def test_reports_refuse_what_init_refuses(params, arguments):
    own = dict(arguments)
    with pytest.raises((TypeError, ValueError)) as raised:
        own.pop("optimizer", muon)(0.1, **own).init(params)
    refused = message_of(type(raised.value), lambda: describe(params, **arguments))
    assert refused == str(raised.value)


def test_reports_take_all_arguments_of_an_optimizer(capsys):
    signature = inspect.signature(muon)
    defaults = {
        name: p.default for name, p in signature.parameters.items() if p.default is not p.empty
    }
    expected = describe(PARAMS)
    for rate in (0.02, SCHEDULE, jnp.float32(0.1)):
        assert describe(PARAMS, learning_rate=rate) == expected
    assert describe(PARAMS, learning_rate=0.02, **defaults) == expected
    message = message_of(ValueError, functools.partial(describe, PARAMS, learning_rate=-1.0))
    assert "learning_rate must be in [0, inf), got -1.0" in message
    describe(PARAMS, mu_dtype=contrib.on_host())
    capsys.readouterr()


def test_newton_schulz_names_its_own_arguments():
    for arguments, expected in [
        (
            {"ns_coeffs": "cans", "dtype": "bfloat16"},
            "dtype must have 32 .* pass dtype='auto'",
        ),
        ({"method": "gram", "preconditioning": "spectral"}, "method='gram' is not .* Pass method="),
        ({"ns_coeffs": "balanced", "dtype": "float8_e4m3fn"}, "pass dtype='auto'"),
    ]:
        message = message_of(ValueError, functools.partial(newton_schulz, MATRIX, **arguments))
        assert re.search(expected, message) and not re.search("ns_dtype|ns_method", message)


def test_no_message_is_of_two_functions():
    """A message that names the argument of another function in parentheses blames the wrong one."""
    root = Path(muon_jax.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert " to muon)" not in node.value, path


# Calls of other optimizers, and the call that the message proposes, whole.
WHOLE_CALLS = [
    (
        (PARAMS, 1e-3, 0.1, 0.95, True, (3.0, -4.0, 2.0), 1e-7, 5),  # torch.optim.Muon
        {},
        "muon(learning_rate=0.001, weight_decay=0.1, beta=0.95, nesterov=True,"
        " ns_coeffs=(3.0, -4.0, 2.0), eps=1e-07, ns_steps=5)",
    ),
    (
        (PARAMS, 1e-3, (0.9, 0.99), 1e-8, 0.01),  # torch.optim.AdamW
        {},
        "muon(learning_rate=0.001, adam_b1=0.9, adam_b2=0.99, adam_eps=1e-08, weight_decay=0.01)",
    ),
    (
        (PARAMS, 1e-3, 0.9, 0.99, 1e-8, 0.0, None, 1e-4),  # optax.adamw
        {},
        "muon(learning_rate=0.001, adam_b1=0.9, adam_b2=0.99, adam_eps=1e-08, adam_eps_root=0.0,"
        " weight_decay=0.0001)",
    ),
    (
        (PARAMS, None),  # Dion's Muon
        {"lr": 0.01, "mu": 0.95, "adjust_lr": "spectral_norm"},
        "muon(learning_rate=0.01, beta=0.95, shape_scale='ratio')",
    ),
    ((PARAMS, None, 0.01, 0.95), {}, "muon(learning_rate=0.01, beta=0.95)"),
    (
        (PARAMS,),  # Emerging-Optimizers' Muon
        {"lr": 0.1, "scale_mode": "unit_rms_norm", "extra_scale_factor": 1.0},
        "muon(learning_rate=0.1, shape_scale='ratio')",
    ),
]


@pytest.mark.parametrize(("args", "kwargs", "expected"), WHOLE_CALLS)
def test_the_call_of_another_optimizer_becomes_one_that_runs(args, kwargs, expected):
    message = message_of(TypeError, lambda: muon(*args, **kwargs))
    (call,) = re.findall(r"optimizer = (muon\(.*\)), and then", message)
    assert call == expected
    eval(call).init(PARAMS)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"muon_params": None, "adamw_params": None}, f"{VIEWS}=by_role"),
        ({"adam_beta1": 0.9, "betas": (0.9, 0.95)}, "adam_b1=0.9, adam_b2=0.95"),
        ({"scale_mode": "spectral", "extra_scale_factor": 0.2}, "consistent_rms=0.2"),
        ({"extra_scale_factor": 0.2, "scale_mode": "spectral"}, "consistent_rms=0.2"),
        ({"scale_mode": "spectral", "extra_scale_factor": 1.0}, "consistent_rms=1.0"),
        # consistent_rms=1.0 would take the place of the scale by shape.
        (
            {"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 1.0},
            "shape_scale='ratio'",
        ),
        (
            {"layout": "out_in", "use_muon": True},
            f"{VIEWS}=by_role(layout='out_in')",
        ),
        ({"lr": 0.1, "muon_lr": 0.1}, "learning_rate=0.1"),
    ],
)
def test_a_message_names_each_argument_once(arguments, expected):
    with_rate = {"learning_rate": 0.1} if "lr" not in arguments else {}
    message = message_of(TypeError, lambda: muon(**with_rate, **arguments))
    (ways,) = re.findall("pass ([^;]*)", message)
    assert ways == expected
    eval(f"muon(**{with_rate}, {ways})")


def test_a_scale_by_shape_has_its_factor_in_the_learning_rate():
    arguments = {"scale_mode": "unit_rms_norm", "extra_scale_factor": 0.2}
    message = message_of(TypeError, lambda: muon(0.1, **arguments))
    assert "pass shape_scale='ratio'; shape_scale has no factor: multiply" in message
    assert "learning_rate by 0.2 and divide weight_decay by it" in message


def test_betas_and_orders_of_adamw_by_position():
    for args, expected in [
        ((0.1, (0.9, 0.99), 1e-8, 0.1), "adam_b1=0.9, adam_b2=0.99, adam_eps=1e-08, weight_"),
        (
            (0.1, 0.9, 0.99, 1e-8, 0.0, jnp.bfloat16, 1e-4),
            "adam_b1=0.9, adam_b2=0.99, adam_eps=1e-08, adam_eps_root=0.0, mu_dtype=jnp.bfloat16,"
            " weight_decay=0.0001",
        ),
    ]:
        message = message_of(ValueError, functools.partial(muon, *args))
        assert f"as the second argument of muon: pass {expected}" in message
    for name, expected in [
        ("b2", "muon takes adam_b2=0.9"),
        ("muon_beta2", "chain scale_by_muon with muon_jax.contrib.scale_by_normuon(b2=0.9)"),
    ]:
        message = message_of(TypeError, functools.partial(scale_by_muon, **{name: 0.9}))
        assert expected in message
