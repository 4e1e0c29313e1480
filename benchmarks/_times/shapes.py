"""Named sets of matrix shapes: (m, n) or (batch, m, n) with m ≤ n."""

# A weight and its transpose are the same work, so each is listed once, with the smaller side first.
SETS = {
    "squares": (
        "64x64 128x128 256x256 512x512 1024x1024 1536x1536 2048x2048 3072x3072 4096x4096 8192x8192"
    ),
    "ragged": "1001x1500",
    # Attention, MLP; all layers' attention outputs and MLP halves stacked.
    "gpt2-small": "768x768 768x2304 768x3072 12x768x768 24x768x3072",
    # k and v, q and o, MLP.
    "llama3-8b": "1024x4096 4096x4096 4096x14336",
    "qwen3-0.6b": "1024x1024 1024x2048 1024x3072",
    "qwen3-8b": "1024x4096 4096x4096 4096x12288",
    # k and v, q and o, the experts of one layer.
    "qwen3-30b-a3b": "512x2048 2048x4096 128x768x2048",
    # Shapes for which other implementations of Muon publish their times.
    "peers": (
        "896x896 896x1152 2048x2048 2048x2560 2560x4096 3584x3584 3584x4608 4096x4096 2048x8192"
        " 4096x16384 8x2048x2048 16x2048x5464 200x512x1280 24x1024x4096 48x768x768"
    ),
    # The shapes of fused-muon's two tables, and of its report on n ≫ m.
    "fused-muon": (
        "896x1152 896x896 2048x2560 2048x2048 2560x4096 3584x4608 3584x3584 4096x4096 2560x6144"
        " 2560x9728 2048x22016 3584x37888"
    ),
    # From 2.4 to 11 times as wide as high, and those of Kimi K3.
    "wide": ("1024x4096 1024x8192 1536x7168 2048x22016 2560x6144 2560x9728 3584x37888 7168x12288"),
}

# Of `--quick`: a square, a wide matrix, a stack.
QUICK_SHAPES = "256x256 256x1024 4x256x256"


def shapes(word: str) -> list[tuple[int, ...]]:
    """Returns the shapes of a named set, or the one shape that is written out: `"24x1024x4096"`.

    Raises:
        ValueError: `word` is neither.
    """
    result = [tuple(map(int, text.split("x"))) for text in SETS.get(word, word).split()]
    if any(len(shape) not in (2, 3) or min(shape) < 1 for shape in result):
        raise ValueError(f"expected [BATCHx]MxN or one of {sorted(SETS)}, got {word!r}")
    return result
