"""Group-relative advantages: a trajectory is as good as it is better than its siblings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from components.contracts.rollouts import Trajectory

EPSILON = 1e-4
Scale = Literal["group_std", "batch_std", "none"]


@dataclass(frozen=True)
class GroupAdvantages:
    """`by_trajectory`: the advantage of each trajectory. `zero_variance`: ids of groups that carry no gradient."""

    by_trajectory: dict[str, float]
    groups: int
    zero_variance: frozenset[str]


def group_advantages(trajectories: Sequence[Trajectory], scale: Scale) -> GroupAdvantages:
    """A_i = (R_i - mean_group R) / s, with s = std_group R + 1e-4 (GRPO, arXiv 2402.03300, eq. for outcome
    supervision), std over the batch of all centred rewards, or 1 (Dr. GRPO, arXiv 2503.20783).

    The standard deviation is the population's. Failed members are not part of a group; a group with one member
    left has no baseline, so its advantage is 0 and it counts as one of zero variance.
    """
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group_id].append(trajectory)
    centred: dict[str, float] = {}
    deviation: dict[str, float] = {}
    zero_variance = set()
    for group_id, members in groups.items():
        rewards = np.array([member.reward for member in members], dtype=np.float64)
        if np.ptp(rewards) == 0.0:
            zero_variance.add(group_id)
        for member, reward in zip(members, rewards - rewards.mean(), strict=True):
            centred[member.trajectory_id] = 0.0 if group_id in zero_variance else float(reward)
            deviation[member.trajectory_id] = float(rewards.std())
    if scale == "batch_std":
        deviation = dict.fromkeys(deviation, float(np.std(list(centred.values()))) if centred else 0.0)
    if scale == "none":
        by_trajectory = centred
    else:
        by_trajectory = {key: value / (deviation[key] + EPSILON) for key, value in centred.items()}
    return GroupAdvantages(by_trajectory, len(groups), frozenset(zero_variance))
