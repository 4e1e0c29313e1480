"""Which optimizer has each parameter."""

from typing import Any

import jax
import optax

from muon_jax._coefficients import CoeffsByPath, check_patterns
from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._iteration.schedules import NSCoeffs
from muon_jax._matrices.views import Views, assigned_views


def labels_of(
    params: optax.Params, views: Views, ns_coeffs: NSCoeffs | NewtonSchulz | CoeffsByPath
) -> Any:
    """Returns `"muon"` or `"adam"` for each parameter, by the arguments of `muon`.

    Raises:
        ValueError: a pattern of `ns_coeffs` matches nothing, or a view does not fit.
    """
    labels = jax.tree.structure(params).unflatten(
        "adam" if view is None else "muon" for view in assigned_views(views, params)
    )
    check_patterns(ns_coeffs, labels)
    return labels
