"""Metrics of an evaluation, compared with values computed by hand."""

from __future__ import annotations

import json
import math

import pytest

from armature.components.artifacts.tables import read_table
from armature.components.contracts.episodes import Task
from armature.components.contracts.rollouts import Failure, GenerateOutputs
from armature.components.evaluation.results import (
    RESULTS,
    RESULTS_FILE,
    collect_results,
    describe_failures,
    metrics,
    write_results,
)
from armature.components.evaluation.settings import EvaluationSettings
from armature.components.evaluation.stage import evaluation_report
from armature.components.evaluation.wilson import wilson_interval
from tests.pages.conftest import make_trajectory
from tests.refusals import refused

TASKS = [Task(f"colors/t{i}", "heldout", {"color": "red" if i < 2 else "blue", "seed": i}) for i in range(4)]
OUTPUTS = GenerateOutputs(
    [make_trajectory("t0", reward=1.0), make_trajectory("t1", reward=0.0), make_trajectory("t2", reward=1.0)],
    [Failure("t3", "g3", "colors/t3", "generation_timeout", "late")],
)
VALUES = {
    "kind_field": "color",
    "seed": 0,
    "sampling": {"temperature": 0.0, "max_tokens": 8, "top_p": 1.0, "top_k": 0},
}
INFERENCE = {"max_model_len": 512, "max_images_per_prompt": 1, "dtype": "float32"}
COLORS = {"name": "colors", "args": {"image_size": 56, "colors": {"red": [220, 40, 40], "blue": [40, 70, 220]}}}
"""Settings of the environment "colors", without the numbers of tasks (`train_tasks` and `heldout_tasks`)."""


def test_metrics_equal_hand_computed_values():
    numbers = metrics(collect_results(OUTPUTS, TASKS, 1.0, "color"), ["heldout"])
    expected = wilson_interval(2, 4)  # the failed episode is not solved, and is not left out
    assert (numbers["accuracy"], numbers["accuracy_low"]) == (0.5, expected.low)
    assert numbers["reward"] == pytest.approx(2 / 3)
    assert (numbers["tasks"], numbers["episodes"], numbers["failed"]) == (4, 4, 1)
    assert numbers["failures"] == {"generation_timeout": 1}
    assert numbers["accuracy_of_finished"] == pytest.approx(2 / 3)
    assert sum(group["failed"] for group in numbers["kinds"].values()) == 1
    assert numbers["reward_parts"] == {"correct": pytest.approx(2 / 3)}
    assert {kind: group["accuracy"] for kind, group in numbers["kinds"].items()} == {"blue": 0.5, "red": 0.5}
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers


def test_describe_failures_names_reasons_and_both_accuracies():
    results = collect_results(OUTPUTS, TASKS, 1.0, "color")
    assert describe_failures(results) == (
        "1 of 4 episodes failed (1 generation_timeout) and count as not solved: accuracy 0.500, of finished ones "
        "0.667; mean rewards are over finished ones"
    )
    assert describe_failures([result for result in results if result.failure is None]) == ""


def test_undefined_metrics_are_left_out():
    alone = GenerateOutputs([make_trajectory("t0")])
    numbers = metrics(collect_results(alone, TASKS, 1.0), ["heldout"])
    assert "reward_low" not in numbers and numbers["reward"] == 1.0
    assert all(math.isfinite(v) for v in numbers.values() if isinstance(v, float))


def test_rounding_error_in_the_reward_still_counts_as_solved():
    trajectory = make_trajectory("t0", reward=0.1 + 0.2 + 0.7 - 2e-16)
    assert trajectory.reward < 1.0
    (result,) = collect_results(GenerateOutputs([trajectory]), TASKS, 1.0)
    assert result.solved


def test_every_planned_episode_is_one_row(tmp_path):
    results = collect_results(OUTPUTS, TASKS, 1.0, "color")
    write_results(tmp_path, results)
    rows = read_table(tmp_path / RESULTS_FILE, RESULTS).to_pylist()
    assert [row["trajectory_id"] for row in rows] == ["t0", "t1", "t2", "t3"]
    assert [row["failure"] for row in rows] == [None, None, None, "generation_timeout"]
    assert rows[3]["reward"] is None and not rows[3]["solved"]


def test_unknown_kind_field():
    with refused("unknown_kind_field", "hue"):
        collect_results(OUTPUTS, TASKS, 1.0, "hue")


def test_rejects_several_greedy_samples_per_task():
    assert EvaluationSettings.model_validate(VALUES).sampling.temperature == 0.0
    with refused("value_error", "samples_per_task = 2"):
        EvaluationSettings.model_validate(VALUES | {"samples_per_task": 2})


def test_report_shows_kinds_parts_and_failures():
    report = evaluation_report("t", collect_results(OUTPUTS, TASKS, 1.0, "color"), ["heldout"], VALUES, {})
    assert report.figures["accuracy, 95 % interval"] == "0.500 [0.150, 0.850]"
    assert report.figures["failed, counted as not solved"] == "1"
    assert report.figures["accuracy of finished episodes"] == "0.667"
    titles = ["By kind of task", "Reward by part", "Episodes that could not be finished"]
    assert [table.title for table in report.tables] == titles
