"""What `ns_coeffs` and `ns_steps` stand for: coefficients by name, and the schedule of any.

The names are of published triples, and of composed schedules that were fitted here.

A published set has triples (a, b, c) of quintic steps. The first line above each says who made it,
where it was published, and when.

A fitted schedule has one to three steps X <- h(XXᵀ)·X of high degree. A step costs a Gram matrix,
the k products of h, and the application of h. A quintic step costs a Gram matrix, one product and
the application. On square matrices of size m, in units of one symmetric product:

| ns_coeffs            | cost |
| -------------------- | ---- |
| "fast"               | 10   |
| "balanced"           | 12   |
| "accurate"           | 15   |
| five quintic steps   | 20   |

On wide matrices the three products with X weigh more, and the schedules save more.

These coefficients are ours. They are fitted jointly by nonlinear least squares in float64, for
singular values in [l, 1] over the Schatten-4 norm, together with the response to the rounding of
every intermediate, and with the worst that rounding can do. `python -m benchmarks
coefficients` recomputes them. All |Sⱼ| ≤ 3.1 and h ≤ 304 on [0, 1], and R < 6 after the first step,
so nothing leaves float16.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from muon_jax._iteration.steps import DEFAULT_STEPS, Product, Schedule, Step, Triple, is_traced
from pallas_kernels.arguments import check_name, is_real

type _Rows = tuple[tuple[float, float, float], ...]


_STANDARD = (3.4445, -4.7750, 2.0315)
_DION = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def _for_larger(rows: _Rows, factor: float) -> _Rows:
    """Returns the triples of p(σ/factor): safe for singular values up to `factor`, not only 1."""
    return tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in rows)


# Each maps singular values in (0, 1] close to 1, so X must enter with spectral norm at most 1.
NAMED: dict[str, _Rows] = {
    # By Keller Jordan, https://kellerjordan.github.io/posts/muon/, 2024.
    # One triple for every step. The steepest slope at 0 whose limit stays within about [0.7, 1.2].
    # No safety factor.
    "standard": (_STANDARD,),
    # By Keller Jordan, as above. The author of the division by 1.02 is not known.
    # All three are divided, as a float16 Muon for mixtures of experts has it: the map, not its
    # argument, is 1.02 times smaller.
    "standard_1.02": ((3.4445 / 1.02, -4.7750 / 1.02, 2.0315 / 1.02),),
    # By Jiacheng You, https://x.com/YouJiacheng/status/1905861218138804534, 2025.
    # So gram-newton-schulz credits it. Emerging-Optimizers credits the fit to Franz Louis Cesista,
    # https://leloykun.github.io/ponder/muon-opt-coeffs/, 2025, and the numbers to modded-nanogpt.
    # The name is that of https://github.com/microsoft/dion, which ships the set and did not make
    # it. Others call it "quintic". No safety factor.
    "dion": _DION,
    # By Noah Amsel, David Persson, Christopher Musco and Robert Gower, arXiv 2505.16932, 2025.
    # Polar Express as https://github.com/Dao-AILab/gram-newton-schulz has it: minimax composition,
    # safety factor 1.05 in every row.
    "polar_express": _for_larger(
        (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        ),
        1.05,
    ),
    # By the authors of "polar_express", in https://github.com/KellerJordan/modded-nanogpt, 2025.
    # Also in dion. Safety factor 1.02, in the rows and once more in the norm that they divide X by,
    # which here is in the first row.
    "polar_express_nanogpt": (
        *_for_larger(((8.156554524902461, -22.48329292557795, 15.878769915207462),), 1.02),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # By the authors of "polar_express", in NVIDIA's Emerging-Optimizers, 2025.
    # https://github.com/NVIDIA-NeMo/Emerging-Optimizers: safety factor 1.01 in the rows. Its own
    # default is the first five.
    "polar_express_nvidia": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # By Ekaterina Grishina, Matvey Smirnov and Maxim Rakhuba, arXiv 2506.10935, 2025.
    # CANS: composed Chebyshev-type polynomials. No safety factor: it diverges from 1.01 on, where
    # Polar Express maps to 1, and so where 16 bits round.
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    # By DeepSeek-AI, report of DeepSeek-V4, 2026.
    # Eight standard steps, and two that converge. No safety factor.
    "deepseek_v4": (_STANDARD,) * 8 + ((2.0, -1.5, 0.5),) * 2,
    # By Thibaut Boissin and others, Turbo-Muon, arXiv 2512.04632, 2025.
    # Found by a genetic algorithm, for preconditioning="aol". No safety factor.
    "aol": (
        (4.6051, -9.6552, 5.6769),
        (4.7505, -6.0861, 2.1790),
        (2.7763, -2.3190, 0.5523),
        (2.4231, -2.2861, 0.8193),
    ),
    # By Thibaut Boissin, https://github.com/thib-s/flash-newton-schulz, 2025.
    # The set "aol" of Emerging-Optimizers, which credits it so, for preconditioning="aol". No
    # safety factor. As published: the first step, and so the map, is negative for σ > 0.8837, and
    # -0.99 at 1, so that a matrix of rank one becomes about minus its polar factor.
    "aol_nvidia": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    # By Hua Huang, "How Much Orthogonalization Does Muon Need?", arXiv 2606.00371, 2026.
    # Five cubic steps (c = 0), up to 1.30. No safety factor. Here a step costs as much as any.
    "cubic": (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
}


# What rounding makes diverge, and from which dtypes.
# "cans" diverges in the gram form in any: on 48 and 231 of 1400 random spectra in float16 and
# bfloat16, and on 3 of 10,000 in the gram form in float32. "polar_express_nvidia" has too small a
# safety factor for bfloat16: a search found a matrix of signs, of four lengths, that becomes
# infinite (tests/benchmarks/test_adversary.py).
DIVERGING: dict[str, Literal["bfloat16", "16 bits"]] = {
    "cans": "16 bits",
    "polar_express_nvidia": "bfloat16",
}
# What has noise in bfloat16. Searches found singular values of 3.2, 1.6, 57 and 3.1 without it
# (docs/numerics.md, section 3.7).
NOISY = frozenset({"aol", "aol_nvidia", "deepseek_v4", "polar_express_nanogpt"})

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


type NSCoeffs = str | Triple | tuple[Triple, ...]

MOST_STEPS = 100  # each step is traced by itself


def canonicalize(name: str, coefficients: Any) -> Any:
    """Returns the coefficients as a name or nested tuples of floats, which hash, or traced.

    Args:
        name: of the argument.
        coefficients: its value.

    Raises:
        TypeError: a dict or a callable.
        ValueError: an unknown name; a wrong shape or more than `MOST_STEPS` rows; or a coefficient
            is no finite real number, or a ≤ 0 in a triple (a, b, c), which would turn small
            singular values around.
    """
    if isinstance(coefficients, str):
        check_name(name, coefficients, sorted({*NAMED, *SCHEDULES}))
        return coefficients
    if isinstance(coefficients, Mapping) or callable(coefficients):
        raise TypeError(
            f"{name} of one matrix must be a name, a triple or a table of triples, got"
            f" {coefficients!r}: pass coefficients by path to muon or scale_by_muon"
        )
    traced = is_traced(coefficients)
    given = jnp.asarray(coefficients) if traced else np.asarray(coefficients, object)
    shape = given.shape
    if len(shape) not in (1, 2) or shape[-1] != 3 or not 1 <= shape[0] <= MOST_STEPS:
        raise ValueError(
            f"{name} must be a name, or have shape (3,) or (steps, 3) with at most"
            f" {MOST_STEPS} steps, got {shape}"
        )
    if isinstance(given, jax.Array):
        return given
    values = given.astype(np.float64) if all(map(is_real, given.flat)) else np.array([np.nan])
    if not np.isfinite(values).all() or (values[..., 0] <= 0).any():
        raise ValueError(
            f"{name} must be finite real numbers (a, b, c) with a > 0, got"
            f" {coefficients}: pass (3.4445, -4.775, 2.0315), for example"
        )
    return (*map(tuple, values.tolist()),) if values.ndim == 2 else tuple(values.tolist())


def resolve_schedule(
    ns_coeffs: Any, ns_steps: int | jax.Array = DEFAULT_STEPS, preconditioning: str = "frobenius"
) -> Schedule:
    """Returns the steps that `ns_coeffs` and `ns_steps` stand for.

    | ns_coeffs                  | steps                                                 |
    | -------------------------- | ----------------------------------------------------- |
    | a triple, or a name of one | the triple, `ns_steps` times                          |
    | a table of the caller's    | its rows, whatever `ns_steps` says                    |
    | a name of several rows     | all rows for 5, the default; else the last `ns_steps` |
    | a composed schedule        | the schedule, whole                                   |

    Args:
        ns_coeffs: canonical, or traced.
        ns_steps: a number, which may be traced.
        preconditioning: as for `newton_schulz`.

    Raises:
        ValueError: a number of steps that the coefficients do not have, or a preconditioning beside
            a composed schedule, which brings its own.
    """
    if isinstance(ns_steps, Tracer):
        ns_steps = ns_steps.astype(jnp.int32)  # schedules of optax make floats
    else:
        ns_steps = int(ns_steps)
    if not isinstance(ns_coeffs, str):
        rows = ns_coeffs if np.ndim(ns_coeffs) == 2 else [ns_coeffs]
        return _of_rows(rows, len(rows) if np.ndim(ns_coeffs) == 2 else ns_steps)
    if ns_coeffs in SCHEDULES:
        return _composed(SCHEDULES[ns_coeffs], ns_steps, preconditioning)
    rows = NAMED[ns_coeffs]
    if len(rows) > 1 and not isinstance(ns_steps, Tracer):
        if ns_steps == DEFAULT_STEPS:
            ns_steps = len(rows)
        if ns_steps > len(rows):
            raise ValueError(
                f"ns_coeffs={ns_coeffs!r} has {len(rows)} steps, got ns_steps={ns_steps}: pass"
                f" fewer steps, {DEFAULT_STEPS} (the default) for all, or a table with a row for"
                " each"
            )
        rows = rows[len(rows) - ns_steps :]
    return _of_rows(rows, ns_steps, ns_coeffs)


def _of_rows(rows: Sequence[Any], count: int | jax.Array, name: str = "") -> Schedule:
    """The last `count` of these rows, or the only row `count` times."""
    steps, loop = tuple(Step.of_triple(*row) for row in rows), None
    if not isinstance(count, Tracer):
        steps = steps * count if len(rows) == 1 else steps
    elif len(rows) == 1:
        loop = 0, count
    else:
        first = jnp.where(count == DEFAULT_STEPS, 0, jnp.maximum(len(rows) - count, 0))
        loop = first, len(rows)
    noisy = None
    if name in NOISY:
        noisy = (Step.of_triple(*rows[0], noisy=1), *steps[1:])
    return Schedule(steps, noisy, name, DIVERGING.get(name), loop, is_traced((rows, count)))


def _composed(schedule: Schedule, ns_steps: int | jax.Array, preconditioning: str) -> Schedule:
    count = len(schedule.steps)
    if not isinstance(ns_steps, Tracer) and ns_steps not in (DEFAULT_STEPS, count):
        raise ValueError(
            f"ns_coeffs={schedule.name!r} is a whole of {count} step(s), none of which can be left"
            f" out or repeated, got ns_steps={ns_steps}: leave ns_steps at its default,"
            f" {DEFAULT_STEPS}"
        )
    if preconditioning != "frobenius":
        raise ValueError(
            f"ns_coeffs={schedule.name!r} is made for its own normalization, by the Schatten-4"
            f" norm, got preconditioning={preconditioning!r}: leave it at its default, 'frobenius'"
        )
    return schedule
