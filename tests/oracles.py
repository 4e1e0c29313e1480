"""Published Muons in NumPy and float64, a function each, from their formulas.

A system is a pair: `step(w, g, state, t, lr)` returns the next weights of a matrix, given those,
the gradient, a dict that it keeps for itself (empty before the first step), the step t = 1, 2, …
and the learning rate. The other function does so for everything that is no matrix. Matrices are as
in PyTorch, (out, in): rows are outputs.
"""

import math

import numpy as np

SIMPLE = [(3.4445, -4.7750, 2.0315)] * 5
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
POLAR_EXPRESS_1_02 = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
POLAR_EXPRESS_1_05 = [
    (8.28721201814563 / 1.05, -23.595886519098837 / 1.05**3, 17.300387312530933 / 1.05**5),
    (4.107059111542203 / 1.05, -2.9478499167379106 / 1.05**3, 0.5448431082926601 / 1.05**5),
    (3.9486908534822946 / 1.05, -2.908902115962949 / 1.05**3, 0.5518191394370137 / 1.05**5),
    (3.3184196573706015 / 1.05, -2.488488024314874 / 1.05**3, 0.51004894012372 / 1.05**5),
    (2.300652019954817 / 1.05, -1.6689039845747493 / 1.05**3, 0.4188073119525673 / 1.05**5),
]
AOL = [
    (4.6051, -9.6552, 5.6769),
    (4.7505, -6.0861, 2.1790),
    (2.7763, -2.3190, 0.5523),
    (2.4231, -2.2861, 0.8193),
]


def newton_schulz(x, triples):
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def on_wide(function, x):
    """function(x), or of the transpose where that is the wider."""
    rows, cols = x.shape
    return function(x.T).T if rows > cols else function(x)


def ema(state, g, beta=0.95):
    state["m"] = beta * state.get("m", 0) + (1 - beta) * g
    return state["m"]


def heavy_ball(state, g, beta=0.95):
    state["m"] = beta * state.get("m", 0) + g
    return state["m"]


# https://github.com/KellerJordan/Muon/blob/857d1adc15/muon.py
# coefficients 16 `a, b, c = (3.4445, -4.7750,  2.0315)`; eps 22 `X.norm(...) + 1e-7`; beta, steps,
# Nesterov 34 `beta=0.95, ns_steps=5, nesterov=True`; form 35-36 `lerp_`; scale 40
# `max(1, grad.size(-2) / grad.size(-1))**0.5`; decay 239 `weight_decay", 0`, decoupled 268.
# Adam: 244 `betas", (0.9, 0.95)`; 245 `eps", 1e-10`, after the bias correction 135; decay 246 `0`.
def keller(w, g, state, t, lr):
    m = ema(state, g)
    u = 0.05 * g + 0.95 * m
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-7), SIMPLE), u)
    return w - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * o


# https://github.com/pytorch/pytorch/blob/098e03f91d/torch/optim/_muon.py
# eps 25 `EPS = 1e-7`, as least norm 64 `.clamp(min=eps)`; coefficients 26-28; steps 29
# `DEFAULT_NS_STEPS = 5`; scale 91 `math.sqrt(max(1, A / B))`; in `Muon.__init__` 104
# `weight_decay: float = 0.1`, 105 `momentum: float = 0.95`, 106 `nesterov: bool = True`; form in
# `_single_tensor_muon` `buf.lerp_(grad, 1 - momentum)`, decay `param.mul_(1 - lr * weight_decay)`.
# AdamW: https://github.com/pytorch/pytorch/blob/002d2f0bb4/torch/optim/adamw.py
# 18 `betas: Tuple[float, float] = (0.9, 0.999)`; 19 `eps: float = 1e-8`; 20
# `weight_decay: float = 1e-2`.
def torch(w, g, state, t, lr):
    m = ema(state, g)
    u = 0.05 * g + 0.95 * m
    o = on_wide(lambda x: newton_schulz(x / max(np.linalg.norm(x), 1e-7), SIMPLE), u)
    return w * (1 - lr * 0.1) - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * o


# https://github.com/MoonshotAI/Moonlight/blob/c2ad5b20c6/examples/toy_train.py
# coefficients 60; eps 65 `X.norm() + 1e-7`; decay of both sides 109 `wd=0.1`, 200, 236; beta 111
# `momentum=0.95`; Nesterov 112 `nesterov=True`; steps 113 `ns_steps=5`; scale 146
# `0.2 * math.sqrt(max(A, B))`; form 189-191 `buf.mul_(momentum).add_(g)`.
# AdamW: 115 `adamw_betas=(0.9, 0.95)`; 116 `adamw_eps=1e-8`, before the bias correction 231-235.
def moonlight(w, g, state, t, lr):
    m = heavy_ball(state, g)
    u = g + 0.95 * m
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-7), SIMPLE), u)
    return w * (1 - lr * 0.1) - lr * 0.2 * math.sqrt(max(w.shape)) * o


# https://github.com/StarrickLiu/fused-muon/blob/740a4d7625/muon_fused/
# optimizer.py: decay of both sides 55 `wd: float = 0.1`; beta 56 `momentum: float = 0.95`; Nesterov
# 57 `True`, 147; steps 58 `ns_steps: int = 5`; scale 83 `0.2 * math.sqrt(max(A, B))`.
# ns_step.py: coefficients 39; eps 45 `X.norm() + 1e-7`.
# AdamW: 59 `adamw_betas = (0.9, 0.95)`; 60 `adamw_eps = 1e-8`, before the bias correction 193.
def fused_muon(w, g, state, t, lr):
    def iterate(x):
        x = x / (np.linalg.norm(x) + 1e-7)
        for a, b, c in SIMPLE:
            gram = x @ x.T
            x = (c * gram @ gram + b * gram + a * np.eye(len(x))) @ x
        return x

    u = g + 0.95 * heavy_ball(state, g)
    return w * (1 - lr * 0.1) - lr * 0.2 * math.sqrt(max(w.shape)) * on_wide(iterate, u)


# optax 0.2.8, optax/contrib/_muon.py: coefficients 42; in `muon` steps 531 `ns_steps = 5`; beta 532
# `0.95`; eps 533 `1e-8`, added 340; decay 534 `0.0`, after the scale 712; Nesterov 540 `True`, with
# the bias corrections of 489-495; scale 145 `sqrt(maximum(1, fan_out / fan_in))`.
# AdamW: 545 `adam_b1 = 0.9`; 546 `adam_b2 = 0.999`; 547 `adam_eps_root = 0.0`; 548
# `adam_weight_decay = 0.0`; 719 `eps=eps`, so 1e-8; 723 `nesterov=nesterov`, so True.
def optax(w, g, state, t, lr):
    m = ema(state, g)
    u = 0.95 * m / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-8), SIMPLE), u)
    return w - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * o


# https://github.com/microsoft/dion/blob/0a059a4542/dion/
# muon.py: beta 66 `mu: float = 0.95`; decay of both sides 68 `weight_decay = 0.01`; eps of both 70
# `epsilon: float = 1e-8`; Nesterov 71 `False`; scale 72 `"spectral_norm"`, megabatch_base.py 1002
# `math.sqrt(fan_out / fan_in)`; 76 `use_polar_express: bool = True`; form 299-300; decoupled 343.
# polar_express.py: coefficients 10-16; norm 35 `X.norm(...) * 1.02 + epsilon`.
# An earlier version (0c205499) iterated with QUINTIC and without the factor 1.02.
# AdamW: muon.py 67 `betas = (0.9, 0.95)`; scalar_opts.py 43 eps after the bias correction; 60.
def dion(w, g, state, t, lr):
    u = heavy_ball(state, g)
    x = u / (1.02 * np.linalg.norm(u) + 1e-8)
    for a, b, c in POLAR_EXPRESS_1_02:
        if w.shape[0] > w.shape[1]:
            gram = x.T @ x
            x = a * x + x @ (b * gram + c * gram @ gram)
        else:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
    return w * (1 - lr * 0.01) - lr * math.sqrt(w.shape[0] / w.shape[1]) * x


# https://github.com/Dao-AILab/gram-newton-schulz/blob/f08f25e1b2/
# gram_newton_schulz/muon/muon.py: decay 81 `weight_decay: float = 0.1`; beta 82 `0.95`; Nesterov 83
# `True`; scale 84 `"rms_norm"`, muon_utils/muon_opt_utils.py 13 `0.2 * sqrt(max(fan_out, fan_in))`;
# eps 89 `ns_epsilon: float = 1e-7`; 92 `gram_newton_schulz_num_restarts: int = 1`.
# gram_newton_schulz/coefficients.py 18-27, the class's default, divided by 24 `1.05`; (the example
# passes YOU_COEFFICIENTS instead). gram_newton_schulz/gram_newton_schulz.py: norm in float32 101,
# float16 102, gram form unless square 104. muon_opt_utils.py: form 43-48; decoupled 73.
# AdamW: example.py 139-143 `AdamW(..., betas=(0.9, 0.95), weight_decay=0.1)`; eps is PyTorch's
# 1e-8.
def gram(w, g, state, t, lr):
    def iterate(x):
        x = x / (np.linalg.norm(x) + 1e-7)
        if w.shape[0] == w.shape[1]:
            return newton_schulz(x, POLAR_EXPRESS_1_05)
        for coefficients in (POLAR_EXPRESS_1_05[:2], POLAR_EXPRESS_1_05[2:]):  # one restart
            r, q = x @ x.T, np.eye(len(x))
            for a, b, c in coefficients:
                z = b * r + c * r @ r
                q = q @ z + a * q
                rz = r @ z + a * r
                r = z @ rz + a * rz
            x = q @ x
        return x

    u = g + 0.95 * heavy_ball(state, g)
    return w * (1 - lr * 0.1) - lr * 0.2 * math.sqrt(max(w.shape)) * on_wide(iterate, u)


# https://github.com/marin-community/marin/blob/0ac1c9bd89/lib/levanter/src/levanter/optim/muon.py
# `MuonConfig`, 37-45: `momentum: float = 0.95`, `nesterov: bool = True`, `backend_steps: int = 5`,
# `weight_decay: float = 0.0`, `muon_epsilon: float = 1e-8`; 50 `coefficient_type = "quintic"`;
# `scale_with_muon`: form `momentum * m + g`, scale `sqrt(maximum(1, shape[0] / shape[1]))`. util.py
# at 054a715f: `NEWTON_SCHULZ_COEFFICIENTS["quintic"]`, `X /= norm(X) + eps`.
# Adam: `adam_weight_decay: Optional[float] = None`, so weight_decay's 0; `beta1: float = 0.9`,
# `beta2: float = 0.95`, `epsilon: float = 1e-8`.
def levanter(w, g, state, t, lr):
    m = heavy_ball(state, g)
    u = g + 0.95 * m
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-8), QUINTIC), u)
    return w - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * o


# https://github.com/thib-s/flash-newton-schulz/blob/cdb03db0e6/newton_schulz_triton.py
# eps 549 `epsilon: float = 1e-7`, as least row sum 579-581; four steps with the coefficients
# 555-558.
# (A later version, 145260f4, takes the last four of QUINTIC.) The file has no optimizer, and none
# is
# stated: all else, AdamW too, is Keller Jordan's, see `keller`.
def turbo(w, g, state, t, lr):
    """AOL tells rows from columns: of a square matrix the rows are inputs in JAX, outputs there."""

    def iterate(x):
        d = 1 / np.sqrt(np.maximum(np.sum(np.abs(x @ x.T), axis=1, keepdims=True), 1e-7))
        return newton_schulz(d * x, AOL)

    m = ema(state, g)
    u = 0.05 * g + 0.95 * m
    o = iterate(u.T).T if w.shape[0] >= w.shape[1] else iterate(u)
    return w - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * o


# https://huggingface.co/AlexWortega/moe100m-physics-tinybpe/resolve/main/optim/muon.py
# 58 `safety: float = 1.02`; float16 62; eps 65 `X.float().norm() + 1e-7`; 67-69 `a = 3.4445 /
# safety`,
# `b = -4.7750 / safety`, `c = 2.0315 / safety`; `Muon.__init__`: 173 `momentum: float = 0.95`; 174
# `ns_mode: str = "fp32"`, where the preset is "fp16"; 175 `ns_iters: int = 5`; 176
# `weight_decay: float = 0.01`; 180 `nesterov: bool = True`. `_step_eager`:
# `buf.mul_(self.momentum).add_(g)`,
# `p.mul_(1.0 - self.lr * self.weight_decay)`, `scale = 0.2 * math.sqrt(max(rows, cols))`.
# AdamW: torch.optim.AdamW with 177 `betas: Tuple[float, float] = (0.9, 0.95)`, 178 `eps: float =
# 1e-8`
# and the weight_decay of 176.
def moe_fp16(w, g, state, t, lr):
    triples = [(a / 1.02, b / 1.02, c / 1.02) for a, b, c in SIMPLE]
    m = heavy_ball(state, g)
    u = g + 0.95 * m
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-7), triples), u)
    return w * (1 - lr * 0.01) - lr * 0.2 * math.sqrt(max(w.shape)) * o


# https://github.com/NVIDIA-NeMo/Emerging-Optimizers/blob/fd77292671/emerging_optimizers/
# orthogonalized_optimizers/
# muon.py: beta 80 `momentum: float = 0.95`; decay 81 `weight_decay: float = 0.01`; Nesterov 83
# `False`; 86 `"quintic"`; steps 87 `5`; 88 `"spectral"`, 210 `max(size_out, size_in) ** 0.5`; 89
# `extra_scale_factor: float = 1.0`. orthogonalized_optimizer.py: decay first 185; form 193 `lerp_`.
# muon_utils.py: coefficients 35-44; eps 154 `eps: float = 1e-15`, as least norm 216
# `normalize(...)`.
# AdamW:
# https://github.com/NVIDIA/Megatron-LM/blob/0075637cdb/megatron/core/optimizer/optimizer_config.py
# `adam_beta1: float = 0.9`, `adam_beta2: float = 0.999`, `adam_eps: float = 1e-08`,
# `weight_decay: float = 0.01`, `decoupled_weight_decay: bool = True`; its muon_* agree with the
# above.
def megatron(w, g, state, t, lr):
    w = w - lr * 0.01 * w
    u = ema(state, g)
    o = on_wide(lambda x: newton_schulz(x / max(np.linalg.norm(x), 1e-15), QUINTIC), u)
    return w - lr * math.sqrt(max(w.shape)) * o


# https://github.com/KellerJordan/modded-nanogpt/blob/f411b3d346/train_gpt.py
# coefficients 168-174; form 191 `lerp_`; norm 198 `X.norm(...) * (1 + 2e-2) + 1e-6`; scale 510
# `max(1.0, shape[-2] / shape[-1]) ** 0.5`; decay 878 `wd * lr`, times lr again where 929
# `(grad * p_precise) >= 0`; the shorter axis 888; least variance 943 `clamp_min(1e-10)`; beta 2073
# `momentum=0.95`, its schedule 1995; b2 2074 `beta2=0.9`; decay 2075 `weight_decay=1.2`.
# Adam: betas by parameter, 2035 `"adam_betas": [0.9,  0.95]`; 2067 `eps=1e-10`, before the bias
# correction; 2068 `weight_decay=0.005`, times 845 `lr * lr`, where 862 `(update * p_slice) > 0`.
def nanogpt(w, g, state, t, lr):
    m = ema(state, g)
    u = 0.05 * g + 0.95 * m
    x = u / (1.02 * np.linalg.norm(u) + 1e-6)
    o = on_wide(lambda x: newton_schulz(x, POLAR_EXPRESS_1_02), x)
    axis = 1 if w.shape[0] >= w.shape[1] else 0
    mean = np.mean(o**2, axis=axis, keepdims=True)
    state["v"] = 0.9 * state.get("v", 0) + 0.1 * mean
    n = o / np.sqrt(np.maximum(state["v"], 1e-10))
    n = n * np.linalg.norm(o) / max(np.linalg.norm(n), 1e-10)
    lr_mul = math.sqrt(max(1, w.shape[0] / w.shape[1]))
    return w - w * (n * w >= 0) * (1.2 * lr) * (lr_mul * lr) - n * (lr_mul * lr)


# https://arxiv.org/abs/2507.20534, Algorithm 1: `M_t = mu M_{t-1} + G_t`,
# `O_t = NewtonSchulz(M_t) sqrt(max(n, m)) 0.2`, `W_t = W_{t-1} - eta (O_t + lambda W_{t-1})`, so no
# Nesterov. The formulas were checked against a restatement of the algorithm, not against the PDF,
# and lines of the report (weight decay 0.1) are still to be added. The rest is not stated, and is
# Moonlight's: beta, coefficients, eps and AdamW.
# GLM-5 (https://arxiv.org/abs/2602.15763) has the numbers of GLM-4.5
# (https://arxiv.org/abs/2508.06471): five steps, momentum 0.95, an update RMS of 0.2, weight decay
# 0.1, as first recorded here; lines of the reports are still to be added. The rest is `moonlight`.
def kimi_k3(w, g, state, t, lr):
    u = heavy_ball(state, g)
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-7), SIMPLE), u)
    return w - lr * (0.2 * math.sqrt(max(w.shape)) * o + 0.1 * w)


# muon_fsdp2 0.3.0 from PyPI (sha256 of the wheel: 55387a0ffbcd90cc), muon_fsdp2.py
# coefficients 47; eps 53 `X.norm(...) + 1e-7`; form 62-63 `lerp_`; scale 71
# `0.2 * math.sqrt(max(grad.shape[1], grad.shape[0]))`; decoupled 160; beta 253 `momentum", 0.95`;
# decay 254 `weight_decay", 0`; 255 `rms_scale", True`; Nesterov 256 `True`; steps 257 `5`.
# Adam: 262 `betas", (0.9, 0.95)`; 263 `eps", 1e-10`, after the bias correction 83; decay 264 `0`.
# https://github.com/PrimeIntellect-ai/prime-rl/blob/dd3fd88790/src/prime_rl/trainer/ used it:
# optim.py passes `weight_decay` and `betas` of config.py, there 0.01 and (0.9, 0.999). At 7f6c3d24
# microsoft/dion took its place.
def prime_rl(w, g, state, t, lr):
    m = ema(state, g)
    u = 0.05 * g + 0.95 * m
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-7), SIMPLE), u)
    return w - lr * 0.2 * math.sqrt(max(w.shape)) * o


# https://arxiv.org/abs/2606.19348, as restated in Markdown, not the PDF: Algorithm 1,
# `M_t = mu M_{t-1} + G_t`, `O'_t = HybridNewtonSchulz(mu M_t + G_t)`,
# `O_t = O'_t sqrt(max(n, m)) gamma`, `W_t = W_{t-1} (1 - eta lambda) - eta O_t`; section 2.4,
# `M_0 = M / ||M||_F`, 8 steps of (3.4445, -4.7750, 2.0315), 2 of (2, -1.5, 0.5); section 4.2.2, of
# both models: momentum 0.95, weight decay 0.1, an RMS of 0.18; AdamW has betas (0.9, 0.95), an eps
# of 1e-20 and weight decay 0.1.
# https://github.com/AI-Hypercomputer/maxtext/blob/e591f30cbb/src/maxtext/optimizers/optimizers.py
# has the same coefficients, 203, and steps, 204, in optax.contrib.muon; of its configs/base.yml are
# eps 989 `1.e-8`, decay 1002 `0`, AdamW's 991 `0.1`, b2 988 `0.95`, and the scale 1003 `None`.
HYBRID = [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2


def deepseek_v4(w, g, state, t, lr):
    u = heavy_ball(state, g) * 0.95 + g
    o = on_wide(lambda x: newton_schulz(x / np.linalg.norm(x), HYBRID), u)
    return w * (1 - lr * 0.1) - lr * 0.18 * math.sqrt(max(w.shape)) * o


# https://github.com/Chongjie-Si/AdaMuon/blob/369f0b3bd9/megatron/core/optimizer/muon.py
# coefficients 22; eps 28 `X.norm() + 1e-7`; scale 70 `math.sqrt(max(A, B)) * matched_adamw_rms`;
# moments 82-84, norm 89 `torch.sqrt(torch.min(global_shape))/(F_norm_o_t_hat + eps)`; in `Muon`
# 96-98 `weight_decay=0.1`, `matched_adamw_rms=0.2`, `momentum=0.95`, `nesterov=True`, `ns_steps=5`,
# `adamw_betas=(0.9, 0.95)`, `adamw_eps=1e-8`; form 182-185; 304 `torch.sign(ns_input)`; b2 309
# `"ada_muon_beta": group['momentum']`, eps 310 `adamw_eps`; decoupled 332.
# AdamW adds eps before the bias correction 375-379; decay 380. gpt2/models/optimizers/adamuon.py
# has the same update of a `lerp_`, whose signs are the same.
def adamuon(w, g, state, t, lr):
    u = np.sign(g + 0.95 * heavy_ball(state, g))
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-7), SIMPLE), u)
    state["v"] = 0.95 * state.get("v", 0) + (1 - 0.95) * o**2
    n = o / (np.sqrt(state["v"]) + 1e-8)
    n = n * (math.sqrt(min(w.shape)) / (np.linalg.norm(n) + 1e-8))
    return w * (1 - lr * 0.1) - lr * 0.2 * math.sqrt(max(w.shape)) * n


def on_sphere(w, u, lr):
    """The norm of w, and the direction that is lr along -u."""
    moved = w - lr * u * np.linalg.norm(w) / max(np.linalg.norm(u), 1e-10)
    return moved / max(np.linalg.norm(moved), 1e-10) * np.linalg.norm(w)


# https://github.com/marin-community/marin/blob/186618b3c2/experiments/grug/moe_hero_ep/optimizer.py
# `GrugMoeMuonHConfig`: `momentum: float = 0.95`, `nesterov: bool = True`, `backend_steps: int = 5`,
# `muon_epsilon: float = 1e-8`, `coefficient_type = "quintic"`, no weight decay;
# `_scale_invariant_hyperball_updates`: `maximum(update_norm, 1e-10)`, `maximum(new_param_norm,
# 1e-10)`.
# grugmuon_hero.py at 13ab69e9: form `momentum * m + g`; `norm + eps`; `sqrt(maximum(1, out / in))`.
# Adam and AdamH: `beta1: float = 0.9`, `beta2: float = 0.95`, `epsilon: float = 1e-8`, no decay.
def muonh(w, g, state, t, lr):
    u = g + 0.95 * heavy_ball(state, g)
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-8), QUINTIC), u)
    return on_sphere(w, o * math.sqrt(max(1, w.shape[0] / w.shape[1])), lr)


def adamh(w, g, state, t, lr):
    return on_sphere(w, adam(state, g, t, 0.95, 1e-8), lr)


def adam(state, g, t, b2, eps, b1=0.9, nesterov=False):
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * g**2
    m = state["m"] / (1 - b1**t)
    if nesterov:
        m = b1 * state["m"] / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
    return m / (np.sqrt(state["v"] / (1 - b2**t)) + eps)


def adamw(b2, eps, weight_decay, nesterov=False):
    def step(w, g, state, t, lr):
        return w * (1 - lr * weight_decay) - lr * adam(state, g, t, b2, eps, nesterov=nesterov)

    return step


def adamw_of_moonlight(w, g, state, t, lr, late=False):
    """eps is added before the bias correction; late: after it, where muon_jax adds it."""
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.95 * state.get("v", 0) + 0.05 * g**2
    scale = (1 - 0.9**t) / math.sqrt(1 - 0.95**t)
    eps = 1e-8 * (math.sqrt(1 - 0.95**t) if late else 1)
    return w * (1 - lr * 0.1) - lr / scale * state["m"] / (eps + np.sqrt(state["v"]))


def adam_of_nanogpt(w, g, state, t, lr, late=False):
    """eps is added before the bias correction; late: after it, where muon_jax adds it."""
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.95 * state.get("v", 0) + 0.05 * g**2
    step_size = lr * math.sqrt(1 - 0.95**t) / (1 - 0.9**t)
    eps = 1e-10 * (math.sqrt(1 - 0.95**t) if late else 1)
    update = step_size * state["m"] / (np.sqrt(state["v"]) + eps)
    return w - update - w * (update * w > 0) * lr * lr * 0.005


SYSTEMS = {
    "keller": (keller, adamw(0.95, 1e-10, 0.0)),
    "torch": (torch, adamw(0.999, 1e-8, 0.01)),
    "moonlight": (moonlight, adamw_of_moonlight),
    "optax": (optax, adamw(0.999, 1e-8, 0.0, nesterov=True)),
    "dion": (dion, adamw(0.95, 1e-8, 0.01)),
    "gram": (gram, adamw(0.95, 1e-8, 0.1)),
    "levanter": (levanter, adamw(0.95, 1e-8, 0.0)),
    "turbo": (turbo, adamw(0.95, 1e-10, 0.0)),
    "fused_muon": (fused_muon, adamw_of_moonlight),
    "moe_fp16": (moe_fp16, adamw(0.95, 1e-8, 0.01)),
    "megatron": (megatron, adamw(0.999, 1e-8, 0.01)),
    "nanogpt": (nanogpt, adam_of_nanogpt),
    "adamuon": (adamuon, adamw_of_moonlight),
    "kimi_k3": (kimi_k3, adamw_of_moonlight),
    "glm5": (moonlight, adamw_of_moonlight),
    "prime_rl": (prime_rl, adamw(0.95, 1e-10, 0.0)),
    "deepseek_v4": (deepseek_v4, adamw(0.95, 1e-20, 0.1)),
    "muonh": (muonh, adamw(0.95, 1e-8, 0.0)),
}
ON_THE_HEAD = {"muonh": adamh}
