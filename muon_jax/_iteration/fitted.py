"""The fitted composed schedules: one to three steps X <- h(XXᵀ)·X of high degree.

A step costs a Gram matrix, the k products of h, and the application of h. A quintic step costs a
Gram matrix, one product and the application. On square matrices of size m, in units of one
symmetric product:

| ns_coeffs            | cost |
| -------------------- | ---- |
| "fast"               | 10   |
| "balanced"           | 12   |
| "accurate"           | 15   |
| five quintic steps   | 20   |

On wide matrices the three products with X weigh more, and the schedules save more.

The coefficients are ours. They are fitted jointly by nonlinear least squares in float64, for
singular values in [l, 1] over the Schatten-4 norm, together with the response to the rounding of
every intermediate. `python -m muon_jax.benchmarks coefficients` makes them anew. All |Sⱼ| ≤ 2 and
h ≤ 318 on [0, 1], and R < 6 after the first step, so nothing leaves float16.
"""

from muon_jax._iteration.steps import Product, Schedule, Step

# Beside each set: its degrees, the interval [l, 1] that it was fitted on, its slope at 0 and its
# maximum. No singular value exceeded 1.34 on 14,000 random spectra (m = 48, condition to 1e9, low
# rank, clusters, spikes, rows that repeat, have two lengths or are sums of few signs).
#
# bfloat16 has polynomials of its own, less steep at 0, so that its rounding does not grow. With the
# polynomials for float16, 480 of 2016 spectra exceed 1.5 in bfloat16 under "fast", 813 under
# "balanced", 230 under "accurate".
_FAST = Schedule(  # (128), l = 0.01, slope 91, maximum 1.17
    "fast",
    steps=(
        Step(
            (
                Product(3.1052428, ((-3.9363297, 0),), 1.0),
                Product(2.0041144, (), -1.0041144),
                Product(1.3670261, ((-0.38550149, 0), (0.15459846, 1)), -0.52162455),
                Product(1.9997467, (), -0.99974672),
                Product(0.50650422, ((-0.32946153, 2), (0.80892581, 4)), 0.014031493),
                Product(1.2107756, (), -0.21077557),
                Product(65.909816, ((8.4328706, 2), (10.730156, 5)), 6.0619874),
            ),
            residuals=1,
        ),
    ),
    bfloat16_steps=(  # (8, 8), l = 0.004, slope 141, maximum 1.24
        Step(
            (
                Product(5.1526525, ((-5.7403688, 0),), 1.0),
                Product(1.4113181, ((0.20109088, 0),), -0.41131813),
                Product(25.115161, ((-0.14972012, 1),), 0.67045843),
            ),
            residuals=1,
        ),
        Step(
            (
                Product(0.15206744, ((-1.0, 0),), 1.0),
                Product(1.1611063, ((-0.042022181, 0),), -0.16110629),
                Product(4.1085577, ((0.57993094, 1),), 0.82246562),
            ),
        ),
    ),
)

_BALANCED = Schedule(  # (512), l = 0.006, slope 318, maximum 1.14
    "balanced",
    steps=(
        Step(
            (
                Product(-3.4924588, ((4.0, 0),), 0.0),
                Product(-3.1089363, ((4.0, 1),), 0.0),
                Product(2.0524735, ((-3.8139995, 2),), 1.0),
                Product(2.0027632, (), -1.0027632),
                Product(1.0431912, ((0.80766416, 4),), -0.85085538),
                Product(0.61858193, ((-0.32683381, 3), (0.99573976, 5)), -0.28748787),
                Product(2.2996498, ((-0.60421386, 3), (0.4608366, 5)), -1.1562725),
                Product(
                    0.52956333,
                    ((-0.05127648, 0), (-0.13858826, 1), (0.11735758, 3), (0.75273268, 7)),
                    -0.3996536,
                ),
                Product(
                    121.61318,
                    (
                        (-7.6745307, 0),
                        (-17.36896, 1),
                        (22.983931, 3),
                        (28.307565, 6),
                        (8.3071747, 7),
                        (94.424845, 8),
                    ),
                    42.142067,
                ),
            ),
            residuals=3,
        ),
    ),
    bfloat16_steps=(  # (16, 16), l = 0.003, slope 299, maximum 1.17
        Step(
            (
                Product(5.8162066, ((-6.4671937, 0),), 1.0),
                Product(1.6699444, ((0.2459221, 0),), -0.66994444),
                Product(1.2689888, ((0.15615165, 0),), -0.26898883),
                Product(35.06212, ((-0.22938222, 2),), 0.92611686),
            ),
        ),
        Step(
            (
                Product(0.17862088, ((-1.0, 0),), 1.0),
                Product(1.3435058, ((0.072665305, 0),), -0.34350582),
                Product(1.3558791, ((-0.52843431, 1),), 0.17255521),
                Product(6.1449357, ((1.7320693, 1),), 0.49320067),
            ),
        ),
    ),
)

_ACCURATE = Schedule(  # (32, 16), l = 0.0016, slope 865, maximum 1.16
    "accurate",
    steps=(
        Step(
            (
                Product(6.4958255, ((-6.9970976, 0),), 1.0),
                Product(1.8388393, ((0.22678032, 0),), -0.83883929),
                Product(1.5078785, ((0.22714798, 0),), -0.50787852),
                Product(
                    1.4189795, ((0.17317768, 0), (-0.096281757, 1), (-0.073214986, 2)), -0.24948274
                ),
                Product(108.16171, (), 1.5512189),
            ),
            residuals=1,
        ),
        Step(
            (
                Product(0.14730898, ((-1.0, 0),), 1.0),
                Product(1.357747, (), -0.35774702),
                Product(1.0669597, (), -0.066959693),
                Product(
                    5.8212763, ((-0.085350896, 0), (0.57902656, 1), (0.34839463, 2)), 1.1316638
                ),
            ),
        ),
    ),
    bfloat16_steps=(  # (8, 8, 4), l = 0.001, slope 896, maximum 1.16
        Step(
            (
                Product(5.0885206, ((-5.6384073, 0),), 1.0),
                Product(1.4415407, ((0.23840519, 0),), -0.44154072),
                Product(29.005547, ((0.12843035, 1),), 0.20473108),
            ),
            residuals=1,
        ),
        Step(
            (
                Product(0.16397809, ((-1.0, 0),), 1.0),
                Product(1.3973711, ((0.057005642, 0),), -0.39737114),
                Product(9.1427296, ((-0.16700562, 1),), 0.57388723),
            ),
        ),
        Step(
            (
                Product(0.22619045, ((-1.0, 0),), 1.0),
                Product(2.1929383, ((-0.15200835, 0),), 1.0060728),
            ),
        ),
    ),
)

SCHEDULES = {schedule.name: schedule for schedule in (_FAST, _BALANCED, _ACCURATE)}
