"""A matrix for each head, by rules with an `Unfold`: updates equal to those of a loop."""

import functools
import math

import chex
import helpers
import jax
import numpy as np
import oracles
import pytest
from helpers import flat, nested
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks._times.sharded import collectives
from muon_jax import MuonDimensionNumbers, NewtonSchulz, Split, Unfold, by_role, muon, scale_by_muon

OF_HEADS = Unfold(-1, (-1, 4), MuonDimensionNumbers(-3, -1))
ALTERNATING = Unfold(-1, (2, 3, -1), MuonDimensionNumbers(-4, -1))
LATENT = Unfold(-1, (-1, 12), Split(-1, (4, 8), MuonDimensionNumbers(-3, -1)))  # nope, v
# The shapes of kernels, where each matrix ends, and the rules.
KERNELS = {
    "layers/self_attn/q_proj/kernel": ((2, 8, 16), [4, 8, 12, 16]),  # stacked, grouped
    "layers/self_attn/k_proj/kernel": ((2, 8, 4), [4]),
    "layers/self_attn/o_proj/kernel": ((2, 16, 8), [8]),
    "h/0/attn/query_key_value/kernel": ((8, 24), [4, 8, 12, 16, 20, 24]),
    "latent/self_attn/kv_b_proj/kernel": ((8, 24), [4, 12, 16, 24]),
}
RULES = {"query_key_value": ALTERNATING, "kv_b_proj": LATENT, "/[qkv]_proj/kernel": OF_HEADS}
UPDATE = {"learning_rate": 1.0, "ns_coeffs": NewtonSchulz(dtype="float32"), "ns_steps": 2}


def loop(kernel, ends):
    """The first update of a kernel (…, in, out) in float64, head by head and layer by layer."""
    if kernel.ndim > 2:
        return np.stack([loop(layer, ends) for layer in kernel])
    iterate = functools.partial(oracles.newton_schulz, triples=oracles.SIMPLE[:1] * 2)
    heads = np.split(np.asarray(kernel, np.float64), ends[:-1], axis=1)
    updates = [
        -math.sqrt(max(1, head.shape[1] / head.shape[0]))  # the scale of a head
        * oracles.on_wide(iterate, head / np.linalg.norm(head))
        for head in heads
    ]
    return np.concatenate(updates, axis=1)


def test_updates_are_those_of_a_loop_over_heads():
    kernels = helpers.random_tree({name: shape for name, (shape, _) in KERNELS.items()}, 0)
    params = nested(kernels)
    optimizer = muon(**UPDATE, muon_weight_dimension_numbers=by_role(rules=RULES))
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    for name, update in flat(updates).items():
        expected = loop(kernels[name], KERNELS[name][1])
        np.testing.assert_allclose(update, expected, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "axis_type", helpers.mostly_nightly([AxisType.Auto, AxisType.Explicit], [AxisType.Auto])
)
@pytest.mark.uncached
def test_heads_that_are_sharded_over_a_tensor_axis_exchange_nothing(axis_type):
    widths = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    params = nested(
        {
            f"attn/{name}/kernel": x
            for name, x in helpers.random_tree({k: (16, n) for k, n in widths.items()}, 0).items()
        }
    )
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(axis_type,))
    columns = NamedSharding(mesh, PartitionSpec(None, "tensor"))

    def compiled_update(params, **arguments):
        views = by_role(**arguments)
        optimizer = scale_by_muon(
            ns_coeffs=NewtonSchulz(dtype="float32"), ns_steps=2, weight_dimension_numbers=views
        )
        state = optimizer.init(params)
        compiled = jax.jit(optimizer.update).lower(params, state).compile()
        return compiled, compiled(params, state)[0]

    heads = {"_proj": OF_HEADS}
    sharded = jax.device_put(params, columns)
    compiled, updates = compiled_update(sharded, rules=heads)
    assert collectives(compiled) == {}
    assert all(x.sharding.is_equivalent_to(columns, 2) for x in jax.tree.leaves(updates))
    expected = compiled_update(params, rules=heads)[1]
    chex.assert_trees_all_close(jax.device_get(updates), jax.device_get(expected), atol=1e-6)
    assert collectives(compiled_update(sharded)[0]) == {"all-to-all": 2}  # of whole matrices
