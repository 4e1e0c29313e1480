"""The tuner writes the table that implementations are chosen by, of results that are right."""

import helpers
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _tuning, tune


def test_tune_writes_the_table_that_the_dispatch_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tune, "_microseconds", lambda program, arguments: 1.0)
    monkeypatch.setattr(_tuning, "TABLES", tmp_path)
    monkeypatch.setattr(_tuning, "_table", _tuning._table.__wrapped__)
    assert _tuning.lookup((2, 64, 128), addend=False) is None
    tune.main(["--shapes", "2x100x60"])
    for shape, addend in (((2, 64, 128), False), ((2, 64, 64), True)):
        times = _tuning.lookup(shape, addend=addend)
        assert times and set(times) == {"xla", "xla, not symmetrized"}
        assert min(times.values()) > 0


def test_it_measures_the_kernel_of_the_device():
    kernels_of = {"H200": "mosaic_gpu", "RTX 4090": "mosaic_gpu_mma", "B200": "mosaic_gpu_tcgen05"}
    for gpu, kernel in kernels_of.items():
        with helpers.described_gpu(gpu):
            names = tune._candidates(jax.ShapeDtypeStruct((1, 2048, 2048), jnp.bfloat16), True)
        kernels = [name.split()[0] for name in names if "mosaic" in name]
        assert {*kernels} == {kernel}


def test_tune_fails_where_a_result_is_wrong(monkeypatch):
    xla = tune._candidates(jnp.ones((1, 64, 64), jnp.bfloat16), False)["xla"]
    wrong = {
        "xla": xla,
        "half": lambda a: 0.5 * xla(a),
        "skew": lambda a: xla(a).at[..., 0, 1].add(1),
    }
    for name, reason in (("half", "twice that of xla"), ("skew", "not symmetric")):
        candidates = {key: wrong[key] for key in ("xla", name)}
        monkeypatch.setattr(tune, "_candidates", lambda a, addend, c=candidates: c)
        with pytest.raises(ArithmeticError, match=f"{name} at .*{reason}"):
            tune.measure_product((1, 64, 64), addend=False)


def test_tune_needs_a_gpu(capsys, tmp_path):
    file = tmp_path / "table.json"
    with pytest.raises(SystemExit) as stopped:
        tune.main(["--json", str(file)])
    assert "run it on a machine with an NVIDIA GPU" in str(stopped.value)
    assert not file.exists() and not capsys.readouterr().out


@pytest.mark.parametrize("shape", ["4x", "0x4", "4", "2x3x4x5", "axb"])
def test_a_wrong_shape_is_refused(shape, capsys):
    with pytest.raises(SystemExit):
        tune.main(["--shapes", shape])
    assert "must be MxN or BATCHxMxN" in capsys.readouterr().err
