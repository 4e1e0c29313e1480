"""What `ns_coeffs` and `ns_steps` stand for: a schedule."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from muon_jax._iteration.coefficients import DIVERGING, NAMED, NOISY, SCHEDULES
from muon_jax._iteration.steps import DEFAULT_STEPS, Schedule, Step, Triple
from pallas_kernels.arguments import check_name, is_real

type NSCoeffs = str | Triple | tuple[Triple, ...]

MOST_STEPS = 100  # each step is traced by itself


def is_traced(value: Any) -> bool:
    """Returns whether any leaf of `value` is known only when the traced function runs."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))


def canonicalize(name: str, coefficients: Any) -> Any:
    """Returns the coefficients as a name or nested tuples of floats, which hash, or traced.

    Args:
        name: of the argument.
        coefficients: its value.

    Raises:
        TypeError: a dict or a callable.
        ValueError: an unknown name; a wrong shape or more than `MOST_STEPS` rows; or a coefficient
            is no finite real number, or a ≤ 0 in a triple (a, b, c), which would turn small
            singular values around.
    """
    if isinstance(coefficients, str):
        check_name(name, coefficients, sorted({*NAMED, *SCHEDULES}))
        return coefficients
    if isinstance(coefficients, Mapping) or callable(coefficients):
        raise TypeError(
            f"{name} of one matrix must be a name, a triple or a table of triples, got"
            f" {coefficients!r}: pass coefficients by path to muon or scale_by_muon"
        )
    traced = is_traced(coefficients)
    given = jnp.asarray(coefficients) if traced else np.asarray(coefficients, object)
    shape = given.shape
    if len(shape) not in (1, 2) or shape[-1] != 3 or not 1 <= shape[0] <= MOST_STEPS:
        raise ValueError(
            f"{name} must be a name, or have shape (3,) or (steps, 3) with at most"
            f" {MOST_STEPS} steps, got {shape}"
        )
    if isinstance(given, jax.Array):
        return given
    values = given.astype(np.float64) if all(map(is_real, given.flat)) else np.array([np.nan])
    if not np.isfinite(values).all() or (values[..., 0] <= 0).any():
        raise ValueError(
            f"{name} must be finite real numbers (a, b, c) with a > 0, got"
            f" {coefficients}: pass (3.4445, -4.775, 2.0315), for example"
        )
    return (*map(tuple, values.tolist()),) if values.ndim == 2 else tuple(values.tolist())


def resolve_schedule(
    ns_coeffs: Any, ns_steps: int | jax.Array = DEFAULT_STEPS, preconditioning: str = "frobenius"
) -> Schedule:
    """Returns the steps that `ns_coeffs` and `ns_steps` stand for.

    | ns_coeffs                  | steps                                                 |
    | -------------------------- | ----------------------------------------------------- |
    | a triple, or a name of one | the triple, `ns_steps` times                          |
    | a table of the caller's    | its rows, whatever `ns_steps` says                    |
    | a name of several rows     | all rows for 5, the default; else the last `ns_steps` |
    | a composed schedule        | the schedule, whole                                   |

    Args:
        ns_coeffs: canonical, or traced.
        ns_steps: a number, which may be traced.
        preconditioning: as for `newton_schulz`.

    Raises:
        ValueError: a number of steps that the coefficients do not have, or a preconditioning beside
            a composed schedule, which brings its own.
    """
    if not isinstance(ns_steps, Tracer):
        ns_steps = int(ns_steps)
    if not isinstance(ns_coeffs, str):
        rows = ns_coeffs if np.ndim(ns_coeffs) == 2 else [ns_coeffs]
        return _of_rows(rows, len(rows) if np.ndim(ns_coeffs) == 2 else ns_steps)
    if ns_coeffs in SCHEDULES:
        return _composed(SCHEDULES[ns_coeffs], ns_steps, preconditioning)
    rows = NAMED[ns_coeffs]
    if len(rows) > 1 and not isinstance(ns_steps, Tracer):
        if ns_steps == DEFAULT_STEPS:
            ns_steps = len(rows)
        if ns_steps > len(rows):
            raise ValueError(
                f"ns_coeffs={ns_coeffs!r} has {len(rows)} steps, got ns_steps={ns_steps}: pass"
                f" fewer steps, {DEFAULT_STEPS} (the default) for all, or a table with a row for"
                " each"
            )
        rows = rows[len(rows) - ns_steps :]
    return _of_rows(rows, ns_steps, ns_coeffs)


def _of_rows(rows: Sequence[Any], count: int | jax.Array, name: str = "") -> Schedule:
    """The last `count` of these rows, or the only row `count` times."""
    steps, loop = tuple(Step.of_triple(*row) for row in rows), None
    if not isinstance(count, Tracer):
        steps = steps * count if len(rows) == 1 else steps
    elif len(rows) == 1:
        loop = 0, count
    else:
        first = jnp.where(count == DEFAULT_STEPS, 0, jnp.maximum(len(rows) - count, 0))
        loop = first, len(rows)
    noisy = None
    if name in NOISY:
        noisy = (Step.of_triple(*rows[0], noisy=1), *steps[1:])
    return Schedule(steps, noisy, name, DIVERGING.get(name), loop, is_traced((rows, count)))


def _composed(schedule: Schedule, ns_steps: int | jax.Array, preconditioning: str) -> Schedule:
    count = len(schedule.steps)
    if not isinstance(ns_steps, Tracer) and ns_steps not in (DEFAULT_STEPS, count):
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
