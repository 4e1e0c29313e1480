"""What `ns_coeffs` and `ns_steps` stand for: quintic steps, or a composed schedule."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from muon_jax._iteration.fitted import SCHEDULES
from muon_jax._iteration.published import DEFAULT_STEPS, DIVERGING, NAMED, NOISY
from muon_jax._iteration.steps import Schedule
from pallas_kernels.arguments import check_name, is_real

type Triple = tuple[float | jax.Array, float | jax.Array, float | jax.Array]
type NSCoeffs = str | Triple | tuple[Triple, ...]

MOST_STEPS = 100  # each step is traced by itself


class Quintics(NamedTuple):
    """Quintic steps X <- aX + bAX + cA²X with A = XXᵀ.

    Step i in [first, last) uses the triple (a, b, c) in `rows[i]`, or the only row.

    Attributes:
        rows: the triples.
        first, last: which steps.
        diverging: where rounding makes the coefficients diverge, by `DIVERGING`.
        traced: whether rows or steps are known only when the traced function runs.
        noisy: whether the first step has noise in bfloat16, by `NOISY`.
    """

    rows: Any
    first: int | jax.Array
    last: int | jax.Array
    diverging: str | None = None
    traced: bool = False
    noisy: bool = False

    @property
    def num_steps(self) -> int:
        """The number of steps; `DEFAULT_STEPS` where a trace does not know them."""
        return DEFAULT_STEPS if self.traced else int(self.last - self.first)

    @property
    def triples(self) -> tuple[tuple[float, ...], ...]:
        """The triple of each step, none of them traced."""
        rows = self.rows * self.last if len(self.rows) == 1 else self.rows[self.first : self.last]
        return tuple(map(tuple, rows))

    def has_noise(self, dtype: jax.typing.DTypeLike) -> bool:
        """Returns whether the first step has noise in that dtype."""
        return self.noisy and jnp.dtype(dtype) == jnp.bfloat16

    def without_arrays(self) -> "Quintics":
        """Returns what is known while tracing, which hashes."""
        if not self.traced:
            return self
        return Quintics((), 0, DEFAULT_STEPS, self.diverging, traced=True, noisy=self.noisy)


type Recipe = Quintics | Schedule


def is_traced(value: Any) -> bool:
    """Returns whether any leaf of `value` is known only when the traced function runs."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))


def canonicalize(ns_coeffs: Any) -> Any:
    """Returns the coefficients as a name or nested tuples of floats, which hash, or traced.

    Raises:
        TypeError: a dict or a callable.
        ValueError: a wrong shape or more than `MOST_STEPS` rows; or a coefficient is no finite real
            number, or a ≤ 0 in a triple (a, b, c), which would turn small singular values around.
    """
    if isinstance(ns_coeffs, str):
        return ns_coeffs
    if isinstance(ns_coeffs, Mapping) or callable(ns_coeffs):
        raise TypeError(
            "ns_coeffs of one matrix must be a name, a triple or a table of triples, got"
            f" {ns_coeffs!r}: pass coefficients by path to muon or scale_by_muon"
        )
    traced = is_traced(ns_coeffs)
    given = jnp.asarray(ns_coeffs) if traced else np.asarray(ns_coeffs, object)
    shape = given.shape
    if len(shape) not in (1, 2) or shape[-1] != 3 or not 1 <= shape[0] <= MOST_STEPS:
        raise ValueError(
            "ns_coeffs must be a name, or have shape (3,) or (steps, 3) with at most"
            f" {MOST_STEPS} steps, got {shape}"
        )
    if isinstance(given, jax.Array):
        return given
    values = given.astype(np.float64) if all(map(is_real, given.flat)) else np.array([np.nan])
    if not np.isfinite(values).all() or (values[..., 0] <= 0).any():
        raise ValueError(
            "ns_coeffs must be finite real numbers (a, b, c) with a > 0, got"
            f" {ns_coeffs}: pass (3.4445, -4.775, 2.0315), for example"
        )
    return (*map(tuple, values.tolist()),) if values.ndim == 2 else tuple(values.tolist())


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
        ValueError: an unknown name, a number of steps that the coefficients do not have, or a
            preconditioning beside a composed schedule, which brings its own.
    """
    if not is_traced(ns_steps):
        ns_steps = int(ns_steps)
    if isinstance(ns_coeffs, str):
        return _resolve_name(ns_coeffs, ns_steps, preconditioning)
    shape, traced = np.shape(ns_coeffs), is_traced((ns_coeffs, ns_steps))
    if len(shape) == 2:
        return Quintics(ns_coeffs, 0, shape[0], traced=is_traced(ns_coeffs))
    return Quintics((ns_coeffs,), 0, ns_steps, traced=traced)


def _resolve_name(name: str, ns_steps: int | jax.Array, preconditioning: str) -> Recipe:
    if name in SCHEDULES:
        return _resolve_schedule(SCHEDULES[name], ns_steps, preconditioning)
    check_name("ns_coeffs", name, sorted({*NAMED, *SCHEDULES}))
    rows, diverging, traced = NAMED[name], DIVERGING.get(name), is_traced(ns_steps)
    noisy = name in NOISY
    if len(rows) == 1:
        return Quintics(rows, 0, ns_steps, traced=traced)
    if traced:
        first = jnp.where(ns_steps == DEFAULT_STEPS, 0, jnp.maximum(len(rows) - ns_steps, 0))
        return Quintics(rows, first, len(rows), diverging, traced, noisy)
    if ns_steps == DEFAULT_STEPS:
        return Quintics(rows, 0, len(rows), diverging, noisy=noisy)
    if ns_steps > len(rows):
        raise ValueError(
            f"ns_coeffs={name!r} has {len(rows)} steps, got ns_steps={ns_steps}: pass fewer"
            f" steps, {DEFAULT_STEPS} (the default) for all, or a table with a row for each"
        )
    return Quintics(rows, len(rows) - ns_steps, len(rows), diverging, noisy=noisy)


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
