"""Weight decay: its place in a chain, the factors of its rate, and the entries that it spares."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from muon_jax._trees import broadcast_prefix
from pallas_kernels.arguments import check_flag


def product_of_rates(*factors: Any) -> optax.ScalarOrSchedule:
    """Returns the product, a schedule where a factor is a schedule."""
    if not any(map(callable, factors)):
        return math.prod(factors)

    def product(count: jax.typing.ArrayLike) -> Any:
        values: list[Any] = [x(count) if callable(x) else x for x in factors]
        return math.prod(values)

    return product


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
