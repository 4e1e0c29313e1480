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


def keller(w, g, state, t, lr):
    m = ema(state, g)
    u = 0.05 * g + 0.95 * m
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-7), SIMPLE), u)
    return w - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * o


def torch(w, g, state, t, lr):
    m = ema(state, g)
    u = 0.05 * g + 0.95 * m
    o = on_wide(lambda x: newton_schulz(x / max(np.linalg.norm(x), 1e-7), SIMPLE), u)
    return w * (1 - lr * 0.1) - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * o


def moonlight(w, g, state, t, lr):
    m = heavy_ball(state, g)
    u = g + 0.95 * m
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-7), SIMPLE), u)
    return w * (1 - lr * 0.1) - lr * 0.2 * math.sqrt(max(w.shape)) * o


def fused_muon(w, g, state, t, lr):
    def iterate(x):
        x = x / (np.linalg.norm(x) + 1e-7)
        for a, b, c in SIMPLE:
            gram = x @ x.T
            x = (c * gram @ gram + b * gram + a * np.eye(len(x))) @ x
        return x

    u = g + 0.95 * heavy_ball(state, g)
    return w * (1 - lr * 0.1) - lr * 0.2 * math.sqrt(max(w.shape)) * on_wide(iterate, u)


def optax(w, g, state, t, lr):
    m = ema(state, g)
    u = 0.95 * m / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-8), SIMPLE), u)
    return w - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * o


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


def levanter(w, g, state, t, lr):
    m = heavy_ball(state, g)
    u = g + 0.95 * m
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-8), QUINTIC), u)
    return w - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * o


def turbo(w, g, state, t, lr):
    """AOL tells rows from columns: of a square matrix the rows are inputs in JAX, outputs there."""

    def iterate(x):
        d = 1 / np.sqrt(np.maximum(np.sum(np.abs(x @ x.T), axis=1, keepdims=True), 1e-7))
        return newton_schulz(d * x, AOL)

    m = ema(state, g)
    u = 0.05 * g + 0.95 * m
    o = iterate(u.T).T if w.shape[0] >= w.shape[1] else iterate(u)
    return w - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * o


def moe_fp16(w, g, state, t, lr):
    triples = [(a / 1.02, b / 1.02, c / 1.02) for a, b, c in SIMPLE]
    m = heavy_ball(state, g)
    u = g + 0.95 * m
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-7), triples), u)
    return w * (1 - lr * 0.01) - lr * 0.2 * math.sqrt(max(w.shape)) * o


def megatron(w, g, state, t, lr):
    w = w - lr * 0.01 * w
    u = ema(state, g)
    o = on_wide(lambda x: newton_schulz(x / max(np.linalg.norm(x), 1e-15), QUINTIC), u)
    return w - lr * math.sqrt(max(w.shape)) * o


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


def kimi_k3(w, g, state, t, lr):
    u = heavy_ball(state, g)
    o = on_wide(lambda x: newton_schulz(x / (np.linalg.norm(x) + 1e-7), SIMPLE), u)
    return w - lr * (0.2 * math.sqrt(max(w.shape)) * o + 0.1 * w)


def on_sphere(w, u, lr):
    """The norm of w, and the direction that is lr along -u."""
    moved = w - lr * u * np.linalg.norm(w) / max(np.linalg.norm(u), 1e-10)
    return moved / max(np.linalg.norm(moved), 1e-10) * np.linalg.norm(w)


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
    "kimi_k3": (kimi_k3, adamw_of_moonlight),
    "glm5": (moonlight, adamw_of_moonlight),
    "muonh": (muonh, adamw(0.95, 1e-8, 0.0)),
}
ON_THE_HEAD = {"muonh": adamh}
