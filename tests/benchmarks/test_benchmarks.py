import collections
import functools
import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import helpers
import jax
import jax.numpy as jnp
import optax.contrib
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from benchmarks import __main__ as benchmarks
from benchmarks._records import pages
from benchmarks._times import (
    models,
    one_device,
    overlap,
    rivals,
    sharded,
    timing,
)
from benchmarks._times.shapes import SETS, shapes
from benchmarks._times.updates import COMPARED, IN_16_BITS
from muon_jax import muon, newton_schulz

TINY = {"embedding": (32, 8), "layer/w": (8, 24), "layer/b": (24,), "experts": (3, 24, 8)}
TWICE = timing.Turns(rounds=2)
CASES = {
    "syrk": ["--shapes", "16x16", "2x8x24"],
    "newton_schulz": ["--shapes", "16x16", "2x8x24", "--coefficients", "balanced", "polar_express"],
    "muon": ["--models", "tiny"],
    "sharded": ["--models", "tiny"],
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(models.MODELS, "tiny", TINY)
    monkeypatch.setattr(rivals, "_reason_missing", lambda package: f"{package} is not installed")


@pytest.fixture
def measure(tmp_path):
    def run(benchmark, *words):
        file = tmp_path / f"{benchmark}.json"
        benchmarks.main([benchmark, "--quick", *CASES[benchmark], *words, "--json", str(file)])
        return file

    return run


@pytest.mark.parametrize(
    ("benchmark", "variants"),
    [
        (
            "syrk",
            [
                *("jnp", "xla", "None", "None, symmetrize_output=False"),
                *("jnp + C", "xla + C", "None + C"),
            ],
        ),
        ("muon", ["optax", IN_16_BITS, "None", "balanced"]),
        pytest.param(
            "newton_schulz",
            ["jnp", "None", "optax f32", "optax bf16", "balanced", "polar_express"],
            marks=pytest.mark.nightly,
        ),
    ],
)
@helpers.slow
def test_it_times_checks_and_reports(benchmark, variants, measure, capsys):
    file = measure(benchmark)
    assert ("tiny: optax" if benchmark == "muon" else "2×8×24: jnp") in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["rounds"] == 3 and "no record" in report["quick"]
    versions = {"python", "jax", "jaxlib", "optax"}
    assert {"benchmark", "device", "commit", "dtype", "input"} | versions <= set(report)
    assert len(report["measurements"]) == (1 if benchmark == "muon" else 2)
    for measurement in report["measurements"]:
        assert measurement["errors"]["None"] < 0.1
        is_wide = benchmark == "newton_schulz" and measurement["shape"] == [2, 8, 24]
        also = ["polar_express, gram"] if is_wide else []
        assert list(measurement["microseconds"]) == variants + also
        for by_clock in measurement["microseconds"].values():
            low, median, high = by_clock["wall"]
            assert 0 < low <= median <= high
        if benchmark == "muon":
            assert measurement["parameters"] == 32 * 8 + 8 * 24 + 24 + 3 * 24 * 8
            for figure in ("compile_seconds", "temp_bytes", "loops", "launches"):
                assert list(measurement[figure]) == variants
        else:
            assert measurement["shape"] in ([16, 16], [2, 8, 24])


@helpers.slow
def test_sharded_steps_are_counted_and_checked(measure, capsys):
    optimizers = ["optax", "None", "automatic axes", "int8", "normuon", "muonh, 3 steps"]
    meshes = ["fsdp=1", "data=2,fsdp=2"]
    report = json.loads(
        measure("sharded", "--mesh", *meshes, "--optimizers", *optimizers).read_text()
    )
    alone, four = report["measurements"]
    assert alone["mesh"] == {"fsdp": 1} and four["mesh"] == {"data": 2, "fsdp": 2}
    assert [*four["microseconds"]] == [*four["collectives"]] == [*four["tflops"]] == optimizers
    assert not any(alone["collectives"].values())
    exchanges = [four["collectives"][name]["all-to-all"] for name in optimizers[1:]]
    assert exchanges == [2] * 5
    # Against one device. Against float64 it would be 0.001 and more: products have 16 bits. The
    # random bits of int8 depend on a parameter's place.
    assert max(error for name, error in four["errors"].items() if name != "int8") < 1e-4
    assert "collectives of None 2 all-to-all" in capsys.readouterr().out
    # TINY's matrices in three quintic steps, on four devices.
    flops = 3 * (1 + 3) * (4 * 8**2 * 24 + 2 * 8**3) / 4
    seconds = four["microseconds"]["muonh, 3 steps"]["wall"][1] * 1e-6
    assert four["tflops"]["muonh, 3 steps"] == pytest.approx(flops / seconds * 1e-12, rel=5e-3)


def test_sharded_refuses_a_mesh_that_divides_nothing():
    message = r"mesh axes \['fsdp'\] divide no parameter of tiny"
    with pytest.raises(SystemExit, match=message):
        sharded.measure_sharded(("tiny", {"fsdp": 5, "tensor": 1}), "float32", ["None"])


def test_sharded_finds_a_momentum_that_is_wrong_on_a_mesh(monkeypatch):
    def wrong(*args, **kwargs):
        right = muon(*args, **kwargs)

        def update(g, state, params):
            updates, state = right.update(g, state, params)
            sign = -1 if jax.typeof(jax.tree.leaves(g)[0]).sharding.mesh.size > 1 else 1
            return updates, jax.tree.map(lambda x: x if x.ndim < 2 else sign * x, state)

        return optax.GradientTransformation(right.init, update)

    monkeypatch.setitem(sharded.OPTIMIZERS, "None", sharded.Compared(wrong))
    measured = functools.partial(
        sharded.measure_sharded, dtype="float32", optimizers=["None"], turns=TWICE
    )
    assert measured(("tiny", {"fsdp": 1}))["errors"]["None"] < 0.02
    with pytest.raises(ArithmeticError, match="tiny, None: the update of .* on one device by"):
        measured(("tiny", {"fsdp": 2}))


def test_marins_model_has_the_flops_that_marin_counts():
    """50.56% of eight H100s' 989 TFLOP/s, for 0.6171 s: three steps of all matrices (issue 6493).

    Experts are divided, and each device computes all other matrices.
    """
    in_three_steps = {
        name: 3 * models.flops_of_quintic_step(shapes)
        for name, shapes in models.MODELS.items()
        if name.startswith("marin")
    }
    counted = 0.5056 * 8 * 989e12 * 0.6171
    assert in_three_steps["marin-256-experts"] == pytest.approx(counted, rel=1e-3)
    assert in_three_steps["marin-32-experts"] > counted / 8


@helpers.slow
def test_several_processes_measure_as_one(tmp_path):
    file, runs = tmp_path / "measured.json", []
    address = helpers.free_address()
    for process in range(2):
        command = [sys.executable, "-m", "benchmarks", "sharded", "--quick", "--json", str(file)]
        command += ["--optimizers", "None", "--mesh", "fsdp=4", "--coordinator", address]
        command += ["--processes", "2", "--process", str(process)]
        flags = "--xla_force_host_platform_device_count=2"
        runs.append(subprocess.Popen(command, env={**os.environ, "XLA_FLAGS": flags}))
    assert [run.wait(timeout=200) for run in runs] == [0, 0]
    report = json.loads(file.read_text())
    assert report["processes"] == "2" and len(report["measurements"]) == 1


def test_sharded_takes_any_mesh_of_its_axes():
    mesh = AbstractMesh((2, 2, 2, 2), ("data", "expert", "fsdp", "tensor"))
    shardings = {
        name: sharded.even_sharding(jax.ShapeDtypeStruct(shape, jnp.float32), mesh).spec
        for name, shape in {**TINY, "odd": (3, 4)}.items()
    }
    assert shardings == {
        "embedding": PartitionSpec("fsdp", "tensor"),
        "layer/w": PartitionSpec("fsdp", "tensor"),
        "layer/b": PartitionSpec(None),
        "experts": PartitionSpec(None, "fsdp", "tensor"),
        "odd": PartitionSpec(None, "tensor"),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "rows=2"], "'rows=2' must be AXIS=SIZE,…, each AXIS another one of data, ex"),
        (["--mesh", "fsdp=2,tensor"], "'fsdp=2,tensor' must be AXIS=SIZE"),
        (["--mesh", "fsdp=2,fsdp=4"], "each AXIS another one of"),
        (["--mesh", "fsdp=0"], "'fsdp=0' must be AXIS=SIZE"),
        (["--mesh", "fsdp=16"], "--mesh fsdp=16 has 16 devices, and there are 8 of 1 processes"),
        (["--processes", "2"], "go together, with a process from 0 on: got (None, 2, None)"),
    ],
)
def test_sharded_refuses_other_meshes(words, message, capsys):
    with pytest.raises(SystemExit) as error:
        benchmarks.main(["sharded", *words])
    assert message in capsys.readouterr().err + str(error.value)


@pytest.mark.parametrize(
    ("computing", "exchanging", "exposed"),
    [
        ([(0, 4), (2, 6)], [(1, 3)], 0),
        ([(0, 4), (6, 9)], [(3, 7)], 2),
        ([(5, 6)], [(0, 2), (1, 3), (5, 7)], 4),
        ([], [(1, 2)], 1),
    ],
)
def test_what_is_exposed_of_exchanges(computing, exchanging, exposed):
    times = overlap.overlap_times(
        overlap.merge_intervals(computing), overlap.merge_intervals(exchanging)
    )
    assert times["exposed"] == exposed
    event = collections.namedtuple("Event", "name start_ns duration_ns")
    line = collections.namedtuple("Line", "name events")
    events = [event("gemm", 1e3 * a, 1e3 * (b - a)) for a, b in computing]
    others = [event("ncclDevKernel_SendRecv", 1e3 * a, 1e3 * (b - a)) for a, b in exchanging]
    plane = collections.namedtuple("Plane", "lines")(
        [line("Stream #1", events), line("Stream #2", others), line("XLA Ops", [*events, *others])]
    )
    assert overlap.overlap_times(*overlap.kernel_intervals(plane)) == times


def test_float32_is_checked_against_float64():
    measurement = one_device.measure_newton_schulz((16, 16), "float32", (), TWICE)
    assert 0 < measurement["errors"]["None"] < 1e-5


def test_a_form_that_is_not_offered_is_not_timed(monkeypatch):
    monkeypatch.setattr(one_device, "rival_programs", lambda *arguments: {})
    measurement = one_device.measure_newton_schulz((8, 24), "bfloat16", ("deepseek_v4",), TWICE)
    assert [*measurement["microseconds"]] == ["jnp", "None", "deepseek_v4"]


def test_a_pause_is_before_each_turn_of_ten_runs(monkeypatch):
    events = []

    class Recorded:
        def result(self):
            raise AssertionError("nothing to run")

        def clocks(self):
            return {"wall": lambda calls: events.append(calls) or 1.0}

    monkeypatch.setattr(timing.time, "sleep", lambda seconds: events.append(f"{seconds} s"))
    turns = timing.Turns(rounds=3, pause=0.2)
    timing.time_interleaved({"one": Recorded(), "other": Recorded()}, turns)
    assert events == [1, 1, *["0.2 s", 10] * 2 * 3]


@pytest.mark.parametrize("wrong", [1.3, jnp.nan])
def test_a_wrong_orthogonalization_fails(wrong, monkeypatch):
    right = one_device.newton_schulz
    monkeypatch.setattr(one_device, "rival_programs", lambda *arguments: {})
    monkeypatch.setattr(one_device, "newton_schulz", lambda x, **kw: wrong * right(x, **kw))
    with pytest.raises(ArithmeticError, match="None: the relative error .* that of jnp"):
        one_device.measure_newton_schulz((16, 16), "bfloat16", ())


@pytest.mark.parametrize("wrong", [1.3, jnp.nan])
def test_a_wrong_form_fails(wrong, monkeypatch):
    right = one_device.newton_schulz
    factors = {"gram": wrong}
    monkeypatch.setattr(
        one_device,
        "newton_schulz",
        lambda x, method="standard", **kw: factors.get(method, 1) * right(x, method=method, **kw),
    )
    with pytest.raises(ArithmeticError, match="dion, gram: the relative error .* more than 0.1"):
        one_device.measure_newton_schulz((16, 32), "bfloat16", ("dion",))


def test_a_wrong_addend_fails(monkeypatch):
    right = one_device.syrk
    monkeypatch.setattr(
        one_device, "syrk", lambda x, c=None, beta=0.0, **kw: right(x, c, beta=1.1 * beta, **kw)
    )
    with pytest.raises(ArithmeticError, match=r"None \+ C: the relative error .* jnp \+ C"):
        one_device.measure_syrk((16, 16), "bfloat16", ())


@pytest.mark.slow
def test_a_wrong_update_fails(monkeypatch):
    monkeypatch.setitem(COMPARED, "None", lambda learning_rate, **kw: muon(0.06, **kw))
    with pytest.raises(
        ArithmeticError, match="muon tiny, None: the update of .* differs from that of optax by 2"
    ):
        one_device.measure_muon("tiny", "float32")


def test_a_rival_that_fails_is_reported_and_not_timed(monkeypatch, measure, capsys):
    def broken():
        raise RuntimeError("no kernel\nmore")

    rivals = {
        "wrong": SimpleNamespace(result=lambda: jnp.zeros((16, 16))),
        "broken": SimpleNamespace(result=broken),
    }

    def programs(measured, x, *_):  # one with coefficients of its own, one that should have none
        if measured != "newton_schulz":
            return {"broken": rivals["broken"]}
        for name in ("dion", "gram_newton_schulz"):
            orthogonalize = functools.partial(newton_schulz, ns_coeffs="dion", dtype=None)
            rivals[name] = timing.JaxProgram.compile(orthogonalize, x)
        return rivals

    monkeypatch.setattr(one_device, "rival_programs", programs)
    monkeypatch.setitem(CASES, "newton_schulz", ["--shapes", "16x16", "--coefficients"])
    file = measure("newton_schulz")
    assert "failed: wrong at 16×16 (the relative error is 1.00e+00" in capsys.readouterr().out
    (measurement,) = json.loads(file.read_text())["measurements"]
    assert measurement["failed"]["broken"] == "RuntimeError: no kernel"
    assert set(measurement["failed"]) == {"wrong", "broken", "gram_newton_schulz"}
    assert set(measurement["microseconds"]) == {"jnp", "None", "dion"}
    assert [*measurement["products"]] == ["XXᵀ", "cA² + bA + aI", "QX"]
    for product in measurement["products"].values():
        assert set(product["microseconds"]) == {"jnp", "None"}
    benchmarks.main(["report", str(file)])
    out = capsys.readouterr().out
    assert "| failed | failed |" in out and "- failed: broken at 16×16 (RuntimeError" in out
    assert "- failed: broken at 16×16, XXᵀ (RuntimeError" in out


def test_flops_of_products_and_their_share_of_the_rate(monkeypatch):
    monkeypatch.setattr(one_device, "rival_programs", lambda *arguments: {})
    measured = one_device.measure_products(jnp.ones((3, 8, 24)) * jnp.eye(8, 24), TWICE)
    flops = {name: product["flops"] for name, product in measured.items()}
    square = 3 * 8 * 8
    assert flops == {"XXᵀ": square * 24, "cA² + bA + aI": square * 8, "QX": 2 * square * 24}
    times = {"jnp": {"wall": [1.0, 3.0, 4.0], "device": [1.0, 2.0, 3.0]}}
    products = {"XXᵀ": {"flops": 800e6, "microseconds": times}}
    cells = pages._products([{"shape": [8, 24], "products": products, "rate": 800e12}])
    assert cells == {"8×24, XXᵀ": {"jnp": "2.0, 400 (50%)"}}


@pytest.mark.nightly
def test_absent_rivals_are_named(measure, capsys):
    file = measure("newton_schulz")
    line = "absent: gram_newton_schulz (gram_newton_schulz is not installed)"
    assert line in capsys.readouterr().out
    benchmarks.main(["report", str(file)])
    assert f"- {line}" in capsys.readouterr().out


def test_the_reason_for_absence(monkeypatch):
    monkeypatch.undo()  # the fixture's
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    assert rivals.absent_rivals("newton_schulz")["gram_newton_schulz"] == "torch is not installed"
    assert rivals.torch_versions("newton_schulz", "syrk") == {}


def test_each_rival_in_torch_can_be_made(monkeypatch):
    torch = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "torch", torch)
    name = "benchmarks._times.rivals_in_torch"
    monkeypatch.delitem(sys.modules, name, raising=False)
    make = importlib.import_module(name)._MAKE
    monkeypatch.delitem(sys.modules, name)  # the next import is of the true torch
    assert set(make) == {name for names in rivals._IN_TORCH.values() for name in names}
    for variant, mode in (("", "default"), (", CUDA graphs", "reduce-overhead")):
        make[f"torch.compile{variant}"]()
        assert torch.compile.call_args.kwargs["mode"] == mode


def test_xla_leaves_memory_where_torch_is_installed(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    rivals.leave_memory_to_torch()
    assert not os.environ
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: name)
    rivals.leave_memory_to_torch()
    assert os.environ == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_report_is_a_table_and_a_plot(capsys, tmp_path):
    def times(median):
        return {"wall": [1.0, 9.0, 10.0], "device": [median, median, median]}

    syrk = {
        "benchmark": "syrk",
        "device": "H200",
        "dtype": "bfloat16",
        "measurements": [
            {
                "shape": [2, 8, 16],
                "chosen": "triton",
                "errors": {"jnp": 0.00171, "None": 0.0016},
                "microseconds": {"jnp": times(120.4), "xla": times(99.94), "None": times(60.2)},
            }
        ],
    }
    muon_report = {
        "benchmark": "muon",
        "device": "H200",
        "dtype": "float32",
        "measurements": [
            {
                "model": "tiny",
                "errors": {"None": 0.0123},
                "compile_seconds": {"optax": 37.66, "None": 2.4},
                "temp_bytes": {"optax": 3 * 2**20, "None": 2**20},
                "launches": {"optax": 9000, "None": 300},
                "microseconds": {"optax": times(2000.0), "None": times(500.0)},
            }
        ],
    }
    files = [tmp_path / "syrk.json", tmp_path / "muon.json"]
    for file, content in zip(files, (syrk, muon_report), strict=True):
        file.write_text(json.dumps(content))
    benchmarks.main(["report", *map(str, files), "--png", str(tmp_path / "a.png")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "benchmark: syrk, device: H200, dtype: bfloat16; µs, device, medians"
    assert "Exact is the same product of the same inputs in float64" in lines[2]
    assert lines[4:7] == [
        "| shape | jnp | syrk | speedup | xla | error of jnp | error of syrk | chosen |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 2×8×16 | 120 | 60.2 | 2.00× | 99.9 | 0.0017 | 0.0016 | triton |",
    ]
    assert lines[-1] == "| tiny | 2000 | 500 | 4.00× | 0.012 | 37.7 | 2.4 | 3 | 1 | 9000 | 300 |"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_named_shapes():
    assert shapes("24x8x16") == [(24, 8, 16)]
    for name in SETS:
        assert all(shape[-2] <= shape[-1] for shape in shapes(name))


@pytest.mark.parametrize("word", ["llama", "16", "0x16", "1x2x3x4"])
def test_shapes_that_are_none(word, capsys):
    with pytest.raises(SystemExit):
        benchmarks.main(["syrk", "--shapes", word])
    assert "--shapes" in capsys.readouterr().err


@pytest.mark.parametrize("name", helpers.mostly_nightly(models.MODELS, ["qwen3-30b-a3b-experts"]))
def test_both_optimizers_take_the_models(name):
    shapes = models.MODELS[name]
    parameters = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
    numbers = models.dimension_numbers(shapes)
    for make in (muon, optax.contrib.muon):
        optimizer = make(0.02, muon_weight_dimension_numbers=numbers)
        state = jax.eval_shape(optimizer.init, parameters)
        updates, _ = jax.eval_shape(optimizer.update, parameters, state, parameters)
        assert jax.tree.map(jnp.shape, updates) == shapes
