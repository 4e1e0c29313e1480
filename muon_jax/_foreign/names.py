"""What other optimizers call our arguments: one table, for messages and for the documents."""

import dataclasses
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
_OTHERS, _BEFORE = "other code", "muon of 0.2.0"
_KELLER, _TORCH, _DION, _EMERGING = "Keller Jordan", "PyTorch", "Dion", "Emerging-Optimizers"
_GRAM, _HUGGING_FACE, _MEGATRON = "gram-newton-schulz", "Hugging Face", "Megatron"
_ZEROPOWER = "zeropower_via_newtonschulz5"
_VIEWS = "muon_weight_dimension_numbers"

FOREIGN: tuple[Foreign, ...] = (
    Foreign(
        {
            "lr": f"{_TORCH}, {_KELLER}, Moonlight, {_DION}, {_MEGATRON}",
            "muon_lr": _OTHERS,
            "step_size": _OTHERS,
        },
        ("learning_rate={}",),
        chained="optax.scale_by_learning_rate({})",
    ),
    Foreign(
        {"wd": "Moonlight", "weight_decay_rate": _OTHERS},
        ("weight_decay={}",),
        note="adam_weight_decay is for AdamW's parameters",
        chained="optax.add_decayed_weights({})",
    ),
    Foreign(
        {
            "mu": _DION,
            "momentum_beta": _EMERGING,
            "muon_momentum": _MEGATRON,
            "muon_beta": _OTHERS,
            "muon_beta1": _OTHERS,
        },
        ("beta={}",),
    ),
    Foreign(
        {
            "adamw_lr": _KELLER,
            "adam_lr": "Levanter",
            "aux_lr": _OTHERS,
            "scalar_lr": _OTHERS,
            "embed_lr": _OTHERS,
        },
        ("adam_learning_rate={}",),
    ),
    Foreign(
        {"muon_to_adam_lr": "Levanter", "adam_lr_ratio": "Keras"},
        ("adam_learning_rate={} * learning_rate",),
    ),
    Foreign(
        {"adamw_wd": _KELLER, "adam_wd": _OTHERS, "adam_decay": _OTHERS}, ("adam_weight_decay={}",)
    ),
    Foreign(
        {
            "b1": "optax.adamw",
            "beta1": "Levanter",
            "beta_1": "Keras",
            "adam_beta_1": "Keras",
            "adam_beta1": f"{_MEGATRON}, {_HUGGING_FACE}",
            "adam_momentum": _OTHERS,
        },
        ("adam_b1={}",),
    ),
    Foreign(
        {
            "b2": "optax.adamw",
            "beta2": "Levanter",
            "beta_2": "Keras",
            "adam_beta_2": "Keras",
            "adam_beta2": f"{_MEGATRON}, {_HUGGING_FACE}",
        },
        ("adam_b2={}", "b2={}"),
    ),
    Foreign(
        {"normuon_b2": _BEFORE, "muon_beta2": f"NorMuon of {_DION}"},
        ("normuon_b2={}", "b2={}"),
        taker=f"{CONTRIB}.normuon",
        chained=f"{CONTRIB}.scale_by_normuon(b2={{}})",
    ),
    Foreign(
        {
            "betas": f"{_TORCH}'s AdamW, {_DION}",
            "adamw_betas": f"{_KELLER}, Moonlight",
            "adam_betas": _OTHERS,
        },
        ("adam_b1={0}, adam_b2={1}",),
    ),
    Foreign(
        {"epsilon": f"{_DION}, Keras", "ns_epsilon": _GRAM, "muon_epsilon": "Levanter"},
        ("eps={}",),
    ),
    Foreign(
        {"adamw_eps": f"{_KELLER}, Moonlight", "adam_epsilon": _HUGGING_FACE}, ("adam_eps={}",)
    ),
    Foreign({"eps_root": "optax.adamw"}, ("adam_eps_root={}",)),
    Foreign(
        {"mask": "optax.adamw", "wd_mask": _OTHERS},
        ("weight_decay_mask={}",),
        note="weight_decay_mask is for Muon's matrices alone. For a mask of the others, leave"
        " adam_weight_decay at 0 and chain optax.add_decayed_weights(-adam_learning_rate * decay,"
        " mask) after muon",
    ),
    Foreign({"exp_avg_dtype": _MEGATRON, "momentum_dtype": _OTHERS}, ("mu_dtype={}",)),
    Foreign(
        {"exp_avg_sq_dtype": _MEGATRON, "nu_dtype": _OTHERS},
        note="AdamW's second moment has the dtype of the parameters",
    ),
    Foreign(
        {
            "ns_coefficients": f"{_TORCH}, {_GRAM}",
            "coefficients": _OTHERS,
            "coeffs": _OTHERS,
        },
        ("ns_coeffs={}",),
    ),
    Foreign(
        {"coefficient_type": f"{_EMERGING}, Levanter", "muon_coefficient_type": _MEGATRON},
        ("ns_coeffs={}",),
        {
            "simple": "ns_coeffs='standard'",
            "quintic": "ns_coeffs='dion'",
            "polar_express": "ns_coeffs='polar_express_nvidia'",
            "aol": "ns_coeffs='aol_nvidia', preconditioning='aol'",
        },
    ),
    Foreign(
        {
            "steps": f"{_KELLER}'s {_ZEROPOWER}",
            "backend_steps": f"{_KELLER}, Levanter",
            "num_ns_steps": _EMERGING,
            "muon_num_ns_steps": _MEGATRON,
            "num_steps": _OTHERS,
            "ns_iters": _OTHERS,
            "num_iterations": _OTHERS,
            "newton_schulz_steps": _OTHERS,
        },
        ("ns_steps={}",),
    ),
    Foreign({"use_nesterov": _EMERGING, "muon_use_nesterov": _MEGATRON}, ("nesterov={}",)),
    Foreign(
        {"adjust_lr_fn": _TORCH},
        by_value={
            "match_rms_adamw": "consistent_rms=0.2",
            "original": "shape_scale='clipped_ratio'",
            None: "shape_scale='clipped_ratio'",
        },
    ),
    Foreign(
        {"adjust_lr": _DION},
        by_value={
            "rms_norm": "consistent_rms=0.2",
            "spectral_norm": "shape_scale='ratio'",
            None: "shape_scale='none'",
        },
    ),
    Foreign(
        {"scale_mode": _EMERGING, "muon_scale_mode": _MEGATRON},
        by_value={
            "spectral": "consistent_rms=1.0",
            "unit_rms_norm": "shape_scale='ratio'",
            "shape_scaling": "shape_scale='clipped_ratio'",
        },
    ),
    Foreign(
        {"use_kimi_scaling": "Levanter"},
        by_value={True: "consistent_rms=0.2", False: "shape_scale='clipped_ratio'"},
    ),
    Foreign(
        {
            "extra_scale_factor": _EMERGING,
            "muon_extra_scale_factor": _MEGATRON,
            "matched_adamw_rms": _OTHERS,
            "rms_rate": "Keras",
        },
        ("consistent_rms={}",),
    ),
    Foreign({"cautious_wd": _DION, "cautious": _OTHERS}, ("cautious_weight_decay={}",)),
    Foreign({"weight_decay_method": _EMERGING}, ("weight_decay_form={}",)),
    Foreign(
        {"use_decoupled_weight_decay": _EMERGING, "decoupled_weight_decay": _OTHERS},
        by_value={True: "weight_decay_form='decoupled'", False: "weight_decay_form='l2'"},
    ),
    Foreign(
        {"fp32_matmul_prec": _EMERGING, "muon_fp32_matmul_prec": _MEGATRON},
        by_value={
            "medium": "ns_coeffs=NewtonSchulz(dtype='bfloat16')",
            "high": "ns_coeffs=NewtonSchulz(dtype='float32')",
            "highest": "ns_coeffs=NewtonSchulz(dtype='float32')",
        },
    ),
    Foreign(
        {"use_gram_newton_schulz": _DION},
        by_value={
            True: "ns_coeffs=NewtonSchulz(method='gram')",
            False: "ns_coeffs=NewtonSchulz(method='standard')",
        },
    ),
    Foreign(
        {"ns_algorithm": _GRAM},
        by_value={
            "gram_newton_schulz": "ns_coeffs=NewtonSchulz(method='gram')",
            "standard_newton_schulz": "ns_coeffs=NewtonSchulz(method='standard')",
        },
        note="the faster form is the default",
    ),
    Foreign(
        {"use_syrk": _EMERGING, "use_triton": _DION, "ns_use_kernels": _GRAM},
        by_value={False: "ns_coeffs=NewtonSchulz(implementation='xla')"},
        note="the fastest kernels that can run are the default",
    ),
    Foreign(
        {
            "use_muon": _KELLER,
            "param_groups": _TORCH,
            "muon_params": f"{_KELLER}, Moonlight",
            "adamw_params": f"{_KELLER}, Moonlight",
            "exclude_layers": "Keras",
            "exclude_embeddings": "Keras",
            "flatten": _DION,
            "split_qkv": _EMERGING,
            "muon_split_qkv": _MEGATRON,
        },
        (f"{_VIEWS}=by_role",),
    ),
    Foreign({"rules": "by_role"}, (f"{_VIEWS}=by_role(rules={{}})",)),
    Foreign({"layout": "by_role"}, (f"{_VIEWS}=by_role(layout={{}})",)),
    Foreign({"per_head": "by_use"}, (f"{_VIEWS}=by_use(fn, params, *inputs, per_head={{}})",)),
    Foreign(
        {"weight_dimension_numbers": "scale_by_muon"},
        (f"{_VIEWS}={{}}",),
    ),
    Foreign({_VIEWS: "muon"}, ("weight_dimension_numbers={}",)),
    *(
        Foreign(dict.fromkeys(names, "NewtonSchulz"), (f"ns_coeffs=NewtonSchulz({names[0]}={{}})",))
        for names in (
            ("dtype", "ns_dtype"),
            ("method", "ns_method"),
            ("implementation",),
            ("max_group_bytes",),
        )
    ),
    Foreign(
        {"normuon_averaged": _BEFORE, "averaged": "scale_by_normuon"},
        ("normuon_averaged={}", "averaged={}"),
        taker=f"{CONTRIB}.normuon",
        chained=f"{CONTRIB}.scale_by_normuon(averaged={{}})",
    ),
    Foreign({"fixed_norms": _BEFORE}, taker=f"{CONTRIB}.muonh"),
    Foreign({"adamh": _BEFORE}, ("adamh={}",), taker=f"{CONTRIB}.muonh"),
    Foreign(
        {"state_memory_kind": _BEFORE},
        by_value={"pinned_host": f"mu_dtype={CONTRIB}.on_host()"},
        note="the default is the memory of the device",
    ),
    Foreign(
        {"block_lr": _OTHERS, "block_learning_rate": "Exchange"},
        ("shardings=Exchange(block_gain={} / learning_rate)",),
    ),
    Foreign({"block_period": "Exchange"}, ("shardings=Exchange(block_period={})",)),
    Foreign({"block_gain": "Exchange"}, ("shardings=Exchange(block_gain={})",)),
    Foreign(
        {"distributed_gram": "Exchange"},
        by_value={
            True: "shardings=Exchange(axes='gram_or_exchange')",
            False: "shardings=Exchange(axes='exchange')",
        },
    ),
    Foreign(
        {"outside": "Exchange"},
        ("shardings=Exchange(axes={})",),
        {word: f"shardings=Exchange(axes={{'tensor': {word!r}}})" for word in ("gram", "block")},
    ),
    Foreign(
        {"exchange_axes": "Exchange"},
        note="shardings=Exchange({'fsdp': 'exchange', ...: 'raise'}) says it",
    ),
    Foreign(
        {"bandwidth": "Exchange", "latency": "Exchange"},
        note="shardings=Exchange(links={'data': Link(50e9, 2e-5)}) says it",
    ),
    Foreign(
        {"G": f"{_KELLER}'s {_ZEROPOWER}", "M": _OTHERS, "grad": _TORCH},
        ("x={}",),
        taker="newton_schulz",
    ),
    Foreign(
        {"qk_clip_threshold": _MEGATRON, "tau": "Kimi K2", "clip_threshold": _OTHERS},
        ("threshold={}",),
        taker=f"{CONTRIB}.qk_clip",
    ),
    Foreign(
        {"qk_clip_alpha": _MEGATRON, "qk_clip": _MEGATRON, "alpha": "Kimi K2"},
        note="chain contrib.qk_clip(100.0, heads) after muon; the heads have the power",
    ),
    Foreign(
        {
            "rank": _KELLER,
            "world_size": _KELLER,
            "process_group": _DION,
            "distributed_mesh": _DION,
            "pg_collection": _MEGATRON,
            "tp_mode": _EMERGING,
            "muon_tp_mode": _MEGATRON,
        },
        note="the optimizer reads the shardings of the parameters",
    ),
    Foreign(
        dict.fromkeys(("fused", "foreach", "capturable"), _TORCH),
        note="jax.jit compiles and fuses the whole update",
    ),
    Foreign({"differentiable": _TORCH}, note="jax.grad differentiates updates as they are"),
    Foreign(
        {"maximize": _TORCH},
        note="to maximize, negate the gradients by optax.chain(optax.scale(-1.0), muon(...))",
    ),
    Foreign(
        {"amsgrad": _TORCH},
        note="for AMSGrad, combine scale_by_muon and optax.amsgrad by optax.partition",
    ),
    Foreign(
        {"backend": _KELLER},
        note="the backend is Newton–Schulz, with ns_coeffs and ns_steps",
    ),
    Foreign(
        {"max_grad_norm": f"{_HUGGING_FACE}, Levanter", "clip_grad": _MEGATRON},
        note="clip before, by optax.chain(optax.clip_by_global_norm(...), muon(...))",
    ),
    Foreign(
        {"warmup": "Levanter", "lr_schedule": "Levanter", "min_lr_ratio": "Levanter"},
        note="learning_rate takes a schedule, such as optax.warmup_cosine_decay_schedule(...)",
    ),
    Foreign(
        {"params": _TORCH, "model": _OTHERS},
        note="optimizer.init(params) takes the parameters",
    ),
)
