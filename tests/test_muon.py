import inspect
import math
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import muon_jax
from muon_jax import MuonDimensionNumbers, NewtonSchulz, muon, scale_by_muon
from muon_jax._iteration.coefficients import NAMED
from muon_jax._transforms.chain import scale_by_shape

DIMENSION_NUMBERS = {
    "wide": MuonDimensionNumbers(),
    "tall": MuonDimensionNumbers(),
    "stack": MuonDimensionNumbers(1, 2),
    "conv": MuonDimensionNumbers((0, 1, 2), 3),
    "bias": None,
}


BIAS = {"a": jnp.ones(3)}
HALF = {"a": jnp.ones((3, 3), jnp.bfloat16)}


def tree(seed=0, dtype=jnp.float32, names=tuple(DIMENSION_NUMBERS)):
    shapes = {
        "wide": (20, 50),
        "tall": (48, 16),
        "stack": (3, 12, 18),
        "conv": (3, 3, 4, 24),
        "bias": (11,),
    }
    drawn = helpers.random_tree(shapes, seed, dtype)
    return {name: x for name, x in drawn.items() if name in names}


FADING = optax.linear_schedule(0.2, 0.0, 50)


def trajectory(optimizer, steps, names=tuple(DIMENSION_NUMBERS)):
    """The last update, parameters and state of `steps` steps on gradients drawn at random."""
    params = tree(names=names)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, updates

    state = optimizer.init(params)
    updates: Any = None  # of the last step
    for seed in range(steps):
        params, state, updates = step(params, state, tree(seed + 1, names=names))
    assert helpers.count_of_programs(step) == 1  # nothing is compiled a second time
    return updates, params, state


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        pytest.param(
            {"nesterov": False, "weight_decay": 0.1, "consistent_rms": 0.2}, marks=helpers.slow
        ),
        *(
            pytest.param(kwargs, marks=helpers.nightly)
            for kwargs in (
                {"adaptive": True, "ns_coeffs": "dion", "adam_learning_rate": 1e-3},
                {"preconditioning": "schatten", "ns_coeffs": (2.0, -1.5, 0.5), "ns_steps": 8},
                {"preconditioning": "aol"},
                {
                    "preconditioning": "spectral",
                    "beta": 0.8,
                    "adam_b1": 0.8,
                    "adam_weight_decay": 0.1,
                },
                {"weight_decay": FADING, "adam_weight_decay": FADING},
            )
        ),
    ],
    ids=lambda kwargs: " ".join(kwargs) or "defaults",
)
def test_a_hundred_steps_are_those_of_optax(kwargs):
    kwargs = {"learning_rate": 1e-2, "muon_weight_dimension_numbers": DIMENSION_NUMBERS, **kwargs}
    with jax.default_matmul_precision("highest"):
        ours = trajectory(muon(**kwargs, ns_coeffs=NewtonSchulz(dtype=None)), 100)
        theirs = trajectory(optax.contrib.muon(**kwargs), 100)
    for ours_, theirs_ in zip(ours[:2], theirs[:2], strict=True):
        for name in DIMENSION_NUMBERS:
            error = jnp.max(jnp.abs(ours_[name] - theirs_[name])) / jnp.max(jnp.abs(theirs_[name]))
            assert error <= 1e-5, name


def test_the_default_dtype_is_bfloat16_and_close_to_optax():
    ours, _, _ = trajectory(muon(1e-2, muon_weight_dimension_numbers=DIMENSION_NUMBERS), 5)
    theirs, _, _ = trajectory(
        optax.contrib.muon(1e-2, muon_weight_dimension_numbers=DIMENSION_NUMBERS), 5
    )
    for name in ("wide", "tall", "stack", "conv"):
        error = jnp.linalg.norm(ours[name] - theirs[name]) / jnp.linalg.norm(theirs[name])
        assert 1e-4 < error < 5e-2, name


OF_THE_ITERATION = [
    "shardings",
    "mu_rounding",
]
NEW = {
    "muon": [
        "preset",
        "momentum",
        "eps_mode",
        "shape_scale",
        "weight_decay_form",
        "cautious_weight_decay",
        "adam_eps",
        "adam_nesterov",
        *OF_THE_ITERATION,
    ],
    "scale_by_muon": ["momentum", "eps_mode", *OF_THE_ITERATION],
}


@pytest.mark.parametrize("name", ["muon", "scale_by_muon"])
def test_parameters_and_their_order_are_those_of_optax(name):
    ours = inspect.signature(getattr(muon_jax, name)).parameters
    theirs = inspect.signature(getattr(optax.contrib, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert list(ours)[len(theirs) :] == NEW[name]
    for key, parameter in theirs.items():
        assert ours[key].kind == parameter.kind
        if key != "ns_coeffs":
            assert ours[key].default == parameter.default, key
    coefficients = NAMED[ours["ns_coeffs"].default]
    assert coefficients == (theirs["ns_coeffs"].default,)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "mu_dtype", helpers.mostly_nightly([None, jnp.bfloat16, jnp.float32], [jnp.bfloat16])
)
def test_updates_and_state_keep_dtype_and_structure(dtype, mu_dtype):
    params = {"w": tree(dtype=dtype)["wide"]}
    optimizer = muon(1e-2, mu_dtype=mu_dtype, consistent_rms=0.2, weight_decay=0.1)
    state = optimizer.init(params)
    updates, new_state = optimizer.update(params, state, params)
    chex.assert_trees_all_equal_shapes(updates, params)
    chex.assert_type(updates["w"], jnp.promote_types(dtype, mu_dtype or dtype))
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    mu = state.inner_states["muon"].inner_state[0].mu
    chex.assert_type(mu["w"], mu_dtype or dtype)
    chex.assert_tree_all_finite(updates)


def test_state_holds_what_training_changes_and_nothing_else():
    params = tree()["wide"]
    optimizer = scale_by_muon()
    state = optimizer.init(params)
    assert state._fields == ("count", "mu")
    _, new_state = optimizer.update(params, state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(new_state), strict=True):
        assert not (old == new).all()
    for other in ("dion", "balanced", (1.0, 2.0, 3.0)):
        chex.assert_trees_all_equal_structs(state, scale_by_muon(other).init(params))


@pytest.mark.parametrize("weight_decay", [0.0, FADING])
def test_the_state_with_a_mask_is_that_of_optax(weight_decay):
    mask = dict.fromkeys(DIMENSION_NUMBERS, True)
    ours, theirs = (
        make(0.1, weight_decay=weight_decay, weight_decay_mask=mask).init(tree())
        for make in (muon, optax.contrib.muon)
    )
    decays = [state.inner_states["muon"].inner_state[2] for state in (ours, theirs)]
    chex.assert_trees_all_equal_structs(*decays)
    assert jax.tree.structure(decays[0]).num_nodes > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [
        {"weight_decay_form": "scaled_palm"},
        {"weight_decay_form": "independent", "cautious_weight_decay": True},
        pytest.param({"weight_decay_form": "palm"}, marks=helpers.nightly),
        pytest.param({"weight_decay_form": "l2"}, marks=helpers.nightly),
        pytest.param({"weight_decay_form": "independent"}, marks=helpers.nightly),
    ],
    ids=lambda kwargs: " ".join(map(str, kwargs.values())),
)
def test_every_weight_decay_takes_a_schedule(kwargs):
    def last(decay):
        return trajectory(muon(FADING, weight_decay=decay, adam_weight_decay=decay, **kwargs), 3)[0]

    chex.assert_trees_all_close(last(lambda _: 0.1), last(0.1), atol=1e-6)


@helpers.slow
def test_ranks_need_not_be_promoted():
    stack = {"w": jnp.ones((3, 8, 16)), "v": jnp.ones((16, 8)), "b": jnp.ones(3)}
    views = {"w": MuonDimensionNumbers(-2, -1), "v": MuonDimensionNumbers(), "b": None}
    with jax.numpy_rank_promotion("raise"):
        for kwargs in (
            {},
            {"ns_coeffs": NewtonSchulz(method="gram")},
            {"ns_coeffs": NewtonSchulz("balanced", method="gram")},
        ):
            optimizer = muon(0.1, muon_weight_dimension_numbers=views, **kwargs)
            optimizer.update(stack, optimizer.init(stack), stack)


def test_init_takes_shapes():
    optimizer = muon(1e-2, muon_weight_dimension_numbers=DIMENSION_NUMBERS)
    shapes = jax.eval_shape(tree)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        jax.eval_shape(optimizer.init, shapes), optimizer.init(tree())
    )


@pytest.mark.parametrize(
    "spec",
    helpers.mostly_nightly([("x", None), (None, "x"), (None, None)], [("x", None)]),
    ids=str,
)
def test_updates_and_state_keep_their_sharding(spec):
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    params = jax.device_put({"w": tree()["tall"]}, sharding)
    optimizer = muon(1e-2)
    state = optimizer.init(params)
    updates, new_state = jax.jit(optimizer.update)(params, state, params)
    mu = new_state.inner_states["muon"].inner_state[0].mu
    for array in (updates["w"], mu["w"]):
        assert array.sharding.is_equivalent_to(sharding, 2)
    one = {"w": tree()["tall"]}
    alone, _ = optimizer.update(one, optimizer.init(one), one)
    chex.assert_trees_all_close(jax.device_get(updates), alone, atol=1e-4)


def test_donated_state_and_schedules():
    schedule = optax.linear_schedule(1e-1, 0.0, 4)
    optimizer = muon(schedule, muon_weight_dimension_numbers=DIMENSION_NUMBERS)

    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    donating = jax.jit(step, donate_argnums=(0, 1))
    params, donated = tree(), tree()
    state, donated_state = optimizer.init(params), optimizer.init(donated)
    for seed in range(5):
        params, state = jax.jit(step)(params, state, tree(seed))
        before = donated["wide"]
        donated, donated_state = donating(donated, donated_state, tree(seed))
        assert before.is_deleted()
    chex.assert_trees_all_close(donated, params, rtol=1e-6)
    last = jax.tree.map(jnp.subtract, step(params, state, tree(9))[0], params)
    chex.assert_trees_all_close(last, jax.tree.map(jnp.zeros_like, last))  # the rate has reached 0


@pytest.mark.parametrize(
    "ns_coeffs",
    helpers.mostly_nightly(
        ["standard", "dion", (3.0, -3.0, 1.0), "accurate"], [(3.0, -3.0, 1.0), "accurate"]
    ),
    ids=str,
)
def test_inject_hyperparams(ns_coeffs):
    names = ("wide", "bias")
    injected = optax.inject_hyperparams(muon)(learning_rate=1e-2, ns_coeffs=ns_coeffs, ns_steps=2)
    updates, params, state = trajectory(injected, 3, names)
    expected, _, _ = trajectory(muon(1e-2, ns_coeffs, 2), 3, names)
    chex.assert_trees_all_close(updates, expected, atol=1e-6)
    update = jax.jit(injected.update)
    state.hyperparams["learning_rate"] *= 2
    doubled, _ = update(tree(7, names=names), state, params)
    state.hyperparams["learning_rate"] /= 2
    once, _ = update(tree(7, names=names), state, params)
    chex.assert_trees_all_close(doubled, jax.tree.map(lambda u: 2 * u, once), rtol=1e-5)


def test_a_schedule_of_floats_may_say_how_many_steps():
    steps = optax.piecewise_constant_schedule(5, {2: 0.4})
    injected = optax.inject_hyperparams(muon)(learning_rate=1e-2, ns_steps=steps)
    params = tree(0, names=("wide",))
    state, found = injected.init(params), []
    for _ in range(4):
        expected, _ = injected.update(params, state, params)
        updates, state = jax.jit(injected.update)(params, state, params)
        chex.assert_trees_all_close(updates, expected, atol=1e-6)
        found.append(float(state.hyperparams["ns_steps"]))
    assert found == [5.0, 5.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "ns_coeffs", helpers.mostly_nightly(["balanced", "aol", "deepseek_v4"], ["deepseek_v4"])
)
def test_injected_defaults_leave_a_name_its_own_steps(ns_coeffs):
    names = ("wide", "bias")
    injected = optax.inject_hyperparams(muon)(learning_rate=1e-2, ns_coeffs=ns_coeffs)
    updates, _, _ = trajectory(injected, 2, names)
    expected, _, _ = trajectory(muon(1e-2, ns_coeffs), 2, names)
    chex.assert_trees_all_close(updates, expected, atol=1e-4)


def test_a_composed_schedule_orthogonalizes_wide_tall_and_stacked_matrices():
    names = ("wide", "tall", "stack")
    numbers = {name: DIMENSION_NUMBERS[name] for name in names}
    optimizer = muon(1.0, "balanced", muon_weight_dimension_numbers=numbers)
    updates, _, _ = trajectory(optimizer, 2, names)
    for name in names:
        matrices = updates[name] / np.sqrt(
            max(1, updates[name].shape[-1] / updates[name].shape[-2])
        )
        sigma = np.linalg.svd(matrices, compute_uv=False)
        assert 0.5 < sigma.min() < sigma.max() < 1.3, name


def test_multi_steps_accumulates():
    optimizer = muon(1e-2)
    accumulating = optax.MultiSteps(optimizer, every_k_schedule=2)
    params, first, second = (tree(seed, names=("wide", "bias")) for seed in range(3))
    update = jax.jit(accumulating.update)
    _, state = update(first, accumulating.init(params), params)
    updates, _ = update(second, state, params)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    expected, _ = optimizer.update(mean, optimizer.init(params), params)
    chex.assert_trees_all_close(updates, expected, atol=2e-4)


def test_a_chain_with_clipping():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon(1e-2))
    params = {"w": tree()["wide"], "b": tree()["bias"]}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    scale = jnp.linalg.svd(updates["w"] / 1e-2 / np.sqrt(50 / 20), compute_uv=False)
    assert 0.6 < float(scale.min()) < float(scale.max()) < 1.3


@pytest.mark.parametrize(
    ("shape", "numbers", "consistent_rms", "factor"),
    [
        ((20, 50), MuonDimensionNumbers(), None, np.sqrt(2.5)),
        ((50, 20), MuonDimensionNumbers(), None, 1.0),
        ((50, 20), MuonDimensionNumbers(1, 0), None, np.sqrt(2.5)),
        ((3, 3, 4, 24), MuonDimensionNumbers((0, 1, 2), 3), None, 1.0),
        ((50, 20), MuonDimensionNumbers(), 0.2, 0.2 * np.sqrt(50)),
        ((3, 12, 18), MuonDimensionNumbers(1, 2), 0.2, 0.2 * np.sqrt(18)),
    ],
)
def test_scale_by_shape(shape, numbers, consistent_rms, factor):
    update = jnp.ones(shape)
    transform = scale_by_shape(numbers, consistent_rms)
    scaled, _ = transform.update(update, transform.init(update))
    chex.assert_trees_all_close(scaled, factor * update, rtol=1e-6)


@pytest.mark.optimized
def test_the_factor_and_a_constant_learning_rate_are_rounded_one_after_the_other():
    """Or XLA multiplies by their product in some programs: updates on a mesh would be others."""
    grads = {"wide": tree()["wide"]}
    optimizer = muon(0.1)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(grads), grads)
    orthogonal = helpers.compiled_update(grads, ns_steps=5, dtype="auto")[1]["wide"]
    factor = np.float32(math.sqrt(50 / 20))
    chex.assert_trees_all_equal(updates["wide"], np.float32(-0.1) * (factor * orthogonal))


def test_none_in_the_parameters_is_none_in_the_updates():
    views = {"w": MuonDimensionNumbers(), "activation": None, "b": None}
    params = {"w": jnp.ones((4, 6)), "activation": None, "b": jnp.ones(4)}
    expected = {k: v for k, v in params.items() if v is not None}
    for numbers in (None, views, lambda params: views):
        optimizer = muon(0.1, muon_weight_dimension_numbers=numbers)
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        alone = muon(0.1)
        known, _ = alone.update(expected, alone.init(expected), expected)
        chex.assert_trees_all_equal(updates, known | {"activation": None})


def test_zero_gradients_give_zero_updates():
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        params = {"w": jnp.zeros((8, 12), dtype)}
        optimizer = muon(1e-2, ns_coeffs=NewtonSchulz(dtype=None))
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        chex.assert_trees_all_equal(updates, params)


def test_derivatives_through_an_update():
    optimizer = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"))
    params = {"w": jax.random.normal(jax.random.key(0), (16, 32))}
    state = optimizer.init(params)

    def loss(gradient):
        return jnp.vdot(optimizer.update({"w": gradient}, state, params)[0]["w"], params["w"])

    gradient, direction = jax.random.normal(jax.random.key(1), (2, 16, 32))
    slope = jnp.vdot(jax.jit(jax.grad(loss))(gradient), direction)
    _, expected = jax.jvp(loss, (gradient,), (direction,))
    np.testing.assert_allclose(slope, expected, rtol=1e-3)


@pytest.mark.parametrize("kwargs", [{}, {"mu_dtype": "float32"}, {"adaptive": True}], ids=str)
def test_gradients_near_the_end_of_float16(kwargs):
    grads = {"w": jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (8, 16)), jnp.float16)}
    transform = scale_by_muon(**kwargs)
    large = jax.tree.map(lambda g: 4000 * g, grads)
    expected, updates = (transform.update(g, transform.init(g))[0] for g in (grads, large))
    scale = 4000 if kwargs.get("adaptive") else 1  # by a dual norm
    difference = updates["w"].astype("f") / scale - expected["w"]
    assert jnp.linalg.norm(difference) < 0.05 * jnp.linalg.norm(expected["w"].astype("f"))


def test_huge_gradients_give_the_updates_of_ordinary_ones():
    params = {"w": tree()["wide"]}
    optimizer = muon(1e-2)
    ordinary, _ = optimizer.update(params, optimizer.init(params), params)
    huge = jax.tree.map(lambda p: 2.0**100 * p, params)  # exact
    updates, _ = optimizer.update(huge, optimizer.init(params), params)
    chex.assert_trees_all_close(updates, ordinary, rtol=1e-5)


@pytest.mark.parametrize("preconditioning", ["aol", "schatten"])
def test_eps_reaches_every_preconditioning(preconditioning):
    params = {"w": 1e-3 * tree()["wide"]}

    def norm(eps):
        optimizer = muon(1.0, eps=eps, preconditioning=preconditioning)
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        return float(jnp.linalg.norm(updates["w"]))

    assert norm(1e4) < 0.1 * norm(1e-8)  # optax: equal


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: muon(0.1, ns_coeffs="muon"), r"one of \[.*'dion'.*\], got 'muon'"),
        (lambda: muon(0.1, ns_coeffs="dion", ns_steps=10), r"has 5 steps, got ns_steps=10"),
        (lambda: muon(0.1, ns_coeffs=[1.0, 2.0]), r"shape \(3,\) or \(steps, 3\).*, got \(2,\)"),
        (lambda: muon(0.1, ns_coeffs=None), r"a name or numbers \(a, b, c\), got None"),
        (lambda: muon(0.1, ns_steps=0), r"ns_steps must be an integer in \[1, 100\], got 0"),
        (lambda: muon(0.1, ns_coeffs="fast", ns_steps=3), r"'fast' is a whole of 1 .*ns_steps=3"),
        (lambda: muon(0.1, "fast", preconditioning="aol"), r"'fast'.*preconditioning='aol'"),
        (
            lambda: muon(0.1, NewtonSchulz("fast", dtype="float8_e4m3fn")),
            r"'fast' is unsafe in float8_e4m3fn",
        ),
        (
            lambda: muon(0.1, ns_coeffs=NewtonSchulz(method=["gram"])),
            r"method must be .*got \['gram'\]",
        ),
        (
            lambda: muon(0.1, ns_coeffs=NewtonSchulz(implementation=["xla"])),
            r"implementation must be .*got \['xla'\]",
        ),
        (
            lambda: muon(0.1).update(BIAS, muon(0.1).init(BIAS), {"b": jnp.ones(3)}),
            r"at \['a'\] the gradients have float32\[3\], the parameters nothing",
        ),
        (
            lambda: muon(0.1, ns_coeffs=NewtonSchulz(dtype="int8")),
            "dtype must be a float dtype, got int8",
        ),
        (
            lambda: muon(0.1, mu_dtype="int16"),
            "mu_dtype must be .* 16 bits or more, or int8, got int16",
        ),
        (
            lambda: muon(0.1, ns_coeffs=NewtonSchulz(max_group_bytes=-1)),
            r"max_group_bytes must be an integer in \[0, inf\), got -1",
        ),
        (lambda: muon(0.1, beta=1.0), r"beta must be in \[0, 1\), got 1.0"),
        (lambda: muon(0.1, beta=np.float32(1.5)), r"beta must be in \[0, 1\), got 1.5"),
        (lambda: muon(0.1, eps=-1e-8), r"eps must be in \[0, inf\), got -1e-08"),
        (lambda: muon(0.1, consistent_rms=-1.0), r"consistent_rms must be in \[0, inf\), got -1"),
        (
            lambda: muon(0.1, mu_dtype="float8_e4m3fn"),
            "mu_dtype must be .* 16 bits or more.*got float8",
        ),
        (lambda: helpers.any_muon(0.1, normuon_b2=1.5), r"normuon_b2 must be in \[0, 1\), got 1.5"),
        (lambda: muon(0.1, preconditioning="svd"), r"preconditioning must be one of.*got 'svd'"),
        (
            lambda: scale_by_muon().update(BIAS, scale_by_muon().init(BIAS)),
            r"parameter \['a'\] of shape \(3,\) is no matrix.*MuonDimensionNumbers",
        ),
        (
            lambda: optax.inject_hyperparams(muon)(0.1, mu_dtype=jnp.bfloat16).init(BIAS),
            r"mu_dtype.*static_args",
        ),
        (
            lambda: muon(0.1).update({"a": None}, muon(0.1).init(BIAS)),
            r"None.*needs the parameters",
        ),
    ],
)
def test_wrong_calls_say_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["beta", "eps", "normuon_b2", "consistent_rms"])
def test_schedules_other_than_those_of_optax_are_to_be_injected(name):
    with pytest.raises(TypeError, match=f"{name} must be a number.*inject_"):
        helpers.any_muon(0.1, **{name: optax.constant_schedule(0.5)})


def test_without_parameters_arrays_of_numpy_are_gradients_and_none_is_refused():
    """Numpy compares an array with None element by element."""
    gradients = {"a": np.eye(4, 6, dtype="f"), "b": np.eye(6, 4, dtype="f")}
    transform = muon(0.1)
    state = transform.init(gradients)
    expected, _ = transform.update(gradients, state, gradients)
    chex.assert_trees_all_equal(transform.update(gradients, state)[0], expected)
    with pytest.raises(ValueError, match=r"None.*needs the parameters"):
        transform.update({**gradients, "b": None}, state)


def test_a_list_of_coefficients_is_taken_too():
    params = {"w": tree()["wide"]}
    table = NAMED["dion"]
    expected, _ = muon(1e-2, "dion").update(params, muon(1e-2).init(params), params)
    for ns_coeffs in (list(table), np.array(table), jnp.array(table)):
        updates, _ = muon(1e-2, ns_coeffs).update(params, muon(1e-2).init(params), params)
        chex.assert_trees_all_close(updates, expected, atol=1e-6)
