import functools
import json
import os
import re
import subprocess
import sys

import helpers
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from muon_jax import newton_schulz
from pallas_kernels import (
    IMPLEMENTATIONS,
    Implementation,
    _implementation,
    _tuning,
    select_implementation,
    syrk,
    syrkx,
    unsupported_reason,
)

MATRIX = jnp.ones((64, 128), jnp.bfloat16)


def operand(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_without_a_gpu_the_choice_is_xla_and_triton_says_why_not():
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    assert select_implementation(MATRIX).implementation == "xla"
    assert unsupported_reason("xla", MATRIX) is None
    assert unsupported_reason("triton", MATRIX) == "the default device is not a GPU"
    with pytest.raises(NotImplementedError, match="'triton' cannot run: the default"):
        syrk(MATRIX, implementation="triton")


IMPORTS = """
import sys
import jax.numpy as jnp
import muon_jax, pallas_kernels

x = jnp.ones((2, 64, 64), jnp.bfloat16)
pallas_kernels.gemm(pallas_kernels.syrk(x), x)
muon_jax.newton_schulz(x, "balanced")
for name in ("triton", "mosaic_gpu"):
    assert pallas_kernels.unsupported_reason(name, x)
print("jax.experimental.pallas" in sys.modules, "pallas_kernels._lowered" in sys.modules)
"""


def test_back_ends_are_not_imported_where_no_kernel_runs():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", IMPORTS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "False False\n"


def chosen(shape, dtype=jnp.bfloat16, **kwargs):
    return select_implementation(operand(shape, dtype), **kwargs).implementation


@pytest.mark.parametrize("gpu", helpers.GPUS)
def test_the_choice_follows_the_described_device(gpu):
    with helpers.described_gpu(gpu):
        assert unsupported_reason("triton", MATRIX) is None
        assert chosen((4096, 4096)) == ("mosaic_gpu" if gpu == "H200" else "triton")
        assert chosen((24, 1024, 4096)) == ("mosaic_gpu" if gpu == "H200" else "triton")
        assert chosen((4096, 4096), jnp.float32) == "xla"
        assert chosen((1001, 1500)) == ("mosaic_gpu" if gpu == "H200" else "xla")


def test_on_hopper_shapes_that_need_padding_go_where_it_costs_least():
    with helpers.described_gpu("H200"):
        assert chosen((16, 2048, 5464)) == "mosaic_gpu"  # A alone is padded
        assert chosen((4000, 4000)) == "triton"  # A and the result would be
        assert chosen((1001, 1504)) == "mosaic_gpu"  # of which the others load no row at a time
        assert chosen((512, 65536)) == "xla"  # which splits the sums


def test_measured_times_decide_where_there_are_any(monkeypatch):
    times = {"xla, not symmetrized": 1.0, "mosaic_gpu 128x160x4": 2.0, "triton": 3.0, "xla": 4.0}
    monkeypatch.setattr(_tuning, "_table", lambda device: {(2, 640, 1280, True): times})
    with helpers.described_gpu("H200"):
        assert select_implementation(operand((2, 640, 1280)), addend=True) == (
            "mosaic_gpu",
            "measured on an NVIDIA H200",
        )
        assert chosen((2, 640, 1280), addend=True, symmetrize_output=False) == "xla"
        assert select_implementation(operand((2, 640, 1280))).basis.startswith("modelled")
    with helpers.described_gpu("A100"):  # the fastest of those that run
        assert chosen((2, 640, 1280), addend=True) == "triton"


def test_an_implementation_is_asked_once_for_each_shape_dtype_and_device(monkeypatch):
    asked, answer = [], _implementation._REASONS["triton"]
    monkeypatch.setitem(_implementation._REASONS, "triton", lambda a: asked.append(a) or answer(a))
    operands = [operand((7, 1234, 56)), operand((7, 1234, 56), jnp.float32), operand((1234, 56))]
    for _ in range(2):
        for gpu in helpers.GPUS:
            with helpers.described_gpu(gpu):
                for a in operands:
                    assert unsupported_reason("triton", a) is None
                    assert select_implementation(a) == select_implementation(a, addend=True)
    assert len(asked) == len(operands) * len(helpers.GPUS)


def test_an_implementation_is_named_or_all_that_run():
    of_hopper = ("xla", "triton", "mosaic_gpu")
    names = {"A100": ("xla", "triton"), "H200": of_hopper, "B200": ("xla", "triton")}
    for gpu, expected in names.items():
        with helpers.described_gpu(gpu):
            assert Implementation.chosen(None, MATRIX).names == expected
            assert Implementation.chosen("triton", MATRIX).names == ("triton",)
            assert Implementation.chosen(None, operand((0, 64, 64))).names == ("xla",)
    with helpers.described_gpu("A100"):
        assert Implementation.chosen("mosaic_gpu", MATRIX).names == ("mosaic_gpu_mma",)
        with pytest.raises(NotImplementedError, match="'mosaic_gpu_tcgen05' cannot run: .*A100"):
            Implementation.chosen("mosaic_gpu_tcgen05", MATRIX)
        with pytest.raises(NotImplementedError, match="out_dtype=float64 is none of"):
            Implementation.chosen("triton", MATRIX, out_dtype=jnp.dtype("float64"))
    with pytest.raises(ValueError, match="one of .* got 'cuda'"):
        Implementation.chosen("cuda", MATRIX)


@pytest.mark.parametrize("gpu", helpers.OTHER_GPUS)
@pytest.mark.parametrize("ns_coeffs", ["standard", "balanced"])
def test_gpus_without_kernels_get_products_of_xla(gpu, ns_coeffs):
    _, platform = helpers.OTHER_GPUS[gpu]
    with helpers.described_gpu(gpu):
        for implementation in ("triton", "mosaic_gpu"):
            assert unsupported_reason(implementation, MATRIX)
        iteration = functools.partial(newton_schulz, ns_coeffs=ns_coeffs, dtype="float16")
        traced = jax.jit(iteration).trace(jax.ShapeDtypeStruct((256, 512), jnp.float32))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "custom_call" not in text and text.count("dot_general") >= 11
    assert not re.search(r"dot_general.*f32.*->", text)  # all products take float16


def test_every_shape_of_the_tables_has_a_choice_that_runs():
    tables = [*_tuning.TABLES.glob("*.json")]
    assert tables
    for path in tables:
        table = json.loads(path.read_text())
        device = jax.sharding.AbstractDevice(table["device"], 132, "gpu")
        mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            assert path == _tuning.table_path(table["device"])
            for entry in table["entries"]:
                a = operand(tuple(entry["shape"]))
                choice = select_implementation(a, addend=entry["addend"])
                assert choice.basis == f"measured on an {table['device']}"
                assert unsupported_reason(choice.implementation, a) is None


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((64, 64), jnp.float64, "dtype float64 is not one of bfloat16, float16, float32"),
        ((64, 64), jnp.complex64, "dtype complex64 is not one of"),
        ((0, 64, 64), jnp.bfloat16, "has no elements"),
    ],
)
def test_triton_states_its_limits(shape, dtype, reason):
    with helpers.described_gpu("H200"):
        assert reason in unsupported_reason("triton", operand(shape, dtype))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Tesla T4", "compute capability 8.0"),
        ("gfx942", "gfx942 is not an NVIDIA GPU"),
        ("Some GPU", "Unsupported GPU device kind: Some GPU"),
        ("AMD Instinct MI300X", "Unsupported GPU device kind"),
        ("Tesla V100-SXM2-16GB", "Unsupported GPU device kind"),
        ("Quadro RTX 8000", "Unsupported GPU device kind"),
    ],
)
def test_triton_needs_a_gpu_that_it_knows_since_ampere(kind, reason):
    device = jax.sharding.AbstractDevice(kind, 40, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert reason in unsupported_reason("triton", MATRIX)
        assert select_implementation(MATRIX).implementation == "xla"


@pytest.mark.parametrize("gpu", ["A100", "H200", "B200"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("shape", [(256, 128), (2, 100, 33)], ids=str)
def test_triton_lowers_for_gpus(gpu, dtype, shape):
    *batch, m, _ = shape
    function = functools.partial(syrk, beta=1.0, diagonal=2.0, implementation="triton")
    with helpers.described_gpu(gpu):
        traced = jax.jit(function).trace(operand(shape, dtype), operand((*batch, m, m), dtype))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize(
    ("implementation", "call"),
    [("triton", "__gpu$xla.gpu.triton"), ("mosaic_gpu", "@mosaic_gpu")],
)
def test_kernels_lower_inside_a_shard_map_that_checks(implementation, call):
    """As `jax.shard_map` does unless told otherwise: whether results vary over the mesh."""
    function = functools.partial(syrk, beta=1.0, implementation=implementation)
    spec = PartitionSpec("x")
    with helpers.described_gpu("H200"):
        mapped = jax.shard_map(function, in_specs=(spec, spec), out_specs=spec, check_vma=True)
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), spec)
        operands = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
            for shape in ((4, 64, 128), (4, 64, 64))
        ]
        traced = jax.jit(mapped).trace(*operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert call in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: syrk(jnp.ones(3)), r"shape \(\.\.\., m, n\), got float32\[3\]"),
        (lambda: syrk(jnp.ones((2, 3), jnp.int32)), r"float dtype .* got int32\[2, 3\]"),
        (lambda: syrkx(MATRIX, MATRIX.T), r"b_matrix must be bfloat16\[64, 128\].*\[128, 64\]"),
        (lambda: syrk(MATRIX, MATRIX), r"c_matrix must be bfloat16\[64, 64\]"),
        (lambda: syrk(MATRIX, jnp.ones((64, 64))), r"c_matrix must be bfloat16.*got\s+float32"),
        (lambda: syrk(MATRIX, beta=2.0), r"beta=2.0 multiplies c_matrix, which is None"),
        (
            lambda: syrk(MATRIX, (jnp.ones((64, 64), jnp.bfloat16),) * 2, beta=2.0),
            r"c_matrix is a tuple of 2 matrices: beta must be one of as many coefficients, got 2.0",
        ),
        (lambda: syrk(MATRIX, alpha=jnp.ones(2)), r"alpha must be a scalar.*got shape \(2,\)"),
        (
            lambda: syrk(MATRIX, implementation="cuda"),
            rf"one of {re.escape(str(sorted(IMPLEMENTATIONS)))}.*got 'cuda'",
        ),
        (
            lambda: unsupported_reason("gpu", MATRIX),
            rf"one of {re.escape(str(sorted(IMPLEMENTATIONS)))}.*got 'gpu'",
        ),
    ],
)
def test_wrong_calls_say_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
