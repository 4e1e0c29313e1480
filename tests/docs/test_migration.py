"""What the page for those who come from another Muon says: runs go on, code corresponds."""

import functools
import re
from pathlib import Path

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, PartitionSpec

from muon_jax import MuonDimensionNumbers, MuonState, NewtonSchulz, muon, scale_by_muon

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
X = jax.random.normal(jax.random.key(0), (16, 8))
SCHEDULE = optax.linear_schedule(0.02, 0.0, 100)
RUNS = [
    {"learning_rate": SCHEDULE, "weight_decay": 0.1, "adam_weight_decay": 0.1},
    pytest.param({"learning_rate": 0.02}, marks=pytest.mark.slow),
]
KNOWN = {"preset": "optax", "ns_coeffs": NewtonSchulz(dtype="float32", method="standard")}


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@nnx.jit
def nnx_step(model, optimizer):
    optimizer.update(model, nnx.grad(lambda model: jnp.mean((model(X) - X) ** 2))(model))


def build_nnx(transform):
    model = Mlp(nnx.Rngs(0))
    return model, nnx.Optimizer(model, transform, wrt=nnx.Param)


def restored(directory, target):
    arguments = ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(directory, args=arguments)


@pytest.mark.slow
@pytest.mark.parametrize("pure", [True, False], ids=["pure dict", "state"])
@pytest.mark.parametrize("run", RUNS)
def test_a_run_of_optax_goes_on_under_nnx(run, pure, tmp_path):
    theirs = build_nnx(optax.contrib.muon(**run))
    for _ in range(3):
        nnx_step(*theirs)
    with ocp.PyTreeCheckpointer() as checkpointer:
        saved = nnx.state(theirs)
        checkpointer.save(tmp_path / "run", nnx.to_pure_dict(saved) if pure else saved)
    ours = build_nnx(muon(**run, **KNOWN))
    state = nnx.state(ours)
    if pure:
        nnx.replace_by_pure_dict(state, restored(tmp_path / "run", nnx.to_pure_dict(state)))
    else:
        state = restored(tmp_path / "run", state)
    nnx.update(ours, state)

    def adam(pair):
        return nnx.to_pure_dict(nnx.state(pair[1]))["opt_state"]["inner_states"]["adam"]

    assert any(np.any(x) for x in jax.tree.leaves(adam(theirs)) if np.ndim(x))
    chex.assert_trees_all_equal(adam(ours), adam(theirs))
    chex.assert_trees_all_equal(ours[1].step[...], theirs[1].step[...])
    before = nnx.to_pure_dict(nnx.state(theirs[0]))
    for _ in range(4):
        nnx_step(*theirs)
        nnx_step(*ours)
    after, expected = (nnx.to_pure_dict(nnx.state(pair[0])) for pair in (ours, theirs))
    chex.assert_trees_all_close(after, expected, atol=1e-6, rtol=0)
    assert np.abs(after["up"]["kernel"] - before["up"]["kernel"]).max() > 1e-3


@jax.jit
def linen_step(state):
    def loss(params):
        return jnp.mean((state.apply_fn({"params": params}, X) - X) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def build_linen(transform):
    model = linen.Sequential([linen.Dense(32), linen.relu, linen.Dense(8)])
    params = model.init(jax.random.key(1), X)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=transform)


def in_memory(saved):
    def is_muon(node):
        return isinstance(node, optax.contrib.MuonState)

    return jax.tree.map(
        lambda node: MuonState(node.count, node.mu) if is_muon(node) else node,
        saved,
        is_leaf=is_muon,
    )


@pytest.mark.parametrize(
    "way", helpers.mostly_nightly(["standard", "manager", "in memory"], ["standard", "in memory"])
)
@pytest.mark.parametrize("run", RUNS)
def test_a_run_of_optax_goes_on_under_linen(run, way, tmp_path):
    theirs = build_linen(optax.contrib.muon(**run))
    for _ in range(3):
        theirs = linen_step(theirs)
    ours = build_linen(muon(**run, **KNOWN))
    if way == "in memory":
        state = in_memory(theirs.opt_state)
        chex.assert_trees_all_equal_structs(state, ours.opt_state)
        ours = ours.replace(step=theirs.step, params=theirs.params, opt_state=state)
    elif way == "standard":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "run", theirs)
        ours = restored(tmp_path / "run", ours)
    else:
        with ocp.CheckpointManager(tmp_path) as manager:
            manager.save(3, args=ocp.args.StandardSave(theirs))
            manager.wait_until_finished()
        with ocp.CheckpointManager(tmp_path) as manager:  # of the process that goes on
            arguments = ocp.args.PyTreeRestore(
                item=ours,
                restore_args=ocp.checkpoint_utils.construct_restore_args(ours),
                partial_restore=True,
            )
            ours = manager.restore(3, args=arguments)
    adam = theirs.opt_state.inner_states["adam"]
    assert any(np.any(x) for x in jax.tree.leaves(adam) if np.ndim(x))
    chex.assert_trees_all_equal(ours.opt_state.inner_states["adam"], adam)
    assert ours.step == theirs.step == 3
    for _ in range(4):
        theirs, ours = linen_step(theirs), linen_step(ours)
    chex.assert_trees_all_close(ours.params, theirs.params, atol=1e-6, rtol=0)


def data_parallel(how, optimizer, params, batch):
    """The parameters after one step of which each device computed its part of the batch."""
    n = jax.device_count()

    def step(params, batch):
        gradients = jax.grad(lambda p: jnp.mean((batch @ p["w"] + p["b"] - 1) ** 2))(params)
        gradients = jax.lax.pmean(gradients, "data")
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    if how == "pmap":
        stacked = jax.tree.map(lambda x: jnp.stack([x] * n), params)
        after = jax.pmap(step, "data")(stacked, batch.reshape(n, -1, batch.shape[-1]))
        return jax.tree.map(lambda x: x[n - 1], after)
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec(), PartitionSpec("data"))
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    return jax.jit(sharded)(params, batch)


@pytest.mark.skipif(jax.device_count() == 1, reason="needs two devices")
@pytest.mark.parametrize("how", ["pmap", "shard_map"])
def test_data_parallel_updates_need_shardings(how):
    params = {"w": jax.random.normal(jax.random.key(1), (16, 32)), "b": jnp.zeros(32)}
    batch = jax.random.normal(jax.random.key(2), (4 * jax.device_count(), 16))
    run = functools.partial(data_parallel, how, params=params, batch=batch)
    with pytest.raises(ValueError, match="PartitionSpec.. where devices have them whole"):
        run(optimizer=muon(0.02, ns_coeffs=NewtonSchulz(dtype="float32")))
    after = run(
        optimizer=muon(0.02, ns_coeffs=NewtonSchulz(dtype="float32"), shardings=PartitionSpec())
    )
    optimizer = muon(0.02, ns_coeffs=NewtonSchulz(dtype="float32"))
    gradients = jax.grad(lambda p: jnp.mean((batch @ p["w"] + p["b"] - 1) ** 2))(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    expected = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(after, expected, atol=1e-5, rtol=0)


B, LR, WD = 0.9, 0.02, 0.1


def ema(m, g, t):
    m = B * m + (1 - B) * g
    return m, B * m + (1 - B) * g


def heavy_ball(m, g, t):
    m = B * m + g
    return m, B * m + g


def plain_ema(m, g, t):
    m = B * m + (1 - B) * g
    return m, m


def plain_heavy_ball(m, g, t):
    m = B * m + g
    return m, m


def debiased(m, g, t):
    m = B * m + (1 - B) * g
    return m, m / (1 - B**t)


def of_optax(transform):
    """A momentum by a transformation of optax that starts with zeros, in the form of the above."""

    def momentum(m, g, t):
        state = transform.init(g)
        name = "trace" if isinstance(state, optax.TraceState) else "ema"
        state = state._replace(**{name: m}, **({"count": t - 1} if name == "ema" else {}))
        u, state = transform.update(g, state)
        return getattr(state, name), u

    return momentum


def orthogonal(u, divide):
    x = divide(u)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def added(u):
    return u / (jnp.linalg.norm(u) + 1e-7)


def at_least(u):
    return u / jnp.maximum(jnp.linalg.norm(u), 1e-7)


def decayed(w, g, o):
    return w * (1 - LR * WD) - LR * o


def independent(w, g, o):
    return w * (1 - WD) - LR * o


EMA, HEAVY = {"momentum": "ema"}, {"momentum": "heavy_ball"}
TRANSPOSED = MuonDimensionNumbers(-1, -2)
# What code says: momentum, division, scale (of in and out), step; and what it is called here.
ROWS = {
    "ema": (ema, added, None, None, EMA),
    "heavy ball": (heavy_ball, added, None, None, HEAVY),
    "trace": (of_optax(optax.trace(B, nesterov=True)), added, None, None, HEAVY),
    "u = m": (plain_ema, added, None, None, EMA | {"nesterov": False}),
    "optax.ema, as it is": (
        of_optax(optax.ema(B, debias=False)),
        added,
        None,
        None,
        EMA | {"nesterov": False},
    ),
    "heavy ball, u = m": (
        plain_heavy_ball,
        added,
        None,
        None,
        HEAVY | {"nesterov": False},
    ),
    "debiased": (debiased, added, None, None, {"nesterov": False}),
    "optax.ema": (of_optax(optax.ema(B)), added, None, None, {"nesterov": False}),
    "maximum": (ema, at_least, None, None, EMA | {"eps_mode": "max"}),
    "of the transpose": (
        ema,
        added,
        lambda i, o: max(1, i / o) ** 0.5,
        None,
        EMA | {"muon_weight_dimension_numbers": TRANSPOSED},
    ),
    "ratio": (ema, added, lambda i, o: (o / i) ** 0.5, None, EMA | {"shape_scale": "ratio"}),
    "0.2": (ema, added, lambda *s: 0.2 * max(s) ** 0.5, None, EMA | {"consistent_rms": 0.2}),
    "1.0": (ema, added, lambda *s: max(s) ** 0.5, None, EMA | {"consistent_rms": 1.0}),
    "no scale": (ema, added, lambda i, o: 1.0, None, EMA | {"shape_scale": "none"}),
    "decoupled": (ema, added, None, decayed, EMA | {"weight_decay": WD}),
    "independent": (
        ema,
        added,
        None,
        independent,
        EMA | {"weight_decay": WD, "weight_decay_form": "independent"},
    ),
    "l2": (ema, added, None, "l2", EMA | {"weight_decay": WD, "weight_decay_form": "l2"}),
}


@pytest.mark.parametrize("shape", helpers.mostly_nightly([(16, 40), (40, 16)], [(16, 40)]))
@pytest.mark.parametrize("row", ROWS)
def test_code_corresponds_to_arguments(row, shape):
    momentum, divide, scale, step, arguments = ROWS[row]
    scale = scale or (lambda i, o: max(1, o / i) ** 0.5)
    optimizer = muon(
        LR,
        beta=B,
        eps=1e-7,
        ns_coeffs=NewtonSchulz(dtype="float32", method="standard"),
        **arguments,
    )
    update = jax.jit(optimizer.update)
    w = ours = jax.random.normal(jax.random.key(0), shape)
    m, state = jnp.zeros(shape), optimizer.init(w)
    for t in range(1, 4):
        g = jax.random.normal(jax.random.key(t), shape)
        updates, state = update(g, state, ours)
        ours = optax.apply_updates(ours, updates)
        m, u = momentum(m, g + WD * w if step == "l2" else g, t)
        o = scale(*shape) * orthogonal(u, divide)
        w = step(w, g, o) if callable(step) else w - LR * o
    np.testing.assert_allclose(ours, w, atol=2e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the page has the ratios of a CPU")
def test_spurious_updates_of_a_momentum_of_rank_4_are_those_of_the_table():
    left, right = jax.random.normal(jax.random.key(0), (2, 512, 4))
    momentum = left @ right.T
    u, v = jnp.linalg.qr(left)[0], jnp.linalg.qr(right)[0]

    def ratio(ns_coeffs):
        optimizer = scale_by_muon(ns_coeffs)
        update, _ = optimizer.update(momentum, optimizer.init(momentum))
        signal = u @ (u.T @ update @ v) @ v.T
        return jnp.linalg.norm(update - signal) / jnp.linalg.norm(signal)

    rows = re.findall(r"^\| (.*) \| (\d\.\d) \|$", PAGE.read_text(), re.M)
    assert len(rows) == 4
    assert rows[0][0].startswith("the default")
    for said, printed in rows:
        (code,) = re.findall(r"`(.+?)`", said) or ["'standard'"]
        assert f"{ratio(eval(code)):.1f}" == printed, said
