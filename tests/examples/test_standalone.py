"""The optimizer by hand trains, and is that of the library."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import standalone
from muon_jax import NewtonSchulz, muon, newton_schulz


@pytest.mark.slow
def test_it_trains(capsys):
    standalone.main(["--epochs", "3"])
    accuracies = re.findall(r"accuracy ([\d.]+)%", capsys.readouterr().out)
    assert len(accuracies) == 3
    assert float(accuracies[-1]) > 96


@pytest.mark.slow
def test_it_is_muon(monkeypatch):
    exact = functools.partial(newton_schulz, dtype="float32")
    monkeypatch.setattr(standalone, "newton_schulz", exact)
    (images, labels), _ = standalone.digits()
    optimizer = muon(
        standalone.LEARNING_RATE,
        preset="keller",
        weight_decay=standalone.WEIGHT_DECAY,
        ns_coeffs=NewtonSchulz(dtype="float32", method="standard"),
    )

    @jax.jit
    def by_library(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    start = ours = theirs = standalone.init(0)
    momenta, state = jax.tree.map(jnp.zeros_like, start), optimizer.init(start)
    for batch in (slice(0, 50), slice(50, 100), slice(100, 150)):
        gradients = jax.grad(standalone.loss)(ours, images[batch], labels[batch])
        stepped = map(standalone.muon_step, ours, momenta, gradients)
        ours, momenta = (list(part) for part in zip(*stepped, strict=True))
        theirs, state = by_library(theirs, state, gradients)
    chex.assert_trees_all_close(ours, theirs, atol=2e-6)
    assert jnp.max(jnp.abs(ours[1] - start[1])) > 1e-3


def test_wrong_arguments_are_refused(capsys):
    with pytest.raises(SystemExit):
        standalone.main(["--epochs", "0"])
    assert "--epochs must be at least 1, got 0" in capsys.readouterr().err
