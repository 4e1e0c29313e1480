"""The kernels by tcgen05 in their interpreter, which checks for races."""

import chex
import helpers
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _reference
from pallas_kernels._mosaic_gpu import tcgen05
from pallas_kernels._mosaic_gpu.tcgen05 import Tcgen05SyrkxProgram

CHECKED = plgpu.InterpretGPUParams(detect_races=True)
# A·Bᵀ without addends, and A·Aᵀ with two and a residual, several tiles for each program.
SEEDS = helpers.mostly_nightly(range(50), (21, 32))


class ReadsBeforeTheSumsAreDone(Tcgen05SyrkxProgram):
    """A program that waits for the sums of a tile too late."""

    def _take_turn(self, tile):
        store = self.storing(tile)
        product = plgpu.async_load_tmem(self._place(tile), layout=self.layout)
        plgpu.wait_load_tmem()
        plgpu.barrier_wait(self.done.at[tile.turn])
        plgpu.barrier_arrive(self.free.at[tile.turn])
        store(product)


class MultipliesBeforeTheSumsAreRead(Tcgen05SyrkxProgram):
    """A program that frees the place of the sums of a tile too early."""

    def _take_turn(self, tile):
        store = self.storing(tile)
        plgpu.barrier_wait(self.done.at[tile.turn])
        plgpu.barrier_arrive(self.free.at[tile.turn])
        product = plgpu.async_load_tmem(self._place(tile), layout=self.layout)
        plgpu.wait_load_tmem()
        store(product)


class StoresBeforeTheBuffersAreWritten(Tcgen05SyrkxProgram):
    """A program that does not commit its buffers."""

    def commit(self):
        pass


@pytest.mark.parametrize("seed", SEEDS)
def test_a_symmetric_product_is_exact_and_free_of_races(seed):
    rng = np.random.default_rng(seed)
    num_cs, has_b, residual = (int(rng.integers(stop)) for stop in (3, 2, 2))
    dtype = (jnp.bfloat16, jnp.float16)[rng.integers(2)]
    batch, m, n = (int(rng.integers(1, stop)) for stop in (3, 401, 401))
    a, b = (helpers.integers(rng, (batch, m, n), dtype) for _ in range(2))
    cs = [helpers.symmetric(helpers.integers(rng, (batch, m, m), dtype)) for _ in range(num_cs)]
    alpha = rng.choice([0.5, 513.0])  # rounds seldom, and often
    coefficients = tuple(map(jnp.float32, (alpha, 2.0, -1.0, 0.25)[: 2 + num_cs]))
    operands = (a, b if has_b else None, tuple(cs), coefficients)
    options = {"symmetrize_output": True, "residual": bool(residual)}
    num_programs = int(rng.integers(1, 5))
    found = tcgen05.syrkx(*operands, **options, num_programs=num_programs, interpret=CHECKED)
    chex.assert_trees_all_equal(found, _reference.syrkx(*operands, **options))
    assert not helpers.found_races()


@pytest.mark.parametrize("seed", SEEDS)
def test_another_product_is_exact_and_free_of_races(seed):
    rng = np.random.default_rng(seed)
    dtype = (jnp.bfloat16, jnp.float16)[rng.integers(2)]
    out_dtype = jnp.dtype((dtype, jnp.float32)[rng.integers(2)])
    batch, m, k, n = (int(rng.integers(1, stop)) for stop in (3, 401, 401, 401))
    a, b = (helpers.integers(rng, (batch, *shape), dtype) for shape in ((m, k), (k, n)))
    num_programs = int(rng.integers(1, 5))
    out = tcgen05.gemm(a, b, out_dtype=out_dtype, num_programs=num_programs, interpret=CHECKED)
    chex.assert_trees_all_equal(out, _reference.gemm(a, b, out_dtype=out_dtype))
    assert not helpers.found_races()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "program",
    [
        ReadsBeforeTheSumsAreDone,
        MultipliesBeforeTheSumsAreRead,
        StoresBeforeTheBuffersAreWritten,
    ],
)
def test_races_of_wrong_programs_are_found(program):
    a, coefficients = jnp.ones((384, 64), jnp.bfloat16), (jnp.float32(1.0), jnp.float32(0.0))
    options = {"symmetrize_output": True, "residual": False, "num_programs": 1}
    options |= {"program": program, "interpret": CHECKED}
    helpers.assert_races_are_found(lambda: tcgen05.syrkx(a, None, (), coefficients, **options))
