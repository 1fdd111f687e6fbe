"""The environment `coordinates`: give the pixel coordinates of a dot in an image, with a hint after each miss."""

from __future__ import annotations

import math
import re
from typing import Any, Self

import numpy as np
from PIL import Image, ImageDraw
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from armature.components.artifacts.images import encode_png
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.settings import Settings
from armature.components.environments.generated import GeneratedEnvironment

Point = tuple[float, float]

_NUMBER = r"(-?\d{1,6}(?:\.\d{1,6})?)"
_PAIR = re.compile(rf"\(?\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\)?\.?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


class CoordinatesSettings(Settings):
    """Settings of the environment `coordinates`: a dot on a square image."""

    image_size: int = Field(224, ge=16, le=2048)
    """Width and height of the image in pixels."""
    dot_radius: PositiveInt = 8
    """Radius of the dot in pixels."""
    tolerance: PositiveFloat = 16.0
    """Largest distance in pixels between a guess and the dot's center at which the guess is a hit."""
    guesses: PositiveInt = 1
    """Most guesses (turns) in an episode; a hint follows each miss."""
    show_guess: bool = False
    """True adds an image to each hint in which the guess is marked."""
    hit_weight: float = 1.0
    """Reward for a hit."""
    closeness_weight: float = 0.0
    """Weight of the last guess's closeness, which is 1 at the dot's center and falls linearly to 0 at a distance of
    image_size."""
    format_weight: float = 0.0
    """Reward for an episode in which every answer has the form x,y."""

    @model_validator(mode="after")
    def _dot_fits(self) -> Self:
        if 2 * self.dot_radius >= self.image_size:
            raise ValueError(f"a dot of radius {self.dot_radius} does not fit into {self.image_size} pixels")
        return self


def parse_point(answer: str) -> Point | None:
    r"""Return the point that an answer gives, or None if it has another form.

    An answer is "x,y" or "(x, y)", or any text with \boxed{x,y}, of which the last one counts.

    Example:
        >>> parse_point("(12, 34.5)"), parse_point(r"so \boxed{3,4}"), parse_point("at the top")
        ((12.0, 34.5), (3.0, 4.0), None)
    """
    boxed = _BOXED.findall(answer)
    match = _PAIR.fullmatch((boxed[-1] if boxed else answer).strip())
    return (float(match[1]), float(match[2])) if match else None


class Coordinates(GeneratedEnvironment[CoordinatesSettings]):
    """An environment that asks where a dot is.

    Coordinates are pixels from the upper left corner, x to the right and y downwards, as in image files. Every part of
    the reward is given once, at the end of the episode, and lies in [0, 1]. A random guess is a hit with a probability
    of about pi * tolerance^2 / image_size^2.
    """

    name = "coordinates"
    Settings = CoordinatesSettings
    draws_only = True

    def __init__(self, settings: CoordinatesSettings, **counts: int) -> None:
        super().__init__(settings, **counts)
        self.max_turns = settings.guesses
        self.reward_weights = {
            "hit": settings.hit_weight,
            "closeness": settings.closeness_weight,
            "format": settings.format_weight,
        }

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        settings = self.settings
        x, y = np.random.default_rng(seed).integers(settings.dot_radius, settings.image_size - settings.dot_radius, 2)
        return {"x": int(x), "y": int(y), "seed": seed}

    def episode(self, task: Task) -> CoordinatesEpisode:
        return CoordinatesEpisode((task.payload["x"], task.payload["y"]), self.settings)


class CoordinatesEpisode:
    """An episode with the dot at `target`: it answers each missed guess with a hint until a hit or the last guess."""

    def __init__(self, target: Point, settings: CoordinatesSettings) -> None:
        self._target, self._settings = target, settings
        self._guesses, self._parsed = 0, 0

    async def reset(self) -> Observation:
        self._guesses, self._parsed = 0, 0
        edge = self._settings.image_size - 1
        question = (
            "Where is the centre of the dot? Count pixels from the upper left corner: x to the right, y downwards, "
            f"both from 0 to {edge}. Answer with x,y and nothing else."
        )
        return Observation((self._image(None), question))

    async def step(self, action: str) -> Outcome:
        guess = parse_point(action)
        self._guesses += 1
        self._parsed += guess is not None
        distance = math.dist(guess, self._target) if guess else math.inf
        hit = distance <= self._settings.tolerance
        if hit or self._guesses == self._settings.guesses:
            parts = {
                "hit": float(hit),
                "closeness": max(0.0, 1 - distance / self._settings.image_size),
                "format": float(self._parsed == self._guesses),
            }
            return Outcome(None, parts, action_defect=None if guess else "format")
        return Outcome(self._hint(guess), action_defect=None if guess else "format")

    async def close(self) -> None:
        pass

    def _hint(self, guess: Point | None) -> Observation:
        if guess is None:
            return Observation(("That is not of the form x,y. Try again.",))
        (x, y), (goal_x, goal_y) = guess, self._target
        across = "left" if goal_x < x else "right"
        along = "up" if goal_y < y else "down"
        directions = [word for word, off in ((across, goal_x != x), (along, goal_y != y)) if off]
        text = f"Not there. The dot is further {' and '.join(directions)}. Try again with x,y."
        return Observation((self._image(guess), text) if self._settings.show_guess else (text,))

    def _image(self, guess: Point | None) -> EncodedImage:
        size, radius = self._settings.image_size, self._settings.dot_radius
        image = Image.new("RGB", (size, size), "white")
        draw = ImageDraw.Draw(image)
        x, y = self._target
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill="red")
        if guess:
            x, y = guess
            draw.line((x - radius, y, x + radius, y), fill="blue")
            draw.line((x, y - radius, x, y + radius), fill="blue")
        return encode_png(image)
