"""Units of parameters: taken from a device's shards, and put back."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from muon_jax._distributed.plan import Leaf, Part
from muon_jax._matrices.views import MatrixAxes, from_matrices, to_matrices


def unit_axes(leaf: Leaf) -> MatrixAxes:
    """Returns the axes for which `to_matrices` makes `(unit, elements, 1)` of a shard."""
    others = (axis for axis in range(len(leaf.shape)) if axis not in leaf.batch)
    return MatrixAxes(leaf.batch, tuple(others), ())


def take_units(
    parts: Sequence[Part],
    shards: Mapping[int, jax.Array],
    axes_of: Callable[[Leaf], MatrixAxes] = unit_axes,
) -> list[jax.Array]:
    """Returns what this device has of the units of each part, as matrices of these axes."""
    return [
        to_matrices(shards[leaf.index], axes_of(leaf))[start:stop] for leaf, start, stop in parts
    ]


def by_part(parts: Sequence[Part], units: jax.Array) -> list[tuple[Part, jax.Array]]:
    """Returns the units of each part, of one array of all; what follows them is padding."""
    ends = itertools.accumulate(stop - start for _, start, stop in parts)
    return [*zip(parts, jnp.split(units, [*ends]), strict=False)]


def put_units_back(
    units: Iterable[tuple[Part, jax.Array]],
    axes_of: Callable[[Leaf], MatrixAxes] = unit_axes,
) -> dict[int, jax.Array]:
    """Returns this device's parts of leaves, by their indices, of their units in any order."""
    found: dict[int, tuple[Leaf, list[jax.Array]]] = {}
    for (leaf, _, _), x in sorted(units, key=lambda each: each[0][1]):
        found.setdefault(leaf.index, (leaf, []))[1].append(x)
    return {
        i: from_matrices(jnp.concatenate(each).astype(leaf.dtype), axes_of(leaf), leaf.local_shape)
        for i, (leaf, each) in found.items()
    }
