"""What `ns_coeffs` and `ns_steps` stand for: quintic steps, or a composed schedule."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from muon_jax._iteration.fitted import SCHEDULES
from muon_jax._iteration.published import DEFAULT_STEPS, DITHERED, DIVERGING, NAMED
from muon_jax._iteration.steps import Schedule

type Triple = tuple[float | jax.Array, float | jax.Array, float | jax.Array]
type NSCoeffs = str | Triple | tuple[Triple, ...]


class Quintics(NamedTuple):
    """Quintic steps X <- aX + bAX + cA²X with A = XXᵀ.

    Step i in [first, last) uses the triple (a, b, c) in `rows[i]`, or the only row.

    Attributes:
        rows: the triples.
        first, last: which steps.
        diverging: whether the coefficients are of `DIVERGING`.
        traced: whether rows or steps are known only when the traced function runs.
        dithered: whether the coefficients are of `DITHERED`.
    """

    rows: Any
    first: int | jax.Array
    last: int | jax.Array
    diverging: bool = False
    traced: bool = False
    dithered: bool = False

    @property
    def num_steps(self) -> int:
        """The number of steps; `DEFAULT_STEPS` where a trace does not know them."""
        return DEFAULT_STEPS if self.traced else int(self.last - self.first)

    def without_arrays(self) -> "Quintics":
        """Returns what is known while tracing, which hashes."""
        if not self.traced:
            return self
        return self._replace(rows=(), first=0, last=DEFAULT_STEPS)


type Recipe = Quintics | Schedule


def is_traced(value: Any) -> bool:
    """Returns whether any leaf of `value` is known only when the traced function runs."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))


def canonicalize(ns_coeffs: Any) -> Any:
    """Returns the coefficients as a name or nested tuples of floats, which hash, or traced."""
    if isinstance(ns_coeffs, str):
        return ns_coeffs
    if is_traced(ns_coeffs):
        return jnp.asarray(ns_coeffs)
    values = np.atleast_1d(np.asarray(ns_coeffs, np.float64)).tolist()
    return tuple(map(tuple, values)) if np.ndim(ns_coeffs) == 2 else tuple(values)


def resolve_recipe(
    ns_coeffs: Any,
    ns_steps: int | jax.Array,
    preconditioning: str = "frobenius",
) -> Recipe:
    """Returns the steps that `ns_coeffs` and `ns_steps` stand for.

    | ns_coeffs                  | steps                                                 |
    | -------------------------- | ----------------------------------------------------- |
    | a triple, or a name of one | the triple, `ns_steps` times                          |
    | a table of the caller's    | its rows, whatever `ns_steps` says                    |
    | a name of several rows     | all rows for 5, the default; else the last `ns_steps` |
    | a composed schedule        | the schedule, whole                                   |

    Raises:
        ValueError: an unknown name, a wrong shape, a number of steps that the coefficients do not
            have, or a preconditioning beside a composed schedule, which brings its own.
    """
    if not is_traced(ns_steps):
        given, ns_steps = ns_steps, int(ns_steps)
        if ns_steps < 1 or ns_steps != given:
            raise ValueError(
                f"ns_steps must be an integer, at least 1, got {given!r}: pass 5, the default"
            )
    if isinstance(ns_coeffs, str):
        return _resolve_name(ns_coeffs, ns_steps, preconditioning)
    shape, traced = np.shape(ns_coeffs), is_traced((ns_coeffs, ns_steps))
    if len(shape) not in (1, 2) or shape[-1] != 3 or shape[0] == 0:
        raise ValueError(f"ns_coeffs must be a name, or have shape (3,) or (steps, 3), got {shape}")
    if len(shape) == 2:
        return Quintics(ns_coeffs, 0, shape[0], traced=is_traced(ns_coeffs))
    return Quintics((ns_coeffs,), 0, ns_steps, traced=traced)


def _resolve_name(name: str, ns_steps: int | jax.Array, preconditioning: str) -> Recipe:
    if name in SCHEDULES:
        return _resolve_schedule(SCHEDULES[name], ns_steps, preconditioning)
    if name not in NAMED:
        names = sorted({*NAMED, *SCHEDULES})
        raise ValueError(f"ns_coeffs must be one of {names}, got {name!r}")
    rows, traced = NAMED[name], is_traced(ns_steps)
    of_rows = functools.partial(
        Quintics, rows, diverging=name in DIVERGING, traced=traced, dithered=name in DITHERED
    )
    if len(rows) == 1:
        return of_rows(0, ns_steps)
    if traced:
        first = jnp.where(ns_steps == DEFAULT_STEPS, 0, jnp.maximum(len(rows) - ns_steps, 0))
        return of_rows(first, len(rows))
    if ns_steps == DEFAULT_STEPS:
        return of_rows(0, len(rows))
    if ns_steps > len(rows):
        raise ValueError(
            f"ns_coeffs={name!r} has {len(rows)} steps, got ns_steps={ns_steps}: pass fewer"
            f" steps, {DEFAULT_STEPS} (the default) for all, or a table with a row for each"
        )
    return of_rows(len(rows) - ns_steps, len(rows))


def _resolve_schedule(
    schedule: Schedule, ns_steps: int | jax.Array, preconditioning: str
) -> Schedule:
    count = len(schedule.steps)
    if not is_traced(ns_steps) and ns_steps not in (DEFAULT_STEPS, count):
        raise ValueError(
            f"ns_coeffs={schedule.name!r} is a whole of {count} step(s), none of which can be left"
            f" out or repeated, got ns_steps={ns_steps}: leave ns_steps at its default,"
            f" {DEFAULT_STEPS}"
        )
    if preconditioning != "frobenius":
        raise ValueError(
            f"ns_coeffs={schedule.name!r} is made for its own normalization, by the Schatten-4"
            f" norm, got preconditioning={preconditioning!r}: leave it at its default, 'frobenius'"
        )
    return schedule
