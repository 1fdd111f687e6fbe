"""Rewards of episodes, computed by hand and in the simulator."""

from __future__ import annotations

from itertools import product
from math import tanh
from pathlib import Path

import numpy as np
import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.robots.libero.processes import SimulatorProcess
from armature.components.robots.libero.progress import GoalProgress
from armature.components.robots.libero.scripted.plans import plan_for
from armature.components.robots.libero.scripted.policy import ScriptedPolicy
from armature.components.robots.libero.simulator import LiberoSimulator
from armature.components.robots.libero.tasks import suite_tasks
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.rl.batch import build_batch, chunk_rewards, gae, potential
from armature.components.robots.rl.collect import Collector
from armature.components.robots.rl.schedule import plan_step
from armature.components.robots.rl.settings import (
    EpisodeGroupMean,
    PotentialShaping,
    ProgressReward,
    SuccessReward,
)
from armature.components.robots.rl.table import ActionChunk
from tests.robots.evaluation.playground import TASKS
from tests.robots.libero.simulated import needs_libero, simulator
from tests.robots.rl.kitchen import Kitchen, calm_policy, rollout_settings

SUCCESS = SuccessReward(name="success")
PROGRESS = ProgressReward(name="progress", weight=0.4)
SHAPED = PotentialShaping(name="potential", weight=0.7)
FAR = GoalProgress(holds=False, reach=0.2, grasped=False, place=0.3)
HELD = GoalProgress(holds=False, reach=0.05, grasped=True, place=0.1)
DONE = GoalProgress(holds=True, reach=0.4, grasped=False, place=0.0)
DRAWER = GoalProgress(holds=False, reach=0.1, grasped=False, place=None)


def test_potential_equals_hand_computation() -> None:
    far = 0.3 * (1 - tanh(1.0)) + 0.3 * (1 - tanh(1.5))
    held = 0.3 + 0.2 + 0.3 * (1 - tanh(0.5))
    assert potential([FAR]) == pytest.approx(far, abs=1e-12)
    assert potential([HELD]) == pytest.approx(held, abs=1e-12)
    assert potential([DRAWER]) == pytest.approx(0.3 * (1 - tanh(0.5)), abs=1e-12)
    assert potential([DONE]) == 1.0
    assert potential([DONE, FAR]) == pytest.approx((1 + far) / 2, abs=1e-12)


def test_chunk_rewards_equal_hand_computation() -> None:
    way = [[FAR], [HELD], [DONE]]
    a, b, c = (potential(each) for each in way)
    assert chunk_rewards(SUCCESS, 2, [], True, 1.0, False) == [0.0, 1.0]
    assert chunk_rewards(SUCCESS, 2, [], False, 1.0, False) == [0.0, 0.0]
    assert chunk_rewards(PROGRESS, 2, way, True, 1.0, False) == [0.0, 1.0]
    assert chunk_rewards(PROGRESS, 2, [[FAR], [HELD], [HELD]], False, 1.0, False) == [0.0, 0.4 * b]
    solved = chunk_rewards(SHAPED, 2, way, True, 0.9, False)
    assert solved == pytest.approx([0.7 * (0.9 * b - a), 1 - 0.7 * b], abs=1e-12)
    failed = chunk_rewards(SHAPED, 2, way, False, 0.9, False)
    assert failed == pytest.approx([0.7 * (0.9 * b - a), -0.7 * b], abs=1e-12)
    goes_on = chunk_rewards(SHAPED, 2, way, False, 0.9, True)
    assert goes_on == pytest.approx([0.7 * (0.9 * b - a), 0.7 * (0.9 * c - b)], abs=1e-12)


def test_shaping_shifts_all_returns_of_a_state_equally() -> None:
    """Ng, Harada, Russell (1999): so the best action in a state does not depend on the potential."""
    gamma, here = 0.9, HELD
    for middle, end, solved in product((FAR, HELD, DONE), (FAR, HELD, DONE), (True, False)):
        way = [[here], [middle], [end]]
        plain, shaped = (chunk_rewards(reward, 2, way, solved, gamma, False) for reward in (SUCCESS, SHAPED))
        difference = sum(gamma**k * (b - a) for k, (a, b) in enumerate(zip(plain, shaped, strict=True)))
        assert difference == pytest.approx(-0.7 * potential([here]), abs=1e-12)


def test_shaping_with_shifted_values_keeps_advantages() -> None:
    """With shaping V'(s) = V(s) - weight Phi(s), so GAE's differences do not change."""
    gamma, lam, values, last = 0.9, 0.8, np.array([0.3, 0.6]), 0.5
    way = [[FAR], [HELD], [FAR]]
    phi = np.array([potential(each) for each in way])
    for goes_on, following in ((True, last), (False, 0.0)):
        plain = chunk_rewards(SUCCESS, 2, way, False, gamma, goes_on)
        shaped = chunk_rewards(SHAPED, 2, way, False, gamma, goes_on)
        shifted = last - 0.7 * phi[2] if goes_on else 0.0
        expected = gae(plain, values.tolist(), following, gamma, lam)
        np.testing.assert_allclose(gae(shaped, (values - 0.7 * phi[:2]).tolist(), shifted, gamma, lam), expected)


def test_rollout_rewards_match_the_simulators_progress(tmp_path: Path) -> None:
    loaded = calm_policy(tmp_path)
    policy = MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", rows=1)

    class Watched(Kitchen):
        """A simulator that records the potential of each progress that it reports."""

        def __init__(self) -> None:
            super().__init__()
            self.potentials: list[float] = []

        def progress(self, slot: int = 0) -> list[GoalProgress]:
            goals = super().progress(slot)
            self.potentials.append(potential(goals))
            return goals

    def play(reward: dict[str, object], batch: int) -> tuple[list[ActionChunk], list[float]]:
        settings, process = rollout_settings(reward=reward, batch=batch), Watched()
        images = ImageStore(tmp_path / "images")
        collector = Collector(settings, policy, [process], images, lambda done, total: None, gamma=0.9)
        return collector.collect(plan_step(settings, TASKS, 1), 1, 0, bootstrap=False).answers, process.potentials

    plain, nothing = play({"name": "success"}, 1)
    assert nothing == [] and {each.reward for each in plain} == {0.0, 1.0}
    progressed, potentials = play({"name": "progress"}, 1)
    shaped, _ = play({"name": "potential"}, 1)
    assert [each.reward for each in play({"name": "potential"}, 3)[0]] == [each.reward for each in shaped]
    at, solved = 0, set()
    for row, answer in enumerate(plain):
        before, after = potentials[at], potentials[at + 1]
        assert shaped[row].reward == pytest.approx(answer.reward + (0.0 if answer.done else 0.9 * after) - before)
        partly = 0.5 * after if answer.truncated else 0.0
        assert progressed[row].reward == pytest.approx(answer.reward + partly)
        at += 2 if answer.done else 1
        solved |= {answer.episode_id} if answer.done and not answer.truncated else set()
    assert at == len(potentials)

    built = build_batch(progressed, EpisodeGroupMean(name="group_mean"))
    episodes = {answer.episode_id for answer in plain}
    assert built.metrics["success"] == len(solved) / len(episodes) < built.metrics["reward"]
    assert built.drops["group_agrees"] <= build_batch(plain, EpisodeGroupMean(name="group_mean")).drops["group_agrees"]


@needs_libero
def test_progress_grows_during_a_demonstration() -> None:
    made = LiberoSimulator(suite_tasks("libero_spatial")[2], simulator(num_steps_wait=10))
    made.reset(0, 3)
    controller, seen = ScriptedPolicy(plan_for(made)), [made.progress()]
    success = False
    while not success and len(seen) < 280:
        success = made.step(controller.act(made.observed))
        seen.append(made.progress())
    first, last = seen[0][0], seen[-1][0]
    assert success and last.holds and not first.holds and not first.grasped
    assert first.place is not None and last.place is not None
    assert last.place < 0.04 < 0.1 < first.place and first.reach > 0.1
    assert potential(seen[0]) < 0.4 and potential(seen[-1]) == 1.0
    held = [each[0] for each in seen if each[0].grasped]
    assert held and all(each.reach < 0.12 for each in held)
    bowl, plate = (made.observed[f"{name}_pos"] for name in ("akita_black_bowl_1", "plate_1"))
    assert last.place == pytest.approx(float(np.linalg.norm(bowl - plate)), abs=1e-3)
    made.close()


@needs_libero
def test_progress_of_a_drawer_task_in_a_process() -> None:
    with SimulatorProcess(simulator(), 300) as process:
        process.reset(suite_tasks("libero_goal")[0], 0, 1)
        (goal,) = process.progress()
    assert not goal.holds and goal.place is None and 0.1 < goal.reach < 1.0
