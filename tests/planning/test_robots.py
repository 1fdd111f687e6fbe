"""Plans of train-vla-rl: the simulated loop against formulas by hand, and costs from the records of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.configuration import load_recipe
from armature.components.evaluation.libero.settings import LiberoEvaluationSettings
from armature.components.planning.clock import VirtualLoop
from armature.components.planning.robots.costs import RobotCosts
from armature.components.planning.robots.play import SimulatedPlay
from armature.components.planning.robots.simulate import SimulatedRobotRun
from armature.components.planning.robots.workload import RobotEpisode, RobotWorkload, RobotWorkloadSettings, drawn
from armature.components.policies.molmoact2.policy import open_policy
from armature.components.vla_rl.collect import Collector
from armature.components.vla_rl.schedule import plan_step
from armature.components.vla_rl.settings import RewardWeighted, TrainVLARLSettings
from tests.environments.libero.simulated import needs_libero
from tests.evaluation.libero.playground import TASKS
from tests.vla_rl.kitchen import Kitchen, calm_policy, rollout_settings

pytestmark = needs_libero
GROUPS, SIZE, ACTIONS, CHUNK = 3, 8, 25, 10
ANSWERS = 3
"""Of an episode: 10, 10 and 5 actions."""
RESET, ACTION, PASS, KEEP = 1.0, 0.1, 0.05, 0.002
COSTS = RobotCosts.model_validate(
    {
        "simulators": {"build_seconds": 9.0, "reset_seconds": RESET, "action_seconds": ACTION},
        "policy": {"pass_seconds": PASS, "rows": 1},
        "trainer": {"answer_seconds": 0.03, "update_seconds": 0.4},
        "flow": {"answer_seconds": KEEP, "batch_answer_seconds": 0.01},
        "sync_seconds": 0.75,
    }
)
HALF = [RobotEpisode(ACTIONS, member % 2 == 0, float(member % 2 == 0)) for member in range(SIZE)]
"""A group whose episodes differ."""
ALL = [RobotEpisode(ACTIONS, True, 1.0)] * SIZE


def make_run(groups: Any = (HALF,), changes: tuple[str, ...] = (), **others: Any) -> SimulatedRobotRun:
    settings = load_recipe("train-vla-rl/tiny", ["rollouts.batch=1", *changes]).settings_for(TrainVLARLSettings)
    assert isinstance(settings, TrainVLARLSettings)
    run = SimulatedRobotRun(
        settings, COSTS, RobotWorkload([list(groups)], "by hand"), processes=1, ranks=1, chunk=CHUNK
    )
    return replace(run, **others)


def episode(reset: float = RESET, answers: int = ANSWERS) -> float:
    """Of one that is played alone."""
    return reset + answers * PASS + ACTIONS * ACTION + ANSWERS * KEEP


def train(answers: int, ranks: int = 1) -> float:
    """Two epochs of updates with 32 answers at most, as even as they can be."""
    parts = -(-answers // 32)
    sizes = [answers // parts + (part < answers % parts) for part in range(parts)]
    return 2 * sum(0.03 * -(-size // ranks) + 0.4 for size in sizes)


BATCH = GROUPS * SIZE * ANSWERS * 0.01


def test_in_turn_a_step_is_the_sum_of_its_parts() -> None:
    found = make_run().simulate()
    rollouts = GROUPS * SIZE * episode()
    assert found.timings["timing/wait_for_rollouts"] == pytest.approx(rollouts, rel=1e-9)
    assert found.timings["timing/train"] == pytest.approx(train(GROUPS * SIZE * ANSWERS), rel=1e-9)
    assert found.step_seconds == pytest.approx(rollouts + BATCH + train(72) + 0.75, rel=1e-9)
    assert found.episodes_per_step == GROUPS * SIZE and found.answers_per_step == found.trained_per_step == 72
    busy = GROUPS * SIZE * (RESET + ACTIONS * ACTION)
    assert found.simulator_share == pytest.approx(busy / found.step_seconds, rel=1e-9)
    assert found.policy_share == pytest.approx(72 * PASS / found.step_seconds, rel=1e-9)


def test_groups_that_agree_are_not_trained_on() -> None:
    """The real advantages decide: one group of three differs."""
    found = make_run([HALF, ALL, ALL]).simulate()
    assert found.trained_per_step == SIZE * ANSWERS
    assert found.timings["timing/train"] == pytest.approx(train(24), rel=1e-9)


def test_solved_episodes_of_earlier_steps_are_trained_on_again() -> None:
    """Half of each step's, of three steps, from the first step that has two before it."""
    run = make_run()
    trainer = run.settings.trainer.model_copy(
        update={"objective": RewardWeighted(name="reward_weighted", earlier_steps=2)}
    )
    found = replace(run, settings=run.settings.model_copy(update={"trainer": trainer})).simulate()
    assert found.answers_per_step == 72 and found.trained_per_step == 3 * 72 / 2
    assert found.timings["timing/train"] == pytest.approx(train(108), rel=1e-9)


def test_further_rounds_are_played_until_enough_groups_differ() -> None:
    """A round of three groups has one that differs, so three rounds are played."""
    found = make_run([HALF, ALL, ALL], ("rollouts.max_rounds=5",)).simulate()
    assert found.episodes_per_step == 3 * GROUPS * SIZE and found.trained_per_step == GROUPS * SIZE * ANSWERS


def test_gae_asks_the_policy_once_more_after_an_episode_that_failed() -> None:
    found = make_run(changes=('trainer.advantage={name="gae"}',)).simulate()
    rollouts = GROUPS * SIZE // 2 * (episode() + episode(answers=ANSWERS + 1) - 0.0)
    assert found.timings["timing/wait_for_rollouts"] == pytest.approx(rollouts, rel=1e-9)


def test_one_step_ahead_the_longer_of_the_two_counts() -> None:
    costs = COSTS.replaced({"trainer": {"answer_seconds": 2.0}}, "by hand")
    found = make_run(changes=("rollouts.max_staleness=1",), costs=costs).simulate()
    updates = 2 * (72 * 2.0 + 3 * 0.4)
    assert updates > GROUPS * SIZE * episode()
    assert found.step_seconds == pytest.approx(BATCH + updates + 0.75, rel=1e-9)


def test_who_waits_is_answered_in_one_call() -> None:
    """Four in lockstep in processes of their own share a pass of four rows; two that share a process do not step at
    the same time."""
    costs = COSTS.replaced({"policy": {"rows": 4}, "flow": {"answer_seconds": 0.0}}, "by hand")
    own = make_run(changes=("rollouts.batch=4",), costs=costs, processes=4).simulate()
    lap = RESET + ANSWERS * PASS + ACTIONS * ACTION
    assert own.timings["timing/wait_for_rollouts"] == pytest.approx(GROUPS * SIZE / 4 * lap, rel=1e-9)
    shared = make_run(changes=("rollouts.batch=2",), costs=costs).simulate()
    steps = GROUPS * SIZE * (RESET + ACTIONS * ACTION)
    assert shared.timings["timing/wait_for_rollouts"] >= steps
    assert shared.simulator_share > own.simulator_share


def test_ranks_share_the_answers_of_an_update_and_gather_weights() -> None:
    costs = COSTS.replaced({"trainer": {"gather_seconds": 0.5}}, "by hand")
    two = make_run(ranks=2, costs=COSTS).simulate()
    assert two.timings["timing/train"] == pytest.approx(train(72, ranks=2), rel=1e-9)
    gathered = make_run(
        ranks=2, costs=costs
    ).simulate()  # 3 updates of 24 answers, 12 micro-batches of 1 each, 2 epochs
    assert gathered.timings["timing/train"] == pytest.approx(2 * 3 * (12 * 0.5 + 0.4), rel=1e-9)


def test_updates_that_target_kl_forbids_take_no_time() -> None:
    half = make_run(workload=RobotWorkload([[HALF]], "by hand", updates_made=0.5))
    assert half.simulate().timings["timing/train"] == pytest.approx(train(72) / 2, rel=1e-9)


def test_a_slot_builds_a_simulator_for_each_new_task() -> None:
    """Two tasks and one slot: a step begins with the task that the one before ended with, and builds the other."""
    changes = ("rollouts.tasks=[0,1]", "rollouts.groups_per_step=16", "rollouts.group_size=2")
    found = make_run([ALL], changes).simulate()
    waits = found.timings["timing/wait_for_rollouts"]
    assert waits == pytest.approx(32 * episode() + (9.0 - RESET), rel=1e-9)


def test_simulators_are_built_as_often_as_by_the_real_collector(tmp_path: Path) -> None:
    """One slot and three tasks, some or all of which a step plays."""
    calm_policy(tmp_path)
    settings, images = (
        rollout_settings(tasks=(0, 1, 2), groups_per_step=3, max_steps=2),
        ImageStore(tmp_path / "images"),
    )
    collector = Collector(settings, open_policy(tmp_path, "continuous", 1), [Kitchen()], images, lambda *_: None)
    costs = COSTS.replaced({"simulators": {"build_seconds": 1.0, "reset_seconds": 0.0, "action_seconds": 0.0}}, "")
    play, loop, builds = SimulatedPlay(costs, 1), VirtualLoop(), []
    for step in (1, 2, 3, 4, 5):
        groups, before = plan_step(settings, TASKS, step), play.arenas[0].busy
        collector.collect(groups, step, 0, bootstrap=False)
        planned = [one for group in groups for one in group]
        loop.run_until_complete(play.play(planned, lambda _: RobotEpisode(2, False, 0.0), 1, 2))
        builds.append(collector.times.since()["simulator/builds"])
        assert play.arenas[0].busy - before == pytest.approx(builds[-1])
    loop.close()
    assert set(builds) == {1.0, 2.0}


def test_an_evaluation_plays_all_of_its_episodes() -> None:
    evaluation = LiberoEvaluationSettings(
        suites=("libero_spatial",), tasks=(0,), episodes_per_task=6, max_steps={"libero_spatial": 30}, batch=1
    )
    seconds = make_run([ALL]).evaluation_seconds(evaluation)
    own = ANSWERS * PASS + ACTIONS * ACTION  # nothing is kept
    assert seconds == pytest.approx(9.0 + 5 * RESET + 6 * own, rel=1e-9)


def test_evaluations_during_training_are_where_they_are_due() -> None:
    held_out = ("evaluation.every=2", "evaluation.panel_episodes=4")
    found = make_run(changes=held_out, steps=4).simulate()
    assert found.timings["timing/evaluation"] > 0
    assert found.step_seconds > make_run(steps=4).simulate().step_seconds


def test_drawn_episodes_are_as_described() -> None:
    settings = RobotWorkloadSettings(success=0.25, solved_actions=0.5, spread=0.1)
    [groups] = drawn(settings, 200, 8, False, 0, "").steps
    every = [one for group in groups for one in group]
    solved = [one for one in every if one.solved]
    assert len(every) == 1024 and len(solved) / len(every) == pytest.approx(0.25, abs=0.05)
    assert sum(one.actions for one in solved) / len(solved) == pytest.approx(100, rel=0.03)
    assert {one.actions for one in every if not one.solved} == {200}
    assert {one.earned for one in every} == {0.0, 1.0}
