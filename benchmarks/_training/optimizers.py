"""The optimizers that are compared, and where the search for their learning rates begins."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib

from benchmarks._training.gpt import GPT
from muon_jax import muon

# The update of a matrix has this root mean square, about that of AdamW's.
RMS = 0.2

type LearningRate = Callable[[Any], Any]


def _muon(
    learning_rate: LearningRate,
    weight_decay: float,
    model: GPT,
    make: Callable[..., optax.GradientTransformation] = muon,
    **arguments: Any,
) -> optax.GradientTransformation:
    return make(
        learning_rate,
        weight_decay=weight_decay,
        consistent_rms=RMS,
        adam_b2=0.95,
        adam_weight_decay=0.0,
        muon_weight_dimension_numbers=model.dimension_numbers(),
        **arguments,
    )


def _adamw(
    learning_rate: LearningRate, weight_decay: float, model: GPT, of_matrices: float = 1.0
) -> optax.GradientTransformation:
    """Has the rate times `of_matrices` for the layers' matrices."""
    del model
    matrices = functools.partial(jax.tree.map, lambda p: p.ndim > 2)
    return optax.chain(
        optax.adamw(learning_rate, b2=0.95, weight_decay=weight_decay, mask=matrices),
        optax.masked(optax.scale(of_matrices), matrices),
    )


class Variant(NamedTuple):
    """An optimizer.

    Attributes:
        make: takes a schedule of the learning rate, the decay of the layers' matrices, and the
            model. The layers' matrices may have an optimizer of their own; the other parameters
            have AdamW without decay at the same learning rate.
        learning_rate: where the search for the best one begins.
    """

    make: Callable[..., optax.GradientTransformation]
    learning_rate: float = 0.008


VARIANTS = {
    "standard": Variant(functools.partial(_muon, ns_coeffs="standard")),
    "balanced": Variant(functools.partial(_muon, ns_coeffs="balanced")),
    "polar_express": Variant(functools.partial(_muon, ns_coeffs="polar_express")),
    "adamw": Variant(_adamw, 0.002),
    # AdamW needs less for matrices than Muon, and one rate for all would hold the others back.
    "adamw_quarter": Variant(functools.partial(_adamw, of_matrices=0.25)),
    "standard_3_steps": Variant(functools.partial(_muon, ns_coeffs="standard", ns_steps=3)),
    "accurate": Variant(functools.partial(_muon, ns_coeffs="accurate")),
    "fast": Variant(functools.partial(_muon, ns_coeffs="fast")),
    "aol": Variant(functools.partial(_muon, ns_coeffs="aol", preconditioning="aol")),
    "optax": Variant(functools.partial(_muon, make=optax.contrib.muon)),
}
# Has too few steps. A comparison that cannot tell it from the others tells nothing.
CONTROL = "standard_3_steps"


def make_optimizer(
    name: str, model: GPT, steps: int, weight_decay: float, learning_rate: float | jax.Array
) -> optax.GradientTransformation:
    """Returns an optimizer of all parameters after clipping gradients to a norm of 1.

    The learning rate rises over a tenth of the steps, and falls to 0 as a cosine.

    Args:
        name: of the variant.
        model: whose parameters are trained.
        steps: of the whole training.
        weight_decay: of the layers' matrices.
        learning_rate: the peak, which may be traced.
    """
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)
    optimizer = VARIANTS[name].make(lambda count: learning_rate * shape(count), weight_decay, model)
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)
