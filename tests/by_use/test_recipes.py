"""The recipes of the page run, and give Muon the parameters that they should."""

import re
from pathlib import Path

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muon_jax
from muon_jax import MuonDimensionNumbers, by_use, muon
from muon_jax._trees import path_name

PAGE = (Path(muon_jax.__file__).parents[1] / "docs" / "routing.md").read_text()
BLOCK = r"^```python\n(.*?)^```$(?:\n\nprints[^\n]*\n\n```text\n(.*?)^```$)?"
RECIPES = {
    section.partition("\n")[0]: re.findall(BLOCK, section, re.S | re.M)
    for section in re.split(r"^##* ", PAGE, flags=re.M)[1:]
}
MUON = {
    "Which parameters are matrices": {"layers/gate_up", "layers/down"},
    "Flax linen": {"Dense_0/kernel", "Dense_1/kernel"},
    "Flax nnx": {"first/kernel", "second/kernel"},
    "Equinox": {"layers/0/weight", "layers/1/weight"},
    "Haiku": {"mlp/~/linear_0/w", "mlp/~/linear_1/w"},
    "Networks that feed each other": {"actor/0", "actor/1", "critic/0", "critic/1"},
    "What raises": {"out", "head"},
    "A matrix for each head": {"q", "k", "v", "o"},
}
QUICK = ("Flax linen", "Haiku", "What raises", "A matrix for each head")


def test_all_recipes_are_here():
    assert {name: 1 for name in MUON} == {n: len(blocks) for n, blocks in RECIPES.items() if blocks}


@pytest.mark.parametrize("name", helpers.mostly_slow([*MUON], QUICK))
def test_muon_gets_the_hidden_matrices(name, capsys):
    ((code, printed),) = RECIPES[name]
    made = {}
    exec(compile(code, name, "exec"), made)
    if printed:
        assert capsys.readouterr().out.strip() == printed.strip()
    params, optimizer = made["params"], muon(0.02, muon_weight_dimension_numbers=made["routes"])
    state = optimizer.init(params)

    def of_muon(path):
        return path.removesuffix("/value") in MUON[name]

    mu = jax.tree.leaves_with_path(state.inner_states["muon"].inner_state[0].mu)
    assert {path_name(path).removesuffix("/value") for path, _ in mu} == MUON[name]
    keys = iter(jax.random.split(jax.random.key(1), 100))
    grads = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype), params)
    updates, _ = optimizer.update(grads, state, params)
    for path, update in paths_of(updates):
        assert np.all(np.isfinite(update)) and np.any(update)
        # AdamW's first step moves all entries by the same distance, Muon's does not.
        of_adamw = np.allclose(np.abs(update), np.abs(update).max(), rtol=1e-2)
        assert of_adamw != of_muon(path), path


def paths_of(tree):
    return [(path_name(path), jnp.asarray(x)) for path, x in jax.tree.leaves_with_path(tree)]


def tower(p, x):  # or a generator of two layers, and its discriminator
    return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]


def siamese(p, x):
    return (tower(p, x) * tower(p, x[::-1])).sum(-1)


def latent_attention(p, x):
    h = jnp.tanh(x @ p["a"])
    k = h @ p["b"] @ p["c"]
    return jax.nn.softmax(h @ p["q"] @ k.T) @ k @ p["d"]


def self_conditioned(p, x):
    return tower(p, jnp.tanh(tower(p, x))[:, :8])


def descended(p, x):
    grads = jax.grad(lambda p: (tower(p, x) ** 2).mean())(p)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)


@pytest.mark.parametrize(
    ("fn", "path", "role", "view"),
    [
        (siamese, "c", "output", None),
        (tower, "b", "hidden", MuonDimensionNumbers(0, 1)),
        (self_conditioned, "c", "hidden", MuonDimensionNumbers(0, 1)),
        (descended, "c", "hidden", MuonDimensionNumbers(0, 1)),
    ],
)
def test_the_limits_are_as_the_page_says(fn, path, role, view):
    """If one of these is told better, take it off the page."""
    params = {"a": jnp.ones((8, 32)), "b": jnp.ones((32, 32)), "c": jnp.ones((32, 16))}
    routed = by_use(fn, params, jnp.ones((4, 8)))[path]
    assert (routed.role, routed.view) == (role, view)
    assert f"`{role}`" in PAGE.partition("## Limits")[2].partition("\n## ")[0]


def test_latent_attention_without_a_norm_is_a_limit():
    shapes = {"a": (8, 32), "b": (32, 8), "c": (8, 16), "q": (32, 16), "d": (16, 3)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    routes = by_use(latent_attention, params, jnp.ones((4, 8)))
    assert [routes[name].role for name in "bcq"] == ["factor", "factor", "hidden"]


def test_the_recipe_for_freezing_takes_modules():
    """Paths have attributes there in the place of keys."""
    page = (Path(muon_jax.__file__).parents[1] / "docs" / "parameters.md").read_text()
    made = {}
    exec(re.findall(BLOCK, page.partition("## Freezing")[2], re.S | re.M)[0][0], made)

    class Network(eqx.Module):
        embedding: jax.Array
        layer_0: eqx.nn.Linear
        layer_01: eqx.nn.Linear

    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    labels = made["labels"](Network(jnp.ones((3, 2)), linear, linear))
    assert jax.tree.leaves(labels) == ["frozen"] * 3 + ["trained"] * 2
