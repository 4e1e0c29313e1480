"""NorMuon: each neuron's share of the orthogonalized update, divided by its size over time."""

import itertools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon_jax._checks import check, check_number
from muon_jax._distributed.reductions import matrices_of_tree
from muon_jax._distributed.sharding import Shardings
from muon_jax._matrices.views import Views
from muon_jax._numerics import over, wide

type Averaged = Literal["fan_in", "shorter"]


class NorMuonState(NamedTuple):
    """State of `scale_by_normuon`.

    At each parameter of the tree `nu` the second moments of its neurons, float32: a list of arrays,
    with one for each part of a `Split`, of the parameter's shape (unfolded by an `Unfold`) but for
    the averaged axes, whose size is 1.
    """

    nu: Any


def scale_by_normuon(
    b2: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    weight_dimension_numbers: Views = None,
    averaged: Averaged = "fan_in",
    shardings: Shardings = None,
) -> optax.GradientTransformation:
    """Normalizes the neurons of each orthogonalized update by their second moments.

    It follows `scale_by_muon` in a chain. For each matrix O (fan_in × fan_out), whose columns are
    its neurons, with V of one number per neuron and 0 at first,

        V <- b2·V + (1 - b2)·mean(O², over fan_in),
        N = O / (√V + eps),
        O <- N·‖O‖/‖N‖,

    so that the Frobenius norm ‖O‖ stays what it was, and zeros stay zeros. Computed in float32, on
    each device of its own part of O: they exchange sums alone.

    This is the form of `microsoft/dion <https://github.com/microsoft/dion>`_. The paper instead
    fixes the norm, 0.2·√(fan_in·fan_out). modded-nanogpt and Emerging-Optimizers average over the
    shorter axis, whichever it is (`averaged="shorter"`), and bound V from below in place of adding
    eps. That differs where fan_in > fan_out, where the columns of an orthogonal O all have the
    norm 1.

    Args:
        b2: decay rate of the second moments.
        eps: added to their roots.
        weight_dimension_numbers: as for `scale_by_muon`.
        averaged: the axis of the mean, `"fan_in"` or the `"shorter"` one: fan_out where that is
            less, with one number for each input.
        shardings: as for `scale_by_muon`; needed in a shard_map alone.

    Raises:
        ValueError: a parameter is no matrix, an unknown axis, `b2` is not in [0, 1), or `shardings`
            is missing or wrong.
        NotImplementedError: on explicit axes or in a shard_map, a `Split` or an `Unfold` takes an
            axis apart elsewhere than its sharding; or the shard_map is over some axes of a mesh.

    References:
        Li et al., `NorMuon: Making Muon more efficient and scalable
        <https://arxiv.org/abs/2510.05491>`_, 2025.
    """
    check("averaged", averaged, Averaged)
    check_number("b2", b2, below=1)

    def axes_of(o):
        """The axes of the mean, and those of the neurons."""
        return o.sides if averaged == "shorter" else (o.axes.reduction, o.axes.output)

    def mean_square(o):
        axes, _ = axes_of(o)
        return o.sum(jnp.abs(wide(o.array)) ** 2, axes) / max(o.size(axes), 1)

    def init_fn(params):
        matrices, _ = matrices_of_tree(weight_dimension_numbers, params, shardings)
        nu = [[jnp.zeros_like(mean_square(o), jnp.float32) for o in parts] for parts in matrices]
        return NorMuonState(jax.tree.structure(params).unflatten(nu))

    def update_fn(updates, state, params=None):
        del params

        def normalize(o, moment):
            square = mean_square(o)
            moment = b2 * moment + (1 - b2) * square
            denominator = jnp.sqrt(moment) + eps
            _, neurons = axes_of(o)
            norm = jnp.sqrt(o.sum(square, neurons))
            normalized = jnp.sqrt(o.sum((jnp.sqrt(square) / denominator) ** 2, neurons))
            scaled = wide(o.array) * (over(norm, normalized) / denominator)
            return scaled.astype(o.array.dtype), moment.astype(jnp.float32)

        matrices, unflatten = matrices_of_tree(weight_dimension_numbers, updates, shardings)
        moments, treedef = jax.tree.flatten(state.nu)
        every = itertools.chain(*matrices)
        pairs = [normalize(*pair) for pair in zip(every, moments, strict=True)]
        return unflatten(o for o, _ in pairs), NorMuonState(treedef.unflatten(v for _, v in pairs))

    return optax.GradientTransformation(init_fn, update_fn)
