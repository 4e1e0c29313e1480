import contextlib
import functools
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import helpers
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import benchmarks
import gpt
import gpt_report
from benchmarks._training.corpus import write_corpus
from benchmarks._training.text import Text
from gpt_model import GPT, shardings_of

STEPS = 100
TINY = (
    "--depth 2 --width 32 --heads 2 --context 32 --batch 8"
    f" --steps {STEPS} --log-every 5 --eval-every 20 --checkpoint-every 20"
).split()


def run(output, *arguments):
    """Trains, and returns what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        gpt.main([*TINY, "--output", str(output), *arguments])
    return printed.getvalue()


def losses(output):
    """The columns of step, training loss and held-out loss."""
    rows = gpt_report.read(output / "metrics.csv")
    columns = ("step", "train_loss", "held_out_loss")
    return np.array([[row[column] for column in columns] for row in rows])


def saved(folder):
    """Leaves of the last state in a folder of checkpoints, and their step."""
    with ocp.CheckpointManager(folder) as checkpoints:
        step = checkpoints.latest_step()
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        return jax.tree.leaves(checkpoints.restore(step, args=args)["state"]), step


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of Muon without interruption: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run(folder, "--tensorboard", "--checkpoint", str(folder / "checkpoints"))


@pytest.mark.slow
def test_it_learns_and_reports(straight):
    folder, printed = straight
    steps, train, held_out = losses(folder).T
    assert steps.tolist() == [*range(5, STEPS + 1, 5)]
    assert steps[~np.isnan(held_out)].tolist() == [20, 40, 60, 80, 100]
    assert train[0] > 5.3 and train[-1] < 2.8  # ln 256 = 5.5 is a guess
    assert abs(train[-1] - held_out[-1]) < 0.3
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    (events,) = folder.glob("events.out.tfevents.*")
    assert b"held_out_loss" in events.read_bytes()
    bits = held_out[-1] / np.log(2)  # a token is a byte
    assert re.search(
        rf"held-out loss +{held_out[-1]:.4f} nats/token, {bits:.4f} bits/byte", printed
    )
    assert re.search(r"optimizer +[\d.]+ ms, [\d.]+% of a step", printed)


@pytest.mark.nightly
def test_killed_it_goes_on_bit_for_bit(straight, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--output", str(tmp_path), "--checkpoint", str(checkpoints)]
    process = subprocess.Popen(
        [sys.executable, gpt.__file__, *TINY, *arguments],
        env={
            **os.environ,
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_NUM_CPU_DEVICES": str(jax.device_count()),
        },
        stderr=subprocess.DEVNULL,
    )
    while not [*checkpoints.glob("?0")] or losses(tmp_path)[-1, 0] <= 20:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert losses(tmp_path)[-1, 0] < STEPS

    run(tmp_path, *arguments[2:])
    np.testing.assert_array_equal(losses(tmp_path), losses(straight[0]))
    leaves, step = saved(checkpoints)
    expected, _ = saved(straight[0] / "checkpoints")
    assert step == STEPS
    jax.tree.map(np.testing.assert_array_equal, leaves, expected)


@pytest.mark.nightly
def test_two_processes_have_the_losses_of_one(tmp_path):
    """Batches and parameters are divided over both; one of them prints and writes metrics."""
    arguments = "--depth 1 --steps 10 --eval-every 10 --mesh data=2,fsdp=2 --output".split()
    run(tmp_path / "one", *arguments[:-1])
    address = helpers.free_address()
    arguments += [str(tmp_path / "two"), "--coordinator", address, "--processes", "2", "--process"]
    processes = [
        subprocess.Popen(
            [sys.executable, gpt.__file__, *TINY, *arguments, str(index)],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                "JAX_NUM_CPU_DEVICES": "2",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    printed = [process.communicate(timeout=200) for process in processes]
    for process, (_, errors) in zip(processes, printed, strict=True):
        assert process.returncode == 0, errors[-3000:]
    assert ["held-out loss" in output for output, _ in printed] == [True, False]
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-5)


@pytest.mark.slow
def test_other_settings_do_not_go_on(straight, tmp_path):
    arguments = ("--checkpoint", str(straight[0] / "checkpoints"))
    differing = "learning_rate is 0.01 there and 0.1 here, width is 32 there and 64 here"
    with pytest.raises(SystemExit, match=f"holds another run: {differing}"):
        run(tmp_path, *arguments, "--width", "64", "--learning-rate", "0.1")
    with pytest.raises(SystemExit, match="already holds all 100 steps"):
        run(tmp_path, *arguments)
    shutil.copytree(straight[0] / "checkpoints" / "80", tmp_path / "killed" / "80")
    other = "--log-every 25 --eval-every 25 --checkpoint-every 25 --checkpoint".split()
    with pytest.raises(SystemExit, match="holds 80 steps, no multiple of --log-every 25"):
        run(tmp_path, *other, str(tmp_path / "killed"))


def specs_by_path(*arguments):
    """How parameters and moments are sharded over four by two devices."""
    options = gpt.parse([*TINY, "--mesh", "fsdp=4,tensor=2", *arguments])
    mesh = jax.make_mesh((1, 4, 2), tuple(options.mesh), (AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        init, *_ = gpt.make_functions(options, gpt.make_optimizer(options))
        shardings = shardings_of(jax.eval_shape(init), mesh)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): sharding.spec
        for path, sharding in jax.tree.leaves_with_path(shardings)
    }


def test_a_text_of_the_benchmarks_is_read(tmp_path, capsys):
    chance, path = np.random.default_rng(0), tmp_path / "tiny.tokens.xz"
    train, held_out = (chance.integers(600, size=n).astype(np.uint16) for n in (1000, 200))
    write_corpus(Text(train, held_out, 3, 600, "tiny", 700), path)
    options = gpt.parse([*TINY, "--text", str(path)])
    np.testing.assert_array_equal(options.text.train, train)
    np.testing.assert_array_equal(options.text.held_out, held_out)
    assert options.text.held_out_bytes == 700
    model = nnx.eval_shape(lambda: GPT(options, nnx.Rngs(0)))
    assert model.embedding.kernel.shape == model.head.kernel.shape[::-1] == (600, 32)

    for contents in (b"int main", path.read_bytes()[:-40]):
        path.write_bytes(contents)
        with pytest.raises(SystemExit, match="2"):
            gpt.parse([*TINY, "--text", str(path)])
        assert "must be a file of tokens, got" in capsys.readouterr().err


@functools.cache
def params_and_first_updates(*arguments):
    """Parameters and their first updates by path, the same gradients whatever the optimizer."""
    options = gpt.parse([*TINY, *arguments])
    axes, types = tuple(options.mesh), (AxisType.Auto,) * 3
    with jax.set_mesh(jax.make_mesh((1, 1, 1), axes, types, devices=jax.devices()[:1])):
        optimizer = gpt.make_optimizer(options)
        init, *_ = gpt.make_functions(options, optimizer)
        shapes = jax.eval_shape(init).params
        chance = np.random.default_rng(0)
        params, gradients = (
            jax.tree.map(lambda p: chance.normal(size=p.shape).astype(np.float32), shapes)
            for _ in range(2)
        )
        state = jax.jit(optimizer.init)(params)
        updates, _ = jax.jit(optimizer.update)(gradients, state, params)
    return by_path(params), by_path(updates)


def by_path(tree):
    """The leaves, by path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x)
        for path, x in jax.tree.leaves_with_path(tree)
    }


MATRICES = {f"layers/{name}/kernel" for name in "query key value out up down".split()}


@pytest.mark.parametrize(
    "arguments",
    helpers.mostly_nightly(
        [
            "--optimizer optax",
            "--ns-coeffs balanced",
            "--ns-coeffs aol --preconditioning aol",
            "--preset normuon",
        ],
        ["--preset normuon"],
    ),
)
def test_what_is_compared_differs_in_the_matrices_alone(arguments):
    """Updates of matrices have one root mean square, and all else has the same AdamW."""
    _, expected = params_and_first_updates()
    params, found = params_and_first_updates(*arguments.split())
    rate = 0.01 / (0.05 * STEPS)  # the first of the warm-up
    for path, update in found.items():
        if path in MATRICES:
            direction = update / rate + 0.1 * params[path]
            np.testing.assert_allclose(np.sqrt(np.mean(direction**2)), 0.2, rtol=0.25)
            assert np.abs(update - expected[path]).max() > 1e-3 * rate
        else:
            np.testing.assert_allclose(update, expected[path], rtol=1e-5)


@pytest.mark.parametrize("optimizer", helpers.mostly_nightly(["muon", "optax", "adamw"], ["adamw"]))
def test_the_rate_of_all_but_the_matrices_is_scaled(optimizer):
    _, plain = params_and_first_updates("--optimizer", optimizer)
    _, scaled = params_and_first_updates("--optimizer", optimizer, "--adam-scale", "3")
    for path, update in plain.items():
        factor = 1 if path in MATRICES else 3
        np.testing.assert_allclose(scaled[path], factor * update, rtol=1e-5)


def test_moments_are_sharded_like_parameters():
    found = specs_by_path()
    expected = {"query": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp")}
    for name, spec in expected.items():
        specs = [found[path] for path in found if path.endswith(f"layers/{name}/kernel")]
        assert specs == [spec] * 2  # the parameter and its momentum
    assert found["step"] == P()


@pytest.mark.nightly
def test_sharded_with_the_preset_it_has_the_curve_of_optax_on_one_device(straight, tmp_path):
    run(tmp_path / "optax", "--optimizer", "optax")
    run(tmp_path / "sharded", "--preset", "optax", "--mesh", "fsdp=2,tensor=2")
    optax, sharded = losses(tmp_path / "optax"), losses(tmp_path / "sharded")
    np.testing.assert_allclose(sharded, optax, rtol=0, atol=3e-5)
    assert np.nanmax(np.abs(losses(straight[0]) - optax)) > 3e-4  # products in 16 bits
    output = tmp_path / "both.png"
    runs = [str(tmp_path / name / "metrics.csv") for name in ("optax", "sharded")]
    gpt_report.main([*runs, "--output", str(output)])
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    helpers.mostly_nightly(
        [
            "--preset muonh --learning-rate 0.03",
            "--preset kimi_k3 --per-head",
            "--preset turbo",
            "--preset normuon",
            "--ns-coeffs aol --preconditioning aol",
        ],
        (),
    ),
)
def test_presets_learn(arguments, tmp_path):
    run(tmp_path, *arguments.split())
    _, train, _ = losses(tmp_path).T
    assert train[0] > 4.5 and train[-1] < 2.8


def test_what_is_said_of_the_speedrun_is_what_it_measured():
    root = Path(benchmarks.__file__).parents[1]
    text = " ".join((root / "docs" / "examples.md").read_text().split())
    names = ("adamw", "optax", "standard", "balanced", "aol", "normuon")
    folders = [root / "benchmarks" / "results" / "speedrun_h200" / name for name in names]
    table = gpt_report.compare([folder / "metrics.csv" for folder in folders])
    assert " ".join(table.split()) in text
    seconds, tokens = np.array(
        [row.strip(" |").split(" | ")[-2:] for row in table.splitlines()[2:]], float
    ).T
    saved = [f"{1 - x / tokens[0]:.0%}" for x in tokens[1:]]
    assert {*saved[1:4]} == {"12%"} and f"with {saved[1]} fewer tokens" in text
    less = [f"{1 - x / seconds[0]:.0%}" for x in seconds]
    assert f'in {less[2]} less time, and with `"balanced"` in {less[3]} less.' in text
    assert f"the same tokens, but takes {seconds[1] / seconds[0] - 1:.0%} longer" in text

    reports = [(folder / "report.txt").read_text() for folder in folders[:4]]
    adamw, optax, standard, balanced = re.findall(r"optimizer +(\S+) ms", "".join(reports))
    assert (
        f"{adamw} ms of a step with AdamW, {optax} with optax's Muon, {standard} with `muon` and"
        f' {balanced} with `"balanced"`'
    ) in text


def test_an_int8_momentum_is_sharded_like_its_parameter():
    found = specs_by_path("--width", "128", "--mu-dtype", "int8")
    codes = [found[path] for path in found if path.endswith("layers/query/kernel/codes")]
    assert codes == [P(None, "fsdp", "tensor")]


def test_rows_after_a_checkpoint_come_once(tmp_path):
    make = functools.partial(gpt_report.Metrics, tmp_path, tokens_per_step=300, tensorboard=False)
    with make(step=0) as metrics:
        for step in (10, 20, 30):
            metrics.write(step, 1.0, {"train_loss": step / 7})
    with make(step=20) as metrics:
        metrics.write(30, 5.0, {"train_loss": 1.0})
    rows = gpt_report.read(metrics.path)
    found = [(row["step"], row["tokens"], row["seconds"]) for row in rows]
    assert found == [(10, 3000, 1), (20, 6000, 2), (30, 9000, 7)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--mesh fsdp=2,expert=2",
            "'fsdp=2,expert=2' is no mesh: give sizes of data, fsdp, tensor",
        ),
        ("--mesh fsdp=0", "'fsdp=0' is no mesh"),
        ("--mesh fsdp=4,tensor=4 --heads 4", "needs 16 devices, there are 8"),
        ("--mesh fsdp=3", "--batch 8 must be a multiple of 3"),
        ("--mesh tensor=4", "--heads 2 must be a multiple of 4"),
        ("--width 30", "--width 30 must be a multiple of 2 × --heads 2"),
        ("--eval-every 7", "--eval-every 7 must be a multiple of --log-every 5"),
        ("--steps 0", "--steps must be at least 1"),
        ("--adam-scale nan", "--adam-scale nan must be 0 or more"),
        ("--processes 2", "--coordinator, --processes and --process go together"),
        (
            "--coordinator localhost:1 --processes 2 --process 2",
            "--process 2 must be in 0 … 1",
        ),
        ("--optimizer adamw --ns-coeffs fast", "--ns-coeffs is an argument of Muon, not of adamw"),
        (
            "--optimizer adamw --preconditioning aol",
            "--preconditioning is an argument of Muon, not of adamw",
        ),
        ("--optimizer adamw --mu-dtype int8", "--mu-dtype is for muon, not for adamw"),
        ("--optimizer optax --block-period 4", "--block-period is for muon, not for optax"),
        ("--optimizer optax --per-head", "--per-head is for muon, not for optax"),
        ("--optimizer optax --preset keller", "--preset is an argument of muon, not of optax"),
    ],
)
def test_what_cannot_run_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpt.parse([*TINY, *arguments.split()])
    assert message in capsys.readouterr().err


def test_tensorboard_is_not_left_out_silently(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(SystemExit, match="2"):
        gpt.parse([*TINY, "--tensorboard"])
    assert "--tensorboard needs tensorboardX: pip install it" in capsys.readouterr().err


def test_curves_need_metrics(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpt_report.main([str(tmp_path / "no.csv")])
    assert re.search(r"no held-out loss in \S+no\.csv: name the", capsys.readouterr().err)


def test_runs_are_compared_at_the_loss_of_the_first(tmp_path, capsys):
    columns, runs = "step,tokens,seconds,train_loss,held_out_loss\n", []
    for name, rows in {
        "adamw": "1,1e6,10,4,\n2,2e6,20,3,3\n4,4e6,40,2,2\n",
        "muon": "2,2e6,22,3,2.5\n3,3e6,33,3,\n4,4e6,44,1,1\n",  # 2 a third of the way
        "normuon": "2,2e6,25,3,1.5\n4,4e6,50,1,0.5\n",  # at its first evaluation
        "slow": "2,2e6,25,3,3\n4,4e6,50,1,2.125\n",
    }.items():
        runs.append(tmp_path / name / "metrics.csv")
        runs[-1].parent.mkdir()
        runs[-1].write_text(columns + rows)
    gpt_report.main([*map(str, runs), "--output", str(tmp_path / "curves.png")])
    heading, _, *rows = capsys.readouterr().out.splitlines()
    assert heading.endswith("| seconds to adamw's loss | million tokens to adamw's loss |")
    assert rows == [
        "| adamw | 2.0000 | 40.0 | 4.0 | 40.0 | 4.0 |",
        "| muon | 1.0000 | 44.0 | 4.0 | 29.3 | 2.7 |",
        "| normuon | 0.5000 | 50.0 | 4.0 | 25.0 | 2.0 |",
        "| slow | 2.1250 | 50.0 | 4.0 | never | never |",
    ]
