"""The products of an iteration, and what they cost."""

import math
from typing import NamedTuple

# Of an H200: the FLOPs of products per µs, the bytes per µs of passes and small products, and the
# µs of a launch. Fitted to 136 measured times of both forms, from 896×896 to 16×2048×5464, which
# the model meets within 7% (RMS). Of 26 pairs of forms the model mistakes the faster in one
# (2048×3072, by 5%). Only ratios decide, and ratios differ less between devices.
_FLOPS, _BYTES, _LAUNCH = 671e6, 3.42e6, 3.95


class Products(NamedTuple):
    """How many products of each kind an iteration on (m, n) matrices has.

    Attributes:
        grams: XXᵀ, of which half is computed.
        squares: of m × m matrices, half computed, most with an addend.
        applications: of an m × m matrix to X.
        mixed: symmetric products of two m × m matrices, half computed, with an addend.
    """

    grams: int
    squares: int
    applications: int
    mixed: int = 0

    def units(self, aspect: float) -> float:
        """Returns the FLOPs for n = aspect·m; the unit is one symmetric m × m product."""
        return self.squares + self.mixed + aspect * (self.grams + 2 * self.applications)

    def microseconds(self, shape: tuple[int, ...]) -> float:
        """Returns a model's time for stacks `(..., m, n)` of 16-bit matrices.

        A product takes √(t² + t'²). The time t is that of its FLOPs, t' that of its operands and
        result.
        """
        *batch, m, n = shape
        square, wide = (2 * math.prod(batch) * m * size for size in (m, n))  # bytes

        def time(flops: float, num_bytes: float) -> float:
            return _LAUNCH + math.hypot(flops / _FLOPS, num_bytes / _BYTES)

        return (
            self.grams * time(m * wide / 2, wide + square)
            + self.squares * time(m * square / 2, 3 * square)
            + self.mixed * time(m * square / 2, 4 * square)
            + self.applications * time(m * wide, 2 * wide + square)
        )
