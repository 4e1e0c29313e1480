"""`by_use` on models of all kinds: each parameter has the role and the view its source says."""

import re

import hard_models  # noqa: F401
import helpers
import jax
import jax.numpy as jnp
import literature_models  # noqa: F401
import numpy as np
import pytest
import real_language_models  # noqa: F401
import real_other_models  # noqa: F401
import real_vision_models  # noqa: F401
import small_models  # noqa: F401
from use_models import CONV, IN_OUT, MODELS, REAL_SIZE, differences

from muon_jax import by_use, muon
from muon_jax._trees import path_name

BIT_FOR_BIT = (
    "nnx_gpt",
    "haiku_lstm",
    "moe_ragged",
    "mla",
    "gqa_fused_grouped",
    "swiglu_fused_alibi_remat",
    "dit",
    "vit",
    "grouped_conv",
    "neox_interleaved",
)
# More than a second each.
SLOW = (
    "resnet_bn",
    "haiku_transformer",
    "flax_resnet50",
    "haiku_resnet50",
    "diffusion_unet",
    "haiku_lstm",
    "eqx_lstm",
    "linen_spectral_norm",
    "real_nvp",
)


def test_many_models_are_at_real_size():
    assert len(REAL_SIZE) >= 40
    assert len(MODELS) - len(REAL_SIZE) >= 60


@pytest.mark.parametrize("name", helpers.mostly_slow(MODELS, {*MODELS} - {*SLOW}))
def test_each_parameter_has_its_role_and_view(name):
    fn, params, inputs, expected, per_head = MODELS[name]()
    if expected is None:
        with pytest.raises(ValueError):
            by_use(fn, params, *inputs)
        return
    rules = {pattern: None for pattern, wanted in expected.items() if wanted == "unclear"}
    if rules:
        with pytest.raises(ValueError, match="cannot decide on") as caught:
            by_use(fn, params, *inputs)
        assert str(caught.value).count(" of shape ") == len(rules)
        expected = {pattern: "rule" for pattern in rules} | expected | dict.fromkeys(rules, "rule")
    routes = by_use(fn, params, *inputs, rules=rules or None, per_head=per_head)
    assert not differences(routes.parameters, expected)


def hand_written(params, expected):
    """The views of `expected`; a first layer without one has (in, out) or is a convolution."""

    def view_of(path, leaf):
        wanted = next((w for p, w in expected.items() if re.search(p, path_name(path))), None)
        if np.ndim(leaf) < 2 or wanted is None or isinstance(wanted, str) and wanted != "input":
            return None
        return {2: IN_OUT, 4: CONV}[np.ndim(leaf)] if wanted == "input" else wanted[1]

    return jax.tree.map_with_path(view_of, params)


@pytest.mark.parametrize("name", helpers.mostly_nightly(BIT_FOR_BIT, ["grouped_conv"]))
def test_updates_are_those_of_hand_written_views(name):
    fn, params, inputs, expected, _ = MODELS[name]()
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    keys = jax.random.split(jax.random.key(0), len(jax.tree.leaves(params)))
    keys = jax.tree.unflatten(jax.tree.structure(params), [*keys])
    grads = jax.tree.map(lambda x, k: jax.random.normal(k, x.shape, x.dtype), params, keys)
    routes = by_use(fn, params, *inputs)

    def updates(views):
        optimizer = muon(0.02, muon_weight_dimension_numbers=views)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    written = hand_written(params, expected)
    assert any(r.view is not None for r in routes.parameters)
    found, wanted = updates(routes), updates(lambda _: written)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
