"""Checks results, because the time of a wrong result says nothing."""

from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp


def in_float64(function: Callable[..., jax.Array], arguments: Iterable[jax.Array]) -> jax.Array:
    """Returns the result of `function`, computed in float64."""
    with jax.enable_x64(True):
        return jax.jit(function)(*(x.astype(jnp.float64) for x in arguments))


def relative_error(result: jax.Array, exact: jax.Array) -> float:
    """Returns ‖result - exact‖ / ‖exact‖ (Frobenius), NaN where either has one."""
    with jax.enable_x64(True):
        result, exact = result.astype(jnp.float64), exact.astype(jnp.float64)
        return float(jnp.linalg.norm(result - exact) / jnp.linalg.norm(exact))


def reason_if_wrong(error: float, baseline: str, limit: float) -> str | None:
    """Returns what is wrong with an error above twice that of the baseline, `limit`; else None."""
    if error <= 2 * limit:
        return None
    return f"the relative error is {error:.2e}, more than twice that of {baseline}, {limit:.2e}"


def largest_error(
    updates: Mapping[str, jax.Array],
    expected: Mapping[str, jax.Array],
    case: str,
    reference: str,
    tolerance: float,
) -> float:
    """Returns the largest relative error of an update, over the parameters.

    Args:
        updates: by parameter.
        expected: likewise.
        case: names the updates in the message of the error.
        reference: names the expected ones there.
        tolerance: the largest relative error that passes.

    Raises:
        ArithmeticError: the relative error of a parameter is more than `tolerance`.
    """
    errors = {name: relative_error(updates[name], x) for name, x in expected.items()}
    for name, error in errors.items():
        if not error <= tolerance:
            raise ArithmeticError(
                f"{case}: the update of {name} differs from {reference} by {error:.2e}, relative,"
                f" more than {tolerance}"
            )
    return max(errors.values())
