"""The Hopper kernel in its interpreter, which checks for races, and lowered for an H200."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _tuning, syrk, unsupported_reason
from pallas_kernels._mosaic_gpu.config import (
    MOSAIC_SYRKX_CONFIGS,
    MosaicSyrkxConfig,
    default_mosaic_syrkx_config,
    predict_syrkx_microseconds,
)
from pallas_kernels._mosaic_gpu.products import syrkx as mosaic_gpu_syrkx

SQUARE_BLOCKS = [config for config in MOSAIC_SYRKX_CONFIGS if config.block_n == 64]
QUICK = [MosaicSyrkxConfig(64, 64, 8)]
# In turns, and with blocks that are not square.

by_mosaic = functools.partial(syrk, implementation="mosaic_gpu")
checked = functools.partial(helpers.interpreted_mosaic, num_programs=2, detect_races=True)


def names(config):
    return config.name


def matrices(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("config", helpers.mostly_nightly(MOSAIC_SYRKX_CONFIGS, QUICK), ids=names)
def test_every_config_is_exact_and_free_of_races(config):
    """Ragged strips and tiles, several for each program, and more steps than the ring has slots."""
    rng = np.random.default_rng(0)
    batch, m, n = (2, 320, 64) if config.tile_n < 160 else (1, 448, 128)
    a = helpers.integers(rng, (batch, m, n), jnp.bfloat16)
    c = helpers.symmetric(helpers.integers(rng, (batch, m, m), jnp.bfloat16))
    alpha = rng.integers(1, 4, batch).astype(np.float32)

    @jax.jit
    def function(alpha):
        return checked(a, None, c, alpha=alpha, beta=-2.0, diagonal=3.0, config=config)

    expected = helpers.exact_syrkx(a, None, c, alpha=alpha, beta=-2.0, diagonal=3.0)
    chex.assert_trees_all_equal(function(alpha), expected.astype(jnp.bfloat16))
    assert not helpers.found_races()


@pytest.mark.gpu
@helpers.needs_hopper
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("num_cs", [0, 1, 2, 6])
def test_on_a_gpu_every_config_has_the_same_result_bit_for_bit(num_cs, residual):
    """The diagonal takes away what alpha·A·Aᵀ has there: the last digit of that is seen."""
    keys = jax.random.split(jax.random.key(0), 1 + num_cs)
    signs, *cs = (jax.random.normal(key, (2, 448, 448)) for key in keys)
    a = (10 * jnp.sign(signs)).astype(jnp.float16)
    cs = tuple(helpers.symmetric(c.astype(jnp.float16)) for c in cs)
    alpha = jnp.float32(0.7)
    diagonal = -alpha * 44_800
    betas = tuple(map(jnp.float32, (0.4, -0.4, 0.9, 0.1, 0.2, 0.6)[:num_cs]))
    first, *others = (
        mosaic_gpu_syrkx(
            a,
            None,
            cs,
            (alpha, diagonal, *betas),
            symmetrize_output=False,
            residual=residual,
            config=config,
        )
        for config in MOSAIC_SYRKX_CONFIGS
    )
    for other in others:
        chex.assert_trees_all_equal(other, first)


@pytest.mark.parametrize(
    "sizes",
    helpers.mostly_nightly([(64, 64, 8), (128, 128, 6, True), (128, 160, 4)], [(64, 64, 8)]),
)
def test_two_addends_and_a_residual_are_exact_and_free_of_races(sizes):
    rng = np.random.default_rng(4)
    config = MosaicSyrkxConfig(*sizes)
    a = helpers.integers(rng, (320, 64), jnp.bfloat16)
    cs = tuple(helpers.symmetric(helpers.integers(rng, (320, 320), jnp.bfloat16)) for _ in "12")
    kwargs = {"alpha": 513.0, "beta": (-2.0, 3.0), "diagonal": 3.0}
    exact = helpers.exact_syrkx(a, None, cs, **kwargs)
    high, low = checked(a, None, cs, config=config, residual=True, **kwargs)
    chex.assert_trees_all_equal(high, exact.astype(jnp.bfloat16))
    residual = exact - np.asarray(high, np.float64)
    chex.assert_trees_all_equal(low, residual.astype(jnp.bfloat16))
    assert np.any(residual)
    assert not helpers.found_races()


@pytest.mark.parametrize("config", helpers.mostly_nightly(SQUARE_BLOCKS, QUICK), ids=names)
def test_two_operands_are_exact_and_free_of_races(config):
    a = helpers.symmetric(helpers.integers(np.random.default_rng(1), (192, 192), jnp.bfloat16))
    b = 2 * a  # commutes with a
    out = checked(a, b, config=config, diagonal=-1.0)
    expected = helpers.exact_syrkx(a, b, diagonal=-1.0).astype(jnp.bfloat16)
    chex.assert_trees_all_equal(out, expected)
    assert not helpers.found_races()


def test_of_two_operands_the_lower_triangle_counts():
    rng = np.random.default_rng(2)
    a, b = (helpers.integers(rng, (130, 70), jnp.float16) for _ in range(2))  # A·Bᵀ ≠ B·Aᵀ
    out = checked(a, b, config=MosaicSyrkxConfig(64, 64, 2))
    chex.assert_trees_all_equal(out, helpers.exact_syrkx(a, b).astype(jnp.float16))


def test_the_interpreter_finds_the_races_of_a_kernel_that_does_not_wait(monkeypatch):
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda *args, **kwargs: None)
    a = jnp.ones((256, 64), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        checked(a, config=MosaicSyrkxConfig(64, 64, 2)).block_until_ready()
    assert helpers.found_races() or "RACE DETECTED" in str(error.value)  # JAX 0.11, or since 0.12


def test_vmap_gives_the_batch():
    rng = np.random.default_rng(3)
    a = helpers.integers(rng, (2, 3, 100, 40), jnp.bfloat16)
    alpha = rng.integers(1, 4, (2, 3)).astype(np.float32)
    out = jax.vmap(lambda a, alpha: helpers.interpreted_mosaic(a, alpha=alpha), (1, 1), 1)(a, alpha)
    chex.assert_trees_all_equal(out, helpers.interpreted_mosaic(a, alpha=alpha))


def test_it_says_that_it_has_no_derivative():
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' has no derivative.*'xla'"):
        jax.grad(lambda a: helpers.interpreted_mosaic(a).sum())(jnp.ones((5, 5), jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(4096, 1024), (3, 100, 40)], ids=str)
def test_vmapped_it_lowers_to_one_launch_for_an_h200(dtype, shape):
    m = shape[-2]
    operands = [matrices((2, *size), dtype) for size in (shape, (*shape[:-2], m, m))]
    with helpers.described_gpu("H200"):
        traced = jax.jit(jax.vmap(by_mosaic)).trace(*operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("gpu", ["V100", "T4"])
def test_gpus_that_no_kernel_runs_on_are_named(gpu):
    kind = helpers.OTHER_GPUS[gpu][0].device_kind
    with helpers.described_gpu(gpu):
        reason = unsupported_reason("mosaic_gpu", matrices((64, 64)))
        assert reason == (
            f"{kind} is not known to be an NVIDIA GPU of compute capability 8.0 or higher, which a"
            " described GPU states only as jax_default_device"
        )
        with pytest.raises(NotImplementedError, match=f"'mosaic_gpu' cannot run: .*{kind}"):
            jax.eval_shape(by_mosaic, matrices((64, 64)))


@pytest.mark.parametrize(
    ("kind", "supported"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H200", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA H800", True),
        ("NVIDIA H20", True),
        ("NVIDIA GB200", False),
        ("NVIDIA L40S", False),
    ],
)
def test_hopper_gpus_are_known_by_their_names(kind, supported):
    device = jax.sharding.AbstractDevice(kind, 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        reason = unsupported_reason("mosaic_gpu", matrices((64, 64)))
    assert (reason is None) == supported


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((64, 64), jnp.float32, "the dtype float32 is neither bfloat16 nor float16"),
        ((64, 0), jnp.bfloat16, "the shape (64, 0) has no elements"),
    ],
)
def test_it_states_its_limits(shape, dtype, reason):
    with helpers.described_gpu("H200"):
        assert unsupported_reason("mosaic_gpu", matrices((64, 64))) is None
        assert unsupported_reason("mosaic_gpu", matrices(shape, dtype)) == reason


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((96, 64, 4), "tile_m must be 64 or 128, got 96"),
        ((128, 288, 2), "tile_n must be a multiple of 32, at most 256, got 288"),
        ((128, 160, 4, True), "tile_n must be a multiple of 32, at most 128, got 160"),
        ((64, 80, 4), "tile_n must be a multiple of 32, .*got 80"),
        ((64, 64, 1), "num_stages must be at least 2, .*num_stages=1"),
        ((128, 256, 5), "num_stages must .*fit in shared memory, .*num_stages=5"),
    ],
)
def test_a_config_is_validated(sizes, message):
    with pytest.raises(ValueError, match=message):
        MosaicSyrkxConfig(*sizes)


def test_two_operands_need_square_blocks():
    a = jnp.ones((64, 64), jnp.bfloat16)
    for config in set(MOSAIC_SYRKX_CONFIGS) - set(SQUARE_BLOCKS):
        assert config.block_n == 32
        with pytest.raises(ValueError, match="config must have a block_n of 64 for A·Bᵀ, got"):
            helpers.interpreted_mosaic(a, a, config=config)


def test_configs_have_names_of_their_own():
    assert MosaicSyrkxConfig(128, 224, 4).name == "mosaic_gpu 128x224x4"
    assert MosaicSyrkxConfig(128, 128, 6, in_turns=True).name == "mosaic_gpu 128x128x6 in turns"
    assert len({config.name for config in MOSAIC_SYRKX_CONFIGS}) == len(MOSAIC_SYRKX_CONFIGS)


@pytest.mark.parametrize("addend", [False, True])
def test_the_default_config_is_the_fastest_that_was_measured(monkeypatch, addend):
    narrow, wide = MosaicSyrkxConfig(64, 64, 8), MosaicSyrkxConfig(128, 224, 4)
    times = {narrow.name: 9.0, wide.name: 8.0, "xla": 1.0, "triton": 2.0}
    asked = []

    def lookup(shape, *, addend):
        asked.append((shape, addend))
        return times

    monkeypatch.setattr(_tuning, "lookup", lookup)
    shape = (2, 512, 256)
    assert default_mosaic_syrkx_config(shape, addend=addend) == wide
    assert asked == [(shape, addend)]
    # Of those that can be used.
    assert wide.block_n == 32
    config = default_mosaic_syrkx_config(shape, addend=addend, mirrored_on_diagonal=True)
    assert config == narrow


@pytest.mark.parametrize("times", [None, {"xla": 1.0}], ids=["unmeasured", "others measured"])
@pytest.mark.parametrize("shape", [(1, 256, 256), (1, 4096, 4096), (24, 1024, 4096)], ids=str)
def test_elsewhere_the_default_config_is_the_one_of_the_model(monkeypatch, times, shape):
    monkeypatch.setattr(_tuning, "lookup", lambda shape, *, addend: times)
    for addend in (False, True):
        predicted = {
            config: predict_syrkx_microseconds(shape, config, addend=addend)
            for config in MOSAIC_SYRKX_CONFIGS
        }
        config = default_mosaic_syrkx_config(shape, addend=addend)
        assert predicted[config] == min(predicted.values())
        config = default_mosaic_syrkx_config(shape, addend=addend, mirrored_on_diagonal=True)
        assert predicted[config] == min(predicted[config] for config in SQUARE_BLOCKS)
