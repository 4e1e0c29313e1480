"""QK-clip against the attention logits that the clipped weights make, in float64."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from muon_jax import muon
from muon_jax._matrices.views import Split
from muon_jax.contrib import KeyHeads, QueryHeads, qk_clip

TOKENS, WIDTH = 12, 10


def attention(queries, keys):
    """The logits (heads, tokens, tokens) of queries and keys (tokens, heads, dim)."""
    keys = np.repeat(keys, queries.shape[1] // keys.shape[1], axis=1)
    return np.einsum("qhd,khd->hqk", queries, keys)


def multi_head(w, x, heads=4):
    return attention(*((x @ w[name]).reshape(TOKENS, heads, -1) for name in ("query", "key")))


def grouped(w, x):
    return attention(*(np.einsum("tm,mhd->thd", x, w[name]) for name in ("query", "key")))


def heads_first(w, x):
    return attention(*(np.einsum("tm,hmd->thd", x, w[name]) for name in ("query", "key")))


def fused(w, x):
    q, k, _ = np.split(x @ w["qkv"], (18, 24), axis=1)
    return attention(q.reshape(TOKENS, 6, 3), k.reshape(TOKENS, 2, 3))


def latent(w, x):
    """Multi-head latent attention: heads of 3 without and 2 with positions, values of 4."""
    queries = (x @ w["q_b"]).reshape(TOKENS, 4, 5)
    keys = (x @ w["kv_b"]).reshape(TOKENS, 4, 7)[:, :, :3]
    shared = (x @ w["k_rope"])[:, None]
    return attention(queries[..., :3], keys) + attention(queries[..., 3:], shared)


def layers_of(logits, axis=0):
    def function(w, x):
        layers = range(w["query"].shape[axis])
        return np.stack([logits({n: np.take(p, i, axis) for n, p in w.items()}, x) for i in layers])

    return function


HALF = ((3, 0.5),)
ATTENTIONS = {
    "multi-head": (
        {"query": (WIDTH, 12), "key": (WIDTH, 12), "value": (WIDTH, 12)},
        {"query": QueryHeads(HALF), "key": KeyHeads(HALF)},
        multi_head,
    ),
    "grouped": (
        {"query": (WIDTH, 6, 3), "key": (WIDTH, 2, 3)},
        {"query": QueryHeads(HALF, 2, axis=(-2, -1)), "key": KeyHeads(HALF, axis=(-2, -1))},
        grouped,
    ),
    "grouped, queries bear all": (
        {"query": (WIDTH, 6, 3), "key": (WIDTH, 2, 3)},
        {"query": QueryHeads(((3, 0),), axis=(-2, -1))},
        grouped,
    ),
    "multi-query, heads first": (
        {"query": (4, WIDTH, 3), "key": (1, WIDTH, 3)},
        {"query": QueryHeads(HALF, 1, axis=(0, 2)), "key": KeyHeads(HALF, axis=(0, 2))},
        heads_first,
    ),
    "fused": (
        {"qkv": (WIDTH, 30)},
        {"qkv": Split(-1, (18, 6, 6), [QueryHeads(HALF, 2), KeyHeads(HALF), None])},
        fused,
    ),
    "latent": (
        {"q_b": (WIDTH, 20), "kv_b": (WIDTH, 28), "k_rope": (WIDTH, 2)},
        {"q_b": QueryHeads(((3, 0.5), (2, 0))), "kv_b": KeyHeads(((3, 0.5), (4, 0)))},
        latent,
    ),
    "layers": (
        {"query": (3, WIDTH, 12), "key": (3, WIDTH, 12)},
        {"query": QueryHeads(HALF), "key": KeyHeads(HALF)},
        layers_of(multi_head),
    ),
    "layers on axis 1": (
        {"query": (WIDTH, 5, 6, 3), "key": (WIDTH, 5, 2, 3)},
        {
            "query": QueryHeads(HALF, 2, axis=(-2, -1), layer_axis=1),
            "key": KeyHeads(HALF, axis=(-2, -1), layer_axis=1),
        },
        layers_of(grouped, 1),
    ),
}


def normal(seed, shapes, scale=1.0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: scale * jax.random.normal(key, shape, dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def as_float64(tree):
    return jax.tree.map(lambda x: np.array(x, np.float64), tree)


def after(params, updates):
    return jax.tree.map(np.add, as_float64(params), as_float64(updates))


@pytest.mark.parametrize(
    "name", helpers.mostly_nightly(ATTENTIONS, ["multi-head", "grouped", "fused", "latent"])
)
def test_logits_of_each_head_are_scaled_to_the_threshold(name):
    shapes, heads, logits = ATTENTIONS[name]
    x = np.random.default_rng(0).normal(size=(TOKENS, WIDTH))
    params, updates = normal(1, shapes), normal(2, shapes, 0.1)
    before = logits(after(params, updates), x)
    max_logits = before.max((-2, -1))
    threshold = float(np.median(max_logits))
    gammas = np.minimum(1, threshold / max_logits)
    assert np.unique(gammas).size > gammas.size // 2  # some heads are clipped, and not alike

    transform = qk_clip(threshold, {f"attention/{key}$": spec for key, spec in heads.items()})
    clipped, _ = jax.jit(transform.update)(
        {"attention": updates},
        transform.init(params),
        {"attention": params},
        max_logits={"attention": max_logits},
    )
    result = logits(after(params, clipped["attention"]), x)
    np.testing.assert_allclose(result, gammas[..., None, None] * before, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_less(result, threshold * (1 + 1e-5))


def test_boxes_of_flax_are_no_part_of_the_path():
    """Parameters of linen, as variables."""
    shapes, heads, _ = ATTENTIONS["multi-head"]
    params = {"params": {"attention": normal(1, shapes)}}
    transform = qk_clip(0.1, {f"^attention/{key}$": spec for key, spec in heads.items()})
    logits = {"params": {"attention": linen.Partitioned(jnp.ones(4), (None,))}}
    clip = functools.partial(transform.update, max_logits=logits)
    expected, _ = clip(params, optax.EmptyState(), params)
    assert not jnp.array_equal(*(x["params"]["attention"]["query"] for x in (expected, params)))
    boxed = jax.tree.map(lambda x: linen.Partitioned(x, (None, None)), params)
    clipped, _ = clip(boxed, optax.EmptyState(), boxed)
    chex.assert_trees_all_equal(linen.unbox(clipped), expected)
    above, _ = transform.update(
        params, optax.EmptyState(), params, max_logits={"params": jnp.ones(4)}
    )
    chex.assert_trees_all_equal(above, expected)


def test_weights_of_latent_attention_are_scaled_as_in_kimi_k2():
    shapes, heads, _ = ATTENTIONS["latent"]
    params, updates = normal(1, shapes), normal(2, shapes, 0.1)
    transform = qk_clip(100.0, heads)
    clipped, _ = transform.update(
        updates, transform.init(params), params, max_logits=jnp.array([50.0, 100, 200, 400])
    )
    gammas = np.array([1, 1, 0.5, 0.25])[:, None]
    expected = after(params, updates)
    queries = expected["q_b"].reshape(WIDTH, 4, 5)
    queries[..., :3] *= np.sqrt(gammas)
    queries[..., 3:] *= gammas
    expected["kv_b"].reshape(WIDTH, 4, 7)[..., :3] *= np.sqrt(gammas)
    chex.assert_trees_all_close(after(params, clipped), expected, rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_equal(clipped["k_rope"], updates["k_rope"])
    values = clipped["kv_b"].reshape(WIDTH, 4, 7)[..., 3:]
    np.testing.assert_array_equal(values, updates["kv_b"].reshape(WIDTH, 4, 7)[..., 3:])


@pytest.mark.parametrize("largest", [-jnp.inf, -3.0, 0.0, 99.0, 100.0, jnp.inf, jnp.nan])
def test_updates_within_the_threshold_stay_what_they_are(largest):
    shapes, heads, _ = ATTENTIONS["multi-head"]
    params, updates = normal(1, shapes), normal(2, shapes, 1e-3)
    transform = qk_clip(100.0, heads)
    max_logits = jnp.full(4, largest)
    clipped, _ = transform.update(updates, transform.init(params), params, max_logits=max_logits)
    chex.assert_trees_all_equal(clipped, updates)


@pytest.mark.parametrize(
    "dtype", helpers.mostly_nightly([jnp.float32, jnp.bfloat16], [jnp.float32])
)
def test_at_the_end_of_a_chain(dtype):
    """Attentions of two layers, by path, with another parameter that is none of theirs."""
    shapes, heads, logits = ATTENTIONS["multi-head"]
    params = {
        "layers": [{"attention": normal(i, shapes, dtype=dtype)} for i in range(2)],
        "bias": jnp.ones(3, dtype),
    }
    optimizer = optax.chain(
        muon(1e-3), qk_clip(1.0, {f"attention/{k}$": s for k, s in heads.items()})
    )
    x = np.random.default_rng(0).normal(size=(TOKENS, WIDTH))

    @jax.jit
    def step(params, state, max_logits):
        updates, state = optimizer.update(params, state, params, max_logits=max_logits)
        return optax.apply_updates(params, updates), state

    def largest(params):
        weights = as_float64(params["layers"])
        return [logits(layer["attention"], x).max((-2, -1)) for layer in weights]

    state = optimizer.init(params)
    for _ in range(3):
        max_logits = {"layers": [{"attention": jnp.array(s)} for s in largest(params)]}
        new_params, state = step(params, state, max_logits)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_params, params)
        params = new_params
    assert helpers.count_of_programs(step) == 1  # nothing is compiled a second time
    assert np.max(largest(params)) < 1.05  # but for the last step's own change


@pytest.mark.parametrize(
    ("heads", "max_logits", "message"),
    [
        (
            {"query": QueryHeads(HALF), "kye": KeyHeads(HALF)},
            np.ones(4),
            r"\['kye'\] of heads match none of the \d parameters, such as",
        ),
        (
            {"query": QueryHeads(HALF), "que": QueryHeads(HALF)},
            np.ones(4),
            r"heads must have one pattern for the parameter query, got \['query', 'que'\]",
        ),
        (
            {"query": QueryHeads(HALF)},
            {"key": np.ones(4)},
            r"one array at or above the parameter query, got 0 of its arrays at \['key'\]",
        ),
        (
            {"query": QueryHeads(HALF)},
            np.ones(3),
            r"query of shape \(10, 12\): max_logits must be of 4 query heads, .* got 3: pass",
        ),
        (
            {"key": KeyHeads(((5, 0.5),))},
            np.ones(4),
            r"size of axis -1 must be a multiple of 5, the sum of the parts of KeyHeads.*, got 12",
        ),
        (
            {"key": KeyHeads(HALF, axis=(0, 1))},
            np.ones(4),
            r"size of axis 1 must be 3, the sum of the parts of KeyHeads.*, got 12",
        ),
        (
            {"query": QueryHeads(HALF, 3)},
            np.ones(4),
            r"a multiple of 3 query heads, the key heads of QueryHeads.*, got 4",
        ),
        (
            {"key": KeyHeads(((4, 0.5),))},
            np.ones(4),
            r"a multiple of 3 query heads, the key heads of KeyHeads.*, got 4",
        ),
        (
            {"query": QueryHeads(HALF)},
            np.ones((2, 4)),
            r"max_logits must be of 10 layers, the size of axis 0, got 2: set layer_axis",
        ),
        ({"query": QueryHeads(HALF)}, np.ones((1, 1, 4)), r"got \(1, 1, 4\)"),
        (
            {"key": KeyHeads(HALF, axis=2)},
            np.ones(4),
            r"key of shape .* KeyHeads.* names axis 2, .*: name axes in \[-2, 2\)",
        ),
    ],
)
def test_errors_name_what_does_not_fit(heads, max_logits, message):
    params = normal(0, ATTENTIONS["multi-head"][0])
    transform = qk_clip(1.0, heads)
    with pytest.raises(ValueError, match=message):
        transform.update(params, transform.init(params), params, max_logits=max_logits)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KeyHeads(()), r"parts must be pairs of a size, .* got \(\)"),
        (lambda: QueryHeads(((0, 0.5),)), "size, at least 1, and a power, got"),
        (lambda: QueryHeads(HALF, 0), r"key_heads must be an integer in \[1, inf\), got 0"),
        (lambda: qk_clip(0.0, {}), r"threshold must be in \(0, inf\), got 0.0"),
    ],
)
def test_wrong_calls_say_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("given", "missing"), [({"max_logits": {}}, "params"), ({"params": {}}, "max_logits")]
)
def test_parameters_and_logits_are_needed(given, missing):
    message = rf"qk_clip needs .* got {missing}=None: call update\(.*max_logits=\.\.\.\)"
    with pytest.raises(ValueError, match=message):
        qk_clip(1.0, {}).update({}, optax.EmptyState(), **given)
