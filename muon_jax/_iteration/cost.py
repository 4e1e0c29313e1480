"""The products of an iteration, and what they cost."""

import math
from typing import NamedTuple

# Of an H200, in units per µs: the FLOPs of products, the bytes that passes and small products move;
# and µs per launch. Fitted to 136 measured times of both forms, from 896×896 to 16×2048×5464, which
# the model meets within 7% (RMS). Of 26 pairs of forms it mistakes the faster in one (2048×3072, by
# 5%). Other devices differ less in the ratios, which decide.
_FLOPS, _BYTES, _LAUNCH = 671e6, 3.42e6, 3.95


class Products(NamedTuple):
    """How many products of each kind an iteration on (m, n) matrices has.

    Attributes:
        grams: XXᵀ, by half.
        squares: of m × m matrices, by half, most with an addend.
        applications: of an m × m matrix to X.
        mixed: symmetric products of two m × m matrices, by half, with an addend.
    """

    grams: int
    squares: int
    applications: int
    mixed: int = 0

    def units(self, aspect: float) -> float:
        """Returns the FLOPs for n = aspect·m, in symmetric products of m × m matrices."""
        return self.squares + self.mixed + aspect * (self.grams + 2 * self.applications)

    def microseconds(self, shape: tuple[int, ...]) -> float:
        """Returns a model's time for stacks `(..., m, n)` of 16-bit matrices.

        A product takes √(t² + t'²) for the time t of its FLOPs and t' of its operands and result.
        """
        *batch, m, n = shape
        square, wide = (2 * math.prod(batch) * m * size for size in (m, n))  # bytes

        def time(flops, num_bytes):
            return _LAUNCH + math.hypot(flops / _FLOPS, num_bytes / _BYTES)

        return (
            self.grams * time(m * wide / 2, wide + square)
            + self.squares * time(m * square / 2, 3 * square)
            + self.mixed * time(m * square / 2, 4 * square)
            + self.applications * time(m * wide, 2 * wide + square)
        )
