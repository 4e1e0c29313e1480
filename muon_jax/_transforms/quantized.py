"""Momenta in 8 bits: a code of one byte for each entry, and a scale for each block of entries."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon_jax._distributed.sharding import Shardings, mesh_axes_by_dim, whole_tree
from muon_jax._numerics import over
from muon_jax._transforms.on_host import map_where_it_is, to_device
from muon_jax._transforms.rounding import cast_like

LARGEST_CODE = 127
LARGEST_BLOCK = 128
# Smaller arrays stay in float32: their bytes do not matter, and norms and biases are among them.
LEAST_ENTRIES = 4096
# Shorter last axes would make the scales take more than 1/16 of the bytes in float32.
LEAST_LAST_AXIS = 16


class Quantized(NamedTuple):
    """A momentum in 8 bits, which `mu_dtype="int8"` puts in the place of an array of `mu`.

    An entry is its code times the scale of its block, in float32. A scale is the largest magnitude
    of its block over 127, so that an entry is off by half a scale at most, or by one after
    stochastic rounding. A block with a NaN or an infinity has no finite entry.

    Blocks are equal parts of the last axis, of n entries. Their number depends on n alone: n is
    halved while it is even and above 128, and each of these pieces has ⌈entries/128⌉ blocks. So a
    block has 64 to 128 entries, fewer only at the end of a piece of odd length.

    Attributes:
        codes: int8 from -127 to 127, in the shape of the parameter.
        scales: float32, in the same shape but for the last axis, which counts the blocks.
    """

    codes: jax.Array
    scales: jax.Array


def is_int8(mu_dtype: jax.typing.DTypeLike | None) -> bool:
    """Returns whether `mu_dtype` stands for momenta in 8 bits."""
    return mu_dtype is not None and jnp.dtype(mu_dtype) == jnp.int8


def computed_dtype(mu_dtype: jax.typing.DTypeLike | None) -> jax.typing.DTypeLike | None:
    """Returns the dtype in which updates compute momenta of `mu_dtype`: float32 for int8."""
    return jnp.float32 if is_int8(mu_dtype) else mu_dtype


def dtype_of_adam(mu_dtype: jax.typing.DTypeLike | None) -> jax.typing.DTypeLike | None:
    """Returns the dtype of AdamW's first moment: bfloat16 for int8.

    AdamW divides by √ν entry by entry. An entry that is small beside its block is 0 in 8 bits, or
    large beside its own √ν.
    """
    return jnp.bfloat16 if is_int8(mu_dtype) else mu_dtype


def count_blocks(n: int) -> int:
    """Returns the number of blocks of an axis of n entries, see `Quantized`."""
    pieces = 1
    while n > LARGEST_BLOCK and n % 2 == 0:
        n, pieces = n // 2, 2 * pieces
    return pieces * -(-n // LARGEST_BLOCK)


def quantize(x: jax.Array, count: int, key: jax.Array | None = None) -> Quantized:
    """Returns `x` in 8 bits.

    Args:
        x: real, at least one axis; computed in float32.
        count: the number of blocks of its last axis.
        key: of random bits, to round up or down so that the mean is `x`; None to round to nearest.
    """
    x = x.astype(jnp.float32)
    scales = _largest_of_blocks(x, count) / LARGEST_CODE
    codes = over(x, _scale_of_entries(scales, x.shape[-1]))
    if key is None:
        rounded = jnp.round(codes)
    else:
        lower = jnp.floor(codes)
        bits = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.float32)
        rounded = lower + (bits + 0.5 < (codes - lower) * 2**16)
    rounded = jnp.clip(rounded, -LARGEST_CODE, LARGEST_CODE)
    return Quantized(rounded.astype(jnp.int8), scales)


def dequantize(m: Any) -> Any:
    """Returns the float32 array that `m` stands for, or `m` where it is an array; on the device."""
    m = to_device(m)
    if not isinstance(m, Quantized):
        return m
    return m.codes.astype(jnp.float32) * _scale_of_entries(m.scales, m.codes.shape[-1])


def with_quantized(mu: Any) -> Any:
    """Returns momenta with `Quantized` in the place of mappings that have its fields.

    `nnx.Optimizer` makes an `nnx.State` of each in its updates, and restored trees may have dicts.
    """
    return jax.tree.map(
        lambda node: Quantized(**node) if _has_fields(node) else node, mu, is_leaf=_has_fields
    )


def in_form_of(mu: Any, given: Any) -> Any:
    """The inverse of `with_quantized`: mappings are where they are in `given`."""
    return jax.tree.map(
        lambda node, m: type(node)(m._asdict()) if _has_fields(node) else m,
        given,
        mu,
        is_leaf=lambda node: _has_fields(node) or _is_quantized(node),
    )


def map_momenta(function: Any, mu: Any, *rest: Any) -> Any:
    """Returns `jax.tree.map(function, mu, *rest)`, where `Quantized` is a leaf of `mu`."""
    return jax.tree.map(function, mu, *rest, is_leaf=_is_quantized)


def cast_mu(mu: Any, mu_dtype: jax.typing.DTypeLike, whole: Any) -> Any:
    """Returns the momenta in `mu_dtype`.

    Args:
        mu: a tree of arrays or `Quantized`.
        mu_dtype: a dtype; int8 for `Quantized` in the place of large arrays, float32 elsewhere.
        whole: the same tree, with shapes of the arrays of which `mu` has the shards.

    Raises:
        ValueError: explicit mesh axes cut a block.
    """

    def cast(path: Any, m: Any, of_whole: Any) -> Any:
        m = dequantize(m)
        if not is_int8(mu_dtype):
            return m.astype(mu_dtype)
        if not _takes_codes(of_whole):
            return m.astype(jnp.float32)
        count = count_blocks(m.shape[-1])
        _check_blocks(path, m, count)
        return quantize(m, count)

    def cast_where_it_is(path: Any, m: Any, of_whole: Any) -> Any:
        return map_where_it_is(lambda m: cast(path, m, of_whole), m)

    return jax.tree.map_with_path(cast_where_it_is, mu, whole, is_leaf=_is_quantized)


def zero_momenta(params: Any, mu_dtype: jax.typing.DTypeLike | None, shardings: Shardings) -> Any:
    """Returns momenta of zeros in `mu_dtype`.

    Raises:
        ValueError: explicit mesh axes cut a block, or `shardings` is missing or does not fit.
    """
    mu = optax.tree.zeros_like(params, dtype=computed_dtype(mu_dtype))
    return cast_mu(mu, jnp.int8, whole_tree(mu, shardings)) if is_int8(mu_dtype) else mu


def shapes_of_momenta(mu: Any) -> Any:
    """Returns the shapes and dtypes that updates compute with, in the tree of the parameters."""

    def shape_of(m: Any) -> jax.ShapeDtypeStruct:
        codes, dtype = (m.codes, jnp.float32) if _is_quantized(m) else (m, m.dtype)
        return jax.ShapeDtypeStruct(codes.shape, dtype)

    return map_momenta(shape_of, mu)


def store(m: Any, like: Any, key: jax.Array | None) -> Any:
    """Returns a momentum in the form of `like`, a `Quantized` or an array.

    Args:
        m: the momentum.
        like: the momentum before the update.
        key: of random bits, to round up or down at random; None to round to nearest.
    """
    if _is_quantized(like):
        return quantize(m, like.scales.shape[-1], key)
    return cast_like(m, like, key)


def _takes_codes(x: Any) -> bool:
    """Whether the momentum of this shape goes in 8 bits; where arrays are sharded, the whole."""
    return math.prod(x.shape) >= LEAST_ENTRIES and x.shape[-1] >= LEAST_LAST_AXIS


def _check_blocks(path: Any, m: jax.Array, count: int) -> None:
    """Raises ValueError where the type of `m` says that its last axis has shards that cut a block.

    Args:
        path: of the parameter.
        m: the momentum.
        count: the number of blocks of its last axis.
    """
    sharding = jax.typeof(m).sharding
    axes = mesh_axes_by_dim(sharding.spec, m.ndim, sharding.mesh.shape)[-1]
    shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
    if count % shards:
        raise ValueError(
            f"mu_dtype='int8' needs whole blocks on each device, but the last axis of the parameter"
            f" {jax.tree_util.keystr(path)} has {count} blocks on {shards} devices: shard another"
            " axis, or pass mu_dtype='bfloat16'"
        )


def check_stored(mu: Any, whole: Any) -> None:
    """Raises ValueError where a momentum should be in 8 bits and is not.

    Args:
        mu: the momenta of an optimizer whose `mu_dtype` is int8.
        whole: as for `cast_mu`.
    """

    def check(path: Any, m: Any, of_whole: Any) -> None:
        if _takes_codes(of_whole) and not isinstance(m, Quantized):
            raise ValueError(
                "mu_dtype='int8' needs a state with momenta in 8 bits, got the momentum of the"
                f" parameter {jax.tree_util.keystr(path)} in {m.dtype}: pass"
                " cast_momentum(state, 'int8')"
            )

    jax.tree.map_with_path(check, mu, whole, is_leaf=_is_quantized)


def _has_fields(node: Any) -> bool:
    """Whether a node is a mapping with the fields of a `Quantized`."""
    is_mapping = isinstance(node, Mapping) and {*node} == {*Quantized._fields}
    return is_mapping and getattr(node["codes"], "dtype", None) == jnp.int8


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def _layout(n: int, count: int) -> tuple[int, int, int]:
    """The pieces of an axis, the blocks of each, and the entries of a block; the last is shorter.

    Shards that divide the axis and its blocks have the layout of the whole.
    """
    pieces = math.gcd(n, count)
    return pieces, count // pieces, -(-n // count)


def _largest_of_blocks(x: jax.Array, count: int) -> jax.Array:
    """max |x| of each block, NaN where a block has one."""
    *lead, n = x.shape
    pieces, blocks, size = _layout(n, count)
    x = jnp.abs(x).reshape(*lead, pieces, n // pieces)
    x = jnp.pad(x, [(0, 0)] * (len(lead) + 1) + [(0, blocks * size - n // pieces)])
    return jnp.max(x.reshape(*lead, pieces, blocks, size), -1).reshape(*lead, count)


def _scale_of_entries(scales: jax.Array, n: int) -> jax.Array:
    """For each of n entries of the last axis the scale of its block."""
    *lead, count = scales.shape
    pieces, blocks, size = _layout(n, count)
    of_block = scales.reshape(*lead, pieces, blocks, 1)
    of_piece = jnp.broadcast_to(of_block, (*lead, pieces, blocks, size))
    of_piece = of_piece.reshape(*lead, pieces, blocks * size)[..., : n // pieces]
    return of_piece.reshape(*lead, n)
