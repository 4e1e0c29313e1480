"""Which optimizer has each parameter: Muon, AdamW or AdamH."""

from typing import Any

import jax
import optax

from muon_jax._coefficients import CoeffsByPath, check_patterns
from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._iteration.schedules import NSCoeffs
from muon_jax._matrices.views import Views, assigned_views
from muon_jax._transforms.adamh import check_adamh, label_of_adam


def labels_of(
    params: optax.Params,
    views: Views,
    adamh: str | None,
    ns_coeffs: NSCoeffs | NewtonSchulz | CoeffsByPath,
) -> Any:
    """Returns `"muon"`, `"adam"` or `"adamh"` for each parameter, by the arguments of `muon`.

    Raises:
        ValueError: a pattern of `adamh` or `ns_coeffs` matches nothing, or a view does not fit.
    """
    leaves, viewed = jax.tree.leaves_with_path(params), assigned_views(views, params)
    labels = jax.tree.structure(params).unflatten(
        "muon" if view is not None else label_of_adam(adamh, *leaf)
        for leaf, view in zip(leaves, viewed, strict=True)
    )
    check_adamh(adamh, labels)
    check_patterns(ns_coeffs, labels)
    return labels
