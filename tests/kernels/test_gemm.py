"""`gemm`: on the CPU its kernels run in Pallas' interpreters, of which Mosaic's finds races."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import gemm
from pallas_kernels._mosaic_gpu.config import MOSAIC_GEMM_CONFIGS, default_mosaic_gemm_config
from pallas_kernels._mosaic_gpu.products import gemm as mosaic_gpu_gemm
from pallas_kernels._triton import TRITON_GEMM_CONFIGS
from pallas_kernels._triton import gemm as triton_gemm

# What a launch looks like in a lowered program.
LAUNCHES = {"triton": "__gpu$xla.gpu.triton", "mosaic_gpu": "custom_call @mosaic_gpu"}

each_triton_config = pytest.mark.parametrize(
    "config", helpers.mostly_nightly(TRITON_GEMM_CONFIGS, TRITON_GEMM_CONFIGS[:2]), ids=str
)
each_config = pytest.mark.parametrize(
    "config", helpers.mostly_nightly(MOSAIC_GEMM_CONFIGS, MOSAIC_GEMM_CONFIGS[:1], ()), ids=str
)


def interpreted(a, b, config=MOSAIC_GEMM_CONFIGS[0], detect_races=False, **kwargs):
    interpret = plgpu.InterpretGPUParams(detect_races=detect_races)
    return mosaic_gpu_gemm(a, b, config=config, num_programs=3, interpret=interpret, **kwargs)


def triton(a, b, out_dtype=jnp.bfloat16, config=None):
    return triton_gemm(a, b, out_dtype=jnp.dtype(out_dtype), config=config, interpret=True)


def exact(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return (a @ b).astype(jnp.bfloat16)


def integers(seed, *shapes, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    return [helpers.integers(rng, shape, dtype) for shape in shapes]


def with_exact_product(*shapes):
    """A and B, integers in bfloat16, and A·B."""
    rng = np.random.default_rng(6)
    a, b = (rng.integers(-31, 32, shape) for shape in shapes)
    return jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16), (a @ b).astype(np.float64)


def operand(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@each_config
def test_every_config_is_exact_and_free_of_races(config):
    """Strips and tiles that end beyond the matrix, and more steps than the ring has slots."""
    a, b = integers(0, (2, 192, 640), (2, 640, 2 * config.tile_n + 64))
    chex.assert_trees_all_equal(interpreted(a, b, config=config, detect_races=True), exact(a, b))
    assert not helpers.found_races()


@each_config
@pytest.mark.parametrize("out_dtype", [jnp.float16, jnp.float32])
def test_sums_are_rounded_once_to_the_dtype_of_the_result(config, out_dtype):
    """They are exact in float32, and many neither in float16 nor in the operands' bfloat16."""
    a, b, product = with_exact_product((128, 64), (64, 3 * config.tile_n // 2))
    out = interpreted(a, b, config=config, out_dtype=jnp.dtype(out_dtype), detect_races=True)
    assert not helpers.found_races()
    chex.assert_trees_all_equal(out, product.astype(out_dtype))


@pytest.mark.slow
@each_triton_config
@pytest.mark.parametrize("sizes", [(100, 70, 300), (128, 64, 128)], ids=str)
def test_every_config_of_triton_is_exact_and_rounds_once(config, sizes):
    """Tiles that end beyond the matrices, and tiles that fit."""
    m, k, n = sizes
    a, b, product = with_exact_product((2, m, k), (2, k, n))
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        out = triton(a, b, dtype, config)
        chex.assert_trees_all_equal(out, product.astype(dtype))


def test_vmap_gives_triton_the_batch():
    a, b = integers(2, (2, 3, 16, 24), (3, 24, 40))
    out = jax.vmap(triton, (0, None))(a, b)
    chex.assert_trees_all_equal(out, exact(a, np.broadcast_to(b, (2, *b.shape))))
    with pytest.raises(NotImplementedError, match="'triton' has no derivative"):
        jax.grad(lambda a: triton(a, b, jnp.float32).sum())(a[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_any_sizes_are_padded(dtype):
    a, b = integers(1, (100, 70), (70, 130), dtype=dtype)
    out = interpreted(a, b)
    assert out.dtype == dtype
    chex.assert_trees_all_equal(out.astype(jnp.bfloat16), exact(a, b))


def test_vmap_gives_the_batch_and_may_leave_an_operand_out():
    a, b = integers(2, (2, 3, 64, 64), (3, 64, 128))
    out = jax.vmap(interpreted, (0, None))(a, b)
    chex.assert_trees_all_equal(out, exact(a, np.broadcast_to(b, (2, *b.shape))))


def test_it_says_that_it_has_no_derivative():
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' has no derivative.*'xla'"):
        jax.grad(lambda a: interpreted(a, a).sum())(jnp.ones((64, 64), jnp.bfloat16))


def test_by_xla_it_has_a_derivative():
    a, b = integers(3, (2, 5, 7), (2, 7, 3), dtype=jnp.float32)
    chex.assert_trees_all_equal(gemm(a, b).astype(jnp.bfloat16), exact(a, b))
    gradient = jax.grad(lambda b: gemm(a, b).sum())(b)
    chex.assert_trees_all_equal(gradient, np.broadcast_to(a.sum(1)[..., None], b.shape))


@pytest.mark.parametrize(
    ("shape", "n", "dtype", "gpu", "kernel"),
    [
        ((4096, 4096), 4096, jnp.bfloat16, "H200", "mosaic_gpu"),
        ((3, 4096, 4096), 11008, jnp.float16, "H200", "mosaic_gpu"),
        ((24, 2048, 2048), 2048, jnp.bfloat16, "H200", None),
        ((3072, 3072), 768, jnp.bfloat16, "H200", None),  # 72 tiles for 132 multiprocessors
        ((4096, 4096), 4088, jnp.bfloat16, "H200", None),
        ((4096, 4096), 4096, jnp.float32, "H200", None),
        ((4096, 4096), 4096, jnp.bfloat16, "A100", None),
        ((0, 4096, 4096), 4096, jnp.bfloat16, "H200", None),
        ((128, 128), 512, jnp.bfloat16, "H200", "triton"),
        ((128, 128), 512, jnp.bfloat16, "A100", "triton"),
        ((16, 256, 256), 256, jnp.float16, "H200", "triton"),
        ((16, 256, 256), 512, jnp.float16, "H200", None),
        ((100, 100), 512, jnp.bfloat16, "H200", None),  # rows do not start on 16 bytes
        ((64, 1024), 64, jnp.bfloat16, "H200", None),  # whose sums XLA splits
        ((128, 128), 512, jnp.float32, "H200", None),
    ],
    ids=str,
)
def test_none_is_a_kernel_where_it_runs_and_is_faster(shape, n, dtype, gpu, kernel):
    *batch, _, k = shape
    operands = operand(*shape, dtype=dtype), operand(*batch, k, n, dtype=dtype)
    with helpers.described_gpu(gpu):
        text = jax.jit(gemm).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    for implementation, launch in LAUNCHES.items():
        assert text.count(launch) == (kernel == implementation)


@pytest.mark.parametrize(
    ("size", "out_dtype", "kernel"),
    [
        (1024, "float16", True),
        (896, "float16", False),
        (1024, "bfloat16", False),
        (4096, "float32", False),
    ],
)
def test_none_is_the_kernel_where_it_spares_a_conversion(size, out_dtype, kernel):
    a = operand(size, size)
    with helpers.described_gpu("H200"):
        traced = jax.jit(functools.partial(gemm, out_dtype=out_dtype)).trace(a, a)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernel


@pytest.mark.parametrize(("implementation", "launch"), LAUNCHES.items())
def test_vmapped_it_lowers_to_one_launch_inside_a_shard_map_that_checks(implementation, launch):
    spec = PartitionSpec("x")
    function = jax.vmap(functools.partial(gemm, implementation=implementation))
    with helpers.described_gpu("H200"):
        mapped = jax.shard_map(function, in_specs=(spec, spec), out_specs=spec, check_vma=True)
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), spec)
        shapes = (4, 2, 64, 128), (4, 2, 128, 192)
        operands = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for s in shapes]
        traced = jax.jit(mapped).trace(*operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(launch) == 1


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "float64"])
def test_by_xla_too_a_result_of_more_bits_is_not_rounded_to_16(out_dtype):
    a, b, product = with_exact_product((32, 64), (64, 48))
    with jax.enable_x64(out_dtype == "float64"):
        out = gemm(a, b, out_dtype=out_dtype)
        twice = product.astype(jnp.bfloat16) if out_dtype == "float16" else product
        chex.assert_trees_all_equal(out, twice.astype(out_dtype))


@pytest.mark.parametrize(
    ("shape", "n", "tile_n"),
    [
        ((1, 2048, 2048), 2048, 256),  # one round, where 176 tiles of 192 columns are two
        ((96, 2048, 2048), 2048, 192),
        ((1, 2304, 2304), 2816, 128),
    ],
)
def test_the_tile_follows_the_number_of_rounds(shape, n, tile_n):
    assert default_mosaic_gemm_config(shape, n, num_programs=132).tile_n == tile_n


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gemm(jnp.ones(3), jnp.ones(3)), r"shape \(\.\.\., m, k\), got float32\[3\]"),
        (
            lambda: gemm(jnp.ones((2, 3), int), jnp.ones((3, 2))),
            r"float dtype .* got int32\[2, 3\]",
        ),
        (
            lambda: gemm(jnp.ones((2, 3)), jnp.ones((2, 3))),
            r"float32\[3\] and n columns .*\[2, 3\]",
        ),
        (lambda: gemm(jnp.ones((2, 3)), jnp.ones(())), r"b_matrix must be .*; got float32\[\]"),
        (
            lambda: gemm(jnp.ones((2, 2)), jnp.ones((2, 2)), out_dtype=int),
            r"out_dtype must be a float dtype, got int",
        ),
        (
            lambda: gemm(jnp.ones((2, 2)), jnp.ones((2, 2)), implementation="cublas"),
            r"one of .*'mosaic_gpu_mma', .*'xla'\] or None, got 'cublas'",
        ),
    ],
)
def test_wrong_calls_say_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("implementation", "dtype", "out_dtype", "message"),
    [
        ("mosaic_gpu", "float32", None, "float32 is neither bfloat16 nor float16"),
        ("triton", "complex64", "float32", "complex64 is not one of bfloat16, float16, float32"),
        ("triton", "bfloat16", "complex64", "out_dtype=complex64 is none of bfloat16, float16 and"),
    ],
)
def test_what_is_named_runs_or_says_why_not(implementation, dtype, out_dtype, message):
    a = jnp.ones((64, 64), dtype)
    with helpers.described_gpu("H200"), pytest.raises(NotImplementedError, match=message):
        gemm(a, a, out_dtype=out_dtype, implementation=implementation)


@pytest.mark.gpu
@helpers.needs_hopper
@each_config
@pytest.mark.parametrize("num_tiles", [0, 5])  # a result may have one block of columns
def test_on_a_gpu_every_config_is_exact_and_the_same_in_any_stack(config, num_tiles):
    a, b = integers(4, (5, 320, 512), (5, 512, num_tiles * config.tile_n + 64))
    chex.assert_trees_all_equal(mosaic_gpu_gemm(a, b, config=config), exact(a, b))
    for out_dtype in map(jnp.dtype, (jnp.float16, jnp.float32)):
        out = mosaic_gpu_gemm(a, b, out_dtype=out_dtype, config=config)
        chex.assert_trees_all_equal(out.astype(jnp.bfloat16), exact(a, b))
    a, b = (jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate((a, b)))
    together = mosaic_gpu_gemm(a, b, config=config)
    for other in MOSAIC_GEMM_CONFIGS:
        alone = mosaic_gpu_gemm(a[3], b[3], config=other)
        chex.assert_trees_all_equal(alone, together[3])


@pytest.mark.gpu
@helpers.needs_hopper
@each_triton_config
def test_on_a_gpu_every_config_of_triton_is_exact_and_the_same_as_the_other_kernel(config):
    a, b = integers(4, (5, 320, 512), (5, 512, 448))
    out_dtype = jnp.dtype("bfloat16")
    run = functools.partial(triton_gemm, out_dtype=out_dtype, config=config)
    chex.assert_trees_all_equal(run(a, b), exact(a, b))
    for dtype in (jnp.bfloat16, jnp.float16):
        keys = jax.random.split(jax.random.key(0))
        a, b = (jax.random.normal(k, x.shape, dtype) for k, x in zip(keys, (a, b), strict=True))
        run = functools.partial(triton_gemm, config=config, out_dtype=a.dtype)
        together = run(a, b)
        chex.assert_trees_all_equal(together, mosaic_gpu_gemm(a, b))
        chex.assert_trees_all_equal(run(a[3], b[3]), together[3])
