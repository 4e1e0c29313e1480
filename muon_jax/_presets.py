"""Published Muons by name: the arguments of `muon` that make it each of them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

_KELLER = {
    "momentum": "ema",
    "eps": 1e-7,
    "ns_dtype": "bfloat16",
    "ns_method": "standard",
    "adam_b2": 0.95,
    "adam_eps": 1e-10,
    "adam_nesterov": False,
}
_MOONLIGHT = {
    "momentum": "heavy_ball",
    "eps": 1e-7,
    "consistent_rms": 0.2,
    "weight_decay": 0.1,
    "ns_dtype": "bfloat16",
    "ns_method": "standard",
    "adam_b2": 0.95,
    "adam_eps": 1e-8,
    "adam_nesterov": False,
    "adam_weight_decay": 0.1,
}

# What is not named has optax's default; dtype and form of the iteration, whose defaults are our
# own, are always named. The learning rate is the caller's. Norms are computed in float32, by the
# peers mostly in the dtype of the iteration. A safety factor on the norm is part of the
# coefficients here, and eps is divided by it.
PRESETS: dict[str, dict[str, Any]] = {
    # https://github.com/KellerJordan/Muon/blob/master/muon.py, SingleDeviceMuonWithAuxAdam. There
    # the scale of a convolution is that of its kernel's height and width; here of its matrix.
    "keller": _KELLER,
    # https://github.com/pytorch/pytorch/blob/main/torch/optim/_muon.py, with torch.optim.AdamW and
    # its defaults beside it. Its adjust_lr_fn="match_rms_adamw" is consistent_rms=0.2.
    "torch": {
        "momentum": "ema",
        "eps": 1e-7,
        "eps_mode": "max",
        "weight_decay": 0.1,
        "ns_dtype": "bfloat16",
        "ns_method": "standard",
        "adam_eps": 1e-8,
        "adam_nesterov": False,
        "adam_weight_decay": 0.01,
    },
    # https://github.com/MoonshotAI/Moonlight/blob/master/examples/toy_train.py. Its AdamW adds eps
    # before the bias correction.
    "moonlight": _MOONLIGHT,
    # https://github.com/google-deepmind/optax/blob/main/optax/contrib/_muon.py, in the momentum's
    # own dtype. AdamW with Nesterov momentum.
    "optax": {"ns_dtype": None, "ns_method": "standard"},
    # https://github.com/microsoft/dion/blob/main/dion/muon.py: Polar Express, no Nesterov momentum,
    # a scale that is not bounded below by 1. Its safety factor is 1.02.
    "dion": {
        "ns_coeffs": "polar_express_nanogpt",
        "momentum": "heavy_ball",
        "nesterov": False,
        "eps": 1e-8 / 1.02,
        "shape_scale": "ratio",
        "weight_decay": 0.01,
        "ns_dtype": "bfloat16",
        "ns_method": "standard",
        "adam_b2": 0.95,
        "adam_eps": 1e-8,
        "adam_weight_decay": 0.01,
    },
    # https://github.com/Dao-AILab/gram-newton-schulz: the gram form in float16 with one restart,
    # after the second step. Square matrices run in the standard form there and in the gram form
    # here: the same polynomial. AdamW is that of its example.py. The gram form needs a number of
    # steps that is known: under optax.inject_hyperparams, static_args="ns_steps".
    "gram": {
        "ns_coeffs": "polar_express",
        "momentum": "heavy_ball",
        "eps": 1e-7,
        "consistent_rms": 0.2,
        "weight_decay": 0.1,
        "ns_dtype": "float16",
        "ns_method": "gram",
        "adam_b2": 0.95,
        "adam_eps": 1e-8,
        "adam_nesterov": False,
        "adam_weight_decay": 0.1,
    },
    # https://github.com/marin-community/marin/blob/main/lib/levanter/src/levanter/optim/muon.py, in
    # the momentum's own dtype. It clips AdamW's gradients to a global norm of 1: chain that. Its
    # use_kimi_scaling is consistent_rms=0.2.
    "levanter": {
        "ns_coeffs": "dion",
        "momentum": "heavy_ball",
        "eps": 1e-8,
        "ns_dtype": None,
        "ns_method": "standard",
        "adam_b2": 0.95,
        "adam_nesterov": False,
    },
    # https://github.com/thib-s/flash-newton-schulz (Turbo-Muon): four steps after rows are scaled
    # by AOL, in Keller Jordan's optimizer. Of a square matrix the rows are inputs here, where
    # weights are (in, out), and outputs there.
    "turbo": _KELLER | {"ns_coeffs": "aol", "preconditioning": "aol"},
    # https://github.com/StarrickLiu/fused-muon: Moonlight's, with one product X <- BX a step, B
    # rounded; which is how this library makes every step. There the scale of a convolution is that
    # of its channels; here of its matrix.
    "fused_muon": dict(_MOONLIGHT),
    # A Muon for mixtures of experts, products in float16. There X is rounded to float16 before its
    # norm is taken, and can overflow; here after. Its AdamW is not known; that of PyTorch.
    "moe_fp16": {
        "ns_coeffs": "standard_1.02",
        "momentum": "heavy_ball",
        "eps": 1e-7,
        "consistent_rms": 0.2,
        "weight_decay": 0.01,
        "ns_dtype": "float16",
        "ns_method": "standard",
        "adam_eps": 1e-8,
        "adam_nesterov": False,
        "adam_weight_decay": 0.01,
    },
    # https://github.com/NVIDIA-NeMo/Emerging-Optimizers, orthogonalized_optimizers/muon.py, and
    # https://github.com/NVIDIA/Megatron-LM, core/optimizer/optimizer_config.py, for AdamW. The
    # scale "spectral" is √max(fan_in, fan_out): its extra_scale_factor is consistent_rms.
    "megatron": {
        "ns_coeffs": "dion",
        "momentum": "ema",
        "nesterov": False,
        "eps": 1e-15,
        "eps_mode": "max",
        "consistent_rms": 1.0,
        "weight_decay": 0.01,
        "ns_dtype": "bfloat16",
        "ns_method": "standard",
        "adam_eps": 1e-8,
        "adam_weight_decay": 0.01,
    },
    # https://github.com/KellerJordan/modded-nanogpt/blob/master/train_gpt.py: NorMuon with weight
    # decay ∝ η². It schedules beta from 0.85 to 0.95 and back, and has factors of learning rate,
    # weight decay and betas by parameter. Its Adam adds eps before the bias correction.
    "nanogpt": _KELLER
    | {
        "ns_coeffs": "polar_express_nanogpt",
        "eps": 1e-6 / 1.02,
        "normuon_b2": 0.9,
        "normuon_averaged": "shorter",
        "weight_decay": 1.2,
        "weight_decay_form": "scaled_palm",
        "cautious_weight_decay": True,
        "adam_weight_decay": 0.005,
    },
}


def arguments_of(preset: str | None) -> dict[str, Any]:
    """Returns the arguments that a preset stands for; none without one.

    Raises:
        ValueError: there is no such preset.
    """
    if preset is None:
        return {}
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {sorted(PRESETS)}, got {preset!r}")
    return PRESETS[preset]


def takes_preset[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Makes the argument `preset` stand for those arguments of PRESETS that a call leaves out."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs).arguments
        preset = given.get("preset")
        if preset and len(given) == len(signature.parameters):
            raise ValueError(
                f"preset={preset!r} came with a value for every argument, which leaves nothing to"
                " it. optax.inject_hyperparams passes every default: make the preset its defaults,"
                f" optax.inject_hyperparams(functools.partial(muon, **muon_jax.PRESETS[{preset!r}]"
                "))(learning_rate=...)"
            )
        merged = arguments_of(preset) | given
        call: Callable[..., R] = function
        return call(**merged)

    return wrapper
