"""No mistake in a call passes in silence: each raises an error that names the argument."""

import collections
import dataclasses
import functools
import inspect

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import muon_jax
from muon_jax import (
    Exchange,
    Link,
    MuonDimensionNumbers,
    NewtonSchulz,
    Split,
    Unfold,
    by_role,
    describe,
    muon,
    newton_schulz,
    scale_by_muon,
)
from muon_jax.contrib import (
    KeyHeads,
    QueryHeads,
    keep_param_norm,
    qk_clip,
    scale_by_adamuon,
    scale_by_normuon,
    scale_to_param_norm,
    with_metrics,
)
from pallas_kernels import gemm, select_implementation, syrk, unsupported_reason

PARAMS = helpers.random_tree({"w": (4, 6), "b": (3,)}, 0)
MATRIX = PARAMS["w"]
RULES = {"^w$": MuonDimensionNumbers()}
COMPLEX = jax.tree.map(lambda x: x.astype("complex64"), PARAMS)
TOKEN = jnp.zeros(3, int)


def updated(gradients, params=PARAMS, optimizer=None, given=True):
    """The program of an update, traced alone."""
    optimizer = optimizer or muon(0.1)
    state = optimizer.init(params)

    def update(gradients, state, params):
        return optimizer.update(gradients, state, params)

    return str(jax.make_jaxpr(update)(gradients, state, params if given else None))


def of_muon(**given):
    return lambda: helpers.any_muon(**{"learning_rate": 0.1, **given})


def exchange(*args, **given):
    return lambda: Exchange(*args, **given)


def initialized(params=PARAMS, **given):
    return lambda: muon(0.1, **given).init(params)


def clipped(shape, spec, logits):
    params = {"query": jnp.ones(shape)}
    return lambda: qk_clip(1.0, {"query": spec}).update(
        params, optax.EmptyState(), params, max_logits=logits
    )


Type, Value = TypeError, ValueError
NUMBER, FLAG = "must be one real number, got", "must be True or False"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        # Flags.
        (
            of_muon(nesterov="False"),
            Type,
            rf"nesterov {FLAG}, got 'False': pass nesterov=True",
        ),
        (of_muon(adaptive="False"), Type, rf"adaptive {FLAG}, got 'False'"),
        (of_muon(cautious_weight_decay="yes"), Type, rf"cautious_weight_decay {FLAG}, got 'y"),
        (of_muon(adam_nesterov=1), Type, r"adam_nesterov must be True, False or None, got 1"),
        (of_muon(nesterov=None), Type, rf"nesterov {FLAG}, got None"),
        (
            lambda: syrk(MATRIX, symmetrize_output="no"),
            Type,
            rf"symmetrize_output {FLAG}, got",
        ),
        (lambda: select_implementation(MATRIX, addend=1), Type, rf"addend {FLAG}, got 1"),
        # Mesh axes.
        (exchange(["x"]), Value, r"axes of Exchange must be one of .*, got \['x'\]"),
        (exchange(("split", 3)), Value, r"axes of Exchange must be one of .*, got 3"),
        (exchange("blocks"), Value, r"axes of Exchange must be one of .*: did you mean 'block'\?"),
        (
            exchange(("split", "gram", "block")),
            Value,
            r"axes of Exchange must have one of \('exchange', .*\) at most .*: leave out one word",
        ),
        (exchange(("split", "repeat")), Value, r"one of \('faster', 'repeat', 'split'\) at most"),
        (exchange({3: "split"}), Type, r"axes of Exchange must have words by the names of mesh a"),
        (exchange({"x": "blocks"}), Value, r"axes\['x'\] of Exchange must be one of"),
        *(
            (
                of_muon(shardings=Exchange({"y": ("split", "block")}), **given),
                Value,
                rf"{name} sums over all mesh axes .* 'block' of Exchange .*: leave out {name}",
            )
            for name, given in {
                "adaptive=True": {"adaptive": True},
                "contrib.normuon": {"normuon_b2": 0.9},
                "contrib.nanogpt": {"preset": "nanogpt"},
                "contrib.adamuon": {"preset": "adamuon"},
                "contrib.muonh": {"adamh": None},
            }.items()
        ),
        (exchange(links=50e9), Type, r"links of Exchange must be a dict of Link by the names of m"),
        (exchange(links={3: Link()}), Type, r"links .* pass links=\{'data': Link\(bandwidth=5"),
        (
            exchange(links={"x": 1e9}),
            Type,
            r"must be a dict of Link by the names of .*, got \{'x'",
        ),
        (lambda: Link(0), Value, r"bandwidth must be in \(0, inf\), got 0"),
        (lambda: Link(latency="1"), Type, r"latency must be one real number, got '1'"),
        *(
            (
                of_muon(shardings=Exchange(block_period=2), **given),
                Value,
                rf"{name}.* sums over .* block_period=2 of .*: leave out {name}.*, or block_period",
            )
            for name, given in {
                "adaptive=True": {"adaptive": True},
                "contrib.normuon": {"normuon_b2": 0.9},
                "contrib.nanogpt": {"preset": "nanogpt"},
                "contrib.adamuon": {"preset": "adamuon"},
                "contrib.muonh": {"adamh": None},
            }.items()
        ),
        (exchange(block_gain=-1), Value, r"block_gain must be in \[0, inf\), got -1"),
        (exchange(shardings=3), Value, r"shardings must be a PartitionSpec, a NamedSharding or N"),
        (
            exchange(block_period=jnp.array(2)),
            Value,
            r"must be no array, got 2: .* static_args='block_period'",
        ),
        (lambda: Link(latency=jnp.array(1e-5)), Value, r"latency must be no array, got"),
        (exchange(block_period=0), Value, r"must be an integer in \[1, .*\], got 0: pass .*=4"),
        # Numbers.
        (
            of_muon(learning_rate=float("nan")),
            Value,
            r"learning_rate must be in \[0, inf\), g",
        ),
        (of_muon(learning_rate=-0.1), Value, r"\[0, inf\), got -0.1: pass learning_rate=0.02"),
        (of_muon(learning_rate=0.1j), Type, rf"learning_rate {NUMBER} 0.1j"),
        (of_muon(learning_rate=jnp.ones(1)), Type, rf"{NUMBER} an array float32\[1\]"),
        (of_muon(learning_rate=None), Type, rf"learning_rate {NUMBER} None"),
        (of_muon(learning_rate=True), Type, rf"learning_rate {NUMBER} True"),
        (of_muon(beta=jnp.array(1.5)), Value, r"beta must be in \[0, 1\), got 1.5"),
        (of_muon(normuon_b2=jnp.array(2.0)), Value, r"normuon_b2 must be in \[0, 1\), got 2"),
        (of_muon(adam_b1=-0.1), Value, r"adam_b1 must be in \[0, 1\), got -0.1"),
        (of_muon(adam_b2=1.0), Value, r"adam_b2 must be in \[0, 1\), got 1.0"),
        (of_muon(adam_eps=-1.0), Value, r"adam_eps must be in \[0, inf\), got -1.0"),
        (of_muon(weight_decay=-0.1), Value, r"weight_decay must be in \[0, inf\), got -0.1"),
        (
            of_muon(ns_steps=10**6),
            Value,
            r"ns_steps must be an integer in \[1, 100\], got 1000",
        ),
        (of_muon(ns_steps=True), Type, rf"ns_steps {NUMBER} True"),
        (
            lambda: NewtonSchulz(max_group_bytes=1.5),
            Value,
            r"max_group_bytes must be an integer .* got 1.5",
        ),
        (lambda: newton_schulz(MATRIX, eps=-1), Value, r"eps must be in \[0, inf\), got -1"),
        (lambda: qk_clip("x", {}), Type, rf"threshold {NUMBER} 'x'"),
        (
            lambda: scale_by_normuon(b2=jnp.array(1.0)),
            Value,
            r"b2 must be in \[0, 1\), got 1.0",
        ),
        (lambda: syrk(MATRIX, alpha=1j), Type, "alpha must be a real number, .* got 1j"),
        (
            lambda: jax.jit(lambda b: muon(0.1, beta=b))(jnp.ones(2)),
            Type,
            rf"beta {NUMBER} an",
        ),
        # Coefficients.
        (
            of_muon(ns_coeffs=(float("nan"), 1, 1)),
            Value,
            r"a > 0, got \(nan, 1, 1\)",
        ),
        (of_muon(ns_coeffs=(0, 0, 0)), Value, r"with a > 0, got \(0, 0, 0\)"),
        (of_muon(ns_coeffs=(True, 1, 1)), Value, r"a > 0, got \(True, 1, 1\)"),
        (of_muon(ns_coeffs=((2, -1, 0),) * 101), Value, r"at most 100 steps, got \(101, 3\)"),
        (lambda: newton_schulz(MATRIX, (1j, 1, 1)), Value, "ns_coeffs must be finite real"),
        # Names.
        (
            lambda: NewtonSchulz(implementation=""),
            Value,
            r"implementation must be one of .* None, got ''",
        ),
        (
            of_muon(normuon_b2=0.9, normuon_averaged="x"),
            Value,
            r"normuon_averaged must be one of .*, got 'x'",
        ),
        (of_muon(preset="kellr"), Value, "got 'kellr': did you mean 'keller'"),
        (of_muon(ns_coeffs="balancd"), Value, "got 'balancd': did you mean 'balanced'"),
        (of_muon(momentum="ema_"), Value, "got 'ema_': did you mean 'ema'"),
        (
            of_muon(weight_decy=0.1),
            Type,
            "muon has no argument 'weight_decy': did you mean 'we",
        ),
        (lambda: unsupported_reason("tritn", MATRIX), Value, "did you mean 'triton'"),
        (of_muon(mu_dtype="float23"), Value, "got 'float23': did you mean 'float32'"),
        (of_muon(mu_dtype="auto"), Value, "mu_dtype must be the name of a float dtype"),
        (
            lambda: gemm(MATRIX, MATRIX.T, out_dtype="x"),
            Value,
            "out_dtype must be a float .* 'x'",
        ),
        # Trees of arguments.
        (of_muon(weight_decay_mask={"w": "no"}), Type, rf"weight_decay_mask\['w'\] {FLAG}"),
        (of_muon(shardings={"w": "x"}), Value, r"shardings\['w'\] must be a PartitionSpec"),
        (
            of_muon(muon_weight_dimension_numbers={"w": 3}),
            Value,
            r"weight_dimension_numbers\['w'\] must be MuonDimensionNumbers, .* got 3: pass",
        ),
        (
            initialized(muon_weight_dimension_numbers=lambda params: {"w": 3, "b": None}),
            Value,
            r"weight_dimension_numbers\['w'\] must be MuonDimensionNumbers, .* got 3: pass",
        ),
        (
            initialized(muon_weight_dimension_numbers={"w": MuonDimensionNumbers(0, 5), "b": None}),
            Value,
            r"\['w'\] of shape \(4, 6\): .* names axis 5",
        ),
        (
            initialized(muon_weight_dimension_numbers={"w": Split(0, (2, 2), 3), "b": None}),
            Value,
            r"\['w'\] of shape \(4, 6\): a view must be .* got 3",
        ),
        (
            initialized(muon_weight_dimension_numbers={"v": None, "b": None}),
            Value,
            r"weight_dimension_numbers must be a tree like .* at \['v'\] .* None, the p.* nothing",
        ),
        (
            initialized(weight_decay=0.1, weight_decay_mask={"w": {"x": True}}),
            Value,
            r"weight_decay_mask must be .* at \['w'\] .* a dict, the parameters float32\[4, 6\]",
        ),
        (
            initialized(
                muon_weight_dimension_numbers={"w": MuonDimensionNumbers(0.5, 1), "b": None}
            ),
            Value,
            "must name axes by integers: pass",
        ),
        (lambda: Split("x", (2, 2)), Type, "axis must be an integer, got 'x': pass axis=-1"),
        (lambda: Unfold(-1, 3), Type, r"sizes must be a tuple of integers, got 3"),
        (
            lambda: with_metrics(muon),
            Type,
            "transform must be a transformation with init and u",
        ),
        (
            lambda: with_metrics(muon(0.1), 3),
            Value,
            "weight_dimension_numbers must be Muon.* 3",
        ),
        (
            lambda: muon_jax.by_role(PARAMS, 3),
            Type,
            "rules must be a dict by regular expr.*got 3",
        ),
        (lambda: muon_jax.by_role(PARAMS, {"(": None}), Type, r"regular expression, got '\(' \("),
        (lambda: qk_clip(1.0, {"w": 3}), Type, r"heads\['w'\] must be KeyHeads or .* got 3"),
        (lambda: KeyHeads(((2, "x"),)), Value, "parts must be pairs of a size, .* power, got"),
        (lambda: KeyHeads(((2, 1),), (0, 1, 2)), Value, "axis must be an axis, or a pair"),
        (
            lambda: QueryHeads(((2, 1),), 0.5),
            Value,
            r"key_heads must be an integer in \[1, inf",
        ),
        (
            clipped((4, 4), QueryHeads(((2, 1),), axis=0, layer_axis=-2), jnp.ones((4, 2))),
            Value,
            r"query of shape \(4, 4\): QueryHeads.* names an axis twice: give heads",
        ),
        (clipped((4, 4), KeyHeads(((4, 1),), (-1, 1)), jnp.ones(4)), Value, "an axis twice"),
        (
            lambda: muon(0.1).update(PARAMS, None),
            Type,
            "state must be what .* 'inner_states'",
        ),
        (
            lambda: scale_by_muon().update(PARAMS, ()),
            Type,
            "init ret.* 'mu', got a tuple: call",
        ),
        (lambda: describe(PARAMS, mesh="x"), Type, "mesh must be a Mesh or None, got 'x'"),
        (
            initialized({"s": jnp.ones(())}, muon_weight_dimension_numbers={"s": Split(0, (1,))}),
            Value,
            r"\['s'\] of shape \(\): Split.* names axis 0, which is out of range for shape \(\)",
        ),
        # Parameters.
        (lambda: describe(None), Type, "params must be a tree of arrays .* got None"),
        (
            lambda: describe({"w": "x"}),
            Type,
            r"the parameter \['w'\] must be an array, got 'x'",
        ),
        (
            initialized({"w": jnp.ones((2, 3), int)}),
            Value,
            r"\['w'\] must have a float dtype, got",
        ),
        (
            initialized({"w": jnp.ones((2, 3), jnp.float8_e4m3fn)}),
            Value,
            r"the parameter \['w'\] must have 16 bits or more, got float8_e4m3fn: train a copy",
        ),
        (
            initialized(mu_dtype="complex64"),
            Value,
            r"complex64 for the parameter \['b'\], which",
        ),
        (
            initialized(COMPLEX, mu_dtype="float32"),
            Value,
            r"float32 for the .* is complex64: pas",
        ),
        (lambda: newton_schulz([[1.0]]), Type, r"x must be an array, got \[\[1.0\]\]"),
        (lambda: syrk("x"), Type, "a_matrix must be an array, got 'x'"),
        # Gradients.
        (
            lambda: updated({**PARAMS, "w": MATRIX[:1]}),
            Value,
            r"at \['w'\] the gradients have float32\[1, 6\], the parameters float32\[4, 6\]. Pass",
        ),
        (
            lambda: updated({**PARAMS, "w": MATRIX[:1]}, given=False),
            Value,
            r"at \['w'\] the gradients have float32\[1, 6\], the state float32\[4, 6\]. Pass",
        ),
        (
            lambda: updated({**PARAMS, "b": jnp.ones(4)}, given=False),
            Value,
            r"at \['b'\] the gradients have float32\[4\], the state float32\[3\]. Pass",
        ),
        (
            lambda: updated({"w": MATRIX}),
            Value,
            r"at \['b'\] the gradients have nothing, the p",
        ),
        (
            lambda: updated([MATRIX, PARAMS["b"]]),
            Value,
            "at the root the gradients have a list",
        ),
        (
            lambda: updated({**PARAMS, "b": TOKEN}),
            Value,
            r"the gradient \['b'\] must .* int32: p",
        ),
        (
            lambda: muon(0.1).update({"b": "x"}, muon(0.1).init(PARAMS)),
            Type,
            r"the gradient \['b'\] must be an array",
        ),
        (
            lambda: updated({**PARAMS, "b": jnp.ones(3, jnp.float8_e5m2)}),
            Value,
            r"the gradient \['b'\] must have 16 bits or more, got float8_e5m2",
        ),
        (lambda: updated(COMPLEX), Value, r"the gradient \['b'\] is complex64, but the param"),
        (
            lambda: updated({"w": MATRIX.T}, {"w": MATRIX}, keep_param_norm()),
            Value,
            r"at \['w'\] the gradients have float32\[6, 4\], the parameters float32\[4, 6\]",
        ),
        (
            lambda: updated({"w": MATRIX[:2]}, {"w": MATRIX}, scale_to_param_norm()),
            Value,
            r"at \['w'\] the gradients have float32\[2, 6\], the parameters float32\[4, 6\]",
        ),
        (
            lambda: updated({"w": MATRIX, "v": MATRIX}, {"w": MATRIX}, scale_by_normuon(), False),
            Value,
            "the updates must have the matrices of the state, 1, got 2",
        ),
        (
            lambda: updated({"w": MATRIX.T}, {"w": MATRIX}, scale_by_adamuon(), False),
            Value,
            r"at \['w'\] the gradients have float32\[6, 4\], the state float32\[4, 6\]",
        ),
    ],
)
def test_mistakes_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_every_argument_of_muon_is_checked():
    """A new argument needs a declaration, or a value that no argument takes passes."""
    nothing = object()
    others = (getattr(muon_jax.contrib, name) for name in ("normuon", *helpers.FUNCTIONS))
    for make in (muon, *others):
        for name in inspect.signature(make).parameters:
            with pytest.raises((TypeError, ValueError), match=name.removeprefix("muon_")):
                make(**{"learning_rate": 0.1, name: nothing})


def test_traced_numbers_are_taken():
    names = ("learning_rate", "beta", "eps", "weight_decay", "adam_b1", "adam_b2", "normuon_b2")

    def update(values):
        optimizer = helpers.any_muon(**values, ns_steps=1)
        return optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)[0]

    values = {name: jnp.array(0.5) for name in names}
    shapes = jax.eval_shape(update, values)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, PARAMS)


def test_a_decay_of_none_is_no_decay():
    none = muon(0.1, weight_decay=None, adam_weight_decay=None)
    assert updated(PARAMS, optimizer=none) == updated(PARAMS)


def test_a_list_of_coefficients_is_a_table():
    table = [[2.0, -1.5, 0.5]] * 2
    tuples = str(jax.make_jaxpr(lambda x: newton_schulz(x, ((2.0, -1.5, 0.5),) * 2))(MATRIX))
    for given in (table, np.array(table), jnp.array(table)):
        assert str(jax.make_jaxpr(lambda x, given=given: newton_schulz(x, given))(MATRIX)) == tuples


@dataclasses.dataclass
class NumbersInADataclass:
    reduction_axis: tuple[int, ...] = (0,)
    output_axis: tuple[int, ...] = (-1,)


NumbersInATuple = collections.namedtuple("NumbersInATuple", ["reduction_axis", "output_axis"])


@pytest.mark.parametrize("numbers", [NumbersInADataclass(), NumbersInATuple((0,), (-1,))])
def test_dimension_numbers_of_other_packages_are_taken(numbers):
    """MaxText has a class of its own."""
    for view in (numbers, Split(-1, (4, 2), numbers)):
        own = MuonDimensionNumbers((0,), (-1,))
        expected = own if view is numbers else Split(-1, (4, 2), own)
        of_view, of_own = (
            muon(0.1, muon_weight_dimension_numbers={"w": v, "b": None}) for v in (view, expected)
        )
        assert updated(PARAMS, optimizer=of_view) == updated(PARAMS, optimizer=of_own)


@pytest.mark.parametrize(
    "optimizer",
    [
        with_metrics(muon(0.1)),
        muon(0.1, muon_weight_dimension_numbers={"w": MuonDimensionNumbers(), "b": None}),
        muon(0.1, muon_weight_dimension_numbers=by_role(rules=RULES)),
        muon(0.1, weight_decay=0.1, weight_decay_mask={"w": True, "b": False}),
    ],
)
def test_parameters_in_the_state_can_be_mapped(optimizer):
    state = optimizer.init(PARAMS)
    doubled = optax.tree.map_params(optimizer, lambda x: x + 2, state)
    chex.assert_trees_all_equal_structs(doubled, state)
    found = [x for x in jax.tree.leaves(doubled) if x.shape == MATRIX.shape]
    assert len(found) == 1 and (found[0] == 2).all()


def test_a_number_may_be_a_gradient():
    optimizer, params = muon(0.1), {"w": MATRIX, "b": 1.0}
    updates = [
        optimizer.update({**params, "b": b}, optimizer.init(params), params)[0]
        for b in (1.0, jnp.float32(1))
    ]
    chex.assert_trees_all_equal(*updates)


def test_moments_are_initialized_from_shapes():
    params = {"w": MATRIX}
    shapes = jax.eval_shape(lambda: params)
    for transform in (scale_by_normuon(), scale_by_normuon(averaged="shorter"), scale_by_adamuon()):
        chex.assert_trees_all_equal(transform.init(shapes), transform.init(params))


@pytest.mark.parametrize("ns_coeffs", ["standard", "balanced"])
def test_promotion_may_be_strict(ns_coeffs):
    x = MATRIX.astype("bfloat16")
    expected = newton_schulz(x, ns_coeffs)
    with jax.numpy_dtype_promotion("strict"):
        chex.assert_trees_all_equal(newton_schulz(x, ns_coeffs), expected)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"normuon_b2": 0.9, "weight_decay": 0.1, "cautious_weight_decay": True},
        {"preset": "adamuon"},
        {"mu_dtype": "bfloat16", "mu_rounding": "stochastic", "adaptive": True},
    ],
)
def test_muon_is_traced_under_strict_promotion(arguments):
    optimizer = with_metrics(helpers.any_muon(0.1, ns_steps=1, **arguments))
    params = {"w": MATRIX.astype("bfloat16"), "b": PARAMS["b"]}

    def update(params):
        state = optimizer.init(params)
        return optimizer.update(params, state, params)

    expected = jax.eval_shape(update, params)
    with jax.numpy_dtype_promotion("strict"):
        chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(update, params), expected)


@pytest.mark.slow
def test_sharded_parameters_are_updated_under_strict_promotion():
    """XLA traces what it partitions after `update` has returned."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (8, 16), "bfloat16")
    sharded = {"w": jax.device_put(x, NamedSharding(mesh, PartitionSpec("x")))}
    optimizer = muon(0.1, ns_steps=1)
    update = functools.partial(optimizer.update, state=optimizer.init(sharded), params=sharded)
    expected = jax.jit(update)(sharded)
    with jax.numpy_dtype_promotion("strict"):
        chex.assert_trees_all_equal(jax.jit(update)(sharded), expected)


def test_kernels_compute_under_strict_promotion():
    x = MATRIX.astype("bfloat16")
    for product in (functools.partial(syrk, x, beta=0.5, c_matrix=x @ x.T), lambda: gemm(x, x.T)):
        expected = product()
        with jax.numpy_dtype_promotion("strict"):
            chex.assert_trees_all_equal(product(), expected)


def test_integers_may_have_no_gradient():
    params = {"w": MATRIX, "count": jnp.zeros(3, int)}
    optimizer = muon(0.1)
    state = optimizer.init(params)
    updates, _ = jax.eval_shape(optimizer.update, {"w": MATRIX, "count": None}, state, params)
    assert updates["count"].shape == (3,)
