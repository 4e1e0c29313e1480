"""The arguments of `muon` that reports are about, and the iteration that they stand for."""

import inspect
from collections.abc import Mapping
from typing import Any

from muon_jax._iteration.iteration import Iteration
from muon_jax._iteration.recipes import canonicalize
from muon_jax._muon import muon
from muon_jax._presets import arguments_of


def all_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `muon`: these, the arguments of their preset, and defaults.

    Raises:
        TypeError: `muon` has no such argument.
        ValueError: there is no such preset, or `muon` refuses an argument.
    """
    muon(0.0, **given)
    given = {**arguments_of(given.get("preset")), **given}
    call = inspect.signature(muon).bind(0.0, **given)
    call.apply_defaults()
    return call.arguments


def iteration_of(arguments: Mapping[str, Any]) -> Iteration:
    """Returns the iteration of `muon` with these arguments, all of them."""
    return Iteration.resolve(
        canonicalize(arguments["ns_coeffs"]),
        arguments["ns_steps"],
        arguments["eps"],
        eps_mode=arguments["eps_mode"],
        preconditioning=arguments["preconditioning"],
        dtype=arguments["ns_dtype"],
        method=arguments["ns_method"],
        implementation=arguments["implementation"],
    )
