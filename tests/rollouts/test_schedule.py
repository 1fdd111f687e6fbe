"""Which tasks a step plays."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from armature.components.contracts.episodes import Task
from armature.components.rollouts.schedule import tasks_of_step


def some_tasks(count: int) -> list[Task]:
    return [Task(str(number), "train", {}) for number in range(count)]


@given(count=st.integers(1, 30), groups=st.integers(1, 40), steps=st.integers(1, 12), seed=st.integers(0, 2**31))
def test_no_task_comes_again_before_all_have_come(count, groups, steps, seed):
    tasks = some_tasks(count)
    walked = [task for step in range(steps) for task in tasks_of_step(tasks, groups, step, seed)]
    assert len(walked) == groups * steps
    for start in range(0, len(walked), count):
        assert max(Counter(task.task_id for task in walked[start : start + count]).values()) == 1


def test_a_step_depends_on_nothing_but_its_number_and_the_seed():
    tasks = some_tasks(50)
    assert tasks_of_step(tasks, 8, 17, 3) == tasks_of_step(list(tasks), 8, 17, 3)
    assert tasks_of_step(tasks, 8, 17, 3) != tasks_of_step(tasks, 8, 17, 4)
    assert tasks_of_step(tasks, 50, 0, 3) != tasks_of_step(tasks, 50, 1, 3)


def test_rounds_walk_through_lists_of_their_own_and_the_first_is_the_steps():
    tasks = some_tasks(50)
    first = tasks_of_step(tasks, 50, 0, 3)
    assert [task.task_id for task in first] == [str(n) for n in np.random.default_rng((3, 0)).permutation(50)]
    assert tasks_of_step(tasks, 50, 0, 3, 0) == first
    for number in (1, 2):
        walked = [task for step in range(10) for task in tasks_of_step(tasks, 5, step, 3, number)]
        assert sorted(walked, key=tasks.index) == tasks and walked != first
    assert tasks_of_step(tasks, 8, 4, 3, 1) != tasks_of_step(tasks, 8, 4, 3, 2)
