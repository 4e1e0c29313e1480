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

from collections.abc import Callable
from typing import Any

import jax
import optax

from muon_jax._checks import checks_arguments
from muon_jax._coefficients import CoeffsByPath
from muon_jax._distributed.by_tree import optimizer_by_tree
from muon_jax._distributed.exchange import Exchange, exchange_of
from muon_jax._distributed.sharding import Shardings
from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._iteration.normalization import EpsMode, Preconditioning
from muon_jax._iteration.schedules import NSCoeffs
from muon_jax._matrices.shape_factors import ShapeScale
from muon_jax._matrices.view_checks import check_views
from muon_jax._matrices.views import OF_MUON, Views
from muon_jax._presets import takes_preset
from muon_jax._scale_by_muon import scale_by_muon
from muon_jax._transforms.adam import scale_by_adam
from muon_jax._transforms.adamh import on_spheres
from muon_jax._transforms.labels import labels_of
from muon_jax._transforms.momentum import Momentum
from muon_jax._transforms.normuon import Averaged, scale_by_normuon
from muon_jax._transforms.on_host import MemoryKind
from muon_jax._transforms.param_norm import check_no_scale, keep_param_norm, scale_to_param_norm
from muon_jax._transforms.quantized import dtype_of_adam
from muon_jax._transforms.rounding import Rounding
from muon_jax._transforms.shape_scale import scale_by_shape
from muon_jax._transforms.skipping import skip_missing
from muon_jax._transforms.weight_decay import DecayForm, chain_with_weight_decay
from muon_jax._tree_checks import check_mu_dtype, check_params
from pallas_kernels._promotion import standard_promotion


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
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    adam_b1: float | jax.Array = 0.9,
    adam_b2: float | jax.Array = 0.999,
    adam_eps_root: float | jax.Array = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule | None = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Views = None,
    consistent_rms: float | jax.Array | None = None,
    preset: str | None = None,
    momentum: Momentum = "bias_corrected",
    eps_mode: EpsMode = "add",
    shape_scale: ShapeScale = "clipped_ratio",
    weight_decay_form: DecayForm = "decoupled",
    cautious_weight_decay: bool = False,
    fixed_norms: bool = False,
    adamh: str | None = None,
    normuon_b2: float | jax.Array | None = None,
    normuon_averaged: Averaged = "fan_in",
    adam_eps: float | jax.Array | None = None,
    adam_nesterov: bool | None = None,
    shardings: Shardings | Exchange = None,
    mu_rounding: Rounding | None = None,
    state_memory_kind: MemoryKind = "device",
) -> optax.GradientTransformation:
    """Muon (momentum orthogonalized by Newton–Schulz) on matrices, AdamW on everything else.

    The update of a matrix W with learning rate η and weight decay λ is -η(s·O + λW), where O is the
    output of `scale_by_muon` and s depends on the shape alone (`consistent_rms`). The defaults are
    those of optax; `preset` sets those of another Muon. A parameter whose gradient is None is
    skipped, see above.

    Args:
        learning_rate: η, a number or a schedule.
        ns_coeffs: coefficients of the Newton–Schulz steps, or a `NewtonSchulz`, or either by path,
            see `scale_by_muon`: `"balanced"` needs fewer products than the default.
        ns_steps: number of Newton–Schulz steps, see `newton_schulz`.
        beta: decay rate of Muon's momentum.
        eps: added to the norm that the momentum is divided by, and to AdamW's denominator.
        weight_decay: λ of matrices, a number or a schedule, see `weight_decay_form`. None is 0.
        weight_decay_mask: tree of booleans (or a callable that makes one): which matrices decay.
        mu_dtype: dtype of the momentum and of AdamW's first moment, also `"int8"`, for AdamW then
            bfloat16; None for the parameters', or what optax promotes that and the gradients' to.
        nesterov: whether both sides use Nesterov momentum, as in optax; see `adam_nesterov`.
        adaptive: whether to multiply each update by its dual norm, see `scale_by_muon`.
        preconditioning: `"frobenius"`, `"spectral"`, `"aol"` or `"schatten"`, see `newton_schulz`.
        adam_b1: decay rate of AdamW's first moment.
        adam_b2: decay rate of AdamW's second moment.
        adam_eps_root: added under the square root of AdamW's denominator.
        adam_weight_decay: weight decay on everything else; None is 0.
        adam_learning_rate: AdamW's learning rate; None for `learning_rate`.
        muon_weight_dimension_numbers: which parameters are matrices, and how: what `by_use`
            returns; or a tree of `optax.contrib.MuonDimensionNumbers` that may be a prefix of the
            parameters', None where AdamW applies, or a callable that makes one from them. None
            itself gives Muon all parameters of rank 2, embeddings and output heads too. A callable
            gets the parameters in `init`, in `update` the gradients, at times with some
            masked (`optax.MaskedNode`): let it decide leaf by leaf.
        consistent_rms: None for `shape_scale`, s = √max(1, fan_out/fan_in); a number r for s =
            r·√max(fan_in, fan_out). Under r = 0.2 updates are about as large as AdamW's: pass what
            `by_use` returns, and try a third, one and three times AdamW's learning rate.
        preset: a name in `muon_jax.PRESETS`, whose arguments stand for those that the call leaves
            out: keller, torch, moonlight, optax, dion, gram, levanter, turbo, fused_muon, moe_fp16,
            megatron, nanogpt, kimi_k3, glm5 or muonh. It sets weight decay, not learning rates.
        momentum: `"bias_corrected"`, `"ema"` or `"heavy_ball"`, see `scale_by_muon`.
        eps_mode: `"add"` or `"max"`, see `scale_by_muon`.
        shape_scale: `"clipped_ratio"` is the above, `"ratio"` √(fan_out/fan_in), `"none"` s = 1.
        weight_decay_form: what decay adds to updates of both sides: `"decoupled"` -ηλW,
            `"independent"` -λW, `"palm"` -λη²W, `"scaled_palm"` -λη²·s·W; `"l2"` λW to gradients.
        cautious_weight_decay: whether both sides decay only entries that the update shrinks too,
            those with W·O ≥ 0 (`Chen et al. <https://arxiv.org/abs/2510.12402>`_).
        fixed_norms: whether each matrix of Muon's keeps its Frobenius norm (MuonH). The update of W
            is then η·‖W‖/‖O‖ long, and s has no effect, see `scale_to_param_norm`.
        adamh: a regular expression. Matrices (rank 2) of AdamW whose paths it matches keep their
            norms as well (AdamH). They have `learning_rate` and no weight decay.
        normuon_b2: decay rate of NorMuon's second moments, see `scale_by_normuon`; None for none.
        normuon_averaged: `"fan_in"` or `"shorter"`, see `scale_by_normuon`.
        adam_eps: added to AdamW's denominator; None for `eps`.
        adam_nesterov: whether AdamW uses Nesterov momentum; None for `nesterov`.
        shardings: of the parameters, None to find out, see `scale_by_muon`; or an `Exchange`, which
            also says what happens along mesh axes, and has block steps. A block has the s of its
            own shape.
        mu_rounding: of Muon's momentum, `"nearest"`, `"stochastic"` or None, see `scale_by_muon`.
        state_memory_kind: `"device"`, or `"pinned_host"` for large moments, see `scale_by_muon`.

    Raises:
        TypeError: there is no such argument, or one has another type, or is a schedule in vain; or
            a schedule returns something other than one real number.
        ValueError: an argument is none of the values above or out of range, two of them contradict
            each other, views or gradients do not fit the parameters, the composed schedule is
            unsafe in its dtype, `adamh` matches no matrix, or `shardings` is missing or wrong. Or
            a schedule returns a number out of range, outside of `jit`. Under
            `optax.inject_hyperparams`, a preset came with a value for every argument, or
            parameters of 16 bits without `hyperparam_dtype=jnp.float32`.
        NotImplementedError: the named implementation cannot run here; or see `scale_by_normuon`.

    References:
        Jordan et al., `Muon: an optimizer for hidden layers in neural networks
        <https://kellerjordan.github.io/posts/muon/>`_, 2024.
    """
    if fixed_norms:
        check_no_scale(consistent_rms, shape_scale)
    scale_of_blocks = shape_scale if consistent_rms is None else "longer_side"
    exchange = exchange_of(shardings).with_(_scale_of_blocks=scale_of_blocks)
    shardings = exchange.shardings
    if normuon_b2 is not None or fixed_norms:
        exchange.check_sums("fixed_norms=True" if fixed_norms else "normuon_b2")
    adam = scale_by_adam(
        b1=adam_b1,
        b2=adam_b2,
        eps=eps if adam_eps is None else adam_eps,
        eps_root=adam_eps_root,
        mu_dtype=dtype_of_adam(mu_dtype),
        nesterov=nesterov if adam_nesterov is None else adam_nesterov,
        memory_kind=state_memory_kind,
    )
    on_the_rest = chain_with_weight_decay(
        adam,
        scale=None,
        learning_rate=learning_rate if adam_learning_rate is None else adam_learning_rate,
        weight_decay=adam_weight_decay,
        mask=None,
        form=weight_decay_form,
        cautious=cautious_weight_decay,
    )

    def with_views(views: Views) -> optax.GradientTransformation:
        """The optimizer for parameters with these views."""
        orthogonal = scale_by_muon(
            ns_coeffs=ns_coeffs,
            ns_steps=ns_steps,
            beta=beta,
            eps=eps,
            mu_dtype=mu_dtype,
            nesterov=nesterov,
            adaptive=adaptive,
            preconditioning=preconditioning,
            weight_dimension_numbers=views,
            momentum=momentum,
            eps_mode=eps_mode,
            shardings=exchange,
            mu_rounding=mu_rounding,
            state_memory_kind=state_memory_kind,
        )
        if normuon_b2 is not None:
            normuon = scale_by_normuon(
                b2=normuon_b2,
                weight_dimension_numbers=views,
                averaged=normuon_averaged,
                shardings=shardings,
            )
            orthogonal = optax.chain(orthogonal, normuon)
        scale = scale_by_shape(views, consistent_rms, shape_scale, shardings)
        if fixed_norms:
            scale = scale_to_param_norm(views, shardings)
        on_matrices = chain_with_weight_decay(
            orthogonal,
            scale=scale,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            mask=weight_decay_mask,
            form=weight_decay_form,
            cautious=cautious_weight_decay,
        )
        if fixed_norms:
            on_matrices = optax.chain(on_matrices, keep_param_norm(views, shardings))
        optimizers: dict[Any, Any] = {"muon": on_matrices, "adam": on_the_rest}
        if adamh is not None:
            optimizers["adamh"] = on_spheres(adam, learning_rate, shardings)
        return optax.multi_transform(
            optimizers, lambda params: labels_of(params, views, adamh, ns_coeffs)
        )

    check_views(muon_weight_dimension_numbers, OF_MUON)
    optimizer_of = optimizer_by_tree(with_views, muon_weight_dimension_numbers, shardings)

    @standard_promotion()
    def init_fn(params: optax.Params) -> optax.OptState:
        check_params(params)
        check_mu_dtype(params, mu_dtype)
        return optimizer_of(params).init(params)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        whole: optax.Updates,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        return optimizer_of(whole).update(updates, state, params, **extra_args)

    update = standard_promotion()(skip_missing(update_fn, "inner_states"))
    return optax.GradientTransformationExtraArgs(init_fn, update)
