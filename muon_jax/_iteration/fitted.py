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

_ACCURATE = Schedule(  # (32, 16), l = 0.0018, slope 850, maximum 1.17
    "accurate",
    steps=(
        Step(
            (
                Product(6.3516617, ((-6.9221884, 0),), 1.0),
                Product(1.8113604, ((0.20062383, 0),), -0.81136037),
                Product(1.4764537, ((0.1935485, 0),), -0.47645368),
                Product(
                    1.4371727, ((0.12087051, 0), (-0.10921486, 1), (-0.11298863, 2)), -0.21496918
                ),
                Product(108.2512, (), 1.5823618),
            ),
            (-5.4337433, 3.3871935),
        ),
        Step(
            (
                Product(0.14463345, ((-1.0, 0),), 1.0),
                Product(1.3903004, (), -0.3903004),
                Product(1.0867114, (), -0.086711382),
                Product(
                    6.1181148, ((-0.082246737, 0), (0.60077529, 1), (0.35181162, 2)), 1.1314295
                ),
            )
        ),
    ),
    bfloat16_steps=(  # (8, 8, 4), l = 0.0008, slope 898, maximum 1.19
        Step(
            (
                Product(-3.6064188, ((4.0, 0),), 0.0),
                Product(2.9765563, ((0.23283684, 0), (-4.116957, 1)), 1.0),
                Product(25.757458, ((-0.017125758, 1),), 1.0482623),
            ),
            (0.9931867,),
        ),
        Step(
            (
                Product(0.17007242, ((-1.0, 0),), 1.0),
                Product(1.3724938, ((0.055784679, 0),), -0.37249375),
                Product(9.5457975, ((-0.43841138, 1),), 0.68690809),
            ),
            (-0.74124661,),
        ),
        Step(
            (
                Product(0.22332764, ((-1.0, 0),), 1.0),
                Product(2.4148375, ((-0.12414213, 0),), 0.93862785),
            )
        ),
    ),
)

SCHEDULES = {schedule.name: schedule for schedule in (_FAST, _BALANCED, _ACCURATE)}
