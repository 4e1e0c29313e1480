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
every intermediate, and with the worst that rounding can do. `python -m muon_jax.benchmarks
coefficients` makes them anew. All |Sⱼ| ≤ 3 and h ≤ 310 on [0, 1], and R < 6 after the first step,
so nothing leaves float16.
"""

from muon_jax._iteration.steps import Product, Schedule, Step

# Beside each set: its degrees, the interval [l, 1] that it was fitted on, its slope at 0 and its
# maximum. bfloat16 has polynomials of its own, less steep at 0, so that its rounding does not grow.
# What searches and random spectra reach: docs/numerics.md, sections 3.4 and 3.7.
_FAST = Schedule(  # (128), l = 0.01, slope 95, maximum 1.18
    "fast",
    steps=(
        Step(
            (
                Product(3.0871015, ((-3.9225797, 0),), 1.0),
                Product(1.993737, (), -0.993737),
                Product(1.4121365, ((-0.39044308, 0), (0.1108906, 1)), -0.52302713),
                Product(3.7155703, (), -2.7155703),
                Product(0.15259858, ((-0.3266556, 2), (0.69466762, 4)), 0.4793894),
                Product(1.2118398, (), -0.21183975),
                Product(69.27935, ((8.5854785, 2), (10.876528, 5)), 6.0111787),
            ),
            (-3.9572693, 3.9860272),
        ),
    ),
    bfloat16_steps=(  # (8, 8), l = 0.004, slope 136, maximum 1.24
        Step(
            (
                Product(5.0034918, ((-5.6461852, 0),), 1.0),
                Product(1.4098188, ((0.19987704, 0),), -0.40981885),
                Product(25.043364, ((-0.2146799, 1),), 0.69883531),
            ),
            (-3.0302079,),
        ),
        Step(
            (
                Product(0.14827838, ((-1.0, 0),), 1.0),
                Product(1.1124074, ((-0.067458676, 0),), -0.11240736),
                Product(3.8630561, ((0.59581684, 1),), 0.85477297),
            )
        ),
    ),
)

_BALANCED = Schedule(  # (512), l = 0.006, slope 310, maximum 1.14
    "balanced",
    steps=(
        Step(
            (
                Product(-3.4467358, ((4.0, 0),), 0.0),
                Product(-3.0644162, ((4.0, 1),), 0.0),
                Product(1.9948114, ((-3.7519268, 2),), 1.0),
                Product(1.9967155, (), -0.99671546),
                Product(1.0438728, ((0.81190295, 4),), -0.85577573),
                Product(0.61201303, ((-0.30813031, 3), (0.99952357, 5)), -0.30340629),
                Product(2.273401, ((-0.57500718, 3), (0.48669558, 5)), -1.1850894),
                Product(
                    0.5243862,
                    ((-0.052598343, 0), (-0.13666606, 1), (0.11738144, 3), (0.75030306, 7)),
                    -0.39207071,
                ),
                Product(
                    118.24339,
                    (
                        (-7.4937643, 0),
                        (-16.573748, 1),
                        (21.755943, 3),
                        (27.787837, 6),
                        (8.124776, 7),
                        (91.598642, 8),
                    ),
                    42.277151,
                ),
            ),
            (3.9762488, 3.9993984, -3.7077159, 0.75010566),
        ),
    ),
    bfloat16_steps=(  # (16, 16), l = 0.003, slope 294, maximum 1.08
        Step(
            (
                Product(5.451714, ((-6.338475, 0),), 1.0),
                Product(1.5642004, ((-0.043759683, 0),), -0.56420037),
                Product(1.0186728, ((-0.20388966, 0),), -0.018672756),
                Product(37.647461, ((-0.09902997, 2),), 0.64614066),
            ),
            (-6.3232029,),
        ),
        Step(
            (
                Product(0.19054037, ((-1.0, 0),), 1.0),
                Product(1.3862887, ((0.084871721, 0),), -0.38628869),
                Product(1.3915629, ((-0.61112613, 1),), 0.21956319),
                Product(5.3377604, ((2.0254872, 1),), 0.34076964),
            )
        ),
    ),
)

_ACCURATE = Schedule(  # (32, 16), l = 0.0018, slope 883, maximum 1.18
    "accurate",
    steps=(
        Step(
            (
                Product(6.3364789, ((-6.9276085, 0),), 1.0),
                Product(1.7800662, ((0.15909818, 0),), -0.78006623),
                Product(1.4225109, ((0.13292135, 0),), -0.42251094),
                Product(
                    1.4566741, ((0.074266857, 0), (-0.12221627, 1), (-0.1517387, 2)), -0.18271918
                ),
                Product(106.3461, (), 1.5424134),
            ),
            (-5.7534572, 3.340283),
        ),
        Step(
            (
                Product(0.14399283, ((-1.0, 0),), 1.0),
                Product(1.3849113, (), -0.38491132),
                Product(1.088164, (), -0.088163976),
                Product(
                    6.1000899, ((-0.081425104, 0), (0.59966811, 1), (0.35530358, 2)), 1.1289555
                ),
            )
        ),
    ),
    bfloat16_steps=(  # (8, 8, 4), l = 0.0008, slope 863, maximum 1.19
        Step(
            (
                Product(-3.6109381, ((4.0, 0),), 0.0),
                Product(2.9390558, ((0.23026769, 0), (-4.0979786, 1)), 1.0),
                Product(25.675836, ((0.075003731, 1),), 0.94962786),
            ),
            (1.1485612,),
        ),
        Step(
            (
                Product(0.16631331, ((-1.0, 0),), 1.0),
                Product(1.3898666, ((0.049016568, 0),), -0.38986658),
                Product(9.4192203, ((-0.15698208, 1),), 0.56457377),
            ),
            (-0.85120148, 0.52754539),
        ),
        Step(
            (
                Product(0.22393839, ((-1.0, 0),), 1.0),
                Product(2.3020937, ((-0.14428199, 0),), 0.99818487),
            )
        ),
    ),
)

SCHEDULES = {schedule.name: schedule for schedule in (_FAST, _BALANCED, _ACCURATE)}
