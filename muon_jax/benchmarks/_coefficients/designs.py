"""The objectives that composed schedules are fitted to; `fit` minimizes them."""

from typing import NamedTuple

type AddendIndices = tuple[tuple[tuple[int, ...], ...], ...]


class Design(NamedTuple):
    """The objective of one schedule; the docstring of `fit` has the formula.

    Attributes:
        addends: for each product of each step, the indices i of the Sᵢ that are added to it.
        low: l, the least singular value that is to become 1.
        noise: the factor of all rounding errors.
        drift: the relative error of a step's output.
        shift: the error of an Sⱼ, relative to its maximum.
        coupling: the error between two directions, relative to the maximum.
        cap: the largest y without a penalty.
        residuals: the number of residuals in the first step.
        start: free coefficients to start from; pass None to start from `greedy` steps.
    """

    addends: AddendIndices
    low: float
    noise: float = 1.0
    drift: float = 0.02
    shift: float = 0.0
    coupling: float = 0.0
    cap: float = 1.25
    residuals: int = 0
    start: tuple[float, ...] | None = None


def _parse_addends(*steps: str) -> AddendIndices:
    """The indices for each step, from a text whose digits are indices; commas separate products."""
    return tuple(tuple(tuple(map(int, digits)) for digits in step.split(",")) for step in steps)


def _parse_numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


# Starts: the ends of fits with less `drift`, `shift` and `coupling`, and fewer residuals. For
# float16 those fits began with all 45 and 25 addends, and left out one after the other.
_BALANCED = _parse_numbers("""
     -3.49  -3.11  2.06  -3.82  2  1.04  0.807  0.62  -0.331  0.994  2.31  -0.606  0.45  0.529
     -0.051  -0.139  0.117  0.753  122  -7.66  -17.4  23.1  28.4  8.3  94.4  41.9
""")
_ACCURATE = _parse_numbers("""
     6.5  -7  1.84  0.224  1.51  0.227  1.42  0.173  -0.0962  -0.0732  108  1.55  0.147  1.36
     1.07  5.82  -0.0854  0.579  0.348  1.13
""")
_FAST_IN_BFLOAT16 = _parse_numbers("""
     5.15  -5.74  1.41  0.201  25.1  -0.15  0.67  0.152  1.16  -0.042  4.11  0.58  0.822
""")
_BALANCED_IN_BFLOAT16 = _parse_numbers("""
     5.82  -6.47  1.67  0.246  1.27  0.156  35.1  -0.229  0.926  0.179  1.34  0.0727  1.36
     -0.528  6.14  1.73  0.493
""")
_ACCURATE_IN_BFLOAT16 = _parse_numbers("""
     5.09  -5.64  1.44  0.238  29  0.128  0.205  0.164  1.4  0.057  9.14  -0.167  0.574  0.226
     2.19  -0.152  1.01
""")

# By name and dtype.
DESIGNS = {
    ("fast", "float16"): Design(_parse_addends("0,,01,,24,,25"), 0.01, 0.2, residuals=1),
    ("fast", "bfloat16"): Design(
        _parse_addends("0,0,1", "0,0,1"),
        0.004,
        1.5,
        0.1,
        shift=4e-3,
        coupling=4e-3,
        residuals=1,
        start=_FAST_IN_BFLOAT16,
    ),
    ("balanced", "float16"): Design(
        _parse_addends("0,1,2,,4,35,35,0137,013678"),
        0.006,
        0.1,
        shift=3.5e-4,
        coupling=3.5e-4,
        cap=1.13,
        residuals=3,
        start=_BALANCED,
    ),
    ("balanced", "bfloat16"): Design(
        _parse_addends("0,0,0,2", "0,0,1,1"),
        0.003,
        3.0,
        0.03,
        shift=5e-3,
        coupling=6.5e-3,
        start=_BALANCED_IN_BFLOAT16,
    ),
    ("accurate", "float16"): Design(
        _parse_addends("0,0,0,012,", "0,,,012"),
        0.0016,
        1.0,
        shift=3.5e-4,
        coupling=3.5e-4,
        cap=1.2,
        residuals=1,
        start=_ACCURATE,
    ),
    ("accurate", "bfloat16"): Design(
        _parse_addends("0,0,1", "0,0,1", "0,0"),
        0.001,
        3.0,
        0.08,
        shift=4e-3,
        residuals=1,
        start=_ACCURATE_IN_BFLOAT16,
    ),
}
