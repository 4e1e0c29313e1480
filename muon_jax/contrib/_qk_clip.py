"""QK-clip: the weights of queries and keys shrink where attention logits exceed a threshold."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from muon_jax._checks import Number, check_patterns, checks_arguments
from muon_jax._iteration.normalization import wide
from muon_jax._matrices.views import Split
from muon_jax._transforms.chain import skip_missing
from muon_jax._trees import check_each_decides, errors_naming, first_match, path_name, unboxed
from muon_jax.contrib._attention_heads import KeyHeads, QueryHeads, head_factors
from pallas_kernels.device import standard_promotion


@checks_arguments
def qk_clip(
    threshold: Annotated[float | jax.Array, Number("(0, inf)", 100.0)],
    heads: Annotated[Mapping[str, KeyHeads | QueryHeads | Split], check_patterns],
) -> optax.GradientTransformationExtraArgs:
    """Bounds attention logits by scaling query and key weights, at the end of a chain.

    The model measures the largest logit S_h of each query head h, scaled and masked, before the
    softmax. Pass these to the update:

        optimizer = optax.chain(muon(0.02), qk_clip(100.0, heads))
        updates, state = optimizer.update(gradients, state, params, max_logits=max_logits)

    Query head h has γ_h = min(1, threshold/S_h). Key head g has γ_g, the least γ_h of the query
    heads that share it. The weights W = params + updates of a part of power p become

        KeyHeads    W <- γ_gᵖ·W
        QueryHeads  W <- γ_h·γ_g⁻ᵖ·W

    So the logits of head h are scaled by γ_h. A head within the threshold keeps its logits even if
    it shares its keys: its queries grow as its keys shrink. Because the logits were measured with
    `params`, they exceed the threshold after the step by no more than the step itself adds.

    `heads` for each kind of attention, by the paths of the parameters:

        # Multi-head attention, heads of 128; with 4 key heads: QueryHeads(((128, 0.5),), 4).
        {"query/kernel": QueryHeads(((128, 0.5),)), "key/kernel": KeyHeads(((128, 0.5),))}
        # Multi-head latent attention. Queries have a part without and a part with positions. All
        # heads share the keys with positions, which stay, so the queries take all of γ there.
        # kv_b holds keys beside values.
        {"q_b": QueryHeads(((128, 0.5), (64, 0))), "kv_b": KeyHeads(((128, 0.5), (128, 0)))}
        # Queries, keys and values side by side, 16 heads of 128 for queries, 4 for the others.
        {"qkv": Split(-1, (2048, 512, 512), [QueryHeads(...), KeyHeads(...), None])}

    Biases have heads, too. The logits must be linear in the clipped weights, so `qk_clip` does not
    work with normalized queries or keys.

    Args:
        threshold: bound of the logits; Kimi K2's is 100.
        heads: where parameters have heads, by regular expressions (`re.search`) of their paths. A
            path is as for `by_role`, such as `"layers/0/attention/query/kernel"`.

    The update's `max_logits` is a tree of arrays `(heads,)`, or `(layers, heads)` for a stack of
    layers. The path of each array is that of a subtree of the parameters, whose attention it
    measures. Heads whose largest logit is not finite do not change, so compute logits in 32 bits.

    Raises:
        TypeError: `threshold` is not a number, or `heads` not a dict from regular expressions to
            views.
        ValueError: one of

            *   `threshold` is not above 0;
            *   `update` got no `params` or no `max_logits`;
            *   an expression matches no parameter, or two expressions match one;
            *   a parameter does not have the stated heads;
            *   a parameter has no array of `max_logits`, or several.

    References:
        Kimi Team, `Kimi K2: Open Agentic Intelligence <https://arxiv.org/abs/2507.20534>`_, 2025.
    """

    _check_specs(heads)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        whole: optax.Updates,
        max_logits: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del extra_args
        if params is None or max_logits is None:
            missing = "params" if params is None else "max_logits"
            raise ValueError(
                f"qk_clip needs the parameters and the largest logits, got {missing}=None: call"
                " update(updates, state, params, max_logits=...)"
            )
        measured = [(_keys_of_path(path), s) for path, s in jax.tree.leaves_with_path(max_logits)]
        names = [path_name(path) for path, _ in jax.tree.leaves_with_path(whole)]
        for name in names:
            _check_one_matches(heads, name)
        check_each_decides("heads", heads, names)

        def clip_update(path: tuple[Any, ...], update: jax.Array, param: jax.Array) -> jax.Array:
            name = path_name(path)
            pattern = first_match(heads, name)
            if pattern is None:
                return update
            gammas = _gammas(threshold, _logits_above(path, measured))
            with errors_naming(name, param.shape):
                factors = head_factors(heads[pattern], param.shape, gammas)
            u = wide(update)
            return (u + (factors - 1) * (wide(param) + u)).astype(update.dtype)

        return jax.tree.map_with_path(clip_update, updates, params), state

    update = standard_promotion()(skip_missing(update_fn))
    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _check_specs(heads: Mapping[str, Any]) -> None:
    """Raises TypeError where a value is none of the views that `qk_clip` takes."""
    for pattern, spec in heads.items():
        for part in spec.views if isinstance(spec, Split) else [spec]:
            if not isinstance(part, KeyHeads | QueryHeads) and not (
                isinstance(spec, Split) and (part is None or isinstance(part, Split))
            ):
                raise TypeError(
                    f"heads[{pattern!r}] must be KeyHeads or QueryHeads, or a Split with such"
                    f" views, got {part!r}: pass KeyHeads(((128, 0.5),)), for example"
                )


def _check_one_matches(heads: Mapping[str, Any], name: str) -> None:
    matches = [pattern for pattern in heads if re.search(pattern, name)]
    if len(matches) > 1:
        raise ValueError(
            f"heads must have one pattern for the parameter {name}, got {matches}: anchor patterns"
            " with ^ and $"
        )


def _logits_above(
    path: tuple[Any, ...], measured: Sequence[tuple[tuple[str, ...], jax.Array]]
) -> jax.Array:
    """The one array measured at the path of a parameter, or at the path of a tree that holds it."""
    keys = _keys_of_path(path)
    logits = [s for above, s in measured if keys[: len(above)] == above]
    if len(logits) != 1:
        paths = ["/".join(above) for above, _ in measured]
        raise ValueError(
            f"max_logits must have one array at or above the parameter {path_name(path)}, got"
            f" {len(logits)} of its arrays at {paths}: give each the path of an attention"
        )
    return logits[0]


def _keys_of_path(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in unboxed(path))


def _gammas(threshold: float | jax.Array, max_logits: jax.Array) -> jax.Array:
    """γ of each query head; 1 where its largest logit is not finite."""
    largest = jnp.asarray(max_logits, jnp.float32)
    largest = jnp.where(jnp.isfinite(largest), largest, threshold)
    return threshold / jnp.maximum(largest, threshold)
