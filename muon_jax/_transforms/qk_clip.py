"""QK-clip: weights of queries and keys shrink where attention logits exceed a threshold."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_jax._matrices.views import Split
from muon_jax._numerics import wide
from muon_jax._trees import naming, path_name, unboxed


@dataclasses.dataclass(frozen=True)
class KeyHeads:
    """Where a parameter has the heads of the keys.

    Attributes:
        parts: the parts of a head, in their order: the size of each and its power p of γ. A part
            that makes no keys, or keys that all heads share, has the power 0.
        axis: of heads merged, one after the other; or a pair, the axis of heads and that of parts.
        layer_axis: that of layers in a stack of them.
    """

    parts: tuple[tuple[int, float], ...]
    axis: int | tuple[int, int] = -1
    layer_axis: int = 0

    def __post_init__(self):
        _check_parts(self.parts)


@dataclasses.dataclass(frozen=True)
class QueryHeads:
    """Where a parameter has the heads of the queries.

    Attributes:
        parts: the parts of a head, in their order: the size of each, and the power p of γ that the
            keys it is multiplied with bear. Queries bear the rest.
        key_heads: how many there are, where several heads of queries, one after the other, share
            one; None for one each.
        axis: of heads merged, one after the other; or a pair, the axis of heads and that of parts.
        layer_axis: that of layers in a stack of them.
    """

    parts: tuple[tuple[int, float], ...]
    key_heads: int | None = None
    axis: int | tuple[int, int] = -1
    layer_axis: int = 0

    def __post_init__(self):
        _check_parts(self.parts)
        if self.key_heads is not None and self.key_heads < 1:
            raise ValueError(f"key_heads must be None or at least 1, got {self.key_heads}")


def qk_clip(
    threshold: float | jax.Array, heads: Mapping[str, KeyHeads | QueryHeads | Split]
) -> optax.GradientTransformationExtraArgs:
    """Clips attention logits by the weights that make them, after the step of a chain before it.

    The model measures the largest logit of each head, S_h (scaled and masked, before the softmax),
    and training passes it on:

        optimizer = optax.chain(muon(0.02), qk_clip(100.0, heads))
        updates, state = optimizer.update(gradients, state, params, max_logits=max_logits)

    With γ_h = min(1, threshold/S_h) for each query head, and for each key head g the least γ_h of
    the query heads that share it, γ_g, a part of power p makes of the weights W = params + updates

        W <- γ_gᵖ·W for keys, and W <- γ_h·γ_g⁻ᵖ·W for the queries that they meet.

    So every logit is scaled by the γ_h of its own head, and those of a head within the threshold
    stay what they are, also where its keys are shared: its queries grow as its keys shrink. Logits
    measured with `params` bound those after the step up to the step's own change of them.

    Heads of each kind of attention, named by their parameters' paths:

        # Multi-head attention, heads of 128; with 4 of keys: QueryHeads(((128, 0.5),), 4).
        {"query/kernel": QueryHeads(((128, 0.5),)), "key/kernel": KeyHeads(((128, 0.5),))}
        # Multi-head latent attention: parts without and with positions, whose keys (elsewhere) are
        # shared and remain, so that the queries bear all of γ; keys beside the values.
        {"q_b": QueryHeads(((128, 0.5), (64, 0))), "kv_b": KeyHeads(((128, 0.5), (128, 0)))}
        # Queries, keys and values side by side, 16 heads of 128 for queries, 4 for the others.
        {"qkv": Split(-1, (2048, 512, 512), [QueryHeads(...), KeyHeads(...), None])}

    Biases have heads, too. The weights of clipped logits must be linear in the parameters: there is
    no use for this with normalized queries and keys.

    Args:
        threshold: of the logits; Kimi K2's is 100.
        heads: for regular expressions (`re.search`) of parameters' paths, such as
            `"layers/0/attention/query/kernel"`, as for `by_role`, where those have heads.

    The update's `max_logits` is a tree of arrays `(heads,)`, or `(layers, heads)` for layers in a
    stack, at the paths of subtrees of the parameters: each is that of the attention there. Heads
    for which it is not finite stay as they are: compute logits in 32 bits.

    Raises:
        ValueError: `threshold` is not above 0; `update` got no `params` or no `max_logits`; an
            expression matches no parameter, or two match one; a parameter has no such heads, or no
            maximal logits.

    References:
        Kimi Team, `Kimi K2: Open Agentic Intelligence <https://arxiv.org/abs/2507.20534>`_, 2025.
    """

    if isinstance(threshold, int | float) and not threshold > 0:
        raise ValueError(f"threshold must be above 0, got {threshold}")

    def update_fn(updates, state, params=None, *, max_logits=None, **extra_args):
        del extra_args
        if params is None or max_logits is None:
            raise ValueError(
                "qk_clip needs the parameters and the largest logits of their attentions: call"
                " update(updates, state, params, max_logits=...)"
            )
        measured = [(_names(path), s) for path, s in jax.tree.leaves_with_path(max_logits)]
        unused = set(heads)

        def clip(path, update, param):
            name = path_name(path)
            matches = [pattern for pattern in heads if re.search(pattern, name)]
            if not matches:
                return update
            unused.difference_update(matches)
            logits = [s for above, s in measured if _names(path)[: len(above)] == above]
            if len(matches) > 1 or len(logits) != 1:
                raise ValueError(
                    f"the parameter {name} needs one pattern of heads and one array of max_logits"
                    f" at a path above it, got {matches} and {len(logits)}"
                )
            largest = jnp.asarray(logits[0], jnp.float32)
            largest = jnp.where(jnp.isfinite(largest), largest, threshold)
            gammas = threshold / jnp.maximum(largest, threshold)
            with naming(name, param.shape):
                factors = _factors(heads[matches[0]], param.shape, gammas)
            u = wide(update)
            return (u + (factors - 1) * (wide(param) + u)).astype(update.dtype)

        clipped = jax.tree.map_with_path(clip, updates, params)
        if unused:
            names = [path_name(path) for path, _ in jax.tree.leaves_with_path(params)]
            raise ValueError(
                f"the patterns {sorted(unused)} match the path of no parameter: these are {names}"
            )
        return clipped, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def _check_parts(parts):
    if not parts or any(size < 1 for size, _ in parts):
        raise ValueError(f"parts must be pairs of a size, at least 1, and a power, got {parts}")


def _names(path):
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in unboxed(path))


def _factors(spec: Any, shape: tuple[int, ...], gammas: jax.Array) -> jax.Array:
    """Returns what an array of that shape is multiplied by, of a shape that broadcasts to it.

    Args:
        spec: `KeyHeads`, `QueryHeads`, a `Split` whose views are such, or None.
        shape: of the parameter.
        gammas: γ of each query head, `(heads,)` or `(layers, heads)`.
    """
    if spec is None:
        return jnp.ones((1,) * len(shape))
    if isinstance(spec, Split):
        axis = spec.axis % len(shape)
        parts = []
        for place, inner in spec.parts(shape):
            part = (*shape[:axis], place.stop - place.start, *shape[axis + 1 :])
            parts.append(jnp.broadcast_to(_factors(inner, part, gammas), part))
        return jnp.concatenate(parts, axis)

    if gammas.ndim not in (1, 2):
        raise ValueError(f"max_logits must be (heads,) or (layers, heads), got {gammas.shape}")
    axes = spec.axis if isinstance(spec.axis, tuple) else (spec.axis,)
    if not all(-len(shape) <= axis < len(shape) for axis in (*axes, spec.layer_axis)):
        raise ValueError(f"{spec} has an axis that it lacks")
    sizes, powers = zip(*spec.parts, strict=True)
    num_heads, rest = divmod(math.prod(shape[axis] for axis in axes), sum(sizes))
    num_queries = gammas.shape[-1]
    num_keys = num_heads if isinstance(spec, KeyHeads) else spec.key_heads or num_queries
    if (
        rest
        or num_queries % num_keys
        or (len(axes) == 2 and shape[axes[1]] != sum(sizes))
        or (isinstance(spec, QueryHeads) and num_heads != num_queries)
    ):
        raise ValueError(f"{spec} does not fit it with max_logits of {num_queries} query heads")

    of_keys = gammas.reshape(*gammas.shape[:-1], num_keys, -1).min(-1)
    if isinstance(spec, KeyHeads):
        by_part = [of_keys**p for p in powers]
    else:
        shared = jnp.repeat(of_keys, num_queries // num_keys, axis=-1)
        by_part = [gammas * shared**-p for p in powers]
    factors = jnp.repeat(
        jnp.stack(by_part, -1), np.array(sizes), -1, total_repeat_length=sum(sizes)
    )
    if len(axes) == 1:
        factors = factors.reshape(*gammas.shape[:-1], -1)
    axes = [axis % len(shape) for axis in ((spec.layer_axis,) if gammas.ndim == 2 else ()) + axes]
    if gammas.ndim == 2 and len(gammas) != shape[axes[0]]:
        raise ValueError(f"{spec} has not the {len(gammas)} layers of max_logits on its layer_axis")
    order = sorted(range(len(axes)), key=axes.__getitem__)
    return factors.transpose(order).reshape(
        [size if axis in axes else 1 for axis, size in enumerate(shape)]
    )
