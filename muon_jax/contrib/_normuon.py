"""NorMuon: the orthogonalized update of each neuron, divided by its running root mean square."""

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon_jax._checks import BETA, checks_arguments
from muon_jax._distributed.sharding import (
    Parameter,
    Shardings,
    check_shardings,
    parameters_of,
)
from muon_jax._iteration.normalization import over, root, wide
from muon_jax._matrices.views import Views, check_views
from muon_jax._transforms.chain import skip_missing
from muon_jax._trees import check_params, is_box
from muon_jax.contrib._reductions import Matrices, matrices_of_tree
from muon_jax.contrib._trees import in_box_of, with_arrays
from pallas_kernels.device import standard_promotion

type Averaged = Literal["fan_in", "shorter"]


class NorMuonState(NamedTuple):
    """State of `scale_by_normuon`.

    Attributes:
        nu: a tree like the parameters. In the place of each parameter it holds the second moments
            (float32) of the neurons: a list with one array for each part of a `Split`. An array has
            the shape of the part, unfolded by an `Unfold`, but the averaged axes have the size 1.
            Where Flax's box of the parameter names mesh axes, each array has a box of its own. The
            averaged axes, and those that a view takes apart, have no names there.
    """

    nu: Any


@checks_arguments
def scale_by_normuon(
    b2: Annotated[float | jax.Array, BETA] = 0.95,
    eps: float | jax.Array = 1e-8,
    weight_dimension_numbers: Views = None,
    averaged: Averaged = "fan_in",
    shardings: Shardings = None,
) -> optax.GradientTransformation:
    """Normalizes the neurons of each orthogonalized update by their second moments.

    It follows `scale_by_muon` in a chain. The columns of a matrix O (fan_in × fan_out) are its
    neurons. V holds one number for each, and starts at 0:

        V <- b2·V + (1 - b2)·mean(O², over fan_in),
        N = O / (√V + eps),
        O <- N·‖O‖/‖N‖.

    The Frobenius norm ‖O‖ stays what it was, and zeros stay zeros. The dtype is float32. Each
    device computes its own part of O, and devices exchange sums alone.

    This is the form of `microsoft/dion <https://github.com/microsoft/dion>`_. Others differ:

    *   The paper fixes the norm at 0.2·√(fan_in·fan_out).
    *   modded-nanogpt and Emerging-Optimizers average over the shorter axis (`averaged="shorter"`).
        The result differs where fan_in > fan_out, where the columns of an orthogonal O all have the
        norm 1. They also bound V from below in place of adding eps.

    Args:
        b2: decay rate of the second moments.
        eps: added to the roots of the second moments.
        weight_dimension_numbers: as for `scale_by_muon`.
        averaged: the axis of the mean. `"shorter"` is fan_out where fan_out < fan_in, with one
            number for each input, and `"fan_in"` elsewhere.
        shardings: as for `scale_by_muon`; needed only in a shard_map.

    Raises:
        TypeError: `b2` or `eps` is no number, such as a schedule.
        ValueError: a parameter is no matrix, `averaged` is unknown, `b2` is not in [0, 1), or
            `shardings` is missing or does not fit.
        NotImplementedError: as `scale_to_param_norm`.

    References:
        Li et al., `NorMuon: Making Muon more efficient and scalable
        <https://arxiv.org/abs/2510.05491>`_, 2025.
    """

    check_views(weight_dimension_numbers)
    check_shardings(shardings)

    def averaged_and_neuron_axes(o: Matrices) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return o.sides if averaged == "shorter" else (o.axes.reduction, o.axes.output)

    def mean_square(o: Matrices) -> jax.Array:
        axes, _ = averaged_and_neuron_axes(o)
        return o.sum(jnp.abs(wide(o.array)) ** 2, axes) / max(o.size(axes), 1)

    @standard_promotion()
    def init_fn(params: optax.Params) -> NorMuonState:
        check_params(params)
        params = with_arrays(params)
        parameters = parameters_of(weight_dimension_numbers, params, shardings)
        matrices, _ = matrices_of_tree(parameters, params)
        parts_of_each = iter(matrices)

        def zeros_for(node: Any, o: Matrices) -> Any:
            averaged_axes, _ = averaged_and_neuron_axes(o)
            axes = [
                None if i in averaged_axes else axis.of_parameter for i, axis in enumerate(o.layout)
            ]
            return in_box_of(node, jnp.zeros_like(mean_square(o), jnp.float32), axes)

        def moments_for(node: Any) -> Any:
            if not jax.tree.leaves(node):  # the box of a parameter that `multi_transform` masked
                return node
            return [zeros_for(node, o) for o in next(parts_of_each)]

        return NorMuonState(jax.tree.map(moments_for, params, is_leaf=is_box))

    def normalize_neurons(o: Matrices, moment: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The new O, in the dtype of the old, and the new V."""
        square = mean_square(o)
        moment = b2 * moment + (1 - b2) * square
        denominator = root(moment) + eps
        _, neurons = averaged_and_neuron_axes(o)
        norm = root(o.sum(square, neurons))
        normalized = root(o.sum((root(square) / denominator) ** 2, neurons))
        scaled = wide(o.array) * (over(norm, normalized) / denominator)
        return scaled.astype(o.array.dtype), moment.astype(jnp.float32)

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None,
        whole: optax.Updates,
        of_muon: Sequence[Parameter] | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, NorMuonState]:
        del params, extra_args
        if of_muon is None:
            of_muon = parameters_of(weight_dimension_numbers, updates, shardings, whole)
        matrices, unflatten = matrices_of_tree(of_muon, updates)
        moments, treedef = jax.tree.flatten(state.nu)
        every = [*itertools.chain(*matrices)]
        if len(moments) != len(every):
            raise ValueError(
                f"the updates must have the matrices of the state, {len(moments)}, got"
                f" {len(every)}: pass updates of the parameters that init got"
            )
        pairs = [normalize_neurons(*pair) for pair in zip(every, moments, strict=True)]
        return unflatten(o for o, _ in pairs), NorMuonState(treedef.unflatten(v for _, v in pairs))

    update = standard_promotion()(skip_missing(update_fn, "nu"))
    return optax.GradientTransformationExtraArgs(init_fn, update)
