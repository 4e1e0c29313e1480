"""AdamH: which of AdamW's matrices keep their norms, and the optimizer that keeps them."""

import re
from typing import Any

import jax
import numpy as np
import optax

from muon_jax._distributed.sharding import Shardings
from muon_jax._transforms.param_norm import keep_param_norm, scale_to_param_norm
from muon_jax._trees import has_masked, path_name


def label_of_adam(pattern: str | None, path: tuple[Any, ...], x: Any) -> str:
    """Returns `"adamh"` for a matrix whose path the pattern matches, else `"adam"`.

    Args:
        pattern: the argument `adamh` of `muon`.
        path: of a parameter that AdamW has.
        x: the parameter.
    """
    is_named = pattern is not None and re.search(pattern, path_name(path))
    return "adamh" if is_named and np.ndim(x) == 2 else "adam"


def check_adamh(pattern: str | None, labels: Any) -> None:
    """Raises ValueError where a pattern matches no matrix, although no parameter is masked.

    Args:
        pattern: the argument `adamh` of `muon`.
        labels: for each parameter the name of its optimizer.
    """
    leaves = jax.tree.leaves(labels)
    if pattern is not None and leaves and "adamh" not in leaves and not has_masked(labels):
        raise ValueError(
            f"adamh={pattern!r} matches no matrix that AdamW has: pass the path of the output head,"
            " which describe(params) prints, or adamh=None where there is none"
        )


def on_spheres(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    shardings: Shardings,
) -> optax.GradientTransformation:
    """Returns the optimizer whose matrices move by η·‖p‖·u/‖u‖ along u, and keep their norms.

    Args:
        direction: makes u of the gradient.
        learning_rate: η, a number or a schedule.
        shardings: as for `muon`.
    """
    return optax.chain(
        direction,
        scale_to_param_norm(shardings=shardings),
        optax.scale_by_learning_rate(learning_rate),
        keep_param_norm(shardings=shardings),
    )
