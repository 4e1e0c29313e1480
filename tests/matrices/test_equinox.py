"""Modules of Equinox: which arrays are matrices, and steps equal to those of a dict of matrices."""

import functools

import chex
import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from muon_jax import MuonDimensionNumbers, NewtonSchulz, Unfold, by_role, describe, muon

HEADS, HEAD_DIM = 2, 4
PROJECTIONS_TO_HEADS = [f"attention/{name}_proj/weight" for name in ("query", "key", "value")]
# The matrices of the network below, in the order (in, out).
MATRICES = {
    "conv/weight": (1, 4 * 2 * 2, 8),
    **dict.fromkeys(PROJECTIONS_TO_HEADS, (1, 16, HEADS * HEAD_DIM)),
    "attention/output_proj/weight": (1, HEADS * HEAD_DIM, 16),
    "mlp/layers/0/weight": (1, 16, 8),
}
ARGUMENTS = {
    "adam_learning_rate": 0.01,
    "ns_coeffs": NewtonSchulz(dtype="float32"),
    "ns_steps": 2,
    "weight_decay": 0.1,
}


class Network(eqx.Module):
    embedding: eqx.nn.Embedding
    conv: eqx.nn.Conv2d
    pointwise: eqx.nn.Conv2d
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = iter(jax.random.split(key, 5))
        self.embedding = eqx.nn.Embedding(10, 16, key=next(keys))
        self.conv = eqx.nn.Conv2d(4, 8, 2, key=next(keys))
        self.pointwise = eqx.nn.Conv2d(8, 16, 1, key=next(keys))
        self.attention = eqx.nn.MultiheadAttention(
            HEADS, 16, qk_size=HEAD_DIM, vo_size=HEAD_DIM, key=next(keys)
        )
        self.norm = eqx.nn.LayerNorm(16)
        self.mlp = eqx.nn.MLP(16, 10, 8, 1, key=next(keys))

    def __call__(self, tokens, image):
        patches = self.pointwise(self.conv(image)).reshape(16, -1).T
        x = jnp.concatenate([jax.vmap(self.embedding)(tokens), patches])
        return jax.vmap(self.mlp)(jax.vmap(self.norm)(x + self.attention(x, x, x)))


def loss(model):
    return jnp.mean((model(jnp.arange(6), jnp.linspace(-1, 1, 36).reshape(4, 3, 3)) - 1) ** 2)


def has_shape(leaf):
    return hasattr(leaf, "shape")


@functools.cache
def network():
    """With normal entries in its arrays, none of which is constant."""
    rng = np.random.default_rng(0)
    model = eqx.filter_eval_shape(Network, jax.random.key(0))
    shapes, others = eqx.partition(model, has_shape)
    arrays = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes)
    return eqx.combine(arrays, others)


def pasted_views(**rules):
    """The call that the error for the network says to pass, with rules for its first layers."""
    rules |= {
        "^conv/weight": MuonDimensionNumbers((-3, -2, -1), -4),
        "^mlp/layers/0/weight": MuonDimensionNumbers(-1, -2),
    }
    with pytest.raises(ValueError, match="by_role does not know") as raised:
        by_role(eqx.filter(network(), eqx.is_array), layout="out_in", rules=rules)
    return helpers.pasted(str(raised.value))


def matrices_of(params, views):
    parameters = describe(params, muon_weight_dimension_numbers=views).parameters
    return {p.path: p.matrices for p in parameters if p.optimizer == "muon"}


def test_what_names_do_not_tell_has_one_call_to_paste():
    views = pasted_views()
    assert views.keywords["layout"] == "out_in"
    rules = [rule for rule, view in views.keywords["rules"].items() if view is None]
    assert rules == [r"^pointwise/weight$", r"^mlp/layers/1/weight$"]
    found = matrices_of(eqx.filter(network(), eqx.is_array), views)
    assert found == {name: (stack,) for name, stack in MATRICES.items()}


def test_blocks_need_no_rules():
    """Neither in a list nor stacked by `eqx.filter_vmap`."""

    def block(key):
        return {"attention": network().attention, "mlp": eqx.nn.MLP(16, 16, 64, 1, key=key)}

    keys = jax.random.split(jax.random.key(0), 3)
    stacked = eqx.filter_eval_shape(eqx.filter_vmap(block), keys)
    one = eqx.filter_eval_shape(block, keys[0])
    params = eqx.filter({"blocks": stacked, "h": [one]}, has_shape)
    views = by_role(layout="out_in")
    layer = {"mlp/layers/0/weight": (16, 64), "mlp/layers/1/weight": (64, 16)}
    layer |= {name: stack[1:] for name, stack in MATRICES.items() if name.startswith("attention")}
    assert matrices_of(params, views) == {
        f"{name}/{below}": ((count, *shape),)
        for name, count in (("blocks", 3), ("h/0", 1))
        for below, shape in layer.items()
    }


def parts(tree, heads):
    """Matrices (in, out), one for each head of q, k and v. Other arrays are flat."""

    def of_one(name, array):
        if name not in MATRICES:
            return [array.ravel()]
        count = heads if name in PROJECTIONS_TO_HEADS else 1
        return [part.T for part in np.split(array.reshape(len(array), -1), count)]

    return {name: of_one(name, np.asarray(x)) for name, x in helpers.flat(tree).items()}


@pytest.mark.slow
@pytest.mark.parametrize("heads", helpers.mostly_nightly([1, HEADS], [HEADS]))
def test_steps_are_those_of_a_dict_of_matrices(heads):
    of_heads = Unfold(-2, (HEADS, HEAD_DIM), MuonDimensionNumbers(-1, -2))
    rules = {"(query|key|value)_proj/weight": of_heads} if heads > 1 else {}
    optimizer = muon(0.02, **ARGUMENTS, muon_weight_dimension_numbers=pasted_views(**rules))

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(loss)(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, grads

    @jax.jit
    def plain_step(plain, state, grads):
        updates, state = plain_optimizer.update(grads, state, plain)
        return optax.apply_updates(plain, updates), state

    plain_optimizer = muon(0.02, **ARGUMENTS)  # its matrices are the arrays of rank 2
    params = eqx.filter(network(), eqx.is_array)
    model, state = network(), optimizer.init(params)
    plain = parts(params, heads)
    plain_state = plain_optimizer.init(plain)
    for _ in range(2):
        model, state, grads = step(model, state)
        plain, plain_state = plain_step(plain, plain_state, parts(grads, heads))
    found = parts(eqx.filter(model, eqx.is_array), heads)
    chex.assert_trees_all_close(found, plain, atol=1e-6, rtol=0)
