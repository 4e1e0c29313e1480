"""A matrix for each head: the routes of published models, and updates equal to those of a loop."""

import functools
import math
import re
from pathlib import Path

import chex
import helpers
import jax
import jax.numpy as jnp
import model_shapes
import numpy as np
import optax
import oracles
import pytest
from helpers import flat, nested
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from model_shapes import shapes

import muon_jax
from benchmarks._times.sharded import collectives
from muon_jax import (
    MuonDimensionNumbers,
    NewtonSchulz,
    Unfold,
    by_role,
    describe,
    explain,
    muon,
    scale_by_muon,
)

PAGE = Path(muon_jax.__file__).parent / "docs" / "muon.md"
PER_HEAD = by_role(per_head=True)
OUT_IN = {"layout": "out_in"}
OF_MOE = {**OUT_IN, "rules": {"mlp/gate/weight$": None}}  # the router
# The models of the table, and the arguments that they need.
PUBLISHED = {
    "GPT-2": (model_shapes.gpt2(1, 768), {**OUT_IN, "head_dim": 64}),
    "BLOOM 560M": (model_shapes.bloom(1, 1024), {"head_dim": 64}),
    "Llama 3 8B": (model_shapes.llama(), {"head_dim": 128}),
    "Gemma 3 4B": (model_shapes.gemma3(), {}),
    "Qwen3 30B-A3B": (model_shapes.qwen3_moe(), OF_MOE),
    "DeepSeek V3": (model_shapes.deepseek(), OF_MOE),
    "Kimi K2": (model_shapes.kimi_k2(), OF_MOE),
    "Moonlight 16B-A3B": (model_shapes.moonlight(), OF_MOE),
    "GLM-5": (model_shapes.glm5(), OF_MOE),
}


def line_of(name):
    """The line of the table for a model."""
    tree, arguments = PUBLISHED[name]
    views = functools.partial(PER_HEAD, **arguments)
    parameters = describe(shapes(tree), muon_weight_dimension_numbers=views).parameters
    per_head, whole = [], []
    for p in parameters:
        module = re.search(r"(?:attn|attention)/(.*)/\w+$", p.path)
        if p.optimizer == "muon" and module:
            stacks = " and ".join(f"{n} of {rows}×{cols}" for n, rows, cols in p.matrices)
            is_whole = stacks.startswith("1 of")
            (whole if is_whole else per_head).append(
                f"`{module[1]}`" + f" {stacks}" * (not is_whole)
            )
    given = [f"`{key}={value!r}`" for key, value in arguments.items() if key != "rules"]
    cells = [", ".join(cell) for cell in (given, per_head, whole)]
    return f"| {name} | {' | '.join(cell or '-' for cell in cells)} |"


@pytest.mark.parametrize("name", PUBLISHED)
def test_routes_of_published_models_are_those_of_the_table(name):
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    assert lines == [line_of(name)]


# Kernels (in, out), and the columns where their matrices end.
KERNELS = {
    "decoder/layers/self_attn/q_proj/kernel": ((2, 8, 16), [4, 8, 12, 16]),  # stacked, grouped
    "decoder/layers/self_attn/k_proj/kernel": ((2, 8, 4), [4]),
    "decoder/layers/self_attn/o_proj/kernel": ((2, 16, 8), [8]),
    "h/0/attn/query_key_value/kernel": ((8, 24), [4, 8, 12, 16, 20, 24]),
    # Two heads of latent attention, with rope = nope = 4 and v = 8.
    "latent/self_attn/q_b_proj/kernel": ((8, 16), [8, 16]),
    "latent/self_attn/kv_b_proj/kernel": ((8, 24), [4, 12, 16, 24]),
    "latent/self_attn/kv_a_proj_with_mqa/kernel": ((8, 8 + 4), [12]),
    "latent/self_attn/o_proj/kernel": ((16, 8), [8]),
}
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


@pytest.mark.parametrize("layout", helpers.mostly_nightly(["in_out", "out_in"], ["out_in"]))
def test_updates_are_those_of_a_loop_over_heads(layout):
    def ordered(kernel):
        return kernel if layout == "in_out" else kernel.swapaxes(-1, -2)

    kernels = helpers.random_tree({name: shape for name, (shape, _) in KERNELS.items()}, 0)
    params = nested(jax.tree.map(ordered, kernels))
    views = functools.partial(PER_HEAD, layout=layout, head_dim=4)
    optimizer = muon(**UPDATE, muon_weight_dimension_numbers=views)
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    for name, update in flat(updates).items():
        expected = loop(kernels[name], KERNELS[name][1])
        np.testing.assert_allclose(ordered(update), expected, atol=1e-6, err_msg=name)


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

    sharded = jax.device_put(params, columns)
    compiled, updates = compiled_update(sharded, per_head=True, head_dim=4)
    assert collectives(compiled) == {}
    assert all(x.sharding.is_equivalent_to(columns, 2) for x in jax.tree.leaves(updates))
    expected = compiled_update(params, per_head=True, head_dim=4)[1]
    chex.assert_trees_all_close(jax.device_get(updates), jax.device_get(expected), atol=1e-6)
    assert collectives(compiled_update(sharded)[0]) == {"all-to-all": 2}  # of whole matrices


def attention(**projections):
    return {"attn": {name: {"kernel": shape} for name, shape in projections.items()}}


@pytest.mark.parametrize(
    ("tree", "arguments", "message"),
    [
        (
            {"h": {str(i): attention(q_proj=(8, 12), o_proj=(12, 8)) for i in range(3)}},
            {},
            r"heads of h/0/attn/q_proj/kernel of shape \(8, 12\) and 2 like it, whose heads have a"
            r" width that nothing tells: pass by_role\(per_head=True,"
            r" head_dim=128\) for heads of 128 columns, or by_role",
        ),
        (
            attention(c_attn=(12, 8)),
            {"layout": "out_in", "head_dim": 8},
            r"c_attn/kernel of shape \(12, 8\), whose 12 columns are no multiple of a head's 8:"
            r" pass by_role\(layout='out_in', per_head=True, head_dim=8, rules",
        ),
        (
            attention(q_b_proj=(6, 12), kv_b_proj=(6, 14), o_proj=(6, 8)),  # kv_a is missing
            {"head_dim": 2},
            "q_b_proj.*, whose heads the projections beside it do not tell: pass",
        ),
        (
            attention(q_proj=(8, 8), k_proj=(8, 8), v_proj=(8, 16), o_proj=(16, 8)),
            {"head_dim": 4},
            r"heads of attn/v_proj/kernel .* may have another width than those of q: pass",
        ),
        (
            attention(q_proj=(8, 8), k_proj=(8, 8), v_proj=(8, 16), to_out=(16, 8)),
            {"head_dim": 4},
            r"heads of attn/v_proj/kernel .* may have another width than those of q: pass",
        ),
        (
            {f"attn_{i}": {f"Dense_{j}": {"kernel": (8, 8)} for j in range(4)} for i in range(2)},
            {},
            r"heads of attn_0/Dense_0/kernel .* and 7 like it, which may be a projection to heads",
        ),
        (
            attention(q_proj=(8, 8), g_proj=(8, 8)),
            {"head_dim": 4},
            "heads of attn/g_proj/kernel .* which may be a projection to heads: pass",
        ),
        (
            {"h": {"0": {"q_attn": {"kernel": (8, 8)}}}},
            {},
            "heads of h/0/q_attn/kernel .* which may be a projection to heads: pass",
        ),
        (
            {"a": attention(q_proj=(8, 8), in_proj_qkvz=(8, 40))["attn"]},
            {"head_dim": 4},
            "no rule knows the role of a/in_proj_qkvz",
        ),
    ],
)
def test_what_cannot_be_told_raises_with_the_remedy(tree, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        PER_HEAD(shapes(tree), **arguments)
    call = re.search(r"by_role\((?!.*by_role).*\}\)", str(error.value))
    assert call
    norm = {"q_norm": {"scale": (arguments.get("head_dim", 4),)}}
    other = attention(q_proj=(8, 8), o_proj=(8, 8))["attn"] | norm
    views = eval(call[0], vars(muon_jax))
    views(shapes({**tree, "other": {"attn": other}}))


def test_arguments():
    tree = shapes(attention(q_proj=(8, 8)))
    with pytest.raises(ValueError, match="head_dim=4 needs per_head=True: pass both, or neither"):
        by_role(tree, head_dim=4)
    with pytest.raises(
        ValueError, match=r"finds no projection to heads among the 1 .* 'h_0/up/kernel"
    ):
        PER_HEAD(shapes({"h_0": {"up": {"kernel": (8, 8)}}}))
    with pytest.raises(ValueError, match=r"head_dim must be an integer in \[1, inf\), got 0"):
        PER_HEAD(tree, head_dim=0)


def with_norm_of_q(size, **projections):
    tree = attention(**projections)
    tree["attn"]["q_norm"] = {"scale": (size,)}
    return tree


def test_a_norm_of_q_tells_the_width_of_a_head_where_it_is_narrower_than_all():
    def width(norm, head_dim):
        tree = shapes(with_norm_of_q(norm, q_proj=(8, 12), o_proj=(12, 8)))
        return PER_HEAD(tree, head_dim=head_dim)["attn"]["q_proj"]["kernel"].sizes[1]

    assert [width(4, None), width(4, 4), width(12, 6)] == [4, 4, 6]


def test_a_value_without_q_and_k_beside_it_is_split_in_no_tree():
    heads = {"blocks": [{"value": {"kernel": (8, 4)}}], "policy_head": {"kernel": (8, 18)}}
    tree = shapes({"tr": attention(q_proj=(8, 8), o_proj=(8, 8)), **heads})
    assert PER_HEAD(tree, head_dim=4)["blocks"] == by_role(tree)["blocks"]
    alone = {**attention(value=(8, 8)), "b": {"v_proj": {"kernel": (8, 8)}}}
    message = r"attn/value/kernel .*, b/v_proj/kernel .* which may be a projection to heads: pass"
    with pytest.raises(ValueError, match=message):
        PER_HEAD(shapes({**alone, "tr": attention(q_proj=(8, 8))}), head_dim=4)


def test_a_norm_over_all_of_q_tells_no_width_where_v_is_wider():
    tree = shapes(with_norm_of_q(8, q_proj=(8, 8), k_proj=(8, 8), o_proj=(16, 8)))
    projections = PER_HEAD(tree, head_dim=4)["attn"]
    assert [projections[name]["kernel"].sizes for name in ("q_proj", "k_proj")] == [(-1, 4)] * 2


def test_head_dim_does_not_yield_to_a_norm_of_q():
    normed = {"a": with_norm_of_q(4, q_proj=(8, 12), k_proj=(8, 4), o_proj=(12, 8))}
    with pytest.raises(
        ValueError,
        match=r"head_dim=6 does not fit a/attn/k_proj/kernel of shape \(8, 4\), whose norm of q"
        r" tells heads of 4 columns, a/attn/q_proj/.*: pass by_role\("
        r"per_head=True\) if",
    ) as error:
        PER_HEAD(shapes(normed), head_dim=6)
    assert PER_HEAD(shapes(normed))["a"]["attn"]["k_proj"]["kernel"].sizes == (-1, 4)
    (call,) = re.findall(r"by_role\((?!.*by_role).*\}\)", str(error.value))
    views = eval(call, vars(muon_jax))
    found = views(shapes({**normed, "b": attention(q_proj=(8, 12), o_proj=(12, 8))}))
    assert found["a"] == PER_HEAD(shapes(normed))["a"]
    assert found["b"]["attn"]["q_proj"]["kernel"].sizes == (-1, 6)


LATENT = attention(q_b_proj=(8, 16), kv_b_proj=(8, 24), kv_a_proj=(8, 12), o_proj=(16, 8))


def test_head_dim_that_no_parameter_uses_raises_unless_parameters_are_masked():
    views = PER_HEAD(shapes(LATENT))
    axes = attention(q_proj=(8, 2, 4), o_proj=(2, 4, 8))
    for tree in (LATENT, axes):
        with pytest.raises(
            ValueError, match=r"head_dim=4 is used by none .* pass .*by_role\(per_head=True\),"
        ):
            PER_HEAD(shapes(tree), head_dim=4)
    masked = shapes(LATENT) | {"other": optax.MaskedNode()}
    assert PER_HEAD(masked, head_dim=4)["attn"] == views["attn"]
    arguments = {"muon_weight_dimension_numbers": functools.partial(PER_HEAD, head_dim=4)}
    described = describe(masked, **arguments).parameters
    explained = explain(masked, PartitionSpec(), **arguments).groups
    assert ((2, 8, 4), (2, 8, 8)) in [p.matrices for p in described]
    assert ((2, 4, 8), (2, 8, 8)) in [g.matrices for g in explained]  # m ≤ n
    mixed = PER_HEAD(shapes({"a": LATENT, "b": attention(q_proj=(8, 8))}), head_dim=4)
    assert mixed["a"] == views and mixed["b"]["attn"]["q_proj"]["kernel"].sizes == (-1, 4)


@pytest.mark.parametrize("head_dim", [4.0, jnp.int32(4)])
def test_the_width_of_a_head_may_be_of_another_type(head_dim):
    tree = {"a": {"q_proj": jnp.ones((8, 16)), "o_proj": jnp.ones((16, 8))}}
    views = by_role(tree, per_head=True, head_dim=head_dim)
    assert views["a"]["q_proj"] == Unfold(-1, (-1, 4), MuonDimensionNumbers(-3, -1))
