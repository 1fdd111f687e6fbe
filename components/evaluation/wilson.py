"""Confidence intervals for proportions and means over episodes, and a comparison of two proportions.

Sources. Wilson's score interval: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
JASA 22 (1927). Difference of two proportions: R. G. Newcombe, "Interval estimation for the difference between
independent proportions", Statistics in Medicine 17 (1998), method 10. Design effect of repeated samples of one task: L.
Kish, "Survey Sampling" (1965).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import erfc, isnan, sqrt
from statistics import NormalDist, fmean

from armature.components.contracts.rollouts import all_equal

CONFIDENCE = 0.95
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the `low` and `high` limits of its confidence interval.

    `n` is the number of independent observations that the estimate is based on. It can be fractional.
    """

    estimate: float
    low: float
    high: float
    n: float

    def __str__(self) -> str:
        if isnan(self.low):
            return f"{self.estimate:.3f}"
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference of two proportions (second minus first), and the `low` and `high` limits of its confidence interval.

    `p_value` is the two-sided p-value under the hypothesis that the proportions do not differ.
    """

    difference: float
    low: float
    high: float
    p_value: float


def normal_quantile(confidence: float) -> float:
    """Return z such that P(|Z| <= z) = `confidence` for a standard normal Z, with 0 < confidence < 1."""
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    return -_NORMAL.inv_cdf((1 - confidence) / 2)  # the lower tail, since 1 - tail loses all digits near 1


def wilson_interval(successes: float, trials: float, confidence: float = CONFIDENCE) -> Interval:
    """Return Wilson's score interval for `successes` out of `trials`.

        (p + z^2/2n  ±  z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)

    The interval lies within [0, 1] and has a positive width also at p = 0 and p = 1. Without trials it is [0, 1] around
    NaN.

    Raises:
        ValueError: a count is negative, or there are more successes than trials.

    Example:
        >>> print(wilson_interval(8, 10))
        0.800 [0.490, 0.943]
    """
    if trials < 0 or not 0 <= successes <= trials:
        raise ValueError(f"need 0 <= successes <= trials, got {successes} of {trials}")
    if trials == 0:
        return Interval(float("nan"), 0.0, 1.0, 0)
    z = normal_quantile(confidence)
    p = successes / trials
    scale = 1 + z * z / trials
    center = (p + z * z / (2 * trials)) / scale
    half = z * sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / scale
    # At p = 0 and p = 1 one limit is exactly p; rounding must not move it past the estimate.
    return Interval(p, max(0.0, min(center - half, p)), min(1.0, max(center + half, p)), trials)


def clustered_wilson_interval(outcomes: Sequence[Sequence[bool]]) -> Interval:
    """Return Wilson's 95 % interval for tasks with repeated samples. `outcomes[task][sample]` is True for a success.

    Samples of one task are correlated, so n samples of one task say less than samples of n tasks. The number of trials
    is therefore divided by the design effect: the variance of the proportion, estimated between tasks, divided by the
    binomial variance, but at least 1. If it cannot be estimated (one task, or p = 0 or 1), each task counts as one
    trial.
    """
    counts = [len(task) for task in outcomes if task]
    solved = [sum(task) for task in outcomes if task]
    n, tasks = sum(counts), len(counts)
    if n == tasks:
        return wilson_interval(sum(solved), n)
    p = sum(solved) / n
    effective = float(tasks)
    if tasks > 1 and 0.0 < p < 1.0:
        residuals = [s - p * c for s, c in zip(solved, counts, strict=True)]
        variance = tasks / (tasks - 1) * sum(r * r for r in residuals) / n**2
        binomial = p * (1 - p) / n
        effective = n / max(1.0, variance / binomial)
    interval = wilson_interval(p * effective, effective)
    return Interval(p, min(interval.low, p), max(interval.high, p), effective)


def mean_interval(clusters: Sequence[Sequence[float]]) -> Interval:
    """Return the mean over all values `clusters[task][sample]`, with a normal 95 % interval.

    The standard error is computed from the differences between tasks. If it cannot be estimated, because there are
    fewer than two tasks or all values are equal, the limits are NaN.
    """
    samples = [list(cluster) for cluster in clusters if cluster]
    n, tasks = sum(map(len, samples)), len(samples)
    nan = float("nan")
    if tasks == 0:
        return Interval(nan, nan, nan, 0)
    mean = fmean([value for cluster in samples for value in cluster])
    if tasks == 1:
        return Interval(mean, nan, nan, 1)
    residuals = [sum(cluster) - mean * len(cluster) for cluster in samples]
    error = sqrt(tasks / (tasks - 1) * sum(r * r for r in residuals)) / n
    if error == 0.0 or all_equal([value for cluster in samples for value in cluster]):
        return Interval(mean, nan, nan, tasks)
    half = normal_quantile(CONFIDENCE) * error
    return Interval(mean, mean - half, mean + half, tasks)


def compare_proportions(first: tuple[int, int], second: tuple[int, int], confidence: float = CONFIDENCE) -> Comparison:
    """Compare two independent proportions, each given as (successes, trials).

    The limits combine the two Wilson intervals by Newcombe's hybrid method. The p-value is from the pooled score test;
    it is 1.0 if both proportions are 0 or both are 1.

    Raises:
        ValueError: one of the proportions has no trials.

    Example:
        >>> comparison = compare_proportions((48, 80), (56, 70))
        >>> print(f"{comparison.difference:.2f} [{comparison.low:.2f}, {comparison.high:.2f}]")
        0.20 [0.05, 0.33]
    """
    if not first[1] or not second[1]:
        raise ValueError(f"both proportions need trials, got {first} and {second}")
    a, b = wilson_interval(*first, confidence), wilson_interval(*second, confidence)
    difference = b.estimate - a.estimate
    low = difference - sqrt((b.estimate - b.low) ** 2 + (a.high - a.estimate) ** 2)
    high = difference + sqrt((b.high - b.estimate) ** 2 + (a.estimate - a.low) ** 2)
    pooled = (first[0] + second[0]) / (first[1] + second[1])
    variance = pooled * (1 - pooled) * (1 / first[1] + 1 / second[1])
    p_value = erfc(abs(difference) / sqrt(2 * variance)) if variance > 0 else 1.0  # 1 - cdf is 0 below 1e-16
    return Comparison(difference, low, high, p_value)
