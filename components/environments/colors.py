"""Name the colour of a noisy picture: the smallest task that cannot be solved without looking."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from components.contracts.episodes import Observation, Outcome, Task
from components.contracts.images import EncodedImage
from components.environments.generated import GeneratedEnvironment
from components.environments.pictures import PictureSettings, colour_reward, painter


class ColorsSettings(PictureSettings):
    """One picture, one question, one answer."""

    question: str = Field("What colour is this?", min_length=1, description="What is asked below the picture.")
    correct_weight: float = Field(1.0, description="Reward for answering with exactly the colour's name.")
    format_weight: float = Field(0.0, description="Reward for answering with exactly one of the colours' names.")


class Colors(GeneratedEnvironment[ColorsSettings]):
    """Every colour comes equally often: a guess is right one time in `len(colours)`."""

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
        return {"colour": self.settings.names[index % len(self.settings.names)], "seed": seed}

    def demonstration(self, task: Task) -> list[str]:
        return [task.payload["colour"]]

    def episode(self, task: Task) -> ColorsEpisode:
        picture = self._paint(task.payload["colour"], task.payload["seed"])
        return ColorsEpisode(picture, task.payload["colour"], self.settings)


class ColorsEpisode:
    def __init__(self, picture: EncodedImage, colour: str, settings: ColorsSettings) -> None:
        self._picture, self._colour, self._settings = picture, colour, settings

    async def reset(self) -> Observation:
        return Observation((self._picture, self._settings.question))

    async def step(self, action: str) -> Outcome:
        return Outcome(None, colour_reward(action, self._colour, self._settings))

    async def close(self) -> None:
        pass
