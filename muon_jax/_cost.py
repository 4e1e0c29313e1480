"""The products of an iteration, and what they cost."""

import math
from typing import NamedTuple

# Of an H200, in units per µs: the FLOPs of products, the bytes that passes and small products move;
# and µs per launch. Fitted to 105 measured times of both forms, from 896×896 to 16×2048×5464, which
# the model meets within 12% (RMS). Other devices differ less in the ratios, which decide.
_FLOPS, _BYTES, _LAUNCH = 650e6, 3.5e6, 2.5
# Of four H200s on NVLink, bytes per µs and µs, from the time of one update in which 302 MB a device
# were exchanged.
_EXCHANGE_BYTES, _EXCHANGE_LAUNCH = 250e3, 20.0


class Products(NamedTuple):
    """How many products of each kind an iteration on (m, n) matrices has.

    Attributes:
        grams: XXᵀ, by half.
        squares: symmetric products of m × m matrices, by half, most with an addend.
        fulls: other products of m × m matrices.
        applications: of an m × m matrix to X.
        passes: elementwise, over m × m matrices.
    """

    grams: int
    squares: int
    fulls: int = 0
    applications: int = 0
    passes: int = 0

    def units(self, aspect: float) -> float:
        """Returns the FLOPs for n = aspect·m, in symmetric products of m × m matrices."""
        return self.squares + 2 * self.fulls + aspect * (self.grams + 2 * self.applications)

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
            + self.fulls * time(m * square, 3 * square)
            + self.applications * time(m * wide, 2 * wide + square)
            + self.passes * time(0, 4 * square)
        )


def exchange_microseconds(num_bytes: float) -> float:
    """Returns a model's time for an all-to-all among H200s of one host, per device's bytes sent."""
    return _EXCHANGE_LAUNCH + num_bytes / _EXCHANGE_BYTES
