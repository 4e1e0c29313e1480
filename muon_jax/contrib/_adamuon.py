"""AdaMuon: the orthogonalized update, each entry divided by its running root mean square."""

import itertools
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from muon_jax._checks import BETA, checks_arguments
from muon_jax._distributed.sharding import Parameter, Shardings, check_shardings, parameters_of
from muon_jax._iteration.normalization import over, root, wide
from muon_jax._matrices.views import Views, check_views
from muon_jax._transforms.chain import skip_missing
from muon_jax._trees import check_gradients, check_params
from muon_jax.contrib._reductions import Matrices, matrices_of_tree
from muon_jax.contrib._trees import with_arrays
from pallas_kernels.device import standard_promotion


@checks_arguments
def scale_by_adamuon(
    b2: Annotated[float | jax.Array, BETA] = 0.95,
    eps: float | jax.Array = 1e-8,
    weight_dimension_numbers: Views = None,
    shardings: Shardings = None,
) -> optax.GradientTransformation:
    """Normalizes the entries of each orthogonalized update by their second moments.

    It follows `scale_by_muon` in a chain, as AdaMuon does, whose iteration gets signs:

        optax.chain(scale_by_muon(NewtonSchulz(before=jnp.sign)), scale_by_adamuon())

    For a matrix O (fan_in × fan_out), V has its shape and starts at 0:

        V <- b2·V + (1 - b2)·O²,
        N = O / (√V + eps),
        O <- N·√min(fan_in, fan_out)/‖N‖.

    The Frobenius norm is then that of an orthogonal matrix, and `consistent_rms=r` gives every
    update the root mean square r. Zeros stay zeros. V is in float32, sharded like the parameter, in
    an `optax.ScaleByRmsState`. Each device computes its own part of O, and devices exchange sums
    alone.

    Args:
        b2: decay rate of the second moments.
        eps: added to the roots of the second moments.
        weight_dimension_numbers: as for `scale_by_muon`.
        shardings: as for `scale_by_muon`; needed only in a shard_map.

    Raises:
        TypeError: `b2` or `eps` is no number, such as a schedule.
        ValueError: a parameter is no matrix, `b2` is not in [0, 1), or `shardings` is missing or
            does not fit.
        NotImplementedError: as `scale_to_param_norm`.

    References:
        Si, Zhang and Shen, `AdaMuon: Adaptive Muon optimizer <https://arxiv.org/abs/2507.11005>`_,
        2025.
    """

    check_views(weight_dimension_numbers)
    check_shardings(shardings)

    @standard_promotion()
    def init_fn(params: optax.Params) -> optax.ScaleByRmsState:
        check_params(params)
        params = with_arrays(params)
        parameters_of(weight_dimension_numbers, params, shardings)  # raises for what is no matrix
        return optax.ScaleByRmsState(optax.tree.zeros_like(params, dtype=jnp.float32))

    def moment_of(o: jax.Array, v: jax.Array) -> jax.Array:
        return b2 * v + (1 - b2) * jnp.abs(wide(o)) ** 2

    def to_norm(n: Matrices) -> jax.Array:
        (short, _), entries = n.sides, n.axes.reduction + n.axes.output
        norm = root(n.sum(jnp.abs(n.array) ** 2, entries))
        return over(n.size(short) ** 0.5 * n.array, norm)

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None,
        whole: optax.Updates,
        of_muon: Sequence[Parameter] | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.ScaleByRmsState]:
        del params, extra_args
        like = state.nu
        if any(map(jnp.iscomplexobj, jax.tree.leaves(updates))):  # whose moments are real
            like = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, jnp.complex64), like)
        check_gradients(updates, like, "the state")
        if of_muon is None:
            of_muon = parameters_of(weight_dimension_numbers, updates, shardings, whole)
        moments = jax.tree.map(moment_of, updates, state.nu)
        normalized = jax.tree.map(lambda o, v: over(wide(o), root(v) + eps), updates, moments)
        matrices, unflatten = matrices_of_tree(of_muon, normalized)
        scaled = unflatten(map(to_norm, itertools.chain(*matrices)))
        new = jax.tree.map(lambda o, x: x.astype(o.dtype), updates, scaled)
        return new, optax.ScaleByRmsState(optax.tree.cast(moments, jnp.float32))

    update = standard_promotion()(skip_missing(update_fn, "nu"))
    return optax.GradientTransformationExtraArgs(init_fn, update)
