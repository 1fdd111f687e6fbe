"""Results of evaluations: success rates, reports, and paired comparison of two policies."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import binomtest, chi2_contingency

from armature.components.contracts.errors import DataError
from armature.components.evaluation.agreement import sign_test
from armature.components.evaluation.wilson import compare_proportions
from armature.components.pages.report import write_report
from armature.components.robots.evaluation.compare import compare_parts, compare_results
from armature.components.robots.evaluation.page import comparison_report, evaluation_report
from armature.components.robots.evaluation.results import (
    LiberoResult,
    eval_info,
    metrics,
    read_results,
    video_path,
    write_results,
)
from tests.refusals import refused


def result(
    suite: str, task: int, episode: int, success: bool, steps: int = 5, failure: str | None = None
) -> LiberoResult:
    actions = tuple(float(k) / 8 for k in range(7 * steps))
    language = f"put <{task}> on the plate"
    return LiberoResult(suite, task, language, episode, episode, 1000 + episode, success, steps, actions, failure)


RESULTS = [
    result("libero_spatial", 0, 0, True, 4),
    result("libero_spatial", 0, 1, True, 6),
    result("libero_spatial", 3, 0, False, 9),
    result("libero_spatial", 3, 1, False, 0, failure="it died"),
    result("libero_goal", 1, 0, True, 3),
]


def test_success_rates_per_task_suite_and_overall() -> None:
    """Wilson's limits for 3 of 5: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    numbers = metrics(RESULTS)
    z, p, n = 1.959963984540054, 3 / 5, 5
    center, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    assert numbers["success"] == 0.6
    assert numbers["success_low"] == pytest.approx((center - half) / (1 + z * z / n), abs=1e-12)
    assert numbers["success_high"] == pytest.approx((center + half) / (1 + z * z / n), abs=1e-12)
    assert numbers["suite_mean"] == (0.5 + 1.0) / 2
    assert (numbers["episodes"], numbers["failed"], numbers["failures"]) == (5, 1, {"it died": 1})
    assert numbers["steps_when_solved"] == pytest.approx((4 + 6 + 3) / 3)
    suites = {name: part["success"] for name, part in numbers["suites"].items()}
    assert suites == {"libero_spatial": 0.5, "libero_goal": 1.0}
    assert numbers["tasks"]["libero_spatial/3"]["success"] == 0.0
    assert "steps_when_solved" not in numbers["tasks"]["libero_spatial/3"]


def test_eval_info_has_lerobots_layout() -> None:
    videos = {RESULTS[0].key: video_path(RESULTS[0].key), RESULTS[4].key: video_path(RESULTS[4].key)}
    info = json.loads(json.dumps(eval_info(RESULTS, videos, seconds=30.0)))
    tasks = [(each["task_group"], each["task_id"]) for each in info["per_task"]]
    assert tasks == [("libero_spatial", 0), ("libero_spatial", 3), ("libero_goal", 1)]
    assert info["per_task"][0]["metrics"] == {
        "sum_rewards": [1.0, 1.0],
        "max_rewards": [1.0, 1.0],
        "successes": [True, True],
        "video_paths": ["videos/libero_spatial_0/eval_episode_0.mp4"],
    }
    assert info["per_group"]["libero_spatial"] == {
        "avg_sum_reward": 0.5,
        "avg_max_reward": 0.5,
        "pc_success": 50.0,
        "n_episodes": 4,
        "video_paths": ["videos/libero_spatial_0/eval_episode_0.mp4"],
    }
    assert info["overall"]["pc_success"] == 60.0
    assert (info["overall"]["eval_s"], info["overall"]["eval_ep_s"]) == (30.0, 6.0)
    assert len(info["overall"]["video_paths"]) == 2


def test_results_roundtrip(tmp_path: Path) -> None:
    write_results(tmp_path, RESULTS)
    assert read_results(tmp_path) == RESULTS
    (tmp_path / "results.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError) as error:
        read_results(tmp_path)
    assert error.value.where == str(tmp_path / "results.parquet")


def test_report_escapes_external_text(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", evaluation_report(RESULTS, [], {"seed": 1}, {"JSON": "eval_info.json"}))
    page = (tmp_path / "report.html").read_text()
    assert "put &lt;3&gt; on the plate" in page
    assert "<3>" not in page
    assert "0.600 [0.231, 0.882]" in page
    assert re.findall(r'<rect class="s0" width="([\d.]+)"', page) == ["50.0", "100.0", "100.0", "0.0", "100.0"]
    assert "it died" in page


def results(ends: str, task: int = 0) -> list[LiberoResult]:
    """Return the results of one task with an episode for each character of `ends`: + stands for a solved episode."""
    return [
        LiberoResult("libero_goal", task, "open", k, k, 1000 + k, end == "+", 3, (), None) for k, end in enumerate(ends)
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [(0, 0), (1, 0), (3, 9), (9, 3), (8, 8), (40, 61), (0, 12), (0, 200), (700, 640), (900, 50), (4000, 4100)],
)
def test_sign_test_equals_scipy(first: int, second: int) -> None:
    expected = binomtest(first, first + second).pvalue if first + second else 1.0
    assert sign_test(first, second) == pytest.approx(expected, rel=1e-9)


def test_paired_comparison_counts_by_episode() -> None:
    first, second = results("++++----++"), results("+++-+++++-")
    paired = compare_results(first, list(reversed(second)))
    assert (paired.both, paired.only_first, paired.only_second, paired.neither) == (4, 2, 4, 0)
    assert paired.difference == pytest.approx(0.2)
    assert paired.p_value == binomtest(2, 6).pvalue
    assert paired.unpaired == compare_proportions((6, 10), (8, 10))


def test_paired_test_is_more_sensitive_than_unpaired() -> None:
    """8 of 100 episodes change from failure to success, and none back."""
    paired = compare_results(results("+" * 50 + "-" * 50), results("+" * 58 + "-" * 42))
    assert paired.p_value == pytest.approx(2 / 2**8)
    assert paired.unpaired.p_value > 0.25


def test_comparison_has_parts_for_all_suites_and_tasks(tmp_path: Path) -> None:
    first, second = results("++--") + results("--", task=7), results("+-++") + results("+-", task=7)
    parts = compare_parts(first, second)
    assert list(parts) == ["all", "libero_goal", "libero_goal/0", "libero_goal/7"]
    assert (parts["all"].only_first, parts["all"].only_second) == (1, 3)
    assert (parts["libero_goal/7"].only_second, parts["libero_goal/7"].pairs) == (1, 2)
    write_report(tmp_path / "report.html", comparison_report(parts, ("old", "new"), {}))
    assert "new against old" in (tmp_path / "report.html").read_text()


def test_report_shows_small_p_values_above_zero() -> None:
    parts = compare_parts(results("-" * 40), results("+" * 40))
    page = comparison_report(parts, ("old", "new"), {})
    (table,) = page.tables
    shown = [page.figures["p, McNemar's exact test"], *table.rows[0][-2:]]
    expected = [2 * 0.5**40, 2 * 0.5**40, chi2_contingency([[40, 0], [0, 40]], correction=False).pvalue]
    assert list(map(float, shown)) == pytest.approx(expected, rel=1e-2)


def test_rejects_comparison_of_different_episodes() -> None:
    with refused("episodes_differ", "3 and 4", "suite libero_goal, task 0, episode 3"):
        compare_parts(results("+++"), results("++++"))
    moved = [replace(each, initial_state=9) for each in results("+")]
    with refused("episode_starts_differ", (0, 1000), (9, 1000)):
        compare_results(results("+"), moved)
    with refused("episodes_differ"):
        compare_results([], [])
