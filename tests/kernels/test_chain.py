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
from muon_jax._iteration.fitted import SCHEDULES
from pallas_kernels import syrk_with_residual
from pallas_kernels._chain import Link, syrk_chain
from pallas_kernels._mosaic_gpu import chain as mosaic_gpu
from pallas_kernels._mosaic_gpu.chain import LARGE, SMALL, plan_chain
from pallas_kernels._mosaic_gpu.chain_program import ChainProgram
from pallas_kernels._mosaic_gpu.work_list import deal_chains, lower_triangle

# Two addends that are inputs; a residual and its reader; a place that is used again.
LINKS = (
    Link(0.5, ((2.0, 1), (-1.0, 2)), 1.0, residual=True),
    Link(0.0, ((1.0, 3), (0.5, 4), (3.0, 0), (1.0, 2)), 0.0),
    Link(0.25, (), -2.0),
    Link(0.125, ((-1.0, 5), (2.0, 3)), 3.0),
)
STRUCTURE = tuple((tuple(c for _, c in link.addends), link.residual) for link in LINKS)


def sparse(rng, shape):
    """Symmetric integers, few of them not zero, so that all of a chain is exact in float16."""
    x = rng.integers(-1, 2, shape) * (rng.random(shape) < 1 / shape[-1])
    return jnp.asarray(x + x.swapaxes(-1, -2) + 2 * np.eye(shape[-1]), jnp.float16)


def coefficients(links):
    values = ((link.alpha, link.diagonal, *(beta for beta, _ in link.addends)) for link in links)
    return tuple(tuple(map(jnp.float32, row)) for row in values)


class InOneProgram(ChainProgram):
    """Waits by a barrier, once for each product of the matrices that go together.

    The interpreter has no semaphores.
    """

    @staticmethod
    def make_counters(number):
        return number

    def run(self):
        parts = self.together * self.num_tiles * self.config.tile_m // self.config.rows

        def with_barrier(barrier):
            program = dataclasses.replace(self, counters=barrier)
            super(InOneProgram, program).run()
            is_producer = self.warpgroup == self.config.num_warpgroups
            pl.when(is_producer)(lambda: plgpu.barrier_wait(barrier))

        pl.run_scoped(with_barrier, plgpu.Barrier(num_arrivals=parts), collective_axes="warpgroup")

    def wait_for_result_before(self, tile):
        begins = (tile.batch % self.together == 0) & (tile.row == 0)
        is_first = (tile.batch == 0) & (tile.product == 0)
        pl.when(begins & ~is_first)(lambda: plgpu.barrier_wait(self.counters))

    def count(self, tile):
        plgpu.barrier_arrive(self.counters)


@pytest.mark.parametrize("config", helpers.mostly_nightly([SMALL, LARGE], [SMALL]))
def test_a_chain_is_exact_and_free_of_races(config, monkeypatch):
    m = 192 if config is LARGE else 128
    rng = np.random.default_rng(0)
    monkeypatch.setattr(mosaic_gpu, "num_together", lambda *_: 1)
    first, second = (sparse(rng, (2, m, m)) for _ in "12")
    shared = sparse(rng, (m, m)) + jnp.float16(1025)  # halves are rounded beside it
    run = functools.partial(
        mosaic_gpu.mosaic_syrk_chain,
        config=config,
        num_programs=1,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
        program_type=InOneProgram,
    )
    got = run((first, second, shared), STRUCTURE, coefficients(LINKS))
    chex.assert_trees_all_equal(
        got, syrk_chain((first, second, shared), LINKS, implementation="xla")
    )
    assert not helpers.found_races()


def test_a_plan_reads_what_the_structure_says():
    """Every place holds what is read from it, for chains of all shapes."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_inputs, made, structure = 3, 3, []
        for _ in range(rng.integers(1, 9)):
            addends = tuple(rng.choice(made, rng.integers(0, min(made, 5)), replace=False).tolist())
            residual = bool(rng.integers(2))
            structure.append((addends, residual))
            made += 1 + residual
        plan, num_places = plan_chain(tuple(structure), num_inputs)
        held, made, factor = {}, num_inputs, 0

        def content(source, held=held, num_inputs=num_inputs):
            return source if source < num_inputs else held[source - num_inputs]

        for (addends, residual), row in zip(structure, plan.tolist(), strict=True):
            assert [content(row[0]), *map(content, row[4 : 4 + row[3]])] == [factor, *addends]
            assert row[0] - num_inputs not in (row[1], row[2]) or factor < num_inputs
            factor = made
            held |= {row[1]: made} if row[1] >= 0 else {}
            held |= {row[2]: made + 1} if row[2] >= 0 else {}
            made += 1 + residual
        assert plan[-1, 1] == -1
        assert {*held} <= {*range(num_places)}


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
    [(200, 64, SMALL), (200, 192, SMALL), (200, 128, LARGE), (1, 896, SMALL), (7, 768, LARGE)],
)
def test_tiles_are_large_where_that_pays(batch, m, config):
    assert mosaic_gpu.default_chain_config(batch, m, 132) is config


def test_an_update_of_gpt2_has_few_kernels():
    shapes = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    params = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes for _ in range(12)]
    with helpers.described_gpu("H200"):
        tx = muon_jax.muon(1e-3, ns_coeffs="balanced")
        state = jax.eval_shape(tx.init, params)
        lowered = (
            jax.jit(tx.update).trace(params, state, params).lower(lowering_platforms=("cuda",))
        )
    # Gram matrices and applications of up and down, and of the others; one chain for both.
    assert lowered.as_text().count("@mosaic_gpu_v2") == 5


@pytest.mark.gpu
@helpers.needs_hopper
@pytest.mark.parametrize(("batch", "m"), [(3, 192), (30, 384), (6, 1024), (1, 1984)])
def test_on_a_gpu_one_launch_has_the_bits_of_one_for_each_product(batch, m, monkeypatch):
    step = SCHEDULES["balanced"].steps[0]
    x = jax.random.normal(jax.random.key(0), (batch, m, m)) / (2 * m**0.5)
    function = functools.partial(
        step.polynomial, symmetrize_output=False, implementation="mosaic_gpu"
    )
    r, low = syrk_with_residual(x.astype(jnp.float16))
    results = []
    for config in (None, SMALL, LARGE):
        monkeypatch.setattr(mosaic_gpu, "chain_is_faster", lambda *_, config=config: bool(config))
        monkeypatch.setattr(mosaic_gpu, "default_chain_config", lambda *_, config=config: config)
        jax.clear_caches()
        results += [jax.jit(function)(r, low) for _ in range(3)]
    for other in results[1:]:
        chex.assert_trees_all_equal(other, results[0])
    jax.clear_caches()
