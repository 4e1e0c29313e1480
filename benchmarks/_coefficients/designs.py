"""The objectives that composed schedules are fitted to; `fit` minimizes them."""

from typing import NamedTuple

type AddendIndices = tuple[tuple[tuple[int, ...], ...], ...]


class Design(NamedTuple):
    """The objective of one schedule; the docstring of `fit` has the formula.

    Attributes:
        addends: for each product of each step, the indices i of the Sᵢ that are added to it.
        residuals: the number of residuals in each step.
        low: l, the least singular value that is to become 1.
        unit: the unit roundoff u of the dtype.
        noise: the factor of independent rounding errors.
        noisy: the index of the S of the first step that has an addend of noise.
        start: free coefficients to start from.
        vanishing: how many S of the first step are 0 where R is, from S₁ on.
        drift: the relative error of a step's output.
        coupling: the error between two directions, relative to the maximum.
        cap: the largest y without a penalty.
        worst: the errors of the worst case, in units of u and relative to the maximum.
        most: the largest y in the worst case without a penalty.
        spike: the weight of errors where one direction dominates.
    """

    addends: AddendIndices
    residuals: tuple[int, ...]
    low: float
    unit: float
    noise: float
    noisy: int
    start: tuple[float, ...]
    vanishing: int = 0
    drift: float = 0.02
    coupling: float = 0.0
    cap: float = 1.25
    worst: float = 1.0
    most: float = 1.33
    spike: float = 0.5


def _parse_addends(*steps: str) -> AddendIndices:
    """The indices for each step, from a text whose digits are indices; commas separate products."""
    return tuple(tuple(tuple(map(int, digits)) for digits in step.split(",")) for step in steps)


def _parse_numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


# Starts are the ends of earlier fits. The first of those had no worst case and no spike. The first
# of all for float16 had all 45 and 25 addends, and left out one after the other.
_FAST = _parse_numbers("""
     3.0871  -3.92258  1.99374  1.41214  -0.390443  0.110891  3.71557  0.152599  -0.326656
     0.694668  1.21184  69.2793  8.58548  10.8765  6.01118  -3.95727  3.98603
""")
_FAST_IN_BFLOAT16 = _parse_numbers("""
     5.00349  -5.64619  1.40982  0.199877  25.0434  -0.21468  0.698835  -3.03021  0.148278
     1.11241  -0.0674587  3.86306  0.595817  0.854773
""")
_BALANCED = _parse_numbers("""
     -3.32786  -2.93986  1.77308  -3.53917  4.09069  0.326379  1.19028  0.362417  -0.257846
     1.00237  2.22322  -0.510209  0.472214  0.518371  -0.0433886  -0.134343  0.119429  0.7513
     116.995  -6.3464  -16.272  20.1105  26.0099  7.93547  89.8259  42.5742  3.94141  3.98434
     -3.4355
""")
_BALANCED_IN_BFLOAT16 = _parse_numbers("""
     5.45171  -6.33847  1.5642  -0.0437597  1.01867  -0.20389  37.6475  -0.09903  0.646141
     -6.3232  0.19054  1.38629  0.0848717  1.39156  -0.611126  5.33776  2.02549  0.34077
""")
_ACCURATE = _parse_numbers("""
     6.23395  -6.88077  1.803  0.153863  1.41201  0.0992141  1.42757  0.117479  -0.103223
     -0.108686  102.35  1.52402  -5.51827  0.148086  1.3451  1.06364  5.73243  -0.0865523
     0.581764  0.358607  1.1326
""")
_ACCURATE_IN_BFLOAT16 = _parse_numbers("""
     -3.60091  2.91859  0.223039  -4.06365  26.1646  -0.114114  1.20492  0.327762  0.16685
     1.38629  0.0545517  9.46546  -0.259655  0.613442  -0.919328  1.45767  0.225903  2.31865
     -0.148873  0.992348
""")

_FLOAT16, _BFLOAT16 = 2.0**-11, 2.0**-8

# By name and dtype.
DESIGNS = {
    ("fast", "float16"): Design(
        _parse_addends("0,,01,,24,,25"), (2,), 0.01, _FLOAT16, noise=0.2, noisy=2, start=_FAST
    ),
    ("fast", "bfloat16"): Design(
        _parse_addends("0,0,1", "0,0,1"),
        (1, 0),
        0.004,
        _BFLOAT16,
        noise=1.5,
        noisy=1,
        start=_FAST_IN_BFLOAT16,
        drift=0.1,
        coupling=4e-3,
    ),
    ("balanced", "float16"): Design(
        _parse_addends("0,1,2,,4,35,35,0137,013678"),
        (3,),
        0.006,
        _FLOAT16,
        noise=0.1,
        noisy=3,
        start=_BALANCED,
        vanishing=2,
        coupling=3.5e-4,
        cap=1.13,
        worst=0.5,
    ),
    ("balanced", "bfloat16"): Design(
        _parse_addends("0,0,0,2", "0,0,1,1"),
        (1, 0),
        0.003,
        _BFLOAT16,
        noise=3.0,
        noisy=1,
        start=_BALANCED_IN_BFLOAT16,
        drift=0.03,
        coupling=6.5e-3,
        worst=1.2,
        spike=0.7,
    ),
    ("accurate", "float16"): Design(
        _parse_addends("0,0,0,012,", "0,,,012"),
        (1, 0),
        0.0018,
        _FLOAT16,
        noise=1.25,
        noisy=1,
        start=_ACCURATE,
        coupling=3e-4,
        cap=1.2,
        worst=0.8,
        spike=1.3,
    ),
    ("accurate", "bfloat16"): Design(
        _parse_addends("0,01,1", "0,0,1", "0,0"),
        (1, 2, 0),
        0.0008,
        _BFLOAT16,
        noise=3.0,
        noisy=2,
        start=_ACCURATE_IN_BFLOAT16,
        vanishing=1,
        drift=0.05,
        worst=0.6,
        spike=4.0,
    ),
}
