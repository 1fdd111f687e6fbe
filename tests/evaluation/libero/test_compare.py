from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import binomtest, chi2_contingency

from armature.components.evaluation.libero.compare import compare_parts, compare_results, sign_test
from armature.components.evaluation.libero.page import comparison_report
from armature.components.evaluation.libero.results import LiberoResult
from armature.components.evaluation.wilson import compare_proportions
from armature.components.reports.report import write_report
from tests.refusals import refused


def results(ends: str, task: int = 0) -> list[LiberoResult]:
    """One episode a letter, + is solved."""
    return [
        LiberoResult("libero_goal", task, "open", k, k, 1000 + k, end == "+", 3, (), None) for k, end in enumerate(ends)
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [(0, 0), (1, 0), (3, 9), (9, 3), (8, 8), (40, 61), (0, 12), (0, 200), (700, 640), (900, 50), (4000, 4100)],
)
def test_the_sign_test_is_scipys(first: int, second: int) -> None:
    expected = binomtest(first, first + second).pvalue if first + second else 1.0
    assert sign_test(first, second) == pytest.approx(expected, rel=1e-9)


def test_pairs_are_counted_by_episode() -> None:
    first, second = results("++++----++"), results("+++-+++++-")
    paired = compare_results(first, list(reversed(second)))
    assert (paired.both, paired.only_first, paired.only_second, paired.neither) == (4, 2, 4, 0)
    assert paired.difference == pytest.approx(0.2)
    assert paired.p_value == binomtest(2, 6).pvalue
    assert paired.unpaired == compare_proportions((6, 10), (8, 10))


def test_pairing_finds_what_two_proportions_do_not() -> None:
    """8 episodes of 100 turn from failure to success and none back."""
    paired = compare_results(results("+" * 50 + "-" * 50), results("+" * 58 + "-" * 42))
    assert paired.p_value == pytest.approx(2 / 2**8)
    assert paired.unpaired.p_value > 0.25


def test_parts_are_all_suites_and_tasks(tmp_path: Path) -> None:
    first, second = results("++--") + results("--", task=7), results("+-++") + results("+-", task=7)
    parts = compare_parts(first, second)
    assert list(parts) == ["all", "libero_goal", "libero_goal/0", "libero_goal/7"]
    assert (parts["all"].only_first, parts["all"].only_second) == (1, 3)
    assert (parts["libero_goal/7"].only_second, parts["libero_goal/7"].pairs) == (1, 2)
    write_report(tmp_path / "report.html", comparison_report(parts, ("old", "new"), {}))
    assert "new against old" in (tmp_path / "report.html").read_text()


def test_the_page_shows_a_small_p_value_as_a_number_above_zero() -> None:
    parts = compare_parts(results("-" * 40), results("+" * 40))
    page = comparison_report(parts, ("old", "new"), {})
    (table,) = page.tables
    shown = [page.figures["p, McNemar's exact test"], *table.rows[0][-2:]]
    expected = [2 * 0.5**40, 2 * 0.5**40, chi2_contingency([[40, 0], [0, 40]], correction=False).pvalue]
    assert list(map(float, shown)) == pytest.approx(expected, rel=1e-2)


def test_other_episodes_are_no_pairs() -> None:
    with refused("episodes_differ", "3 and 4", "suite libero_goal, task 0, episode 3"):
        compare_parts(results("+++"), results("++++"))
    moved = [replace(each, initial_state=9) for each in results("+")]
    with refused("episode_starts_differ", (0, 1000), (9, 1000)):
        compare_results(results("+"), moved)
    with refused("episodes_differ"):
        compare_results([], [])
