"""Whether there is anything to learn from some rollouts."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from armature.components.batches.advantages import turn_advantages
from armature.components.batches.settings import BatchSettings
from armature.components.contracts.rollouts import Trajectory


def no_signal(trajectories: Sequence[Trajectory], settings: BatchSettings) -> str | None:
    """What to say where no turn of any group has an advantage, so that rewards would not change a weight; else None.

    Raises:
        ConfigurationError: GiGPO without any state to compare turns at.
    """
    groups = {trajectory.group_id for trajectory in trajectories}
    if not groups or groups - turn_advantages(trajectories, settings).without_gradient:
        return None
    rewards = {trajectory.reward for trajectory in trajectories}
    earned = f"each earned {min(rewards):g}" if len(rewards) == 1 else "members of a group all earned the same"
    answer = reprlib.repr(trajectories[0].turns[-1].completion) if trajectories[0].turns else "nothing"
    return (
        f"warning: nothing could be learned from these {len(trajectories)} rollouts of {len(groups)} groups: {earned}. "
        f"The first ended with {answer}. While that is so, no step changes the weights by rewards: see whether the "
        "reward can be earned by such answers, and whether the tasks are too hard or too easy"
    )
