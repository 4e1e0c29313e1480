"""The Muon optimizer: `scale_by_muon` and `muon`, drop-in for those of `optax.contrib`.

Parameters, defaults and formulas are those of optax 0.2.8. Where ours differ:

1.  The iteration computes in the dtype that its coefficients and its form need: bfloat16, as every
    other Muon does, or float16. `ns_coeffs=NewtonSchulz(dtype=None)` is optax's choice, the
    momentum's own dtype. The form is the faster one, equal in exact arithmetic.
2.  `ns_coeffs="dion"` runs its last steps where `ns_steps` is below 5, and raises above 5. optax
    raises below 5 and silently runs 5 above. Below 1 step there is an error.
3.  `ns_coeffs` takes more names than optax's `"standard"` and `"dion"`. `scale_by_muon` takes the
    same names as `muon`. optax documents a name `"muon"`, which it rejects.
4.  A gradient of zeros gives a matrix zeros in every dtype. optax gives NaN in float16, as AdamW
    does: its eps of 1e-8 is 0 there, see `adam_eps`. A gradient of magnitude 1e30 gives the same
    update as one of magnitude 1. optax gives zero: its norm overflows.
5.  `preconditioning="spectral"` works in bfloat16 and float16 (optax: no SVD in those dtypes).
6.  `eps` applies to `preconditioning="aol"` and `"schatten"` too. optax drops it there.
7.  `"schatten"` takes complex parameters through XXᴴ (optax: XXᵀ).
8.  The state holds what training changes, `count` and `mu`. optax also keeps the coefficients in
    the state, so a checkpoint does not load under other coefficients.
9.  Errors name the parameter and say what to do.
10. A parameter whose gradient is None is skipped, as in torch: its update is zero, and its moments
    and the parameter itself stay as they are. The count of steps advances for all. `update` then
    needs the parameters. optax raises.
11. Other published Muons have a name, `preset`. The arguments that presets set are there, too.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from muon_jax._checks import checks_arguments
from muon_jax._distributed.exchange import Exchange, exchange_of
from muon_jax._distributed.sharding import (
    InitShardings,
    Shardings,
    located,
    settled_views,
)
from muon_jax._iteration.coefficients import NSCoeffs
from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._iteration.normalization import EpsMode, Preconditioning
from muon_jax._matrices.views import OF_MUON, ShapeScale, View, Views, assigned_views, check_views
from muon_jax._presets import takes_preset
from muon_jax._scale_by_muon import CoeffsByPath, check_patterns, orthogonalization, scale_by_muon
from muon_jax._transforms.chain import (
    DecayForm,
    Relative,
    chain_with_weight_decay,
    scale_by_adam,
    scale_by_shape,
    skip_missing,
)
from muon_jax._transforms.momentum import Momentum, Rounding, Storage, storage_of
from muon_jax._trees import check_mu_dtype, check_params
from pallas_kernels.device import standard_promotion


@checks_arguments
@takes_preset
def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: NSCoeffs | NewtonSchulz | CoeffsByPath = "standard",
    ns_steps: int | jax.Array = 5,
    beta: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    weight_decay: optax.ScalarOrSchedule | None = 0.0,
    weight_decay_mask: Any | Callable[[optax.Params], Any] | None = None,
    mu_dtype: jax.typing.DTypeLike | Storage | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    adam_b1: float | jax.Array = 0.9,
    adam_b2: float | jax.Array = 0.999,
    adam_eps_root: float | jax.Array = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule | None = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | Relative | None = None,
    muon_weight_dimension_numbers: Views = None,
    consistent_rms: float | jax.Array | None = None,
    preset: str | None = None,
    momentum: Momentum = "bias_corrected",
    eps_mode: EpsMode = "add",
    shape_scale: ShapeScale = "clipped_ratio",
    weight_decay_form: DecayForm = "decoupled",
    cautious_weight_decay: bool = False,
    adam_eps: float | jax.Array | None = None,
    adam_nesterov: bool | None = None,
    shardings: Shardings | Exchange = None,
    mu_rounding: Rounding | None = None,
) -> optax.GradientTransformation:
    """Muon (momentum orthogonalized by Newton–Schulz) on matrices, AdamW on everything else.

    With the learning rate η and the weight decay λ, a matrix W changes by -η(s·O + λW). O is the
    output of `scale_by_muon`, and s depends on the shape of W alone. The defaults are those of
    optax. A parameter whose gradient is None is skipped.

    Args:
        learning_rate: η, a number or a schedule.
        ns_coeffs: coefficients of the Newton–Schulz steps, or a `NewtonSchulz`, or either by path,
            see `scale_by_muon`. `"balanced"` needs fewer products than the default.
        ns_steps: number of steps, see `newton_schulz`.
        beta: decay rate of Muon's momentum.
        eps: added to the norm that divides the momentum, and to AdamW's denominator.
        weight_decay: λ of matrices, a number or a schedule; None is 0.
        weight_decay_mask: which matrices decay: a tree of booleans, or a callable that makes one.
            All of AdamW's parameters have `adam_weight_decay`.
        mu_dtype: dtype of the momentum and of AdamW's first moment. None keeps that of the
            parameters. `"int8"` takes 8 bits (AdamW: bfloat16), and `contrib.on_host(dtype)` keeps
            large moments on the host.
        nesterov: whether both sides use Nesterov momentum.
        adaptive: whether to multiply each update by its dual norm, see `scale_by_muon`.
        preconditioning: `"frobenius"`, `"spectral"`, `"aol"` or `"schatten"`, see `newton_schulz`.
        adam_b1: decay rate of AdamW's first moment.
        adam_b2: decay rate of AdamW's second moment.
        adam_eps_root: added under the square root of AdamW's denominator.
        adam_weight_decay: weight decay of everything else; None is 0.
        adam_learning_rate: AdamW's learning rate; None for `learning_rate`, or `Relative(0.3)` for
            0.3 times that.
        muon_weight_dimension_numbers: which parameters are matrices, and how. Pass what `by_use`
            returns, or a tree (or a prefix) of `optax.contrib.MuonDimensionNumbers`, with None for
            AdamW, or a callable that makes one. The default gives Muon all parameters of rank 2,
            embeddings and output heads too. Write a callable that decides leaf by leaf: it gets
            parameters in `init` and gradients in `update`, where some may be masked.
        consistent_rms: a number r for s = r·√max(fan_in, fan_out); None for `shape_scale`. With
            0.2, updates are about as large as AdamW's. From a tuned AdamW, keep its learning rate,
            pass what `by_use` returns, and start with 0.2; then try 0.6, above all for short runs.
        preset: another Muon, by its name in `muon_jax.PRESETS`. It sets the arguments that you
            leave out, but no learning rate: keller, torch, moonlight, optax, dion, gram, levanter,
            turbo, fused_muon, moe_fp16, megatron, kimi_k3, glm5, prime_rl or deepseek_v4.
        momentum: `"bias_corrected"`, `"ema"` or `"heavy_ball"`, see `scale_by_muon`.
        eps_mode: `"add"` or `"max"`, see `scale_by_muon`.
        shape_scale: s is √max(1, fan_out/fan_in) for `"clipped_ratio"`, √(fan_out/fan_in) for
            `"ratio"` and 1 for `"none"`.
        weight_decay_form: what decay adds to both sides' updates: `"decoupled"` -ηλW,
            `"independent"` -λW, `"palm"` -λη²W, `"scaled_palm"` -λη²·s·W. `"l2"` adds λW to
            gradients.
        cautious_weight_decay: whether only entries decay that the update shrinks as well, W·O ≥ 0
            (`Chen et al. <https://arxiv.org/abs/2510.12402>`_).
        adam_eps: added to AdamW's denominator; None for `eps`.
        adam_nesterov: whether AdamW uses Nesterov momentum; None for `nesterov`.
        shardings: of the parameters, None to find out, see `scale_by_muon`; or an `Exchange`, which
            also says what happens along mesh axes, and has block steps. A block has the s of its
            own shape.
        mu_rounding: `"nearest"` or `"stochastic"`, see `scale_by_muon`.

    Raises:
        TypeError: unknown argument, wrong type, or a schedule where a number is required.
        ValueError: a value out of range, two arguments that contradict each other, views or
            gradients that do not fit the parameters, coefficients that are unsafe in their dtype,
            or shardings that are missing or wrong. Under `optax.inject_hyperparams`, a preset; or
            parameters of 16 bits without `hyperparam_dtype=jnp.float32`.
        NotImplementedError: the named implementation cannot run here.

    References:
        Jordan et al., `Muon: an optimizer for hidden layers in neural networks
        <https://kellerjordan.github.io/posts/muon/>`_, 2024.
    """
    return build(locals())


@dataclasses.dataclass(frozen=True)
class Additions:
    """What another optimizer adds to `muon`, or has in its place.

    Attributes:
        name: of the optimizer, for errors.
        after: follows the orthogonalization, for matrices with these views.
        scale: in the place of the scale by shape.
        last: follows the learning rate and the weight decay.
        relabel: makes labels of parameters and `muon`'s labels; what is "muon" stays so.
        others: optimizers for further labels, made of AdamW's direction.
    """

    name: str = ""
    after: Callable[[Views], optax.GradientTransformation] | None = None
    scale: Callable[[Views], optax.GradientTransformation] | None = None
    last: Callable[[Views], optax.GradientTransformation] | None = None
    relabel: Callable[[Any, Any], Any] | None = None
    others: Mapping[str, Callable[[optax.GradientTransformation], optax.GradientTransformation]] = (
        dataclasses.field(default_factory=dict)
    )


def build(
    arguments: Mapping[str, Any], added: Additions = Additions()
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with these arguments of `muon`, all of them, and with additions."""
    given = types.SimpleNamespace(**arguments)
    scale_of_blocks = given.shape_scale if given.consistent_rms is None else "longer_side"
    exchange = exchange_of(given.shardings).with_(_scale_of_blocks=scale_of_blocks)
    shardings = exchange.shardings
    if added.name:
        exchange.check_sums(added.name)
    storage, rate = storage_of(given.mu_dtype), given.learning_rate
    adam = scale_by_adam(
        b1=given.adam_b1,
        b2=given.adam_b2,
        eps=given.eps if given.adam_eps is None else given.adam_eps,
        eps_root=given.adam_eps_root,
        nesterov=given.nesterov if given.adam_nesterov is None else given.adam_nesterov,
        storage=storage.of_adam,
    )
    rate_of_adam = rate if given.adam_learning_rate is None else given.adam_learning_rate
    if isinstance(rate_of_adam, Relative):
        rate_of_adam = rate_of_adam.of(rate)
    form, cautious = given.weight_decay_form, given.cautious_weight_decay
    on_the_rest = chain_with_weight_decay(
        adam,
        scale=None,
        learning_rate=rate_of_adam,
        weight_decay=given.adam_weight_decay,
        mask=None,
        form=form,
        cautious=cautious,
    )
    others = {label: make(adam) for label, make in added.others.items()}
    names = inspect.signature(scale_by_muon).parameters.keys() & arguments.keys()
    of_direction = {name: arguments[name] for name in names}
    views, init_shardings = given.muon_weight_dimension_numbers, InitShardings()
    check_views(views, OF_MUON)

    def on_matrices(views: Views) -> optax.GradientTransformationExtraArgs:
        """The optimizer of matrices with these views, which an update finds for all of them."""
        own = {"weight_dimension_numbers": views, "shardings": exchange}
        orthogonal = orthogonalization(of_direction | own, init_shardings)
        if added.after:
            orthogonal = optax.chain(orthogonal, added.after(views))
        scale = scale_by_shape(views, given.consistent_rms, given.shape_scale, shardings)
        optimizer = chain_with_weight_decay(
            orthogonal,
            scale=added.scale(views) if added.scale else scale,
            learning_rate=rate,
            weight_decay=given.weight_decay,
            mask=given.weight_decay_mask,
            form=form,
            cautious=cautious,
        )
        if added.last:
            optimizer = optax.chain(optimizer, added.last(views))
        return optax.with_extra_args_support(optimizer)

    def on_all(
        of_matrices: optax.GradientTransformation, found: Sequence[View | None], tree: Any
    ) -> optax.GradientTransformationExtraArgs:
        """The optimizer of all leaves of a tree, parameters or gradients, with these views.

        None is the view of AdamW's.
        """
        labels = jax.tree.structure(tree).unflatten(
            "adam" if view is None else "muon" for view in found
        )
        check_patterns(given.ns_coeffs, labels)
        labels = added.relabel(tree, labels) if added.relabel else labels
        # A callable, because labels in the shape of an Equinox module may be callable themselves.
        return optax.multi_transform(
            {"muon": of_matrices, "adam": on_the_rest, **others}, lambda _: labels
        )

    matrix_optimizer = on_matrices(views)

    @standard_promotion()
    def init_fn(params: optax.Params) -> optax.OptState:
        check_params(params)
        check_mu_dtype(params, storage.dtype)
        settled = settled_views(views, params, shardings)
        of_init = matrix_optimizer if settled is views else on_matrices(settled)
        return on_all(of_init, assigned_views(settled, params), params).init(params)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        whole: optax.Updates,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        found = assigned_views(settled_views(views, whole, shardings), updates)
        leaves, treedef = jax.tree.flatten(updates)
        pairs = zip(leaves, found, strict=True)
        matrices = treedef.unflatten(optax.MaskedNode() if view is None else x for x, view in pairs)
        of_muon = located([view for view in found if view is not None], matrices, shardings)
        bound = optax.GradientTransformationExtraArgs(
            matrix_optimizer.init, functools.partial(matrix_optimizer.update, of_muon=of_muon)
        )
        return on_all(bound, found, updates).update(updates, state, params, **extra_args)

    update = standard_promotion()(skip_missing(update_fn, "inner_states", storage))
    return optax.GradientTransformationExtraArgs(init_fn, update)
