"""Which tasks a step plays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from armature.components.contracts.episodes import Task


def tasks_of_step(tasks: Sequence[Task], groups_per_step: int, step: int, seed: int, round: int = 0) -> list[Task]:
    """The tasks of round `round` of step `step` (both from 0), one per group.

    All steps together walk through one endless list: the tasks in an order drawn for epoch 0, then in one drawn
    for epoch 1, and so on. So no task comes again before all others have come, and a resumed run needs to
    know nothing but its step. Further rounds walk through lists of their own, so that what a step plays does not
    depend on how many rounds the steps before it needed.
    """
    positions = np.arange(step * groups_per_step, (step + 1) * groups_per_step)
    orders = {
        int(epoch): task_order(len(tasks), seed, int(epoch), round) for epoch in np.unique(positions // len(tasks))
    }
    return [tasks[orders[position // len(tasks)][position % len(tasks)]] for position in positions.tolist()]


def task_order(count: int, seed: int, epoch: int, round: int) -> npt.NDArray[np.int64]:
    """(count,) int64: the order of the tasks in an epoch of a round's list."""
    return np.random.default_rng((seed, epoch, round)).permutation(count)
