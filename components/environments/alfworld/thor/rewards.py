"""What a turn in AI2-THOR earns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from armature.components.contracts.settings import Settings


class TerminalReward(Settings):
    """The win alone."""

    name: Literal["terminal"] = Field(description="terminal: nothing but the win is rewarded.")
    won_weight: float = Field(10.0, description="Reward for the win.")


class PotentialReward(Settings):
    """The win, and each turn's change of the share of the goal's conditions that hold.

    Over an episode the changes sum up to the last share minus the first, however long a share was held; what is
    undone is taken back.
    """

    name: Literal["potential"] = Field(description="potential: progress is rewarded as well, when it is made.")
    won_weight: float = Field(10.0, description="Reward for the win.")
    progress_weight: float = Field(1.0, description="Reward for all of the goal's conditions; a part earns its share.")


RewardSettings = Annotated[TerminalReward | PotentialReward, Field(discriminator="name")]


class RewardTracker:
    """The reward parts of one episode's turns. `share` is that of the start, in [0, 1]."""

    def __init__(self, settings: TerminalReward | PotentialReward, share: float) -> None:
        self._progress = isinstance(settings, PotentialReward)
        self._share = share

    def turn(self, share: float, won: bool) -> dict[str, float]:
        """Of a turn after which `share` of the conditions hold."""
        parts = {"won": float(won)}
        if self._progress:
            parts["progress"], self._share = share - self._share, share
        return parts


def weights(settings: TerminalReward | PotentialReward) -> dict[str, float]:
    """The weight of each part."""
    progress = {"progress": settings.progress_weight} if isinstance(settings, PotentialReward) else {}
    return {"won": settings.won_weight, **progress}
