"""Chains of symmetric products: plans and lists, in the interpreter, lowered, and on a GPU."""

import dataclasses
import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import muon_jax
from muon_jax._iteration.coefficients import SCHEDULES
from pallas_kernels import ChainLink, Implementation, syrk_with_residual
from pallas_kernels._mosaic_gpu import chain as mosaic_gpu
from pallas_kernels._mosaic_gpu.chain import LARGE, SMALL, ChainProgram, structure_of
from pallas_kernels._mosaic_gpu.small_chain import fits_shared_memory
from pallas_kernels._mosaic_gpu.work_list import deal_chains, lower_triangle, plan_chain

# Two addends that are inputs; a residual and its reader; a place that is used again.
LINKS = (
    ChainLink(0.5, ((2.0, 1), (-1.0, 2)), 1.0, residual=True),
    ChainLink(0.0, ((1.0, 3), (0.5, 4), (3.0, 0), (1.0, 2)), 0.0),
    ChainLink(0.25, (), -2.0),
    ChainLink(0.125, ((-1.0, 5), (2.0, 3)), 3.0),
)
IN_INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)
STEPS = [
    pytest.param(step, dtype, id=f"{name}-{dtype}-{i}")
    for name, schedule in SCHEDULES.items()
    for dtype in ("float16", "bfloat16")
    for i, step in enumerate(schedule.steps_in(dtype))
]


def by(name):
    return Implementation((name,))


def sparse(rng, shape):
    """Symmetric integers, few of them not zero, so that all of a chain is exact in float16."""
    x = rng.integers(-1, 2, shape) * (rng.random(shape) < 1 / shape[-1])
    return jnp.asarray(x + x.swapaxes(-1, -2) + 2 * np.eye(shape[-1]), jnp.float16)


def chain_of(step, operand):
    """Inputs and products of the polynomial of a step, with a residual that is small enough."""
    return step.chain(operand, operand / 4096 if step.residual_betas else None)


class InOneProgram(ChainProgram):
    """Waits by a barrier, once for each product of the matrices that go together.

    The interpreter has no semaphores.
    """

    def run(self):
        parts = self.together * self.num_tiles * self.config.tile_m // self.config.rows

        def with_barrier(barrier):
            program = dataclasses.replace(self, counters=barrier)
            super(ChainProgram, program).run()
            is_producer = self.warpgroup == self.config.num_warpgroups
            pl.when(is_producer)(lambda: plgpu.barrier_wait(barrier))

        pl.run_scoped(with_barrier, plgpu.Barrier(num_arrivals=parts), collective_axes="warpgroup")

    def wait_for_result_before(self, tile):
        begins = (tile.batch % self.together == 0) & (tile.row == 0)
        is_first = (tile.batch == 0) & (tile.product == 0)
        pl.when(begins & ~is_first)(lambda: plgpu.barrier_wait(self.counters))

    def count(self, tile):
        plgpu.barrier_arrive(self.counters)


def check_exactness(rng, shape, **options):
    """Compares with XLA, also where halves are rounded, and looks for races."""
    inputs = *(sparse(rng, shape) for _ in "12"), sparse(rng, shape[1:]) + jnp.float16(1025)
    options = {"num_programs": 1, "interpret": IN_INTERPRETER} | options
    got = mosaic_gpu.syrk_chain(inputs, LINKS, **options)
    chex.assert_trees_all_equal(got, by("xla").syrk_chain(inputs, LINKS))
    assert not helpers.found_races()


@pytest.mark.parametrize("config", helpers.mostly_nightly([SMALL, LARGE], [SMALL]))
def test_a_chain_is_exact_and_free_of_races(config, monkeypatch):
    m = 192 if config is LARGE else 128
    rng = np.random.default_rng(0)
    monkeypatch.setattr(mosaic_gpu, "num_together", lambda *_: 1)
    monkeypatch.setattr(mosaic_gpu, "ChainProgram", InOneProgram)
    check_exactness(rng, (2, m, m), config=config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "m", "num_programs"),
    [(6, 64, 1), (3, 128, 1), pytest.param(3, 128, 2, marks=helpers.nightly)],
)
def test_a_chain_in_shared_memory_is_exact_and_free_of_races(batch, m, num_programs):
    """Two of four teams at 64 have two matrices, and the only one at 128 has three."""
    check_exactness(np.random.default_rng(0), (batch, m, m), num_programs=num_programs)


@pytest.mark.nightly
@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize(("step", "dtype"), STEPS)
def test_both_kernels_of_chains_have_the_same_bits(step, dtype, m, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "num_together", lambda *_: 1)
    monkeypatch.setattr(mosaic_gpu, "ChainProgram", InOneProgram)
    x = jax.random.normal(jax.random.key(0), (2, m, m)) / (2 * m**0.5)
    inputs, links = chain_of(step, (x @ x.mT).astype(dtype))
    run = functools.partial(
        mosaic_gpu.syrk_chain,
        inputs,
        links,
        num_programs=1,
        interpret=IN_INTERPRETER,
    )
    got = run()
    assert not helpers.found_races()
    chex.assert_trees_all_equal(got, run(config=SMALL))


@pytest.mark.parametrize(("step", "dtype"), STEPS)
def test_every_chain_of_small_matrices_fits_in_shared_memory(step, dtype):
    inputs, links = chain_of(step, jnp.zeros((1, 64, 64), dtype))
    fits = [fits_shared_memory(m, structure_of(links), len(inputs)) for m in (64, 128, 192)]
    assert fits == [True, True, False]


@pytest.mark.parametrize(("m", "is_small"), [(64, True), (192, False)])
def test_all_matrices_of_a_vmap_are_in_one_launch(m, is_small):
    step = SCHEDULES["balanced"].steps[0]
    operand = jax.ShapeDtypeStruct((3, 5, m, m), jnp.float16)
    function = jax.vmap(lambda *r: by("mosaic_gpu").syrk_chain(*step.chain(*r)))
    with helpers.described_gpu("H200"):
        traced = jax.jit(function).trace(operand, operand)
        if is_small:  # the other kernel is lowered below
            lowered = traced.lower(lowering_platforms=("cuda",))
            assert lowered.as_text().count("@mosaic_gpu_v2") == 1
    assert str(traced.jaxpr).count("= lowered_kernel[") == 1
    assert ("_mosaic_gpu.small_chain" in str(traced.jaxpr)) == is_small


def test_a_plan_reads_what_the_structure_says():
    """Every place holds what is read from it, for chains of all shapes."""
    rng = np.random.default_rng(0)
    for all_in_places in [False, True] * 100:
        num_inputs, made, structure = 3, 3, []
        for _ in range(rng.integers(1, 9)):
            addends = tuple(rng.choice(made, rng.integers(0, min(made, 5)), replace=False).tolist())
            residual = bool(rng.integers(2))
            structure.append((addends, residual))
            made += 1 + residual
        plan, num_places = plan_chain(tuple(structure), num_inputs, all_in_places=all_in_places)
        first_place = 0 if all_in_places else num_inputs
        held, made, factor = {i: i for i in range(num_inputs)}, num_inputs, 0
        for (addends, residual), row in zip(structure, plan.tolist(), strict=True):
            sources = [row[0], *row[4 : 4 + row[3]]]
            assert [held[source] for source in sources] == [factor, *addends]
            stored = {
                first_place + place: made + i for i, place in enumerate(row[1:3]) if place >= 0
            }
            assert row[0] not in stored
            held |= stored
            factor = made
            made += 1 + residual
        assert (plan[-1, 1] >= 0) == all_in_places
        assert {*held} <= {*range(first_place + num_places)}


@pytest.mark.parametrize(("name", "num_places"), [("fast", 3), ("balanced", 5), ("accurate", 3)])
def test_results_take_few_places(name, num_places):
    products = SCHEDULES[name].steps[0].products
    structure = tuple((tuple(i for _, i in product.addends), False) for product in products)
    assert plan_chain(structure, 1)[1] == num_places


@pytest.mark.parametrize(("batch", "m", "tile"), [(1, 192, 64), (5, 384, 128), (40, 128, 128)])
def test_products_come_after_what_they_need(batch, m, tile):
    nums_addends, num_programs = (2, 0, 3), 7
    tiles = deal_chains(batch, m, tile, nums_addends, together=3, num_programs=num_programs)
    expected = {
        (image, row // 64, col // 64, product)
        for image in range(batch)
        for product in range(3)
        for row, col in lower_triangle(m, tile, tile)
    }
    assert {*map(tuple, tiles[:, :4].tolist())} == expected
    assert len(tiles) == len(expected)
    for image in range(batch):
        order = tiles[tiles[:, 0] == image, 3]
        assert (np.diff(order) >= 0).all()
        if image >= 3:  # has the places of the one three before
            (own,) = np.nonzero(tiles[:, 0] == image)
            (other,) = np.nonzero(tiles[:, 0] == image - 3)
            assert other.max() < own.min()
    for program in range(num_programs):
        own = tiles[program::num_programs]
        steps = m // 64 + np.array(nums_addends)[own[:, 3]]
        assert (own[:, 4] == np.cumsum(steps) - steps).all()


@pytest.mark.parametrize(
    ("batch", "m", "config"),
    [
        *[(1, 896, None), (1, 1024, None), (1, 1792, None), (2, 1024, None)],
        *[(200, 64, SMALL), (200, 192, SMALL), (4, 512, SMALL), (2, 768, SMALL)],
        *[(200, 128, LARGE), (7, 768, LARGE), (3, 1024, LARGE), (2, 1536, LARGE)],
    ],
)
def test_the_tiles_of_a_chain_are_those_that_are_fastest_on_an_h100(batch, m, config):
    assert mosaic_gpu.fastest_chain_config(batch, m, 132) is config


@pytest.mark.slow
def test_an_update_of_gpt2_has_few_kernels():
    shapes = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    params = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes for _ in range(12)]
    with helpers.described_gpu("H200"):
        tx = muon_jax.muon(1e-3, ns_coeffs="balanced")
        state = jax.eval_shape(tx.init, params)
        lowered = (
            jax.jit(tx.update).trace(params, state, params).lower(lowering_platforms=("cuda",))
        )
    # All matrices are one group: a kernel for XXᵀ, the chain, and a kernel for QX.
    assert lowered.as_text().count("@mosaic_gpu_v2") == 3


@pytest.mark.gpu
@helpers.needs_hopper
@pytest.mark.parametrize(
    ("batch", "m"),
    [(3, 64), (1000, 64), (1, 128), (300, 128), (3, 192), (30, 384), (6, 1024), (1, 1984)],
)
def test_on_a_gpu_one_launch_has_the_bits_of_one_for_each_product(batch, m, monkeypatch):
    step = SCHEDULES["balanced"].steps[0]
    x = jax.random.normal(jax.random.key(0), (batch, m, m)) / (2 * m**0.5)

    def function(*r):
        return by("mosaic_gpu").syrk_chain(*step.chain(*r), symmetrize_output=False)

    r, low = syrk_with_residual(x.astype(jnp.float16))
    results = []
    for config in (None, SMALL, LARGE):
        fits = fits_shared_memory if config else lambda *_: False
        monkeypatch.setattr(mosaic_gpu, "fits_shared_memory", fits)
        monkeypatch.setattr(mosaic_gpu, "fastest_chain_config", lambda *_, config=config: config)
        jax.clear_caches()
        results += [jax.jit(function)(r, low) for _ in range(3)]
    for other in results[1:]:
        chex.assert_trees_all_equal(other, results[0])
    jax.clear_caches()
