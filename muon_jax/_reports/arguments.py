"""The arguments of `muon` that reports are about, and the iterations that they stand for."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_jax._coefficients import Iterations, check_patterns, iterations_by_path
from muon_jax._foreign.calls import check_names
from muon_jax._matrices.views import View, assigned_views
from muon_jax._presets import all_given
from muon_jax._transforms.momentum import Memory, storage_of
from muon_jax._trees import check_params


def all_arguments(
    report: str, optimizer: Callable[..., Any], given: Mapping[str, Any], params: Any
) -> tuple[dict[str, Any], Any]:
    """Returns all arguments, those of the preset and defaults too, and the shapes of the state.

    Args:
        report: the function that got them, for errors.
        optimizer: `muon`, or one that takes its arguments.
        given: the arguments. The learning rate may be missing.
        params: the parameters.

    Raises:
        TypeError: `muon` has no such argument, or its `init` refuses the parameters.
        ValueError: there is no such preset, or `muon` refuses an argument or, in `init`, the
            parameters.
    """
    signature = inspect.signature(optimizer)
    check_names(report, given, [*signature.parameters])
    given = {"learning_rate": 0.0, **given}
    optimizer(**given)
    check_params(params, f"{report}(params)")
    # A report is about any devices, so its arrays need not be in the memory of these.
    storage = dataclasses.replace(storage_of(given.get("mu_dtype")), memory=Memory())
    made = optimizer(**given | {"mu_dtype": storage, "shardings": None})
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), params)
    state = jax.eval_shape(made.init, shapes)
    call = signature.bind(**all_given(optimizer, given))
    call.apply_defaults()
    return call.arguments, state


def iterations_of_muon(arguments: Mapping[str, Any], matrices: Any) -> Iterations:
    """Returns the iterations of `muon` with these arguments, all of them.

    Args:
        arguments: those of `muon`.
        matrices: the tree of the parameters that Muon has.

    Raises:
        TypeError: coefficients are none.
        ValueError: coefficients are wrong, or a parameter has none.
    """
    iterations_of = iterations_by_path(
        arguments["ns_coeffs"],
        steps=arguments["ns_steps"],
        eps=arguments["eps"],
        eps_mode=arguments["eps_mode"],
        preconditioning=arguments["preconditioning"],
    )
    return iterations_of(matrices)


def views_of_muon(arguments: Mapping[str, Any], params: Any) -> list[View | None]:
    """Returns the view of each parameter, None for AdamW.

    Args:
        arguments: those of `muon`, all of them.
        params: the parameters.

    Raises:
        ValueError: as `assigned_views` and `check_patterns`.
    """
    views = assigned_views(arguments["muon_weight_dimension_numbers"], params)
    labels = ("adam" if view is None else "muon" for view in views)
    check_patterns(arguments["ns_coeffs"], jax.tree.structure(params).unflatten(labels))
    return views


def matrices_of_muon(params: Any, views: Sequence[View | None]) -> Any:
    """Returns the parameters as `scale_by_muon` gets them: those without a view are masked."""
    leaves, treedef = jax.tree.flatten(params)
    return treedef.unflatten(
        optax.MaskedNode() if view is None else x for x, view in zip(leaves, views, strict=True)
    )
