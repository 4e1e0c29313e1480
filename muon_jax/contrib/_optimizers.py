"""Published Muons that need more than arguments of `muon`: NorMuon, AdaMuon, MuonH and AdamH."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_jax._checks import BETA, check_pattern, checks_arguments
from muon_jax._distributed.exchange import exchange_of
from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._muon import Additions, build, muon
from muon_jax._presets import PRESETS, in_bfloat16, map_coeffs, takes_preset, with_defaults
from muon_jax._trees import check_each_decides, first_match, has_masked, path_name
from muon_jax.contrib._adamuon import scale_by_adamuon
from muon_jax.contrib._normuon import Averaged, scale_by_normuon
from muon_jax.contrib._param_norm import check_no_scale, keep_param_norm, scale_to_param_norm

# As in PRESETS, tests/oracles.py has the source of each number.
NANOGPT: Mapping[str, Any] = {
    **PRESETS["keller"],
    "ns_coeffs": in_bfloat16("polar_express_nanogpt"),
    "eps": 1e-6 / 1.02,
    "normuon_b2": 0.9,
    "normuon_averaged": "shorter",
    "weight_decay": 1.2,
    "weight_decay_form": "scaled_palm",
    "cautious_weight_decay": True,
    "adam_weight_decay": 0.005,
}
ADAMUON: Mapping[str, Any] = {
    **PRESETS["moonlight"],
    "ns_coeffs": in_bfloat16(before=jnp.sign),
}
MUONH: Mapping[str, Any] = {
    "ns_coeffs": in_bfloat16("dion"),
    "momentum": "heavy_ball",
    "eps": 1e-8,
    "shape_scale": "none",
    "adamh": "lm_head|output_proj",
    "adam_b2": 0.95,
    "adam_eps": 1e-8,
    "adam_nesterov": False,
}


def _with_arguments_of_muon[R](*left_out: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Returns a decorator that lets a function of keywords take the arguments of `muon` as well.

    The function gets all arguments, with their defaults. Callers pass all but the learning rate by
    name.

    Args:
        *left_out: arguments of `muon` that callers cannot pass, and that have defaults.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        of_muon = inspect.signature(muon).parameters
        own = inspect.signature(function).parameters.values()
        first, *others = (p for name, p in of_muon.items() if name not in left_out)
        by_name = [p.replace(kind=p.KEYWORD_ONLY) for p in others]
        by_name += [p for p in own if p.kind is p.KEYWORD_ONLY]
        signature = inspect.Signature([first, *by_name])

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> R:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return function(**{n: of_muon[n].default for n in left_out} | given.arguments)

        wrapper.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return wrapper

    return decorate


@checks_arguments
@takes_preset
@_with_arguments_of_muon()
def normuon(
    *,
    normuon_b2: Annotated[float | jax.Array, BETA] = 0.95,
    normuon_averaged: Averaged = "fan_in",
    **arguments: Any,
) -> optax.GradientTransformation:
    """NorMuon: `muon`, with the neurons of each orthogonal update normalized.

        contrib.normuon(0.02, weight_decay=0.1)

    It adds `scale_by_normuon` after the orthogonalization, in Dion's form. For the hyperparameters
    of modded-nanogpt use `nanogpt`.

    Args:
        learning_rate: as for `muon`.
        normuon_b2: decay rate of the second moments, `b2` of `scale_by_normuon`.
        normuon_averaged: `"fan_in"` or `"shorter"`, `averaged` of `scale_by_normuon`.
        **arguments: those of `muon`, by name, with its defaults.

    Raises:
        TypeError: as `muon`.
        ValueError: as `muon`; or matrices in blocks, over which neurons have no sums.
        NotImplementedError: as `muon` and `scale_by_normuon`.
    """
    return _normuon("contrib.normuon", normuon_b2, normuon_averaged, arguments)


@checks_arguments
@with_defaults("nanogpt", NANOGPT)
@_with_arguments_of_muon("preset")
def nanogpt(
    *,
    normuon_b2: Annotated[float | jax.Array, BETA] = 0.95,
    normuon_averaged: Averaged = "fan_in",
    **arguments: Any,
) -> optax.GradientTransformation:
    """The Muon of modded-nanogpt: NorMuon, with cautious weight decay ∝ η².

    Unlike the source, it has no schedule of beta from 0.85 to 0.95 and back, and no factors of
    learning rate, weight decay and betas by parameter. The source's Adam adds eps before the bias
    correction.

    Args:
        learning_rate: as for `muon`.
        normuon_b2: as for `normuon`.
        normuon_averaged: as for `normuon`.
        **arguments: those of `muon` but `preset`, by name. `help` shows the defaults.

    Raises:
        TypeError: as `muon`.
        ValueError: as `normuon`.
        NotImplementedError: as `normuon`.

    References:
        `train_gpt.py <https://github.com/KellerJordan/modded-nanogpt/blob/master/train_gpt.py>`_.
    """
    return _normuon("contrib.nanogpt", normuon_b2, normuon_averaged, arguments)


def _normuon(
    name: str, b2: float | jax.Array, averaged: Averaged, arguments: Mapping[str, Any]
) -> optax.GradientTransformation:
    shardings = exchange_of(arguments["shardings"]).shardings
    after = functools.partial(_by_views, scale_by_normuon, shardings, b2=b2, averaged=averaged)
    return build(arguments, Additions(name, after=after))


@checks_arguments
@with_defaults("adamuon", ADAMUON)
@_with_arguments_of_muon("preset")
def adamuon(**arguments: Any) -> optax.GradientTransformation:
    """AdaMuon: signs of momenta are orthogonalized, and entries get a second moment as in Adam.

        contrib.adamuon(6e-4, muon_weight_dimension_numbers=routes)

    The momentum is Moonlight's, with Nesterov momentum. Newton–Schulz gets its signs
    (`NewtonSchulz(before=jnp.sign)`), also where you pass other coefficients. `scale_by_adamuon`
    follows, with `b2=beta` as in the source, and makes the root mean square of an update
    `consistent_rms`.

    Args:
        learning_rate: as for `muon`.
        **arguments: those of `muon` but `preset`, by name. `help` shows the defaults.

    Raises:
        TypeError: as `muon`.
        ValueError: as `muon`; or blocks of matrices, whose norms have no sums.
        NotImplementedError: as `muon` and `scale_by_adamuon`.

    References:
        Si, Zhang and Shen, `AdaMuon: Adaptive Muon optimizer <https://arxiv.org/abs/2507.11005>`_,
        2025, as in `their code for Megatron-LM <https://github.com/Chongjie-Si/AdaMuon>`_.
    """
    coeffs = map_coeffs(_of_signs, arguments["ns_coeffs"])
    shardings = exchange_of(arguments["shardings"]).shardings
    after = functools.partial(_by_views, scale_by_adamuon, shardings, b2=arguments["beta"])
    return build(arguments | {"ns_coeffs": coeffs}, Additions("contrib.adamuon", after=after))


def _of_signs(iteration: NewtonSchulz) -> NewtonSchulz:
    """The iteration of signs, unless it has a `before` of its own."""
    return dataclasses.replace(iteration, before=iteration.before or jnp.sign)


@checks_arguments
@with_defaults("muonh", MUONH)
@_with_arguments_of_muon("preset")
def muonh(
    *, adamh: Annotated[str | None, check_pattern] = None, **arguments: Any
) -> optax.GradientTransformation:
    """MuonH: matrices keep their norms, and steps are relative to those norms.

        contrib.muonh(0.02, muon_weight_dimension_numbers=routes)

    The orthogonal update O of a matrix W is multiplied by η·‖W‖/‖O‖ (Frobenius, see
    `scale_to_param_norm`), and W stays on its sphere (see `keep_param_norm`). The output head has
    AdamH, which does the same with Adam's direction. `hyperp_learning_rate` transfers a learning
    rate to models of other sizes.

    In the source, routers and gates have Adam with 3/13 of MuonH's learning rate, and Adam's eps
    depends on the budget. Here eps is the source's default.

    Args:
        learning_rate: as for `muon`.
        adamh: a regular expression. AdamW's matrices (rank 2) whose paths it matches get AdamH
            instead, with `learning_rate` and without weight decay; None for no matrix.
        **arguments: those of `muon` but `preset`, by name. `help` shows the defaults.

    Raises:
        TypeError: as `muon`.
        ValueError: as `muon`; there is a scale by shape; `adamh` matches no matrix; or blocks of
            matrices, whose norms have no sums.
        NotImplementedError: as `muon` and `scale_to_param_norm`.

    References:
        MuonH in `marin <https://github.com/marin-community/marin>`_,
        experiments/grug/moe_hero_ep/optimizer.py.
    """
    check_no_scale(arguments["consistent_rms"], arguments["shape_scale"])
    rate = arguments["learning_rate"]
    shardings = exchange_of(arguments["shardings"]).shardings

    def on_spheres(direction: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.chain(
            direction,
            scale_to_param_norm(shardings=shardings),
            optax.scale_by_learning_rate(rate),
            keep_param_norm(shardings=shardings),
        )

    added = Additions(
        "contrib.muonh",
        scale=functools.partial(_by_views, scale_to_param_norm, shardings),
        last=functools.partial(_by_views, keep_param_norm, shardings),
        relabel=functools.partial(_with_adamh, adamh),
        others={} if adamh is None else {"adamh": on_spheres},
    )
    return build(arguments, added)


def _by_views(
    make: Callable[..., optax.GradientTransformation], shardings: Any, views: Any, **arguments: Any
) -> optax.GradientTransformation:
    return make(weight_dimension_numbers=views, shardings=shardings, **arguments)


def _with_adamh(pattern: str | None, params: Any, labels: Any) -> Any:
    """Returns the labels with `"adamh"` for AdamW's matrices whose paths the pattern matches.

    Raises:
        ValueError: the pattern matches none, although no parameter is masked.
    """
    if pattern is None:
        return labels

    matrices = []

    def relabel(path: Any, x: Any, label: str) -> str:
        if label != "adam" or np.ndim(x) != 2:
            return label
        matrices.append(path_name(path))
        return label if first_match([pattern], matrices[-1]) is None else "adamh"

    found = jax.tree.map_with_path(relabel, params, labels)
    if jax.tree.leaves(found) and not has_masked(found):
        mend = (
            ". Where Muon has the output head, leave it to AdamW: pass by_use(…) as"
            " muon_weight_dimension_numbers. Where there is no head, pass adamh=None"
        )
        check_each_decides("adamh", [pattern], matrices, "matrices that AdamW has", mend)
    return found
