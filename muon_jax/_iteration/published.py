"""Published coefficients (a, b, c) of quintic steps, by name.

The first line above each set says who made it, where it was published, and when.
"""

from typing import Literal

type _Rows = tuple[tuple[float, float, float], ...]


DEFAULT_STEPS = 5  # the default of ns_steps, here as in optax

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
