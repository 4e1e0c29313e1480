"""The code of the page runs, and gives Muon the parameters that it should."""

import re
from pathlib import Path

import equinox as eqx
import haiku as hk
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import muon_jax
from muon_jax import MuonDimensionNumbers, by_role, by_use, describe, muon
from muon_jax._trees import path_name

PAGE = (Path(muon_jax.__file__).parents[1] / "docs" / "routing.md").read_text()
BLOCK = r"^```python\n(.*?)^```$(?:\n\nprints[^\n]*\n\n```text\n(.*?)^```$)?"
RECIPES = {
    section.partition("\n")[0]: re.findall(BLOCK, section, re.S | re.M)
    for section in re.split(r"^##* ", PAGE, flags=re.M)[1:]
}
MUON = {
    "Flax nnx": {"gate_up/kernel", "down/kernel"},
    "Flax linen": {"Dense_0/kernel"},
    "Equinox": {"layers/0/weight", "layers/1/weight"},
}
QUICK = ("Flax linen",)


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

    mu = jax.tree.leaves_with_path(state.inner_states["muon"].inner_state[0].mu)
    assert {path_name(path).removesuffix("/value") for path, _ in mu} == MUON[name]
    keys = iter(jax.random.split(jax.random.key(1), 100))
    grads = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype), params)
    updates, _ = optimizer.update(grads, state, params)
    for path, update in paths_of(updates):
        assert np.all(np.isfinite(update)) and np.any(update)
        # AdamW's first step moves all entries by the same distance, Muon's does not.
        of_adamw = np.allclose(np.abs(update), np.abs(update).max(), rtol=1e-2)
        assert of_adamw != (path.removesuffix("/value") in MUON[name]), path


def said(heading, pattern):
    """The one expression between backticks that the page has below a heading."""
    (section,) = re.findall(rf"^##* {heading}\n(.*?)(?=^#|\Z)", PAGE, re.S | re.M)
    (expression,) = re.findall(f"`({pattern})`", section)
    return expression


def of_muon(routes):
    return {path for path in routes if routes[path].view is not None}


def test_haiku():
    def network(x):
        return hk.nets.MLP([64, 64, 10])(x, dropout_rate=0.1, rng=hk.next_rng_key())

    def with_state(x):
        return hk.BatchNorm(True, True, 0.9)(network(x), is_training=True)

    key, batch = jax.random.key(0), jnp.zeros((8, 32))
    hidden = {"mlp/~/linear_0/w", "mlp/~/linear_1/w"}
    model = hk.transform(network)
    made = {"params": model.init(key, batch), "key": key, "batch": batch, "model": model}
    assert of_muon(eval(said("Haiku", r"by_use\(.*\)"), {"by_use": by_use} | made)) == hidden
    model = hk.transform_with_state(with_state)
    params, state = model.init(key, batch)
    inputs = eval(said("Haiku", "state, .*"), made | {"state": state})
    assert of_muon(by_use(model.apply, params, *inputs)) == hidden


def test_linen_parameters_may_stay_in_boxes():
    boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor"))
    model = nn.Sequential([nn.Dense(64, kernel_init=boxed), nn.relu, nn.Dense(10)])
    params = model.init(jax.random.key(0), jnp.zeros((8, 32)))["params"]
    assert isinstance(params["layers_0"]["kernel"], nn.Partitioned)
    routes = by_use(
        lambda params, x: model.apply({"params": params}, x), params, jnp.zeros((8, 32))
    )
    views = [route.view for route in routes.parameters if len(route.shape) == 2]
    assert views == [MuonDimensionNumbers(0, 1), None]
    muon(0.02, muon_weight_dimension_numbers=routes).init(params)


def test_rules_decide_first():
    params = {"gate": jnp.ones((16, 64)), "mixer": jnp.ones((64, 4))}

    def loss(params, x):
        return jax.nn.relu(x @ params["gate"]) @ params["mixer"]

    made = {"by_use": by_use, "MuonDimensionNumbers": MuonDimensionNumbers, "loss": loss}
    batch = jnp.zeros((8, 16))
    plain = by_use(loss, params, batch)
    routes = eval(said("Rules", r"by_use\(.*\)"), made | {"params": params, "batch": batch})
    assert of_muon(plain) == {"gate"}
    assert of_muon(routes) == {"mixer"}  # the other way round
    assert routes["gate"].reason == "the rule '^gate$' matches; without it: input"


def test_both_forward_passes_of_networks_that_feed_each_other():
    def mlp(layers, x):
        for kernel in layers[:-1]:
            x = jax.nn.relu(x @ kernel)
        return x @ layers[-1]

    def critic(layers, state, action):
        return mlp(layers, jnp.concatenate([state, action], axis=-1))

    def networks(params, state, action):
        return mlp(params["actor"], state), critic(params["critic"], state, action)

    def loss(params, state):
        return -critic(params["critic"], state, mlp(params["actor"], state)).mean()

    params = {
        "actor": [jnp.ones((16, 64)), jnp.ones((64, 64)), jnp.ones((64, 4))],
        "critic": [jnp.ones((20, 64)), jnp.ones((64, 64)), jnp.ones((64, 1))],
    }
    state, action = jnp.zeros((8, 16)), jnp.zeros((8, 4))
    routes = by_use(networks, params, state, action)
    assert of_muon(routes) == {"actor/0", "actor/1", "critic/0", "critic/1"}
    with pytest.raises(ValueError, match=r"on actor/2 of shape \(64, 4\), .* feed critic: .* pass"):
        by_use(loss, params, state)


def test_each_head_is_a_matrix():
    shapes = {"q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64), "head": (64, 10)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}

    def loss(params, x):
        q, k, v = ((x @ params[name]).reshape(*x.shape[:2], -1, 16) for name in "qkv")
        attended = jax.nn.dot_product_attention(q, k, v)
        return (x + attended.reshape(x.shape) @ params["o"]) @ params["head"]

    made = {"by_use": by_use, "loss": loss, "params": params, "batch": jnp.zeros((2, 8, 64))}
    routes = eval(said("A matrix for each head", r"by_use\(.*\)"), made)
    description = describe(params, muon_weight_dimension_numbers=routes)
    assert {p.path: p.matrices for p in description.parameters} == {
        "q": ((4, 64, 16),),
        "k": ((2, 64, 16),),
        "v": ((2, 64, 16),),
        "o": ((1, 64, 64),),
        "head": (),
    }


@pytest.mark.parametrize(
    ("view", "shape", "matrices"),
    [
        (r"MuonDimensionNumbers\(\(.*?\), 3\)", (3, 3, 4, 16), ((1, 36, 16),)),
        (r"Split\(.*?\)\)", (16, 48), ((1, 16, 16),) * 3),
        (r"Unfold\(.*\)", (16, 48), ((6, 16, 8),)),
        (r"Unfold\(.*\)", (2, 16, 48), ((12, 16, 8),)),
    ],
)
def test_views_by_hand(view, shape, matrices):
    view = eval(said("By hand", view), vars(muon_jax))
    params, views = {"a": jnp.ones((8, 8)), "b": jnp.ones(shape)}, {"a": None, "b": view}
    described = describe(params, muon_weight_dimension_numbers=views).parameters
    assert [p.matrices for p in described] == [(), matrices]


def test_by_role():
    params = {
        "layers": {"query": {"kernel": jnp.ones((2, 16, 4, 4))}, "up": jnp.ones((2, 16, 64))},
        "Dense_1": {"kernel": jnp.ones((16, 10))},
    }
    with pytest.raises(ValueError, match="by_role does not know") as raised:
        muon(0.02, muon_weight_dimension_numbers=by_role).init(params)
    call = said("By role", r"by_role\(rules=.*\)")
    assert helpers.pasted(str(raised.value)).keywords == eval(call, {"by_role": by_role}).keywords
    views = eval(call, {"by_role": by_role})
    described = describe(params, muon_weight_dimension_numbers=views).parameters
    assert [p.optimizer for p in described] == ["adamw", "muon", "muon"]
    other = {"up": jnp.ones((64, 16)), "bias": jnp.ones(64)}
    layout = eval(said("By role", r"by_role\(layout=.*\)"), {"by_role": by_role})
    assert layout({"layers": [other]})["layers"][0]["up"] == MuonDimensionNumbers(-1, -2)


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
    """If `by_use` decides one of the first three better, take it off the page."""
    params = {"a": jnp.ones((8, 32)), "b": jnp.ones((32, 32)), "c": jnp.ones((32, 16))}
    routed = by_use(fn, params, jnp.ones((4, 8)))[path]
    assert (routed.role, routed.view) == (role, view)
    assert f"`{role}`" in PAGE.partition("## Limits")[2].partition("\n## ")[0]


def test_latent_attention_without_a_norm_is_a_limit():
    shapes = {"a": (8, 32), "b": (32, 8), "c": (8, 16), "q": (32, 16), "d": (16, 3)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    routes = by_use(latent_attention, params, jnp.ones((4, 8)))
    assert [routes[name].role for name in "bcq"] == ["factor", "factor", "hidden"]


def made_below(heading):
    """What the first code below a heading of parameters.md makes."""
    page = (Path(muon_jax.__file__).parents[1] / "docs" / "parameters.md").read_text()
    made = {}
    exec(re.findall(BLOCK, page.partition(heading)[2], re.S | re.M)[0][0], made)
    return made


def test_the_recipe_for_freezing_freezes():
    made = made_below("## Freezing")
    params, optimizer = made["params"], made["optimizer"]
    state = optimizer.init(params)
    moments = [path for path, _ in paths_of(state) if re.search(r"\b(?:mu|nu)\b", path)]
    assert len(moments) == 3  # Muon's momentum of one matrix, AdamW's two of the head
    assert all(path.endswith(("layer_1/kernel", "head")) for path in moments)
    updates, _ = optimizer.update(params, state, params)
    moved = {path for path, update in paths_of(updates) if update.any()}
    assert moved == {"layer_1/kernel", "head"}


def test_the_recipe_for_masked_decay_is_adamw():
    made = made_below("## Weight decay")
    params, optimizer = made["params"], made["optimizer"]
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    adamw = optax.adamw(made["rate"], weight_decay=made["decay"], mask=made["mask"])
    expected, _ = adamw.update(params, adamw.init(params), params)
    for name in ("bias", "head"):
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-6)


def test_the_recipe_for_freezing_takes_modules():
    """Paths have attributes there in the place of keys."""
    made = made_below("## Freezing")

    class Network(eqx.Module):
        embedding: jax.Array
        layer_0: eqx.nn.Linear
        layer_01: eqx.nn.Linear

    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    labels = made["labels"](Network(jnp.ones((3, 2)), linear, linear))
    assert jax.tree.leaves(labels) == ["frozen"] * 3 + ["trained"] * 2
