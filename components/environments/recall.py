"""The environment `recall`: name the color of an image from an earlier turn.

It can only be solved if the images of earlier turns stay in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.environments.generated import ColorImageSettings, GeneratedEnvironment, color_reward, painter

NUMBER = "{number}"


class RecallSettings(ColorImageSettings):
    """Settings of the environment `recall`: turns with an image, then turns without one, then the question."""

    images: PositiveInt = 1
    """Number of turns that show an image; each image has another color."""
    filler_turns: NonNegativeInt = 0
    """Number of turns without an image between the last image and the question."""
    asked: Literal["first", "last", "random"] = "first"
    """The image whose color the question asks for."""
    remember: str = Field("Remember this picture.", min_length=1)
    """Text below an image; {number} is replaced by the image's number."""
    filler: str = Field("Go on.", min_length=1)
    """Text of a turn without an image."""
    question: str = Field("Which colour was it?", min_length=1)
    """Text of the last turn; {number} is replaced by the number of the image that is asked for."""
    correct_weight: float = 1.0
    """Reward for an answer that is exactly the color's name."""
    format_weight: float = 0.0
    """Reward for an answer that is exactly one of the colors' names, right or wrong."""

    @model_validator(mode="after")
    def _check_question(self) -> Self:
        if self.images > len(self.colors):
            raise PydanticCustomError(
                "too_few_colors", f"{self.images} images of different colors need more than {len(self.colors)} colors"
            )
        if self.images > 1 and self.asked == "random" and NUMBER not in self.question:
            raise PydanticCustomError(
                "number_place_missing", f"the question does not name the image that it asks for: put {NUMBER} into it"
            )
        return self


class Recall(GeneratedEnvironment[RecallSettings]):
    """An environment that asks for the color of an earlier image. Only the last turn is rewarded.

    Over the tasks, each color is the answer equally often; the other images' colors are drawn without replacement. A
    guess is right once in `len(colors)`; a policy that remembers the images but not which one is asked for is right
    once in `images`.
    """

    name = "recall"
    Settings = RecallSettings
    draws_only = True

    def __init__(self, settings: RecallSettings, **counts: int) -> None:
        super().__init__(settings, **counts)
        self.max_turns = settings.images + settings.filler_turns + 1
        self.reward_weights = {"correct": settings.correct_weight, "format": settings.format_weight}
        self._paint = painter(settings)

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        names, images = self.settings.names, self.settings.images
        choices = {"first": 0, "last": images - 1, "random": int(random.integers(images))}
        asked = choices[self.settings.asked]
        answer = names[index % len(names)]
        colors = [str(name) for name in random.permutation([name for name in names if name != answer])]
        return {"colors": [*colors[:asked], answer, *colors[asked : images - 1]], "asked": asked, "seed": seed}

    def episode(self, task: Task) -> RecallEpisode:
        return RecallEpisode(task, self.settings, self._paint)


class RecallEpisode:
    """An episode that shows its images in order, then the filler turns, then the question."""

    def __init__(self, task: Task, settings: RecallSettings, paint: Callable[[str, int], EncodedImage]) -> None:
        self._colors: list[str] = task.payload["colors"]
        self._asked: int = task.payload["asked"]
        self._seed: int = task.payload["seed"]
        self._settings, self._paint = settings, paint
        self._turn = 0

    async def reset(self) -> Observation:
        self._turn = 0
        return self._observation()

    async def step(self, action: str) -> Outcome:
        if self._turn == self._settings.images + self._settings.filler_turns:
            return Outcome(None, color_reward(action, self._colors[self._asked], self._settings))
        self._turn += 1
        return Outcome(self._observation())

    async def close(self) -> None:
        pass

    def _observation(self) -> Observation:
        settings, turn = self._settings, self._turn
        if turn < settings.images:
            image = self._paint(self._colors[turn], self._seed + turn * 2**64)
            return Observation((image, settings.remember.replace(NUMBER, str(turn + 1))))
        if turn < settings.images + settings.filler_turns:
            return Observation((settings.filler,))
        return Observation((settings.question.replace(NUMBER, str(self._asked + 1)),))
