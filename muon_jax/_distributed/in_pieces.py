"""Matrices that stay in pieces: wide ones, and fewer than the devices that share them.

With one owner each, most devices would wait while a few multiply. In the gram form little of the
work is on whole matrices: with the columns of X divided among the devices, X = (X₁ X₂ …),

    G = XXᵀ = Σᵢ XᵢXᵢᵀ  ->  Q, the steps on G  ->  QX = (QX₁ QX₂ …),

all that is exchanged is G, summed, and Q, once and again for each restart of `_gram` or segment of
`_composed`. Where rows are divided as well, or instead, an all-to-all makes that a finer division
of the columns, and one at the end takes it back. The order of rows and columns does not matter: G
and Q follow that of the rows, whatever it is.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muon_jax._distributed.cost import Estimate, in_pieces
from muon_jax._distributed.pieces import Pieces
from muon_jax._distributed.plan import Bucket, Leaf
from muon_jax._iteration.form import Form, choose, gram_form
from muon_jax._iteration.normalization import largest_entries
from muon_jax._iteration.passes import iterate, scale_down, split, transposed
from muon_jax._iteration.recipes import resolve_recipe
from muon_jax._matrices.axes import MatrixAxes, from_matrices, matrix_axes, to_matrices
from muon_jax._matrices.views import MuonDimensionNumbers


def form(leaf: Leaf, keywords: Mapping[str, Any]) -> Form | str:
    """Returns the form for the leaf's matrices in pieces, or why they cannot stay so.

    Args:
        leaf: the parameter.
        keywords: as for `_form.of`.
    """
    if not isinstance(leaf.view, MuonDimensionNumbers):
        return f"its view, {leaf.view}, is of matrices that are parts of an axis"
    return gram_form(leaf.dtype, **keywords)


def estimate(bucket: Bucket, form: Form) -> Estimate:
    """Returns what the bucket costs where its matrices stay in pieces."""
    (chunk,) = bucket.chunks
    _, m, n = chunk.parts[0][0].matrices[0]
    mesh = dict(bucket.axes)
    return in_pieces(
        form.products,
        (chunk.count, m, n),
        bucket.owners,
        form.dtype.itemsize,
        [
            (stop - start, math.prod(mesh[name] for name in _short_axes(leaf)))
            for leaf, start, stop in chunk.parts
        ],
    )


def run_in_pieces(
    buckets: Sequence[Bucket], shards: Sequence[jax.Array], keywords: Mapping[str, Any]
) -> dict[int, jax.Array]:
    """Returns the results for these matrices in pieces, by the index of their parameter.

    Args:
        buckets: `Plan.grams`, whose mesh axes must be manual.
        shards: the local part of each parameter.
        keywords: of `orthogonalize`.
    """
    leaves, results = {}, {}
    for bucket in buckets:
        done = _orthogonalize(bucket, shards, **keywords)
        for (leaf, _, _), x in zip(bucket.chunks[0].parts, done, strict=True):
            leaves[leaf.index] = leaf
            results.setdefault(leaf.index, []).append(x)
    return {
        i: from_matrices(jnp.concatenate(results[i]), _axes(leaf), shards[i].shape)
        for i, leaf in leaves.items()
    }


def _orthogonalize(
    bucket,
    shards,
    *,
    ns_coeffs,
    ns_steps,
    eps,
    eps_mode,
    dtype,
    preconditioning,
    method,
    implementation,
):
    """As `orthogonalize`, for the pieces of a bucket: (unit, rows, columns) for each part."""
    del method
    (chunk,) = bucket.chunks
    leaves = [leaf for leaf, _, _ in chunk.parts]
    stacks = [
        to_matrices(shards[leaf.index], _axes(leaf))[start:stop]
        for leaf, start, stop in chunk.parts
    ]
    _, m, n = leaves[0].matrices[0]
    recipe = resolve_recipe(ns_coeffs, ns_steps, preconditioning)
    form = choose(recipe, "gram", preconditioning, dtype, (m, n), stacks[0].dtype)
    held = Pieces(
        implementation=implementation,
        axes=tuple(name for name, _ in bucket.axes),
        owners=bucket.owners,
        count=chunk.count,
    )
    # Without a derivative: it decides a power of two alone.
    largest = jax.lax.pmax(jax.lax.stop_gradient(largest_entries(stacks)), held.axes)
    scaled, scale = scale_down(stacks, largest, n, form.dtype, held)
    x = jnp.concatenate([*map(_with_whole_rows, scaled, leaves)])
    x = iterate(x, recipe, "gram", eps, eps_mode, held.own(scale), preconditioning, n, held)
    done = map(_as_before, split(x, stacks), leaves, stacks)
    return [x.astype(given.dtype) for x, given in zip(done, stacks, strict=True)]


def _with_whole_rows(x, leaf):
    """Pieces (unit, m, columns) of the wide matrices, of pieces of any other kind."""
    x = transposed(x) if _is_tall(leaf) else x
    names = _short_axes(leaf)
    if not names:
        return x
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[-1] % jax.lax.axis_size(names))])
    return jax.lax.all_to_all(x, names, 2, 1, tiled=True)


def _as_before(x, leaf, given):
    """The inverse of `_with_whole_rows`, in the shape of `given`."""
    names = _short_axes(leaf)
    x = jax.lax.all_to_all(x, names, 1, 2, tiled=True) if names else x
    return (x.mT if _is_tall(leaf) else x)[:, : given.shape[1], : given.shape[2]]


def _short_axes(leaf: Leaf) -> tuple[str, ...]:
    """The mesh axes that divide the rows of the wide matrices."""
    axes = _axes(leaf)
    short = axes.output if _is_tall(leaf) else axes.reduction
    return sum((leaf.axes[i] for i in short), ())


def _is_tall(leaf):
    ((_, rows, cols),) = leaf.stacks
    return rows > cols


def _axes(leaf) -> MatrixAxes:
    return matrix_axes(len(leaf.whole), leaf.view)
