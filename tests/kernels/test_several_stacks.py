"""Products of several stacks in one launch, with the interpreter and for a described GPU."""

import dataclasses
import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from muon_jax import MuonDimensionNumbers, NewtonSchulz, scale_by_muon
from pallas_kernels import Implementation
from pallas_kernels._mosaic_gpu import products

SHAPES = ((2, 64, 192), (1, 64, 128), (2, 64, 64))


def integers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float16)


def interpreted(name):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return functools.partial(getattr(products, name), num_programs=2, interpret=interpret)


def as_it_is(name):
    return getattr(Implementation(("mosaic_gpu",)), name)


run_as = pytest.mark.parametrize(
    "run",
    [interpreted, pytest.param(as_it_is, marks=[pytest.mark.gpu, helpers.needs_hopper])],
)


@run_as
def test_gram_matrices_of_all_stacks_are_exact(run):
    stacks = [integers(i, *shape) for i, shape in enumerate(SHAPES)]
    alpha = jnp.array([1.0, 0.5, 2.0, 0.25, 1.0])
    high, low = run("syrk_of_stacks")(stacks, alpha=alpha, residual=True)
    wide = [np.asarray(x, np.float64) for x in stacks]
    exact = np.concatenate([x @ x.transpose(0, 2, 1) for x in wide]) * alpha[:, None, None]
    np.testing.assert_array_equal(np.asarray(high, np.float64) + np.asarray(low), exact)
    chex.assert_trees_all_equal(high, high.mT)


@run_as
@pytest.mark.parametrize("out_dtype", [None, jnp.float32])
def test_applications_to_all_stacks_are_exact(run, out_dtype):
    stacks = [integers(i, *shape) for i, shape in enumerate(SHAPES)]
    q = integers(9, 5, 64, 64)
    results = run("gemm_of_stacks")(q, stacks, out_dtype=out_dtype)
    begins = np.cumsum([0, *map(len, stacks)])
    for x, begin, result in zip(stacks, begins, results, strict=False):
        exact = np.asarray(q[begin : begin + len(x)], np.float64) @ np.asarray(x, np.float64)
        assert result.dtype == (out_dtype or jnp.float16)
        np.testing.assert_array_equal(np.asarray(result, np.float64), exact)


def gradients():
    """Returns gradients of matrices with one m and several n, some of them tall."""
    shapes = [(256, 256), (256, 1024), (1024, 256), (256, 512), (250, 512)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def updates_of(updates, **arguments):
    tx = scale_by_muon(**arguments)
    return jax.jit(tx.update)(updates, tx.init(updates))[0]


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "kernels"), [((), 3), ((2,), 7)], ids=["alone", "vmapped"])
@pytest.mark.parametrize(
    "ns_coeffs", helpers.mostly_nightly(["balanced", "standard"], ["balanced"])
)
def test_matrices_of_one_m_share_kernels(ns_coeffs, axis, kernels):
    """XXᵀ, the products between, and QX. Under `vmap` the first and the last are one for each n."""
    tx = scale_by_muon(ns_coeffs=NewtonSchulz(ns_coeffs, method="gram"))
    params = [jax.ShapeDtypeStruct((*axis, *x.shape), x.dtype) for x in gradients()[:4]]
    update, init = (jax.vmap(f) if axis else f for f in (tx.update, tx.init))
    with helpers.described_gpu("H200"):
        traced = jax.jit(update).trace(params, jax.eval_shape(init, params))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == kernels


def test_matrices_without_elements_need_no_kernel():
    tx = scale_by_muon(ns_coeffs="balanced", weight_dimension_numbers=MuonDimensionNumbers(-2, -1))
    params = [jax.ShapeDtypeStruct((0, 256, n), jnp.float32) for n in (256, 512)]
    with helpers.described_gpu("H200"):
        traced = jax.jit(tx.update).trace(params, jax.eval_shape(tx.init, params))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu_v2" not in text


@pytest.mark.gpu
@helpers.needs_hopper
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("ns_coeffs", ["balanced", "standard"])
def test_on_a_gpu_an_update_is_that_of_each_matrix_alone_bit_for_bit(ns_coeffs, method):
    iteration = NewtonSchulz(ns_coeffs, method=method, implementation="mosaic_gpu")
    together = updates_of(gradients(), ns_coeffs=iteration)
    alone = dataclasses.replace(iteration, max_group_bytes=0)
    chex.assert_trees_all_equal(together, updates_of(gradients(), ns_coeffs=alone))
    stacks = [jnp.stack([x, 2 - x]) for x in gradients()]
    tx = scale_by_muon(iteration)
    mapped, _ = jax.vmap(tx.update)(stacks, jax.vmap(tx.init)(stacks))
    chex.assert_trees_all_equal(together, jax.tree.map(lambda x: x[0], mapped))
