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
_FAST = Schedule(  # (128), l = 0.01
    "fast",
    steps=(
        Step(
            (
                Product(3.0295891, ((-3.8731001, 0),), 1.0),
                Product(2.0160692, (), -1.0160692),
                Product(
                    1.3869874,
                    (
                        (-0.40683299, 0),
                        (0.17303287, 1),
                    ),
                    -0.56002031,
                ),
                Product(1.9998306, (), -0.99983063),
                Product(
                    0.52168956,
                    (
                        (-0.32700029, 2),
                        (0.80697538, 4),
                    ),
                    -0.0016646475,
                ),
                Product(1.2102133, (), -0.21021328),
                Product(
                    68.847536,
                    (
                        (8.3869327, 2),
                        (10.774919, 5),
                    ),
                    6.057465,
                ),
            ),
            (
                -3.8731001,
                4.0321384,
            ),
        ),
    ),
    bfloat16_steps=(  # (8, 8), l = 0.004
        Step(
            (
                Product(5.0739476, ((-5.6742143, 0),), 1.0),
                Product(1.4176126, ((0.2330628, 0),), -0.41761262),
                Product(25.313594, ((-0.2240187, 1),), 0.67960599),
            ),
            (-5.6742143,),
        ),
        Step(
            (
                Product(0.1472365, ((-1.0, 0),), 1.0),
                Product(1.0988562, ((-0.072330563, 0),), -0.098856244),
                Product(3.73286, ((0.59642408, 1),), 0.85801646),
            )
        ),
    ),
)

_BALANCED = Schedule(  # (512), l = 0.006
    "balanced",
    steps=(
        Step(
            (
                Product(-3.4911202, ((4.0, 0),), 0.0),
                Product(-3.0959011, ((4.0, 1),), 0.0),
                Product(1.9966703, ((-3.7504596, 2),), 1.0),
                Product(2.0010327, (), -1.0010327),
                Product(1.0421451, ((0.80837572, 4),), -0.85052081),
                Product(
                    0.61250757,
                    (
                        (-0.30826612, 3),
                        (0.99972447, 5),
                    ),
                    -0.30396592,
                ),
                Product(
                    2.2762655,
                    (
                        (-0.57434037, 3),
                        (0.48668338, 5),
                    ),
                    -1.1886086,
                ),
                Product(
                    0.52444708,
                    (
                        (-0.052374759, 0),
                        (-0.13687924, 1),
                        (0.11735201, 3),
                        (0.75030188, 7),
                    ),
                    -0.39210097,
                ),
                Product(
                    118.2429,
                    (
                        (-7.5218694, 0),
                        (-16.540042, 1),
                        (21.768276, 3),
                        (27.782584, 6),
                        (8.124928, 7),
                        (91.599799, 8),
                    ),
                    42.2744,
                ),
            ),
            (
                4.0,
                4.0,
                -3.7504596,
                4.0020654,
            ),
        ),
    ),
    bfloat16_steps=(  # (16, 16), l = 0.003
        Step(
            (
                Product(5.4518464, ((-6.3428142, 0),), 1.0),
                Product(1.5661552, ((-0.043523098, 0),), -0.56615525),
                Product(1.0207766, ((-0.20538739, 0),), -0.020776571),
                Product(38.69368, ((-0.17030278, 2),), 0.72082957),
            ),
            (-6.3275898,),
        ),
        Step(
            (
                Product(0.14338534, ((-0.84808445, 0),), 1.0),
                Product(1.3893835, ((0.083252773, 0),), -0.38938353),
                Product(1.3801958, ((-0.61470197, 1),), 0.23450615),
                Product(5.0758258, ((1.9153818, 1),), 0.27558271),
            )
        ),
    ),
)

_ACCURATE = Schedule(  # (32, 16), l = 0.00175
    "accurate",
    steps=(
        Step(
            (
                Product(6.5369607, ((-7.0124388, 0),), 1.0),
                Product(1.836618, ((0.23258875, 0),), -0.83661805),
                Product(1.5103707, ((0.23821147, 0),), -0.51037068),
                Product(
                    1.4236451,
                    (
                        (0.17647308, 0),
                        (-0.098812541, 1),
                        (-0.074215463, 2),
                    ),
                    -0.25061711,
                ),
                Product(110.83834, (), 1.6566132),
            ),
            (
                -4.8814268,
                3.6320164,
            ),
        ),
        Step(
            (
                Product(0.13212393, ((-0.94735006, 0),), 1.0),
                Product(1.3629027, (), -0.36290273),
                Product(1.0696879, (), -0.069687867),
                Product(
                    5.6492363,
                    (
                        (-0.07915457, 0),
                        (0.56731167, 1),
                        (0.35972382, 2),
                    ),
                    1.1046045,
                ),
            )
        ),
    ),
    bfloat16_steps=(  # (8, 8, 4), l = 0.0008
        Step(
            (
                Product(-3.6084023, ((4.0, 0),), -0.0),
                Product(
                    2.9705205,
                    (
                        (0.23220217, 0),
                        (-4.1111475, 1),
                    ),
                    1.0,
                ),
                Product(28.528707, ((0.045344262, 1),), 1.1162878),
            ),
            (0.89148068,),
        ),
        Step(
            (
                Product(0.10660268, ((-0.79261042, 0),), 1.0),
                Product(1.3738487, ((0.043886202, 0),), -0.37384869),
                Product(11.880311, ((-0.52548999, 1),), 0.84859293),
            ),
            (-0.71985048,),
        ),
        Step(
            (
                Product(0.058735921, ((-0.51455444, 0),), 1.0),
                Product(1.7403261, ((-0.045789166, 0),), 0.67188195),
            )
        ),
    ),
)

SCHEDULES = {schedule.name: schedule for schedule in (_FAST, _BALANCED, _ACCURATE)}
