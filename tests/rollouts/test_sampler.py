"""Tasks that gave no signal are played less often, and a sampler that starts again continues as it would have."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armature.components.contracts.episodes import Task
from armature.components.rollouts.sampler import PlayedGroup, SignalSampler, tasks_of_step
from armature.components.rollouts.settings import RolloutSettings


def plan(**values: object) -> RolloutSettings:
    return RolloutSettings.model_validate({"groups_per_step": 5, "sampling": {"max_tokens": 4}, "seed": 3} | values)


def some_tasks(count: int) -> list[Task]:
    return [Task(str(number), "train", {}) for number in range(count)]


class Played:
    """A run that plays the tasks that its sampler chooses. Rewards differ within the groups of tasks with even ids."""

    def __init__(self, tasks: list[Task], settings: RolloutSettings) -> None:
        self.sampler = SignalSampler(tasks, settings)
        self.steps: dict[int, list[list[Task]]] = {}

    def groups(self, step: int) -> list[PlayedGroup]:
        tasks = [task for each in self.steps[step] for task in each]
        return [PlayedGroup(step, one.task_id, 0.0, float(int(one.task_id) % 2 == 0)) for one in tasks]

    def until(self, last: int) -> Played:
        for step in range(len(self.steps) + 1, last + 1):
            self.steps[step] = self.sampler.tasks_of_step(step, self.groups)
        return self


@given(count=st.integers(1, 20), groups=st.integers(1, 15), rounds=st.integers(1, 3), seed=st.integers(0, 2**31))
@settings(max_examples=25)
def test_sampler_with_only_useful_tasks_keeps_the_plain_order(count, groups, rounds, seed):
    tasks = some_tasks(count)
    played = Played(tasks, plan(groups_per_step=groups, max_rounds=rounds, seed=seed, repeat_no_signal=1.0)).until(6)
    for step, chosen in played.steps.items():
        assert chosen == [tasks_of_step(tasks, groups, step, seed, number) for number in range(rounds)]


def test_useful_tasks_are_in_every_epoch():
    tasks = some_tasks(200)
    played = Played(tasks, plan(groups_per_step=40, repeat_no_signal=0.25)).until(200)
    times = Counter(task.task_id for step in range(1, 201) for task in played.steps[step][0])
    telling = [times[task.task_id] for task in tasks if int(task.task_id) % 2 == 0]
    silent = [times[task.task_id] for task in tasks if int(task.task_id) % 2]
    assert max(telling) - min(telling) <= 2  # the first epoch and the last are not whole
    # 8,000 draws over epochs of 100 + 25; the share of 100 silent tasks over 64 epochs has a standard error of 0.0054
    assert sum(silent) / 100 / (sum(telling) / 100) == pytest.approx(0.25, abs=0.025)


def test_task_with_signal_again_is_played_normally():
    sampler, tasks = SignalSampler(some_tasks(4), plan(groups_per_step=4, repeat_no_signal=0.01)), ["0", "1", "2", "3"]
    (first,) = sampler.tasks_of_step(1, lambda step: [])
    assert sorted(task.task_id for task in first) == tasks
    (second,) = sampler.tasks_of_step(2, lambda step: [PlayedGroup(1, name, 0, name != "2") for name in tasks])
    assert "2" not in {task.task_id for task in second}
    (third,) = sampler.tasks_of_step(3, lambda step: [PlayedGroup(2, "2", 0, 1)])
    (fourth,) = sampler.tasks_of_step(4, lambda step: [])
    assert "2" in {task.task_id for task in (*third, *fourth)}


def test_step_without_useful_tasks_is_filled():
    sampler = SignalSampler(some_tasks(3), plan(repeat_no_signal=0.01))
    sampler.tasks_of_step(1, lambda step: [])
    (chosen,) = sampler.tasks_of_step(2, lambda step: [PlayedGroup(1, str(number), 1, 1) for number in range(3)])
    assert len(chosen) == 5


@pytest.mark.parametrize("stopped", [1, 4, 9])
def test_resumed_sampler_continues_identically(stopped):
    settings = plan(max_rounds=2, repeat_no_signal=0.2)
    whole = Played(some_tasks(12), settings).until(10)
    again = SignalSampler(some_tasks(12), settings)
    assert again.tasks_of_step(stopped + 1, whole.groups) == whole.steps[stopped + 1]
    assert again.tasks_of_step(10, whole.groups) == whole.steps[10]


@given(count=st.integers(1, 30), groups=st.integers(1, 40), steps=st.integers(1, 12), seed=st.integers(0, 2**31))
def test_every_task_is_played_before_any_repeats(count, groups, steps, seed):
    tasks = some_tasks(count)
    walked = [task for step in range(steps) for task in tasks_of_step(tasks, groups, step, seed)]
    assert len(walked) == groups * steps
    for start in range(0, len(walked), count):
        assert max(Counter(task.task_id for task in walked[start : start + count]).values()) == 1


def test_tasks_of_a_step_depend_only_on_step_and_seed():
    tasks = some_tasks(50)
    assert tasks_of_step(tasks, 8, 17, 3) == tasks_of_step(list(tasks), 8, 17, 3)
    assert tasks_of_step(tasks, 8, 17, 3) != tasks_of_step(tasks, 8, 17, 4)
    assert tasks_of_step(tasks, 50, 0, 3) != tasks_of_step(tasks, 50, 1, 3)


def test_each_round_has_its_own_task_order():
    tasks = some_tasks(50)
    first = tasks_of_step(tasks, 50, 0, 3)
    assert [task.task_id for task in first] == [str(n) for n in np.random.default_rng((3, 0)).permutation(50)]
    assert tasks_of_step(tasks, 50, 0, 3, 0) == first
    for number in (1, 2):
        walked = [task for step in range(10) for task in tasks_of_step(tasks, 5, step, 3, number)]
        assert sorted(walked, key=tasks.index) == tasks and walked != first
    assert tasks_of_step(tasks, 8, 4, 3, 1) != tasks_of_step(tasks, 8, 4, 3, 2)
