"""Published Muons by name, each as the arguments that make `muon` compute it."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import optax

from muon_jax._iteration.coefficients import canonicalize
from muon_jax._iteration.newton_schulz import NewtonSchulz
from pallas_kernels.arguments import check_name


class _ReadOnly(dict[str, Any]):
    """A dict that refuses changes. Copies, and what unpickles, are dicts of the caller's own."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "PRESETS is read-only, because muon(preset=...) reads it for every caller: give the"
            " argument next to the preset, as in muon(0.02, preset='moonlight', weight_decay=0.05),"
            " or change a copy, as in PRESETS['moonlight'] | {'weight_decay': 0.05}"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = cast(Any, _refuse)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


in_bfloat16 = functools.partial(NewtonSchulz, dtype="bfloat16", method="standard")
_KELLER = {
    "ns_coeffs": in_bfloat16(),
    "momentum": "ema",
    "eps": 1e-7,
    "adam_b2": 0.95,
    "adam_eps": 1e-10,
    "adam_nesterov": False,
}
_MOONLIGHT = {
    "ns_coeffs": in_bfloat16(),
    "momentum": "heavy_ball",
    "eps": 1e-7,
    "consistent_rms": 0.2,
    "weight_decay": 0.1,
    "adam_b2": 0.95,
    "adam_eps": 1e-8,
    "adam_nesterov": False,
    "adam_weight_decay": 0.1,
}

# tests/oracles.py has the file, commit and line of each number. Every preset names the dtype and
# the method of its iteration, whose defaults are this library's own. Other arguments that a preset
# leaves out have optax's defaults. The learning rate is the caller's.
# Differences from all sources:
# -   Norms are computed in float32. Most sources compute them in the dtype of the iteration.
# -   A safety factor on the norm is part of the coefficients, and eps is divided by it.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    # SingleDeviceMuonWithAuxAdam in https://github.com/KellerJordan/Muon/blob/master/muon.py. It
    # scales a convolution by its kernel's height and width, this library by its matrix.
    "keller": _KELLER,
    # https://github.com/pytorch/pytorch/blob/main/torch/optim/_muon.py, beside torch.optim.AdamW
    # with its defaults. The source's adjust_lr_fn="match_rms_adamw" is consistent_rms=0.2.
    "torch": {
        "ns_coeffs": in_bfloat16(),
        "momentum": "ema",
        "eps": 1e-7,
        "eps_mode": "max",
        "weight_decay": 0.1,
        "adam_eps": 1e-8,
        "adam_nesterov": False,
        "adam_weight_decay": 0.01,
    },
    # https://github.com/MoonshotAI/Moonlight/blob/master/examples/toy_train.py. The source's AdamW
    # adds eps before the bias correction.
    "moonlight": _MOONLIGHT,
    # https://github.com/google-deepmind/optax/blob/main/optax/contrib/_muon.py. It iterates in the
    # momentum's own dtype, and its AdamW has Nesterov momentum.
    "optax": {"ns_coeffs": NewtonSchulz(dtype=None, method="standard")},
    # https://github.com/microsoft/dion/blob/main/dion/muon.py: Polar Express without Nesterov
    # momentum, the default in 2026. The scale is not bounded below by 1. The source's safety factor
    # is 1.02.
    "dion": {
        "ns_coeffs": in_bfloat16("polar_express_nanogpt"),
        "momentum": "heavy_ball",
        "nesterov": False,
        "eps": 1e-8 / 1.02,
        "shape_scale": "ratio",
        "weight_decay": 0.01,
        "adam_b2": 0.95,
        "adam_eps": 1e-8,
        "adam_weight_decay": 0.01,
    },
    # https://github.com/Dao-AILab/gram-newton-schulz: the gram form in float16 with one restart,
    # after the second step. The source runs square matrices in the standard form, this library in
    # the gram form; the polynomial is the same. AdamW is from the source's example.py. The gram
    # form needs a static number of steps: pass static_args="ns_steps" to optax.inject_hyperparams.
    "gram": _MOONLIGHT
    | {"ns_coeffs": NewtonSchulz("polar_express", dtype="float16", method="gram")},
    # https://github.com/marin-community/marin/blob/main/lib/levanter/src/levanter/optim/muon.py. It
    # iterates in the momentum's own dtype. It also clips AdamW's gradients to a global norm of 1;
    # add that with optax.chain. The source's use_kimi_scaling is consistent_rms=0.2.
    "levanter": {
        "ns_coeffs": NewtonSchulz("dion", dtype=None, method="standard"),
        "momentum": "heavy_ball",
        "eps": 1e-8,
        "adam_b2": 0.95,
        "adam_nesterov": False,
    },
    # https://github.com/thib-s/flash-newton-schulz (Turbo-Muon): four steps after rows are scaled
    # by AOL, with the coefficients of the version of 2025-09-22, which has no optimizer of its own:
    # the rest is Keller Jordan's. The rows of a square matrix are the source's outputs and
    # this library's inputs, because weights are (in, out) here.
    "turbo": _KELLER | {"ns_coeffs": in_bfloat16("aol"), "preconditioning": "aol"},
    # https://github.com/StarrickLiu/fused-muon: Moonlight's Muon, with one product X <- BX a step
    # for a rounded B. This library makes every step so. The source scales a convolution by its
    # channels, this library by its matrix.
    "fused_muon": _MOONLIGHT,
    # optim/muon.py in https://huggingface.co/AlexWortega/moe100m-physics-tinybpe, a Muon for
    # mixtures of experts, with ns_mode="fp16": products in float16 and coefficients that are all
    # divided by 1.02. The source rounds X to float16 before it takes the norm, so X can overflow;
    # this library rounds after. AdamW is torch.optim.AdamW with the class's own betas=(0.9, 0.95),
    # eps=1e-8 and weight_decay=0.01.
    "moe_fp16": _MOONLIGHT
    | {
        "ns_coeffs": NewtonSchulz("standard_1.02", dtype="float16", method="standard"),
        "weight_decay": 0.01,
        "adam_weight_decay": 0.01,
    },
    # Muon: orthogonalized_optimizers/muon.py in https://github.com/NVIDIA-NeMo/Emerging-Optimizers.
    # AdamW: core/optimizer/optimizer_config.py in https://github.com/NVIDIA/Megatron-LM. The
    # source's scale "spectral" is √max(fan_in, fan_out), so its extra_scale_factor is
    # consistent_rms.
    "megatron": {
        "ns_coeffs": in_bfloat16("dion"),
        "momentum": "ema",
        "nesterov": False,
        "eps": 1e-15,
        "eps_mode": "max",
        "consistent_rms": 1.0,
        "weight_decay": 0.01,
        "adam_eps": 1e-8,
        "adam_weight_decay": 0.01,
    },
    # Kimi K3: the Muon of Algorithm 1 in the report of Kimi K2 (https://arxiv.org/abs/2507.20534),
    # which has no Nesterov momentum. K3 (https://arxiv.org/abs/2607.24653, section 2.5) applies it
    # head by head: pass muon_weight_dimension_numbers=by_use(…, per_head=True).
    # Its weight decay is 0.1. Its QK-Clip is `qk_clip` with a threshold of 100. Neither report
    # states coefficients, eps or dtype, or AdamW's arguments: these are Moonlight's.
    "kimi_k3": _MOONLIGHT | {"nesterov": False},
    # GLM-5 (https://arxiv.org/abs/2602.15763): "Muon Split" orthogonalizes up-projections of latent
    # attention head by head: pass by_use(…, per_head=True). Five steps, momentum
    # 0.95, updates of RMS 0.2 and weight decay 0.1 are those of GLM-4.5
    # (https://arxiv.org/abs/2508.06471), where AdamW has embeddings, biases and norms alone, and
    # Muon the output head. All else is not stated, and is Moonlight's.
    "glm5": _MOONLIGHT,
    # muon_fsdp2 0.3.0 (https://pypi.org/project/muon-fsdp2), the sharded Muon that prime-rl
    # (https://github.com/PrimeIntellect-ai/prime-rl) began with: Keller Jordan's, with Moonlight's
    # scale. These are its own defaults. The config of prime-rl gave both sides a weight decay of
    # 0.01, and AdamW b2=0.999. Since September 2025 prime-rl has a version of Dion's Muon.
    "prime_rl": _KELLER | {"consistent_rms": 0.2},
    # DeepSeek-V4 (https://arxiv.org/abs/2606.19348): Algorithm 1, eq. 28 and section 4.2.2, with
    # products in bfloat16 (section 3.4.1). Nothing is added to the norm. MaxText's Muon for it
    # (https://github.com/AI-Hypercomputer/maxtext/pull/4065) is optax's with these coefficients.
    "deepseek_v4": _MOONLIGHT
    | {
        "ns_coeffs": in_bfloat16("deepseek_v4"),
        "eps": 0.0,
        "consistent_rms": 0.18,
        "adam_eps": 1e-20,
    },
}
PRESETS: dict[str, dict[str, Any]] = _ReadOnly(
    {name: _ReadOnly(arguments) for name, arguments in _ARGUMENTS.items()}
)


def arguments_of(preset: str | None) -> dict[str, Any]:
    """Returns the arguments that `preset` stands for, an empty dict for None.

    Raises:
        ValueError: no preset has that name, or what has it is a function.
    """
    if preset is None:
        return {}
    if isinstance(preset, str) and preset in ("nanogpt", "muonh", "normuon", "adamuon"):
        raise ValueError(f"preset={preset!r} is a function: use muon_jax.contrib.{preset}(...)")
    check_name("preset", preset, sorted(_ARGUMENTS))
    return _ARGUMENTS[preset]


def all_given(optimizer: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of an optimizer with those that its preset, or `with_defaults`, sets.

    Raises:
        ValueError: as `arguments_of`.
    """
    defaults = getattr(optimizer, "defaults", None) or arguments_of(given.get("preset"))
    return _merged(given, defaults)


def takes_preset[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function` with `preset` setting the arguments that a call leaves out.

    The result raises ValueError if `preset` is no key of PRESETS, if a call leaves out nothing, or
    if it gives a scale by shape alone where the preset has another scale.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs).arguments
        preset = given.get("preset")
        of_preset = arguments_of(preset)
        if of_preset and len(given) == len(signature.parameters):
            raise ValueError(
                f"preset={preset!r} came with a value for every argument, so the preset sets none."
                " optax.inject_hyperparams passes every default: make the preset the defaults, with"
                f" optax.inject_hyperparams(functools.partial(muon, **muon_jax.PRESETS[{preset!r}]"
                "))(learning_rate=...)"
            )
        return _call(function, given, of_preset, f"preset={preset!r}")

    return wrapper


def with_defaults[**P, R](
    origin: str, defaults: Mapping[str, Any]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that gives a function other defaults, as a preset does.

    Args:
        origin: who sets them, for errors.
        defaults: by argument.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        changed = [
            p.replace(default=defaults.get(p.name, p.default))
            for p in signature.parameters.values()
        ]

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs).arguments
            return _call(function, given, defaults, origin)

        wrapper.defaults = defaults  # pyright: ignore[reportAttributeAccessIssue]
        wrapper.__signature__ = signature.replace(  # pyright: ignore[reportAttributeAccessIssue]
            parameters=changed
        )
        return wrapper

    return decorate


def _call[R](
    function: Callable[..., R], given: Mapping[str, Any], defaults: Mapping[str, Any], origin: str
) -> R:
    """Calls `function` with what is given, or else the defaults; errors name their origin."""
    parameters = inspect.signature(function).parameters
    set_here = {k: v for k, v in defaults.items() if k not in given}
    rms, shape_scale = set_here.get("consistent_rms"), given.get("shape_scale")
    # muon itself refuses other scales, and cannot tell the default from what a call gives.
    if rms is not None and shape_scale == parameters["shape_scale"].default:
        raise ValueError(
            f"shape_scale={shape_scale!r} has no effect beside consistent_rms={rms!r}, which"
            f" {origin} sets: pass consistent_rms=None as well, or leave out shape_scale"
        )
    undone = {
        name: (repr(value), repr(parameters[name].default)) for name, value in set_here.items()
    }
    coeffs = given.get("ns_coeffs")
    if defaults and isinstance(coeffs, str | tuple):  # their dtype and method are the default's
        undone["ns_coeffs"] = repr(defaults["ns_coeffs"]), f"NewtonSchulz({coeffs!r})"
    naming = functools.partial(_naming_origin, origin, undone)
    made = naming(function)(**_merged(given, defaults))
    if not (set_here and isinstance(made, optax.GradientTransformation)):
        return made
    return made._replace(init=naming(made.init), update=naming(made.update))


def _merged(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {**defaults, **given}
    if defaults and "ns_coeffs" in given:
        found["ns_coeffs"] = _with_coeffs(defaults["ns_coeffs"], given["ns_coeffs"])
    return found


def _with_coeffs(of_preset: NewtonSchulz, coeffs: Any) -> Any:
    """Returns the preset's iteration with these coefficients, in the form that these have.

    A `NewtonSchulz` has a dtype and a method of its own.
    """

    def iteration_of(own: Any) -> NewtonSchulz:
        if isinstance(own, NewtonSchulz):
            return own
        return dataclasses.replace(of_preset, coeffs=canonicalize("ns_coeffs", own))

    return map_coeffs(iteration_of, coeffs)


def map_coeffs(function: Callable[[Any], NewtonSchulz], coeffs: Any) -> Any:
    """Returns the function of the coefficients, or by path of those that each path has."""
    if isinstance(coeffs, Mapping):
        return {pattern: map_coeffs(function, own) for pattern, own in coeffs.items()}
    if callable(coeffs):
        return lambda path, shape: map_coeffs(function, coeffs(path, shape))
    return function(coeffs)


def _naming_origin[**P, R](
    origin: str, undone: Mapping[str, tuple[str, str]], function: Callable[P, R]
) -> Callable[P, R]:
    """Returns `function` with errors that say which of the arguments they name `origin` has set.

    For each argument, `undone` has the value, and what to pass to undo that.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            message = str(error)
            # A name of one word, such as momentum, is also an ordinary word.
            patterns = {name: rf"{name}(?!\w)" if "_" in name else f"{name}=" for name in undone}
            patterns["ns_coeffs"] = r"(?:ns_coeffs(?!\w)|(?:dtype|method)(?:=| must))"
            named = {
                name: values
                for name, values in undone.items()
                if re.search(rf"\b{patterns[name]}", message)
            }
            if named and f"{origin} sets" not in message:
                values, defaults = (
                    ", ".join(f"{name}={pair[i]}" for name, pair in named.items()) for i in (0, 1)
                )
                error.args = (f"{message} ({origin} sets {values}; to undo that, pass {defaults})",)
            raise

    return wrapper
