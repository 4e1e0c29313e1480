"""Weight decay: where it enters a chain, what it is multiplied by, which entries it spares."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from muon_jax._checks import check

type DecayForm = Literal["decoupled", "independent", "l2", "palm", "scaled_palm"]


def chain(
    direction: optax.GradientTransformation,
    scale: optax.GradientTransformation | None,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule,
    mask: Any | Callable[[optax.Params], Any] | None,
    form: DecayForm,
    cautious: bool,
) -> optax.GradientTransformation:
    """Returns an optimizer whose update of p is -η·s·O and, of weight decay λ, by `form`

        "decoupled"    -ηλp,
        "independent"  -λp,
        "palm"         -λη²p,
        "scaled_palm"  -λη²·s·p,
        "l2"           nothing, but λp is added to the gradient.

    Args:
        direction: makes O of the gradient.
        scale: multiplies by s; None for s = 1.
        learning_rate: η, a number or a schedule.
        weight_decay: λ, a number or a schedule.
        mask: tree of booleans, or a callable that makes one: which parameters decay.
        form: see above.
        cautious: whether p decays only where p·O ≥ 0, entry by entry.

    Raises:
        ValueError: an unknown form, or a cautious one that is no decay of p.
    """
    check("weight_decay_form", form, DecayForm)
    if cautious and form == "l2":
        raise ValueError(
            "cautious_weight_decay compares the decay with the update, got weight_decay_form='l2',"
            " where decay is a part of the gradient: choose another form"
        )

    def decay(rate, cautious=cautious):
        if isinstance(weight_decay, int | float) and weight_decay == 0:
            nothing = optax.identity()  # else a pass over all parameters
            return nothing if mask is None else optax.masked(nothing, mask)
        return _decay(rate, mask, cautious)

    decay_of_palm = decay(_times(weight_decay, learning_rate))
    descend = optax.scale_by_learning_rate(learning_rate)
    parts = {
        "decoupled": (direction, scale, decay(weight_decay), descend),
        "independent": (direction, scale, descend, decay(_times(-1, weight_decay), cautious=False)),
        "palm": (direction, scale, decay_of_palm, descend),
        "scaled_palm": (direction, decay_of_palm, scale, descend),
        "l2": (decay(weight_decay), direction, scale, descend),
    }
    chained = [part for part in parts[form] if part is not None]
    return _by_direction(chained) if cautious and form == "independent" else optax.chain(*chained)


def _times(*factors: Any) -> Any:
    """The product of numbers, or the schedule of it where one of them is a schedule."""

    def value(factor: Any, count) -> Any:
        return factor(count) if callable(factor) else factor

    if not any(map(callable, factors)):
        return math.prod(factors)
    return lambda count: math.prod(value(factor, count) for factor in factors)


def _decay(rate, mask, cautious):
    """u + rate·p in the dtype of u; where cautious only in entries in which it has u's sign."""
    inner = optax.add_decayed_weights(rate, mask)

    def update_fn(updates, state, params=None):
        decayed, state = inner.update(updates, state, params)

        def choose(d, u):
            kept = jnp.where(_agree(d - u, u), d, u) if cautious else d
            return kept.astype(u.dtype)

        return jax.tree.map(choose, decayed, updates), state

    return optax.GradientTransformation(inner.init, update_fn)


def _by_direction(parts):
    """The chain, whose last parts descend and decay, the latter where p·O ≥ 0, with O before both.

    After a learning rate of 0 there is no sign to compare with.
    """
    *first, descend, decay = parts
    makes_direction = optax.chain(*first)

    def update_fn(updates, state, params=None):
        of_first: Any
        *of_first, of_descend, of_decay = state
        direction, of_first = makes_direction.update(updates, tuple(of_first), params)
        steps, of_descend = descend.update(direction, of_descend, params)
        decayed, of_decay = decay.update(steps, of_decay, params)

        def choose(d, step, o):
            return jnp.where(_agree(step - d, o), d, step)

        chosen = jax.tree.map(choose, decayed, steps, direction)
        return chosen, (*of_first, of_descend, of_decay)

    return optax.GradientTransformation(optax.chain(*parts).init, update_fn)


def _agree(x, y):
    """Whether Re(x·ȳ) ≥ 0, without products that could be too small for a number."""
    return (x * jnp.sign(y).conj()).real >= 0
