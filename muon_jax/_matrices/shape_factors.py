"""Factors of updates that depend on the shape of a matrix alone."""

import math
from typing import Literal

type ShapeScale = Literal["clipped_ratio", "ratio", "none"]
type ScaleOfBlocks = Literal["clipped_ratio", "ratio", "none", "longer_side"]


def shape_factor(scale: ScaleOfBlocks, fan_in: int, fan_out: int) -> float:
    """Returns the factor of the update of a matrix of `fan_in` rows and `fan_out` columns.

    Args:
        scale: `"clipped_ratio"` is √max(1, fan_out/fan_in), `"ratio"` √(fan_out/fan_in), `"none"`
            1, and `"longer_side"` √max(fan_in, fan_out).
        fan_in: the number of rows.
        fan_out: the number of columns.
    """
    ratio = fan_out / max(fan_in, 1)
    squares = {
        "clipped_ratio": max(1.0, ratio),
        "ratio": ratio,
        "none": 1.0,
        "longer_side": max(fan_in, fan_out),
    }
    return math.sqrt(squares[scale])
