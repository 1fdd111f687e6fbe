from __future__ import annotations

from armature.components.robots.rl.schedule import answer_seed, plan_step
from tests.refusals import refused
from tests.robots.evaluation.playground import TASKS
from tests.robots.rl.kitchen import rollout_settings


def test_all_initial_states_are_used_before_any_repeats() -> None:
    settings = rollout_settings()
    groups = [group for step in (1, 2, 3, 4) for group in plan_step(settings, TASKS, step)]
    begins = [{(each.task.index, each.initial_state, each.simulator_seed) for each in group} for group in groups]
    assert all(len(group) == 4 and len(begin) == 1 for group, begin in zip(groups, begins, strict=True))
    states = [next(iter(begin))[:2] for begin in begins]
    every = [(0, 0), (0, 3), (2, 0), (2, 3)]
    assert sorted(states[:4]) == sorted(states[4:]) == every
    assert len({next(iter(begin))[2] for begin in begins}) == 8


def test_all_starts_are_played_without_and_with_each_perturbation() -> None:
    settings = rollout_settings(perturbations={"camera": (0.5,), "robot": (0.25, 1.0)})
    groups = [group for step in range(1, 17) for group in plan_step(settings, TASKS, step)]
    begins = [{(each.task.index, each.initial_state, each.perturbation) for each in group} for group in groups]
    assert all(len(begin) == 1 for begin in begins)
    for lap in (begins[:16], begins[16:]):
        played = {(task, state, each and each.label) for begin in lap for task, state, each in begin}
        labels = (None, "camera/0.5", "robot/0.25", "robot/1")
        assert played == {(task, state, label) for task in (0, 2) for state in (0, 3) for label in labels}


def test_rounds_of_different_steps_are_different_groups() -> None:
    settings = rollout_settings(max_rounds=3)
    groups = [group for step in (1, 2) for number in range(3) for group in plan_step(settings, TASKS, step, number)]
    assert [group[0].repetition for group in groups] == [*range(12)]
    assert plan_step(settings, TASKS, 0) == plan_step(rollout_settings(), TASKS, 0)


def test_all_chunks_of_a_run_have_different_seeds() -> None:
    settings = rollout_settings()
    seeds = [
        answer_seed(settings, step, planned, chunk)
        for step in (0, 1, 2)
        for group in plan_step(settings, TASKS, step)
        for planned in group
        for chunk in range(3)
    ]
    assert len(set(seeds)) == len(seeds) == 3 * 4 * 5
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_rejects_unknown_tasks_and_initial_states() -> None:
    with refused("unknown_task", "libero_spatial", 7):
        plan_step(rollout_settings(tasks=(7,)), TASKS, 1)
    with refused("unknown_initial_state", 5):
        plan_step(rollout_settings(initial_states=(5,)), TASKS, 1)
