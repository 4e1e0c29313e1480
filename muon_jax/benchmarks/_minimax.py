"""Odd quintics that are best approximations to 1, composed: the published sets of that kind."""

import numpy as np

_CUSHION = 0.02407327424182761  # of the code in the paper on Polar Express
_ODD = np.array([1, 3, 5])
_ALTERNATION = np.array([1.0, -1.0, 1.0, -1.0])
# Between singular values this close, float64 cannot tell the alternation points apart.
_NARROW = 1 - 5e-6


def minimax_quintic(low: float, high: float) -> np.ndarray:
    """Returns the best approximation to 1 on [low, high] among p(σ) = aσ + bσ³ + cσ⁵, as (a, b, c).

    |1 - p| is largest at low, q, r and high, with alternating signs (Chebyshev), where q and r are
    the stationary points of p. Remez' exchange finds them: p for given points solves four linear
    equations, new points are the roots of p'(σ) = a + 3bσ² + 5cσ⁴. On a narrow interval the limit,
    (15, -10, 3)/8 for σ/high. Float64, shape `(3,)`.

    Raises:
        ValueError: unless 0 < low <= high.
    """
    if not 0 < low <= high:
        raise ValueError(f"the interval needs 0 < low <= high, got low={low} and high={high}")
    if low >= _NARROW * high:
        return np.array([15, -10, 3]) / 8 / high**_ODD
    row, error, last = np.zeros(3), 1.0, np.inf
    inner = low + (high - low) * np.array([0.25, 0.75])
    while abs(last - error) > 1e-14:
        points, last = np.array([low, *inner, high]), error
        system = np.column_stack([points[:, None] ** _ODD, _ALTERNATION])
        *row, error = np.linalg.solve(system, np.ones(4))
        a, b, c = row
        root = np.sqrt(9 * b**2 - 20 * a * c)
        inner = np.sqrt((-3 * b + np.array([-root, root])) / (10 * c))
    return np.array(row)


def minimax_quintics(
    low: float, steps: int, cushion: float = 0.0, safety: float = 1.0
) -> np.ndarray:
    """Returns rows (a, b, c), each the best for what the ones before make of [low, 1].

    The composition is the best of all of as many quintics (Polar Express,
    https://arxiv.org/abs/2505.16932; CANS, https://arxiv.org/abs/2506.10935, does the same). With
    a cushion or a safety factor it is nearly so. Float64, shape `(steps, 3)`.

    Args:
        low: the least singular value that is to become 1.
        steps: the number of rows.
        cushion: intervals [l, u] with l < cushion·u are approximated on [cushion·u, u] only, and p
            is scaled to p(l) + p(u) = 2: the polynomials amplify small values by less, and so does
            rounding.
        safety: all rows but the last are those of p(σ/safety), and the following ones account for
            what this changes.
    """
    rows, high = [], 1.0
    for step in range(steps):
        row = minimax_quintic(max(low, cushion * high), high)
        row *= 2 / (_value(row, low) + _value(row, high))
        if step < steps - 1:
            row /= safety**_ODD
        rows.append(row)
        low = _value(row, low)
        high = 2 - low
    return np.array(rows)


def published() -> dict[str, np.ndarray]:
    """Returns the sets of `_coefficients.NAMED` that are compositions of best approximations, anew.

    `NAMED` has as many digits as were published: all of `"polar_express"` and
    `"polar_express_nanogpt"`, of others four decimals.
    """
    paper = minimax_quintics(1e-3, 8, _CUSHION)
    nanogpt = minimax_quintics(1e-3, 5, cushion=0.02, safety=1.02)
    return {
        "polar_express": paper[:5] / 1.05**_ODD,
        "polar_express_nanogpt": np.array([nanogpt[0] / 1.02**_ODD, *nanogpt[1:]]),
        "polar_express_nvidia": np.array([*paper[:-1] / 1.01**_ODD, paper[-1]]),
        "cans": minimax_quintics(1e-3, 5),
    }


def _value(row, sigma):
    return float(row @ sigma**_ODD)
