"""Attention heads: where a parameter has them, and the factor by which QK-clip scales each."""

import dataclasses
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax._checks import Number, check_axis, check_fields
from muon_jax._matrices.views import Split, axis_of
from pallas_kernels.arguments import is_integer, is_real

# The size of each part of a head, and its power of γ.
type Parts = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class KeyHeads:
    """Where a parameter has the heads of the keys.

    Attributes:
        parts: the size of each part of a head and its power p of γ, in the order of the parts. The
            power is 0 for a part that is not a key, and for keys that all heads share.
        axis: the axis on which the heads follow one another; or a pair, the axis of heads and the
            axis of parts.
        layer_axis: the axis of layers, where the parameter stacks layers.
    """

    parts: Parts
    axis: int | tuple[int, int] = -1
    layer_axis: Annotated[int, check_axis] = 0

    def __post_init__(self) -> None:
        _check_heads(self)


@dataclasses.dataclass(frozen=True)
class QueryHeads:
    """Where a parameter has the heads of the queries.

    Attributes:
        parts: the size of each part of a head, in the order of the parts, and the power p of γ for
            the keys that the part is multiplied with. The queries take the rest of γ.
        key_heads: the number of key heads if consecutive query heads share one; None if each query
            head has its own.
        axis: the axis on which the heads follow one another; or a pair, the axis of heads and the
            axis of parts.
        layer_axis: the axis of layers, where the parameter stacks layers.
    """

    parts: Parts
    key_heads: Annotated[int | None, Number("[1, inf)", 4, is_whole=True)] = None
    axis: int | tuple[int, int] = -1
    layer_axis: Annotated[int, check_axis] = 0

    def __post_init__(self) -> None:
        _check_heads(self)


def head_factors(spec: Any, shape: tuple[int, ...], gammas: jax.Array) -> jax.Array:
    """Returns the factors for an array of that shape, in a shape that broadcasts to it.

    Args:
        spec: `KeyHeads`, `QueryHeads`, a `Split` with such views, or None for factors of 1.
        shape: of the parameter, or of the part of a `Split`.
        gammas: γ of each query head, `(heads,)` or `(layers, heads)`.
    """
    if spec is None:
        return jnp.ones((1,) * len(shape))
    if isinstance(spec, Split):
        axis = axis_of(shape, spec)
        parts = []
        for place, inner in spec.parts(shape):
            part = (*shape[:axis], place.stop - place.start, *shape[axis + 1 :])
            parts.append(jnp.broadcast_to(head_factors(inner, part, gammas), part))
        return jnp.concatenate(parts, axis)
    num_keys = _checked_key_heads(spec, shape, gammas)
    return _broadcast_to_axes(_factors_of_parts(spec, gammas, num_keys), spec, shape)


def _checked_key_heads(
    spec: KeyHeads | QueryHeads, shape: tuple[int, ...], gammas: jax.Array
) -> int:
    """Returns the number of key heads of an array of that shape.

    Raises:
        ValueError: the array does not have the heads of `spec`, or `gammas` are of other heads.
    """
    if gammas.ndim not in (1, 2):
        raise ValueError(
            f"max_logits must be (heads,) or (layers, heads), got {gammas.shape}: reduce the other"
            " axes of the logits by max"
        )
    ndim, axes = len(shape), _head_axes(spec)
    for axis in (*axes, spec.layer_axis):
        if not -ndim <= axis < ndim:
            raise ValueError(
                f"{spec} names axis {axis}, which is out of range: name axes in [-{ndim}, {ndim})"
            )
    named = [axis % ndim for axis in (*axes, *((spec.layer_axis,) * (gammas.ndim - 1)))]
    if len({*named}) < len(named):
        raise ValueError(
            f"{spec} names an axis twice: give heads, parts and layers an axis each, by axis and"
            " layer_axis"
        )
    head_size, size = sum(size for size, _ in spec.parts), shape[axes[-1]]
    if size % head_size or (len(axes) == 2 and size != head_size):
        needed = f"a multiple of {head_size}" if len(axes) == 1 else head_size
        raise ValueError(
            f"the size of axis {axes[-1]} must be {needed}, the sum of the parts of {spec}, got"
            f" {size}: correct its axis or its parts"
        )
    num_heads = math.prod(shape[axis] for axis in axes) // head_size
    num_queries = gammas.shape[-1]
    if isinstance(spec, QueryHeads) and num_heads != num_queries:
        raise ValueError(
            f"max_logits must be of {num_heads} query heads, as many as {spec} has on its axis, got"
            f" {num_queries}: pass the largest logit of each query head"
        )
    num_keys = num_heads if isinstance(spec, KeyHeads) else spec.key_heads or num_queries
    if not num_keys or num_queries % num_keys:
        raise ValueError(
            f"max_logits must be of a multiple of {num_keys} query heads, the key heads of {spec},"
            f" got {num_queries}: pass the largest logit of each query head"
        )
    if gammas.ndim == 2 and len(gammas) != shape[spec.layer_axis]:
        raise ValueError(
            f"max_logits must be of {shape[spec.layer_axis]} layers, the size of axis"
            f" {spec.layer_axis}, got {len(gammas)}: set layer_axis of {spec} to the axis of layers"
        )
    return num_keys


def _head_axes(spec: KeyHeads | QueryHeads) -> tuple[int, ...]:
    return spec.axis if isinstance(spec.axis, tuple) else (spec.axis,)


def _factors_of_parts(spec: KeyHeads | QueryHeads, gammas: jax.Array, num_keys: int) -> jax.Array:
    """The factor of each part of a head, `(heads, parts)` or `(layers, heads, parts)`.

    spec        head          factor of a part of power p
    KeyHeads    key head g    γ_gᵖ, with γ_g the least γ_h of the query heads that share g
    QueryHeads  query head h  γ_h·γ_g⁻ᵖ, with the key head g that h uses
    """
    of_keys = gammas.reshape(*gammas.shape[:-1], num_keys, -1).min(-1)
    if isinstance(spec, KeyHeads):
        return jnp.stack([of_keys**p for _, p in spec.parts], -1)
    shared = jnp.repeat(of_keys, gammas.shape[-1] // num_keys, axis=-1)
    return jnp.stack([gammas * shared**-p for _, p in spec.parts], -1)


def _broadcast_to_axes(
    by_part: jax.Array, spec: KeyHeads | QueryHeads, shape: tuple[int, ...]
) -> jax.Array:
    """`by_part`, of `_factors_of_parts`, in a shape that broadcasts to `shape`."""
    sizes = [size for size, _ in spec.parts]
    factors = jnp.repeat(by_part, np.array(sizes), -1, total_repeat_length=sum(sizes))
    has_layers, axes = by_part.ndim == 3, _head_axes(spec)
    if len(axes) == 1:
        factors = factors.reshape(*by_part.shape[:-2], -1)
    axes = [axis % len(shape) for axis in ((spec.layer_axis,) if has_layers else ()) + axes]
    order = sorted(range(len(axes)), key=axes.__getitem__)
    return factors.transpose(order).reshape(
        [size if axis in axes else 1 for axis, size in enumerate(shape)]
    )


def _check_heads(spec: KeyHeads | QueryHeads) -> None:
    check_fields(spec)
    parts = spec.parts
    if not isinstance(parts, tuple | list) or not parts or not all(map(_is_part, parts)):
        raise ValueError(
            f"parts must be pairs of a size, at least 1, and a power, got {parts}: pass"
            " ((128, 0.5),) for heads of 128, for example"
        )
    if len(_head_axes(spec)) > 2:
        raise ValueError(
            f"axis must be an axis, or a pair of the axis of heads and the axis of parts, got"
            f" {spec.axis}: pass axis=(-2, -1), for example"
        )


def _is_part(part: Any) -> bool:
    if not isinstance(part, tuple | list) or len(part) != 2:
        return False
    size, power = part
    return is_integer(size) and size >= 1 and is_real(power) and math.isfinite(power)
