"""What becomes of episodes: those of a run that was made, or drawn from a description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import Field, NonNegativeFloat

from armature.components.contracts.settings import Settings


class RobotWorkloadSettings(Settings):
    """Episodes that are drawn: one that fails takes all of its actions."""

    success: float = Field(0.5, ge=0, le=1, description="Share of the episodes that solve their task.")
    solved_actions: float = Field(0.6, gt=0, le=1, description="Mean actions of one that does, over max_steps.")
    spread: NonNegativeFloat = Field(0.2, description="Standard deviation over mean of these; 0: all are alike.")


@dataclass(frozen=True)
class RobotEpisode:
    """`earned`: its reward, which groups are compared by."""

    actions: int
    solved: bool
    earned: float


Group = Sequence[RobotEpisode]


@dataclass(frozen=True)
class RobotWorkload:
    """The groups of each step that was made, or of one for all, which follow one another again and again.

    A group keeps its episodes together: where all earn the same, none is trained on. `updates_made` is the share of a
    step's updates that `target_kl` lets be made. `source` says where all is from.
    """

    steps: Sequence[Sequence[Group]]
    source: str
    updates_made: float = 1.0

    def episode(self, step: int, group: int, member: int) -> RobotEpisode:
        groups = self.steps[step % len(self.steps)]
        episodes = groups[group % len(groups)]
        return episodes[member % len(episodes)]

    def evened(self) -> RobotWorkload:
        """Every episode has the mean of all actions, and is as it was."""
        every = [episode for step in self.steps for group in step for episode in group]
        mean = max(1, round(sum(episode.actions for episode in every) / len(every)))
        steps = [[[replace(one, actions=mean) for one in group] for group in step] for step in self.steps]
        return RobotWorkload(steps, self.source, self.updates_made)


def drawn(
    settings: RobotWorkloadSettings, max_steps: int, group_size: int, partly: bool, seed: int, source: str
) -> RobotWorkload:
    """Some 1,024 episodes of at most `max_steps` actions.

    Args:
        partly: whether episodes that fail earn something too, each something else.
    """
    random = np.random.default_rng((seed, 0x70B))
    mean = settings.solved_actions * max_steps

    def episode() -> RobotEpisode:
        solved = bool(random.random() < settings.success)
        actions = round(float(random.normal(mean, settings.spread * mean))) if solved else max_steps
        earned = 1.0 if solved else partly * float(random.random())
        return RobotEpisode(min(max(actions, 1), max_steps), solved, earned)

    groups = [[episode() for _ in range(group_size)] for _ in range(max(1, 1024 // group_size))]
    return RobotWorkload([groups], source)
