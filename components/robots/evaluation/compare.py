"""Two policies on the same episodes: what one solves and the other does not.

Both begin every episode in the same state, so the episodes are pairs, and only those that end differently say
which policy is better. Under "no difference" each of them falls on either side with probability one half: the
exact form of McNemar's test (Q. McNemar, "Note on the sampling error of the difference between correlated
proportions or percentages", Psychometrika 12, 1947), a sign test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from armature.components.contracts.errors import DataError
from armature.components.evaluation.wilson import Comparison, compare_proportions
from armature.components.robots.evaluation.results import (
    LiberoResult,
    PerturbedResult,
    by_perturbation,
    by_suite,
    by_task,
    numbers,
)


@dataclass(frozen=True)
class PairedComparison:
    """Counts of pairs, McNemar's exact two-sided p-value, and the comparison that leaves the pairing aside."""

    both: int
    only_first: int
    only_second: int
    neither: int
    p_value: float
    unpaired: Comparison

    @property
    def pairs(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        """Rate of the second minus rate of the first."""
        return (self.only_second - self.only_first) / self.pairs


def sign_test(first: int, second: int) -> float:
    """Two-sided p-value of `first` against `second` falls of a fair coin: 2 P(X <= min), at most 1."""
    trials = first + second
    tail = ways = 1
    for k in range(min(first, second)):
        ways = ways * (trials - k) // (k + 1)  # exact: the binomial coefficient of k + 1
        tail += ways
    return min(1.0, 2 * tail / 2**trials)


def compare_results(
    first: Sequence[LiberoResult], second: Sequence[LiberoResult], confidence: float = 0.95
) -> PairedComparison:
    """
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
    """Over all, by suite and by task, in this order."""
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
    """By perturbation and strength: those that both were evaluated with."""
    others = by_perturbation(second)
    groups = by_perturbation(first).items()
    return {label: compare_results(group, others[label], confidence) for label, group in groups if label in others}


def perturbed_metrics(
    results: Sequence[LiberoResult], perturbed: Sequence[PerturbedResult]
) -> dict[str, dict[str, float]]:
    """By perturbation and strength: success, and the difference to the same episodes without."""
    found = {}
    for label, group in by_perturbation(perturbed).items():
        pairs = compare_results(results, group)
        found[label] = {
            **numbers(group),
            "difference": pairs.difference,
            "solved_only_without": float(pairs.only_first),
            "solved_only_with": float(pairs.only_second),
            "p_value": pairs.p_value,
        }
    return found


def _pairs(first: Sequence[LiberoResult], second: Sequence[LiberoResult]) -> list[tuple[LiberoResult, LiberoResult]]:
    by_key = {result.key: result for result in second}
    lone = {result.key for result in first} ^ set(by_key)
    if lone or not first:
        example = "no episode" if not lone else "suite {}, task {}, episode {}".format(*min(lone))
        raise DataError(
            f"the evaluations did not play the same episodes: {len(first)} and {len(second)}, {len(lone)} in one alone",
            code="episodes_differ",
            where=example,
            remedy="evaluate both with the same suites, tasks and episodes_per_task",
        )
    pairs = [(result, by_key[result.key]) for result in first]
    for a, b in pairs:
        begins = [(each.initial_state, each.simulator_seed) for each in (a, b)]
        if begins[0] != begins[1]:
            raise DataError(
                f"the evaluations began an episode differently: (initial state, seed) {begins[0]} and {begins[1]}",
                code="episode_starts_differ",
                where=f"{a.suite}, task {a.task}, episode {a.episode}",
                remedy="evaluate both with the same seed",
            )
    return pairs
