"""The mixture of experts learns, on four devices as on one."""

import re

import helpers
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import moe
from muon_jax import describe

EXPERTS, WIDTH = 4, 16


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(moe, "CONTEXT", 16)
    monkeypatch.setattr(moe, "LAYERS", 1)


@pytest.fixture
def model():
    return moe.Transformer(EXPERTS, WIDTH, nnx.Rngs(0))


def mesh_of(*sizes):
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, moe.AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


@pytest.mark.nightly
def test_it_learns_the_same_on_four_devices_as_on_one(model, capsys):
    optimizer = moe.make_optimizer("muon", 0.02, None, model)
    alone, _ = moe.train(model, optimizer, mesh_of(1, 1), 30)
    assert alone[0] > 5.5 and np.mean(alone[-5:]) < 0.7 * alone[0]  # ln 256 = 5.55
    moe.main("--steps 8 --width 16 --experts 4 --mesh expert=2,fsdp=2".split())
    out = capsys.readouterr().out
    assert "blocks/0/moe/router/kernel" in out and "exchange over fsdp" in out
    assert "on 4 devices (cpu)" in out
    losses = {int(step) - 1: float(loss) for step, loss in re.findall(r"(\d+): (\S+)", out)}
    assert losses.keys() == {0, 1, 2, 4, 5, 7}
    for step, loss in losses.items():
        assert loss == pytest.approx(alone[step], abs=0.01)
    assert losses[0] - losses[7] > 0.1


@pytest.mark.slow
def test_experts_go_to_muon_and_are_exchanged_over_fsdp_only(model):
    params = nnx.state(model)
    arguments = moe.muon_arguments("gram", model)
    description = describe(params, **arguments)
    found = {p.path: p for p in description.parameters}
    router = found["blocks/0/moe/router/kernel"]
    assert router.role.startswith("router") and router.optimizer == "adamw"
    for name, shape in (("up", (WIDTH, 2 * WIDTH)), ("down", (2 * WIDTH, WIDTH))):
        assert found[f"blocks/0/moe/experts/{name}"].matrices == ((EXPERTS, *shape),)
    assert {group.method for group in description.groups} == {"gram"}

    specs = moe.specs_of(params)
    local = helpers.exchanges(params, specs, mesh_of(4, 1), **arguments)
    assert {g.mode for g in local.groups} == {"local"}
    explanation = helpers.exchanges(params, specs, mesh_of(2, 2), **arguments)
    assert {g.mode for g in explanation.groups} == {"exchange over fsdp"}


@pytest.mark.slow
def test_no_byte_depends_on_a_later_one(model):
    text = np.arange(16)[None]
    changed = text.copy()
    changed[0, 8:] += 100
    (before, _), (after, balance) = model(text), model(changed)
    np.testing.assert_array_equal(before[0, :8], after[0, :8])
    assert np.all(np.any(before[0, 8:] != after[0, 8:], axis=-1))
    assert 0.9 < balance < EXPERTS


@pytest.mark.slow
def test_an_expert_takes_no_more_than_its_capacity():
    layer = moe.MixtureOfExperts(EXPERTS, WIDTH, nnx.Rngs(0))
    layer.router.kernel[...] = np.tile(100 * np.eye(EXPERTS)[0], (WIDTH, 1))  # all to the first
    layer.experts.up[...] = np.abs(layer.experts.up[...])
    x = np.ones((1, 16, WIDTH), np.float32)
    result, balance = layer(x)
    capacity = 10  # 1.25 · 2 choices · 16 bytes / 4 experts
    passed = np.any(np.asarray(result[0]) != 0, axis=-1)
    assert passed.tolist() == [True] * capacity + [False] * (16 - capacity)
    assert balance == pytest.approx(EXPERTS / moe.EXPERTS_PER_BYTE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "tensor=2"], "need sizes such as expert=2,fsdp=2, got 'tensor=2'"),
        (["--mesh", "expert=3"], "--experts must be at least 2 and a multiple of expert=3, got 8"),
        (["--mesh", "expert=32", "--experts", "32"], "divide a batch of 16, got 32"),
        (["--width", "30"], "--width a multiple of 4"),
        (["--steps", "0"], "--steps 1"),
    ],
)
def test_wrong_arguments_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        moe.main(words)
    assert message in capsys.readouterr().err
