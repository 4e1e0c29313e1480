"""`NewtonSchulz(before=, after=)`: functions of the matrices around the iteration."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import Exchange, MuonDimensionNumbers, NewtonSchulz, newton_schulz, scale_by_muon

IN_FLOAT32 = functools.partial(NewtonSchulz, dtype="float32", method="standard")
MATRICES = MuonDimensionNumbers(-2, -1)
SHAPES = {"wide": (8, 24), "tall": (24, 8), "square": (8, 8), "layers": (4, 24, 8)}


@pytest.fixture(autouse=True)
def float32_products():  # GPUs would take TF32, which groups of matrices round otherwise
    with jax.default_matmul_precision("highest"):
        yield


def polar(x):
    """The polar factors of matrices, as five steps in float32 approximate them."""
    return newton_schulz(x, dtype="float32")


def rows_scaled(weights, x):
    """Multiplies the rows of stacks `(..., 8, n)`."""
    return weights[:, None] * x


def direction(u, **kwargs):
    optimizer = scale_by_muon(
        beta=0.0, nesterov=False, weight_dimension_numbers=MATRICES, momentum="ema", **kwargs
    )
    return jax.jit(optimizer.update)(u, optimizer.init(u))[0]


def wide(x):
    return x.mT if x.shape[-2] > x.shape[-1] else x


def assert_equal(results, expected):
    for name, x in expected.items():
        np.testing.assert_allclose(results[name], x, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("name", SHAPES)
def test_before_changes_what_is_orthogonalized(name):
    x = helpers.random_tree(SHAPES, 0)[name]
    result = newton_schulz(x, IN_FLOAT32(before=jnp.sign))
    np.testing.assert_allclose(result, polar(jnp.sign(x)), atol=2e-6)
    assert not np.allclose(result, polar(x), atol=0.1)


def test_after_gets_the_factor_and_the_matrix_from_before_before():
    u = helpers.random_tree(SHAPES, 0)
    iteration = IN_FLOAT32(before=jnp.sign, after=lambda o, x: o * x - 1)
    expected = {name: polar(jnp.sign(x)) * x - 1 for name, x in u.items()}
    assert_equal(direction(u, ns_coeffs=iteration), expected)
    assert_equal({"square": newton_schulz(u["square"], iteration)}, {"square": expected["square"]})


def test_tall_matrices_are_transposed():
    weights = jnp.linspace(0.5, 2.0, 8)
    u = helpers.random_tree(SHAPES, 0)
    iteration = IN_FLOAT32(before=functools.partial(rows_scaled, weights))
    expected = {}
    for name, x in u.items():
        made = polar(weights[:, None] * wide(x))
        expected[name] = made.mT if x.shape[-2] > x.shape[-1] else made
    assert_equal(direction(u, ns_coeffs=iteration), expected)


def test_arrays_of_a_partial_are_operands():
    u = helpers.random_tree({"w": (8, 24)}, 0)

    @jax.jit
    def update(u, weights):
        before = jax.tree_util.Partial(rows_scaled, weights)
        return direction(u, ns_coeffs=IN_FLOAT32(before=before))

    for scale in (1.0, 2.0):
        weights = jnp.linspace(0.5, scale, 8)
        expected = {"w": polar(weights[:, None] * u["w"])}
        assert_equal(update(u, weights), expected)
    assert helpers.count_of_programs(update) == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_matrices_are_those_of_one_device(kind):
    u = helpers.random_tree(SHAPES, 0)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    specs = {"wide": (None, "x"), "tall": ("x",), "square": ("x",), "layers": (None, "x")}
    weights = jnp.linspace(0.5, 2.0, 8)

    def run(u, weights):
        before = jax.tree_util.Partial(rows_scaled, weights)
        iteration = IN_FLOAT32(before=before, after=lambda o, x: o * jnp.sign(x))
        return direction(u, ns_coeffs=iteration)

    expected = run(u, weights)
    shardings = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}
    weights = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))
    assert_equal(jax.jit(run)(jax.device_put(u, shardings), weights), expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("ns_coeffs", ["standard", "balanced"])  # exchanged in 16 bits otherwise
def test_sharded_matrices_come_in_their_own_dtype_and_digits(kind, ns_coeffs):
    u = helpers.random_tree({"wide": (8, 24), "layers": (4, 24, 8)}, 0)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    weights = jax.device_put(jnp.linspace(0.5, 2.0, 8), NamedSharding(mesh, PartitionSpec("x")))

    def run(u, weights):
        before = jax.tree_util.Partial(rows_scaled, weights)
        iteration = NewtonSchulz(ns_coeffs, before=before, after=lambda o, x: x)
        return direction(u, ns_coeffs=iteration)

    expected = {name: x / 1 for name, x in u.items()}  # the momentum of the first step
    results = jax.jit(run)(jax.device_put(u, sharding), weights)
    for name, x in expected.items():
        np.testing.assert_array_equal(results[name], x, err_msg=name)


@pytest.mark.parametrize(
    "exchange", [Exchange("block"), Exchange(block_period=2)], ids=["block", "block_period"]
)
def test_matrices_are_not_cut_in_blocks(exchange):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    u = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec(None, "x")))}
    with pytest.raises(ValueError, match=r"\(before=, after=\) take whole matrices, and 'block'"):
        direction(u, ns_coeffs=NewtonSchulz(before=jnp.sign), shardings=exchange)


def test_arrays_of_numpy_in_a_partial_are_operands():
    u = helpers.random_tree({"w": (8, 24)}, 0)
    weights = np.linspace(0.5, 2.0, 8, dtype=np.float32)
    before = jax.tree_util.Partial(rows_scaled, weights)
    result = jax.jit(lambda u: direction(u, ns_coeffs=IN_FLOAT32(before=before)))(u)
    assert_equal(result, {"w": polar(weights[:, None] * u["w"])})


def test_programs_in_a_cache_are_told_apart_by_what_functions_compute():
    def named(factor):
        return lambda x: factor * x

    functions = [named(x) for x in (2.0, 3.0, np.linspace(1, 2, 24), np.linspace(1, 3, 24))]
    # Programs within programs have constants of their own.
    functions += [jax.jit(named(jnp.linspace(1, end, 4096)[:, None, None])) for end in (4, 5)]
    programs = [
        NewtonSchulz(before=function).programs_of_functions((8, 24), jnp.dtype(dtype))
        for function in functions
        for dtype in ("float32", "bfloat16")
    ]
    assert len({*programs}) == len(programs)
    again = NewtonSchulz(before=named(2.0)).programs_of_functions((8, 24), jnp.dtype("float32"))
    assert again == programs[0]


def test_a_function_of_a_traced_array_raises():
    def update(u, weights):
        return direction(u, ns_coeffs=NewtonSchulz(before=lambda x: weights[:, None] * x))

    with pytest.raises(TypeError, match=r"before must not close over a traced array.*Partial"):
        jax.jit(update)({"w": jnp.ones((8, 24))}, jnp.ones(8))


def test_a_function_that_does_not_hash_raises():
    class Unhashable(dict):
        def __call__(self, x):
            return x

    with pytest.raises(TypeError, match=r"before must be hashable.*Partial"):
        NewtonSchulz(before=Unhashable())


def test_matrices_do_not_stay_sharded():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    u = {"w": jax.device_put(jnp.ones((8, 24)), sharding)}
    with pytest.raises(ValueError, match=r"NewtonSchulz\(before=, after=\) take whole matrices"):
        direction(u, ns_coeffs=NewtonSchulz(before=jnp.sign), shardings=Exchange("gram"))


@pytest.mark.parametrize(
    ("field", "function"),
    [("before", lambda x: x.mT), ("after", lambda o, x: o.astype(jnp.bfloat16))],
)
def test_another_shape_or_dtype_raises(field, function):
    match = rf"NewtonSchulz\({field}=\) must return .*float32\[8, 24\], got"
    with pytest.raises(ValueError, match=match):
        newton_schulz(jnp.ones((8, 24)), NewtonSchulz(**{field: function}))


@pytest.mark.parametrize("field", ["before", "after"])
def test_what_is_no_function_raises(field):
    with pytest.raises(TypeError, match=rf"{field} must be a function of matrices, got 'sign'"):
        NewtonSchulz(**{field: "sign"})


def test_what_a_function_raises_says_where_and_what_it_got():
    x = jnp.ones((8, 24))
    with pytest.raises(ValueError, match=r"NewtonSchulz\(before=\) must return .*, got NoneType"):
        newton_schulz(x, NewtonSchulz(before=lambda x: None))
    for field, function, got in (
        ("before", lambda x: jnp.eye(24) @ x, "1 × float32[8, 24]"),
        ("after", lambda o: o, "2 × float32[8, 24]"),
    ):
        with pytest.raises(TypeError) as raised:
            newton_schulz(x, IN_FLOAT32(**{field: function}))
        note = f"This is in NewtonSchulz({field}=), which got {got}."
        assert note in raised.value.__notes__
