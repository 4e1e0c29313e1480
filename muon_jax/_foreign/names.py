"""What other optimizers call our arguments: one table, for messages and for the documents."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Foreign:
    """Names that others have for one thing, and what to write here.

    Attributes:
        names: each name, with the packages that have it.
        ways: what to write, with `{}` for the value, or `{0}` and `{1}` for those of a pair. A
            function takes the first way whose arguments it has.
        by_value: what to write for some values.
        note: why there is nothing to write, or what to do besides.
        taker: the function that takes the ways where the function that was called takes none. One
            of contrib is to be called in its place.
        chained: for `scale_by_muon`, the transformation to chain with it.
    """

    names: Mapping[str, str]
    ways: tuple[str, ...] = ()
    by_value: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    note: str = ""
    taker: str = "muon"
    chained: str = ""


CONTRIB = "muon_jax.contrib"
# What were presets, and are functions.
MOVED_PRESETS = {name: f"{CONTRIB}.{name}(...)" for name in ("nanogpt", "muonh")}


def _row(names: str, *ways: str, **others: Any) -> Foreign:
    """Returns the row of names such as "lr (PyTorch, Dion), step_size", and of ways."""
    found = re.findall(r"(\w+)(?: \(([^)]*)\))?", names)
    return Foreign({name: packages or "other code" for name, packages in found}, ways, **others)


FOREIGN: tuple[Foreign, ...] = (
    _row(
        "lr (PyTorch, Keller Jordan, Moonlight, Dion, Megatron), muon_lr, step_size",
        "learning_rate={}",
        chained="optax.scale_by_learning_rate({})",
    ),
    _row(
        "wd (Moonlight), weight_decay_rate",
        "weight_decay={}",
        note="adam_weight_decay is for AdamW's parameters",
        chained="optax.add_decayed_weights({})",
    ),
    _row(
        "mu (Dion), momentum_beta (Emerging-Optimizers), muon_momentum (Megatron), muon_beta, "
        "muon_beta1",
        "beta={}",
    ),
    _row(
        "adamw_lr (Keller Jordan), adam_lr (Levanter), aux_lr, scalar_lr, embed_lr",
        "adam_learning_rate={}",
    ),
    _row(
        "muon_to_adam_lr (Levanter), adam_lr_ratio (Keras)", "adam_learning_rate={} * learning_rate"
    ),
    _row("adamw_wd (Keller Jordan), adam_wd, adam_decay", "adam_weight_decay={}"),
    _row(
        "b1 (optax.adamw), beta1 (Levanter), beta_1 (Keras), adam_beta_1 (Keras), "
        "adam_beta1 (Megatron, Hugging Face), adam_momentum",
        "adam_b1={}",
    ),
    _row(
        "b2 (optax.adamw), beta2 (Levanter), beta_2 (Keras), adam_beta_2 (Keras), "
        "adam_beta2 (Megatron, Hugging Face)",
        "adam_b2={}",
        "b2={}",
    ),
    _row(
        "normuon_b2 (muon of 0.2.0), muon_beta2 (NorMuon of Dion)",
        "normuon_b2={}",
        "b2={}",
        taker="muon_jax.contrib.normuon",
        chained="muon_jax.contrib.scale_by_normuon(b2={})",
    ),
    _row(
        "betas (PyTorch's AdamW, Dion), adamw_betas (Keller Jordan, Moonlight), adam_betas",
        "adam_b1={0}, adam_b2={1}",
    ),
    _row(
        "epsilon (Dion, Keras), ns_epsilon (gram-newton-schulz), muon_epsilon (Levanter)", "eps={}"
    ),
    _row("adamw_eps (Keller Jordan, Moonlight), adam_epsilon (Hugging Face)", "adam_eps={}"),
    _row("eps_root (optax.adamw)", "adam_eps_root={}"),
    _row(
        "mask (optax.adamw), wd_mask",
        "weight_decay_mask={}",
        note=(
            "weight_decay_mask is for Muon's matrices alone. For a mask of the others, leave "
            "adam_weight_decay at 0 and chain optax.add_decayed_weights(-adam_learning_rate * "
            "decay, mask) after muon"
        ),
    ),
    _row("exp_avg_dtype (Megatron), momentum_dtype", "mu_dtype={}"),
    _row(
        "exp_avg_sq_dtype (Megatron), nu_dtype",
        note="AdamW's second moment has the dtype of the parameters",
    ),
    _row("ns_coefficients (PyTorch, gram-newton-schulz), coefficients, coeffs", "ns_coeffs={}"),
    _row(
        "coefficient_type (Emerging-Optimizers, Levanter), muon_coefficient_type (Megatron)",
        "ns_coeffs={}",
        by_value={
            "simple": "ns_coeffs='standard'",
            "quintic": "ns_coeffs='dion'",
            "polar_express": "ns_coeffs='polar_express_nvidia'",
            "aol": "ns_coeffs='aol_nvidia', preconditioning='aol'",
        },
    ),
    _row(
        "steps (Keller Jordan's zeropower_via_newtonschulz5), "
        "backend_steps (Keller Jordan, Levanter), num_ns_steps (Emerging-Optimizers), "
        "muon_num_ns_steps (Megatron), num_steps, ns_iters, num_iterations, newton_schulz_steps",
        "ns_steps={}",
    ),
    _row("use_nesterov (Emerging-Optimizers), muon_use_nesterov (Megatron)", "nesterov={}"),
    _row(
        "adjust_lr_fn (PyTorch)",
        by_value={
            "match_rms_adamw": "consistent_rms=0.2",
            "original": "shape_scale='clipped_ratio'",
            None: "shape_scale='clipped_ratio'",
        },
    ),
    _row(
        "adjust_lr (Dion)",
        by_value={
            "rms_norm": "consistent_rms=0.2",
            "spectral_norm": "shape_scale='ratio'",
            None: "shape_scale='none'",
        },
    ),
    _row(
        "scale_mode (Emerging-Optimizers), muon_scale_mode (Megatron)",
        by_value={
            "spectral": "consistent_rms=1.0",
            "unit_rms_norm": "shape_scale='ratio'",
            "shape_scaling": "shape_scale='clipped_ratio'",
        },
    ),
    _row(
        "use_kimi_scaling (Levanter)",
        by_value={True: "consistent_rms=0.2", False: "shape_scale='clipped_ratio'"},
    ),
    _row(
        "extra_scale_factor (Emerging-Optimizers), muon_extra_scale_factor (Megatron), "
        "matched_adamw_rms, rms_rate (Keras)",
        "consistent_rms={}",
    ),
    _row("cautious_wd (Dion), cautious", "cautious_weight_decay={}"),
    _row("weight_decay_method (Emerging-Optimizers)", "weight_decay_form={}"),
    _row(
        "use_decoupled_weight_decay (Emerging-Optimizers), decoupled_weight_decay",
        by_value={True: "weight_decay_form='decoupled'", False: "weight_decay_form='l2'"},
    ),
    _row(
        "fp32_matmul_prec (Emerging-Optimizers), muon_fp32_matmul_prec (Megatron)",
        by_value={
            "medium": "ns_coeffs=NewtonSchulz(dtype='bfloat16')",
            "high": "ns_coeffs=NewtonSchulz(dtype='float32')",
            "highest": "ns_coeffs=NewtonSchulz(dtype='float32')",
        },
    ),
    _row(
        "use_gram_newton_schulz (Dion)",
        by_value={
            True: "ns_coeffs=NewtonSchulz(method='gram')",
            False: "ns_coeffs=NewtonSchulz(method='standard')",
        },
    ),
    _row(
        "ns_algorithm (gram-newton-schulz)",
        by_value={
            "gram_newton_schulz": "ns_coeffs=NewtonSchulz(method='gram')",
            "standard_newton_schulz": "ns_coeffs=NewtonSchulz(method='standard')",
        },
        note="the faster form is the default",
    ),
    _row(
        "use_syrk (Emerging-Optimizers), use_triton (Dion), ns_use_kernels (gram-newton-schulz)",
        by_value={False: "ns_coeffs=NewtonSchulz(implementation='xla')"},
        note="the fastest kernels that can run are the default",
    ),
    _row(
        "use_muon (Keller Jordan), param_groups (PyTorch), "
        "muon_params (Keller Jordan, Moonlight), adamw_params (Keller Jordan, Moonlight), "
        "exclude_layers (Keras), exclude_embeddings (Keras), flatten (Dion), "
        "split_qkv (Emerging-Optimizers), muon_split_qkv (Megatron)",
        "muon_weight_dimension_numbers=by_role",
    ),
    _row("rules (by_role)", "muon_weight_dimension_numbers=by_role(rules={})"),
    _row("layout (by_role)", "muon_weight_dimension_numbers=by_role(layout={})"),
    _row(
        "per_head (by_use)",
        "muon_weight_dimension_numbers=by_use(fn, params, *inputs, per_head={})",
    ),
    _row("weight_dimension_numbers (scale_by_muon)", "muon_weight_dimension_numbers={}"),
    _row("muon_weight_dimension_numbers (muon)", "weight_dimension_numbers={}"),
    _row("dtype (NewtonSchulz), ns_dtype (NewtonSchulz)", "ns_coeffs=NewtonSchulz(dtype={})"),
    _row("method (NewtonSchulz), ns_method (NewtonSchulz)", "ns_coeffs=NewtonSchulz(method={})"),
    _row("implementation (NewtonSchulz)", "ns_coeffs=NewtonSchulz(implementation={})"),
    _row("max_group_bytes (NewtonSchulz)", "ns_coeffs=NewtonSchulz(max_group_bytes={})"),
    _row(
        "normuon_averaged (muon of 0.2.0), averaged (scale_by_normuon)",
        "normuon_averaged={}",
        "averaged={}",
        taker="muon_jax.contrib.normuon",
        chained="muon_jax.contrib.scale_by_normuon(averaged={})",
    ),
    _row("fixed_norms (muon of 0.2.0)", taker="muon_jax.contrib.muonh"),
    _row("adamh (muon of 0.2.0)", "adamh={}", taker="muon_jax.contrib.muonh"),
    _row(
        "state_memory_kind (muon of 0.2.0)",
        by_value={"pinned_host": "mu_dtype=muon_jax.contrib.on_host()"},
        note="the default is the memory of the device",
    ),
    _row(
        "block_lr, block_learning_rate (Exchange)",
        "shardings=Exchange(block_gain={} / learning_rate)",
    ),
    _row("block_period (Exchange)", "shardings=Exchange(block_period={})"),
    _row("block_gain (Exchange)", "shardings=Exchange(block_gain={})"),
    _row(
        "distributed_gram (Exchange)",
        by_value={
            True: "shardings=Exchange(axes='gram_or_exchange')",
            False: "shardings=Exchange(axes='exchange')",
        },
    ),
    _row(
        "outside (Exchange)",
        "shardings=Exchange(axes={})",
        by_value={
            "gram": "shardings=Exchange(axes={'tensor': 'gram'})",
            "block": "shardings=Exchange(axes={'tensor': 'block'})",
        },
    ),
    _row(
        "exchange_axes (Exchange)",
        note="shardings=Exchange({'fsdp': 'exchange', ...: 'raise'}) says it",
    ),
    _row(
        "bandwidth (Exchange), latency (Exchange)",
        note="shardings=Exchange(links={'data': Link(50e9, 2e-5)}) says it",
    ),
    _row(
        "G (Keller Jordan's zeropower_via_newtonschulz5), M, grad (PyTorch)",
        "x={}",
        taker="newton_schulz",
    ),
    _row(
        "qk_clip_threshold (Megatron), tau (Kimi K2), clip_threshold",
        "threshold={}",
        taker="muon_jax.contrib.qk_clip",
    ),
    _row(
        "qk_clip_alpha (Megatron), qk_clip (Megatron), alpha (Kimi K2)",
        note="chain contrib.qk_clip(100.0, heads) after muon; the heads have the power",
    ),
    _row(
        "rank (Keller Jordan), world_size (Keller Jordan), process_group (Dion), "
        "distributed_mesh (Dion), pg_collection (Megatron), tp_mode (Emerging-Optimizers), "
        "muon_tp_mode (Megatron)",
        note="the optimizer reads the shardings of the parameters",
    ),
    _row(
        "fused (PyTorch), foreach (PyTorch), capturable (PyTorch)",
        note="jax.jit compiles and fuses the whole update",
    ),
    _row("differentiable (PyTorch)", note="jax.grad differentiates updates as they are"),
    _row(
        "maximize (PyTorch)",
        note="to maximize, negate the gradients by optax.chain(optax.scale(-1.0), muon(...))",
    ),
    _row(
        "amsgrad (PyTorch)",
        note="for AMSGrad, combine scale_by_muon and optax.amsgrad by optax.partition",
    ),
    _row(
        "backend (Keller Jordan)", note="the backend is Newton–Schulz, with ns_coeffs and ns_steps"
    ),
    _row(
        "max_grad_norm (Hugging Face, Levanter), clip_grad (Megatron)",
        note="clip before, by optax.chain(optax.clip_by_global_norm(...), muon(...))",
    ),
    _row(
        "warmup (Levanter), lr_schedule (Levanter), min_lr_ratio (Levanter)",
        note="learning_rate takes a schedule, such as optax.warmup_cosine_decay_schedule(...)",
    ),
    _row("params (PyTorch), model", note="optimizer.init(params) takes the parameters"),
)
