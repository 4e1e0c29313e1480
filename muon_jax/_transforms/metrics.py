"""Diagnostics of Muon's matrices, computed with the updates and kept in the optimizer's state."""

import collections
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax._distributed.reductions import matrices_of_tree, stack
from muon_jax._distributed.sharding import Shardings, locate
from muon_jax._matrices.views import Views
from muon_jax._numerics import norm_of_any_size, over, wide
from muon_jax._transforms.momentum import MuonState
from muon_jax._trees import fill_missing

POWER_ITERATIONS = 16


class MetricsState(NamedTuple):
    """State of `with_metrics`: that of the transformation, and scalars (float32) by name."""

    inner: optax.OptState
    metrics: dict[str, jax.Array]


def with_metrics(
    transform: optax.GradientTransformation,
    weight_dimension_numbers: Views = None,
    shardings: Shardings = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps `scale_by_muon`, or a chain with it, so that the state holds metrics of each update.

    For the matrices (fan_in × fan_out) of each shape, from all parameters, there are

    *   `16x40/gradient_norm`: the Frobenius norm of their gradients together;
    *   `16x40/update_rms`: the root mean square of the entries of their updates;
    *   `16x40/orthogonality_residual`: ‖OOᵀ - I‖_F/√m for the update O on its smaller side m, the
        mean over matrices. 0 for an orthogonal O; a meaning only where no scale is in the chain;
    *   `16x40/stable_rank`: ‖M‖_F²/‖M‖₂² of the momentum M, the mean over matrices: between 1 and
        m, 0 for zeros. ‖M‖₂ is what 16 power iterations find, which is never above it, so that the
        rank may come out too large where the largest singular values are close.

    The residual costs a product OOᵀ in float32; nothing waits for the host. `metrics` finds the
    values in a state.

    Args:
        transform: has one `MuonState` in its state.
        weight_dimension_numbers: as for `scale_by_muon`.
        shardings: as for `scale_by_muon`; needed in a shard_map alone.

    Raises:
        ValueError: the state has no `MuonState`, or several, or a parameter is no matrix, or
            `shardings` is missing or wrong.
        NotImplementedError: in a shard_map that divides a parameter, or that is over some axes of a
            mesh only.
    """
    wrapped = optax.with_extra_args_support(transform)

    def measure(*trees, places):
        """The metrics of gradients, updates and momenta; equal leaves of a place go together."""
        flat = [matrices_of_tree(weight_dimension_numbers, tree, shardings)[0] for tree in trees]
        groups = collections.defaultdict(lambda: collections.defaultdict(list))
        for place, *leaf in zip(places, *flat, strict=True):
            for matrices in zip(*leaf, strict=True):
                x, axes, _ = matrices[0]
                rows, cols = map(matrices[0].size, axes[1:])
                groups[f"{rows}x{cols}"][place, axes, x.shape].append(matrices)
        values = {}
        for shape, by_layout in groups.items():
            stacks = [[*map(stack, zip(*each, strict=True))] for each in by_layout.values()]
            g, o, m = zip(*stacks, strict=True)
            entries = sum(x.array.size for x in o)
            values[f"{shape}/gradient_norm"] = _norm([x.array for x in g])
            values[f"{shape}/update_rms"] = _norm([x.array for x in o]) / max(entries, 1) ** 0.5
            values[f"{shape}/orthogonality_residual"] = _mean(_orthogonality_residual, o)
            values[f"{shape}/stable_rank"] = _mean(_stable_rank, m)
        return {name: value.astype(jnp.float32) for name, value in values.items()}

    def of_state(gradients, updates, state):
        mu = _only(state, MuonState).mu
        gradients, updates = (_where_not_masked(mu, tree) for tree in (gradients, updates))
        mesh, kind, specs, wholes = locate(gradients, shardings)
        names = []
        pairs = zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(wholes), strict=True)
        for (path, x), whole in pairs:
            names.append(jax.tree_util.keystr(path))
            if x.shape != whole.shape:
                raise NotImplementedError(
                    f"with_metrics in a shard_map needs whole parameters, got {names[-1]},"
                    f" {x.shape} of {whole.shape}: call the optimizer outside it"
                )
        # Along automatic axes nothing says which are divided alike: those of one name, mostly.
        alike = [re.sub(r"\d+", "", name) for name in names]
        places = alike if kind == AxisType.Auto else specs or [None] * len(names)
        of_places = functools.partial(measure, places=places)
        if AxisType.Explicit not in mesh.axis_types:
            return of_places(gradients, updates, mu)
        replicated = NamedSharding(mesh, PartitionSpec())
        return jax.sharding.auto_axes(out_sharding=replicated)(of_places)(gradients, updates, mu)

    def init_fn(params):
        state = wrapped.init(params)
        shapes = jax.eval_shape(of_state, params, params, state)
        return MetricsState(state, {name: jnp.zeros([], jnp.float32) for name in shapes})

    def update_fn(updates, state, params=None, **extra_args):
        new_updates, inner = wrapped.update(updates, state.inner, params, **extra_args)
        return new_updates, MetricsState(inner, of_state(updates, new_updates, inner))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def metrics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Returns the metrics that `with_metrics` left in an optimizer's state, however nested.

    Raises:
        ValueError: there are none, or those of several wrapped transformations: ask their states.
    """
    return _only(opt_state, MetricsState).metrics


def _only(state: Any, kind: type) -> Any:
    """Returns the one node of that kind in a state."""
    found = [
        node
        for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
        if isinstance(node, kind)
    ]
    if len(found) != 1:
        raise ValueError(f"the optimizer's state must hold one {kind.__name__}, got {len(found)}")
    return found[0]


def _where_not_masked(mu, tree):
    """`tree` with zeros for None, and a masked node at each of `mu`'s, of other optimizers."""

    def is_masked(node):
        return isinstance(node, optax.MaskedNode)

    tree = fill_missing(tree, mu)
    return jax.tree.map(lambda m, x: m if is_masked(m) else x, mu, tree, is_leaf=is_masked)


def _norm(arrays):
    """‖·‖ of arrays together, of entries too whose squares are out of range."""

    def largest(x):
        return jnp.max(jnp.abs(x), initial=0)

    norms = jnp.stack([norm_of_any_size(wide(x), largest, jnp.sum) for x in arrays])
    return norm_of_any_size(norms, largest, jnp.sum)


def _mean(function, arrays):
    """The mean of `function` over the matrices of several arrays."""
    count = sum(x.size(x.axes.batch) for x in arrays)
    return sum(jnp.sum(function(x)) for x in arrays) / max(count, 1)


def _orthogonality_residual(o):
    """‖OOᵀ - I‖_F/√m of each matrix (m, n), or of its transpose where it is tall."""
    x, (short, _), batch = wide(o.array), o.sides, o.axes.batch
    first = [*range(x.ndim)]
    second = [axis + x.ndim if axis in short else axis for axis in first]
    of_gram = [*batch, *short, *(second[axis] for axis in short)]
    gram = jnp.einsum(x, first, x.conj(), second, of_gram, precision="highest")
    m, sizes = o.size(short), gram.shape[len(batch) :]
    squares = jnp.abs(gram - jnp.eye(m).reshape(sizes)) ** 2
    return jnp.sqrt(jnp.sum(squares, range(len(batch), gram.ndim)) / max(m, 1))


def _stable_rank(m):
    """‖M‖_F²/‖M‖₂² of each matrix, 0 for zeros."""
    x, (short, long) = wide(m.array), m.sides
    x = over(x, m.largest(x))  # with finite squares

    def image(vector):
        return m.sum(x.conj() * vector, short)

    def length(vector, axes):
        return jnp.sqrt(m.sum(jnp.abs(vector) ** 2, axes))

    def iterate(_, vector):
        vector = m.sum(x * image(vector), long)
        return over(vector, length(vector, short))

    sizes = [size if axis in short else 1 for axis, size in enumerate(x.shape)]
    start = jax.random.normal(jax.random.key(0), sizes, x.dtype)
    start = start / length(start, short) + jnp.zeros_like(m.sum(x, long))
    vector = jax.lax.fori_loop(0, POWER_ITERATIONS, iterate, start)
    return over(length(x, short + long), length(image(vector), long)) ** 2
