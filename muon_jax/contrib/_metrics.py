"""Diagnostics of Muon's matrices, computed in each update and kept in the optimizer's state."""

import collections
import functools
import itertools
import re
from collections.abc import Hashable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax._checks import checks_arguments
from muon_jax._distributed.sharding import (
    Placed,
    Shardings,
    check_shardings,
    locate,
    meshes_of,
    parameters_of,
)
from muon_jax._iteration.normalization import wide
from muon_jax._matrices.views import Views, check_views
from muon_jax._transforms.chain import Present
from muon_jax._transforms.momentum import MuonState
from muon_jax._trees import check_state, fill_missing
from muon_jax.contrib._quantized import QUANTIZED
from muon_jax.contrib._reductions import Matrices, matrices_of_tree, norm_of_any_size, stack
from muon_jax.contrib._spectra import (
    grams_of,
    orthogonality_residual,
    stable_rank,
    unreached_share,
)
from muon_jax.contrib._trees import is_placeholder
from pallas_kernels.arguments import shown
from pallas_kernels.device import standard_promotion


class MetricsState(NamedTuple):
    """State of `with_metrics`.

    Attributes:
        inner: the state of the wrapped transformation.
        metrics: scalars (float32) by name.
    """

    inner: optax.OptState
    metrics: dict[str, jax.Array]


def _check_transform(name: str, value: Any) -> None:
    if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        raise TypeError(
            f"{name} must be a transformation with init and update, got {shown(value)}: pass"
            " scale_by_muon(), for example"
        )


@checks_arguments
def with_metrics(
    transform: Annotated[optax.GradientTransformation, _check_transform],
    weight_dimension_numbers: Views = None,
    shardings: Shardings = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps `scale_by_muon`, or a chain with it, to keep metrics of each update in the state.

    Each metric covers all matrices (fan_in × fan_out) of one shape, across all parameters. For
    16×40 matrices the metrics are

    *   `16x40/gradient_norm`: the Frobenius norm of all their gradients together.
    *   `16x40/update_rms`: the root mean square of the entries of all their updates.
    *   `16x40/orthogonality_residual`: the mean over matrices of ‖OOᵀ - I‖_F/√m, for the update O
        with the smaller side m. It is 0 for an orthogonal O, and meaningless for a chain that
        scales its updates.
    *   `16x40/stable_rank`: the mean over matrices of ‖M‖_F²/‖M‖₂², for the momentum M with the
        smaller side m. It lies between 1 and m, and is 0 for zeros. 16 power iterations estimate
        ‖M‖₂ from below, so the rank can be too large if the largest singular values are close.

    *   `16x40/unreached_share`: an estimate of the mean over matrices of the share of singular
        values of O below ½. Each named set of `ns_coeffs` but `"aol_nvidia"` maps singular values
        of the momentum to ½ or more, down to the smallest that it reaches. With coefficients by
        path, that smallest value depends on the path. 16 Lanczos steps on OOᵀ from one vector of
        random signs estimate the share p. The choice of the vector has a standard error of at
        most √(2p/m) for one matrix, and √(2p/(mN)) for N that differ. The steps add an error where
        many singular values lie close to ½; for m ≤ 16 they add only rounding. The vectors are the
        same in every update. The share is meaningless for a chain that scales its updates, and is 1
        for zeros.

    The residual costs a product OOᵀ in float32, and the share 16 products of that with a vector.
    Nothing waits for the host. `metrics` finds the values in a state.

    Matrices whose gradient is None are left out. If all matrices of a shape are left out, its
    metrics are 0.

    Args:
        transform: a transformation with one `MuonState` in its state.
        weight_dimension_numbers: as for `scale_by_muon`.
        shardings: as for `scale_by_muon`; needed only in a shard_map.

    Raises:
        TypeError: `transform` has no `init` and `update`.
        ValueError: the state has no `MuonState` or several, a parameter is no matrix, or
            `shardings` is missing or does not fit.
        NotImplementedError: a shard_map shards a parameter, or is over only some axes of a mesh.
    """
    check_views(weight_dimension_numbers)
    check_shardings(shardings)
    wrapped = optax.with_extra_args_support(transform)
    measure = functools.partial(_measure_update, weight_dimension_numbers, shardings)

    @standard_promotion()
    def init_fn(params: optax.Params) -> MetricsState:
        state = wrapped.init(params)
        if is_placeholder(params):
            # One leaf stands for the metrics, whose names depend on the parameters.
            return MetricsState(state, jnp.zeros([]))  # pyright: ignore[reportArgumentType]
        shapes = jax.eval_shape(measure, params, params, state)
        return MetricsState(state, {name: jnp.zeros([], jnp.float32) for name in shapes})

    @standard_promotion()
    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MetricsState]:
        check_state(updates, state, params, "inner")
        new_updates, inner = wrapped.update(updates, state.inner, params, **extra_args)
        none = {name: jnp.zeros([], jnp.float32) for name in state.metrics}
        return new_updates, MetricsState(inner, none | measure(updates, new_updates, inner))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def metrics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Returns the metrics that `with_metrics` left in an optimizer's state, however nested.

    Raises:
        ValueError: the state has no metrics, or the metrics of several wrapped transformations.
            Pass the state of each of them.
    """
    found = _nodes_of_type(opt_state, MetricsState)
    if len(found) != 1:
        raise ValueError(
            f"opt_state must hold one MetricsState, got {len(found)}: pass the state of one"
            " transformation that with_metrics wraps"
        )
    return found[0].metrics


class _Matched(NamedTuple):
    """The gradients, the updates and the momenta of the same matrices."""

    gradients: Matrices
    updates: Matrices
    momenta: Matrices


def _measure_update(
    views: Views,
    shardings: Shardings,
    gradients: optax.Updates,
    updates: optax.Updates,
    state: optax.OptState,
) -> dict[str, jax.Array]:
    """The metrics by name of one update, from the state after it; replicated on explicit axes."""
    found = _nodes_of_type(state, MuonState)
    if len(found) != 1:
        raise ValueError(
            f"with_metrics must wrap one MuonState, got {len(found)} in the state of its"
            " transformation: wrap one scale_by_muon, or one chain or muon that holds it"
        )
    mu = QUANTIZED.map(QUANTIZED.load, QUANTIZED.unpack(found[0].mu))
    filled = fill_missing(gradients, mu)
    mu = Present(gradients, mu).mask(mu)
    gradients, updates = (_masked_like(mu, tree) for tree in (filled, updates))
    _check_meshes(jax.tree.leaves(gradients))
    placed = locate(gradients, shardings)
    _check_unsharded(gradients, placed.whole)
    measure = functools.partial(
        _measure_matrices, views, shardings, _placement_keys(gradients, placed)
    )
    if AxisType.Explicit not in placed.mesh.axis_types:
        return measure(gradients, updates, mu)
    replicated = NamedSharding(placed.mesh, PartitionSpec())
    return jax.sharding.auto_axes(out_sharding=replicated)(measure)(gradients, updates, mu)


def _measure_matrices(
    views: Views,
    shardings: Shardings,
    placement_keys: Sequence[Hashable],
    *trees: optax.Updates,
) -> dict[str, jax.Array]:
    """The metrics by name of the trees of gradients, updates and momenta.

    Matrices can stack where they have the same placement, layout of axes and shape of their array.
    """
    parameters = parameters_of(views, trees[0], shardings)
    flat = [matrices_of_tree(parameters, tree)[0] for tree in trees]
    shapes = collections.defaultdict(lambda: collections.defaultdict(list))
    for placement, *leaf in zip(placement_keys, *flat, strict=True):
        for matched in itertools.starmap(_Matched, zip(*leaf, strict=True)):
            first = matched.gradients
            rows, cols = map(first.size, first.axes[1:])
            shapes[f"{rows}x{cols}"][placement, first.axes, first.array.shape].append(matched)
    found: dict[str, jax.Array] = {}
    for shape, groups in shapes.items():
        stacks = [_Matched(*map(stack, zip(*group, strict=True))) for group in groups.values()]
        for name, value in _measure_stacks(stacks).items():
            found[f"{shape}/{name}"] = value.astype(jnp.float32)
    return found


def _measure_stacks(stacks: Sequence[_Matched]) -> dict[str, jax.Array]:
    """The metrics of all matrices of one shape."""
    gradients, updates, momenta = zip(*stacks, strict=True)
    entries = sum(x.array.size for x in updates)
    grams = [*map(grams_of, updates)]
    return {
        "gradient_norm": _joint_norm([x.array for x in gradients]),
        "update_rms": _joint_norm([x.array for x in updates]) / max(entries, 1) ** 0.5,
        "orthogonality_residual": _mean([orthogonality_residual(gram) for gram in grams]),
        "unreached_share": _mean([unreached_share(gram) for gram in grams]),
        "stable_rank": _mean([*map(stable_rank, momenta)]),
    }


def _nodes_of_type[T](state: optax.OptState, node_type: type[T]) -> list[T]:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, node_type))
    return [node for node in nodes if isinstance(node, node_type)]


def _masked_like(mu: optax.Updates, tree: optax.Updates) -> optax.Updates:
    """`tree` with a masked node wherever `mu` has one.

    Other optimizers update those parameters, or this update skips them.
    """
    masked = optax.MaskedNode
    return jax.tree.map(
        lambda m, x: m if isinstance(m, masked) else x,
        mu,
        tree,
        is_leaf=lambda m: isinstance(m, masked),
    )


def _check_meshes(leaves: Sequence[jax.Array]) -> None:
    """Raises NotImplementedError where leaves are on several meshes, one of them with types."""
    meshes = meshes_of(leaves)
    if len(meshes) > 1 and any(AxisType.Explicit in mesh.axis_types for mesh in meshes):
        raise NotImplementedError(
            f"with_metrics on {len(meshes)} meshes, of which one has explicit axes: wrap an"
            " optimizer for the parameters of each mesh (optax.partition), or use automatic axes"
        )


def _check_unsharded(tree: optax.Updates, whole: Any) -> None:
    """Raises NotImplementedError where leaves of `tree` are shards of those of `whole`."""
    pairs = zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(whole), strict=True)
    for (path, x), of_all in pairs:
        if x.shape != of_all.shape:
            raise NotImplementedError(
                f"with_metrics in a shard_map needs whole parameters, got a shard of shape"
                f" {x.shape} of {jax.tree_util.keystr(path)} of shape {of_all.shape}: call the"
                " optimizer outside the shard_map"
            )


def _placement_keys(tree: optax.Updates, placed: Placed) -> Sequence[Hashable]:
    """A key for each leaf; leaves that are sharded alike have equal keys."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    if placed.kind == AxisType.Auto:
        # Only the compiler knows the sharding. Parameters whose paths differ in their digits alone
        # are layers of one kind, and mostly sharded alike.
        return [re.sub(r"\d+", "", path) for path in paths]
    return placed.specs or [None] * len(paths)


def _joint_norm(arrays: Sequence[jax.Array]) -> jax.Array:
    """‖·‖ of all arrays together, also of entries whose squares are out of range."""

    def largest_magnitude(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x), initial=0)

    norms = jnp.stack([norm_of_any_size(wide(x), largest_magnitude, jnp.sum) for x in arrays])
    return norm_of_any_size(norms, largest_magnitude, jnp.sum)


def _mean(values: Sequence[jax.Array]) -> jax.Array:
    """The mean of all values together; 0 of none."""
    total: Any = sum(map(jnp.sum, values))
    return total / max(sum(x.size for x in values), 1)
