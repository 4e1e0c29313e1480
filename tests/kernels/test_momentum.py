"""The momentum and what the iteration reads of it, in one pass."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from muon_jax import (
    MuonDimensionNumbers,
    NewtonSchulz,
    Split,
    _scale_by_muon,
    muon,
    scale_by_muon,
)
from muon_jax._transforms import chain
from pallas_kernels import _momentum
from pallas_kernels._momentum import Layout, accumulate
from pallas_kernels.device import Device

WEIGHTS = np.array([0.9, 0.5, 0.7, 0.25], np.float32)
# On GPUs the kernels run.
INTERPRET = jax.default_backend() != "gpu"
interpreted = functools.partial(accumulate, interpret=INTERPRET)
GPU = Device("gpu", "", 0, "", None)


def arrays(shapes, dtype, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(scale * rng.standard_normal(shape), dtype) for shape in shapes]


@np.errstate(invalid="ignore")
def in_float64(gradients, momenta):
    """The new M and U by the formula."""
    w = WEIGHTS.astype(np.float64)
    pairs = [(np.float64(g), np.float64(m)) for g, m in zip(gradients, momenta, strict=True)]
    new = [w[0] * m + w[1] * g for g, m in pairs]
    return new, [w[2] * m + w[3] * g for m, (g, _) in zip(new, pairs, strict=True)]


def assert_right(gradients, momenta, layout, results, wrong=()):
    """Checks all matrices but those at the places `wrong`, which are NaN."""
    new, stack, scales = results
    expected, u = in_float64(gradients, momenta)
    for got, exact, m in zip(new, expected, momenta, strict=True):
        assert got.dtype == m.dtype
        largest = abs(exact[np.isfinite(exact)]).max(initial=0.0)
        atol = float(jnp.finfo(m.dtype).eps) * largest
        np.testing.assert_allclose(np.float64(got), exact, rtol=0, atol=atol)
    matrices = [
        matrix.T if transposed else matrix
        for of_array, transposed in zip(u, layout.transposed, strict=True)
        for matrix in of_array
    ]
    assert stack.shape == (len(matrices), *layout.shape) and stack.dtype == layout.dtype
    for i, (x, scale, exact) in enumerate(zip(stack, scales, matrices, strict=True)):
        if i in wrong:
            assert np.isnan(np.float64(x)).all()
            continue
        m, n = exact.shape
        x, scale = np.float64(x), float(scale)
        largest = abs(x).max()
        assert not x[m:].any() and not x[:, n:].any()
        if exact.any():
            assert 2.0**-layout.exponent / 4 <= largest <= 2.0**-layout.exponent
        assert np.log2(scale) % 1 == 0
        # Rounded to 16 bits once, and in float16 to multiples of 2⁻²⁴.
        eps = float(jnp.finfo(layout.dtype).eps)
        bound = eps / 2 * abs(scale * exact) + (2.0**-25 if eps < 2**-8 else 0)
        assert (abs(x[:m, :n] - scale * exact) <= 1.001 * bound + 1e-6 * largest).all()


@pytest.mark.parametrize(
    ("shapes", "transposed", "shape"),
    [
        ([(1, 64, 128)] * 2, [False] * 2, (64, 128)),
        ([(1, 128, 64), (2, 128, 64), (1, 64, 128)], [True, True, False], (64, 128)),
        ([(3, 100, 200), (1, 200, 100)], [False, True], (128, 256)),
        ([(1, 24, 40)] * 14, [False] * 14, (24, 40)),  # two launches of seven
        ([(1, 24, 40), (1, 40, 24)] * 2, [False, True] * 2, (24, 40)),  # no neighbours are alike
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "dtypes",
    helpers.mostly_nightly(
        ["float32 float32 float16", "bfloat16 float32 bfloat16", "float16 bfloat16 float16"],
        {"float32 float32 float16"},
    ),
)
def test_it_is_the_formula_in_place(shapes, transposed, shape, dtypes):
    of_gradients, of_momenta, of_stack = dtypes.split()
    gradients = arrays(shapes, of_gradients, 0, scale=300.0)
    momenta = arrays(shapes, of_momenta, 1)
    layout = Layout(tuple(transposed), shape, jnp.dtype(of_stack), 3)
    results = interpreted(gradients, momenta, WEIGHTS, layout)
    assert_right(gradients, momenta, layout, results)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(100, 200), (96, 160)])  # blocks of 32 end where the latter do
def test_what_the_sample_misses_is_computed_again(sizes, transposed):
    shape = (2, *(sizes[::-1] if transposed else sizes))
    gradients, momenta = arrays([shape] * 3, "float32", 0), arrays([shape] * 3, "float32", 1)
    # Blocks of the sample are on the diagonal; this entry is in none of them.
    gradients[0] = gradients[0].at[1, -1, 0].set(1e6)
    gradients[1] = 1e-30 * gradients[1].at[0].set(0.0).at[0, -1, 0].set(1.0)  # else zero
    momenta[1] = 0.0 * momenta[1]
    gradients[2] = gradients[2].at[0].set(0.0).at[1, -1, 0].set(jnp.inf)
    momenta[2] = momenta[2].at[0].set(0.0)
    layout = Layout((transposed,) * 3, (128, 256), jnp.dtype("float16"), 2)
    results = interpreted(gradients, momenta, WEIGHTS, layout)
    assert_right(gradients, momenta, layout, results, wrong=(5,))


def test_a_matrix_does_not_depend_on_the_others():
    shapes = [(1, 64, 128)] * 5
    gradients, momenta = arrays(shapes, "float32", 0), arrays(shapes, "float32", 1)
    gradients[2] = gradients[2].at[0, -1, 0].set(1e6)
    layout = Layout((False,) * 5, (64, 128), jnp.dtype("float16"), 2)
    weights = np.array([0.5, 0.25, 2.0, 1.0], np.float32)  # with which products are exact
    new, stack, scales = interpreted(gradients, momenta, weights, layout)
    for i in range(5):
        alone = layout._replace(transposed=(False,))
        own = interpreted([gradients[i]], [momenta[i]], weights, alone)
        np.testing.assert_array_equal(new[i], own[0][0])
        np.testing.assert_array_equal(stack[i], own[1][0])
        assert scales[i] == own[2][0]


def test_vmap_has_the_definition_and_derivatives_an_error():
    shapes = [(3, 1, 64, 128)] * 2
    gradients, momenta = arrays(shapes, "float32", 0), arrays(shapes, "float32", 1)
    layout = Layout((False,) * 2, (64, 128), jnp.dtype("float16"), 2)
    run = functools.partial(interpreted, weights=WEIGHTS, layout=layout)
    new, stack, scales = jax.vmap(lambda g, m: run(g, m))(gradients, momenta)
    for i in range(3):
        own = [x[i] for x in gradients], [x[i] for x in momenta]
        assert_right(*own, layout, ([x[i] for x in new], stack[i], scales[i]))
    with pytest.raises(NotImplementedError, match="pass implementation='xla' to differentiate"):
        jax.grad(lambda g: run(g, momenta)[2].sum())([x[0] for x in gradients])


# In an optimizer.

NUMBERS = MuonDimensionNumbers(-2, -1)
SHAPES = {
    "tall": (96, 40),
    "tall_too": (96, 40),
    "wide": (40, 96),
    "square": (40, 40),
    "experts": (3, 40, 96),
    "by_columns": (96, 40),
    "convolution": (2, 2, 10, 96),
    "heads": (40, 4, 24),
    "qkv": (48, 144),
}
VIEWS = dict.fromkeys(SHAPES, NUMBERS) | {
    "by_columns": MuonDimensionNumbers(1, 0),
    "convolution": MuonDimensionNumbers((0, 1, 2), 3),
    "heads": MuonDimensionNumbers(0, (1, 2)),
    "qkv": Split(-1, (48, 48, 48)),
}


@pytest.fixture
def by_interpreted_kernels(monkeypatch):
    """Makes optimizers take the kernels, interpreted, and the products XLA's."""
    calls = []

    def run(*args, **kwargs):
        calls.append(args)
        return accumulate(*args, **kwargs, interpret=INTERPRET)

    def accumulates(self, stack):
        return self.implementation != "xla" and stack.dtype.itemsize < 8

    monkeypatch.setattr(_momentum, "accumulate", run)
    monkeypatch.setattr(NewtonSchulz, "accumulates", accumulates)
    monkeypatch.setattr(_scale_by_muon, "current", lambda: GPU)
    return calls


def updates_of(optimizer, gradients, params, steps=3):
    # Without a mesh, a program may be for all devices, and arrays may be sharded.
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))):
        state = optimizer.init(params)
        update = jax.jit(optimizer.update)
        for _ in range(steps - 1):
            _, state = update(gradients, state, params)
        return update(gradients, state, params)


@pytest.mark.parametrize(
    "arguments",
    [
        {"ns_coeffs": "balanced", "nesterov": False},
        *(
            pytest.param(arguments, marks=pytest.mark.nightly)
            for arguments in (
                {},
                {"ns_coeffs": NewtonSchulz(method="gram"), "momentum": "ema"},
                {"momentum": "heavy_ball", "nesterov": False, "preconditioning": "aol"},
                {"ns_coeffs": {"tall": "fast", ".*": "standard"}, "mu_dtype": "bfloat16"},
            )
        ),
    ],
    ids=str,
)
def test_an_update_is_that_of_xla(arguments, by_interpreted_kernels):
    gradients = helpers.random_tree(SHAPES, 0)
    optimizer = scale_by_muon(weight_dimension_numbers=VIEWS, eps=1e-7, **arguments)
    updates, state = updates_of(optimizer, gradients, gradients)
    taken = {g.shape for call in by_interpreted_kernels for g in call[0]}
    assert (1, 48, 144) not in taken and {(1, 96, 40), (3, 40, 96), (1, 40, 96)} <= taken
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NewtonSchulz, "accumulates", lambda *_: False)
        expected, expected_state = updates_of(optimizer, gradients, gradients)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, gradients)
    for name, got in updates.items():
        error = np.linalg.norm(np.float64(got) - np.float64(expected[name]))
        assert error <= 0.02 * np.linalg.norm(np.float64(expected[name])), name
    for got, exact in zip(*map(jax.tree.leaves, (state, expected_state)), strict=True):
        assert got.dtype == exact.dtype
        np.testing.assert_allclose(np.float64(got), np.float64(exact), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec()], ids=str)
def test_explicit_axes_of_one_device_change_nothing(spec, by_interpreted_kernels):
    gradients = helpers.random_tree({name: SHAPES[name] for name in ("tall", "wide", "qkv")}, 0)
    views = {name: VIEWS[name] for name in gradients}
    optimizer = optax.inject_hyperparams(scale_by_muon)(
        beta=0.9,
        weight_dimension_numbers=views,  # an array, on which the weights depend
    )
    expected, of_auto = updates_of(optimizer, gradients, gradients)
    by_interpreted_kernels.clear()
    jax.clear_caches()  # of programs on other meshes of one device
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:1])
    there = jax.device_put(gradients, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        updates, state = there, optimizer.init(there)
        for _ in range(3):
            updates, state = jax.jit(optimizer.update)(there, state, there)
    taken = {g.shape for call in by_interpreted_kernels for g in call[0]}
    assert {(1, 96, 40), (1, 40, 96)} <= taken
    assert all(jax.typeof(updates[name]) == jax.typeof(there[name]) for name in there)
    chex.assert_trees_all_close(jax.device_get(updates), expected, atol=1e-5)
    chex.assert_trees_all_close(jax.device_get(state), of_auto, atol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        {"adaptive": True},
        {"mu_dtype": "int8"},
        {"mu_dtype": "bfloat16", "mu_rounding": "stochastic"},
        {"ns_coeffs": NewtonSchulz(implementation="xla")},
    ],
    ids=str,
)
def test_what_the_kernel_does_not_do_is_xla_s(arguments, by_interpreted_kernels):
    gradients = helpers.random_tree({"wide": (40, 96)}, 0)
    updates_of(scale_by_muon(**arguments), gradients, gradients, steps=1)
    assert not by_interpreted_kernels


def test_matrices_of_a_shape_are_one_group_with_or_without_the_kernel(by_interpreted_kernels):
    shapes = {"qkv": (40, 120), "out": (40, 40), "up": (40, 96), "down": (96, 40)}
    views = dict.fromkeys(shapes, NUMBERS) | {"qkv": Split(-1, (40, 40, 40))}
    gradients = helpers.random_tree(shapes, 0)
    optimizer = scale_by_muon(weight_dimension_numbers=views)
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))):
        text = str(jax.make_jaxpr(optimizer.update)(gradients, optimizer.init(gradients)))
    assert text.count("name=orthogonalize") == 2
    taken = {g.shape for call in by_interpreted_kernels for g in call[0]}
    assert taken == {(1, 40, 96), (1, 96, 40)}


def on_gpu(name="H200"):
    axis_types, device = (AxisType.Auto,), helpers.GPUS[name]
    mesh = AbstractMesh((1,), ("x",), axis_types=axis_types, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def lowered_names(optimizer, shapes):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    with on_gpu():
        state = jax.eval_shape(optimizer.init, params)
        jaxpr = jax.make_jaxpr(optimizer.update)(params, state, params)
    text = str(jaxpr)
    return [text.count(f"name=momentum_{kind}") for kind in ("sample", "pass", "redo")]


def test_kernels_grow_with_shapes():
    shapes = {f"{i}": (768, 3072) for i in range(24)} | {f"t{i}": (3072, 768) for i in range(12)}
    optimizer = scale_by_muon("balanced")
    # The wide ones are two launches of one kernel, which is printed once.
    assert lowered_names(optimizer, shapes) == [2, 2, 2]
    assert lowered_names(optimizer, {"a": (768, 768)}) == [1, 1, 1]
    assert lowered_names(optimizer, {"a": (100, 300)}) == [1, 1, 1]
    by_xla = scale_by_muon(NewtonSchulz("balanced", implementation="xla"))
    assert lowered_names(by_xla, shapes) == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("H200", "float32"),
        pytest.param("H200", "bfloat16", marks=pytest.mark.slow),
        pytest.param("A100", "float32", marks=pytest.mark.nightly),
    ],
)
def test_it_lowers_for_gpus(name, dtype):
    optimizer = scale_by_muon("balanced", weight_dimension_numbers=VIEWS)
    params = {key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in SHAPES.items()}
    with on_gpu(name):
        state = jax.eval_shape(optimizer.init, params)
        traced = jax.jit(optimizer.update).trace(params, state)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert all(f"momentum_{kind}" in text for kind in ("sample", "pass", "redo"))


@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec()], ids=str)
def test_it_lowers_on_explicit_axes_of_one_device(spec):
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=helpers.GPUS["H200"])
    sharding = NamedSharding(mesh, spec)
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for name, shape in {"wide": (512, 1024), "tall": (1024, 512)}.items()
    }
    optimizer = scale_by_muon("balanced")
    with jax.sharding.use_abstract_mesh(mesh):
        state = jax.eval_shape(optimizer.init, params)
        traced = jax.jit(optimizer.update).trace(params, state)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert all(f"momentum_{kind}" in text for kind in ("sample", "pass", "redo"))


@pytest.mark.parametrize(
    ("of_gradients", "of_momenta", "coeffs", "kernels"),
    [
        ("float32", "float32", "balanced", 1),
        ("float32", "bfloat16", "balanced", 0),
        ("float32", "bfloat16", "standard", 1),  # whose X is bfloat16
        ("bfloat16", "bfloat16", "balanced", 1),
        ("float16", "float16", "balanced", 0),
    ],
)
def test_what_is_computed_again_loses_nothing(of_gradients, of_momenta, coeffs, kernels):
    gradients = {"a": jax.ShapeDtypeStruct((256, 256), of_gradients)}
    optimizer = scale_by_muon(coeffs, mu_dtype=of_momenta)
    with on_gpu():
        state = jax.eval_shape(optimizer.init, gradients)
        text = str(jax.make_jaxpr(optimizer.update)(gradients, state))
    assert text.count("name=momentum_redo") == kernels


def test_leaves_of_adamw_that_differ_in_more_than_shape_stay_apart(monkeypatch):
    monkeypatch.setattr(chain, "current", lambda: GPU)
    params = helpers.random_tree({"a": (8,), "b": (8,)}, 0)
    optimizer = muon(0.02, muon_weight_dimension_numbers=dict.fromkeys(params))
    expected = optimizer.update(params, optimizer.init(params), params)[0]
    # Of one device each, outside jit. On a machine of one device that is the same one twice.
    devices = jax.devices()[0], jax.devices()[-1]
    apart = {k: jax.device_put(x, d) for (k, x), d in zip(params.items(), devices, strict=True)}
    updates, _ = optimizer.update(apart, optimizer.init(apart), apart)
    assert tuple(x.device for x in updates.values()) == devices
    # In a shard_map over one device, which knows that b does not vary.
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"a": PartitionSpec("x"), "b": PartitionSpec()}

    def update(params):
        return optimizer.update(params, optimizer.init(params), params)[0]

    in_map = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=specs))(params)
    for found in (updates, in_map):
        for name, x in expected.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-6)


def test_small_equal_leaves_of_adamw_share_launches(monkeypatch):
    shapes = {f"bias_{i}": (24,) for i in range(5)} | {"scale": (40,), "large": (300, 300)}
    gradients = helpers.random_tree(shapes, 0)
    numbers = dict.fromkeys(shapes)
    optimizer = muon(0.02, adam_weight_decay=0.1, muon_weight_dimension_numbers=numbers)
    params = helpers.random_tree(shapes, 1)
    expected = updates_of(optimizer, gradients, params)
    monkeypatch.setattr(chain, "current", lambda: GPU)
    with on_gpu():
        state = jax.eval_shape(optimizer.init, params)
        text = str(jax.make_jaxpr(optimizer.update)(gradients, state, params))
    assert text.count("f32[5,24]") and not text.count("f32[2,")
    got = updates_of(optimizer, gradients, params)
    for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=2e-6, atol=1e-9)
