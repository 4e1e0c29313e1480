"""Matrices of one shape are orthogonalized together; the result is each one's own."""

import dataclasses
import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muon_jax import MuonDimensionNumbers, NewtonSchulz, describe, muon, scale_by_muon
from muon_jax._iteration.grouping import groups, map_by_shape
from muon_jax._iteration.normalization import total

SHAPES = {
    **{f"layer {i}/up": (16, 40) for i in range(6)},
    **{f"layer {i}/down": (40, 16) for i in range(6)},
    **{f"layer {i}/out": (16, 16) for i in range(6)},
    "experts": (3, 16, 40),
}
NUMBERS = {name: MuonDimensionNumbers(-2, -1) for name in SHAPES}


def gradients():
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in SHAPES.items()}


def updates(grads, **kwargs):
    optimizer = scale_by_muon(**{"weight_dimension_numbers": NUMBERS, **kwargs})
    return jax.jit(optimizer.update)(grads, optimizer.init(grads))[0]


# Libraries for GPUs sum a product otherwise in a stack than alone; float32 keeps that in the last
# digits.
@pytest.mark.slow
def test_each_gets_its_own_update():
    apart = updates(gradients(), ns_coeffs=NewtonSchulz(max_group_bytes=0, dtype="float32"))
    for name, update in updates(gradients(), ns_coeffs=NewtonSchulz(dtype="float32")).items():
        np.testing.assert_allclose(update, apart[name], rtol=1e-5, atol=1e-6, err_msg=name)


def assert_same_alone(m, n, dtype=jnp.float32, ns_coeffs=NewtonSchulz(), **kwargs):  # noqa: B008
    """Asserts that updates do not depend on the grouping nor on stacks, bit for bit."""
    shapes = {"square": (2, m, m), "wide": (2, m, n), "tall": (2, n, m), "one": (1, n, m)}
    stacks = helpers.random_tree(shapes, seed=0, dtype=dtype)
    matrices = {f"{name} {i}": x for name, stack in stacks.items() for i, x in enumerate(stack)}
    run = functools.partial(
        updates, weight_dimension_numbers=MuonDimensionNumbers(-2, -1), **kwargs
    )
    apart = dataclasses.replace(ns_coeffs, max_group_bytes=0)
    together, alone = run(stacks, ns_coeffs=ns_coeffs), run(matrices, ns_coeffs=apart)
    chex.assert_trees_all_equal(run(stacks, ns_coeffs=apart), together)
    chex.assert_trees_all_equal(run(matrices, ns_coeffs=ns_coeffs), alone)
    for name, update in alone.items():
        stack, index = name.split()
        chex.assert_trees_all_equal(update, together[stack][int(index)])


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA's products on CPUs")
@pytest.mark.parametrize(
    ("m", "n", "kwargs"),
    [
        (16, 40, {}),
        *(
            pytest.param(*case, marks=helpers.nightly)
            for case in (
                (33, 70, {"ns_coeffs": NewtonSchulz("balanced")}),
                (33, 70, {"ns_coeffs": NewtonSchulz(dtype="float32"), "dtype": jnp.bfloat16}),
                (128, 300, {"ns_coeffs": NewtonSchulz(method="gram")}),
                (128, 300, {"ns_coeffs": NewtonSchulz("aol", preconditioning="aol")}),
            )
        ),
    ],
    ids=str,
)
def test_on_cpus_results_are_the_same_alone_bit_for_bit(m, n, kwargs):
    assert_same_alone(m, n, **kwargs)


def test_a_nan_stays_in_its_matrix():
    grads = gradients()
    grads["layer 2/up"] = grads["layer 2/up"].at[3, 3].set(jnp.nan)
    grads["experts"] = grads["experts"].at[1, 0, 0].set(jnp.nan)
    bad = {name: np.isnan(update) for name, update in updates(grads).items()}
    assert bad.pop("layer 2/up").all()
    experts = bad.pop("experts")
    assert experts[1].all() and not experts[[0, 2]].any()
    assert not any(b.any() for b in bad.values())


@pytest.mark.parametrize(
    ("max_group_bytes", "groups"),
    [
        (2**30, 2),  # 15 of 16 × 40, 6 of 16 × 16
        (0, 19),
        (4 * 16 * 40 * 4, 5 + 1),  # 15 of 16 × 40 in equal parts of at most four
    ],
)
def test_groups_are_bounded(max_group_bytes, groups):
    optimizer = scale_by_muon(
        weight_dimension_numbers=NUMBERS, ns_coeffs=NewtonSchulz(max_group_bytes=max_group_bytes)
    )
    state = optimizer.init(gradients())
    text = str(jax.make_jaxpr(optimizer.update)(gradients(), state))
    assert text.count("name=orthogonalize") == groups


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ({(2048, 2048): 96, (8192, 2048): 48}, [16] * 6 + [16] * 3),
        ({(2048, 2048): 48, (2048, 8192): 72}, [12] * 4 + [12] * 6),
        ({(2048, 2048): 17}, [9, 8]),
        ({(1024, 65536): 10}, [4, 4, 2]),  # of 256 MiB each
        ({(4096, 4096): 16, (4096, 65536): 16}, [4] * 4 + [1] * 16),
    ],
    ids=str,
)
def test_groups_of_as_many_rows_are_equally_large(counts, sizes):
    stacks = [
        jax.ShapeDtypeStruct((1, *shape), jnp.float32)
        for shape, count in counts.items()
        for _ in range(count)
    ]
    assert [len(group) for group in groups(stacks, None)] == sizes


@pytest.mark.parametrize(
    ("counts", "max_group_bytes", "joined"),
    [
        # GPT-2, and with twice as many layers: attention needs less memory than the MLP.
        ({(768, 2304): 12, (768, 768): 12, (768, 3072): 24}, None, [[768, 2304, 3072]]),
        ({(768, 2304): 24, (768, 768): 24, (768, 3072): 48}, None, [[768, 2304], [3072]]),
        ({(64, 64): 3, (64, 128): 3, (128, 128): 2}, None, [[64, 128], [128]]),
        ({(64, 64): 3, (64, 128): 3, (128, 128): 2}, 0, [[64]] * 3 + [[128]] * 5),
        # Equal groups of one shape stay equal.
        ({(2048, 2048): 48, (2048, 8192): 24}, None, [[2048]] * 4 + [[8192]] * 2),
    ],
    ids=str,
)
def test_groups_of_one_m_are_joined_within_the_memory_of_the_largest(
    counts, max_group_bytes, joined
):
    stacks = [
        jax.ShapeDtypeStruct((1, *shape), jnp.float32)
        for shape, count in counts.items()
        for _ in range(count)
    ]
    seen = []

    def function(group):
        seen.append(sorted({max(x.shape) for x in group}))
        assert [x.shape[2] for x in group] == sorted((x.shape[2] for x in group), reverse=True)
        return group

    assert map_by_shape(function, stacks, max_group_bytes, lambda _: True) == stacks
    assert sorted(seen) == sorted(joined)


def test_groups_have_tall_matrices_first_and_one_dtype():
    shapes = [(2, 3, 5), (1, 5, 3), (4, 3, 5), (1, 3, 3), (2, 5, 3)]
    stacks = [jnp.full(shape, i, jnp.float32) for i, shape in enumerate(shapes)]
    stacks.append(jnp.full((1, 3, 5), 5, jnp.bfloat16))
    seen = []

    def function(group):
        seen.append(([len(x) for x in group], {x.dtype.name for x in group}))
        return [2 * x for x in group]

    for i, out in enumerate(map_by_shape(function, stacks, 1000)):
        assert out.shape == stacks[i].shape and out.dtype == stacks[i].dtype
        assert (out == 2 * i).all()
    assert seen == [([1], {"float32"}), ([1], {"bfloat16"}), ([1, 2, 2, 4], {"float32"})]


@pytest.mark.parametrize("ns_coeffs", ["standard", "polar_express"])
@pytest.mark.parametrize("shape", [(1024, 4096), (768, 3072), (1024, 1024)], ids=str)
def test_the_form_does_not_depend_on_the_group(ns_coeffs, shape):
    stack = {"stack": jax.ShapeDtypeStruct((64, *shape), jnp.float32)}
    numbers = MuonDimensionNumbers(-2, -1)
    one = {"one": jax.ShapeDtypeStruct(shape, jnp.float32)}
    (of_stack,), (of_one,) = (
        describe(params, ns_coeffs=ns_coeffs, muon_weight_dimension_numbers=numbers).groups
        for params in (stack, one)
    )
    assert (of_stack.shape, of_one.shape) == ((64, *shape), (1, *shape))
    assert of_stack.method == of_one.method == ("gram" if shape[0] < shape[1] else "standard")


def test_sums_are_the_same_in_any_order():
    rng = np.random.default_rng(0)
    x = np.exp(4 * rng.standard_normal((20, 1000))).astype(np.float32)
    exact = x.astype(np.float64).sum(-1).astype(np.float32)
    plain = {tuple(np.asarray(jnp.sum(rng.permuted(x, axis=-1), -1))) for _ in range(5)}
    assert len(plain) > 1
    for _ in range(5):
        chex.assert_trees_all_equal(jax.jit(total)(rng.permuted(x, axis=-1)), exact)


def test_muon_groups_what_it_gets_beside_adamw():
    params = {**gradients(), "bias": jnp.ones(16)}
    numbers = {**NUMBERS, "bias": None}

    def run(max_group_bytes):
        optimizer = muon(
            0.1,
            muon_weight_dimension_numbers=numbers,
            ns_coeffs=NewtonSchulz(max_group_bytes=max_group_bytes, dtype="float32"),
        )
        return optimizer.update(params, optimizer.init(params), params)[0]

    together, apart = run(2**30), run(0)
    assert together.keys() == params.keys()
    for name, update in together.items():
        np.testing.assert_allclose(update, apart[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "ns_coeffs", "implementation"),
    [
        ((64, 576), "standard", "triton"),
        ((64, 576), "balanced", "mosaic_gpu"),
        ((256, 256), "standard", "mosaic_gpu"),
        pytest.param((100, 64, 576), "standard", "triton", marks=helpers.nightly),
        pytest.param((2048, 8192), "standard", "mosaic_gpu", marks=helpers.nightly),
        # Of this one XLA would split the sums.
        pytest.param((64, 65536), "standard", "mosaic_gpu", marks=helpers.nightly),
    ],
    ids=str,
)
def test_on_hopper_all_products_are_by_kernels_that_do_not_depend_on_the_stack(
    shape, ns_coeffs, implementation
):
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    numbers = MuonDimensionNumbers(-2, -1)
    optimizer = scale_by_muon(ns_coeffs, weight_dimension_numbers=numbers)
    state = jax.eval_shape(optimizer.init, params)
    with helpers.described_gpu("H200"):
        described = describe(params, ns_coeffs=ns_coeffs, muon_weight_dimension_numbers=numbers)
        (group,) = described.groups
        lowered = jax.jit(optimizer.update).trace(params, state).lower(lowering_platforms=("cuda",))
    assert group.implementation == implementation
    assert "stablehlo.dot_general" not in lowered.as_text()


@pytest.mark.gpu
@helpers.needs_hopper
@pytest.mark.parametrize("ns_coeffs", ["standard", "balanced"])
@pytest.mark.parametrize(
    ("m", "n"),
    [
        (64, 64),
        (64, 576),
        (64, 16384),
        (128, 128),
        (200, 280),
        (256, 2304),
        (400, 640),
        (512, 512),
        (768, 3072),
    ],
)
def test_on_hopper_results_are_the_same_alone_bit_for_bit(m, n, ns_coeffs):
    assert_same_alone(m, n, ns_coeffs=ns_coeffs)
