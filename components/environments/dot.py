"""The environment `dot`: name the color of one pixel in a large gray image. It needs a tool that enlarges the pixel."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from PIL import Image
from pydantic import Field, NonNegativeInt, model_validator
from pydantic_core import PydanticCustomError

from armature.components.artifacts.images import encode_png
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.environments.generated import ColorImageSettings, GeneratedEnvironment, color_reward, painter


class DotSettings(ColorImageSettings):
    """Settings of the environment `dot`: one image, one question, one answer."""

    image_size: int = Field(896, ge=8, le=4096)
    """Width and height of the image in pixels. Processors shrink a large image until its dot is invisible."""
    dot: tuple[NonNegativeInt, NonNegativeInt] = (600, 300)
    """Column and row of the dot."""
    noise: float = Field(0.0, ge=0, le=255)
    """Standard deviation of the noise that each channel of the dot gets, in levels from 0 to 255."""
    question: str = Field("What color is the dot?", min_length=1)
    """Question that is shown below the image."""

    @model_validator(mode="after")
    def _check_dot(self) -> Self:
        if max(self.dot) >= self.image_size:
            raise PydanticCustomError(
                "dot_outside", f"the dot {self.dot} is not in an image of {self.image_size} pixels"
            )
        return self


class Dot(GeneratedEnvironment[DotSettings]):
    """An environment that asks for the color of a dot. Colors take turns: a guess is right once in `len(colors)`.

    In an image of 896 pixels that a processor shrinks to 28, a dot of any color is gray: it makes a thousandth of a
    pixel. In one that it shrinks to 168, two pixels differ from gray by up to 3 of 255 levels.
    """

    name = "dot"
    Settings = DotSettings
    draws_only = True
    max_turns = 1

    def __init__(self, settings: DotSettings, **counts: int) -> None:
        super().__init__(settings, **counts)
        self.reward_weights = {"correct": 1.0, "format": 0.0}
        self._paint = painter(settings, dotted_image)

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        return {"color": self.settings.names[index % len(self.settings.names)], "seed": seed}

    def demonstration(self, task: Task) -> list[str]:
        return [task.payload["color"]]

    def episode(self, task: Task) -> DotEpisode:
        return DotEpisode(
            self._paint(task.payload["color"], task.payload["seed"]), task.payload["color"], self.settings
        )


class DotEpisode:
    """An episode of one turn: it shows the image and grades the answer."""

    def __init__(self, image: EncodedImage, color: str, settings: DotSettings) -> None:
        self._image, self._color, self._settings = image, color, settings

    async def reset(self) -> Observation:
        return Observation((self._image, self._settings.question))

    async def step(self, action: str) -> Outcome:
        return Outcome(None, color_reward(action, self._color, self._settings))

    async def close(self) -> None:
        pass


def dotted_image(color: str, seed: int, settings: DotSettings) -> EncodedImage:
    """Return a gray image with one pixel of a color. Equal arguments give the same image."""
    random = np.random.default_rng(seed)
    brightness = 1 + settings.brightness_jitter * random.uniform(-1, 1)
    shift = settings.tint_jitter * random.uniform(-1, 1, 3) + settings.noise * random.standard_normal(3)
    pixels = np.full((settings.image_size, settings.image_size, 3), 128, np.uint8)
    column, row = settings.dot
    pixels[row, column] = np.clip(brightness * np.array(settings.colors[color]) + shift, 0, 255).round()
    return encode_png(Image.fromarray(pixels))
