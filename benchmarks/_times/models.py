"""Models for whole updates: the shapes of their parameters, by name."""

import itertools
from collections.abc import Iterator

from optax.contrib import MuonDimensionNumbers

from muon_jax._matrices.views import parts_of

type Shapes = dict[str, tuple[int, ...]]


def _repeated_layers(count: int, layer: Shapes) -> Shapes:
    return {f"layer_{i}/{name}": shape for i in range(count) for name, shape in layer.items()}


# Of `--quick`.
QUICK_MODEL = "2-layers"
# Of `muon` on one device.
ON_ONE_DEVICE = (
    "gpt2-small",
    "24-layers",
    "qwen3-30b-a3b-experts",
    "moe100m",
    "cifar10",
    "brax-ppo",
)

MODELS: dict[str, Shapes] = {
    # Each parameter on its own, 124M in all. The output head is the token embedding.
    "gpt2-small": {
        "embedding/token": (50257, 768),
        "embedding/position": (1024, 768),
        **_repeated_layers(
            12,
            {
                "norm_1/scale": (768,),
                "norm_1/bias": (768,),
                "attention/qkv": (768, 2304),
                "attention/qkv_bias": (2304,),
                "attention/out": (768, 768),
                "attention/out_bias": (768,),
                "norm_2/scale": (768,),
                "norm_2/bias": (768,),
                "mlp/up": (768, 3072),
                "mlp/up_bias": (3072,),
                "mlp/down": (3072, 768),
                "mlp/down_bias": (768,),
            },
        ),
        "norm/scale": (768,),
        "norm/bias": (768,),
    },
    # The matrices of 24 layers of width 2048, 1.2B in all.
    "24-layers": _repeated_layers(
        24,
        {
            **{name: (2048, 2048) for name in ("q", "k", "v", "o")},
            "up": (2048, 8192),
            "down": (8192, 2048),
        },
    ),
    # The matrices of 26 layers of width 2560, 2.0B in all.
    "26-layers": _repeated_layers(
        26,
        {
            **{name: (2560, 2560) for name in ("q", "k", "v", "o")},
            "up": (2560, 10240),
            "down": (10240, 2560),
        },
    ),
    # The matrices of marin's 26 layers of width 2560 with 256 experts, 66B in all; see issue 6493
    # of marin-community/marin. And with the 32 experts that one of eight GPUs has, 9.2B in all.
    **{
        f"marin-{experts}-experts": _repeated_layers(
            26,
            {
                "experts/gate_up": (experts, 2560, 2560),
                "experts/down": (experts, 1280, 2560),
                "attention/q": (2560, 2560),
                "attention/k": (2560, 640),
                "attention/v": (2560, 640),
                "attention/o": (2560, 2560),
                **{
                    f"{norm}/{name}": shape
                    for norm in ("attention_norm", "mlp_norm")
                    for name, shape in (("down", (2560, 128)), ("up", (128, 2560)))
                },
                "shared/gate": (2560, 2560),
                "shared/up": (2560, 2560),
                "shared/down": (2560, 2560),
            },
        )
        for experts in (256, 32)
    },
    # The experts of one layer, stacked, 604M in all.
    "qwen3-30b-a3b-experts": {
        "gate": (128, 2048, 768),
        "up": (128, 2048, 768),
        "down": (128, 768, 2048),
    },
    # The matrices of moe100m, whose Muon takes all of one shape together, 204M in all.
    "moe100m": {
        f"{name}_{i}": shape
        for name, count, shape in (
            ("experts/in", 200, (512, 1280)),
            ("experts/out", 100, (1280, 512)),
            ("attention/q_and_o", 24, (512, 512)),
            ("attention/k_and_v", 24, (512, 128)),
        )
        for i in range(count)
    },
    # The network of examples/cifar10.ipynb, 2.0M in all.
    "cifar10": {
        "whitening_bias": (24,),
        "head/kernel": (256, 10),
        **{
            f"group_{i}/{name}": shape
            for i, (given, channels) in enumerate([(24, 64), (64, 256), (256, 256)])
            for name, shape in {
                "conv_0": (3, 3, given, channels),
                "norm_0": (channels,),
                "conv_1": (3, 3, channels, channels),
                "norm_1": (channels,),
            }.items()
        },
    },
    # Brax's networks of PPO for the environment "ant", 0.3M in all.
    "brax-ppo": {
        f"{network}/hidden_{i}/{name}": shape
        for network, sizes in {
            "policy": (27, 32, 32, 32, 32, 16),
            "value": (27, 256, 256, 256, 256, 256, 1),
        }.items()
        for i, (rows, cols) in enumerate(itertools.pairwise(sizes))
        for name, shape in {"kernel": (rows, cols), "bias": (cols,)}.items()
    },
    # Every kind of parameter, 3.1M in all.
    QUICK_MODEL: {
        "embedding": (4096, 256),
        **_repeated_layers(
            2,
            {
                "norm": (256,),
                **{name: (256, 256) for name in ("q", "k", "v", "o")},
                "up": (256, 1024),
                "down": (1024, 256),
            },
        ),
        "experts": (4, 256, 512),
    },
}


def dimension_numbers(shapes: Shapes) -> dict[str, MuonDimensionNumbers | None]:
    """Returns the matrices of each parameter; None, AdamW, for embeddings, heads and vectors."""

    def numbers(name: str, shape: tuple[int, ...]) -> MuonDimensionNumbers | None:
        if len(shape) == 1 or name.startswith(("embedding", "head")) or 1 in shape:
            return None
        return MuonDimensionNumbers((0, 1, 2) if len(shape) == 4 else -2, -1)

    return {name: numbers(name, shape) for name, shape in shapes.items()}


def stacks_of_matrices(shapes: Shapes) -> Iterator[tuple[int, int, int]]:
    """Yields how many matrices each parameter has, and their sizes, m ≤ n."""
    for name, numbers in dimension_numbers(shapes).items():
        if numbers is not None:
            (part,) = parts_of(numbers, shapes[name])
            batch, *sizes = part.stack
            m, n = sorted(sizes)
            yield batch, m, n


def flops_of_quintic_step(shapes: Shapes) -> int:
    """Returns the FLOPs of one quintic step of all matrices, 4m²n + 2m³ each."""
    return sum(b * (4 * m**2 * n + 2 * m**3) for b, m, n in stacks_of_matrices(shapes))
