"""The layers of Kimi K3 and Kimi Linear (KDA): Muon has projections, q, k and v head by head."""

import dataclasses
import functools

import flax_models
import helpers
import jax
import jax.numpy as jnp
import model_shapes
import numpy as np
import oracles
import pytest
from flax import nnx
from use_models import IN_OUT, f32, i32, nnx_module

from muon_jax import PRESETS, MuonDimensionNumbers, Unfold, by_role, by_use, muon
from muon_jax._matrices.views import MATRICES, is_view

QKV, OTHERS = {"q_proj", "k_proj", "v_proj"}, {"b_proj", "o_proj"}
LOW_RANK = {"f_a_proj", "f_b_proj"}
GATES = {False: {"g_proj"}, True: {"g_a_proj", "g_b_proj"}}  # of K3, and of Kimi Linear
# Filters of one channel, what each head has a number of, biases and norms.
OF_ADAMW = {"q_conv1d", "k_conv1d", "v_conv1d", "A_log", "dt_bias", "o_norm"}
HEADS = Unfold(1, (-1, 8), MuonDimensionNumbers(0, 2))  # of 8 columns

each_gate = pytest.mark.parametrize("low_rank_gate", GATES)


def kimi(low_rank_gate):
    return nnx_module(functools.partial(flax_models.Kimi, low_rank_gate=low_rank_gate), i32(2, 8))


def assert_attention(layer, expected):
    """That the modules of the attention have these views, and all others None."""
    found = {n: jax.tree.leaves(m, is_leaf=is_view) for n, m in layer["self_attn"].items()}
    assert found == {name: [view] for name, view in (dict.fromkeys(OF_ADAMW) | expected).items()}


@each_gate
def test_by_role(low_rank_gate):
    projections = QKV | LOW_RANK | GATES[low_rank_gate] | OTHERS
    _, params, _ = kimi(low_rank_gate)
    for layer in nnx.to_pure_dict(by_role(params))["layers"].values():
        assert_attention(layer, dict.fromkeys(projections, MATRICES))
    in_pytorch = model_shapes.shapes(model_shapes.kimi_k3(low_rank_gate))
    layer = by_role(in_pytorch, layout="out_in")["model"]["layers"]["0"]
    assert_attention(layer, dict.fromkeys(projections, MuonDimensionNumbers(-1, -2)))


# Two projections with nothing between are factors for by_use, see "Limits" in docs/routing.md.
RULES = {"(f|g)_[ab]_proj": IN_OUT}


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("rules", [None, RULES], ids=["no rules", "rules"])
@each_gate
def test_by_use(low_rank_gate, rules, per_head):
    """The step sizes of b_proj have one column for each head: it stays whole."""
    fn, params, inputs = kimi(low_rank_gate)
    routes = by_use(fn, params, *inputs, rules=rules, per_head=per_head)
    expected = dict.fromkeys(OTHERS | GATES[low_rank_gate], IN_OUT)
    expected |= dict.fromkeys(QKV, HEADS if per_head else IN_OUT)
    low_rank = LOW_RANK | (GATES[True] if low_rank_gate else set())
    expected |= dict.fromkeys(low_rank, IN_OUT if rules else None)
    for layer in nnx.to_pure_dict(routes(params))["layers"].values():
        assert_attention(layer, expected)


def test_an_update_is_that_of_each_head():
    """The report of K3 cuts the momenta of q, k and v along their heads."""
    fn, params, inputs = kimi(False)
    routes = by_use(fn, params, *inputs, per_head=True)
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    params, gradients = (
        treedef.unflatten(jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in leaves)
        for _ in range(2)
    )
    iteration = dataclasses.replace(PRESETS["kimi_k3"]["ns_coeffs"], dtype="float32")
    kwargs = {"ns_coeffs": iteration, "muon_weight_dimension_numbers": routes}
    optimizer = muon(0.1, preset="kimi_k3", **kwargs)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)

    def kernels(tree, name):
        kernel = nnx.to_pure_dict(tree)["layers"][1]["self_attn"][name]["kernel"]
        parts = np.split(np.float64(kernel), 3 if name in QKV else 1, axis=1)
        return [part.T for part in parts]

    for name in (*QKV, "g_proj", "b_proj", "o_proj"):
        each = (kernels(tree, name) for tree in (params, gradients, updates))
        for w, g, update in zip(*each, strict=True):
            expected = oracles.kimi_k3(w, g, {}, 1, 0.1) - w
            assert helpers.relative_error(update, expected) < 2e-4, name


def test_a_number_for_each_head_is_no_matrix():
    def fn(params, x):
        weights = jax.nn.sigmoid(x @ params["beta"])
        pooled = jnp.einsum("bth,bthd->bhd", weights, x.reshape(2, 8, 3, 10))
        return jnp.tanh(pooled.reshape(2, 30)) @ params["head"]

    params = {"beta": f32(30, 3), "head": f32(30, 5)}
    assert by_use(fn, params, f32(2, 8, 30))["beta"].view == IN_OUT
    with pytest.raises(ValueError, match="per_head=True finds no projection to heads"):
        by_use(fn, params, f32(2, 8, 30), per_head=True)
