"""Numbers of a training report: best learning rates, differences with intervals, and times."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks._records.reading import Report

_CONFIDENCE, _POWER = 0.95, 0.8
# The factor of the best learning rate in which a parabola is fitted: two rates on each side.
_WITHIN = 2.1
NOT_MUON = ("adamw", "adamw_quarter")


class Trained(NamedTuple):
    """The runs of a variant at a width.

    Attributes:
        curves: the validation losses `(evaluations,)` by learning rate, the smallest first, and by
            seed. They are ∞ where they were not finite.
        best_rate: the learning rate with the least mean final loss, among those with all seeds.
            Where none has all, it is among those with the most seeds.
    """

    curves: Mapping[float, Mapping[int, np.ndarray]]
    best_rate: float

    @property
    def at_the_end(self) -> bool:
        """Whether the best learning rate is the smallest or the largest one tried."""
        return self.best_rate in (min(self.curves), max(self.curves))

    @property
    def final_losses(self) -> dict[int, float]:
        """The final loss at the best learning rate, by seed."""
        return {seed: float(curve[-1]) for seed, curve in self.curves[self.best_rate].items()}

    @property
    def mean_curve(self) -> np.ndarray:
        """The mean over seeds at the best learning rate, shape `(evaluations,)`."""
        return np.mean([*self.curves[self.best_rate].values()], axis=0)


class Noise(NamedTuple):
    """A standard deviation of pair differences, and its degrees of freedom."""

    std: float
    df: int


class Difference(NamedTuple):
    """A mean difference to the first variant; its 95% interval is mean ± half_width."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half_width


class Study(NamedTuple):
    """What a training report holds, by width and variant.

    Attributes:
        report: the report.
        trained: the runs by width and variant, those that were measured.
        pairs: the final losses less those of the first variant, for seeds that both have, by width
            and variant. Each variant is at its own best learning rate.
        noise: the pooled deviation of all pairs but those of the control and of AdamW.
        vertices: those of `fit_vertex`, by width and variant.
    """

    report: Report
    trained: Mapping[tuple[int, str], Trained]
    pairs: Mapping[tuple[int, str], np.ndarray]
    noise: Noise
    vertices: Mapping[tuple[int, str], float | None]

    @property
    def first(self) -> str:
        """The variant that others are compared with."""
        return self.report["variants"][0]

    def difference(self, variant: str, width: int | None = None) -> Difference | None:
        """Returns the difference of a variant at a width, or over all widths for None.

        Over all widths it is the mean over all pairs of these widths. Its interval assumes one
        deviation at every width and independent pairs, and tells nothing of other widths. AdamW's
        deviation is that of its own pairs, the others' is `noise`.

        Returns:
            None where there is no pair.
        """
        widths = self.report["widths"] if width is None else [width]
        pairs = [self.pairs[w, variant] for w in widths if (w, variant) in self.pairs]
        if not (count := sum(map(len, pairs))):
            return None
        with np.errstate(invalid="ignore"):
            mean = float(np.concatenate(pairs).mean())
        of_variant = (found for (_, name), found in self.pairs.items() if name == variant)
        std, df = pooled_noise(of_variant) if variant in NOT_MUON else self.noise
        return Difference(mean, interval_half_width(std, count, df))


def read_study(report: Report) -> Study:
    """Returns the numbers of a report."""
    curves: dict[tuple[int, str], dict[float, dict[int, np.ndarray]]] = {}
    for m in sorted(report["measurements"], key=lambda m: (m["learning_rate"], m["seed"])):
        rates = curves.setdefault((m["width"], m["variant"]), {})
        losses = np.nan_to_num(np.array(m["losses"], np.float64), nan=np.inf)
        rates.setdefault(m["learning_rate"], {})[m["seed"]] = losses
    keys = itertools.product(report["widths"], report["variants"])
    trained = {key: Trained(curves[key], _best_rate(curves[key])) for key in keys if key in curves}
    pairs, first = {}, report["variants"][0]
    for (width, variant), of_variant in trained.items():
        if variant != first and (width, first) in trained:
            losses, others = of_variant.final_losses, trained[width, first].final_losses
            with np.errstate(invalid="ignore"):  # NaN where both diverged
                pairs[width, variant] = np.array(
                    [np.subtract(losses[seed], others[seed]) for seed in losses if seed in others]
                )
    alike = (v for (_, name), v in pairs.items() if name not in (report["control"], *NOT_MUON))
    vertices = {key: fit_vertex(of_variant) for key, of_variant in trained.items()}
    return Study(report, trained, pairs, pooled_noise(alike), vertices)


def _best_rate(curves: Mapping[float, Mapping[int, np.ndarray]]) -> float:
    most = max(map(len, curves.values()))
    means = {
        rate: np.mean([curve[-1] for curve in seeds.values()])
        for rate, seeds in curves.items()
        if len(seeds) == most
    }
    return min(means, key=lambda rate: means[rate])


def pooled_noise(samples: Iterable[np.ndarray]) -> Noise:
    """Returns √(Σᵢ Σⱼ (xᵢⱼ - x̄ᵢ)²/Σᵢ (nᵢ - 1)), and the degrees of freedom, Σᵢ (nᵢ - 1).

    Samples of one size have their root mean square deviation. Differences to one variant share its
    runs, so the degrees of freedom are a little fewer than their sum.

    Args:
        samples: shapes `(nᵢ,)`. Those with fewer than two or with infinite values are left out.

    Returns:
        The deviation is NaN for 0 degrees of freedom.
    """
    used = [x for x in samples if len(x) > 1 and np.isfinite(x).all()]
    df = sum(len(x) - 1 for x in used)
    squares = sum(float(np.sum((x - x.mean()) ** 2)) for x in used)
    return Noise((squares / df) ** 0.5 if df else np.nan, df)


def interval_half_width(std: float, seeds: int, df: int) -> float:
    """Returns t·std/√seeds, half the 95% confidence interval of a mean difference of pairs.

    t is the quantile of Student's t at 0.975. NaN for 0 degrees of freedom.

    Args:
        std: standard deviation of the differences of pairs, from this record or an earlier one.
        seeds: the number of pairs.
        df: degrees of freedom of `std`.
    """
    from scipy import stats

    return float(stats.t.isf((1 - _CONFIDENCE) / 2, df)) * std / seeds**0.5 if df else np.nan


def detectable_difference(std: float, seeds: int, df: int) -> float:
    """Returns the difference δ whose 95% interval leaves out 0 with 80% power.

    δ = λ·std/√seeds, where a noncentral t with `df` degrees of freedom and noncentrality λ exceeds
    t with probability 0.8; t and the arguments are those of `interval_half_width`.
    """
    from scipy import optimize, stats

    if not df:
        return np.nan
    t = stats.t.isf((1 - _CONFIDENCE) / 2, df)
    # Neither distribution has an end, so λ = 4t + 4 is far above what 80% need.
    found: Any = optimize.brentq(lambda x: stats.nct.sf(t, df, x) - _POWER, 0.0, 4 * t + 4)
    return float(found) * std / seeds**0.5


def fit_vertex(trained: Trained) -> float | None:
    """Returns the learning rate of the least loss by a parabola over its logarithm.

    The parabola is fitted by least squares to all runs within a factor of 2.1 of the best learning
    rate. In it lie five rates that are √2 apart. Each seed has a constant of its own: rates with
    fewer seeds than others do not bend the parabola. Where all rates have all seeds that is the
    parabola through the means.

    Returns:
        None where it opens downwards, or has its vertex outside the fitted rates, or where there
        are fewer than three of them.
    """
    runs = [
        (np.log2(rate / trained.best_rate), seed, curve[-1])
        for rate, seeds in trained.curves.items()
        for seed, curve in seeds.items()
        if 1 / _WITHIN < rate / trained.best_rate < _WITHIN and np.isfinite(curve[-1])
    ]
    if len({x for x, _, _ in runs}) < 3:
        return None
    x, seed, loss = map(np.array, zip(*runs, strict=True))
    seeds = np.unique(seed)
    terms = np.column_stack([x**2, x, seed[:, None] == seeds])
    square, linear, *_ = np.linalg.lstsq(terms, loss)[0]
    if square <= 0 or not x.min() <= (vertex := -linear / (2 * square)) <= x.max():
        return None
    return float(trained.best_rate * 2**vertex)


def seconds_to_equal_loss(study: Study) -> dict[tuple[int, str], tuple[float, float]]:
    """Returns the seconds of training until a variant and the first one have the same loss.

    The loss is the larger one of their mean final losses, so that both reach it. Steps are those of
    `steps_to_loss` in mean curves at the best learning rates, and take `step_ms`.

    Returns:
        Seconds of the variant and of the first one, by width and variant, where step times of both
        were measured and neither diverged.
    """
    seconds, steps = {}, study.report["training"]["steps"]
    step_ms = {(p["width"], p["variant"]): p.get("step_ms") for p in study.report["programs"]}
    for width, variant in study.trained:
        both = [(width, variant), (width, study.first)]
        if (width, study.first) in study.trained and all(step_ms.get(key) for key in both):
            curves = [study.trained[key].mean_curve for key in both]
            loss = max(curve[-1] for curve in curves)
            if np.isfinite(loss):
                own, of_first = (
                    steps_to_loss(curve, loss, steps) * step_ms[key] / 1000
                    for key, curve in zip(both, curves, strict=True)
                )
                seconds[width, variant] = own, of_first
    return seconds


def steps_to_loss(curve: np.ndarray, loss: float, steps: int) -> float:
    """Returns the first step with at most that loss, between evaluations by interpolation.

    The learning rates fall over the whole run, so a run made shorter can reach a loss sooner.

    Args:
        curve: losses at equal distances, the last after `steps`, shape `(evaluations,)`.
        loss: at least the last one.
        steps: of the run.
    """
    i = int(np.argmax(curve <= loss))
    back = (loss - curve[i]) / (curve[i - 1] - curve[i]) if i and np.isfinite(curve[i - 1]) else 0.0
    return float(steps * (i + 1 - back) / len(curve))
