"""Reported times and counts of playing episodes, with simulators that take no time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.machine.workers.channel import WorkerError
from armature.components.robots.policies.player import open_flow_policy
from armature.components.robots.rl.collect import Collector, PlayTimes, TimedSimulators
from armature.components.robots.rl.schedule import plan_step
from tests.robots.evaluation.playground import TASKS
from tests.robots.rl.kitchen import Kitchen, calm_policy, rollout_settings


def test_rollout_times_and_counts_are_reported(tmp_path: Path) -> None:
    """Two groups of four episodes of two tasks in one slot: each task is built once, and on a CPU a pass has one
    row."""
    calm_policy(tmp_path)
    settings, images = rollout_settings(), ImageStore(tmp_path / "images")
    collector = Collector(settings, open_flow_policy(tmp_path, "continuous", 8), [Kitchen()], images, lambda *_: None)
    groups = plan_step(settings, TASKS, 1)
    answers = collector.collect(groups, 1, 0, bootstrap=False).answers
    times, tasks = collector.times.since(), len({group[0].task for group in groups})
    assert times["simulator/builds"] == tasks and times["simulator/resets"] == 8 - tasks
    assert times["simulator/actions"] == sum(answer.executed for answer in answers)
    assert times["policy/passes"] == len(answers)
    spent = {"simulator_build", "simulator_reset", "simulator_step", "policy", "prepare", "keep_answers"}
    assert {name for name in times if name.startswith("timing/")} == {f"timing/{part}" for part in spent}
    assert collector.times.since() == {}


def test_failed_calls_are_not_counted_and_crashed_process_rebuilds() -> None:
    times = PlayTimes()
    simulators, still, task = TimedSimulators(Kitchen(deaths=[1]), times), np.zeros((3, 7), np.float32), TASKS[0]
    simulators.reset(task, 0, 0)
    with pytest.raises(WorkerError):
        simulators.step(still)
    simulators.reset(task, 0, 0)
    simulators.reset(task, 0, 0)
    simulators.step(still)
    counts = times.since()
    assert (counts["simulator/builds"], counts["simulator/resets"], counts["simulator/actions"]) == (2, 1, 3)
