"""What `muon` chains around the orthogonalization.

- `skip_missing`: gradients of None, whose parameters an update skips, as in torch.
- `scale_by_shape`: the scale of updates that depends on the shape of a matrix alone.
- `scale_by_adam`: the direction of AdamW.
- `chain_with_weight_decay`: the learning rate, and the weight decay in its place of the chain.
- `Relative`: a learning rate for AdamW that follows Muon's.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax

from muon_jax._checks import Number, check_fields, checks_arguments
from muon_jax._distributed.sharding import Parameter, Shardings, are_alike, parameters_of
from muon_jax._iteration.operand import cut_at
from muon_jax._matrices.views import ShapeScale, Views, shape_factor
from muon_jax._transforms.momentum import Storage
from muon_jax._trees import (
    any_missing,
    broadcast_prefix,
    check_gradients,
    check_state,
    check_update,
    fill_missing,
    is_box,
    is_missing,
)
from pallas_kernels.arguments import check_flag
from pallas_kernels.device import current, standard_promotion

# The fields of a state that are trees like the parameters.
_ARRAYS = Storage()
_OF_PARAMETERS = ("mu", "nu")


class Present:
    """Which parameters have a gradient.

    Attributes:
        tree: a boolean for each parameter.
    """

    def __init__(self, gradients: Any, like: Any) -> None:
        """Compares gradients, where None stands for all that is below it, with parameters."""

        def fill(gradient: Any, subtree: Any) -> Any:
            return jax.tree.map(lambda _: gradient is not None, subtree)

        self.tree = jax.tree.map(fill, gradients, like, is_leaf=is_missing)

    def select(self, present: Any, absent: Any) -> Any:
        """Returns the tree `present`, with that of `absent` in the places of skipped parameters."""
        return jax.tree.map(
            lambda keep, p, a: p if _all(keep) else a, self.tree, present, absent, is_leaf=is_box
        )

    def mask(self, tree: Any) -> Any:
        """Returns a tree like the parameters in which skipped ones are masked."""
        return self.select(tree, jax.tree.map(lambda _: optax.MaskedNode(), self.tree))


def skip_missing(
    update: Callable[..., tuple[Any, Any]],
    field: str | None = None,
    storage: Storage = _ARRAYS,
    has_momenta: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Returns the update of a transformation that skips parameters whose gradient is None.

    Their updates are zeros in the dtype that a gradient of the parameter's own dtype gives, and
    what the state has of them stays as it is. Counts of steps advance.

    Args:
        update: as of a transformation, with another argument `whole`: a tree like the parameters,
            with arrays in the places of skipped ones, too.
        field: that the state must have; None for any state.
        storage: of the momenta in the state.
        has_momenta: whether the state has a momentum `mu` for each parameter, which has its shape
            where a call has no parameters.

    Raises:
        TypeError: a gradient is no array, or the state is not what `init` returned.
        ValueError: a gradient is None and there are no shapes; or gradients are wrong.
    """

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if field is not None:
            check_state(updates, state, params, field)
        check_update(updates, params)
        if not any_missing(updates):
            return update(updates, state, params, whole=updates, **extra_args)
        of_state = None
        if has_momenta:
            of_state = storage.map(storage.load, storage.unpack(state.mu))
            check_gradients(updates, of_state, "the state")
        like = of_state if params is None else params
        if like is None:
            raise ValueError(
                "None in the place of a gradient, which Equinox leaves for all that is no array,"
                " needs the parameters, for its shape: call update(updates, state, params)"
            )
        present = Present(updates, like)
        zeros = _zeros(present, like, state, storage)
        whole = fill_missing(updates, zeros)
        new_updates, new_state = update(
            present.mask(whole),
            _map_nodes(present.mask, state),
            None if params is None else present.mask(params),
            whole=whole,
            **extra_args,
        )
        new_state = _map_nodes(lambda old, new: present.select(new, old), state, new_state)
        return present.select(new_updates, zeros), new_state

    return update_fn


def _all(keep: Any) -> bool:
    """Whether a boolean, or the one in a box, is true; none is in a box that is masked."""
    return all(jax.tree.leaves(keep))


def _map_nodes(function: Callable[..., Any], state: Any, *rest: Any) -> Any:
    """Maps the fields of states that are like the parameters; all else is that of the last one."""

    def map_node(*nodes: Any) -> Any:
        if not _is_node(nodes[0]):
            return nodes[-1]
        fields = [name for name in _OF_PARAMETERS if name in nodes[0]._fields]
        new = {name: function(*(getattr(node, name) for node in nodes)) for name in fields}
        return nodes[-1]._replace(**new)

    return jax.tree.map(map_node, state, *rest, is_leaf=_is_node)


def _is_node(node: Any) -> bool:
    fields = getattr(node, "_fields", ()) if isinstance(node, tuple) else ()
    return any(name in fields for name in _OF_PARAMETERS)


def _zeros(present: Present, like: Any, state: Any, storage: Storage) -> Any:
    """Zeros like the parameters, in the dtypes that these and their momenta promote to."""
    nodes = jax.tree.leaves(state, is_leaf=_is_node)
    of_nodes = (node.mu for node in nodes if _is_node(node) and hasattr(node, "mu"))
    momenta = [storage.map(storage.shape_of, storage.unpack(mu)) for mu in of_nodes]

    def zeros(keep: Any, *subtrees: Any) -> Any:
        if _all(keep):
            return subtrees[0]
        dtypes = [x.dtype for x in jax.tree.leaves(subtrees)]
        dtype = functools.reduce(jnp.promote_types, dtypes)
        return jax.tree.map(lambda x: jnp.zeros_like(x, dtype), subtrees[0])

    return jax.tree.map(zeros, present.tree, like, *momenta, is_leaf=is_box)


@checks_arguments
def scale_by_shape(
    weight_dimension_numbers: Views = None,
    consistent_rms: float | jax.Array | None = None,
    shape_scale: ShapeScale = "clipped_ratio",
    shardings: Shardings = None,
) -> optax.GradientTransformation:
    """Scales the update of each matrix by its fan-in, the rows, and its fan-out, the columns.

    Args:
        weight_dimension_numbers: as for `scale_by_muon`.
        consistent_rms: a number r, to multiply by r·√max(fan_in, fan_out) (`Moonlight
            <https://arxiv.org/abs/2502.16982>`_). An orthogonal update of any shape then has the
            root mean square r. Pass None for `shape_scale`.
        shape_scale: what to multiply by without `consistent_rms`:

            *   `"clipped_ratio"`: √max(1, fan_out/fan_in) (Jordan).
            *   `"ratio"`: √(fan_out/fan_in) (`Dion <https://github.com/microsoft/dion>`_).
            *   `"none"`: 1.
        shardings: as for `scale_by_muon`.

    Raises:
        TypeError: `consistent_rms` is a schedule.
        ValueError: `shape_scale` is unknown or beside `consistent_rms`, `consistent_rms` is
            negative, or `shardings` is missing or does not fit.
        NotImplementedError: a shard_map is over only some axes of a mesh.
    """
    if consistent_rms is not None and shape_scale != "clipped_ratio":
        raise ValueError(
            f"shape_scale={shape_scale!r} and consistent_rms={consistent_rms} are two scales for"
            " one update: pass shape_scale='clipped_ratio' to have consistent_rms alone, or"
            " consistent_rms=None to have shape_scale alone"
        )

    scale = shape_scale if consistent_rms is None else "longer_side"
    factor_of = functools.partial(shape_factor, scale)

    @standard_promotion()
    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        of_muon: Sequence[Parameter] | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, extra_args
        leaves, treedef = jax.tree.flatten(updates)
        if of_muon is None:
            of_muon = parameters_of(weight_dimension_numbers, updates, shardings)
        factors = [parameter.values(factor_of) for parameter in of_muon]
        if consistent_rms is not None:
            factors = [consistent_rms * value for value in factors]
        rms = 1.0 if consistent_rms is None else consistent_rms
        dtypes = [jnp.result_type(x.dtype, rms) for x in leaves]  # as in optax
        factors = [jnp.asarray(f, dtype) for f, dtype in zip(factors, dtypes, strict=True)]
        # Without a barrier some programs multiply by the product of this factor and a constant
        # learning rate, which rounds once, and others by one after the other, which rounds twice.
        factors = jax.lax.optimization_barrier(factors)
        return treedef.unflatten([*map(jnp.multiply, factors, leaves)]), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def scale_by_adam(
    b1: float | jax.Array,
    b2: float | jax.Array,
    eps: float | jax.Array,
    eps_root: float | jax.Array,
    nesterov: bool,
    storage: Storage,
) -> optax.GradientTransformation:
    """Returns `optax.scale_by_adam`, whose state is kept as `storage` says.

    With gradient g at step t = 1, 2, …,

        m <- (1 - b1)g + b1·m,  v <- (1 - b2)g² + b2·v,
        u = b1·m/(1 - b1ᵗ⁺¹) + (1 - b1)·g/(1 - b1ᵗ) with Nesterov momentum, else m/(1 - b1ᵗ),

    and the update is u/(√(v/(1 - b2ᵗ) + eps_root) + eps).

    Args:
        b1, b2: decay rates of the moments.
        eps: added to the denominator.
        eps_root: added under its square root.
        nesterov: whether u looks one step ahead.
        storage: of arrays. Its dtype is that of m; None is what optax promotes the parameters' and
            the gradients' to.

    Raises:
        TypeError: the state is not what `init` returned.
        ValueError: gradients do not fit the state, or the state is in another memory.
        NotImplementedError: the device has no such memory.
    """
    init = optax.scale_by_adam(mu_dtype=storage.dtype).init

    def init_fn(params: optax.Params) -> optax.OptState:
        return storage.memory.place(init(params))

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        check_state(updates, state, params, "mu")
        check_gradients(updates, state.mu, "the state")
        storage.memory.check(state)
        count = jnp.asarray(optax.safe_increment(state.count))
        # Computed once, as in optax: XLA may divide in another way by what only one leaf needs.
        mu_weight, nu_weight = 1 - b1**count, 1 - b2**count
        next_mu_weight = 1 - b1 ** jnp.asarray(optax.safe_increment(count))

        def update_leaf(moments: Any, g: jax.Array) -> tuple[Any, Any]:
            mu: Any = optax.tree.update_moment(g, moments[0], b1, 1)
            nu: Any = optax.tree.update_moment_per_elem_norm(g, moments[1], b2, 2)
            if nesterov:
                u = b1 * _divide(mu, next_mu_weight) + (1 - b1) * _divide(g, mu_weight)
            else:
                u = _divide(mu, mu_weight)
            u = u / (jnp.sqrt(_divide(nu, nu_weight) + eps_root) + eps)
            return u, (optax.tree.cast(mu, storage.dtype), nu.astype(moments[1].dtype))

        moments = jax.tree.map(lambda *both: both, state.mu, state.nu)
        leaves, treedef = jax.tree.flatten(updates)
        if leaves and current().platform == "gpu" and storage.is_plain and are_alike(leaves):
            pairs = [*zip(treedef.flatten_up_to(moments), leaves, strict=True)]
            made = zip(*_in_stacks(update_leaf, pairs), strict=True)
            updates, moments = map(treedef.unflatten, made)
        else:
            updates, moments = storage.update_leaves(
                update_leaf, moments, updates, are_read_again=False
            )
        both = zip(*treedef.flatten_up_to(moments), strict=True)
        mu, nu = map(treedef.unflatten, both) if treedef.num_leaves else (state.mu, state.nu)
        return updates, state._replace(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(init_fn, update_fn)


# Arrays of more entries take longer than a launch.
_SMALL = 2**16


def _in_stacks(update: Callable[..., Any], leaves: Sequence[tuple[Any, jax.Array]]) -> list[Any]:
    """Returns `update`, which works on each element, of all leaves, small equal ones together.

    GPUs take longer to launch a kernel than to update a bias. XLA merges what reads the parts of a
    stack, too, such as `optax.apply_updates`.

    Args:
        update: maps moments and a gradient to a tree of arrays of their shape.
        leaves: trees of arrays of one shape.
    """
    results: dict[int, Any] = {}
    alike = collections.defaultdict[Any, list[int]](list)
    for i, leaf in enumerate(leaves):
        arrays = jax.tree.leaves(leaf)
        alike[arrays[0].shape, *(x.dtype for x in arrays)].append(i)
    for members in alike.values():
        if len(members) == 1 or leaves[members[0]][1].size > _SMALL:
            results |= {i: update(*leaves[i]) for i in members}
            continue
        stacks = jax.tree.map(lambda *arrays: jnp.stack(arrays), *(leaves[i] for i in members))
        made, treedef = jax.tree.flatten(jax.lax.optimization_barrier(update(*stacks)))
        cut = [cut_at(x, (1,) * len(members)) for x in made]
        for i, parts in zip(members, zip(*cut, strict=True), strict=True):
            results[i] = treedef.unflatten(x[0] for x in parts)
    return [results[i] for i in range(len(leaves))]


def _divide(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x/weight in the dtype of x."""
    return x / weight.astype(jnp.result_type(x))


def product_of_rates(*factors: Any) -> optax.ScalarOrSchedule:
    """Returns the product, a schedule where a factor is a schedule."""
    if not any(map(callable, factors)):
        return math.prod(factors)

    def product(count: jax.typing.ArrayLike) -> Any:
        values: list[Any] = [x(count) if callable(x) else x for x in factors]
        return math.prod(values)

    return product


@dataclasses.dataclass(frozen=True)
class Relative:
    """A multiple of `learning_rate`, to pass as `adam_learning_rate`.

        muon(schedule, adam_learning_rate=Relative(0.3))

    AdamW then has 0.3 times Muon's rate at every step, also under `optax.inject_hyperparams`, where
    the rate in the state may change.

    Attributes:
        factor: what `learning_rate` is multiplied by.

    Raises:
        TypeError: `factor` is no number.
        ValueError: `factor` is negative.
    """

    factor: Annotated[float | jax.Array, Number("[0, inf)", 0.3)]

    def __post_init__(self) -> None:
        check_fields(self)

    def of(self, learning_rate: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
        """Returns the multiple of this learning rate, a schedule of a schedule."""
        return product_of_rates(learning_rate, self.factor)


type DecayForm = Literal["decoupled", "independent", "l2", "palm", "scaled_palm"]


def chain_with_weight_decay(
    direction: optax.GradientTransformation,
    scale: optax.GradientTransformation | None,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule | None,
    mask: Any | Callable[[optax.Params], Any] | None,
    form: DecayForm,
    cautious: bool,
) -> optax.GradientTransformation:
    """Returns an optimizer whose update of p is -η·s·O plus a term of the weight decay λ.

    The term is, by `form`,

        "decoupled"    -ηλp,
        "independent"  -λp,
        "palm"         -λη²p,
        "scaled_palm"  -λη²·s·p,
        "l2"           0, with λp added to the gradient.

    Args:
        direction: makes O of the gradient.
        scale: multiplies by s; None for s = 1.
        learning_rate: η, a number or a schedule.
        weight_decay: λ, a number or a schedule; None is 0.
        mask: which parameters decay: a tree of booleans, a callable that makes one, or None for
            all.
        form: see above.
        cautious: whether p decays only in entries with p·O ≥ 0.

    Raises:
        ValueError: `form` is `"l2"` with `cautious`.
    """
    if cautious and form == "l2":
        raise ValueError(
            "cautious_weight_decay compares the decay with the update, got weight_decay_form='l2',"
            " whose decay is a part of the gradient: pass another form, such as 'decoupled'"
        )

    def mask_of(params: optax.Params) -> Any:
        found = broadcast_prefix("weight_decay_mask", _decays, mask, params, lambda node: False)
        return jax.tree.structure(params).unflatten(found)

    weight_decay = 0.0 if weight_decay is None else weight_decay

    def decay(
        rate: optax.ScalarOrSchedule, cautious: bool = cautious
    ) -> optax.GradientTransformation:
        if isinstance(weight_decay, int | float) and weight_decay == 0:
            nothing = optax.identity()  # spares a pass over all parameters
            return nothing if mask is None else optax.masked(nothing, mask_of)
        return _add_decayed(rate, mask if mask is None else mask_of, cautious)

    independent_decay = decay(product_of_rates(-1, weight_decay), cautious=False)
    palm_decay = decay(product_of_rates(weight_decay, learning_rate))
    descend = optax.scale_by_learning_rate(learning_rate)
    parts = {
        "decoupled": (direction, scale, decay(weight_decay), descend),
        "independent": (direction, scale, descend, independent_decay),
        "palm": (direction, scale, palm_decay, descend),
        "scaled_palm": (direction, palm_decay, scale, descend),
        "l2": (decay(weight_decay), direction, scale, descend),
    }
    chained = [part for part in parts[form] if part is not None]
    if cautious and form == "independent":
        return _cautious_by_direction(chained)
    return optax.chain(*chained)


def _decays(path: tuple[Any, ...], node: Any) -> bool:
    """Whether parameters decay, by a leaf of the mask."""
    check_flag(f"weight_decay_mask{jax.tree_util.keystr(path)}", node)
    return bool(node)


def _add_decayed(
    rate: optax.ScalarOrSchedule, mask: Any, cautious: bool
) -> optax.GradientTransformation:
    """Makes u + rate·p of the update u, in the dtype that optax promotes these to.

    Args:
        rate: a number or a schedule.
        mask: as for `chain_with_weight_decay`.
        cautious: whether only entries decay in which rate·p has the sign of u.
    """
    inner = optax.add_decayed_weights(rate, mask)
    if not cautious:
        return inner

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        decayed, state = inner.update(updates, state, params)

        def decayed_or_update(d: jax.Array, u: jax.Array) -> jax.Array:
            return jnp.where(_agree(d - u, u), d, u)

        return jax.tree.map(decayed_or_update, decayed, updates), state

    return optax.GradientTransformation(inner.init, update_fn)


def _cautious_by_direction(
    parts: Sequence[optax.GradientTransformation],
) -> optax.GradientTransformation:
    """Chains `parts`, the last of which decays only in entries with p·O ≥ 0.

    O is the output of the parts before the last two, which descend and decay. The output of the
    descent has no sign where the learning rate is 0.
    """
    *first, descend, decay = parts
    makes_direction = optax.with_extra_args_support(optax.chain(*first))

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        of_first: Any
        *of_first, of_descend, of_decay = state
        direction, of_first = makes_direction.update(updates, tuple(of_first), params, **extra_args)
        steps, of_descend = descend.update(direction, of_descend, params)
        decayed, of_decay = decay.update(steps, of_decay, params)

        def decayed_or_step(d: jax.Array, step: jax.Array, o: jax.Array) -> jax.Array:
            return jnp.where(_agree(step - d, o), d, step)

        chosen = jax.tree.map(decayed_or_step, decayed, steps, direction)
        return chosen, (*of_first, of_descend, of_decay)

    return optax.GradientTransformationExtraArgs(optax.chain(*parts).init, update_fn)


def _agree(x: jax.Array, y: jax.Array) -> jax.Array:
    """Whether Re(x·ȳ) ≥ 0, without products that could underflow."""
    return (x * jnp.sign(y).conj()).real >= 0
