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
every intermediate, and with the worst that rounding can do. `python -m benchmarks
coefficients` recomputes them. All |Sⱼ| ≤ 3.1 and h ≤ 304 on [0, 1], and R < 6 after the first step,
so nothing leaves float16.
"""

from muon_jax._iteration.steps import Product, Schedule, Step

# Beside each set: its degrees, the interval [l, 1] that it was fitted on, its slope at 0 and its
# maximum. bfloat16 has polynomials of its own, less steep at 0, so that its rounding does not grow.
# What searches and random spectra reach: docs/numerics.md, sections 3.4 and 3.7.
_FAST = Schedule(  # (128), l = 0.01, slope 95, maximum 1.18
    name="fast",
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
            noisy=2,
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
            noisy=1,
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

_BALANCED = Schedule(  # (512), l = 0.006, slope 303, maximum 1.14
    name="balanced",
    steps=(
        Step(
            (
                Product(-3.3278576, ((4.0, 0),), 0.0),
                Product(-2.9398552, ((4.0, 1),), 0.0),
                Product(1.7730816, ((-3.539167, 2),), 1.0),
                Product(4.0906946, (), -3.0906946),
                Product(0.32637909, ((1.1902842, 4),), -0.51666327),
                Product(0.36241673, ((-0.25784631, 3), (1.0023725, 5)), -0.10694295),
                Product(2.223222, ((-0.51020911, 3), (0.47221404, 5)), -1.1852269),
                Product(
                    0.51837094,
                    ((-0.043388628, 0), (-0.13434259, 1), (0.11942887, 3), (0.75129964, 7)),
                    -0.38909946,
                ),
                Product(
                    116.99513,
                    (
                        (-6.3463996, 0),
                        (-16.272018, 1),
                        (20.110501, 3),
                        (26.009877, 6),
                        (7.9354719, 7),
                        (89.825887, 8),
                    ),
                    42.574239,
                ),
            ),
            (3.9414068, 3.9843427, -3.435501),
            noisy=3,
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
            noisy=1,
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

_ACCURATE = Schedule(  # (32, 16), l = 0.0018, slope 811, maximum 1.16
    name="accurate",
    steps=(
        Step(
            (
                Product(6.2339525, ((-6.8807736, 0),), 1.0),
                Product(1.8030029, ((0.15386278, 0),), -0.80300287),
                Product(1.4120085, ((0.099214114, 0),), -0.41200848),
                Product(
                    1.4275675, ((0.11747907, 0), (-0.10322266, 1), (-0.10868587, 2)), -0.21565896
                ),
                Product(102.35009, (), 1.5240176),
            ),
            (-5.5182691,),
            noisy=1,
        ),
        Step(
            (
                Product(0.14808585, ((-1.0, 0),), 1.0),
                Product(1.3451038, (), -0.34510379),
                Product(1.063643, (), -0.063642975),
                Product(5.7324259, ((-0.08655228, 0), (0.58176355, 1), (0.35860707, 2)), 1.1326001),
            )
        ),
    ),
    bfloat16_steps=(  # (8, 8, 4), l = 0.0008, slope 890, maximum 1.19
        Step(
            (
                Product(-3.6009098, ((4.0, 0),), 0.0),
                Product(2.9185936, ((0.22303905, 0), (-4.0636481, 1)), 1.0),
                Product(26.164557, ((-0.11411393, 1),), 1.2049188),
            ),
            (0.32776203,),
            noisy=2,
        ),
        Step(
            (
                Product(0.16685041, ((-1.0, 0),), 1.0),
                Product(1.386294, ((0.054551672, 0),), -0.38629401),
                Product(9.4654574, ((-0.25965501, 1),), 0.613442),
            ),
            (-0.91932833, 1.4576715),
        ),
        Step(
            (
                Product(0.2259032, ((-1.0, 0),), 1.0),
                Product(2.3186489, ((-0.14887305, 0),), 0.99234843),
            )
        ),
    ),
)

SCHEDULES = {schedule.name: schedule for schedule in (_FAST, _BALANCED, _ACCURATE)}
