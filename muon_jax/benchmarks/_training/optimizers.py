"""The optimizers that are compared, and where the search for their learning rates begins."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib

from muon_jax import muon
from muon_jax.benchmarks._training.gpt import GPT


class Variant(NamedTuple):
    """An optimizer.

    Attributes:
        make: an optimizer that takes optax's arguments.
        arguments: of `make`.
        learning_rate: where the search for the best one begins.
    """

    make: Callable[..., optax.GradientTransformation]
    arguments: dict[str, Any]
    learning_rate: float = 0.008


VARIANTS = {
    "standard": Variant(muon, {"ns_coeffs": "standard"}),
    "balanced": Variant(muon, {"ns_coeffs": "balanced"}),
    "polar_express": Variant(muon, {"ns_coeffs": "polar_express"}),
    "adamw": Variant(optax.adamw, {}, 0.002),
    "standard_3_steps": Variant(muon, {"ns_coeffs": "standard", "ns_steps": 3}),
    "accurate": Variant(muon, {"ns_coeffs": "accurate"}),
    "fast": Variant(muon, {"ns_coeffs": "fast"}),
    "aol": Variant(muon, {"ns_coeffs": "aol", "preconditioning": "aol"}),
    "optax": Variant(optax.contrib.muon, {}),
}
# Has too few steps. A comparison that cannot tell it from the others tells nothing.
CONTROL = "standard_3_steps"
# The update of a matrix has this root mean square, about that of AdamW's.
RMS = 0.2


def make_optimizer(
    name: str, model: GPT, steps: int, weight_decay: float, learning_rate: float | jax.Array
) -> optax.GradientTransformation:
    """Returns an optimizer of all parameters after clipping gradients to a norm of 1.

    The learning rate rises over a tenth of the steps, and falls to 0 as a cosine. Muon has the
    layers' matrices, AdamW the other parameters at the same rate. Matrices alone decay.

    Args:
        name: of the variant.
        model: whose parameters are trained.
        steps: of the whole training.
        weight_decay: of the layers' matrices.
        learning_rate: the peak, which may be traced.
    """
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)
    variant, numbers = VARIANTS[name], model.dimension_numbers()
    if variant.make is optax.adamw:
        mask = functools.partial(jax.tree.map, lambda p: p.ndim > 2)
        arguments = {"b2": 0.95, "mask": mask}
    else:
        arguments = {"adam_b2": 0.95, "adam_weight_decay": 0.0, "consistent_rms": RMS}
        arguments["muon_weight_dimension_numbers"] = numbers
    optimizer = variant.make(
        lambda count: learning_rate * shape(count),
        weight_decay=weight_decay,
        **arguments,
        **variant.arguments,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)
