"""Name the color of a noisy image: the smallest task that cannot be solved without looking."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.environments.generated import ColorImageSettings, GeneratedEnvironment, color_reward, painter


class ColorsSettings(ColorImageSettings):
    """One image, one question, one answer."""

    question: str = Field("What colour is this?", min_length=1)
    """What is asked below the image."""
    correct_weight: float = 1.0
    """Reward for answering with exactly the color's name."""
    format_weight: float = 0.0
    """Reward for answering with exactly one of the colors' names."""


class Colors(GeneratedEnvironment[ColorsSettings]):
    """Every color comes equally often: a guess is right one time in `len(colors)`."""

    name = "colors"
    Settings = ColorsSettings
    max_turns = 1

    def __init__(
        self, settings: ColorsSettings, *, train_tasks: int, heldout_tasks: int, seed: int, processes: int
    ) -> None:
        super().__init__(settings, train_tasks=train_tasks, heldout_tasks=heldout_tasks, seed=seed, processes=processes)
        self.reward_weights = {"correct": settings.correct_weight, "format": settings.format_weight}
        self._paint = painter(settings)

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        return {"color": self.settings.names[index % len(self.settings.names)], "seed": seed}

    def demonstration(self, task: Task) -> list[str]:
        return [task.payload["color"]]

    def episode(self, task: Task) -> ColorsEpisode:
        image = self._paint(task.payload["color"], task.payload["seed"])
        return ColorsEpisode(image, task.payload["color"], self.settings)


class ColorsEpisode:
    def __init__(self, image: EncodedImage, color: str, settings: ColorsSettings) -> None:
        self._image, self._color, self._settings = image, color, settings

    async def reset(self) -> Observation:
        return Observation((self._image, self._settings.question))

    async def step(self, action: str) -> Outcome:
        return Outcome(None, color_reward(action, self._color, self._settings))

    async def close(self) -> None:
        pass
