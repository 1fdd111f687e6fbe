"""The environment `colors`: name the color of a noisy image. It is the smallest task that needs vision."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.environments.generated import ColorImageSettings, GeneratedEnvironment, color_reward, painter


class ColorsSettings(ColorImageSettings):
    """Settings of the environment `colors`: one image, one question, one answer."""

    question: str = Field("What colour is this?", min_length=1)
    """Question that is shown below the image."""
    correct_weight: float = 1.0
    """Reward for an answer that is exactly the color's name."""
    format_weight: float = 0.0
    """Reward for an answer that is exactly one of the colors' names, right or wrong."""


class Colors(GeneratedEnvironment[ColorsSettings]):
    """An environment that asks for the color of an image. Colors take turns: a guess is right once in `len(colors)`."""

    name = "colors"
    Settings = ColorsSettings
    draws_only = True
    max_turns = 1

    def __init__(self, settings: ColorsSettings, **counts: int) -> None:
        super().__init__(settings, **counts)
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
    """An episode of one turn: it shows the image and grades the answer."""

    def __init__(self, image: EncodedImage, color: str, settings: ColorsSettings) -> None:
        self._image, self._color, self._settings = image, color, settings

    async def reset(self) -> Observation:
        return Observation((self._image, self._settings.question))

    async def step(self, action: str) -> Outcome:
        return Outcome(None, color_reward(action, self._color, self._settings))

    async def close(self) -> None:
        pass
