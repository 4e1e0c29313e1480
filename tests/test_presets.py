"""Presets against NumPy in float64, PyTorch and optax; the arguments that they set."""

import dataclasses
import functools
import inspect
from pathlib import Path

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import oracles
import pytest

import muon_jax
from muon_jax import (
    PRESETS,
    MuonDimensionNumbers,
    MuonState,
    NewtonSchulz,
    _presets,
    contrib,
    muon,
    scale_by_muon,
)
from muon_jax._presets import takes_preset
from muon_jax._transforms.chain import scale_by_shape

FIXTURE = Path(__file__).parent / "fixtures" / "torch_muon.npz"

NUMBERS = {
    "wide": MuonDimensionNumbers(),
    "tall": MuonDimensionNumbers(),
    "square": MuonDimensionNumbers(),
    "conv": MuonDimensionNumbers((0, 1, 2), 3),
    "bias": None,
    "lm_head": None,
}
SHAPES = {
    "wide": (24, 36),
    "tall": (36, 24),
    "square": (24, 24),
    "conv": (3, 3, 4, 24),
    "bias": (11,),
}
ALL_SHAPES = SHAPES | {"lm_head": (24, 20)}
# The arguments of each system by name: presets of `muon`, and functions of contrib.
SYSTEMS = {**PRESETS, **helpers.arguments_of_functions()}
SLOW = {
    "nanogpt",
    "adamuon",
    "optax",
    "dion",
    "gram",
    "levanter",
    "turbo",
    "fused_muon",
    "moe_fp16",
    "megatron",
    "kimi_k3",
    "glm5",
    "prime_rl",
    "deepseek_v4",
}
STEPS = 20
TOLERANCE = {"float32": 2e-4, "float16": 1e-2, "bfloat16": 2e-2}


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


def tree(seed, names=tuple(SHAPES), dtype=jnp.float32):
    """Arrays drawn at random, by seed and name."""
    return {
        name: jnp.asarray(np.random.default_rng([seed, i]).standard_normal(shape), dtype)
        for i, (name, shape) in enumerate(ALL_SHAPES.items())
        if name in names
    }


def learning_rate(count):
    return 0.05 - 0.001 * count


@functools.cache
def jitted_step(optimizer):
    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


def train(optimizer, params, state, seeds):
    """The parameters and the state after a step on the gradients of each seed."""
    for seed in seeds:
        params, state = jitted_step(optimizer)(params, state, tree(seed, params))
    return params, state


def run(optimizer, steps=STEPS, names=tuple(SHAPES)):
    params = tree(0, names)
    return train(optimizer, params, optimizer.init(params), range(1, steps + 1))[0]


def as_pytorch(x):
    """The matrix of an array, (out, in) as in PyTorch; a vector as it is."""
    x = np.asarray(x, np.float64)
    return x.reshape(-1, x.shape[-1]).T if x.ndim > 1 else x


def names_for(preset):
    """All names but the output head's, if it has no optimizer of its own."""
    return ALL_SHAPES if "adamh" in SYSTEMS[preset] else SHAPES


@functools.cache
def expected(preset):
    on_matrices, on_the_rest = oracles.SYSTEMS[preset]
    steps = {"bias": on_the_rest, "lm_head": oracles.ON_THE_HEAD.get(preset)}
    result = {}
    for name in names_for(preset):
        step = steps.get(name, on_matrices)
        w, state = as_pytorch(tree(0, [name])[name]), {}
        for t in range(1, STEPS + 1):
            w = step(w, as_pytorch(tree(t, [name])[name]), state, t, float(learning_rate(t - 1)))
        result[name] = w
    return result


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [
        pytest.param(
            preset,
            dtype,
            id=f"{preset}-{dtype}",
            marks=helpers.nightly if dtype != "float32" else helpers.slow if preset in SLOW else [],
        )
        for preset, kwargs in SYSTEMS.items()
        for dtype in {"float32": None, kwargs["ns_coeffs"].dtype or "float32": None}
    ],
)
def test_twenty_steps_are_those_of_the_system(preset, dtype):
    optimizer = helpers.any_muon(
        learning_rate,
        preset=preset,
        muon_weight_dimension_numbers={name: NUMBERS[name] for name in names_for(preset)},
        ns_coeffs=dataclasses.replace(SYSTEMS[preset]["ns_coeffs"], dtype=dtype),
    )
    ours = run(optimizer, names=names_for(preset))
    for name, theirs in expected(preset).items():
        start = as_pytorch(tree(0, [name])[name])
        error = helpers.relative_error(as_pytorch(ours[name]) - start, theirs - start)
        assert error < (1e-4 if NUMBERS[name] is None else TOLERANCE[dtype]), name


def test_every_preset_has_a_system_and_arguments_of_muon():
    assert SYSTEMS.keys() == oracles.SYSTEMS.keys()
    for preset, kwargs in SYSTEMS.items():
        parameters = inspect.signature(getattr(contrib, preset, muon)).parameters
        assert kwargs.keys() <= parameters.keys() - {"learning_rate", "preset"}, preset
        iteration = kwargs["ns_coeffs"]  # our defaults are not optax's
        assert iteration.dtype != "auto" and iteration.method is not None, preset
        assert preset in inspect.getdoc(getattr(contrib, preset, muon))


def test_functions_are_named_where_presets_are_asked_for():
    for name in ("nanogpt", "muonh", "normuon", "adamuon"):
        message = rf"is a function: use muon_jax.contrib.{name}\(\.\.\.\)"
        with pytest.raises(ValueError, match=message):
            muon(0.1, preset=name)


@pytest.mark.parametrize("make", [contrib.normuon, contrib.nanogpt, contrib.adamuon])
def test_functions_of_contrib_under_inject_hyperparams(make):
    """Their defaults are those of their signature, so that all of them may be given."""
    names = ("wide", "bias")
    ours = run(optax.inject_hyperparams(make)(learning_rate=learning_rate), 2, names)
    expected = run(make(learning_rate), 2, names)
    chex.assert_trees_all_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [contrib.nanogpt, contrib.adamuon])
def test_coefficients_of_a_call_keep_the_dtype_of_the_function(make):
    found = muon_jax.describe({"w": jnp.ones((4, 6))}, optimizer=make, ns_coeffs="dion")
    (group,) = found.groups
    assert (group.coefficients, group.dtype, group.method) == ("dion", "bfloat16", "standard")


@pytest.mark.parametrize(
    "coeffs",
    [
        "dion",
        NewtonSchulz("dion"),
        {".*": "dion"},
        lambda path, shape: NewtonSchulz("dion"),
    ],
    ids=["name", "NewtonSchulz", "by path", "callable"],
)
def test_adamuon_orthogonalizes_signs_whatever_the_coefficients(coeffs):
    params = {"w": tree(0)["wide"]}
    optimizer = contrib.adamuon(0.1, ns_coeffs=coeffs, weight_decay=0.0)
    state = optimizer.init(params)
    updates, _ = optimizer.update(params, state, params)
    expected, _ = optimizer.update(jax.tree.map(jnp.sign, params), state, params)
    chex.assert_trees_all_equal(updates, expected)
    np.testing.assert_allclose(jnp.sqrt(jnp.mean(updates["w"] ** 2)), 0.1 * 0.2, rtol=1e-5)


def test_muonh_keeps_norms_and_steps_are_relative_to_them():
    params = tree(0, ("wide", "lm_head"))
    numbers = {"wide": MuonDimensionNumbers(), "lm_head": None}
    optimizer = contrib.muonh(0.25, muon_weight_dimension_numbers=numbers)
    updates, state = optimizer.update(tree(1, params), optimizer.init(params), params)
    assert state.inner_states.keys() == {"muon", "adam", "adamh"}
    for name, w in params.items():
        norm = np.linalg.norm(w)
        np.testing.assert_allclose(np.linalg.norm(w + updates[name]), norm, rtol=1e-5)
        assert 0.2 < np.linalg.norm(updates[name]) / norm < 0.3


def test_adamh_has_matrices_alone_and_needs_one():
    head = {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}
    params = {"lm_head": head, "w": jnp.ones((4, 4))}
    numbers = {"lm_head": None, "w": MuonDimensionNumbers()}
    kwargs = {"muon_weight_dimension_numbers": numbers}
    described = muon_jax.describe(params, optimizer=contrib.muonh, **kwargs)
    optimizers = {p.path: p.optimizer for p in described.parameters}
    assert optimizers == {"lm_head/bias": "adamw", "lm_head/kernel": "adamh", "w": "muon"}
    with pytest.raises(ValueError, match=r"\['logits'\] of adamh match none of the 1 matrices"):
        contrib.muonh(0.1, adamh="logits", **kwargs).init(params)
    contrib.muonh(0.1, adamh=None, **kwargs).init(params)
    masked = optax.masked(contrib.muonh(0.1), {"lm_head": False, "w": True})
    masked.init(params)  # another optimizer has the head


def test_hyperp_is_its_formula():
    sizes = {"depth": 32, "base_depth": 8, "tokens": 16e9, "base_tokens": 1e9}
    rate = contrib.hyperp_learning_rate(0.02, **sizes)
    assert rate == pytest.approx(0.02 / 2 * 2.0 ** (-4 * 0.32), rel=1e-12)
    assert contrib.hyperp_learning_rate(0.02, **dict.fromkeys(sizes, 3)) == 0.02
    with pytest.raises(ValueError, match=r"depth must be in \(0, inf\), got 0"):
        contrib.hyperp_learning_rate(0.02, **{**sizes, "depth": 0})


def test_the_preset_of_optax_is_optax():
    names = ("tall", "bias")
    ours = run(muon(learning_rate, preset="optax"), names=names)
    theirs = run(optax.contrib.muon(learning_rate), names=names)
    chex.assert_trees_all_close(ours, theirs, atol=1e-5)


def test_the_muon_of_maxtext_for_deepseek_v4_is_optax_with_its_coefficients():
    names = ("tall", "bias")
    kwargs = {"adam_b2": 0.95, "adam_weight_decay": 0.1}
    named = muon(learning_rate, preset="optax", ns_coeffs="deepseek_v4", **kwargs)
    kwargs |= {"ns_coeffs": oracles.HYBRID, "ns_steps": 10}  # as MaxText passes them
    theirs = run(optax.contrib.muon(learning_rate, **kwargs), names=names)
    for ours in (named, muon(learning_rate, preset="optax", **kwargs)):
        chex.assert_trees_all_close(run(ours, names=names), theirs, atol=1e-5)


@pytest.mark.parametrize("preset", ["keller", "fused_muon", "prime_rl"])
def test_a_convolution_is_the_matrix_of_the_source_by_use(preset):
    """The source views (out, in, h, w) as (out, in·h·w). By default AdamW has convolutions."""
    params = {"conv": tree(0)["conv"], "head": tree(0, ALL_SHAPES)["lm_head"]}

    def forward(params, images):
        kernel, numbers = params["conv"], ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return jax.nn.relu(x).mean((1, 2)) @ params["head"]

    of_conv, _ = muon_jax.describe(params, preset=preset).parameters
    assert (of_conv.path, of_conv.optimizer) == ("conv", "adamw")
    optimizer = muon(
        0.1,
        preset=preset,
        ns_coeffs=dataclasses.replace(PRESETS[preset]["ns_coeffs"], dtype="float32"),
        muon_weight_dimension_numbers=muon_jax.by_use(forward, params, jnp.ones((2, 8, 8, 4))),
    )
    gradients = params | {"conv": tree(1)["conv"]}
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    w, g = (as_pytorch(tree(seed)["conv"]) for seed in (0, 1))
    expected = oracles.SYSTEMS[preset][0](w, g, {}, 1, 0.1) - w
    assert helpers.relative_error(as_pytorch(updates["conv"]), expected) < TOLERANCE["float32"]


each_variant_of_pytorch = pytest.mark.parametrize(
    ("variant", "kwargs"),
    [
        ("default", {}),
        pytest.param("match_rms_adamw", {"consistent_rms": 0.2}, marks=helpers.slow),
        pytest.param(
            "without_nesterov", {"nesterov": False, "weight_decay": 0.0}, marks=helpers.slow
        ),
    ],
)


def assert_four_steps_are(theirs, recorded, **kwargs):
    params = start = {name: jnp.asarray(recorded[f"w/{name}"]) for name in theirs}
    optimizer = muon(0.02, preset="torch", **kwargs)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(4):
        gradients = {name: jnp.asarray(recorded[f"g/{name}/{step}"]) for name in theirs}
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    for name, expected in theirs.items():
        change = expected - start[name]
        error = jnp.max(jnp.abs(params[name] - start[name] - change)) / jnp.max(jnp.abs(change))
        assert error < (1e-4 if name == "bias" else 3e-2), name


@each_variant_of_pytorch
def test_four_steps_are_those_of_pytorch(variant, kwargs):
    """Recorded by tests/fixtures/make_torch_muon.py; products there are bfloat16 as well."""
    recorded = np.load(FIXTURE)
    names = ("wide", "tall", "square", "bias")
    theirs = {name: recorded[f"{variant}/{name}"] for name in names}
    assert_four_steps_are(theirs, recorded, **kwargs)


@pytest.mark.gpu
@each_variant_of_pytorch
def test_four_steps_are_those_of_pytorch_on_this_gpu(variant, kwargs):
    pytest.importorskip("torch")
    from fixtures import make_torch_muon

    recorded = np.load(FIXTURE)
    theirs = make_torch_muon.trained(recorded, "cuda", **make_torch_muon.VARIANTS[variant])
    assert_four_steps_are(theirs, recorded, **kwargs)


def test_arguments_of_the_call_win_over_those_of_the_preset(monkeypatch):
    monkeypatch.setitem(_presets._ARGUMENTS, "mine", {"eps": 2, "nesterov": False})

    @takes_preset
    def function(learning_rate, eps=1, *, nesterov=True, preset=None):
        return learning_rate, eps, nesterov, preset

    assert function(0) == (0, 1, True, None)
    assert function(0, preset="mine") == (0, 2, False, "mine")
    assert function(0, 5, preset="mine") == (0, 5, False, "mine")
    assert function(learning_rate=0, nesterov=True, preset="mine") == (0, 2, True, "mine")
    assert _presets._ARGUMENTS["mine"] == {"eps": 2, "nesterov": False}


def test_presets_under_inject_hyperparams():
    with pytest.raises(ValueError, match=r"'torch' came.*partial\(muon, \*\*muon_jax.PRESETS\['t"):
        optax.inject_hyperparams(muon)(learning_rate, preset="torch").init(tree(0))
    injected = optax.inject_hyperparams(functools.partial(muon, **muon_jax.PRESETS["torch"]))
    names = ("wide", "bias")
    ours = run(injected(learning_rate=learning_rate), 3, names)
    expected = run(muon(learning_rate, preset="torch"), 3, names)
    chex.assert_trees_all_close(ours, expected, rtol=1e-5, atol=1e-5)


ETA, LAMBDA = 0.5, 0.3
FORMS = {
    "decoupled": lambda w, s: -ETA * LAMBDA * w,
    "independent": lambda w, s: -LAMBDA * w,
    "palm": lambda w, s: -LAMBDA * ETA**2 * w,
    "scaled_palm": lambda w, s: -LAMBDA * ETA**2 * s * w,
}
DECAY = {"weight_decay": LAMBDA, "adam_weight_decay": LAMBDA}


def one_update(dtype=jnp.float32, gradients=None, schedule=False, **kwargs):
    """The second update, of the same gradients; a schedule is wrong in the first."""
    names = ("wide", "bias")
    params = tree(0, names, dtype)
    gradients = tree(1, names, dtype) if gradients is None else gradients
    rate = (lambda count: ETA * count) if schedule else ETA
    optimizer = muon(rate, ns_coeffs=NewtonSchulz(dtype=None), momentum="ema", **kwargs)
    _, state = optimizer.update(gradients, optimizer.init(params), params)
    return params, optimizer.update(gradients, state, params)[0]


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_weight_decay(form, cautious, schedule):
    params, plain = one_update(schedule=schedule)
    _, updates = one_update(
        schedule=schedule, weight_decay_form=form, cautious_weight_decay=cautious, **DECAY
    )
    for name, s in (("wide", np.sqrt(36 / 24)), ("bias", 1.0)):
        decay = FORMS[form](params[name], s)
        kept = decay * plain[name] >= 0 if cautious else True
        np.testing.assert_allclose(updates[name] - plain[name], decay * kept, atol=1e-6)
        assert not cautious or 0 < np.mean(kept) < 1


def test_l2_is_a_gradient_of_the_weights():
    params = tree(0, ("wide", "bias"))
    gradients = jax.tree.map(lambda w, g: g + LAMBDA * w, params, tree(1, ("wide", "bias")))
    _, expected = one_update(gradients=gradients)
    _, updates = one_update(weight_decay_form="l2", **DECAY)
    chex.assert_trees_all_close(updates, expected, atol=1e-5)


@pytest.mark.parametrize("form", [*FORMS, "l2"])
def test_weight_decay_keeps_the_dtype_and_spares_what_the_mask_spares(form):
    params, updates = one_update(
        jnp.bfloat16,
        schedule=True,
        weight_decay_form=form,
        weight_decay_mask={"wide": False, "bias": True},
        cautious_weight_decay=form != "l2",
        weight_decay=LAMBDA,
    )
    chex.assert_trees_all_equal_dtypes(updates, params)
    _, plain = one_update(jnp.bfloat16, schedule=True)
    chex.assert_trees_all_equal(updates, plain)


@pytest.mark.parametrize(
    ("order", "kwargs"),
    [
        pytest.param(2, {"ns_steps": 1}, id="frobenius"),
        pytest.param(2, {"ns_steps": 2, "method": "gram"}, id="gram", marks=helpers.nightly),
        pytest.param(np.inf, {"ns_steps": 1, "preconditioning": "spectral"}, id="spectral"),
        pytest.param(4, {"ns_coeffs": "fast"}, id="composed", marks=helpers.nightly),
    ],
)
def test_eps_is_added_or_the_least_norm(order, kwargs):
    x = tree(0)["wide"]
    size = float(np.linalg.norm(np.linalg.svd(x, compute_uv=False), order))

    def newton_schulz(eps, eps_mode, x=x):
        return muon_jax.newton_schulz(x, eps=eps, eps_mode=eps_mode, dtype="float32", **kwargs)

    added = newton_schulz(2 * size, "add")
    chex.assert_trees_all_close(newton_schulz(3 * size, "max"), added, atol=1e-5)
    without = newton_schulz(0.0, "add")
    chex.assert_trees_all_close(newton_schulz(0.9 * size, "max"), without, atol=1e-5)
    assert helpers.relative_error(added, np.asarray(without)) > 0.1
    assert not np.any(newton_schulz(0.0, "max", 0 * x))


@pytest.mark.parametrize(
    ("shape_scale", "shape", "factor"),
    [
        ("clipped_ratio", (36, 24), 1.0),
        ("ratio", (36, 24), np.sqrt(24 / 36)),
        ("ratio", (24, 36), np.sqrt(36 / 24)),
        ("none", (24, 36), 1.0),
    ],
)
def test_shape_scale(shape_scale, shape, factor):
    transform = scale_by_shape(shape_scale=shape_scale)
    scaled, _ = transform.update(jnp.ones(shape), transform.init(None))
    chex.assert_trees_all_close(scaled, jnp.full(shape, factor), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: muon(0.1, preset="kimi"), r"one of \['deepseek_v4', .*'turbo'\], got 'kimi'"),
        (lambda: muon(0.1, momentum="sgd"), r"momentum must be one of \('bias_.*got 'sgd'"),
        (lambda: muon(0.1, eps_mode="min"), r"eps_mode must be one of \('add'.*got 'min'"),
        (lambda: muon(0.1, shape_scale="rms"), r"shape_scale must be one of.*got 'rms'"),
        (lambda: muon(0.1, weight_decay_form="l1"), r"weight_decay_form must be.*got 'l1'"),
        (
            lambda: contrib.muonh(0.1, shape_scale="ratio"),
            r"contrib.muonh makes .*leave out shape_scale='ratio'",
        ),
        (
            lambda: muon(0.1, preset="moonlight", shape_scale="ratio"),
            r"shape_scale='ratio' and consistent_rms=0.2.*or consistent_rms=None to have",
        ),
        (
            lambda: muon(0.1, preset="moonlight", shape_scale="clipped_ratio"),
            r"has no effect beside consistent_rms=0.2, which preset='moonlight' sets: pass consis",
        ),
        (
            lambda: muon(0.1, preset="megatron", shape_scale="clipped_ratio"),
            r"has no effect beside consistent_rms=1.0, which preset='megatron' sets: pass consis",
        ),
        (
            lambda: muon(0.1, weight_decay_form="l2", cautious_weight_decay=True),
            r"cautious_weight_decay compares.*'l2'.*pass another form, such as 'decoupled'",
        ),
        (
            lambda: contrib.normuon(0.1, normuon_averaged="rows"),
            r"averaged must be one of.*got 'rows'",
        ),
        (lambda: convert({}), r"state must have a MuonState in it, got dict with none"),
        (lambda: convert(beta=lambda count: 0.9), r"got the schedule .* only where β is constant"),
        (lambda: convert(beta=1.0), r"beta must be in \[0, 1\), got 1.0"),
        (lambda: convert(target="nesterov"), r"target must be one of.*got 'nesterov'"),
    ],
)
def test_wrong_calls_say_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def convert(state=None, *, source="ema", target="heavy_ball", beta=0.95):
    state = MuonState(jnp.array(0), {}) if state is None else state
    return contrib.convert_momentum(state, source=source, target=target, beta=beta)


@pytest.mark.parametrize(
    ("source", "target", "factor"),
    [
        ("ema", "heavy_ball", 20.0),
        ("heavy_ball", "bias_corrected", 0.05),
        ("bias_corrected", "ema", 1.0),
    ],
)
def test_converted_momentum_is_rescaled_wherever_it_is(source, target, factor):
    params = tree(0, ("wide", "bias"))
    optimizer = optax.chain(optax.clip(1.0), optax.inject_hyperparams(muon)(0.1))
    state = jax.tree.map(lambda x: x + 1, optimizer.init(params))
    converted = convert(state, source=source, target=target)
    chex.assert_trees_all_equal_shapes_and_dtypes(converted, state)
    before, after = (s[1].inner_state.inner_states for s in (state, converted))
    count, mu = after["muon"].inner_state[0]
    np.testing.assert_allclose(mu["wide"], factor * np.ones((24, 36)), rtol=1e-6)
    assert count == 1
    chex.assert_trees_all_equal(after["adam"], before["adam"])


def test_training_goes_on_after_conversion_as_it_would_have():
    names = ("wide", "bias")
    ema, heavy_ball = (
        muon(0.1, momentum=form, ns_coeffs=NewtonSchulz(dtype="float32"))
        for form in ("ema", "heavy_ball")
    )
    params = tree(0, names)
    params, state = train(ema, params, ema.init(params), range(1, 5))
    expected, _ = train(ema, params, state, range(5, 10))
    converted, _ = train(heavy_ball, params, convert(state), range(5, 10))
    chex.assert_trees_all_close(converted, expected, atol=1e-5)


@pytest.mark.parametrize("form", ["bias_corrected", "ema", "heavy_ball"])
def test_a_missing_gradient_skips_its_parameter(form):
    params = {"a": tree(0)["wide"], "b": {"c": tree(1)["wide"], "d": tree(0)["bias"]}}
    optimizers = [
        muon(0.1, momentum=form, weight_decay_form="l2", **DECAY),
        scale_by_muon(
            momentum=form, weight_dimension_numbers={"a": None, "b": {"c": None, "d": VECTOR}}
        ),
    ]
    for optimizer in optimizers:
        _, state = optimizer.update(params, optimizer.init(params), params)
        full, _ = optimizer.update(params, state, params)
        for c, d in ((None, None), (None, params["b"]["d"]), (params["b"]["c"], None)):
            updates, _ = optimizer.update({"a": params["a"], "b": {"c": c, "d": d}}, state, params)
            expected = {
                "c": full["b"]["c"] if d is None and c is not None else 0 * full["b"]["c"],
                "d": full["b"]["d"] if c is None and d is not None else 0 * full["b"]["d"],
            }
            chex.assert_trees_all_equal(updates, {"a": full["a"], "b": expected})
        updates, _ = optimizer.update({"a": params["a"], "b": None}, state, params)
        chex.assert_trees_all_equal_structs(updates, params)
        assert not np.any(updates["b"]["c"])


VECTOR = muon_jax.Unfold(0, (1, -1))


def test_a_missing_gradient_without_parameters_has_the_dtype_of_the_momentum():
    params = {"w": tree(0, dtype=jnp.bfloat16)["wide"]}
    optimizer = scale_by_muon()
    updates, state = optimizer.update({"w": None}, optimizer.init(params))
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
    assert state.count == 1


def test_a_state_is_restored_from_a_list_of_its_leaves(tmp_path):
    optimizer = contrib.nanogpt(0.1)
    params = tree(0, ("wide", "bias"))
    params, state = train(optimizer, params, optimizer.init(params), (1, 2))
    np.savez(tmp_path / "state.npz", *jax.tree.leaves(state))
    with np.load(tmp_path / "state.npz") as saved:
        leaves = [saved[f"arr_{i}"] for i in range(len(saved))]
    template = jax.eval_shape(optimizer.init, params)
    restored = jax.tree.unflatten(jax.tree.structure(template), leaves)
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, template)
    ours, theirs = (train(optimizer, params, s, (3,))[0] for s in (restored, state))
    chex.assert_trees_all_equal(ours, theirs)


def test_a_state_loads_under_other_presets():
    def structure(preset):
        numbers = {name: NUMBERS[name] for name in SHAPES}
        optimizer = muon(0.1, preset=preset, muon_weight_dimension_numbers=numbers)
        return jax.eval_shape(optimizer.init, tree(0))

    for preset in PRESETS:
        chex.assert_trees_all_equal_shapes_and_dtypes(structure(preset), structure("optax"))


# What went wrong in others' code. A FSDP Muon and torch.optim.Muon orthogonalize in place, in
# bfloat16 into the momentum itself where that is not a copy.
@pytest.mark.parametrize("form", ["ema", "heavy_ball"])
def test_without_nesterov_the_momentum_is_not_overwritten(form):
    params = {"w": tree(0, dtype=jnp.bfloat16)["wide"]}
    optimizer = muon(0.1, momentum=form, nesterov=False)
    state = optimizer.init(params)
    step = jax.jit(optimizer.update, donate_argnums=1)
    for gradient in (2.0, 4.0):
        gradients = {"w": jnp.full_like(params["w"], gradient)}
        _, state = step(gradients, state, params)
    mu = state.inner_states["muon"].inner_state[0].mu["w"]
    expected = {"ema": 0.05 * (0.95 * 2 + 4), "heavy_ball": 0.95 * 2 + 4}[form]
    np.testing.assert_allclose(np.float32(mu), expected, rtol=1e-2)


# flash-muon accepts stacks and has buffers for one matrix.
def test_a_stack_is_its_matrices():
    stack = {"w": jnp.stack([tree(seed)["wide"] for seed in range(3)])}
    iteration = dataclasses.replace(PRESETS["moonlight"]["ns_coeffs"], dtype="float32")
    kwargs = {"preset": "moonlight", "ns_coeffs": iteration}
    numbers = {"w": MuonDimensionNumbers(1, 2)}
    optimizer = muon(0.1, muon_weight_dimension_numbers=numbers, **kwargs)
    updates, _ = optimizer.update(stack, optimizer.init(stack), stack)
    alone = muon(0.1, **kwargs)
    for i, w in enumerate(stack["w"]):
        expected, _ = alone.update({"w": w}, alone.init({"w": w}), {"w": w})
        chex.assert_trees_all_close(updates["w"][i], expected["w"], atol=1e-5)


# An eps of 1e-8 beside the norm damps small gradients; float16 rounds it to 0, and 0/0 is NaN.
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_small_and_zero_gradients_under_a_least_norm(dtype):
    params = {"w": jnp.zeros((24, 36), dtype)}
    optimizer = muon(0.1, preset="megatron")
    state = optimizer.init(params)
    zero, _ = optimizer.update(params, state, params)
    chex.assert_trees_all_equal(zero, params)
    if dtype == jnp.float32:
        gradients = {"w": tree(0)["wide"]}
        ordinary, _ = optimizer.update(gradients, state, params)
        small, _ = optimizer.update({"w": 2.0**-40 * gradients["w"]}, state, params)
        chex.assert_trees_all_close(small, ordinary, rtol=1e-5)


@pytest.mark.parametrize("preset", ["moonlight", "megatron", "gram", "kimi_k3"])
def test_a_scale_by_shape_beside_a_preset_that_has_another(preset):
    optimizer = muon(0.1, preset=preset, shape_scale="clipped_ratio", consistent_rms=None)
    params = {"w": tree(0)["wide"]}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    arguments = dict(PRESETS[preset]) | {"consistent_rms": None}
    same = muon(0.1, **arguments)
    expected, _ = same.update(params, same.init(params), params)
    chex.assert_trees_all_equal(updates, expected)
