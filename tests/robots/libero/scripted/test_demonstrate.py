"""The scripted policy in the simulator: it solves its tasks, with and without noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from armature.components.robots.libero.scripted.plans import body_grasp, is_scripted, rim_grasp
from armature.components.robots.libero.scripted.policy import DemonstrationOutcome, demonstrate
from armature.components.robots.libero.simulator import LiberoSimulator
from armature.components.robots.libero.tasks import suite_tasks

from ..simulated import needs_libero, physics, simulator

pytestmark = needs_libero

SUPPORTED: dict[str, list[int]] = {
    "libero_spatial": list(range(10)),
    "libero_object": list(range(10)),
    "libero_goal": [1, 2, 4, 6, 8],
    "libero_10": [],
    "libero_90": [],
}
"""Numbers of the tasks that pick up one object and put it somewhere, by suite."""


def last(values: Iterator[Any]) -> DemonstrationOutcome:
    *_, outcome = values
    assert isinstance(outcome, DemonstrationOutcome)
    return outcome


def test_scripted_policy_reaches_the_goal_despite_noise(bowl: LiberoSimulator) -> None:
    calm = last(demonstrate(bowl, 0, 1, noise=0.0, limit=280, watch=False))
    ends = physics(bowl)
    disturbed = last(demonstrate(bowl, 0, 1, noise=0.2, limit=280, watch=False))
    assert calm.success and calm.phase == "done" and disturbed.success
    assert not np.array_equal(physics(bowl), ends)


@pytest.mark.parametrize("suite", SUPPORTED)
def test_supported_tasks_follow_from_their_goals(suite: str) -> None:
    assert [task.index for task in suite_tasks(suite) if is_scripted(task)] == SUPPORTED[suite]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "index"), [(suite, index) for suite, tasks in sorted(SUPPORTED.items()) for index in tasks[:2]]
)
def test_scripted_policy_solves_its_tasks(suite: str, index: int) -> None:
    made = LiberoSimulator(suite_tasks(suite)[index], simulator(num_steps_wait=10))
    outcome = last(demonstrate(made, 7, 7, noise=0.0, limit=280, watch=False))
    made.close()
    assert outcome.success


def test_demonstration_fails_with_too_few_steps(bowl: LiberoSimulator) -> None:
    outcome = last(demonstrate(bowl, 0, 1, noise=0.0, limit=5, watch=False))
    assert (outcome.success, outcome.steps, outcome.phase) == (False, 5, "above")


def test_reach_task_is_solved_when_the_gripper_comes_near(
    bowl: LiberoSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bowl, "_settings", bowl._settings.model_copy(update={"reach_distance": 0.065}))
    *steps, outcome = demonstrate(bowl, 0, 1, noise=0.0, limit=280, watch=False)
    _, data, item = bowl.body("akita_black_bowl_1")
    distance = np.linalg.norm(data.xpos[item] - bowl.site("gripper0_grip_site"))
    assert isinstance(outcome, DemonstrationOutcome) and not steps
    assert outcome.success and outcome.phase == "descend" and 0.06 < distance < 0.065


def test_grasps_equal_hand_computation() -> None:
    place, yaw = rim_grasp(np.pi / 2, 0.05, 0.03)
    assert np.allclose(place, [0, 0.05, 0.03]) and abs(yaw) < 1e-12  # half a turn is no turn for two fingers
    box = np.array([[0, 0, 0], [0.2, 0.1, 0.1]])
    assert np.allclose(body_grasp(box, np.array([0, 0, 0.05]), 0.03), [0.1, 0.05, 0.02])
    assert np.allclose(body_grasp(box, np.zeros(3), 0.2), [0.1, 0.05, 0.008])  # not into the table
