"""The environment `motion`: which way does a square move? It is the smallest task that needs the order of frames."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from PIL import Image
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from armature.components.artifacts.videos import encode_video
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.settings import Settings
from armature.components.environments.generated import GeneratedEnvironment, bare_answer

WAYS = ("left", "right")


class MotionSettings(Settings):
    """Settings of the environment `motion`: one video, one question, one answer."""

    question: str = Field("Which way does the square move?", min_length=1)
    """Question that is shown below the video."""
    frames: int = Field(4, ge=2, le=64)
    """Number of frames."""
    fps: PositiveFloat = 2.0
    """Frames per second."""
    image_size: int = Field(28, ge=8, le=2048)
    """Width and height of a frame in pixels."""
    square: PositiveInt = 14
    """Width and height of the square in pixels."""
    pixels_per_frame: PositiveInt = 7
    """Pixels by which the square moves from a frame to the next; it leaves at one side and comes back at the other."""
    noise: float = Field(16.0, ge=0, le=255)
    """Standard deviation of the noise that each pixel gets, in levels from 0 to 255."""
    shuffled: bool = False
    """Show the frames in a random order, from which nobody can tell the direction."""

    @model_validator(mode="after")
    def _check_direction(self) -> Self:
        if max(2 * self.pixels_per_frame, self.square) >= self.image_size:
            raise PydanticCustomError(
                "direction_ambiguous",
                f"nobody can see which way a square of {self.square} pixels moves by {self.pixels_per_frame} pixels in "
                f"image_size = {self.image_size}: pixels_per_frame must be less than half of it, and square smaller",
            )
        return self


class Motion(GeneratedEnvironment[MotionSettings]):
    """An environment that asks for the direction of a square, left or right: a guess is right every second time.

    The square begins anywhere, and behind the right side comes the left side. So every frame is equally frequent in
    both directions at every time: only the order of frames tells which way it is.
    """

    name = "motion"
    Settings = MotionSettings
    draws_only = True
    max_turns = 1
    most_videos = 1

    def __init__(self, settings: MotionSettings, **counts: int) -> None:
        super().__init__(settings, **counts)
        self.reward_weights = {"correct": 1.0}

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        return {"way": WAYS[index % 2], "seed": seed}

    def demonstration(self, task: Task) -> list[str]:
        return [task.payload["way"]]

    def episode(self, task: Task) -> MotionEpisode:
        return MotionEpisode(task.payload["way"], task.payload["seed"], self.settings)


class MotionEpisode:
    """An episode of one turn: it shows the video and grades the answer."""

    def __init__(self, way: str, seed: int, settings: MotionSettings) -> None:
        self._way, self._seed, self._settings = way, seed, settings

    async def reset(self) -> Observation:
        return Observation((moving_square(self._way, self._seed, self._settings), self._settings.question))

    async def step(self, action: str) -> Outcome:
        return Outcome(None, {"correct": float(bare_answer(action) == self._way)})

    async def close(self) -> None:
        pass


def moving_square(way: str, seed: int, settings: MotionSettings) -> EncodedImage:
    """Return the video of a bright square on a dark ground. Equal arguments give the same video."""
    random, size, side = np.random.default_rng(seed), settings.image_size, settings.square
    left, top = int(random.integers(size)), int(random.integers(size - side + 1))
    frames = []
    for number in range(settings.frames):
        pixels = np.full((size, size, 3), 40.0)
        columns = (left + number * settings.pixels_per_frame + np.arange(side)) % size
        pixels[top : top + side, columns] = 215.0
        pixels += settings.noise * random.standard_normal(pixels.shape)
        frames.append(Image.fromarray(np.clip(pixels, 0, 255).round().astype(np.uint8)))
    if way == "left":
        frames.reverse()
    if settings.shuffled:
        frames = [frames[at] for at in random.permutation(len(frames))]
    return encode_video(frames, [number / settings.fps for number in range(settings.frames)])
