"""The environment `digits`: what is the sum of the handwritten digits in an image?

The digits are scikit-learn's, 1,797 images of 8 x 8 pixels that people have written. Every fifth of them is held out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from PIL import Image
from pydantic import Field

from armature.components.artifacts.images import encode_png
from armature.components.artifacts.sources import versions
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.settings import Settings
from armature.components.environments.generated import GeneratedEnvironment
from armature.components.rewards.number import read_number

HELDOUT = 5
"""One in so many handwritten digits is shown in held-out tasks only."""


class DigitsSettings(Settings):
    """Settings of the environment `digits`: one image, one question, one answer."""

    question: str = Field("What is the sum of the digits?", min_length=1)
    """Question that is shown below the image."""
    digits: int = Field(2, ge=1, le=9)
    """Number of digits side by side."""
    image_size: int = Field(28, ge=8, le=512)
    """Width and height of a digit in pixels."""


class Digits(GeneratedEnvironment[DigitsSettings]):
    """An environment that asks for the sum of handwritten digits. Only the last number of an answer is graded.

    Demonstrations read the digits first: "3 + 5 = 8". A constant guess at the sum of two is right once in ten times.
    """

    name = "digits"
    Settings = DigitsSettings
    draws_only = True
    max_turns = 1

    def __init__(self, settings: DigitsSettings, **counts: int) -> None:
        super().__init__(settings, **counts)
        self.reward_weights = {"correct": 1.0}

    @staticmethod
    def sources(settings: DigitsSettings) -> dict[str, str]:
        """Return the version of the package with the images."""
        return versions("scikit-learn")

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        """Return the rows of scikit-learn's table that a task shows; `seed` is odd for held-out tasks."""
        rows = np.arange(len(handwritten()[1]))
        rows = rows[(rows % HELDOUT == 0) == bool(seed % 2)]
        return {"rows": np.random.default_rng(seed).choice(rows, self.settings.digits, replace=False).tolist()}

    def demonstration(self, task: Task) -> list[str]:
        digits = handwritten()[1][task.payload["rows"]]
        return [f"{' + '.join(map(str, digits))} = {digits.sum()}"]

    def episode(self, task: Task) -> DigitsEpisode:
        return DigitsEpisode(task.payload["rows"], self.settings)


class DigitsEpisode:
    """An episode of one turn: it shows the digits and grades the sum."""

    def __init__(self, rows: list[int], settings: DigitsSettings) -> None:
        self._rows, self._settings = rows, settings

    async def reset(self) -> Observation:
        return Observation((side_by_side(self._rows, self._settings.image_size), self._settings.question))

    async def step(self, action: str) -> Outcome:
        total = handwritten()[1][self._rows].sum()
        return Outcome(None, {"correct": float(read_number(action, "last", percent=1.0) == total)})

    async def close(self) -> None:
        pass


@cache
def handwritten() -> tuple[Any, Any]:
    """Return all images (1797, 8, 8), from 0 for paper to 16 for ink, and their digits (1797,)."""
    from sklearn.datasets import load_digits  # MLflow depends on scikit-learn

    table = load_digits()
    return table.images, table.target


def side_by_side(rows: list[int], size: int) -> EncodedImage:
    """Return an image of `size` x `size` pixels for each row, from left to right, bright on a dark ground."""
    shown = [Image.fromarray((handwritten()[0][row] * 255 / 16).round().astype(np.uint8)) for row in rows]
    enlarged = [np.asarray(each.resize((size, size), Image.Resampling.BILINEAR)) for each in shown]
    return encode_png(Image.fromarray(np.concatenate(enlarged, axis=1)).convert("RGB"))
