"""Computes compositions of odd quintics that are best approximations to 1."""

import numpy as np

_CUSHION = 0.02407327424182761  # from the code in the paper on Polar Express
_ODD = np.array([1, 3, 5])
_ALTERNATION = np.array([1.0, -1.0, 1.0, -1.0])
# Between singular values this close, float64 cannot tell the alternation points apart.
_NARROW = 1 - 5e-6


def minimax_quintic(low: float, high: float) -> np.ndarray:
    """Returns the best approximation to 1 on [low, high] among p(σ) = aσ + bσ³ + cσ⁵, as (a, b, c).

    1 - p is largest in magnitude at low, q, r and high, with alternating signs (Chebyshev). Here q
    and r are the stationary points of p. Remez' exchange finds them in turns: for given points, p
    solves four linear equations; then the roots of p'(σ) = a + 3bσ² + 5cσ⁴ are the new points. On a
    narrow interval the result is the limit, (15, -10, 3)/8 for σ/high.

    Returns:
        Float64, shape `(3,)`.

    Raises:
        ValueError: 0 < low <= high does not hold.
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
    """Returns rows (a, b, c), each the best approximation on the image of [low, 1] so far.

    No composition of as many quintics is closer to 1. With a cushion or a safety factor this holds
    nearly.

    Args:
        low: the least singular value that is to become 1.
        steps: the number of rows.
        cushion: an interval [l, u] with l < cushion·u is approximated on [cushion·u, u] only, and p
            is scaled to p(l) + p(u) = 2. Small values, and rounding errors with them, are then
            amplified by less.
        safety: each row but the last is that of p(σ/safety). The following rows account for it.

    Returns:
        Float64, shape `(steps, 3)`.

    References:
        Polar Express, https://arxiv.org/abs/2505.16932
        CANS, which is the same composition, https://arxiv.org/abs/2506.10935
    """
    rows, high = [], 1.0
    for step in range(steps):
        row = minimax_quintic(max(low, cushion * high), high)
        row *= 2 / (_quintic_value(row, low) + _quintic_value(row, high))
        if step < steps - 1:
            row /= safety**_ODD
        rows.append(row)
        low = _quintic_value(row, low)
        high = 2 - low
    return np.array(rows)


def published_minimax_sets() -> dict[str, np.ndarray]:
    """Computes the sets of `NAMED` that are compositions of best approximations.

    `NAMED` has as many digits as were published: all digits of `"polar_express"` and
    `"polar_express_nanogpt"`, four decimals of the others.

    Returns:
        For each name float64 of shape `(steps, 3)`.
    """
    paper = minimax_quintics(1e-3, 8, _CUSHION)
    nanogpt = minimax_quintics(1e-3, 5, cushion=0.02, safety=1.02)
    return {
        "polar_express": paper[:5] / 1.05**_ODD,
        "polar_express_nanogpt": np.array([nanogpt[0] / 1.02**_ODD, *nanogpt[1:]]),
        "polar_express_nvidia": np.array([*paper[:-1] / 1.01**_ODD, paper[-1]]),
        "cans": minimax_quintics(1e-3, 5),
    }


def _quintic_value(row: np.ndarray, sigma: float) -> float:
    return float(row @ sigma**_ODD)
