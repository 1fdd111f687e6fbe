"""Which tasks a step plays, where tasks that lately gave no signal are played less often."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from armature.components.contracts.episodes import Task
from armature.components.rollouts.difficulty import PlayedGroup
from armature.components.rollouts.schedule import task_order
from armature.components.rollouts.settings import RolloutSettings

Groups = Callable[[int], Iterable[PlayedGroup]]
"""The groups that a step has played."""


class SignalSampler:
    """Walks through the lists of `tasks_of_step`, from step 1, and leaves tasks out.

    A task whose last group had equal rewards is taken with the probability `plan.repeat_no_signal`, drawn for each
    epoch. What step k plays follows from the seed and from the groups of the steps before it, so a sampler that
    starts with those of a stored run continues as the one of that run would have.
    """

    def __init__(self, tasks: Sequence[Task], plan: RolloutSettings) -> None:
        self._tasks, self._plan = tasks, plan
        self._places = [plan.groups_per_step] * plan.max_rounds
        self._no_signal: set[str] = set()
        self._step, self._chosen = 0, list[list[Task]]()

    def tasks_of_step(self, step: int, played: Groups) -> list[list[Task]]:
        """The tasks of each round of `step`; steps are asked for in their order.

        Args:
            played: gives the groups of the steps from that of the last call to the one before `step`.
        """
        while self._step < step:
            if self._step:
                self._learn(played(self._step))
            self._step += 1
            self._chosen = [self._walk(number) for number in range(self._plan.max_rounds)]
        return self._chosen

    def _learn(self, groups: Iterable[PlayedGroup]) -> None:
        for group in groups:
            (self._no_signal.discard if group.differs else self._no_signal.add)(group.task_id)

    def _walk(self, number: int) -> list[Task]:
        """The next tasks of the list of round `number`."""
        plan, count = self._plan, len(self._tasks)
        chosen: list[Task] = []
        while len(chosen) < plan.groups_per_step:
            epoch, start = divmod(self._places[number], count)
            order = task_order(count, plan.seed, epoch, number)
            draws = np.random.default_rng((plan.seed, epoch, number, 1)).random(count)
            for place in range(start, count):
                task = self._tasks[order[place]]
                self._places[number] += 1
                if task.task_id not in self._no_signal or draws[place] < plan.repeat_no_signal:
                    chosen.append(task)
                if len(chosen) == plan.groups_per_step:
                    break
        return chosen
