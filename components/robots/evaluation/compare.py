"""Paired comparison of two policies that played the same episodes.

Both policies start every episode from the same state, so the episodes are pairs, and only pairs with different results
tell which policy is better. Under the null hypothesis of no difference, each such pair favors either policy with
probability 1/2. This sign test is the exact form of McNemar's test (Q. McNemar, "Note on the sampling error of the
difference between correlated proportions or percentages", Psychometrika 12, 1947).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from armature.components.contracts.errors import DataError
from armature.components.evaluation.agreement import sign_test
from armature.components.evaluation.wilson import Comparison, compare_proportions
from armature.components.robots.evaluation.results import (
    LiberoResult,
    PerturbedResult,
    by_perturbation,
    by_suite,
    by_task,
    metrics,
    numbers,
)


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of two policies on the same episodes: numbers of episode pairs by result, and McNemar's exact
    two-sided p-value. It also has a comparison that ignores the pairing."""

    both: int
    only_first: int
    only_second: int
    neither: int
    p_value: float
    unpaired: Comparison

    @property
    def pairs(self) -> int:
        """Number of episodes that both policies played."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        """Success rate of the second policy minus the rate of the first."""
        return (self.only_second - self.only_first) / self.pairs


def compare_results(
    first: Sequence[LiberoResult], second: Sequence[LiberoResult], confidence: float = 0.95
) -> PairedComparison:
    """Compare two evaluations over all their episodes.

    Raises:
        DataError: the two did not play the same episodes from the same states.
    """
    pairs = _pairs(first, second)
    ends = [(a.success, b.success) for a, b in pairs]
    only_first, only_second = ends.count((True, False)), ends.count((False, True))
    both = ends.count((True, True))
    total = len(ends)
    return PairedComparison(
        both=both,
        only_first=only_first,
        only_second=only_second,
        neither=ends.count((False, False)),
        p_value=sign_test(only_first, only_second),
        unpaired=compare_proportions((both + only_first, total), (both + only_second, total), confidence),
    )


def compare_parts(
    first: Sequence[LiberoResult], second: Sequence[LiberoResult], confidence: float = 0.95
) -> dict[str, PairedComparison]:
    """Return comparisons by name of the part: over all episodes ("all"), then of each suite, then of each task."""
    _pairs(first, second)
    parts = {"all": compare_results(first, second, confidence)}
    others = by_suite(second)
    for suite, group in by_suite(first).items():
        parts[suite] = compare_results(group, others[suite], confidence)
    tasks = by_task(second)
    for (suite, task), group in by_task(first).items():
        parts[f"{suite}/{task}"] = compare_results(group, tasks[suite, task], confidence)
    return parts


def compare_perturbed(
    first: Sequence[PerturbedResult], second: Sequence[PerturbedResult], confidence: float = 0.95
) -> dict[str, PairedComparison]:
    """Compare two evaluations separately for each perturbation that both have. Return the comparisons by the
    perturbation's label."""
    others = by_perturbation(second)
    groups = by_perturbation(first).items()
    return {label: compare_results(group, others[label], confidence) for label, group in groups if label in others}


def all_metrics(results: Sequence[LiberoResult], perturbed: Sequence[PerturbedResult]) -> dict[str, Any]:
    """Return the content of `metrics.json`, which has "perturbations" if episodes were perturbed."""
    changed = perturbed_metrics(results, perturbed)
    return {**metrics(results), **({"perturbations": changed} if changed else {})}


def perturbed_metrics(
    results: Sequence[LiberoResult], perturbed: Sequence[PerturbedResult]
) -> dict[str, dict[str, float]]:
    """Return the metrics of each perturbation, by the perturbation's label.

    They are the success rate with the perturbation, and its difference from the rate of the same episodes without it.
    """
    by_label = {}
    for label, group in by_perturbation(perturbed).items():
        pairs = compare_results(results, group)
        by_label[label] = {
            **numbers(group),
            "difference": pairs.difference,
            "solved_only_without": float(pairs.only_first),
            "solved_only_with": float(pairs.only_second),
            "p_value": pairs.p_value,
        }
    return by_label


def _pairs(first: Sequence[LiberoResult], second: Sequence[LiberoResult]) -> list[tuple[LiberoResult, LiberoResult]]:
    by_key = {result.key: result for result in second}
    lone = {result.key for result in first} ^ set(by_key)
    if lone or not first:
        example = "no episode" if not lone else "suite {}, task {}, episode {}".format(*min(lone))
        raise DataError(
            f"the evaluations did not play the same episodes: {len(first)} and {len(second)}, only one has {len(lone)}",
            code="episodes_differ",
            where=example,
            remedy="evaluate both with the same suites, tasks and episodes_per_task",
        )
    pairs = [(result, by_key[result.key]) for result in first]
    for a, b in pairs:
        starts = [(each.initial_state, each.simulator_seed) for each in (a, b)]
        if starts[0] != starts[1]:
            raise DataError(
                f"the evaluations started an episode differently: (initial state, seed) {starts[0]} and {starts[1]}",
                code="episode_starts_differ",
                where=f"{a.suite}, task {a.task}, episode {a.episode}",
                remedy="evaluate both with the same seed",
            )
    return pairs
