"""The turns of one task's rollouts, laid side by side with what each of them scored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from armature.components.batches.settings import Deviation, PenaltySettings
from armature.components.contracts.errors import DataError
from armature.components.contracts.rollouts import Trajectory, Turn, all_equal

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Group:
    """The N turns of the M trajectories of one group, trajectory by trajectory.

    `member` (N,) int64: which trajectory a turn belongs to. `penalties` (N,): what its defect costs. `scores` (N,):
    the reward of its whole trajectory less that. `rewards` (M,): those of the trajectories, nothing subtracted.
    """

    group_id: str
    trajectories: tuple[Trajectory, ...]
    turns: tuple[Turn, ...]
    member: npt.NDArray[np.int64]
    penalties: Values
    rewards: Values
    scores: Values

    @property
    def weights(self) -> Values:
        """(N,) so that every trajectory counts once, however many turns it has."""
        return 1.0 / np.bincount(self.member)[self.member]

    @property
    def trajectory_scores(self) -> Values:
        """(M,) the mean score of each trajectory's turns."""
        return self.rewards - np.bincount(self.member, self.penalties * self.weights, len(self.rewards))


def deviation(squares: float, count: float, kind: Deviation) -> float:
    """The standard deviation of `count` numbers whose squared distances from their mean sum to `squares`."""
    return float(np.sqrt(squares / max(1.0, count - (kind == "sample"))))


def groups_that_differ(rewards: Iterable[tuple[str, float]]) -> list[str]:
    """Return the groups whose members did not all earn the same, in the order of their first member.

    Args:
        rewards: for each member the id of its group, and what it earned.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for group_id, reward in rewards:
        groups[group_id].append(reward)
    return [group_id for group_id, earned in groups.items() if not all_equal(earned)]


def groups_of(trajectories: Sequence[Trajectory], penalty: PenaltySettings) -> list[Group]:
    """Groups in the order in which they come. One whose reward is not finite is in none: it cannot be compared.

    Raises:
        DataError: a trajectory comes twice, which would count it twice in its group's mean.
    """
    members: dict[str, list[Trajectory]] = defaultdict(list)
    seen: set[str] = set()
    for trajectory in trajectories:
        if trajectory.trajectory_id in seen:
            raise DataError(
                "a trajectory comes twice: it would weigh double in its group",
                code="trajectory_repeated",
                where=trajectory.trajectory_id,
                remedy="give every rollout once",
            )
        seen.add(trajectory.trajectory_id)
        if np.isfinite(trajectory.reward):
            members[trajectory.group_id].append(trajectory)
    return [_group(group_id, tuple(group), penalty) for group_id, group in members.items()]


def _group(group_id: str, trajectories: tuple[Trajectory, ...], penalty: PenaltySettings) -> Group:
    costs = {None: 0.0, "format": penalty.format, "inadmissible": penalty.inadmissible}
    turns = tuple(turn for trajectory in trajectories for turn in trajectory.turns)
    member = np.repeat(np.arange(len(trajectories)), [len(trajectory.turns) for trajectory in trajectories])
    penalties = np.array([costs[turn.action_defect] for turn in turns], dtype=np.float64)
    rewards = np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64)
    return Group(group_id, trajectories, turns, member, penalties, rewards, rewards[member] - penalties)
