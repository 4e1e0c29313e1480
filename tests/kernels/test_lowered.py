"""Lowered kernels that are kept: the same programs in every context, and files that are damaged."""

import functools
import inspect
import re

import helpers
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_kernels import _lowered
from pallas_kernels._lowered import CustomCall
from pallas_kernels._mosaic_gpu import ring
from pallas_kernels._mosaic_gpu.chain import launch_chain
from pallas_kernels._mosaic_gpu.products import gemm, launch_mosaic_gemm

SQUARES = (2, 64, 64)
# Without their jit, which keeps what it has traced.
GEMM = functools.partial(
    inspect.unwrap(launch_mosaic_gemm),
    out_dtype=jnp.dtype("float16"),
    config=None,
    num_programs=132,
    interpret=None,
)
CHAIN = functools.partial(
    inspect.unwrap(launch_chain),
    others=(),
    coefficients=jnp.ones((2, 2, 3)),
    structure=(((), False), ((0,), False)),
    config=None,
    num_programs=132,
    interpret=None,
)


def matmul(a, b):
    return GEMM(a, (b,))


CALL = CustomCall({"module": "TUzvUgoA", "flag": True, "other": False}, [[3], [4, 5]])


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder of kernels beside an empty compilation cache, and no kernel kept."""
    monkeypatch.setattr(_lowered, "_kept", {})
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "pallas_kernels"
    jax.config.update("jax_compilation_cache_dir", before)


def fail(*_, **__):
    raise AssertionError("a kernel is lowered again")


def text_of(function, *shapes, sharding=None) -> str:
    """The program for a described GPU, which is traced anew."""
    operands = [jax.ShapeDtypeStruct(shape, jnp.float16, sharding=sharding) for shape in shapes]
    traced = jax.jit(lambda *x: function(*x)).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


# A chain has scratch in global memory.
@pytest.mark.parametrize(
    ("function", "shapes"),
    [(matmul, [SQUARES, SQUARES]), (CHAIN, [SQUARES])],
    ids=["gemm", "chain"],
)
def test_a_program_is_the_same_whether_its_kernel_is_lowered_kept_or_read(
    function, shapes, folder, monkeypatch
):
    with helpers.described_gpu("H200"):
        with monkeypatch.context() as patched:
            patched.setattr(ring, "call_lowered", lambda kernel, _, *operands: kernel(*operands))
            by_pallas = text_of(function, *shapes)
        assert not folder.exists()
        lowered = text_of(function, *shapes)
        assert len([*folder.iterdir()]) == 1
        monkeypatch.setattr(_lowered, "_lower_anew", fail)
        assert text_of(function, *shapes) == lowered
        monkeypatch.setattr(_lowered, "_kept", {})
        assert text_of(function, *shapes) == lowered
    if jax.__version_info__ < (0, 12):  # which numbers the kernels of a process, in their code
        lowered, by_pallas = (
            re.sub(r'(kernel_hash|module) = "[^"]*"', "", x) for x in (lowered, by_pallas)
        )
    assert lowered == by_pallas


def test_a_kernel_is_kept_for_vmap_and_shard_map(folder, monkeypatch):
    """Kernels for the shards of two devices are those for one device."""
    device, spec = helpers.GPUS["H200"], PartitionSpec("x")
    with helpers.described_gpu("H200"):
        (call,) = calls_of(text_of(gemm, SQUARES, SQUARES))
        monkeypatch.setattr(_lowered, "_lower_anew", fail)
        assert calls_of(text_of(jax.vmap(gemm), SQUARES, SQUARES)) == [call]
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh = AbstractMesh((2,), ("x",), axis_types=(kind,), abstract_device=device)
        for check in (True, False):
            with jax.sharding.use_abstract_mesh(mesh):
                mapped = jax.shard_map(gemm, in_specs=(spec, spec), out_specs=spec, check_vma=check)
                text = text_of(mapped, (4, 64, 64), (4, 64, 64), sharding=NamedSharding(mesh, spec))
            assert calls_of(text) == [call]


def calls_of(text: str) -> list[str]:
    """The custom calls in a program, without the names of values."""
    return [line.split(") {", 1)[1] for line in text.splitlines() if "@mosaic_gpu_v2" in line]


def test_another_kernel_is_not_taken_for_it(folder):
    with helpers.described_gpu("H200"):
        text_of(matmul, SQUARES, SQUARES)
        ((key, call),) = _lowered._kept.items()
        other = {key: CustomCall({**call.attributes, "module": "YW5vdGhlcg=="}, [])}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_lowered, "_kept", other)
            assert 'module = "another"' in text_of(matmul, SQUARES, SQUARES)
    for cores in (114, 132):
        device = jax.sharding.AbstractDevice("NVIDIA H200", cores, "gpu")
        mesh = AbstractMesh((1,), ("x",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            text_of(matmul, SQUARES, SQUARES)
    assert len(_lowered._kept) == len([*folder.iterdir()]) == 2


def test_what_is_read_is_what_was_written(folder):
    _lowered._store("key", CALL)
    assert _lowered._read("key") == CALL
    assert _lowered._read("another key") is None
    assert len([*folder.iterdir()]) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:64],
        lambda content: content.replace(b"scratch", b"scretch"),
        lambda content: b"0" * 64 + content[64:],
    ],
)
def test_a_damaged_file_is_as_good_as_none(damage, folder):
    _lowered._store("key", CALL)
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert _lowered._read("key") is None
    _lowered._store("key", CALL)
    assert _lowered._read("key") == CALL


def test_a_file_of_other_sources_or_of_another_kernel_is_as_good_as_none(folder, monkeypatch):
    _lowered._store("key", CALL)
    (path,) = folder.iterdir()
    for name, version in (("other", _lowered._version()), ("key", ["0.13.0", "0.13.0", "digest"])):
        monkeypatch.setattr(_lowered, "_version", lambda version=version: version)
        assert _lowered._read(name) is None
        path = path.rename(_lowered._file_of(name))  # even under its name
        assert _lowered._read(name) is None


def test_without_a_local_compilation_cache_nothing_is_stored(folder):
    for name, value in (
        ("jax_compilation_cache_dir", None),
        ("jax_compilation_cache_dir", "gs://bucket/cache"),
        ("jax_enable_compilation_cache", False),
    ):
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        _lowered._store("key", CALL)
        assert _lowered._file_of("key") is None and _lowered._read("key") is None
        jax.config.update(name, before)
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.write_bytes(b"not a folder")
    _lowered._store("key", CALL)
    assert _lowered._read("key") is None
