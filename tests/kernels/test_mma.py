"""The kernels by mma, in an interpreter that knows neither mma nor cp.async, and lowered."""

import functools
import inspect
import json
import re
import sys

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from muon_jax import newton_schulz
from pallas_kernels import (
    _implementation,
    _tuning,
    gemm,
    select_implementation,
    syrk,
    unsupported_reason,
)
from pallas_kernels._mosaic_gpu import mma
from pallas_kernels._mosaic_gpu.config import (
    MMA_SYRKX_CONFIGS,
    MmaGemmConfig,
    MmaSyrkxConfig,
    measured_config,
)
from pallas_kernels._mosaic_gpu.ring import RingProgram

CHECKED = plgpu.InterpretGPUParams(detect_races=True)


def dot(sums, a, b):
    product = jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
    return sums + product


@pytest.fixture
def interpreter(monkeypatch):
    """Copies are TMA's, and barriers tell when they have come."""

    def await_copies(self, tile, slot):
        plgpu.barrier_wait(self.full.at[tile.turn, slot])
        self.commit()

    for name in ("copy", "commit"):
        monkeypatch.setattr(mma.MmaProgram, name, getattr(RingProgram, name))
    monkeypatch.setattr(mma.MmaProgram, "skip_copies", lambda self: None)
    monkeypatch.setattr(mma.MmaProgram, "await_copies", await_copies)
    monkeypatch.setattr(mma.MmaProgram, "mma", lambda self, *operands: dot(*operands))
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()


def random_case(seed):
    """Ragged sizes, several tiles for each program, and each part of the epilogue."""
    rng = np.random.default_rng([60, seed])
    batch, m, n = (int(x) for x in (rng.integers(1, 3), rng.integers(1, 400), rng.integers(1, 300)))
    dtype = (jnp.bfloat16, jnp.float16)[rng.integers(2)]
    a = helpers.integers(rng, (batch, m, n), dtype)
    cs = tuple(
        helpers.symmetric(helpers.integers(rng, (batch, m, m), dtype))
        for _ in range(rng.integers(3))
    )
    config = MmaSyrkxConfig(128, int(rng.choice([64, 128])), int(rng.integers(2, 5)))
    return rng, a, 2 * a if rng.integers(2) else None, cs, bool(rng.integers(2)), config


@pytest.mark.parametrize("seed", helpers.mostly_nightly(range(30), (0, 1)))
def test_random_symmetric_products_are_exact_and_free_of_races(interpreter, seed):
    rng, a, b, cs, residual, config = random_case(seed)
    kwargs = {"alpha": 0.5, "diagonal": 3.0, "beta": (-2.0, 0.25)[: len(cs)]}
    high, *low = mma.syrkx(
        a,
        b,
        cs,
        tuple(map(jnp.float32, (0.5, 3.0, *kwargs["beta"]))),
        symmetrize_output=True,
        residual=residual,
        config=config,
        num_programs=int(rng.integers(1, 5)),
        interpret=CHECKED,
    )
    exact = helpers.exact_syrkx(a, b, cs, **kwargs)
    chex.assert_trees_all_equal(high, exact.astype(a.dtype))
    for left in low:
        chex.assert_trees_all_equal(left, (exact - np.asarray(high, float)).astype(a.dtype))
    assert not helpers.found_races()


@pytest.mark.parametrize("tile_n", helpers.mostly_nightly([64, 128], [128]))
@pytest.mark.parametrize("out_dtype", helpers.mostly_nightly([jnp.bfloat16, jnp.float32], (), ()))
def test_other_products_are_exact_and_free_of_races(interpreter, tile_n, out_dtype):
    rng = np.random.default_rng(0)
    a, b = (helpers.integers(rng, shape, jnp.bfloat16) for shape in ((2, 130, 200), (2, 200, 260)))
    config = MmaGemmConfig(128, tile_n, 2)
    out = mma.gemm(a, b, out_dtype=out_dtype, config=config, num_programs=3, interpret=CHECKED)
    exact = np.asarray(a, float) @ np.asarray(b, float)
    chex.assert_trees_all_equal(out, exact.astype(out_dtype))
    assert not helpers.found_races()


def test_the_interpreter_finds_a_step_that_is_overwritten_while_it_is_read(interpreter):
    def await_copies(self, tile, slot):
        plgpu.barrier_wait(self.full.at[tile.turn, slot])  # but not for the other threads

    interpreter.setattr(mma.MmaProgram, "await_copies", await_copies)
    a, coefficients = jnp.ones((256, 256), jnp.bfloat16), (jnp.float32(1), jnp.float32(0))
    run = functools.partial(mma.syrkx, symmetrize_output=True, residual=False, interpret=CHECKED)
    helpers.assert_races_are_found(lambda: run(a, None, (), coefficients, num_programs=2))


def lowered(function, *shapes):
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("gpu", helpers.GPUS)
@pytest.mark.parametrize("function", [syrk, lambda a, **kwargs: gemm(a, a, **kwargs)])
def test_it_is_mosaic_gpu_but_on_hopper_and_blackwell(gpu, function):
    with helpers.described_gpu(gpu):
        for name in ("mosaic_gpu", "mosaic_gpu_mma"):
            text = lowered(functools.partial(function, implementation=name), (256, 256))
            assert text.count("@mosaic_gpu") == 1
        matrix = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
        assert unsupported_reason("mosaic_gpu", matrix) is None
        chosen = _implementation.kernel_of("mosaic_gpu")
        kernels = {"H200": "mosaic_gpu", "B200": "mosaic_gpu_tcgen05"}
        assert chosen == kernels.get(gpu, "mosaic_gpu_mma")


def test_a_table_of_the_device_decides(monkeypatch, tmp_path):
    """Which implementation runs, and which config; elsewhere None stays with Triton."""
    times = {"mosaic_gpu_mma 128x64x3": 1.0, "mosaic_gpu_mma 128x128x2": 2.0, "triton": 3.0}
    for name in ("a100", "b200"):
        entry = {"shape": (1, 2048, 2048), "addend": False, "microseconds": times}
        (tmp_path / f"nvidia_{name}.json").write_text(json.dumps({"entries": [entry]}))
        times = {"mosaic_gpu_tcgen05 128x128x4 in turns": 1.0, "triton": 3.0}
    monkeypatch.setattr(_tuning, "TABLES", tmp_path)
    monkeypatch.setattr(_tuning, "_table", inspect.unwrap(_tuning._table))
    monkeypatch.setattr(
        _implementation, "fastest_syrkx", inspect.unwrap(_implementation.fastest_syrkx)
    )
    with helpers.described_gpu("A100"):
        choice = select_implementation(jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16))
        assert choice == ("mosaic_gpu_mma", "measured on an NVIDIA A100")
        config = measured_config(MMA_SYRKX_CONFIGS, (1, 2048, 2048), addend=False)
        assert config == MmaSyrkxConfig(128, 64, 3)
        assert measured_config(MMA_SYRKX_CONFIGS, (2, 2048, 2048), addend=False) is None
    with helpers.described_gpu("B200"):
        choice = select_implementation(jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16))
        assert choice == ("mosaic_gpu_tcgen05", "measured on an NVIDIA B200")


@pytest.mark.parametrize("gpu", ["A100", "B200"])
def test_it_says_that_it_has_no_derivative(gpu):
    with helpers.described_gpu(gpu):
        name = _implementation.kernel_of("mosaic_gpu")
        function = functools.partial(syrk, implementation=name)
        matrix = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match=f"'{name}' has no derivative"):
            jax.eval_shape(jax.grad(lambda a: function(a).sum()), matrix)


@pytest.mark.parametrize("gpu", ["A100", "B200"])
@pytest.mark.parametrize(
    "ns_coeffs", helpers.mostly_nightly(["standard", "balanced"], ["standard"])
)
def test_an_iteration_by_name_has_kernels_for_all_products(gpu, ns_coeffs):
    """Chains in one launch are Hopper's. Sizes are padded once, for all products."""
    iteration = functools.partial(newton_schulz, ns_coeffs=ns_coeffs, implementation="mosaic_gpu")
    with helpers.described_gpu(gpu):
        text = lowered(iteration, (2, 200, 400))
    assert "@mosaic_gpu" in text and "dot_general" not in text and "syrk_chain" not in text
    pads = re.findall(r"stablehlo\.pad .*high = \[(.*?)\]", text)
    assert [high for high in pads if high != "0, 0, 0"] == ["0, 56, 56"]  # two columns at a time


@pytest.mark.parametrize("gpu", helpers.GPUS)
def test_it_takes_the_place_of_a_lowering_that_jax_has_removed(gpu, monkeypatch):
    large = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    with helpers.described_gpu(gpu):
        before = select_implementation(large).implementation
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr(jax.experimental.pallas, "triton", raising=False)
    jax.clear_caches()
    with helpers.described_gpu(gpu):
        assert "triton" in (reasons(large)["triton"] or "")
        monkeypatch.setattr(_implementation, "reasons_against", reasons)
        uncached = inspect.unwrap(_implementation.fastest_syrkx)
        monkeypatch.setattr(_implementation, "fastest_syrkx", uncached)
        after = select_implementation(large).implementation
        text = lowered(functools.partial(newton_schulz, dtype="bfloat16"), (1024, 1024))
    assert before == ("mosaic_gpu" if gpu == "H200" else "triton")
    expected = {"H200": "mosaic_gpu", "B200": "xla"}.get(gpu, "mosaic_gpu_mma")
    assert after == expected
    assert ("@mosaic_gpu" in text) == (expected != "xla") and "triton" not in text


def reasons(operand):
    return {name: reason(operand) for name, reason in _implementation._REASONS.items()}
